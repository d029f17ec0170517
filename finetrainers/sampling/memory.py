"""Estimated memory of sampling, and the choice whether idle components wait in host memory."""

from __future__ import annotations

import torch

from finetrainers.config.facts import is_network
from finetrainers.config.sections import TrainingSection
from finetrainers.memory.fit import fits, with_reserve
from finetrainers.memory.network_weights import NetworkWeights
from finetrainers.memory.phases import RunSizes, plan_run
from finetrainers.models.spec import ModelSpec, frozen_bytes, leave_out_unused
from finetrainers.plan.trainable import trainable_dtype
from finetrainers.utils.phases import VALIDATION
from finetrainers.utils.text import file_size

from .plan import SamplePlan


def sampling_bytes(plan: SamplePlan, spec: ModelSpec) -> float:
    """Return the bytes on the device at the peak of denoising and decoding, without a LoRA's own weights."""
    config, sizes = plan.config, plan.sizes
    widest = config.model.transformer_dtype
    if any(v.weights.kind == "full" and v.weights.is_checkpoint for v in plan.variants):
        widest = "fp32" if trainable_dtype(config) == torch.float32 else "bf16"
    # Nothing is trained, and text encoders are freed before the network is loaded.
    tables = {
        "training": TrainingSection(),
        "data": config.data.model_copy(update={"precompute_conditions": True}),
        "model": config.model.model_copy(update={"transformer_dtype": widest}),
        "memory": config.memory.model_copy(update={"blocks_to_swap": 0}),  # training alone swaps blocks
    }
    config = config.model_copy(update=tables)
    network = spec.transformer_on_meta().requires_grad_(False)
    leave_out_unused(network)
    networks = (*spec.facts.networks[:-1], *filter(is_network, spec.facts.companions))
    around = RunSizes(
        bucket=max(sizes, key=lambda size: spec.facts.geometry.num_tokens(*size)),
        sampled=tuple(sizes),
        parts={part: size for part in networks if (size := frozen_bytes(spec, part)) is not None},
        experts={part: NetworkWeights(expert, spec) for part, expert in spec.experts_on_meta().items()},
        total=sum(p.numel() for p in network.parameters()),
    )
    return plan_run(config, spec.facts.geometry, network, spec=spec, around=around).peaks[VALIDATION]


def offloads(plan: SamplePlan, spec: ModelSpec, *, device: torch.device) -> tuple[bool, str]:
    """Return whether idle components wait in host memory: as the option says, or else if sampling would not fit.

    Returns:
        The choice, and a note for the user, which may be empty.
    """
    option = plan.config.validation.enable_model_cpu_offload
    if option is not None or device.type != "cuda":
        return bool(option), ""
    planned, total = sampling_bytes(plan, spec), torch.cuda.mem_get_info(device)[1]
    if fits(planned, total):
        return False, ""
    return True, (
        f"note: model CPU offload enabled for sampling: otherwise it needs about {file_size(with_reserve(planned))}, "
        f"and the GPU has {file_size(total)} (--no-enable_model_cpu_offload)"
    )
