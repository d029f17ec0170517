"""`--activation_memory auto` of a configured run: the choice by the estimate and the operations of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from finetrainers.config.geometry import Geometry
from finetrainers.config.root import TrainConfig
from finetrainers.config.sections import ActivationMemory

from .activation_plan import (
    SETTINGS,
    ActivationPolicy,
    Machine,
    StepWork,
    choose,
    make_policy,
    recomputed,
    step_seconds,
)
from .estimate import GIB, MemoryPlan, Workload, build_workload, estimate
from .network_weights import NetworkWeights
from .phases import RunSizes

if TYPE_CHECKING:
    from torch import nn

    from finetrainers.models.spec import ModelSpec

#: Operations and bytes a second that are assumed for an unknown GPU: 40 % of an A100's peak, and a common rate of
#: PCIe 4 x16.
ASSUMED_FLOPS, ASSUMED_LINK = 0.4 * 312e12, 25e9
#: The share of a GPU's peak that training is assumed to reach before it has been measured.
UTILIZATION = 0.4
#: The share of the host's available memory that activations may take; checkpoints, workers and others need the rest.
HOST_SHARE = 0.75
#: The share that they may take together with networks that wait there.
_WITH_NETWORKS = 0.9


@dataclass(frozen=True)
class ActivationModel:
    """Memory and time of a training step with each setting.

    Attributes:
        workload: the other quantities that decide the memory.
        work: operations of a micro-batch.
        settings: settings that the other options allow.
        all_blocks: whether a setting must hold for all blocks.
        others: bytes on the device during a step that are not in the workload: other networks.
        waiting: bytes of networks that wait in host memory in some phase, which activations leave to them.
        correction: ratio of measured to planned bytes that a step takes beyond the memory between steps.
    """

    workload: Workload
    work: StepWork
    settings: tuple[ActivationMemory, ...] = SETTINGS
    all_blocks: bool = False
    others: float = 0.0
    waiting: float = 0.0
    correction: float = 1.0

    def choose(self, machine: Machine) -> ActivationPolicy:
        """Return the setting that makes a step fastest; see `activation_plan.choose`."""
        total, machine = sum(self.workload.num_blocks), self._without_networks(machine)
        return choose(total, self.sizes, self.work, machine, settings=self.settings, all_blocks=self.all_blocks)

    def policy(self, config: TrainConfig, machine: Machine) -> ActivationPolicy:
        """Return the setting of a configuration, with its memory and time."""
        stored, share, total = (
            config.memory.stored,
            config.memory.selective_checkpointing,
            sum(self.workload.num_blocks),
        )
        number = 0 if stored == "none" else total if share is None else round(share * total)
        machine = self._without_networks(machine)
        return make_policy(stored, number, total, self.sizes, self.work, machine)

    def _without_networks(self, machine: Machine) -> Machine:
        """Return a machine with the host memory that swapped blocks and waiting networks leave."""
        host = machine.host - self.workload.swap.host
        left = host + (_WITH_NETWORKS / HOST_SHARE - 1) * machine.host - self.waiting
        return replace(machine, host=min(host, max(0.0, left)))

    def slower(self, config: TrainConfig, machine: Machine) -> float:
        """Return the additional time of a step relative to one that recomputes and copies nothing, as a share."""
        stored, share = config.memory.stored, config.memory.selective_checkpointing
        share = 0.0 if stored == "none" else 1.0 if share is None else share
        _, host = self.sizes(stored, round(share * sum(self.workload.num_blocks)))
        fastest = step_seconds(replace(self.work, copied=0.0), machine, "none", 0.0, 0.0)
        return step_seconds(self.work, machine, stored, share, host) / fastest - 1

    def sizes(self, stored: ActivationMemory, number: int) -> tuple[float, float]:
        """Return the bytes on the device and on the host with a setting for `number` blocks."""
        plan = self.plan(stored, number)
        moving = self.correction * (plan.total - plan.persistent_bytes)
        return self.others + GIB * (plan.persistent_bytes + moving), GIB * plan.offloaded

    def plan(self, stored: ActivationMemory, number: int) -> MemoryPlan:
        """Return the estimate with a setting for `number` blocks, without the correction."""
        total = sum(self.workload.num_blocks)
        return estimate(replace(self.workload, stored=stored, share=None if number == total else number / total))

    @property
    def persistent_bytes(self) -> float:
        """Bytes on the device between steps."""
        return self.others + GIB * self.plan("none", 0).persistent_bytes

    def with_measured_peak(self, choice: ActivationPolicy, *, peak: float) -> ActivationModel:
        """Return the model, corrected by the peak in bytes of a step with this choice."""
        plan = self.plan(choice.stored, choice.number)
        moving = max(0.0, (peak - self.others) / GIB - plan.persistent_bytes)
        return replace(self, correction=moving / (plan.total - plan.persistent_bytes))

    def operations(self, choice: ActivationPolicy) -> float:
        """Return the operations of a micro-batch divided by those without recomputation."""
        once = self.work.forward + self.work.backward
        return 1 + recomputed(self.work, choice.stored, choice.number / choice.total) / once


def activation_model(
    config: TrainConfig,
    geometry: Geometry,
    network: nn.Module,
    *,
    spec: ModelSpec,
    around: RunSizes,
    others: float = 0.0,
    waiting: float = 0.0,
) -> ActivationModel:
    """Return the model of a configured run.

    Args:
        config: the run.
        geometry: size rules of the checkpoint.
        network: on the meta device, with its adapter attached.
        spec: of the model.
        around: the largest clips, their number in a micro-batch, and the sharding over processes.
        others, waiting: see `ActivationModel`.
    """
    weights = around.weights or NetworkWeights(network, spec)
    workload = build_workload(
        config, geometry, network, spec=spec, bucket=around.bucket, batch_size=around.clips, split=around.split,
        weights=weights,
    )  # fmt: skip
    # Autograd stores the casts of blocks that are not recomputed, which the estimate leaves out.
    casts = "transformer" in config.memory.layerwise_upcasting_modules
    # The operators of a compiled block cannot be seen, and this attention is not a single operator.
    hides_attention = config.memory.compile != "none" or config.model.attn_backend == "_native_math"
    excluded = ({"keep_attention", "offload"} if hides_attention else set()) | ({"none"} if casts else set())
    settings = tuple(setting for setting in SETTINGS if setting not in excluded)
    return ActivationModel(
        workload, _work(workload, weights, spec), settings, all_blocks=casts, others=others, waiting=waiting
    )


def with_choice(config: TrainConfig, choice: ActivationPolicy | None) -> TrainConfig:
    """Return a copy of `config` with the choice, or with nothing recomputed if it is None."""
    stored, share = ("none", None) if choice is None else (choice.stored, choice.share)
    memory = {"activation_memory": stored, "selective_checkpointing": share, "gradient_checkpointing": False}
    return config.with_values(memory)


def _work(workload: Workload, weights: NetworkWeights, spec: ModelSpec) -> StepWork:
    from finetrainers.models.spec import Tokens  # needs torch, as the caller's network does

    tokens = Tokens(workload.batch_size, workload.num_tokens, 0)
    flops = weights.once("flops", lambda: spec.flops(weights.network))
    if flops is None:  # two operations for each weight and token
        forward = 2.0 * weights.total * tokens.clips * tokens.video / workload.sharing
        return StepWork(forward, 2 * forward, 0.0, workload.swap.copied, sum(workload.num_blocks))
    totals = flops.of_forward(tokens), flops.of_backward(tokens), flops.of_attention(tokens)
    forward, backward, attention = (total / workload.sharing for total in totals)
    return StepWork(forward, backward, attention, workload.swap.copied, sum(workload.num_blocks))
