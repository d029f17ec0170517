"""Locations of the files of a model's parts, and their problems: by names, sizes and headers. Imports no torch.

A part is a subfolder of a repository in diffusers layout, or its replacement; see `common`. A local folder is examined
completely, a Hub model only in the cache, since the rest is still to be downloaded. A single weight file may replace
the weights of a part: its config is still that of the base model.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from finetrainers.config.base import expand_home
from finetrainers.config.errors import Problem
from finetrainers.config.facts import Json, is_network
from finetrainers.config.sections import ModelSection
from finetrainers.config.values import split_part
from finetrainers.utils.device import likely_device_type
from finetrainers.utils.failures import FileError, InputError
from finetrainers.utils.files import open_regular
from finetrainers.utils.headers import Header, read_header
from finetrainers.utils.packaged import model_path, packaged_configs
from finetrainers.utils.reading import MAX_SETTINGS, fits, read_json_object
from finetrainers.utils.text import printable, shortened

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
#: Vocabulary files: a tokenizer's folder holds at least one of them.
_VOCABULARIES = ("tokenizer.json", "spiece.model", "tokenizer.model", "vocab.json")
#: Classes of tokenizers without one, whose tokens are bytes.
_OF_BYTES = ("ByT5Tokenizer",)
#: Keys of counts and sizes in configs of networks and schedulers: of layers and steps, and others.
_COUNT = re.compile(
    r"(.*_)?(num_(\w+_)?(layers|heads|blocks|train_timesteps|groups)|layers_per_block|\w*channels|\w+_dim|dim_mult"
    r"|\w*max_(distance|position_embeddings|seq_len|text_seq_length)|patch_size(_t)?"
    r"|(spatial|temporal)_compression_ratio|(hidden|intermediate|vocab|image)_size|d_model|d_ff|d_kv)"
)
_LAYERS = re.compile(r"layers|blocks|timesteps")
_OPTIONAL_LAYERS = re.compile(r".*layers_per_block|num_\w+_layers(?<!num_hidden_layers)|.*num_\w*(blocks|groups)")
_MOST_LAYERS, _LARGEST_SIZE, _LARGEST_FP32 = 100_000, 10_000_000, 3.4028235e38
#: Largest vocabulary in bytes; published ones have up to 35 MB.
_MAX_VOCABULARY = 256 << 20
_MAIN_FILES = (
    "config.json", "scheduler_config.json", "tokenizer_config.json", "preprocessor_config.json", *_VOCABULARIES,
)  # fmt: skip


def trained_part(config: ModelSection) -> str:
    """Return the part that is trained; the expert for low noise levels, if there are two, is `transformer_2`."""
    return "transformer_2" if config.expert == "low" else "transformer"


def replacement_source(config: ModelSection, part: str) -> str | None:
    """Return the id or folder that replaces the model's own part, or None; `transformer_id` is the trained part's."""
    own = _own_options(config, part)
    return getattr(config, f"{own}_id") if own else _choice(config, part)[0]


def frozen_dtype(config: ModelSection, part: str) -> str:
    """Return the dtype that a frozen part is loaded in; a second transformer has that of the first by default."""
    own = "transformer" if part.startswith("transformer") else part
    return _choice(config, part)[1] or str(getattr(config, f"{own}_dtype", "bf16"))


def source_option(config: ModelSection, part: str) -> str:
    """Return the option that names the source of a part."""
    if not replacement_source(config, part):
        return "--pretrained_model_name_or_path"
    own = _own_options(config, part)
    return f"--{own}_id" if own else "--part"


def _own_options(config: ModelSection, part: str) -> str | None:
    """Return the prefix of a part's options, or None if `part` is its option."""
    if part.startswith("transformer"):
        return "transformer" if part == trained_part(config) else None
    return part if f"{part}_id" in type(config).model_fields else None


def _choice(config: ModelSection, part: str) -> tuple[str | None, str | None]:
    """Return the source and the dtype that the option `part` sets for a part, each or None."""
    settings = (split_part(text) for text in config.part)
    return next(((source, dtype) for name, source, dtype in settings if name == part), (None, None))


def single_file(config: ModelSection, part: str, folder: Path | None = None) -> Path | None:
    """Return the weight file that replaces a part's weights, or None if they lie in a folder or a repository.

    Args:
        config: names the model.
        part: the part.
        folder: folder that the part is read from instead.
    """
    source = (replacement_source(config, part) or "") if folder is None else str(folder)
    path = Path(expand_home(source))
    return path if source and (path.is_file() or (source.endswith(_SINGLE) and not path.is_dir())) else None


def part_sources(config: ModelSection, part: str, folder: Path | None = None) -> list[tuple[str, str, str | None]]:
    """Return the sources of a part, in order: a folder or Hub id, its subfolder, and the revision of a repository.

    Files on disk decide at once; a Hub replacement is tried both ways. Next to a single weight file the rest of a part
    is the base model's.

    Args:
        config: names the model.
        part: the part.
        folder: folder that it is read from instead.
    """
    replacement = replacement_source(config, part) if folder is None else str(folder)
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

    It is if the Hub's cache lacks the config, and the part needs nothing else: the run is only estimated, or the
    transformer and the VAE are single files.
    """
    if not is_hub_id(root):
        return None
    if config.is_estimated:
        folder = packaged_configs(root, part, estimated=True) if part == "scheduler" or is_network(part) else None
    else:
        needs_config_only = part == "scheduler" or (is_network(part) and single_file(config, part) is not None)
        are_files = all(single_file(config, network) is not None for network in ("vae", trained_part(config)))
        folder = packaged_configs(root, part) if needs_config_only and are_files else None
    if folder is None:
        return None
    return None if _on_disk(root, config, config.revision, part, _config_name(part)) is not None else folder


def component_file(config: ModelSection, part: str, name: str) -> Path | None:
    """Return the path of a file of a part, or None if it is not on disk, Hub cache included."""
    paths = (_on_disk(root, config, revision, within, name) for root, within, revision in part_sources(config, part))
    return next((path for path in paths if path is not None), None)


def is_hub_id(root: str) -> bool:
    """Return whether a source is a Hub repository: it looks like one, and no folder of that name exists."""
    return _HUB_ID.fullmatch(root) is not None and not root.endswith(_SINGLE) and not Path(root).exists()


def _on_disk(root: str, config: ModelSection, revision: str | None, *names: str) -> Path | None:
    """Return the path of a file in a folder or a downloaded Hub repository, or None if it is not on disk."""
    path: Any = Path(root, *names)
    if is_hub_id(root):
        from huggingface_hub import try_to_load_from_cache

        name = str(PurePosixPath(*names))
        path = try_to_load_from_cache(root, name, cache_dir=config.cache_dir, revision=revision)
    return Path(path) if isinstance(path, str | Path) and Path(path).is_file() else None


def part_folder(config: ModelSection, part: str) -> Path | None:
    """Return the folder that a part would be loaded from, after asking for a Hub model's newest config, or None."""
    for name in ("config.json", "tokenizer_config.json"):
        for root, within, revision in part_sources(config, part) if away() is None else ():
            if is_hub_id(root):
                from huggingface_hub import hf_hub_download

                with contextlib.suppress(OSError, ValueError):  # asks the Hub for the newest, unless it is offline
                    hf_hub_download(root, name, subfolder=within or None, revision=revision, cache_dir=config.cache_dir)
        path = component_file(config, part, name)
        if path is not None:
            return path.parent
    return None


def folder_on_disk(config: ModelSection, part: str) -> Path | None:
    """Return the folder of a part's files without asking the Hub, or None if it is not on this disk."""
    paths = (component_file(config, part, name) for name in _MAIN_FILES)
    return next((path.parent for path in paths if path is not None), None)


def part_config(config: ModelSection, part: str) -> Json | None:
    """Read the config of a part, or return None if it is not on this disk, Hub cache included.

    Raises:
        ValueError: the file holds none.
    """
    path = component_file(config, part, _config_name(part))
    return None if path is None else read_config(path)


def read_config(path: Path) -> Json:
    """Read the config of a part.

    Raises:
        ValueError: the file holds none, or counts and sizes in it are of other types or no network can have them, or a
            number is NaN or infinite.
    """
    settings = read_json_object(path)
    problems = list(_size_problems(settings))
    if not isinstance(settings.get("_class_name", ""), str):
        problems.append("_class_name must be text")
    if problems:
        raise InputError(f"{path}: {'; '.join(problems[:5])}")
    return settings


#: Numbers of configs that may be infinite.
_NO_BOUND = {"lambda_min_clipped": -math.inf}


def _size_problems(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems of a config's numbers, including those in its tables."""
    for key, value in settings.items():
        if isinstance(value, dict) and not _COUNT.fullmatch(key):
            yield from _size_problems(value)
        elif key == "attention_head_dim" and not fits(value, int):
            yield f"{key} must be a whole number, got {shortened(printable(repr(value)), 40)}"
        elif value is not None and _COUNT.fullmatch(key):
            limit = _MOST_LAYERS if _LAYERS.search(key) else _LARGEST_SIZE
            minimum = 0 if _OPTIONAL_LAYERS.fullmatch(key) else 1
            counts = value if isinstance(value, list) and value else [value]
            if not all(fits(count, int) and minimum <= count <= limit for count in counts):
                text = shortened(printable(repr(value)), 40)
                yield f"{key} must be a whole number from {minimum} to {limit:,}, or a list of them, got {text}"
        # NaN is not, and an infinite bound bounds nothing, such as lambda_min_clipped of multistep solvers.
        elif value != _NO_BOUND.get(key) and not all(abs(number) <= _LARGEST_FP32 for number in numbers_in(value)):
            yield f"{key} must be a finite number in fp32, got {shortened(printable(repr(value)), 40)}"


def numbers_in(value: Any) -> Iterator[float]:
    """Yield a value if it is a number, or the numbers in it if it is a list."""
    if isinstance(value, list | tuple):
        for entry in value:
            yield from numbers_in(entry)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def _config_name(part: str) -> str:
    if part == "scheduler":
        return "scheduler_config.json"
    return "config.json" if is_network(part) else "preprocessor_config.json"


def read_configs(config: ModelSection, parts: Sequence[str]) -> dict[str, Json]:
    """Read the configs on this disk: of these parts, the pipeline, and the other networks that the pipeline lists.

    Raises:
        ValueError: a file holds none.
    """
    parts_to_read = dict.fromkeys((*parts, trained_part(config)))
    configs = {part: part_config(config, part) for part in parts_to_read if not part.startswith("tokenizer")}
    root = model_path(config.pretrained_model_name_or_path)
    index = _on_disk(root, config, config.revision, f"{MODEL_INDEX}.json")
    if index is None and config.is_estimated and (folder := packaged_configs(root, "", estimated=True)) is not None:
        index = folder / f"{MODEL_INDEX}.json"
    if index is not None:
        with contextlib.suppress(ValueError):  # only newer checkpoints need it
            configs[MODEL_INDEX] = read_json_object(index)
    for part, entry in (configs.get(MODEL_INDEX) or {}).items():
        if part not in configs and isinstance(entry, list) and entry[:1] != [None] and is_network(part):
            with contextlib.suppress(ValueError):
                configs[part] = part_config(config, part)
    return {part: settings for part, settings in configs.items() if settings is not None}


# ---- weights ---------------------------------------------------------------------------------------------------------


def weight_files(folder: Path, part: str, variant: str | None) -> tuple[list[Path], Mapping[str, str]]:
    """Return the files that the libraries would load a network's weights from, and the index's file of each tensor.

    Raises:
        ValueError: there are none, or their index cannot be read.
    """
    stem = "model" if "encoder" in part else "diffusion_pytorch_model"
    middle = "" if variant is None else f".{variant}"
    single, index = folder / f"{stem}{middle}.safetensors", folder / f"{stem}.safetensors.index{middle}.json"
    # diffusers looks for an index first, transformers for a single file.
    if index.is_file() and not (stem == "model" and single.is_file()):
        weight_map = read_json_object(index).get("weight_map")
        if not weight_map or not fits(weight_map, {str: str}):
            raise ValueError(f"{index} has no table 'weight_map' of file names")
        return [folder / name for name in sorted(set(weight_map.values()))], weight_map
    if single.is_file():
        return [single], {}
    file_names = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in file_names if name.endswith(_PICKLES)]
    if pickles and not any(name.endswith(".safetensors") for name in file_names):
        raise InputError(
            f"{folder} has its weights only as pickles ({', '.join(pickles[:3])}), which are not loaded; convert "
            f"them to {single.name}",
            "unsupported",
        )
    raise InputError(f"{folder} has no {single.name}; it holds: {', '.join(file_names[:12]) or 'nothing'}", "not_found")


def weights_size(config: ModelSection, part: str) -> int | None:
    """Return the bytes of the files with a network's weights, or None if they are not all on this disk."""
    single = single_file(config, part)
    if single is not None:
        return single.stat().st_size if single.is_file() else None
    folder = folder_on_disk(config, part)
    if folder is None:
        return None
    try:
        files, _ = weight_files(folder, part, None if replacement_source(config, part) else config.variant)
    except ValueError:
        return None
    return sum(file.stat().st_size for file in files) if all(file.is_file() for file in files) else None


def stored_header(
    folder: Path, part: str, variant: str | None, *, is_complete: bool = True
) -> tuple[Header, list[ValueError]]:
    """Read shapes and dtypes of a network's stored tensors by name, and all problems of the files.

    Args:
        folder: folder of the part.
        part: its name.
        variant: variant of the weight files.
        is_complete: False if missing files can still be downloaded; then nothing is reported until all are here.
    """
    try:
        files, weight_map = weight_files(folder, part, variant)
    except ValueError as error:
        return Header({}, {}, {}), [error] if is_complete else []
    if not is_complete and not all(path.is_file() for path in files):
        return Header({}, {}, {}), []
    headers: dict[str, Header] = {}
    problems: list[ValueError] = []
    for path in files:
        try:
            headers[path.name] = read_header(path)
        except ValueError as error:
            message = f"{path} is missing, and the index of {folder} names it"
            problems.append(error if path.is_file() else InputError(message, "not_found"))
    missing = [name for name, file in weight_map.items() if file in headers and name not in headers[file].shapes]
    if missing:
        message = f"{folder / weight_map[missing[0]]} lacks {summarize(missing)}, which the index places there"
        problems.append(InputError(message, "mismatch"))
    shapes = {name: shape for header in headers.values() for name, shape in header.shapes.items()}
    return Header(shapes, {}, {n: dtype for header in headers.values() for n, dtype in header.dtypes.items()}), problems


def summarize(names: Sequence[str]) -> str:
    """Return the first of several names, and how many more there are."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


# ---- everything at once ----------------------------------------------------------------------------------------------


def file_problems(
    config: ModelSection, parts: Sequence[str], *, weights: bool = True, device_type: str | None = None
) -> list[Problem]:
    """Return the problems with the files of a model's parts that names, sizes and headers show.

    Args:
        config: names the model.
        parts: parts that are loaded.
        weights: whether weight files are examined too.
        device_type: where the model will be used, or None for this machine.
    """
    on_cuda = (device_type or likely_device_type()) == "cuda"
    problems = (
        Problem.from_error(source_option(config, part), error)
        for part in parts
        for error in _examine(config, part, weights, on_cuda)
    )
    return list(dict.fromkeys(problems))  # parts of one directory lack it together


def tokenizer_problems(config: ModelSection, parts: Sequence[str]) -> list[Problem]:
    """Return a problem for each missing tokenizer, where the configs are packaged and the Hub is away."""
    problems = []
    for part in (part for part in parts if part.startswith("tokenizer")):
        place = part_sources(config, part)[0][0]
        if (
            is_hub_id(place)
            and packaged_configs(place, "transformer") is not None
            and folder_on_disk(config, part) is None
        ):
            encoder = part.replace("tokenizer", "text_encoder")
            message = f"the {part} of {place} is not on this disk, and the Hub is offline; use a directory with "
            problems.append(
                Problem(
                    f"--{part}_id",
                    f"{message}tokenizer.json, such as that of the {encoder} if it has one",
                    "unavailable",
                )
            )
    return problems


def _examine(config: ModelSection, part: str, weights: bool, on_cuda: bool) -> Iterator[ValueError]:
    single = single_file(config, part)
    if single is not None:
        yield from _examine_single(config, part, single)
        return
    place, within, _ = part_sources(config, part)[0]
    root, is_local = Path(place), Path(place).is_dir()
    if root.is_file():
        yield ValueError(
            f"{root} is a file; use the directory of a model in diffusers layout, or its Hub id. The file itself "
            "replaces the weights of one component: --transformer_path, --vae_path, --text_encoder_path or "
            "--text_encoder_2_path"
        )
        return
    if not is_local and not is_hub_id(place):
        message = f"directory not found: {shortened(printable(place), 300)}; use a directory in diffusers layout, or a "
        yield InputError(message + "Hub id", "not_found")
        return
    folder = root / within if is_local else folder_on_disk(config, part)
    if is_local and not (root / within).is_dir():
        contents = ", ".join(sorted(path.name for path in root.iterdir())[:12]) or "nothing"
        message = f"{root} has no directory {part!r}, so it is not a model in diffusers layout (it holds: {contents})"
        yield InputError(message, "not_found")
        return
    if folder is None:
        return
    yield from _json_problems(folder)
    if is_local:
        yield from _missing_files(folder, part)
    if weights and is_network(part):
        variant = None if replacement_source(config, part) else config.variant
        header, problems = stored_header(folder, part, variant, is_complete=is_local)
        yield from problems
        yield from _quantized_already(folder, header, part, on_cuda=on_cuda)


def _examine_single(config: ModelSection, part: str, path: Path) -> Iterator[ValueError]:
    """Yield the problems with a single weight file, and with the config that it needs."""
    if not is_network(part):
        yield ValueError(
            f"{path} is a file, and the {part} must be a directory or a Hub id with its vocabulary and settings"
        )
        return
    if not path.is_file():
        yield InputError(f"file not found: {path}", "not_found")
        return
    problem = _read_problem(path)
    if problem is not None:
        yield problem
    root, within, _ = part_sources(config, part)[0]
    if Path(root).is_dir() and not (Path(root) / within / "config.json").is_file():
        yield InputError(
            f"{path} holds only weights; their config {Path(root) / within / 'config.json'} was not found. Download "
            "the other files of a repository in diffusers layout (hf download REPOSITORY --include '*.json' "
            "'*.model' '*.txt' --local-dir DIRECTORY), and set the directory as --pretrained_model_name_or_path",
            "required",
        )


def _read_problem(path: Path) -> ValueError | None:
    """Return the reason why a single weight file cannot be read, from its name and header, or None if it can."""
    try:
        with open_regular(path) as file:
            is_gguf = file.read(4) == b"GGUF"
    except OSError as error:
        return FileError(f"{path} cannot be read: {error.strerror}", cause=error)
    if is_gguf or path.suffix == ".gguf":
        return InputError(f"{path} holds quantized weights (GGUF), {_GIVE_UNQUANTIZED}", "unsupported")
    if path.suffix in _PICKLES:
        message = f"{path} is a pickle, which is not loaded; convert it to safetensors first"
        return InputError(message, "unsupported")
    try:
        header = read_header(path)
    except ValueError as error:
        return error
    format_name = quantized_as(header)
    if format_name is None:
        return None
    return InputError(f"{path} holds quantized weights ({format_name}), {_GIVE_UNQUANTIZED}", "unsupported")


#: Options that quantize text encoders without CUDA.
_HERE = "--quantize_text_encoders int8 or fp8"
_GIVE_UNQUANTIZED = (
    "which are not supported; use the unquantized ones, which --quantize_frozen int8, fp8 or nf4 quantizes while "
    "they are loaded"
)


def quantized_as(header: Header) -> str | None:
    """Return the way a tool has quantized the weights of a file, or None if it has not.

    Read without their scales, such weights would be noise. Weights that were merely cast to 8-bit floats have no
    scales; see `cast_to_float8`.
    """
    names = sorted(header.shapes)
    states = [name for name in names if ".quant_state." in name or name.endswith((".absmax", ".quant_map"))]
    scales = [name for name in names if name.endswith(_SCALES)]
    integers = [n for n in names if header.dtypes[n] in ("I8", "U8", "F4") and n.endswith((".weight", ".qweight"))]
    if states:
        return f"states of bitsandbytes: {summarize(states)}"
    if scales:
        return f"scales of its weights, as in ComfyUI's fp8 files: {summarize(scales)}"
    return f"integers of {header.dtypes[integers[0]]}: {summarize(integers)}" if integers else None


def cast_to_float8(header: Header) -> str | None:
    """Return the 8-bit float, as the header calls it, that weights of a file were cast to without scales, or None."""
    return next((dtype for dtype in header.dtypes.values() if dtype.startswith("F8_")), None)


def _quantized_already(folder: Path, header: Header, part: str, *, on_cuda: bool) -> Iterator[InputError]:
    """Refuse weights that another tool has quantized; those of text encoders, transformers reads by its own config."""
    settings = {}
    with contextlib.suppress(ValueError):  # reported by `_json_problems`
        settings = read_json_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    is_text_encoder = part.startswith("text_encoder")
    if "quantization_config" in settings:
        by = (settings["quantization_config"] or {}).get("quant_method", "bitsandbytes")
        if is_text_encoder:
            if by == "bitsandbytes" and not on_cuda:
                advice = _GIVE_UNQUANTIZED.partition(";")[2].replace("--quantize_frozen int8, fp8 or nf4", _HERE)
                yield InputError(
                    f"{folder} holds weights quantized by bitsandbytes, which requires CUDA;{advice}",
                    "unsupported",
                )
            return
        format_name: str | None = f"its config.json has quantization_config, by {by}"
    else:
        format_name = quantized_as(header)
    if format_name is None:
        return
    advice = _GIVE_UNQUANTIZED
    if is_text_encoder:
        advice = advice.replace("--quantize_frozen", "--quantize_text_encoders")
    elif not part.startswith("transformer"):
        advice = advice.partition(", which")[0]
    yield InputError(f"{folder} holds quantized weights ({format_name}), {advice}", "unsupported")


def _json_problems(folder: Path) -> Iterator[ValueError]:
    for name in ("config.json", "scheduler_config.json", "tokenizer_config.json", "tokenizer.json"):
        if (folder / name).is_file():
            try:
                if name in ("config.json", "scheduler_config.json"):
                    read_config(folder / name)
                else:
                    limit = _MAX_VOCABULARY if name in _VOCABULARIES else MAX_SETTINGS
                    read_json_object(folder / name, limit=limit)
            except ValueError as error:
                yield error


def _is_of_bytes(folder: Path) -> bool:
    path = folder / "tokenizer_config.json"
    with contextlib.suppress(ValueError):  # which is another problem
        return path.is_file() and read_json_object(path).get("tokenizer_class") in _OF_BYTES
    return False


def _missing_files(folder: Path, part: str) -> Iterator[InputError]:
    if part.startswith("tokenizer"):
        if not any((folder / name).is_file() for name in _VOCABULARIES) and not _is_of_bytes(folder):
            yield InputError(f"{folder} holds no tokenizer: none of {', '.join(_VOCABULARIES)}", "not_found")
    elif not (folder / _config_name(part)).is_file():
        yield InputError(f"{folder} has no {_config_name(part)}", "not_found")
