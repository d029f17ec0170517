"""Memory probe: one micro-batch of every size before the first step, so that an OOM shows in the first minute."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from finetrainers.methods.registry import method_spec
from finetrainers.optim.in_backward import get_step_in_backward
from finetrainers.optim.table import OPTIMIZERS, resolve_name
from finetrainers.parallel.strategy import Strategy
from finetrainers.utils.process_state import free_memory

from .guards.memory import Attempt, advise_on_oom, peak_gib
from .state import TrainState

logger = logging.getLogger(__name__)


def wants_memory_probe(option: str, parallel: Strategy) -> bool:
    """Return whether `--dry_batches` asks for a probe; `auto`: on CUDA, where memory is short and steps are quick."""
    return option == "on" or (option == "auto" and parallel.device.type == "cuda" and parallel.can_drop_gradients)


def probe_memory(state: TrainState, accumulate: Callable[[TrainState, Attempt], Any]) -> None:
    """Run forward and backward of a micro-batch of each size, largest first; no update follows, and nothing remains.

    Meanwhile the memory is reserved that the optimizer will take at its first update. With accumulation the largest
    micro-batch runs twice: the second time, gradients exist already. An OOM is handled as in training.

    Raises:
        OutOfMemory: a size does not fit.
    """
    parallel, config = state.parallel, state.config
    reserved = _reserve_optimizer_memory(state)
    first: tuple[str, Any] | None = None
    for name, step in state.method.dry_steps(state.transformer):
        first = first or (name, step)
        _probe_size(state, accumulate, name, step)
    if first is not None and method_spec(config).accumulates(config):
        _probe_size(state, accumulate, f"{first[0]}, accumulated", first[1])
    del reserved, first
    parallel.drop_gradients()
    free_memory()
    peak_gib(parallel.device)  # training must not report the probe's peak


def _probe_size(state: TrainState, accumulate: Callable[[TrainState, Attempt], Any], name: str, step: Any) -> None:
    started = time.perf_counter()
    peak_gib(state.parallel.device)
    # Neither unscaled nor clipped: an fp16 scaler allows that once per update, and none follows.
    step_in_backward = get_step_in_backward(state.optimizer)
    for attempt in state.guards.memory.attempts(step):
        with attempt, contextlib.nullcontext() if step_in_backward is None else step_in_backward.pause_updates():
            accumulate(state, attempt)
    peak = peak_gib(state.parallel.device)
    seconds = round(time.perf_counter() - started, 3)
    samples = sum(len(item) for item in step.items)
    state.run_dir.event(
        "dry_batch", size=name, samples=samples, seconds=seconds, peak_gib=None if peak is None else round(peak, 3)
    )
    memory = "" if peak is None else f", peak memory {peak:.2f} GiB"
    logger.info("dry batch of %d x %s: %.2f s%s", samples, name, seconds, memory)


def _reserve_optimizer_memory(state: TrainState) -> torch.Tensor | None:
    """Return device memory as large as the optimizer's state will be, or None if that exists or lies elsewhere."""
    device, options = state.parallel.optimizer_device, state.config.optimizer
    recipe = OPTIMIZERS[resolve_name(options)]
    has_state = bool(getattr(state.optimizer, "state", None))
    if device.type != "cuda" or recipe.on_host or options.use_cpu_offload_optimizer or has_state:
        return None
    count = sum(p.numel() for p in state.transformer.parameters() if p.requires_grad)
    size = int(count // state.parallel.optimizer_shards * recipe.state_bytes)
    with advise_on_oom(f"making room for {size / 2**30:.2f} GiB of optimizer state"):
        return torch.empty(size, dtype=torch.uint8, device=device)
