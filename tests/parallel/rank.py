"""One rank of a multi-process test: trains one job after another and writes down what it saw.

Usage: rank.py jobs.json OUT, where jobs.json maps names to options of a run, plus `_fail_saving_on` (a rank).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from finetrainers.config.load import load_config
from finetrainers.engine import checkpoint
from finetrainers.engine.run import train
from finetrainers.models.ltx_video import LTXVideoSpec
from finetrainers.parallel.engine import Parallel

RANK = int(os.environ["RANK"])


def digest(trainer: Any) -> str:
    """Hash of every trained weight as this rank holds it."""
    found = hashlib.sha256()
    for parameter in trainer.parallel.unwrap(trainer.transformer).parameters():
        if parameter.requires_grad:
            found.update(parameter.detach().float().numpy().tobytes())
    return found.hexdigest()


def run_job(options: dict[str, Any], seen: list[float]) -> dict[str, Any]:
    failing_rank = options.pop("_fail_saving_on", None)
    save_weights = checkpoint.save_weights

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    if failing_rank == RANK:
        checkpoint.save_weights = fail
    seen.clear()
    try:
        trainer = train(load_config(**options))
    except Exception as error:
        if failing_rank is None:
            raise
        return {"error": repr(error)}
    finally:
        checkpoint.save_weights = save_weights
    return {"digest": digest(trainer), "inputs": list(seen), "kind": trainer.parallel.describe()}


def main(jobs: Path, out: Path) -> None:
    torch.set_num_threads(1)
    # One process group serves all jobs: made a second time over the same store, it would find the first one's addresses.
    Parallel.close = Parallel.barrier  # type: ignore[method-assign]
    seen: list[float] = []
    predict = LTXVideoSpec.predict

    def record(self: Any, transformer: Any, x: Any, *rest: Any) -> Any:
        seen.append(x.double().sum().item())
        return predict(self, transformer, x, *rest)

    LTXVideoSpec.predict = record  # type: ignore[method-assign]
    results = {name: run_job(options, seen) for name, options in json.loads(jobs.read_text()).items()}
    torch.distributed.destroy_process_group()
    (out / f"rank{RANK}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
