"""How much GPU memory a run needs, by arithmetic. Imports no torch: the answer comes before anything is loaded.

The unit of activation memory is U = batch * tokens * hidden * 2 bytes, one bf16 hidden tensor. What one transformer
block keeps for its backward pass was counted in these units on diffusers' blocks at real widths (`saved_tensors_hooks`,
parameters left out): full finetuning keeps 28 U; a LoRA with fp32 weights under bf16 autocast keeps 18.6 to 21.1 U; with
checkpointing a block keeps its input, 1 U. `docs/how-to/memory.md` compares the result with published measurements.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetrainers.config.geometry import Geometry
from finetrainers.config.root import TrainConfig
from finetrainers.methods.registry import method_spec
from finetrainers.optim.table import RECIPES, resolve_name
from finetrainers.parallel.sharding import WHOLE, Split

if TYPE_CHECKING:
    from torch import nn

    from finetrainers.models.spec import ModelSpec

GIB = 2**30
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
#: U that one block keeps for backward without checkpointing.
SAVED_UNITS_LORA = 21.0
SAVED_UNITS_FULL = 28.0
_CHECKPOINT_UNITS = 1.0
_HALF = 2  # bytes of 16-bit floats, as of activations


@dataclass(frozen=True)
class Workload:
    """The quantities that decide the memory of one training process.

    Attributes:
        frozen_bytes: frozen weights, in bytes.
        num_trainable: trainable numbers.
        num_blocks: transformer blocks.
        hidden: width of a token.
        num_tokens: tokens of one clip (text tokens that join the sequence included).
        batch_size: clips per micro-step.
        trainable_bytes: bytes per trainable weight; its gradient has as many.
        optimizer_bytes: optimizer state per trainable weight that lies on the GPU.
        gradient_checkpointing: whether blocks keep only their input.
        saved_units: U that a block keeps otherwise.
        accumulates: whether gradients of earlier micro-steps are present in forward.
        gradients_stay: False if each gradient leaves the GPU as soon as it is made.
        split: the state that processes share, and the state in host memory (offloading).
        gathered_bytes: weights that a strategy gathers to compute with, and the gradients that it makes of them.
        casts: whether autocast copies weights of more than 16 bits.
        ema: whether an fp32 average of the trainable weights is kept.
        copy_bytes, trajectory_bytes: see `MethodMemory`.
    """

    frozen_bytes: float
    num_trainable: int
    num_blocks: int
    hidden: int
    num_tokens: int
    batch_size: int = 1
    trainable_bytes: float = 4.0
    optimizer_bytes: float = 8.0
    gradient_checkpointing: bool = True
    saved_units: float = SAVED_UNITS_LORA
    accumulates: bool = False
    gradients_stay: bool = True
    split: Split = WHOLE
    gathered_bytes: float = 0.0
    casts: bool = True
    ema: bool = False
    copy_bytes: float = 0.0
    trajectory_bytes: float = 0.0


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted memory in GiB. Not in it: text encoders, VAE, CUDA context, fragmentation.

    Attributes:
        parts: memory by what takes it.
        total: the peak.
    """

    parts: Mapping[str, float]
    total: float

    def table(self) -> list[tuple[str, str]]:
        """Rows of what and how much, for printing; the last is the peak."""
        kept = [(name, f"{gib:.2f} GiB") for name, gib in self.parts.items() if gib]
        return [*kept, ("peak, about", f"{self.total:.1f} GiB")]


def estimate(workload: Workload) -> MemoryPlan:
    """The memory of a workload on one GPU.

    Kept activations are `num_blocks` times 1 U with checkpointing, else `saved_units` U. While backward runs through a
    block, that block's `saved_units` U are there (recomputed with checkpointing, else counted as kept), and about as
    much again in gradients and temporaries.

    Forward fills activations, backward empties them as it makes gradients: the larger counts in the peak. With accumulation
    the gradients of earlier micro-steps are there in forward already, so both count.
    """
    unit = workload.batch_size * workload.num_tokens * workload.hidden * _HALF / GIB
    checkpointing, split = workload.gradient_checkpointing, workload.split
    per_block = _CHECKPOINT_UNITS if checkpointing else workload.saved_units
    in_backward = (2 if checkpointing else 1) * workload.saved_units
    trained = workload.num_trainable / GIB
    weights = trained * workload.trainable_bytes
    whole = workload.accumulates and split.keeps_gradients  # and in fp32, although the rest is split
    shared = weights / split.gradients if workload.gradients_stay else 0.0
    fixed = {
        "frozen weights": 0.0 if split.weights_on_host else workload.frozen_bytes / GIB / split.weights,
        "trainable weights": 0.0 if split.weights_on_host else weights / split.weights,
        "optimizer state": trained * workload.optimizer_bytes / split.optimizer,
        "moving average": 4 * trained if workload.ema else 0.0,
        "copies of the policy": workload.copy_bytes / GIB,
        "sampled trajectories": workload.trajectory_bytes / GIB,
    }
    gradients = {"gradients, whole" if whole else "gradients": 4 * trained if whole else shared}
    forward = {
        "gathered weights": workload.gathered_bytes / GIB,
        "autocast copies": trained * _HALF if workload.casts and workload.trainable_bytes > _HALF else 0.0,
        "activations kept": per_block * workload.num_blocks * unit,
    }
    block = {"one block in backward": in_backward * unit}
    moving = (sum if workload.accumulates else max)((sum(forward.values()), sum(gradients.values())))
    total = sum(fixed.values()) + sum(block.values()) + moving
    return MemoryPlan({**fixed, **gradients, **forward, **block}, total)


def estimate_for(
    config: TrainConfig,
    geometry: Geometry,
    transformer: nn.Module,
    *,
    spec: ModelSpec,
    bucket: tuple[int, int, int],
    batch_size: int | None = None,
    split: Split = WHOLE,
) -> MemoryPlan:
    """The estimate for each process of a configured run; `transformer` may lie on the meta device.

    Args:
        config: the run.
        geometry: size rules of the checkpoint.
        transformer: with its adapter attached, so that it is known what is trainable.
        spec: tells the transformer's blocks and width.
        bucket: the largest clips, frames x height x width. Text tokens, a hundredth of the sequence, are left out.
        batch_size: how many of them make a micro-batch; default: as configured.
        split: what the strategy splits over processes; default: nothing.
    """
    options, training = config.optimizer, config.training
    is_lora = training.training_type == "lora"
    rounds = training.master_weights == "stochastic_rounding"
    name, state_bytes = resolve_name(options), optimizer_state_bytes(config)
    offloads = options.use_cpu_offload_optimizer or split.optimizer_on_host or RECIPES[name].on_host
    num_trainable = sum(p.numel() for p in transformer.parameters() if p.requires_grad)
    trainable_bytes = 2 if rounds else 4
    width = computed_bytes(config)
    method, blocks = method_spec(config), spec.block_modules(transformer)
    kept = method.memory(
        config,
        (transformer.config.out_channels, *geometry.denoised_shape(*bucket)),  # type: ignore[union-attr, arg-type]
        batch_size=batch_size or config.dataloader.batch_size,
        trained=num_trainable * trainable_bytes,
        reference=sum(p.numel() for p in transformer.parameters())
        * bytes_of_copy(config, split, trainable_bytes=trainable_bytes),
    )
    masters = split.masters and width == _HALF
    return estimate(
        Workload(
            frozen_bytes=_frozen_bytes(config, transformer),
            num_trainable=num_trainable,
            num_blocks=len(blocks),
            hidden=spec.width(transformer),
            num_tokens=geometry.num_tokens(*bucket),
            batch_size=kept.batch_size,
            trainable_bytes=_HALF if masters else trainable_bytes,
            optimizer_bytes=0 if offloads else state_bytes + (4 if masters else 0),
            gradient_checkpointing=config.memory.gradient_checkpointing,
            saved_units=SAVED_UNITS_LORA if is_lora else SAVED_UNITS_FULL,
            accumulates=method.accumulates(config),
            ema=training.use_ema,
            copy_bytes=kept.copies,
            trajectory_bytes=kept.trajectories,
            gradients_stay=not (options.offload_gradients or split.weights_on_host),
            split=split,
            gathered_bytes=gathered_bytes(transformer, blocks, width=width) if split.gathers else 0.0,
            casts=not (split.gathers and width == _HALF),  # gathered weights arrive in what they compute in
        )
    )


def optimizer_state_bytes(config: TrainConfig) -> float:
    """Bytes of optimizer state for each trained weight, wherever they lie."""
    name = resolve_name(config.optimizer)
    # Moments have the weights' dtype.
    halved = config.training.master_weights == "stochastic_rounding" and name == "adamw"
    return RECIPES[name].state_bytes / (2 if halved else 1)


def _frozen_bytes(config: TrainConfig, transformer: nn.Module) -> float:
    frozen = sum(p.numel() for p in transformer.parameters() if not p.requires_grad)
    width = DTYPE_BYTES[config.model.transformer_dtype]
    total = float(frozen * width)
    if "transformer" in config.memory.layerwise_upcasting_modules:
        from .casting import castable_layers  # needs torch, as the caller's transformer does

        layers = castable_layers(
            transformer, skip_modules_pattern=config.memory.layerwise_upcasting_skip_modules_pattern
        )
        total -= (width - 1) * sum(p.numel() for _, layer in layers for p in layer.parameters())
    return total


def bytes_of_copy(config: TrainConfig, split: Split, *, trainable_bytes: float) -> float:
    """Bytes that a process keeps of a weight of a frozen copy; see `Strategy.prepare_frozen`."""
    if not (split.gathers or split.masters):
        return trainable_bytes
    width = min(trainable_bytes, computed_bytes(config))
    if split.masters:  # DeepSpeed splits what it trains
        return width
    return 0.0 if split.weights_on_host else width / split.weights


def computed_bytes(config: TrainConfig) -> int:
    """Bytes of a weight in the dtype that the network computes in."""
    precision = config.training.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION")
    if precision is None and config.model.transformer_dtype in ("bf16", "fp16"):
        precision = config.model.transformer_dtype
    return _HALF if precision in ("bf16", "fp16") else 4


def gathered_bytes(transformer: nn.Module, blocks: Sequence[nn.Module], *, width: int) -> float:
    """Weights of the block that computes, of the next one, which is fetched meanwhile, and outside of blocks; and gradients of
    one block in fp32, which are summed over processes."""
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
    trained = [sum(p.numel() for p in block.parameters() if p.requires_grad) for block in blocks]
    outside = sum(p.numel() for p in transformer.parameters()) - sum(sizes)
    return (2 * max(sizes, default=0) + outside) * width + 4.0 * max(trained, default=0)
