"""Files that are named for one of two experts, by their names or titles: refused where another network is expected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import problems, refused_command
from safetensors.torch import save_file

from finetrainers.config.errors import ConfigError
from finetrainers.config.load import load_config
from finetrainers.models.lookalikes import named_expert
from finetrainers.plan.preflight import preflight

NETWORK = {"patch_embedding.bias": torch.zeros(4)}
LORA = {f"transformer.blocks.0.attn1.to_q.lora_{name}.weight": torch.zeros(4, 4) for name in "AB"}
HIGH = "wan2.2_t2v_high_noise_14B_fp16.safetensors"


@pytest.fixture
def place(options: Callable[..., dict], tmp_path: Path) -> Callable[..., list[tuple[str, Any]]]:
    """`place(version, **options)`: problems of a run, without those that do not concern names."""

    def check(version: str, **changes: Any) -> list[tuple[str, Any]]:
        values = options("wan", version=version, **changes)
        try:
            preflight(load_config(**values))
        except ConfigError as error:
            return problems(error)
        return []

    return check


def write(path: Path, tensors: dict[str, torch.Tensor] = NETWORK, **metadata: str) -> str:
    path.parent.mkdir(exist_ok=True)
    save_file(tensors, path, metadata)
    return str(path)


def test_names_and_titles_tell_the_expert() -> None:
    assert named_expert(f"/models/{HIGH}") == named_expert("Wan2.2-T2V-A14B/high_noise_model") == "high"
    assert named_expert("high_noise_model/diffusion_pytorch_model.safetensors") == "high"
    assert named_expert("high_noise/Wan2_2-T2V-A14B-LOW-Noise.safetensors") == "low"  # the file, before its directory
    assert named_expert("Wan-AI/Wan2.2-T2V-A14B-Diffusers/transformer_2") == "low"
    assert named_expert("x.safetensors", {"modelspec.title": "tiger_low_noise"}) == "low"
    assert named_expert("high_noise/models/wan/x.safetensors", {"format": "pt"}) is None


def test_a_network_is_that_of_the_expert(place: Callable[..., Any], tmp_path: Path) -> None:
    high, plain = write(tmp_path / HIGH), write(tmp_path / "wan.safetensors")
    titled = write(tmp_path / "x.safetensors", title="Wan2.2 T2V Low Noise")
    assert place("t2v", transformer_id=high) == [("--transformer_id", "mismatch")]
    assert place("t2v", transformer_id=titled) == [("--transformer_id", "mismatch")]
    assert place("t2v", transformer_id=plain) == place("a14b", expert="high", transformer_id=high) == []
    assert place("a14b", expert="low", transformer_id=high) == [("--transformer_id", "mismatch")]
    assert place("a14b", expert="high", transformer_id=titled) == [("--transformer_id", "mismatch")]
    assert place("a14b", expert="high", part=[f"transformer_2={high}"]) == [("--part", "mismatch")]
    assert place("a14b", expert="low", init_from=high) == [("--init_from", "mismatch")]
    assert place("a14b", expert="low", other_expert=titled) == [("--other_expert", "mismatch")]


def test_a_lora_is_that_of_the_expert(place: Callable[..., Any], tmp_path: Path) -> None:
    lora = write(tmp_path / "tiger_high_noise.safetensors", LORA)
    for expert, expected in (("low", [("--init_from", "mismatch")]), ("high", [])):
        found = place("a14b", expert=expert, init_from=lora, rank=4, lora_alpha=4, target_modules=["attn1.to_q"])
        assert found == expected


def test_a_missing_file_says_nothing_of_the_experts(place: Callable[..., Any], tmp_path: Path) -> None:
    missing = str(tmp_path / HIGH)
    assert place("a14b", expert="high", transformer_id=missing) == [("--transformer_id", "not_found")]


@pytest.mark.parametrize("command", ["sample", "export"])
def test_commands_refuse_the_other_experts_lora(command: str, tiny_repo: Callable[..., Path], tmp_path: Path) -> None:
    lora = write(tmp_path / "tiger_high_noise.safetensors", LORA)
    base = ["--pretrained_model_name_or_path", str(tiny_repo("wan", "a14b")), "--expert", "low"]
    more = ["--prompts", "a tiger", "--size", "9x64x64"] if command == "sample" else ["--format", "peft"]
    where = "TARGET" if command == "sample" else "SOURCE"
    assert (where, "mismatch") in refused_command([command, lora, *base, *more])[1]
