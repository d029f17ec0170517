"""Rules between the options that say where a data set is and how it is read; for the run's, and for each of several."""

from __future__ import annotations

from collections.abc import Collection

from .sections import DataSection

_TABLES = (".csv", ".json", ".jsonl", ".parquet")
_OF_LIBRARY = ("hf_subset", "hf_split", "hf_revision", "hf_streaming")


def check_source(data: DataSection, *, given: Collection[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Errors as (option, message), and warnings about options without effect.

    Args:
        data: the options.
        given: names of those that were given.
    """
    errors: list[tuple[str, str]] = []
    if not data.is_named:
        return [("data_root", "no data: give --data_root (a folder), --dataset_file, --hf_dataset or --dataset")], []
    if data.dataset is not None:
        named = [name for name in ("data_root", "dataset_file", "hf_dataset") if getattr(data, name) is not None]
        return [(name, "--dataset FILE names the data sets; name it there, or drop --dataset") for name in named], []
    if data.hf_dataset is not None and data.dataset_file is not None:
        errors.append(("hf_dataset", "--dataset_file names another data set; give one of them"))
    if data.caption_columns and "caption_column" in given:
        errors.append(("caption_columns", "they take the place of --caption_column; give one of them"))
    warnings = []
    if data.hf_dataset is None:
        warnings += [f"--{name} has no effect without --hf_dataset" for name in _OF_LIBRARY if name in given]
    suffix = data.dataset_file.suffix.lower() if data.dataset_file is not None else ""
    if data.caption_lines and (suffix in _TABLES or data.hf_dataset is not None):
        warnings.append(
            "--caption_lines has no effect without .txt files beside the clips; several captions are a list there"
        )
    if data.caption_columns and data.dataset_file is None and data.hf_dataset is None:
        warnings.append("--caption_columns has no effect without columns: a .csv, .json, .jsonl, .parquet or .tar file")
    return errors, warnings
