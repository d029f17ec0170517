"""LTX-Video against diffusers itself: same text, same latents, same network calls, same files."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from diffusers import AutoencoderKLLTXVideo, LTXImageToVideoPipeline, LTXPipeline, LTXVideoTransformer3DModel
from peft import LoraConfig, get_peft_model_state_dict
from refusals import refused_options
from safetensors import safe_open
from torch import nn

from finetrainers.config.sections import ModelSection
from finetrainers.diffusion.process import FlowMatching
from finetrainers.models.ltx_video import LTXVideoSpec
from finetrainers.models.registry import get_family
from finetrainers.models.spec import PromptEmbeds, SampleRequest, VideoMeta

PROMPTS = ["a red ball moves left", "a dog"]
FRAMES, HEIGHT, WIDTH = 17, 64, 96  # latents of 3 x 2 x 3
FP32 = {"text_encoder_dtype": "fp32", "transformer_dtype": "fp32", "vae_dtype": "fp32"}


@pytest.fixture(scope="module")
def repo(tiny_repo):
    return tiny_repo("ltx_video")


@pytest.fixture(scope="module")
def spec(repo):
    return get_family("ltx_video").load(
        ModelSection(model_name="ltx_video", pretrained_model_name_or_path=str(repo), **FP32)
    )


@pytest.fixture(scope="module")
def encoders(spec):
    return spec.load_text_encoders()


@pytest.fixture(scope="module")
def vae(spec):
    return spec.load_vae()


@pytest.fixture(scope="module")
def transformer(spec):
    return spec.load_transformer(torch.float32)


@pytest.fixture
def fresh_transformer(spec):
    return spec.load_transformer(torch.float32)


@pytest.fixture(scope="module")
def conditions(spec, encoders):
    return spec.encode_text(encoders, PROMPTS)


@pytest.fixture
def stock(repo):
    pipe = LTXPipeline.from_pretrained(repo, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def noisy():
    return torch.randn(2, 128, 3, 2, 3, generator=torch.Generator().manual_seed(3))


def meta(*fps: float) -> VideoMeta:
    return VideoMeta(fps=torch.tensor(fps))


def record_calls(transformer: nn.Module) -> list[tuple[dict, torch.Tensor]]:
    """Every later call's keyword arguments and output."""
    calls: list[tuple[dict, torch.Tensor]] = []
    transformer.register_forward_hook(
        lambda _module, _args, kwargs, output: calls.append((dict(kwargs), output[0])), with_kwargs=True
    )
    return calls


def assert_same_call(ours: dict, theirs: dict) -> None:
    assert {name for name, value in theirs.items() if value is not None} == set(ours)
    for name in ("hidden_states", "encoder_hidden_states", "encoder_attention_mask", "timestep"):
        assert ours[name].dtype == theirs[name].dtype, name
        assert torch.equal(ours[name], theirs[name]), name
    for name in ("num_frames", "height", "width"):
        assert ours[name] == theirs[name], name
    time, *space = ours["rope_interpolation_scale"]
    time_expected, *space_expected = theirs["rope_interpolation_scale"]
    assert space == space_expected
    assert torch.equal(time.flatten(), torch.tensor(time_expected, dtype=torch.float32).expand(time.numel()))


# ---- text ------------------------------------------------------------------------------------------------------


def test_text_is_what_the_pipeline_computes(spec, encoders, conditions, stock):
    with torch.no_grad():
        embeds, mask, _, _ = stock.encode_prompt(PROMPTS, do_classifier_free_guidance=False)
    assert torch.equal(conditions["prompt_embeds"], embeds)
    assert torch.equal(conditions["prompt_attention_mask"], mask)
    assert conditions["prompt_attention_mask"].dtype == torch.bool
    assert conditions["prompt_embeds"].shape == (2, 128, 32)
    assert not conditions["prompt_embeds"].requires_grad


def test_long_prompts_are_cut_at_128_tokens(spec, encoders):
    encoded = spec.encode_text(encoders, ["red " * 300])
    assert encoded["prompt_embeds"].shape[1] == 128
    assert encoded["prompt_attention_mask"].all()


# ---- latents ---------------------------------------------------------------------------------------------------


def test_latents_and_decode_are_the_pipelines(spec, vae):
    video = torch.rand(2, 3, FRAMES, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(1)) * 2 - 1
    stats = spec.vae_stats(vae)
    assert stats.mean.abs().max() > 0.05  # the check below would not see a forgotten normalization otherwise
    moments = spec.encode_video(vae, video)
    assert moments.shape == (2, 256, 3, 2, 3)

    with torch.no_grad():
        mode = vae.encode(video).latent_dist.mode()
    expected = LTXPipeline._normalize_latents(mode, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
    latents = spec.latents(moments, None, stats)
    assert latents.dtype == torch.float32
    torch.testing.assert_close(latents, expected)

    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        distribution = vae.encode(video).latent_dist
    sampled = LTXPipeline._normalize_latents(
        distribution.mean + distribution.std * noise, vae.latents_mean, vae.latents_std, vae.config.scaling_factor
    )
    torch.testing.assert_close(spec.latents(moments, noise, stats), sampled)

    with torch.no_grad():
        decoded = vae.decode(
            LTXPipeline._denormalize_latents(expected, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
        ).sample
    frames = spec.decode(vae, latents, stats)
    assert frames.shape == video.shape
    torch.testing.assert_close(frames, (decoded / 2 + 0.5).clamp(0, 1), atol=1e-5, rtol=1e-5)


def test_statistics_outlive_the_vae(spec):
    vae = spec.load_vae()
    stats = spec.vae_stats(vae)
    mean = stats.mean.clone()
    vae.latents_mean.zero_()
    assert torch.equal(stats.mean, mean)


@pytest.mark.parametrize("slicing", [False, True])
def test_timestep_conditioned_vae_decodes_like_the_pipeline(spec, stock, slicing):
    torch.manual_seed(0)
    vae = AutoencoderKLLTXVideo(  # the decoder layout of 0.9.1
        block_out_channels=(8, 8, 8, 8), layers_per_block=(1, 1, 1, 1, 1), decoder_block_out_channels=(8, 16, 32),
        decoder_layers_per_block=(1, 1, 1, 1), decoder_spatio_temporal_scaling=(True, True, True),
        decoder_inject_noise=(True, True, True, False), upsample_residual=(True, True, True),
        upsample_factor=(2, 2, 2), timestep_conditioning=True,
    ).eval()  # fmt: skip
    for name, parameter in vae.named_parameters():
        if "per_channel_scale" in name:
            nn.init.normal_(parameter, std=0.3)
    vae.use_slicing = slicing
    latents = torch.randn(2, 128, 2, 2, 2, generator=torch.Generator().manual_seed(4))
    stats = spec.vae_stats(vae)
    stock.register_modules(vae=vae)

    def put_latents(pipe, step, timestep, kwargs):
        torch.manual_seed(0)  # of the noise that the decoder injects
        return {"latents": pipe._pack_latents(latents[:1])}

    expected = stock(
        prompt="a dog", height=64, width=64, num_frames=9, num_inference_steps=2, output_type="pt",
        callback_on_step_end=put_latents, generator=torch.Generator().manual_seed(0),
    ).frames  # fmt: skip
    state = torch.random.get_rng_state()
    ours = spec.decode(vae, latents, stats)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert ours.shape == (2, 3, 9, 64, 64)
    torch.testing.assert_close(ours[0].transpose(0, 1), expected[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(spec.decode(vae, latents, stats), ours)


# ---- the network call ------------------------------------------------------------------------------------------


def test_predict_makes_the_pipelines_call(spec, stock, encoders, conditions):
    calls = record_calls(stock.transformer)
    start = torch.randn(1, 18, 128, generator=torch.Generator().manual_seed(5))
    stock(
        PROMPTS[0], height=HEIGHT, width=WIDTH, num_frames=FRAMES, frame_rate=24, num_inference_steps=2,
        guidance_scale=1.0, latents=start, output_type="latent",
    )  # fmt: skip
    assert len(calls) == 2
    for theirs, output in list(calls):
        calls.clear()
        x = LTXPipeline._unpack_latents(theirs["hidden_states"], 3, 2, 3)
        sigma = theirs["timestep"] / 1000
        with torch.no_grad():
            prediction = spec.predict(stock.transformer, x, sigma, conditions.rows([0]), meta(24.0))
        ((ours, _),) = calls
        torch.testing.assert_close(ours.pop("timestep"), theirs.pop("timestep"), rtol=1e-6, atol=0)
        ours["timestep"] = theirs["timestep"] = torch.zeros(1)
        ours.pop("return_dict"), theirs.pop("return_dict")
        assert_same_call(ours, theirs)
        assert prediction.shape == x.shape
        assert prediction.dtype == torch.float32
        torch.testing.assert_close(prediction, LTXPipeline._unpack_latents(output, 3, 2, 3), atol=1e-5, rtol=1e-5)


def test_per_frame_times_make_the_image_pipelines_call(spec, repo, conditions):
    pipe = LTXImageToVideoPipeline.from_pretrained(repo, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    calls = record_calls(pipe.transformer)
    pipe(
        image=torch.rand(1, 3, HEIGHT, WIDTH), prompt=PROMPTS[0], height=HEIGHT, width=WIDTH, num_frames=FRAMES,
        num_inference_steps=2, guidance_scale=1.0, output_type="latent", generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    theirs, output = calls[0]
    calls.clear()
    times = torch.tensor([[0.0, 1.0, 1.0]])  # the first step is at sigma = 1
    x = LTXPipeline._unpack_latents(theirs["hidden_states"], 3, 2, 3)
    with torch.no_grad():
        prediction = spec.predict(pipe.transformer, x, times, conditions.rows([0]), meta(25.0))
    assert_same_call(calls[0][0], theirs)
    assert theirs["timestep"].shape == (1, 18)
    torch.testing.assert_close(prediction, LTXPipeline._unpack_latents(output, 3, 2, 3), atol=1e-5, rtol=1e-5)


def test_a_constant_time_per_frame_is_one_time(spec, transformer, conditions, noisy):
    t = torch.tensor([0.3, 0.8])
    with torch.no_grad():
        one = spec.predict(transformer, noisy, t, conditions, meta(25.0, 25.0))
        each = spec.predict(transformer, noisy, t[:, None].expand(2, 3), conditions, meta(25.0, 25.0))
    torch.testing.assert_close(each, one, atol=1e-5, rtol=1e-5)


def test_batch_of_two_frame_rates_is_two_calls(spec, transformer, conditions, noisy):
    t = torch.tensor([0.3, 0.8])
    with torch.no_grad():
        both = spec.predict(transformer, noisy, t, conditions, meta(25.0, 8.0))
        for row, fps in enumerate((25.0, 8.0)):
            alone = spec.predict(transformer, noisy[row : row + 1], t[row : row + 1], conditions.rows([row]), meta(fps))
            torch.testing.assert_close(both[row : row + 1], alone, atol=1e-5, rtol=1e-5)
        other = spec.predict(transformer, noisy, t, conditions, meta(25.0, 25.0))
    assert not torch.allclose(both[1], other[1], atol=1e-4)  # the frame rate matters at all


def test_predict_repeats_itself_and_leaves_its_inputs_alone(spec, transformer, conditions, noisy):
    t, rates = torch.tensor([0.3, 0.8]), meta(25.0, 24.0)
    inputs = [noisy, t, rates.fps, *conditions.tensors.values()]
    before = [value.clone() for value in inputs]
    with torch.no_grad():
        first = spec.predict(transformer, noisy, t, conditions, rates)
        second = spec.predict(transformer, noisy, t, conditions, rates)
    assert torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


def test_network_runs_in_the_conditions_dtype_and_returns_fp32(spec, noisy, conditions):
    transformer = spec.load_transformer(torch.bfloat16)
    calls = record_calls(transformer)
    with torch.no_grad():
        prediction = spec.predict(
            transformer, noisy, torch.tensor([0.3, 0.8]), conditions.to("cpu", torch.bfloat16), meta(25.0, 25.0)
        )
    assert calls[0][0]["hidden_states"].dtype == torch.bfloat16
    assert calls[0][0]["timestep"].dtype == torch.float32
    assert prediction.dtype == torch.float32


def test_gradients_reach_the_network(spec, fresh_transformer, conditions, noisy):
    out = spec.predict(fresh_transformer, noisy, torch.tensor([0.3, 0.8]), conditions, meta(25.0, 25.0))
    out.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in fresh_transformer.parameters())


def test_predict_needs_no_vae(repo, tmp_path, transformer, conditions, noisy):
    """Compression comes from the VAE's config file, also where checkpoints state it explicitly."""
    (tmp_path / "vae").mkdir()
    config = json.loads((repo / "vae" / "config.json").read_text())
    stated = {**config, "spatial_compression_ratio": 16, "temporal_compression_ratio": 4}
    (tmp_path / "vae" / "config.json").write_text(json.dumps(stated))
    spec = get_family("ltx_video").load(
        ModelSection(model_name="ltx_video", pretrained_model_name_or_path=str(repo), vae_id=str(tmp_path))
    )
    calls: list[dict] = []
    handle = transformer.register_forward_pre_hook(
        lambda _module, _args, kwargs: calls.append(dict(kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        spec.predict(transformer, noisy, torch.tensor([0.3, 0.8]), conditions, meta(8.0, 2.0))
    handle.remove()
    time, height, width = calls[0]["rope_interpolation_scale"]
    assert time.flatten().tolist() == [0.5, 2.0]
    assert (height, width) == (16, 16)


# ---- description, sampling, saving -----------------------------------------------------------------------------


def test_process_geometry_and_meta_network(spec, vae, transformer):
    assert spec.process(spec.load_scheduler()) == FlowMatching()
    assert spec.load_scheduler().config.shift_terminal == 0.1
    assert spec.facts.geometry == get_family("ltx_video").facts.geometry
    on_meta = spec.transformer_on_meta()
    assert {n: p.shape for n, p in on_meta.named_parameters()} == {
        n: p.shape for n, p in transformer.named_parameters()
    }
    assert all(p.is_meta for p in on_meta.parameters())
    assert all(hasattr(transformer, name) for name in spec.blocks)


def test_parts_are_frozen_in_eval_mode_and_in_their_dtypes(repo):
    spec = get_family("ltx_video").load(
        ModelSection(
            model_name="ltx_video", pretrained_model_name_or_path=str(repo), vae_dtype="fp16", enable_slicing=True,
            enable_tiling=True,
        )
    )  # fmt: skip
    vae, encoder = spec.load_vae(), spec.load_text_encoders().modules["text_encoder"]
    assert vae.dtype == torch.float16
    assert encoder.dtype == torch.bfloat16
    assert vae.use_slicing
    assert vae.use_tiling
    for module in (vae, encoder):
        assert not module.training
        assert not any(p.requires_grad for p in module.parameters())


def test_eight_bit_text_encoder_stores_less_and_stays_close(repo, conditions):
    spec = get_family("ltx_video").load(
        ModelSection(
            model_name="ltx_video", pretrained_model_name_or_path=str(repo), text_encoder_dtype="float8_e4m3fn"
        )
    )
    encoders = spec.load_text_encoders()
    stored = {p.dtype for p in encoders.modules["text_encoder"].parameters()}
    assert torch.float8_e4m3fn in stored
    encoded = spec.encode_text(encoders, PROMPTS)["prompt_embeds"]
    assert encoded.dtype == torch.bfloat16
    expected = conditions["prompt_embeds"]
    assert (encoded.float() - expected).norm() / expected.norm() < 0.1


def test_a_missing_part_says_where_it_was_looked_for(tmp_path):
    (tmp_path / "vae").mkdir()
    spec = get_family("ltx_video").load(
        ModelSection(model_name="ltx_video", pretrained_model_name_or_path=str(tmp_path))
    )
    with refused_options(("--pretrained_model_name_or_path", "not_found")) as caught:
        spec.load_transformer(torch.float32)
    assert "'transformer'" in str(caught.value)
    assert ": vae)" in str(caught.value)
    with refused_options(("--pretrained_model_name_or_path", "unreadable")) as caught:
        spec.load_vae()
    assert f"{str(tmp_path)!r} (subfolder 'vae')" in str(caught.value)
    hub = get_family("ltx_video").load(
        ModelSection(
            model_name="ltx_video", pretrained_model_name_or_path="nobody/nothing", revision="v9", variant="fp16",
            cache_dir=tmp_path / "cache",
        )
    )  # fmt: skip
    with refused_options(("--pretrained_model_name_or_path", "unavailable")) as caught:
        hub.load_transformer(torch.float32)
    assert "'nobody/nothing'" in str(caught.value)
    assert "revision 'v9'" in str(caught.value)
    replaced = get_family("ltx_video").load(
        ModelSection(
            model_name="ltx_video", pretrained_model_name_or_path=str(tmp_path), transformer_id="nobody/nothing"
        )
    )
    with refused_options(("--transformer_id", "unavailable")) as caught:
        replaced.load_transformer(torch.float32)
    assert "'nobody/nothing'" in str(caught.value)


def test_replacement_may_be_the_part_itself(repo, transformer, tmp_path):
    transformer.save_pretrained(tmp_path / "mine", variant=None)
    section = ModelSection(model_name="ltx_video", pretrained_model_name_or_path=str(repo))
    for place in (tmp_path / "mine", repo):
        spec = get_family("ltx_video").load(section.model_copy(update={"transformer_id": str(place)}))
        loaded = spec.load_transformer(torch.float32)
        assert torch.equal(loaded.proj_in.weight, transformer.proj_in.weight)


@pytest.mark.parametrize("image", [False, True])
def test_pipeline_with_encoded_text_samples_like_the_stock_one(spec, repo, transformer, vae, encoders, image):
    negative = spec.encode_text(encoders, [""])
    request = SampleRequest(
        num_frames=9, height=64, width=64, frame_rate=24.0, num_inference_steps=2, guidance_scale=2.5,
        image=torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0)) if image else None,
        extra={"output_type": "pt"},
    )  # fmt: skip
    ours = spec.pipeline(transformer, vae, spec.load_scheduler(), image_to_video=image)
    call = spec.pipeline_call(spec.encode_text(encoders, PROMPTS[:1]), negative, request)
    stock = (LTXImageToVideoPipeline if image else LTXPipeline).from_pretrained(repo, torch_dtype=torch.float32)
    for pipe in (ours, stock):
        pipe.set_progress_bar_config(disable=True)
    frames = ours(**call, generator=torch.Generator().manual_seed(1)).frames
    plain = {"image": request.image} if image else {}
    expected = stock(
        prompt=PROMPTS[0], negative_prompt="", height=64, width=64, num_frames=9, frame_rate=24.0,
        num_inference_steps=2, guidance_scale=2.5, output_type="pt", generator=torch.Generator().manual_seed(1),
        **plain,
    ).frames  # fmt: skip
    torch.testing.assert_close(frames, expected, atol=1e-5, rtol=1e-5)
    default = spec.pipeline_call(negative, negative, replace(request, guidance_scale=None))
    assert "guidance_scale" not in default


def test_lora_with_alpha_unequal_rank_reloads_in_the_stock_pipeline(
    spec, stock, fresh_transformer, conditions, noisy, tmp_path
):
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=12, target_modules=list(spec.facts.lora_targets), init_lora_weights=False)
    fresh_transformer.add_adapter(config)
    t = torch.tensor([0.3, 0.8])
    with torch.no_grad():
        expected = spec.predict(fresh_transformer, noisy, t, conditions, meta(25.0, 25.0))
    spec.save_lora(
        tmp_path, get_peft_model_state_dict(fresh_transformer), fresh_transformer.peft_config["default"].to_dict()
    )
    file = tmp_path / "pytorch_lora_weights.safetensors"
    with safe_open(file, "pt") as opened:
        saved = json.loads(opened.metadata()["lora_adapter_metadata"])
    assert saved["transformer.r"] == 4
    assert saved["transformer.lora_alpha"] == 12
    assert saved["transformer.target_modules"] == sorted(spec.facts.lora_targets)

    with torch.no_grad():
        base = spec.predict(stock.transformer, noisy, t, conditions, meta(25.0, 25.0))
        stock.load_lora_weights(str(tmp_path))
        loaded = spec.predict(stock.transformer, noisy, t, conditions, meta(25.0, 25.0))
    assert not torch.allclose(base, expected, atol=1e-3)
    torch.testing.assert_close(loaded, expected, atol=1e-5, rtol=1e-5)
    assert stock.transformer.transformer_blocks[0].attn1.to_q.scaling == {"default_0": 3.0}

    again = spec.load_transformer(torch.float32)
    spec.load_lora(again, file)
    with torch.no_grad():
        torch.testing.assert_close(
            spec.predict(again, noisy, t, conditions, meta(25.0, 25.0)), expected, atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("max_shard_size", [10**10, 10**5])
def test_full_weights_reload_in_the_stock_class(spec, transformer, tmp_path, max_shard_size, monkeypatch):
    monkeypatch.setattr("finetrainers.models.files.saving.MAX_SHARD_SIZE", max_shard_size)
    weights = {name: (value + 1.0).bfloat16() for name, value in transformer.state_dict().items()}
    spec.save_full(tmp_path, transformer, weights)
    index = tmp_path / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    assert index.is_file() == (max_shard_size == 10**5)
    loaded = LTXVideoTransformer3DModel.from_pretrained(tmp_path / "transformer", torch_dtype=torch.bfloat16)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, weights[name]), name


def test_the_saved_class_is_the_stock_one_however_the_network_is_sharded(spec, tmp_path):
    """FSDP2 puts a class of its own in front of the network's."""
    transformer = spec.load_transformer(torch.float32)
    transformer.__class__ = type("FSDPLTXVideoTransformer3DModel", (type(transformer),), {})
    spec.save_full(tmp_path, transformer, transformer.state_dict())
    saved = json.loads((tmp_path / "transformer" / "config.json").read_text())
    assert saved["_class_name"] == "LTXVideoTransformer3DModel"
    assert str(spec.config.pretrained_model_name_or_path) not in json.dumps(saved)  # it is published


def test_conditions_join_into_batches(spec, encoders, conditions):
    joined = PromptEmbeds.cat([spec.encode_text(encoders, [p]) for p in PROMPTS])
    torch.testing.assert_close(joined["prompt_embeds"], conditions["prompt_embeds"], atol=1e-6, rtol=1e-5)


def test_registered(spec, repo):
    section = ModelSection(model_name="ltx_video", pretrained_model_name_or_path=str(repo))
    assert isinstance(get_family("ltx_video").load(section), LTXVideoSpec)
    assert spec.facts.first_frame == get_family("ltx_video").facts.first_frame == "tokens"
