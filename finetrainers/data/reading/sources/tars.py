"""Reader of WebDataset tars: `key.mp4` next to `key.txt`, `key.json` or `key.caption`, in one archive or many.

Members are read one after the other and media are unpacked under names of their content. A member's name never becomes
a path: names that lead out of the archive, links and devices are left out and counted.
"""

from __future__ import annotations

import glob
import json
import lzma
import os
import posixpath
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetrainers.config.sections import DataSection
from finetrainers.utils.reading import parse_json
from finetrainers.utils.text import file_size

from .captions import split_captions
from .rows import MAX_CAPTION_BYTES, MEDIA_SUFFIXES, DataError, Findings, Row, decode_text, printable_name
from .tables import Columns
from .unpacked import MediaFolder

SUFFIXES = (".tar", ".tar.gz", ".tgz")
_TEXT = ("txt", "caption")
_BRACES = re.compile(r"\{([^{}]+)\}")
_MAX_SHARDS = 100_000
#: Times its own size that an archive may unpack to, and bytes beyond that. Media hardly shrink; bitmaps may, tenfold.
_MAX_RATIO, _MIN_LIMIT_BYTES = 100, 128 << 20


def read_tars(pattern: Path, data: DataSection, media: MediaFolder, findings: Findings) -> list[Row]:
    """Return rows of one archive, or of all that a pattern names (`clips-{000..011}.tar`, `clips-*.tar`).

    Raises:
        DataError: there is no archive, one is missing, or one cannot be read.
    """
    rows: list[Row] = []
    for shard in expand(str(pattern)):
        limit = None if data.max_items is None else data.max_items - len(rows)
        if limit == 0:
            break
        state = shard.stat()
        columns = Columns(data)
        key = json.dumps(
            [
                "tar", os.path.realpath(shard), state.st_size, state.st_mtime_ns, columns.captions, data.caption_lines,
                *([columns.media] if columns.is_further else []),
            ]
        )  # fmt: skip
        reader = _Reader(shard, columns, media, each_line=data.caption_lines)
        rows += media.rows(key, reader.samples, limit=limit, findings=findings)
    return rows


def expand(pattern: str) -> list[Path]:
    """Return the archives that a pattern names: braces first, as a shell does it, then wildcards.

    Raises:
        DataError: there is no file, or a list in braces names a missing file.
    """
    if os.path.lexists(pattern):
        names = [pattern]
    else:
        names = []
        for name in _expand_braces(pattern):
            names += sorted(glob.glob(name)) if glob.has_magic(name) else [name]
    missing = [name for name in names if not Path(name).is_file()]
    if missing or not names:
        absent = [f"{name} is missing" for name in missing]
        raise DataError(f"dataset_file {pattern!r}: file not found", absent, "not_found")
    return [Path(name) for name in dict.fromkeys(names)]


def _expand_braces(pattern: str) -> list[str]:
    match = _BRACES.search(pattern)
    if match is None:
        return [pattern]
    first, dots, last = match[1].partition("..")
    if dots and first.isdigit() and last.isdigit():
        if abs(int(last) - int(first)) >= _MAX_SHARDS:
            raise DataError(f"dataset_file {pattern!r} names more than {_MAX_SHARDS} archives", kind="too_large")
        step = 1 if int(last) >= int(first) else -1
        parts = [str(number).zfill(len(first)) for number in range(int(first), int(last) + step, step)]
    else:
        parts = match[1].split(",")
    return [name for part in parts for name in _expand_braces(pattern[: match.start()] + part + pattern[match.end() :])]


@dataclass(frozen=True)
class _Reader:
    """Samples of one archive."""

    shard: Path
    columns: Columns
    media: MediaFolder
    each_line: bool

    def samples(self, skip: int) -> Iterator[Row]:
        """Yield the samples after the first `skip`: consecutive members of one key, and refused members."""
        number = 0
        try:
            with tarfile.open(self.shard, "r:*") as archive:
                for key, members in _group_by_key(self._bounded(archive)):
                    number += 1
                    if number > skip:
                        yield self._sample(archive, key, members)
                _check_end(archive)
        except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            message = f"{self.shard}: cannot be read after {number} samples: {error}"
            raise DataError(message, kind="unreadable") from error

    def _bounded(self, archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
        """Yield the members, until they declare more bytes than media can have had before they were packed.

        `tarfile` reads no more of a member than it declares, and also reads compressed ones that are skipped.
        """
        limit_bytes, total_bytes = _MAX_RATIO * self.shard.stat().st_size + _MIN_LIMIT_BYTES, 0
        for member in archive:
            total_bytes += member.size
            if total_bytes > limit_bytes:
                raise DataError(
                    f"{self.shard}: its members up to {printable_name(member.name)!r} unpack to "
                    f"{file_size(total_bytes)}, over {_MAX_RATIO} times its own size, so it holds no media, or was "
                    "made to fill disks. If you trust it, unpack it yourself, and set the directory as data_root",
                    kind="too_large",
                )
            yield member

    def _sample(self, archive: tarfile.TarFile, key: str, members: Mapping[str, tarfile.TarInfo]) -> Row:
        where = printable_name(f"{self.shard.name}/{key}")
        refused = next(filter(None, map(_refusal, members.values())), None)
        if refused is not None:
            return Row(where, key, refused=refused)
        # A clip is `000.mp4`, and its control video `000.control_video.mp4`.
        prefix = f"{self.columns.media.lower()}." if self.columns.is_further else ""
        media = [name for name in members if name.startswith(prefix) and f".{name[len(prefix) :]}" in MEDIA_SUFFIXES]
        unreadable = [name for name in members if prefix and name.startswith(prefix) and name not in media]
        if unreadable and not media:
            return Row(where, key, refused=f"{unreadable[0]} is not a readable image or video")
        if not media:
            return Row(where, key, refused="it has no media file")
        if len(media) > 1:
            return Row(where, key, refused=f"it has several media files ({', '.join(media)})")
        try:
            captions, extra = self._read_texts(archive, members)
        except (DataError, ValueError) as error:
            return Row(where, key, refused=f"its caption cannot be read ({error})")
        member = members[media[0]]
        stream = archive.extractfile(member)
        assert stream is not None, "a regular member has content"
        stored, size = self.media.store(stream, suffix=f".{media[0][len(prefix) :]}", size=member.size)
        return Row(where, f"{where}.{media[0]}", captions, extra, stored, size)

    def _read_texts(
        self, archive: tarfile.TarFile, members: Mapping[str, tarfile.TarInfo]
    ) -> tuple[tuple[str, ...] | None, dict[str, Any]]:
        """Return captions and further columns; a text file comes before the JSON file's columns."""
        captions: tuple[str, ...] | None = None
        extra: dict[str, Any] = {}
        if "json" in members:
            record = parse_json(_read_text(archive, members["json"]))
            if not isinstance(record, dict):
                raise ValueError(f"its JSON must be an object, got {type(record).__name__}")
            captions = self.columns.read_captions(record)
            extra = dict(self.columns.extra(record))
        for suffix in _TEXT:
            if suffix in members:
                captions = split_captions(_read_text(archive, members[suffix]), each_line=self.each_line)
        return captions, extra


def _check_end(archive: tarfile.TarFile) -> None:
    """Raise if an archive was read only in part, since `tarfile` takes a damaged header for the end.

    Raises:
        tarfile.ReadError: the archive does not end here.
        OSError: the checksum of a compressed archive does not match its content.
    """
    assert archive.fileobj is not None
    archive.fileobj.seek(archive.offset)
    if any(archive.fileobj.read(tarfile.BLOCKSIZE)):
        raise tarfile.ReadError(f"damaged at byte {archive.offset}")
    for _ in range((_MIN_LIMIT_BYTES >> 20) + 1):
        if not archive.fileobj.read(1 << 20):
            return
    raise tarfile.ReadError(f"it continues for more than {file_size(_MIN_LIMIT_BYTES)} after its end")


def _group_by_key(archive: Iterable[tarfile.TarInfo]) -> Iterator[tuple[str, dict[str, tarfile.TarInfo]]]:
    """Yield neighboring members of one key (name up to the first dot of its last part), by the rest of their names.

    Members that are refused are a group each. Those whose name starts with a dot are skipped, as in folders.
    """
    current: str | None = None
    members: dict[str, tarfile.TarInfo] = {}
    for member in archive:
        folder, base = posixpath.split(member.name)
        if member.isdir() or base.startswith("."):  # macOS puts `._000.mp4` before `000.mp4`
            continue
        stem, _, suffix = base.partition(".")
        key = posixpath.join(folder, stem)
        if key != current or _refusal(member) or suffix.lower() in members:
            if members and current is not None:
                yield current, members
            current, members = key, {}
        members[suffix.lower()] = member
    if members and current is not None:
        yield current, members


def _refusal(member: tarfile.TarInfo) -> str | None:
    """Return the reason why a member is not read, or None if it is."""
    if not member.isreg():
        return "it is a link, a device or a pipe in its archive"
    if member.name.startswith("/") or ".." in member.name.split("/"):
        return "its name points outside of its archive"
    return None


def _read_text(archive: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    if member.size > MAX_CAPTION_BYTES:
        raise ValueError(f"{member.size} bytes, more than the limit of {MAX_CAPTION_BYTES} for captions")
    stream = archive.extractfile(member)
    assert stream is not None, "a regular member has content"
    return decode_text(stream.read(), member.name)
