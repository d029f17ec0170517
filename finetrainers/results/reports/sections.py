"""Text and tables of a report: figures, data, events, settings, and commands that repeat the run."""

from __future__ import annotations

import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from finetrainers.data.inspect.html_report import shares_of
from finetrainers.data.inspect.report import counts_of, reasons_of
from finetrainers.plan.lineage import BEGAN_FROM, ancestors
from finetrainers.rundir.run_records import (
    Event,
    RunRecords,
    changed_options,
    describe_reward_hacking,
    differing_options,
    option_value,
    table_of,
)
from finetrainers.utils.phases import label
from finetrainers.utils.text import duration, plural, shortened

_STATUS = {
    "finished": ("finished", "good"),
    "stopped": ("stopped, with a checkpoint", "note"),
    "training": ("training", "held"),
    "ended": ("ended without a result", "bad"),
}
_MOST_EVENTS = 200
_NAMED = 5  # files listed for a reason
_LOWER_IS_BETTER = ("loss", "eval_loss")


def status_of(run: RunRecords) -> tuple[str, str]:
    """Return the outcome of a run, and its CSS class."""
    stops = run.of_kind("stopped", "stopped_by_guard")
    if run.status == "stopped" and stops[-1]["event"] == "stopped_by_guard":
        return f"stopped by {stops[-1].get('by')}, with a checkpoint", "bad"
    return _STATUS[run.status]


def facts_of(run: RunRecords) -> list[tuple[str, str]]:
    """Return the rows of a run's facts: method, model, steps, times, rewards, origin and versions."""
    options, environment = run.options, run.environment
    rows: list[tuple[str, str]] = []
    if options.get("model_name"):
        is_lora = option_value(run, "training_type") == "lora"
        kind = f"LoRA of rank {option_value(run, 'rank')}" if is_lora else "full finetune"
        rows.append(("training", f"{option_value(run, 'method')}, {kind}"))
        rows.append(("model", f"{options['model_name']}, {options.get('pretrained_model_name_or_path', '')}"))
    total = options.get("train_steps")
    rows.append(("steps", f"{run.last_step} of {total}" if total else str(run.last_step)))
    times = [record["time"] for record in (*run.events, *run.metrics) if isinstance(record.get("time"), int | float)]
    if times:
        start, end = (time.strftime("%Y-%m-%d %H:%M", time.localtime(when)) for when in (min(times), max(times)))
        rows.append(("recorded", f"{start} to {end}"))
    if run.training_seconds:
        rows.append(("training steps took", duration(run.training_seconds)))
    for event in run.of_kind("reward_hacking")[-1:]:
        good_checkpoint = f"; before it: {event['checkpoint']}" if event.get("checkpoint") else ""
        rows.append(
            ("reward hacking", f"seen at step {event.get('step')}: {describe_reward_hacking(event)}{good_checkpoint}")
        )
    resumes = [event for event in run.of_kind("start") if event.get("step")]
    if resumes:
        steps = ", ".join(str(event["step"]) for event in resumes)
        rows.append(("resumed", f"{plural(len(resumes), 'time')}, from step {steps}"))
    rows += [("and that from" if n else "began from", _origin(event)) for n, event in enumerate(ancestors(run.root))]
    packages = environment.get("packages") or {}
    versions = [f"{name} {packages[name]}" for name in ("finetrainers", "torch", "diffusers") if packages.get(name)]
    if versions:
        rows.append(("made with", ", ".join([*versions, f"Python {environment.get('python', '?')}"])))
    return rows


def _origin(event: Event) -> str:
    """Return the weights that a run began from, the run that made them, and their checkpoint."""
    loaded = {"full": "all weights", "lora": "a LoRA", "state": "weights, optimizer state"}.get(
        str(event.get("load")), "weights"
    )
    if event.get("run") is None:
        return f"{event.get('path')} ({loaded})"
    step = "" if event.get("step") is None else f"step {event['step']} of "
    checkpoint = f"; checkpoint {str(event['checkpoint'])[:12]}" if event.get("checkpoint") else ""
    return f"{step}{event['run']} ({loaded}{checkpoint})"


# ---- figures ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """A number of a run, for a tile or a table cell.

    Attributes:
        name: of the number.
        value: as text.
        note: its earlier value, or its parts.
    """

    name: str
    value: str
    note: str = ""


def summary_figures(run: RunRecords) -> list[Figure]:
    """Return the most important numbers of a run."""
    return [*_progress(run), *_speed(run), *_memory_figure(run), *_power_figure(run)]


def _progress(run: RunRecords) -> Iterator[Figure]:
    """Yield the first and last losses and rewards."""
    names = [n for n in run.names if n in ("eval_loss", "eval_accuracy") or n.startswith(("eval_reward/", "reward/"))]
    if not any(name.startswith("reward/") for name in names):  # the loss means little in a run with rewards
        names.append("loss")
    order = ("eval_loss", "eval_accuracy", "eval_reward", "reward", "loss")
    for name in sorted(names, key=lambda n: order.index(n.partition("/")[0])):
        steps, values = run.points(name)
        if not values:
            continue
        best = (min if name in _LOWER_IS_BETTER else max)(values)
        note = f"from {values[0]:.4g}" if len(values) > 1 else ""
        if len(values) > 2 and name.startswith("eval") and best != values[-1]:
            note += f"; best {best:.4g} at step {steps[values.index(best)]:g}"
        title = (
            name.replace("weighted_sum", "weighted sum")
            .replace("eval_reward/", "held-out reward, ")
            .replace("reward/", "rollout reward, ")
        )
        yield Figure(_NAMES.get(name, title), f"{values[-1]:.4g}", note)


_NAMES = {"loss": "training loss", "eval_loss": "held-out loss", "eval_accuracy": "held-out accuracy"}


def _speed(run: RunRecords) -> Iterator[Figure]:
    """Yield the median seconds of a step with their parts, and the median rates."""
    seconds = run.values("step_s")
    if not seconds:
        return
    step = median(seconds)
    parts = []
    for name in run.names:
        if name.startswith("seconds/") or name == "waiting_s":
            part = median(run.values(name) or [0.0])
            title = "waiting for the slowest rank" if name == "waiting_s" else name.partition("/")[2]
            parts.append(f"{title} {100 * part / step:.0f} %")
    yield Figure("seconds per step", f"{step:.3g}", ", ".join(parts) or "median")
    for name, title, number_format in (("tokens_per_s", "tokens per second", "{:.4g}"), ("mfu", "MFU", "{:.1%}")):
        if values := run.values(name):
            yield Figure(title, number_format.format(median(values)).replace("%", " %"), "median")


def _memory_figure(run: RunRecords) -> Iterator[Figure]:
    measured = run.measured_memory()
    for memory, title in (("allocated", "peak GPU memory"), ("host", "peak host memory")):
        peaks = {phase: peak[memory] for phase, peak in measured.items() if memory in peak}
        if peaks:
            peak_phase = max(peaks, key=lambda phase: peaks[phase])
            yield Figure(title, f"{peaks[peak_phase]:.3g} GiB", label(peak_phase))
            return


def _power_figure(run: RunRecords) -> Iterator[Figure]:
    """Yield the power of all GPUs, with the temperature of the hottest."""
    total_watts = run.values("gpu_power_w/sum")
    watts = total_watts or run.values("gpu_power_w")
    if not watts:
        return
    notes = ["median of all" if total_watts else "median"]
    if degrees := run.values("gpu_temperature_c"):
        notes.append(f"hottest {max(degrees):.0f} C")
    if shares := run.values("gpu_utilization_percent"):
        notes.append(f"utilization {median(shares):.0f} %")
    yield Figure("GPU power", f"{median(watts):.0f} W", ", ".join(notes))


def compared(runs: Sequence[RunRecords]) -> list[tuple[str, list[Figure | None]]]:
    """Return the rows of a comparison table: a figure of each run, or None; a single run has tiles instead."""
    if len(runs) == 1:
        return []
    figures_by_run = [{figure.name: figure for figure in summary_figures(run)} for run in runs]
    names = dict.fromkeys(name for figures in figures_by_run for name in figures)
    return [(name, [figures.get(name) for figures in figures_by_run]) for name in names]


# ---- data ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataSummary:
    """Use of the items in a run's dataset.

    Attributes:
        total: number of items, with their noun.
        shares: of uses, as on the page of `finetrainers check`.
        buckets: size, clips trained on, clips held out.
        reasons: for leaving items out, and remarks.
        rejected: names and reasons in full, the first ones.
        later: problems found while training, with counts.
    """

    total: str
    shares: list[dict[str, Any]]
    buckets: list[tuple[str, int, int]]
    reasons: list[dict[str, Any]]
    rejected: list[tuple[str, str]]
    later: list[str]


def summarize_data(run: RunRecords) -> DataSummary | None:
    """Return the use of a run's data, or None if nothing is recorded."""
    items = [item for item in run.items if "use" in item]
    later = list(_training_problems(run))
    if not items and not later:
        return None
    clips = [item for item in items if "status" in item and "name" in item]
    items = [{"status": "used", "marks": [], "name": item.get("prompt", ""), **item} for item in items]
    buckets: dict[str, Counter[str]] = defaultdict(Counter)
    for item in clips:
        if item.get("bucket"):
            buckets[str(item["bucket"])][item["use"]] += 1
    return DataSummary(
        total=plural(len(items), "item" if clips else "prompt"),
        shares=shares_of(counts_of(items)),
        buckets=[(bucket, uses["train"], uses["eval"]) for bucket, uses in sorted(buckets.items(), reverse=True)],
        reasons=reasons_of(items),
        rejected=[(str(item["name"]), str(item["reason"])) for item in items if item.get("reason")][:_MOST_EVENTS],
        later=later,
    )


def _training_problems(run: RunRecords) -> Iterator[str]:
    """Yield the clips that were left out while training."""
    bad = {str(event.get("file")): str(event.get("reason", "")) for event in run.of_kind("bad_sample")}
    for file, reason in list(bad.items())[:_NAMED]:
        yield f"{file}: {reason}"
    if len(bad) > _NAMED:
        yield f"and {len(bad) - _NAMED} more files that could not be read; events.jsonl has all (bad_sample)"
    if counts := [event.get("clips", 0) for event in run.of_kind("left_out")]:
        yield f"{min(counts)} to {max(counts)} clips an epoch fell through all buckets (bucket_keep_prob)"


# ---- events ----------------------------------------------------------------------------------------------------------

#: CSS class and text of each event; other events are listed as recorded.
_EVENTS: Mapping[str, tuple[str, Callable[[Event], str]]] = {
    "start": ("", lambda e: f"resumed from step {e['step']}" if e.get("step") else "started"),
    "origin": ("", lambda e: "; ".join(f"{k.replace('_', ' ')}: {v}" for k, v in _details(e).items())),
    BEGAN_FROM: ("", lambda e: f"began from {_origin(e)}"),
    "finished": ("good", lambda e: "finished"),
    "stopped": ("note", lambda e: f"stopped by {e.get('by')}"),
    "stopped_by_guard": ("bad", lambda e: f"stopped by {e.get('by')}"),
    "reward_hacking": ("bad", lambda e: f"reward hacking: {describe_reward_hacking(e)}"),
    "spike": ("note", lambda e: f"spike: {e.get('values')}"),
    "nonfinite": ("bad", lambda e: f"not finite: {e.get('values')}{'; step skipped' if e.get('skipped') else ''}"),
    "rollback": ("bad", lambda e: f"rolled back, after step {e.get('failed')} was not finite"),
    "out_of_memory": ("bad", lambda e: (
        f"out of memory with {e.get('samples')} samples of {e.get('latent_size')}; "
        f"retried with at most {e.get('now')} at once"
    )),
    "host_memory_low": ("bad", lambda e: f"host memory nearly full: {e.get('available_gib', 0):.2f} GiB left"),
    "bad_sample": ("note", lambda e: f"clip left out: {e.get('file')}: {e.get('reason')}"),
    "left_out": ("", lambda e: f"epoch {e.get('epoch')}: {e.get('clips')} clips fell through all buckets"),
    "loader_restarted": ("note", lambda e: f"loader restarted: {e.get('why')}"),
    "straggler": ("note", lambda e: f"the others wait {e.get('waiting_s')} s of each step for rank {e.get('rank')}"),
    "set_aside": ("", lambda e: f"set aside: {e.get('path')}"),
    "checkpoint_waited": ("", lambda e: f"waited {e.get('seconds')} s for the checkpoint before"),
    "tracker": ("", lambda e: f"{e.get('tracker')} run: {e.get('run') or e.get('project')}"),
    "tracker_failed": ("note", lambda e: f"{e.get('tracker')} failed: {e.get('error')}"),
    "dry_batch": ("", lambda e: f"dry batch of {e.get('samples')} x {e.get('size')}: {e.get('seconds')} s"),
}  # fmt: skip
#: Events that are counted, not listed: the page shows them elsewhere.
_COUNTED = {"checkpoint": "checkpoint", "checkpoint_removed": "removed checkpoint", "samples": "round of samples",
            "memory": "", "memory_planned": ""}  # fmt: skip


@dataclass(frozen=True)
class Events:
    """Rows of time, step, text and color; events that are only counted; and the number of rows left out."""

    rows: list[tuple[str, str, str, str]]
    counted: list[str]
    left_out: int


def events_of(run: RunRecords) -> Events | None:
    """Return the events, or None without any; those that need attention have a color."""
    if not run.events:
        return None
    counts = Counter(_COUNTED[k] for event in run.events if (k := event.get("event")) in _COUNTED and _COUNTED[k])
    rows = [_event_row(event) for event in run.events if event.get("event") not in _COUNTED]
    total = len(rows)
    many = {"round of samples": "rounds of samples"}
    counted = [plural(count, name, many.get(name)) for name, count in counts.items()]
    if len(rows) > _MOST_EVENTS:  # the first ones and the last ones
        rows = [*rows[: _MOST_EVENTS // 2], *rows[-_MOST_EVENTS // 2 :]]
    return Events(rows, counted, total - len(rows))


def _event_row(event: Event) -> tuple[str, str, str, str]:
    kind = str(event.get("event", ""))
    color, describe = _EVENTS.get(kind, ("", _describe))
    moment = event.get("time")
    when = time.strftime("%m-%d %H:%M:%S", time.localtime(moment)) if isinstance(moment, int | float) else ""
    # The step of this event is one of the run that it began from, and its text has it.
    step = "" if kind == BEGAN_FROM else str(event.get("step", ""))
    return when, step, shortened(describe(event), 600), color


def _describe(event: Event) -> str:
    """Return an event as recorded."""
    values = ", ".join(f"{name} {value}" for name, value in _details(event).items())
    return f"{str(event.get('event', '')).replace('_', ' ')} {values}".strip()


def _details(event: Event) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in ("time", "event", "step")}


# ---- settings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Value of an option in each run; `differs` if they are not all equal."""

    table: str
    name: str
    values: list[str]
    differs: bool


def list_settings(runs: Sequence[RunRecords]) -> list[Setting]:
    """Return the options that differ from their defaults in any run, after those that differ between runs."""
    differing = differing_options(runs) if len(runs) > 1 else []
    changed = [name for run in runs for name in changed_options(run)]
    return [
        Setting(table_of(name), name, [_format_value(option_value(run, name)) for run in runs], name in differing)
        for name in dict.fromkeys([*differing, *changed])
    ]


def _format_value(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value if isinstance(value, list) else [value]))


def list_commands(run: RunRecords) -> list[tuple[str, str]]:
    """Return labeled commands that repeat the run and continue it, and the one that started it."""
    config = shlex.quote(str(run.root / "config.toml"))
    commands = []
    if run.options:
        commands.append(
            ("the same training on the same data", f"finetrainers train --config {config} --output_dir repeated")
        )
        if run.status in ("stopped", "ended"):
            resume = f"finetrainers train --config {config} --resume_from_checkpoint latest"
            commands.append(("to continue it", resume))
    if command := run.environment.get("command"):
        program = "finetrainers" if str(command[0]).endswith(("finetrainers", "__main__.py")) else str(command[0])
        commit = run.environment.get("git")
        commit_note = f", at commit {str(commit)[:12]}" if commit else ""
        commands.append((f"how it was last started{commit_note}", shlex.join([program, *map(str, command[1:])])))
    return commands
