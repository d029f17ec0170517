"""Gradient exchange of DDP: buckets of gradients are averaged over ranks while backward computes earlier layers'.

`torch.nn.parallel.DistributedDataParallel` also does so, but it averages the gradients themselves: a rank that runs out
of memory would leave the others waiting, and they could not drop their gradients. Here copies are averaged. Each rank
sends every bucket once per attempt at a step, whether it has all gradients or not, and the ranks agree on the attempt
before any of them uses the averages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _take_tensors, _unflatten_dense_tensors

from finetrainers.utils.process_state import call_weakly

#: Bytes averaged at once: enough to use the network well, and little memory.
_BUCKET_BYTES = 25 << 20
#: Buckets in flight while one is received, without overlap: more would take memory, and wait for the same network.
_AHEAD = 2


class GradientExchange:
    """Exchange that averages the gradients of a network's trainable weights over all ranks.

    Buckets are sent in one order on all ranks, last layers first: those whose gradients backward computes first. A
    weight without a gradient holds its bucket back, and those behind it, until backward has ended.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, overlaps: bool) -> None:
        """Args:
        parameters: the trainable weights, in the order of the network, equal on all ranks.
        overlaps: whether buckets are sent during the last backward pass of a step, and a copy of all gradients stays in
            memory; otherwise they are sent by `receive`, a few at a time.
        """
        self.overlaps = overlaps
        self._buckets = [_Bucket(tensors) for tensors in _take_tensors([*reversed(parameters)], _BUCKET_BYTES)]
        self._sent = 0
        self._is_last = False
        if not overlaps:
            return
        for index, bucket in enumerate(self._buckets):
            bucket.reserve()
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(partial(call_weakly, WeakMethod(self._arrived), index))

    def begin(self) -> None:
        """Begin an attempt at a step; averages of an earlier one are dropped."""
        for bucket in self._buckets:
            bucket.begin()
        self._sent = 0

    @contextmanager
    def during_backward(self) -> Iterator[None]:
        """Send each bucket when its gradients are complete, within the block around a step's last micro-batch."""
        self._is_last = True
        try:
            yield
        finally:
            self._is_last = False
        self.complete()

    def complete(self) -> None:
        """Send the buckets that the other ranks wait for, including after an OOM, where gradients are missing."""
        if self.overlaps:
            self._send(len(self._buckets))

    def receive(self) -> None:
        """Put the averages into the gradients. Every rank must call it, or none."""
        for index, bucket in enumerate(self._buckets):
            self._send(len(self._buckets) if self.overlaps else index + 1 + _AHEAD)
            bucket.take()
            if not self.overlaps:
                bucket.flat = None

    def _arrived(self, index: int, parameter: Tensor) -> None:
        """Send the buckets that a newly accumulated gradient of the bucket at `index` completes."""
        if not self._is_last:
            return
        bucket = self._buckets[index]
        assert bucket.work is None, "backward has changed a gradient that was complete"
        bucket.awaited.discard(id(parameter))
        complete = self._sent
        while complete < len(self._buckets) and not self._buckets[complete].awaited:
            complete += 1
        self._send(complete)

    def _send(self, end: int) -> None:
        """Send the buckets before number `end` that have not been sent."""
        for bucket in self._buckets[self._sent : end]:
            self._sent += 1
            bucket.send()


class _Bucket:
    """Weights of one dtype whose gradients are averaged at once.

    Attributes:
        parameters: the weights.
        awaited: weights whose gradients the last backward pass has not accumulated, by `id`.
        flat: a copy of the gradients, followed by a number for each that is positive if it exists.
        work: the exchange of `flat`, or None if it was not sent.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.flat: Tensor | None = None
        self.work: dist.Work | None = None
        self.begin()

    def reserve(self) -> Tensor:
        """Return the memory of the copy, allocated now so that sending needs none."""
        if self.flat is None:
            size = sum(parameter.numel() for parameter in self.parameters) + len(self.parameters)
            self.flat = torch.empty(size, dtype=self.parameters[0].dtype, device=self.parameters[0].device)
        return self.flat

    def begin(self) -> None:
        """Wait until the copy can be written to."""
        self.awaited = {id(parameter) for parameter in self.parameters}
        if self.work is not None:
            self.work.wait()
            self.work = None

    def send(self) -> None:
        """Copy the gradients, and begin to average the copy."""
        flat = self.reserve()
        copies, presence = self._parts(flat)
        presence.fill_(1)
        gradients = [parameter.grad for parameter in self.parameters]
        missing = [copy for copy, gradient in zip(copies, gradients, strict=True) if gradient is None]
        if missing:
            torch._foreach_zero_(missing)
            presence.copy_(torch.tensor([gradient is not None for gradient in gradients]))
        _copy(copies, gradients)
        flat /= dist.get_world_size()
        self.work = dist.all_reduce(flat, async_op=True)

    def take(self) -> None:
        """Put the averages into the gradients. A weight that had none on any rank still has none."""
        assert self.work is not None, "it was sent"
        assert self.flat is not None, "it was sent"
        self.work.wait()
        self.work = None
        copies, presence = self._parts(self.flat)
        gradients = [parameter.grad for parameter in self.parameters]
        if _copy(gradients, copies) < len(copies):  # only then the device is waited for
            for parameter, copy, count in zip(self.parameters, copies, presence.tolist(), strict=True):
                if parameter.grad is None and count > 0:
                    parameter.grad = copy.clone()

    def _parts(self, flat: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        """Return the copy of each gradient, and the numbers that mark those that exist."""
        count = len(self.parameters)
        return _unflatten_dense_tensors(flat[:-count], self.parameters), flat[-count:]


def _copy(targets: Sequence[Tensor | None], sources: Sequence[Tensor | None]) -> int:
    """Copy the tensors at positions where both lists have one, and return their number."""
    pairs = [(a, b) for a, b in zip(targets, sources, strict=True) if a is not None and b is not None]
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
    return len(pairs)
