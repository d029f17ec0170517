"""The page on a run: what it says is what the records say, and it needs nothing but itself."""

from __future__ import annotations

import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetrainers.results.reports import page
from finetrainers.results.reports.charts import chart_groups
from finetrainers.results.reports.media import VideoLimits, drawn_samples, rollout_videos, sample_videos, watched_videos
from finetrainers.results.reports.memory import memory_charts, summarize_memory
from finetrainers.results.reports.page import make_report, write_run_report
from finetrainers.results.reports.sections import (
    events_of,
    facts_of,
    list_commands,
    list_settings,
    status_of,
    summarize_data,
    summary_figures,
)
from finetrainers.results.reports.watched import read_watched
from finetrainers.rundir.best import mark_best
from finetrainers.rundir.run_records import read_run
from finetrainers.utils.video import write_mp4

EVIL = '<script>alert("x")</script> & "quoted" </textarea>'
VOID = {"meta", "input", "br", "path", "link", "img"}


class Page(HTMLParser):
    """What a page consists of. Fails on tags that are not closed in order, and on what is fetched from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.data: dict[str, str] = {}
        self._id = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = dict(attributes)
        for name in ("src", "href", "action", "poster", "data"):
            assert (given.get(name) or "#").startswith(("#", "data:")), given
        self._id = (given.get("id") or "") if tag == "script" else ""
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag
        self._id = ""

    def handle_data(self, data: str) -> None:
        if self._id:
            self.data[self._id] = self.data.get(self._id, "") + data
        elif not {"script", "style"} & set(self.open):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def clip(path: Path, *, comment: str, size: int = 32) -> None:
    frames = np.random.default_rng(0).integers(0, 255, (5, size, size, 3)).astype(np.uint8)
    write_mp4(path, frames, fps=8, comment=comment)


def item(name: str, use: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "use": use, "status": "used", "marks": [], "bucket": "9x32x64", "reason": None, **more}


METRICS = [
    {"step": 0, "eval_loss": 2.0, "eval_loss_0.10": 3.0, "eval_loss_0.90": 1.0},
    *(
        {
            "step": k,
            "loss": 1.0 / k,
            "lr": 1e-3,
            "grad_norm": 0.01 * 3**k,
            "step_s": 2.0,
            "seconds/data": 0.5 + k / 10,
            "tokens_per_s": 100.0 * k,
            "mfu": 0.2 + k / 100,
            "memory/training_step/allocated_gib": 3.0 + k,
        }
        for k in range(1, 5)
    ),
    # A resumed run that did not clear what it redid.
    *(
        {"step": k, "loss": 0.5 / k, "lr": 1e-3, "grad_norm": 0.1, "step_s": 1.0, "seconds/data": 0.25}
        for k in range(3, 7)
    ),
    {"step": 6, "eval_loss": 1.5, "eval_loss_0.10": 2.5, "eval_loss_0.90": 0.5},
]
EVENTS = [
    {"time": 1e9, "event": "start", "step": 0},
    {"time": 1e9 + 1, "event": "memory_planned", "step": 0, "gib": {"training_step": {"allocated": 4.5, "host": 1.0}}},
    {"time": 1e9 + 2, "event": "spike", "step": 2, "values": "loss 9 is 12 sigma above"},
    {"time": 1e9 + 3, "event": "out_of_memory", "latent_size": "2x4x4", "samples": 8, "now": 4, "error": "rank 0"},
    {"time": 1e9 + 4, "event": "start", "step": 2},
    {"time": 1e9 + 4, "event": "began_from", "step": 900, "run": "runs/before", "load": "lora"},
    {"time": 1e9 + 5, "event": "bad_sample", "step": 3, "file": EVIL, "reason": "damaged"},
    {"time": 1e9 + 6, "event": "checkpoint", "step": 6, "path": "x"},
    {"time": 1e9 + 7, "event": "of_a_later_version", "step": 6, "what": EVIL},
]
CONFIG = """
[model]
model_name = "ltx_video"
pretrained_model_name_or_path = "demo://ltx"
[training]
train_steps = 8
rank = 32
[run]
output_dir = "elsewhere"
[gone]
an_option_of_another_version = [1, 2]
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that was killed after step 6."""
    root = tmp_path / "runs" / "first"
    write_lines(root / "metrics.jsonl", METRICS)
    write_lines(root / "events.jsonl", EVENTS)
    with open(root / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "lo')
    bad = item(EVIL, "rejected", status="too_short", bucket=None, reason="3 frames of `9`")
    write_lines(root / "manifest.jsonl", [item("a.mp4", "train"), item("b.mp4", "eval", marks=["cropped"]), bad])
    (root / "config.toml").write_text(CONFIG)
    (root / "env.json").write_text(json.dumps({"command": ["/x/finetrainers", "train", "--id_token", EVIL]}))
    (root / "traceback.txt").write_text(f"Traceback\nValueError: {EVIL}\n")
    for step in (0, 3, 6):
        clip(root / "samples" / f"step-{step:06d}" / "00-a.mp4", comment=f"{EVIL}\nseed 1")
        clip(root / "samples" / f"step-{step:06d}" / "01-b.mp4", comment="b\nseed 1")
    for step in (1, 3):
        folder = root / "rollouts" / f"step-{step:06d}"
        for kind in ("best", "worst"):
            clip(folder / f"{kind}.mp4", comment="c")
        score = {"clip": 1, "advantage": 1.25, "reward": {"brightness": 0.125 * step}}
        (folder / "scores.json").write_text(json.dumps({"prompt": EVIL, "best": score, "worst": score}))
    return root


def drawn(page: Page) -> dict[str, list[list[float]]]:
    """Points of all lines that a page draws, by label; those without one by their chart's place."""
    charts = json.loads(page.data["charts"])
    return {s["label"] or str(k): s["points"] for k, chart in enumerate(charts) for s in chart["series"]}


def test_the_page_of_a_run(run_dir: Path) -> None:
    text = make_report([read_run(run_dir)], VideoLimits(20))
    page = Page(text)
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//|@import|url\(""", text)
    assert page.tags.count("script") == 4  # of the charts, their data, and of two grids: none of a prompt
    assert page.text.count("<script>alert(") >= 6  # prompt, file names, event, command, traceback, setting: as text
    assert "runs/first ended without a result" in page.text
    assert re.search(r"Page of \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\b", page.text)
    assert not re.search("http-equiv=.refresh", text)
    assert text.index('id="samples"') < text.index('<section id="loss"') < text.index('<p class="marks">')
    lines = drawn(page)
    assert lines["0.10"] == [[0, 3.0], [6, 2.5]]
    assert lines["waiting for data"] == [[1, 0.6], [2, 0.7], *([k, 0.25] for k in range(3, 7))]
    loss = [[k, float(f"{(1.0 if k < 3 else 0.5) / k:.5g}")] for k in range(1, 7)]
    assert [*lines.values()].count(loss) == 1  # each step once
    assert "constant: learning rate 0.001" in page.text
    assert page.tags.count("video") == 6 + 4
    assert "advantage +1.25" in page.text
    assert re.search(r"This page: \d+ kB, 10 videos\.", page.text)
    size = int(re.search(r"This page: (\d+) kB", page.text)[1])  # type: ignore[index]
    assert size == pytest.approx(len(text.encode()) / 1000, abs=1)


def test_its_numbers_are_those_of_the_records(run_dir: Path) -> None:
    run = read_run(run_dir)
    figures = {figure.name: (figure.value, figure.note) for figure in summary_figures(run)}
    assert figures == {
        "held-out loss": ("1.5", "from 2"),
        "training loss": ("0.08333", "from 1"),
        "seconds per step": ("1", "data 25 %"),
        "tokens per second": ("150", "median"),
        "MFU": ("21.5 %", "median"),
        "peak GPU memory": ("5 GiB", "training step"),
    }
    assert run.training_seconds == 2 * 2.0 + 4 * 1.0
    memory = summarize_memory(run)
    assert memory is not None
    headings = ["phase", "GPU memory, allocated, planned", "GPU memory, allocated, measured"]
    assert memory.table == (headings, [["training step", "4.50", "5.00"]])
    assert [(bar.phase, bar.text) for bar in memory.bars] == [("training step", "5.00, plan 4.50")]
    assert (memory.title, memory.maximum) == ("GPU memory, allocated", 5.0)
    data = summarize_data(run)
    assert data is not None
    assert [(share["text"], share["count"]) for share in data.shares] == [
        ("trained on", 1),
        ("held out", 1),
        ("too short", 1),
    ]
    assert data.buckets == [("9x32x64", 1, 1)]
    assert [(reason["kind"], reason["names"]) for reason in data.reasons] == [
        ("too_short", [EVIL]),
        ("cropped", ["b.mp4"]),
    ]
    assert data.later == [f"{EVIL}: damaged"]
    events = events_of(run)
    assert events is not None
    assert [(step, text, color) for _, step, text, color in events.rows] == [
        ("0", "started", ""),
        ("2", "spike: loss 9 is 12 sigma above", "note"),
        ("", "out of memory with 8 samples of 2x4x4; retried with at most 4 at once", "bad"),
        ("2", "resumed from step 2", ""),
        ("", "began from step 900 of runs/before (a LoRA)", ""),  # a step of the other run
        ("3", f"clip left out: {EVIL}: damaged", "note"),
        ("6", f"of a later version what {EVIL}", ""),
    ]
    assert events.counted == ["1 checkpoint"]
    settings = {setting.name: setting.values for setting in list_settings([run])}
    assert settings == {
        "model_name": ["ltx_video"], "pretrained_model_name_or_path": ["demo://ltx"], "train_steps": ["8"],
        "rank": ["32"], "an_option_of_another_version": ["1 2"],
    }  # fmt: skip
    assert [command for _, command in list_commands(run)][1].endswith(
        "first/config.toml --resume_from_checkpoint latest"
    )


def test_runs_are_compared(run_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "runs" / "second"
    write_lines(other / "metrics.jsonl", [{"step": k, "loss": 2.0 / k, "reward/a": 0.1 * k, "kl": 0.1} for k in (1, 2)])
    (other / "config.toml").write_text(CONFIG.replace("rank = 32", "rank = 64"))
    runs = [read_run(run_dir, name="first"), read_run(other, name="second")]
    page = Page(make_report(runs, VideoLimits(0)))
    assert "video" not in page.tags
    assert "10 left out" in page.text
    assert page.text.startswith("first, second")
    lines = [[s["label"] for s in chart["series"]] for chart in json.loads(page.data["charts"])]
    assert ["first", "second"] in lines  # the loss
    assert ["second"] in lines  # the reward
    differing = [(setting.name, setting.values) for setting in list_settings(runs) if setting.differs]
    assert differing == [("rank", ["32", "64"])]


@pytest.mark.parametrize("kept", ["metrics.jsonl", "events.jsonl", "config.toml"])
def test_what_is_missing_has_no_section(run_dir: Path, tmp_path: Path, kept: str) -> None:
    """Of earlier versions, of runs that have just begun, or copied in part."""
    root = tmp_path / "partly"
    root.mkdir()
    (root / kept).write_bytes((run_dir / kept).read_bytes())
    page = Page(make_report([read_run(root)], VideoLimits(9)))
    sections = {"metrics.jsonl": "Loss Optimization Speed Memory", "events.jsonl": "Data Events",
                "config.toml": "Settings Repeat it"}[kept]  # fmt: skip
    for word in (
        "Loss",
        "Optimization",
        "Speed",
        "Memory",
        "Samples",
        "Rollouts",
        "Data",
        "Events",
        "Settings",
        "Repeat it",
    ):
        assert (f" {word} " in page.text) == (word in sections), word
    assert page.tags.count("section") == len(sections.replace(" it", "").split())


def test_status(run_dir: Path) -> None:
    assert read_run(run_dir).status == "ended"
    for line, status in (("stopped", "stopped"), ("start", "ended"), ("finished", "finished"), ("start", "ended")):
        write_lines(
            run_dir / "events.jsonl", [*EVENTS, {"event": "stopped"}, {"event": "start", "step": 4}, {"event": line}]
        )
        assert read_run(run_dir).status == status
    (run_dir / ".lock-holder.json").write_text('{"pid": 1, "host": "another machine"}')
    assert read_run(run_dir).status == "training"


def test_reward_hacking_is_said_at_the_top(run_dir: Path) -> None:
    """What was seen, the way back, and whether it has stopped the run."""
    found = {
        "event": "reward_hacking", "step": 8, "judge": "shape", "best_step": 4, "before": 0.6, "now": 0.25,
        "trained_before": 0.8, "trained_now": 0.9, "checkpoint": "run/checkpoints/step-4",
    }  # fmt: skip
    for end, expected in (
        ({"event": "stopped_by_guard", "by": "--hacking_guard"}, "stopped by --hacking_guard, with a checkpoint"),
        ({"event": "finished"}, "finished"),
    ):
        write_lines(run_dir / "events.jsonl", [*EVENTS, {"event": "start", "step": 0}, found, end])
        run = read_run(run_dir)
        assert status_of(run)[0] == expected
        assert dict(facts_of(run))["reward hacking"] == (
            "seen at step 8: held-out reward shape 0.6 -> 0.25 since step 4, trained reward 0.8 -> 0.9; before it: "
            "run/checkpoints/step-4"
        )


def test_videos_are_few_and_small(run_dir: Path) -> None:
    """Of many steps some, the last among them; at the end of a run none that would have to be encoded again."""
    run = read_run(run_dir)
    some = sample_videos([run], VideoLimits(4))
    assert some.grid is not None
    assert some.grid.columns == ["step 0", "step 6"]  # its first weights are those of another run
    assert (some.shown_count, some.left_out) == (4, 2)
    last = sample_videos([run], VideoLimits(1))
    assert last.grid is not None
    assert (last.grid.columns, last.shown_count, last.left_out) == (["step 6"], 1, 5)
    clip(run_dir / "samples" / "step-000006" / "00-a.mp4", comment="large", size=512)
    assert (run_dir / "samples" / "step-000006" / "00-a.mp4").stat().st_size > VideoLimits.SMALL
    assert sample_videos([run], VideoLimits(9, own_size=True)).left_out == 1
    assert sample_videos([run], VideoLimits(9)).left_out == 0
    assert rollout_videos(run, VideoLimits(2)).left_out == 2
    write_lines(run_dir / "events.jsonl", [event for event in EVENTS if event["event"] != "began_from"])
    new = sample_videos([read_run(run_dir)], VideoLimits(4))
    assert new.grid is not None
    assert new.grid.columns == ["base (step 0)", "step 6"]


def test_a_page_that_cannot_be_made_fails_no_run(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_run_report(run_dir)
    assert Page((run_dir / "report.html").read_text()).tags.count("video") == 10
    assert not caplog.records
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "chart_groups", lambda runs: runs[0].nothing)
        write_run_report(run_dir)
    assert re.search(r"report\.html .*: AttributeError", caplog.text)


#: Values that edited records may have.
ODD: list[Any] = [None, [], "x", {"a": 1}, 10**299, 1e308, float("nan"), True, [[1]], {"training_step": {"host": "x"}}]


def test_edited_records_cost_one_value_each(run_dir: Path) -> None:
    """Each value of each record in turn; the page has everything else."""
    watched_run(run_dir, "run")
    (run_dir / "env.json").write_text(json.dumps({"command": ["a"], "packages": {"torch": "2"}, "python": "3"}))
    extra = [
        {"time": 1e9, "event": "host_memory_low", "available_gib": 1.0}, {"time": 1e9, "event": "left_out", "clips": 3},
        {"time": 1e9, "event": "memory", "gib": {"training_step": {"allocated": 4.0}}},
        {"time": 1e9, "event": "reward_hacking", "step": 3, "judge": "kl", "before": 1.0, "now": 2.0},
    ]  # fmt: skip
    write_lines(run_dir / "events.jsonl", [*EVENTS, *extra])
    write_lines(run_dir / "metrics.jsonl", [{**record, "time": 1e9} for record in METRICS])
    files = ["env.json", *(path.relative_to(run_dir) for path in run_dir.rglob("*.jsonl"))]
    for index, file in enumerate(sorted([*files, "rollouts/step-000003/scores.json"], key=str)):
        text = (run_dir / file).read_text()
        records = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        for turn in range(max(map(len, records))):  # a key of each record is changed at a time
            edited = [dict(record) for record in records]
            for place, record in enumerate(edited):
                record[[*record][turn % len(record)]] = ODD[(index + turn + place) % len(ODD)]
            write_lines(run_dir / file, edited)
            assert "<html" in make_report([read_run(run_dir)], VideoLimits(0))
        (run_dir / file).write_text(text)


def test_rewards_come_first_and_spread_is_drawn(tmp_path: Path) -> None:
    records = [
        {"step": k, "loss": 1.0 / k, "reward/a": 0.1 * k, "group_std/a": 0.05, "kl": 0.2 / k, "clipped_high": 0.0}
        for k in (1, 2, 3)
    ]
    write_lines(tmp_path / "metrics.jsonl", records)
    groups = chart_groups([read_run(tmp_path)])
    assert [group.title for group in groups] == ["Rewards", "Loss"]
    reward, kl, against = groups[0].charts
    assert [(chart.title, chart.note) for chart in (reward, kl)] == [
        ("Reward of rollouts: a", "smoothed; band: std within groups"),
        ("KL divergence from the reference model", "smoothed"),
    ]
    assert reward.series[0].spread == [0.05] * 3
    assert against.series[0].points == ([0.2 / 3, 0.1, 0.2], [pytest.approx(0.3), 0.2, 0.1])
    assert groups[0].constant == "clipped ratios: above (share) 0"
    assert kl.x == "step"


def test_what_happened_is_marked_on_the_curves_also_of_several_runs(run_dir: Path, tmp_path: Path) -> None:
    """In the color of the run, whose events may say no step, but when they were."""
    run = read_run(run_dir, name="first")
    other = tmp_path / "other"
    write_lines(other / "metrics.jsonl", [{"time": 1e9 + 10 * k, "step": k, "loss": 1.0 / k} for k in range(1, 7)])
    happened = [
        {"time": 1e9 + 35, "event": "out_of_memory", "now": 4},
        {"time": 1e9, "event": "nonfinite", "step": 5, "values": "loss nan"},
    ]
    write_lines(other / "events.jsonl", [*happened, {"time": 1e9, "event": "rollback", "step": 4, "failed": 5}])
    [alone] = [chart for group in chart_groups([run]) for chart in group.charts if chart.title == "Training loss"]
    assert [(mark.x, mark.kind, mark.color) for mark in alone.marks] == [(2, "spike", None), (2, "resume", None)]
    runs = [run, read_run(other, name="other")]
    [both] = [chart for group in chart_groups(runs) for chart in group.charts if chart.title == "Training loss"]
    assert [(mark.x, mark.kind, mark.color) for mark in both.marks] == [
        (2, "spike", 0), (2, "resume", 0), (3, "failure", 1), (5, "failure", 1), (4, "resume", 1),
    ]  # fmt: skip
    assert re.fullmatch("other: .* memory at step 3, .* 4 samples .*", both.marks[2].text)
    page = make_report(runs, VideoLimits(0))
    assert page.count('class="mark failure c1"') >= 2
    text = Page(page).text
    assert [said in text for said in ("resumed or rolled back", "spike", "out of memory and retried")] == [True] * 3


def test_memory_is_drawn_against_its_plan(run_dir: Path, tmp_path: Path) -> None:
    run = read_run(run_dir, name="first")
    [chart] = memory_charts([run])
    assert chart.title == "GPU memory, allocated, peak of each phase (GiB)"
    assert [(one.label, one.points) for one in chart.series] == [("training step", ([1, 2], [4.0, 5.0]))]
    assert [(level.y, level.text) for level in chart.levels] == [(4.5, "training step: 4.50 GiB planned")]
    other = tmp_path / "other"
    records = [
        {"step": k, "memory/training_step/allocated_gib": 2.0 + k, "memory/validation/allocated_gib": 9.0}
        for k in (1, 1, 2)
    ]
    records[0]["memory/training_step/allocated_gib"] = 7.0  # two records of a step
    write_lines(other / "metrics.jsonl", records)
    both = memory_charts([run, read_run(other, name="other")])[0]
    assert both.title == "GPU memory, allocated, peak of a training step (GiB)"
    assert [(one.label, one.points[1]) for one in both.series] == [("first", [4.0, 5.0]), ("other", [7.0, 4.0])]
    assert [(level.text, level.color) for level in both.levels] == [("first: 4.50 GiB planned", 0)]


def watched_run(root: Path, name: str) -> Path:
    """A run with two checkpoints that were watched, the first one in two versions, and with a sheet of samples."""
    write_lines(root / "metrics.jsonl", [{"step": k, "loss": 1.0} for k in (1, 2)])
    folder, sheet = root / "watch" / "low", root / "samples" / "sample"
    records, drawn_clips = [], []
    for step, manifest, score in ((1, "old", 0.9), (1, "new", 0.25), (2, "b", 0.75)):
        for prompt, seed in ((EVIL, 3), ("b", 3), ("b", 4)):
            file = f"{prompt[-1]}-{step}-{seed}.mp4".replace(">", "x")
            clip(folder / file, comment=prompt)
            record = {"step": step, "manifest": manifest, "preset": "low", "prompt": prompt, "seed": seed, "file": file}
            records += [
                {**record, "scores": {"motion": score + (seed - 3) / 10}},
                {**record, "scores": {"bright": None}},
            ]
    write_lines(folder / "scores.jsonl", records)
    for column, scale in (("result_scale-1", 1.0), ("result_scale-0.5", 0.5), ("base", None)):
        for seed in (7, 8):
            clip(sheet / f"{column}-{seed}.mp4", comment="c")
            drawn_clips.append(
                {
                    "time": 1,
                    "file": f"{column}-{seed}.mp4",
                    "column": column,
                    "prompt": EVIL,
                    "seed": seed,
                    "size": "9x32x32",
                    "scale": scale,
                    "path": "x",
                }
            )
    write_lines(
        sheet / "ledger.jsonl", [*drawn_clips, {**drawn_clips[0], "time": 2, "file": "gone.mp4"}, {"key": "cut"}]
    )
    checkpoints = root / "checkpoints"
    (checkpoints / "step-1").mkdir(parents=True)
    mark_best(checkpoints / "step-1")
    return root


def test_watched_checkpoints_and_drawn_samples_are_shown(tmp_path: Path) -> None:
    run = read_run(watched_run(tmp_path / "run", "run"), name="run")
    [watched] = read_watched(run)
    assert (watched.preset, watched.best, watched.labels) == ("low", 1, ["motion", "bright"])
    assert {step for step, _, _ in watched.records} == {1, 2}
    assert watched.means("motion") == (
        [1.0, 2.0],
        [pytest.approx(0.85 / 3), pytest.approx(2.35 / 3)],
    )  # not of the old one
    grid = watched_videos(watched, VideoLimits(20)).grid
    assert grid is not None
    assert grid.columns == ["step 1, best", "step 2"]
    assert [(group.heading, [row.label for row in group.rows]) for group in grid.groups] == [
        (EVIL, ["seed 3"]),
        ("b", ["seed 3", "seed 4"]),
    ]
    assert [cell.caption for cell in grid.cells][-2:] == ["motion 0.35\nbright failed", "motion 0.85\nbright failed"]
    few = watched_videos(watched, VideoLimits(4))
    assert (few.shown_count, few.left_out) == (4, 2)
    assert few.grid is not None
    assert [group.heading for group in few.grid.groups] == [EVIL, "b"]  # a seed of each prompt first

    drawn_grid = drawn_samples(run, VideoLimits(20)).grid
    assert drawn_grid is not None
    assert drawn_grid.columns == ["base model", "result, scale 0.5", "result, scale 1"]
    assert [(group.heading, [row.label for row in group.rows]) for group in drawn_grid.groups] == [
        (EVIL, ["seed 7", "seed 8"])
    ]
    assert [cell.video.name for cell in drawn_grid.cells if cell.video][::3] == ["base-7.mp4", "base-8.mp4"]

    page = Page(make_report([run], VideoLimits(40)))
    assert page.tags.count("video") == 6 + 6
    for said in (
        "Watched checkpoints",
        "Reward of checkpoints: motion",
        "preset low",
        "step 1, best",
        "Drawn with finetrainers sample",
    ):
        assert said in page.text
    second = read_run(watched_run(tmp_path / "second", "second"), name="second")
    compared = make_report([run, second], VideoLimits(0))
    assert "run low" in Page(compared).text
    assert "second low" in Page(compared).text


def test_rollouts_of_each_reward_are_shown(run_dir: Path) -> None:
    folder = run_dir / "rollouts" / "step-000003"
    clip(folder / "best-b.mp4", comment="c")
    scores = json.loads((folder / "scores.json").read_text())
    heads = {"brightness": {kind: {**scores[kind], "video": f"{kind}.mp4"} for kind in ("best", "worst")}}
    heads["b"] = {"best": {**scores["best"], "video": "best-b.mp4"}, "worst": {**scores["worst"], "video": "worst.mp4"}}
    (folder / "scores.json").write_text(json.dumps({**scores, "heads": heads}))
    grid = rollout_videos(read_run(run_dir), VideoLimits(20)).grid
    assert grid is not None
    assert [group.heading for group in grid.groups] == ["by advantage, over all rewards", "by brightness", "by b"]
    found = [[None if cell.video is None else cell.video.name for cell in row.cells] for row in grid.groups[2].rows]
    assert found == [[None, "best-b.mp4"], [None, "worst.mp4"]]  # of the first step only two clips were kept


def test_hardware_of_each_process_is_drawn_for_one_run(tmp_path: Path) -> None:
    """Of several runs, only what all processes have together: rank 1 of one is not rank 1 of the other."""
    for name in ("a", "b"):
        records = [
            {"step": k, "gpu_power_w": 450.0 + k, "gpu_power_w/sum": 900.0 + 2 * k, "gpu_power_w/rank_0": 500.0 + k,
             "gpu_power_w/rank_1": 400.0 + k, "gpu_temperature_c": 60.0, "gpu_utilization_percent": 97.0,
             "network_mib_per_s/ethernet_sent": 1.5 * k, "network_mib_per_s/infiniband_received_max": 20.0 * k}
            for k in (1, 2, 3)
        ]  # fmt: skip
        write_lines(tmp_path / name / "metrics.jsonl", records)
    runs = [read_run(tmp_path / name, name=name) for name in ("a", "b")]
    [one] = chart_groups(runs[:1])
    assert [(chart.title, [s.label for s in chart.series]) for chart in one.charts] == [
        ("GPU power (W)", ["mean", "rank_0", "rank_1"]),
        ("Network traffic of a machine (MiB/s)", ["Ethernet sent", "InfiniBand received, most"]),
    ]
    assert (one.title, one.constant) == ("Hardware", "GPU temperature (C) 60, GPU utilization (%) 97")
    [both] = chart_groups(runs)
    assert [(chart.title, [s.label for s in chart.series]) for chart in both.charts] == [
        ("GPU power (W)", ["a", "b"]),
        ("Network traffic of a machine: Ethernet sent (MiB/s)", ["a", "b"]),
        ("Network traffic of a machine: InfiniBand received, most (MiB/s)", ["a", "b"]),
    ]
    [power] = summary_figures(runs[0])
    assert (power.name, power.value, power.note) == (
        "GPU power", "904 W", "median of all, hottest 60 C, utilization 97 %",
    )  # fmt: skip


def test_a_long_run_has_a_small_page_in_a_moment(tmp_path: Path) -> None:
    """Curves are thinned, and no spike is lost."""
    records = [
        {
            "time": 1e9 + k,
            "step": k,
            **dict.fromkeys(
                ("loss", "grad_norm", "step_s", "seconds/data", "tokens_per_s", "mfu", "memory/training_step/host_gib"),
                1.0 + k * 7919 % 1000 / 1000,
            ),
        }
        for k in range(1, 20_001)
    ]
    records[12_344]["loss"] = 99.0
    write_lines(tmp_path / "metrics.jsonl", records)
    begun = time.process_time()
    text = make_report([read_run(tmp_path)], VideoLimits(0))
    assert time.process_time() - begun < 4  # 0.5 s on an idle core
    assert len(text) < 300_000
    assert any([12_345, 99.0] in points for points in drawn(Page(text)).values())
