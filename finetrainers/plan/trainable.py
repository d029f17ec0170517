"""Trainable parameters: an adapter or all parameters; the network without weights, and adapters on it."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.root import TrainConfig
from finetrainers.config.sections import TrainingSection
from finetrainers.memory.quantization import quantizable_layers
from finetrainers.methods.reference import REFERENCE_ADAPTER
from finetrainers.methods.registry import method_spec
from finetrainers.models.registry import build_tiny
from finetrainers.models.spec import DTYPES, ModelSpec, leave_out_unused, unused_weights
from finetrainers.utils.device import meta_device
from finetrainers.utils.failures import InputError
from finetrainers.utils.seeding import derive_seed
from finetrainers.utils.text import nearest

from .initial_weights import InitialWeights, check_lora, is_expression, is_target
from .preflight import ResolvedRun


def trainable_dtype(config: TrainConfig) -> torch.dtype:
    """Return the transformer's dtype at loading: frozen weights as set, trainable ones fp32 unless they round."""
    if config.training.training_type == "lora":
        return DTYPES[config.model.transformer_dtype]
    return torch.float32 if config.training.master_weights == "fp32" else torch.bfloat16


def num_quantizable(transformer: nn.Module, config: TrainConfig, spec: ModelSpec) -> int:
    """Return the number of frozen weights that a run quantizes; the transformer may lie on the meta device.

    Raises:
        ConfigError: there are none.
    """
    skip = config.memory.quantize_skip_modules or spec.unquantized
    layers = quantizable_layers(transformer, skip=skip)
    if not layers:
        message = f"leave no frozen linear layer to quantize: {' '.join(skip)}; list fewer modules"
        raise ConfigError([Problem("--quantize_skip_modules", message)])
    return sum(layer.weight.numel() for _, layer in layers)


#: The arguments of the last `network_without_weights`, followed by its result.
_last_network: list[Any] = []


def network_without_weights(checked: ResolvedRun, *, stand_in: bool = False) -> nn.Module:
    """Return the transformer on the meta device, with an adapter or all weights trainable.

    It must not be changed: the next call returns the same network for a run with the same model and training options.

    Args:
        checked: the run.
        stand_in: whether to build a tiny network of the family, because the model's own config is unavailable.

    Raises:
        ConfigError: a LoRA target matches nothing.
    """
    config, family = checked.config, checked.family
    trained = None if stand_in else checked.spec.configs.get(family.facts.trained)
    inputs = [family, stand_in, has_reference_adapter(checked), config.model, config.training, deepcopy(trained)]
    inputs += [checked.parts.lora, checked.parts.network]
    if _last_network[:-1] != inputs:
        _last_network[:] = [*inputs, _build_without_weights(checked, stand_in=stand_in)]
    return _last_network[-1]


def _build_without_weights(checked: ResolvedRun, *, stand_in: bool) -> nn.Module:
    config = checked.config.model
    if stand_in:
        with tempfile.TemporaryDirectory() as directory:
            tiny = Path(directory) / "tiny"
            build_tiny(config.model_name, tiny)
            local = config.model_copy(update={"pretrained_model_name_or_path": str(tiny), "transformer_id": None})
            transformer = checked.family.load(local).transformer_on_meta()
    else:
        transformer = checked.spec.transformer_on_meta()
    make_trainable(transformer, checked.config.training, checked.parts.lora)
    if has_reference_adapter(checked):
        attach_reference_adapter(transformer)
    return transformer


def make_trainable(transformer: nn.Module, training: TrainingSection, lora: LoraConfig | None = None) -> None:
    """Make the weights that `training_type` names trainable, and only those; LoRA weights are fp32.

    Unused layers are left out; in full finetuning, whose results are whole networks, their weights stay.

    Args:
        transformer: the network.
        training: the options, those of an adapter included.
        lora: settings of the adapter that the options do not have.

    Raises:
        ConfigError: a LoRA target matches no module.
    """
    if training.training_type == "full-finetune":
        train_all(transformer)
        return
    transformer.requires_grad_(False)
    settings = LoraConfig(init_lora_weights=True) if lora is None else deepcopy(lora)
    settings.r, settings.lora_alpha = training.rank, training.lora_alpha  # type: ignore[assignment]
    settings.target_modules = lora_targets(transformer, training.target_modules)
    settings.lora_dropout = training.lora_dropout
    settings.use_rslora, settings.use_dora = training.use_rslora, training.use_dora
    _add_adapter(transformer, settings, "default", seed=derive_seed(training.seed, "lora"))
    leave_out_unused(transformer)


def train_all(transformer: nn.Module) -> None:
    """Make all weights trainable that predictions depend on."""
    leave_out_unused(transformer, has_weights=True)
    unused = unused_weights(transformer)
    for name, parameter in transformer.named_parameters():
        parameter.requires_grad_(unused is None or re.search(unused, name) is None)


def _add_adapter(transformer: nn.Module, settings: LoraConfig, name: str, *, seed: int) -> None:
    """Add an adapter with fp32 weights, which are the only ones that then require gradients."""
    is_meta = next(transformer.parameters()).is_meta  # PEFT would make the adapter on the CPU, which takes seconds
    with torch.random.fork_rng(devices=[]), meta_device() if is_meta else nullcontext():
        torch.manual_seed(seed)  # PEFT draws A from the global generator
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config` attribute")  # a second adapter is meant
            transformer.add_adapter(settings, adapter_name=name)  # type: ignore[operator]
    for parameter in transformer.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def has_reference_adapter(checked: ResolvedRun) -> bool:
    """Return whether the reference model of a run is the network with another LoRA."""
    config = checked.config
    if config.training.training_type != "lora" or checked.start.initial_lora is None:
        return False
    return method_spec(config).uses_reference(config)


def attach_reference_adapter(transformer: nn.Module) -> None:
    """Attach a frozen copy of the trainable adapter, without dropout, for the reference model."""
    settings: LoraConfig = deepcopy(transformer.peft_config["default"])  # type: ignore[union-attr, index, assignment]
    layers = [re.escape(name) for name, module in transformer.named_modules() if isinstance(module, LoraLayer)]
    settings.target_modules, settings.lora_dropout = "|".join(layers), 0.0
    _add_adapter(transformer, settings, REFERENCE_ADAPTER, seed=0)
    transformer.set_adapter("default")  # type: ignore[operator]
    if not next(transformer.parameters()).is_meta:
        set_peft_model_state_dict(transformer, get_peft_model_state_dict(transformer), adapter_name=REFERENCE_ADAPTER)


def lora_targets(transformer: nn.Module, targets: list[str]) -> list[str] | str:
    """Return PEFT's `target_modules`: a list of name suffixes, or one regular expression.

    Unused layers get no LoRA: where suffixes or the expression match some, another expression leaves them out.

    Raises:
        ConfigError: a suffix or the expression matches no linear or convolution layer.
    """
    layers = [n for n, m in transformer.named_modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    unused = unused_weights(transformer)
    names = [name for name in layers if unused is None or re.search(unused, name) is None]
    others = {*layers} - {*names}
    if is_expression(targets):
        if not any(re.fullmatch(targets[0], name) for name in names):
            message = f"the expression {targets[0]!r} matches no layer in full; names look like {names[:3]}"
            raise ConfigError([Problem("--target_modules", message, "not_found")])
        if not any(re.fullmatch(targets[0], name) for name in others):
            return targets[0]
        flags = re.match(r"(?:\(\?[a-zA-Z]+\))*", targets[0])[0]  # type: ignore[index]
        return f"{flags}(?!.*(?:{unused}))(?:{targets[0].removeprefix(flags)})"  # flags must come first
    suffixes = {name.split(".", 2)[-1] for name in names} | {name.rsplit(".", 1)[-1] for name in names}
    for target in targets:
        if not any(is_target(name, target) for name in names):
            message = f"{target!r} matches no layer{nearest(target, suffixes)}"
            raise ConfigError([Problem("--target_modules", message, "unknown")])
    if any(is_target(name, target) for name in others for target in targets):
        return rf"(?!.*(?:{unused}))(?:.*\.)?(?:{'|'.join(map(re.escape, targets))})"
    return targets


def trainable_parameters(transformer: nn.Module) -> dict[str, nn.Parameter]:
    """Return trainable parameters by name."""
    return {name: p for name, p in transformer.named_parameters() if p.requires_grad}


def check_initial_lora(initial: InitialWeights, spec: ModelSpec, training: TrainingSection) -> None:
    """Refuse a LoRA file of `--init_from`, in any format, that is of another network or another adapter.

    Raises:
        ConfigError: with every difference.
    """
    with attribute_to_init_from():
        state, settings = spec.read_lora(initial.path)
        check_lora_modules(initial.path, state, spec.transformer_on_meta())
        if training.training_type == "lora":
            check_lora(initial.path, {name: t.shape for name, t in state.items()}, settings, training)


def check_other_expert(spec: ModelSpec) -> None:
    """Refuse a LoRA of the other expert, in any format, that is of another network.

    Raises:
        ConfigError: with the difference.
    """
    path = Path(spec.config.other_expert or "")
    try:
        check_lora_modules(path, spec.read_lora(path)[0], spec.transformer_on_meta())
    except ValueError as error:
        raise ConfigError([Problem.from_error("--other_expert", error)]) from None


@contextmanager
def attribute_to_init_from() -> Iterator[None]:
    """Turn an error about a LoRA within the block into a problem of `--init_from`."""
    try:
        yield
    except ValueError as error:
        raise ConfigError([Problem.from_error("--init_from", error)]) from None


def check_lora_modules(path: Path, state: Mapping[str, Tensor], transformer: nn.Module) -> None:
    """Compare a LoRA file's layers with a network's, which may lie on the meta device.

    Raises:
        ValueError: the network has no such layer, or one of another shape.
    """
    modules = dict(transformer.named_modules())
    for name, tensor in state.items():
        module, separator, _ = name.partition(".lora_A.")
        if not separator:
            continue
        if module not in modules:
            message = f"{path} adapts {module}, which this model does not have; is it a LoRA of this model?"
            raise InputError(message, "mismatch")
        width = getattr(modules[module], "in_features", tensor.shape[1])
        if tensor.shape[1] != width:
            raise InputError(
                f"{path} adapts {module} of {tensor.shape[1]} inputs, and this model's has {width}; is it a LoRA of "
                "this model?",
                "mismatch",
            )
