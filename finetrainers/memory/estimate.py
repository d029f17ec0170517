"""Estimate of the GPU memory of a run, by arithmetic. Imports no torch: the answer comes before anything is loaded.

The unit of activation memory is U = batch * tokens * hidden * 2 bytes, one bf16 hidden tensor. The activations that the
blocks of each family keep for backward, and the further needs of forward and backward, were counted in these units; see
`memory.count`.
`docs/reference/memory-estimate.md` compares the result with published measurements.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from finetrainers.config.facts import Activations
from finetrainers.config.geometry import Geometry
from finetrainers.config.root import TrainConfig
from finetrainers.config.sections import ActivationMemory
from finetrainers.methods.registry import method_spec
from finetrainers.optim.table import OPTIMIZERS, resolve_name
from finetrainers.parallel.sharding import WHOLE, ShardingSpec

from .activation_plan import activation_units
from .gathered import NOTHING, Gathered, gathered_bytes
from .network_weights import NetworkWeights
from .swap_plan import NO_SWAP, SwapSizes, chosen_blocks, swap_sizes

if TYPE_CHECKING:
    from torch import nn

    from finetrainers.models.spec import ModelSpec

GIB = 2**30
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
#: Units that ring attention adds to the peak of a block's backward pass: keys and values on the way, and their
#: gradients in fp32. From 0 to 9 were counted in a pair of processes, by family.
_RING_UNITS = 6.0
_HALF = 2  # bytes of 16-bit floats, as of activations


@dataclass(frozen=True)
class Workload:
    """The quantities that decide the memory of one training process.

    Attributes:
        frozen_bytes: frozen weights, in bytes.
        num_trainable: trainable numbers.
        num_blocks: transformer blocks of each list.
        hidden: width of a token.
        num_tokens: tokens of one clip (text tokens that join the sequence included).
        sharing: processes that share each clip, so that each has activations of its part of the tokens.
        batch_size: clips per micro-step.
        trainable_bytes: bytes per trainable parameter; its gradient has as many.
        optimizer_bytes: optimizer state per trainable parameter that lies on the GPU.
        stored: what blocks store for backward.
        share: of the blocks that `stored` holds for, or None for all.
        activations: what blocks keep, and what forward and backward need beyond that.
        accumulates: whether gradients of earlier micro-steps are present in forward.
        gradients_stay: False if each gradient leaves the GPU as soon as it is made.
        split: the state that processes share, and the state in host memory (offloading).
        gathered: bytes that a strategy gathers to compute with.
        casts: whether autocast copies weights of more than 16 bits.
        ema: whether an fp32 average of the trainable weights is kept.
        copy_bytes, trajectory_bytes: see `MethodMemory`.
        swap: of swapped blocks, whose frozen weights are not among `frozen_bytes`.
    """

    frozen_bytes: float
    num_trainable: int
    num_blocks: tuple[int, ...]
    hidden: int
    num_tokens: int
    activations: Activations
    sharing: int = 1
    batch_size: int = 1
    trainable_bytes: float = 4.0
    optimizer_bytes: float = 8.0
    stored: ActivationMemory = "checkpoint"
    share: float | None = None
    accumulates: bool = False
    gradients_stay: bool = True
    split: ShardingSpec = WHOLE
    gathered: Gathered = NOTHING
    casts: bool = True
    ema: bool = False
    copy_bytes: float = 0.0
    trajectory_bytes: float = 0.0
    swap: SwapSizes = NO_SWAP


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted memory in GiB. Not in it: text encoders, VAE, CUDA context, fragmentation.

    Attributes:
        parts: memory by the name of its use.
        total: the peak.
        swap: bytes that swapped blocks take in host memory and on the way from there.
        offloaded: activations in host memory.
        persistent_bytes: memory between steps.
    """

    parts: Mapping[str, float]
    total: float
    swap: SwapSizes = NO_SWAP
    offloaded: float = 0.0
    persistent_bytes: float = 0.0


def estimate(workload: Workload) -> MemoryPlan:
    """Return the memory of a workload on one GPU.

    Forward fills activations, and keeps the copies of weights that autocast makes. Backward empties activations as it
    makes gradients. With accumulation the gradients of earlier micro-steps stay all the time.
    """
    unit = workload.batch_size * workload.num_tokens / workload.sharing * workload.hidden * _HALF / GIB
    split = workload.split
    units = activation_units(workload.activations, workload.num_blocks, workload.stored, workload.share)
    saved, in_forward, in_backward = units.stored * unit, units.in_forward * unit, units.in_backward * unit
    trained = workload.num_trainable / GIB
    weights = trained * workload.trainable_bytes
    are_unsharded = workload.accumulates and split.keeps_gradients  # and in fp32, although the rest is split
    shared = weights / split.gradients if workload.gradients_stay else 0.0
    fixed = {
        "frozen weights": 0.0 if split.weights_on_host else workload.frozen_bytes / GIB / split.weights,
        "slots of swapped blocks": workload.swap.slots / GIB,
        "trainable weights": 0.0 if split.weights_on_host else weights / split.weights,
        "optimizer state": trained * workload.optimizer_bytes / split.optimizer,
        "moving average": 4 * trained if workload.ema else 0.0,
        "gradient buffers": workload.gathered.stays / GIB + (weights if split.copies_gradients else 0.0),
        "copies of the policy": workload.copy_bytes / GIB,
        "sampled trajectories": workload.trajectory_bytes / GIB,
    }
    gradients = {"gradients, whole": 4 * trained} if are_unsharded else {"gradients": shared}
    casts = trained * _HALF if workload.casts and workload.trainable_bytes > _HALF else 0.0
    gathered, made = workload.gathered, sum(gradients.values())
    forward = gathered.forward / GIB + casts + saved + in_forward
    backward = max(
        moment.gathered / GIB
        + moment.stored * saved
        + moment.working * in_backward
        + (0.0 if workload.accumulates else moment.made * made)
        for moment in gathered.backward
    )
    at_work = max(forward, backward) + (made if workload.accumulates else 0.0)
    parts = {
        **fixed,
        **gradients,
        "gathered weights": (gathered.forward if split.zero_stage else gathered.peak) / GIB,
        "gradients being averaged": (gathered.peak - gathered.forward) / GIB if split.zero_stage else 0.0,
        "autocast copies": casts,
        "activations kept": saved,
        "one block in backward": in_backward,
    }
    persistent_bytes = sum(fixed.values())
    return MemoryPlan(
        parts, persistent_bytes + max(at_work, gathered.after / GIB), workload.swap,
        units.on_host * unit, persistent_bytes,
    )  # fmt: skip


def estimate_for(
    config: TrainConfig,
    geometry: Geometry,
    transformer: nn.Module,
    *,
    spec: ModelSpec,
    bucket: tuple[int, int, int],
    batch_size: int | None = None,
    split: ShardingSpec = WHOLE,
    weights: NetworkWeights | None = None,
) -> MemoryPlan:
    """Return the estimate for each process of a configured run; see `build_workload`."""
    return estimate(
        build_workload(
            config, geometry, transformer, spec=spec, bucket=bucket, batch_size=batch_size, split=split, weights=weights
        )
    )


def build_workload(
    config: TrainConfig, geometry: Geometry, transformer: nn.Module, *, spec: ModelSpec, bucket: tuple[int, int, int],
    batch_size: int | None = None, split: ShardingSpec = WHOLE, weights: NetworkWeights | None = None,
) -> Workload:  # fmt: skip
    """Return the workload of each process of a configured run; `transformer` may lie on the meta device.

    Args:
        config: the run.
        geometry: size rules of the checkpoint.
        transformer: with its adapter attached, which decides what is trainable.
        spec: knows the transformer's blocks and width.
        bucket: the largest clips, frames x height x width. Text tokens, a hundredth of the sequence, are left out.
        batch_size: number of these clips in a micro-batch; default: as configured.
        split: what the strategy splits over processes; default: nothing.
        weights: those of the transformer, if they are listed already. Gathered ones arrive in the dtype that they
            compute in.
    """
    width, weights = computed_bytes(config), weights or NetworkWeights(transformer, spec)
    # Bytes per trainable parameter, before a strategy changes it.
    trainable_bytes = 2 if config.training.master_weights == "stochastic_rounding" else 4
    # Weights that full finetuning leaves as they are have the dtype of the others.
    full = config.training.training_type == "full-finetune"
    frozen, swap = frozen_sizes(
        config, weights, spec, adapters=width if split.zero_stage else 4,
        width=width if full and split.zero_stage else trainable_bytes if full else None,
    )  # fmt: skip
    halved = trainable_bytes == _HALF or ((split.gathers or split.zero_stage > 0) and width == _HALF)
    accumulates = method_spec(config).accumulates(config)
    gathered = gathered_bytes(
        weights, width=width, split=split, accumulates=accumulates,
        swapped=swapped_blocks(config, weights.blocks),
        saved=_quantization_savings(config, weights, spec, DTYPE_BYTES[config.model.transformer_dtype]),
    )  # fmt: skip
    workload = Workload(
        frozen_bytes=frozen,
        swap=swap,
        num_trainable=weights.trained,
        num_blocks=tuple(len(getattr(transformer, name)) for name in spec.blocks),
        hidden=spec.width(transformer),
        num_tokens=geometry.num_tokens(*bucket),
        sharing=config.parallel.sp_size,
        batch_size=batch_size or config.dataloader.batch_size,
        trainable_bytes=width if split.zero_stage else trainable_bytes,
        optimizer_bytes=_optimizer_bytes_on_device(config, split),
        stored=config.memory.stored,
        share=config.memory.selective_checkpointing,
        activations=counted_activations(config, spec, split, halved=halved),
        accumulates=accumulates,
        ema=config.training.use_ema,
        gradients_stay=_gradients_stay(config, split),
        split=split,
        gathered=gathered,
        casts=not halved,
    )
    latent = (spec.latent_channels(transformer), *geometry.denoised_shape(*bucket))
    return _with_method(workload, config, weights, latent=latent, trainable_bytes=trainable_bytes)


def _with_method(
    workload: Workload, config: TrainConfig, weights: NetworkWeights, *, latent: tuple[int, int, int, int],
    trainable_bytes: int,
) -> Workload:  # fmt: skip
    """Return a workload with the training method's copies, samples, and clips of a micro-batch.

    Args:
        workload: of the network alone.
        config: the run.
        weights: of the network.
        latent: channels, frames, height and width of a clip's latents.
        trainable_bytes: per trainable parameter, before a strategy changes it.
    """
    split = workload.split
    method = method_spec(config).memory(
        config,
        latent,
        batch_size=workload.batch_size,
        trained=weights.trained * trainable_bytes,
        reference=weights.total * bytes_of_copy(config, split, trainable_bytes=trainable_bytes),
    )
    return replace(
        workload,
        batch_size=method.batch_size,
        copy_bytes=method.copies,
        trajectory_bytes=method.trajectories,
    )


def _gradients_stay(config: TrainConfig, split: ShardingSpec) -> bool:
    options = config.optimizer
    if split.zero_stage == 3 or (split.zero_stage == 2 and split.optimizer_on_host):
        return False  # they are in buffers that stay, or on the host
    return not (options.offload_gradients or options.optimizer_in_backward or split.weights_on_host)


def counted_activations(config: TrainConfig, spec: ModelSpec, split: ShardingSpec, *, halved: bool) -> Activations:
    """Return the counted activations of the training type; `halved`: trainable weights are 16-bit when they compute."""
    training_type = config.training.training_type
    # DeepSpeed has no autocast.
    plain = split.zero_stage > 0 or (training_type == "lora" and not config.memory.lora_autocast)
    special = f"{training_type} without autocast" if plain else f"{training_type}-bf16" if halved else training_type
    activations = spec.activations.get(special, spec.activations[training_type])
    if config.parallel.sp_size > 1 and config.parallel.sp_mode == "ring":
        return replace(activations, backward=activations.backward + _RING_UNITS)
    return activations


def optimizer_state_bytes(config: TrainConfig) -> float:
    """Return bytes of optimizer state per trainable parameter, on any device."""
    name = resolve_name(config.optimizer)
    # Moments have the weights' dtype.
    halved = config.training.master_weights == "stochastic_rounding" and name == "adamw"
    return OPTIMIZERS[name].state_bytes / (2 if halved else 1)


def _optimizer_bytes_on_device(config: TrainConfig, split: ShardingSpec) -> float:
    """Return bytes of optimizer state per trainable parameter on the GPU, including DeepSpeed's fp32 weights."""
    on_host = config.optimizer.use_cpu_offload_optimizer or split.optimizer_on_host
    if on_host or OPTIMIZERS[resolve_name(config.optimizer)].on_host:
        return 0.0
    return optimizer_state_bytes(config) + (4 if split.zero_stage else 0)


def frozen_sizes(
    config: TrainConfig, weights: NetworkWeights, spec: ModelSpec, *, adapters: int = 4, width: int | None = None
) -> tuple[float, SwapSizes]:
    """Return bytes of the frozen weights that stay on the device, and of swapped blocks.

    Args:
        config: the run.
        weights: those of the network that is trained, or of another expert, which is stored in the same way.
        spec: of the model.
        adapters: bytes per parameter of a frozen adapter.
        width: bytes per parameter of the other weights; default: of `transformer_dtype`.
    """
    memory, width = config.memory, width or DTYPE_BYTES[config.model.transformer_dtype]
    casts = "transformer" in memory.layerwise_upcasting_modules
    skip = memory.layerwise_upcasting_skip_modules_pattern

    def find() -> tuple[float, list[float]]:
        widths = {**dict.fromkeys(weights.in_fp32, 4), **dict.fromkeys(weights.frozen_adapters, adapters)}
        sizes = {id(p): float(p.numel() * widths.get(id(p), width)) for p in weights.all if not p.requires_grad}
        if casts:
            sizes |= weights.bytes_cast(skip)
        for weight, saved in _quantization_savings(config, weights, spec, width).items():
            sizes[weight] -= saved
        return sum(sizes.values()), [sum(sizes.get(id(p), 0.0) for p in block) for block in weights.blocks]

    quantized = (memory.quantize_frozen, *memory.quantize_skip_modules)
    total, block_bytes = weights.once(("frozen", width, adapters, (*skip,) if casts else None, quantized), find)
    swap = swap_sizes(block_bytes, len(swapped_blocks(config, weights.blocks)))
    if casts and swap.slots:  # each layer leaves a copy in 8 bits behind, until its block has computed
        swap = replace(swap, slots=swap.slots + max(block_bytes))
    return total - swap.host, swap


def _quantization_savings(
    config: TrainConfig, weights: NetworkWeights, spec: ModelSpec, width: int
) -> Mapping[int, float]:
    """Return the bytes that quantization saves of each weight of `width` bytes per parameter, by its `id`."""
    if config.memory.quantize_frozen == "none":
        return {}
    skip = tuple(config.memory.quantize_skip_modules or spec.unquantized)
    return weights.bytes_saved(config.memory.quantize_frozen, skip=skip, width=width)


def swapped_blocks(config: TrainConfig, blocks: Sequence[object]) -> list[int]:
    """Return the indices of swapped blocks; all for `auto`, which a run replaces by a number: the least memory."""
    number = config.memory.blocks_to_swap
    return chosen_blocks(len(blocks), len(blocks) if number == "auto" else number) if number else []


def bytes_of_copy(config: TrainConfig, split: ShardingSpec, *, trainable_bytes: float) -> float:
    """Return bytes per parameter that a process keeps of a frozen copy; see `Strategy.prepare_frozen`."""
    if not (split.gathers or split.zero_stage):
        return trainable_bytes
    width = min(trainable_bytes, computed_bytes(config))
    if split.zero_stage:  # DeepSpeed splits what it trains
        return width
    return 0.0 if split.weights_on_host else width / split.weights


def computed_bytes(config: TrainConfig) -> int:
    """Return bytes per parameter in the dtype that the network computes in."""
    precision = config.training.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION")
    if (precision is None or not config.memory.lora_autocast) and config.model.transformer_dtype in ("bf16", "fp16"):
        precision = config.model.transformer_dtype
    return _HALF if precision in ("bf16", "fp16") else 4
