"""One rank of a run that is disturbed on one rank alone; writes down how it ended.

Usage: stopping_rank.py JOBS OUT, where JOBS is a folder into which tests put jobs (see `rank_jobs.py`), or a file that
maps names to jobs. These are options of a run, plus `_disturb`: what happens to rank 1 in its second step, or in all of
them.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rank_jobs import served

from finetrainers.config.errors import ConfigError
from finetrainers.config.load import load_config
from finetrainers.methods.sft import SFT
from finetrainers.plan.preflight import preflight
from finetrainers.runs.run import run
from finetrainers.training.guards.nonfinite import NonFiniteError
from finetrainers.utils.process_state import process_groups

RANK = int(os.environ["RANK"])


def run_job(options: dict[str, Any]) -> dict[str, Any]:
    disturbance = options.pop("_disturb", None)
    loss, calls = SFT.loss, iter(range(1, 1000))

    def disturbed(method: SFT, transformer: Any, batch: Any) -> Any:
        value, metrics = loss(method, transformer, batch)
        call = next(calls)
        if disturbance == "memory" and RANK == 1 and call >= 2 and len(batch) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if disturbance == "slow" and RANK == 1:
            time.sleep(0.3)
        asked = Path(options["output_dir"]) / "control" / str(disturbance)
        if call == 2 and RANK == 0 and disturbance in ("stop", "save"):
            while not asked.exists():  # rank 0 reads it before the ranks agree on this step
                time.sleep(0.01)
        if call != 2 or RANK != 1:
            return value, metrics
        if disturbance == "nan":
            return value * math.nan, {name: one * math.nan for name, one in metrics.items()}
        if disturbance in ("stop", "save"):
            asked.touch()
        elif disturbance == "SIGUSR1":
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.2)
        return value, metrics

    SFT.loss = disturbed  # type: ignore[method-assign]
    gc.collect()
    gc.freeze()  # runs collect garbage between their loading phases; the libraries' objects never go
    try:
        state = run(preflight(load_config(**options)), handle_signals=True)
    except (NonFiniteError, ConfigError) as error:
        return {"error": str(error)}
    finally:
        SFT.loss = loss  # type: ignore[method-assign]
    assert state is not None
    digest = hashlib.sha256()
    for parameter in state.parallel.unwrap(state.transformer).parameters():
        if parameter.requires_grad:
            digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return {
        "step": state.step,
        "stopped_by": state.stopped_by,
        "skipped": state.guards.nonfinite.count,
        "digest": digest.hexdigest(),
        "fits": state.guards.memory.state_dict(),
        "data_ahead": state.data_ahead,
    }


def in_the_group_of_a_host(options: dict[str, Any]) -> dict[str, Any]:
    found = run_job(options)
    assert process_groups() == [torch.distributed.group.WORLD]
    return found


def main(jobs: Path, out: Path) -> None:
    torch.set_num_threads(1)
    # The group of a host program serves all jobs, and stays the only one.
    torch.distributed.init_process_group("gloo")
    if jobs.is_dir():
        served(jobs, out, RANK, in_the_group_of_a_host)
    else:
        results = {name: in_the_group_of_a_host(job) for name, job in json.loads(jobs.read_text()).items()}
        (out / f"rank{RANK}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
