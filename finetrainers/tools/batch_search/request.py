"""The buckets of a run that are searched, and the reasons why some runs cannot be. Imports no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from finetrainers.config.errors import Problem
from finetrainers.config.root import TrainConfig
from finetrainers.methods.registry import is_method, load_method, method_class_problem, method_spec
from finetrainers.methods.spec import TrainingSet
from finetrainers.parallel.sharding import with_launcher
from finetrainers.plan.preflight import ResolvedRun
from finetrainers.utils.launch import launched_processes

from .sizes import Trial, best

Bucket = tuple[int, int, int]

#: Options that choose others by the batch size, each with the alternative.
_CHOOSING = {
    "blocks_to_swap": "set a number of blocks",
    "activation_memory": "set none, checkpoint, keep_attention or offload",
}


@dataclass
class BucketSearch:
    """Bucket with its results.

    Attributes:
        bucket: frames, height and width.
        clips: of an epoch, or None if the data is not on this machine.
        most: the largest batch size to try.
        estimated: the largest batch size that fits by the estimate; 0 if none does.
        needed: GiB of `estimated` clips by the estimate, or of one clip if none fits.
        phase: the one that needs them.
        trials: measured sizes, in the order of measurement.
    """

    bucket: Bucket
    clips: int | None
    most: int
    estimated: int = 0
    needed: float = 0.0
    phase: str = ""
    trials: Sequence[Trial] = field(default_factory=list)

    @property
    def chosen(self) -> int:
        """Batch size to use: the fastest measured one that fits, else the largest estimated one; 0 if nothing fits."""
        if not self.trials:
            return self.estimated
        fastest = best(self.trials)
        return 0 if fastest is None else fastest.clips

    @property
    def largest(self) -> int | None:
        """Largest measured batch size that fits, or None if nothing was measured."""
        return max((trial.clips for trial in self.trials if trial.fits), default=0) if self.trials else None


def searched_config(config: TrainConfig) -> TrainConfig:
    """Return the run's configuration for the search, without batch sizes and without an earlier run to resume."""
    loading = {"batch_size": 1, "bucket_batch_sizes": [], "epoch_end": "keep"}
    training: dict[str, object] = {"resume_from_checkpoint": None, "reset": []}
    sections = {
        "dataloader": config.dataloader.model_copy(update=loading),
        "training": config.training.model_copy(update=training),
        "memory": config.memory.model_copy(update={"fit_gpu": False}),  # sizes are found for the options as they are
    }
    return config.model_copy(update=sections)


def search_problems(config: TrainConfig) -> list[Problem]:
    """Return the reasons why batch sizes of a run cannot be searched."""
    problems = []
    if is_method(config.training.method) and method_spec(config).samples:
        message = (
            "has no buckets: clips are sampled at one size. `finetrainers estimate --batch_size N` estimates the "
            "memory for N clips"
        )
        problems.append(Problem(f"--method {config.training.method}", message, "unsupported"))
    for name, alternative in _CHOOSING.items():
        if config.get(name) == "auto":
            message = f"is chosen from the batch size, which this command searches for; {alternative}"
            problems.append(Problem(f"--{name} auto", message, "conflict"))
    if config.memory.memory_budget is not None:
        message = (
            "chooses other options from the batch size, which this command searches for; remove it, and set the "
            "memory with --gpu"
        )
        problems.append(Problem("--memory_budget", message, "conflict"))
    if config.run.dry_run:
        message = "requires `finetrainers train`; --estimate_only loads no weights"
        problems.append(Problem("--dry_run", message, "unsupported"))
    return problems


def buckets_of(plan: TrainingSet, *, most: int) -> list[BucketSearch]:
    """Return the buckets that a run uses, those with most pixels first.

    Sizes above a bucket's number of clips are not tried, since no batch would have as many.

    Args:
        plan: of the run.
        most: the largest batch size to try.
    """
    counts: Counter[Bucket] | None = None
    if (clips := getattr(plan, "clips", None)) is not None:
        counts = Counter()
        for clip in clips:
            for bucket in clip.buckets:
                counts[bucket] += clip.repeats
    buckets = plan.buckets if counts is None else counts
    searches = []
    for bucket in sorted(set(buckets), key=lambda size: (math.prod(size), size), reverse=True):
        count = None if counts is None else max(1, round(counts[bucket]))
        searches.append(BucketSearch(bucket, count, most if count is None else min(most, count)))
    return searches


def why_not_measured(config: TrainConfig, *, no_data: bool) -> str | None:
    """Return the reason why a run cannot be measured, as the beginning of a sentence, or None if it can.

    Args:
        config: the run.
        no_data: whether its data is not on this machine.

    Raises:
        ConfigError: its options contradict the launcher's file.
    """
    options, processes = with_launcher(config.parallel), launched_processes()
    if no_data:
        return "the data is not on this machine"
    if processes > 1:
        return f"this is planned for {processes} processes, and only one can be measured"
    if options.fsdp is not None or options.deepspeed:
        return "a strategy that shards weights cannot continue after an OOM"
    method = config.training.method
    if is_method(method) and method_class_problem(config) is None:
        return None if hasattr(load_method(method), "benchmark_steps") else f"{method} has no benchmark_steps"
    return None  # the method's problem is reported with the others


def without_clips(config: TrainConfig, searches: Sequence[BucketSearch]) -> list[Bucket]:
    """Return configured buckets without clips, which need no search."""
    searched = {search.bucket for search in searches}
    return [bucket for bucket in dict.fromkeys(method_spec(config).sizes(config)) if bucket not in searched]


def count_tokens(checked: ResolvedRun, bucket: Bucket) -> int:
    """Return the transformer's tokens for a sample of a bucket, without those of its text; a pair is two clips."""
    clips = method_spec(checked.config).memory(checked.config, (1, *bucket), batch_size=1, trained=0.0, reference=0.0)
    return clips.batch_size * checked.geometry.num_tokens(*bucket)
