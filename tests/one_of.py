"""A stand-in for the processes of a run, where one process plays a rank and the others say nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from finetrainers.parallel.ranks import DistributedContext


class OneOf:
    """Rank `rank` of `world_size`; by default the only process. So many neighbors as `sharing` says share their
    samples."""

    device = torch.device("cpu")
    forward_is_collective = False
    owns_item, take_turns = DistributedContext.owns_item, DistributedContext.take_turns

    def __init__(self, rank: int = 0, world_size: int = 1, *, sharing: int = 1) -> None:
        self.rank, self.world_size, self.sharing = rank, world_size, sharing
        self.data_rank, self.data_size = rank // sharing, world_size // sharing
        self.sequence_group = None

    def without_exchange(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def raise_if_any_failed(self, error: Exception | None, what: str) -> None:
        if error is not None:
            raise error

    def raise_on_all_ranks(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def max_on_host(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def gather_objects(self, items: list[Any]) -> list[Any]:
        return items

    def one_at_a_time(self, what: str, load: Callable[[], Any], *, together: bool = False) -> Any:
        return load()
