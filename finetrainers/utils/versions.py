"""This package's version, and whether the installed libraries are new enough; checked before any of them is imported."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.version import Version

__version__ = "0.1.0"


def version_problem(requirements: Iterable[str] | None = None) -> str | None:
    """Which libraries are missing or too old, with the command that installs them; None if all are installed.

    pip sees to it when it installs this package, but not when another package's installation replaces a library later.

    Args:
        requirements: what is needed; default: what this package's metadata says, nothing where it is not installed.
    """
    return _own_problem() if requirements is None else _problem(requirements)


@cache
def _own_problem() -> str | None:
    """Asked by every check of a run; what is installed does not change under a process."""
    try:
        return _problem(requires("finetrainers") or [])
    except PackageNotFoundError:
        return None


def _problem(requirements: Iterable[str]) -> str | None:
    wrong, wanted = [], []
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(requirement.name)
            # Builds of a coming version, as vendors ship, count as that version.
            if requirement.specifier.contains(Version(Version(found).base_version), prereleases=True):
                continue
            wrong.append(f"{requirement.name} {found}")
        except PackageNotFoundError:
            wrong.append(f"no {requirement.name}")
        wanted.append(f"'{requirement.name}{requirement.specifier}'")
    if not wrong:
        return None
    return f"{', '.join(wrong)} installed, which cannot work; run: pip install {' '.join(wanted)}"
