"""The version of this package, and a check of the installed libraries' versions before any of them is imported."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.version import Version

__version__ = "0.3.0"


def version_problem(requirements: Iterable[str] | None = None) -> str | None:
    """Return missing or too old libraries with the command that installs them, or None if all are installed.

    pip checks versions when it installs this package, but not when another package's installation replaces a library
    later.

    Args:
        requirements: by default, those of this package's metadata, or none if it is not installed.
    """
    return _own_problem() if requirements is None else _problem(requirements)


@cache
def _own_problem() -> str | None:
    """Return the cached problem of this package's requirements: libraries do not change under a process."""
    try:
        return _problem(requires("finetrainers") or [])
    except PackageNotFoundError:
        return None


def _problem(requirements: Iterable[str]) -> str | None:
    wrong, needed = [], []
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = version(requirement.name)
            # Builds of a coming version, as vendors ship, count as that version.
            if requirement.specifier.contains(Version(Version(installed).base_version), prereleases=True):
                continue
            wrong.append(f"{requirement.name} {installed} is not supported")
        except PackageNotFoundError:
            wrong.append(f"{requirement.name} is not installed")
        needed.append(f"'{requirement.name}{requirement.specifier}'")
    if not wrong:
        return None
    return f"{'; '.join(wrong)}; run: pip install {' '.join(needed)}"
