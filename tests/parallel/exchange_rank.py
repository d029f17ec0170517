"""One of two ranks that exchange gradients; writes down where they differ from averages that are made one by one.

Usage: exchange_rank.py OUT. At the end rank 1 fails within a backward pass, which must end both.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from finetrainers.config.load import load_config
from finetrainers.config.parallel import ParallelSection
from finetrainers.methods.base import Step
from finetrainers.parallel import exchange
from finetrainers.parallel.ddp import DDP
from finetrainers.training.guards.memory import MemoryGuard

#: Name -> what the network and the step are like. `micro_batches` of each rank; `spare`: those that use a layer.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one micro-batch": {"micro_batches": (1, 1)},
    "more on one rank": {"micro_batches": (3, 1)},
    "16 bits": {"dtype": torch.bfloat16},
    "checkpointed": {"checkpointed": True},
    "unused": {"spare": ((), ())},
    "unused on one rank": {"spare": ((2,), ())},
    "used before the last": {"spare": ((0,), (1,))},
}


@dataclass(frozen=True)
class Rows:
    """A micro-batch: seeds of samples, and their share of the loss."""

    seeds: tuple[int, ...]
    share: float
    number: int
    latent_size: tuple[int, ...] = (1,)

    def __len__(self) -> int:
        return len(self.seeds)

    def split(self, pieces: int) -> list[Rows]:
        assert pieces <= len(self.seeds)
        size = -(-len(self.seeds) // pieces)
        return [Rows(self.seeds[k : k + size], self.share, self.number) for k in range(0, len(self.seeds), size)]


class Network(nn.Module):
    """Four layers, of which two share their weight, and a spare one; one more is frozen."""

    def __init__(self, *, dtype: torch.dtype = torch.float32, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=dtype) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight
        self.spare = nn.Linear(6, 6, dtype=dtype)
        self.frozen = nn.Linear(6, 6, dtype=dtype).requires_grad_(False)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor, *, spare: bool, within: Any = None) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
            x = torch.tanh(x)
            if number == 1 and within is not None:
                x.register_hook(lambda _: within())  # when backward has done layers 3 and 2
        return self.frozen(self.spare(x) if spare else x)


class Rank:
    """This process, with the network that it trains."""

    def __init__(self) -> None:
        config = load_config(
            model_name="ltx_video", pretrained_model_name_or_path="x", mixed_precision="no", nccl_timeout=20
        )
        self.parallel = DDP(config, config.parallel)
        self.sent: list[bool] = []  # of each bucket, whether backward was still on its way
        self.in_backward = False
        reduce = dist.all_reduce

        def noted(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
            if options.get("async_op"):
                self.sent.append(self.in_backward)
            return reduce(tensor, *arguments, **options)

        dist.all_reduce = noted

    def prepare(self, *, overlaps: bool, **network: Any) -> None:
        self.parallel._options = ParallelSection(overlap_gradient_exchange=overlaps)
        self.network, _ = self.parallel.prepare(lambda: Network(**network), lambda ps: torch.optim.SGD(ps, lr=1.0))

    def backward(self, rows: Rows, *, spare: Any, within: Any = None) -> None:
        x = torch.stack([torch.randn(6, generator=torch.Generator().manual_seed(seed)) for seed in rows.seeds])
        uses = rows.number in spare[self.parallel.rank]
        found = self.network(x.to(self.network.frozen.weight.dtype), spare=uses, within=within)
        loss = rows.share * found.float().square().sum()
        self.in_backward = True
        try:
            self.parallel.backward(loss)
        finally:
            self.in_backward = False

    def rows(self, step: int, micro_batches: int) -> list[Rows]:
        first = 1000 * step + 100 * self.parallel.rank
        return [Rows((first + 2 * k, first + 2 * k + 1), 1 / (k + 1), k) for k in range(micro_batches)]

    def take(self) -> list[Tensor | None]:
        found = [None if p.grad is None else p.grad.clone() for p in self.network.parameters() if p.requires_grad]
        self.parallel.drop_gradients()
        return found

    def step(
        self, guard: MemoryGuard, rows: list[Rows], *, spare: Any, failing: int | None = None, fault: Any = None
    ) -> list[Tensor | None]:
        """Return the exchanged gradients; `fault` is in backward of micro-batch `failing`, at the first attempt."""
        for number, attempt in enumerate(guard.attempts(Step(rows))):
            with attempt:
                self.parallel.begin_step(len(attempt))
                for one in attempt:
                    fails = number == 0 and one.number == failing and self.parallel.rank == 1
                    with self.parallel.accumulate(self.network):
                        self.backward(one, spare=spare, within=fault if fails else None)
        self.parallel.all_reduce()
        return self.take()

    def expected(self, rows: list[Rows], *, spare: Any) -> list[Tensor | None]:
        """The averages, made without the exchange."""
        for one in rows:
            self.backward(one, spare=spare)
        found = []
        for gradient, parameter in zip(self.take(), self.parallel._parameters, strict=True):
            mine = torch.zeros_like(parameter) if gradient is None else gradient
            there = torch.tensor(float(gradient is not None))
            average = mine.detach() / 2
            dist.all_reduce(average)
            dist.all_reduce(there)
            found.append(average if there else None)
        return found


def fail() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def guard_of(rank: Rank) -> MemoryGuard:
    run_dir: Any = SimpleNamespace(event=lambda *_, **__: None)
    return MemoryGuard(parallel=rank.parallel, run_dir=run_dir, refusal=None)


def same(ours: list[Tensor | None], theirs: list[Tensor | None]) -> bool:
    assert any(one is not None and one.any() for one in theirs)
    return [one is None for one in ours] == [one is None for one in theirs] and all(
        torch.equal(one, other)
        for one, other in zip(ours, theirs, strict=True)
        if one is not None and other is not None
    )


def exchanges(rank: Rank) -> Iterator[tuple[str, Any]]:
    for name, case in CASES.items():
        network = {key: case[key] for key in ("dtype", "checkpointed") if key in case}
        spare = case.get("spare", ((0, 1, 2), (0, 1, 2)))
        for overlaps in (True, False):
            rank.prepare(overlaps=overlaps, **network)
            found = []
            for step in range(2):
                rows = rank.rows(step, case.get("micro_batches", (3, 3))[rank.parallel.rank])
                rank.parallel.begin_step(1)  # a step that was given up before anything was sent
                wanted = rank.expected(rows, spare=spare)
                rank.sent.clear()
                found.append(same(rank.step(guard_of(rank), rows, spare=spare), wanted))
            yield f"{name}, {'during' if overlaps else 'after'}", [*found, rank.sent.copy()]


def retries(rank: Rank) -> Iterator[tuple[str, Any]]:
    for overlaps in (True, False):
        for failing in range(3):
            rank.prepare(overlaps=overlaps)
            guard, spare, rows = guard_of(rank), ((0, 1, 2), (0, 1, 2)), rank.rows(0, 3)
            wanted = rank.expected([piece for one in rows for piece in one.split(2)], spare=spare)
            rank.sent.clear()
            retried = same(rank.step(guard, rows, spare=spare, failing=failing, fault=fail), wanted)
            following = rank.rows(1, 3)
            wanted = rank.expected([piece for one in following for piece in one.split(2)], spare=spare)
            sent = rank.sent.copy()
            again = same(rank.step(guard, following, spare=spare), wanted)
            yield (
                f"{failing}, {'during' if overlaps else 'after'}",
                [retried, again, guard.fitting_samples == {(1,): 1}, sent],
            )


def main(out: Path) -> None:
    torch.set_num_threads(1)
    exchange._BUCKET_BYTES = 60  # several buckets
    rank = Rank()
    found: dict[str, Any] = {"exchanges": dict(exchanges(rank)), "retries": dict(retries(rank))}
    rank.prepare(overlaps=True)
    used = ((0, 1, 2), (0, 1, 2))
    before = rank.parallel.waited_s
    rank.step(guard_of(rank), rank.rows(0, 3), spare=used, failing=2, fault=lambda: time.sleep(0.3))
    found["waited_s"] = rank.parallel.waited_s - before
    torch.manual_seed(rank.parallel.rank)
    layer = nn.Linear(3, 2)
    rank.parallel.prepare(lambda: layer, lambda ps: torch.optim.SGD(ps, lr=1.0))
    found["weights"] = layer.weight.tolist()
    rank.prepare(overlaps=True)
    (out / f"{rank.parallel.rank}.json").write_text(json.dumps(found))
    with contextlib.suppress(KeyError):
        rank.step(guard_of(rank), rank.rows(0, 3), spare=used, failing=2, fault=lambda: {}["no such layer"])
        raise SystemExit("the others' failure was not seen")
    raise SystemExit(3)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
