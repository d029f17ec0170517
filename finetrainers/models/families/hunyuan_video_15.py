"""Facts about HunyuanVideo-1.5 checkpoints, read from their config files. Imports no torch."""

from __future__ import annotations

from finetrainers.config.facts import Configs, Facts, LoRASettings
from finetrainers.config.geometry import Geometry
from finetrainers.utils.failures import InputError

from ..family import CONSTANT_LR, Family

_LORA = LoRASettings(32, 1e-4, 1500, CONSTANT_LR)
_HUB = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-"


def read(configs: Configs) -> Facts:
    """Read the facts about a HunyuanVideo-1.5 checkpoint.

    All transformers take the latents, as many channels for the first frame, and a mask; `task_type` states whether they
    are given one, with states of the image by SigLIP. The scheduler's shift is that of samples, which depends on size
    and task; training draws logit-normal noise levels at shift 3 (`TrainingConfig` and `encode_vae` in train.py of
    Tencent-Hunyuan/HunyuanVideo-1.5).

    Raises:
        ValueError: a checkpoint that takes something else, or that was distilled to few steps.
    """
    vae, transformer = configs.get("vae", {}), configs.get("transformer", {})
    inputs, latents = transformer.get("in_channels", 65), transformer.get("out_channels") or 32
    if transformer.get("use_meanflow", False):
        raise InputError(
            "this checkpoint of hunyuan_video_15 was distilled to few steps, whose networks are given "
            f"two noise levels (use_meanflow); train {_HUB}480p_i2v or {_HUB}480p_t2v",
            "unsupported",
        )
    if inputs != 2 * latents + 1:
        raise InputError(
            f"unknown hunyuan_video_15 transformer with {inputs} input channels for {latents} latent channels; "
            f"text-to-video and image-to-video checkpoints have {2 * latents + 1}, and upsamplers are not supported",
            "unsupported",
        )
    animates = transformer.get("task_type", "i2v") == "i2v"
    image_parts = ("feature_extractor", "image_encoder") if animates and transformer else ()
    return Facts(
        Geometry(
            temporal=vae.get("temporal_compression_ratio", 4),
            spatial=vae.get("spatial_compression_ratio", 16),
            patch=transformer.get("patch_size", 1),
            patch_t=transformer.get("patch_size_t", 1),
            fps=24.0,
        ),
        text_parts=("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2"),
        clip_parts=(*image_parts, "vae"),
        companions=image_parts,
        heads=transformer.get("num_attention_heads", 16),
        lora=_LORA,
        first_frame=("channels" if animates else "none") if transformer else "unknown",
        first_frame_p=1.0 if image_parts else 0.0,
        sees_image=bool(image_parts),
        image_optional=True,  # `TrainingConfig.i2v_prob` there; images are text-to-video (`sample_task`)
        defaults={
            "flow_weighting_scheme": "logit_normal",
            "flow_shift": 3.0,
            "sample_posterior": True,
            "validation_guidance_scale": 6.0,
        },
        noise_source="train.py of HunyuanVideo-1.5",
    )


FAMILY = Family(
    name="hunyuan_video_15", spec="finetrainers.models.hunyuan_video_15:HunyuanVideo15Spec", read=read,
    transformer="HunyuanVideo15Transformer3DModel", vae="AutoencoderKLHunyuanVideo15",
    pipelines=("HunyuanVideo15Pipeline", "HunyuanVideo15ImageToVideoPipeline"),
    published=tuple(f"{_HUB}{kind}" for kind in ("480p_t2v", "480p_i2v", "720p_t2v", "720p_i2v")),
    starters={f"{_HUB}480p_t2v": 8},
    tiny="finetrainers.models.tiny_hunyuan_video_15:build_hunyuan_video_15", tiny_versions=("t2v", "i2v"),
)  # fmt: skip
