"""Kandinsky 5 against diffusers' network and pipelines: texts of any length in a batch, a given first frame, the even
start of its clips, loss, runs, and refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from derived import KEYS, SEED, Setting
from diffusers import AutoencoderKLHunyuanVideo, Kandinsky5I2VPipeline, Kandinsky5T2VPipeline
from PIL import Image
from refusals import refused
from torch import Tensor

from finetrainers.config.load import load_config
from finetrainers.config.sections import ModelSection
from finetrainers.models.batch import Batch, PromptEmbeds, SampleRequest, VideoMeta
from finetrainers.models.kandinsky5 import Kandinsky5Spec, even_start
from finetrainers.models.registry import get_family
from finetrainers.plan.preflight import preflight
from finetrainers.utils.seeding import derive_seed

PROMPTS = ["a red ball", "a blue square moves slowly to the left over the dark sea at night", ""]
FP32 = dict.fromkeys(("text_encoder_dtype", "text_encoder_2_dtype", "transformer_dtype", "vae_dtype"), "fp32")


def spec_of(repo: Path) -> Kandinsky5Spec:
    section = ModelSection(model_name="kandinsky5", pretrained_model_name_or_path=str(repo), **FP32)
    spec = get_family("kandinsky5").load(section)
    assert isinstance(spec, Kandinsky5Spec)
    return spec


def stock_network(repo: Path) -> Any:
    return diffusers.Kandinsky5Transformer3DModel.from_pretrained(repo / "transformer", torch_dtype=torch.float32)


def stock_call(
    network: Any, x_CTHW: Tensor, given: Tensor | None, time: Tensor, text: Tensor, pooled: Tensor
) -> Tensor:
    """The stock network's prediction of one clip `[C, T, H, W]`, with a mask of its given frames `[T]`."""
    _, frames, height, width = x_CTHW.shape
    mask = torch.zeros(1, *x_CTHW.shape[1:]) if given is None else given.view(1, -1, 1, 1).expand(1, -1, height, width)
    x = torch.cat([x_CTHW, torch.zeros_like(x_CTHW), mask.to(x_CTHW)])
    prediction = network(
        hidden_states=x.permute(1, 2, 3, 0)[None], encoder_hidden_states=text[None], timestep=1000 * time[None],
        pooled_projections=pooled[None], text_rope_pos=torch.arange(len(text)), scale_factor=(1, 3.16, 3.16),
        visual_rope_pos=[torch.arange(count) for count in (frames, height // 2, width // 2)], return_dict=False,
    )  # fmt: skip
    return prediction[0].permute(3, 0, 1, 2)


@pytest.mark.rotating
def test_a_batch_is_predicted_as_by_the_stock_network_for_each_prompt(tiny_repo: Callable[..., Path]) -> None:
    """With a mask of the padding in a batch, without one where the texts have one length."""
    repo = tiny_repo("kandinsky5")
    spec, pipeline = spec_of(repo), Kandinsky5T2VPipeline.from_pretrained(repo, dtype=torch.float32)
    network, stock = spec.load_transformer(torch.float32), stock_network(repo)
    texts = spec.encode_text(spec.load_text_encoders(), PROMPTS)
    lengths = texts.to("cpu").lengths
    assert lengths is not None
    assert len(set(lengths)) == 3
    x, t = torch.randn(3, 16, 2, 4, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0.9, 0.5, 0.1])
    meta = VideoMeta(fps=torch.full((3,), 24.0))
    with torch.no_grad():
        together = spec.predict(network, x, t, texts.trimmed(), meta)
        assert together.equal(spec.predict(network, x, t, texts.trimmed(), meta))
        torch.testing.assert_close(spec.predict(network, x, t, texts, meta), together, rtol=1e-3, atol=1e-3)
        for row, prompt in enumerate(PROMPTS):
            text, pooled, _ = pipeline.encode_prompt(prompt)
            assert text.shape[1] == lengths[row]
            expected = stock_call(stock, x[row], None, t[row], text[0], pooled[0])
            one, level = slice(row, row + 1), t[row : row + 1]
            for conditions in (texts.rows([row]), texts.rows([row]).trimmed()):  # without lengths, and with
                alone = spec.predict(network, x[one], level, conditions, VideoMeta(fps=meta.fps[one]))
                torch.testing.assert_close(alone[0], expected, rtol=1e-5, atol=1e-5)
            # Positions are rounded to bf16: another order of sums may change a last bit there.
            torch.testing.assert_close(together[row], expected, rtol=1e-3, atol=1e-3)
        padded = texts["prompt_embeds"].clone()
        padded[0, lengths[0] :] = 9.0
        changed = PromptEmbeds({**texts.tensors, "prompt_embeds": padded}).trimmed()
        assert spec.predict(network, x, t, changed, meta).equal(together)


def test_positions_are_scaled_by_the_size_in_pixels(tiny_repo: Callable[..., Path]) -> None:
    spec = spec_of(tiny_repo("kandinsky5"))
    pipeline = Kandinsky5T2VPipeline(*[None] * 7)
    for height, width in ((64, 96), (60, 106), (60, 107), (59, 96), (106, 60), (96, 128)):
        assert spec._position_scale(height, width) == pipeline._get_scale_factor(8 * height, 8 * width)


@pytest.mark.rotating
def test_clips_that_start_from_an_image_are_evened_one_by_one(tiny_repo: Callable[..., Path]) -> None:
    """As the pipeline's sample is after the last step; without frames to compare with, which it makes NaN, not."""
    spec = spec_of(tiny_repo("kandinsky5", "i2v"))
    vae = spec.load_vae()
    latents = torch.randn(2, 16, 5, 2, 2, generator=torch.Generator().manual_seed(1)) + torch.tensor([0.0, 2.0]).view(
        2, 1, 1, 1, 1
    )
    pipeline, stats = Kandinsky5I2VPipeline(*[None] * 7), spec.vae_stats(vae)
    videos = spec.decode(vae, latents, stats)
    for row in range(2):
        even = pipeline.normalize_first_frame(latents[row : row + 1].permute(0, 2, 3, 4, 1)).permute(0, 4, 1, 2, 3)
        assert (even[:, :, :4] - latents[row : row + 1, :, :4]).abs().max() > 0.01
        with torch.no_grad():
            expected = vae.decode(even / vae.config.scaling_factor).sample[0] / 2 + 0.5
        torch.testing.assert_close(videos[row], expected.clamp(0, 1), rtol=1e-4, atol=1e-4)
    short = latents[:, :, :4].permute(0, 2, 3, 4, 1)
    assert even_start(short) is short
    assert not torch.isfinite(pipeline.normalize_first_frame(short)).any(dim=(1, 2, 3, 4)).all()
    text_to_video = spec_of(tiny_repo("kandinsky5"))
    plain = text_to_video.decode(vae, latents, stats)
    assert not torch.allclose(plain, videos, atol=1e-3)


def test_sizes_with_positions_of_hd_are_noted(options: Callable[..., dict[str, Any]]) -> None:
    geometry = get_family("kandinsky5").facts.geometry
    assert geometry.size_notes([(61, 480, 848), (61, 1024, 1024)]) == []
    [note] = geometry.size_notes([(61, 368, 720), (1, 368, 720), (61, 512, 512)])
    assert note.count("368x720") == 1
    assert "512x512" not in note
    plan = preflight(load_config(**options("kandinsky5"))).plan
    assert [note for note in plan.notes if "3.16" in note] == geometry.size_notes(plan.buckets) != []


def test_prompts_have_at_most_the_tokens_of_the_authors_configs(tiny_repo: Callable[..., Path]) -> None:
    repo = tiny_repo("kandinsky5")
    spec, pipeline = spec_of(repo), Kandinsky5T2VPipeline.from_pretrained(repo, dtype=torch.float32)
    prompt = "a red ball rolls over the grass, " * 100
    texts = spec.encode_text(spec.load_text_encoders(), [prompt])
    assert texts.to("cpu").lengths == (256,)
    torch.testing.assert_close(texts["prompt_embeds"], pipeline.encode_prompt(prompt, max_sequence_length=256)[0])


@pytest.mark.rotating
def test_short_samples_from_an_image_are_finite(tiny_repo: Callable[..., Path]) -> None:
    spec = spec_of(tiny_repo("kandinsky5", "i2v"))
    rows = spec.encode_text(spec.load_text_encoders(), PROMPTS[:2])
    request = SampleRequest(13, 32, 48, 24.0, 2, 2.0, image=Image.new("RGB", (48, 32), (250, 10, 10)))
    pipeline = spec.pipeline(
        spec.load_transformer(torch.float32), spec.load_vae(), spec.load_scheduler(), image_to_video=True
    )
    pipeline.set_progress_bar_config(disable=True)
    frames = spec.sample(pipeline, rows.rows([0]), rows.rows([1]), request, torch.Generator().manual_seed(1))
    assert frames.shape == (13, 32, 48, 3)
    assert np.isfinite(frames).all()
    with refused("required"):
        spec.pipeline_call(rows.rows([0]), rows.rows([1]), SampleRequest(13, 32, 48, 24.0, 2))


def test_attention_is_dense_in_checkpoints_of_sparse_attention(tiny_repo: Callable[..., Path], tmp_path: Path) -> None:
    """Their pipeline asks for a backend that a CPU does not have; samples here have the prediction of training."""
    repo = tmp_path / "nabla"
    shutil.copytree(tiny_repo("kandinsky5"), repo)
    path = repo / "transformer" / "config.json"
    sparse = {"attention_type": "nabla", "attention_P": 0.9, "attention_wT": 11, "attention_wW": 3, "attention_wH": 3}
    path.write_text(json.dumps(json.loads(path.read_text()) | sparse))
    made = []
    for place in (repo, tiny_repo("kandinsky5")):
        spec = spec_of(place)
        assert bool(spec.facts.notes) == (place == repo)
        rows = spec.encode_text(spec.load_text_encoders(), PROMPTS[:2])
        pipeline = spec.pipeline(spec.load_transformer(torch.float32), spec.load_vae(), spec.load_scheduler())
        pipeline.set_progress_bar_config(disable=True)
        request = SampleRequest(5, 32, 48, 24.0, 2, 2.0)
        made.append(spec.sample(pipeline, rows.rows([0]), rows.rows([1]), request, torch.Generator().manual_seed(1)))
    assert (made[0] == made[1]).all()


def test_checkpoints_are_distinguished_by_their_pipeline(tiny_repo: Callable[..., Path]) -> None:
    read = get_family("kandinsky5").read
    animates = {"model_index": {"_class_name": "Kandinsky5I2VPipeline"}}
    network: dict[str, Any] = {"visual_cond": True, "out_visual_dim": 16, "model_dim": 1792, "axes_dims": [16, 24, 24]}
    assert (read({"transformer": network}).first_frame, read({"transformer": network}).needs_image) == ("none", False)
    facts = read({**animates, "transformer": network})
    assert (facts.first_frame, facts.needs_image, facts.first_frame_p, facts.heads) == ("tokens", True, 1.0, 28)
    sizes = (509, 512, 768), (513, 512, 768), (5, 2048, 2048), (5, 2048, 2064)
    assert [bool(facts.geometry.problems(*size)) for size in sizes] == [False, True, False, True]
    with refused("unsupported", "visual_cond"):
        read({**animates, "transformer": {**network, "visual_cond": False}})
    family, spec = get_family("kandinsky5"), spec_of(tiny_repo("kandinsky5"))
    section = spec.config.model_copy(update={"vae_id": str(tiny_repo("wan", "ti2v"))})
    problems = {(problem.where, problem.kind) for problem in family.problems(section)}
    assert problems == {("--vae_id", "mismatch"), ("--vae_id", "conflict")}  # its class, and its 48 channels
    network_without = spec.load_transformer(torch.float32)
    network_without.register_to_config(visual_cond=False)
    conditions, meta = spec.empty_inputs(1)
    with refused("unsupported"):
        spec.predict(network_without, torch.zeros(1, 16, 2, 2, 2), torch.tensor([[0.0, 0.5]]), conditions, meta)


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.rotating
@pytest.mark.parametrize("version", ["t2v", "i2v"])
def test_the_loss_is_that_of_the_stock_network_in_float64(version: str, tiny_repo: Callable[..., Path]) -> None:
    """Derived from pixels, with a shift and masks; a given first frame is encoded by itself, and leaves the loss."""
    repo, animates = tiny_repo("kandinsky5", version), version == "i2v"
    setting = Setting(repo, "kandinsky5", given="first=1" if animates else "", flow_shift=3.0)
    spec, method = setting.spec, setting.method
    del spec.predict  # its own again
    times: list[Tensor] = []
    network = spec.load_transformer(torch.float32)
    network.register_forward_pre_hook(lambda _, args, given: times.append(given["timestep"]), with_kwargs=True)
    clips = torch.from_numpy(np.random.default_rng(3).integers(0, 256, (3, 3, 9, 32, 48), dtype=np.uint8))
    encoded = spec.encode_clip(spec.load_clip_encoders(), clips, None)
    texts = spec_of(repo).encode_text(spec_of(repo).load_text_encoders(), PROMPTS)
    lengths, shape = texts.to("cpu").lengths, spec.latent_shape(encoded["moments"])
    mask = torch.rand(3, 1, *shape[1:], generator=torch.Generator().manual_seed(5))
    loss, _ = method.loss(
        network, Batch(encoded["moments"], texts, VideoMeta(torch.full((3,), 24.0)), KEYS, encoded, mask=mask)
    )
    vae, stock = AutoencoderKLHunyuanVideo.from_pretrained(repo / "vae").double(), stock_network(repo).double()
    for name, module in stock.named_modules():  # which it computes in fp32
        if name == "time_embeddings" or name.endswith(("query_norm", "key_norm")):
            module.float()
    expected = 0.0
    assert lengths is not None
    for row, key in enumerate(KEYS):
        generator = torch.Generator().manual_seed(derive_seed(SEED, "train", *key))
        noise, eps = (torch.randn(shape, generator=generator).double() for _ in range(2))
        pixels, counted = clips[row : row + 1].double() / 127.5 - 1, mask[row].double()
        with torch.no_grad():
            posterior = vae.encode(pixels).latent_dist
            x0 = (posterior.mean[0] + posterior.std[0] * noise) * vae.config.scaling_factor
            sigma = times[0][row].double() / 1000
            x, given = (1 - sigma) * x0 + sigma * eps, torch.zeros(shape[1])
            if animates:
                x[:, :1] = vae.encode(pixels[:, :, :1]).latent_dist.mean[0] * vae.config.scaling_factor
                given[0], counted[:, 0] = 1.0, 0.0
            text = texts["prompt_embeds"][row, : lengths[row]].double()
            prediction = stock_call(stock, x, given, sigma, text, texts["pooled_prompt_embeds"][row].double())
        error = (counted * (prediction - (eps - x0)) ** 2).sum() / (counted.sum() * shape[0])
        expected += float(error) / 3
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)  # positions are rounded to bf16


@torch.no_grad()
def evaluate(state: Any, network: Any) -> float:
    """Loss of a fixed batch at fixed noise, of low and high levels."""
    batch = next(iter(state.method.steps(0, state.transformer)))[0]
    return float(torch.stack([state.method.eval_loss(network.eval(), batch, level) for level in (0.3, 0.7)]).mean())


@pytest.mark.rotating
@pytest.mark.parametrize(("version", "training_type"), [("t2v", "full-finetune"), ("i2v", "lora")])
def test_it_learns_a_clip_and_resumes_exactly(
    version: str, training_type: str, options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path
) -> None:
    is_lora = training_type == "lora"
    targets = [*get_family("kandinsky5").facts.lora_targets, "feed_forward.out_layer", "out_layer.out_layer"]
    values = options(
        "kandinsky5", version=version, training_type=training_type, train_steps=40, checkpointing_steps=36, lr=2e-2,
        precompute_conditions=True, precompute_dir=str(tmp_path / "cache"),
        **({"target_modules": targets, "rank": 16, "lora_alpha": 16} if is_lora else {}),
    )  # fmt: skip
    done = run(**values)
    spec, trained = done.state.spec, done.state.parallel.unwrap(done.state.transformer)
    assert evaluate(done.state, trained) < 0.9 * evaluate(done.state, spec.load_transformer(torch.float32))
    again = tmp_path / "again"
    shutil.copytree(done.root / "checkpoints" / "step-36", again / "checkpoints" / "step-36")
    resumed = run(**{**values, "output_dir": str(again)}, resume_from_checkpoint="latest")
    assert resumed.steps_done == 4
    ours = resumed.state.parallel.unwrap(resumed.state.transformer).parameters()
    assert all(torch.equal(one, other) for one, other in zip(ours, trained.parameters(), strict=True))


@pytest.mark.rotating
@pytest.mark.parametrize(
    "changes", [{}, {"method": "nft", "init_same_noise": False}, {"method": "refl", "sampling_steps": 4}],
    ids=["grpo", "nft", "refl"],
)  # fmt: skip
def test_clips_of_rewards_start_from_the_image_as_in_the_pipeline(
    changes: dict[str, Any], tiny_repo: Callable[..., Path], run: Callable[..., Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The network gets the latents of the image alone in the first frame, and their place on its mask."""
    pixels = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "0.png")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "pattern", "image": "0.png"}))
    calls: list[Tensor] = []
    load = Kandinsky5Spec.load_transformer

    def record(spec: Kandinsky5Spec, *args: Any, **options: Any) -> Any:
        network = load(spec, *args, **options)
        network.register_forward_pre_hook(
            lambda _, args, call: calls.append(call["hidden_states"].detach()), with_kwargs=True
        )
        return network

    monkeypatch.setattr(Kandinsky5Spec, "load_transformer", record)
    repo = tiny_repo("kandinsky5", "i2v")
    done = run(
        **{
            "method": "grpo", "model_name": "kandinsky5", "pretrained_model_name_or_path": str(repo), "rank": 4,
            "reward": ["brightness"], "rollout_size": "9x32x48", "batch_size": 2, "prompts_per_step": 1,
            "prompts": str(tmp_path / "prompts.jsonl"), "num_generations": 2, "sampling_steps": 3, "window_size": 1,
            "lora_alpha": 4, "train_steps": 1, "output_dir": str(tmp_path / "run"), **FP32, **changes,
        }
    )  # fmt: skip
    assert done.metrics[-1]["grad_norm"] > 0
    assert done.metrics[-1].get("ratio_error", 0.0) == 0.0  # densities of rollout and training agree
    vae = AutoencoderKLHunyuanVideo.from_pretrained(repo / "vae")
    image = torch.from_numpy(pixels).permute(2, 0, 1)[None, :, None].float() / 127.5 - 1
    with torch.no_grad():
        latents = vae.encode(image).latent_dist.mean[0, :, 0] * vae.config.scaling_factor
    assert calls
    for x in calls:
        for clip in x:
            torch.testing.assert_close(clip[0, ..., :16].permute(2, 0, 1), latents, rtol=1e-4, atol=1e-4)
            assert clip[..., 16:32].abs().max() == 0
            assert clip[..., 32].mean(dim=(1, 2)).tolist() == [1.0, 0.0, 0.0]
