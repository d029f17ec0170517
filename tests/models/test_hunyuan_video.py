"""HunyuanVideo against diffusers' own pipeline and untouched transformer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
import torch.nn.functional as F
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, HunyuanVideoTransformer3DModel
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from peft import LoraConfig, get_peft_model_state_dict
from refusals import refused

from finetrainers.config.sections import ModelSection
from finetrainers.diffusion.process import FlowMatching
from finetrainers.models.hunyuan_video import HunyuanVideoSpec
from finetrainers.models.registry import get_family
from finetrainers.models.spec import ModelComponents, PromptEmbeds, SampleRequest, VideoMeta

SHORT, LONG = "a red ball", "a blue square moves slowly to the left over the dark sea at night"
FRAMES, HEIGHT, WIDTH = 9, 64, 48
META = VideoMeta(fps=torch.tensor([24.0]))


@pytest.fixture(scope="module")
def repo(tiny_repo) -> Path:
    return tiny_repo("hunyuan_video")


@pytest.fixture(scope="module")
def spec(repo) -> HunyuanVideoSpec:
    return get_family("hunyuan_video").load(section(repo))


@pytest.fixture(scope="module")
def pipe(repo):
    """The stock pipeline around an untouched transformer."""
    pipe = DiffusionPipeline.from_pretrained(repo, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def transformer(spec):
    return spec.load_transformer(torch.float32)


@pytest.fixture(scope="module")
def conditions(spec) -> PromptEmbeds:
    """Of a short and a long prompt."""
    return spec.encode_text(spec.load_text_encoders(), [SHORT, LONG])


def section(repo: Path, **options) -> ModelSection:
    return ModelSection(
        model_name="hunyuan_video",
        pretrained_model_name_or_path=str(repo),
        text_encoder_dtype="fp32",
        text_encoder_2_dtype="fp32",
        vae_dtype="fp32",
        **options,
    )


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def latents(batch: int = 1, seed: int = 0) -> torch.Tensor:
    return normal(batch, 16, (FRAMES - 1) // 4 + 1, HEIGHT // 8, WIDTH // 8, seed=seed)


def recorder(module: torch.nn.Module) -> list[dict]:
    """Every later call of the module: its keyword arguments as the caller gave them, and its output."""
    calls: list[dict] = []
    module.register_forward_pre_hook(lambda _, args, kwargs: calls.append(dict(kwargs)), with_kwargs=True, prepend=True)
    module.register_forward_hook(lambda _, args, output: calls[-1].update(output=output[0]))
    return calls


@pytest.fixture
def masks(monkeypatch) -> list:
    """The `attn_mask` of every attention that runs during the test."""
    seen = []
    attention = F.scaled_dot_product_attention

    def spy(query, key, value, attn_mask=None, **kwargs):
        seen.append(attn_mask)
        return attention(query, key, value, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return seen


# ---- conditioning and latents ----------------------------------------------------------------------------------------


def test_text_is_encoded_as_the_pipeline_does(pipe, conditions):
    with torch.no_grad():
        embeds, pooled, mask = pipe.encode_prompt([SHORT, LONG])
    torch.testing.assert_close(conditions["prompt_embeds"], embeds, rtol=0, atol=0)
    torch.testing.assert_close(conditions["pooled_prompt_embeds"], pooled, rtol=0, atol=0)
    torch.testing.assert_close(conditions["prompt_attention_mask"], mask.bool())
    assert embeds.shape[1] == 256
    lengths = conditions["prompt_attention_mask"].sum(1)
    assert 0 < lengths[0] < lengths[1] < 256


def test_a_tokenizer_that_pads_left_is_refused(spec, repo, tmp_path):
    tokenizer = spec.load_text_encoders().modules["tokenizer"]
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(str(tmp_path))
    with refused("unsupported", '"padding_side": "right"'):
        get_family("hunyuan_video").load(section(repo, tokenizer_id=str(tmp_path))).load_text_encoders()


def test_latents_are_scaled_and_decoded_as_the_pipeline_does(spec, pipe):
    vae = spec.load_vae()
    stats = spec.vae_stats(vae)
    video = normal(1, 3, FRAMES, 32, 32).clamp(-1, 1)
    with torch.no_grad():
        distribution = pipe.vae.encode(video).latent_dist
    noise = normal(*distribution.mean.shape, seed=1)
    moments = spec.encode_video(vae, video)
    scale = pipe.vae.config.scaling_factor
    torch.testing.assert_close(spec.latents(moments, None, stats), distribution.mean * scale)
    torch.testing.assert_close(
        spec.latents(moments, noise, stats), (distribution.mean + distribution.std * noise) * scale
    )

    x = 2 * normal(*distribution.mean.shape, seed=2)
    with torch.no_grad():
        decoded = pipe.vae.decode(x / scale, return_dict=False)[0]
    expected = pipe.video_processor.postprocess_video(decoded, output_type="pt").transpose(1, 2)
    actual = spec.decode(vae, x, stats)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    assert actual.min() >= 0
    assert actual.max() <= 1


# ---- the network -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pipeline_call(pipe) -> dict:
    """Inputs and output of the untouched transformer in one step of the stock pipeline, without guidance."""
    calls = recorder(pipe.transformer)
    pipe(
        prompt=SHORT,
        num_frames=FRAMES,
        height=HEIGHT,
        width=WIDTH,
        num_inference_steps=1,
        sigmas=[0.37],
        guidance_scale=1.0,
        latents=latents(),
        output_type="latent",
    )
    return calls[0]


def predict_recorded(spec, pipeline_call, conditions) -> tuple[dict, torch.Tensor]:
    transformer = spec.load_transformer(torch.float32)
    calls = recorder(transformer)
    with torch.no_grad():
        prediction = spec.predict(transformer, latents(), pipeline_call["timestep"] / 1000, conditions, META)
    return calls[0], prediction


def test_predict_feeds_the_network_what_the_pipeline_feeds_it(spec, conditions, pipeline_call):
    ours, prediction = predict_recorded(spec, pipeline_call, conditions.rows([0]))
    names = ("hidden_states", "encoder_hidden_states", "encoder_attention_mask", "pooled_projections", "guidance")
    for name in (*names, "timestep"):
        expected = pipeline_call[name]
        torch.testing.assert_close(ours[name].to(expected.dtype), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(prediction, pipeline_call["output"], rtol=0, atol=1e-5)


def test_the_prediction_depends_on_text_noise_level_and_latents(spec, transformer, conditions):
    def predict(x, t, row):
        with torch.no_grad():
            return spec.predict(transformer, x, torch.tensor([t]), conditions.rows([row]), META)

    base = predict(latents(), 0.4, 0)
    for other in (predict(latents(), 0.4, 1), predict(latents(), 0.8, 0), predict(latents(seed=1), 0.4, 0)):
        assert (base - other).abs().max() > 1e-3


def test_predict_repeats_itself_and_leaves_its_inputs_alone(spec, transformer, conditions):
    x, t = latents(2), torch.tensor([0.2, 0.9])
    before = [x.clone(), t.clone(), *(v.clone() for v in conditions.tensors.values())]
    with torch.no_grad():
        first = spec.predict(transformer, x, t, conditions, META)
        second = spec.predict(transformer, x, t, conditions, META)
    assert torch.equal(first, second)
    assert first.shape == x.shape
    for now, then in zip([x, t, *conditions.tensors.values()], before, strict=True):
        assert torch.equal(now, then)


def test_a_batch_equals_its_rows_one_by_one(spec, transformer, conditions, masks):
    x, t = latents(2), torch.tensor([0.2, 0.9])
    with torch.no_grad():
        batch = spec.predict(transformer, x, t, conditions, META)
        # Two lengths in one batch: real masks are needed and used.
        assert all(mask is not None for mask in masks)
        rows = [spec.predict(transformer, x[i : i + 1], t[i : i + 1], conditions.rows([i]), META) for i in (0, 1)]
    torch.testing.assert_close(batch, torch.cat(rows), rtol=0, atol=1e-5)


def test_bf16_weights_see_exact_noise_levels(spec, conditions):
    transformer = spec.load_transformer(torch.bfloat16)
    calls = recorder(transformer)
    t = torch.tensor([0.4321])
    with torch.no_grad():
        prediction = spec.predict(transformer, latents(), t, conditions.rows([0]), META)
    assert prediction.dtype == torch.bfloat16
    assert calls[0]["hidden_states"].dtype == calls[0]["guidance"].dtype == torch.bfloat16
    torch.testing.assert_close(calls[0]["timestep"], t * 1000)


def test_a_checkpoint_without_guidance_embedding_gets_none(spec, conditions, repo):
    config = HunyuanVideoTransformer3DModel.load_config(repo, subfolder="transformer")
    transformer = HunyuanVideoTransformer3DModel.from_config({**config, "guidance_embeds": False})
    calls = recorder(transformer)
    with torch.no_grad():
        spec.predict(transformer, latents(), torch.tensor([0.5]), conditions.rows([0]), META)
    assert calls[0]["guidance"] is None


# ---- attention without masks -----------------------------------------------------------------------------------------


def trainable(transformer, *, checkpointing: bool):
    """With a LoRA, the same in every transformer it is given to."""
    transformer.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    for i, (name, parameter) in enumerate(transformer.named_parameters()):
        parameter.requires_grad_("lora" in name)
        if "lora" in name:
            parameter.data = 0.1 * normal(*parameter.shape, seed=i)
    if checkpointing:
        transformer.enable_gradient_checkpointing()
    return transformer.train()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_gradients_without_masks_equal_those_with_padding_and_masks(spec, repo, conditions, masks, checkpointing):
    stock = trainable(
        HunyuanVideoTransformer3DModel.from_pretrained(repo, subfolder="transformer"), checkpointing=False
    )
    ours = trainable(spec.load_transformer(torch.float32), checkpointing=checkpointing)
    x, t, one = latents(), torch.tensor([0.3]), conditions.rows([0])

    outputs, seen = [], []
    for transformer in (stock, ours):
        masks.clear()
        output = spec.predict(transformer, x, t, one, META)
        output.square().sum().backward()
        outputs.append(output.detach())
        seen.append(list(masks))
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)
    expected = {name: p.grad for name, p in stock.named_parameters() if p.grad is not None}
    actual = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    assert expected.keys() == actual.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-4, msg=name)

    # Two double, two single and one refiner attention; recomputing runs the blocks' four again.
    assert [mask is None for mask in seen[0]] == [False] * 5
    assert [mask is None for mask in seen[1]] == [True] * (9 if checkpointing else 5)


def test_a_kernel_that_refuses_masks_runs(spec, repo, conditions):
    stock = HunyuanVideoTransformer3DModel.from_pretrained(repo, subfolder="transformer")
    ours = spec.load_transformer(torch.float32)
    arguments = (latents(), torch.tensor([0.3]), conditions.rows([0]), META)
    try:
        for transformer in (stock, ours):
            transformer.set_attention_backend("_native_flash")
        with pytest.raises(ValueError, match="attn_mask"):
            spec.predict(stock, *arguments)
        output = spec.predict(ours, *arguments)
    finally:
        # Setting it on a network also sets the process-wide default.
        _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)
    for transformer in (stock, ours):
        transformer.reset_attention_backend()
    torch.testing.assert_close(output, spec.predict(stock, *arguments), rtol=0, atol=1e-5)


def test_the_text_of_a_batch_of_one_is_cut_for_positional_calls_too(spec, transformer, conditions):
    lengths = []
    handle = transformer.context_embedder.register_forward_pre_hook(
        lambda _, args: lengths.append(args[0].shape[1]), prepend=True
    )
    with torch.no_grad():
        for rows in ([0], [1], [0, 1]):
            chosen = conditions.rows(rows)
            transformer(
                latents(len(rows)),
                torch.full((len(rows),), 300.0),
                chosen["prompt_embeds"],
                chosen["prompt_attention_mask"],
                chosen["pooled_prompt_embeds"],
                torch.full((len(rows),), 1000.0),
            )
    handle.remove()
    short, long = conditions["prompt_attention_mask"].sum(1).tolist()
    assert lengths == [short, long, conditions["prompt_attention_mask"].shape[1]]


def test_a_prediction_does_not_depend_on_the_rest_of_its_batch(spec, transformer, conditions):
    """Bit for bit: what was sampled in one batch is replayed in another."""
    lengths = []
    hook = transformer.context_embedder.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    x, t = latents(2), torch.tensor([0.3, 0.6])
    with torch.no_grad():
        beside_long = spec.predict(transformer, x, t, conditions.rows([0, 1]), META)
        beside_short = spec.predict(transformer, x, t, conditions.rows([0, 0]), META)
        spec.predict(transformer, x[:1], t[:1], conditions.rows([0]), META)
    hook.remove()
    assert torch.equal(beside_long[0], beside_short[0])
    assert not torch.equal(beside_long[1], beside_short[1])
    # Sums over other numbers of masked tokens may round differently, so the text keeps its padding beside any other.
    padded, of_the_short = (
        conditions["prompt_attention_mask"].shape[1],
        int(conditions["prompt_attention_mask"][0].sum()),
    )
    assert of_the_short < padded
    assert lengths == [padded, padded, of_the_short]


def test_the_host_is_asked_how_long_the_text_is(spec, transformer, conditions):
    """Reading the mask in a forward pass would wait for the device, and break torch.compile's graph."""
    lengths = []
    hook = transformer.context_embedder.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    one = conditions.rows([0])
    told = one.to("cpu")
    assert told.lengths is not None
    other = PromptEmbeds(one.tensors, (told.lengths[0] + 1,))  # not what the mask says
    with torch.no_grad():
        found = [spec.predict(transformer, latents(1), torch.tensor([0.3]), c, META) for c in (one, told, other)]
    hook.remove()
    assert torch.equal(found[0], found[1])
    assert lengths == [told.lengths[0], told.lengths[0], told.lengths[0] + 1]


def test_a_prompt_without_tokens_is_an_error(spec, transformer, conditions):
    mask = conditions["prompt_attention_mask"].clone()
    mask[1] = False
    empty = PromptEmbeds({**conditions.tensors, "prompt_attention_mask": mask})
    with refused("invalid", "row 1 "):
        spec.predict(transformer, latents(2), torch.tensor([0.3, 0.3]), empty, META)


# ---- loading ---------------------------------------------------------------------------------------------------------


def test_the_transformer_on_meta_has_the_same_parameters(spec, transformer):
    meta = spec.transformer_on_meta()
    assert all(p.is_meta for p in meta.parameters())
    assert {n: p.shape for n, p in meta.named_parameters()} == {n: p.shape for n, p in transformer.named_parameters()}


def test_the_scheduler_is_the_checkpoints_and_the_process_is_a_flow(spec):
    scheduler = spec.load_scheduler()
    assert isinstance(scheduler, FlowMatchEulerDiscreteScheduler)
    assert scheduler.config.shift == 7.0
    assert spec.process(scheduler) == FlowMatching()


# ---- sampling and saving ---------------------------------------------------------------------------------------------


def request(**options) -> SampleRequest:
    return SampleRequest(num_frames=5, height=32, width=48, frame_rate=24.0, num_inference_steps=2, **options)


@pytest.fixture(scope="module")
def skyreels(tiny_repo) -> HunyuanVideoSpec:
    """SkyReels-V1 from an image."""
    return get_family("hunyuan_video").load(section(tiny_repo("hunyuan_video", version="i2v")))


def test_an_image_is_seen_as_its_pipeline_shows_it(skyreels, conditions, pipeline_call):
    """One step, and whole samples with classifier-free guidance, equal the pipeline's own."""
    pipe = DiffusionPipeline.from_pretrained(skyreels.config.pretrained_model_name_or_path, dtype=torch.float32)
    assert type(pipe) is skyreels.pipeline_class is skyreels.image_pipeline_class
    calls = recorder(pipe.transformer)
    image = PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8))
    size = {"num_frames": FRAMES, "height": HEIGHT, "width": WIDTH, "num_inference_steps": 2}
    seed = torch.Generator().manual_seed
    expected = pipe(image, SHORT, negative_prompt=LONG, **size, output_type="pt", generator=seed(3)).frames

    given = calls[0]["hidden_states"]
    frame = given[:, 16:, :1]
    assert frame.abs().min() > 0
    assert not given[:, 16:, 1:].any()
    meta = VideoMeta(fps=META.fps, extra={"first_frame": frame}, guidance=skyreels.facts.guidance)
    transformer = skyreels.load_transformer(torch.float32)
    with torch.no_grad():
        ours = skyreels.predict(transformer, given[:, :16], calls[0]["timestep"] / 1000, conditions.rows([0]), meta)
        without = skyreels.predict(transformer, given[:, :16], calls[0]["timestep"] / 1000, conditions.rows([0]), META)
    torch.testing.assert_close(ours, calls[0]["output"], rtol=0, atol=1e-5)
    assert not torch.allclose(ours, without, atol=1e-3)

    built = skyreels.pipeline(transformer, skyreels.load_vae(), skyreels.load_scheduler(), image_to_video=True)
    asked = SampleRequest(**size, frame_rate=24.0, image=image)
    call = skyreels.pipeline_call(conditions.rows([0]), conditions.rows([1]), asked)
    actual = built(**call, output_type="pt", generator=seed(3)).frames
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_a_first_frame_for_a_text_to_video_checkpoint_is_refused(spec, transformer, conditions):
    meta = VideoMeta(fps=META.fps, extra={"first_frame": latents()[:, :, :1]})
    with refused("unsupported", "hunyuan_video", "first frame"):
        spec.predict(transformer, latents(), torch.tensor([0.4]), conditions.rows([0]), meta)


@pytest.mark.parametrize(
    ("extra", "stock"),
    [
        ({}, {}),
        ({"true_cfg_scale": 3.0}, {"true_cfg_scale": 3.0, "negative_prompt": LONG}),
    ],
)
def test_sampling_from_conditions_equals_the_pipeline_from_prompts(spec, repo, transformer, conditions, extra, stock):
    pipe = DiffusionPipeline.from_pretrained(repo, dtype=torch.float32)
    size = {"num_frames": 5, "height": 32, "width": 48, "num_inference_steps": 2}
    expected = pipe(
        SHORT, **size, **stock, guidance_scale=4.0, output_type="pt", generator=torch.Generator().manual_seed(3)
    ).frames
    ours = spec.pipeline(transformer, spec.load_vae(), spec.load_scheduler())
    call = spec.pipeline_call(conditions.rows([0]), conditions.rows([1]), request(guidance_scale=4.0, extra=extra))
    actual = ours(**call, output_type="pt", generator=torch.Generator().manual_seed(3)).frames
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_the_pipeline_takes_prompts_when_given_encoders(spec, transformer):
    encoders: ModelComponents = spec.load_text_encoders()
    pipe = spec.pipeline(transformer, spec.load_vae(), spec.load_scheduler(), encoders)
    frames = pipe(SHORT, num_frames=5, height=32, width=32, num_inference_steps=1, output_type="pt").frames
    assert frames.shape == (1, 5, 3, 32, 32)


def test_images_are_refused(spec, transformer, conditions):
    with refused("unsupported", "hunyuan_video", "validation_images"):
        spec.pipeline(transformer, None, None, image_to_video=True)
    with refused("unsupported", "hunyuan_video", "validation_images"):
        spec.pipeline_call(conditions.rows([0]), conditions.rows([1]), request(image=object()))


def test_a_saved_lora_is_loaded_by_the_pipeline_with_its_alpha(spec, repo, conditions, tmp_path):
    arguments = (latents(), torch.tensor([0.3]), conditions.rows([0]), META)
    trained = spec.load_transformer(torch.float32)
    base = spec.predict(trained, *arguments)
    trained.add_adapter(LoraConfig(r=4, lora_alpha=12, target_modules=list(spec.facts.lora_targets)))
    for i, (name, parameter) in enumerate(trained.named_parameters()):
        if "lora" in name:
            parameter.data = 0.1 * normal(*parameter.shape, seed=i)
    spec.save_lora(tmp_path, get_peft_model_state_dict(trained), trained.peft_config["default"].to_dict())
    assert [p.name for p in tmp_path.iterdir()] == ["pytorch_lora_weights.safetensors"]

    pipe = DiffusionPipeline.from_pretrained(repo, dtype=torch.float32)
    pipe.load_lora_weights(tmp_path)
    again = spec.load_transformer(torch.float32)
    spec.load_lora(again, tmp_path / "pytorch_lora_weights.safetensors")
    with torch.no_grad():
        expected = spec.predict(trained, *arguments)
        assert (expected - base).abs().max() > 1e-2
        torch.testing.assert_close(spec.predict(pipe.transformer, *arguments), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(spec.predict(again, *arguments), expected, rtol=0, atol=1e-5)
