"""Mochi against diffusers' network and converter; its texts, schedule, files, loss, runs, and former command."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from derived import KEYS, SEED, Setting, normalize
from diffusers import AutoencoderKLMochi, MochiPipeline, MochiTransformer3DModel
from refusals import refused, refused_options

from finetrainers.config.load import load_config
from finetrainers.config.sections import ModelSection
from finetrainers.models.batch import Batch, VideoMeta
from finetrainers.models.files.original import original_layout
from finetrainers.models.mochi import MochiSpec
from finetrainers.models.registry import get_family, with_family
from finetrainers.utils.seeding import derive_seed

PROMPTS = ["a red ball", "a blue square moves slowly to the left over the dark sea at night", ""]


def spec_of(repo: Path, **options: Any) -> MochiSpec:
    fp32 = dict.fromkeys(("text_encoder_dtype", "transformer_dtype", "vae_dtype"), "fp32")
    spec = get_family("mochi").load(ModelSection(pretrained_model_name_or_path=str(repo), **{**fp32, **options}))
    assert isinstance(spec, MochiSpec)
    return spec


def test_a_batch_is_predicted_as_by_the_stock_network(tiny_repo: Callable[..., Path]) -> None:
    """Which loops over clips: each attends to its own prompt, also where that is empty; one clip and three."""
    repo = tiny_repo("mochi")
    spec = spec_of(repo)
    network, stock = spec.load_transformer(torch.float32), MochiTransformer3DModel.from_pretrained(repo / "transformer")
    texts = spec.encode_text(spec.load_text_encoders(), PROMPTS)
    assert texts["prompt_attention_mask"].sum(1).tolist()[2] == 0
    x, t = torch.randn(3, 12, 2, 4, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0.9, 0.5, 0.1])
    meta = VideoMeta(fps=torch.full((3,), 30.0))
    with torch.no_grad():
        expected = -stock(
            hidden_states=x, timestep=1000 * (1 - t), encoder_hidden_states=texts["prompt_embeds"],
            encoder_attention_mask=texts["prompt_attention_mask"], return_dict=False,
        )[0]  # fmt: skip
        torch.testing.assert_close(spec.predict(network, x, t, texts, meta), expected, rtol=1e-5, atol=1e-5)
        for row in range(3):
            one, level = slice(row, row + 1), t[row : row + 1]
            for conditions in (texts.rows([row]), texts.rows([row]).trimmed()):  # without lengths, and with
                found = spec.predict(network, x[one], level, conditions, meta)
                torch.testing.assert_close(found, expected[one], rtol=1e-5, atol=1e-5)


def test_an_empty_prompt_does_not_change_the_others(tiny_repo: Callable[..., Path]) -> None:
    """The pipeline masks a whole batch that ends with one."""
    repo = tiny_repo("mochi")
    spec, pipeline = spec_of(repo), MochiPipeline.from_pretrained(repo, dtype=torch.float32)
    prompts = ["", PROMPTS[0], "", PROMPTS[1], ""]
    found = spec.encode_text(spec.load_text_encoders(), prompts)
    for row, prompt in enumerate(prompts):
        embeds, mask, _, _ = pipeline.encode_prompt([prompt], do_classifier_free_guidance=False)
        torch.testing.assert_close(found["prompt_embeds"][row], embeds[0])
        assert torch.equal(found["prompt_attention_mask"][row], mask[0])
    assert pipeline.encode_prompt(prompts, do_classifier_free_guidance=False)[1].sum() == 0


def test_the_schedule_is_linear_then_quadratic_and_can_be_shifted(tiny_repo: Callable[..., Path]) -> None:
    """Half of the steps remove 2.5% of the noise; steps along predictions give the pipeline's latents."""
    repo = tiny_repo("mochi")
    spec, pipeline = spec_of(repo), MochiPipeline.from_pretrained(repo, dtype=torch.float32)
    times = spec.sampling_times(pipeline.scheduler, 6, num_tokens=12)
    torch.testing.assert_close(times[:4], torch.tensor([1.0, 1 - 0.025 / 3, 1 - 0.05 / 3, 0.975]))
    assert (times.diff() < 0).all()
    shifted = spec.sampling_times(pipeline.scheduler, 6, num_tokens=12, shift=3.0)
    torch.testing.assert_close(shifted, 3 * times / (1 + 2 * times))

    network, texts = spec.load_transformer(torch.float32), spec.encode_text(spec.load_text_encoders(), PROMPTS[:1])
    x = torch.randn(1, 12, 2, 4, 6, generator=torch.Generator().manual_seed(0))
    pipeline.set_progress_bar_config(disable=True)
    expected = pipeline(
        PROMPTS[0], latents=x, num_frames=7, height=32, width=48, num_inference_steps=6, guidance_scale=1.0,
        output_type="latent",
    ).frames  # fmt: skip
    with torch.no_grad():
        for now, then in zip(times, [*times[1:], torch.tensor(0.0)], strict=True):
            x = x + (then - now) * spec.predict(network, x, now[None], texts, VideoMeta(fps=torch.tensor([30.0])))
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-5)


def test_pixels_are_encoded_in_fp32_unless_set(tiny_repo: Callable[..., Path]) -> None:
    """The encoder's sines of pixels have up to 128 periods, and bf16 has 8 bits."""
    repo = tiny_repo("mochi")
    section = ModelSection(pretrained_model_name_or_path=str(repo))
    assert with_family(section).vae_dtype == "fp32"
    assert with_family(section.model_copy(update={"model_name": "mochi"})).vae_dtype == "fp32"
    chosen = ModelSection(pretrained_model_name_or_path=str(repo), vae_dtype="bf16")
    assert with_family(chosen).vae_dtype == "bf16"
    encoder = AutoencoderKLMochi.from_pretrained(repo / "vae").encoder
    pixels = torch.arange(256).view(1, 1, 1, 16, 16) / 127.5 - 1
    exact, rounded = encoder.fourier_features(pixels), encoder.fourier_features(pixels.bfloat16()).float()
    assert (exact - rounded).abs().max() > 0.5


def test_other_compression_is_refused() -> None:
    read = get_family("mochi").read
    assert read({"vae": {"temporal_expansions": [1, 2, 3]}}).geometry == read({}).geometry
    for changed in ({"temporal_expansions": [1, 2, 2]}, {"spatial_expansions": [2, 2, 1]}, {"latent_channels": 16}):
        with refused("unsupported", "genmo/mochi-1-preview"):
            read({"vae": changed})


def test_lora_targets_are_only_in_blocks(tiny_repo: Callable[..., Path]) -> None:
    """`to_q` would also be in the pooling of the caption."""
    spec = spec_of(tiny_repo("mochi"))
    names = [name for name, _ in spec.transformer_on_meta().named_modules()]
    targets = [name for name in names if name.endswith(tuple(f".{target}" for target in spec.facts.lora_targets))]
    assert len(targets) == 8
    assert all(name.startswith("transformer_blocks.") for name in targets)
    assert "time_embed.pooler.to_q" in names


# ---- files -----------------------------------------------------------------------------------------------------------

#: Names of ComfyUI's `AsymmDiTJoint` (comfy/ldm/genmo/joint_model), without weight and bias: those of a block, and the
#: others.
COMFYUI = (
    {
        "mod_x", "mod_y", *(f"attn.{name}_{s}" for name in ("qkv", "q_norm", "k_norm", "proj") for s in "xy"),
        *(f"mlp_{s}.w{n}" for s in "xy" for n in (1, 2)),
    },
    {
        "x_embedder.proj", "t_embedder.mlp.0", "t_embedder.mlp.2", "t5_y_embedder.to_kv", "t5_y_embedder.to_q",
        "t5_y_embedder.to_out", "t5_yproj", "pos_frequencies", "final_layer.mod", "final_layer.linear",
    },
)  # fmt: skip
#: Some of its VAE (comfy/ldm/genmo/vae/model.py), by which `comfy/sd.py` recognizes it, and of each kind of layer.
COMFYUI_VAE = {
    "decoder.blocks.2.blocks.3.stack.5.weight", "encoder.layers.4.layers.1.attn_block.attn.qkv.weight",
    "encoder.layers.0.weight", "encoder.layers.3.stack.0.bias", "encoder.layers.6.layers.0.bias",
    "encoder.layers.9.attn_block.attn.out.bias", "encoder.layers.9.attn_block.norm.weight",
    "encoder.output_norm.weight", "encoder.output_proj.weight", "decoder.blocks.0.0.bias",
    "decoder.blocks.0.3.stack.2.weight", "decoder.blocks.1.blocks.5.stack.3.bias", "decoder.blocks.3.proj.weight",
    "decoder.blocks.4.2.stack.5.bias", "decoder.output_proj.bias",
}  # fmt: skip


def test_files_have_the_names_of_comfyui(tiny_repo: Callable[..., Path]) -> None:
    names = MochiTransformer3DModel.from_pretrained(tiny_repo("mochi") / "transformer").state_dict()
    layout, prefix = original_layout("MochiTransformer3DModel", names)
    assert prefix == ""  # Genmo's own programs read none
    bare = {name.removesuffix(".weight").removesuffix(".bias") for name in layout}
    block = {name.split(".", 2)[2] for name in bare if name.startswith("blocks.0.")}
    assert (block, {name for name in bare if not name.startswith("blocks.")}) == COMFYUI
    last = {name.split(".", 2)[2] for name in bare if name.startswith("blocks.1.")}
    assert block - last == {"attn.proj_y", "mlp_y.w1", "mlp_y.w2"}
    with torch.device("meta"):
        vae = AutoencoderKLMochi()
    assert original_layout("AutoencoderKLMochi", vae.state_dict())[0].keys() >= COMFYUI_VAE


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.rotating
def test_the_loss_is_that_of_the_stock_network_in_float64(tiny_repo: Callable[..., Path]) -> None:
    """Derived from pixels, with a shift, a loss weight, and masks; the network's time and target are the opposite."""
    repo = tiny_repo("mochi")
    setting = Setting(repo, "mochi", flow_weighting_scheme="sigma_sqrt", flow_shift=3.0)
    spec, method = setting.spec, setting.method
    del spec.predict  # its own again
    times: list[torch.Tensor] = []
    network = spec.load_transformer(torch.float32)
    network.register_forward_pre_hook(lambda _, args, given: times.append(given["timestep"]), with_kwargs=True)
    clips = torch.from_numpy(np.random.default_rng(3).integers(0, 256, (3, 3, 7, 32, 48), dtype=np.uint8))
    encoded = spec.encode_clip(spec.load_clip_encoders(), clips, None)
    texts = spec_of(repo).encode_text(spec_of(repo).load_text_encoders(), PROMPTS)
    shape = spec.latent_shape(encoded["moments"])
    mask = torch.rand(3, 1, *shape[1:], generator=torch.Generator().manual_seed(5))
    meta = VideoMeta(torch.full((3,), 30.0))
    loss, _ = method.loss(network, Batch(encoded["moments"], texts, meta, KEYS, encoded, mask=mask))

    vae = AutoencoderKLMochi.from_pretrained(repo / "vae").double()
    stock, expected = MochiTransformer3DModel.from_pretrained(repo / "transformer").double(), 0.0
    for row, key in enumerate(KEYS):
        generator = torch.Generator().manual_seed(derive_seed(SEED, "train", *key))
        noise, eps = (torch.randn(shape, generator=generator).double() for _ in range(2))
        with torch.no_grad():
            posterior = vae.encode(clips[row : row + 1].double() / 127.5 - 1).latent_dist
            x0 = normalize("mochi", vae, posterior.mean[0] + posterior.std[0] * noise)
            sigma = 1 - times[0][row].double() / 1000
            prediction = stock(
                hidden_states=((1 - sigma) * x0 + sigma * eps)[None], timestep=1000 * (1 - sigma)[None],
                encoder_hidden_states=texts["prompt_embeds"][row : row + 1].double(),
                encoder_attention_mask=texts["prompt_attention_mask"][row : row + 1], return_dict=False,
            )[0][0]  # fmt: skip
        error = (mask[row] * (prediction - (x0 - eps)) ** 2).sum() / (mask[row].sum() * shape[0])
        expected += float(min(sigma**-2, 10.0) * error) / 3
    assert float(loss.detach()) == pytest.approx(expected, rel=3e-6)


@torch.no_grad()
def evaluate(state: Any, network: Any) -> float:
    """Loss of a fixed batch at fixed noise, of low and high levels."""
    batch = next(iter(state.method.steps(0, state.transformer)))[0]
    return float(torch.stack([state.method.eval_loss(network.eval(), batch, level) for level in (0.3, 0.7)]).mean())


@pytest.mark.rotating
@pytest.mark.parametrize("training_type", ["lora", "full-finetune"])
def test_it_learns_a_clip_and_resumes_exactly(
    training_type: str, options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path
) -> None:
    changes = {"target_modules": ["to_q", "to_v", "ff.net.2", "proj_out"]} if training_type == "lora" else {}
    values = options(
        "mochi", training_type=training_type, train_steps=100, checkpointing_steps=96, precompute_conditions=True,
        precompute_dir=str(tmp_path / "cache"), **changes,
    )  # fmt: skip
    done = run(**values)
    trained = done.state.parallel.unwrap(done.state.transformer)
    # Measured: 0.83 and 0.86.
    assert evaluate(done.state, trained) < 0.9 * evaluate(done.state, done.state.spec.load_transformer(torch.float32))

    again = tmp_path / "again"
    shutil.copytree(done.root / "checkpoints" / "step-96", again / "checkpoints" / "step-96")
    resumed = run(**{**values, "output_dir": str(again)}, resume_from_checkpoint="latest")
    assert resumed.steps_done == 4
    ours = resumed.state.parallel.unwrap(resumed.state.transformer).parameters()
    assert all(torch.equal(one, other) for one, other in zip(ours, trained.parameters(), strict=True))


#: `train.sh` of the earlier Mochi-1 trainer (training/mochi-1), without its prompts.
FORMER = {
    "train_batch_size": 1, "max_train_steps": 2000, "caption_dropout": 0.1, "learning_rate": 2e-4,
    "validation_prompt": "a ball", "validation_prompt_separator": ":::", "num_validation_videos": 1,
    "enable_slicing": True, "enable_tiling": True, "enable_model_cpu_offload": True, "gradient_checkpointing": True,
    "allow_tf32": True, "optimizer": "adamw", "compile_dit": True,
}  # fmt: skip


def test_the_names_of_the_former_mochi_trainer(tmp_path: Path) -> None:
    common = {
        "model_name": "mochi",
        "data_root": str(tmp_path),
        "pretrained_model_name_or_path": "genmo/mochi-1-preview",
    }
    config = load_config(**common, **FORMER)
    assert (config.training.train_steps, config.dataloader.batch_size, config.optimizer.lr) == (2000, 1, 2e-4)
    assert (config.data.caption_dropout_p, config.memory.compile) == (0.1, "regional")
    for name, value in (("cast_dit", True), ("height_buckets", 480), ("fps", 30)):
        with refused_options((name, "unknown")):
            load_config(**common, **{name: value})
