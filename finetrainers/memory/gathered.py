"""Memory that a strategy gathers to compute with, and that of buffers which average gradients, for the estimate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from finetrainers.parallel.sharding import ShardingSpec

from .network_weights import NetworkWeights


@dataclass(frozen=True)
class Moment:
    """A moment of the backward pass.

    Attributes:
        gathered: bytes that a strategy has gathered to compute with, and of the gradients that it sums over processes.
        stored: share of the stored activations that still exist.
        made: share of the gradients that exist.
        working: share of the peak memory of a block's backward pass.
    """

    gathered: float
    stored: float
    made: float
    working: float = 1.0


@dataclass(frozen=True)
class Gathered:
    """Bytes that a strategy gathers to compute with.

    Attributes:
        forward: at the end of forward: weights of the block that computes, of the next one, and outside of blocks.
        backward: moments that include the peak.
        after: when no activations are left: all gradients that are averaged or used for the update.
        stays: buffers that also exist between steps.
    """

    forward: float
    backward: tuple[Moment, ...]
    after: float = 0.0
    stays: float = 0.0

    @property
    def peak(self) -> float:
        """The most bytes at a time."""
        return max(self.forward, *(moment.gathered for moment in self.backward))


NOTHING = Gathered(0.0, (Moment(0.0, 1.0, 0.0), Moment(0.0, 0.0, 1.0)))


def gathered_bytes(
    weights: NetworkWeights,
    *,
    width: int,
    split: ShardingSpec,
    accumulates: bool,
    swapped: Sequence[int] = (),
    saved: Mapping[int, float] | None = None,
) -> Gathered:
    """Return the bytes that a strategy gathers of a network, and those of the buffers that sum gradients.

    Args:
        weights: of the network.
        width: bytes per parameter as it computes.
        split: of the strategy. FSDP2 gathers the block that computes and the next one, and keeps all until backward if
            it does not reshard; gradients that it does not keep unsharded are summed over processes at once, in fp32.
        accumulates: whether a step has several micro-batches.
        swapped: indices of blocks whose frozen weights come from the host, and are not gathered.
        saved: bytes that quantization saves of weights, by their `id`.
    """
    if split.zero_stage:
        return _gathered_by_zero(weights, width=width, split=split, accumulates=accumulates)
    blocks, sums = weights.blocks, not (split.keeps_gradients and accumulates)
    if not split.gathers or not blocks:
        return NOTHING
    outside = weights.total - sum(p.numel() for block in blocks for p in block)

    trained = [sum(p.numel() for p in block if p.requires_grad) for block in blocks]

    def unsharded_bytes(index: int) -> float:
        if index in swapped:
            return float(trained[index] * width)
        return sum(p.numel() * width - (saved or {}).get(id(p), 0.0) for p in blocks[index])

    sizes, last = [unsharded_bytes(index) for index in range(len(blocks))], len(blocks) - 1

    def moment(index: int) -> Moment:
        """Return the moment when half of a block's gradients are made.

        The next block is gathered, and the gradients of the previous one are summed.
        """
        gathered = sizes[max(0, index - 1) : index + 1] if split.reshards else sizes[: index + 1]
        moving = 0.5 * trained[index] * width + 4.0 * (trained[index + 1] if index < last else 0)
        made = sum(trained[index + 1 :]) / max(1, weights.trained)
        return Moment(outside * width + sum(gathered) + sums * moving, (index + 1) / len(blocks), made)

    forward = outside * width + (2 * sizes[last] if split.reshards else sum(sizes))
    return Gathered(forward, tuple(map(moment, range(len(blocks)))))


def _gathered_by_zero(weights: NetworkWeights, *, width: int, split: ShardingSpec, accumulates: bool) -> Gathered:
    """Return the bytes of DeepSpeed's buffers, as `count_zero` counts them.

    Gradients are copied into a bucket. A full bucket is averaged in a copy, after which each process keeps its part.
    Stages 1 and 2 get the bucket in backward. In stage 3 it stays, like the averaged gradients.
    """
    trained, bucket, blocks = float(weights.trained), float(split.buffer_numbers), max(1, len(weights.blocks))
    filled, part = min(trained, bucket), trained / split.optimizer
    largest = weights.largest
    own = 0.0 if split.optimizer_on_host else part  # averaged gradients, on the device
    before = own if accumulates else 0.0  # averaged gradients of earlier micro-batches
    updated = 0.0 if split.optimizer_on_host else min(part, split.update_numbers)
    update = (width + 4) * updated  # flat, and in fp32
    # When the bucket is full for the first time, a block may be nearly done; the second time may be at any point.
    full = [
        (1 - count * bucket / trained, working) for count, working in ((1, 0.75), (2, 1.0)) if trained > count * bucket
    ]
    if split.zero_stage == 3:
        live, new = float(width * min(weights.total, split.live_weights)), float(width * largest)
        moments = [Moment(live + new, 1.0, 0.0)]
        for share, working in full:  # and weights that are done with are freed
            left = min(live, share * weights.total * width)
            moments.append(Moment(left + new + width * bucket, share, 0.0, working=working))
        return Gathered(live, tuple(moments), max(width * filled, update), width * (bucket + own))
    # The bucket exists from the first gradient on: that of a weight behind the blocks, or within the last one.
    outside = weights.trained - sum(p.numel() for block in weights.blocks for p in block if p.requires_grad)
    first_gradient = Moment(width * bucket, 1.0 if outside else 1 - 1 / blocks, 0.0)
    moments = [Moment(0.0, 1.0, 0.0), first_gradient]
    if split.zero_stage == 1:  # gradients are unsharded until backward is over
        moments.append(Moment(width * bucket, 1 / blocks, 1 - 1 / blocks))
        after = bucket + trained + own
    else:
        for index, (share, working) in enumerate(full):  # at first, nothing has been averaged before
            moments.append(Moment(width * (2 * bucket + index * before), share, float(index), working=working))
        after = bucket + filled + own + before
    stays = float(width * largest) if split.optimizer_on_host else 0.0  # the buffer of offloaded gradients
    return Gathered(0.0, tuple(moments), max(width * after, width * updated + update), stays)


def zero_host_bytes(
    split: ShardingSpec, *, total: int, trained: int, largest: int, width: int, state_bytes: float, accumulates: bool
) -> float:
    """Return the bytes that DeepSpeed's offloading has in host memory for each process, between steps.

    Args:
        split: of the strategy.
        total, trained, largest: parameters of the network, trainable ones, and those of the largest trainable weight.
        width: bytes per parameter as it computes.
        state_bytes: of the optimizer per trainable parameter, without fp32 weights.
        accumulates: whether a step has several micro-batches.
    """
    num_bytes = 0.0
    if split.weights_on_host:
        num_bytes += width * total / split.weights
    if split.optimizer_on_host:
        part = trained / split.optimizer
        num_bytes += (state_bytes + 8) * part  # fp32 weights and gradients
        # Averaged gradients; stages 1 and 2 have buffers for new weights and for a gradient, and sums of micro-batches.
        num_bytes += width * part if split.zero_stage == 3 else width * (part * (1 + accumulates) + largest)
    return num_bytes
