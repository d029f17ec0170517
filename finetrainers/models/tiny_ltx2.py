"""Tiny LTX-2 repositories: 2.0 and 2.3 with the stock classes, sound included; see `tiny`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig, SiglipVisionConfig

from finetrainers.utils.failures import InputError

from .tiny import save_pipeline, seeded
from .tiny_tokenizers import gemma_tokenizer

LTX2Version = Literal["2.0", "2.3"]
_TEXT_WIDTH, _TEXT_LAYERS = 32, 2
#: Width of a video token, of an audio token, and of a head of each: both streams have four.
_WIDTH, _AUDIO_WIDTH, _HEADS = 64, 32, 4
#: By version, options of the transformer, of the connectors, and of the VAE, beside those of both.
_VERSIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "2.0": (
        {},
        {"video_connector_attention_head_dim": 8, "audio_connector_attention_head_dim": 8},
        {
            "decoder_block_out_channels": (8, 16, 32), "decoder_layers_per_block": (1, 1, 1, 1),
            "decoder_spatial_padding_mode": "reflect",
        },
    ),
    "2.3": (
        {
            "gated_attn": True, "cross_attn_mod": True, "audio_gated_attn": True, "audio_cross_attn_mod": True,
            "use_prompt_embeddings": False, "perturbed_attn": True,
        },
        {
            "video_connector_attention_head_dim": _WIDTH // _HEADS, "video_hidden_dim": _WIDTH,
            "audio_connector_attention_head_dim": _AUDIO_WIDTH // _HEADS, "audio_hidden_dim": _AUDIO_WIDTH,
            "video_gated_attn": True, "audio_gated_attn": True, "per_modality_projections": True, "proj_bias": True,
        },
        {
            "decoder_block_out_channels": (8, 16, 16, 32), "decoder_layers_per_block": (1, 1, 1, 1, 1),
            "decoder_spatio_temporal_scaling": (True,) * 4, "decoder_inject_noise": (False,) * 5,
            "upsample_type": ("spatiotemporal", "spatiotemporal", "temporal", "spatial"),
            "upsample_residual": (False,) * 4, "upsample_factor": (2, 2, 1, 2),
            "decoder_spatial_padding_mode": "zeros",
        },
    ),
}  # fmt: skip


def build_ltx2(directory: Path | str, *, seed: int = 0, version: LTX2Version = "2.0", layers: int = 2) -> Path:
    """Write a tiny LTX-2: 32x32x8 compression to 128 channels, one token per latent cell, Gemma 3, and sound.

    Raises:
        ValueError: the version is unknown.
    """
    if version not in _VERSIONS:
        raise InputError(f"unknown LTX-2 version {version!r}; valid: {', '.join(_VERSIONS)}", "unknown")
    transformer, connectors, vae = _VERSIONS[version]
    with seeded(seed):
        tokenizer = gemma_tokenizer()
        parts: dict[str, Any] = {
            "tokenizer": tokenizer,
            "text_encoder": _text_encoder(len(tokenizer)),
            "connectors": LTX2TextConnectors(
                caption_channels=_TEXT_WIDTH, text_proj_in_factor=_TEXT_LAYERS + 1, rope_type="split",
                video_connector_num_attention_heads=_HEADS, video_connector_num_layers=1,
                audio_connector_num_attention_heads=_HEADS, audio_connector_num_layers=1, **connectors,
            ),
            "vae": _video_vae(vae),
            "audio_vae": AutoencoderKLLTX2Audio(
                base_channels=16, latent_channels=1, ch_mult=(1, 1, 1), num_res_blocks=1
            ),
            "vocoder": LTX2Vocoder(
                in_channels=128, hidden_channels=8, upsample_kernel_sizes=[4, 4], upsample_factors=[2, 2],
                resnet_kernel_sizes=[3], resnet_dilations=[[1]],
            ),
            "transformer": LTX2VideoTransformer3DModel(
                num_attention_heads=_HEADS, attention_head_dim=_WIDTH // _HEADS, cross_attention_dim=_WIDTH,
                audio_num_attention_heads=_HEADS, audio_attention_head_dim=_AUDIO_WIDTH // _HEADS,
                audio_cross_attention_dim=_AUDIO_WIDTH, audio_in_channels=16, audio_out_channels=16,
                caption_channels=_TEXT_WIDTH, num_layers=layers,
                rope_type="split", **transformer,
            ),
            "scheduler": FlowMatchEulerDiscreteScheduler(
                use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024,
                max_image_seq_len=4096, shift_terminal=0.1,
            ),
        }  # fmt: skip
        pipeline = LTX2Pipeline(**parts)
    return save_pipeline(pipeline, directory)


def _text_encoder(words: int) -> Gemma3ForConditionalGeneration:
    text = Gemma3TextConfig(
        vocab_size=words, hidden_size=_TEXT_WIDTH, intermediate_size=64, num_hidden_layers=_TEXT_LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8, sliding_window=512,
        layer_types=["sliding_attention", "full_attention"], use_cache=False,
    )  # fmt: skip
    vision = SiglipVisionConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=4
    )
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=words - 1)
    encoder = Gemma3ForConditionalGeneration(config).eval()
    for name, parameter in encoder.named_parameters():
        if "norm" in name:  # the class's are zero, which is a factor of 1
            parameter.normal_(std=0.1)
        elif "embed_tokens" in name:
            parameter.normal_(std=0.3)
    return encoder


def _video_vae(options: dict[str, Any]) -> AutoencoderKLLTX2Video:
    vae = AutoencoderKLLTX2Video(
        block_out_channels=(8, 8, 16, 16), layers_per_block=(1, 1, 1, 1, 1), decoder_causal=False,
        spatial_compression_ratio=32, temporal_compression_ratio=8, **options,
    )  # fmt: skip
    # Statistics that are not the identity, as published ones are not.
    vae.latents_mean.normal_(std=0.1)
    vae.latents_std.uniform_(0.5, 1.5)
    return vae
