"""The device: its probable type, so that wrong options are refused before torch is imported; its allocators; copies."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .launch import is_enabled
from .reading import read_bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Variables that configure torch's allocator on CUDA: the current one, and the one before torch 2.9.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
#: Setting of the size, in MiB, up to which page-locked memory is rounded up to a power of two; torch 2.13 has it.
PINNED_SETTING = "pinned_max_round_threshold_mb"
#: Its value: weights are larger; blocks of equal size serve the smaller copies of all clip sizes.
PINNED_ROUNDING_MIB = 16
#: Files of a loaded NVIDIA driver; at least one exists on Linux, in containers and under WSL2.
_SIGNS_OF_A_DRIVER = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")


def likely_device_type() -> str:
    """Return `cuda` if an NVIDIA driver and a CUDA build of torch are present and the GPU is not hidden, else `cpu`.

    When processes join, it is compared with torch's device (`device_problem`).
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and not is_enabled("ACCELERATE_USE_CPU")
    if not visible or not has_nvidia_driver():  # before torch's metadata are read, which takes longer
        return "cpu"
    try:
        return "cuda" if "+cpu" not in version("torch") else "cpu"
    except PackageNotFoundError:
        return "cpu"


def has_nvidia_driver() -> bool:
    """Return whether an NVIDIA driver is loaded."""
    return any(Path(sign).exists() for sign in _SIGNS_OF_A_DRIVER)


def configure_allocator() -> None:
    """Let torch's CUDA allocator grow its segments, which fragments less, and its page-locked memory be of exact size.

    Call it before torch is used. It does nothing without a GPU, or if the user has configured the allocator; Linux
    alone can grow segments. The allocator reads its variable on first use; forked and spawned processes inherit it.
    """
    if likely_device_type() != "cuda" or allocator_settings():
        return
    settings = ["expandable_segments:True"] if sys.platform.startswith("linux") else []
    if knows_allocator_setting(PINNED_SETTING):
        settings.append(f"{PINNED_SETTING}:{PINNED_ROUNDING_MIB}")
    is_new = tuple(int(part) for part in version("torch").split(".")[:2]) >= (2, 9)
    if settings:
        os.environ[ALLOCATOR[0] if is_new else ALLOCATOR[1]] = ",".join(settings)


@cache
def knows_allocator_setting(name: str) -> bool:
    """Return whether the installed torch has this setting of its allocators; it refuses to start with others.

    It is looked for in torch's library: builds for the CPU accept any name, and importing torch takes seconds.
    """
    torch_spec = find_spec("torch")
    directories = [] if torch_spec is None else torch_spec.submodule_search_locations or []
    libraries = (Path(directory, "lib", file) for directory in directories for file in ("libc10.so", "c10.dll"))
    return any(name.encode() in read_bytes(library) for library in libraries if library.is_file())


def page_locked_bytes(size: int) -> int:
    """Return the host memory that torch's allocator takes for page-locked memory of `size` bytes in a run.

    It rounds up to a power of two, above `PINNED_ROUNDING_MIB` only if a run cannot limit that.
    """
    settings = allocator_settings()
    is_limited = PINNED_SETTING in settings if settings else knows_allocator_setting(PINNED_SETTING)
    return size if is_limited and size > PINNED_ROUNDING_MIB * 2**20 else 1 << max(size - 1, 0).bit_length()


def allocator_settings() -> str:
    """Return the configuration of torch's CUDA allocator, `NAME=VALUE`, or an empty string without one."""
    return next((f"{name}={os.environ[name]}" for name in ALLOCATOR if os.environ.get(name)), "")


@contextlib.contextmanager
def meta_device() -> Iterator[None]:
    """Create tensors on the meta device within the block, without the random values of layers, half of the time."""
    import torch
    from torch import Tensor
    from torch.nn import init
    from torch.overrides import TorchFunctionMode

    draws = {init.kaiming_uniform_, init.normal_, init.uniform_, Tensor.normal_, Tensor.uniform_}

    class SkipDraws(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func in draws and (tensor := args[0] if args else kwargs["tensor"]).is_meta:
                return tensor
            return func(*args, **kwargs)

    with torch.device("meta"), SkipDraws():
        yield


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
    if tensor.device.type != "cpu" or str(device).startswith("cpu"):
        return tensor.to(device)
    pinned = tensor if str(device).startswith("meta") else tensor.pin_memory()
    return pinned.to(device, non_blocking=True)
