"""The device: its probable type, so that wrong options are refused before torch is imported; and copies to it."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from .launch import is_enabled

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Variables that configure torch's allocator on CUDA: the current one, and the one before torch 2.9.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
#: Files of a loaded NVIDIA driver; at least one exists on Linux, in containers and under WSL2.
_SIGNS_OF_A_DRIVER = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")


def likely_device_type() -> str:
    """Return `cuda` if an NVIDIA driver and a CUDA build of torch are present and the GPU is not hidden, else `cpu`.

    When processes join, it is compared with torch's device (`device_problem`).
    """
    try:
        can_use_cuda = "+cpu" not in version("torch")
    except PackageNotFoundError:
        can_use_cuda = False
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and not is_enabled("ACCELERATE_USE_CPU")
    return "cuda" if can_use_cuda and visible and has_nvidia_driver() else "cpu"


def has_nvidia_driver() -> bool:
    """Return whether an NVIDIA driver is loaded."""
    return any(Path(sign).exists() for sign in _SIGNS_OF_A_DRIVER)


def use_expandable_segments() -> None:
    """Let torch's CUDA allocator grow its segments, which fragments less; call it before torch is used.

    Only on Linux with a GPU, and unless the user has configured the allocator. The allocator reads its variable on
    first use; forked and spawned processes inherit it.
    """
    if likely_device_type() != "cuda" or not sys.platform.startswith("linux") or allocator_settings():
        return
    new = tuple(int(part) for part in version("torch").split(".")[:2]) >= (2, 9)
    os.environ[ALLOCATOR[0] if new else ALLOCATOR[1]] = "expandable_segments:True"


def allocator_settings() -> str:
    """Return the configuration of torch's CUDA allocator, `NAME=VALUE`, or an empty string without one."""
    return next((f"{name}={os.environ[name]}" for name in ALLOCATOR if os.environ.get(name)), "")


def device_problem() -> str | None:
    """Return why torch cannot use an apparent GPU, and the remedy, or None if it can or there is none.

    Training would otherwise run on the CPU, a thousand times slower, with only one line of output about it.
    """
    import torch

    if likely_device_type() != "cuda" or torch.cuda.is_available():
        return None
    try:
        torch.cuda.init()
        reason = "it does not detect a device"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split(". ", 1)[0].rstrip(".")
    return (
        f"this machine has an NVIDIA driver, but torch {torch.__version__} cannot use a GPU: {reason}. Update the "
        "driver, or install a torch build for the driver's CUDA version (`nvidia-smi` prints it); to train on the "
        "CPU anyway, set ACCELERATE_USE_CPU=true"
    )


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor on a device; from the host to a GPU through page-locked memory, without waiting for the GPU."""
    if tensor.device.type != "cpu" or str(device) == "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
