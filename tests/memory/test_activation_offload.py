"""The arena and the lifetimes in it; `test_checkpointing` has the gradients of every family."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from finetrainers.memory import activation_offload
from finetrainers.memory.activation_offload import ActivationOffload, Arena, OnDevice, Stored


def test_slots_do_not_overlap_and_become_one() -> None:
    """Whatever the order in which slots are freed."""
    draw = random.Random(0)
    arena = Arena(poison=True, slots=4)
    held: dict[int, tuple[tuple[int, int, int], Tensor]] = {}
    most = 0
    for number in range(400):
        if held and draw.random() < 0.5:
            slot, values = held.pop(draw.choice(list(held)))
            assert torch.equal(arena.view(slot, values), values)
            view = arena.view(slot, values)
            arena.release(slot)
            assert view.isnan().all()
        else:
            values = torch.full(
                (draw.randint(1, 3000),), float(number), dtype=draw.choice([torch.bfloat16, torch.float32])
            )
            slot = arena.allocate(values.nbytes)
            arena.view(slot, values).copy_(values)
            held[number] = slot, values
        assert arena.used == sum(slot[2] for slot, _ in held.values()) <= arena.num_bytes
        most = max(most, arena.used)
    assert arena.peak == most
    for slot, _ in held.values():
        arena.release(slot)
    size = arena.num_bytes
    slot = arena.allocate(size)
    assert (arena.used, arena.num_bytes, slot[1]) == (size, 4 * size, 0)  # one piece, which holds it
    arena.release(slot)


def test_one_piece_is_enough_from_the_second_step_on() -> None:
    arena = Arena(slots=3)
    for _ in range(2):
        slots = [arena.allocate(size) for _ in range(3) for size in (1024, 512)]
        for slot in slots:
            arena.release(slot)
    assert (arena.num_bytes, arena.peak) == (4608, 4608)
    before = arena.num_bytes
    slots = [arena.allocate(size) for _ in range(3) for size in (1024, 512)]
    assert (len({slot[0] for slot in slots}), arena.num_bytes) == (1, before)


class Chain(nn.Module):
    """Blocks whose inputs are a state, and a vector that all of them get."""

    def __init__(self, offload_of: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Bilinear(6, 3, 6) for _ in range(6))
        self.offload = ActivationOffload(list(self.blocks), torch.device("cpu")) if offload_of else None

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        for block in self.blocks:
            if self.offload is None:
                x = checkpoint(block, x, shared, use_reentrant=False)
            else:
                with self.offload.open_store(block, (x, shared)).saving_inputs():
                    x = checkpoint(block, x, shared, use_reentrant=False)
        return x


def gradients(chain: Chain, order: str) -> list[Tensor]:
    x, shared = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)), torch.ones(5, 3)
    chain.zero_grad()
    if order == "dropped":
        chain(2 * x, shared)  # never goes backward
    one, other = chain(x, shared).sum(), chain(-3 * x, shared).square().sum()
    for loss in {"last first": (other, one), "sum": (one + other,)}.get(order, (one, other)):
        loss.backward()
    return [parameter.grad.clone() for parameter in chain.parameters()]


@pytest.mark.parametrize("order", ["first first", "last first", "sum", "dropped"])
def test_any_order_of_passes(order: str) -> None:
    offloaded = Chain()
    for _ in range(2):
        for a, b in zip(gradients(offloaded, order), gradients(Chain(False), order), strict=True):
            assert torch.equal(a, b)
        arena = offloaded.offload.arena
        assert arena.used == 0
        # Two passes, three of six blocks each (the first and the last two do not count), without inputs of all blocks.
        assert arena.peak == 2 * 3 * 256
    assert activation_offload.LAST == 2


def test_an_exception_frees_what_was_stored() -> None:
    chain = Chain()
    hook = chain.blocks[4].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        chain(torch.randn(5, 6), torch.ones(5, 3))
    assert chain.offload.arena.used == 0
    hook.remove()
    gradients(chain, "sum")


def test_reading_what_is_free_gives_nan() -> None:
    """That is what makes the tests of gradients proofs of lifetimes."""
    offload = ActivationOffload([nn.Identity() for _ in range(4)], torch.device("cpu"))
    blocks = [nn.Identity() for _ in range(4)]
    offload = ActivationOffload(blocks, torch.device("cpu"))
    x = torch.randn(4, 8)
    store = offload.open_store(blocks[1], (x,))
    stored = store.put(x.T)
    assert isinstance(stored, Stored)
    taken = stored.take()
    assert torch.equal(taken, x.T)
    assert taken.stride() == x.T.stride()
    offload.arena.release(stored._slot)
    assert stored.take().isnan().all()
    del stored._in_arena  # released already
    for stays in (x[:, ::2], torch.arange(3), x.expand(2, 4, 8)):  # with gaps, integers, repeated
        assert isinstance(store.put(stays), OnDevice)
    assert isinstance(offload.open_store(blocks[0], (x,)).put(x), OnDevice)
