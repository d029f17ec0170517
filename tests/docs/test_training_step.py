"""The tables that follow a step through the code name the called functions, in order."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from snippets import ROOT

from finetrainers.cli.main import main
from finetrainers.methods.grpo.rollout.collect import RolloutCollector
from finetrainers.methods.sft import SFT
from finetrainers.models.ltx_video import LTXVideoSpec

PAGE = ROOT / "docs" / "explanation" / "architecture.md"
PACKAGE = ROOT / "finetrainers"
#: Frames from the command to the loss of supervised finetuning, at most.
DEPTH = 9
#: The code of `module:function` per line, since Python 3.10 has no qualified names in frames.
Frames = list[tuple[str, str]]


def tables() -> dict[str, Frames]:
    """Return file and function of each row, by heading."""
    text = PAGE.read_text(encoding="utf-8").partition("\n## A training step, function by function\n")[2]
    sections = re.split(r"^### ", text, flags=re.M)[1:]
    return {part.splitlines()[0]: re.findall(r"^\| `(\S+\.py)` \| `(\S+)` \|", part, re.M) for part in sections}


def frames_above() -> Frames:
    """Return the package's frames from the outermost to the caller's caller, by file and function."""
    frame, found = sys._getframe(2), []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            found.append((path.relative_to(PACKAGE).as_posix(), frame.f_code.co_name))
        frame = frame.f_back  # type: ignore[assignment]
    return found[::-1]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Frames]:
    """The frames of each call of a network."""
    calls: list[Frames] = []
    predict = LTXVideoSpec.predict

    def recording(self: LTXVideoSpec, *arguments: Any, **options: Any) -> Any:
        calls.append([*frames_above(), ("models/ltx_video.py", "predict")])
        return predict(self, *arguments, **options)

    monkeypatch.setattr(LTXVideoSpec, "predict", recording)
    return calls


def names(rows: Frames) -> Frames:
    return [(file, function.rpartition(".")[2]) for file, function in rows]


def test_the_tables_are_the_calls_of_a_step(
    recorded: list[Frames], options: Callable[..., dict], tmp_path: Path
) -> None:
    supervised, rollout, update = (names(rows) for rows in tables().values())

    def train(**changes: Any) -> None:
        values = options(train_steps=1, output_dir=str(tmp_path / changes.get("method", "sft")), **changes)
        if "prompts" in changes:
            values = {name: value for name, value in values.items() if not name.startswith(("data", "video_"))}
        flags = [part for name, value in values.items() for part in (f"--{name}", str(value))]
        assert main(["train", *flags]) == 0

    train(video_resolution_buckets="9x64x64")
    assert recorded[0] == supervised
    depth = supervised.index(("methods/sft.py", SFT.loss.__name__)) + 1
    assert depth <= DEPTH
    recorded.clear()
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red ball\n")
    train(
        method="grpo", prompts=str(prompts), reward="brightness", rollout_size="9x64x64", prompts_per_step=1,
        num_generations=2, sampling_steps=3,
    )  # fmt: skip
    starts = ("methods/grpo/rollout/collect.py", RolloutCollector._shared_starts.__name__)
    assert starts in recorded[0], "what the clips of a prompt share is sampled first"
    assert next(call for call in recorded if starts not in call)[-len(rollout) :] == rollout
    assert recorded[-1][-len(update) :] == update


def test_the_functions_are_there() -> None:
    for rows in tables().values():
        assert len(rows) > 5
        for file, function in rows:
            text = (PACKAGE / file).read_text(encoding="utf-8")
            for name in function.replace(".<locals>", "").split("."):
                assert re.search(rf"^\s*(class|def) {name}\b", text, re.M), f"{file}: {name}"
