"""Measured batch sizes: the model is loaded once, and real training steps are taken in each bucket."""

from __future__ import annotations

import contextlib
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from finetrainers.config.root import TrainConfig
from finetrainers.data.buckets.clip import cut_to
from finetrainers.data.inspect.plan import DatasetPlan
from finetrainers.data.loading.training_data import longest_captions
from finetrainers.memory.estimate import GIB
from finetrainers.memory.recorder import MemoryRecorder
from finetrainers.plan.init_distributed import make_strategy
from finetrainers.plan.preflight import ResolvedRun
from finetrainers.training.assemble import assemble
from finetrainers.training.trainer import Trainer
from finetrainers.training.watchdog import Watchdog
from finetrainers.utils.failures import is_out_of_memory
from finetrainers.utils.faults import arm_faults
from finetrainers.utils.host_memory import return_freed_memory
from finetrainers.utils.phases import LOADING, TRAINING_STEP, phase
from finetrainers.utils.process_state import free_memory, restored

from .request import Bucket, BucketSearch
from .sizes import Trial, search

logger = logging.getLogger(__name__)

#: Micro-batches of a measured step: with accumulation, gradients exist already when the second one is computed.
_ACCUMULATED = 2


@contextlib.contextmanager
def load_timer(checked: ResolvedRun) -> Iterator[StepTimer]:
    """Load the model, with one clip of each bucket encoded, in a folder that is deleted after the block.

    Args:
        checked: the run, including its weights; see `ready.examine_weights`.

    Raises:
        OutOfMemory: it does not fit before the first step.
    """
    with tempfile.TemporaryDirectory(prefix="finetrainers-search-batch-") as folder, restored():
        config = _make_config(checked.config, Path(folder))
        plan = _select_clips(checked.plan)  # type: ignore[arg-type]
        checked = replace(checked, config=config, plan=plan, prompts=[], scored=[])
        with contextlib.closing(make_strategy(config)) as parallel:
            watchdog = Watchdog.of_run(config.run, rank=parallel.rank)
            memory = MemoryRecorder(parallel.device)
            with watchdog.running(), memory.running():
                arm_faults()
                with phase(LOADING):
                    watchdog.enter("loading")
                    trainer = assemble(checked, parallel, watchdog, memory)
                trainer.state.transformer.train()
                yield StepTimer(trainer)


def _select_clips(plan: DatasetPlan) -> DatasetPlan:
    """Return a plan of each bucket's clip with the longest caption, and of a clip with a mask, if any has one.

    A clip with a mask gives all batches a mask.
    """
    clips = [clips[0] for clips in longest_captions(plan.clips).values()]
    if not any(clip.mask for clip in clips):
        clips += [cut_to(clip, clip.bucket) for clip in plan.clips if clip.mask is not None][:1]
    return plan.of_clips(clips)


def _make_config(config: TrainConfig, folder: Path) -> TrainConfig:
    """Return the run's configuration for measuring, with everything that takes memory in a step.

    The run samples, saves and reports nothing, and keeps its weights.
    """
    tables: dict[str, dict[str, Any]] = {
        "run": {"output_dir": folder, "report_to": [], "train_log": False, "push_to_hub": False, "export_formats": []},
        "training": {
            "train_steps": 1_000_000, "checkpointing_steps": 0, "on_nonfinite": "raise", "spike_sigma": 0.0,
        },
        "optimizer": {"lr": 0.0, "scale_lr": False},
        "validation": {"validation_prompts": None, "eval_prompts": None, "eval_reward": []},
        "memory": {"oom_retry": "off", "dry_batches": "off"},
    }  # fmt: skip
    updated = {name: getattr(config, name).model_copy(update=options) for name, options in tables.items()}
    return config.model_copy(update=updated)


class StepTimer:
    """Loaded model that takes training steps of any batch size.

    Attributes:
        trainer: takes the steps.
        on_gpu: whether the measured memory is that of a GPU; otherwise it is the resident memory of this process.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Make a bench.

        Args:
            trainer: with everything loaded.
        """
        self.trainer = trainer
        self.on_gpu = trainer.state.parallel.device.type == "cuda"
        accumulation = trainer.state.config.training.gradient_accumulation_steps
        self._micro_batches = min(_ACCUMULATED, accumulation)

    @property
    def device(self) -> torch.device:
        """Device that computes the steps."""
        return self.trainer.state.parallel.device

    def limit(self, size: float, *, margin: float) -> float:
        """Return GiB that PyTorch may reserve, or this process may use on a CPU, so that a share stays free.

        GPU memory of other processes and of CUDA's context is not included.

        Args:
            size: GiB to fit.
            margin: the share.
        """
        if not self.on_gpu:
            return (1 - margin) * size
        free, total = torch.cuda.mem_get_info(self.device)
        others = total - free - torch.cuda.memory_reserved(self.device)
        return ((1 - margin) * min(total, GIB * size) - others) / GIB

    def measure(self, bucket: Bucket, clips: int, *, steps: int, limit: float) -> Trial:
        """Measure a batch size: take a step that is not timed, then return the median of the next ones.

        Args:
            bucket: frames, height and width.
            clips: of a micro-batch.
            steps: to time.
            limit: GiB that may be used.
        """
        spec, memory, watchdog = self.trainer.state.spec, self.trainer.state.memory, self.trainer.state.watchdog
        watchdog.enter("step")
        vae_sizes = set(spec.vae_one_by_one), set(spec.vae_too_large)
        free_memory()
        return_freed_memory()
        memory.take_record()  # earlier peaks are of other sizes
        seconds = self._try_timing(bucket, clips, steps)
        peaks = memory.take_record()
        is_reduced = (spec.vae_one_by_one, spec.vae_too_large) != vae_sizes
        spec.vae_one_by_one, spec.vae_too_large = vae_sizes
        if seconds is None:
            self._recover()
            return Trial(clips, "out of memory")
        kind = "reserved" if self.on_gpu else "host"
        peak = max(gib for name, gib in peaks.items() if name.endswith(f"/{kind}_gib"))
        if is_reduced:
            return Trial(clips, "the VAE ran out of memory", seconds, peak)
        return Trial(clips, None if peak <= limit else f"over {limit:.2f} GiB", seconds, peak)

    def _try_timing(self, bucket: Bucket, clips: int, steps: int) -> float | None:
        """Return seconds per micro-batch, or None if it ran out of memory.

        The error, which holds the tensors of the step, ends here.
        """
        try:
            return self._time_steps(bucket, clips, steps)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            logger.debug("out of memory with %d clips of %s: %s", clips, bucket, error)
        return None

    def _time_steps(self, bucket: Bucket, clips: int, steps: int) -> float:
        state, times = self.trainer.state, []
        num_batches = self._micro_batches
        batches = state.method.benchmark_steps(bucket, clips, micro_batches=num_batches)  # type: ignore[attr-defined]
        for _ in range(1 + steps):
            started = time.perf_counter()
            with phase(TRAINING_STEP):
                self.trainer.train_step(next(batches))
            if self.on_gpu:
                torch.cuda.synchronize(self.device)
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:]) / num_batches

    def _recover(self) -> None:
        """Drop the remains of a step that ran out of memory."""
        parallel = self.trainer.state.parallel
        parallel.drop_gradients()
        if parallel.scaler is not None:
            with contextlib.suppress(AssertionError):  # it has seen no gradient of this step
                parallel.scaler.update()
        free_memory()


def measure_sizes(
    bench: StepTimer,
    bucket_search: BucketSearch,
    *,
    steps: int,
    limit: float,
    say: Callable[[BucketSearch, Trial], Any],
) -> None:
    """Set the trials of a bucket.

    Args:
        bench: a loaded model.
        bucket_search: the bucket, with its estimate.
        steps: to time for each size.
        limit: GiB that may be used.
        say: called with each trial.
    """

    def measure(clips: int) -> Trial:
        trial = bench.measure(bucket_search.bucket, clips, steps=steps, limit=limit)
        say(bucket_search, trial)
        return trial

    start = max(1, bucket_search.estimated)
    bucket_search.trials = search(measure, start=start, max_clips=bucket_search.most, limit=limit)
