"""Encoded prompts in DanceGRPO's layout, written by `finetrainers prepare` and read as the prompts of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from refusals import refused_options

from finetrainers.config.load import load_config
from finetrainers.methods.grpo.prompts.plan import PromptPlan
from finetrainers.methods.grpo.prompts.prompt_embeddings import check_embeddings
from finetrainers.methods.grpo.prompts.prompts import Prompt, read_prompts
from finetrainers.models.registry import get_family
from finetrainers.plan.memory_plan import RunMemory
from finetrainers.plan.preflight import for_preparing, preflight
from finetrainers.plan.start_report import sizes_on_disk
from finetrainers.runs.prepare import prepare
from finetrainers.runs.training import train
from finetrainers.utils.failures import Kind
from finetrainers.utils.phases import ENCODING_TEXT


def test_what_is_written_is_what_the_encoders_gave(tmp_path: Path, tiny_repo, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the named folder alone, and a run that reads it needs no text encoder, with guidance or without."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("a dog runs\na cat that sleeps on a red sofa\n猫\n")
    options = {
        "method": "grpo", "pretrained_model_name_or_path": str(tiny_repo("hunyuan_video")),
        "text_encoder_dtype": "fp32", "text_encoder_2_dtype": "fp32", "prompts": str(tmp_path / "prompts.txt"),
        "prompt_embeddings_dir": str(tmp_path / "rl_embeddings"),
    }  # fmt: skip
    config = for_preparing(load_config(**options))
    prepare(preflight(config, preparing=True))
    folder = tmp_path / "rl_embeddings"
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.txt", "rl_embeddings"}
    assert {path.name for path in folder.iterdir()} == {"prompt_embed", "prompt_attention_mask", "videos2caption.json"}
    assert json.loads((folder / "videos2caption.json").read_text())[1] == {
        "caption": "a cat that sleeps on a red sofa", "prompt_embed_path": "1.pt", "prompt_attention_mask": "1.pt",
    }  # fmt: skip
    family = get_family("hunyuan_video")
    spec = family.load(config.model)
    with torch.no_grad():
        wanted = spec.encode_text(
            spec.load_text_encoders(), ["a dog runs", "a cat that sleeps on a red sofa", "猫", ""]
        )
    found = read_prompts(folder / "videos2caption.json")
    assert found.empty is not None
    assert [prompt.text for prompt in found.prompts] == ["a dog runs", "a cat that sleeps on a red sofa", "猫"]
    for number, prompt in enumerate((*found.prompts, found.empty)):
        assert prompt.embedding is not None
        assert prompt.mask is not None
        embedding, mask = (torch.load(path, weights_only=True) for path in (prompt.embedding, prompt.mask))
        assert (len(embedding), len(mask)) == (257, 256)
        for name, tensor in spec.given_text(embedding, mask).tensors.items():
            torch.testing.assert_close(tensor, wanted[name][number : number + 1], rtol=1e-5, atol=1e-5)
    assert [path.name for path in folder.glob("*/.*")] == []

    monkeypatch.setattr(type(spec), "load_text_encoders", lambda _: pytest.fail("loaded the text encoders"))
    run = {
        **options, "prompts": str(folder / "videos2caption.json"), "prompt_embeddings_dir": None, "train_steps": 1,
        "reward": ["brightness"], "rollout_size": "5x32x32", "prompts_per_step": 1, "num_generations": 2,
        "batch_size": 2, "sampling_steps": 4, "window_size": 1, "updates_per_rollout": 1,
        "transformer_dtype": "fp32", "vae_dtype": "fp32",
    }  # fmt: skip
    checked = preflight(load_config(**run, rollout_cfg=3.0, output_dir=str(tmp_path / "guided")))
    assert not checked.needs_text
    assert ENCODING_TEXT not in RunMemory(checked).plan().phases
    assert not {name for name in sizes_on_disk(checked) if "text" in name}
    train(checked.config)

    # Those that earlier versions have prepared: the empty prompt is encoded where guidance needs it.
    for path in folder.glob("*/empty_prompt.pt"):
        path.unlink()
    train(load_config(**run, rollout_cfg=1.0, output_dir=str(tmp_path / "plain")))
    guided = preflight(load_config(**run, rollout_cfg=3.0, output_dir=str(tmp_path / "old")))
    assert guided.needs_text
    assert ENCODING_TEXT in RunMemory(guided).plan().phases
    with pytest.raises(pytest.fail.Exception, match="text encoders"):
        train(guided.config)

    # The same prompts are written again; others, and other files, are not written over.
    preflight(config, preparing=True)
    (tmp_path / "prompts.txt").write_text("a dog runs\n")
    for remedy in (folder / "videos2caption.json", folder / "notes.txt"):
        remedy.touch()
        with refused_options(("--prompt_embeddings_dir", "occupied")):
            preflight(config, preparing=True)
        remedy.unlink()
    preflight(config, preparing=True)


def test_what_cannot_be_written_is_refused_before_anything_is_loaded(tmp_path: Path, tiny_repo) -> None:
    given = Prompt("a", "", tmp_path / "0.pt", tmp_path / "0.pt")
    cases: tuple[tuple[str, Prompt, Kind], ...] = (
        ("hunyuan_video", given, "conflict"), ("ltx_video", Prompt("a", ""), "unsupported"),
    )  # fmt: skip
    for family, prompt, kind in cases:
        config = load_config(method="grpo", model_name=family, pretrained_model_name_or_path=str(tiny_repo(family)))
        plan = PromptPlan((prompt,), (), (9, 64, 64), 8, 8.0, "f")
        with refused_options(("--prompt_embeddings_dir", kind)):
            check_embeddings(plan, writes=True, spec=get_family(family).load(config.model))
    assert not (tmp_path / "out").exists()
