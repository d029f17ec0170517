"""Tiny SkyReels-V2 repositories: each kind of checkpoint with the stock classes; see `tiny`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from diffusers import (
    SkyReelsV2DiffusionForcingPipeline,
    SkyReelsV2ImageToVideoPipeline,
    SkyReelsV2Pipeline,
    SkyReelsV2Transformer3DModel,
    UniPCMultistepScheduler,
)
from transformers import CLIPVisionModelWithProjection

from finetrainers.utils.failures import InputError

from .tiny import save_pipeline, seeded
from .tiny_tokenizers import t5_tokenizer
from .tiny_wan import IMAGE_TOKENS, SEES_IMAGE, image_encoder, image_processor, text_encoder, wan_vae

SkyReelsV2Version = Literal["t2v", "i2v", "flf2v", "df"]
#: By version: pipeline, the shift that its publishers recommend, and options of its transformer; that of the published
#: 1.3B diffusion-forcing checkpoint takes the frame rate.
_VERSIONS: dict[str, tuple[Any, float, dict[str, Any]]] = {
    "t2v": (SkyReelsV2Pipeline, 8.0, {}),
    "i2v": (SkyReelsV2ImageToVideoPipeline, 5.0, SEES_IMAGE),
    "flf2v": (SkyReelsV2ImageToVideoPipeline, 5.0, {**SEES_IMAGE, "pos_embed_seq_len": 2 * IMAGE_TOKENS}),
    "df": (SkyReelsV2DiffusionForcingPipeline, 8.0, {"inject_sample_info": True}),
}


def build_skyreels_v2(
    directory: Path | str,
    *,
    seed: int = 0,
    version: SkyReelsV2Version = "t2v",
    layers: int = 2,
    inject_sample_info: bool | None = None,
) -> Path:
    """Write a tiny SkyReels-V2: Wan 2.1's VAE, UMT5 and design, CLIP for images, and an embedding of frame rates.

    Args:
        directory: of the repository.
        seed: of its weights.
        version: kind of checkpoint.
        layers: blocks of the transformer.
        inject_sample_info: whether the network takes the frame rate; default: as the published ones of the version.

    Raises:
        ValueError: the version is unknown.
    """
    if version not in _VERSIONS:
        raise InputError(f"unknown SkyReels-V2 version {version!r}; valid: {', '.join(_VERSIONS)}", "unknown")
    pipeline_class, shift, options = _VERSIONS[version]
    if inject_sample_info is not None:
        options = {**options, "inject_sample_info": inject_sample_info}
    with seeded(seed):
        tokenizer = t5_tokenizer()
        parts: dict[str, Any] = {
            "tokenizer": tokenizer,
            "text_encoder": text_encoder(tokenizer),
            "vae": wan_vae(is_residual=False),
            "transformer": SkyReelsV2Transformer3DModel(
                **{
                    "num_attention_heads": 4, "attention_head_dim": 12, "text_dim": 32, "freq_dim": 32, "ffn_dim": 96,
                    "num_layers": layers, **options,
                }
            ),
            "scheduler": UniPCMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=shift
            ),
        }  # fmt: skip
        if "image_dim" in options:
            encoder = image_encoder(CLIPVisionModelWithProjection)
            parts |= {"image_encoder": encoder, "image_processor": image_processor()}
        pipeline = pipeline_class(**parts)
    return save_pipeline(pipeline, directory)
