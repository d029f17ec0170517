"""Sequence parallelism: the tokens of each clip are split over a group of processes.

All processes of a group are given equal, complete inputs. Where the network has made tokens of the latents, each takes
its part of them, and goes through the blocks with it. Attention needs all tokens. An all-to-all gives each process all
tokens of a part of the heads, and a second one takes its result back (Ulysses, arXiv:2309.14509). Or keys and values go
around the processes, which takes any number of heads (`ring`). Text tokens are whole on every process. The prediction
is whole again on all of them, and so is the loss.

Gradients: a process has only those of the tokens in its part, so that those of a clip are the sum over its group. The
backward pass of the last join multiplies by the size of the group, since each of its processes has computed the loss of
the whole prediction. The mean over all processes, which every strategy takes anyway, is then the mean over clips of
these sums, and no strategy has to know about groups.

Parts differ by one token at most, so that no padding is needed. diffusers' own context parallelism is not used: its
plan for LTX-Video fails in the backward pass, there is none for the other families, and its hooks do not see the layers
that a LoRA puts in the place of others.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

from finetrainers.config.attention import AUTO
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.parallel import SpMode, heads_problem, ring_problem

from ..batch import even_bounds
from ..common import leave_out_unused
from .attention import AttentionFn, set_processors
from .ring import ring_attention
from .sequence_dropout import split_dropout


@dataclass(frozen=True)
class SequenceParallelPlan:
    """Dimensions of latent tokens in a network's tensors, where these can be split.

    Attributes:
        inputs: arguments of the network by name, with that dimension; those that do not have it are whole.
        outputs: modules whose output is split, with that dimension.
        entries: modules whose first argument is split, given by place or by name, with that dimension.
        unsplit: modules before these, which see all tokens.
        text_first: those modules whose output begins with text tokens: as many as their first argument has.
        last: the module whose output is joined, in dimension 1.
    """

    inputs: Mapping[str, int] = field(default_factory=dict)
    outputs: Mapping[str, int] = field(default_factory=dict)
    entries: Mapping[str, int] = field(default_factory=dict)
    unsplit: Sequence[str] = ()
    text_first: Sequence[str] = ()
    last: str = "proj_out"


class SequenceGroup:
    """The processes that share a clip, and the tokens of each of them.

    Attributes:
        group: these processes.
        size, rank: number of processes, and index of this one.
        tokens: tokens of a clip in the call of the network that is being computed, forward or backward.
        splits_times: whether that call has a noise level per token, which are split as tokens are.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.tokens = 0
        self.splits_times = False

    @property
    def shares(self) -> list[int]:
        """Tokens of each process."""
        return [end - start for start, end in even_bounds(self.tokens, self.size)]

    def part(self, tensor: Tensor, dim: int, *, text: int = 0) -> Tensor:
        """Return this process's part of a tensor, after the tokens of the text, which stay.

        Raises:
            ValueError: there are fewer tokens than processes.
        """
        self.tokens = tensor.shape[dim] - text
        if self.tokens < self.size:
            raise ValueError(
                f"a clip of {self.tokens} latent tokens cannot be split over {self.size} processes; use a smaller "
                "--sp_size"
            )
        start, end = even_bounds(self.tokens, self.size)[self.rank]
        own = tensor.narrow(dim, text + start, end - start)
        # Copies, since a view would keep the memory of the whole tensor.
        return torch.cat([tensor.narrow(dim, 0, text), own], dim=dim) if text else own.clone()

    def join(self, part: Tensor) -> Tensor:
        """Join the parts in dimension 1, on every process."""
        joined: Tensor = _Join.apply(part, self)
        return joined


def _exchange(rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    """Exchange rows with all processes of a group, in order; `sent` and `received` count rows to and from each."""
    return funcol.wait_tensor(funcol.all_to_all_single(rows.contiguous(), received, sent, group))


class _AllToAll(torch.autograd.Function):
    """Exchange of rows: those for each process, in order, are sent to it, and its rows are received."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return _exchange(rows, received, sent, group)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(upstream[0], ctx.sent, ctx.received, ctx.group), None, None, None


class _Join(torch.autograd.Function):
    """All-gather. Its backward pass assumes that all processes of the group compute the same loss."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, sequence: SequenceGroup) -> Tensor:
        ctx.sequence, ctx.tokens = sequence, sequence.tokens
        rows = part.transpose(0, 1)
        # An all-to-all takes parts of different sizes.
        sent = rows.expand(sequence.size, *rows.shape).flatten(0, 1)
        joined = _exchange(sent, sequence.shares, [len(rows)] * sequence.size, sequence.group)
        return joined.transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        sequence = ctx.sequence
        # Blocks may be recomputed from here on, maybe after calls with clips of another size.
        sequence.tokens = ctx.tokens
        start, end = even_bounds(sequence.tokens, sequence.size)[sequence.rank]
        return sequence.size * upstream[0][:, start:end], None


@dataclass(frozen=True)
class SplitAttend(AttentionFn):
    """Attention over a clip split over processes: each computes part of the heads, or its tokens (`ring`)."""

    sequence: SequenceGroup
    mode: SpMode = "ulysses"

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, text: tuple[int, int] = (0, 0)
    ) -> Tensor:
        """Compute attention as `AttentionFn`; text tokens, first and last, are on every process. Clips have no mask."""
        before, after = text
        own = query.shape[1] - before - after
        if own != self.sequence.shares[self.sequence.rank]:
            raise RuntimeError(
                f"attention got {own} tokens of a clip, where process {self.sequence.rank} of {self.sequence.size} has "
                f"{self.sequence.shares[self.sequence.rank]} of {self.sequence.tokens}"
            )
        if torch.is_autocast_enabled(value.device.type):  # the dtype of attention; norms give fp32
            dtype = torch.get_autocast_dtype(value.device.type)
            query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        if self.mode == "ring":
            shares, rank, group = self.sequence.shares, self.sequence.rank, self.sequence.group.group_name
            return ring_attention(query, key, value, mask, before=before, shares=shares, rank=rank, group=group)
        query, key, value = self._gather_tokens([query, key, value], before, own)
        if mask is not None:
            clip = mask[..., before : before + 1].expand(*mask.shape[:-1], self.sequence.tokens)
            mask = torch.cat([mask[..., :before], clip, mask[..., before + own :]], dim=-1)
        return self._gather_heads(self.attend_locally(query, key, value, mask), before, own)

    def _gather_tokens(self, tensors: list[Tensor], before: int, own: int) -> list[Tensor]:
        """Exchange this process's tokens of all heads for all tokens of its heads, `[B, S, H / N, D]`."""
        size, rank = self.sequence.size, self.sequence.rank
        heads = [tensor.unflatten(2, (size, -1)) for tensor in tensors]
        sent = torch.stack([head[:, before : before + own].permute(2, 1, 0, 3, 4) for head in heads], dim=2)
        received = _AllToAll.apply(sent.flatten(0, 1), self.sequence.shares, [own] * size, self.sequence.group)
        clips = [clip.transpose(0, 1) for clip in received.unbind(1)]
        own_heads = [head[:, :, rank] for head in heads]
        return [
            clip if head.shape[1] == own else torch.cat([head[:, :before], clip, head[:, before + own :]], dim=1)
            for clip, head in zip(clips, own_heads, strict=True)
        ]

    def _gather_heads(self, outputs: Tensor, before: int, own: int) -> Tensor:
        """Exchange all tokens of this process's heads for all heads of its tokens and the text, `[B, S, H, D]`."""
        size, tokens, shares = self.sequence.size, self.sequence.tokens, self.sequence.shares
        rows = outputs.transpose(0, 1)
        first, clip, last = rows[:before], rows[before : before + tokens], rows[before + tokens :]
        text = len(first) + len(last)
        if text:
            rows = torch.cat([torch.cat([first, part, last]) for part in clip.split(shares)])
        received = _AllToAll.apply(rows, [own + text] * size, [share + text for share in shares], self.sequence.group)
        return received.unflatten(0, (size, -1)).permute(2, 1, 0, 3, 4).flatten(2, 3)


def check_split(spec: Any, size: int, mode: SpMode = "ulysses") -> None:
    """Refuse to split clips over `size` processes where the network cannot be; before it is loaded.

    Args:
        spec: spec of the model.
        size: number of processes that share a clip.
        mode: way in which they share attention.

    Raises:
        ConfigError: the heads of the network do not divide, or its attention does not go around a ring.
    """
    heads = spec.facts.heads
    if mode == "ulysses" and heads is not None and heads % size:
        raise ConfigError([Problem("--sp_size", heads_problem(heads, size))])
    if mode == "ring" and size > 1 and (problem := ring_problem(spec.config.attn_backend)) is not None:
        raise ConfigError([Problem("--sp_mode", problem, "conflict")])


def share_clips(spec: Any, network: nn.Module, group: dist.ProcessGroup | None, mode: SpMode) -> None:
    """Implement `ModelSpec.split_tokens`."""
    if group is None:
        return
    check_split(spec, dist.get_world_size(group), mode)
    leave_out_unused(network, has_weights=True)  # their tokens are others than the clip's
    sequence = SequenceGroup(group)
    backend = "native" if spec.config.attn_backend == AUTO else spec.config.attn_backend
    set_processors(spec.block_modules(network), spec.attention_processor(SplitAttend(backend, sequence, mode)))
    split_dropout(network, spec, sequence)
    split_tokens(network, spec.token_plan, sequence)


def split_tokens(network: nn.Module, plan: SequenceParallelPlan, sequence: SequenceGroup) -> None:
    """Split each call of a network over the processes of a group, which must all make it; in place, after a LoRA."""

    def split_inputs(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict]:
        assert not args, "the network is called with names"
        times, dim = kwargs.get("timestep"), plan.inputs.get("timestep")
        sequence.splits_times = dim is not None and isinstance(times, Tensor) and times.ndim > dim
        return args, {
            n: _split(value, plan.inputs[n], sequence) if n in plan.inputs else value for n, value in kwargs.items()
        }

    def split_output(name: str, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return _split(output, plan.outputs[name], sequence, text=args[0].shape[1] if name in plan.text_first else 0)

    def split_entry(
        dim: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (_split(args[0], dim, sequence), *args[1:]), kwargs
        first = next(iter(inspect.signature(module.forward).parameters))
        return args, {**kwargs, first: _split(kwargs[first], dim, sequence)}

    if plan.inputs:
        network.register_forward_pre_hook(split_inputs, with_kwargs=True)
    for name in plan.outputs:
        network.get_submodule(name).register_forward_hook(partial(split_output, name))
    for name, dim in plan.entries.items():
        network.get_submodule(name).register_forward_pre_hook(partial(split_entry, dim), with_kwargs=True)
    network.get_submodule(plan.last).register_forward_hook(lambda _, args, output: sequence.join(output))


def _split(value: Any, dim: int, sequence: SequenceGroup, *, text: int = 0) -> Any:
    """Return this process's part of a tensor, or of each in a tuple; values without the dimension stay."""
    if isinstance(value, tuple):
        return tuple(_split(element, dim, sequence, text=text) for element in value)
    return value if not isinstance(value, Tensor) or value.ndim <= dim else sequence.part(value, dim, text=text)
