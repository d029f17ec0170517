"""Facts about Wan 2.1 and 2.2 checkpoints, read from their config files. Imports no torch."""

from __future__ import annotations

from finetrainers.config.facts import Configs, Facts, LoRASettings
from finetrainers.config.geometry import Geometry
from finetrainers.utils.failures import InputError

from ..family import CONSTANT_LR, Family

_LORA = LoRASettings(32, 1e-4, 1500, {"flow_shift": 3.0, **CONSTANT_LR})


def read(configs: Configs) -> Facts:
    """Read the facts about a Wan checkpoint: 2.1, 2.2 A14B with two experts, or 2.2 5B.

    Text-to-video transformers take the latents alone, image-to-video ones also a mask, with a channel for each frame of
    a latent frame, and the latents of the given frames. Those of 2.1 also read CLIP's states of the image; one with
    positions for two images is given the last frame, too. 5B takes a time per token (`expand_timesteps`), so that given
    frames are clean tokens. Two experts share the noise levels at `boundary_ratio` of the pipeline's config.

    Raises:
        ValueError: a checkpoint that takes something else.
    """
    vae, index = configs.get("vae", {}), configs.get("model_index", {})
    transformer = configs.get("transformer", configs.get("transformer_2", {}))
    is_known = bool(transformer)
    inputs, latents = transformer.get("in_channels", 16), transformer.get("out_channels") or 16
    temporal, patch = vae.get("scale_factor_temporal", 4), transformer.get("patch_size", (1, 2, 2))
    if inputs not in (latents, 2 * latents + temporal):
        raise InputError(
            f"a wan transformer with {inputs} input channels for {latents} latent channels is not known; text-to-video "
            f"checkpoints have {latents}, image-to-video ones {2 * latents + temporal}",
            "unsupported",
        )
    has_times = index.get("expand_timesteps", latents == 48)
    on_channels, sees_image = inputs > latents, transformer.get("image_dim") is not None
    kind = "tokens" if has_times else "channels" if on_channels else "none"
    image_parts = ("image_processor", "image_encoder") if sees_image else ()
    return Facts(
        Geometry(
            temporal=temporal,
            spatial=vae.get("scale_factor_spatial", 8),
            patch=patch[1],
            patch_t=patch[0],
            fps=24.0 if has_times else 16.0,
            pixels=16,
        ),
        clip_parts=(*image_parts, "vae"),
        companions=image_parts,
        heads=transformer.get("num_attention_heads"),
        lora=_LORA,
        first_frame=kind if is_known else "unknown",
        any_frame=has_times or not is_known,
        first_frame_p=1.0 if on_channels else 0.1 if has_times else 0.0,
        last_frame=transformer.get("pos_embed_seq_len") is not None,
        sees_image=sees_image,
        boundary=index.get("boundary_ratio"),
    )


FAMILY = Family(
    name="wan", spec="finetrainers.models.wan:WanSpec", read=read,
    transformer="WanTransformer3DModel", vae="AutoencoderKLWan",
    pipelines=("WanPipeline", "WanImageToVideoPipeline", "WanVideoToVideoPipeline"),
    published=(
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "Wan-AI/Wan2.1-T2V-14B-Diffusers",
        "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers",
        "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers", "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
        "Wan-AI/Wan2.2-T2V-A14B-Diffusers", "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
    ),
    starters={"Wan-AI/Wan2.1-T2V-1.3B-Diffusers": 1.3, "Wan-AI/Wan2.1-T2V-14B-Diffusers": 14},
    dtypes={"vae_dtype": "fp32"},  # as in diffusers' examples: bf16 shifts colors
    tiny="finetrainers.models.tiny_wan:build_wan",
    tiny_versions=("t2v", "i2v", "flf2v", "ti2v", "a14b", "a14b_i2v"),
)  # fmt: skip
