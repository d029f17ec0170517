"""Records of a run, read from its directory.

They can be read while the run trains, after a crash, and from earlier versions: missing records are empty.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from finetrainers.config.base import Section
from finetrainers.config.load import CHOSEN
from finetrainers.config.root import by_current_names, fields, flat_name, has_table, sections, split_name
from finetrainers.draw.curves import LARGEST, Points, is_number, points, read_metrics
from finetrainers.utils.files import missing_path_problem
from finetrainers.utils.phases import PHASES
from finetrainers.utils.reading import find_json_object, fitting, read_jsonl, read_text, read_toml

from .find import checkpoints_dir
from .health import HEALTH, reading
from .lock import in_use

_FILES = ("metrics.jsonl", "events.jsonl", "config.toml")
_TAIL = 12  # displayed lines of a failure's text
_RESULTS = ("pytorch_lora_weights.safetensors", "transformer", "transformer_2")

Event = Mapping[str, Any]


def _is_moment(value: object) -> bool:
    """Return whether a value is a time that the system can write as a date."""
    return is_number(value) and abs(value) < 1e11


#: Types of the values that pages compute with; others of a record, which may come from an edited file, are left out.
_EVENT_TYPES = {
    "event": str, "time": _is_moment, "step": float, "gib": {str: {str: float}}, "clips": float, "available_gib": float,
    "path": str, "run": str,
}  # fmt: skip
_METRIC_TYPES = {"time": _is_moment, "steps": float, "step_s": float}
_ITEM_TYPES = {
    "use": str, "status": str, "marks": [str], "name": str, "bucket": str, "reason": str, "prompt": str, "crop": float,
    "scale": float,
}  # fmt: skip
_ENVIRONMENT_TYPES = {"packages": {str: str}, "python": str, "command": [str], "git": str}


@dataclass(frozen=True)
class RunRecords:
    """The records of a run.

    Attributes:
        root: the run directory.
        name: the run's name on the page.
        options: of `config.toml`, by flat name.
        environment: of `env.json`.
        metrics: of `metrics.jsonl`, without steps that were redone.
        events: of `events.jsonl`.
        items: of `manifest.jsonl`: clips or prompts.
        status: `finished`, `stopped`, `training`, or `ended` for a run that left no result.
        failures: tracebacks and stacks left by failures, each with the file's name.
        health: of `health.jsonl`, with a time and a host each, in the order of time.
    """

    root: Path
    name: str
    options: Mapping[str, Any]
    environment: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    events: Sequence[Event]
    items: Sequence[Mapping[str, Any]]
    status: str
    failures: Sequence[tuple[str, str]] = field(default_factory=tuple)
    health: Sequence[Mapping[str, Any]] = ()

    @property
    def last_step(self) -> int:
        """Step of the last record."""
        return int(max((record["step"] for record in self.metrics), default=0))

    def points(self, name: str, x: str = "step") -> Points:
        """Return the points of a metric, by step or by another metric."""
        return self._by_step.get(name, ([], [])) if x == "step" else points(self.metrics, name, x)

    @cached_property
    def _by_step(self) -> dict[str, Points]:
        """Points of all metrics; one pass, since a long run has many."""
        points_by_name: dict[str, Points] = defaultdict(lambda: ([], []))
        for record in self.metrics:
            step = record["step"]
            for name, value in record.items():
                if isinstance(value, float | int) and -LARGEST < value < LARGEST:  # `is_number`, called most here
                    xs, ys = points_by_name[name]
                    xs.append(step)
                    ys.append(value)
        return dict(points_by_name)

    @cached_property
    def times(self) -> list[float]:
        """Time at which each record was written, never falling; empty if no record has one."""
        moments, last = [], 0.0
        for record in self.metrics:
            moment = record.get("time")
            last = max(last, moment) if is_number(moment) else last
            moments.append(last)
        return moments if last else []

    def values(self, name: str) -> list[float]:
        """Return a metric's values."""
        return self.points(name)[1]

    @property
    def names(self) -> list[str]:
        """Names of all metrics."""
        return list(self._by_step)

    @property
    def training_seconds(self) -> float:
        """Total time of training steps, as recorded."""
        return sum(r["step_s"] * r.get("steps", 1) for r in self.metrics if isinstance(r.get("step_s"), int | float))

    def of_kind(self, *kinds: str) -> list[Event]:
        """Return the events of these kinds."""
        return [event for event in self.events if event.get("event") in kinds]

    def measured_memory(self) -> dict[str, dict[str, float]]:
        """Return GiB of each phase: the maximum of all processes if the run has ended, else that of rank 0."""
        phases: dict[str, dict[str, float]] = {}
        for event in self.of_kind("memory"):
            _keep_greatest(phases, event.get("gib"))
        if not phases:
            for name, (_, values) in self._by_step.items():
                prefix, _, rest = name.partition("/")
                phase, _, measure = rest.partition("/")
                if prefix == "memory" and measure:
                    _keep_greatest(phases, {phase: {measure.removesuffix("_gib"): max(values)}})
        return {phase: phases[phase] for phase in PHASES if phase in phases}

    def planned_memory(self) -> dict[str, dict[str, float]]:
        """Return GiB of each phase, as planned at the last start."""
        planned = self.of_kind("memory_planned")
        return dict(planned[-1].get("gib") or {}) if planned else {}


def _keep_greatest(phases: dict[str, dict[str, float]], peaks: object) -> None:
    """Update the greatest GiB of each phase and measure by those of `peaks`, which may come from an edited file."""
    for phase, peak in peaks.items() if isinstance(peaks, Mapping) else ():
        for measure, value in peak.items() if isinstance(peak, Mapping) else ():
            if isinstance(value, int | float):
                greatest = phases.setdefault(phase, {})
                greatest[measure] = max(value, greatest.get(measure, value))


def run_problem(root: Path) -> str | None:
    """Return the reason why a path is not a run directory, as a predicate of the path, or None if it is one."""
    if not root.is_dir():
        return missing_path_problem(root, folder=True)
    if not any((root / name).is_file() for name in _FILES):
        inside = sorted(path.parent.name for path in root.glob("*/metrics.jsonl"))
        if inside:
            return f"is not a run directory, but contains some: {', '.join(str(root / name) for name in inside[:5])}"
        above = next((folder for folder in root.absolute().parents if (folder / "metrics.jsonl").is_file()), None)
        if above is not None:
            return f"is a directory inside of a run; use the run directory, {above}"
        return f"is not a run directory: it has none of {', '.join(_FILES)}"
    return None


def read_run(root: Path, *, name: str = "") -> RunRecords:
    """Read a run directory.

    Args:
        root: the directory.
        name: what to call it; default: the end of its path.
    """
    events = _read_lines(root / "events.jsonl", _EVENT_TYPES)
    metrics = root / "metrics.jsonl"
    return RunRecords(
        root=root,
        name=name or "/".join(root.resolve().parts[-2:] if root.is_absolute() else root.parts) or root.resolve().name,
        options=_read_options(root / "config.toml"),
        environment=fitting(find_json_object(root / "env.json"), _ENVIRONMENT_TYPES),
        metrics=[fitting(r, _METRIC_TYPES) for r in read_metrics(metrics)] if metrics.is_file() else [],
        events=events,
        items=_read_lines(root / "manifest.jsonl", _ITEM_TYPES),
        status=_find_status(root, events),
        failures=_read_failures(root),
        health=_read_health(root),
    )


def _read_health(root: Path) -> list[dict[str, Any]]:
    """Return the readings of machines, checked as those of a machine's answer: the file may have been edited."""
    records = [
        r for r in _read_lines(root / HEALTH, {"time": _is_moment}) if "time" in r and isinstance(r.get("host"), str)
    ]
    readings = [
        reading(r["host"], None if "error" in r else r, r["time"], error=str(r.get("error", ""))) for r in records
    ]
    return sorted(readings, key=lambda record: record["time"])


def run_status(root: Path) -> str:
    """Return the status of a run, see `RunRecords`."""
    return _find_status(root, _read_lines(root / "events.jsonl", _EVENT_TYPES))


def _find_status(root: Path, events: Sequence[Event]) -> str:
    kinds = [event.get("event") for event in events]
    last_start = max((index for index, kind in enumerate(kinds) if kind == "start"), default=0)
    kinds = kinds[last_start:]
    if "finished" in kinds:
        return "finished"
    if {"stopped", "stopped_by_guard"} & set(kinds):
        return "stopped"
    if in_use(root):
        return "training"
    # Earlier versions wrote no event at the end.
    return "finished" if "memory" in kinds or _has_result(root) else "ended"


def _has_result(root: Path) -> bool:
    """Return whether a result exists that is not older than the newest checkpoint."""
    newest = max((path.stat().st_mtime for path in checkpoints_dir(root).glob("step-*")), default=0.0)
    return any(path.stat().st_mtime >= newest for path in result_paths(root))


def result_paths(root: Path) -> list[Path]:
    """Return the paths of the weights that a run left as its result."""
    return [path for name in _RESULTS if (path := root / name).exists()]


def _read_failures(root: Path) -> list[tuple[str, str]]:
    """Return the end of each text that failures left, with the file's name and time."""
    paths = [*sorted((root / "failures").glob("rank-*.txt")), *sorted((root / "hangs").glob("rank-*.txt"))]
    failures = []
    for path in [root / "traceback.txt", *paths]:
        if path.is_file():
            lines = read_text(path, errors="replace").rstrip().splitlines()
            excerpt = lines[-_TAIL:] if path.name == "traceback.txt" else lines[: 2 * _TAIL]
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
            failures.append((f"{path.relative_to(root).as_posix()}, {when}", "\n".join(excerpt)))
    return failures


def _read_lines(path: Path, kinds: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [fitting(record, kinds) for record in read_jsonl(path)[0]] if path.is_file() else []


def _read_options(path: Path) -> dict[str, Any]:
    """Return the options of a `config.toml` by flat name; former options keep the name of their table."""
    try:
        tables = read_toml(path)
    except ValueError:
        return {}
    options: dict[str, Any] = {}
    for table, values in tables.items():
        if not isinstance(values, dict):
            options[table] = values
            continue
        if table == CHOSEN:  # a table for each source
            values = {name: value for chosen in values.values() for name, value in chosen.items()}
        section = table if table != CHOSEN and has_table(table) else None
        options |= {flat_name(key, section): value for key, value in values.items()}
    return by_current_names(options)


def _defaults() -> Mapping[str, Any]:
    """Return default values by flat name, as a file has them."""
    return _table_defaults(tuple(sections().items()))


@lru_cache(maxsize=1)
def _table_defaults(tables: tuple[tuple[str, type[Section]], ...]) -> dict[str, Any]:
    defaults: dict[str, Any] = {}
    for table, section in tables:
        values = section.model_construct().model_dump(mode="json", warnings=False)
        defaults |= {flat_name(key, table): value for key, value in values.items()}
    return defaults


def describe_reward_hacking(event: Event) -> str:
    """Return a short description of a `reward_hacking` event."""

    def change(before: str, now: str) -> str:
        return " -> ".join(f"{event[name]:.3g}" if is_number(event.get(name)) else "?" for name in (before, now))

    judge = str(event.get("judge"))
    metric = "KL" if judge == "kl" else judge if judge.startswith("witness/") else f"held-out reward {judge}"
    trained = change("trained_before", "trained_now")
    return f"{metric} {change('before', 'now')} since step {event.get('best_step')}, trained reward {trained}"


def changed_options(run: RunRecords) -> dict[str, Any]:
    """Return a run's options that differ from the current defaults, except its output directory."""
    defaults = _defaults()
    return {
        name: value
        for name, value in run.options.items()
        if name != "output_dir" and (name not in defaults or defaults[name] != value)
    }


def option_value(run: RunRecords, name: str) -> Any:
    """Return an option's value; an option missing from the file has its default."""
    return run.options.get(name, _defaults().get(name) if run.options else None)


def differing_options(runs: Sequence[RunRecords]) -> list[str]:
    """Return the names of options in which runs differ, except the output directory, in the reference's order."""
    names = dict.fromkeys([*fields(), *(name for run in runs for name in run.options)])
    return [name for name in names if name != "output_dir" and len({repr(option_value(r, name)) for r in runs}) > 1]


def table_of(name: str) -> str:
    """Return the table of a file that an option is in."""
    table, _ = split_name(name)
    return table or (fields()[name].section if name in fields() else "")
