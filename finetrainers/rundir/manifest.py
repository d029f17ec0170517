"""A checkpoint's manifest: every file with its size and SHA-256, so that damage is found before anything is loaded.

It also has a checksum of its text, so that damage to the manifest itself is found. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from finetrainers.utils.failures import InputError
from finetrainers.utils.files import file_sha256, fsync_dir, not_a_file, write_text_atomic
from finetrainers.utils.reading import parse_json_object, read_bytes

MANIFEST = "manifest.json"
#: Key of the SHA-256 of the manifest's text, computed with `_BLANK` in its place.
_SEAL = "manifest_sha256"
_BLANK = "0" * 64
#: Keys of manifests written before they had a checksum of their text.
_KEYS_WITHOUT_CHECKSUM = {"format", "step", "saved_at", "packages", "config", "data", "tracker_run", "files"}
#: Informative entries, which must not keep a run from being continued.
_INFORMATIVE: dict[str, type | tuple[type, ...]] = {
    "packages": dict,
    "config": dict,
    "chosen": dict,
    "saved_at": (int, float),
}
#: Upper limit of the seconds since 1970 at which a checkpoint was saved.
_LAST_TIME = 2.0**40
#: The file without which a run cannot be continued.
_STATE = "state.json"
#: Files and folders that only resuming needs: a copy of a checkpoint to sample from may lack them.
_OPTIMIZER = ("optimizer.pt", "optimizer", "deepspeed")


def write_manifest(
    directory: Path, *, facts: Mapping[str, Any], written: Mapping[Path, tuple[int, str]] | None = None
) -> None:
    """Write `directory/manifest.json` over all its files, and flush it to disk.

    Args:
        directory: complete but for this file.
        facts: other entries of the manifest: format, step, versions and so on.
        written: size and SHA-256 of the files that were hashed when they were written; the others are read.
    """
    entries = {path.relative_to(directory).as_posix(): entry for path, entry in (written or {}).items()}
    names = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    for name, digest in _digests(directory, sorted(names - entries.keys())).items():
        entries[name] = ((directory / name).stat().st_size, digest)
    files = {name: {"size": size, "sha256": digest} for name, (size, digest) in sorted(entries.items())}
    text = json.dumps({**facts, "files": files, _SEAL: _BLANK}, indent=2, sort_keys=True, default=str) + "\n"
    write_text_atomic(directory / MANIFEST, text.replace(_BLANK, hashlib.sha256(text.encode()).hexdigest()))
    fsync_dir(directory)


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Raises:
        ValueError: it is missing, is not a manifest, or has changed since it was written.
    """
    path = directory / MANIFEST
    try:
        wrong_kind = not_a_file(path.lstat().st_mode)
        if wrong_kind is not None:
            raise InputError(f"{MANIFEST} {wrong_kind}", "unreadable")
        return parse_manifest(read_bytes(path))
    except FileNotFoundError:
        message = f"{MANIFEST} is missing: the checkpoint is incomplete, or was saved by an earlier version"
        raise InputError(message, "not_found") from None


def parse_manifest(content: bytes) -> dict[str, Any]:
    """Return the manifest with this content.

    Raises:
        ValueError: it is not a manifest, or has changed since it was written.
    """
    try:
        manifest = parse_json_object(content, "content")
        for name, entry in manifest["files"].items():
            int(entry["size"]), str(entry["sha256"])
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts or not name.isprintable():
                raise ValueError(f"{name!r} is not a file in the checkpoint")
        _check_checksum(manifest, content)
        for name, kind in _INFORMATIVE.items():  # of manifests without a checksum
            if name in manifest and not isinstance(manifest[name], kind):
                del manifest[name]
        if not 0 <= manifest.get("saved_at", 0) < _LAST_TIME:  # infinite, or beyond what dates can be
            del manifest["saved_at"]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise InputError(f"{MANIFEST} cannot be read ({type(error).__name__}: {error})", "unreadable") from None
    return manifest


def is_sealed(manifest: Mapping[str, Any]) -> bool:
    """Return whether the manifest has a checksum of its text; those of earlier versions have none."""
    return _SEAL in manifest


def seal_of(directory: Path) -> str | None:
    """Return the SHA-256 that names a checkpoint and its contents, or None if it has none or is missing."""
    try:
        return read_manifest(directory).get(_SEAL)
    except (ValueError, OSError):
        return None


def _check_checksum(manifest: Mapping[str, Any], content: bytes) -> None:
    """Compare the manifest's text with its checksum, and check that required entries exist.

    Raises:
        ValueError: it has changed since it was written.
    """
    if not is_sealed(manifest):
        unknown = sorted(manifest.keys() - _KEYS_WITHOUT_CHECKSUM)
        if unknown:
            raise ValueError(f"it has no checksum, and {unknown[0]!r} is unknown")
    elif hashlib.sha256(content.replace(manifest[_SEAL].encode(), _BLANK.encode())).hexdigest() != manifest[_SEAL]:
        raise ValueError("manifest checksum mismatch")
    if _STATE not in manifest["files"]:
        raise ValueError(f"it does not list {_STATE}")


def is_optimizer_state(name: str) -> bool:
    """Return whether a listed file belongs to the optimizer, which sampling does not need."""
    return PurePosixPath(name).parts[0] in _OPTIMIZER


def damage(
    directory: Path,
    *,
    contents: bool,
    weights_only: bool = False,
    largest: int | None = None,
    share: tuple[int, int] = (0, 1),
) -> str | None:
    """Return the first problem with a checkpoint's files, or None if it is complete.

    Links, pipes and devices count as damage, and are not read.

    Args:
        directory: the checkpoint.
        contents: also read every byte and compare the SHA-256; otherwise only existence and sizes are checked.
        largest: bytes of the largest file whose contents are read, or None to read all.
        share: index and number of the share of the contents to read: processes that each read one share have together
            read every byte once.
        weights_only: whether the optimizer state is ignored, and may be missing: the checkpoint will not be resumed.
    """
    try:
        files = read_manifest(directory)["files"]
    except (ValueError, OSError) as error:
        return str(error)
    if weights_only:
        files = {name: expected for name, expected in files.items() if not is_optimizer_state(name)}
    for name, expected in files.items():
        problem = _file_problem(directory, name, size=expected["size"])
        if problem is not None:
            return problem
    if not contents:
        return None
    try:
        read = {name: file for name, file in files.items() if largest is None or file["size"] <= largest}
        digests = _digests(directory, share_of(read, *share))
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    mismatches = [name for name, digest in digests.items() if digest != files[name]["sha256"]]
    return f"{mismatches[0]} does not match its SHA-256 checksum" if mismatches else None


def share_of(files: Mapping[str, Mapping[str, Any]], index: int, count: int) -> list[str]:
    """Return the files of one of `count` shares that have about the same number of bytes."""
    shares: list[list[str]] = [[] for _ in range(count)]
    sizes = [0] * count
    for name in sorted(files, key=lambda name: (-files[name]["size"], name)):
        smallest = sizes.index(min(sizes))
        shares[smallest].append(name)
        sizes[smallest] += files[name]["size"]
    return sorted(shares[index])


def _file_problem(directory: Path, name: str, *, size: int) -> str | None:
    """Return the problem with a file, or with a folder on the way to it, without reading it, or None."""
    *folders, _ = PurePosixPath(name).parents  # the file's own first, the checkpoint's last
    try:
        for folder in folders:
            if (directory / folder).is_symlink():
                return f"{folder} is a link"
        stat = (directory / name).lstat()
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    kind = not_a_file(stat.st_mode)
    if kind is not None:
        return f"{name} {kind}"
    return None if stat.st_size == size else f"{name} has {stat.st_size} bytes instead of {size}"


def lacks_optimizer(directory: Path) -> bool:
    """Return whether all optimizer state of an otherwise complete checkpoint is missing, as in a copy."""
    if damage(directory, contents=False, weights_only=True) is not None:
        return False
    names = [name for name in read_manifest(directory)["files"] if is_optimizer_state(name)]
    return bool(names) and not any((directory / name).exists() for name in names)


def total_size(manifest: Mapping[str, Any]) -> int:
    """Return the bytes of all files that a manifest lists."""
    return sum(entry["size"] for entry in manifest["files"].values())


def _digests(directory: Path, names: list[str]) -> dict[str, str]:
    """Return SHA-256 by name; hashing releases the interpreter lock, so that files are read side by side."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        return dict(zip(names, pool.map(lambda name: file_sha256(directory / name), names), strict=True))
