"""Process-wide state: save and restore it around a run, pause the garbage collector, free memory."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any
from weakref import WeakMethod

from .device import likely_device_type
from .failures import InputError
from .launch import launched_processes, launched_rank

#: A walk over fewer new objects takes under a millisecond, less than counting the objects that were frozen.
_FEW = 10_000


@lru_cache(maxsize=1)
def _lock(pid: int) -> AbstractContextManager[Any]:
    """Return the lock of a process; a fork has its own, since the thread that holds the other one is not in it."""
    return threading.RLock()


@contextlib.contextmanager
def only_thread(*, waits: bool = False) -> Iterator[None]:
    """Keep other threads from running functions of finetrainers within the block, which change state of the process.

    Args:
        waits: whether to wait for another thread.

    Raises:
        InputError: another thread runs one, and `waits` is False.
    """
    lock: Any = _lock(os.getpid())
    if not lock.acquire(blocking=waits):
        message = (
            "another thread of this process is within a function of finetrainers, which changes state of the process"
        )
        raise InputError(f"{message}; call them one after another, or in separate processes", "occupied")
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def restored(*, waits: bool = False) -> Iterator[list[str]]:
    """Run the block under PyTorch's and accelerate's default state, and restore that of the host program at the end.

    Set to their defaults and restored: default dtype and device, autocast, grad and inference mode, precision flags,
    choice of kernels, accelerate's state. Restored: random generators of Python, numpy and torch, number of
    threads, environment variables, levels of loggers. Determinism, anomaly detection and the number of threads stay
    as the host has set them. Imports torch and accelerate.

    Args:
        waits: see `only_thread`.

    Yields:
        Settings of the host that would have changed results, and have no effect within the block.
    """
    with contextlib.ExitStack() as undo:
        undo.enter_context(only_thread(waits=waits))
        undo.enter_context(environment_restored())
        loggers = [logging.getLogger(name) for name in [None, *logging.Logger.manager.loggerDict]]
        undo.callback(_restore_loggers, [(logger, logger.level, logger.propagate) for logger in loggers])
        _reset_accelerate(undo)
        settings = [*_reset_modes(undo), *_reset_kernels(undo)]
        _restore_random_later(undo)
        yield settings


@contextlib.contextmanager
def environment_restored() -> Iterator[None]:
    """Restore the environment variables at the end of the block, in one thread at a time. Imports nothing."""
    with only_thread():
        before = dict(os.environ)
        try:
            yield
        finally:
            for name in os.environ.keys() - before.keys():
                del os.environ[name]
            os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


def _restore_loggers(states: Sequence[tuple[logging.Logger, int, bool]]) -> None:
    for logger, level, propagate in states:
        logger.propagate = propagate
        if logger.level != level:  # setting a level clears the caches of all loggers, and libraries have hundreds
            logger.setLevel(level)


def _restore_random_later(undo: contextlib.ExitStack) -> None:
    import numpy as np
    import torch

    undo.callback(random.setstate, random.getstate())
    undo.callback(np.random.set_state, np.random.get_state())
    # Only the state of a GPU in use: asking for another's would take memory there, in each process of a launch.
    in_use = torch.cuda.is_available() and (torch.cuda.is_initialized() or launched_processes() == 1)
    undo.enter_context(torch.random.fork_rng([torch.cuda.current_device()] if in_use else []))
    if in_use:
        undo.callback(torch.cuda.set_device, torch.cuda.current_device())


def _reset_accelerate(undo: contextlib.ExitStack) -> None:
    """Clear accelerate's state, which all its objects in a process share."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for shared in (kind._shared_state for kind in (PartialState, AcceleratorState, GradientState)):
        undo.callback(shared.update, dict(shared))
        undo.callback(shared.clear)
        shared.clear()


def _reset_modes(undo: contextlib.ExitStack) -> Iterator[str]:
    """Set the default dtype and device, leave the modes of the host program, and yield the settings that differed."""
    import torch

    dtype = torch.get_default_dtype()
    undo.callback(torch.set_default_dtype, dtype)
    if dtype != torch.float32:
        torch.set_default_dtype(torch.float32)
        yield f"default dtype {str(dtype).removeprefix('torch.')}"
    device = torch.get_default_device()
    undo.callback(_set_default_device, device)
    if device.type != "cpu":
        undo.enter_context(torch.device("cpu"))
        yield f"default device {device}"
    if torch.is_inference_mode_enabled():
        undo.enter_context(torch.inference_mode(False))
        yield "inference_mode"
    elif not torch.is_grad_enabled():
        yield "no_grad"
    undo.enter_context(torch.enable_grad())
    yield from _leave_autocast(undo)


def _leave_autocast(undo: contextlib.ExitStack) -> Iterator[str]:
    """Leave every autocast of the host program, even a disabled one, and yield the device types that it applied to.

    Torch keeps cast weights until the outermost autocast ends: within one of the host, each step of a run would compute
    with the weights of its first step.
    """
    import torch

    depth = torch.autocast_increment_nesting()
    while torch.autocast_decrement_nesting() > 0:
        pass
    for _ in range(depth - 1):
        undo.callback(torch.autocast_increment_nesting)
    undo.callback(torch.clear_autocast_cache)
    torch.clear_autocast_cache()
    undo.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
    torch.set_autocast_cache_enabled(True)
    for device_type in ("cpu", "cuda", "xpu", "mps"):
        undo.callback(torch.set_autocast_dtype, device_type, torch.get_autocast_dtype(device_type))
        if torch.is_autocast_enabled(device_type):
            undo.callback(torch.set_autocast_enabled, device_type, True)
            torch.set_autocast_enabled(device_type, False)
            yield f"autocast on {device_type}"


def _set_default_device(device: Any) -> None:
    import torch

    if torch.get_default_device() != device:
        torch.set_default_device(None if device.type == "cpu" else device)


def _reset_kernels(undo: contextlib.ExitStack) -> Iterator[str]:
    """Set the flags that choose kernels and their precision.

    Yields the settings that differed and would change results on this machine.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    undo.callback(torch.set_num_threads, torch.get_num_threads())
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    undo.callback(
        torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled(), warn_only=warns_only
    )
    _reset_precision(undo)
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    defaults = {"enabled": True, "benchmark": False}
    products = dict.fromkeys(("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"), True)
    for module, flags in ((cudnn, defaults), (cuda.matmul, products | {"allow_fp16_accumulation": False})):
        for name, default in flags.items():
            with contextlib.suppress(AttributeError):  # torch before 2.7 has no fp16 accumulation
                undo.callback(_set, module, name, getattr(module, name))
                _set(module, name, default)
    undo.callback(_set, cudnn, "deterministic", cudnn.deterministic)
    enabled = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled())
    if not all(enabled):
        yield "sdpa_kernel"
    backends = [backend for name, backend in SDPBackend.__members__.items() if name != "ERROR"]
    undo.enter_context(sdpa_kernel(backends))
    # Networks without their own backend follow it.
    if (dispatch := sys.modules.get("diffusers.models.attention_dispatch")) is not None:
        default = dispatch.AttentionBackendName(dispatch.DIFFUSERS_ATTN_BACKEND)
        if (active := dispatch._AttentionBackendRegistry.get_active_backend()[0]) != default:
            yield f"attention backend {active.value}"
        undo.enter_context(dispatch.attention_backend(default))


def _reset_precision(undo: contextlib.ExitStack) -> None:
    """Set the flags of TF32 and bf16 in fp32 products; `--allow_tf32` sets those of CUDA after that."""
    import torch

    cuda, cudnn, mkldnn = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mkldnn
    parts = [getattr(module, part, None) for module in (mkldnn, cudnn) for part in ("rnn", "conv", "matmul")]
    precisions = [
        module for module in (*parts, mkldnn, cudnn, cuda, torch.backends) if hasattr(module, "fp32_precision")
    ]
    # Last in, first out: the older flags are restored first, since each sets several of the newer ones (torch 2.9), and
    # among these the wider ones first.
    for module, name in [
        *((module, "fp32_precision") for module in precisions),
        (cudnn, "allow_tf32"),
        (cuda, "allow_tf32"),
    ]:
        with contextlib.suppress(RuntimeError):  # torch cannot report an older flag that newer ones contradict
            undo.callback(_set, module, name, getattr(module, name))
    with contextlib.suppress(RuntimeError):
        undo.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    for module in reversed(precisions):
        _set(module, "fp32_precision", "none")
    torch.set_float32_matmul_precision("highest")
    cuda.allow_tf32, cudnn.allow_tf32 = False, True  # torch's own defaults


def _set(module: Any, name: str, value: Any) -> None:
    with contextlib.suppress(RuntimeError):  # newer flags contradict this one
        if getattr(module, name) == value:
            return
    setattr(module, name, value)


def process_groups() -> list[Any]:
    """Return the process groups of torch.distributed in this process. Imports nothing."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return []
    return list(dist.distributed_c10d._world.pg_map)


def leave_groups(excluded: Sequence[Any]) -> None:
    """Leave all process groups except `excluded`, which the host program has joined. Every rank must call it."""
    for group in process_groups():
        if group not in excluded:
            sys.modules["torch.distributed"].destroy_process_group(group)


def host_group_problem() -> str | None:
    """Return why a run cannot use the host program's process group, or None if it can or there is none."""
    if not process_groups():
        return None
    dist = sys.modules["torch.distributed"]
    size, rank, backend = dist.get_world_size(), dist.get_rank(), str(dist.get_backend_config())
    if size > 1 and not os.environ.get("RANK"):
        message = (
            f"the program has joined one as rank {rank} of {size}, and RANK is not set, as with accelerate's "
            "debug_launcher: start it with torchrun, accelerate launch or notebook_launcher, which set it"
        )
    elif (size, rank) != (launched_processes(), launched_rank()):
        message = (
            f"the program has joined one as rank {rank} of {size}, but WORLD_SIZE and RANK are set to rank "
            f"{launched_rank()} of {launched_processes()}: start it with torchrun or accelerate launch"
        )
    elif size > 1 and (needed := "nccl" if likely_device_type() == "cuda" else "gloo") not in backend:
        message = (
            f"the program has joined one with {backend}, and a run on this device requires {needed}: initialize it "
            "with that"
        )
    else:
        return None
    return f"{message}, or call torch.distributed.destroy_process_group() before the run"


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector within the block, for millions of new objects that all stay alive.

    Collections would walk them repeatedly, and free nothing.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if gc.get_count()[0] > _FEW and not gc.get_freeze_count():
                # Both calls make the objects old without a walk; old ones are rarely collected.
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@contextlib.contextmanager
def planning() -> Iterator[None]:
    """Import libraries faster, for a command that computes nothing: no garbage collection, no compiler of PyTorch.

    bitsandbytes, which diffusers and PEFT import, decorates functions with `torch.compile`. That imports the compiler,
    unless PyTorch's variable disables it.
    """
    with gc_paused(), environment_restored():
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        yield


def free_memory() -> None:
    """Free unreachable objects (reference cycles) and the unused device memory in torch's caching allocator.

    It does the same as `diffusers.training_utils.free_memory`, which imports every network of diffusers, bitsandbytes,
    torchao and scipy.
    """
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.xpu.is_available():
        torch.xpu.empty_cache()


def call_weakly(method: WeakMethod[Any], *arguments: Any) -> None:
    """Call a method unless its object is gone.

    As a hook of a weight, for an object that refers to this weight: PyTorch holds hooks where Python's garbage
    collector does not see them, so that a strong reference would keep the object and the weight for good.
    """
    if (call := method()) is not None:
        call(*arguments)
