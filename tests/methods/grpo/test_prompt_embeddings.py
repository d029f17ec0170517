"""Encoded prompts in DanceGRPO's layout, written by `finetrainers prepare` and read as the prompts of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from one_of import OneOf

from finetrainers.config.errors import ConfigError
from finetrainers.config.load import load_config
from finetrainers.engine.preflight import for_preparing, preflight
from finetrainers.engine.prepare import prepare
from finetrainers.methods.grpo.plan import PromptPlan
from finetrainers.methods.grpo.prompt_embeddings import embeddings_writer
from finetrainers.methods.grpo.prompts import Prompt, read_prompts
from finetrainers.models.registry import get_family


def test_what_is_written_is_what_the_encoders_gave(tmp_path: Path, tiny_repo) -> None:
    """Of two processes each writes its share; a resumed preparation finds the texts in the cache."""
    (tmp_path / "prompts.txt").write_text("a dog runs\na cat that sleeps on a red sofa\n猫\n")
    options = {
        "method": "grpo", "pretrained_model_name_or_path": str(tiny_repo("hunyuan_video")), "text_encoder_dtype": "fp32",
        "text_encoder_2_dtype": "fp32", "prompts": str(tmp_path / "prompts.txt"), "output_dir": str(tmp_path / "run"),
        "prompt_embeddings_dir": str(tmp_path / "rl_embeddings"),
    }  # fmt: skip
    config = for_preparing(load_config(**options))
    prepare(preflight(config, preparing=True))
    folder = tmp_path / "rl_embeddings"
    assert json.loads((folder / "videos2caption.json").read_text())[1] == {
        "caption": "a cat that sleeps on a red sofa", "prompt_embed_path": "1.pt", "prompt_attention_mask": "1.pt",
    }  # fmt: skip
    family = get_family("hunyuan_video")
    spec = family.load(config.model)
    with torch.no_grad():
        wanted = spec.encode_text(spec.load_text_encoders(), ["a dog runs", "a cat that sleeps on a red sofa", "猫"])
    prompts = read_prompts(folder / "videos2caption.json").prompts
    assert [prompt.text for prompt in prompts] == ["a dog runs", "a cat that sleeps on a red sofa", "猫"]
    for number, prompt in enumerate(prompts):
        assert prompt.embedding is not None
        assert prompt.mask is not None
        embedding, mask = (torch.load(path, weights_only=True) for path in (prompt.embedding, prompt.mask))
        assert (len(embedding), len(mask)) == (257, 256)
        for name, tensor in spec.given_text(embedding, mask).tensors.items():
            torch.testing.assert_close(tensor, wanted[name][number : number + 1], rtol=1e-5, atol=1e-5)
    assert [path.name for path in folder.glob("*/.*")] == []
    # The same prompts are written again; others, and other files, are not written over.
    preflight(config, preparing=True)
    (tmp_path / "prompts.txt").write_text("a dog runs\n")
    for remedy in (folder / "videos2caption.json", folder / "notes.txt"):
        remedy.touch()
        with pytest.raises(ConfigError) as refused:
            preflight(config, preparing=True)
        assert [problem.where for problem in refused.value.problems] == ["--prompt_embeddings_dir"]
        remedy.unlink()
    preflight(config, preparing=True)


def test_what_cannot_be_written_is_refused_before_anything_is_loaded(tmp_path: Path, tiny_repo) -> None:
    given = Prompt("a", "", tmp_path / "0.pt", tmp_path / "0.pt")
    for family, prompt, message in (
        ("hunyuan_video", given, "the prompts are encoded already"),
        ("ltx_video", Prompt("a", ""), "ltx_video has no format of encoded prompts that other tools read; remove it"),
    ):
        config = load_config(method="grpo", model_name=family, pretrained_model_name_or_path=str(tiny_repo(family)))
        plan = PromptPlan((prompt,), (), (9, 64, 64), 8, 8.0, "f")
        with pytest.raises(ConfigError, match=message):
            embeddings_writer(tmp_path / "out", plan, spec=get_family(family).load(config.model), parallel=OneOf(0, 2))
    assert not (tmp_path / "out").exists()
