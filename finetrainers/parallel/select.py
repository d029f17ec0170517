"""Choice of the strategy of a run."""

from __future__ import annotations

import logging

from finetrainers.config.parallel import ParallelSection
from finetrainers.config.root import TrainConfig
from finetrainers.utils.launch import launched_rank

from .ddp import DDP
from .sharding import with_launcher
from .strategy import Strategy

logger = logging.getLogger(__name__)


def planned_strategy(config: TrainConfig, *, device_type: str) -> Strategy:
    """Return the strategy that the options and the launcher ask for, without joining a process; see `Strategy.planned`.

    Raises:
        ConfigError: the options contradict each other or the launcher.
    """
    options = with_launcher(config.parallel)
    return _strategy_class(options).planned(config, options, device_type=device_type)


def _strategy_class(options: ParallelSection) -> type[Strategy]:
    if options.fsdp is not None:
        from .fsdp import FSDP

        return FSDP
    if options.deepspeed:
        from .zero import ZeRO

        return ZeRO
    return DDP


def open_strategy(config: TrainConfig) -> Strategy:
    """Join the other processes under the strategy that the options and the launcher ask for.

    Raises:
        ConfigError: the options contradict each other or the launcher.
        RuntimeError: the processes do not see each other.
    """
    options = with_launcher(config.parallel)
    strategy, warns = _strategy_class(options), launched_rank() == 0
    if warns and strategy is not DDP and config.changed("overlap_gradient_exchange"):
        logger.warning(
            "--overlap_gradient_exchange has an effect only under DDP; FSDP2 and DeepSpeed exchange gradients in "
            "another way"
        )
    # Whether FSDP2 is used is known only now.
    for name in ("fsdp_reshard_after_forward", "fsdp_cpu_offload", "sync_each_batch"):
        if warns and options.fsdp is None and config.changed(name):
            logger.warning("--%s has no effect without FSDP2 (--fsdp)", name)
    return strategy(config, options)
