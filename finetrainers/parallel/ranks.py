"""This process's place among all, and how it talks to the others."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Ranks:
    """The processes of a run. Each of the methods below must be called by all of them."""

    def __init__(self, accelerator: Accelerator, *, timeout: timedelta) -> None:
        """Args:
        accelerator: has joined the other processes.
        timeout: after which a stuck collective fails.
        """
        self.accelerator = accelerator
        self._timeout = timeout
        self._host_group: dist.ProcessGroup | None = None
        self.waited_s = 0.0  # in messages between the hosts

    @property
    def rank(self) -> int:
        """Index of this process among all."""
        return self.accelerator.process_index

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.accelerator.num_processes

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and talks."""
        return self.accelerator.is_main_process

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return self.accelerator.device

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.accelerator.wait_for_everyone()

    def mean(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        """Averages over ranks, as numbers: the one place where a step waits for the device."""
        names = sorted(values)
        if not names:
            return {}
        stacked = torch.stack([values[n].detach().float().reshape(()).to(self.device) for n in names])
        return dict(zip(names, self.accelerator.reduce(stacked, reduction="mean").tolist(), strict=True))

    def sum(self, value: Tensor) -> Tensor:
        """Sum over ranks."""
        return self.accelerator.reduce(value.to(self.device), reduction="sum")

    def max_on_host(self, values: Sequence[int]) -> list[int]:
        """Element-wise maximum over ranks, between the hosts: no device is waited for."""
        if self.world_size == 1:
            return list(values)
        if self._host_group is None:
            self._host_group = dist.new_group(backend="gloo", timeout=self._timeout)
        agreed = torch.tensor(values)
        started = time.perf_counter()
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self._host_group)
        self.waited_s += time.perf_counter() - started
        return agreed.tolist()

    def finish_on_device(self) -> None:
        """Let the device do what it was given, before the other ranks are asked to wait on the host; one alone need not."""
        if self.world_size > 1 and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gather_objects(self, items: list[T]) -> list[T]:
        """All ranks' lists, joined in rank order."""
        return gather_object(items)

    def same_on_all(self, value: T) -> T:
        """Rank 0's value on every rank."""
        return broadcast_object_list([value])[0]

    def raise_if_any_failed(self, error: Exception | None, what: str) -> None:
        """Turn a failure on one rank into a failure on all, so that none waits for ever.

        The error is logged first: where the other ranks wait for something else, nothing would ever show it.

        Raises:
            RuntimeError: naming the ranks and their errors (the local error itself on the rank that has it).
        """
        if error is not None and self.world_size > 1:
            logger.error("%s failed on rank %d", what, self.rank, exc_info=error)
        failures = self.gather_objects([f"rank {self.rank}: {error}"] if error else [])
        if error is not None:
            raise error
        if failures:
            raise RuntimeError(f"{what} failed on another rank: {'; '.join(failures)}")

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A failure within the block, on any rank, is raised on all; it also waits for all of them.

        Raises:
            RuntimeError: see `raise_if_any_failed`.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        self.raise_if_any_failed(error, what)

    def close(self) -> None:
        """Leave the process group."""
        self.accelerator.end_training()
