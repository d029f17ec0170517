"""The first process of a machine reads for the others, and tells them of what it has found or why it could not."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from real_process import Python

from finetrainers.config.load import load_config
from finetrainers.plan import once_per_node as told
from finetrainers.plan.once_per_node import once_per_node
from finetrainers.plan.preflight import ResolvedRun, preflight
from finetrainers.utils.json_objects import from_json, to_json

#: What both of two processes ask; each prints what came of it.
QUESTIONS = """
import os, signal, subprocess, sys, time
from pathlib import Path
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.plan import once_per_node as module
from finetrainers.plan.once_per_node import LocalRankZeroError, once_per_node

module._BEAT_S, module._SILENCE_S = 0.05, 1.0

rank, asks = int(os.environ["RANK"]), Path(sys.argv[1])

def made(): return ("by", rank)
def refused(): raise ConfigError([Problem("--lr", f"found by {rank}", "unknown"), Problem("", "second")])
def failed(): raise OSError(28, f"No space left on device for {rank}")
def slow(): time.sleep(1.5); return "slow"
def suspended():
    waiting = asks.with_name("second")
    while not waiting.exists(): time.sleep(0.01)
    both = f"{waiting.read_text()} {os.getpid()}"
    # The one that waits goes on first, before there is another sign of life.
    resume = f"for each in {both}; do kill -CONT $each; sleep 0.1; done"
    subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -STOP {both}; sleep 1.5; {resume}"])
    time.sleep(3)
    return "suspended"
def too_slow(): time.sleep(1.5); return "too slow"
def stopped():
    asks.with_name("first").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
def ended():
    while not asks.exists(): time.sleep(0.01)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)

for make, question in ((made, "same"), (made, rank), (refused, ""), (failed, ""), (made, "then"), (slow, ""),
                       (suspended, ""), (too_slow, ""), (stopped, ""), (ended, "")):
    if rank == 1 and make is ended: asks.touch()
    if rank == 1 and make is suspended: asks.with_name("second").write_text(str(os.getpid()))
    try:
        print(once_per_node(make, question, timeout_s=0.3 if make is too_slow else 60), flush=True)
    except ConfigError as error:
        print([f"{problem} ({problem.kind})" for problem in error.problems], flush=True)
    except (LocalRankZeroError, OSError) as error:
        print(type(error).__name__, error, flush=True)
    if rank == 1 and make is stopped: os.kill(int(asks.with_name("first").read_text()), signal.SIGCONT)
"""
#: The preflight of a run, and the files below some folders that are opened for it.
READY = """
import json, os, sys
from pathlib import Path

opened = []
roots = tuple(sys.argv[2:])
sys.addaudithook(lambda event, values: opened.append(values[0]) if event in ("open", "os.scandir", "os.listdir")
                 and str(values[0]).startswith(roots) else None)
from finetrainers.config.load import load_config
from finetrainers.plan.ready import examine_weights, get_ready
from finetrainers.utils.json_objects import to_json

checked = get_ready(load_config(**json.loads(Path(sys.argv[1]).read_text())))
examine_weights(checked)
fields = {name: getattr(checked, name) for name in checked.__dataclass_fields__}
Path(sys.argv[1] + os.environ["RANK"]).write_text(json.dumps([len(opened), to_json(fields)]))
"""


@pytest.mark.rotating
def test_every_outcome_is_shared(python: Python, tmp_path: Path) -> None:
    first, second = python.ranks(2, "-c", QUESTIONS, str(tmp_path / "asks"))
    assert (first.wait(), second.wait()) == (-9, 0)
    problems = "['--lr: found by 0 (unknown)', 'second (invalid)']"
    full = "[Errno 28] No space left on device for 0"
    assert first.stdout.splitlines() == [
        "('by', 0)", "('by', 0)", problems, f"OSError {full}", "('by', 0)", "slow", "suspended", "too slow", "None",
    ]  # fmt: skip
    lines = second.stdout.splitlines()
    assert lines[:3] == ["('by', 0)", "('by', 1)", problems]  # with other options it finds out for itself
    assert lines[4:7] == [
        "('by', 0)",
        "slow",  # for longer than a process may be silent
        "suspended",  # both, as by a scheduler or a laptop's lid
    ]
    # Its failure; no answer in time; no sign of life; its end.
    for line, values in zip(
        [lines[3], *lines[7:]], (os.strerror(errno.ENOSPC), "0.3 s", " 1 s", " ended"), strict=True
    ):
        assert line.startswith("LocalRankZeroError ")
        assert values in line


def test_two_processes_read_the_data_and_the_model_once(
    python: Python, options: Callable[..., dict], tmp_path: Path
) -> None:
    values = options(clips=4, train_steps=1, validation_prompts="one@@@9x64x64")
    place = tmp_path / "options.json"
    place.write_text(json.dumps(values))
    model = values["pretrained_model_name_or_path"]
    restarts = {"TORCHELASTIC_MAX_RESTARTS": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for process in python.ranks(2, "-c", READY, str(place), values["data_root"], model, **restarts):
        assert process.wait() == 0, process.stderr
    (first, seen), (second, heard) = (json.loads((tmp_path / f"options.json{rank}").read_text()) for rank in range(2))
    assert heard == seen
    assert "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in heard
    assert first > 8
    assert second == 0

    flags = f"--model_name ltx_video --pretrained_model_name_or_path {model} --output_dir {tmp_path / 'run'}"
    wrong = f"--data_root {tmp_path / 'absent'} --validation_prompts one@@@10x64x64"
    refused = python.ranks(2, "train.py", *flags.split(), *wrong.split())
    assert [process.wait() for process in refused] == [2, 2]
    assert re.search(r"--validation_prompts: .*\b10 .*8\*k\+1", refused[0].stderr)
    assert "absent" in refused[0].stderr
    assert "error" not in refused[1].stderr


def plain(checked: ResolvedRun) -> Mapping[str, Any]:
    return {field.name: getattr(checked, field.name) for field in fields(checked)}


@pytest.fixture
def kinds(options: Callable[..., dict], make_clips: Callable[..., Path], tmp_path: Path) -> dict[str, Any]:
    """Options of runs of every kind of work."""
    clips, pairs, prompts = make_clips(4), tmp_path / "pairs.jsonl", tmp_path / "prompts.txt"
    rows = [{"prompt": f"pattern {k}", "chosen": f"{k}.mp4", "rejected": f"{k + 1}.mp4"} for k in range(3)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts.write_text("one\ntwo\n")
    reward = {
        "method": "grpo",
        "prompts": str(prompts),
        "rollout_size": "9x64x64",
        "reward": ["brightness"],
        "prompts_per_step": 1,
    }
    return {
        "clips": options(clips=4, eval_num_items=1, prior_preservation_weight=1.0, class_prompt="a pattern"),
        "pairs": options(clips=4, method="dpo", dataset_file=str(pairs), data_root=str(clips)),
        "prompts": {
            name: value for name, value in options(**reward).items() if not name.startswith(("data", "video_"))
        },
    }


@pytest.mark.parametrize("kind", ["clips", "pairs", "prompts"])
def test_what_is_told_is_what_was_found(kind: str, kinds: dict[str, Any]) -> None:
    checked = preflight(load_config(**kinds[kind]))
    found = from_json(to_json(checked))
    assert plain(found) == plain(checked)
    assert type(found.plan) is type(checked.plan)
    assert found.family is checked.family


def test_one_process_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told, "_address", lambda call: pytest.fail("it has opened a socket"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    value = object()  # which could not be told
    assert once_per_node(lambda: value, value, timeout_s=1) is value


def test_a_process_whose_first_one_does_not_appear_reads_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    company = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_PORT": "1"}
    for name, value in company.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(told, "_APPEAR_S", 0.05)
    assert once_per_node(lambda: "read", "", timeout_s=1) == "read"
