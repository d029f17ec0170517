"""Gradient checkpointing: keep only the input of each transformer block, compute the rest again in backward."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def set_gradient_checkpointing(transformer: nn.Module, *, enabled: bool) -> None:
    """Switch checkpointing of every block on or off; gradients are the same either way.

    Diffusers' own checkpoint function saves and restores the random state around each block, which on CUDA copies it
    to the host and waits; that is done only where a dropout draws from it.

    Raises:
        ValueError: the network does not support checkpointing.
    """
    if not getattr(transformer, "_supports_gradient_checkpointing", False):
        raise ValueError(
            f"{type(transformer).__name__} does not support gradient checkpointing; drop gradient_checkpointing"
        )
    if not enabled:
        transformer.disable_gradient_checkpointing()  # type: ignore[operator]
        return
    has_dropout = any(isinstance(m, nn.Dropout) and m.p > 0 for m in transformer.modules())

    def run_block(block: nn.Module, *inputs: Any) -> Tensor | tuple[Tensor, ...]:
        return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=has_dropout)

    transformer.enable_gradient_checkpointing(run_block)  # type: ignore[operator]
