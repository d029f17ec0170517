"""The recipe of two experts: one command trains both from the same encoded data and leaves one pair of LoRA files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from real_process import Python
from refusals import refused_command
from safetensors.torch import load_file

from finetrainers.cli.main import main
from finetrainers.config.load import load_config
from finetrainers.models import common
from finetrainers.models.registry import get_family
from finetrainers.training.callbacks import validation

RECIPE = Path(__file__).parents[2] / "examples" / "wan" / "a14b_pair" / "stages.toml"
#: A busy machine is many times slower.
LONG_S = 280.0


@pytest.fixture
def command(tiny_repo: Callable[..., Path], make_clips: Callable[..., Path], tmp_path: Path) -> Callable[..., list]:
    """`command(version, *more)`: the recipe's command on small clips and a tiny model."""
    Image.fromarray(np.full((64, 64, 3), 90, np.uint8)).save(tmp_path / "image.png")

    def build(version: str, *more: object) -> list[str]:
        flags = f"""--data_root {make_clips(1)} --output_dir {tmp_path}/tiger --precompute_dir {tmp_path}/cache
            --pretrained_model_name_or_path {tiny_repo("wan", version)} --video_resolution_buckets 9x64x64
            --train_steps 2 --rank 2 --lora_alpha 2 --lr 1e-2 --lr_warmup_steps 0 --checkpointing_steps 1
            --dataloader_num_workers 0 --validation_steps 2 --validation_inference_steps 2 --mixed_precision no
            --transformer_dtype fp32 --vae_dtype fp32 --text_encoder_dtype fp32 --validation_guidance_scale 1"""
        image = ["--validation_images", f"{tmp_path}/image.png"] if "i2v" in version else []
        prompt = ["--validation_prompts", "a tiger@@@9x64x64"]
        return ["-m", "finetrainers", "run", str(RECIPE), *flags.split(), *prompt, *image, *map(str, more)]

    return build


def files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}


@pytest.mark.timeout(600)
@pytest.mark.rotating
@pytest.mark.parametrize("version", ["a14b", "a14b_i2v"])
def test_one_recipe_trains_both_experts(
    version: str, command: Callable[..., list], tiny_repo: Callable[..., Path], tmp_path: Path,
    python: Python,
) -> None:  # fmt: skip
    """Killed in the first stage and repeated, it resumes; the second stage encodes nothing."""
    encoded: dict[Path, int] = {}
    if version == "a14b":
        assert python(*command(version), FINETRAINERS_FAULT="kill@step:2").wait(timeout=LONG_S) == 128 + 9
        encoded = files(tmp_path / "cache")
        assert encoded
    done = python(*command(version))
    assert done.wait(timeout=LONG_S) == 0, done.stderr
    first, second = done.stdout.partition("stage low (2 of 2)")[::2]
    assert ("stage high (1 of 2): from step 1" in first) == (version == "a14b")
    assert "encoded" not in second
    assert version != "a14b" or files(tmp_path / "cache") == encoded

    high, low = tmp_path / "tiger" / "high", tmp_path / "tiger" / "low"
    pair = [low / "export" / "comfyui" / f"tiger_{expert}_noise.safetensors" for expert in ("high", "low")]
    assert [*sorted((low / "export" / "comfyui").glob("*.safetensors"))] == pair
    spec = get_family("wan").load(load_config(low / "config.toml").model)
    for file, run in zip(pair, (high, low), strict=True):
        trained, exported = (spec.read_lora(path)[0] for path in (run / "pytorch_lora_weights.safetensors", file))
        assert trained.keys() == exported.keys()
        assert all(trained[name].equal(exported[name]) for name in trained)
        assert any(tensor.any() for name, tensor in trained.items() if "lora_B" in name)
    _check_pipeline(version, tiny_repo, pair, spec)
    card = (low / "README.md").read_text()
    calls = [line for line in card.splitlines() if line.startswith("pipe.load_lora_weights(")]
    assert ["transformer_2" in call for call in calls] == [False, True]
    assert all(path.name in call for path, call in zip(pair, calls, strict=True))
    assert [name for name in ("`transformer_2`", "`tiger_high_noise`") if name not in card] == []
    assert f"{high}" not in card


def _check_pipeline(version: str, tiny_repo: Callable[..., Path], pair: list[Path], spec: Any) -> None:
    """Compare the networks that sample with those of a user's pipeline that has loaded both files."""
    pipeline = DiffusionPipeline.from_pretrained(tiny_repo("wan", version), dtype=torch.float32)
    pipeline.load_lora_weights(str(pair[0].parent), weight_name=pair[0].name)
    pipeline.load_lora_weights(str(pair[1].parent), weight_name=pair[1].name, load_into_transformer_2=True)
    low = spec.load_transformer(torch.float32)
    spec.load_lora(low, pair[1].parents[2] / "pytorch_lora_weights.safetensors")
    for ours, theirs in ((spec.companions["transformer"], pipeline.transformer), (low, pipeline.transformer_2)):
        tensors = {name.replace("default_0", "default"): tensor for name, tensor in theirs.state_dict().items()}
        assert ours.state_dict().keys() == tensors.keys()
        assert all(tensor.equal(tensors[name]) for name, tensor in ours.state_dict().items())


def test_rollouts_and_samples_share_the_other_expert(
    options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is loaded once, with its LoRA, and both use it."""
    low = run(**options("wan", version="a14b", expert="low", train_steps=1, output_dir=str(tmp_path / "low")))
    loaded: list[str] = []
    load = common.load_network

    def counting(cls: Any, config: Any, part: str, *more: Any, **others: Any) -> Any:
        loaded.append(part)
        return load(cls, config, part, *more, **others)

    monkeypatch.setattr(common, "load_network", counting)
    given = options("wan", version="a14b", expert="high", train_steps=1, output_dir=str(tmp_path / "high"))
    for name in ("data_root", "video_resolution_buckets"):
        del given[name]
    done = run(
        **given, other_expert=str(low.root), method="grpo", prompts=_prompts(tmp_path), reward=["smoothness"],
        rollout_size="5x32x32", prompts_per_step=1, num_generations=2, sampling_steps=3, window_size=1,
        validation_prompts="a tiger@@@5x32x32", validation_steps=1, validation_inference_steps=2,
    )  # fmt: skip
    assert sorted(part for part in loaded if part.startswith("transformer")) == ["transformer", "transformer_2"]
    other, trained = done.state.spec.companions["transformer_2"].state_dict(), load_file(low.root / _LORA)
    for name, tensor in trained.items():
        adapter = name.removeprefix("transformer.").replace(".weight", ".default.weight")
        assert other[adapter].equal(tensor.to(other[adapter].dtype))


@pytest.mark.parametrize("changes", [{"blocks_to_swap": 3}, {"quantize_frozen": "int8", "blocks_to_swap": 4}])
def test_the_other_expert_is_stored_as_the_trained_one(
    changes: dict[str, Any], options: Callable[..., dict], run: Callable[..., Any],
    tiny_repo: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Its blocks wait in host memory, and rollouts, samples and training stay the same to the last bit."""
    given = options("wan", version="a14b", expert="high", train_steps=1)
    given["pretrained_model_name_or_path"] = str(tiny_repo("wan", "a14b", layers=4))
    for name in ("data_root", "video_resolution_buckets"):
        del given[name]
    given |= {
        "method": "grpo", "prompts": _prompts(tmp_path), "reward": ["smoothness"], "rollout_size": "5x32x32",
        "prompts_per_step": 1, "num_generations": 2, "sampling_steps": 3, "window_size": 1,
        "validation_prompts": "a tiger@@@5x32x32", "validation_steps": 1, "validation_inference_steps": 2,
    }  # fmt: skip
    written: list[np.ndarray] = []
    write = validation.write_sample
    monkeypatch.setattr(validation, "write_sample", lambda *a, **k: written.append(a[2]) or write(*a, **k))
    trained = []
    for name, options_of_run in (("swapped", changes), ("plain", {**changes, "blocks_to_swap": 0})):
        done = run(**given | {"output_dir": str(tmp_path / name), **options_of_run})
        trained.append(load_file(done.root / _LORA))
        other: Any = done.state.spec.companions["transformer_2"]
        layers = [block.attn1.to_q for block in other.blocks]
        weights = [getattr(layer, "codes" if "quantize_frozen" in changes else "weight") for layer in layers]
        storages = {weight.untyped_storage().data_ptr() for weight in weights}
        assert len(storages) == 4 - options_of_run["blocks_to_swap"] + (2 if name == "swapped" else 0)
    assert all(tensor.equal(trained[1][name]) for name, tensor in trained[0].items())
    half = len(written) // 2
    assert half > 1
    assert all(map(np.array_equal, written[:half], written[half:]))


_LORA = "pytorch_lora_weights.safetensors"


def _prompts(folder: Path) -> str:
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "a tiger"}) + "\n")
    return str(folder / "prompts.jsonl")


def test_the_recipe_for_a_small_card_is_planned(
    command: Callable[..., list], capsys: pytest.CaptureFixture[str]
) -> None:
    small = RECIPE.parents[1] / "a14b_pair_24gb" / "stages.toml"
    assert main(["run", str(small), *command("a14b", "--plan")[4:]]) == 0
    printed = capsys.readouterr().out
    assert [stage in printed for stage in ("high", "low")] == [True, True]


def test_stages_that_are_no_pair_are_refused(command: Callable[..., list], tmp_path: Path) -> None:
    text, changed = RECIPE.read_text(encoding="ascii"), tmp_path / "stages.toml"
    for old, new, where, kind in (
        ('expert = "low"', 'expert = "high"', "stage low, other_expert", "mismatch"),
        ('stage = "high" }', 'stage = "hihg" }', f"stage low, {changed}:", "unknown"),
        ('name = "low"\nexpert = "low"', 'name = "low"', "stage low, --expert", "required"),
    ):
        assert old in text
        changed.write_text(text.replace(old, new))
        code, [(place, actual), *others] = refused_command(["run", changed, *command("a14b", "--plan")[4:]])
        assert (code, actual, others) == (2, kind, [])
        assert place.startswith(where)
