"""Rows of Python as the data of a run: stored once for all processes of a machine, and named by options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.load import load_config
from finetrainers.config.methods import trait
from finetrainers.config.root import TrainConfig
from finetrainers.data.reading.datasets import media_dir
from finetrainers.data.reading.items import DataError
from finetrainers.data.reading.sources.python_rows import StoredRows, is_rows, store_rows
from finetrainers.utils.progress import working

from .once_per_node import once_per_node
from .ownership import output_dir_problems
from .preflight import resolve_family

#: Options that rows replace; the first one names their file.
_OPTIONS = {
    "data": (
        "dataset_file", "data_root", "dataset", "hf_dataset", "hf_subset", "hf_revision", "hf_split", "hf_streaming",
        "allow_outside", "caption_lines",
    ),
    "eval_data": ("eval_dataset_file", "eval_num_items"),
}  # fmt: skip


class RowsByItem(Protocol):
    """Rows that are read by their index, such as a list, or a dataset of `datasets` or torch."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


Rows: TypeAlias = Iterable[Mapping[str, Any]] | RowsByItem


def store_data(
    config: TrainConfig, rows: Mapping[str, Any], *, makes_run: bool = True
) -> tuple[TrainConfig, dict[str, StoredRows]]:
    """Return a configuration that names the files of stored rows, and these rows by name.

    Only the first process of each machine reads the rows.

    Args:
        config: of the run, in whose directory or cache the rows and their arrays are stored.
        rows: by name, `data` and `eval_data`.
        makes_run: whether a run will write into its directory, which must then not be another's.

    Raises:
        ConfigError: an option contradicts them, or they cannot be read or stored.
    """
    if not rows:
        return config, {}
    if problems := list(_conflicts(config, list(rows), makes_run=makes_run)):
        raise ConfigError(problems)
    columns = trait(config.training.method, "media_columns") or ()

    def store() -> dict[str, StoredRows]:
        stored: dict[str, StoredRows] = {}
        for name, value in rows.items():
            # As for `eval_dataset_file`, the number of items to train on is not that of those to evaluate.
            data = config.data.model_copy(update={} if name == "data" else {"max_items": None})
            try:
                stored[name] = store_rows(value, data, media_dir(config), name=name, columns=columns)
            except DataError as error:
                problems.append(Problem.from_error(name, error))
            except OSError as error:
                problems.append(Problem(name, f"cannot be stored: {error}", "unavailable"))
        if problems:
            raise ConfigError(problems)
        return stored

    with working("storing rows"):
        stored = once_per_node(store, (config, list(rows)), timeout_s=config.run.idle_timeout)
    options: dict[str, Any] = {_OPTIONS[name][0]: value.path for name, value in stored.items()}
    return load_config(config, **options), stored


def _conflicts(config: TrainConfig, names: list[str], *, makes_run: bool) -> Iterator[Problem]:
    """Yield why rows cannot be stored in the directory of the run, or are not used: by its options or its method."""
    method = config.training.method
    if makes_run and config.data.precompute_dir is None:
        resolved, family = resolve_family(config)
        for message in output_dir_problems(resolved, trained=family.facts.trained):
            yield Problem("--output_dir", message, "occupied")
    if trait(method, "samples"):
        message = f"method {method} trains on samples of prompts; remove it"
        yield from (Problem(name, message, "unsupported") for name in names)
    for name in names:
        for option in _OPTIONS[name]:
            value = config.get(option)
            if config.changed(option) and not (option == _OPTIONS[name][0] and is_rows(value)):
                yield Problem(f"--{option}", f"cannot be combined with {name}=; remove one of them", "conflict")
