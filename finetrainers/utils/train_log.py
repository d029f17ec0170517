"""Log file of the printed and logged lines of a process, with the time of each line."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from pathlib import Path

#: Logger of printed lines; without a file, they are dropped.
PRINTED = logging.getLogger("finetrainers").getChild("printed")
PRINTED.propagate = False
PRINTED.setLevel(logging.INFO)
PRINTED.addHandler(logging.NullHandler())


@contextlib.contextmanager
def train_log(path: Path | None) -> Iterator[None]:
    """Append logged lines, and lines of `PRINTED`, to a file within the block, or to no file if it is None.

    The exception that ends the block is its last line.
    """
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(_Format("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S"))
    loggers = (logging.getLogger(), PRINTED)
    # Without handlers Python prints warnings to stderr by its last-resort handler, which any handler would replace.
    last_resort = None if loggers[0].handlers else logging.lastResort
    for logger in loggers:
        logger.addHandler(handler)
    if last_resort is not None:
        loggers[0].addHandler(last_resort)
    try:
        yield
    except BaseException as error:
        PRINTED.info("ended by %s: %s", type(error).__name__, error)
        raise
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        if last_resort is not None:
            loggers[0].removeHandler(last_resort)
        handler.close()


class PrintedLines(io.StringIO):
    """A text file whose lines go to `PRINTED`."""

    def write(self, text: str) -> int:
        for line in text.splitlines():
            PRINTED.info("%s", line.rstrip())
        return len(text)  # nothing is buffered


class _Format(logging.Formatter):
    """The format of log lines; printed lines have no level."""

    def format(self, record: logging.LogRecord) -> str:
        if record.name != PRINTED.name:
            return super().format(record)
        return f"{self.formatTime(record, self.datefmt)} {record.getMessage()}"
