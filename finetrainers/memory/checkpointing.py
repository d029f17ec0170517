"""Gradient checkpointing: each block keeps its input, and backward computes the rest again, with or without attention.

`torch.utils.checkpoint` recomputes all of a block. Its `create_selective_checkpoint_contexts` can keep the results of
some operators, but in a private dict: `saved_tensors_hooks` do not see them, so that they could never leave the GPU.
Both contexts are therefore written here, for the one kind of operator that is worth keeping. Offloaded tensors go
through `memory.activation_offload`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from finetrainers.config.sections import ActivationMemory
from finetrainers.utils.failures import InputError

from .activation_offload import STORED_TYPES, ActivationOffload, BlockStore

#: Operators that run fused attention: PyTorch's, by kernel and device, and those of flash-attn, diffusers and
#: `models.ring`.
_ATTENTION = re.compile(r"_scaled_dot_product_\w+|_?(flash|efficient|cudnn|flex|ring)_att\w+")


def set_activation_memory(
    transformer: nn.Module, setting: ActivationMemory, *, blocks: Sequence[nn.Module] | None = None, host: str = "cpu"
) -> list[ActivationOffload]:
    """Choose what blocks keep for backward; gradients are the same, bit for bit, with every setting.

    Diffusers' own checkpoint function saves and restores the random state around each block, which on CUDA copies it
    to the host and waits. Here that happens only where a dropout draws from it.

    Args:
        transformer: the network.
        setting: `none` keeps everything.
        blocks: the blocks that it holds for, in the order in which they compute. The others keep everything.
            Default: all; offloading needs them.
        host: where offloaded tensors go; see `activation_offload.Arena`.

    Returns:
        A list that gets the `ActivationOffload` once a block has run; empty with other settings.

    Raises:
        ValueError: the network does not support checkpointing.
    """
    if not getattr(transformer, "_supports_gradient_checkpointing", False):
        raise InputError(
            f"{type(transformer).__name__} does not support gradient checkpointing; use activation_memory none",
            "unsupported",
        )
    if setting == "none":
        transformer.disable_gradient_checkpointing()  # type: ignore[operator]
        return []
    has_dropout = any(isinstance(m, nn.Dropout) and m.p > 0 for m in transformer.modules())
    chosen = None if blocks is None else {id(block) for block in blocks}
    offloads: list[ActivationOffload] = []  # made at the first call, which shows where blocks compute

    def run_block(block: nn.Module, *inputs: Any) -> Tensor | tuple[Tensor, ...]:
        if chosen is not None and id(block) not in chosen:
            return block(*inputs)
        run = partial(checkpoint, use_reentrant=False, preserve_rng_state=has_dropout)
        if setting == "checkpoint":
            return run(block, *inputs)
        if setting == "offload" and not offloads:
            assert blocks is not None, "offloading needs the order of the blocks"
            offloads.append(ActivationOffload(blocks, inputs[0].device, host=host))
        store = offloads[0].open_store(block, inputs) if offloads else None
        return _run_keeping_attention(run, block, inputs, store)

    transformer.enable_gradient_checkpointing(run_block)  # type: ignore[operator]
    return offloads


def _run_keeping_attention(run: Any, block: nn.Module, inputs: tuple[Any, ...], store: BlockStore | None) -> Any:
    """Run a checkpointed block whose attention is not computed again.

    Raises:
        ValueError: no attention operator was seen.
    """
    keep = _KeepAttention(store)
    with nullcontext() if store is None else store.saving_inputs():
        result = run(block, *inputs, context_fn=lambda: (keep, _ReturnAttention(keep)))
    if not keep.results:
        raise InputError(
            f"activation_memory {'keep_attention' if store is None else 'offload'}: no attention operator was seen in "
            f"{type(block).__name__}, so that nothing could be kept; use activation_memory checkpoint",
            "unsupported",
        )
    return result


@cache
def is_attention(operator: Any) -> bool:
    """Return whether an operator is the forward pass of fused attention."""
    name = operator.name().rpartition("::")[2].partition(".")[0]
    return _ATTENTION.fullmatch(name) is not None and "backward" not in name


class _KeepAttention(TorchDispatchMode):
    """Mode that keeps the results of attention while a block runs: outputs, log-sum-exp, state of its dropout."""

    def __init__(self, store: BlockStore | None) -> None:
        super().__init__()
        self.store = store
        self.results: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_attention(func):
            # Autograd is about to attach its graph to `result`; a reference to it would keep the graph alive for good.
            detached = tree_map_only(Tensor, torch.Tensor.detach, result)
            self.results.append(detached if self.store is None else tree_map_only(Tensor, self.store.put, detached))
        return result


class _ReturnAttention(TorchDispatchMode):
    """Mode that returns the kept results, in order, whenever the block runs again in backward."""

    def __init__(self, keeper: _KeepAttention) -> None:
        super().__init__()
        self._keeper = keeper
        self._results: Iterator[Any] = iter(())

    def __enter__(self) -> _ReturnAttention:
        self._results = iter(self._keeper.results)
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_attention(func):
            return func(*args, **(kwargs or {}))
        result, store = next(self._results), self._keeper.store
        return result if store is None else tree_map_only(STORED_TYPES, store.take, result)
