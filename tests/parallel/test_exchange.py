"""Averages made during backward are those of every gradient by itself, and a step can be retried: two processes."""

from __future__ import annotations

import gc
import json
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from real_process import Python
from torch import nn

from finetrainers.parallel.exchange import GradientExchange

SCRIPT = Path(__file__).with_name("exchange_rank.py")


@pytest.fixture(scope="module")
def ranks(python_of_module: Python, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks wrote down; the last thing that they do is to fail, the second one by itself."""
    out = tmp_path_factory.mktemp("exchange")
    first, second = python_of_module.ranks(2, str(SCRIPT), str(out))
    assert second.wait() == 3, second.stderr
    begun = time.monotonic()
    assert first.wait() == 1, first.stderr
    assert time.monotonic() - begun < 10
    assert "Connection closed" in first.stderr or "Connection reset" in first.stderr
    return [json.loads((out / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.rotating
def test_gradients_are_averaged_bit_for_bit(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        assert len(rank["exchanges"]) == 16
        for name, (*equal, sent) in rank["exchanges"].items():
            assert equal == [True, True], name
            assert len(sent) > 5, name
            # Where the first weight has no gradient in the last micro-batch, the others wait for the end of backward.
            waits = "used" in name and not (name.startswith("unused on one rank") and number == 0)
            assert any(sent) == ("during" in name and not waits), name
    for name, (*_, sent) in ranks[0]["exchanges"].items():
        assert len(sent) == len(ranks[1]["exchanges"][name][-1]), name


def test_a_rank_out_of_memory_lets_both_retry(ranks: list[dict[str, Any]]) -> None:
    """At the first, second and last micro-batch, in the middle of its backward pass."""
    for rank in ranks:
        assert len(rank["retries"]) == 6
        for name, (*equal, sent) in rank["retries"].items():
            assert equal == [True, True, True], name
            attempts = 2 if "during" in name else 1
            assert len(sent) == attempts * len(ranks[0]["exchanges"]["plain, after"][-1]), name


def test_the_quick_rank_waits_for_the_slow_one_in_the_message(ranks: list[dict[str, Any]]) -> None:
    """And not for what the slow one sends."""
    assert ranks[0]["waited_s"] > 0.2 > 0.1 > ranks[1]["waited_s"]


def test_weights_of_the_first_rank_are_those_of_all(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["weights"] == ranks[1]["weights"]


def test_a_gradient_that_changes_after_it_was_sent_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a block that goes backward by itself within backward."""
    layer = nn.Linear(2, 2)
    exchange = GradientExchange([*layer.parameters()], overlaps=True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: object())
    loss = layer(torch.ones(2)).sum()
    with exchange.during_backward():
        loss.backward(retain_graph=True)
        with pytest.raises(AssertionError, match=r"backward .*gradient .*complete"):
            loss.backward()


def test_a_network_is_freed_with_its_exchange() -> None:
    network = nn.Linear(4, 4)
    exchange = GradientExchange([*network.parameters()], overlaps=True)
    weight = weakref.ref(network.weight)
    network(torch.ones(1, 4)).sum().backward()
    del network, exchange
    gc.collect()
    assert weight() is None
