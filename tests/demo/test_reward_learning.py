"""Reward finetuning of the embedded model raises the score that it trains on, and captions are obeyed as before.

The reward's optimum is red for one half of the captions and cyan, its opposite, for the other, so that no drift raises it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FULL = {"training_type": "full-finetune", "rank": None, "lora_alpha": None}
WINDOW: dict[str, Any] = {}
DANCEGRPO: dict[str, Any] = {}
NFT: dict[str, Any] = {}


def curve(directory: Path, name: str) -> dict[int, float]:
    """A number of the records, by step."""
    records = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record[name] for record in records if name in record}
