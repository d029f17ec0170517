"""What this machine trains on, guessed without importing torch, so that wrong options are refused at once."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def likely_device_type() -> str:
    """`cuda` where an NVIDIA driver and a torch build that can use it are present, else `cpu`."""
    try:
        can_use_cuda = "+cpu" not in version("torch")
    except PackageNotFoundError:
        can_use_cuda = False
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")
    has_driver = Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()
    return "cuda" if can_use_cuda and visible and has_driver else "cpu"
