"""Tiny HunyuanVideo-1.5 repositories, with the stock classes; see `tiny`."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, Literal

from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from transformers import (
    ByT5Tokenizer,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    Qwen2Tokenizer,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5EncoderModel,
)

from finetrainers.utils.failures import InputError

from .tiny import save_pipeline, seeded
from .tiny_tokenizers import template_tokenizer

HunyuanVideo15Version = Literal["t2v", "i2v"]
#: SigLIP sees 27 x 27 patches of an image, as the published one, of 2 x 2 pixels.
_IMAGE_SIDE, _IMAGE_WIDTH = 54, 12
_TEXT_WIDTH, _GLYPH_WIDTH = 16, 16


def build_hunyuan_video_15(
    directory: Path | str, *, seed: int = 0, version: HunyuanVideo15Version = "t2v", layers: int = 2
) -> Path:
    """Write a tiny HunyuanVideo-1.5: 16x16x4 compression to 32 channels, one token per cell, Qwen2.5-VL, ByT5, SigLIP.

    An image-to-video pipeline chooses sizes of 6 cells, such as 48x32 for an image of that shape.

    Raises:
        ValueError: the version is unknown.
    """
    if version not in ("t2v", "i2v"):
        raise InputError(f"unknown HunyuanVideo-1.5 version {version!r}; valid: t2v, i2v", "unknown")
    with seeded(seed):
        tokenizer = qwen_tokenizer()
        parts: dict[str, Any] = {
            "tokenizer": tokenizer,
            "text_encoder": _text_encoder(len(tokenizer)),
            "tokenizer_2": ByT5Tokenizer(),
            "text_encoder_2": _glyph_encoder(),
            # Latents of random weights are larger than published ones.
            "vae": AutoencoderKLHunyuanVideo15(
                block_out_channels=(8, 8, 8, 16, 64), layers_per_block=1, scaling_factor=0.5
            ),
            "transformer": HunyuanVideo15Transformer3DModel(
                num_attention_heads=2, attention_head_dim=16, num_layers=layers, num_refiner_layers=1,
                text_embed_dim=_TEXT_WIDTH, text_embed_2_dim=_GLYPH_WIDTH, image_embed_dim=_IMAGE_WIDTH,
                rope_axes_dim=(4, 6, 6), target_size=40, task_type=version,
            ),
            "scheduler": FlowMatchEulerDiscreteScheduler(shift=5.0),
            "guider": ClassifierFreeGuidance(guidance_scale=6.0),
        }  # fmt: skip
        if version == "i2v":
            side = {"height": _IMAGE_SIDE, "width": _IMAGE_SIDE}
            parts |= {"image_encoder": _image_encoder(), "feature_extractor": SiglipImageProcessor(size=side)}
        pipeline = (HunyuanVideo15ImageToVideoPipeline if version == "i2v" else HunyuanVideo15Pipeline)(**parts)
    return save_pipeline(pipeline, directory)


def qwen_tokenizer() -> Qwen2Tokenizer:
    """Build a Qwen2 tokenizer for HunyuanVideo-1.5, whose pipelines cut off the first 108 tokens."""
    parameters = inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters
    # Words after a line break or a tag follow no space.
    return template_tokenizer(parameters["system_message"].default, unspaced=("system", "You", "user", "assistant"))


def _text_encoder(vocab_size: int) -> Qwen2_5_VLTextModel:
    """Build the text model of Qwen2.5-VL; the pipeline reads its third from last state."""
    config = Qwen2_5_VLTextConfig(
        vocab_size=-(-vocab_size // 8) * 8, hidden_size=_TEXT_WIDTH, intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=2048, bos_token_id=0, eos_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
    )  # fmt: skip
    return Qwen2_5_VLTextModel(config).eval()


def _glyph_encoder() -> T5EncoderModel:
    config = T5Config(
        vocab_size=384, d_model=_GLYPH_WIDTH, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
        relative_attention_num_buckets=8, feed_forward_proj="gated-gelu", is_encoder_decoder=False, use_cache=False,
        tie_word_embeddings=False,
    )  # fmt: skip
    return T5EncoderModel(config).eval()


def _image_encoder() -> SiglipVisionModel:
    config = SiglipVisionConfig(
        hidden_size=_IMAGE_WIDTH, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        image_size=_IMAGE_SIDE, patch_size=2,
    )  # fmt: skip
    return SiglipVisionModel(config).eval()
