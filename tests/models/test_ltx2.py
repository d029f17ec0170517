"""LTX-2: the video stream alone, its layers, its text, its version, and the noise levels of its authors' trainer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.ltx2.utils import DEFAULT_NEGATIVE_PROMPT
from peft import LoraConfig, get_peft_model_state_dict
from PIL import Image
from refusals import refused, refused_options
from safetensors import safe_open

from finetrainers.config.sections import DiffusionSection, ModelSection, TrainingSection
from finetrainers.diffusion.timesteps import NoiseLevels
from finetrainers.models.batch import PromptEmbeds, SampleRequest, VideoMeta
from finetrainers.models.ltx2 import LTX2Spec
from finetrainers.models.registry import get_family
from finetrainers.plan.trainable import make_trainable, trainable_parameters
from finetrainers.training.trained_weights import attach_lora

VERSIONS = ("2.0", "2.3")
SOUND = ("audio", "av_cross_attn", "a2v")
FP32 = dict.fromkeys(("text_encoder_dtype", "transformer_dtype", "vae_dtype"), "fp32")


def spec_of(repo: Path) -> LTX2Spec:
    section = ModelSection(
        model_name="ltx2", pretrained_model_name_or_path=str(repo), part=["connectors=,fp32"], **FP32
    )
    spec = get_family("ltx2").load(section)
    assert isinstance(spec, LTX2Spec)
    return spec


def predicted(spec: LTX2Spec, network: Any, t: torch.Tensor, fps: tuple[float, ...] = (24.0, 24.0)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 128, 3, 2, 2, generator=generator)
    text = torch.randn(2, *spec.text_shapes()["prompt_embeds"], generator=generator)
    return spec.predict(network, x, t, PromptEmbeds({"prompt_embeds": text}), VideoMeta(fps=torch.tensor(fps)))


@pytest.mark.parametrize("version", VERSIONS)
def test_predictions_depend_on_the_video_stream_alone(version: str, tiny_repo: Callable[..., Path]) -> None:
    """All of its weights get a gradient, and no other does. Each clip has its noise level and its frame rate."""
    spec = spec_of(tiny_repo("ltx2", version))
    network = spec.load_transformer(torch.float32)
    times = torch.tensor([[0.0, 0.7, 0.7], [0.3, 0.3, 0.3]])
    out = predicted(spec, network, times, (24.0, 12.0))
    out.square().sum().backward()
    for name, parameter in network.named_parameters():
        is_used = parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
        assert is_used == (not any(part in name for part in SOUND)), name
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if any(part in name for part in SOUND):
                parameter.add_(1.0)
        torch.testing.assert_close(predicted(spec, network, times, (24.0, 12.0)), out)
        swapped = predicted(spec, network, times.flip(0), (12.0, 24.0))
    assert not torch.allclose(swapped[0], out[0])


def test_the_text_of_2_3_sees_the_noise_level_of_the_clip(tiny_repo: Callable[..., Path]) -> None:
    """Not those of its tokens, of which the given ones have 0: the network is told `sigma` besides."""
    spec = spec_of(tiny_repo("ltx2", "2.3"))
    network, calls = spec.load_transformer(torch.float32), []
    network.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs), with_kwargs=True)
    with torch.no_grad():
        predicted(spec, network, torch.tensor([[0.0, 0.7, 0.7], [0.3, 0.3, 0.3]]))
    assert calls[0]["sigma"].tolist() == pytest.approx([700.0, 300.0])
    assert calls[0]["timestep"].shape == (2, 12)
    assert calls[0]["timestep"][0].tolist() == pytest.approx([0.0] * 4 + [700.0] * 8)


@pytest.mark.parametrize("targets", [None, ["to_q", "to_out.0"], [r"(?i)(?s).*\.TO_[kv]"]])
def test_no_layer_of_sound_gets_a_lora(
    targets: list[str] | None, tiny_repo: Callable[..., Path], tmp_path: Path
) -> None:
    """Nor has the file a key of one."""
    spec = spec_of(tiny_repo("ltx2"))
    network: Any = spec.transformer_on_meta()
    chosen = list(spec.facts.lora_targets) if targets is None else targets
    make_trainable(network, TrainingSection(rank=2, lora_alpha=2, target_modules=chosen))
    names = [*trainable_parameters(network)]
    assert {name.split(".")[2] for name in names} == {"attn1", "attn2"}
    weights = {name.replace(".default", ""): torch.ones(p.shape) for name, p in trainable_parameters(network).items()}
    (path,) = spec.save_lora(tmp_path, weights, network.peft_config["default"].to_dict())
    with safe_open(path, framework="pt") as file:
        assert len([*file.keys()]) == len(names)
        assert not [name for name in file.keys() if any(part in name for part in SOUND)]  # noqa: SIM118
        assert file.metadata()["base_model_version"] == "LTX-2.0"
    with refused_options(("--target_modules", "unknown")):
        make_trainable(spec.transformer_on_meta(), TrainingSection(rank=2, target_modules=["audio_attn1.to_q"]))


def test_full_finetuning_leaves_sound_as_it_is(tiny_repo: Callable[..., Path]) -> None:
    network = spec_of(tiny_repo("ltx2")).transformer_on_meta()
    make_trainable(network, TrainingSection(training_type="full-finetune"))
    trained = trainable_parameters(network)
    assert {n for n, _ in network.named_parameters()} - {*trained} == {
        n for n, _ in network.named_parameters() if any(part in n for part in SOUND)
    }


def test_a_lora_of_another_version_is_told(
    tiny_repo: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec, other = spec_of(tiny_repo("ltx2", "2.0")), spec_of(tiny_repo("ltx2", "2.3"))
    network: Any = spec.transformer_on_meta()
    make_trainable(network, TrainingSection(rank=2, lora_alpha=2, target_modules=["attn1.to_q"]))
    weights = {name.replace(".default", ""): torch.ones(p.shape) for name, p in trainable_parameters(network).items()}
    (path,) = spec.save_lora(tmp_path, weights, network.peft_config["default"].to_dict())
    spec.read_lora(path)
    assert not caplog.records
    other.read_lora(path)
    other.read_lora(path)  # to check it, and to load it
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_layers_of_sound_in_a_lora_are_counted(
    tiny_repo: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = spec_of(tiny_repo("ltx2"))
    network: Any = spec.transformer_on_meta()
    network.add_adapter(LoraConfig(r=2, target_modules=["attn1.to_q", "audio_attn1.to_q"]))
    weights = {name: torch.ones(tensor.shape) for name, tensor in get_peft_model_state_dict(network).items()}
    (path,) = spec.save_lora(tmp_path, weights, network.peft_config["default"].to_dict())
    attach_lora(path, spec.load_transformer(torch.float32), spec=spec)
    assert " 2 layers" in capsys.readouterr().out


def test_the_prompt_comes_before_the_learned_tokens(tiny_repo: Callable[..., Path]) -> None:
    """In the order of Lightricks' code: without attention in the connector, each token is that of its place."""
    spec = spec_of(tiny_repo("ltx2", "2.3"))
    encoders = spec.load_text_encoders()
    connectors: Any = encoders["connectors"]
    states, mask = torch.randn(1, 256, 96, generator=torch.Generator().manual_seed(0)), torch.zeros(1, 256)
    mask[:, -3:] = 1  # padding is on the left
    connectors.video_connector.transformer_blocks = torch.nn.ModuleList()
    tokens = connectors(states, mask.long())[0][0]
    learned = connectors.video_connector.learnable_registers.repeat(2, 1)
    norm = connectors.video_connector.norm_out
    torch.testing.assert_close(tokens[3:], norm(learned)[3:])
    assert not torch.allclose(tokens[:3], norm(learned)[:3])


def test_samples_with_a_last_frame_in_its_place(tiny_repo: Callable[..., Path]) -> None:
    """Clean at time 0 in every call of the network, as in training; and kept."""
    spec = spec_of(tiny_repo("ltx2"))
    network = spec.load_transformer(torch.float32)
    pipeline = spec.pipeline(network, spec.load_vae(), FlowMatchEulerDiscreteScheduler())
    pipeline.set_progress_bar_config(disable=True)
    rows = PromptEmbeds({"prompt_embeds": torch.zeros(2, *spec.text_shapes()["prompt_embeds"])})
    calls: list[dict[str, Any]] = []
    network.register_forward_hook(lambda _, args, kwargs, out: calls.append(dict(kwargs)), with_kwargs=True)
    request = SampleRequest(17, 64, 64, 24.0, 3, 1.0, last_image=Image.new("RGB", (64, 64), (250, 10, 10)))
    for given in (request, replace(request, image=Image.new("RGB", (64, 64), (10, 10, 250)))):
        calls.clear()
        spec.sample(pipeline, rows.rows([0]), rows.rows([1]), given, torch.Generator().manual_seed(1))
        latents = torch.stack([call["hidden_states"][0].view(3, 4, -1) for call in calls])
        times = torch.stack([call["timestep"][0].view(3, -1) for call in calls])
        assert all(call["isolate_modalities"] for call in calls)
        for frame, is_clean in enumerate([given.image is not None, False, True]):
            assert torch.equal(latents[:, frame], latents[:1, frame].expand_as(latents[:, frame])) == is_clean
            assert bool((times[:, frame] == 0).all()) == is_clean


@pytest.mark.parametrize("tokens", [1024, 8000, 62000])
def test_noise_levels_are_those_of_the_authors_trainer(tokens: int) -> None:
    """Level by level, from the same random numbers, by its formula in float64; the shift is not clamped."""
    config = DiffusionSection(flow_weighting_scheme="shifted_logit_normal", flow_resolution_shifting=True)
    scheduler = {"base_shift": 0.95, "max_shift": 2.05, "base_image_seq_len": 1024, "max_image_seq_len": 4096}
    levels = NoiseLevels(config, is_flow=True, scheduler_config=scheduler)
    u = levels.sample([torch.Generator().manual_seed(seed) for seed in range(2000)], tokens)
    mu = 0.95 + (tokens - 1024) * (2.05 - 0.95) / (4096 - 1024)
    low, high = (1 / (1 + math.exp(-(mu + q))) for q in (-2.5758, 3.0902))
    uniform = 0
    for seed, level in enumerate(u.tolist()):
        generator = torch.Generator().manual_seed(seed)
        z = float(torch.randn((), generator=generator))
        v, choice = (float(torch.rand((), generator=generator)) for _ in range(2))
        stretched = (1 / (1 + math.exp(-(mu + z))) - low) / (high - low)
        expected = min(max(stretched if stretched >= 1e-3 else 2e-3 - stretched, 0.0), 1.0)
        uniform += choice <= 0.1
        assert level == pytest.approx(expected if choice > 0.1 else 1e-3 + (1 - 1e-3) * v, abs=1e-5)
    assert 150 < uniform < 250


def test_other_networks_are_refused() -> None:
    read = get_family("ltx2").read
    assert (read({}).version, read({"transformer": {"cross_attn_mod": True}}).version) == ("LTX-2.0", "LTX-2.3")
    assert read({}).defaults["validation_negative_prompt"] == DEFAULT_NEGATIVE_PROMPT
    with refused("unsupported", "LTX-2.5"):
        read({"transformer": {"cross_attn_mod": True, "ff_bias": False}})
    for part, other in (
        ("transformer", {"patch_size": 2}),
        ("connectors", {"video_connector_num_learnable_registers": None}),
    ):
        with refused("unsupported"):
            read({part: other})


@pytest.mark.parametrize("version", VERSIONS)
def test_a_lora_run_holds_no_layers_of_sound(version: str, tiny_repo: Callable[..., Path]) -> None:
    """The prediction and the gradients are the same without them, bit for bit; full finetuning writes them."""
    spec = spec_of(tiny_repo("ltx2", version))
    times = torch.tensor([[0.0, 0.7, 0.7], [0.3, 0.3, 0.3]])
    training = TrainingSection(rank=2, lora_alpha=2, target_modules=[*spec.facts.lora_targets])
    whole, light = spec.load_transformer(torch.float32), spec.load_transformer(torch.float32)
    make_trainable(light, training)
    layers = {layer: [name for name, _ in whole.named_parameters() if layer in name] for layer in spec.unused_layers}
    assert all(layers.values())
    assert {name for name, _ in light.named_parameters()}.isdisjoint(chain.from_iterable(layers.values()))
    whole.add_adapter(light.peft_config["default"], adapter_name="default")  # type: ignore[operator, union-attr, index]
    whole.load_state_dict(light.state_dict(), strict=False)
    results = []
    for network in (whole, light):
        out = predicted(spec, network, times)
        out.square().sum().backward()
        grads = {name: p.grad for name, p in trainable_parameters(network).items()}
        results.append((out, grads))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1].keys() == results[1][1].keys()
    assert all(torch.equal(results[0][1][name], grad) for name, grad in results[1][1].items())
    full = spec.transformer_on_meta()
    names = {name for name, _ in full.named_parameters()}
    make_trainable(full, TrainingSection(training_type="full-finetune"))
    assert {name for name, _ in full.named_parameters()} == names
