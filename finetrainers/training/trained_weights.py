"""Load the transformer, and save and load its trainable weights: those of an adapter, or all."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import StateDictSplit
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from finetrainers.config.errors import ConfigError
from finetrainers.config.root import TrainConfig
from finetrainers.config.sections import TrainingSection
from finetrainers.memory.activation_plan import select_evenly
from finetrainers.memory.block_swap import swap_blocks
from finetrainers.memory.casting import cast_adapter_for_each_use, enable_layerwise_upcasting
from finetrainers.memory.checkpointing import set_activation_memory
from finetrainers.memory.quantization import quantize_frozen, summary
from finetrainers.methods.reference import REFERENCE_ADAPTER
from finetrainers.models.spec import DTYPES, ModelSpec, input_dtype, unused_weights, weight_files
from finetrainers.parallel.strategy import Strategy, WeightFilter
from finetrainers.plan.initial_weights import INITIAL_LORA, LORA_FILE, strip_component
from finetrainers.plan.preflight import ResolvedRun, attribute_to_option
from finetrainers.plan.start_report import print_line
from finetrainers.plan.trainable import (
    attach_reference_adapter,
    attribute_to_init_from,
    check_lora_modules,
    has_reference_adapter,
    make_trainable,
    num_quantizable,
    train_all,
    trainable_dtype,
)
from finetrainers.utils.failures import InputError
from finetrainers.utils.faults import fault_point
from finetrainers.utils.files import file_sha256, fsync_dir, fsync_file
from finetrainers.utils.hashed_files import Written
from finetrainers.utils.headers import load_tensors, read_header
from finetrainers.utils.text import plural

from .state import TrainState

#: Dtypes of safetensors files.
_SAFETENSORS_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

#: Size of the files that ranks share, at least: smaller ones are many to open, for little to write at once.
LEAST_FILE_BYTES = 256 << 20


def mapped_dtype(checked: ResolvedRun, spec: ModelSpec) -> torch.dtype | None:
    """Return the dtype in which the transformer's weights are mapped from its files, or None if they are copied.

    No process holds a copy of mapped weights. They have the dtype of the files, if all tensors have it and it is that
    of training. Full finetuning in fp32 also maps narrower weights: fp32 holds them exactly, and strategies widen them
    part by part.
    """
    config, checkpoint, initial = checked.config, checked.start.checkpoint, checked.start.initial
    is_full, dtype = config.training.training_type == "full-finetune", trainable_dtype(config)
    files = [] if spec.network is not None else spec.files_of(spec.facts.trained)
    if checkpoint is not None and is_full:
        files = sorted((checkpoint / spec.facts.trained).iterdir())
    if not files or any(file.parent != files[0].parent for file in files) or len(files) == 1:
        return None  # a single file of another program, whose tensors have another layout
    dtypes = {name for file in files if file.suffix == ".safetensors" for name in read_header(file).dtypes.values()}
    stored = _SAFETENSORS_DTYPES.get(dtypes.pop()) if len(dtypes) == 1 else None
    # A LoRA that is added to the weights would round in the narrower dtype.
    adds_lora = checkpoint is None and initial is not None and initial.kind == "lora"
    widens = is_full and dtype == torch.float32 and not adds_lora
    return stored if stored == dtype or widens else None


def load_trainable_transformer(
    checked: ResolvedRun,
    spec: ModelSpec,
    dtype: torch.dtype,
    *,
    device: torch.device | None = None,
    sequence_group: ProcessGroup | None = None,
) -> nn.Module:
    """Load the transformer with its adapter attached and resumed or initial weights, ready to be wrapped.

    Args:
        checked: the run.
        spec: of the model.
        dtype: of the weights as they are loaded.
        device: quantizes frozen weights, layer by layer; default: the CPU.
        sequence_group: the processes that share each clip with this one, or None if no process does.

    Raises:
        ConfigError: a LoRA target matches nothing, or a LoRA to start from does not fit.
    """
    fault_point("load")
    config, checkpoint, initial = checked.config, checked.start.checkpoint, checked.start.initial
    if checkpoint is not None and config.training.training_type == "full-finetune":
        transformer = spec.load_transformer(dtype, folder=checkpoint / spec.facts.trained)
    else:
        try:
            transformer = spec.load_transformer(dtype)
        except ConfigError as error:
            raise ConfigError(attribute_to_option(error.problems, initial)) from error
    make_trainable(transformer, config.training, checked.parts.lora)
    if checkpoint is not None and config.training.training_type == "lora":
        load_lora_weights(checkpoint, transformer)
    elif checkpoint is None and initial is not None and initial.kind == "lora":
        with attribute_to_init_from():
            start_from_lora(initial.path, transformer, spec=spec, training=config.training)
    if has_reference_adapter(checked):
        attach_reference_adapter(transformer)
        if checkpoint is not None and checked.start.initial_lora is not None:
            load_lora_weights(checked.start.initial_lora.parent, transformer, adapter=REFERENCE_ADAPTER)
    store_frozen_weights(transformer, config, spec, dtype=dtype, device=device)
    spec.split_tokens(transformer, sequence_group, config.parallel.sp_mode)
    blocks = select_evenly(spec.block_modules(transformer), config.memory.selective_checkpointing)
    set_activation_memory(transformer, config.memory.stored, blocks=blocks)
    if config.memory.compile == "regional":
        sizes = {*checked.plan.buckets, *(prompt.size or checked.plan.size for prompt in checked.sampled)}
        spec.compile_blocks(transformer, num_sizes=len(sizes))
    return transformer


def store_frozen_weights(
    transformer: nn.Module, config: TrainConfig, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | None
) -> None:
    """Store frozen weights in 8 bits or quantized, and have an adapter cast its inputs, as the options say; in place.

    Args:
        transformer: with its adapter attached.
        config, spec: of the run, and of its model.
        dtype: of the weights as they were loaded.
        device: quantizes them; default: the CPU.
    """
    if not config.memory.lora_autocast:
        cast_adapter_for_each_use(transformer)
    if "transformer" in config.memory.layerwise_upcasting_modules:
        enable_layerwise_upcasting(
            transformer,
            storage_dtype=DTYPES[config.memory.layerwise_upcasting_storage_dtype],
            compute_dtype=dtype,
            skip_modules_pattern=config.memory.layerwise_upcasting_skip_modules_pattern,
        )
    if config.memory.quantize_frozen != "none":
        _quantize(transformer, config, spec, device)


def store_expert(
    network: nn.Module, config: TrainConfig, spec: ModelSpec, *, device: torch.device | None, swapped: int = 0
) -> None:
    """Store the other expert as `store_frozen_weights` stores the network that is trained, its LoRA on top; in place.

    Args:
        network: on the CPU, with its LoRA, and frozen.
        config, spec: of the run, and of its model.
        device: quantizes it, and computes with swapped blocks; default: the CPU.
        swapped: number of its blocks that wait in host memory.
    """
    if config.memory.quantize_frozen != "none":
        print_line("the other expert:")
    store_frozen_weights(network, config, spec, dtype=input_dtype(network), device=device)
    blocks = spec.block_modules(network)
    if swapped:
        swap_blocks(network, blocks, min(swapped, len(blocks)), device or torch.device("cpu"))


def _quantize(transformer: nn.Module, config: TrainConfig, spec: ModelSpec, device: torch.device | None) -> None:
    """Quantize the frozen weights in place, and print how large the rounding errors are."""
    quantization, num_weights = config.memory.quantize_frozen, sum(p.numel() for p in transformer.parameters())
    assert quantization != "none"
    num_quantizable(transformer, config, spec)
    skip = config.memory.quantize_skip_modules or spec.unquantized
    layers = quantize_frozen(transformer, quantization, skip=skip, device=device)
    for line in summary(layers, quantization, num_weights=num_weights):
        print_line(line)


def save_weights(
    directory: Path,
    *,
    state: TrainState,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
    files: StateDictSplit | None = None,
) -> dict[Path, Written]:
    """Write the trained weights in diffusers layout.

    Args:
        directory: gets `pytorch_lora_weights.safetensors`, or a directory named after the trainable component.
        state: the run.
        tensors: all weights of the network, gathered; for a LoRA the trainable ones are enough. With `files`, those of
            this process.
        dtype: dtype on disk; None keeps the trained one.
        files: of a network that several processes write.

    Returns:
        The weight files that were written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    is_lora = state.config.training.training_type == "lora"
    selected = get_peft_model_state_dict(state.network, state_dict=dict(tensors)) if is_lora else tensors
    weights = {name: tensor.detach().cpu().to(dtype or tensor.dtype).contiguous() for name, tensor in selected.items()}
    if is_lora:
        return state.spec.save_lora(directory, weights, state.network.peft_config["default"].to_dict())
    return state.spec.save_full(directory, state.network, weights, files)


def shared_files(state: TrainState, dtype: torch.dtype | None = None) -> StateDictSplit | None:
    """Return the weight files of a network whose ranks share the saving, or None if rank 0 writes it alone.

    Args:
        state: the run.
        dtype: dtype on disk; None keeps the trained one.
    """
    if not state.shares_saving:
        return None
    shapes = state.parallel.shapes(state.transformer)
    tensors = {name: tensor.to(dtype or tensor.dtype) for name, tensor in shapes.items()}
    share = -(-sum(tensor.nbytes for tensor in tensors.values()) // state.parallel.world_size)
    return weight_files(tensors, at_most=max(share, LEAST_FILE_BYTES))


def select_rank_weights(files: StateDictSplit | None, parallel: Strategy) -> WeightFilter | None:
    """Return a test for the weights that a rank writes, those of every N-th file, or None if rank 0 writes all."""
    if files is None:
        return None
    own = list(files.filename_to_tensors.values())[parallel.rank :: parallel.world_size]
    return {name for names in own for name in names}.__contains__


def load_lora_weights(directory: Path, transformer: nn.Module, *, adapter: str = "default") -> None:
    """Load a LoRA that a run has written into an attached adapter, exactly.

    Raises:
        ValueError: the file does not fit the adapter.
    """
    path = directory / LORA_FILE
    state = {strip_component(name): tensor for name, tensor in load_tensors(path).items()}
    _set_adapter(state, transformer, path, adapter=adapter)


def store_initial_lora(checked: ResolvedRun, spec: ModelSpec) -> str | None:
    """Store the LoRA that a run started from in its directory, and return its SHA-256, or None if the run needs none.

    A resumed run does not depend on the file that `--init_from` named, which may be gone or changed by then.

    Raises:
        ValueError: a LoRA that another run has stored has changed since it was read.
    """
    source, folder = checked.start.initial_lora, checked.config.run.output_dir / INITIAL_LORA
    if source is None:
        return None
    expected = (checked.start.origin or {}).get("sha256")
    if expected is not None and source.resolve() == (folder / LORA_FILE).resolve():
        return expected
    with tempfile.TemporaryDirectory(prefix=f".{INITIAL_LORA}.", dir=folder.parent) as temporary:
        path = Path(temporary) / LORA_FILE
        if expected is None:
            lora = spec.lora_of(source)
            spec.save_lora(path.parent, lora.state(), lora.complete_settings())
        else:
            shutil.copyfile(source, path)
        sha256 = file_sha256(path)
        if expected not in (None, sha256):
            raise InputError(f"{source} has changed since the run was checked", "mismatch")
        fsync_file(path)
        folder.mkdir(exist_ok=True)
        path.replace(folder / LORA_FILE)
    fsync_dir(folder)
    return sha256


def start_from_lora(path: Path, transformer: nn.Module, *, spec: ModelSpec, training: TrainingSection) -> None:
    """Load a LoRA file into the attached adapter; for full finetuning, merge it into the weights.

    Raises:
        ValueError: the file does not fit the adapter, or the transformer; names every difference.
    """
    if training.training_type == "full-finetune":
        spec.merge_lora(transformer, path)
        train_all(transformer)
        return
    _set_adapter(spec.read_lora(path)[0], transformer, path)


def attach_lora(path: Path, transformer: nn.Module, *, spec: ModelSpec) -> None:
    """Attach a LoRA file as it is, with its own rank, alpha and modules; its weights are fp32, as in training.

    Raises:
        ValueError: the file is not a LoRA of this model.
    """
    transformer.requires_grad_(False)
    state, settings = spec.read_lora(path)
    check_lora_modules(path, state, transformer)
    load_adapter: Any = transformer.load_lora_adapter
    try:
        load_adapter(dict(state), adapter_name="default", prefix=None, metadata=settings or None)
    except (TypeError, ValueError, AttributeError, LookupError, NotImplementedError, ImportError) as error:
        message = f"{path}: PEFT cannot attach it with its settings: {type(error).__name__}: {error}"
        raise InputError(message) from error
    for name, parameter in transformer.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)  # frozen weights may be stored in 8 bits
    _set_adapter(state, transformer, path)  # again in fp32: PEFT's adapter had the dtype of the frozen weights
    unused = unused_weights(transformer)
    without_effect = {name.partition(".lora_")[0] for name in state if unused and re.search(unused, name)}
    if without_effect:
        layers = plural(len(without_effect), "layer")
        print_line(f"note: {path} has {layers} without effect on videos, such as {min(without_effect)}")


def replace_lora(path: Path, transformer: nn.Module, *, spec: ModelSpec) -> bool:
    """Load another LoRA file into the attached adapter; if its rank or modules differ, load nothing, return False."""
    state, settings = spec.read_lora(path)
    expected = get_peft_model_state_dict(transformer)
    attached = transformer.peft_config["default"]  # type: ignore[union-attr, index]
    rank = max(tensor.shape[0] for name, tensor in state.items() if "lora_A" in name)
    defaults = {"lora_alpha": rank, "use_rslora": False, "use_dora": False}
    is_equal = all(
        float(getattr(attached, name)) == float(settings.get(name, default)) for name, default in defaults.items()
    )
    has_patterns = any(settings.get(name) for name in ("rank_pattern", "alpha_pattern"))
    shapes = [{name: tensor.shape for name, tensor in tensors.items()} for tensors in (state, expected)]
    if not is_equal or has_patterns or shapes[0] != shapes[1]:
        return False
    set_peft_model_state_dict(transformer, state)
    return True


def load_ema_weights(path: Path, transformer: nn.Module) -> None:
    """Replace trainable weights by their moving average, which a checkpoint stores.

    Raises:
        ValueError: the file has averages of other weights.
    """
    parameters, averages = dict(transformer.named_parameters()), load_tensors(path)
    unknown = sorted(averages.keys() - parameters.keys())
    if unknown:
        raise InputError(
            f"{path} holds averages of other weights: {len(unknown)} names are not in the network, e.g. {unknown[0]}",
            "mismatch",
        )
    for name, average in averages.items():
        parameters[name].data.copy_(average)


def _set_adapter(state: dict[str, Tensor], transformer: nn.Module, path: Path, *, adapter: str = "default") -> None:
    expected = get_peft_model_state_dict(transformer, adapter_name=adapter)
    if state.keys() != expected.keys():
        differing = sorted(state.keys() ^ expected.keys())
        message = f"{path} does not fit this adapter: {len(differing)} names differ, e.g. {differing[0]}"
        raise InputError(message, "mismatch")
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            raise InputError(
                f"{path} does not fit this adapter: {name} is {list(tensor.shape)} in the file, "
                f"{list(expected[name].shape)} here; is it a LoRA of this model?",
                "mismatch",
            )
    set_peft_model_state_dict(transformer, state, adapter_name=adapter)
