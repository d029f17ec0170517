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
