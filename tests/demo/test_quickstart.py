"""The first command, with few steps: it must end and leave its results; `test_learning.py` trains to the end."""

from __future__ import annotations

import json
from pathlib import Path

import av
import pytest
from PIL import Image

from finetrainers.demo import quickstart as demo
from finetrainers.demo.measure import measure
from finetrainers.demo.quickstart import quickstart


@pytest.mark.rotating
@pytest.mark.timeout(180)
def test_quickstart_leaves_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("_ASKED", 4), ("NEW", 8), ("KNOWN", 12), ("HELD_OUT", 4)):
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setitem(measure.__kwdefaults__, "steps", 8)
    before, after = quickstart(tmp_path, steps=1)
    assert before.concept < 0.2
    assert 0 <= after.concept <= 1
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {r["step"] for r in records if "eval_loss" in r} >= {0, 1}
    manifest = [json.loads(line) for line in (tmp_path / "run" / "manifest.jsonl").read_text().splitlines()]
    assert len(manifest) == 20
    assert Image.open(tmp_path / "result.png").width > 500
    assert (tmp_path / "loss.png").stat().st_size > 5000
    with av.open(str(tmp_path / "result.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.frames, stream.width, stream.height) == (9, 4 * 4 * 64, 2 * 4 * 32)
    card = (tmp_path / "run" / "README.md").read_text()
    assert 'LTXPipeline.from_pretrained(model_path("demo://ltx")' in card
    said = capsys.readouterr().out
    for name in ("result.png", "result.mp4", "loss.png", "run/pytorch_lora_weights.safetensors"):
        assert str(tmp_path / name) in said
        assert (tmp_path / name).is_file()
