"""`--activation_memory auto` of a configured run: what it chooses from, by the estimate and the operations of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from finetrainers.config.geometry import Geometry
from finetrainers.config.root import TrainConfig
from finetrainers.config.sections import ActivationMemory
from finetrainers.parallel.sharding import WHOLE, Split

from .activation_plan import SETTINGS, Choice, Machine, StepWork, choose, recomputed
from .estimate import GIB, MemoryPlan, Workload, estimate, workload_of

if TYPE_CHECKING:
    from torch import nn

    from finetrainers.models.spec import ModelSpec

#: Operations and bytes a second that are assumed where nothing is known of the GPU: 40 % of an A100's peak, and a common rate
#: of PCIe 4 x16.
ASSUMED_FLOPS, ASSUMED_LINK = 0.4 * 312e12, 25e9
#: The share of a GPU's peak that training is taken to reach before it has been measured.
UTILIZATION = 0.4
#: The share of the host's available memory that activations may take; checkpoints, workers and others need the rest.
HOST_SHARE = 0.75


@dataclass(frozen=True)
class ActivationModel:
    """Memory and time of a training step with each setting.

    Attributes:
        workload: what else decides the memory.
        work: operations of a micro-batch.
        settings: that go with the other options.
        whole: whether a setting must hold for all blocks.
        correction: measured by planned bytes of what a step takes beyond what is there between steps.
    """

    workload: Workload
    work: StepWork
    settings: tuple[ActivationMemory, ...] = SETTINGS
    whole: bool = False
    correction: float = 1.0

    def choose(self, machine: Machine) -> Choice:
        """The setting with which a step takes least time; see `activation_plan.choose`."""
        total = sum(self.workload.num_blocks)
        return choose(total, self.sizes, self.work, machine, settings=self.settings, whole=self.whole)

    def sizes(self, stored: ActivationMemory, number: int) -> tuple[float, float]:
        """Bytes on the device and on the host with a setting for so many blocks."""
        plan = self.plan(stored, number)
        return GIB * (plan.at_rest + self.correction * (plan.total - plan.at_rest)), GIB * plan.offloaded

    def plan(self, stored: ActivationMemory, number: int) -> MemoryPlan:
        """The estimate, without the correction."""
        total = sum(self.workload.num_blocks)
        return estimate(replace(self.workload, stored=stored, share=None if number == total else number / total))

    @property
    def at_rest(self) -> float:
        """Bytes on the device between steps."""
        return GIB * self.plan("none", 0).at_rest

    def measured(self, choice: Choice, *, peak: float) -> ActivationModel:
        """The model, corrected by the peak in bytes of a step with this choice."""
        plan = self.plan(choice.stored, choice.number)
        return replace(self, correction=max(0.0, peak / GIB - plan.at_rest) / (plan.total - plan.at_rest))

    def operations(self, choice: Choice) -> float:
        """Of a micro-batch, by those that are computed once."""
        once = self.work.forward + self.work.backward
        return 1 + recomputed(self.work, choice.stored, choice.number / choice.total) / once


def activation_model(
    config: TrainConfig,
    geometry: Geometry,
    network: nn.Module,
    *,
    spec: ModelSpec,
    bucket: tuple[int, int, int],
    batch_size: int,
    split: Split = WHOLE,
) -> ActivationModel:
    """The model of a configured run; see `workload_of`."""
    workload = workload_of(config, geometry, network, spec=spec, bucket=bucket, batch_size=batch_size, split=split)
    # Autograd stores the casts of blocks that are not recomputed, which the estimate leaves out.
    casts = "transformer" in config.memory.layerwise_upcasting_modules
    return ActivationModel(workload, _work(workload, network, spec), _settings(config, recomputes=casts), whole=casts)


def with_choice(config: TrainConfig, choice: Choice | None) -> TrainConfig:
    """The configuration with what was chosen; None: nothing is recomputed."""
    stored, share = ("none", None) if choice is None else (choice.stored, choice.share)
    memory = {"activation_memory": stored, "selective_checkpointing": share, "gradient_checkpointing": False}
    return config.model_copy(update={"memory": config.memory.model_copy(update=memory)})


def _settings(config: TrainConfig, *, recomputes: bool) -> tuple[ActivationMemory, ...]:
    """The settings that go with the other options, the simplest first."""
    # The operators of a compiled block are not seen, and this attention is no single operator.
    hides_attention = config.memory.compile != "none" or config.model.attn_backend == "_native_math"
    excluded = ({"keep_attention", "offload"} if hides_attention else set()) | ({"none"} if recomputes else set())
    return tuple(setting for setting in SETTINGS if setting not in excluded)


def _work(workload: Workload, network: nn.Module, spec: ModelSpec) -> StepWork:
    from finetrainers.models.spec import Tokens  # needs torch, as the caller's network does

    tokens = Tokens(workload.batch_size, workload.num_tokens, 0)
    flops = spec.flops(network)
    if flops is None:  # two operations for each weight and token
        forward = 2.0 * sum(p.numel() for p in network.parameters()) * tokens.clips * tokens.video
        return StepWork(forward, 2 * forward, 0.0, workload.swap.copied)
    return StepWork(
        flops.of_forward(tokens), flops.of_backward(tokens), flops.of_attention(tokens), workload.swap.copied
    )
