"""Floating-point operations (FLOPs) of a network: a formula in the numbers of its tokens, from its layers and attentions.

A product of matrices has two operations for each pair of numbers, as `torch.utils.flop_counter` counts them. Only these
are counted, and what checkpointing recomputes is not: model FLOPs, not those of the hardware.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import nn

T = TypeVar("T")

#: Which numbers go through a layer: the tokens of the clip, of the text, both as one sequence, the text as it was given
#: (no trained layer comes before it), or a vector per noise level.
Stream = Literal["video", "text", "joint", "prompt", "time"]

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
#: The backward pass of fused attention computes five products for the two of forward, since it computes the scores
#: again.
_ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True)
class Attends:
    """One attention in each block of a list.

    Attributes:
        blocks: path of the list in the network.
        queries, keys: what attends to what.
    """

    blocks: str
    queries: Stream
    keys: Stream


@dataclass(frozen=True)
class Tokens:
    """The tokens of one call of the network, of all of its clips.

    Attributes:
        clips: how many.
        video: of each clip.
        text: of each clip.
        times: noise levels of each clip: 1, or one per token.
    """

    clips: int
    video: int
    text: int
    times: int = 1

    def of(self, stream: Stream) -> int:
        """Of each clip."""
        joint = self.video + self.text
        return {"video": self.video, "text": self.text, "prompt": self.text, "joint": joint, "time": self.times}[stream]


@dataclass(frozen=True)
class Flops:
    """The formula.

    Attributes:
        forward, backward: operations of linear layers and convolutions for a token of each stream.
        attentions: queries, keys, and blocks x width of each attention.
        attentions_backward: those of them that have a backward pass.
    """

    forward: Mapping[Stream, float]
    backward: Mapping[Stream, float]
    attentions: Sequence[tuple[Stream, Stream, int]]
    attentions_backward: Sequence[tuple[Stream, Stream, int]]

    def of_forward(self, tokens: Tokens) -> float:
        """Of the forward pass of one call."""
        return tokens.clips * (_layers(self.forward, tokens) + _attention(self.attentions, tokens))

    def of_attention(self, tokens: Tokens) -> float:
        """Of the attentions alone, in the forward pass of one call."""
        return tokens.clips * _attention(self.attentions, tokens)

    def of_backward(self, tokens: Tokens) -> float:
        """Of its backward pass."""
        attention = _ATTENTION_BACKWARD * _attention(self.attentions_backward, tokens)
        return tokens.clips * (_layers(self.backward, tokens) + attention)


def _layers(per_token: Mapping[Stream, float], tokens: Tokens) -> float:
    return sum(operations * tokens.of(stream) for stream, operations in per_token.items())


def _attention(attentions: Sequence[tuple[Stream, Stream, int]], tokens: Tokens) -> float:
    return sum(4.0 * tokens.of(queries) * tokens.of(keys) * size for queries, keys, size in attentions)


def flops_formula(
    network: nn.Module,
    *,
    streams: Mapping[str, Stream],
    attentions: Sequence[Attends],
    blocks: Sequence[str],
    width: int,
) -> Flops:
    """Return the formula of a network, adapters included.

    Backward computes the gradient of a layer's weights where they are trained, and that of its input where something
    trained comes before: in full finetuning everywhere but at the inputs of the network, with adapters in blocks and
    after them.

    Args:
        network: may lie on the meta device.
        streams: see `find_stream`.
        attentions: of the network.
        blocks: names of its lists of blocks.
        width: of a token.
    """
    base = [p.requires_grad for name, p in network.named_parameters() if "lora_" not in name]
    trains_all = all(base)
    forward: dict[Stream, float] = {}
    backward: dict[Stream, float] = {}
    is_entry = True  # until the first block
    for name, layer in network.named_modules():
        is_entry = is_entry and not name.startswith(tuple(blocks))
        if not isinstance(layer, _LAYERS):
            continue
        stream = find_stream(name, streams)
        operations = 2.0 * _size(layer)
        gets_gradient = trains_all or "lora_B" in name or not (is_entry or stream in ("prompt", "time"))
        gradients = int(layer.weight.requires_grad) + int(gets_gradient)
        forward[stream] = forward.get(stream, 0.0) + operations
        backward[stream] = backward.get(stream, 0.0) + operations * gradients
    sizes = [(a.queries, a.keys, width * len(network.get_submodule(a.blocks))) for a in attentions]  # type: ignore[arg-type]
    return Flops(forward, backward, sizes, [one for one in sizes if trains_all or one[0] != "prompt"])


def find_stream(name: str, streams: Mapping[str, Stream]) -> Stream:
    """Return the stream of a layer by its name: that of the first expression that is found in it."""
    return next(found for pattern, found in streams.items() if re.search(pattern, name))


def _size(layer: Any) -> int:
    """Numbers of a layer's matrix. Its tensor may hold them in another form, quantized or sharded."""
    if isinstance(layer, nn.Linear):
        return layer.in_features * layer.out_features
    cells = 1
    for side in layer.kernel_size:
        cells *= side
    return layer.in_channels // layer.groups * layer.out_channels * cells


class FlopMeter:
    """Adds up the operations and the tokens of a network's calls.

    Calls without gradients, as those of rollouts and of a reference model, have no backward pass. Their clips are no
    training tokens.
    """

    def __init__(self, flops: Flops, tokens_of: Callable[[Mapping[str, Any]], Tokens], *, sharing: int = 1) -> None:
        """Args:
        flops: the formula.
        tokens_of: of a call, by its arguments.
        sharing: processes that share the operations of each call.
        """
        self._flops, self._tokens_of, self._sharing = flops, tokens_of, sharing
        self._known: dict[tuple[Tokens, bool], float] = {}  # operations of a call
        self._operations = self._tokens = 0.0

    def add(self, arguments: Mapping[str, Any], *, trains: bool) -> None:
        """Count a call."""
        tokens = self._tokens_of(arguments)
        operations = self._known.get((tokens, trains))
        if operations is None:
            operations = self._flops.of_forward(tokens) + (self._flops.of_backward(tokens) if trains else 0.0)
            operations /= self._sharing
            self._known[tokens, trains] = operations
        self._operations += operations
        if trains:
            self._tokens += tokens.clips * tokens.video

    def last_of(self, attempts: Iterable[T]) -> Iterator[T]:
        """The attempts at a step, of which only the last one is counted: what an OOM retry repeats is no throughput."""
        before = self._operations, self._tokens
        for attempt in attempts:
            self._operations, self._tokens = before
            yield attempt

    def take(self) -> dict[str, float]:
        """`flops` and `tokens` since the last time."""
        found = {"flops": self._operations, "tokens": self._tokens}
        self._operations = self._tokens = 0.0
        return found
