"""Loading and saving that every family shares: which repository a part comes from, in which dtype, said how on error.

A part ("component") is a subfolder of a repository in diffusers layout: `transformer`, `vae`, `text_encoder`, ... A
replacement id may name either a whole repository or a directory or repository that holds only that part. `revision`
and `variant` belong to the base repository and are not applied to replacements.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.hooks import apply_layerwise_casting
from safetensors import SafetensorError
from torch import Tensor, nn

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.sections import ModelSection
from finetrainers.utils.packaged import model_path

from . import hub
from .files import file_problems
from .hub_help import hub_help
from .spec import DTYPES, TextEncoders
from .weights import check_loaded

T = TypeVar("T")

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
#: Kept in bf16 under 8-bit storage: embeddings decide what dtype an encoder reports, norms are small and sensitive, and
#: T5 casts activations to the dtype of `wo` before the weight is upcast.
_FLOAT8_SKIP = ("embed", "shared", "norm", r"\.wo$")


def load_part(
    load: Callable[..., T],
    config: ModelSection,
    part: str,
    *,
    replacement: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> T:
    """Call a `from_pretrained` or `load_config` with the place that the configuration gives for a part.

    Args:
        load: the bound class method.
        config: repository, revision and cache of the model.
        part: subfolder of the repository.
        replacement: id or directory to use instead (`--vae_id` and the like).
        arguments: further arguments of `load`, such as the dtype.

    Raises:
        ValueError: the part could not be loaded; the message says from where, and the cause is chained.
    """
    arguments = arguments or {}
    cache_dir = None if config.cache_dir is None else str(config.cache_dir)
    places = _places(config, part, replacement)
    errors: list[Exception] = []
    for root, subfolder in places:
        place = {"subfolder": subfolder} if subfolder else {}
        if replacement is None and config.revision is not None:
            place["revision"] = config.revision
        # A hub known not to answer is not asked for every file again, which takes ten seconds each.
        here = {"local_files_only": True} if hub.away() else {}
        try:
            return load(root, cache_dir=cache_dir, **place, **here, **arguments)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            errors.append(error)
    tried = " nor from ".join(f"{root!r}{f' (subfolder {sub!r})' if sub else ''}" for root, sub in places)
    how = f"--{part}_id" if replacement else "--pretrained_model_name_or_path"
    detail = "".join(
        f", {name} {value!r}"
        for name, value in (("revision", config.revision), ("variant", arguments.get("variant")))
        if value is not None and replacement is None
    )
    helps = None if Path(places[0][0]).is_dir() else hub_help(errors[0], places[0][0], away=hub.away())
    advice = helps or f"{how} takes a directory in diffusers layout or a hub id that you have access to."
    message = f"cannot load the {part} from {tried}{detail}: {errors[0]} {advice}"
    raise ConfigError([Problem(how, message)]) from errors[0]


def _places(config: ModelSection, part: str, replacement: str | None) -> list[tuple[str, str | None]]:
    """Where to look, in order. What lies on disk decides at once; a hub replacement is tried both ways."""
    if replacement is None:
        root = model_path(config.pretrained_model_name_or_path)
        if Path(root).is_dir() and not (Path(root) / part).is_dir():
            raise ConfigError(file_problems(config, [part]))
        return [(root, part)]
    replacement = model_path(replacement)
    if Path(replacement).is_dir():
        return [(replacement, part if (Path(replacement) / part).is_dir() else None)]
    return [(replacement, part), (replacement, None)]


def load_encoder(cls: Any, config: ModelSection, part: str, *, dtype: str, replacement: str | None = None) -> nn.Module:
    """A frozen text encoder (a transformers class), in eval mode, in the dtype of that name."""
    target = DTYPES[dtype]
    model = _load_network(cls, config, part, {"dtype": _loadable(target)}, replacement=replacement)
    return _frozen(model, target)


def load_vae(cls: Any, config: ModelSection) -> nn.Module:
    """The frozen VAE, in eval mode, in `vae_dtype`, with slicing and tiling as asked for."""
    target = DTYPES[config.vae_dtype]
    vae: Any = _load_network(cls, config, "vae", {"torch_dtype": _loadable(target)}, replacement=config.vae_id)
    if config.enable_slicing:
        vae.enable_slicing()
    if config.enable_tiling:
        vae.enable_tiling()
    return _frozen(vae, target)


def load_transformer(cls: Any, config: ModelSection, dtype: torch.dtype) -> nn.Module:
    """The transformer, in eval mode; what of it is trained is the caller's business."""
    return _load_network(cls, config, "transformer", {"torch_dtype": dtype}, replacement=config.transformer_id)


def transformer_on_meta(cls: Any, config: ModelSection) -> nn.Module:
    """The transformer without weights."""
    with torch.device("meta"):
        return cls.from_config(load_config(cls, config, "transformer", replacement=config.transformer_id))


def load_config(cls: Any, config: ModelSection, part: str, *, replacement: str | None = None) -> dict[str, Any]:
    """The config of a diffusers part, without loading its weights."""
    return load_part(cls.load_config, config, part, replacement=replacement)


def load_tokenizer(cls: Any, config: ModelSection, part: str, *, replacement: str | None = None) -> Any:
    """A tokenizer (a transformers class)."""
    return load_part(cls.from_pretrained, config, part, replacement=replacement)


def load_scheduler(config: ModelSection) -> Any:
    """The checkpoint's own scheduler, of the class that its config names."""
    # Any scheduler class reads the file; which one it describes is in `_class_name`.
    raw = load_config(FlowMatchEulerDiscreteScheduler, config, "scheduler")
    cls = getattr(diffusers, raw["_class_name"], None)
    if cls is None:
        raise ValueError(
            f"the scheduler of {config.pretrained_model_name_or_path} is a {raw['_class_name']}, which the installed "
            f"diffusers {diffusers.__version__} does not have; update diffusers."
        )
    return cls.from_config(raw)


def build_pipeline(cls: Any, parts: Mapping[str, Any]) -> Any:
    """A pipeline of the given parts; those that its constructor requires besides are None."""
    required = [
        name
        for name, parameter in inspect.signature(cls.__init__).parameters.items()
        if name != "self" and parameter.default is inspect.Parameter.empty
    ]
    return cls(**{**dict.fromkeys(required), **parts})


def encoder_device(encoders: TextEncoders, name: str = "text_encoder") -> torch.device:
    """Where a text encoder's weights are."""
    return next(encoders.modules[name].parameters()).device


def save_lora(
    pipeline_cls: Any, directory: Path, state_dict: Mapping[str, Tensor], adapter_metadata: dict[str, Any]
) -> None:
    """Write `pytorch_lora_weights.safetensors`, with rank and alpha in its metadata, for `load_lora_weights`."""
    # Sets have no order that is the same in every process, and the metadata is written as JSON.
    metadata = {k: sorted(v) if isinstance(v, (set, frozenset)) else v for k, v in adapter_metadata.items()}
    pipeline_cls.save_lora_weights(
        str(directory),
        transformer_lora_layers={name: value.detach().cpu().contiguous() for name, value in state_dict.items()},
        transformer_lora_adapter_metadata=metadata,
        safe_serialization=True,
    )


def _load_network(
    cls: Any, config: ModelSection, part: str, arguments: Mapping[str, Any], *, replacement: str | None
) -> nn.Module:
    """A network with all of its weights, which are numbers; from safetensors alone."""
    network, info = load_part(
        cls.from_pretrained,
        config,
        part,
        replacement=replacement,
        arguments={
            **arguments,
            **({} if replacement or config.variant is None else {"variant": config.variant}),
            "use_safetensors": True,
            "output_loading_info": True,
        },
    )
    check_loaded(network, info, part=part, config=config)
    return network


def _loadable(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype in _FLOAT8 else dtype


def _frozen(model: Any, dtype: torch.dtype) -> nn.Module:
    model.requires_grad_(False).eval()
    if dtype in _FLOAT8:
        # 8-bit floats cannot be multiplied directly: weights are stored in 8 bits and upcast layer by layer.
        apply_layerwise_casting(
            model, storage_dtype=dtype, compute_dtype=torch.bfloat16, skip_modules_pattern=_FLOAT8_SKIP
        )
    return model
