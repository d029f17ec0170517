"""Facts about HunyuanVideo checkpoints, read from their config files. Imports no torch."""

from __future__ import annotations

from finetrainers.config.facts import Configs, Facts, LoRASettings
from finetrainers.config.geometry import Geometry
from finetrainers.utils.failures import InputError

from ..family import CONSTANT_LR, Family

_LORA = LoRASettings(128, 3e-5, 500, CONSTANT_LR)
#: `scripts/run_train_image2video_lora.sh` of HunyuanVideo-I2V with `Transport.sample`, whose `lognorm` is logit-normal;
#: `hyvae_extract` encodes clips to the mean. Tencent has published no trainer for text-to-video; its shift is also 7.
_NOISE = {"flow_weighting_scheme": "logit_normal", "flow_shift": 7.0, "sample_posterior": False}


def read(configs: Configs) -> Facts:
    """Read the facts about a HunyuanVideo checkpoint, whose VAE states its compression.

    Guidance-distilled transformers have an embedding for the guidance scale. Text-to-video checkpoints take the latents
    alone, SkyReels-V1's image-to-video one a first frame on as many channels again. HunyuanVideo-I2V, whose text
    encoder also sees the image, takes it as the first latent frame ("token_replace"), or on channels with a mask on one
    more ("latent_concat").

    Raises:
        ValueError: a checkpoint that takes something else.
    """
    vae, transformer = configs.get("vae", {}), configs.get("transformer", {})
    kind, inputs, outputs = (transformer.get(key) for key in ("image_condition_type", "in_channels", "out_channels"))
    layouts = {None: (1, 0), "token_replace": (1, 0), "latent_concat": (2, 1)}
    animates = kind is None and inputs is not None and outputs is not None and inputs == 2 * outputs
    if kind not in layouts or not (
        inputs == outputs is None or animates or inputs == _times_plus(outputs, *layouts[kind])
    ):
        raise InputError(
            f"unknown hunyuan_video transformer with image_condition_type {kind!r} and {inputs} input channels for "
            f"{outputs} output channels; supported are text-to-video checkpoints such as "
            "hunyuanvideo-community/HunyuanVideo, and from an image Skywork/SkyReels-V1-Hunyuan-I2V and "
            "hunyuanvideo-community/HunyuanVideo-I2V",
            "unsupported",
        )
    sees, on_channels = kind is not None, animates or kind == "latent_concat"
    image_parts = ("image_processor",) if sees else ()
    first_frame = "tokens" if kind == "token_replace" else "channels" if on_channels else "none"
    takes_guidance = "transformer" not in configs or transformer.get("guidance_embeds", False)
    return Facts(
        Geometry(
            temporal=vae.get("temporal_compression_ratio", 4),
            spatial=vae.get("spatial_compression_ratio", 8),
            patch=transformer.get("patch_size", 2),
            patch_t=transformer.get("patch_size_t", 1),
            fps=24.0,
            pixels=16,
        ),
        text_parts=("tokenizer", "tokenizer_2", "text_encoder", "text_encoder_2", *image_parts),
        heads=transformer.get("num_attention_heads", 24),
        lora=_LORA,
        # The default of the pipeline's `guidance_scale`: SkyReels' has classifier-free guidance instead.
        guidance=(1.0 if animates or sees else 6.0) if takes_guidance else None,
        first_frame=first_frame if "transformer" in configs else "unknown",
        # HunyuanVideo-I2V's text encoder always sees the first frame, which its pipeline leaves out of samples.
        any_frame=animates or "transformer" not in configs,
        first_frame_p=1.0 if animates or sees else 0.0,
        text_sees_image=sees,
        defaults=_NOISE,
        noise_source="the trainer of HunyuanVideo-I2V",
    )


def _times_plus(channels: int | None, times: int, plus: int) -> int | None:
    return None if channels is None else times * channels + plus


FAMILY = Family(
    name="hunyuan_video", spec="finetrainers.models.hunyuan_video:HunyuanVideoSpec", read=read,
    transformer="HunyuanVideoTransformer3DModel", vae="AutoencoderKLHunyuanVideo",
    pipelines=("HunyuanVideoPipeline", "HunyuanSkyreelsImageToVideoPipeline", "HunyuanVideoImageToVideoPipeline"),
    published=(
        "hunyuanvideo-community/HunyuanVideo", "tencent/HunyuanVideo", "Skywork/SkyReels-V1-Hunyuan-I2V",
        "hunyuanvideo-community/HunyuanVideo-I2V", "hunyuanvideo-community/HunyuanVideo-I2V-33ch",
    ),
    starters={"hunyuanvideo-community/HunyuanVideo": 13},
    tiny="finetrainers.models.tiny:build_hunyuan_video",
    tiny_versions=("t2v", "i2v", "token_replace", "latent_concat"),
)  # fmt: skip
