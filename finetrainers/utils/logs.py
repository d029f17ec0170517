"""Logging: messages of this package, and fewer start-up messages of other packages."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from .failures import Kind
from .text import quoted, shortened

#: Loggers that announce, on every start, optional parts that are not installed.
_CHATTER = (
    "bitsandbytes",
    "torchao",
    "torch.utils._pytree",
    "diffusers.quantizers.torchao.torchao_quantizer",
    "diffusers.utils.torch_utils",
)
#: Warnings of torch about intended behavior: the prediction is a view, which is not changed in place, norms get fp32
#: weights or inputs on purpose, and the compiled step of torchao's quantized optimizers is not cached on disk.
_NO_NEWS = (
    "In CPU autocast, but the target dtype is not supported",  # a network may ask for fp32 there
    "FSDP2-wrapped module .* returned a view tensor",
    "Mismatch dtype between input and weight",
    "OptimState.* does not implement _stable_hash_for_caching",
)
_VARIABLE = "FINETRAINERS_LOG_LEVEL"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
#: Logger of a command's notes to its user, apart from results: `note: ...`, without level and module.
NOTES = logging.getLogger("finetrainers").getChild("notes")


def yield_idle_threads() -> None:
    """Let OpenMP threads sleep between operations, unless the user decided otherwise; before torch is imported.

    Spinning threads make CPU runs many times slower as soon as anything else runs on the machine.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def configure_logging() -> None:
    """Set up logging for a command; the level comes from FINETRAINERS_LOG_LEVEL, else INFO."""
    handler = _StderrHandler()
    handler.setFormatter(_Format())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("finetrainers").setLevel(_level())
    # huggingface_hub prints its warnings itself; the handler above would print each a second time.
    logging.getLogger("huggingface_hub").propagate = False
    _quiet_chatter(contextlib.ExitStack())


class _StderrHandler(logging.StreamHandler[Any]):
    """Handler that writes to the current `sys.stderr`, which puts lines above a live line of the terminal."""

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, _: Any) -> None:
        """Ignore the stream of the time when the handler was made."""


class _Format(logging.Formatter):
    """The format of log lines, like that of printed ones: `warning: ...`; other packages' lines also name these."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.name == NOTES.name:
            return f"note: {text}"
        if record.name.partition(".")[0] != "finetrainers" or _level() == "DEBUG":
            return f"{record.levelname} {record.name}: {text}"
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"


def quiet_progress_bars() -> None:
    """Disable messages and progress bars of the libraries that load models, until the process ends; for commands."""
    _quiet_loading(contextlib.ExitStack())


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Let libraries log errors only within the block: no missing optional packages, deprecations, or loading bars.

    Downloads still have bars on a terminal. Afterwards levels, filters and bars are restored. Imports transformers and
    diffusers, since they log on import. FINETRAINERS_LOG_LEVEL=DEBUG shows their other warnings.
    """
    with contextlib.ExitStack() as undo:
        undo.enter_context(warnings.catch_warnings())
        _quiet_chatter(undo)
        _quiet_loading(undo)
        yield


def log_level_problem() -> tuple[str, str, Kind] | None:
    """Return the place, message and kind of an invalid FINETRAINERS_LOG_LEVEL, or None."""
    level = os.environ.get(_VARIABLE, "INFO")
    if level.upper() in _LEVELS:
        return None
    return _VARIABLE, f"unknown value {shortened(quoted(level))}; valid: {', '.join(_LEVELS)}", "unknown"


def _level() -> str:
    return "INFO" if log_level_problem() else os.environ.get(_VARIABLE, "INFO").upper()


def _quiet_chatter(undo: contextlib.ExitStack) -> None:
    """Disable the messages that libraries log on import; imports none of them."""
    if _level() != "DEBUG":
        for category in (FutureWarning, DeprecationWarning):
            warnings.simplefilter("ignore", category)
        warnings.filterwarnings("ignore", module="huggingface_hub")
        for message in _NO_NEWS:
            warnings.filterwarnings("ignore", message=message)
    for name in _CHATTER:
        _raise_level(logging.getLogger(name), undo)
    # DeepSpeed resets its logger's level on import, but not its filters. transformers warns on import of a class.
    for name in ("DeepSpeed", "transformers.utils.import_utils"):
        logger = logging.getLogger(name)
        logger.addFilter(_is_news)
        undo.callback(logger.removeFilter, _is_news)


def _is_news(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return "Setting accelerator to CPU" not in text and "requires torchvision (not installed)" not in text


def _quiet_loading(undo: contextlib.ExitStack) -> None:
    """Disable messages and bars of the libraries that load models; download bars stay on terminals."""
    from .progress import working  # not before rich is needed: every command imports this module

    with working("importing torch and diffusers"):
        import diffusers
        import transformers
        from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    # transformers also switches the download bars off and on.
    downloads = not are_progress_bars_disabled()
    undo.callback(enable_progress_bars if downloads else disable_progress_bars)
    for library in (diffusers, transformers):
        bars = library.utils.logging
        if bars.is_progress_bar_enabled():
            bars.disable_progress_bar()
            undo.callback(bars.enable_progress_bar)
        if f"{library.__name__.upper()}_VERBOSITY" not in os.environ and _level() != "DEBUG":
            _raise_level(logging.getLogger(library.__name__), undo)
    if downloads and sys.stderr.isatty():
        enable_progress_bars()


def _raise_level(logger: logging.Logger, undo: contextlib.ExitStack) -> None:
    undo.callback(logger.setLevel, logger.level)
    logger.setLevel(max(logging.ERROR, logger.level))
