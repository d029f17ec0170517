"""`--activation_memory auto` of a run: planned before weights are loaded, and once more from what a step has measured."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from finetrainers.config.root import TrainConfig
from finetrainers.memory.activation_auto import (
    ASSUMED_FLOPS,
    ASSUMED_LINK,
    HOST_SHARE,
    UTILIZATION,
    ActivationModel,
    activation_model,
    with_choice,
)
from finetrainers.memory.activation_plan import Choice, Machine, spread
from finetrainers.memory.checkpointing import set_activation_memory
from finetrainers.memory.estimate import GIB
from finetrainers.memory.phases import RESERVE
from finetrainers.methods.base import Step
from finetrainers.models.spec import ModelSpec
from finetrainers.parallel.sharding import expected_split
from finetrainers.parallel.strategy import Strategy
from finetrainers.utils.host_memory import room
from finetrainers.utils.launch import local_world_size
from finetrainers.utils.process_state import free_memory

from .block_swap import with_blocks_to_swap
from .preflight import Preflight
from .start_report import print_line, print_warnings
from .throughput import peak_flops
from .trainable import network_without_weights

if TYPE_CHECKING:
    from .state import TrainState

#: Bytes of the copies that measure the link.
_PROBE_BYTES = 64 << 20
#: After an OOM, a step may take this share of what it was planned to take beyond what is there between steps.
_LESS = 0.75
#: A step that takes as long as its copies, up to this share, does not tell how fast the device computes.
_COPIES_DECIDE = 0.9


class ActivationPlanner:
    """Chooses what blocks store for backward, the same on all ranks, and changes it between steps.

    Attributes:
        choice: in use.
        machine: that the choice is for; after a measured step with the compute rate of that step.
    """

    def __init__(
        self, model: ActivationModel, machine: Machine, *, heaviest: tuple[tuple[int, int, int], int], loaded: float,
        replans: bool = True,
    ) -> None:  # fmt: skip
        """Args:
        model: memory and time of each setting.
        machine: what there is.
        heaviest: size of the largest clips' latents, and how many make a micro-batch.
        loaded: bytes on the device that the model knows nothing of.
        replans: whether a measured step changes the choice.
        """
        self.machine = machine
        self.choice = model.choose(machine)
        self._model, self._heaviest, self._loaded, self._replans = model, heaviest, loaded, replans

    def look(self, state: TrainState, step: Step[Any], *, seconds: float, operations: float | None) -> None:
        """Plan once more after the first step with the largest clips; every rank must call it after every step.

        Args:
            state: of the run, when gradients are complete.
            step: that was computed.
            seconds: that forward and backward took.
            operations: of the network's calls, without those that were repeated; None: not known.
        """
        if not self._replans:
            return
        shares = state.parallel.gather_objects(
            [(seconds, operations, self._peak(state))] if self._is_heaviest(step) else []
        )
        if not shares:
            return
        self._replans = False
        seconds, operations, peak = max(share[0] for share in shares), shares[0][1], max(share[2] for share in shares)
        copies = 2 * self.choice.host * len(step) / self.machine.link
        if operations is not None and copies < _COPIES_DECIDE * seconds:
            rate = operations * self._model.operations(self.choice) / seconds
            self.machine = replace(self.machine, flops=rate)
        if peak:
            self._model = self._model.measured(self.choice, peak=peak)
        found = self._model.choose(self.machine)
        measured = f"measured {seconds:.2f} s" + (f" and {peak / GIB:.1f} GiB" if peak else "")
        if found.fits and (found.stored, found.number) != (self.choice.stored, self.choice.number):
            self._use(found, state, why=measured)

    def recompute_more(self, state: TrainState) -> bool:
        """After an OOM let blocks store less; False: there is nothing that takes less. Every rank must call it."""
        rest = self._model.at_rest
        less = rest + _LESS * (self.choice.device - rest)
        machine = replace(self.machine, device=min(self.machine.device, less))
        found = self._model.choose(machine)
        if found.device >= self.choice.device:
            return False
        self.machine = machine
        self._use(found, state, why="out of memory")
        return True

    def _use(self, choice: Choice, state: TrainState, *, why: str) -> None:
        device = state.parallel.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # copies to the present arena may be under way
        blocks = spread(state.spec.block_modules(state.network), choice.share)
        set_activation_memory(state.network, choice.stored, blocks=blocks)
        self.choice = choice
        print_line(f"activation memory, {why}: now {choice.what}: {choice.why(self.machine)}")
        state.run_dir.event(
            "activation_memory",
            step=state.step,
            setting=choice.stored,
            blocks=choice.number,
            total=choice.total,
            why=why,
        )

    def _is_heaviest(self, step: Step[Any]) -> bool:
        latent, clips = self._heaviest
        return any(
            not item.latent_size or (tuple(item.latent_size) == latent and len(item) >= clips) for item in step.items
        )

    def _peak(self, state: TrainState) -> float:
        """Bytes that the step took at most on this rank's device, with those of an optimizer state that is yet to come."""
        peak = measured_peak(state.parallel.device)
        if not peak:
            return 0.0
        plan = self._model.plan(self.choice.stored, self.choice.number)
        is_there = bool(getattr(state.optimizer, "state", None))
        return peak - self._loaded + (0.0 if is_there else GIB * plan.parts["optimizer state"])


def activation_planner(
    checked: Preflight, spec: ModelSpec, parallel: Strategy, *, blocks_to_swap: int
) -> ActivationPlanner | None:
    """What chooses the activation memory of a run, when all but the network that is trained is loaded.

    None: the options say what blocks store; or the device is a CPU without a budget, where everything is stored. Every rank
    must call it.
    """
    config = checked.config
    if config.memory.activation_memory != "auto":
        return None
    if parallel.device.type == "cpu" and config.memory.memory_budget is None:
        print_line("activation memory: none, since a CPU has no device memory to save")
        return None
    machine, loaded = _machine(config, parallel)
    bucket, clips = checked.plan.heaviest(config)
    model = activation_model(
        with_blocks_to_swap(config, blocks_to_swap), checked.geometry, network_without_weights(checked), spec=spec,
        bucket=bucket, batch_size=clips, split=expected_split(config.parallel),
    )  # fmt: skip
    planner = ActivationPlanner(
        model, machine, heaviest=(checked.geometry.latent_shape(*bucket), clips), loaded=loaded,
        replans=config.memory.compile == "none",  # the first step compiles, and another choice would compile again
    )  # fmt: skip
    say = print_line if planner.choice.fits else lambda text: print_warnings([text])
    say(f"activation memory: {planner.choice.what}: {planner.choice.why(machine)}")
    return planner


def with_activations(config: TrainConfig, planner: ActivationPlanner | None) -> TrainConfig:
    """The configuration with what was chosen in the place of `auto`."""
    if config.memory.activation_memory != "auto":
        return config
    return with_choice(config, None if planner is None else planner.choice)


def _machine(config: TrainConfig, parallel: Strategy) -> tuple[Machine, float]:
    """The least that any process has to compute with; and the bytes that tensors take on this one's device."""
    device, budget = parallel.device, config.memory.memory_budget
    free_memory()
    free, loaded, flops, link = float("inf"), 0.0, ASSUMED_FLOPS, ASSUMED_LINK
    if device.type == "cuda":
        free, loaded = float(torch.cuda.mem_get_info(device)[0]), float(torch.cuda.memory_allocated(device))
        peak = peak_flops(device)
        flops = flops if peak is None else UTILIZATION * peak
        link = link_bandwidth(device)
    if budget is not None:
        free = min(free, GIB * budget - loaded)
    host = HOST_SHARE * room().available / local_world_size()
    least = [min(numbers) for numbers in zip(*parallel.gather_objects([(free, host, flops, link)]), strict=True)]
    return Machine(least[0] / (1 + RESERVE), *least[1:]), loaded


def link_bandwidth(device: torch.device) -> float:
    """Bytes a second of a copy between pinned host memory and a CUDA device, in the slower direction."""
    host = torch.empty(_PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    slowest = 0.0
    for target, source in ((there, host), (host, there)):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        target.copy_(source, non_blocking=True)  # the first one may set up the link
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        slowest = max(slowest, start.elapsed_time(end) / 1000)
    return _PROBE_BYTES / slowest


def measured_peak(device: torch.device) -> float:
    """Bytes that tensors have taken at most on a CUDA device in this phase; 0 on others."""
    return float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else 0.0
