"""`--activation_memory auto` of a run that trains: chosen again from the measurements of a step, and after an OOM."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from finetrainers.config.root import MEMORY
from finetrainers.memory.activation_plan import ActivationPolicy, select_evenly
from finetrainers.memory.automatic import AutoSettings
from finetrainers.memory.checkpointing import set_activation_memory
from finetrainers.memory.estimate import GIB
from finetrainers.methods.base import Step
from finetrainers.plan.preflight import ResolvedRun
from finetrainers.plan.start_report import print_line

if TYPE_CHECKING:
    from .state import TrainState

#: After an OOM, the memory that a step takes beyond that in use between steps is reduced to this share of the plan.
_RETRY_SHARE = 0.75
#: A step whose copies take at least this share of its time is copy-bound: it does not show the compute rate.
_COPY_BOUND_SHARE = 0.9


class ActivationPlanner:
    """Chooser of what blocks store for backward, the same on all ranks; it changes the choice between steps.

    Attributes:
        choice: the choice in use.
        machine: memory and speed that the choice was made for; its `flops` are measured once a step has been.
    """

    def __init__(self, checked: ResolvedRun, automatic: AutoSettings, device: torch.device) -> None:
        """Args:
        checked: the run.
        automatic: its choices, those of activation memory among them.
        device: without the network that is trained, which is loaded later.
        """
        assert automatic.machine is not None
        assert automatic.activations is not None
        self.machine, self.choice, self._model = automatic.machine, automatic.activations, automatic.model
        bucket, self._most_clips = checked.plan.heaviest(checked.config)
        self._largest_latent = checked.geometry.latent_shape(*bucket)
        self._loaded_bytes = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        self._awaits_measurement = not automatic.repeats
        self._skips_first = checked.config.memory.compile != "none"  # the first step with the largest clips compiles

    def replan(self, state: TrainState, step: Step[Any], *, seconds: float, operations: float | None) -> None:
        """Plan again after the first measured step with the largest clips; every rank must call it after every step.

        Args:
            state: of the run, when gradients are complete.
            step: that was computed.
            seconds: that forward and backward took.
            operations: of the network's calls, without those that were repeated, or None if unknown.
        """
        if not self._awaits_measurement:
            return
        measures = self._has_largest_clips(step)
        if measures and self._skips_first:
            self._skips_first = measures = False
        shares = state.parallel.gather_objects([(seconds, operations, self._peak(state))] if measures else [])
        if not shares:
            return
        self._awaits_measurement = False
        seconds, operations, peak = max(share[0] for share in shares), shares[0][1], max(share[2] for share in shares)
        copies = 2 * self.choice.host * len(step) / self.machine.link
        if operations is not None and copies < _COPY_BOUND_SHARE * seconds:
            rate = operations * self._model.operations(self.choice) / seconds
            self.machine = replace(self.machine, flops=rate)
        if peak:
            self._model = self._model.with_measured_peak(self.choice, peak=peak)
        choice = self._model.choose(self.machine)
        measured = f"measured {seconds:.2f} s" + (f" and {peak / GIB:.1f} GiB" if peak else "")
        if choice.fits and (choice.stored, choice.number) != (self.choice.stored, self.choice.number):
            self._apply(choice, state, reason=measured)

    def recompute_more(self, state: TrainState) -> bool:
        """Let blocks store less after an OOM; return False if no setting takes less. Every rank must call it."""
        rest = self._model.persistent_bytes
        less = rest + _RETRY_SHARE * (self.choice.device - rest)
        machine = replace(self.machine, device=min(self.machine.device, less))
        choice = self._model.choose(machine)
        if choice.device >= self.choice.device:
            return False
        self.machine = machine
        self._apply(choice, state, reason="out of memory")
        return True

    def _apply(self, choice: ActivationPolicy, state: TrainState, *, reason: str) -> None:
        device = state.parallel.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # copies to the present arena may be under way
        blocks = select_evenly(state.spec.block_modules(state.network), choice.share)
        set_activation_memory(state.network, choice.stored, blocks=blocks)
        self.choice = choice
        if state.config.chosen.get("activation_memory") == MEMORY:  # a resumed run begins with it
            state.config = state.config.with_chosen(choice.options, MEMORY)
        print_line(f"activation memory, {reason}: now {choice.what}: {choice.why(self.machine)}")
        state.run_dir.event(
            "activation_memory",
            step=state.step,
            setting=choice.stored,
            blocks=choice.number,
            total=choice.total,
            why=reason,
        )

    def _has_largest_clips(self, step: Step[Any]) -> bool:
        return any(
            not item.latent_size or (tuple(item.latent_size) == self._largest_latent and len(item) >= self._most_clips)
            for item in step.items
        )

    def _peak(self, state: TrainState) -> float:
        """Return the most bytes that the step took on this rank's device, and the optimizer state if it is yet to come.

        Other networks count as they were planned.
        """
        peak = measured_peak(state.parallel.device)
        if not peak:
            return 0.0
        plan = self._model.plan(self.choice.stored, self.choice.number)
        has_state = bool(getattr(state.optimizer, "state", None))
        others = self._model.others - self._loaded_bytes
        return peak + others + (0.0 if has_state else GIB * plan.parts["optimizer state"])


def activation_planner(
    checked: ResolvedRun, automatic: AutoSettings | None, device: torch.device
) -> ActivationPlanner | None:
    """Return the planner that changes a run's activation memory between steps, or None if the options decide it."""
    if automatic is None or automatic.activations is None:
        return None
    return ActivationPlanner(checked, automatic, device)


def measured_peak(device: torch.device) -> float:
    """Return the most bytes that tensors have taken on a CUDA device in this phase; 0 on others."""
    return float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else 0.0
