"""Checks that runs and commands do not write into directories, or over files, of others. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from finetrainers.config.root import TrainConfig, fields, sections
from finetrainers.config.values import split_part
from finetrainers.rundir.find import checkpoints_dir, step_of
from finetrainers.rundir.identity import IDENTITY, Identity, read_identity
from finetrainers.rundir.manifest import read_manifest
from finetrainers.utils.files import open_regular
from finetrainers.utils.reading import find_json_object, read_jsonl, read_toml
from finetrainers.utils.text import listed, plural, printable

from .initial_weights import INITIAL_LORA, LORA_FILE

CONFIG = "config.toml"
#: Options that name weights of the model.
MODEL_OPTIONS = [name for name, option in fields().items() if option.place == "model"]
#: Entries that a command leaves in a directory before its run has records. A run replaces none of them.
_BEFORE_RECORDS = frozenset(
    ("train.log", "traceback.txt", "hangs", "failures", "control", "precomputed", "stage.toml", "lost+found")
)
#: Entries that a run or a command about it writes, besides its result and the folder of its tracker.
_RECORDS = frozenset(
    (IDENTITY, CONFIG, "env.json", "README.md", "report.html", "metrics.jsonl", "events.jsonl", "manifest.jsonl")
) | frozenset(("dataset.toml", "curves.png", "rollouts.png", "vq_reward.txt", "mq_reward.txt"))
_FOLDERS = frozenset(
    ("checkpoints", "samples", "rollouts", "pairs", "export", "watch", "videos", "profile", INITIAL_LORA)
)
#: Files that a launcher, a scheduler or a shell writes next to a run that it starts, and configuration files.
_SUFFIXES_BESIDE = (".log", ".out", ".err", ".toml")
#: A file in an exported folder that names its run and the other files of the export.
EXPORTED = ".export.json"
#: Bytes at the beginning of a page by any version of this program.
_PAGE = b"default-src 'none'; img-src data:"
_MAX_NAMES = 6


def is_run(directory: Path) -> bool:
    """Return whether a directory is that of a run of any version, even if only a part of it was copied."""
    packages = find_json_object(directory / "env.json").get("packages")
    return (
        read_identity(directory) is not None
        or _has_checkpoint(directory)
        or (isinstance(packages, dict) and "finetrainers" in packages)
        or _has_events(directory / "events.jsonl")
    )


def _has_checkpoint(directory: Path) -> bool:
    with suppress(OSError):
        for path in checkpoints_dir(directory).iterdir():
            with suppress(OSError, ValueError):
                if step_of(path) is not None:
                    read_manifest(path)
                    return True
    return False


def _has_events(path: Path) -> bool:
    try:
        records = read_jsonl(path)[0]
    except OSError:
        return False
    return any(record.get("event") == "start" and "step" in record for record in records[:1])


def _is_resolved_config(path: Path) -> bool:
    """Return whether a run wrote a configuration: it names most options. People copy it to start another run."""
    try:
        document = read_toml(path)
    except ValueError:
        return False
    tables = [table for name, table in document.items() if name in sections() and isinstance(table, dict)]
    return sum(map(len, tables)) > len(fields()) // 3


# ---- the output directory of a run -----------------------------------------------------------------------------------


def output_dir_problems(config: TrainConfig, *, trained: str) -> Iterator[str]:
    """Yield the reasons why a run must not write into its output directory: it would overwrite others' files.

    Args:
        config: of the run.
        trained: the folder of the network that full finetuning writes.
    """
    root = config.run.output_dir
    result = LORA_FILE if config.training.training_type == "lora" else trained
    written = _written_entries(config, trained)
    if root.is_dir() and not is_run(root):
        foreign = _foreign_entries(root, written, used=_used_entries(config, root))
        if foreign:
            lost = [name for name in foreign if name in written - {LORA_FILE, trained} | {Path(result).parts[0]}]
            overwritten = f", and the run would overwrite {_list_names(lost)}" if lost else ""
            yield (
                f"{root} is not the directory of a run: it holds {_list_names(foreign)}{overwritten}; use a new or "
                "empty directory"
            )
            return
    identity = read_identity(root)
    exports = [export_problem(root / "export" / name, trained=trained, identity=identity)
               for name in config.run.export_formats]  # fmt: skip
    yield from filter(None, exports)
    if option := _find_weights_option(config, root / result, trained):
        yield f"the result would overwrite {root / result}, the weights of --{option}; use another directory"
    runs = filter(is_run, Path(os.path.realpath(root)).parents)
    yield from filter(None, (inside_problem(config, parent, trained=trained) for parent in runs))


def inside_problem(config: TrainConfig, other: Path, *, trained: str) -> str | None:
    """Return the problem that another run writes into a run's output directory, or None if there is none.

    Args:
        config: of the run.
        other: the directory of the other run.
        trained: the folder of the network that full finetuning writes.
    """
    root, other = Path(os.path.realpath(config.run.output_dir)), Path(os.path.realpath(other))
    if other not in root.parents:
        return None
    name = root.relative_to(other).parts[0]
    if name not in _written_entries(config, trained):
        return None
    return (
        f"{config.run.output_dir} is in {name}/ of the run {other}, which writes there; use a directory outside of it"
    )


def _written_entries(config: TrainConfig, trained: str) -> set[str]:
    """Return the entries that a run writes into its directory."""
    return {*_RECORDS, *_FOLDERS, LORA_FILE, trained, Path(config.run.logging_dir).parts[0]}


def _foreign_entries(root: Path, written: Collection[str], *, used: Collection[str]) -> list[str]:
    """Return the entries that keep a run from starting in a directory; those that it would overwrite come first."""
    foreign = []
    for path in sorted(root.iterdir()):
        name = path.name
        is_record = _is_resolved_config(path) if name == CONFIG else name in _BEFORE_RECORDS or name.startswith(".")
        if is_record or (name not in written and (name in used or name.endswith(_SUFFIXES_BESIDE) or is_run(path))):
            continue
        foreign.append(name)
    return sorted(foreign, key=lambda name: name not in written)


def _used_entries(config: TrainConfig, root: Path) -> set[str]:
    """Return the entries of a directory that options name, or that contain something that options name."""
    base, separator = Path(os.path.realpath(root)), config.validation.validation_separator
    parts = [part for text in _strings(config.plain()) for part in text.split(separator) if "\0" not in part]
    paths = [Path(os.path.realpath(part)) for part in parts]
    return {path.relative_to(base).parts[0] for path in paths if base in path.parents}


def _strings(value: Any) -> Iterator[str]:
    """Yield every string and path in a configuration."""
    if isinstance(value, str | Path):
        yield str(value)
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(inner)


def model_sources(config: TrainConfig) -> list[tuple[str, str | None]]:
    """Return the options that name weights of the model, each with its directory, file or Hub id."""
    parts = [("part", split_part(text)[1]) for text in config.model.part]
    return [*((name, config.get(name)) for name in MODEL_OPTIONS if name != "part"), *parts]


def _find_weights_option(config: TrainConfig, result: Path, trained: str) -> str | None:
    """Return the option that names the weights at a path, or None if none does."""
    if not result.exists():
        return None
    result = result.resolve()
    # A run that is continued writes over its own result, which a repeated command may name.
    initial = None if config.training.resume_from_checkpoint else config.training.init_from
    for option, value in [*model_sources(config), ("init_from", initial)]:
        path = Path(os.path.realpath(value)) if value else None
        if path is not None and result in (path, *path.parents, path / trained, path / LORA_FILE):
            return option
    return None


def _list_names(names: list[str]) -> str:
    """Return names of entries as text, only the first few of many."""
    remaining = len(names) - _MAX_NAMES
    visible = [printable(name) for name in names[:_MAX_NAMES]]
    return listed([*visible, plural(remaining, "other", "others")] if remaining > 0 else visible)


# ---- what other commands write ---------------------------------------------------------------------------------------


def page_problem(path: Path) -> str | None:
    """Return the problem that an HTML page would replace another file, or None."""
    return _file_problem(path, is_ours=_is_page(path))


def json_problem(path: Path, *keys: str) -> str | None:
    """Return the problem that a JSON object with these keys would replace another file, or None."""
    return _file_problem(path, is_ours=set(keys) <= find_json_object(path).keys())


def _file_problem(path: Path, *, is_ours: bool) -> str | None:
    if is_ours or not path.is_file() or not path.stat().st_size:
        return None
    return f"{path} exists, and was not written by this command; use another file, or remove it"


def _is_page(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return _PAGE in file.read(2000)
    except OSError:
        return False


def export_problem(folder: Path, *, trained: str, identity: Identity | None) -> str | None:
    """Return the problem that an export would replace another run's, or other files, or None.

    Args:
        folder: of one format.
        trained: the folder of the network that full finetuning writes.
        identity: of the exported run, if it has one.
    """
    if not folder.is_dir():
        return None
    record = find_json_object(folder / EXPORTED)
    run = record.get("run")
    if run is not None and identity is not None and run != identity.run:
        return f"{folder} holds an export of another run, which would be lost; remove it, or set another --output_dir"
    names = [path.name for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
    files = record.get("files")
    if not isinstance(files, list):  # of an earlier version, which wrote one file of weights under any name
        weights = [name for name in names if name.endswith(".safetensors")]
        files = [LORA_FILE, "adapter_model.safetensors", "adapter_config.json", trained]
        files += weights if len(weights) == 1 else []
    exported = set(map(str, files))
    others = [name for name in names if name not in exported]
    if others:
        return (
            f"{folder} also holds {_list_names(others)}, which would be lost; move it away, or set another --output_dir"
        )
    return None


def samples_problem(folder: Path) -> str | None:
    """Return the problem that the page or sheet of samples would overwrite other files, or None if there is none."""
    page, sheet = folder / "index.html", folder / "sheet.png"
    others = [] if _is_page(page) or not page.exists() else [page.name]
    if sheet.exists() and not _is_page(page) and not any(folder.glob("ledger*.jsonl")):
        others.append(sheet.name)
    return (
        f"{folder} holds {listed(others)} of another origin, which would be overwritten; use another directory"
        if others
        else None
    )
