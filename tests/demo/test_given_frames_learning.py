"""The embedded model learns to make the rest of a clip from frames of every kind that it is given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from finetrainers.config.frame_conditioning import KINDS, read_frame_conditioning
from finetrainers.config.load import load_config
from finetrainers.demo.base import SHIFT
from finetrainers.demo.data import training_scenes, write_clips
from finetrainers.runs.training import train
from finetrainers.training.callbacks.base import Callback

STEPS = 16
LABELS = ("prefix:5", "suffix:4", *KINDS)


class HeldOut(Callback):
    """The held-out loss with frames of each kind alone, before training and after it."""

    def __init__(self) -> None:
        self.losses: list[dict[str, float]] = []

    def on_start(self, state) -> None:
        self.measure(state)

    def on_stop(self, state) -> None:
        self.measure(state)

    def measure(self, state) -> None:
        method, kinds = state.method, state.method.conditioning_modes
        found = {}
        with torch.no_grad():
            for label in LABELS:
                method.conditioning_modes = read_frame_conditioning(f"{label}=1")
                batches = [batch for batch, _ in method.batches.eval_batches()]
                losses = [method.eval_loss(state.transformer, batch, 0.5) for batch in batches]
                found[label] = torch.cat(losses).mean().item()
        method.conditioning_modes = kinds
        self.losses.append(found)


@pytest.mark.rotating
def test_a_held_out_loss_improves_with_every_kind_of_given_frames(tmp_path: Path) -> None:
    write_clips(tmp_path / "clips", training_scenes(48, seed=5))
    held_out = HeldOut()
    train(load_config(
        model_name="ltx_video", pretrained_model_name_or_path="demo://ltx", data_root=str(tmp_path / "clips"),
        dataset_file=str(tmp_path / "clips/captions.jsonl"), video_resolution_buckets=["9x32x64"],
        precompute_conditions=True, frame_conditioning=",".join(f"{label}={1 / len(LABELS)}" for label in LABELS),
        flow_shift=SHIFT, rank=16, lora_alpha=16, lr=3e-3, optimizer="adamw", batch_size=8, train_steps=STEPS,
        eval_num_items=12, checkpointing_steps=0, transformer_dtype="fp32", vae_dtype="fp32", text_encoder_dtype="fp32",
        output_dir=str(tmp_path / "run"),
    ), callbacks=[held_out])  # fmt: skip
    before, after = held_out.losses
    for label in LABELS:
        assert after[label] < 0.7 * before[label], label
