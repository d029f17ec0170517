"""Ring attention (Liu et al. 2023, arXiv:2310.01889): queries stay on their process, keys and values go around.

Each process attends to the keys of one process after another, and merges the results by their log-sum-exp. While it
computes on one part, the next one arrives. Backward sends keys and values around again, with the gradients that each
process adds to them. Scores are those of PyTorch's fused kernels, which give the log-sum-exp, and whose backward passes
take that of all keys.

diffusers' `TemplatedRingAttention` is not used. It needs parts of the same size (its `ring_anything` has no backward
pass), gives each part the mask of all keys, has no place for a text that every process has, and refuses the `native`
backend, which gives it no log-sum-exp: nothing else runs in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor

_ATEN = torch.ops.aten
#: Memory-efficient attention stores its log-sum-exp, and reads masks, in rows of multiples of these.
_LSE_ROWS, _MASK_COLUMNS = 32, 16


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, before: int, shares: Sequence[int], rank: int,
    group: str,
) -> Tensor:  # fmt: skip
    """Compute attention of this process's tokens to its own and to the clip's on other processes: `[B, S, H, D]`.

    Args:
        query: `[B, S, H, D]`, for text and the process's part of a clip.
        key: `[B, S, H, D]`, for the same tokens.
        value: `[B, S, H, D]`, for the same tokens.
        mask: over these keys, broadcast to `[B, H, S, S]`: boolean (True is attended to), or added to the scores. The
            other processes' tokens are all attended to.
        before: number of text tokens that precede those of the clip.
        shares: tokens of the clip on each process.
        rank: rank of this process in the group.
        group: name of the process group.
    """
    heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
    out, _ = torch.ops.finetrainers.ring_attention(*heads_first, mask, before, list(shares), rank, group)
    return out.transpose(1, 2)


# ---- the operator, which checkpointing keeps and torch.compile calls as a whole ------------------------------------


def _forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, before: int, shares: Sequence[int], rank: int,
    group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return outputs `[B, H, S, D]`, and the log-sum-exp of all scores, `[B, H, S]`."""
    own = slice(before, before + shares[rank])
    visitors = _visitors(_pack(key[:, :, own], value[:, :, own]), shares, rank, group, key.shape)
    next(visitors)
    part, lse = _attend(query, key, value, mask)
    out = part.to(lse.dtype)
    for keys, values in visitors:
        part, part_lse = _attend(query, keys, values, None)
        total = torch.logaddexp(lse, part_lse)
        out.mul_((lse - total).exp_().unsqueeze(-1))
        out.addcmul_(part, (part_lse - total).exp_().unsqueeze(-1))
        lse = total
        del keys, values, part  # the next ones replace them
    return _token_by_token(out.to(query.dtype)), lse.contiguous()


def _backward(
    upstream: Tensor, saved: Sequence[Any], before: int, shares: Sequence[int], rank: int, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of query, key and value; `saved` are arguments and results of forward."""
    query, key, value, mask, out, lse = saved
    size, own = len(shares), slice(before, before + shares[rank])
    visitors = _visitors(_pack(key[:, :, own], value[:, :, own]), shares, rank, group, key.shape)
    next(visitors)
    d_query, d_key, d_value = _gradients(upstream, query, key, value, mask, out, lse)
    d_query = d_query.to(lse.dtype)
    sums = _pack(d_key[:, :, own], d_value[:, :, own]).to(lse.dtype)
    texts = [(d[:, :, : own.start].clone(), d[:, :, own.stop :].clone()) for d in (d_key, d_value)]
    del d_key, d_value
    for keys, values in visitors:
        # Gradients of the visiting part, as far as the processes before have added to them.
        arriving = _pass_on(sums, 2 * keys.numel(), rank, size, group)
        part, *d_visitor = _gradients(upstream, query, keys, values, None, out, lse)
        d_query += part
        del part
        sums = funcol.wait_tensor(arriving)
        for total, gradient in zip(_unpack(sums, keys.shape[2], keys.shape), d_visitor, strict=True):
            total += gradient
        del keys, values, arriving, d_visitor
    sums = funcol.wait_tensor(_pass_on(sums, 2 * key[:, :, own].numel(), rank, size, group))
    d_query = _token_by_token(d_query.to(query.dtype))
    d_clip = _unpack(sums.to(key.dtype), shares[rank], key.shape)
    d_key, d_value = (
        torch.cat([part.transpose(1, 2) for part in (first, clip, last)], dim=1).transpose(1, 2)  # token by token
        for (first, last), clip in zip(texts, d_clip, strict=True)
    )
    return d_query, d_key, d_value


def _visitors(
    packed: Tensor, shares: Sequence[int], rank: int, group: str, shape: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield keys and values of this process, and then those of each other one; the next ones arrive meanwhile."""
    size = len(shares)
    for step in range(size):
        tokens = shares[(rank - step) % size]
        last = step == size - 1
        numel = packed.numel() // tokens * shares[(rank - step - 1) % size]
        arriving = packed if last else _pass_on(packed, numel, rank, size, group)
        yield _unpack(packed, tokens, shape)
        packed = arriving if last else funcol.wait_tensor(arriving)


def _pass_on(tensor: Tensor, numel: int, rank: int, size: int, group: str) -> Tensor:
    """Send a vector to the next process, and receive `numel` numbers of the previous one after `wait_tensor`."""
    received, sent = [0] * size, [0] * size
    received[(rank - 1) % size], sent[(rank + 1) % size] = numel, tensor.numel()
    return funcol.all_to_all_single(tensor, received, sent, group)  # type: ignore[arg-type]


def _pack(key: Tensor, value: Tensor) -> Tensor:
    return torch.cat([key.flatten(), value.flatten()])


def _unpack(packed: Tensor, tokens: int, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return keys and values `[B, H, S, D]`, of `tokens` tokens and otherwise `shape`."""
    batch, heads, _, width = shape
    key, value = packed.view(2, batch, heads, tokens, width)
    return key, value


def _token_by_token(heads_first: Tensor) -> Tensor:
    """Return `[B, H, S, D]` with a token's heads adjacent in memory: compiled code relies on strides."""
    return heads_first.transpose(1, 2).contiguous().transpose(1, 2)


# ---- PyTorch's fused attention, with its log-sum-exp --------------------------------------------------------------


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return outputs and log-sum-exp of attention to a part of the keys."""
    if query.device.type == "cpu":
        mask = None if mask is None else _additive_mask(mask, query.dtype)
        return _ATEN._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=mask)
    if _is_flash(query, mask):
        out, lse, *_ = _ATEN._scaled_dot_product_flash_attention(query, key, value)
        return out, lse
    mask = None if mask is None else _align_mask(mask, query, key.shape[2])
    out, lse, *_ = _ATEN._scaled_dot_product_efficient_attention(query, key, value, mask, True)
    return out, lse[:, :, : query.shape[2]]


def _gradients(
    upstream: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the part of the queries' gradients due to given keys, and the gradients of these keys and their values.

    Args:
        upstream: gradients of the outputs.
        query: all queries.
        key: a part of the keys.
        value: values of these keys.
        mask: mask over these keys.
        out: outputs of attention to all keys.
        lse: log-sum-exp of the scores of all keys.
    """
    if query.device.type == "cpu":
        mask = None if mask is None else _additive_mask(mask, query.dtype)
        return _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            upstream, query, key, value, out, lse, 0.0, False, attn_mask=mask
        )
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
    if _is_flash(query, mask):
        return _ATEN._scaled_dot_product_flash_attention_backward(
            upstream, query, key, value, out, lse.contiguous(), None, None, query.shape[2], key.shape[2], 0.0, False,
            no_dropout, no_dropout,
        )  # fmt: skip
    mask = None if mask is None else _align_mask(mask, query, key.shape[2])
    # The kernel reads whole rows; infinity is what its own forward pass puts behind them.
    lse = F.pad(lse, (0, -lse.shape[2] % _LSE_ROWS), value=torch.inf)
    no_dropout = no_dropout[0].to(torch.int64)
    d_query, d_key, d_value, _ = _ATEN._scaled_dot_product_efficient_attention_backward(
        upstream, query, key, value, mask, out, lse, no_dropout, no_dropout, 0.0, [True, True, True, False]
    )
    return d_query, d_key, d_value


def _is_flash(query: Tensor, mask: Tensor | None) -> bool:
    width = query.shape[3]
    return mask is None and query.dtype in (torch.float16, torch.bfloat16) and width % 8 == 0 and width <= 256


def _additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask to add to the scores."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


def _align_mask(mask: Tensor, query: Tensor, keys: int) -> Tensor:
    """Return a mask as memory-efficient attention reads it: of full size, its rows at aligned addresses."""
    added = _additive_mask(mask, query.dtype)
    padded = F.pad(added, (0, -keys % _MASK_COLUMNS))[..., :keys]
    return padded.expand(*query.shape[:3], keys)


# ---- registration --------------------------------------------------------------------------------------------------

_PLACE = "int before, int[] shares, int rank, str group"
_FORWARD = torch.library.custom_op(
    "finetrainers::ring_attention", _forward, mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, Tensor? mask, {_PLACE}) -> (Tensor, Tensor)",
)  # fmt: skip
_BACKWARD = torch.library.custom_op(
    "finetrainers::ring_attention_backward", _backward, mutates_args=(),
    schema=f"(Tensor upstream, Tensor?[] saved, {_PLACE}) -> (Tensor, Tensor, Tensor)",
)  # fmt: skip
#: Functions of these operators, to count their allocations.
OPERATOR_BODIES: Mapping[Any, Callable[..., tuple[Tensor, ...]]] = {
    torch.ops.finetrainers.ring_attention.default: _forward,
    torch.ops.finetrainers.ring_attention_backward.default: _backward,
}


@_FORWARD.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return _token_by_token(torch.empty_like(query)), query.new_empty(query.shape[:3], dtype=lse_dtype)


@_BACKWARD.register_fake
def _(_: Tensor, saved: Sequence[Any], *_place: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, *_others = saved
    d_query, d_key, d_value = (_token_by_token(torch.empty_like(tensor)) for tensor in (query, key, value))
    return d_query, d_key, d_value


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.before, ctx.shares, ctx.rank, ctx.group = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _derive(ctx: Any, upstream: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.finetrainers.ring_attention_backward(
        upstream, list(ctx.saved_tensors), ctx.before, ctx.shares, ctx.rank, ctx.group
    )
    return *gradients, None, None, None, None, None


_FORWARD.register_autograd(_derive, setup_context=_save)
