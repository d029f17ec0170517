"""Reader of datasets that the library `datasets` opens: those of the Hub, imagefolder, videofolder, parquet.

The library is imported only here, when such a dataset is named. Rows whose media are bytes are unpacked; those whose
media are local files stay where they are.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from finetrainers.config.sections import DataSection
from finetrainers.utils.failures import Kind
from finetrainers.utils.reading import parse_json

from ..status import InvalidSampleError
from .paths import Root
from .rows import MEDIA_SUFFIXES, DataError, Findings, Row
from .tables import Columns
from .tars import expand
from .unpacked import MediaFolder

#: First bytes of files whose name is not known, and the suffix that they then get.
_MAGIC = (
    (0, b"\x89PNG", ".png"), (0, b"\xff\xd8\xff", ".jpg"), (0, b"BM", ".bmp"), (8, b"WEBP", ".webp"),
    (0, b"GIF8", ".gif"), (4, b"ftyp", ".mp4"), (0, b"\x1a\x45\xdf\xa3", ".mkv"), (8, b"AVI ", ".avi"),
    (0, b"\x00\x00\x01\xba", ".mpg"),
)  # fmt: skip


#: Archives that are read, and the only addresses that are opened: a dataset must not name another server.
_ARCHIVES = ("zip://", "tar://", "gzip://")
_HUB = ("hf://", "https://huggingface.co/")


def read_hub(data: DataSection, root: Root, media: MediaFolder, findings: Findings) -> list[Row]:
    """Return rows of `hf_dataset`, or of the parquet files of `dataset_file`.

    Raises:
        DataError: the library is not installed, or it cannot read the dataset.
    """
    try:
        import datasets
    except ImportError as error:
        message = "this dataset requires the library `datasets`; install it with: pip install datasets"
        raise DataError(message, kind="not_installed") from error
    columns = Columns(data)
    with _as_data_error(f"{_name(data)} cannot be read by `datasets`"):
        table = _open(datasets, data, columns)
        key = json.dumps(["hub", _state(datasets, data, table), columns.media, columns.captions])
    if data.hf_dataset is None or _is_local(data):
        reader = _Reader(columns, media, local=root)
    else:
        caches = [Path(datasets.config.HF_DATASETS_CACHE), Path(datasets.config.HF_CACHE_HOME)]
        downloads = [Root(cache, allow_outside=data.allow_outside) for cache in caches]
        reader = _Reader(columns, media, downloads=downloads)

    def samples(skip: int) -> Iterator[Row]:
        records = iter(table.skip(skip))
        for number in count(skip):
            with _as_data_error(f"{_name(data)} cannot be read after {number} rows", "; the next start resumes there"):
                record = next(records, None)
                if record is None:
                    return
                sample = reader.sample(f"{_name(data)} row {number}", record)
            yield sample

    return media.rows(key, samples, limit=data.max_items, findings=findings)


@contextmanager
def _as_data_error(message: str, hint: str = "") -> Iterator[None]:
    """Turn whatever a builder, a file system or the network raises into a `DataError`."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        kind: Kind = "unavailable" if isinstance(error, ConnectionError) else "unreadable"
        kind = "not_found" if isinstance(error, FileNotFoundError) else kind
        raise DataError(f"{message}: {type(error).__name__}: {error}{hint}", kind=kind) from error


def _name(data: DataSection) -> str:
    return data.hf_dataset or str(data.dataset_file)


def _open(datasets: Any, data: DataSection, columns: Columns) -> Any:
    """Return the library's dataset with undecoded media. Local ones are streamed so that they are not copied first."""
    if data.hf_dataset is None:
        files = [str(file) for file in expand(str(data.dataset_file))]
        table = datasets.load_dataset("parquet", data_files={"train": files}, split="train", streaming=True)
    else:
        table = datasets.load_dataset(
            data.hf_dataset,
            data.hf_subset,
            data_dir=None if data.data_root is None else str(data.data_root),
            split=data.hf_split,
            revision=data.hf_revision,
            streaming=data.hf_streaming or _is_local(data),
        )
    names = list(table.column_names or table.features or ())
    if names and (missing := columns.missing(dict.fromkeys(names))) is not None:
        raise DataError(f"{_name(data)}: {missing}", kind="not_found")
    return undecoded(table)


def undecoded(table: Any) -> Any:
    """Return a dataset of the library whose images and videos are bytes and paths."""
    for name, feature in (table.features or {}).items():
        if type(feature).__name__ in ("Image", "Video"):
            table = table.cast_column(name, type(feature)(decode=False))
    return table


def media_suffix(path: str, content: bytes) -> str | None:
    """Return the suffix of a file in memory, by its path if that has one, or None if its format is unknown."""
    suffix = Path(path.partition("::")[0]).suffix.lower()
    magic_suffixes = (end for offset, magic, end in _MAGIC if content[offset : offset + len(magic)] == magic)
    return suffix if suffix in MEDIA_SUFFIXES else next(magic_suffixes, None)


def _is_local(data: DataSection) -> bool:
    return data.data_root is not None or Path(str(data.hf_dataset)).is_dir()


def _state(datasets: Any, data: DataSection, table: Any) -> list[Any]:
    """Return values that change with the content of the dataset."""
    if data.hf_dataset is None:
        files = expand(str(data.dataset_file))
    else:
        folder = data.data_root or Path(data.hf_dataset)
        files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
    options = [data.hf_dataset, data.hf_subset, data.hf_split, data.hf_revision]
    if files:
        stats = [(os.path.realpath(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        return [*options, stats]
    if not data.hf_streaming:
        return [*options, table._fingerprint]
    from huggingface_hub import HfApi

    return [*options, HfApi().dataset_info(str(data.hf_dataset), revision=data.hf_revision).sha]


@dataclass(frozen=True)
class _Reader:
    """Converter of the library's rows into samples.

    The locations of media in a row come from the dataset and are untrusted, even where the library has a type for them.
    So a path has to be below the dataset's folder or the library's downloads, and an address on the Hub.

    Attributes:
        columns: the roles of columns.
        media: the folder into which bytes are unpacked.
        local: the dataset's folder, or None if it is on the Hub.
        downloads: the folders of the library's downloads.
    """

    columns: Columns
    media: MediaFolder
    local: Root | None = None
    downloads: Sequence[Root] = ()

    def sample(self, where: str, record: Mapping[str, Any]) -> Row:
        """Return the sample of a row; refused, with the reason, if it cannot be one."""
        value = record.get(self.columns.media)
        try:
            captions = self.columns.read_captions(record)
        except ValueError as error:
            return Row(where, where, refused=f"its caption is malformed ({error})")
        extra = parse_json(json.dumps(dict(self.columns.extra(record)), default=as_text))
        if isinstance(value, (bytes, bytearray)):
            value = {"bytes": bytes(value)}
        elif isinstance(value, str):
            value = {"path": value}
        path, content = (value.get("path") or "", value.get("bytes")) if isinstance(value, Mapping) else ("", None)
        if content is not None:
            suffix = media_suffix(path, content)
            if suffix is None:
                return Row(where, where, refused="its format is unknown")
            stored, size = self.media.store(io.BytesIO(content), suffix=suffix, size=len(content))
            return Row(where, where, captions, extra, stored, size)
        if not path:
            return Row(where, where, refused=f"its column {self.columns.media!r} holds no media")
        if "://" not in path and self.local is not None:
            return Row(where, self.local.relative(path), captions, extra)  # looked up like any other row's
        try:
            download = self._find_download(path)
        except InvalidSampleError as problem:
            return Row(where, where, refused=f"its media {problem}")
        if download is not None:
            return Row(where, where, captions, extra, stored=download.absolute())
        import fsspec

        with fsspec.open(path, "rb") as file:
            stored, size = self.media.store(file, suffix=Path(path.partition("::")[0]).suffix.lower())
        return Row(where, where, captions, extra, stored, size)

    def _find_download(self, path: str) -> Path | None:
        """Return the file of a path that the library downloaded, or None if it is an address that may be opened.

        Raises:
            InvalidSampleError: the path is neither.
        """
        *inner, location = path.split("::")  # `zip://a.mp4::hf://datasets/someone/clips/part.zip`
        is_on_hub = self.local is None and location.startswith(_HUB)
        if not all(part.startswith(_ARCHIVES) for part in inner) or ("://" in location and not is_on_hub):
            raise InvalidSampleError(f"have an address that is not supported: {path!r}", "outside_root")
        if is_on_hub:
            return None
        problem = InvalidSampleError("do not exist", "missing")
        for root in [self.local] if self.local is not None else self.downloads:
            try:
                file = root.find(location)
            except InvalidSampleError as error:
                problem = error
            else:
                return None if inner else file
        raise problem


def as_text(value: object) -> str:
    """Return a text for a value that JSON has no type for.

    Bytes, such as other columns' media, become their number: their text is four times as long.
    """
    return f"<{len(value)} bytes>" if isinstance(value, (bytes, bytearray)) else str(value)
