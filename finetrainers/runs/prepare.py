"""Encoding before a training run: `finetrainers prepare` encodes what the run would encode, and stops."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from finetrainers.data.loading.precompute import Encoded
from finetrainers.data.loading.text_conditioning import cache_directory
from finetrainers.methods.registry import method_spec
from finetrainers.parallel.ranks import DistributedContext
from finetrainers.plan.dry_run import dry_run_report
from finetrainers.plan.init_distributed import make_strategy
from finetrainers.plan.preflight import ResolvedRun
from finetrainers.plan.ready import examine_weights
from finetrainers.plan.start_report import print_line
from finetrainers.training.guards.memory import advise_on_oom
from finetrainers.training.load_inputs import load_batch_source, load_text_conditioning
from finetrainers.training.watchdog import Watchdog
from finetrainers.utils.faults import arm_faults
from finetrainers.utils.phases import LOADING, phase
from finetrainers.utils.text import duration, file_size, plural


def prepare(checked: ResolvedRun) -> Mapping[str, Encoded]:
    """Encode captions, then clips, each with only its encoders in memory; return the counts of all ranks together.

    Raises:
        ConfigError: the loaded model refuses the sizes.
    """
    config = checked.config
    if config.run.dry_run:
        dry_run_report(checked)
        return {}
    checked = examine_weights(checked)
    started = time.monotonic()
    with contextlib.closing(make_strategy(config)) as parallel:
        arm_faults()
        print_line(parallel.describe())
        watchdog = Watchdog.of_run(config.run, rank=parallel.rank, directory=cache_directory(config))
        with watchdog.running(), phase(LOADING):
            encoded = _encode(checked, parallel, watchdog)
        for content, counts in encoded.items():
            left_out = f", {len(counts.bad)} left out (damaged)" if counts.bad else ""
            number = f"{counts.encoded} encoded, {counts.found} already cached{left_out}"
            print_line(f"{content}: {number}; {file_size(counts.size_bytes)} written")
        done = f"done in {duration(time.monotonic() - started)}"
        scratch = method_spec(config).scratch_cache(config)
        if scratch is None:
            print_line(f"{done}; cache: {cache_directory(config)}{_training_hint(checked)}")
        else:
            parallel.barrier()
            if parallel.is_main:
                shutil.rmtree(scratch)
            print_line(f"{done}; {plural(checked.plan.count, checked.plan.noun)} in {scratch.parent}")
    return encoded


@advise_on_oom("loading and encoding")
def _encode(checked: ResolvedRun, parallel: DistributedContext, watchdog: Watchdog) -> Mapping[str, Encoded]:
    watchdog.enter("loading")
    spec = checked.spec
    texts, _ = load_text_conditioning(checked, spec, parallel, watchdog)
    try:
        encoded = {checked.plan.texts: texts.encoded}
        if checked.plan.encodes_clips:
            source, _ = load_batch_source(checked, spec, parallel, watchdog, texts)
            encoded |= source.precomputed
        return encoded
    finally:
        texts.keys.cache.release()


def _training_hint(checked: ResolvedRun) -> str:
    """Return the hint about options that make the training command find the cache."""
    if not checked.plan.encodes_clips:
        return ""
    directory = checked.config.data.precompute_dir
    option = "" if directory is None else f" --precompute_dir {Path(directory)}"
    return f"; train with --precompute_conditions{option}"
