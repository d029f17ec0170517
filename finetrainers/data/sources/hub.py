"""Reads what the library `datasets` reads: data sets of the hub, imagefolder, videofolder, parquet.

The library is imported only here, when such a data set is named. Rows whose media are bytes are unpacked; those whose
media are local files stay where they are.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from finetrainers.config.sections import DataSection

from .rows import MEDIA_SUFFIXES, DataError, Findings, Row
from .tables import Columns
from .tars import expand
from .unpacked import MediaFolder, Sample

#: First bytes of files whose name is not known, and the suffix that they then get.
_MAGIC = (
    (0, b"\x89PNG", ".png"), (0, b"\xff\xd8\xff", ".jpg"), (0, b"BM", ".bmp"), (8, b"WEBP", ".webp"), (0, b"GIF8", ".gif"),
    (4, b"ftyp", ".mp4"), (0, b"\x1a\x45\xdf\xa3", ".mkv"), (8, b"AVI ", ".avi"), (0, b"\x00\x00\x01\xba", ".mpg"),
)  # fmt: skip


def read_hub(data: DataSection, media: MediaFolder, found: Findings) -> list[Row]:
    """Rows of `hf_dataset`, or of the parquet files of `dataset_file`.

    Raises:
        DataError: the library is not installed, or it cannot read what is named.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            "this data set needs the library `datasets`; install it with: pip install 'finetrainers[datasets]'"
        ) from error
    columns = Columns(data)
    is_local = data.hf_dataset is None or _is_local(data)
    try:
        table = _open(datasets, data)
        names = list(table.column_names or table.features or ())
        if names and (missing := columns.missing(dict.fromkeys(names))) is not None:
            raise DataError(f"{_name(data)}: {missing}")
        for name, feature in (table.features or {}).items():
            if isinstance(feature, (datasets.Image, datasets.Video)):
                table = table.cast_column(name, type(feature)(decode=False))
        key = json.dumps(["hub", _state(datasets, data, table), columns.media, columns.captions])
    except DataError:
        raise
    except Exception as error:  # whatever a builder, a file system or the network raises
        raise DataError(f"{_name(data)} cannot be read by `datasets`: {type(error).__name__}: {error}") from error

    def samples(skip: int) -> Iterator[Sample]:
        number = skip
        try:
            for record in table.skip(skip):
                yield _sample(f"{_name(data)} row {number}", record, columns, media, is_local)
                number += 1
        except DataError:
            raise
        except Exception as error:
            raise DataError(
                f"{_name(data)} cannot be read after {number} rows: {type(error).__name__}: {error}; the next start goes on there"
            ) from error

    return media.rows(key, samples, limit=data.max_items, found=found)


def _name(data: DataSection) -> str:
    return data.hf_dataset or str(data.dataset_file)


def _open(datasets: Any, data: DataSection) -> Any:
    """The library's data set, local ones as they come: otherwise the library would first copy them."""
    if data.hf_dataset is None:
        files = [str(file) for file in expand(str(data.dataset_file))]
        return datasets.load_dataset("parquet", data_files={"train": files}, split="train", streaming=True)
    return datasets.load_dataset(
        data.hf_dataset,
        data.hf_subset,
        data_dir=None if data.data_root is None else str(data.data_root),
        split=data.hf_split,
        revision=data.hf_revision,
        streaming=data.hf_streaming or _is_local(data),
    )


def _is_local(data: DataSection) -> bool:
    return data.data_root is not None or Path(str(data.hf_dataset)).is_dir()


def _state(datasets: Any, data: DataSection, table: Any) -> list[Any]:
    """What tells one content of the data set from another."""
    if data.hf_dataset is None:
        files = expand(str(data.dataset_file))
    else:
        folder = data.data_root or Path(data.hf_dataset)
        files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
    named = [data.hf_dataset, data.hf_subset, data.hf_split, data.hf_revision]
    if files:
        stats = [(os.path.realpath(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        return [*named, stats]
    if not data.hf_streaming:
        return [*named, table._fingerprint]
    from huggingface_hub import HfApi

    return [*named, HfApi().dataset_info(str(data.hf_dataset), revision=data.hf_revision).sha]


def _sample(where: str, record: Mapping[str, Any], columns: Columns, media: MediaFolder, is_local: bool) -> Sample:
    value = record.get(columns.media)
    if isinstance(value, (bytes, bytearray)):
        value = {"path": None, "bytes": bytes(value)}
    try:
        captions = columns.captions_of(record)
    except ValueError as error:
        return Sample(where, where, refused=f"its caption is malformed ({error})")
    extra = json.loads(json.dumps(dict(columns.extra(record)), default=str))
    if isinstance(value, str):
        if not is_local:
            return Sample(where, where, refused="its media is a path, and the data set has no folder; give `data_root`")
        return Sample(where, value, captions, extra)
    if not isinstance(value, Mapping) or not (value.get("bytes") or value.get("path")):
        return Sample(where, where, refused=f"its column {columns.media!r} holds no media")
    path, content = value.get("path") or "", value.get("bytes")
    suffix = Path(path).suffix.lower()
    if content is None and "://" not in path:
        if is_local:
            return Sample(where, path, captions, extra)
        return Sample(where, where, captions, extra, stored=str(Path(path).absolute()))  # what the library downloaded
    if content is None:
        import fsspec

        with fsspec.open(path, "rb") as file:
            stored, size = media.store(file, suffix=suffix)
        return Sample(where, where, captions, extra, stored, size)
    known = suffix if suffix in MEDIA_SUFFIXES else _sniffed(content)
    if known is None:
        return Sample(where, where, refused="it is of no known format")
    stored, size = media.store(io.BytesIO(content), suffix=known, size=len(content))
    return Sample(where, where, captions, extra, stored, size)


def _sniffed(content: bytes) -> str | None:
    return next((suffix for at, magic, suffix in _MAGIC if content[at : at + len(magic)] == magic), None)
