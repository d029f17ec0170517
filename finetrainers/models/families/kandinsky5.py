"""Facts about Kandinsky 5.0 Video checkpoints, read from their config files. Imports no torch."""

from __future__ import annotations

from finetrainers.config.facts import Configs, Facts, LoRASettings
from finetrainers.config.geometry import Geometry
from finetrainers.utils.failures import InputError

from ..family import CONSTANT_LR, Family

#: Rank, rate and schedule of musubi-tuner's docs/kandinsky5.md.
_LORA = LoRASettings(32, 1e-4, 1500, CONSTANT_LR)
_HUB = "kandinskylab/Kandinsky-5.0-"
#: Default of the pipelines' calls and of the authors' repository.
NEGATIVE_PROMPT = (
    "Static, 2D cartoon, cartoon, 2d animation, paintings, images, worst quality, low quality, ugly, deformed, "
    "walking backwards"
)
_IMAGE_PIPELINE = "Kandinsky5I2VPipeline"
#: Positions of tokens that the network has in time and along each side.
_POSITIONS = 128
_DENSE = (
    "the sparse attention of this checkpoint (NABLA) is not supported: it is trained and sampled with dense attention"
)


def read(configs: Configs) -> Facts:
    """Read the facts about a Kandinsky 5 checkpoint.

    Text-to-video and image-to-video checkpoints have the same network; the pipeline's config distinguishes them. With
    `visual_cond` it takes as many channels as the latents for a condition, which stay zero, and a mask of given frames.

    Raises:
        ValueError: a checkpoint of images, or a network that cannot be given the image that its pipeline starts from.
    """
    vae, transformer, index = (configs.get(name, {}) for name in ("vae", "transformer", "model_index"))
    patch, axes = transformer.get("patch_size", (1, 2, 2)), transformer.get("axes_dims", (16, 24, 24))
    spatial, temporal = vae.get("spatial_compression_ratio", 8), vae.get("temporal_compression_ratio", 4)
    animates = index.get("_class_name") == _IMAGE_PIPELINE
    if animates and transformer and not transformer.get("visual_cond", False):
        raise InputError(
            "this transformer of kandinsky5 takes no mask of given frames (visual_cond), so it cannot start from an "
            f"image; use that of {_HUB}I2V-Lite-5s-Diffusers",
            "unsupported",
        )
    first_frame = "tokens" if animates else "none"
    return Facts(
        Geometry(
            temporal=temporal,
            spatial=spatial,
            patch=patch[1],
            patch_t=patch[0],
            fps=24.0,
            longest=(_POSITIONS * patch[0] - 1) * temporal + 1,
            largest=(_POSITIONS * spatial * patch[1], _POSITIONS * spatial * patch[2]),
            small_sides=(480, "their positions are scaled by 3.16, which the authors' configs do in HD alone"),
        ),
        text_parts=("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2"),
        channels=transformer.get("out_visual_dim", 4) if transformer else 16,
        heads=transformer.get("model_dim", 2048) // sum(axes) if transformer else 28,
        lora_targets=("to_query", "to_key", "to_value", "self_attention.out_layer", "cross_attention.out_layer"),
        lora=_LORA,
        notes=(_DENSE,) if transformer.get("attention_type", "regular") != "regular" else (),
        first_frame=first_frame if transformer else "unknown",
        first_frame_p=1.0 if animates else 0.0,
        animates=animates,
        # The pipeline fits the first four latent frames to the next ones; see `models.kandinsky5.even_start`.
        least_frames=17 if animates else 1,
        # Shift of the published schedulers too; its cache of latents is drawn.
        defaults={
            "flow_shift": 5.0,
            "sample_posterior": True,
            "validation_guidance_scale": 5.0,
            "validation_negative_prompt": NEGATIVE_PROMPT,
        },
        noise_source="musubi-tuner's docs/kandinsky5.md",
    )


FAMILY = Family(
    name="kandinsky5", spec="finetrainers.models.kandinsky5:Kandinsky5Spec", read=read,
    transformer="Kandinsky5Transformer3DModel", vae="AutoencoderKLHunyuanVideo",
    pipelines=("Kandinsky5T2VPipeline", _IMAGE_PIPELINE),
    published=tuple(
        f"{_HUB}{kind}-Diffusers" for kind in (
            "T2V-Lite-sft-5s", "T2V-Lite-sft-10s", "T2V-Lite-pretrain-5s", "T2V-Lite-pretrain-10s", "I2V-Lite-5s",
            "T2V-Pro-sft-5s", "T2V-Pro-sft-10s", "T2V-Pro-pretrain-5s", "T2V-Pro-pretrain-10s", "I2V-Pro-sft-5s",
        )
    ),
    starters={f"{_HUB}T2V-Lite-sft-5s-Diffusers": 2, f"{_HUB}T2V-Pro-sft-5s-Diffusers": 19},
    tiny="finetrainers.models.tiny_kandinsky5:build_kandinsky5", tiny_versions=("t2v", "i2v"),
)  # fmt: skip
