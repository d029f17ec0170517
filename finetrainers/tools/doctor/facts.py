"""Facts about this machine that affect a run: versions, GPUs, limits, shared memory, ports, disk. Imports no torch."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from finetrainers.rundir.health import health_facts
from finetrainers.rundir.run_dir import package_versions
from finetrainers.utils.versions import version_problem

from .disk import disk_facts
from .torch_facts import torch_facts

#: Facts of a machine by name.
Facts = Mapping[str, Any]
#: Value of a system limit that is not set.
UNLIMITED = -1
_SHM = Path("/dev/shm")


def host_facts(folder: Path, *, disk_mib: int) -> dict[str, Any]:
    """Return facts by name, as JSON has them. Facts that this system lacks are left out.

    Args:
        folder: the one whose disk is measured.
        disk_mib: size of the file for that.
    """
    return {
        **disk_facts(folder, disk_mib),  # first, and alone: imports also read the disk
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "memory": psutil.virtual_memory().total,
        **{name: version for name, version in package_versions().items() if version is not None},
        "version_problem": version_problem(),
        **_limits(),
        **({"shm": psutil.disk_usage(str(_SHM)).total} if _SHM.is_dir() else {}),
        **_infiniband(health_facts()),
        **torch_facts(),
    }


def _limits() -> dict[str, Any]:
    """Return the open files and bytes of locked memory that a process may have."""
    try:
        import resource
    except ImportError:  # not a POSIX system
        return {}
    limits = {"open_files": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK}
    soft = {name: resource.getrlimit(limit)[0] for name, limit in limits.items()}
    return {name: UNLIMITED if limit == resource.RLIM_INFINITY else limit for name, limit in soft.items()}


def _infiniband(health: dict[str, Any]) -> dict[str, Any]:
    """Return the readings with the number of InfiniBand or RoCE ports, and of those that are up."""
    ports = health["ports"].values()
    return {**health, **({"ib_ports": len(ports), "ib_active": sum(port["active"] for port in ports)} if ports else {})}
