"""Rank and world size of this process, and its collectives with the others."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from ctypes import c_float
from datetime import timedelta
from itertools import chain, islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

from finetrainers.utils.alive import waiting
from finetrainers.utils.failures import ExpectedError, user_message
from finetrainers.utils.launch import launched_local_rank
from finetrainers.utils.process_state import leave_groups
from finetrainers.utils.progress import working

from .pulse import Pulse, connections, tcp_sockets

logger = logging.getLogger(__name__)
T = TypeVar("T")


class RemoteRankError(ExpectedError, RuntimeError):
    """A failure of another rank; its error, with the traceback, is printed there."""


class DistributedContext:
    """The processes of a run. Each of the methods below must be called by all of them.

    Tensors of the device go through the default process group (NCCL on GPUs). Everything else goes through two gloo
    groups, from host to host. One has the timeout of the default group, and is for agreements within a step. The other
    has a long timeout, and is for points that ranks reach at very different times: one that has nothing to save, to
    sample or to encode waits there for those that have, as long as they show that they run (`Pulse`). NCCL would treat
    that as a hang, and abort all of them.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        timeout: timedelta,
        idle_timeout: timedelta,
        sharing: int = 1,
        host_groups: Sequence[Any] = (),
    ) -> None:
        """Args:
        accelerator: has joined the other processes.
        timeout: time after which a stuck collective of a step fails, and any wait for a lost machine.
        idle_timeout: time after which a rank that waits for others which load, encode, sample, score or save fails.
        sharing: number of neighbors that have the same samples.
        host_groups: process groups of the host program, joined before the run.

        Raises:
            RuntimeError: the machines do not reach each other by the addresses that gloo has chosen.
        """
        self.accelerator = accelerator
        self.sharing = sharing
        self._host_groups = host_groups
        self.waited_s = 0.0  # in messages between the hosts
        self._step_group: dist.ProcessGroup | None = None
        self._idle_group: dist.ProcessGroup | None = None
        self._pulse: Pulse | None = None
        if self.world_size > 1:
            # At the start, where a wrong address shows at once, and no rank is late.
            self._step_group, before = _host_group(timeout), connections()
            self._idle_group = _host_group(idle_timeout)
            sockets = connections() - before
            self._pulse = Pulse(rank=self.rank, world_size=self.world_size, timeout=timeout, sockets=sockets)
            _probe_connections(timeout)

    @property
    def rank(self) -> int:
        """Index of this process among all."""
        return self.accelerator.process_index

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.accelerator.num_processes

    @property
    def data_rank(self) -> int:
        """Index of the samples that this process trains on: data, noise and dropout depend on it, not on `rank`."""
        return self.rank // self.sharing

    @property
    def data_size(self) -> int:
        """Number of processes that train on separate samples; a step's mean is over these."""
        return self.world_size // self.sharing

    @property
    def is_main(self) -> bool:
        """True if this process writes files and talks."""
        return self.accelerator.is_main_process

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return self.accelerator.device

    def barrier(self) -> None:
        """Wait on the host for all ranks, for up to `idle_timeout`; the device is not waited for."""
        if self._idle_group is not None:
            with self._waiting():
                dist.barrier(group=self._idle_group)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Require all other processes to show that they run, within the block, where this one waits for them.

        Raises:
            RankSilent: one of them does not.
        """
        assert self._pulse is not None, "there are others"
        with waiting(), self._pulse.waiting():
            yield

    def mean(self, values: Mapping[str, Tensor | float]) -> dict[str, float]:
        """Return averages over ranks, as numbers: the only point where a step waits for the device.

        Args:
            values: one number each. Numbers that are not tensors stay on the host if this process is the only one; they
                are rounded to fp32, as several processes would.
        """
        is_single = self.world_size == 1
        names = [name for name in sorted(values) if isinstance(values[name], Tensor) or not is_single]
        means: dict[str, float] = {
            name: c_float(float(values[name])).value for name in sorted(values) if name not in names
        }
        if names:
            numbers = [torch.as_tensor(values[name]).detach().float().reshape(()).to(self.device) for name in names]
            stacked = torch.stack(numbers)
            if not is_single:
                stacked = self.accelerator.reduce(stacked, reduction="mean")
            means.update(zip(names, stacked.tolist(), strict=True))
        return {name: means[name] for name in sorted(means)}

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over ranks."""
        return self.accelerator.reduce(value.to(self.device), reduction="sum")

    def max_on_host(self, values: Sequence[int]) -> list[int]:
        """Return the element-wise maximum over ranks, between the hosts: no device is waited for."""
        if self._step_group is None:
            return list(values)
        agreed = torch.tensor(values)
        started = time.perf_counter()
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self._step_group)
        self.waited_s += time.perf_counter() - started
        return agreed.tolist()

    def finish_on_device(self) -> None:
        """Wait for the device's queued work, before other ranks wait on the host; a single process need not.

        Collectives run on separate streams and are not waited for: they end when the slowest rank has joined them.
        """
        if self.world_size > 1 and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def gather_objects(self, items: list[T]) -> list[T]:
        """Join all ranks' lists in rank order; waits for all of them, for up to `idle_timeout`."""
        if self._idle_group is None:
            return list(items)
        lists: list[Any] = [None] * self.world_size
        with self._waiting():
            dist.all_gather_object(lists, items, group=self._idle_group)
        return list(chain.from_iterable(lists))

    def take_turns(self, items: Iterable[T]) -> Iterator[T]:
        """Yield this process's items of those made jointly with the ranks that share samples: one of every `sharing`.

        They are yielded once all `sharing` of them are made. So each process works on its item at the same time, where
        the others would otherwise wait for it to make the next.
        """
        numbered = enumerate(items)
        while group := list(islice(numbered, self.sharing)):
            yield from (item for index, item in group if self.owns_item(index))

    def owns_item(self, index: int) -> bool:
        """Return whether the item at an index belongs to this process, among the ranks that share its samples."""
        return index % self.sharing == self.rank % self.sharing

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's value on every rank; waits for it, for up to `idle_timeout`."""
        if self._idle_group is None:
            return value
        values = [value]
        with self._waiting():
            dist.broadcast_object_list(values, src=0, group=self._idle_group)
        return values[0]

    def raise_if_any_failed(self, error: Exception | None, task: str) -> None:
        """Turn a failure on one rank into a failure on all, so that none waits forever.

        The error is logged first: if the other ranks wait for something else, it would never be shown.

        Raises:
            RemoteRankError: naming the ranks and their errors (the local error itself on the rank that has it).
        """
        if error is not None and self.world_size > 1:
            message = user_message(error)
            cause, traceback = ("", error) if message is None else (f": {message}", None)
            logger.error("%s failed on rank %d%s", task, self.rank, cause, exc_info=traceback)
        flag = getattr(error, "is_resumable", False)
        failures = self.gather_objects([(f"rank {self.rank}: {error}", flag)] if error else [])
        if not failures:
            return
        raised = error or RemoteRankError(
            f"{task} failed on another rank: {'; '.join(message for message, _ in failures)}"
        )
        if isinstance(raised, ExpectedError):  # all ranks save, or none
            raised.is_resumable = all(resumable for _, resumable in failures)
        raise raised

    @contextmanager
    def raise_on_all_ranks(self, task: str) -> Iterator[None]:
        """Raise a failure within the block on any rank on all of them; this also waits for all.

        Raises:
            RuntimeError: see `raise_if_any_failed`.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        self.raise_if_any_failed(error, task)

    def one_at_a_time(self, task: str, load: Callable[[], T], *, together: bool = False) -> T:
        """Call `load` on the processes of each machine in turn: host memory then holds one copy on the way to a GPU.

        Args:
            task: name of the work in errors.
            load: work of each process.
            together: whether all may load at once, because they map files, whose pages they share. They do if all
                agree, since machines may have different files.

        Raises:
            RuntimeError: it failed on another rank; on the rank where it fails, the error itself.
        """
        local_rank = launched_local_rank()
        with self.raise_on_all_ranks(task), working(task):
            requests = self.gather_objects([(local_rank, together)])
            if all(mapped for _, mapped in requests):
                return load()
            error: Exception | None = None
            for turn in range(max(rank for rank, _ in requests) + 1):
                if turn == local_rank:
                    try:
                        loaded = load()
                    except Exception as caught:
                        error = caught  # the others still take their turns: most errors affect all
                self.barrier()
            if error is not None:
                raise error
        return loaded

    def close(self) -> None:
        """Leave the process groups, except those that the host program had joined before."""
        if self._pulse is not None:
            self._pulse.close()
        if self._host_groups:
            leave_groups(self._host_groups)
        else:
            self.accelerator.end_training()


class SingleProcess(DistributedContext):
    """A process that exchanges nothing with others, and has its share of the samples of a given number of processes.

    The program may have joined other processes in its own way.
    """

    def __init__(self, device: torch.device, *, data_rank: int = 0, data_size: int = 1) -> None:
        self.sharing, self.waited_s = 1, 0.0
        self._device, self._data_rank, self._data_size = device, data_rank, data_size
        self._step_group = self._idle_group = self._pulse = None

    rank, world_size, is_main = 0, 1, True  # type: ignore[assignment]

    @property
    def data_rank(self) -> int:
        return self._data_rank

    @property
    def data_size(self) -> int:
        return self._data_size

    @property
    def device(self) -> torch.device:
        return self._device

    def sum(self, value: Tensor) -> Tensor:
        return value.to(self.device)

    def close(self) -> None:
        """Do nothing: no group was joined."""


def _host_group(timeout: timedelta) -> dist.ProcessGroup:
    """Create a gloo group of all ranks.

    Raises:
        RuntimeError: they do not reach each other; with the remedy.
    """
    try:
        return dist.new_group(backend="gloo", timeout=timeout)
    except RuntimeError as error:
        raise RuntimeError(
            f"the processes do not reach each other by gloo, between their hosts: {error}. It uses the address of "
            "the host's name, on some machines 127.0.1.1, which others cannot reach: set the network interface with "
            "GLOO_SOCKET_IFNAME (`ip -brief address` lists them) on every machine"
        ) from error


def _probe_connections(timeout: timedelta) -> None:
    """Set TCP keepalive for the connections of this process, where the system has it (Linux).

    A machine without power or network closes none: a process that waits for it would do so for all of `idle_timeout`.
    """
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    seconds = min(int(timeout.total_seconds()), 24 * 3600)
    options = {
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): min(max(seconds // 4, 1), 60),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): min(max(seconds // 4, 1), 60),
        # For connections that only wait, and for those whose last message has not been acknowledged.
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): 1000 * seconds,
    }
    for _, connection in tcp_sockets():
        with suppress(OSError):
            for (level, name), value in options.items():
                connection.setsockopt(level, name, value)
