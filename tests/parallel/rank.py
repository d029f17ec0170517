"""One rank of a multi-process test: trains one job after another and writes down what it saw.

Usage: rank.py JOBS OUT, where JOBS is a folder into which tests put jobs (see `rank_jobs.py`), or a file that maps
names to jobs. These are options of a run, plus `_fail_saving_on` (a rank), `_slow_saving` (seconds), `_zero_stage` (of
DeepSpeed), `_poisoned` (how many of the first micro-batches have a loss of NaN) `_measured_on` (a rank on which a step
takes slightly more memory than there is, with `--activation_memory auto`) `_least_file_bytes` (of weight files that
ranks share), `_copied` (whether weights are loaded in turns, in the dtype that is trained), `_scores_latents` (whether
rewards score latents), and `_damaged` (a file in which a byte changes before; then no process reads a whole checkpoint
for itself).
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_replay import score_latents
from rank_jobs import served
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from finetrainers.config.errors import ConfigError
from finetrainers.config.load import load_config
from finetrainers.memory.activation_plan import Machine
from finetrainers.methods.sft import SFT
from finetrainers.models.ltx_video import LTXVideoSpec
from finetrainers.parallel import exchange
from finetrainers.parallel.strategy import Strategy
from finetrainers.plan.preflight import preflight
from finetrainers.rundir import manifest
from finetrainers.runs.run import run
from finetrainers.training import activation_memory
from finetrainers.training.checkpoints import save as saving
from finetrainers.utils.files import file_sha256

RANK = int(os.environ["RANK"])


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Hash of some tensors, in their order."""
    found = hashlib.sha256()
    for tensor in tensors:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found.update(whole.detach().float().cpu().numpy().tobytes())
    return found.hexdigest()


def poisoned(number: int) -> Callable[..., Any]:
    """`SFT.loss`, of which the first calls give NaN."""
    loss, calls = SFT.loss, count()

    def changed(method: SFT, transformer: Any, batch: Any) -> Any:
        value, metrics = loss(method, transformer, batch)
        if next(calls) < number:
            return value * math.nan, {name: one * math.nan for name, one in metrics.items()}
        return value, metrics

    return changed


def damage(file: Path) -> None:
    """Change a byte of a file, on one rank, before any looks at it."""
    if RANK == 0:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    torch.distributed.barrier()


def run_job(options: dict[str, Any], seen: list[float]) -> dict[str, Any]:
    failing_rank, slow = options.pop("_fail_saving_on", None), options.pop("_slow_saving", 0.0)
    if "_zero_stage" in options:
        os.environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = str(options.pop("_zero_stage"))
    save_weights, loss = saving.save_weights, SFT.loss
    patch = pytest.MonkeyPatch()
    if "_least_file_bytes" in options:
        patch.setattr("finetrainers.training.trained_weights.LEAST_FILE_BYTES", options.pop("_least_file_bytes"))
    if options.pop("_copied", False):
        patch.setattr("finetrainers.training.assemble.mapped_dtype", lambda *_: None)
    if options.pop("_scores_latents", False):
        score_latents(patch)
    hashed: list[str] = []
    if "_damaged" in options:
        damage(Path(options.pop("_damaged")))
        patch.setattr("finetrainers.rundir.find.SMALL_BYTES", -1)
        patch.setattr(manifest, "file_sha256", lambda path: hashed.append(path.name) or file_sha256(path))
    measured_on = options.pop("_measured_on", None)
    if measured_on is not None:
        patch.setattr("finetrainers.plan.automatic._machine", lambda *_: Machine(2.0**40, 2.0**40, 1e9, 1.0))
        patch.setattr(activation_memory, "measured_peak", lambda _: 1.001 * 2**40 if measured_on == RANK else 0.0)
    SFT.loss = poisoned(options.pop("_poisoned", 0))  # type: ignore[method-assign]

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    def dawdle(*arguments: Any, **options: Any) -> Any:
        time.sleep(slow)
        return save_weights(*arguments, **options)

    if slow:
        saving.save_weights = dawdle
    if failing_rank == RANK:
        saving.save_weights = fail
    seen.clear()
    gc.collect()
    gc.freeze()  # runs collect garbage between their loading phases; the libraries' objects never go
    try:
        state = run(preflight(load_config(**options)))
        assert state is not None
    except ConfigError as error:
        return {"error": str(error), "places": [problem.where for problem in error.problems]}
    except Exception as error:
        if failing_rank is None:
            raise
        return {"error": repr(error)}
    finally:
        saving.save_weights, SFT.loss = save_weights, loss  # type: ignore[method-assign]
        patch.undo()
    lines = state.run_dir.metrics_file.read_text().splitlines()
    return {
        "digest": digest(p for p in state.parallel.unwrap(state.transformer).parameters() if p.requires_grad),
        "inputs": list(seen),
        "hashed": hashed,
        "kind": state.parallel.describe(),
        "metrics": [json.loads(line) for line in lines],
        "results": {
            path.name: digest(load_file(path).values())
            for path in state.run_dir.root.glob("**/*.safetensors")
            if "checkpoints" not in path.parts
        },
    }


def main(jobs: Path, out: Path, do: Callable[..., Any] | None = None) -> None:
    """`do(job, train)`: what a job is; by default, `train(job)`."""
    torch.set_num_threads(1)
    # One process group serves all jobs: made a second time over the same store, it would find the first one's
    # addresses.
    Strategy.close = Strategy.barrier  # type: ignore[method-assign]
    exchange._BUCKET_BYTES = 1000  # of the tiny networks' gradients, several buckets are on their way
    seen: list[float] = []
    predict = LTXVideoSpec.predict

    def record(self: Any, transformer: Any, x: Any, *rest: Any) -> Any:
        seen.append(x.double().sum().item())
        return predict(self, transformer, x, *rest)

    def train(options: dict[str, Any]) -> dict[str, Any]:
        if find_spec("deepspeed") is not None and any(name in options for name in ("deepspeed", "_zero_stage")):
            # An extension that speeds up gloo, and takes a minute to compile.
            import_module("deepspeed.comm.torch").build_shm_op = lambda: None
        return run_job(options, seen)

    LTXVideoSpec.predict = record  # type: ignore[method-assign]
    job = train if do is None else partial(do, train=train)
    if jobs.is_dir():
        served(jobs, out, RANK, job)
    else:
        results = {name: job(options) for name, options in json.loads(jobs.read_text()).items()}
        (out / f"rank{RANK}.json").write_text(json.dumps(results))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*map(Path, sys.argv[-2:]))  # the launcher of DeepSpeed puts a flag of its own first
