"""Lookup of the files that a dataset names, below its root and nowhere else.

Only names and types of files are looked up. Files are not opened, so that named pipes and devices are not either.
"""

from __future__ import annotations

import os
import stat
import unicodedata
from pathlib import Path

from finetrainers.utils.files import not_a_file

from ..status import InvalidSampleError


class Root:
    """The folder that a dataset's names are relative to, and that they may not leave."""

    def __init__(self, folder: Path, *, allow_outside: bool = False) -> None:
        """Args:
        folder: an existing folder; it may itself be a link.
        allow_outside: whether names and links may lead out of it.
        """
        self.folder = folder
        self.allow_outside = allow_outside
        self._folder_path = os.fspath(folder)
        self._real = os.path.realpath(folder)
        # Most files of a dataset are in few folders: resolving each folder once leaves one system call per file.
        self._folders: dict[str, Path] = {}
        self._listings: dict[str, dict[str, list[str]]] = {}

    def find(self, name: str) -> Path:
        """Return the regular file of a name; see `look_up`."""
        return self.look_up(name)[0]

    def look_up(self, name: str) -> tuple[Path, os.stat_result]:
        """Return the regular file of a name, relative to the root or absolute: its path, not resolved, and its state.

        A missing name is looked up in other Unicode normal forms: macOS writes names decomposed, and lists of them are
        mostly composed.

        Raises:
            InvalidSampleError: it leads out of the root, does not exist, is ambiguous, or is not a regular file.
        """
        try:
            if not name.isascii():
                name.encode()  # bytes that are not text could be opened, but not be written into records
            if name.startswith("~/"):  # as a shell does it; a folder of that name is ./~
                name = os.path.expanduser(name)
            return self._look_up(name)
        except InvalidSampleError:
            raise
        except OSError as error:  # a name that is too long, a folder that may not be read, links in a circle
            raise InvalidSampleError(f"is not accessible: {error.strerror or error}", "missing") from error
        except ValueError as error:
            raise InvalidSampleError(f"is not a file name: {error}", "missing") from error

    def relative(self, path: str) -> str:
        """Return a path below the root as a name relative to it, which does not change when the dataset moves."""
        for folder in (os.path.abspath(self._folder_path), self._real):
            if path.startswith(folder.rstrip(os.sep) + os.sep):
                return os.path.relpath(path, folder)
        return path

    def is_outside(self, path: str) -> bool:
        """Return whether an existing file or folder is outside the root once links are resolved, and may not be."""
        if self.allow_outside:
            return False
        real = os.path.realpath(path)
        return real != self._real and not real.startswith(self._real.rstrip(os.sep) + os.sep)

    def _look_up(self, name: str) -> tuple[Path, os.stat_result]:
        full = os.path.join(self._folder_path, name)
        folder = self._parent_folder(full)
        try:
            state = os.lstat(full)
        except (FileNotFoundError, NotADirectoryError):
            full = self._find_other_form(name)
            folder = self._parent_folder(full)
            state = os.lstat(full)
        if stat.S_ISLNK(state.st_mode):
            if self.is_outside(full):
                raise _outside(f"is a link to {os.path.realpath(full)!r}, outside")
            try:
                state = os.stat(full)
            except FileNotFoundError:
                raise InvalidSampleError(
                    f"is a link to {os.readlink(full)!r}, which does not exist", "missing"
                ) from None
        if (reason := not_a_file(state.st_mode)) is not None:
            raise InvalidSampleError(reason, "not_a_file")
        return folder / os.path.basename(full), state

    def _parent_folder(self, full: str) -> Path:
        """Return the folder of a path, which may not be outside the root."""
        text = full[: full.rfind(os.sep) + 1]
        folder = self._folders.get(text)
        if folder is None:
            if self.is_outside(text):
                raise _outside("lies outside")
            folder = self._folders[text] = Path(text)
        return folder

    def _find_other_form(self, name: str) -> str:
        """Return the path of a file whose name differs in its Unicode normal form only, in any of its parts."""
        if name.isascii():
            raise InvalidSampleError("does not exist", "missing")
        path = os.sep if os.path.isabs(name) else self._folder_path
        for part in name.split(os.sep):
            if part in ("", os.curdir, os.pardir) or os.path.lexists(os.path.join(path, part)):
                path = os.path.join(path, part)
                continue
            matches = self._listing(path).get(unicodedata.normalize("NFC", part), [])
            if not matches:
                raise InvalidSampleError("does not exist", "missing")
            if len(matches) > 1:
                raise InvalidSampleError(
                    f"is ambiguous: {len(matches)} names there differ only in their Unicode normal form; rename one",
                    "missing",
                )
            path = os.path.join(path, matches[0])
        return path

    def _listing(self, folder: str) -> dict[str, list[str]]:
        """Return the names in a directory by their composed form, or none if the dataset may not read the directory."""
        if folder not in self._listings:
            names: dict[str, list[str]] = {}
            if os.path.isdir(folder) and not self.is_outside(folder):
                for entry in os.listdir(folder):
                    if not entry.isascii():
                        names.setdefault(unicodedata.normalize("NFC", entry), []).append(entry)
            self._listings[folder] = names
        return self._listings[folder]


def _outside(problem: str) -> InvalidSampleError:
    return InvalidSampleError(
        f"{problem} the dataset's directory; move it there, or add --allow_outside", "outside_root"
    )
