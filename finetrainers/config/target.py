"""Device that options are checked for: this machine's, or the GPU that a dry run plans for. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from finetrainers.utils.device import likely_device_type
from finetrainers.utils.gpus import Capability, Gpu, read_gpu

from .root import TrainConfig


@dataclass(frozen=True)
class TargetDevice:
    """Device that options are checked for.

    Attributes:
        type: `cpu`, `cuda` or `xpu`.
        capability: compute capability of a GPU, or None if it is not known.
        is_elsewhere: whether it belongs to another machine, on which other packages may be installed.
    """

    type: str
    capability: Capability | None = None
    is_elsewhere: bool = False


def planned_gpu(config: TrainConfig) -> Gpu | None:
    """Return the GPU that a dry run or an estimate plans for, or None if it plans for this machine."""
    run = config.run
    return read_gpu(run.gpu) if run.dry_run and run.gpu is not None else None


def target_device(config: TrainConfig) -> TargetDevice:
    """Return the device that a run is checked for."""
    gpu = planned_gpu(config)
    return (
        TargetDevice(likely_device_type()) if gpu is None else TargetDevice("cuda", gpu.capability, is_elsewhere=True)
    )
