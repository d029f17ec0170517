"""Weights of learned rewards: from hub ids or paths, read without running any code from them."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator
from torch import Tensor

from finetrainers.utils.text import plural, quoted

DType = Literal["fp32", "bf16", "fp16"]
DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def torch_device(name: str) -> torch.device:
    """The device of an option: `auto` is this process's GPU if there is one, else the CPU.

    Raises:
        ValueError: there is no such device here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(check_device(name))
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"device {name!r}: this process sees {plural(count, 'GPU')}; auto takes what is there")
    return device


def check_device(name: str) -> str:
    """Return a name of a device that torch knows; whether this machine has it is another question.

    Raises:
        ValueError: torch knows none of this name.
    """
    try:
        _ = name == "auto" or torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device {name!r} is none of torch's: auto, cpu, cuda, cuda:1, ...") from error
    return name


def check_path(path: str) -> str:
    """A path that exists, or could be a hub id.

    Raises:
        ValueError: it cannot be either.
    """
    if not Path(path).expanduser().exists() and not _HUB_ID.fullmatch(path):
        raise ValueError(f"{quoted(path)} is no file or folder here, and no hub id (owner/name)")
    return path


#: Bytes of a number.
WIDTHS: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}

#: The option of a reward that says where its weights are; checked before anything is loaded.
WeightsPath = Annotated[str, AfterValidator(check_path)]
#: `auto`, or a device of torch.
Device = Annotated[str, AfterValidator(check_device)]


def fetch(path: str, *, files: Sequence[str]) -> Path:
    """The file or folder at `path`; for a hub id, a folder with those of its files that match the patterns `files`.

    Raises:
        ValueError: there is no such file or folder, nor such a repository on the hub.
    """
    local = Path(path).expanduser()
    if local.exists():
        return local
    check_path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(path, allow_patterns=list(files)))
    except (HfHubHTTPError, OSError) as error:
        raise ValueError(f"{quoted(path)} is no file or folder here, and the hub does not give it: {error}") from error


def on_disk(path: str) -> Path | None:
    """The file or folder at `path`, or what the hub's cache holds of a hub id; None: nothing. It asks no hub."""
    local = Path(path).expanduser()
    if local.exists():
        return local
    if not _HUB_ID.fullmatch(path):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def fetch_file(path: str, *, names: Sequence[str]) -> Path:
    """The file at `path`, or the first of `names` that the folder or hub repository `path` holds.

    Raises:
        ValueError: neither.
    """
    found = fetch(path, files=names)
    if found.is_file():
        return found
    for name in names:
        if (found / name).is_file():
            return found / name
    raise ValueError(f"{found} holds none of: {', '.join(names)}")


def read_tensors(path: Path, *, within: Sequence[str] = ()) -> dict[str, Tensor]:
    """Named tensors of a safetensors file, or of a torch file that holds nothing but tensors and plain values.

    Args:
        path: the file.
        within: keys under which a torch file may keep the tensors; what else it holds is then left alone.

    Raises:
        ValueError: the file could run code, or holds other things.
    """
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} is not loaded: it holds objects other than tensors, and those can run code"
        ) from error
    for key in within:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{path} is no dictionary of tensors")
    return dict(content)


def read_sharded(folder: Path) -> dict[str, Tensor]:
    """All tensors of the safetensors files of a model folder.

    Raises:
        ValueError: it has none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors")
    return {name: tensor for file in files for name, tensor in read_tensors(file).items()}


def check_names(found: Iterable[str], wanted: Iterable[str], *, source: Path) -> None:
    """Check that a checkpoint has exactly the tensors of a network.

    Raises:
        ValueError: some are missing or left over; a few are named.
    """
    missing, unexpected = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    parts = [f"{what} {_some(names)}" for what, names in (("lacks", missing), ("also has", unexpected)) if names]
    if parts:
        raise ValueError(f"{source} does not fit the network: it {' and '.join(parts)}")


def build(cls: Any, config: Any, state: dict[str, Tensor], *, dtype: torch.dtype, source: Path) -> Any:
    """A transformers model of this configuration that holds exactly these weights.

    Raises:
        ValueError: names or shapes differ from what the configuration makes.
    """
    with torch.device("meta"):
        wanted = cls(config).state_dict()
    check_names(state, wanted, source=source)
    wrong = [name for name, tensor in state.items() if tensor.shape != wanted[name].shape]
    if wrong:
        example = f"{tuple(state[wrong[0]].shape)}, not {tuple(wanted[wrong[0]].shape)}"
        raise ValueError(f"{source} does not fit the network: sizes of {_some(wrong)} differ, the first is {example}")
    model = cls.from_pretrained(None, config=config, state_dict=state, dtype=dtype, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def load_pretrained(cls: Any, path: str, *, dtype: torch.dtype) -> Any:
    """A transformers model from a hub id or folder that has all of its weights, ready to score.

    Raises:
        ValueError: there is no such path, or weights are missing; transformers would make them up.
    """
    check_path(path)
    model, found = cls.from_pretrained(
        path, dtype=dtype, attn_implementation="sdpa", output_loading_info=True, trust_remote_code=False
    )
    if found["missing_keys"]:
        raise ValueError(f"{path} does not fit {cls.__name__}: it lacks {_some(sorted(found['missing_keys']))}")
    return model.eval().requires_grad_(False)


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a hub id or folder.

    Raises:
        ValueError: there is none, or it needs code of its own, which is never run.
    """
    from transformers import AutoTokenizer

    check_path(str(path))
    return load_settings(AutoTokenizer, path)


def load_settings(cls: Any, path: str | Path) -> Any:
    """A transformers configuration or processor (`cls`) of a hub id or folder.

    Raises:
        ValueError: see `load_tokenizer`.
    """
    try:  # without trust_remote_code=False, the library would ask on a terminal whether to run the repository's code
        return cls.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
