"""Tiny Wan repositories: each kind of checkpoint with the stock classes; see `tiny`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel, UMT5Config, UMT5EncoderModel

from finetrainers.utils.failures import InputError

from .tiny import save_pipeline, seeded
from .tiny_tokenizers import t5_tokenizer

WanVersion = Literal["t2v", "i2v", "flf2v", "ti2v", "a14b", "a14b_i2v"]
#: CLIP sees 16 x 16 patches of an image, as the published one, of 2 x 2 pixels.
_CLIP_SIDE, _CLIP_WIDTH = 32, 16
IMAGE_TOKENS = 257
ON_CHANNELS = {"in_channels": 36}
SEES_IMAGE = {**ON_CHANNELS, "image_dim": _CLIP_WIDTH, "added_kv_proj_dim": 48}
#: By version: the shift of its scheduler, and options of its transformer and of its pipeline.
_VERSIONS: dict[str, tuple[float, dict[str, Any], dict[str, Any]]] = {
    "t2v": (3.0, {}, {}),
    "i2v": (3.0, SEES_IMAGE, {}),
    "flf2v": (16.0, {**SEES_IMAGE, "pos_embed_seq_len": 2 * IMAGE_TOKENS}, {}),
    "ti2v": (5.0, {"in_channels": 48, "out_channels": 48}, {"expand_timesteps": True}),
    "a14b": (3.0, {}, {"boundary_ratio": 0.875}),
    "a14b_i2v": (5.0, ON_CHANNELS, {"boundary_ratio": 0.9}),
}


def build_wan(directory: Path | str, *, seed: int = 0, version: WanVersion = "t2v", layers: int = 2) -> Path:
    """Write a tiny Wan: 8x8x4 compression to 16 channels (5B: 16x16x4 to 48), 1x2x2 patches, UMT5, CLIP for images.

    Raises:
        ValueError: the version is unknown.
    """
    if version not in _VERSIONS:
        raise InputError(f"unknown Wan version {version!r}; valid: {', '.join(_VERSIONS)}", "unknown")
    shift, options, settings = _VERSIONS[version]
    with seeded(seed):
        tokenizer = t5_tokenizer()
        parts: dict[str, Any] = {
            "tokenizer": tokenizer,
            "text_encoder": text_encoder(tokenizer),
            "vae": wan_vae(is_residual="expand_timesteps" in settings),
            "transformer": _transformer(layers, options),
            "scheduler": UniPCMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=shift
            ),
        }
        if "boundary_ratio" in settings:
            parts["transformer_2"] = _transformer(layers, options)
        if "image_dim" in options:
            parts |= {"image_encoder": image_encoder(CLIPVisionModel), "image_processor": image_processor()}
        animates = options.get("in_channels") == ON_CHANNELS["in_channels"]
        pipeline = (WanImageToVideoPipeline if animates else WanPipeline)(**parts, **settings)
    return save_pipeline(pipeline, directory)


def _transformer(layers: int, options: dict[str, Any]) -> WanTransformer3DModel:
    return WanTransformer3DModel(
        **{
            "patch_size": (1, 2, 2), "num_attention_heads": 4, "attention_head_dim": 12, "in_channels": 16,
            "out_channels": 16, "text_dim": 32, "freq_dim": 32, "ffn_dim": 96, "num_layers": layers, **options,
        }
    )  # fmt: skip


def wan_vae(*, is_residual: bool) -> AutoencoderKLWan:
    """Build the VAE of 2.1 and A14B, or the residual one of 5B, whose pixels come in patches of 2 x 2."""
    if not is_residual:
        return AutoencoderKLWan(base_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    mean = [0.1 * (channel % 5 - 2) for channel in range(48)]
    std = [0.5 + 0.02 * channel for channel in range(48)]
    return AutoencoderKLWan(
        base_dim=8, decoder_base_dim=8, z_dim=48, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=mean,
        latents_std=std, is_residual=True, in_channels=12, out_channels=12, patch_size=2, scale_factor_spatial=16,
    )  # fmt: skip


def text_encoder(tokenizer: Any) -> UMT5EncoderModel:
    """Build UMT5."""
    config = UMT5Config(
        vocab_size=-(-len(tokenizer) // 8) * 8, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        relative_attention_num_buckets=8, feed_forward_proj="gated-gelu", is_encoder_decoder=False, use_cache=False,
        tie_word_embeddings=False,
    )  # fmt: skip
    return UMT5EncoderModel(config).eval()


def image_encoder(cls: Any) -> Any:
    """Build CLIP's image encoder of a class, with as many tokens as the published one."""
    config = CLIPVisionConfig(
        hidden_size=_CLIP_WIDTH, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        image_size=_CLIP_SIDE, patch_size=2,
    )  # fmt: skip
    return cls(config).eval()


def image_processor() -> CLIPImageProcessor:
    """Build the processor of that encoder's images."""
    crop_size = {"height": _CLIP_SIDE, "width": _CLIP_SIDE}
    return CLIPImageProcessor(size={"shortest_edge": _CLIP_SIDE}, crop_size=crop_size)
