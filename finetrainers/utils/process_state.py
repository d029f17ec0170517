"""Process-wide state: save and restore it around a run, pause the garbage collector, free memory."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
from collections.abc import Iterator
from typing import Any

from .launch import launched_processes

#: A walk over fewer new objects takes under a millisecond, less than counting the objects that were frozen.
_FEW = 10_000


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Restore the process-wide state that a run changes at the end of the block.

    Random generators of Python, numpy and torch; precision flags; default dtype and number of threads; environment
    variables; levels of loggers. Imports torch.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(_restore_environment, dict(os.environ))
        for name in [None, *logging.Logger.manager.loggerDict]:
            logger = logging.getLogger(name)
            undo.callback(_restore_logger, logger, logger.level, logger.propagate)
        _restore_torch_later(undo)
        _restore_random_later(undo)
        yield


@contextlib.contextmanager
def environment_restored() -> Iterator[None]:
    """Restore the environment variables at the end of the block. Imports nothing."""
    before = dict(os.environ)
    try:
        yield
    finally:
        _restore_environment(before)


def _restore_environment(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


def _restore_logger(logger: logging.Logger, level: int, propagate: bool) -> None:
    logger.setLevel(level)
    logger.propagate = propagate


def _restore_random_later(undo: contextlib.ExitStack) -> None:
    import numpy as np
    import torch

    undo.callback(random.setstate, random.getstate())
    undo.callback(np.random.set_state, np.random.get_state())
    # The state of a GPU in use before; asking for that of another would take memory there, from each process of a launch.
    in_use = torch.cuda.is_available() and (torch.cuda.is_initialized() or launched_processes() == 1)
    undo.enter_context(torch.random.fork_rng([torch.cuda.current_device()] if in_use else []))


def _restore_torch_later(undo: contextlib.ExitStack) -> None:
    import torch

    undo.callback(torch.set_default_dtype, torch.get_default_dtype())
    undo.callback(torch.set_num_threads, torch.get_num_threads())
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    # Last in, first out: the older flags are put back first, since each sets several of the newer ones (torch 2.9), and
    # among these the wider ones first.
    flags = [
        *((getattr(cudnn, part, None), "fp32_precision") for part in ("rnn", "conv")),
        *((place, "fp32_precision") for place in (cudnn, cuda, torch.backends)),
        *((cudnn, name) for name in ("benchmark", "deterministic", "allow_tf32")),
        (cuda, "allow_tf32"),
    ]
    for place, name in flags:
        # Neither flag is there in every version, and torch does not say what an older one is that newer ones contradict.
        with contextlib.suppress(AttributeError, RuntimeError):
            undo.callback(_set, place, name, getattr(place, name))
    with contextlib.suppress(RuntimeError):
        undo.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())


def _set(place: Any, name: str, value: Any) -> None:
    if getattr(place, name) != value:
        setattr(place, name, value)


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector within the block, where millions of objects are made that all stay alive.

    Collections would walk them again and again, and find nothing.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if gc.get_count()[0] > _FEW and not gc.get_freeze_count():
                # Both at once make the objects old, without a walk; old ones are left alone for long.
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@contextlib.contextmanager
def planning() -> Iterator[None]:
    """Import libraries faster, for a command that computes nothing: no garbage collection, no compiler of PyTorch.

    bitsandbytes, which diffusers and PEFT import, decorates functions with `torch.compile`. That imports the compiler, unless
    PyTorch's own variable says that nothing will be compiled.
    """
    with gc_paused(), environment_restored():
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        yield


def free_memory() -> None:
    """Free unreachable objects (reference cycles) and the unused device memory in torch's caching allocator.

    As `diffusers.training_utils.free_memory`, which imports every network of diffusers, bitsandbytes, torchao and scipy.
    """
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.xpu.is_available():
        torch.xpu.empty_cache()
