"""Runs on preference pairs: every family, resumed, encoded beforehand; and what the embedded model learns from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from every_family import FAMILIES

KINDS: dict[str, dict[str, Any]] = {
    "lora": {
        "gradient_accumulation_steps": 2,
        "lora_dropout": 0.2,
        "eval_num_items": 1,
        "eval_steps": 2,
        "train_steps": 6,
        "lr": 5e-3,
    },
    "full": {
        "train_steps": 4,
        "lr": 1e-3,
        "training_type": "full-finetune",
        "batch_size": 2,
        "precompute_conditions": True,
    },
}


def write_pairs(path: Path, clips: Path, *, count: int = 3) -> str:
    """A file of pairs of some of a folder's clips, each pair with a prompt of its own."""
    rows = [{"prompt": f"pattern {k}", "chosen": f"{k}.mp4", "rejected": f"{k + 1}.mp4"} for k in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


#: Every family, every kind on one of them at least: what differs between families is only how each is called.
CASES = [(family, [*KINDS][place % len(KINDS)]) for place, family in enumerate(FAMILIES)]


@pytest.mark.rotating
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_resuming_changes_nothing(
    family: str,
    kind: str,
    options: Callable[..., dict],
    run: Callable[..., Any],
    make_clips: Callable[..., Path],
    tmp_path: Path,
) -> None:
    changes = KINDS[kind]
    values = options(
        family, clips=4, method="dpo", dataset_file=write_pairs(tmp_path / "pairs.jsonl", make_clips(4)),
        checkpointing_steps=2, **changes,
    )  # fmt: skip
    straight = run(**{**values, "output_dir": str(tmp_path / "straight")})
    resumed = run(
        **{**values, "output_dir": str(tmp_path / "resumed")},
        resume_from_checkpoint=str(straight.root / "checkpoints" / "step-2"),
    )
    names = ("loss", "accuracy", "margin", "gain_chosen", "grad_norm")
    assert resumed.curve(*names) == straight.curve(*names)[2:]
    assert resumed.weights.keys() == straight.weights.keys()
    assert all(torch.equal(weight, straight.weights[key]) for key, weight in resumed.weights.items())
    assert straight.curve("accuracy")[0][1] == 0.5  # the network is the reference model still
    assert max(margin for _, margin in straight.curve("margin")) > 0  # of each step, at other noise levels
    if "eval_steps" in changes:
        evaluations = [[r["eval_accuracy"] for r in done.metrics if "eval_loss" in r] for done in (straight, resumed)]
        assert len(evaluations[0]) == 4
        assert evaluations[0][2:] == evaluations[1]
