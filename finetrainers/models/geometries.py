"""Size rules of each family and the like, read from a checkpoint's config files. No torch: wrong sizes are refused at once."""

from __future__ import annotations

from typing import Any

from finetrainers.config.geometry import Geometry

Json = dict[str, Any]


def ltx_video(vae: Json, transformer: Json) -> Geometry:
    """Each scaling stage halves space and time, on top of the VAE's patch, unless the config says what comes of it.

    That is `AutoencoderKLLTXVideo.__init__`; from version 0.9.5 on stages differ and the config has the ratios. The
    pipeline refuses sizes that are not multiples of 32, whatever its VAE.
    """
    stages = sum(bool(s) for s in vae.get("spatio_temporal_scaling", (True, True, True, False)))
    return Geometry(
        temporal=vae.get("temporal_compression_ratio") or vae.get("patch_size_t", 1) * 2**stages,
        spatial=vae.get("spatial_compression_ratio") or vae.get("patch_size", 4) * 2**stages,
        patch=transformer.get("patch_size", 1),
        patch_t=transformer.get("patch_size_t", 1),
        fps=25.0,
        pixels=32,
    )


def hunyuan_video(vae: Json, transformer: Json) -> Geometry:
    """The VAE states its compression."""
    return Geometry(
        temporal=vae.get("temporal_compression_ratio", 4),
        spatial=vae.get("spatial_compression_ratio", 8),
        patch=transformer.get("patch_size", 2),
        patch_t=transformer.get("patch_size_t", 1),
        fps=24.0,
        pixels=16,
    )


def hunyuan_video_takes_guidance(transformer: Json) -> bool:
    """Guidance-distilled checkpoints have an embedding for it."""
    return bool(transformer.get("guidance_embeds", False))


def hunyuan_video_unknown(transformer: Json) -> str | None:
    """Image-to-video checkpoints take the image on more channels, or as tokens."""
    condition, inputs, outputs = (
        transformer.get(key) for key in ("image_condition_type", "in_channels", "out_channels")
    )
    if condition is None and inputs == outputs:
        return None
    return (
        f"this is an image-to-video transformer (image_condition_type {condition!r}, {inputs} input channels for {outputs} "
        "output channels); hunyuan_video trains text-to-video checkpoints such as hunyuanvideo-community/HunyuanVideo"
    )


def cogvideox(vae: Json, transformer: Json) -> Geometry:
    """One halving per VAE stage after the first; 1.5 has a temporal patch and runs at 16 frames per second."""
    patch_t = transformer.get("patch_size_t") or 1
    return Geometry(
        temporal=int(vae.get("temporal_compression_ratio", 4)),
        spatial=2 ** (len(vae.get("block_out_channels", (128, 256, 256, 512))) - 1),
        patch=transformer.get("patch_size", 2),
        patch_t=patch_t,
        fps=16.0 if transformer.get("patch_size_t") else 8.0,
    )


def cogvideox_first_frame(transformer: Json) -> str:
    """Image-to-video checkpoints take a first frame on as many channels again as they put out."""
    return "channels" if transformer.get("in_channels", 16) > transformer.get("out_channels", 16) else "none"


def cogvideox_unknown(transformer: Json) -> str | None:
    """Text-to-video checkpoints take the latents alone, image-to-video ones a first frame on as many channels again.

    Checkpoints of CogVideoX-Fun take a control video on as many channels, or a video to be completed and a mask. What tells the
    former from image-to-video ones: those have learned positions (1.0) or an `ofs` embedding (1.5).
    """
    inputs, latents = transformer.get("in_channels", 16), transformer.get("out_channels", 16)
    if inputs not in (latents, 2 * latents):
        return (
            f"a cogvideox transformer with {inputs} input channels for {latents} latent channels is not known; "
            f"text-to-video checkpoints have {latents}, image-to-video ones {2 * latents}"
        )
    own = transformer.get("use_learned_positional_embeddings") or transformer.get("ofs_embed_dim") is not None
    if inputs == 2 * latents and not own:
        return (
            f"this transformer takes {inputs} channels as CogVideoX-Fun's control checkpoints do, and has neither the learned "
            "positions of CogVideoX-5b-I2V nor the ofs embedding of CogVideoX1.5-5B-I2V; cogvideox trains text-to-video and "
            "image-to-video checkpoints"
        )
    return None
