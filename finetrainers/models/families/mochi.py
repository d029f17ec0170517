"""Facts about Mochi checkpoints, read from their config files. Imports no torch."""

from __future__ import annotations

import math

from finetrainers.config.facts import Configs, Facts, LoRASettings
from finetrainers.config.geometry import Geometry
from finetrainers.utils.failures import InputError

from ..family import Family

#: `demos/fine_tuner/configs/lora.yaml` of Genmo's repository.
_LORA = LoRASettings(
    16, 2e-4, 2000,
    {"lr_scheduler": "cosine", "lr_warmup_steps": 200, "weight_decay": 0.01, "caption_dropout_p": 0.1},
)  # fmt: skip
#: Frames per latent frame, pixels per latent cell, and channels that `MochiPipeline` has as constants.
_COMPRESSION = (6, 8, 12)


def read(configs: Configs) -> Facts:
    """Read the facts about a Mochi checkpoint.

    Raises:
        ValueError: its VAE has another compression than the pipeline, which does not read the VAE's config.
    """
    vae, transformer = configs.get("vae", {}), configs.get("transformer", {})
    temporal = math.prod(vae.get("temporal_expansions", (1, 2, 3)))
    spatial = math.prod(vae.get("spatial_expansions", (2, 2, 2)))
    compression = (temporal, spatial, vae.get("latent_channels", 12))
    if compression != _COMPRESSION:
        actual, supported = (" x ".join(map(str, numbers)) for numbers in (compression, _COMPRESSION))
        raise InputError(
            f"a mochi VAE with {actual} (frames x pixels x channels) is not supported, since MochiPipeline assumes "
            f"{supported}; use that of genmo/mochi-1-preview",
            "unsupported",
        )
    return Facts(
        Geometry(temporal=temporal, spatial=spatial, patch=transformer.get("patch_size", 2), patch_t=1, fps=30.0),
        heads=transformer.get("num_attention_heads", 24),
        # Only the blocks' video stream: `to_q` alone would also be the query of the pooled caption (`time_embed`).
        lora_targets=("attn1.to_k", "attn1.to_q", "attn1.to_v", "attn1.to_out.0"),
        lora=_LORA,
        least_steps=2,  # its linear-quadratic schedule divides by the number of linear steps, half of all
        # Those of `demos/cli.py` of Genmo's repository. Its `demos/fine_tuner/train.py` has uniform noise levels.
        defaults={"sample_posterior": True, "validation_guidance_scale": 6.0, "validation_inference_steps": 64},
        noise_source="Genmo's demos/fine_tuner",
    )


FAMILY = Family(
    name="mochi", spec="finetrainers.models.mochi:MochiSpec", read=read,
    transformer="MochiTransformer3DModel", vae="AutoencoderKLMochi", pipelines=("MochiPipeline",),
    published=("genmo/mochi-1-preview",),
    starters={"genmo/mochi-1-preview": 10},
    # The encoder reads pixels through sines of up to 128 periods, which bf16's 8 bits shift by up to half a period.
    dtypes={"vae_dtype": "fp32"},
    tiny="finetrainers.models.tiny_mochi:build_mochi",
)  # fmt: skip
