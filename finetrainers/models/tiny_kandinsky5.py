"""Tiny Kandinsky 5 repositories, with the stock classes; see `tiny`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from diffusers import (
    AutoencoderKLHunyuanVideo,
    FlowMatchEulerDiscreteScheduler,
    Kandinsky5I2VPipeline,
    Kandinsky5T2VPipeline,
    Kandinsky5Transformer3DModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from finetrainers.utils.failures import InputError

from .tiny import save_pipeline, seeded
from .tiny_tokenizers import clip_tokenizer, template_tokenizer

Kandinsky5Version = Literal["t2v", "i2v"]
_TEXT_WIDTH, _CLIP_WIDTH = 16, 8
_PIPELINES = {"t2v": Kandinsky5T2VPipeline, "i2v": Kandinsky5I2VPipeline}


def build_kandinsky5(
    directory: Path | str, *, seed: int = 0, version: Kandinsky5Version = "t2v", layers: int = 2
) -> Path:
    """Write a tiny Kandinsky 5: HunyuanVideo's 8x8x4 compression to 16 channels, 2x2 patches, Qwen2.5-VL and CLIP.

    Raises:
        ValueError: the version is unknown.
    """
    if version not in _PIPELINES:
        raise InputError(f"unknown Kandinsky 5 version {version!r}; valid: {', '.join(_PIPELINES)}", "unknown")
    with seeded(seed):
        template = Kandinsky5T2VPipeline(*[None] * 7).prompt_template
        # The template has 131 tokens here, and the pipelines cut off 128: each text begins with its last three.
        unspaced = ("system", "You", "Describe", "Name", "Pay", "user")
        tokenizers = template_tokenizer(template, unspaced=unspaced), clip_tokenizer()
        transformer = Kandinsky5Transformer3DModel(
            in_visual_dim=16, out_visual_dim=16, in_text_dim=_TEXT_WIDTH, in_text_dim2=_CLIP_WIDTH, time_dim=32,
            model_dim=32, ff_dim=64, num_text_blocks=1, num_visual_blocks=layers, axes_dims=(4, 6, 6), visual_cond=True,
        )  # fmt: skip
        for name, parameter in transformer.named_parameters():
            if "modulation" in name:  # the class has zeros
                parameter.normal_(std=0.05)
        pipeline = _PIPELINES[version](
            tokenizer=tokenizers[0],
            text_encoder=_text_encoder(len(tokenizers[0])),
            tokenizer_2=tokenizers[1],
            text_encoder_2=_clip(tokenizers[1]),
            vae=AutoencoderKLHunyuanVideo(
                latent_channels=16,
                block_out_channels=(8, 8, 8, 8),
                layers_per_block=1,
                norm_num_groups=4,
                scaling_factor=0.476986,
            ),
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        )
    return save_pipeline(pipeline, directory)


def _text_encoder(vocab_size: int) -> Qwen2_5_VLForConditionalGeneration:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
    text = {
        "vocab_size": -(-vocab_size // 8) * 8, "hidden_size": _TEXT_WIDTH, "intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 2048,
        "bos_token_id": 0, "eos_token_id": 0, "rope_parameters": rope,
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 8, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": _TEXT_WIDTH,
    }  # fmt: skip
    # Tokens of images, which prompts do not have.
    places: dict[str, Any] = dict.fromkeys(
        ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"), vocab_size - 1
    )
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **places)).eval()


def _clip(tokenizer: Any) -> CLIPTextModel:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=_CLIP_WIDTH, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, projection_dim=_CLIP_WIDTH, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return CLIPTextModel(config).eval()
