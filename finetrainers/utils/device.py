"""The device: which type it will probably be, so that wrong options are refused before torch is imported; and copies to it."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from .launch import says_yes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Variables that configure torch's allocator on CUDA, and how it was called before torch 2.9.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
#: One of them is there where an NVIDIA driver is loaded: on Linux, in containers, under WSL2.
_SIGNS_OF_A_DRIVER = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")


def likely_device_type() -> str:
    """`cuda` where an NVIDIA driver and a torch build that can use it are present, and nothing hides the GPU; else `cpu`.

    Whoever joins the processes compares it with what torch finds (`device_problem`).
    """
    try:
        can_use_cuda = "+cpu" not in version("torch")
    except PackageNotFoundError:
        can_use_cuda = False
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and not says_yes("ACCELERATE_USE_CPU")
    return "cuda" if can_use_cuda and visible and has_nvidia_driver() else "cpu"


def has_nvidia_driver() -> bool:
    """Whether an NVIDIA driver is loaded."""
    return any(Path(sign).exists() for sign in _SIGNS_OF_A_DRIVER)


def use_expandable_segments() -> None:
    """Let torch's CUDA allocator grow its segments, which fragments less, unless the user has configured it; before torch is used.

    On Linux with a GPU only. The allocator reads its variable when it is used first; forked and spawned processes inherit it.
    """
    if likely_device_type() != "cuda" or not sys.platform.startswith("linux") or allocator_settings():
        return
    new = tuple(int(part) for part in version("torch").split(".")[:2]) >= (2, 9)
    os.environ[ALLOCATOR[0] if new else ALLOCATOR[1]] = "expandable_segments:True"


def allocator_settings() -> str:
    """How torch's CUDA allocator is configured: `NAME=VALUE`; empty: not at all."""
    return next((f"{name}={os.environ[name]}" for name in ALLOCATOR if os.environ.get(name)), "")


def device_problem() -> str | None:
    """Why torch cannot use a GPU that seems to be there, and how to fix it; None if it can, or there is none.

    Training would otherwise begin on the CPU, a thousand times slower, and one line of its output would say so.
    """
    import torch

    if likely_device_type() != "cuda" or torch.cuda.is_available():
        return None
    try:
        torch.cuda.init()
        reason = "it finds no device"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split(". ", 1)[0].rstrip(".")
    return (
        f"this machine has an NVIDIA driver, but torch {torch.__version__} cannot use a GPU: {reason}. Update the driver, or "
        "install a torch build for the driver's CUDA version (`nvidia-smi` names it); to train on the CPU all the same, set "
        "ACCELERATE_USE_CPU=true"
    )


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor on a device. From the host to CUDA through page-locked memory, so that nobody waits for what the GPU is at."""
    if tensor.device.type != "cpu" or not str(device).startswith("cuda"):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
