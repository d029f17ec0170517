"""Maintenance of a cache of precomputed tensors: listing, verification and repair of its entries, and pruning.

Runs never do this, since they know the keys that they need. Here every file is read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from finetrainers.utils.progress import Progress

from ..inspect.file_facts import FileFacts
from ..reading.sources.unpacked import SEAL
from .store import SUFFIX, TEMPORARY, CacheInUse, TensorCache, is_finite, read_about, read_entry

#: Entries are read by several threads, since a network disk answers slowly and many at a time.
_THREADS = 8
#: Age of temporary files that a killed writer left behind; a living writer needs only a moment.
_ABANDONED_S = 3600.0
#: Uses are recorded once a day: without locks, more recent ones are unknown.
_BLIND_DAYS = 2.0
#: Directories of a cache: tensors, and media of archives and of rows from Python.
KINDS = ("tensors", "media")
_UNKNOWN = {"kind": "unknown", "of": "", "model": "", "identity": ""}


@dataclass(frozen=True)
class Entry:
    """A file of the cache: its name, size, and when it was last used (to a day), in seconds since 1970."""

    key: str
    path: Path
    size_bytes: int
    used: float


@dataclass(frozen=True)
class Group:
    """Entries of one kind by one model; for `finetrainers cache ls`."""

    kind: str
    model: str
    identity: str
    entries: int
    size_bytes: int
    oldest_use: float
    newest_use: float


@dataclass(frozen=True)
class Damage:
    """An entry that cannot be used: its file or key, its source if known, and the reason."""

    key: str
    of: str
    reason: str


class CacheMaintenance:
    """A cache whose entries are listed, verified and pruned."""

    def __init__(self, directory: Path) -> None:
        """Args:
        directory: the value of `--precompute_dir`, or the output directory of a run without it.

        Raises:
            FileNotFoundError: there is no cache.
        """
        candidates = (directory, directory / "precomputed")
        cache_directory = next((path for path in candidates for kind in KINDS if (path / kind).is_dir()), None)
        if cache_directory is None:
            raise FileNotFoundError(
                f"{directory} holds no cache; use the --precompute_dir or the --output_dir of a run"
            )
        self.directory = cache_directory
        self.cache = TensorCache(cache_directory / "tensors")

    def entries(self) -> list[Entry]:
        """Return every entry, one folder after the other."""
        entries = []
        for file in self._files():
            if file.name.endswith(SUFFIX) and not file.name.startswith("."):
                stat = file.stat()
                key = file.name.removesuffix(SUFFIX)
                entries.append(Entry(key, Path(file.path), stat.st_size, stat.st_mtime))
        return entries

    def media(self) -> list[Entry]:
        """Return the files unpacked from archives or stored for rows from Python, and the lists of these rows.

        Their keys are paths in the directory.
        """
        media = self.directory / "media"
        entries = []
        for path in (*media.glob("??/*"), *media.glob("rows/*")):
            if path.suffix != SEAL:
                stat = path.stat()
                key = path.relative_to(self.directory).as_posix()
                entries.append(Entry(key, path, stat.st_size, max(stat.st_atime, stat.st_mtime)))
        return entries

    def groups(self) -> list[Group]:
        """Return the entries by kind and model, the largest first; their headers are read."""
        entries, media = self.entries(), self.media()
        with ThreadPoolExecutor(_THREADS) as pool:
            abouts = [*pool.map(_about, entries), *({**_UNKNOWN, "kind": "media"} for _ in media)]
        entries += media
        entries_by_group: dict[tuple[str, str, str], list[Entry]] = {}
        for entry, about in zip(entries, abouts, strict=True):
            entries_by_group.setdefault((about["kind"], about["model"], about["identity"]), []).append(entry)
        groups = [
            Group(
                *group_key,
                entries=len(members),
                size_bytes=sum(entry.size_bytes for entry in members),
                oldest_use=min(entry.used for entry in members),
                newest_use=max(entry.used for entry in members),
            )
            for group_key, members in entries_by_group.items()
        ]
        return sorted(groups, key=lambda group: -group.size_bytes)

    def known_files(self) -> int:
        """Return how many versions of media files have a stored digest."""
        return len(FileFacts(self.directory / "digests"))

    def verify(self, *, progress: Progress | None = None) -> tuple[int, list[Damage]]:
        """Read every entry; return their number, and those that are damaged, not finite, or indexed but missing."""
        indexed = self.cache.indexed()
        entries = self.entries()
        damaged = []
        with ThreadPoolExecutor(_THREADS) as pool:
            for done, (entry, reason) in enumerate(zip(entries, pool.map(_fault, entries), strict=True), start=1):
                if reason is not None:
                    damaged.append(Damage(entry.key, _about(entry)["of"], reason))
                if progress:
                    progress(done, len(entries))
        # An entry that was written or removed in the meantime is neither damaged nor missing.
        unlisted = indexed - {entry.key for entry in entries}
        damaged += [
            Damage(key, "", "listed in the index, but missing")
            for key in sorted(unlisted)
            if not self.cache.path(key).exists()
        ]
        return len(entries), damaged

    def repair(self, damaged: Iterable[Damage]) -> None:
        """Remove damaged entries, which the next run computes again, and temporary files of killed writers.

        Raises:
            CacheInUse: a run uses the cache.
        """
        with self.cache.exclusive():
            self._remove([damage.key for damage in damaged])
            self._sweep()

    def prune(
        self, *, keep: Collection[str] | None = None, older_than_days: float | None = None, dry_run: bool = False
    ) -> list[Entry]:
        """Remove and return entries that are not in `keep` and were not used for `older_than_days`.

        A condition that is None is left out.

        Raises:
            CacheInUse: a run uses the cache, or it is unknown whether one does.
        """
        with self.cache.exclusive() as is_locked:
            if not is_locked and (older_than_days is None or older_than_days < _BLIND_DAYS):
                raise CacheInUse(
                    f"{self.directory} is on a file system without locks, so its use by a run cannot be detected; "
                    f"remove only old entries: --older_than {_BLIND_DAYS:g} or more"
                )
            limit = None if older_than_days is None else time.time() - older_than_days * 86400
            pruned = [
                entry
                for entry in (*self.entries(), *self.media())
                if (keep is None or entry.key not in keep) and (limit is None or entry.used < limit)
            ]
            if not dry_run:
                self._remove([entry.key for entry in pruned if entry.path.suffix == SUFFIX])
                for entry in pruned:  # media; an archive is unpacked again where one of its files is missing
                    entry.path.unlink(missing_ok=True)
                    entry.path.with_name(f"{entry.path.name}{SEAL}").unlink(missing_ok=True)
                self._sweep()
        return pruned

    def _remove(self, keys: Collection[str]) -> None:
        # The index first: an entry that is not listed is searched for, one that is listed and missing fails when read.
        self.cache.rewrite_index(self.cache.indexed().difference(keys))
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda key: self.cache.path(key).unlink(missing_ok=True), keys))

    def _sweep(self) -> None:
        for file in self._files():
            if file.name.endswith(TEMPORARY) and time.time() - file.stat().st_mtime > _ABANDONED_S:
                Path(file.path).unlink(missing_ok=True)

    def _files(self) -> Iterator[os.DirEntry[str]]:
        if not self.cache.directory.is_dir():
            return
        for folder in sorted(os.scandir(self.cache.directory), key=lambda folder: folder.name):
            if folder.is_dir() and len(folder.name) == 2:
                yield from os.scandir(folder.path)


def _about(entry: Entry) -> dict[str, str]:
    try:
        return {**_UNKNOWN, **read_about(entry.path)}
    except (OSError, ValueError):
        return dict(_UNKNOWN)


def _fault(entry: Entry) -> str | None:
    """Return the reason why an entry cannot be used, or None if it can."""
    try:
        tensors = read_entry(entry.path, note_use=False)
    except FileNotFoundError:
        return None  # pruned meanwhile
    except (OSError, ValueError) as error:
        return str(error)
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            return f"{name} holds NaN or infinity"
    return None
