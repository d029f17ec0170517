"""What the launcher says about this process's company. Imports no torch."""

from __future__ import annotations

import os


def launched_processes() -> int:
    """How many processes the launcher (accelerate, torchrun) started over all machines; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_rank() -> int:
    """This process's index among them; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))
