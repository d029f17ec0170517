"""Facts about Wan 2.1 and 2.2 checkpoints, read from their config files. Imports no torch."""

from __future__ import annotations

from typing import Any

from finetrainers.config.facts import Configs, Facts, Json, LoRASettings
from finetrainers.config.geometry import Geometry
from finetrainers.utils.failures import InputError

from ..family import CONSTANT_LR, Family

_LORA = LoRASettings(32, 1e-4, 1500, CONSTANT_LR)
#: `sample_neg_prompt` of the original repositories' configs: overexposed, static, blurred, subtitles, paintings, gray,
#: worst quality, artifacts, wrong anatomy, cluttered backgrounds, walking backwards.
NEGATIVE_PROMPT = (
    "\u8272\u8c03\u8273\u4e3d\uff0c\u8fc7\u66dd\uff0c\u9759\u6001\uff0c\u7ec6\u8282\u6a21\u7cca\u4e0d\u6e05\uff0c"
    "\u5b57\u5e55\uff0c\u98ce\u683c\uff0c\u4f5c\u54c1\uff0c\u753b\u4f5c\uff0c\u753b\u9762\uff0c\u9759\u6b62\uff0c"
    "\u6574\u4f53\u53d1\u7070\uff0c\u6700\u5dee\u8d28\u91cf\uff0c\u4f4e\u8d28\u91cf\uff0c"
    "JPEG\u538b\u7f29\u6b8b\u7559\uff0c\u4e11\u964b\u7684\uff0c\u6b8b\u7f3a\u7684\uff0c"
    "\u591a\u4f59\u7684\u624b\u6307\uff0c\u753b\u5f97\u4e0d\u597d\u7684\u624b\u90e8\uff0c"
    "\u753b\u5f97\u4e0d\u597d\u7684\u8138\u90e8\uff0c\u7578\u5f62\u7684\uff0c\u6bc1\u5bb9\u7684\uff0c"
    "\u5f62\u6001\u7578\u5f62\u7684\u80a2\u4f53\uff0c\u624b\u6307\u878d\u5408\uff0c"
    "\u9759\u6b62\u4e0d\u52a8\u7684\u753b\u9762\uff0c\u6742\u4e71\u7684\u80cc\u666f\uff0c\u4e09\u6761\u817f\uff0c"
    "\u80cc\u666f\u4eba\u5f88\u591a\uff0c\u5012\u7740\u8d70"
)
_NO_TRAINER = "; no trainer is published"
#: Added in front for image-to-video checkpoints of 2.1: a shaky camera; and for those with a last frame: cuts.
_SHAKY, _CUTS = "\u955c\u5934\u6643\u52a8\uff0c", "\u955c\u5934\u5207\u6362\uff0c"


def read(configs: Configs, *, family: str = "wan") -> Facts:
    """Read the facts about a Wan checkpoint: 2.1, 2.2 A14B with two experts, or 2.2 5B; or about one of its design.

    Text-to-video transformers take the latents alone, image-to-video ones also a mask, with a channel for each frame of
    a latent frame, and the latents of the given frames. Those of 2.1 also read CLIP's states of the image; one with
    positions for two images is also given the last frame. 5B takes a time per token (`expand_timesteps`), so that given
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
            f"unknown {family} transformer with {inputs} input channels for {latents} latent channels; "
            f"text-to-video checkpoints have {latents}, image-to-video ones {2 * latents + temporal}",
            "unsupported",
        )
    has_times = index.get("expand_timesteps", latents == 48)
    on_channels, sees_image = inputs > latents, transformer.get("image_dim") is not None
    kind = "tokens" if has_times else "channels" if on_channels else "none"
    image_parts = ("image_processor", "image_encoder") if sees_image else ()
    boundary, has_last = index.get("boundary_ratio"), transformer.get("pos_embed_seq_len") is not None
    negative_prompt = (_CUTS if has_last else "") + (_SHAKY if sees_image else "") + NEGATIVE_PROMPT
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
        last_frame=has_last,
        sees_image=sees_image,
        boundary=boundary,
        defaults={
            **_noise_defaults(configs.get("scheduler", {}), boundary, is_image_to_video=on_channels),
            "validation_negative_prompt": negative_prompt,
        },
        noise_source=("the published scheduler" if boundary is None else "configs of Wan2.2") + _NO_TRAINER,
    )


def _noise_defaults(scheduler: Json, boundary: float | None, *, is_image_to_video: bool) -> dict[str, Any]:
    """Return shift and guidance of the published configs.

    The shift is that of samples, since Wan's authors have published no trainer: of the checkpoint's scheduler, or for
    A14B of the original repository's configs, which have a guidance scale for each expert. Their VAE encodes to the
    mean. DiffSynth-Studio, the trainer that they name, does so and draws uniform levels at shift 5 for all.
    """
    shift, scales = scheduler.get("flow_shift", 3.0), {"validation_guidance_scale": 5.0}
    if boundary is not None:
        shift, high, low = (5.0, 3.5, 3.5) if is_image_to_video else (12.0, 4.0, 3.0)
        scales = {"validation_guidance_scale": high, "validation_guidance_scale_2": low}
    return {"flow_shift": shift, "sample_posterior": False, **scales}


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
    starters={
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": 1.3, "Wan-AI/Wan2.2-TI2V-5B-Diffusers": 5,
        "Wan-AI/Wan2.1-T2V-14B-Diffusers": 14,
    },
    has_experts=True, dtypes={"vae_dtype": "fp32"},  # as in diffusers' examples: bf16 shifts colors
    tiny="finetrainers.models.tiny_wan:build_wan",
    tiny_versions=("t2v", "i2v", "flf2v", "ti2v", "a14b", "a14b_i2v"),
)  # fmt: skip
