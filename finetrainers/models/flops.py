"""Floating-point operations (FLOPs) of a network: a formula in its token counts, from its layers and attentions.

A product of matrices has two operations for each pair of numbers, as `torch.utils.flop_counter` counts them. Only these
are counted, without recomputation by checkpointing: model FLOPs, not those of the hardware.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from torch import nn

T = TypeVar("T")

#: Input of a layer: the tokens of the clip, of the text, both as one sequence, the text as it was given (no trained
#: layer comes before it), likewise the states of glyphs and of given images, a vector per noise level or per clip, or
#: nothing, since predictions do not depend on the layer.
Stream = Literal["video", "text", "joint", "prompt", "glyph", "image", "time", "clip", "none"]

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
#: The backward pass of fused attention computes five products for the two of forward, since it computes the scores
#: again.
_ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True)
class AttentionSpec:
    """One attention in each block of a list.

    Attributes:
        blocks: path of the list in the network.
        queries, keys: streams that attend, and that are attended to.
    """

    blocks: str
    queries: Stream
    keys: Stream


@dataclass(frozen=True)
class Tokens:
    """The tokens of one call of the network, of all of its clips.

    Attributes:
        clips: number of clips.
        video: video tokens of each clip.
        text: text tokens of each clip.
        times: noise levels of each clip: 1, or one per token.
        image: an image encoder's tokens of each clip's given images.
        prompt: those of `text` that are the prompt's, or None for all.
        glyph: those that another encoder makes of the prompt's quoted text.
    """

    clips: int
    video: int
    text: int
    times: int = 1
    image: int = 0
    prompt: int | None = None
    glyph: int = 0

    def count(self, stream: Stream) -> int:
        """Return the tokens of a stream of each clip."""
        if stream == "joint":
            return self.video + self.text
        counts = {
            "video": self.video, "text": self.text, "glyph": self.glyph, "image": self.image, "time": self.times,
            "clip": 1, "none": 0,
        }  # fmt: skip
        return (self.text if self.prompt is None else self.prompt) if stream == "prompt" else counts[stream]


@dataclass(frozen=True)
class Flops:
    """Formula of a network's operations.

    Attributes:
        forward, backward: operations of linear layers and convolutions for a token of each stream.
        attentions: queries, keys, and blocks x width of each attention.
        attentions_backward: the attentions that have a backward pass.
        shared: operations for a token of each stream that all clips of a call share, as on positions.
    """

    forward: Mapping[Stream, float]
    backward: Mapping[Stream, float]
    attentions: Sequence[tuple[Stream, Stream, int]]
    attentions_backward: Sequence[tuple[Stream, Stream, int]]
    shared: Mapping[Stream, float] = field(default_factory=dict)

    def of_forward(self, tokens: Tokens) -> float:
        """Return the operations of the forward pass of one call."""
        per_clip = _layers(self.forward, tokens) + _attention(self.attentions, tokens)
        return tokens.clips * per_clip + _layers(self.shared, tokens)

    def of_attention(self, tokens: Tokens) -> float:
        """Return the operations of the attentions alone, in the forward pass of one call."""
        return tokens.clips * _attention(self.attentions, tokens)

    def of_backward(self, tokens: Tokens) -> float:
        """Return the operations of the backward pass of one call."""
        attention = _ATTENTION_BACKWARD * _attention(self.attentions_backward, tokens)
        return tokens.clips * (_layers(self.backward, tokens) + attention)


def _layers(per_token: Mapping[Stream, float], tokens: Tokens) -> float:
    return sum(operations * tokens.count(stream) for stream, operations in per_token.items())


def _attention(attentions: Sequence[tuple[Stream, Stream, int]], tokens: Tokens) -> float:
    return sum(4.0 * tokens.count(queries) * tokens.count(keys) * size for queries, keys, size in attentions)


def flops_formula(
    network: nn.Module,
    *,
    streams: Mapping[str, Stream],
    attentions: Sequence[AttentionSpec],
    blocks: Sequence[str],
    width: int,
    unused: str | None = None,
) -> Flops:
    """Build the formula of a network's operations, including adapters.

    Backward computes the gradient of a layer's weights where they are trained, and that of its input where something
    trained comes before: in full finetuning everywhere but at the inputs of the network, with adapters in blocks and
    after them.

    Args:
        network: the network, possibly on the meta device.
        streams: see `find_stream`.
        attentions: attentions of the network.
        blocks: names of its lists of blocks.
        width: width of a token.
        unused: expression searched in the names of layers that predictions do not depend on, or None.
    """
    ignored = re.compile("lora_" if unused is None else f"lora_|{unused}")
    trains_all = all(p.requires_grad for name, p in network.named_parameters() if not ignored.search(name))
    forward: dict[Stream, float] = {}
    backward: dict[Stream, float] = {}
    is_entry = True  # until the first block
    for name, layer in network.named_modules():
        is_entry = is_entry and not name.startswith(tuple(blocks))
        if not isinstance(layer, _LAYERS):
            continue
        stream = find_stream(name, streams)
        operations = 2.0 * _size(layer)
        is_input = is_entry or stream in ("prompt", "glyph", "image", "time", "clip")
        is_unused = unused is not None and re.search(unused, name) is not None
        gets_gradient = not is_unused and (trains_all or "lora_B" in name or not is_input)
        gradients = int(layer.weight.requires_grad) + int(gets_gradient)
        forward[stream] = forward.get(stream, 0.0) + operations
        backward[stream] = backward.get(stream, 0.0) + operations * gradients
    lengths = [len(network.get_submodule(attention.blocks)) for attention in attentions]  # type: ignore[arg-type]
    sizes = [(a.queries, a.keys, width * length) for a, length in zip(attentions, lengths, strict=True)]
    return Flops(forward, backward, sizes, [size for size in sizes if trains_all or size[0] != "prompt"])


def find_stream(name: str, streams: Mapping[str, Stream]) -> Stream:
    """Return the stream of a layer: that of the first expression found in its name."""
    return next(stream for pattern, stream in streams.items() if re.search(pattern, name))


def _size(layer: Any) -> int:
    """Count the numbers of a layer's matrix, whose tensor may hold them in another form, quantized or sharded."""
    if isinstance(layer, nn.Linear):
        return layer.in_features * layer.out_features
    cells = 1
    for side in layer.kernel_size:
        cells *= side
    return layer.in_channels // layer.groups * layer.out_channels * cells


class FlopMeter:
    """Meter of the operations and the tokens of a network's calls.

    Calls without gradients, as those of rollouts and of a reference model, have no backward pass. Their clips are no
    training tokens.
    """

    def __init__(self, flops: Flops, count_tokens: Callable[[Mapping[str, Any]], Tokens], *, sharing: int = 1) -> None:
        """Args:
        flops: the formula.
        count_tokens: counts the tokens of a call, by its arguments.
        sharing: processes that share the operations of each call.
        """
        self._flops, self._count_tokens, self._sharing = flops, count_tokens, sharing
        self._call_flops: dict[tuple[Tokens, bool], float] = {}
        self._operations = self._tokens = 0.0

    def add(self, arguments: Mapping[str, Any], *, trains: bool) -> None:
        """Count a call."""
        tokens = self._count_tokens(arguments)
        operations = self._call_flops.get((tokens, trains))
        if operations is None:
            operations = self._flops.of_forward(tokens) + (self._flops.of_backward(tokens) if trains else 0.0)
            operations /= self._sharing
            self._call_flops[tokens, trains] = operations
        self._operations += operations
        if trains:
            self._tokens += tokens.clips * tokens.video

    def count_last(self, attempts: Iterable[T]) -> Iterator[T]:
        """Yield the attempts at a step, and count only the last one: repetition by an OOM retry is not throughput."""
        before = self._operations, self._tokens
        for attempt in attempts:
            self._operations, self._tokens = before
            yield attempt

    def take(self) -> dict[str, float]:
        """Return `flops` and `tokens` since the last call."""
        counts = {"flops": self._operations, "tokens": self._tokens}
        self._operations = self._tokens = 0.0
        return counts
