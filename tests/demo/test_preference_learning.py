"""The embedded model learns from preference pairs what its samples shall show."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from finetrainers.config.load import load_config
from finetrainers.demo.base import SHIFT
from finetrainers.demo.color_preference import CHOICES, choice_captions, preferred
from finetrainers.demo.data import FPS
from finetrainers.demo.measure import load_pipeline, measure
from finetrainers.demo.world import caption, draw_scene, render
from finetrainers.runs.training import train
from finetrainers.utils.packaged import model_path
from finetrainers.utils.video import write_mp4

MODEL, PAIRS, STEPS, ASKED = "demo://ltx", 64, 8, 16


def write_pairs(folder: Path) -> Path:
    """Scenes whose captions leave a choice of two colors, in the preferred one and in the other one."""
    rows = []
    for k in range(PAIRS):
        best = list(CHOICES)[k % 2]
        scene, colors = draw_scene("pairs", k, colors=(best,)), [best, CHOICES[best]]
        for kind, color in zip(("chosen", "rejected"), colors, strict=True):
            write_mp4(folder / f"{k}-{kind}.mp4", render(replace(scene, color=color)), fps=FPS)
        text = caption(scene, phrasing=k, color=" or ".join(colors if k // 2 % 2 else reversed(colors)))
        rows.append({"prompt": text, "chosen": f"{k}-chosen.mp4", "rejected": f"{k}-rejected.mp4"})
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.rotating
def test_samples_show_what_the_pairs_prefer(tmp_path: Path) -> None:
    result = train(load_config(
        method="dpo", model_name="ltx_video", pretrained_model_name_or_path=MODEL,
        dataset_file=str(write_pairs(tmp_path)), video_resolution_buckets=["9x32x64"], precompute_conditions=True,
        first_frame_conditioning_p=0.0, flow_shift=SHIFT, dpo={"beta": 200.0}, rank=16, lora_alpha=16, lr=3e-3,
        optimizer="adamw", weight_decay=0.0, batch_size=8, train_steps=STEPS, eval_num_items=8, eval_num_timesteps=2,
        checkpointing_steps=0, transformer_dtype="fp32", vae_dtype="fp32", text_encoder_dtype="fp32",
        output_dir=str(tmp_path / "run"),
    ))  # fmt: skip
    first, last = (record for record in result.metrics if "eval_accuracy" in record)
    assert (first["eval_accuracy"], last["eval_accuracy"]) == (0.5, 1.0)
    assert last["eval_loss"] < 0.2

    pipeline, captions = load_pipeline(Path(model_path(MODEL))), choice_captions(ASKED, name="asked", held_out=True)

    def share() -> float:
        found = measure(pipeline, captions, steps=4, guidance=1.0)
        return sum(r.color == preferred(c) for r, c in zip(found.readings, captions, strict=True)) / ASKED

    before = share()
    pipeline.load_lora_weights(str(tmp_path / "run"))
    assert share() >= before + 0.2
