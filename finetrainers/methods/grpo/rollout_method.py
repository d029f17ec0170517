"""The common part of reward finetuning methods: rollouts, each cut into optimizer steps, and the evaluation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from finetrainers.methods.base import Evaluation, MethodParts, Step, Summary
from finetrainers.methods.reference import Reference, reference_model
from finetrainers.utils.alive import begin_work
from finetrainers.utils.failures import InputError
from finetrainers.utils.phases import ROLLOUT, phase

from .prompts.selective_rollouts import SelectiveRollouts
from .prompts.source import PromptSource
from .rollout.batches import Part, Rollout, SharedInputs, parts_of_updates
from .rollout.collect import RolloutCollector, timed
from .rollout.evaluate import PromptEvaluation

R = TypeVar("R", bound=Rollout)
T = TypeVar("T")


class RolloutMethod(ABC, Generic[R, T]):
    """A method that trains on clips which the network has just sampled: rollouts `R` become micro-batches `T`.

    Attributes:
        updates: optimizer steps per rollout.
        repeats: number of times that each clip is trained in a step.
        reference: returns the reference policy; None where the loss does not use it.
    """

    repeats: int
    headline: tuple[str, ...] = ("reward/", "kl", "eval_reward/")
    summaries: Mapping[str, Summary] = {
        "rollout": "last",
        "reward_min/": "min",
        "reward_max/": "max",
        "ratio_error": "max",
    }

    def __init__(self, parts: MethodParts[PromptSource], *, uses_reference: bool) -> None:
        self.section = parts.config.grpo
        self.seed = parts.config.training.seed
        self.updates = self.section.updates_per_rollout
        self.collector = RolloutCollector(parts)
        self.sampler = self.collector.sampler
        trained = (f"reward/{name}" for name, weight in self.collector.panel.weights.items() if weight)
        self.headline = (*trained, *type(self).headline)  # before rewards that are only logged
        self.evaluation = PromptEvaluation(parts, self.collector)
        self.reference: Reference | None = reference_model(parts) if uses_reference else None

    @abstractmethod
    def rollout(self, transformer: nn.Module, rollout: int) -> R:
        """Return this rank's clips with their training data. All ranks call it together."""

    @abstractmethod
    def dummy_rollout(self) -> R:
        """Return a rollout of clips that were not sampled, as many as a micro-batch has."""

    @abstractmethod
    def micro_batch(self, transformer: nn.Module, collected: R, rollout: int, part: Part) -> T:
        """Return a micro-batch on the device."""

    def shared_inputs(self, collected: R) -> SharedInputs | None:
        """Return the inputs that clips share the first time that they are trained in a step, by default none."""
        return None

    def collect(self, transformer: nn.Module, rollout: int) -> R:
        """Return a rollout of the policy that samples, by default the one that is trained."""
        companions, parallel = self.sampler.spec.experts, self.collector.parallel
        begin_work("rollout")
        with phase(ROLLOUT), companions.on(self.sampler.device), parallel.without_exchange(transformer):
            return self.rollout(transformer, rollout)

    def steps(self, start: int, transformer: nn.Module) -> Iterator[Step[T]]:
        if not self.can_stop_after(start):
            raise ValueError(f"step {start} is within a rollout of {self.updates} steps, whose clips are lost")
        for rollout in count(start // self.updates):
            transformer.eval()  # with dropout, the replayed policy would differ from the sampled one
            # Not assigned to a variable, which would hold it in memory while the next one is made.
            yield from self.update_steps(transformer, self.collect(transformer, rollout), rollout)

    def can_stop_after(self, step: int) -> bool:
        return step % self.updates == 0  # the clips of a rollout are not saved

    def update_steps(self, transformer: nn.Module, collected: R, rollout: int) -> Iterator[Step[T]]:
        """Yield the optimizer steps of a rollout. A step without clips on any rank is empty."""
        for parts in self.parts(collected, rollout):
            yield TimedStep(
                parts,
                partial(self.micro_batch, transformer, collected, rollout),
                metrics={**collected.stats, "updates_skipped": float(not parts)},
                device=self.collector.parallel.device,
                look=self.look,
            )

    def parts(self, collected: R, rollout: int) -> list[list[Part]]:
        """Return the clips of each micro-batch of each optimizer step of a rollout."""
        return parts_of_updates(
            collected,
            data_rank=self.collector.parallel.data_rank,
            batch_size=self.collector.batch_size,
            updates=self.updates,
            repeats=self.repeats,
            seed=self.seed,
            rollout=rollout,
            shared=self.shared_inputs(collected),
        )

    @property
    def fits_last_step(self) -> bool:
        """Whether `state_dict` fits the weights of the last complete step even within the next one.

        It does: the state says which rollout it has moved on for.
        """
        return True

    def state_dict(self) -> dict[str, Any]:
        selection = self.selection
        return {} if selection is None else {"prompts": selection.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.keys() - {"prompts"}:
            message = f"this method can only restore the state of its prompts, got {sorted(state)}"
            raise InputError(message, "mismatch")
        if self.selection is not None:
            self.selection.load_state_dict(state.get("prompts", {}))

    @property
    def selection(self) -> SelectiveRollouts | None:
        """Selection that skips prompts that teach nothing, or None if no prompt is skipped."""
        return self.collector.source.selection if self.section.selective_rollouts < 1 else None

    def look(self) -> None:
        """Read metrics that the device has computed in a step, once all its micro-batches are done."""

    def dry_steps(self, transformer: nn.Module) -> Iterator[tuple[str, Step[T]]]:
        """Yield one micro-batch as a rollout gives it, of clips that were not sampled."""
        collected, count = self.dummy_rollout(), self.collector.batch_size
        part = Part(list(range(count)), [1.0 / count] * count, repeat=0, update=1, is_first=True)
        yield "a rollout's micro-batch", Step([part], partial(self.micro_batch, transformer, collected, 0))

    @property
    def evaluates(self) -> bool:
        return bool(self.evaluation.prompts)

    def evaluate(self, transformer: nn.Module) -> Evaluation:
        with self.sampler.spec.experts.on(self.sampler.device):
            return self.evaluation.run(transformer)


class TimedStep(Step[T]):
    """A step that measures `seconds/train`, from the first micro-batch until all are done, and then calls `look`.

    Training before that, after a batch of clips is scored, is part of the metrics passed in.
    """

    def __init__(
        self,
        parts: Sequence[Any],
        make: Callable[[Any], T],
        *,
        metrics: Mapping[str, float],
        device: torch.device,
        look: Callable[[], None],
    ) -> None:
        super().__init__(parts, make, metrics={"seconds/train": 0.0, **metrics})
        self._device = device
        self._look = look

    def __iter__(self) -> Iterator[T]:
        with timed(self.metrics, "seconds/train", self._device):
            yield from super().__iter__()
        self._look()  # the device has finished, so that reading does not wait
