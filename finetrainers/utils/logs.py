"""What the commands print besides results: our own messages, and less of other packages' start-up chatter."""

from __future__ import annotations

import logging
import os
import sys

#: Loggers that announce optional parts which are simply not installed, on every start.
_CHATTER = (
    "bitsandbytes",
    "torchao",
    "torch.utils._pytree",
    "diffusers.quantizers.torchao.torchao_quantizer",
    "diffusers.utils.torch_utils",
)


def yield_idle_threads() -> None:
    """Let OpenMP threads sleep between operations, unless the user decided otherwise; before torch is imported.

    Spinning threads make CPU runs many times slower as soon as anything else runs on the machine.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def configure_logging() -> None:
    """Set up logging for a command; the level comes from FINETRAINERS_LOG_LEVEL, else INFO."""
    level = os.environ.get("FINETRAINERS_LOG_LEVEL", "INFO").upper()
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("finetrainers").setLevel(level)
    if level != "DEBUG":
        for name in _CHATTER:
            logging.getLogger(name).setLevel(logging.ERROR)
        # DeepSpeed resets its logger's level on import, but not its filters.
        logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")


def quiet_progress_bars() -> None:
    """Switch off model loading bars where nobody watches a terminal."""
    if sys.stderr.isatty():
        return
    import diffusers
    import transformers

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
