"""Facts about SkyReels-V2 checkpoints, read from their config files. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from finetrainers.config.facts import Configs, Facts

from ..family import Family
from . import wan

#: Pipelines of checkpoints whose network takes a noise level for each latent frame.
FORCING_PIPELINES = tuple(f"SkyReelsV2DiffusionForcing{kind}Pipeline" for kind in ("", "ImageToVideo", "VideoToVideo"))
#: Negative prompt of the original repository's commands.
NEGATIVE_PROMPT = (
    "Bright tones, overexposed, static, blurred details, subtitles, style, works, paintings, images, static, overall "
    "gray, worst quality, low quality, JPEG compression residue, ugly, incomplete, extra fingers, poorly drawn hands, "
    "poorly drawn faces, deformed, disfigured, misshapen limbs, fused fingers, still picture, messy background, three "
    "legs, many people in the background, walking backwards"
)
#: Frames of a window of overlapping ones, unless samples set them: the pipeline's default, for 540P.
BASE_FRAMES = 97
_TEMPORAL = 4


def read(configs: Configs) -> Facts:
    """Read the facts about a SkyReels-V2 checkpoint: text-to-video, image-to-video, or diffusion forcing.

    All have Wan 2.1's design. Text-to-video and diffusion-forcing checkpoints differ in their pipeline's config alone;
    without one, a network that takes the frame rate is one of diffusion forcing.

    Raises:
        ValueError: a checkpoint that takes something else.
    """
    facts = wan.read(configs, family="skyreels_v2")
    transformer, pipeline = configs.get("transformer", {}), configs.get("model_index", {}).get("_class_name")
    has_rates = transformer.get("inject_sample_info", False)
    takes_levels = pipeline in FORCING_PIPELINES or (pipeline is None and has_rates)
    is_image_to_video = facts.first_frame == "channels"
    facts = replace(
        facts,
        misread={"comfyui": "its network has no embedding of the frame rate"} if has_rates else {},
        geometry=replace(facts.geometry, fps=24.0),
        boundary=None,
        defaults={
            "flow_shift": 5.0 if is_image_to_video else 8.0,
            "sample_posterior": False,  # its VAE is Wan's
            "validation_guidance_scale": 5.0 if is_image_to_video else 6.0,
            "validation_negative_prompt": NEGATIVE_PROMPT,
        },
        noise_source="samples of the authors' README; no trainer is published",
    )
    if is_image_to_video or not takes_levels:
        return facts
    return replace(
        facts,
        first_frame="tokens",
        any_frame=True,
        first_frame_p=0.1,
        sample_arguments=("addnoise_condition", "ar_step", "base_num_frames", "causal_block_size", "overlap_history"),
        sample_problem=sample_problem,
    )


def sample_problem(arguments: Mapping[str, int], frames: int) -> str | None:
    """Return why a diffusion-forcing sample of `frames` frames cannot have these arguments, or None if it can."""
    block, overlap = arguments.get("causal_block_size", 1), arguments.get("overlap_history")
    base = arguments.get("base_num_frames", frames if overlap is None else BASE_FRAMES)
    noise = arguments.get("addnoise_condition", 0)
    if block < 1:
        return f"causal_block_size must be at least 1, got {block}"
    if noise > 60:
        return f"addnoise_condition must be at most 60, got {noise}; use 20"
    if frames > base and overlap is None:
        return f"{frames} frames are more than base_num_frames={base}; set overlap_history, for example 17"
    if overlap is not None and not 0 <= (overlap - 1) // _TEMPORAL < (base - 1) // _TEMPORAL:
        distance = f"one latent frame ({_TEMPORAL} frames) less than base_num_frames={base}"
        return f"overlap_history must be at least 1 and at least {distance}, got {overlap}"
    uneven = next((latents for latents in window_lengths(frames, base, overlap) if latents % block), None)
    if uneven is not None:
        return f"causal_block_size must divide the {uneven} latent frames of each window, got {block}"
    return None


def window_lengths(frames: int, base: int, overlap: int | None) -> list[int]:
    """Return the latent frames of the windows that a sample of `frames` frames is drawn in, one after the other.

    Each window but the first begins with the last `overlap` frames of the one before.
    """
    latents, base_latents, shared = ((number - 1) // _TEMPORAL + 1 for number in (frames, base, overlap or 1))
    if frames <= base:
        return [latents]
    fresh = base_latents - shared
    rest = latents - base_latents
    return [base_latents, *[base_latents] * ((rest - 1) // fresh), shared + (rest - 1) % fresh + 1]


FAMILY = Family(
    name="skyreels_v2", spec="finetrainers.models.skyreels_v2:SkyReelsV2Spec", read=read,
    transformer="SkyReelsV2Transformer3DModel", vae="AutoencoderKLWan",
    pipelines=("SkyReelsV2Pipeline", "SkyReelsV2ImageToVideoPipeline", *FORCING_PIPELINES),
    published=(
        "Skywork/SkyReels-V2-T2V-14B-540P-Diffusers", "Skywork/SkyReels-V2-T2V-14B-720P-Diffusers",
        "Skywork/SkyReels-V2-I2V-1.3B-540P-Diffusers", "Skywork/SkyReels-V2-I2V-14B-540P-Diffusers",
        "Skywork/SkyReels-V2-I2V-14B-720P-Diffusers", "Skywork/SkyReels-V2-DF-1.3B-540P-Diffusers",
        "Skywork/SkyReels-V2-DF-14B-540P-Diffusers", "Skywork/SkyReels-V2-DF-14B-720P-Diffusers",
    ),
    starters={"Skywork/SkyReels-V2-DF-1.3B-540P-Diffusers": 1.3, "Skywork/SkyReels-V2-T2V-14B-540P-Diffusers": 14},
    dtypes={"vae_dtype": "fp32"},  # as in diffusers' examples
    tiny="finetrainers.models.tiny_skyreels_v2:build_skyreels_v2",
    tiny_versions=("t2v", "i2v", "flf2v", "df"),
)  # fmt: skip
