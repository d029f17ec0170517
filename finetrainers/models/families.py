"""Model families, and readers of their checkpoints' config files. Imports no torch: wrong options are refused at once.

A reader is given the configs that are on disk. Keys that they leave out mean the class's defaults, so that without any
config it describes the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finetrainers.config.facts import Configs, Facts, LoRASettings
from finetrainers.config.geometry import Geometry
from finetrainers.utils.failures import InputError

from .family import Family

_CONSTANT = {"lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 100}
_LINEAR = {"lr_scheduler": "linear", "lr_warmup_steps": 0}
_LTX_LORA = LoRASettings(
    32, 2e-4, 1500, {"flow_weighting_scheme": "logit_normal", "flow_resolution_shifting": True, **_LINEAR}
)
_LTX_DEMO_LORA = LoRASettings(16, 2e-3, 600, _LINEAR)
_HUNYUAN_LORA = LoRASettings(128, 3e-5, 500, {"flow_weighting_scheme": "logit_normal", **_CONSTANT})
_WAN_LORA = LoRASettings(32, 1e-4, 1500, {"flow_shift": 3.0, **_CONSTANT})
_COGVIDEOX_2B_LORA = LoRASettings(64, 1e-4, 1500, {"transformer_dtype": "fp16", **_CONSTANT})
_COGVIDEOX_5B_LORA = LoRASettings(128, 3e-5, 1000, _CONSTANT)


def ltx_video(configs: Configs) -> Facts:
    """Read the facts about an LTX-Video checkpoint.

    Each scaling stage halves space and time, on top of the VAE's patch, unless the config states the compression: that
    is `AutoencoderKLLTXVideo.__init__`; from version 0.9.5 on stages differ and the config has the ratios. The pipeline
    refuses sizes that are not multiples of 32, whatever its VAE.
    """
    vae, transformer = configs.get("vae", {}), configs.get("transformer", {})
    is_small = transformer.get("num_layers", 28) < 8  # the demo model, a thousandth of the published ones
    stages = sum(bool(s) for s in vae.get("spatio_temporal_scaling", (True, True, True, False)))
    return Facts(
        Geometry(
            temporal=vae.get("temporal_compression_ratio") or vae.get("patch_size_t", 1) * 2**stages,
            spatial=vae.get("spatial_compression_ratio") or vae.get("patch_size", 4) * 2**stages,
            patch=transformer.get("patch_size", 1),
            patch_t=transformer.get("patch_size_t", 1),
            fps=25.0,
            pixels=32,
        ),
        first_frame="tokens",
        any_frame=True,
        first_frame_p=0.1,
        heads=transformer.get("num_attention_heads", 32),
        lora=_LTX_DEMO_LORA if is_small else _LTX_LORA,
        scene="a red circle moving right on a grey background" if is_small else Facts.scene,
        least_steps=2,  # its schedule is stretched to end at its own level, which one step leaves undefined
    )


def hunyuan_video(configs: Configs) -> Facts:
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
        lora=_HUNYUAN_LORA,
        # The default of the pipeline's `guidance_scale`: SkyReels' has classifier-free guidance instead.
        guidance=(1.0 if animates or sees else 6.0) if takes_guidance else None,
        first_frame=first_frame if "transformer" in configs else "unknown",
        # HunyuanVideo-I2V's text encoder always sees the first frame, which its pipeline leaves out of samples.
        any_frame=animates or "transformer" not in configs,
        first_frame_p=1.0 if animates or sees else 0.0,
        text_sees_image=sees,
    )


def _times_plus(channels: int | None, times: int, plus: int) -> int | None:
    return None if channels is None else times * channels + plus


def cogvideox(configs: Configs) -> Facts:
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
        lora=_COGVIDEOX_5B_LORA if transformer.get("num_attention_heads", 30) > 30 else _COGVIDEOX_2B_LORA,
        first_frame=kind if "transformer" in configs else "unknown",
        any_frame=animates or "transformer" not in configs,
        first_frame_p=1.0 if animates else 0.0,
        # From finetune/models/cogvideox_i2v/lora_trainer.py of THUDM/CogVideo.
        first_frame_noise=(-3.0, 0.5) if animates else None,
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


def wan(configs: Configs) -> Facts:
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
        lora=_WAN_LORA,
        first_frame=kind if is_known else "unknown",
        any_frame=has_times or not is_known,
        first_frame_p=1.0 if on_channels else 0.1 if has_times else 0.0,
        last_frame=transformer.get("pos_embed_seq_len") is not None,
        sees_image=sees_image,
        boundary=index.get("boundary_ratio"),
    )


FAMILIES = (
    Family(
        name="ltx_video", spec="finetrainers.models.ltx_video:LTXVideoSpec", read=ltx_video,
        transformer="LTXVideoTransformer3DModel", vae="AutoencoderKLLTXVideo",
        pipelines=("LTXPipeline", "LTXImageToVideoPipeline", "LTXConditionPipeline"),
        published=("Lightricks/LTX-Video",),
        starters={"Lightricks/LTX-Video": 2},
        tiny="finetrainers.models.tiny:build_ltx_video",
    ),
    Family(
        name="hunyuan_video", spec="finetrainers.models.hunyuan_video:HunyuanVideoSpec", read=hunyuan_video,
        transformer="HunyuanVideoTransformer3DModel", vae="AutoencoderKLHunyuanVideo",
        pipelines=("HunyuanVideoPipeline", "HunyuanSkyreelsImageToVideoPipeline", "HunyuanVideoImageToVideoPipeline"),
        published=(
            "hunyuanvideo-community/HunyuanVideo", "tencent/HunyuanVideo", "Skywork/SkyReels-V1-Hunyuan-I2V",
            "hunyuanvideo-community/HunyuanVideo-I2V", "hunyuanvideo-community/HunyuanVideo-I2V-33ch",
        ),
        starters={"hunyuanvideo-community/HunyuanVideo": 13},
        tiny="finetrainers.models.tiny:build_hunyuan_video",
        tiny_versions=("t2v", "i2v", "token_replace", "latent_concat"),
    ),
    Family(
        name="cogvideox", spec="finetrainers.models.cogvideox:CogVideoXSpec", read=cogvideox,
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
    ),
    Family(
        name="wan", spec="finetrainers.models.wan:WanSpec", read=wan,
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
    ),
)  # fmt: skip
