"""The datasets of a run: the one of its options, or those of a TOML file, each with its own options. Imports no torch.

A file has defaults at its top and a `[[dataset]]` table for each dataset, whose keys are data options by their own
names, `name`, and `num_repeats` or `weight`. Files of diffusion-pipe, with `[[directory]]` tables, are read without
changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from finetrainers.config.base import Section
from finetrainers.config.checks.data import check_dataset
from finetrainers.config.checks.findings import Findings
from finetrainers.config.errors import Problem, value_kind, value_message
from finetrainers.config.names import INSTEAD, suggest_option
from finetrainers.config.root import TrainConfig, fields, former_names
from finetrainers.config.sections import DataSection
from finetrainers.utils.failures import error_kind
from finetrainers.utils.reading import read_toml
from finetrainers.utils.text import plural

from .diffusion_pipe import Translated, translate
from .items import DataError, Reading, read_dataset
from .sources.captions import has_word
from .sources.folder import LISTS, lacks_lists
from .sources.rows import path_error


class _Share(Section):
    """Keys of a table that are not data options."""

    name: Annotated[str, Field(min_length=1)] | None = None
    num_repeats: float | None = Field(None, gt=0, allow_inf_nan=False)
    weight: float | None = Field(None, gt=0, allow_inf_nan=False)


_KEYS = [*_Share.model_fields, *(name for name, option in fields().items() if option.scope == "dataset")]
#: Two ways to set the sizes: a dataset that uses one of them ignores the run's options of the other.
_BUCKET_OPTIONS, _AREA_OPTIONS = (
    ("video_resolution_buckets", "image_resolution_buckets"),
    ("resolutions", "frame_buckets"),
)


@dataclass(frozen=True)
class Dataset:
    """A dataset of a run.

    Attributes:
        name: for messages; empty where there is only the one that the run's options name.
        data: the run's data options, with those of this dataset.
        repeats: how often each of its items comes in an epoch.
        weight: its share of the samples, in proportion to the others'; then `repeats` follows from it.
        held_out: whether it is only evaluated.
        warnings: where training differs from what its file seems to ask for.
    """

    name: str
    data: DataSection
    repeats: float = 1.0
    weight: float | None = None
    warnings: tuple[str, ...] = ()
    held_out: bool = False

    @property
    def prefix(self) -> str:
        """The prefix of messages about it."""
        return f"{self.name}: " if self.name else ""


def read_datasets(data: DataSection) -> list[Dataset]:
    """Return the datasets that the options name; the one that is only evaluated comes last.

    Raises:
        DataError: the TOML file is missing or invalid; all of its problems at once.
    """
    if data.eval_dataset_file is not None:
        names = ("data_root", "dataset", "hf_dataset", "max_items", "eval_dataset_file")
        update = {**dict.fromkeys(names), "dataset_file": data.eval_dataset_file}
        training = data.model_copy(update={"eval_dataset_file": None})
        return [*read_datasets(training), Dataset("eval", data.model_copy(update=update), held_out=True)]
    if data.dataset is None:
        return [Dataset("", data)]
    document = _read_document(data.dataset)
    if "directory" in document and "dataset" in document:
        message = f"{data.dataset}: [[dataset]] and [[directory]] cannot be combined; use one of them"
        raise DataError(message, kind="conflict")
    kind = "directory" if "directory" in document else "dataset"
    tables = document.pop(kind, None)
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        message = f"{data.dataset}: requires a [[dataset]] table for each dataset, with its options"
        raise DataError(message, kind="required")
    problems: list[Problem] = []
    datasets = [
        _parse_table(table, document, f"[[{kind}]] {number}", data, problems)
        for number, table in enumerate(tables, start=1)
    ]
    if not problems:
        problems += _common_problems(datasets)
    if problems:
        problems = list(dict.fromkeys(problems))  # a problem at the top repeats for every table
        raise DataError(f"{data.dataset}: {plural(len(problems), 'problem')}", problems)
    return [
        replace(dataset, data=_with_buckets(dataset.data, data.dataset_buckets.get(dataset.name, ())))
        for dataset in _with_names(datasets)
    ]


def trigger_words(data: DataSection) -> tuple[str, ...]:
    """Return the trigger words of all datasets, each once.

    Raises:
        DataError: see `read_datasets`.
    """
    tokens = ((dataset.data.id_token or "").strip() for dataset in read_datasets(data))
    return tuple(dict.fromkeys(filter(None, tokens)))


def readable_trigger_words(data: DataSection) -> tuple[str, ...]:
    """Return the trigger words of all datasets, or none if the datasets cannot be read here."""
    with suppress(DataError):
        return trigger_words(data)
    return ()


def trigger_warning(data: DataSection, prompts: Iterable[str]) -> str | None:
    """Return a warning if prompts are sampled and none has a trigger word, or None. Unreadable datasets have none."""
    triggers, prompts = readable_trigger_words(data), list(prompts)
    if not prompts or not triggers or any(has_word(prompt, word) for prompt in prompts for word in triggers):
        return None
    words = " or ".join(triggers)
    return f"no prompt has the trigger word {words} (id_token), so samples need not show what its captions teach"


def _with_buckets(data: DataSection, buckets: Sequence[tuple[int, int, int]]) -> DataSection:
    """Return the options of a dataset with buckets that were chosen for it, unless its options say how it is cut.

    With `resolutions` only the lengths were chosen.
    """
    if any(getattr(data, name) for name in (*_BUCKET_OPTIONS, "frame_buckets", "sliding_window_size")):
        return data
    videos = [bucket for bucket in buckets if bucket[0] > 1]
    sizes: dict[str, Any] = {"frame_buckets": sorted({bucket[0] for bucket in videos}, reverse=True)}
    if not data.resolutions:
        sizes = {
            "video_resolution_buckets": videos,
            "image_resolution_buckets": [bucket[1:] for bucket in buckets if bucket[0] == 1],
        }
    return data.model_copy(update=sizes)


def media_dir(config: TrainConfig) -> Path:
    """Return the folder into which media of tars and parquet files are unpacked, next to the precomputed tensors."""
    return (config.data.precompute_dir or config.run.output_dir / "precomputed") / "media"


def read_all(datasets: Sequence[Dataset], media: Path) -> list[Reading]:
    """Return the items of each dataset, with consecutive numbers, under names that do not depend on the machine.

    Args:
        datasets: of the run.
        media: see `media_dir`.

    Raises:
        DataError: a dataset cannot be used; with the problems of all datasets.
    """
    readings: list[Reading] = []
    problems: list[Problem] = []
    count = 0
    for dataset in datasets:
        try:
            prefix = f"{dataset.name}/" if dataset.name else ""
            reading = read_dataset(dataset.data, media_dir=media, first=count, prefix=prefix)
        except DataError as error:
            if not dataset.name:
                raise
            texts = error.problems or [str(error)]
            problems += [Problem(dataset.name, text, error.kind) for text in texts]
            continue
        readings.append(reading)
        count += len(reading.items)
    if problems:
        raise DataError(f"unusable datasets: {plural(len(problems), 'problem')}", problems)
    return readings


def epoch_repeats(datasets: Sequence[Dataset], counts: Sequence[int]) -> list[float]:
    """Return how often an item of each dataset comes in an epoch.

    With weights w_d and n_d items, N in all, it is w_d / sum(w) * N / n_d: an epoch then has N samples, and dataset d
    has the share w_d / sum(w) of them.
    """
    if any(dataset.weight is None for dataset in datasets):
        return [dataset.repeats for dataset in datasets]
    weights = [(dataset.weight or 0.0) if count else 0.0 for dataset, count in zip(datasets, counts, strict=True)]
    return [
        weight / sum(weights) * sum(counts) / count if count else 0.0
        for weight, count in zip(weights, counts, strict=True)
    ]


def _read_document(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise path_error("dataset", path)
    try:
        return read_toml(path)
    except ValueError as error:
        raise DataError(str(error), kind=error_kind(error)) from error


def _parse_table(
    table: Mapping[str, Any], top: Mapping[str, Any], where: str, data: DataSection, problems: list[Problem]
) -> Dataset:
    """Return the dataset of a table with the file's defaults; errors go to `problems`."""
    if isinstance(table.get("name"), str):
        where += f" ({table['name']})"
    values = {**top, **table}
    is_diffusion_pipe = where.startswith("[[directory]]")
    translated = translate(values) if is_diffusion_pipe else Translated(dict(values))
    # diffusion-pipe resolves the path of masks relative to the file, this package relative to the clips.
    if is_diffusion_pipe and isinstance(folder := translated.options.get("mask_column"), str):
        translated.options["mask_column"] = str(((data.dataset or Path()).parent / folder).absolute())

    def locate(key: str) -> str:
        return f"{'at the top' if key in top and key not in table else where}: {key}"

    for key in [key for key in translated.options if key in former_names()]:
        name = former_names()[key]
        translated.options[name] = translated.options.pop(key)
        translated.warnings[key] = f"was renamed to {name}"
    table_problems = [Problem.from_error(locate(key), error) for key, error in translated.problems.items()]
    for key in [key for key in translated.options if key not in _KEYS]:
        message = _unknown_key_message(key, translated.options.pop(key))
        table_problems.append(Problem(locate(key), message, "unsupported" if key in fields() else "unknown"))
    share, options = (
        _validate_section(section, translated.options, locate, table_problems) for section in (_Share, DataSection)
    )
    if "weight" in share and "num_repeats" in share:
        message = "weight and num_repeats cannot be combined; remove one of them"
        table_problems.append(Problem(where, message, "conflict"))
    merged = _merge_options(options, data, names_columns=bool(set(LISTS) & table.keys()))
    warnings = [f"{locate(key)}: {message}" for key, message in translated.warnings.items()]
    if not table_problems:
        check_dataset(merged, given=options, found=(findings := Findings()))
        table_problems += [
            replace(problem, where=f"{where}: {problem.where.removeprefix('--')}") for problem in findings.errors
        ]
        warnings += [f"{where}: {warning}" for warning in findings.warnings]
    problems += table_problems
    return Dataset(
        share.get("name") or "",
        merged,
        repeats=share.get("num_repeats") or 1.0,
        weight=share.get("weight"),
        warnings=tuple(warnings),
    )


def _unknown_key_message(key: str, value: Any) -> str:
    """Return the reason why a table must not have the key."""
    if key in fields():
        return "must be the same for all datasets; set it as an option of the run"
    if isinstance(value, dict):
        return "unknown table"
    suggestion = suggest_option(key, _KEYS)
    hint = f"; {INSTEAD[key]}" if key in INSTEAD else f"; did you mean {suggestion!r}?" if suggestion else ""
    return f"is not an option of a dataset{hint}"


def _merge_options(options: dict[str, Any], data: DataSection, *, names_columns: bool) -> DataSection:
    """Return the run's options updated with a dataset's, whose paths are relative to the file of datasets."""
    for key in ("data_root", "dataset_file"):
        if options.get(key) is not None:
            options[key] = (data.dataset or Path()).parent / options[key]
    sizes: dict[str, Any] = {}
    for used, ignored in ((_BUCKET_OPTIONS, _AREA_OPTIONS), (_AREA_OPTIONS, _BUCKET_OPTIONS)):
        if any(options.get(key) for key in used):
            sizes |= {key: [] for key in ignored}
    dataset_columns = dict(options.get("extra_columns", ()))  # the model determines the media that exist
    columns = [(name, dataset_columns.get(name, column)) for name, column in data.extra_columns]
    merged = data.model_copy(update={**sizes, **options, "extra_columns": columns, "dataset": None})
    if not names_columns and lacks_lists(merged):
        # The columns that the top or the run names are those of the tables among the datasets.
        merged = merged.model_copy(update={name: DataSection.model_fields[name].default for name in LISTS})
    return merged


def _validate_section(
    section: type[Section], options: Mapping[str, Any], locate: Callable[[str], str], problems: list[Problem]
) -> dict[str, Any]:
    """Return the validated values of a section's options; errors go to `problems`."""
    values = {key: value for key, value in options.items() if key in section.model_fields}
    try:
        validated = section.model_validate(values)
    except ValidationError as error:
        invalid = set()
        for entry in error.errors():
            key = str(entry["loc"][0])
            invalid.add(key)
            problems.append(Problem(locate(key), value_message(entry), value_kind(entry)))
        return _validate_section(
            section, {key: value for key, value in values.items() if key not in invalid}, locate, problems
        )
    return {key: getattr(validated, key) for key in values}


def _common_problems(datasets: Sequence[Dataset]) -> list[Problem]:
    names = [dataset.name for dataset in datasets if dataset.name]
    problems = [
        Problem("", f"{names.count(name)} datasets are named {name!r}; names must be unique", "duplicate")
        for name in names
        if names.count(name) > 1
    ]
    weighted = sum(dataset.weight is not None for dataset in datasets)
    if 0 < weighted < len(datasets):
        message = f"{weighted} of {len(datasets)} datasets have a weight; set one for all, or use num_repeats"
        problems.append(Problem("", message, "required"))
    return problems


def _with_names(datasets: Sequence[Dataset]) -> list[Dataset]:
    """Return the datasets, each with a name: its own, or that of its folder or file."""
    used_names = {dataset.name for dataset in datasets}
    named_datasets = []
    for dataset in datasets:
        name = dataset.name
        if not name:
            path = dataset.data.dataset_file or dataset.data.data_root
            stem = (path.stem if dataset.data.dataset_file else path.name) if path else str(dataset.data.hf_dataset)
            stem = name = stem or "data"
            suffix = 2
            while name in used_names:
                name, suffix = f"{stem}-{suffix}", suffix + 1
            used_names.add(name)
        named_datasets.append(replace(dataset, name=name))
    return named_datasets
