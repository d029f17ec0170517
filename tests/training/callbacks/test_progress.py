"""What a person sees while training: a line that fits, the numbers that matter, and the time that is left."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from finetrainers.methods.grpo.rollout_method import RolloutMethod
from finetrainers.methods.sft import SFT
from finetrainers.training.callbacks import progress
from finetrainers.training.callbacks.metrics import summarize_records
from finetrainers.training.callbacks.progress import Clock, ProgressLine, number

EVALUATION = {"eval_loss": 0.43214, **{f"eval_loss_{k / 10:.2f}": 0.5 / k for k in (1, 3, 5, 7, 9)}}
LOSS = {"loss": 0.04213, "grad_norm": 0.385, "lr": 1e-3, "step_s": 3.41}
SCORES = {"reward/a.quality": 0.51234, "kl": 0.0023, "group_std/a.quality": 0.1, **LOSS}
MEMORY = SimpleNamespace(highest_peak=lambda: 12.3)
SECOND = {"reward/my_module:a_function_with_a_long_name": 12.3456}


def shown(width: int | None, records: list[dict[str, float]], *, headline: tuple[str, ...], total: int) -> list[str]:
    """The lines on a terminal of that width after these records, the live one last; in a file without a width."""
    out = io.StringIO()
    console = Console(file=out, soft_wrap=True)
    if width is not None:
        console = Console(file=out, width=width, force_terminal=True, soft_wrap=True, legacy_windows=False)
    state: Any = SimpleNamespace(
        step=0, total_steps=total, doing="", watchdog=SimpleNamespace(section="step"), memory=MEMORY
    )
    line = ProgressLine(headline=headline, console=console)
    line.on_start(state)
    for record in records:
        state.step = int(record["step"])
        line.on_log(state, record)
    if width is not None:
        plain = Console(file=io.StringIO(), width=width)
        plain.print(line)
        line.on_stop(state)
        assert isinstance(plain.file, io.StringIO)
        return plain.file.getvalue().splitlines()
    return out.getvalue().splitlines()


@pytest.mark.parametrize(
    ("headline", "record", "total", "order"),
    [
        (SFT.headline, LOSS, 30, ["loss", "s/step", "eval_loss", "avg", "grad", "lr", "mem", "elapsed"]),
        (SFT.headline, LOSS, 20000, ["loss", "s/step", "eval_loss", "avg", "grad", "lr", "mem", "elapsed"]),
        (RolloutMethod.headline, SCORES, 30, ["reward", "s/step", "kl", "avg", "grad", "lr", "mem", "elapsed"]),
        (
            RolloutMethod.headline,
            {**SCORES, **SECOND},
            30,
            ["reward/a.quality", "s/step", "reward/my_module:a_funct.."],
        ),
        (
            ("reward/z", *RolloutMethod.headline),
            {**SCORES, "reward/z": 0.2},
            30,
            ["reward/z", "s/step", "reward/a.quality"],
        ),
    ],
)
def test_the_line_fits_any_width(
    headline: tuple[str, ...], record: dict[str, float], total: int, order: list[str]
) -> None:
    """One row, beginning with step, total and time left; fields that do not fit go, the least important first."""
    steps = [total // 2 - 1, total // 2]
    first = [{"step": 0, **EVALUATION}] if headline == SFT.headline else []
    records = [*first, *({"step": step, **record} for step in steps)]
    before = 0
    for width in (40, 60, 80, 100, 120, 200):
        [line] = shown(width, records, headline=headline, total=total)
        assert len(line) <= width
        texts = line.split("  ")
        assert texts[0] == f"{total // 2}/{total}"
        assert texts[2 if "\u2501" in texts[1] else 1].startswith("left ")
        assert "loss 0.0000" not in line
        names = [name for name in order if any(name in text.split() for text in texts)]
        assert names == order[: len(names)], line
        assert len(names) >= before
        before = len(names)
        # Every number is whole.
        for text in ("loss 0.0421", "eval_loss 0.4321", "grad 0.385", "lr 1.00e-03", "3.41 s/step", "mem 12.3 GiB"):
            name = next(word for word in text.split() if not word[0].isdigit() and word != "GiB")
            assert text in texts or not any(name in other.split() for other in texts)
    assert before == len(order)


def test_what_the_run_is_doing_and_what_became_of_a_step() -> None:
    state: Any = SimpleNamespace(
        step=0, total_steps=9, doing="", watchdog=SimpleNamespace(section="sampling"), memory=MEMORY
    )
    console = Console(file=io.StringIO(), width=80, force_terminal=True, legacy_windows=False)
    line = ProgressLine(console=console)
    line.on_start(state)
    assert [text for _, text in line._fields()][:3] == ["0/9", "left -:--", "sampling"]
    line.on_log(state, {"step": 0, **LOSS})
    state.watchdog.section = "step"
    rest = {name: value for name, value in LOSS.items() if name != "loss"}
    line.on_log(state, {"step": 1, **rest, "nonfinite_steps": 1.0})
    texts = [text for _, text in line._fields()]
    assert "not finite, skipped" in texts
    assert not any(text.startswith("loss") for text in texts), "the loss of an earlier step"
    state.watchdog.section = "checkpoint"
    assert "saving" in [text for _, text in line._fields()]
    line.on_stop(state)  # by a signal, say: nothing is left, and nothing is being done
    assert isinstance(console.file, io.StringIO)
    last = console.file.getvalue().splitlines()[-2]
    assert "took 0:00" in last
    assert "saving" not in last
    assert "left" not in last


def test_an_evaluation_is_broken_between_its_numbers() -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system=None, legacy_windows=False)
    state: Any = SimpleNamespace(
        step=10, total_steps=30, doing="", watchdog=SimpleNamespace(section="sampling"), memory=MEMORY
    )
    line = ProgressLine(headline=SFT.headline, console=console)
    line.on_start(state)
    line.on_log(state, {"step": 10, **EVALUATION})
    line.on_stop(state)
    assert "step 10/30  eval_loss 0.4321  by noise level  0.10: 0.5000  0.30: 0.1667" in out.getvalue()
    assert "  0.50: 0.1000  0.70: 0.0714  0.90: 0.0556\n" in out.getvalue()


def test_a_log_file_has_a_line_for_each_record() -> None:
    records = [{"step": 0, **EVALUATION}, *({"step": k, **LOSS} for k in range(1, 31))]
    memory = {"step": 30, "memory/checkpoint/host_gib": 1.2, "memory_before_training/host_gib": 1.1}
    assert len(shown(None, [*records, memory], headline=SFT.headline, total=30)) == len(records)
    lines = shown(None, records, headline=SFT.headline, total=30)
    assert len(lines) == len(records)
    assert lines[0].startswith("step  0/30  eval_loss 0.4321  by noise level  0.10: 0.5000")
    assert lines[1].startswith("step  1/30  left 1:3")
    assert "  loss 0.0421  3.41 s/step  grad 0.385  lr 1.00e-03  mem " in lines[1]
    assert lines[-1].startswith("step 30/30  took 0:00  loss 0.0421")
    assert all(character.isprintable() for line in lines for character in line)


def test_the_time_left_counts_what_happens_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    clock = Clock()
    assert clock.left_s(5) is None
    now += 20  # loading, an evaluation
    clock.tick(steps=2, step_s=10)
    assert clock.left_s(5) == pytest.approx(50)
    now += 10 + 20  # a step, and saving
    clock.tick(steps=1, step_s=10)
    assert clock.left_s(3) == pytest.approx(3 * (10 + 20 / 3))
    now += 4
    assert clock.left_s(3) == pytest.approx(3 * (10 + 20 / 3) - 4)
    assert clock.elapsed_s() == pytest.approx(54)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1e-5, "1.00e-05"), (0.04213, "0.0421"), (-3.14159, "-3.1416"), (12.345, "12.35"), (1.5e6, "1.50e+06"),
     (float("nan"), "nan")],
)  # fmt: skip
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


def test_an_interval_becomes_one_record() -> None:
    summaries: Any = {"rollout": "last", "low/": "min", "high/": "max"}
    nan, records = float("nan"), []
    for k, loss in enumerate((1.0, 3.0, nan)):
        values = {"loss": loss, "grad_norm": k, "rollout": k, "low/a": k, "high/a": -k, "spikes": k}
        records.append(values if k else {**values, "once": 7.0})
    assert summarize_records(records, seconds=9.0, every=4, summaries=summaries) == {
        "loss": 2.0, "grad_norm": 1.0, "grad_norm_max": 2.0, "rollout": 2, "low/a": 0, "high/a": 0, "spikes": 2,
        "once": 7.0, "steps": 3.0, "step_s": 3.0,
    }  # fmt: skip
    short = summarize_records([{"loss": 5.0}], seconds=1.0, every=4, summaries=summaries)
    assert short == {"loss": 5.0, "steps": 1.0, "step_s": 1.0}


def test_a_resume_within_an_interval_changes_no_weight(
    options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path
) -> None:
    """Records are means over the steps that they cover, and say how many."""
    values = options(clips=3, train_steps=5, checkpointing_steps=2, lora_dropout=0.3)
    every = run(**{**values, "output_dir": str(tmp_path / "every")})
    some = run(**values, logging_steps=3)
    losses, norms = ([row[1] for row in every.curve(name)] for name in ("loss", "grad_norm"))
    assert every.metrics[0].keys() & {"steps", "grad_norm_max"} == set()
    found = some.curve("loss", "grad_norm", "grad_norm_max", "steps", "lr")
    assert [(row[0], row[4], row[5]) for row in found] == [(3, 3, 1e-2), (5, 2, 1e-2)]
    for row, part in zip(found, (slice(0, 3), slice(3, 5)), strict=True):
        assert row[1] == pytest.approx(sum(losses[part]) / len(losses[part]), rel=1e-12)
        assert row[2] == pytest.approx(sum(norms[part]) / len(norms[part]), rel=1e-12)
        assert row[3] == max(norms[part])
    straight = {name: tensor.clone() for name, tensor in some.weights.items()}
    resumed = run(**values, logging_steps=3, resume_from_checkpoint="2")
    assert all(straight[name].equal(tensor) for name, tensor in resumed.weights.items())
    assert resumed.curve("loss", "steps") == [(3, losses[2], 1), (5, pytest.approx(sum(losses[3:]) / 2), 2)]


def test_a_run_shows_its_methods_headline(
    options: Callable[..., dict], run: Callable[..., Any], capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """The line asks the method what matters; the trainer tells it when training ends, also by an error."""
    monkeypatch.setattr(SFT, "headline", ("grad_norm",))
    done = run(**options(train_steps=2))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split("  ")[0] for line in lines] == ["step 1/2", "step 2/2"]
    record = json.loads((done.root / "metrics.jsonl").read_text().splitlines()[0])
    assert f"  grad_norm {number(record['grad_norm'])}" in lines[0]
    assert "loss" not in lines[0]
