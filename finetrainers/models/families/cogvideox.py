"""Facts about CogVideoX checkpoints, read from their config files. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finetrainers.config.facts import Configs, Facts, LoRASettings
from finetrainers.config.geometry import Geometry
from finetrainers.utils.failures import InputError

from ..family import CONSTANT_LR, Family

_LORA_2B = LoRASettings(64, 1e-4, 1500, {"transformer_dtype": "fp16", **CONSTANT_LR})
_LORA_5B = LoRASettings(128, 3e-5, 1000, CONSTANT_LR)


def read(configs: Configs) -> Facts:
    """Read the facts about a CogVideoX checkpoint.

    Space is halved once per VAE stage after the first; 1.5 has a temporal patch and runs at 16 frames per second.
    Text-to-video checkpoints take the latents alone, image-to-video ones a first frame on as many channels again.
    Checkpoints of CogVideoX-Fun take a control video on as many channels, or a video to be completed and a mask on one
    more. Apart from their pipeline, the former differ from image-to-video ones, which have learned positions (1.0) or
    an `ofs` embedding (1.5).

    Raises:
        ValueError: a checkpoint that takes something else.
    """
    vae, transformer = configs.get("vae", {}), configs.get("transformer", {})
    inputs, latents = transformer.get("in_channels", 16), transformer.get("out_channels", 16)
    if inputs not in (latents, 2 * latents):
        raise InputError(
            f"unknown cogvideox transformer with {inputs} input channels for {latents} latent channels; "
            f"text-to-video checkpoints have {latents}, image-to-video ones and those with a control video "
            f"{2 * latents}",
            "unsupported",
        )
    own = transformer.get("use_learned_positional_embeddings") or transformer.get("ofs_embed_dim") is not None
    animates = inputs > latents and own
    kind = "channels" if animates else "none"
    spatial = 2 ** (len(vae.get("block_out_channels", (128, 256, 256, 512))) - 1)
    trained_at = transformer.get("sample_height", 60) * spatial, transformer.get("sample_width", 90) * spatial
    learned = transformer.get("use_learned_positional_embeddings", False)
    # The slice grid of 1.5 has as many positions as the largest size it was trained on.
    sliced = transformer.get("use_rotary_positional_embeddings", False) and transformer.get("patch_size_t") is not None
    misread, note = _cogvideox_in_comfyui(transformer) if "transformer" in configs else (None, None)
    return Facts(
        Geometry(
            temporal=int(vae.get("temporal_compression_ratio", 4)),
            spatial=spatial,
            patch=transformer.get("patch_size", 2),
            patch_t=transformer.get("patch_size_t") or 1,
            fps=16.0 if transformer.get("patch_size_t") else 8.0,
            sides=trained_at if learned else None,
            largest=trained_at if sliced and not learned else None,
        ),
        is_flow=False,
        heads=transformer.get("num_attention_heads"),  # 30 (2b) or 48 (5b and 1.5)
        lora=_LORA_5B if transformer.get("num_attention_heads", 30) > 30 else _LORA_2B,
        first_frame=kind if "transformer" in configs else "unknown",
        any_frame=animates or "transformer" not in configs,
        first_frame_p=1.0 if animates else 0.0,
        image_optional=True,  # `noised_image_dropout` 0.05 of zeros, in sat/configs/cogvideox_5b_i2v.yaml
        # From finetune/models/cogvideox_i2v/lora_trainer.py of THUDM/CogVideo.
        first_frame_noise=(-3.0, 0.5) if animates else None,
        # Timesteps are uniform there, too.
        defaults={"sample_posterior": True},
        noise_source="CogVideo's finetune/models",
        media=("control_video",) if inputs > latents and not own else (),
        misread={} if misread is None else {"comfyui": misread},
        read_notes={} if note is None else {"comfyui": note},
    )


#: ComfyUI's assumptions about every table of positions, which are also diffusers' defaults.
_COMFYUI_TABLE = {
    "sample_height": 60,
    "sample_width": 90,
    "sample_frames": 49,
    "temporal_compression_ratio": 4,
    "max_text_seq_length": 226,
    "patch_size_t": None,
}


def _cogvideox_in_comfyui(transformer: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return why ComfyUI takes a transformer for another network, and a note on one that it reads, each or None.

    A file with `patch_embed.pos_embedding` has that table of positions there, of one size, and no rotary positions. Any
    other file has rotary positions (`detect_unet_config` in comfy/model_detection.py, comfy/ldm/cogvideo/model.py).
    """
    rotary = transformer.get("use_rotary_positional_embeddings", False)
    learned = transformer.get("use_learned_positional_embeddings", False)
    if rotary and learned:
        return "ComfyUI ignores the rotary positions of checkpoints with learned ones", None
    if rotary and transformer.get("patch_size_t") is None:
        return None, (
            "ComfyUI multiplies the rotary positions of CogVideoX 1.0 by 1.875, even those of the published weights, "
            "so its samples differ from those of diffusers; CogVideoX 1.5 is not affected"
        )
    if rotary:
        return None, None
    odd = [name for name, value in _COMFYUI_TABLE.items() if transformer.get(name, value) != value]
    if odd:
        values = ", ".join(f"{name} {transformer[name]}" for name in odd)
        return f"ComfyUI has positions for latents of 60x90, 49 frames and 226 text tokens only, not for {values}", None
    return None, "ComfyUI reads positions for 480x720 (height x width) and up to 49 frames; other sizes get wrong ones"


FAMILY = Family(
    name="cogvideox", spec="finetrainers.models.cogvideox:CogVideoXSpec", read=read,
    transformer="CogVideoXTransformer3DModel", vae="AutoencoderKLCogVideoX",
    pipelines=(
        "CogVideoXPipeline", "CogVideoXImageToVideoPipeline", "CogVideoXVideoToVideoPipeline",
        "CogVideoXFunControlPipeline",
    ),
    published=(
        *(
            f"{owner}/{name}"
            for owner in ("THUDM", "zai-org")
            for name in (
                "CogVideoX-2b", "CogVideoX-5b", "CogVideoX-5b-I2V", "CogVideoX1.5-5B", "CogVideoX1.5-5B-I2V",
            )
        ),
        *(f"alibaba-pai/CogVideoX-Fun-V1.1-{size}-{kind}" for size in ("2b", "5b") for kind in ("Pose", "Control")),
    ),
    starters={"THUDM/CogVideoX-2b": 2, "THUDM/CogVideoX-5b": 5, "THUDM/CogVideoX1.5-5B": 5},
    tiny="finetrainers.models.tiny:build_cogvideox", tiny_versions=("5b", "2b", "1.5", "i2v", "control"),
)  # fmt: skip
