"""What a strategy gathers to compute with, and the buffers through which gradients are averaged, for the memory estimate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from finetrainers.parallel.sharding import Split

from .network_weights import NetworkWeights


@dataclass(frozen=True)
class Moment:
    """A moment of the backward pass.

    Attributes:
        gathered: bytes that a strategy has gathered to compute with, and of the gradients that it sums over processes.
        kept: share of the stored activations that are still there.
        made: share of the gradients that are there.
        working: share of what one block needs at most while it goes backward.
    """

    gathered: float
    kept: float
    made: float
    working: float = 1.0


@dataclass(frozen=True)
class Gathered:
    """Bytes that a strategy gathers to compute with.

    Attributes:
        forward: at the end of forward: of the block that computes, the next one, and outside of blocks.
        backward: moments among which that of the peak is.
        after: when no activations are left: gradients that are averaged or updated with, all of them.
        stays: buffers that are there between steps too.
    """

    forward: float
    backward: tuple[Moment, ...]
    after: float = 0.0
    stays: float = 0.0

    @classmethod
    def same(cls, forward: float, backward: float) -> Gathered:
        """So many bytes in forward, and all the time in backward."""
        return cls(forward, (Moment(backward, 1.0, 0.0), Moment(backward, 0.0, 1.0)))

    @property
    def most(self) -> float:
        """Bytes, at most."""
        return max(self.forward, *(moment.gathered for moment in self.backward))


NOTHING = Gathered.same(0.0, 0.0)


def gathered_bytes(
    weights: NetworkWeights,
    *,
    width: int,
    split: Split,
    accumulates: bool,
    swapped: Sequence[int] = (),
    saved: Mapping[int, float] | None = None,
) -> Gathered:
    """What a strategy gathers of a network of these blocks, and the buffers through which gradients are summed.

    Args:
        weights: of the network.
        width: bytes of a weight as it computes.
        split: of the strategy. FSDP2 gathers the block that computes and the next one, and keeps all until backward if it
            does not reshard; gradients that it does not keep whole are summed over processes at once, in fp32.
        accumulates: whether a step has several micro-batches.
        swapped: numbers of blocks whose frozen weights come from the host, and are not gathered.
        saved: bytes that quantization saves of weights, by their `id`.
    """
    if split.zero_stage:
        return _of_zero(weights, width=width, split=split, accumulates=accumulates)
    blocks, sums = weights.blocks, not (split.keeps_gradients and accumulates)
    if not split.gathers or not blocks:
        return NOTHING
    outside = weights.total - sum(p.numel() for block in blocks for p in block)

    trained = [sum(p.numel() for p in block if p.requires_grad) for block in blocks]

    def whole(index: int) -> float:
        if index in swapped:
            return float(trained[index] * width)
        return sum(p.numel() * width - (saved or {}).get(id(p), 0.0) for p in blocks[index])

    sizes, last = [whole(index) for index in range(len(blocks))], len(blocks) - 1

    def moment(index: int) -> Moment:
        """A block goes backward, half of its gradients made; the next one is gathered, and those of the last one are summed."""
        there = sizes[max(0, index - 1) : index + 1] if split.reshards else sizes[: index + 1]
        moving = 0.5 * trained[index] * width + 4.0 * (trained[index + 1] if index < last else 0)
        made = sum(trained[index + 1 :]) / max(1, weights.trained)
        return Moment(outside * width + sum(there) + sums * moving, (index + 1) / len(blocks), made)

    forward = outside * width + (2 * sizes[last] if split.reshards else sum(sizes))
    return Gathered(forward, tuple(map(moment, range(len(blocks)))))


def _of_zero(weights: NetworkWeights, *, width: int, split: Split, accumulates: bool) -> Gathered:
    """DeepSpeed's buffers, as `count_zero` counts them.

    Gradients are copied into a bucket. A full one is averaged in a copy, after which each process keeps its part. Stages 1
    and 2 get the bucket in backward. In stage 3 it stays, like the averaged gradients.
    """
    trained, bucket, blocks = float(weights.trained), float(split.buffer_numbers), max(1, len(weights.blocks))
    filled, part = min(trained, bucket), trained / split.optimizer
    largest = weights.largest
    own = 0.0 if split.optimizer_on_host else part  # averaged gradients, on the device
    before = own if accumulates else 0.0  # those of the micro-batches before
    updated = 0.0 if split.optimizer_on_host else min(part, split.update_numbers)
    update = (width + 4) * updated  # flat, and in fp32
    # The bucket is full for the first time, where a block may be nearly done, and again, which may be at any time.
    full = [
        (1 - number * bucket / trained, working)
        for number, working in ((1, 0.75), (2, 1.0))
        if trained > number * bucket
    ]
    if split.zero_stage == 3:
        live, new = float(width * min(weights.total, split.live_weights)), float(width * largest)
        moments = [Moment(live + new, 1.0, 0.0)]
        for kept, working in full:  # and weights that are done with are freed
            left = min(live, kept * weights.total * width)
            moments.append(Moment(left + new + width * bucket, kept, 0.0, working=working))
        return Gathered(live, tuple(moments), max(width * filled, update), width * (bucket + own))
    # The bucket is there from the first gradient on: that of a weight behind the blocks, or within the last one.
    outside = weights.trained - sum(p.numel() for block in weights.blocks for p in block if p.requires_grad)
    begun = Moment(width * bucket, 1.0 if outside else 1 - 1 / blocks, 0.0)
    moments = [Moment(0.0, 1.0, 0.0), begun]
    if split.zero_stage == 1:  # gradients are whole until backward is over
        moments.append(Moment(width * bucket, 1 / blocks, 1 - 1 / blocks))
        after = bucket + trained + own
    else:
        for number, (kept, working) in enumerate(full):  # at first, nothing has been averaged before
            moments.append(Moment(width * (2 * bucket + number * before), kept, float(number), working=working))
        after = bucket + filled + own + before
    stays = float(width * largest) if split.optimizer_on_host else 0.0  # through which offloaded gradients come back
    return Gathered(0.0, tuple(moments), max(width * after, width * updated + update), stays)


def zero_host_bytes(
    split: Split, *, total: int, trained: int, largest: int, width: int, state_bytes: float, accumulates: bool
) -> float:
    """Bytes that DeepSpeed's offloading has in host memory for each process, between steps.

    Args:
        split: of the strategy.
        total, trained, largest: numbers of the network's weights, of those that are trained, and of the largest of these.
        width: bytes of a weight as it computes.
        state_bytes: of the optimizer for each trained weight, without fp32 weights.
        accumulates: whether a step has several micro-batches.
    """
    found = 0.0
    if split.weights_on_host:
        found += width * total / split.weights
    if split.optimizer_on_host:
        part = trained / split.optimizer
        found += (state_bytes + 8) * part  # fp32 weights and gradients
        # Averaged gradients; stages 1 and 2 have buffers for new weights and for a gradient, and sums of micro-batches.
        found += width * part if split.zero_stage == 3 else width * (part * (1 + accumulates) + largest)
    return found
