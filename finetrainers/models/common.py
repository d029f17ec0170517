"""Loading of the parts of a repository in diffusers layout: source, dtype, and the remedy on error.

A part is a subfolder of the repository: `transformer`, `vae`, `text_encoder`, ... A replacement id may name either a
whole repository or a directory or repository that holds only that part. `revision` and `variant` belong to the base
repository and are not applied to replacements. A replacement may be a single weight file; see `single_file`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ModelMixin
from diffusers.hooks import apply_layerwise_casting
from safetensors import SafetensorError
from torch import Tensor, nn

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.sections import ModelSection
from finetrainers.utils.failures import InputError, Kind
from finetrainers.utils.text import shortened

from .batch import ModelComponents
from .cpu_convolutions import compute_in_fp32_on_cpu
from .files import hub
from .files.files import (
    component_file,
    file_problems,
    frozen_dtype,
    is_hub_id,
    part_sources,
    replacement_source,
    single_file,
    source_option,
)
from .files.hub_help import hub_help
from .files.single_file import load_single_file
from .files.weights import check_loaded, check_numbers, network_on_meta

T = TypeVar("T")

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
#: Kept in bf16 under 8-bit storage: embeddings decide what dtype an encoder reports, norms are small and sensitive, and
#: T5 casts activations to the dtype of `wo` before the weight is upcast.
_FLOAT8_SKIP = ("embed", "shared", "norm", r"\.wo$")


def load_part(
    load: Callable[..., T],
    config: ModelSection,
    part: str,
    *,
    folder: Path | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> T:
    """Call a `from_pretrained` or `load_config` with the source that the configuration sets for a part.

    Args:
        load: the bound class method.
        config: repository, revision and cache of the model, and ids to use instead (`--vae_id` and the like).
        part: subfolder of the repository.
        folder: folder that the part is read from instead.
        arguments: further arguments of `load`, such as the dtype.

    Raises:
        ValueError: the part could not be loaded; the message names the source, and the cause is chained.
    """
    arguments = arguments or {}
    cache_dir = None if config.cache_dir is None else str(config.cache_dir)
    sources = part_sources(config, part, folder)
    first, within, base_revision = sources[0]
    if Path(first).is_dir() and not Path(first, within).is_dir():
        raise ConfigError(file_problems(config, [part]))
    if not Path(first).exists() and not is_hub_id(first):
        message = f"directory not found: {shortened(first, 300)}; use a directory in diffusers layout, or a Hub id"
        raise ConfigError([Problem(source_option(config, part), message, "not_found")])
    errors: list[Exception] = []
    for root, subfolder, revision in sources:
        where = {n: value for n, value in (("subfolder", subfolder), ("revision", revision)) if value}
        # A Hub that did not answer is not asked for every file again, which takes ten seconds each.
        here = {"local_files_only": True} if hub.away() else {}
        try:
            return load(root, cache_dir=cache_dir, **where, **here, **arguments)
        except (OSError, ValueError, RuntimeError, SafetensorError, TypeError, AttributeError, LookupError) as error:
            errors.append(error)  # the last ones: values of other types in configs that only the library reads
    tried = " nor from ".join(f"{root!r}{f' (subfolder {sub!r})' if sub else ''}" for root, sub, _ in sources)
    option = source_option(config, part)
    detail = "".join(
        f", {name} {value!r}"
        for name, value in (("revision", base_revision), ("variant", arguments.get("variant")))
        if value is not None
    )
    hub_error = None if Path(first).is_dir() else hub_help(errors[0], first, away=hub.away())
    advice = hub_error or f"{option} must be a directory in diffusers layout or a Hub id that you can access."
    message = f"cannot load the {part} from {tried}{detail}: {errors[0]} {advice}"
    kind: Kind = "unreadable" if hub_error is None else hub_error.kind
    raise ConfigError([Problem(option, message, kind)]) from errors[0]


def load_frozen(classes: Mapping[str, Any], config: ModelSection, parts: Iterable[str]) -> ModelComponents:
    """Load parts by name: tokenizers, processors, and networks (CPU, eval mode, configured dtypes)."""
    modules: dict[str, Any] = {}
    for part in parts:
        cls = classes[part]
        if not issubclass(cls, nn.Module):
            modules[part] = load_part(cls.from_pretrained, config, part)
            continue
        target = DTYPES[frozen_dtype(config, part)]
        argument = "torch_dtype" if issubclass(cls, ModelMixin) else "dtype"
        modules[part] = _freeze(load_network(cls, config, part, {argument: _loading_dtype(target)}), target)
    return ModelComponents(modules)


def on_meta(cls: Any, config: ModelSection, part: str) -> nn.Module:
    """Build a diffusers network without weights, on the meta device.

    Raises:
        ConfigError: no network can be built from the config.
    """
    settings = load_part(cls.load_config, config, part)
    try:
        return network_on_meta(cls, settings, f"the config of the {part}")
    except InputError as error:
        raise ConfigError([Problem(source_option(config, part), str(error))]) from error


def load_scheduler(config: ModelSection) -> Any:
    """Load the checkpoint's own scheduler, of the class that its config names."""
    # Any scheduler class reads the file; which one it describes is in `_class_name`.
    raw = load_part(FlowMatchEulerDiscreteScheduler.load_config, config, "scheduler")
    place = config.pretrained_model_name_or_path
    cls = getattr(diffusers, str(raw.get("_class_name")), None)
    if cls is None or not hasattr(cls, "from_config"):
        raise InputError(
            f"the scheduler of {place} is a {raw.get('_class_name')}, which the installed diffusers "
            f"{diffusers.__version__} does not have; update diffusers.",
            "not_installed",
        )
    check_numbers(cls, raw, str(component_file(config, "scheduler", "scheduler_config.json")))
    try:
        return cls.from_config(raw)
    except Exception as error:  # of any class, which depends on the value
        message = f"the scheduler of {place} is not a valid {cls.__name__} config: {type(error).__name__}: {error}"
        raise InputError(message) from None


def build_pipeline(cls: Any, parts: Mapping[str, Any], *, settings: Mapping[str, Any] | None = None) -> Any:
    """Build a pipeline of the given parts; others that its constructor requires are None.

    Args:
        cls: class of the pipeline.
        parts: parts by name.
        settings: the pipeline's config (`model_index.json`), which may hold arguments other than parts, such as a flag.
    """
    parameters = inspect.signature(cls.__init__).parameters
    required = [name for name, p in parameters.items() if name != "self" and p.default is inspect.Parameter.empty]
    plain = {n: v for n, v in (settings or {}).items() if n in parameters and not isinstance(v, list) and v is not None}
    return cls(**{**dict.fromkeys(required), **plain, **parts})


def encoder_device(encoders: ModelComponents, name: str = "text_encoder") -> torch.device:
    """Return the device of a text encoder's weights."""
    return next(encoders.modules[name].parameters()).device


def load_network(
    cls: Any, config: ModelSection, part: str, arguments: Mapping[str, Any], *, folder: Path | None = None
) -> nn.Module:
    """Load a network in eval mode, with all of its weights, which must be finite; from safetensors alone.

    Its folder may also be a single weight file.
    """
    path = single_file(config, part, folder)
    if path is not None:
        load = cls.load_config if issubclass(cls, ModelMixin) else cls.config_class.from_pretrained
        dtype = arguments.get("torch_dtype", arguments.get("dtype"))
        network, info = load_single_file(cls, load_part(load, config, part, folder=path), path, dtype)
        check_loaded(network, info, part=part, config=config)
        return network
    own = folder is None and replacement_source(config, part) is None  # a variant is the base repository's
    network, info = load_part(
        cls.from_pretrained,
        config,
        part,
        folder=folder,
        arguments={
            **arguments,
            **({"variant": config.variant} if own and config.variant is not None else {}),
            "use_safetensors": True,
            "output_loading_info": True,
        },
    )
    check_loaded(network, info, part=part, config=config)
    return network


def copy_network(network: nn.Module, dtype: torch.dtype | None = None, device: str = "cpu") -> nn.Module:
    """Return a copy of a network in eval mode, as `from_pretrained` loads it.

    Args:
        network: the network, which stays as it is.
        dtype: dtype of the copy's weights, except of those that the class keeps in fp32; default: as they are.
        device: device of the copy.
    """
    fp32 = {*(getattr(network, "_keep_in_fp32_modules", None) or ())}
    stored, memo = network.state_dict(keep_vars=True), {}
    for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
        target = None if dtype is None or name not in stored or not tensor.is_floating_point() else dtype
        target = torch.float32 if target is not None and fp32.intersection(name.split(".")) else target
        copied = tensor.detach().to(device, target or tensor.dtype, copy=True)
        memo[id(tensor)] = nn.Parameter(copied) if isinstance(tensor, nn.Parameter) else copied
    return deepcopy(network, memo).eval()


def _loading_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype in _FLOAT8 else dtype


def _freeze(model: Any, dtype: torch.dtype) -> nn.Module:
    model.requires_grad_(False).eval()
    compute_in_fp32_on_cpu(model)
    if dtype in _FLOAT8:
        # 8-bit floats cannot be multiplied directly: weights are stored in 8 bits and upcast layer by layer.
        apply_layerwise_casting(
            model, storage_dtype=dtype, compute_dtype=torch.bfloat16, skip_modules_pattern=_FLOAT8_SKIP
        )
    return model


_UNUSED, _UNUSED_LAYERS = "_finetrainers_unused", "_finetrainers_unused_layers"


def mark_unused(network: nn.Module, pattern: str | None, layers: Sequence[str]) -> None:
    """Mark the weights of a network that training leaves as they are, and layers; see `leave_out_unused`.

    Args:
        network: the network.
        pattern: `Facts.unused`.
        layers: `ModelSpec.unused_layers`.
    """
    network.__dict__ |= {_UNUSED: pattern, _UNUSED_LAYERS: frozenset(layers)}


def rotate_pairs(x_BSHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of channels by positions' cosines and sines, one of each for a pair, which broadcast."""
    first, second = x_BSHD.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1).flatten(-2)


def unused_weights(network: nn.Module) -> str | None:
    """Return the expression that matches the names of a network's unused weights, or None if it has none."""
    return network.__dict__.get(_UNUSED)


def leave_out_unused(network: nn.Module, *, has_weights: bool = False) -> None:
    """Replace a network's unused layers by ones that return zeros.

    Args:
        network: the network.
        has_weights: whether their weights stay, for a network that is written as a whole. Others are not even read
            where a file is mapped.
    """
    layers = network.__dict__.get(_UNUSED_LAYERS, ())
    for parent in [*network.modules()] if layers else ():
        for name in layers & dict(parent.named_children()).keys():
            if has_weights:
                parent.get_submodule(name).forward = _return_zeros  # type: ignore[method-assign, assignment]
            else:
                setattr(parent, name, _LeftOut())


def _return_zeros(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.zeros_like(hidden_states)


class _LeftOut(nn.Module):
    """Takes the place of a layer whose output no prediction depends on."""

    def forward(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Return zeros."""
        return _return_zeros(hidden_states)


_FIXED_DTYPE = "_finetrainers_input_dtype"


def fix_input_dtype(network: nn.Module) -> None:
    """Fix a network's input dtype to that of its weights now, whatever dtype they are gathered in later (FSDP2)."""
    network.__dict__[_FIXED_DTYPE] = input_dtype(network)


def input_dtype(network: nn.Module) -> torch.dtype:
    """Return the dtype of an (unwrapped) network's inputs: that of its weights, without those its class keeps in fp32.

    diffusers' own `dtype` walks through all modules, a millisecond at every call; it is asked only where weights are
    stored in 8 bits and the answer is another.
    """
    fixed = network.__dict__.get(_FIXED_DTYPE)
    if fixed is not None:
        return fixed
    fp32_modules = getattr(network, "_keep_in_fp32_modules", None) or ()
    dtypes = (p.dtype for name, p in network.named_parameters() if not any(part in name for part in fp32_modules))
    dtype = next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)
    return network.dtype if dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else dtype  # type: ignore[return-value]
