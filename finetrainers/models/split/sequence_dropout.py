"""Dropout in a network whose clips are split (`--sp_size`): each process drops the numbers that one process would.

The processes of a group draw from generators in the same state. Each draws the mask of all tokens and takes its part of
it, so that tokens of the text, which are whole on every process, lose the same numbers everywhere, and generators stay
equal. Gradient checkpointing restores the generator before it computes a block again, as for other dropout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from finetrainers.config.errors import ConfigError, Problem

from ..batch import even_bounds
from ..flops import Stream, find_stream


class SplitDropout(nn.Dropout):
    """`nn.Dropout` of a tensor that has a part of a clip's tokens."""

    def __init__(self, p: float, sequence: Any, stream: Stream, *, text_first: bool) -> None:
        """Args:
        p: probability of an element to be zeroed.
        sequence: the processes that share clips (`SequenceGroup`).
        stream: tokens of the tensor: of the clip, of clip and text, or a noise level per token or clip.
        text_first: whether those of the text come first.
        """
        super().__init__(p)
        self._sequence, self._stream, self._text_first = sequence, stream, text_first

    def forward(self, x: Tensor) -> Tensor:
        """Zero `p` of the numbers of `[B, S, D]`, or with a row per noise level `[B * S, D]`, while training."""
        if not self.training or (self._stream == "time" and not self._sequence.splits_times):
            return super().forward(x)
        sequence = self._sequence
        start, end = even_bounds(sequence.tokens, sequence.size)[sequence.rank]
        tokens = x.unflatten(0, (-1, end - start)) if self._stream == "time" else x
        text = tokens.shape[1] - (end - start)
        # One byte per number of the whole clip, for a moment.
        shape = (len(tokens), sequence.tokens + text, *tokens.shape[2:])
        # A single process's mask has this order in memory, that of its input.
        mask = torch.empty_permuted(shape, tokens.dim_order(), dtype=torch.bool, device=x.device).bernoulli_(1 - self.p)
        first, clip, last = mask.split(
            (text, sequence.tokens, 0) if self._text_first else (0, sequence.tokens, text), 1
        )
        mask = torch.cat([first, clip[:, start:end], last], dim=1)
        return (tokens * mask * (1 / (1 - self.p))).view_as(x)


def split_dropout(network: nn.Module, spec: Any, sequence: Any) -> None:
    """Put `SplitDropout` in the place of each dropout that sees parts of clips, a LoRA's included; in place.

    Args:
        network: with its LoRA attached.
        spec: spec of its model.
        sequence: the processes that share clips.

    Raises:
        ConfigError: there is dropout, and the family does not define the tokens that go through its layer.
    """
    plan = spec.token_plan
    for name, module in list(network.named_modules()):
        if not isinstance(module, nn.Dropout) or module.p == 0:
            continue
        if not spec.streams:
            message = f"{spec.name} does not declare the tokens that pass through {name} (`ModelSpec.streams`)"
            raise ConfigError([Problem("--sp_size", f"{message}; remove dropout", "unsupported")])
        stream = find_stream(name, spec.streams)
        sees_all = stream in ("text", "prompt", "glyph", "image", "clip", "none")
        if not sees_all and not name.startswith(tuple(f"{module}." for module in (*plan.outputs, *plan.unsplit))):
            split = SplitDropout(module.p, sequence, stream, text_first=bool(plan.text_first))
            network.set_submodule(name, split)
