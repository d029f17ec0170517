"""The index of a watch's scores, from a file that may have been edited."""

from __future__ import annotations

import json
from pathlib import Path

from finetrainers.sampling.watch.scores import FILE, Scores, recorded_labels

SEED = Path(__file__).parents[2] / "fuzz" / "seeds" / "sft" / "watch" / "run" / FILE


def test_records_of_wrong_types_are_ignored(tmp_path: Path) -> None:
    record = json.loads(SEED.read_text().splitlines()[0])
    wrong = [
        {**record, name: value}
        for name, values in {
            "key": (1, None), "manifest": ([],), "weights": ({}, None), "kind": (2,), "checkpoint": (None, 1.5),
            "step": ("x", {}, None, float("nan"), float("inf")), "scores": (1, "x", None, [1]),
        }.items()
        for value in values
    ]  # fmt: skip
    wrong += [{name: value for name, value in record.items() if name != left_out} for left_out in ("weights", "step")]
    mixed = {**record, "key": "mixed", "scores": {"brightness": {}, "color": 0.5}}
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / FILE).write_text("".join(json.dumps(line) + "\n" for line in [*wrong, mixed, record]))
    scores = Scores(folder, ["brightness"])
    assert [step for step, _, _ in scores.columns()] == [record["step"]]
    assert scores.of_clip(record["key"]) == record["scores"]
    assert (scores.of_clip("mixed"), scores.has(record["manifest"], "mixed")) == ({"color": 0.5}, False)
    assert recorded_labels(tmp_path) == {"brightness", "color"}
