"""Seconds of a block are those of its work, on a device that works on its own too."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finetrainers.methods.grpo.rollout.collect import timed


def test_seconds_add_up() -> None:
    totals = {"other": 1.0}
    for _ in range(2):
        with timed(totals, "sleep", torch.device("cpu")):
            time.sleep(0.02)
    assert 0.04 <= totals["sleep"] < 1
    assert totals["other"] == 1.0


def test_a_device_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work given before the block is done before it begins, and its own before it ends; other streams go on."""
    done: list[Any] = []
    stream = lambda device: SimpleNamespace(synchronize=lambda: done.append(("wait", device)))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    device = torch.device("cuda", 1)
    with timed({}, "block", device):
        done.append("block")
    assert done == [("wait", device), "block", ("wait", device)]
