"""Calls of rewards: async ones run in one event loop of this process, and scores of any kind become tensors."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .retries import Retries

_AT_ONCE = 32  # calls of an async reward in flight
#: Keywords that are not columns of prompts.
RESERVED = ("videos", "prompts", "fps", "images")


@dataclass(frozen=True)
class Columns:
    """Columns of prompts that a reward takes, each as a keyword with a list of one value per clip.

    Attributes:
        required: names of columns that all prompts must have.
        optional: names of columns that are passed if the prompts have them.
        takes_all: whether all other columns are passed, too, but for the keywords in `excluded`.
        prompts: name of the argument that the prompts are passed as, by position.
    """

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    takes_all: bool = False
    excluded: tuple[str, ...] = RESERVED
    prompts: str = "prompts"

    @classmethod
    def from_function(cls, function: Callable[..., Any], *, skip: int = 2) -> Columns:
        """Return the columns that a function takes, beside its first arguments and the keywords `fps` and `images`."""
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except ValueError:  # Python does not know the function's arguments
            return cls()
        by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:skip]
        excluded = (*RESERVED, *(p.name for p in by_position))
        named = [
            p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in excluded
        ]
        return cls(
            required=tuple(p.name for p in named if p.default is p.empty),
            optional=tuple(p.name for p in named if p.default is not p.empty),
            takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters),
            excluded=excluded,
            prompts=by_position[-1].name if len(by_position) == skip else "prompts",
        )

    def takes(self, name: str) -> bool:
        """Return whether a column is passed."""
        return name in (*self.required, *self.optional) or (self.takes_all and name not in self.excluded)

    def select(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
        """Return the keywords for clips whose prompts have these columns, all prompts the same.

        Raises:
            KeyError: they lack a required column.
        """
        names = [name for name in (rows[0] if rows else ()) if self.takes(name)]
        missing = [name for name in self.required if name not in names]
        if missing:
            raise KeyError(missing[0])
        return {name: [row[name] for row in rows] for name in names}


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a call of a function must be awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def start_calls(calls: Sequence[Callable[[], Any]], *, asynchronous: bool, retries: Retries) -> Iterator[Any]:
    """Return an iterator over the result or exception of each call, which is repeated as `retries` says.

    Async calls start at once, at most 32 at the same time; others run one after another, as they are iterated over.
    """
    if not asynchronous:
        return map(partial(_outcome, retries), calls)
    return _results(asyncio.run_coroutine_threadsafe(_gather(calls, retries), _event_loop(os.getpid())))


def _outcome(retries: Retries, call: Callable[[], Any]) -> Any:
    try:
        return retries.call(call)
    except Exception as error:
        return error


def _results(future: Any) -> Iterator[Any]:
    yield from future.result()


async def _gather(calls: Iterable[Callable[[], Any]], retries: Retries) -> list[Any]:
    free = asyncio.Semaphore(_AT_ONCE)

    async def limited(call: Callable[[], Any]) -> Any:
        async with free:
            return await retries.wait_for(call)

    return await asyncio.gather(*map(limited, calls), return_exceptions=True)


@lru_cache(maxsize=1)
def _event_loop(process: int) -> asyncio.AbstractEventLoop:
    """Return the event loop of a process for async rewards, in its own thread: connections stay open between calls."""
    loop = asyncio.new_event_loop()

    def serve() -> None:
        torch.set_grad_enabled(False)
        loop.run_forever()

    Thread(target=serve, name="async rewards", daemon=True).start()
    return loop


def to_scores(values: object, count: int) -> tuple[Tensor, Tensor] | None:
    """Return scores `[count]` fp64 on the CPU, and which of them are None, `[count]`; or None for anything else.

    Args:
        values: a tensor or an array `[count]`, or a list of numbers and None, which become NaN.
        count: number of clips.
    """
    if isinstance(values, np.ndarray):
        values = torch.from_numpy(values) if values.dtype.kind in "biuf" else list(values)
    if isinstance(values, Tensor):
        if values.shape != (count,) or values.is_complex():
            return None
        return values.to("cpu", torch.float64), torch.zeros(count, dtype=torch.bool)
    if not isinstance(values, list | tuple) or len(values) != count:
        return None
    numbers = []
    for value in values:
        is_single = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
        if is_single:
            numbers.append(value.reshape(()).to("cpu", torch.float64))
        elif value is None or isinstance(value, int | float | np.integer | np.floating | np.bool_):
            numbers.append(torch.tensor(float("nan") if value is None else float(value), dtype=torch.float64))
        else:
            return None
    return torch.stack(numbers), torch.tensor([value is None for value in values])
