"""Exit codes of a training command, for scripts that decide whether to start it again."""

from __future__ import annotations

from collections.abc import Sequence

#: The run is done and its results are on disk.
DONE = 0
#: The run failed; see its traceback. (Python's exit code on any exception.)
FAILED = 1
#: The options or the data are not usable, or another run has the output directory. Nothing was changed.
CONFIGURATION = 2
#: The options are valid, but the data is not usable: unreadable, or with too few usable items (EX_DATAERR).
UNUSABLE_DATA = 65
#: Stopped on request, with a checkpoint: start it again to resume (EX_TEMPFAIL of sysexits.h).
STOPPED = 75
#: Stopped by a guard, with a checkpoint, because further training would do harm: read its message first.
GUARDED = 76
#: A section took longer than its time limit (as `timeout` exits).
HUNG = 124


def refused(places: Sequence[str]) -> int:
    """Return the exit code of a command that is refused, from the places of the problems."""
    return UNUSABLE_DATA if places and set(places) == {"data"} else CONFIGURATION


def killed_by(signal_number: int) -> int:
    """Return the exit code of a process that a signal killed, as shells report it.

    A second stop signal ends a run with it.
    """
    return 128 + signal_number
