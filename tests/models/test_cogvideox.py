"""Every version of CogVideoX against diffusers' own pipelines and schedulers."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from diffusers import (
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    CogVideoXImageToVideoPipeline,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    DiffusionPipeline,
)
from peft import LoraConfig, get_peft_model_state_dict
from refusals import refused

from finetrainers.config.sections import ModelSection
from finetrainers.models import cogvideox
from finetrainers.models.cogvideox import CogVideoXSpec
from finetrainers.models.registry import get_family
from finetrainers.models.spec import Batch, PromptEmbeds, SampleRequest, VideoMeta

SHORT, LONG = "a red ball", "a blue square moves slowly to the left over the dark sea at night"
META = VideoMeta(fps=torch.tensor([8.0]))
#: "1.5-i2v" is put together here: two latent frames a patch, image channels, an `ofs` embedding, inverted image scale.
VERSIONS = ("2b", "5b", "1.5", "i2v", "1.5-i2v", "control")
IMAGE_VERSIONS = ("i2v", "1.5-i2v")


@dataclass
class Checkpoint:
    """One tiny checkpoint: our spec and transformer, and the stock pipeline that shares no module with them."""

    version: str
    config: ModelSection
    spec: CogVideoXSpec
    transformer: CogVideoXTransformer3DModel
    pipe: CogVideoXPipeline | CogVideoXImageToVideoPipeline
    conditions: PromptEmbeds  # of a short and a long prompt


@pytest.fixture(scope="module")
def checkpoint_of(tiny_repo, tmp_path_factory):
    made: dict[str, Checkpoint] = {}

    def make(version: str) -> Checkpoint:
        if version not in made:
            made[version] = load(version)
        return made[version]

    def load(version: str) -> Checkpoint:
        options = {"text_encoder_dtype": "fp32", "vae_dtype": "fp32"}
        if version == "1.5-i2v":
            repo = tiny_repo("cogvideox", version="1.5")
            options["transformer_id"] = str(write_15_i2v_transformer(repo, tmp_path_factory.mktemp("transformer")))
        else:
            repo = tiny_repo("cogvideox", version=version)
        config = ModelSection(model_name="cogvideox", pretrained_model_name_or_path=str(repo), **options)
        spec = get_family("cogvideox").load(config)
        return Checkpoint(
            version=version,
            config=config,
            spec=spec,
            transformer=spec.load_transformer(torch.float32),
            pipe=stock_pipeline(config),
            conditions=spec.encode_text(spec.load_text_encoders(), [SHORT, LONG]),
        )

    return make


@pytest.fixture(params=VERSIONS)
def checkpoint(request, checkpoint_of) -> Checkpoint:
    return checkpoint_of(request.param)


def write_15_i2v_transformer(repo: Path, directory: Path) -> Path:
    config = CogVideoXTransformer3DModel.load_config(repo, subfolder="transformer")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        # In the class, the embeddings of time and ofs are summed, so their widths agree.
        transformer = CogVideoXTransformer3DModel.from_config({**config, "in_channels": 32, "ofs_embed_dim": 32})
    transformer.save_pretrained(str(directory))
    return directory


def stock_pipeline(config: ModelSection) -> CogVideoXPipeline | CogVideoXImageToVideoPipeline:
    pipe = DiffusionPipeline.from_pretrained(config.pretrained_model_name_or_path, dtype=torch.float32)
    if config.transformer_id:
        transformer = CogVideoXTransformer3DModel.from_pretrained(config.transformer_id)
        pipe = CogVideoXImageToVideoPipeline(**{**pipe.components, "transformer": transformer})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def latents(frames: int = 3, height: int = 8, width: int = 8, *, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return normal(batch, 16, frames, height, width, seed=seed)


def denoised(checkpoint: Checkpoint, frames: int = 3, *, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Latents of whole temporal patches."""
    step = checkpoint.transformer.config.patch_size_t or 1
    return latents(frames + -frames % step, batch=batch, seed=seed)


def meta_of(checkpoint: Checkpoint, batch: int = 1) -> VideoMeta:
    """With a first frame or a control video where the checkpoint takes one."""
    extra = {name: latents(batch=batch, seed=9) for name in checkpoint.spec.facts.media}
    if checkpoint.version in IMAGE_VERSIONS:
        extra["first_frame"] = latents(1, batch=batch, seed=9)
    return VideoMeta(fps=torch.full((batch,), 8.0), extra=extra)


def control_video(frames: int, height: int, width: int) -> torch.Tensor:
    """`[1, 3, T, H, W]` in [0, 1], as pipelines take it; 2 x - 1 is exact."""
    steps = torch.randint(257, (1, 3, frames, height, width), generator=torch.Generator().manual_seed(6))
    return steps / 256


def recorder(module: torch.nn.Module) -> tuple[list[dict], list]:
    """Every later call of the module (its keyword arguments and output), and the handles that end the recording."""
    calls: list[dict] = []
    return calls, [
        module.register_forward_pre_hook(lambda _, args, kwargs: calls.append(dict(kwargs)), with_kwargs=True),
        module.register_forward_hook(lambda _, args, output: calls[-1].update(output=output[0])),
    ]


def stop(handles: list) -> None:
    for handle in handles:
        handle.remove()


# ---- conditioning and latents ----------------------------------------------------------------------------------------


@pytest.mark.rotating
def test_text_is_encoded_as_the_pipeline_does(checkpoint):
    with torch.no_grad():
        expected, _ = checkpoint.pipe.encode_prompt([SHORT, LONG], do_classifier_free_guidance=False)
    assert list(checkpoint.conditions.tensors) == ["prompt_embeds"]
    torch.testing.assert_close(checkpoint.conditions["prompt_embeds"], expected, rtol=0, atol=0)
    assert expected.shape[1] == 226


def test_text_is_padded_to_the_transformers_length(checkpoint_of, tmp_path):
    checkpoint = checkpoint_of("5b")
    config = {**checkpoint.transformer.config, "max_text_seq_length": 40}
    CogVideoXTransformer3DModel.from_config(config).save_pretrained(str(tmp_path))
    spec = get_family("cogvideox").load(checkpoint.config.model_copy(update={"transformer_id": str(tmp_path)}))
    conditions = spec.encode_text(spec.load_text_encoders(), [SHORT])
    assert conditions["prompt_embeds"].shape[1] == 40


@pytest.mark.rotating
def test_latents_are_scaled_and_decoded_as_the_pipeline_does(checkpoint):
    """Also with `invert_scale_latents`: the pipelines decode `latents / scaling_factor` either way."""
    spec, pipe = checkpoint.spec, checkpoint.pipe
    vae = spec.load_vae()
    stats = spec.vae_stats(vae)
    video = normal(1, 3, 9, 32, 32).clamp(-1, 1)
    with torch.no_grad():
        distribution = pipe.vae.encode(video).latent_dist
        moments = spec.encode_video(vae, video)
        mean = spec.latents(moments, None, stats)
        reconstruction = pipe.decode_latents(mean.transpose(1, 2))
        torch.testing.assert_close(reconstruction, pipe.vae.decode(distribution.mean).sample, rtol=0, atol=1e-5)
    noise = normal(*distribution.mean.shape, seed=1)
    expected = (distribution.mean + distribution.std * noise) * pipe.vae.config.scaling_factor
    torch.testing.assert_close(spec.latents(moments, noise, stats), expected)

    x = 2 * normal(*distribution.mean.shape, seed=2)
    with torch.no_grad():
        decoded = pipe.decode_latents(x.transpose(1, 2))
    expected = pipe.video_processor.postprocess_video(decoded, output_type="pt").transpose(1, 2)
    torch.testing.assert_close(spec.decode(vae, x, stats), expected, rtol=0, atol=1e-5)


# ---- the noise process -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "scheduler_class"), [("2b", CogVideoXDDIMScheduler), ("5b", CogVideoXDPMScheduler)]
)
def test_noise_and_velocity_equal_the_schedulers_in_float64(checkpoint_of, version, scheduler_class):
    checkpoint = checkpoint_of(version)
    scheduler = checkpoint.spec.load_scheduler()
    assert type(scheduler) is scheduler_class
    process = checkpoint.spec.process(scheduler)
    assert not process.is_flow
    t = torch.tensor([0, 1, 17, 500, 998, 999])
    x0, eps = latents(batch=6, seed=1).clamp(-1, 1), latents(batch=6, seed=2).clamp(-1, 1)
    noisy = scheduler.add_noise(x0.double(), eps.double(), t)
    velocity = scheduler.get_velocity(x0.double(), eps.double(), t)
    torch.testing.assert_close(process.add_noise(x0, eps, t).double(), noisy, rtol=0, atol=1e-6)
    torch.testing.assert_close(process.target(x0, eps, t).double(), velocity, rtol=0, atol=1e-6)
    # Zero terminal SNR: the last index is pure noise.
    torch.testing.assert_close(process.add_noise(x0, eps, t)[5], eps[5])


def test_other_predictions_are_refused(checkpoint_of):
    scheduler = CogVideoXDDIMScheduler(prediction_type="epsilon")
    with refused("unsupported", "'epsilon'", '"v_prediction"'):
        checkpoint_of("5b").spec.process(scheduler)


# ---- the network -----------------------------------------------------------------------------------------------------


def pipeline_step(checkpoint: Checkpoint, x: torch.Tensor, **given: object) -> dict:
    """Inputs and output of the stock transformer in one unguided pipeline step from latents `[B, C, T, H, W]`."""
    arguments = dict(
        prompt=SHORT,
        **given,
        num_inference_steps=1,
        guidance_scale=1.0,
        latents=x.transpose(1, 2).clone(),
        output_type="latent",
        generator=torch.Generator().manual_seed(5),
    )
    calls, handles = recorder(checkpoint.pipe.transformer)
    checkpoint.pipe(**arguments)
    stop(handles)
    assert len(calls) == 1
    return calls[0]


def encoded_first_frame(checkpoint: Checkpoint, image: torch.Tensor) -> torch.Tensor:
    """The image's latent, with the noise that the pipeline draws for it."""
    spec, vae = checkpoint.spec, checkpoint.spec.load_vae()
    moments = spec.encode_video(vae, 2 * image[:, :, None] - 1)
    noise = normal(*moments.chunk(2, dim=1)[0].shape, seed=5)
    return spec.latents(moments, noise, spec.vae_stats(vae))


def encoded_control(checkpoint: Checkpoint, control: torch.Tensor) -> VideoMeta:
    """What training tells the network of a clip's control video in [-1, 1]."""
    spec = checkpoint.spec
    encoders = spec.load_clip_encoders()
    clip = spec.encode_clip(encoders, torch.zeros_like(control), None, {"control_video": control})
    batch = Batch(clip.pop("moments"), checkpoint.conditions.rows([0]), META, [(0, 0)], clip)
    return spec.condition(batch, latents(), [()], spec.vae_stats(encoders["vae"]))[0]


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("version", "num_frames", "height", "width"),
    [
        ("2b", 9, 48, 80),
        ("5b", 9, 48, 80),
        ("5b", 1, 80, 48),
        ("1.5", 13, 48, 80),  # 4 latent frames: two whole pairs
        ("1.5", 9, 48, 80),  # 3 latent frames: one is denoised in front of them
        ("1.5", 1, 48, 48),
        ("i2v", 9, 64, 64),
        ("1.5-i2v", 13, 48, 80),
        ("1.5-i2v", 9, 48, 80),
        ("control", 9, 48, 80),
    ],
)
def test_predict_feeds_the_network_what_the_pipeline_feeds_it(checkpoint_of, version, num_frames, height, width):
    checkpoint = checkpoint_of(version)
    frames = (num_frames - 1) // 4 + 1
    front = frames % 2 if version.startswith("1.5") else 0
    x = latents(frames + front, height // 8, width // 8)  # the pipelines denoise as many
    given: dict[str, object] = {"num_frames": num_frames, "height": height, "width": width}
    meta = META
    if version in IMAGE_VERSIONS:
        given["image"] = image = torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(4))
        meta = replace(META, extra={"first_frame": encoded_first_frame(checkpoint, image)})
    if version == "control":
        control = control_video(given.pop("num_frames"), height, width)
        given["control_video"] = control.transpose(1, 2)
        meta = encoded_control(checkpoint, 2 * control - 1)
    expected = pipeline_step(checkpoint, x, **given)

    calls, handles = recorder(checkpoint.transformer)
    with torch.no_grad():
        prediction = checkpoint.spec.predict(
            checkpoint.transformer,
            x,
            expected["timestep"],
            checkpoint.conditions.rows([0]),
            meta,
        )
    stop(handles)
    ours = calls[0]
    if version == "control":
        assert torch.equal(ours["hidden_states"], expected["hidden_states"])
    for name in ("hidden_states", "encoder_hidden_states", "timestep"):
        torch.testing.assert_close(ours[name], expected[name], rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    for name in ("image_rotary_emb", "ofs"):
        if expected.get(name) is None:
            assert ours[name] is None
        else:
            torch.testing.assert_close(ours[name], expected[name], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(prediction, expected["output"].transpose(1, 2), rtol=0, atol=1e-5)
    assert prediction.shape == x.shape


@pytest.mark.parametrize("version", VERSIONS)
def test_clean_latents_are_padded_as_the_pipelines_latents_are(checkpoint_of, version):
    """In front, with copies of the first frame, before any noise; whole patches stay what they are."""
    checkpoint = checkpoint_of(version)
    spec, geometry = checkpoint.spec, checkpoint.spec.facts.geometry
    for frames in (1, 2, 3):
        x0 = latents(frames)
        padded = spec.padded(x0)
        assert padded.shape[2:] == geometry.denoised_shape(4 * (frames - 1) + 1, 64, 64)
        assert torch.equal(padded[:, :, -frames:], x0)
        front = padded.shape[2] - frames
        assert front == (frames % 2 if version.startswith("1.5") else 0)
        assert torch.equal(padded[:, :, :front], x0[:, :, :front])
    if version.startswith("1.5"):
        with refused("invalid", "3 latent frames", "patches of 2", "`padded`"):
            spec.predict(checkpoint.transformer, latents(3), torch.tensor([4]), checkpoint.conditions.rows([0]), META)


def test_the_prediction_depends_on_every_input(checkpoint):
    spec, meta = checkpoint.spec, meta_of(checkpoint)

    def predict(x, t, row, meta):
        with torch.no_grad():
            return spec.predict(checkpoint.transformer, x, torch.tensor([t]), checkpoint.conditions.rows([row]), meta)

    x = denoised(checkpoint)
    base = predict(x, 400, 0, meta)
    others = [
        predict(x, 400, 1, meta),
        predict(x, 800, 0, meta),
        predict(denoised(checkpoint, seed=1), 400, 0, meta),
    ]
    if meta.extra:
        zeros = {name: torch.zeros_like(value) for name, value in meta.extra.items()}
        others.append(predict(x, 400, 0, replace(meta, extra=zeros)))
    for other in others:
        assert (base - other).abs().max() > 1e-3


def test_predict_repeats_itself_and_leaves_its_inputs_alone(checkpoint):
    spec, meta = checkpoint.spec, meta_of(checkpoint, batch=2)
    x, t = denoised(checkpoint, batch=2), torch.tensor([200, 900])
    inputs = [x, t, *checkpoint.conditions.tensors.values(), *meta.extra.values()]
    before = [value.clone() for value in inputs]
    with torch.no_grad():
        first = spec.predict(checkpoint.transformer, x, t, checkpoint.conditions, meta)
        second = spec.predict(checkpoint.transformer, x, t, checkpoint.conditions, meta)
    assert torch.equal(first, second)
    assert first.shape == x.shape
    assert all(torch.equal(now, then) for now, then in zip(inputs, before, strict=True))


def test_a_batch_equals_its_rows_one_by_one(checkpoint):
    spec, meta = checkpoint.spec, meta_of(checkpoint, batch=2)
    x, t = denoised(checkpoint, batch=2), torch.tensor([200, 900])
    with torch.no_grad():
        batch = spec.predict(checkpoint.transformer, x, t, checkpoint.conditions, meta)
        rows = []
        for i in (0, 1):
            one = VideoMeta(fps=meta.fps[i : i + 1], extra={k: v[i : i + 1] for k, v in meta.extra.items()})
            rows.append(
                spec.predict(checkpoint.transformer, x[i : i + 1], t[i : i + 1], checkpoint.conditions.rows([i]), one)
            )
    torch.testing.assert_close(batch, torch.cat(rows), rtol=0, atol=1e-5)


def test_rows_without_a_first_frame_are_zero_rows(checkpoint_of):
    """None means that no row is conditioned."""
    checkpoint = checkpoint_of("i2v")
    arguments = (checkpoint.transformer, latents(), torch.tensor([400]), checkpoint.conditions.rows([0]))
    zeros = VideoMeta(fps=META.fps, extra={"first_frame": torch.zeros(1, 16, 1, 8, 8)})
    with torch.no_grad():
        none, zero = checkpoint.spec.predict(*arguments, META), checkpoint.spec.predict(*arguments, zeros)
    assert torch.equal(none, zero)


def test_bf16_weights_get_bf16_inputs(checkpoint_of):
    checkpoint = checkpoint_of("1.5-i2v")
    transformer = checkpoint.spec.load_transformer(torch.bfloat16)
    with torch.no_grad():
        prediction = checkpoint.spec.predict(
            transformer, denoised(checkpoint), torch.tensor([400]), checkpoint.conditions.rows([0]), meta_of(checkpoint)
        )
    assert prediction.dtype == torch.bfloat16
    assert prediction.isfinite().all()


@pytest.mark.parametrize("version", ["1.5", "i2v"])
def test_gradients_reach_latents_and_lora_under_checkpointing(checkpoint_of, version):
    checkpoint = checkpoint_of(version)
    gradients = []
    for checkpointing in (False, True):
        transformer = checkpoint.spec.load_transformer(torch.float32)
        transformer.add_adapter(LoraConfig(r=2, target_modules=list(checkpoint.spec.facts.lora_targets)))
        for i, (name, parameter) in enumerate(transformer.named_parameters()):
            if "lora" in name:
                parameter.data = 0.1 * normal(*parameter.shape, seed=i)
        if checkpointing:
            transformer.enable_gradient_checkpointing()
        x = denoised(checkpoint).requires_grad_()
        prediction = checkpoint.spec.predict(
            transformer.train(), x, torch.tensor([400]), checkpoint.conditions.rows([0]), meta_of(checkpoint)
        )
        prediction.square().sum().backward()
        gradients.append([x.grad, *(p.grad for n, p in transformer.named_parameters() if "lora" in n)])
    for plain, recomputed in zip(*gradients, strict=True):
        assert plain.abs().max() > 0
        torch.testing.assert_close(recomputed, plain)


# ---- what a checkpoint can take --------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_the_config_decides_whether_a_first_frame_is_taken(checkpoint_of, version):
    spec = checkpoint_of(version).spec
    expected = ("channels", 1.0) if version in IMAGE_VERSIONS else ("none", 0.0)
    assert (spec.facts.first_frame, spec.facts.first_frame_p) == expected


def test_a_first_frame_for_a_text_to_video_checkpoint_is_refused(checkpoint_of):
    checkpoint = checkpoint_of("5b")
    meta = VideoMeta(fps=META.fps, extra={"first_frame": latents(1)})
    with refused("unsupported", "cogvideox", "first frame"):
        checkpoint.spec.predict(
            checkpoint.transformer, latents(), torch.tensor([4]), checkpoint.conditions.rows([0]), meta
        )


def test_unknown_channels_are_refused(checkpoint_of, tmp_path):
    checkpoint = checkpoint_of("5b")
    config = {**checkpoint.transformer.config, "in_channels": 33}
    CogVideoXTransformer3DModel.from_config(config).save_pretrained(str(tmp_path))
    spec = get_family("cogvideox").load(checkpoint.config.model_copy(update={"transformer_id": str(tmp_path)}))
    for load in (lambda: spec.load_transformer(torch.float32), spec.transformer_on_meta, lambda: spec.facts):
        with refused("unsupported", "33 input channels"):
            load()


@pytest.mark.parametrize(
    ("version", "shape", "values"),
    [
        ("i2v", (3, 8, 10), (" 64x80: ", " 64x64 ")),
        ("1.5", (2, 302, 4), (" 2416x32: ", " 2400x2400 ")),
    ],
)
def test_sizes_without_positions_are_refused(checkpoint_of, version, shape, values):
    checkpoint = checkpoint_of(version)
    with refused("invalid", *values):
        checkpoint.spec.predict(
            checkpoint.transformer, latents(*shape), torch.tensor([4]), checkpoint.conditions.rows([0]), META
        )


def test_lengths_without_learned_positions_are_said_once(checkpoint_of, caplog):
    checkpoint = checkpoint_of("i2v")
    arguments = (torch.tensor([4]), checkpoint.conditions.rows([0]), META)
    cogvideox._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="finetrainers"), torch.no_grad():
        checkpoint.spec.predict(checkpoint.transformer, latents(3), *arguments)
        assert not [record for record in caplog.records if record.name.startswith("finetrainers")]
        for _ in range(2):
            checkpoint.spec.predict(checkpoint.transformer, latents(2), *arguments)
    records = [record for record in caplog.records if record.name.startswith("finetrainers")]
    assert len(records) == 1
    assert " 9 frames" in records[0].message


@pytest.mark.parametrize("version", VERSIONS)
def test_the_network_sees_as_many_tokens_as_the_geometry_says(checkpoint_of, version):
    checkpoint = checkpoint_of(version)
    geometry = checkpoint.spec.facts.geometry
    tokens = []
    handle = checkpoint.transformer.patch_embed.register_forward_hook(
        lambda _, args, output: tokens.append(output.shape[1] - 226)
    )
    with torch.no_grad():
        checkpoint.spec.predict(
            checkpoint.transformer,
            denoised(checkpoint),
            torch.tensor([4]),
            checkpoint.conditions.rows([0]),
            meta_of(checkpoint),
        )
    handle.remove()
    assert tokens == [geometry.num_tokens(9, 64, 64)]


def test_the_transformer_on_meta_has_the_same_parameters(checkpoint):
    meta = checkpoint.spec.transformer_on_meta()
    assert all(p.is_meta for p in meta.parameters())
    expected = {name: p.shape for name, p in checkpoint.transformer.named_parameters()}
    assert {name: p.shape for name, p in meta.named_parameters()} == expected


# ---- sampling and saving ---------------------------------------------------------------------------------------------


def sample_request(checkpoint: Checkpoint, **options) -> SampleRequest:
    image = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(4))
    options.setdefault("image", image if checkpoint.version in IMAGE_VERSIONS else None)
    options["media"] = {name: 2 * control_video(9, 64, 64) - 1 for name in checkpoint.spec.facts.media}
    return SampleRequest(num_frames=9, height=64, width=64, frame_rate=8.0, num_inference_steps=2, **options)


@pytest.mark.rotating
def test_sampling_from_conditions_equals_the_pipeline_from_prompts(checkpoint):
    spec = checkpoint.spec
    request = sample_request(checkpoint, guidance_scale=4.0, extra={"use_dynamic_cfg": True})
    given = {"control_video": control_video(9, 64, 64).transpose(1, 2)} if request.media else {"num_frames": 9}
    expected = checkpoint.pipe(
        prompt=SHORT,
        negative_prompt=LONG,
        **given,
        height=64,
        width=64,
        num_inference_steps=2,
        guidance_scale=4.0,
        use_dynamic_cfg=True,
        output_type="pt",
        generator=torch.Generator().manual_seed(3),
        **({} if request.image is None else {"image": request.image}),
    ).frames
    pipe = spec.pipeline(
        checkpoint.transformer,
        spec.load_vae(),
        spec.load_scheduler(),
        image_to_video=checkpoint.version in IMAGE_VERSIONS,
    )
    assert type(pipe) is type(checkpoint.pipe)
    call = spec.pipeline_call(checkpoint.conditions.rows([0]), checkpoint.conditions.rows([1]), request)
    actual = pipe(**call, output_type="pt", generator=torch.Generator().manual_seed(3)).frames
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_the_pipelines_own_guidance_is_used_unless_asked_otherwise(checkpoint_of):
    checkpoint = checkpoint_of("5b")
    rows = (checkpoint.conditions.rows([0]), checkpoint.conditions.rows([1]))
    assert "guidance_scale" not in checkpoint.spec.pipeline_call(*rows, sample_request(checkpoint))


def test_images_and_checkpoints_must_match(checkpoint_of):
    text, image = checkpoint_of("5b"), checkpoint_of("i2v")
    rows = (text.conditions.rows([0]), text.conditions.rows([1]))
    with refused("unsupported", "cogvideox", "validation_images"):
        text.spec.pipeline(text.transformer, None, None, image_to_video=True)
    with refused("unsupported", "cogvideox", "validation_images"):
        text.spec.pipeline_call(*rows, sample_request(text, image=torch.zeros(1, 3, 64, 64)))
    with refused("required", "cogvideox", "validation_images"):
        image.spec.pipeline_call(*rows, sample_request(image, image=None))


@pytest.mark.rotating
def test_a_saved_lora_is_loaded_by_the_pipeline_with_its_alpha(checkpoint, tmp_path):
    spec = checkpoint.spec
    arguments = (denoised(checkpoint), torch.tensor([400]), checkpoint.conditions.rows([0]), meta_of(checkpoint))
    trained = spec.load_transformer(torch.float32)
    with torch.no_grad():
        base = spec.predict(trained, *arguments)
    trained.add_adapter(LoraConfig(r=4, lora_alpha=12, target_modules=list(spec.facts.lora_targets)))
    for i, (name, parameter) in enumerate(trained.named_parameters()):
        if "lora" in name:
            parameter.data = 0.1 * normal(*parameter.shape, seed=i)
    spec.save_lora(tmp_path, get_peft_model_state_dict(trained), trained.peft_config["default"].to_dict())

    pipe = stock_pipeline(checkpoint.config)
    pipe.load_lora_weights(tmp_path)
    again = spec.load_transformer(torch.float32)
    spec.load_lora(again, tmp_path / "pytorch_lora_weights.safetensors")
    with torch.no_grad():
        expected = spec.predict(trained, *arguments)
        assert (expected - base).abs().max() > 1e-2
        torch.testing.assert_close(spec.predict(pipe.transformer, *arguments), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(spec.predict(again, *arguments), expected, rtol=0, atol=1e-5)


def test_a_scheduler_that_the_control_pipeline_cannot_step_is_replaced(checkpoint_of, tiny_repo, tmp_path):
    """CogVideoX-5b's own takes the last prediction as well; both have the same noise schedule."""
    repo = shutil.copytree(tiny_repo("cogvideox", version="control"), tmp_path / "model")
    other = tiny_repo("cogvideox", version="5b") / "scheduler" / "scheduler_config.json"
    shutil.copy(other, repo / "scheduler" / "scheduler_config.json")
    config = checkpoint_of("control").config.model_copy(update={"pretrained_model_name_or_path": str(repo)})
    scheduler = get_family("cogvideox").load(config).load_scheduler()
    assert type(scheduler) is CogVideoXDDIMScheduler
    assert torch.equal(scheduler.alphas_cumprod, checkpoint_of("5b").spec.load_scheduler().alphas_cumprod)
