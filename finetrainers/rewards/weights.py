"""Weights of learned rewards: from Hub ids or paths, read without running any code from them."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator
from torch import Tensor

from finetrainers.config.base import expand_home
from finetrainers.utils.device import meta_device
from finetrainers.utils.failures import InputError
from finetrainers.utils.headers import load_tensors
from finetrainers.utils.text import plural, quoted

DType = Literal["fp32", "bf16", "fp16"]
DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def torch_device(name: str) -> torch.device:
    """Return the device of an option: `auto` is this process's GPU if there is one, else the CPU.

    Raises:
        ValueError: this process has no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(check_device(name))
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        message = f"device {name!r}: this process sees {plural(count, 'GPU')}; use auto"
        raise InputError(message, "unavailable")
    return device


def check_device(name: str) -> str:
    """Return a device name that torch knows, whether or not this machine has the device.

    Raises:
        ValueError: torch does not know the name.
    """
    try:
        _ = name == "auto" or torch.device(name)
    except RuntimeError as error:
        raise InputError(f"device must be auto, cpu, cuda, cuda:1, ..., got {name!r}", "unknown") from error
    return name


def check_path(path: str) -> str:
    """Return a path that exists, or could be a Hub id.

    Raises:
        ValueError: it cannot be either.
    """
    if not Path(expand_home(path)).exists() and not _HUB_ID.fullmatch(path):
        raise InputError(f"{quoted(path)} is not a file or directory here, or a Hub id (owner/name)", "not_found")
    return path


#: Bytes of a number.
WIDTHS: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}

#: Option with the path of a reward's weights; checked before anything is loaded.
WeightsPath = Annotated[str, AfterValidator(check_path)]
#: Option with `auto` or a device of torch.
Device = Annotated[str, AfterValidator(check_device)]


def fetch(path: str, *, files: Sequence[str]) -> Path:
    """Return the file or folder at `path`, or for a Hub id a folder with its files that match the patterns `files`.

    Raises:
        ValueError: there is no such file or folder, nor such a repository on the Hub.
    """
    local = Path(expand_home(path))
    if local.exists():
        return local
    check_path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(path, allow_patterns=list(files)))
    except (HfHubHTTPError, OSError) as error:
        message = f"{quoted(path)} is not a file or directory here, and the Hub does not provide it: {error}"
        raise InputError(message, "unavailable") from error


def on_disk(path: str) -> Path | None:
    """Return the file or folder at `path`, or the cached folder of a Hub id, or None. It does not contact the Hub."""
    local = Path(expand_home(path))
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
    """Return the file at `path`, or the first of `names` in the folder or Hub repository `path`.

    Raises:
        ValueError: neither exists.
    """
    local_path = fetch(path, files=names)
    if local_path.is_file():
        return local_path
    for name in names:
        if (local_path / name).is_file():
            return local_path / name
    raise InputError(f"{local_path} holds none of: {', '.join(names)}", "not_found")


def read_tensors(path: Path, *, within: Sequence[str] = ()) -> dict[str, Tensor]:
    """Read named tensors of a safetensors file, or of a torch file with only tensors and plain values.

    Args:
        path: the file.
        within: keys under which a torch file may keep the tensors; its other content is then ignored.

    Raises:
        ValueError: the file could run code, or has other content.
    """
    if path.suffix == ".safetensors":
        return load_tensors(path)
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path} is not loaded: it holds objects other than tensors, which can run code", "unsupported"
        ) from error
    for key in within:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise InputError(f"{path} is not a dictionary of tensors", "unreadable")
    return dict(content)


def read_sharded(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of the safetensors files of a model folder.

    Raises:
        ValueError: it has none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputError(f"{folder} holds no *.safetensors", "not_found")
    return {name: tensor for file in files for name, tensor in read_tensors(file).items()}


def check_names(present: Iterable[str], expected: Iterable[str], *, source: Path) -> None:
    """Check that a checkpoint has exactly the tensors of a network.

    Raises:
        ValueError: some are missing or left over; the message names a few.
    """
    missing, unexpected = sorted(set(expected) - set(present)), sorted(set(present) - set(expected))
    parts = [f"{verb} {_list_names(names)}" for verb, names in (("lacks", missing), ("also has", unexpected)) if names]
    if parts:
        raise InputError(f"{source} does not fit the network: it {' and '.join(parts)}", "mismatch")


def build(cls: Any, config: Any, state: dict[str, Tensor], *, dtype: torch.dtype, source: Path) -> Any:
    """Build a transformers model of this configuration with exactly these weights.

    Raises:
        ValueError: names or shapes differ from those of the configuration.
    """
    with meta_device():
        expected = cls(config).state_dict()
    check_names(state, expected, source=source)
    mismatched = [name for name, tensor in state.items() if tensor.shape != expected[name].shape]
    if mismatched:
        example = f"{tuple(state[mismatched[0]].shape)}, not {tuple(expected[mismatched[0]].shape)}"
        raise InputError(
            f"{source} does not fit the network: sizes of {_list_names(mismatched)} differ, the first is {example}",
            "mismatch",
        )
    model = cls.from_pretrained(None, config=config, state_dict=state, dtype=dtype, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def load_pretrained(cls: Any, path: str, *, dtype: torch.dtype) -> Any:
    """Load a transformers model from a Hub id or folder that has all of its weights, ready to score.

    Raises:
        ValueError: there is no such path, or weights are missing, which transformers would initialize at random.
    """
    check_path(path)
    model, loading_info = cls.from_pretrained(
        path, dtype=dtype, attn_implementation="sdpa", output_loading_info=True, trust_remote_code=False
    )
    if loading_info["missing_keys"]:
        raise InputError(
            f"{path} does not fit {cls.__name__}: it lacks {_list_names(sorted(loading_info['missing_keys']))}",
            "mismatch",
        )
    return model.eval().requires_grad_(False)


def load_tokenizer(path: str | Path) -> Any:
    """Load the tokenizer of a Hub id or folder.

    Raises:
        ValueError: there is none, or it needs code from its repository, which is never run.
    """
    from transformers import AutoTokenizer

    check_path(str(path))
    return load_settings(AutoTokenizer, path)


def load_settings(cls: Any, path: str | Path) -> Any:
    """Load a transformers configuration or processor (`cls`) of a Hub id or folder.

    Raises:
        ValueError: see `load_tokenizer`.
    """
    try:  # without trust_remote_code=False, the library would ask on a terminal whether to run the repository's code
        return cls.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {error}", "unreadable") from error


def _list_names(names: Sequence[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest
