"""Dropout of split clips: the parts of all processes are what one process drops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from refusals import refused_options
from torch import Tensor, nn

from finetrainers.models.split.sequence import SequenceGroup, SequenceParallelPlan
from finetrainers.models.split.sequence_dropout import SplitDropout, split_dropout

TOKENS, SIZE, TEXT = 7, 2, 3


def group(rank: int) -> Any:
    """A process of a group that was never joined."""
    found = object.__new__(SequenceGroup)
    found.rank, found.size, found.tokens, found.splits_times = rank, SIZE, TOKENS, True
    return found


def dropped(rank: int, own: Tensor, stream: Any, *, text_first: bool) -> Tensor:
    """What one of the processes makes of its part."""
    torch.manual_seed(0)
    return SplitDropout(0.4, group(rank), stream, text_first=text_first)(own)


@pytest.mark.parametrize(
    ("stream", "text", "text_first"), [("video", 0, False), ("joint", TEXT, True), ("joint", TEXT, False)]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_processes_drop_what_one_process_drops(stream: str, text: int, text_first: bool, transposed: bool) -> None:
    whole = torch.rand(2, TOKENS + text, 4) + 1
    if transposed:
        whole = (torch.rand(2, 4, TOKENS + text) + 1).transpose(1, 2)
    torch.manual_seed(0)
    expected = F.dropout(whole, 0.4)
    sizes = (text, 3, 4) if text_first else (3, 4, text)
    pieces = torch.arange(TOKENS + text).split(sizes)
    texts, first, second = pieces if text_first else (pieces[2], pieces[0], pieces[1])
    for rank, clip in enumerate((first, second)):
        own = torch.cat([texts, clip] if text_first else [clip, texts])
        part = whole.transpose(1, 2)[:, :, own].transpose(1, 2) if transposed else whole[:, own]
        torch.testing.assert_close(dropped(rank, part, stream, text_first=text_first), expected[:, own])


def test_noise_levels_of_tokens_are_rows() -> None:
    whole = torch.rand(2, TOKENS, 4) + 1
    torch.manual_seed(0)
    expected = F.dropout(whole.flatten(0, 1), 0.4).view_as(whole)
    for rank, (start, end) in enumerate(((0, 3), (3, 7))):
        found = dropped(rank, whole[:, start:end].flatten(0, 1), "time", text_first=False)
        torch.testing.assert_close(found, expected[:, start:end].flatten(0, 1))


def test_a_family_that_tells_no_streams_has_no_dropout() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    spec = SimpleNamespace(name="mine", streams={}, token_plan=SequenceParallelPlan())
    with refused_options(("--sp_size", "unsupported")) as caught:
        split_dropout(network, spec, group(0))
    assert "through 1 (`ModelSpec.streams`)" in str(caught.value)
