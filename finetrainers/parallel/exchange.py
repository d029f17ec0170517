"""Gradient exchange of DDP: buckets of gradients are averaged over ranks while backward computes those of earlier layers.

`torch.nn.parallel.DistributedDataParallel` does so too, but it averages the gradients themselves: a rank that runs out
of memory would leave the others waiting, and they could not drop what they have. Here copies are averaged. Each rank
sends every bucket once per attempt at a step, whether it has all gradients or not, and the ranks agree on the attempt
before any of them uses what came back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _take_tensors, _unflatten_dense_tensors

#: What is averaged at once: enough to use the network well, and little memory.
_BUCKET_BYTES = 25 << 20
#: Without overlap, how many buckets are on their way while another one is received: more would take memory, and wait
#: for the same network.
_AHEAD = 2


class GradientExchange:
    """Averages the gradients of some weights over all ranks.

    Buckets are sent in one order on all ranks, last layers first: those whose gradients backward computes first. A
    weight without a gradient holds its bucket back, and those behind it, until backward has ended.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, overlaps: bool) -> None:
        """Args:
        parameters: the trained weights, in the order of the network; the same on all ranks.
        overlaps: whether buckets are sent during the last backward pass of a step, and a copy of all gradients stays in
            memory; otherwise they are sent by `receive`, a few at a time.
        """
        self.overlaps = overlaps
        self._buckets = [_Bucket(some) for some in _take_tensors([*reversed(parameters)], _BUCKET_BYTES)]
        self._sent = 0
        self._is_last = False
        if not overlaps:
            return
        for bucket in self._buckets:
            bucket.reserve()
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, bucket))

    def begin(self) -> None:
        """Begin an attempt at a step; what came back of an earlier one is dropped."""
        for bucket in self._buckets:
            bucket.begin()
        self._sent = 0

    @contextmanager
    def during_backward(self) -> Iterator[None]:
        """Around the last micro-batch of a step: within the block a bucket is sent when its gradients are complete."""
        self._is_last = True
        try:
            yield
        finally:
            self._is_last = False
        self.complete()

    def complete(self) -> None:
        """Send what the other ranks wait for; after an OOM too, where gradients are missing."""
        if self.overlaps:
            self._send(len(self._buckets))

    def receive(self) -> None:
        """Put the averages into the gradients. Every rank must call it, or none."""
        for number, bucket in enumerate(self._buckets):
            self._send(len(self._buckets) if self.overlaps else number + 1 + _AHEAD)
            bucket.take()
            if not self.overlaps:
                bucket.flat = None

    def _arrived(self, bucket: _Bucket, parameter: Tensor) -> None:
        """After a gradient has been accumulated."""
        if not self._is_last:
            return
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
        awaited: those whose gradients the last backward pass has not accumulated, by `id`.
        flat: a copy of the gradients, and for each a number that says whether there is one.
        work: the exchange of `flat`; None if it was not sent.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.awaited = {id(parameter) for parameter in parameters}
        self.flat: Tensor | None = None
        self.work: dist.Work | None = None

    def reserve(self) -> Tensor:
        """Return the memory of the copy, so that sending needs none."""
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
        copies, there = self._parts(flat)
        there.fill_(1)
        gradients = [parameter.grad for parameter in self.parameters]
        missing = [copy for copy, gradient in zip(copies, gradients, strict=True) if gradient is None]
        if missing:
            torch._foreach_zero_(missing)
            there.copy_(torch.tensor([gradient is not None for gradient in gradients]))
        into, found = _paired(copies, gradients)
        if into:
            torch._foreach_copy_(into, found)
        flat /= dist.get_world_size()
        self.work = dist.all_reduce(flat, async_op=True)

    def take(self) -> None:
        """Put the averages into the gradients. A weight that had none on any rank still has none."""
        assert self.work is not None, "it was sent"
        assert self.flat is not None, "it was sent"
        self.work.wait()
        self.work = None
        copies, there = self._parts(self.flat)
        gradients = [parameter.grad for parameter in self.parameters]
        into, averages = _paired(gradients, copies)
        if into:
            torch._foreach_copy_(into, averages)
        if len(into) < len(copies):  # only then the device is waited for
            for parameter, copy, has_one in zip(self.parameters, copies, there.tolist(), strict=True):
                if parameter.grad is None and has_one > 0:
                    parameter.grad = copy.clone()

    def _parts(self, flat: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        """Return the copy of each gradient, and the numbers that say whether there are any."""
        count = len(self.parameters)
        return _unflatten_dense_tensors(flat[:-count], self.parameters), flat[-count:]


def _paired(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors of two lists, at places where both have one."""
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    return [a for a, _ in pairs], [b for _, b in pairs]
