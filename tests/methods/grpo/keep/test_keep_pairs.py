"""Clips of a rollout that are kept as preference pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from one_of import OneOf

from finetrainers.methods.grpo.advantage import Advantages
from finetrainers.methods.grpo.keep.keep_pairs import PairKeeper
from finetrainers.methods.grpo.prompts.prompts import Prompt, RolloutSample
from finetrainers.utils.video import read_mp4

#: Of the first prompt clip 2 is best and 0 worst, since 1 has failed; the clips of the second are alike.
VALUES = torch.tensor([[-1.0, 0.0, 2.0], [0.0, 0.0, 0.0], [0.5, -0.5, 0.1]])
FAILED = torch.tensor([[False, True, False], [False] * 3, [False] * 3])
FOUND = Advantages(VALUES, VALUES[..., None], {}, constant=(1,), failed=FAILED)
PROMPTS = ("a cat", "a dog", "a bird")


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]


def test_the_best_and_the_worst_clip_of_each_prompt_are_kept(tmp_path: Path) -> None:
    """Three ranks each have three clips, parts of one or two groups; a rollout that is redone is replaced."""
    said: list[Any] = []
    for rollout in (0, 1, 0):
        said.clear()
        for rank in (2, 1, 0):  # the last one writes the file
            parallel: Any = OneOf(rank, 3)
            parallel.gather_objects = lambda items: said.extend(items) or list(said)
            numbers = range(3 * rank, 3 * rank + 3)
            PairKeeper(tmp_path, parallel, fps=8.0).keep(
                [RolloutSample(rollout, k // 3, Prompt(PROMPTS[k // 3], ""), k % 3) for k in numbers],
                {i: torch.full((9, 32, 32, 3), 20 * k, dtype=torch.uint8) for i, k in enumerate(numbers)},
                FOUND,
            )
        expected = [(rollout, "a cat"), (rollout, "a bird")]
        assert [(row["rollout"], row["prompt"]) for row in rows(tmp_path)][-2:] == expected
    assert [row["rollout"] for row in rows(tmp_path)] == [0, 0]
    first, second = rows(tmp_path)
    for name, clip in ((first["chosen"], 2), (first["rejected"], 0), (second["chosen"], 6), (second["rejected"], 7)):
        frames, _ = read_mp4(tmp_path / name, columns=1)
        assert abs(float(np.median(frames)) - 20 * clip) < 4
