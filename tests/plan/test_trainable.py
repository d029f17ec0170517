"""The family names the trained network of a checkpoint: here the second of two experts, without a LoRA loader."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from diffusers import DiffusionPipeline, LTXVideoTransformer3DModel
from safetensors import safe_open
from safetensors.torch import load_file

from finetrainers.config.facts import Configs, Facts
from finetrainers.models import family
from finetrainers.models.families.ltx_video import read as ltx_video
from finetrainers.models.ltx_video import LTXVideoSpec
from finetrainers.runs.training import TrainResult

LORA = "pytorch_lora_weights.safetensors"


class TwoExperts(DiffusionPipeline):
    """A pipeline that knows nothing of LoRA files."""

    def __init__(self, tokenizer, text_encoder, vae, transformer, transformer_2, scheduler, boundary=None) -> None:
        super().__init__()
        self.register_modules(
            tokenizer=tokenizer, text_encoder=text_encoder, vae=vae, transformer=transformer,
            transformer_2=transformer_2, scheduler=scheduler,
        )  # fmt: skip
        self.register_to_config(boundary=boundary)


class TwoExpertsSpec(LTXVideoSpec):
    parts: ClassVar = {**LTXVideoSpec.parts, "transformer_2": LTXVideoTransformer3DModel}
    pipeline_class = TwoExperts
    image_pipeline_class = None


def read(configs: Configs) -> Facts:
    facts = ltx_video({**configs, "transformer": configs.get("transformer_2", {})})
    return replace(
        facts,
        boundary=0.5,
        lora_targets=("to_k", "to_v"),
    )


@pytest.fixture
def two(tiny_repo: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of two experts, of a family that is registered for this test."""
    repo = tmp_path / "two"
    shutil.copytree(tiny_repo("ltx_video"), repo)
    shutil.copytree(repo / "transformer", repo / "transformer_2")
    (repo / "model_index.json").write_text(json.dumps({"_class_name": "TwoExperts", "boundary": 0.5}))
    known = family.Family(
        name="two", spec=f"{__name__}:TwoExpertsSpec", read=read, transformer="LTXVideoTransformer3DModel"
    )
    monkeypatch.setattr(family.FAMILIES, "registered", {**family.families(), "two": known})
    return repo


@pytest.mark.rotating
@pytest.mark.parametrize("training_type", ["lora", "full-finetune"])
def test_the_second_expert_is_trained_saved_resumed_and_loaded(
    training_type: str, two: Path, options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path
) -> None:
    values = options(
        clips=2, training_type=training_type, train_steps=2, checkpointing_steps=1, first_frame_conditioning_p=0.0
    ) | {"model_name": "two", "pretrained_model_name_or_path": str(two), "expert": "low"}
    done = run(**values)
    assert done.state.method.noise_levels.within == (0.0, 0.5)
    base = load_file(two / "transformer_2" / "diffusion_pytorch_model.safetensors")
    card = (done.root / "README.md").read_text()
    assert not (done.root / "transformer").exists()
    if training_type == "lora":
        with safe_open(done.root / LORA, "pt") as file:
            names = list(file.keys())
            assert json.loads(file.metadata()["lora_adapter_metadata"])["transformer_2.lora_alpha"] == 8
        assert {name.rsplit(".lora_", 1)[0].rsplit(".", 1)[1] for name in names} == {"to_k", "to_v"}
        assert all(name.startswith("transformer_2.transformer_blocks.") for name in names)
        assert f'pipe.transformer_2.load_lora_adapter("{done.root}", prefix="transformer_2"' in card
    else:
        weights = load_file(done.root / "transformer_2" / "diffusion_pytorch_model.safetensors")
        assert any(not torch.equal(weights[name], base[name]) for name in base)
        assert 'subfolder="transformer_2"' in card
        assert "transformer_2=transformer_2" in card
    pipeline = TrainResult(done.state.config, step=2).pipeline("cpu")
    assert pipeline.config.boundary == 0.5
    trained = done.state.parallel.unwrap(done.state.transformer)
    for (name, ours), theirs in zip(trained.named_parameters(), pipeline.transformer_2.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    for name, tensor in pipeline.transformer.named_parameters():
        assert torch.equal(tensor, base[name])

    first, last = sorted((done.root / "checkpoints").iterdir())
    (resumed := tmp_path / "resumed").mkdir()
    run(**values | {"output_dir": str(resumed), "resume_from_checkpoint": str(first)})
    file = LORA if training_type == "lora" else "transformer_2/diffusion_pytorch_model.safetensors"
    expected, found = load_file(last / file), load_file(resumed / file)
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    again = run(**values | {"output_dir": str(tmp_path / "again"), "init_from": str(done.root), "train_steps": 1})
    assert again.state.step == 1
