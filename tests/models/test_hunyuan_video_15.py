"""HunyuanVideo-1.5 against diffusers' own network and pipeline: glyphs, images in a batch, sizes, and refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image
from refusals import refused
from safetensors.torch import load_file
from torch import Tensor

from finetrainers.config.sections import ModelSection
from finetrainers.models.batch import Batch, PromptEmbeds, SampleRequest, VideoMeta
from finetrainers.models.files.lora_formats import Factors, Lora, save_original, to_stored
from finetrainers.models.files.original import known_layouts
from finetrainers.models.hunyuan_video_15 import IMAGE_STATES, HunyuanVideo15Spec
from finetrainers.models.registry import get_family

PROMPTS = ["a red ball", 'a cat with a sign "slow" and a sign "still"']


def spec_of(repo: Path) -> HunyuanVideo15Spec:
    section = ModelSection(
        model_name="hunyuan_video_15", pretrained_model_name_or_path=str(repo), text_encoder_dtype="fp32",
        transformer_dtype="fp32", vae_dtype="fp32", part=["image_encoder=,fp32", "text_encoder_2=,fp32"],
    )  # fmt: skip
    spec = get_family("hunyuan_video_15").load(section)
    assert isinstance(spec, HunyuanVideo15Spec)
    return spec


def test_quoted_text_is_encoded_as_by_the_pipeline(tiny_repo: Callable[..., Path]) -> None:
    """Each prompt as in the pipeline's call; without quotation marks there are no glyphs."""
    repo = tiny_repo("hunyuan_video_15")
    spec = spec_of(repo)
    conditions = spec.encode_text(spec.load_text_encoders(), PROMPTS)
    pipeline = diffusers.HunyuanVideo15Pipeline.from_pretrained(repo, dtype=torch.float32)
    expected = pipeline.encode_prompt(PROMPTS, batch_size=2, device="cpu", dtype=torch.float32)
    names = ("prompt_embeds", "prompt_attention_mask", "glyph_embeds", "glyph_attention_mask")
    for name, tensor in zip(names, expected, strict=True):
        torch.testing.assert_close(conditions[name].float(), tensor, rtol=1e-5, atol=1e-6)
    moved = conditions.to("meta")
    text = 'Text "slow". Text "still". '
    assert moved.further_lengths == {"glyph_attention_mask": (0, len(text) + 1)}
    assert moved.rows([1]).further_lengths == {"glyph_attention_mask": (len(text) + 1,)}
    joined = PromptEmbeds.cat([moved.rows([1]), moved.rows([0])])
    assert joined.further_lengths == {"glyph_attention_mask": (len(text) + 1, 0)}
    assert conditions.trimmed().further_lengths == moved.further_lengths
    assert not conditions["glyph_embeds"][0].any()


@pytest.fixture
def stock(tiny_repo: Callable[..., Path]) -> Callable[[str], Any]:
    def load(version: str) -> Any:
        folder = tiny_repo("hunyuan_video_15", version) / "transformer"
        return diffusers.HunyuanVideo15Transformer3DModel.from_pretrained(folder, torch_dtype=torch.float32)

    return load


def given_inputs(spec: HunyuanVideo15Spec) -> tuple[Tensor, Tensor, PromptEmbeds, VideoMeta]:
    """Noise, times and texts of two clips, of which only the first is given its first frame."""
    encoders = spec.load_clip_encoders()
    pixels = torch.randint(0, 256, (2, 3, 5, 48, 32), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    clip, stats = spec.encode_clip(encoders, pixels, None), spec.vae_stats(encoders["vae"])
    meta = VideoMeta(fps=torch.full((2,), 24.0))
    batch = Batch(clip["moments"], PromptEmbeds({}), meta, [(0, 0), (0, 1)], clip)
    x0 = spec.latents(batch.moments, None, stats)
    meta = spec.condition(batch, x0, [(0,), ()], stats)[0]
    assert spec.condition(batch, x0, [(), ()], stats)[0].extra.keys() == {"first_frame"}
    conditions = spec.encode_text(spec.load_text_encoders(), PROMPTS)
    x = torch.randn(x0.shape, generator=torch.Generator().manual_seed(4))
    return x, torch.tensor([0.3, 0.857]), conditions, meta


def of_row(row: int, inputs: tuple[Tensor, Tensor, PromptEmbeds, VideoMeta]) -> tuple[Any, ...]:
    x, t, conditions, meta = inputs
    extra = {name: tensor[row : row + 1] for name, tensor in meta.extra.items()}
    if not extra["first_frame"].any():
        del extra[IMAGE_STATES]
    return x[row : row + 1], t[row : row + 1], conditions.rows([row]), VideoMeta(meta.fps[row : row + 1], extra)


@pytest.mark.rotating
@pytest.mark.parametrize("trims", [False, True])
def test_rows_of_a_batch_are_what_the_stock_network_computes_of_each(
    trims: bool, tiny_repo: Callable[..., Path], stock: Callable[[str], Any]
) -> None:
    """With and without glyphs and an image, whether masks or lengths say what is padding."""
    spec = spec_of(tiny_repo("hunyuan_video_15", "i2v"))
    inputs = given_inputs(spec)
    network, reference = spec.load_transformer(torch.float32), stock("i2v")
    x, t, conditions, meta = inputs
    with torch.no_grad():
        together = spec.predict(network, x, t, conditions.trimmed() if trims else conditions, meta)
        for row in range(2):
            one = of_row(row, inputs)
            channels = torch.zeros(1, 33, *one[0].shape[2:])
            channels[:, :, :1] = one[3].extra["first_frame"]
            assert channels[:, 32, 0].unique().tolist() == [1.0 - row]
            expected = reference(
                hidden_states=torch.cat([one[0], channels], dim=1), timestep=1000 * one[1],
                encoder_hidden_states=one[2]["prompt_embeds"],
                encoder_attention_mask=one[2]["prompt_attention_mask"].float(),
                encoder_hidden_states_2=one[2]["glyph_embeds"],
                encoder_attention_mask_2=one[2]["glyph_attention_mask"].float(),
                image_embeds=one[3].extra.get(IMAGE_STATES, torch.zeros(1, 729, 12)), return_dict=False,
            )[0]  # fmt: skip
            torch.testing.assert_close(together[row : row + 1], expected, rtol=1e-4, atol=1e-5)
            alone = (one[2].trimmed() if trims else one[2]).to("cpu")
            torch.testing.assert_close(
                spec.predict(network, one[0], one[1], alone, one[3]), expected, rtol=1e-4, atol=1e-5
            )


def test_a_text_that_is_empty_is_an_error(tiny_repo: Callable[..., Path]) -> None:
    spec = spec_of(tiny_repo("hunyuan_video_15"))
    conditions, meta = spec.empty_inputs(1)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in conditions.tensors.items()}
    x = torch.zeros(1, 32, 1, 2, 2)
    with pytest.raises(ValueError, match="row 0 "):
        spec.predict(
            spec.load_transformer(torch.float32), x, torch.tensor([0.5]), PromptEmbeds(tensors).to("cpu"), meta
        )


@pytest.mark.rotating
def test_times_keep_their_precision_in_16_bits(tiny_repo: Callable[..., Path]) -> None:
    """Levels that bf16 cannot tell apart give other predictions."""
    spec = spec_of(tiny_repo("hunyuan_video_15"))
    network, inputs = spec.load_transformer(torch.bfloat16), spec.empty_inputs(1)
    conditions = spec.encode_text(spec.load_text_encoders(), PROMPTS[:1]).to("cpu", torch.bfloat16)
    x, seen = torch.randn(1, 32, 1, 2, 2), []
    network.time_embed.timestep_embedder.register_forward_pre_hook(lambda _, args: seen.append(args[0].float()))
    with torch.no_grad():
        for level in (0.857, 0.858):
            spec.predict(network, x, torch.tensor([level]), conditions, inputs[1])
    assert (seen[0] - seen[1]).abs().max() > 0.1


@pytest.mark.rotating
def test_samples_from_an_image_have_the_size_of_the_request(tiny_repo: Callable[..., Path]) -> None:
    """The pipeline alone chooses another. Also from the first frame of a prefix's kind: a tensor."""
    spec = spec_of(tiny_repo("hunyuan_video_15", "i2v"))
    pipeline = spec.pipeline(
        spec.load_transformer(torch.float32), spec.load_vae(), spec.load_scheduler(), image_to_video=True
    )
    pipeline.set_progress_bar_config(disable=True)
    rows = spec.encode_text(spec.load_text_encoders(), ["a red ball", ""])
    request = SampleRequest(5, 32, 64, 24.0, 2, 2.0, image=Image.new("RGB", (64, 32), (250, 10, 10)))
    found = [
        spec.sample(pipeline, rows.rows([0]), rows.rows([1]), given, torch.Generator().manual_seed(1))
        for given in (request, replace(request, guidance_scale=1.0), replace(request, height=48, width=32))
    ]
    assert [frames.shape for frames in found] == [(5, 32, 64, 3)] * 2 + [(5, 48, 32, 3)]
    assert abs(found[0] - found[1]).max() > 1e-4  # guidance has an effect
    with refused("required"):
        spec.pipeline_call(rows.rows([0]), rows.rows([1]), replace(request, image=None))


def test_other_checkpoints_are_refused(tiny_repo: Callable[..., Path]) -> None:
    read = get_family("hunyuan_video_15").read
    assert read({"transformer": {"task_type": "t2v"}}).first_frame == "none"
    assert read({"transformer": {"in_channels": 65}}).sees_image
    with refused("unsupported", "use_meanflow"):
        read({"transformer": {"use_meanflow": True}})
    with refused("unsupported", "98"):  # a super-resolution transformer
        read({"transformer": {"in_channels": 98}})
    spec = spec_of(tiny_repo("hunyuan_video_15"))
    conditions, meta = spec.empty_inputs(1)
    given = replace(meta, extra={"first_frame": torch.zeros(1, 33, 1, 2, 2)})
    with refused("unsupported"):
        spec.predict(spec.transformer_on_meta(), torch.zeros(1, 32, 1, 2, 2), torch.tensor([0.5]), conditions, given)


#: Layers of Tencent's network (scripts/convert_hunyuan_video1_5_to_diffusers.py of diffusers), without weight and bias:
#: those of a block, and the others.
BLOCK = {
    f"{stream}_{layer}"
    for stream in ("img", "txt")
    for layer in ("mod.linear", "attn_q", "attn_k", "attn_v", "attn_q_norm", "attn_k_norm", "attn_proj", "mlp.fc1",
                  "mlp.fc2")
}  # fmt: skip
OTHERS = {
    "img_in.proj", "time_in.mlp.0", "time_in.mlp.2", "txt_in.t_embedder.mlp.0", "txt_in.t_embedder.mlp.2",
    "txt_in.c_embedder.linear_1", "txt_in.c_embedder.linear_2", "txt_in.input_embedder",
    *(f"txt_in.individual_token_refiner.blocks.0.{name}" for name in (
        "norm1", "self_attn_qkv", "self_attn_proj", "norm2", "mlp.fc1", "mlp.fc2", "adaLN_modulation.1")),
    "byt5_in.layernorm", "byt5_in.fc1", "byt5_in.fc2", "byt5_in.fc3", "cond_type_embedding",
    *(f"vision_in.proj.{n}" for n in (0, 1, 3, 4)), "final_layer.adaLN_modulation.1", "final_layer.linear",
}  # fmt: skip


def test_files_have_the_names_of_tencent_and_of_comfyui(stock: Callable[[str], Any], tmp_path: Path) -> None:
    """Tencent's have query, key and value apart; ComfyUI's files, which are written, have them joined."""
    network = stock("t2v")
    weights = network.state_dict()

    def bare(names: Any) -> set[str]:
        return {re.sub(r"^double_blocks\.\d+\.|\.(weight|bias)$", "", name) for name in names}

    layouts = known_layouts(type(network).__name__, weights)
    assert bare(layouts["Tencent's"]) == BLOCK | OTHERS
    save_original(tmp_path / "a.safetensors", network, weights)
    saved = load_file(tmp_path / "a.safetensors")
    apart = {f"{stream}_attn_{part}" for stream in ("img", "txt") for part in "qkv"}
    assert bare(saved) == (BLOCK - apart) | OTHERS | {"img_attn_qkv", "txt_attn_qkv"}
    key = saved["double_blocks.1.txt_attn_qkv.weight"].chunk(3)[1]
    assert key.equal(weights["transformer_blocks.1.attn.add_k_proj.weight"])
    shift, scale = saved["final_layer.adaLN_modulation.1.bias"].chunk(2)  # scale comes first in diffusers
    assert torch.cat([scale, shift]).equal(weights["norm_out.linear.bias"])


def test_loras_have_the_names_of_musubi_tuner_and_of_comfyui(stock: Callable[[str], Any]) -> None:
    """Its converter to ComfyUI's joins query, key and value, and multiplies rank and alpha by three."""
    network = stock("t2v")
    names = [f"transformer_blocks.0.attn.{name}" for name in ("to_q", "to_k", "to_v", "add_q_proj", "to_out.0")]
    factors = {name: Factors(torch.randn(2, 32), torch.randn(32, 2), 1.5) for name in names}
    kohya = to_stored(Lora(factors), network, "kohya")
    layers = {name.removeprefix("lora_unet_double_blocks_0_").split(".")[0] for name in kohya}
    assert layers == {"img_attn_q", "img_attn_k", "img_attn_v", "txt_attn_q", "img_attn_proj"}
    comfyui = to_stored(Lora(factors), network, "comfyui")
    joined = "diffusion_model.double_blocks.0.img_attn_qkv.lora_"
    assert (comfyui[f"{joined}A.weight"].shape, comfyui[f"{joined}B.weight"].shape) == ((6, 32), (96, 6))
    for place, name in enumerate(names[:3]):
        rows = comfyui[f"{joined}B.weight"][32 * place : 32 * (place + 1)] @ comfyui[f"{joined}A.weight"]
        torch.testing.assert_close(rows, 1.5 * factors[name].up @ factors[name].down)
