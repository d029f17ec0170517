"""SkyReels-V2: what its kinds differ in from Wan, and diffusion forcing against diffusers' pipelines and networks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from derived import KEYS, SEED, Setting, normalize
from diffusers import AutoencoderKLWan, SkyReelsV2Transformer3DModel, UniPCMultistepScheduler, WanTransformer3DModel
from PIL import Image
from refusals import refused, refused_options
from torch import Tensor

from finetrainers.config.errors import ConfigError
from finetrainers.config.load import load_config
from finetrainers.config.sections import ModelSection
from finetrainers.models.batch import Batch, PromptEmbeds, SampleRequest, VideoMeta
from finetrainers.models.families.skyreels_v2 import read, sample_problem, window_lengths
from finetrainers.models.files.original import original_layout
from finetrainers.models.registry import get_family
from finetrainers.models.skyreels_v2 import SkyReelsV2Spec
from finetrainers.models.spec import ModelSpec
from finetrainers.models.tiny_skyreels_v2 import build_skyreels_v2
from finetrainers.plan.preflight import preflight
from finetrainers.runs.training import train
from finetrainers.testing import same_calls
from finetrainers.utils.seeding import derive_seed

FORCING = {"model_index": {"_class_name": "SkyReelsV2DiffusionForcingPipeline"}}
LATENT_FRAMES = 5


def spec_of(repo: Path) -> SkyReelsV2Spec:
    section = ModelSection(
        model_name="skyreels_v2", pretrained_model_name_or_path=str(repo), text_encoder_dtype="fp32",
        transformer_dtype="fp32", vae_dtype="fp32", part=["image_encoder=,fp32"],
    )  # fmt: skip
    spec = get_family("skyreels_v2").load(section)
    assert isinstance(spec, SkyReelsV2Spec)
    return spec


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_kinds_are_read_from_configs() -> None:
    plain, rated = {"transformer": {"in_channels": 16}}, {"transformer": {"inject_sample_info": True}}
    animated = read({"transformer": {"in_channels": 36, "image_dim": 1280}})
    assert [read(c).first_frame for c in (plain, rated, {**plain, **FORCING})] == ["none", "tokens", "tokens"]
    assert read({**rated, "model_index": {"_class_name": "SkyReelsV2Pipeline"}}).first_frame == "none"
    assert (animated.first_frame, animated.defaults["flow_shift"], read(plain).defaults["flow_shift"]) == (
        "channels", 5.0, 8.0,
    )  # fmt: skip
    assert read({}).first_frame == "unknown"
    with refused("unsupported", "skyreels_v2", "48"):
        read({"transformer": {"in_channels": 48}})


def test_a_scheduler_without_a_shift_has_the_recommended_one(
    tiny_repo: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(tiny_repo("skyreels_v2"))
    for stated, used in ((1.0, 8.0), (3.0, 3.0)):
        scheduler = UniPCMultistepScheduler(use_flow_sigmas=True, flow_shift=stated)
        monkeypatch.setattr(ModelSpec, "load_scheduler", lambda _, scheduler=scheduler: scheduler)
        assert spec.load_scheduler().config.flow_shift == used


def test_windows_and_blocks_of_a_sample_are_checked() -> None:
    assert [window_lengths(*sizes) for sizes in ((97, 97, None), (177, 97, 17), (193, 97, 17))] == [
        [25], [25, 25], [25, 25, 9],
    ]  # fmt: skip
    valid: tuple[tuple[Mapping[str, int], int], ...] = (
        ({}, 257), ({"ar_step": 5, "causal_block_size": 5}, 97), ({"overlap_history": 17}, 177),
        ({"overlap_history": 17, "base_num_frames": 97, "causal_block_size": 5, "addnoise_condition": 20}, 177),
    )  # fmt: skip
    assert [sample_problem(*case) for case in valid] == [None] * 4
    invalid: tuple[tuple[Mapping[str, int], int, str], ...] = (
        ({"causal_block_size": 0}, 97, "causal_block_size"), ({"causal_block_size": 4}, 97, "causal_block_size"),
        ({"base_num_frames": 97}, 98, "overlap_history"), ({"overlap_history": 97}, 97, "overlap_history"),
        ({"overlap_history": 97, "base_num_frames": 98}, 177, "overlap_history"), ({"overlap_history": 0}, 97, "over"),
        ({"overlap_history": 2, "base_num_frames": 4}, 97, "overlap_history"),
        ({"overlap_history": 17, "base_num_frames": 97, "causal_block_size": 5}, 193, "causal_block_size"),
        ({"addnoise_condition": 61}, 97, "addnoise_condition"),
    )  # fmt: skip
    assert [name in (sample_problem(*case) or "") for *case, name in invalid] == [True] * 9  # type: ignore[arg-type]


def test_layers_have_the_names_of_wan_and_the_rates_those_of_skywork() -> None:
    sizes = {"num_layers": 1, "in_channels": 36, "image_dim": 8, "added_kv_proj_dim": 24, "num_attention_heads": 2}
    with torch.device("meta"):
        wan = WanTransformer3DModel(**sizes, attention_head_dim=12, ffn_dim=8)
        own = SkyReelsV2Transformer3DModel(**sizes, attention_head_dim=12, ffn_dim=8, inject_sample_info=True)
    layouts = [original_layout(type(n).__name__, list(n.state_dict())) for n in (wan, own)]
    assert layouts[0][1] == layouts[1][1]
    names = [set(layout) for layout, _ in layouts]
    assert names[1] - names[0] == {
        "fps_embedding.weight",
        *(f"fps_projection.{n}.{x}" for n in (0, 2) for x in ("weight", "bias")),
    }
    assert names[0] <= names[1]
    assert {n: layouts[0][0][n] for n in names[0]} == {n: layouts[1][0][n] for n in names[0]}


def test_clips_of_a_batch_have_their_own_frame_rates_and_levels(tiny_repo: Callable[..., Path]) -> None:
    """diffusers' network takes one frame rate for a batch."""
    spec = spec_of(tiny_repo("skyreels_v2", "df"))
    network = spec.load_transformer(torch.float32)
    x, t = drawn(3, 16, LATENT_FRAMES, 4, 4), torch.rand(3, LATENT_FRAMES, generator=torch.Generator().manual_seed(1))
    text, rates = PromptEmbeds({"prompt_embeds": drawn(3, 512, 32, seed=2)}), (24.0, 16.0, 30.0)
    stock = SkyReelsV2Transformer3DModel.from_pretrained(spec.config.pretrained_model_name_or_path + "/transformer")
    with torch.no_grad():
        batch = spec.predict(network, x, t, text, VideoMeta(torch.tensor(rates)))
        rows = [
            stock(
                hidden_states=x[i : i + 1], timestep=1000 * t[i : i + 1], fps=[int(rate != 16)],
                encoder_hidden_states=text["prompt_embeds"][i : i + 1], enable_diffusion_forcing=True,
                return_dict=False,
            )[0]
            for i, rate in enumerate(rates)
        ]  # fmt: skip
        equal = spec.predict(network, x, t[:, 0], text, VideoMeta(torch.full((3,), 24.0)))
        levels = t[:, :1].expand(-1, LATENT_FRAMES)
        assert torch.equal(equal, spec.predict(network, x, levels, text, VideoMeta(torch.full((3,), 24.0))))
        same_rate = spec.predict(network, x[1:2], t[1:2], text.rows([1]), VideoMeta(torch.tensor([24.0])))
    torch.testing.assert_close(batch, torch.cat(rows), rtol=1e-5, atol=1e-5)
    assert (same_rate - rows[1]).abs().max() > 1e-3


def forcing_pipeline(spec: SkyReelsV2Spec, *, image_to_video: bool = False) -> Any:
    pipeline = spec.pipeline(
        spec.load_transformer(torch.float32), spec.load_vae(), spec.load_scheduler(), image_to_video=image_to_video
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.rotating
@pytest.mark.parametrize(
    "arguments",
    [
        {"ar_step": 2, "causal_block_size": 1}, {"ar_step": 2, "causal_block_size": 5},
        {"base_num_frames": 9, "overlap_history": 5, "addnoise_condition": 20},
    ],
)  # fmt: skip
def test_asynchronous_and_long_samples_are_the_pipelines(
    arguments: dict[str, int], tiny_repo: Callable[..., Path]
) -> None:
    """Causal blocks end with the sample: a mask in the next training step would be another network's."""
    spec = spec_of(tiny_repo("skyreels_v2", "df"))
    texts = spec.encode_text(spec.load_text_encoders(), ["a red ball", ""])
    request = SampleRequest(17, 32, 32, 16.0, 3, 2.0, extra=arguments)
    pipeline = forcing_pipeline(spec)
    own = spec.sample(pipeline, texts.rows([0]), texts.rows([1]), request, torch.Generator().manual_seed(3))
    assert pipeline.transformer.config.num_frame_per_block == 1
    stock = diffusers.DiffusionPipeline.from_pretrained(spec.config.pretrained_model_name_or_path, dtype=torch.float32)
    stock.set_progress_bar_config(disable=True)
    torch.manual_seed(3)
    expected = stock(
        "a red ball", negative_prompt="", height=32, width=32, num_frames=17, num_inference_steps=3, guidance_scale=2.0,
        fps=16, generator=torch.Generator().manual_seed(3), output_type="np", **arguments,
    ).frames[0]  # fmt: skip
    torch.testing.assert_close(torch.from_numpy(own), torch.from_numpy(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.rotating
@pytest.mark.parametrize("block", [1, 5])
def test_given_frames_stay_clean_in_every_call(block: int, tiny_repo: Callable[..., Path]) -> None:
    spec = spec_of(tiny_repo("skyreels_v2", "df"))
    texts = PromptEmbeds({"prompt_embeds": drawn(2, 512, 32)})
    arguments = {"ar_step": 1, "causal_block_size": block}
    image, last = Image.new("RGB", (32, 32), (250, 10, 10)), Image.new("RGB", (32, 32), (10, 10, 250))
    plain = SampleRequest(17, 32, 32, 24.0, 3, 1.0, extra=arguments)
    requests = {
        (0,): replace(plain, image=image), (4,): replace(plain, last_image=last),
        (0, 4): replace(plain, image=image, last_image=last),
        (0, 1, 4): replace(plain, prefix=drawn(1, 3, 5, 32, 32).clamp(-1, 1), last_image=last),
    }  # fmt: skip
    for given, request in requests.items():
        pipeline = forcing_pipeline(spec, image_to_video=request.starts_from_image)
        calls: list[dict[str, Any]] = []
        pipeline.transformer.register_forward_pre_hook(
            lambda _, args, kwargs, calls=calls: calls.append(dict(kwargs)), with_kwargs=True
        )
        spec.sample(pipeline, texts.rows([0]), texts.rows([1]), request, torch.Generator().manual_seed(1))
        latents = torch.stack([call["hidden_states"][0] for call in calls])
        times = torch.stack([call["timestep"][0] for call in calls])
        for frame in range(LATENT_FRAMES):
            is_fixed = torch.equal(latents[:, :, frame], latents[:1, :, frame].expand_as(latents[:, :, frame]))
            assert (is_fixed, bool((times[:, frame] == 0).all())) == (frame in given, frame in given)
        assert not vars(pipeline).keys() & {"prepare_latents", "generate_timestep_matrix"}


@pytest.mark.rotating
@pytest.mark.parametrize("version", ["t2v", "i2v", "df"])
def test_other_frame_rates_in_the_network(version: Any, tmp_path: Path) -> None:
    """Pipelines of one noise level give it no rate, so that a sample here forces it; forcing works without, too."""
    repo = build_skyreels_v2(tmp_path, version=version, inject_sample_info=version != "df")
    stock = diffusers.DiffusionPipeline.from_pretrained(repo, dtype=torch.float32)
    assert len(same_calls(spec_of(repo), stock)) == (8 if version == "df" else 4)


def refused_runs(options: dict[str, Any]) -> list[str]:
    try:
        preflight(load_config(**options))
        train(load_config(**options, dry_run=True))
    except ConfigError as error:
        return [problem.where for problem in error.problems]
    return []


def test_options_that_diffusion_forcing_has_no_hook_for_are_refused(
    options: Callable[..., dict], tmp_path: Path
) -> None:
    """By the checkpoint's hooks: its samples are several trajectories, and its times are those of frames."""
    (tmp_path / "p.txt").write_text("a\n")
    rewarded: dict[str, Any] = {
        "method": "grpo", "reward": ["brightness"], "prompts": str(tmp_path / "p.txt"), "rollout_size": "9x32x32",
        "data_root": None, "video_resolution_buckets": None, "sampling_steps": 3,
    }  # fmt: skip
    for version, expected in (("df", ["--method"]), ("t2v", [])):
        values = options("skyreels_v2", version=version, **rewarded)
        values = {name: value for name, value in values.items() if rewarded.get(name, 0) is not None}
        assert refused_runs(values) == expected
    asynchronous = {"validation_prompts": "a@@@17x32x32", "validation_pipeline_arguments": ["ar_step=2"]}
    assert refused_runs(options("skyreels_v2", version="df", **asynchronous)) == []
    for version, argument, kind in (
        ("t2v", "ar_step=2", "unsupported"), ("df", "ar_steps=2", "unknown"), ("df", "causal_block_size=2", "invalid"),
    ):  # fmt: skip
        asynchronous["validation_pipeline_arguments"] = [argument]
        with refused_options(("--validation_pipeline_arguments", kind)):  # type: ignore[arg-type]
            preflight(load_config(**options("skyreels_v2", version=version, **asynchronous)))


@pytest.mark.rotating
def test_the_loss_is_that_of_the_stock_network_in_float64(tiny_repo: Callable[..., Path]) -> None:
    """With a level for each latent frame, given first frames, masks, a loss weight, and frame rates that differ."""
    repo, frames = tiny_repo("skyreels_v2", "df"), 9
    setting = Setting(repo, "skyreels_v2", given="first=0.5", flow_weighting_scheme="sigma_sqrt", flow_shift=3.0)
    spec, method = setting.spec, setting.method
    del spec.predict  # its own again
    calls: list[dict[str, Any]] = []
    network = spec.load_transformer(torch.float32)
    network.register_forward_pre_hook(lambda _, args, given: calls.append(given), with_kwargs=True)
    clips = torch.randint(0, 256, (3, 3, frames, 64, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    moments = spec.encode_clip(spec.load_clip_encoders(), clips, None)["moments"]
    text, shape, rates = drawn(3, 512, 32, seed=1), spec.latent_shape(moments), (24.0, 16.0, 24.0)
    mask = torch.rand(3, 1, *shape[1:], generator=torch.Generator().manual_seed(5))
    meta = VideoMeta(torch.tensor(rates))
    batch = Batch(moments, PromptEmbeds({"prompt_embeds": text}), meta, KEYS, {"moments": moments}, mask=mask)
    loss, _ = method.loss(network, batch)

    vae = AutoencoderKLWan.from_pretrained(repo / "vae").double()
    stock = SkyReelsV2Transformer3DModel.from_pretrained(repo / "transformer").double()
    expected, given = 0.0, 0
    for row, key in enumerate(KEYS):
        generator = torch.Generator().manual_seed(derive_seed(SEED, "train", *key))
        noise, eps = (torch.randn(shape, generator=generator).double() for _ in range(2))
        with torch.no_grad():
            posterior = vae.encode(clips[row : row + 1].double() / 127.5 - 1).latent_dist
        x0 = normalize("skyreels_v2", vae, posterior.mean[0] + posterior.std[0] * noise)
        levels = calls[0]["timestep"][row].double() / 1000
        given += int(levels[0] == 0)
        assert len(set(levels.tolist())) == shape[1]
        level = levels[:, None, None]
        with torch.no_grad():
            prediction = stock(
                hidden_states=((1 - level) * x0 + level * eps)[None], timestep=1000 * levels[None],
                encoder_hidden_states=text[row : row + 1].double(), enable_diffusion_forcing=True,
                fps=[int(rates[row] != 16)], return_dict=False,
            )[0][0]  # fmt: skip
        is_trained = (levels > 0).double()
        weights = torch.where(levels > 0, levels, 1.0).pow(-2).clamp(max=10.0) * is_trained
        error = (mask[row].double() * (prediction - (eps - x0)) ** 2).mean(dim=(0, 2, 3))
        expected += float((error * weights).sum() / (mask[row].double().mean(dim=(0, 2, 3)) * is_trained).sum()) / 3
    assert 0 < given < 3
    assert float(loss.detach()) == pytest.approx(expected, rel=3e-6)
