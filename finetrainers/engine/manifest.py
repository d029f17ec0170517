"""A checkpoint's manifest: every file with its size and SHA-256, so that damage is found before anything is loaded.

Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from finetrainers.utils.files import fsync_dir, write_json_atomic

MANIFEST = "manifest.json"
_CHUNK = 1 << 22


def write_manifest(directory: Path, *, facts: Mapping[str, Any]) -> None:
    """Write `directory/manifest.json` over all files that are there, and flush it to disk.

    Args:
        directory: complete but for this file.
        facts: what else the manifest says: format, step, versions and so on.
    """
    names = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    files = {
        name: {"size": (directory / name).stat().st_size, "sha256": digest}
        for name, digest in _digests(directory, names).items()
    }
    write_json_atomic(directory / MANIFEST, {**facts, "files": files})
    fsync_dir(directory)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        ValueError: there is none, or it is none.
    """
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        for entry in manifest["files"].values():
            int(entry["size"]), str(entry["sha256"])
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST} is missing: not written to the end, or by an earlier version") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} cannot be read ({type(error).__name__}: {error})") from None
    return manifest


def damage(directory: Path, *, contents: bool) -> str | None:
    """What is wrong with a checkpoint's files, naming the first; None if nothing is.

    Args:
        directory: the checkpoint.
        contents: also read every byte and compare the SHA-256; without, existence and sizes are looked at.
    """
    try:
        files = read_manifest(directory)["files"]
    except (ValueError, OSError) as error:
        return str(error)
    for name, expected in files.items():
        try:
            size = (directory / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if size != expected["size"]:
            return f"{name} has {size} bytes instead of {expected['size']}"
    if not contents:
        return None
    try:
        found = _digests(directory, list(files))
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    changed = [name for name, expected in files.items() if found[name] != expected["sha256"]]
    return f"{changed[0]} is not what was saved: its SHA-256 differs" if changed else None


def total_size(manifest: Mapping[str, Any]) -> int:
    """Bytes of all files that a manifest lists."""
    return sum(entry["size"] for entry in manifest["files"].values())


def _digests(directory: Path, names: list[str]) -> dict[str, str]:
    """SHA-256 by name; hashing releases the interpreter lock, so that files are read side by side."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        return dict(zip(names, pool.map(lambda name: _sha256(directory / name), names), strict=True))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
