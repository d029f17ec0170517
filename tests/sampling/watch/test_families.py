"""A watch of every family: its clips are those of `finetrainers sample`, and scored as their files show them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_family import FAMILIES, short_clip
from PIL import Image

from finetrainers.cli.main import main
from finetrainers.config.sections import ModelSection, TrainingSection
from finetrainers.models.registry import get_family
from finetrainers.plan.trainable import make_trainable
from finetrainers.rewards.pixels import Brightness
from finetrainers.rundir import publish
from finetrainers.rundir.best import best_checkpoint
from finetrainers.sampling.watch import server
from finetrainers.utils.video import write_mp4

PROMPT = "a red ball"


def checkpoint(run: Path, spec: Any, *, step: int) -> None:
    """Publish a random LoRA."""
    network = spec.load_transformer(torch.float32)
    make_trainable(network, TrainingSection(rank=2, lora_alpha=4, target_modules=[*spec.facts.lora_targets[:2]]))
    generator = torch.Generator().manual_seed(step)
    weights = {
        name.replace(".default", ""): 0.3 * torch.randn(value.shape, generator=generator)
        for name, value in network.state_dict().items()
        if ".lora_" in name
    }
    final = run / "checkpoints" / f"step-{step}"
    temporary = publish.reserve(final, needed=0)
    spec.save_lora(temporary, weights, network.peft_config["default"].to_dict())
    (temporary / "state.json").write_text(json.dumps({"critical": {"model_name": spec.name}}))
    publish.publish(temporary, final, facts={"step": step})


@pytest.mark.rotating
@pytest.mark.parametrize("family", FAMILIES)
def test_a_watch_of_every_family(
    family: str, tiny_repo: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    repository, run, size = tiny_repo(family), tmp_path / "run", f"{short_clip(family)}x64x64"
    spec = get_family(family).load(ModelSection(model_name=family, pretrained_model_name_or_path=str(repository)))
    for step in (1, 2):
        checkpoint(run, spec, step=step)
    dtypes = "".join(f'{part}_dtype = "fp32"\n' for part in ("transformer", "vae", "text_encoder"))
    (run / "config.toml").write_text(
        f'model_name = "{family}"\npretrained_model_name_or_path = "{repository}"\n{dtypes}'
        f'data_root = "gone"\nvideo_resolution_buckets = ["{size}"]\noutput_dir = "{run}"\ntrain_steps = 2\n'
        f'validation_prompts = "{PROMPT}"\nvalidation_inference_steps = 2\nvalidation_guidance_scale = 2.0\n'
    )
    media: list[str] = []
    if spec.facts.first_frame != "none":
        Image.fromarray(np.full((64, 64, 3), 90, np.uint8)).save(tmp_path / "image.png")
        media += ["--image", str(tmp_path / "image.png")]
    if spec.facts.media:
        write_mp4(tmp_path / "control.mp4", np.full((20, 64, 64, 3), 90, np.uint8), fps=spec.facts.geometry.fps)
        media += ["--video", str(tmp_path / "control.mp4")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    arguments = [str(run), "--prompts", PROMPT, *media, "--seed", "3"]
    watch = ["watch", *arguments, "--once", "--device", "cpu", "--best_by", "brightness"]
    assert main(watch) == 0, capsys.readouterr().err
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"  # the device is the command's
    folder = run / "watch" / "run"
    records = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    assert [one["step"] for one in records] == [1, 2]
    for one in records:
        pixels = server._pixels(folder / one["file"])
        assert one["scores"]["brightness"] == pytest.approx(
            Brightness().score(pixels, [PROMPT], fps=8)["score"].item(), rel=1e-6
        )
    assert (folder / records[0]["file"]).read_bytes() != (folder / records[1]["file"]).read_bytes()
    best = max(records, key=lambda one: one["scores"]["brightness"])["step"]
    assert best_checkpoint(run) == run / "checkpoints" / f"step-{best}"
    sample = ["sample", str(run / "checkpoints" / "step-2"), *arguments[1:], "--size", size]
    assert main(sample) == 0
    [theirs] = (run / "samples" / "sample").glob("*.mp4")
    assert torch.equal(server._pixels(theirs), server._pixels(folder / records[1]["file"]))
