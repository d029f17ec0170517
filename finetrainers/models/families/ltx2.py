"""Facts about LTX-2 and LTX-2.3 checkpoints, read from their config files. Imports no torch."""

from __future__ import annotations

from finetrainers.config.facts import Configs, Facts, Json, LoRASettings
from finetrainers.config.geometry import Geometry
from finetrainers.utils.failures import InputError

from ..family import Family

#: Settings of `ltx-trainer`'s `configs/t2v_lora.yaml`. It trains without given frames there, and half of the samples
#: with the first one in `i2v_lora.yaml`.
_LORA = LoRASettings(32, 1e-4, 2000, {"lr_scheduler": "linear", "lr_warmup_steps": 0})
#: Layers of the video stream alone: names such as `to_q` also match those of sound, and between sound and video.
_VIDEO_LAYERS = tuple(
    f"{attention}.{layer}" for attention in ("attn1", "attn2") for layer in ("to_k", "to_q", "to_v", "to_out.0")
)
#: `DEFAULT_NEGATIVE_PROMPT` of Lightricks' `ltx-pipelines`, with words on sound.
NEGATIVE_PROMPT = (
    "blurry, out of focus, overexposed, underexposed, low contrast, washed out colors, excessive noise, grainy "
    "texture, poor lighting, flickering, motion blur, distorted proportions, unnatural skin tones, deformed facial "
    "features, asymmetrical face, missing facial features, extra limbs, disfigured hands, wrong hand count, artifacts "
    "around text, inconsistent perspective, camera shake, incorrect depth of field, background too sharp, background "
    "clutter, distracting reflections, harsh shadows, inconsistent lighting direction, color banding, cartoonish "
    "rendering, 3D CGI look, unrealistic materials, uncanny valley effect, incorrect ethnicity, wrong gender, "
    "exaggerated expressions, wrong gaze direction, mismatched lip sync, silent or muted audio, distorted voice, "
    "robotic voice, echo, background noise, off-sync audio, incorrect dialogue, added dialogue, repetitive speech, "
    "jittery movement, awkward pauses, incorrect timing, unnatural transitions, inconsistent framing, tilted camera, "
    "flat lighting, inconsistent tone, cinematic oversaturation, stylized filters, or AI artifacts."
)
#: Weights of sound, and those between sound and video.
_UNUSED = "audio|av_cross_attn|a2v"


def read_version(transformer: Json) -> str:
    """Return the version of LTX-2 whose network a config describes; later ones modulate the text.

    Raises:
        ValueError: it is LTX-2.5.
    """
    if transformer.get("use_keyframes_abs_pos_embedding") or transformer.get("ff_bias") is False:
        raise InputError(
            "this is a checkpoint of LTX-2.5, which has another text encoder and decoder; ltx2 trains LTX-2 and "
            "LTX-2.3, such as Lightricks/LTX-2",
            "unsupported",
        )
    return "2.3" if transformer.get("cross_attn_mod") else "2.0"


def read(configs: Configs) -> Facts:
    """Read the facts about an LTX-2 checkpoint.

    The compression is that of the config, or by default of the class: the patch times each halving of its four stages.

    Raises:
        ValueError: it is LTX-2.5, has tokens of several latent cells, or prompts with padding.
    """
    vae, transformer, connectors = configs.get("vae"), configs.get("transformer", {}), configs.get("connectors", {})
    version = read_version(transformer)
    if (transformer.get("patch_size", 1), transformer.get("patch_size_t", 1)) != (1, 1):
        raise InputError("ltx2 supports tokens of one latent cell; use a transformer with patch_size 1", "unsupported")
    if connectors.get("video_connector_num_learnable_registers", 128) is None:
        message = "ltx2 supports connectors that replace padding by learned tokens; use those of Lightricks/LTX-2"
        raise InputError(message, "unsupported")
    spatial, temporal = 32, 8
    if vae is not None:
        stages = vae.get("downsample_type", ("spatial", "temporal", "spatiotemporal", "spatiotemporal"))
        spatial = vae.get("spatial_compression_ratio") or vae.get("patch_size", 4) * 2 ** len(stages)
        temporal = vae.get("temporal_compression_ratio") or vae.get("patch_size_t", 1) * 2 ** len(stages)
    return Facts(
        Geometry(
            temporal=temporal,
            spatial=spatial,
            patch=1,
            patch_t=1,
            fps=24.0,
            pixels=32,
        ),
        text_parts=("tokenizer", "text_encoder", "connectors"),
        first_frame="tokens",
        any_frame=True,
        first_frame_p=0.1,
        heads=transformer.get("num_attention_heads", 32),
        lora_targets=_VIDEO_LAYERS,
        unused=_UNUSED,
        lora=_LORA,
        least_steps=2,  # its schedule is stretched to end at its own level, which one step leaves undefined
        # Those of the trainer's `ShiftedLogitNormalTimestepSampler` and VAE, and of Lightricks' `ltx-pipelines`.
        defaults={
            "flow_weighting_scheme": "shifted_logit_normal",
            "flow_resolution_shifting": True,
            "sample_posterior": False,
            "validation_guidance_scale": 3.0,
            "validation_inference_steps": 40 if version == "2.0" else 30,
            "validation_negative_prompt": NEGATIVE_PROMPT,
        },
        noise_source="Lightricks' ltx-trainer",
        version=f"LTX-{version}",
    )


FAMILY = Family(
    name="ltx2", spec="finetrainers.models.ltx2:LTX2Spec", read=read,
    transformer="LTX2VideoTransformer3DModel", vae="AutoencoderKLLTX2Video",
    pipelines=("LTX2Pipeline", "LTX2ImageToVideoPipeline", "LTX2ConditionPipeline"),
    published=("Lightricks/LTX-2", "diffusers/LTX-2.3-Diffusers"),
    starters={"Lightricks/LTX-2": 19, "diffusers/LTX-2.3-Diffusers": 22},
    tiny="finetrainers.models.tiny_ltx2:build_ltx2",
    tiny_versions=("2.0", "2.3"),
)  # fmt: skip
