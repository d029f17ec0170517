"""Two machines, as two network namespaces: the recipe of examples/cluster starts, loses and restarts a run."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import machines
import pytest
from machines import Machines, two_machines, wait_for
from real_process import Python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

#: How long a process may take that has nothing to wait for; a loaded machine imports slowly.
TIMEOUT_S = 120
RUN = {
    "training_type": "full-finetune",
    "mixed_precision": "no",
    "fsdp": "full",
    "train_steps": 3,
    "checkpointing_steps": 1,
}
#: Enters the machine that is the first argument, and waits there for a process that has work, which is rank 1.
WAITING = """
import ctypes, os, sys, time
from datetime import timedelta
from pathlib import Path

with open(f"/run/netns/{sys.argv[1]}") as machine:
    assert ctypes.CDLL(None, use_errno=True).setns(machine.fileno(), 0) == 0, os.strerror(ctypes.get_errno())

from finetrainers.config.load import load_config
from finetrainers.parallel.ddp import DDP
from finetrainers.utils.failures import user_message

config = load_config(
    model_name="ltx_video", pretrained_model_name_or_path="x", mixed_precision="no", nccl_timeout=4, idle_timeout=600
)
parallel = DDP(config, config.parallel)
Path(sys.argv[2], f"joined-{parallel.rank}").touch()
if parallel.rank == 1:
    time.sleep(600)
begun = time.monotonic()
try:
    parallel.barrier()
except RuntimeError as error:
    print(time.monotonic() - begun, user_message(error))
    sys.stdout.flush()
    os._exit(1)  # as a command would, after it has said so
"""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Machines]:
    """Two machines that share the disk."""
    reason = machines.why_none()
    if reason is not None:
        pytest.skip(reason)
    with two_machines(tmp_path) as found:
        yield found


def losses(directory: Path) -> list[tuple[int, float, float]]:
    records = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [(record["step"], record["loss"], record["grad_norm"]) for record in records if "loss" in record]


def results(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (directory / "transformer").glob("*.safetensors")}


def kill_in_step(pair: Machines, killed: list[Any]) -> None:
    """Kill the second machine, whose process hangs; the first one ends soon."""
    deadline = time.monotonic() + TIMEOUT_S
    while "hang at step" not in pair.said("killed", 1):
        codes = [process.poll() for process in killed]
        assert codes == [None, None], pair.said("killed", 0) + pair.said("killed", 1)
        assert time.monotonic() < deadline, pair.said("killed", 0)
        time.sleep(0.05)
    pair.kill(1)
    code, _ = wait_for(killed[0], TIMEOUT_S)  # and not --nccl_timeout, which is 600 s
    assert code == 1
    assert re.search("error: another process .* ended: .*output", pair.said("killed", 0))
    assert "[rank0]: Traceback" not in pair.said("killed", 0)


@pytest.mark.rotating
def test_a_machine_is_killed_and_the_same_command_continues(
    pair: Machines, python: Python, options: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Two machines compute what two processes of one do; after a kill the run resumes from the parts of both."""
    config = tmp_path / "run.toml"
    values = options(tmp_path / "absent", **RUN)
    del values["output_dir"]
    config.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()))

    def start(log: str, **environment: str) -> list[Any]:
        flags = ("--config", str(config))
        place = {"OUTPUT_DIR": str(tmp_path / "run"), "TORCHDYNAMO_DISABLE": "1", **stand_ins}
        return [pair.node(machine, *flags, log=log, **place, **environment) for machine in range(2)]

    with python.stand_ins("accelerate", "-m", "accelerate.commands.accelerate_cli") as stand_ins:
        killed = start("killed", FINETRAINERS_FAULT="hang@step:3:rank=1")
        kill_in_step(pair, killed)
        assert [step for step, *_ in losses(tmp_path / "run")] == [1, 2]

        for process in start("resumed"):
            assert wait_for(process, TIMEOUT_S)[0] == 0, pair.said("resumed", 0) + pair.said("resumed", 1)
        assert "step-2" in pair.said("resumed", 0)

    flags = ("--config", str(config), "--output_dir", str(tmp_path / "one"))
    for process in python.ranks(2, "train.py", *flags, TORCHDYNAMO_DISABLE="1"):
        assert process.wait(TIMEOUT_S) == 0, process.stderr
    assert losses(tmp_path / "run") == losses(tmp_path / "one")
    assert results(tmp_path / "run") == results(tmp_path / "one") != {}


@pytest.mark.rotating
def test_a_machine_that_vanishes_ends_the_wait_of_the_others(pair: Machines, python: Python, tmp_path: Path) -> None:
    """It closes no connection, as without power or network; idle_timeout is for machines that answer."""
    company = {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": machines.ADDRESSES[0],
        "MASTER_PORT": machines.PORT, "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": machines.INTERFACE,
    }  # fmt: skip
    waits, works = (
        python("-c", WAITING, pair.names[rank], str(tmp_path), **company, RANK=str(rank)) for rank in range(2)
    )
    waits.wait_until(lambda: all((tmp_path / f"joined-{rank}").exists() for rank in range(2)))
    pair.unplug(1)
    works.kill()
    assert waits.wait(60) == 1
    seconds, sentence = waits.stdout.split(" ", 1)
    assert float(seconds) < 30
    assert re.match("another process .* not answer: .*machine .*lost", sentence)
