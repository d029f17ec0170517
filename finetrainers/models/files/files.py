"""Where the files of a model's parts lie, and what is wrong with them: by names, sizes and headers. Imports no torch.

A part is a subfolder of a repository in diffusers layout, or what replaces it; see `common`. A local folder is examined
whole. Of a hub model what its cache holds is examined, since the rest is still to be downloaded. A single weight file may
replace the weights of a part: its config is still that of the base model.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from finetrainers.config.errors import Problem
from finetrainers.config.facts import Json, is_network
from finetrainers.config.sections import ModelSection
from finetrainers.config.values import split_part
from finetrainers.utils.device import likely_device_type
from finetrainers.utils.headers import Header, read_header
from finetrainers.utils.packaged import model_path, packaged_configs

from .hub import away

#: The pipeline's config, at the root of a repository.
MODEL_INDEX = "model_index"
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_SINGLE = (".safetensors", ".gguf", *_PICKLES)
#: Ends of the names of scales in files of quantized weights.
_SCALES = (
    ".scale_weight",
    ".weight_scale",
    ".weight_scale_inv",
    ".scale_input",
    ".comfy_quant",
    "scaled_fp8",
    ".absmax",
)
#: Files of which a tokenizer's folder holds at least one.
_VOCABULARIES = ("tokenizer.json", "spiece.model", "tokenizer.model", "vocab.json")
_MAIN_FILES = (
    "config.json", "scheduler_config.json", "tokenizer_config.json", "preprocessor_config.json", *_VOCABULARIES,
)  # fmt: skip


def trained_part(config: ModelSection) -> str:
    """The part that is trained: of two experts the one for low noise levels is `transformer_2`."""
    return "transformer_2" if config.expert == "low" else "transformer"


def replacement_of(config: ModelSection, part: str) -> str | None:
    """The id or folder that takes the place of the model's own part; `transformer_id` is that of the trained one."""
    own = _own_options(config, part)
    return getattr(config, f"{own}_id") if own else _choice(config, part)[0]


def dtype_of(config: ModelSection, part: str) -> str:
    """The dtype that a frozen part is loaded in; a second transformer has that of the first unless `part` says otherwise."""
    own = "transformer" if part.startswith("transformer") else part
    return _choice(config, part)[1] or str(getattr(config, f"{own}_dtype", "bf16"))


def option_of(config: ModelSection, part: str) -> str:
    """The option that names where a part comes from."""
    if not replacement_of(config, part):
        return "--pretrained_model_name_or_path"
    own = _own_options(config, part)
    return f"--{own}_id" if own else "--part"


def _own_options(config: ModelSection, part: str) -> str | None:
    """What the names of a part's options begin with; None: `part` is its option."""
    if part.startswith("transformer"):
        return "transformer" if part == trained_part(config) else None
    return part if f"{part}_id" in type(config).model_fields else None


def _choice(config: ModelSection, part: str) -> tuple[str | None, str | None]:
    """Place and dtype that the option `part` gives a part."""
    given = (split_part(text) for text in config.part)
    return next(((place, dtype) for name, place, dtype in given if name == part), (None, None))


def single_file(config: ModelSection, part: str, folder: Path | None = None) -> Path | None:
    """The weight file that takes the place of a part's weights; None: they lie in a folder or a repository.

    Args:
        config: names the model.
        part: the part.
        folder: what the part is read from instead.
    """
    place = (replacement_of(config, part) or "") if folder is None else str(folder)
    path = Path(place).expanduser()
    return path if place and (path.is_file() or (place.endswith(_SINGLE) and not path.is_dir())) else None


def places_of(config: ModelSection, part: str, folder: Path | None = None) -> list[tuple[str, str, str | None]]:
    """Where to look for a part, in order: a folder or hub id, the subfolder of it, and the revision of a repository.

    What lies on disk decides at once; a hub replacement is tried both ways. Next to a single weight file the rest of a part
    is the base model's.

    Args:
        config: names the model.
        part: the part.
        folder: where it is read from instead.
    """
    replacement = replacement_of(config, part) if folder is None else str(folder)
    if single_file(config, part, folder) is not None:
        replacement = None
    root = model_path(replacement or config.pretrained_model_name_or_path)
    if replacement is None:
        packaged = _packaged_configs(config, part, root)
        return [(root, part, config.revision)] if packaged is None else [(str(packaged), part, None)]
    if Path(root).is_dir():
        return [(root, part if (Path(root) / part).is_dir() else "", None)]
    return [(root, part, None), (root, "", None)]


def _packaged_configs(config: ModelSection, part: str, root: str) -> Path | None:
    """Return the packaged folder that a part's config is read from, or None if it is read from the repository.

    So it is where the transformer and the VAE are single files, and the part needs a config alone that the hub's cache lacks.
    """
    alone = part == "scheduler" or (is_network(part) and single_file(config, part) is not None)
    if not alone or not is_hub_id(root) or (folder := packaged_configs(root)) is None:
        return None
    if any(single_file(config, network) is None for network in ("vae", trained_part(config))):
        return None
    return None if _on_disk(root, config, config.revision, part, _config_name(part)) is not None else folder


def component_file(config: ModelSection, part: str, name: str) -> Path | None:
    """A file of a part if it is on disk, hub cache included."""
    found = (_on_disk(root, config, revision, within, name) for root, within, revision in places_of(config, part))
    return next((path for path in found if path is not None), None)


def is_hub_id(root: str) -> bool:
    """Whether a model's place is a repository of the hub: it looks like one, and no folder of that name is here."""
    return _HUB_ID.fullmatch(root) is not None and not root.endswith(_SINGLE) and not Path(root).exists()


def _on_disk(root: str, config: ModelSection, revision: str | None, *names: str) -> Path | None:
    """A file of a folder, or of a hub repository as far as it has been downloaded."""
    path: Any = Path(root, *names)
    if is_hub_id(root):
        from huggingface_hub import try_to_load_from_cache

        name = str(PurePosixPath(*names))
        path = try_to_load_from_cache(root, name, cache_dir=config.cache_dir, revision=revision)
    return Path(path) if isinstance(path, str | Path) and Path(path).is_file() else None


def part_folder(config: ModelSection, part: str) -> Path | None:
    """Where the files of a part lie that loading it would read, a hub model's newest ones included; None: not on this disk."""
    for name in ("config.json", "tokenizer_config.json"):
        for root, within, revision in places_of(config, part) if away() is None else ():
            if is_hub_id(root):
                from huggingface_hub import hf_hub_download

                with contextlib.suppress(OSError, ValueError):  # asks the hub what is newest, unless it is offline
                    hf_hub_download(root, name, subfolder=within or None, revision=revision, cache_dir=config.cache_dir)
        path = component_file(config, part, name)
        if path is not None:
            return path.parent
    return None


def folder_on_disk(config: ModelSection, part: str) -> Path | None:
    """Where the files of a part lie, without asking the hub; None: not on this disk."""
    found = (component_file(config, part, name) for name in _MAIN_FILES)
    return next((path.parent for path in found if path is not None), None)


def read_json(path: Path) -> Json:
    """A JSON object.

    Raises:
        ValueError: the file holds none; the message names it.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must be a JSON object, and it is a {type(value).__name__}")
    return value


def part_config(config: ModelSection, part: str) -> Json | None:
    """The config of a part if it is on this disk, hub cache included.

    Raises:
        ValueError: the file holds none.
    """
    path = component_file(config, part, _config_name(part))
    return None if path is None else read_json(path)


def _config_name(part: str) -> str:
    if part == "scheduler":
        return "scheduler_config.json"
    return "config.json" if is_network(part) else "preprocessor_config.json"


def read_configs(config: ModelSection, parts: Sequence[str]) -> dict[str, Json]:
    """The configs of these parts that are on this disk, the pipeline's, and those of the other networks that it lists.

    Raises:
        ValueError: a file holds none.
    """
    wanted = dict.fromkeys((*parts, trained_part(config)))
    found = {part: part_config(config, part) for part in wanted if not part.startswith("tokenizer")}
    root = model_path(config.pretrained_model_name_or_path)
    index = _on_disk(root, config, config.revision, f"{MODEL_INDEX}.json")
    if index is not None:
        with contextlib.suppress(ValueError):  # only newer checkpoints are told by it
            found[MODEL_INDEX] = read_json(index)
    for part, known in (found.get(MODEL_INDEX) or {}).items():
        if part not in found and isinstance(known, list) and known[:1] != [None] and is_network(part):
            with contextlib.suppress(ValueError):
                found[part] = part_config(config, part)
    return {part: settings for part, settings in found.items() if settings is not None}


# ---- weights -----------------------------------------------------------------------------------------------------------


def weight_files(folder: Path, part: str, variant: str | None) -> tuple[list[Path], Mapping[str, str]]:
    """The files that the libraries would load a network's weights from, and which tensor an index places in which.

    Raises:
        ValueError: there are none, or their index cannot be read.
    """
    stem = "model" if "encoder" in part else "diffusion_pytorch_model"
    middle = "" if variant is None else f".{variant}"
    single, index = folder / f"{stem}{middle}.safetensors", folder / f"{stem}.safetensors.index{middle}.json"
    # diffusers looks for an index first, transformers for a single file.
    if index.is_file() and not (stem == "model" and single.is_file()):
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise ValueError(f"{index} has no table 'weight_map' of file names")
        return [folder / name for name in sorted(set(places.values()))], places
    if single.is_file():
        return [single], {}
    there = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in there if name.endswith(_PICKLES)]
    if pickles and not any(name.endswith(".safetensors") for name in there):
        raise ValueError(
            f"{folder} has its weights as pickles only ({', '.join(pickles[:3])}), and these are not loaded; convert them to "
            f"{single.name}"
        )
    raise ValueError(f"{folder} has no {single.name}; it holds: {', '.join(there[:12]) or 'nothing'}")


def weights_size(config: ModelSection, part: str) -> int | None:
    """Bytes of the files that a network's weights would be loaded from; None where they are not all on this disk."""
    single = single_file(config, part)
    if single is not None:
        return single.stat().st_size if single.is_file() else None
    folder = folder_on_disk(config, part)
    if folder is None:
        return None
    try:
        files, _ = weight_files(folder, part, None if replacement_of(config, part) else config.variant)
    except ValueError:
        return None
    return sum(file.stat().st_size for file in files) if all(file.is_file() for file in files) else None


def stored_header(
    folder: Path, part: str, variant: str | None, *, is_complete: bool = True
) -> tuple[Header, list[str]]:
    """Shapes and dtypes of a network's stored tensors by name, and everything that is wrong with the files.

    Args:
        folder: of the part.
        part: its name.
        variant: of the weight files.
        is_complete: False where the hub still has what is missing; nothing is said then until all is here.
    """
    try:
        files, places = weight_files(folder, part, variant)
    except ValueError as error:
        return Header({}, {}, {}), [str(error)] if is_complete else []
    if not is_complete and not all(path.is_file() for path in files):
        return Header({}, {}, {}), []
    held: dict[str, Header] = {}
    problems = []
    for path in files:
        try:
            held[path.name] = read_header(path)
        except ValueError as error:
            problems.append(str(error) if path.is_file() else f"{path} is missing, and the index of {folder} names it")
    lost = [name for name, file in places.items() if file in held and name not in held[file].shapes]
    if lost:
        problems.append(f"{folder / places[lost[0]]} lacks {some(lost)}, which the index places there")
    shapes = {name: shape for header in held.values() for name, shape in header.shapes.items()}
    return Header(shapes, {}, {n: dtype for header in held.values() for n, dtype in header.dtypes.items()}), problems


def some(names: Sequence[str]) -> str:
    """The first of several names, and how many there are."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


# ---- everything at once ------------------------------------------------------------------------------------------------


def file_problems(
    config: ModelSection, parts: Sequence[str], *, weights: bool = True, device_type: str | None = None
) -> list[Problem]:
    """What is wrong with the files of a model's parts, as far as names, sizes and headers tell.

    Args:
        config: names the model.
        parts: which of its parts are loaded.
        weights: whether weight files are examined too.
        device_type: where the model will be used, or None for this machine.
    """
    on_cuda = (device_type or likely_device_type()) == "cuda"
    return [
        Problem(option_of(config, part), text) for part in parts for text in _examine(config, part, weights, on_cuda)
    ]


def tokenizer_problems(config: ModelSection, parts: Sequence[str]) -> list[Problem]:
    """Return a problem for each tokenizer that is not on this disk while the configs are packaged and the hub is away."""
    problems = []
    for part in (one for one in parts if one.startswith("tokenizer")):
        place = places_of(config, part)[0][0]
        if is_hub_id(place) and packaged_configs(place) is not None and folder_on_disk(config, part) is None:
            encoder = part.replace("tokenizer", "text_encoder")
            message = f"the {part} of {place} is not on this disk, and the hub cannot be asked; give a folder with "
            problems.append(
                Problem(f"--{part}_id", f"{message}tokenizer.json, such as that of the {encoder} if it has one")
            )
    return problems


def _examine(config: ModelSection, part: str, weights: bool, on_cuda: bool) -> Iterator[str]:
    single = single_file(config, part)
    if single is not None:
        yield from _examine_single(config, part, single)
        return
    place, within, _ = places_of(config, part)[0]
    root, is_local = Path(place), Path(place).is_dir()
    if root.is_file():
        yield (
            f"{root} is a file; give the folder of a model in diffusers layout, or its hub id. The file itself takes the place "
            "of the weights of one part: --transformer_path, --vae_path, --text_encoder_path or --text_encoder_2_path"
        )
        return
    folder = root / within if is_local else folder_on_disk(config, part)
    if is_local and not (root / within).is_dir():
        there = ", ".join(sorted(path.name for path in root.iterdir())[:12]) or "nothing"
        yield f"{root} has no folder {part!r}, so it is no model in diffusers layout (it holds: {there})"
        return
    if folder is None:
        return
    yield from _json_problems(folder)
    if is_local:
        yield from _missing_files(folder, part)
    if weights and is_network(part):
        variant = None if replacement_of(config, part) else config.variant
        header, problems = stored_header(folder, part, variant, is_complete=is_local)
        yield from problems
        yield from _quantized_already(folder, header, part, on_cuda=on_cuda)


def _examine_single(config: ModelSection, part: str, path: Path) -> Iterator[str]:
    """What is wrong with a single weight file, and with what it needs besides."""
    if not is_network(part):
        yield f"{path} is a file, and the {part} is a folder or a hub id with its vocabulary and settings"
        return
    if not path.is_file():
        yield f"no such file: {path}"
        return
    wrong = _unreadable(path)
    if wrong is not None:
        yield wrong
    root, within, _ = places_of(config, part)[0]
    if Path(root).is_dir() and not (Path(root) / within / "config.json").is_file():
        yield (
            f"{path} holds weights alone, and their config is read from {Path(root) / within / 'config.json'}, which is not "
            "there. Download what is not weights of a repository in diffusers layout (hf download REPOSITORY --include "
            "'*.json' '*.model' '*.txt' --local-dir FOLDER), and give the folder as --pretrained_model_name_or_path"
        )


def _unreadable(path: Path) -> str | None:
    """Why a single weight file cannot be read, by its name and its header."""
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    if is_gguf or path.suffix == ".gguf":
        return f"{path} holds quantized weights (GGUF), {_GIVE_UNQUANTIZED}"
    if path.suffix in _PICKLES:
        return f"{path} is a pickle, and these are not loaded; convert it to safetensors first"
    try:
        header = read_header(path)
    except ValueError as error:
        return str(error)
    how = quantized_as(header)
    return None if how is None else f"{path} holds quantized weights ({how}), {_GIVE_UNQUANTIZED}"


#: What quantizes text encoders without CUDA.
_HERE = "--quantize_text_encoders int8 or fp8"
_GIVE_UNQUANTIZED = (
    "and these are not read; give the unquantized ones, which --quantize_frozen int8, fp8 or nf4 quantizes while they are "
    "loaded"
)


def quantized_as(header: Header) -> str | None:
    """How a tool has quantized the weights of a file: read without their scales, they would be noise. None: it has not.

    Weights that were merely cast to 8-bit floats have no scales; see `cast_to_float8`.
    """
    names = sorted(header.shapes)
    states = [name for name in names if ".quant_state." in name or name.endswith((".absmax", ".quant_map"))]
    scales = [name for name in names if name.endswith(_SCALES)]
    integers = [n for n in names if header.dtypes[n] in ("I8", "U8", "F4") and n.endswith((".weight", ".qweight"))]
    if states:
        return f"states of bitsandbytes: {some(states)}"
    if scales:
        return f"scales of its weights, as in ComfyUI's fp8 files: {some(scales)}"
    return f"integers of {header.dtypes[integers[0]]}: {some(integers)}" if integers else None


def cast_to_float8(header: Header) -> str | None:
    """The 8-bit float that weights of a file were cast to without scales, as its header calls it; None: they were not."""
    return next((dtype for dtype in header.dtypes.values() if dtype.startswith("F8_")), None)


def _quantized_already(folder: Path, header: Header, part: str, *, on_cuda: bool) -> Iterator[str]:
    """Refuse weights that another tool has quantized; those of text encoders, transformers reads by its own config."""
    settings = {}
    with contextlib.suppress(ValueError):  # said already
        settings = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    is_text_encoder = part.startswith("text_encoder")
    if "quantization_config" in settings:
        by = (settings["quantization_config"] or {}).get("quant_method", "bitsandbytes")
        if is_text_encoder:
            if by == "bitsandbytes" and not on_cuda:
                advice = _GIVE_UNQUANTIZED.partition(";")[2].replace("--quantize_frozen int8, fp8 or nf4", _HERE)
                yield f"{folder} holds weights quantized by bitsandbytes, which needs CUDA, and there is none here;{advice}"
            return
        what: str | None = f"its config.json says quantization_config, by {by}"
    else:
        what = quantized_as(header)
    if what is None:
        return
    advice = _GIVE_UNQUANTIZED
    if is_text_encoder:
        advice = advice.replace("--quantize_frozen", "--quantize_text_encoders")
    elif not part.startswith("transformer"):
        advice = advice.partition(", which")[0]
    yield f"{folder} holds quantized weights ({what}), {advice}"


def _json_problems(folder: Path) -> Iterator[str]:
    for name in ("config.json", "scheduler_config.json", "tokenizer_config.json", "tokenizer.json"):
        if (folder / name).is_file():
            try:
                read_json(folder / name)
            except ValueError as error:
                yield str(error)


def _missing_files(folder: Path, part: str) -> Iterator[str]:
    if part.startswith("tokenizer"):
        if not any((folder / name).is_file() for name in _VOCABULARIES):
            yield f"{folder} holds no tokenizer: none of {', '.join(_VOCABULARIES)}"
    elif not (folder / _config_name(part)).is_file():
        yield f"{folder} has no {_config_name(part)}"
