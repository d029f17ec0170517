"""Complete runs of families outside this repository, each with a specialty that `ModelSpec` supports."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from refusals import refused_options
from torch import Tensor
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel, T5EncoderModel, T5TokenizerFast

from finetrainers.config.errors import ConfigError
from finetrainers.config.facts import Configs, Facts
from finetrainers.config.geometry import Geometry
from finetrainers.config.load import load_config
from finetrainers.models import common, compiling, family
from finetrainers.models.families.ltx_video import read as ltx_video
from finetrainers.models.family import Family
from finetrainers.models.ltx_video import LTXVideoSpec
from finetrainers.models.spec import ModelComponents, ModelSpec, PromptEmbeds, VAEStats, to_unit_range
from finetrainers.plan.preflight import preflight
from finetrainers.runs.training import TrainResult
from finetrainers.training.callbacks import validation
from finetrainers.training.sampling import sample_seed


def register(monkeypatch: pytest.MonkeyPatch, **entry: Any) -> None:
    """A family of this name, for one test."""
    known = Family(spec=f"{__name__}:{entry.pop('spec').__name__}", **entry)
    monkeypatch.setattr(family.FAMILIES, "registered", {**family.families(), known.name: known})


class Continuation(LTXVideoSpec):
    """Predicts what follows a clip's first latent frame, each frame at a noise level of its own."""

    noise_per = "frame"
    calls: ClassVar[list[tuple[tuple[int, ...], Tensor]]] = []

    def section(self, latents: Tensor, generators: Sequence[torch.Generator]) -> tuple[Tensor, dict[str, Tensor]]:
        return latents[:, :, 1:], {"history": latents[:, :, :1]}

    def predict(self, transformer: Any, x: Tensor, t: Tensor, conditions: Any, meta: Any) -> Tensor:
        self.calls.append((tuple(x.shape), t.detach().clone()))
        history = meta.extra["history"]
        clip, times = torch.cat([history, x], dim=2), torch.cat([torch.zeros_like(t[:, :1]), t], dim=1)
        return super().predict(transformer, clip, times, conditions, meta)[:, :, 1:]


@pytest.mark.rotating
def test_a_section_is_trained_with_a_noise_level_for_every_frame(
    options: Callable[..., dict],
    run: Callable[..., Any],
    make_clips: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Continuation, "calls", [])
    register(
        monkeypatch, name="continuation", spec=Continuation, transformer="LTXVideoTransformer3DModel",
        read=lambda configs: replace(ltx_video(configs), first_frame="none"),
    )  # fmt: skip
    done = run(
        **options(
            train_steps=20, batch_size=2, eval_num_items=1, eval_steps=20, validation_prompts=None,
            video_resolution_buckets=["17x64x64"], data_root=str(make_clips(3, frames=17)),
        )
        | {"model_name": "continuation"}
    )  # fmt: skip
    shapes, times = zip(*Continuation.calls, strict=True)
    assert {shape[2:] for shape in shapes} == {(2, 2, 2)}
    drawn = torch.cat([t for t in times if t.shape[0] == 2])
    assert (drawn[:, 0] != drawn[:, 1]).all()
    losses = [row["loss"] for row in done.metrics if "loss" in row]
    assert len(losses) == 20
    [before, *_, after] = [row["eval_loss"] for row in done.metrics if "eval_loss" in row]
    assert after < before


class Animated(LTXVideoSpec):
    """Sees a clip's first frame through an image encoder, whose states join the text."""

    parts: ClassVar = {
        **LTXVideoSpec.parts, "image_encoder": CLIPVisionModel, "image_processor": CLIPImageProcessor,
    }  # fmt: skip
    clip_version = "animated"
    seen: ClassVar[list[Any]] = []

    def encode_clip(self, encoders: ModelComponents, video: Tensor, *others: Any, **more: Any) -> dict[str, Tensor]:
        encoder, processor = encoders["image_encoder"], encoders["image_processor"]
        self.seen.append((encoder.dtype, encoder.post_layernorm.bias[0].item()))
        frames = [
            frame.permute(1, 2, 0).float().cpu().numpy() for frame in (to_unit_range(video[:, :, :1])[:, :, 0] + 1) / 2
        ]
        pixels = processor(frames, return_tensors="pt", do_rescale=False).pixel_values
        with torch.no_grad():
            states = encoder(pixels.to(encoder.device, encoder.dtype)).last_hidden_state
        return {**super().encode_clip(encoders, video, *others, **more), "image_states": states}

    def condition(self, batch: Any, *others: Any) -> Any:
        meta, trained = super().condition(batch, *others)
        return replace(meta, extra={**meta.extra, "image_states": batch.clip["image_states"]}), trained

    def predict(self, transformer: Any, x: Tensor, t: Tensor, conditions: Any, meta: Any) -> Tensor:
        states, mask = meta.extra["image_states"].float(), conditions["prompt_attention_mask"]
        text = torch.cat([conditions["prompt_embeds"], states], dim=1)
        mask = torch.cat([mask, mask.new_ones(states.shape[:2])], dim=1)
        self.seen.append(tuple(text.shape))
        both = PromptEmbeds({"prompt_embeds": text, "prompt_attention_mask": mask})
        return super().predict(transformer, x, t, both, meta)


@pytest.mark.rotating
def test_an_image_encoder_encodes_clips_and_is_replaced_by_name(
    options: Callable[..., dict], run: Callable[..., Any], tiny_repo: Callable[..., Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(Animated, "seen", [])
    repo, other = tmp_path / "animated", tmp_path / "other"
    shutil.copytree(tiny_repo("ltx_video"), repo)
    width = json.loads((repo / "transformer" / "config.json").read_text())["caption_channels"]
    for folder, bias in ((repo / "image_encoder", 0.25), (other, 0.5)):
        vision = CLIPVisionConfig(
            hidden_size=width, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=32
        )
        encoder = CLIPVisionModel(vision)
        torch.nn.init.constant_(encoder.post_layernorm.bias, bias)
        encoder.save_pretrained(folder)
    size = {"height": 32, "width": 32}
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size).save_pretrained(repo / "image_processor")
    register(
        monkeypatch, name="animated", spec=Animated, transformer="LTXVideoTransformer3DModel",
        read=lambda configs: replace(
            ltx_video(configs), first_frame="none", clip_parts=("vae", "image_encoder", "image_processor")
        ),
    )  # fmt: skip
    values = options(clips=2, precompute_conditions=True, train_steps=1, precomputation_dir=str(tmp_path / "cache")) | {
        "model_name": "animated", "pretrained_model_name_or_path": str(repo)
    }  # fmt: skip
    for name, part, expected in (
        ("a", [], (torch.bfloat16, 0.25)),
        ("b", [f"image_encoder={other},fp32"], (torch.float32, 0.5)),
        ("c", ["image_encoder=,fp32"], (torch.float32, 0.25)),
        ("d", ["image_encoder=,fp32"], (torch.float32, 0.25)),
    ):
        Animated.seen.clear()
        if name == "d":
            CLIPImageProcessor(size={"shortest_edge": 40}, crop_size=size).save_pretrained(repo / "image_processor")
        done = run(**values | {"output_dir": str(tmp_path / name), "part": part})
        encoded, predicted = Animated.seen[:-1], Animated.seen[-1]
        assert encoded == [expected] * 2, "each is other tensors, so none is found in the cache"
        assert predicted[2] == width
        assert done.state.step == 1

    def refuse(pattern: str, *part: str) -> None:
        with pytest.raises(ConfigError, match=pattern):
            preflight(load_config(**values | {"part": list(part)}))

    refuse("--part: .*'image_encodr';.*'image_encoder'", "image_encodr=x/y")
    refuse("--part: vae .*--vae_id and --vae_dtype", "vae=x/y")
    refuse("--part: image_processor .*fp32$", "image_processor=,fp32")
    refuse("--part: image_encoder .*once", "image_encoder=,fp32", "image_encoder=,bf16")
    refuse("NAME=PATH, NAME=PATH,DTYPE or NAME=,DTYPE", "image_encoder")
    with refused_options(("--part", "not_found")) as caught:
        preflight(load_config(**values | {"part": [f"image_encoder={tmp_path}/none"]}))
    assert f"{tmp_path}/none" in str(caught.value)
    (repo / "image_encoder" / "model.safetensors").unlink()
    refuse(r"image_encoder .*model\.safetensors")
    shutil.rmtree(repo / "image_processor")
    refuse("'image_processor'")


# ---- two experts, as Wan 2.2's ---------------------------------------------------------------------------------------

BOUNDARY, TOKENS = 0.875, 32


class Wan(ModelSpec):
    parts: ClassVar = {
        "tokenizer": T5TokenizerFast,
        "text_encoder": T5EncoderModel,
        "vae": AutoencoderKLWan,
        "transformer": WanTransformer3DModel,
        "transformer_2": WanTransformer3DModel,
    }
    pipeline_class = WanPipeline
    blocks = ("blocks",)
    calls: ClassVar[list[tuple[Any, float]]] = []

    @torch.no_grad()
    def encode_text(self, encoders: ModelComponents, prompts: Sequence[str]) -> PromptEmbeds:
        pipeline = common.build_pipeline(WanPipeline, encoders.modules)
        embeds, _ = pipeline.encode_prompt(
            list(prompts), do_classifier_free_guidance=False, max_sequence_length=TOKENS, device=torch.device("cpu")
        )
        return PromptEmbeds({"prompt_embeds": embeds})

    def vae_stats(self, vae: Any) -> VAEStats:
        mean, std = (torch.tensor(getattr(vae.config, name)) for name in ("latents_mean", "latents_std"))
        return VAEStats(mean=mean, scale=1 / std)

    def predict(self, transformer: Any, x: Tensor, t: Tensor, conditions: PromptEmbeds, meta: Any) -> Tensor:
        self.calls.append((compiling.unwrap(transformer), t.min().item()))
        text = conditions["prompt_embeds"]
        return transformer(hidden_states=x, timestep=1000 * t, encoder_hidden_states=text, return_dict=False)[0]


def read_wan(configs: Configs) -> Facts:
    boundary = configs.get("model_index", {}).get("boundary_ratio")
    return Facts(Geometry(temporal=4, spatial=8, patch=2, patch_t=1, fps=16.0), boundary=boundary)


@pytest.fixture
def wan(tiny_repo: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny repository with both experts, of a family that is registered for this test."""
    torch.manual_seed(0)
    latents = {"z_dim": 16, "latents_mean": [0.1] * 16, "latents_std": [1.5] * 16}
    shape = {"num_attention_heads": 2, "attention_head_dim": 12, "text_dim": 32, "ffn_dim": 32, "num_layers": 2}
    ltx = tiny_repo("ltx_video")
    encoder = T5EncoderModel.from_pretrained(ltx / "text_encoder")
    shape["text_dim"] = encoder.config.d_model
    WanPipeline(
        tokenizer=T5TokenizerFast.from_pretrained(ltx / "tokenizer"),
        text_encoder=encoder,
        vae=AutoencoderKLWan(base_dim=3, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **latents),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        transformer=WanTransformer3DModel(**shape),
        transformer_2=WanTransformer3DModel(**shape),
        boundary_ratio=BOUNDARY,
    ).save_pretrained(tmp_path / "wan")
    register(monkeypatch, name="wan", spec=Wan, transformer="WanTransformer3DModel", read=read_wan)
    monkeypatch.setattr(Wan, "calls", [])
    return tmp_path / "wan"


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("expert", "training_type"),
    [("high", "lora"), ("low", "lora"), ("low", "full-finetune"), ("high", "full-finetune")],
)
def test_either_expert_is_trained_and_sampled_with_the_other(
    expert: str, training_type: str, wan: Path, options: Callable[..., dict], run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    written: list[np.ndarray] = []
    write = validation.write_sample
    monkeypatch.setattr(validation, "write_sample", lambda *a, **k: written.append(a[2]) or write(*a, **k))
    part, other = ("transformer", "transformer_2") if expert == "high" else ("transformer_2", "transformer")
    done = run(
        **options(
            training_type=training_type, train_steps=3, eval_num_items=1, eval_steps=3, clips=2,
            validation_prompts="a red ball@@@9x64x64", validation_inference_steps=4, validation_guidance_scale=2.0,
        )
        | {"model_name": "wan", "pretrained_model_name_or_path": str(wan), "expert": expert}
    )  # fmt: skip
    levels = [t for _, t in Wan.calls]
    assert all((t >= BOUNDARY) == (expert == "high") for t in levels)
    assert len(levels) > 3
    assert not (done.root / other).exists()

    stock = WanPipeline.from_pretrained(wan)
    card = (done.root / "README.md").read_text()
    if training_type == "lora":
        second = ", load_into_transformer_2=True" if expert == "low" else ""
        assert f'pipe.load_lora_weights("{done.root}"{second})' in card
        stock.load_lora_weights(str(done.root), **({"load_into_transformer_2": True} if second else {}))
    else:
        assert f"pipe = WanPipeline.from_pretrained({json.dumps(str(wan))}, {part}={part}," in card
        trained = WanTransformer3DModel.from_pretrained(done.root / part)
        stock = WanPipeline.from_pretrained(wan, **{part: trained})
    ours = TrainResult(done.state.config, step=3).pipeline("cpu")
    seed = sample_seed(done.state.config.training.seed, "a red ball")
    for pipeline in (stock, ours):
        frames = pipeline(
            prompt="a red ball", num_frames=9, height=64, width=64, num_inference_steps=4, guidance_scale=2.0,
            max_sequence_length=TOKENS, generator=torch.Generator().manual_seed(seed), output_type="np",
        ).frames[0]  # fmt: skip
        assert np.array_equal((frames * 255).round().astype(np.uint8), written[-1])
    base = WanPipeline.from_pretrained(wan)
    assert all(map(torch.equal, getattr(ours, other).state_dict().values(), getattr(base, other).state_dict().values()))


@pytest.mark.rotating
@pytest.mark.parametrize(("method", "expert"), [("grpo", "low"), ("grpo", "high"), ("nft", "low"), ("awm", "high")])
def test_rewards_train_one_expert_at_its_noise_levels(
    method: str, expert: str, wan: Path, run: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("a red ball\n")
    values = {
        "model_name": "wan", "pretrained_model_name_or_path": str(wan), "expert": expert, "method": method,
        "prompts": str(tmp_path / "prompts.txt"), "reward": ["brightness"], "rollout_size": "9x64x64", "rank": 4,
        "output_dir": str(tmp_path / "run"), "sampling_steps": 8, "num_generations": 2, "prompts_per_step": 1,
        "train_steps": 1, "transformer_dtype": "fp32", "vae_dtype": "fp32", "text_encoder_dtype": "fp32",
        "batch_size": 2,
    }  # fmt: skip
    if method == "grpo":
        values |= {"window_size": 0}
    else:
        values |= {"init_same_noise": False}
    done = run(**values)
    trained = done.state.network
    rollout, rest = Wan.calls[:8], Wan.calls[8:]
    assert [t for _, t in rollout] == sorted((t for _, t in rollout), reverse=True)
    own = [(t >= BOUNDARY) == (expert == "high") for _, t in rollout]
    assert any(own)
    assert not all(own)
    assert [network is trained for network, _ in rollout] == own
    assert all((t >= BOUNDARY) == (expert == "high") for _, t in rest)
    assert len(rest) >= 1
    if method == "grpo":
        with pytest.raises(ConfigError, match=r" 6 steps .* expert .*--window_range"):
            run(**values | {"output_dir": str(tmp_path / "other"), "window_size": 6, "window_range": [0.0, 1.0]})
    else:
        with refused_options(("--noise_level_range", "conflict")):
            levels = [0.0, 0.2] if expert == "low" else [0.8, 1.0]
            run(**values | {"output_dir": str(tmp_path / "other"), "noise_level_range": levels})


def test_an_expert_is_chosen_and_replaced(wan: Path, options: Callable[..., dict], tmp_path: Path) -> None:
    values = options() | {"model_name": "wan", "pretrained_model_name_or_path": str(wan)}
    with pytest.raises(ConfigError, match=r"--expert: .* `high` .* 0\.875 .*`low`"):
        preflight(load_config(**values))
    with pytest.raises(ConfigError, match=r"--expert: [^`]*$"):
        preflight(load_config(**options(expert="low")))

    shutil.copytree(wan / "transformer", tmp_path / "mine" / "transformer_2")
    config = load_config(**values, expert="low", transformer_id=str(tmp_path / "mine"))
    spec = preflight(config).family.load(config.model)
    first = WanTransformer3DModel.from_pretrained(wan / "transformer").state_dict()
    for network in (spec.load_transformer(torch.float32), spec.companions["transformer"]):
        assert all(map(torch.equal, network.state_dict().values(), first.values()))
    shutil.rmtree(wan / "transformer")
    with pytest.raises(ConfigError, match="no directory 'transformer'"):
        preflight(config)
