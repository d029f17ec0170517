"""What the launcher says about this process's company. Imports no torch."""

from __future__ import annotations

import os


def launched_processes() -> int:
    """How many processes the launcher (accelerate, torchrun, deepspeed) started over all machines; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_rank() -> int:
    """This process's index among them; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def launched_here() -> int:
    """How many of them run on this machine."""
    # DeepSpeed's launcher sets the first; on CPUs accelerate then sets the second, to 1.
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or launched_processes())


def launched_local_rank() -> int:
    """This process's index among those of this machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))
