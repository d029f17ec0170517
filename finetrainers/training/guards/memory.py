"""On OOM, retry the step with smaller micro-batches; the accumulated gradient is unchanged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from finetrainers.methods.base import Step
from finetrainers.parallel.strategy import Strategy
from finetrainers.rundir.run_dir import RunDirectory
from finetrainers.utils.failures import ExpectedError, is_out_of_memory
from finetrainers.utils.process_state import free_memory

logger = logging.getLogger(__name__)

#: Options that make a step need less memory, with the greatest effect first.
ADVICE = (
    "What needs less: --gradient_checkpointing; smaller or shorter --video_resolution_buckets (reward finetuning: "
    "--rollout_size); --training_type lora; --quantize_frozen int8; an 8-bit or offloaded optimizer; "
    "--precompute_conditions; where clips are encoded or decoded, --enable_tiling and --enable_slicing. --dry_run "
    "prints an estimate of what takes how much"
)


class OutOfMemory(ExpectedError, RuntimeError):
    """OOM that cannot be retried; the message names the phase, and options that need less memory."""


@contextmanager
def advise_on_oom(doing: str, advice: str = ADVICE) -> Iterator[None]:
    """Turn an OOM within the block into an `OutOfMemory` that names `doing` and the options that need less memory.

    Raises:
        OutOfMemory: memory ran out.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, OutOfMemory) or not is_out_of_memory(error):
            raise
        first = str(error).split("\n", 1)[0]
        raise OutOfMemory(f"out of memory while {doing} ({first or type(error).__name__}). {advice}") from error


@dataclass
class Attempt:
    """The micro-batches of a step, with an OOM caught in the `with` block around their forward and backward passes.

    Attributes:
        step: the micro-batches.
        refusal: why an OOM ends the run, as the end of a sentence, or None if it is caught.
        error: short message of the allocator, or None if all micro-batches fit.
    """

    step: Step[Any]
    refusal: str | None = None
    error: str | None = None
    _index = 0

    @property
    def item(self) -> Any:
        """The micro-batch that was reached last, or the item that it is made of."""
        return self.step.items[self._index]

    def __len__(self) -> int:
        return len(self.step)

    def __iter__(self) -> Iterator[Any]:
        micro_batches = iter(self.step)
        for index in range(len(self.step)):
            self._index = index
            yield next(micro_batches)  # kept in no variable: it would stay in memory while the next one is made
        # `iter(step)` may have something to do at its end.
        next(micro_batches, None)

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if error is None or not is_out_of_memory(error):
            return False
        if self.refusal is not None:
            raise OutOfMemory(f"out of memory, and {self.refusal}. {ADVICE}") from error
        if isinstance(error, dist.DistError):
            return False  # a communicator that has failed cannot be used again
        # Not the error itself: its traceback holds the tensors of the step.
        self.error = str(error).split("\n", 1)[0][:200]
        return True


@dataclass
class MemoryGuard:
    """Guard that retries a step in smaller micro-batches on OOM, and remembers how many samples of a latent size fit.

    All ranks decide together, after each has gone through its micro-batches or run out of memory, and has sent its part
    of the gradient exchange, which goes on meanwhile: all gradients are dropped, including exchanged ones, the
    micro-batch that did not fit is halved, and all ranks repeat the step. Shares of the loss belong to samples, so that
    the accumulated gradient is unchanged. All ranks have equally many micro-batches: one that has fewer samples than
    another has pieces fills up with a sample of share 0.

    Attributes:
        parallel: the processes of the run.
        run_dir: gets an event for each retry.
        refusal: why no step is retried, as the end of a sentence, or None if steps are.
        recompute_more: lets blocks store less on all ranks before micro-batches are halved; returns whether they do,
            see `ActivationPlanner`.
        agreed_flags: maximum over ranks of the `flags` sent with the last attempt, or None if nothing was sent.
        fitting_samples: maximum samples of a micro-batch by latent size, for the sizes that have run out of memory.
    """

    parallel: Strategy
    run_dir: RunDirectory
    refusal: str | None
    recompute_more: Callable[[], bool] = lambda: False
    agreed_flags: list[int] | None = None
    fitting_samples: dict[tuple[int, ...], int] = field(default_factory=dict)

    def attempts(self, step: Step[Any], *, flags: Callable[[], Sequence[int]] = tuple) -> Iterator[Attempt]:
        """Yield attempts at a step, each to be used once in a `with` block, until one fits on all ranks.

        Args:
            step: the micro-batches.
            flags: returns integers to exchange together with whether an attempt fits; see `agreed_flags`.

        Raises:
            OutOfMemory: a micro-batch of one sample does not fit on some rank; on every rank.
        """
        self.agreed_flags = None
        while True:
            if self.refusal is not None:
                yield Attempt(step, refusal=self.refusal)
                return
            attempt = Attempt(self._fitting(step))
            yield attempt
            # 0: fits; 1: a half may fit; 2: there is nothing smaller.
            local = 0 if attempt.error is None else 1 if len(attempt.item) > 1 else 2
            self.parallel.complete_exchange()
            self.parallel.finish_on_device()
            worst, *self.agreed_flags = self.parallel.max_on_host([local, *flags()])
            if worst == 0:
                return
            self.parallel.drop_gradients()
            free_memory()
            if self.recompute_more():
                continue
            if worst == 2:
                process = "this" if local == 2 else "another"
                reason = "" if attempt.error is None else f" ({attempt.error})"
                raise OutOfMemory(
                    f"{process} process ran out of memory on a micro-batch of one sample{reason}. {ADVICE}"
                )
            self._halve(attempt)

    def _fitting(self, step: Step[Any]) -> Step[Any]:
        """Return the step in as many micro-batches as the rank with the largest need requires."""
        if not self.fitting_samples:
            return step
        needed = [-(-len(item) // self.fitting_samples.get(item.latent_size, len(item))) for item in step.items]
        return step.split(self.parallel.max_on_host(needed))

    def _halve(self, attempt: Attempt) -> None:
        """Remember on all ranks the sizes that did not fit on any rank."""
        item, error = attempt.item, attempt.error
        failures = [] if error is None else [(item.latent_size, len(item), f"rank {self.parallel.rank}: {error}")]
        for failed, samples, reason in self.parallel.gather_objects(failures):
            fits = -(-samples // 2)
            self.fitting_samples[failed] = min(fits, self.fitting_samples.get(failed, fits))
            name = "x".join(map(str, failed)) or "any"
            self.run_dir.event(
                "out_of_memory", latent_size=name, samples=samples, now=self.fitting_samples[failed], error=reason
            )
            logger.warning(
                "out of memory with %d samples (latent size: %s); from now on at most %d at once, in more "
                "micro-batches (%s)",
                samples,
                name,
                self.fitting_samples[failed],
                reason,
            )

    def state_dict(self) -> list[list[Any]]:
        """Return the sizes that fit, as JSON values."""
        return [[list(latent_size), size] for latent_size, size in sorted(self.fitting_samples.items())]

    def load_state_dict(self, state: list[list[Any]]) -> None:
        """Restore what `state_dict` returned."""
        self.fitting_samples = {tuple(latent_size): size for latent_size, size in state}


def peak_gib(device: torch.device) -> float | None:
    """Return the most memory that was taken on a CUDA device since the last call, in GiB, or None on other devices."""
    if device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated(device) / 2**30
    torch.cuda.reset_peak_memory_stats(device)
    return peak
