"""The store of file facts (headers, full decodes, digests) on disk, so that no start probes a known file again.

Facts belong to one version of a file: path, size, modification time and change time. Only the file system sets the
change time, so a replaced file is detected even if its size and modification time are the same (`cp -p`, `rsync -t`).
It would not be detected on a file system without change times, or after a clock was turned back to the same nanosecond.
Inode numbers are left out, since some network file systems number files differently at every mount.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import av
from pydantic import StringConstraints, TypeAdapter

from finetrainers.utils.alive import send_heartbeat
from finetrainers.utils.append_log import AppendLog
from finetrainers.utils.files import file_sha256
from finetrainers.utils.reading import parse_json

from ..reading.status import Decoded, InvalidSample
from .probe import PROBE_VERSION, Probe

logger = logging.getLogger(__name__)

#: Number of facts stored for one directory, or twice as many as a start uses if that is more. They take 60 MB on disk
#: and 200 MB of memory.
_MOST_FACTS = 500_000
_FEW_FILES = 8
_NAME = 32  # hexadecimal digits that name a version of a file, or a dataset's directory
_DIGEST = 64
_QUIET_S = 3600.0
_FORGOTTEN_S = 90 * 24 * 3600.0
#: Change times are coarse: a file that changed more recently than this may change again without a later time.
_SETTLED_S = 2.0
_THREADS = 4


class Facts(NamedTuple):
    """The stored facts of one version of a file.

    Attributes:
        header: the probe of its header, or the reason why it cannot be used.
        full: the result of decoding all of it: the reason why it cannot be used, or its marks (maybe none), or None if
            it was not decoded.
        digest: SHA-256 of its content, in hexadecimal.
        white: the result of decoding it as a mask: its mean brightness from 0 to 1, or the reason why it is not a mask,
            or None if it was not decoded.
    """

    header: Probe | InvalidSample | None = None
    full: Decoded | None = None
    digest: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")] | None = None
    white: float | InvalidSample | None = None


_JSON = TypeAdapter(Facts)
NOTHING = Facts()


class FileFacts:
    """The facts of a directory's files. If they cannot be written, a warning is logged once."""

    def __init__(self, directory: Path, *, version: str = "", root: Path | None = None, recall: bool = True) -> None:
        """Args:
        directory: of the log.
        version: of the code that computed the facts; facts of other versions are ignored.
        root: the directory that names in logs of earlier versions are relative to.
        recall: whether facts stored before are used; otherwise every file is probed again.
        """
        self.directory = directory
        self.version = version
        self.root = root
        self._log = AppendLog(directory, prefix=version)
        self._facts: dict[bytes, Facts] = {}
        self._used: set[bytes] = set()
        self._lock = threading.Lock()
        self._recall = recall
        self._is_writable = True

    @classmethod
    def for_dataset(cls, directory: Path, root: Path, *, recall: bool = True) -> FileFacts:
        """Return the facts of a dataset's directory, below the directory of all datasets."""
        folder = directory / hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()[:_NAME]
        # The version of the library is included, since other versions may read other files.
        facts = cls(folder, version=f"v{PROBE_VERSION}-{av.__version__}-", root=root, recall=recall)
        facts.refresh()
        return facts

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the facts, which another process reads from disk."""
        return {name: getattr(self, name) for name in ("directory", "version", "root")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        FileFacts.__init__(self, **state)

    def __len__(self) -> int:
        self.refresh()
        return len(self._facts)

    def lookup(self, path: Path, stat: os.stat_result | None) -> Facts:
        """Return the facts of a file, or `NOTHING` if it has changed since or has no `stat`."""
        if stat is None:
            return NOTHING
        name = _name(*file_version(path, stat))
        self._used.add(name)
        return self._facts.get(name, NOTHING)

    def store(self, path: Path, stat: os.stat_result, facts: Facts) -> None:
        """Store further facts of a file."""
        name = _name(*file_version(path, stat))
        self._learn(name, facts)
        if not self._is_writable:
            return
        try:
            self._log.add([_line(name, facts)])
        except OSError as error:
            self._is_writable = False
            logger.warning("facts about files cannot be stored in %s: %s", self.directory, error.strerror or error)

    def kept_open(self) -> contextlib.AbstractContextManager[None]:
        """Keep the log open within the block, for many facts."""
        return self._log.kept_open()

    def digest(self, path: Path) -> str:
        """Return the SHA-256 of a file's content, in hexadecimal; the file is read unless the digest is stored.

        Raises:
            OSError: the file cannot be read; the error names it.
        """
        stat = path.stat()
        stored = self.lookup(path, stat).digest
        if stored is None:
            self.refresh()
            stored = self.lookup(path, stat).digest
        return stored or self._read_digest(path, stat)

    def _read_digest(self, path: Path, stat: os.stat_result) -> str:
        digest = file_sha256(path)
        is_settled = abs(time.time() - stat.st_ctime) > _SETTLED_S
        if is_settled and file_version(path, stat) == file_version(path, path.stat()):
            self.store(path, stat, Facts(digest=digest))
        return digest

    def learn(self, paths: Iterable[Path]) -> None:
        """Read files without a stored digest, a few at a time; `digest` then returns or raises at once."""
        self.refresh()  # once: every process that has ever stored facts here has a separate file

        def read(path: Path) -> None:
            with contextlib.suppress(OSError):
                stat = path.stat()
                if self.lookup(path, stat).digest is None:
                    self._read_digest(path, stat)

        with ThreadPoolExecutor(_THREADS) as pool:
            for _ in pool.map(read, dict.fromkeys(paths)):
                send_heartbeat()

    def refresh(self) -> None:
        """Read the facts that other processes have stored."""
        if not self._recall:
            return
        for line in self._log.news():
            # Lines that were cut and joined, or have other content, are skipped.
            with contextlib.suppress(ValueError, TypeError, KeyError):
                self._learn(*self._parse_line(line))

    def _parse_line(self, line: str) -> tuple[bytes, Facts]:
        """Return the facts of a line.

        Raises:
            ValueError, TypeError, KeyError: the line is damaged.
        """
        if line[:1] == "[":
            return self._parse_old_line(line)
        name, value = bytes.fromhex(line[:_NAME]), line[_NAME + 1 :]
        if len(name) != _NAME // 2:
            raise ValueError(f"no name: {line}")
        if len(value) == _DIGEST:  # alone, as in caches of 0.1
            value = f'[null,null,"{value}"]'
        return name, _JSON.validate_json(value, strict=True)

    def _parse_old_line(self, line: str) -> tuple[bytes, Facts]:
        """Return facts in the format of 0.1: `[name below root, size, mtime_ns, ctime_ns, header, full, digest]`."""
        below, size, mtime_ns, ctime_ns, header, full, _ = parse_json(line)
        if header is not None:
            names = ("status", "reason") if len(header) == 2 else Probe.__slots__
            header = dict(zip(names, header, strict=True))
        if isinstance(full, dict):
            full = {"status": full["fate"], "reason": full["reason"]}
        name = _name(str(((self.root or Path()) / below).absolute()), size, mtime_ns, ctime_ns)
        return name, _JSON.validate_json(json.dumps([header, full, None]), strict=True)

    def _learn(self, name: bytes, facts: Facts) -> None:
        with self._lock:
            earlier = self._facts.pop(name, None)  # popped, so that the dictionary is in order of writing
            if earlier is not None:
                changes = {field: value for field, value in facts._asdict().items() if value is not None}
                facts = earlier._replace(**changes)
            self._facts[name] = facts

    def tidy(self) -> None:
        """Compact old log files once there are several, and remove facts that were not used for long.

        To be called when all files of a dataset were looked up. Their facts are kept, regardless of their number, and
        the newest of the others. So a start never removes facts that the next one needs, and two datasets of one
        directory do not evict each other.
        """
        if not self._recall or not self.directory.is_dir():
            return
        try:
            os.utime(self.directory)
            now = time.time()
            age = {path.name: now - path.stat().st_mtime for path in self.directory.iterdir()}
            log_names = self._log.files()
            for name in age.keys() - set(log_names):
                if age[name] > _FORGOTTEN_S:
                    (self.directory / name).unlink(missing_ok=True)
            quiet = [name for name in log_names if age.get(name, 0.0) > _QUIET_S]
            limit = max(_MOST_FACTS, 2 * len(self._used))
            if len(quiet) > _FEW_FILES or (quiet and len(self._facts) > limit):
                used_names = [name for name in self._facts if name in self._used]
                other_names = [name for name in self._facts if name not in self._used]
                kept_names = [*other_names[max(0, len(self._facts) - limit) :], *used_names]
                self._log.replace((_line(name, self._facts[name]) for name in kept_names), quiet)
            for folder in self.directory.parent.iterdir():
                # `probe_dir` may hold other directories: only those with such a name hold facts.
                is_facts_folder = len(folder.name) == _NAME and set(folder.name) <= set("0123456789abcdef")
                if is_facts_folder and folder != self.directory and now - folder.stat().st_mtime > _FORGOTTEN_S:
                    shutil.rmtree(folder, ignore_errors=True)
        except OSError as error:  # another process is also tidying, or the directory is read-only: keep everything
            logger.debug("not tidied: %s", error)


def default_directory() -> Path:
    """Return the default directory of datasets' facts, in the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "finetrainers" / "probes"


def file_version(path: Path, stat: os.stat_result) -> tuple[str, int, int, int]:
    """Return the values that identify one version of a file.

    Links are not resolved, which would take a system call per directory.
    """
    return str(path.absolute()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _name(path: str, size: int, mtime_ns: int, ctime_ns: int) -> bytes:
    """Return a digest of a version's JSON, which is assembled by hand since that is three times as fast."""
    version = f"[{encode_basestring_ascii(path)}, {size}, {mtime_ns}, {ctime_ns}]"
    return hashlib.sha256(version.encode("ascii")).digest()[: _NAME // 2]


def _line(name: bytes, facts: Facts) -> str:
    return (
        f"{name.hex()} {json.dumps(_JSON.dump_python(facts)[: 3 if facts.white is None else 4], separators=(',', ':'))}"
    )
