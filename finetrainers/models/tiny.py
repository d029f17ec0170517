"""Complete repositories with tiny random networks: the stock classes and real geometry, a few MB, no download.

For tests, dry runs and trying things out. The same seed writes the same bytes on every run. Compression, channels,
patch sizes, positional embeddings and scheduler configs are those of the published checkpoints, width and depth are
not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import (
    AutoencoderKLCogVideoX,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLLTXVideo,
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    CogVideoXFunControlPipeline,
    CogVideoXImageToVideoPipeline,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
    HunyuanSkyreelsImageToVideoPipeline,
    HunyuanVideoImageToVideoPipeline,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)
from transformers import (
    CLIPImageProcessor,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    T5Config,
    T5EncoderModel,
)

from finetrainers.utils.failures import InputError

from .tiny_tokenizers import IMAGE_TOKEN, clip_tokenizer, llama_tokenizer, t5_tokenizer

HunyuanVideoVersion = Literal["t2v", "i2v", "token_replace", "latent_concat"]
#: The second is SkyReels-V1's, which has the image's latent on 16 more channels. The others are HunyuanVideo-I2V's.
_HUNYUAN_PIPELINES = {
    "t2v": HunyuanVideoPipeline,
    "i2v": HunyuanSkyreelsImageToVideoPipeline,
    "token_replace": HunyuanVideoImageToVideoPipeline,
    "latent_concat": HunyuanVideoImageToVideoPipeline,
}
_HUNYUAN_CHANNELS = {"i2v": 32, "latent_concat": 33}
CogVideoXVersion = Literal["2b", "5b", "1.5", "i2v", "control"]
_ROTARY = {"use_rotary_positional_embeddings": True}
#: By version of CogVideoX: the size of its samples (frames, latent height, latent width), and its transformer's
#: options.
_COGVIDEOX: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    # Absolute sine-cosine positions.
    "2b": ((49, 60, 90), {}),
    "5b": ((49, 60, 90), _ROTARY),
    "1.5": ((81, 300, 300), {**_ROTARY, "patch_size_t": 2, "patch_bias": False}),
    # The image's latent comes on 16 more channels. Learned positions fix the size: 9 frames of 64 x 64 pixels here.
    "i2v": ((9, 8, 8), {**_ROTARY, "use_learned_positional_embeddings": True, "in_channels": 32}),
    # Of CogVideoX-Fun: so does the control video's latent, and positions are those of any size.
    "control": ((49, 60, 90), {**_ROTARY, "in_channels": 32}),
}
_COGVIDEOX_PIPELINES = {"i2v": CogVideoXImageToVideoPipeline, "control": CogVideoXFunControlPipeline}


def build_ltx_video(directory: Path | str, *, seed: int = 0, layers: int = 2) -> Path:
    """Write a tiny LTX-Video: 32x32x8 compression to 128 channels, one token per latent cell, T5."""
    with seeded(seed):
        tokenizer = t5_tokenizer()
        vae = AutoencoderKLLTXVideo(
            latent_channels=128,
            block_out_channels=(8, 16, 32, 32),
            decoder_block_out_channels=(8, 16, 32, 32),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1, 1),
        )
        # Statistics that are not the identity, as published ones are not.
        vae.latents_mean.normal_(std=0.1)
        vae.latents_std.uniform_(0.5, 1.5)
        pipeline = LTXPipeline(
            tokenizer=tokenizer,
            text_encoder=t5_encoder(tokenizer),
            vae=vae,
            transformer=ltx_transformer(128, heads=4, head_width=8, layers=layers),
            scheduler=FlowMatchEulerDiscreteScheduler(
                use_dynamic_shifting=True,
                base_shift=0.95,
                max_shift=2.05,
                base_image_seq_len=1024,
                max_image_seq_len=4096,
                shift_terminal=0.1,
            ),
        )
    return save_pipeline(pipeline, directory)


def build_hunyuan_video(directory: Path | str, *, seed: int = 0, version: HunyuanVideoVersion = "t2v") -> Path:
    """Write a tiny HunyuanVideo: 8x8x4 compression to 16 channels, 2x2 patches, guidance embedding, Llama and CLIP.

    Raises:
        ValueError: the version is unknown.
    """
    if version not in _HUNYUAN_PIPELINES:
        raise InputError(f"unknown HunyuanVideo version {version!r}; valid: {', '.join(_HUNYUAN_PIPELINES)}", "unknown")
    with seeded(seed):
        sees_image = version in ("token_replace", "latent_concat")
        tokenizers, encoders = _hunyuan_texts(sees_image=sees_image)
        pipeline = _HUNYUAN_PIPELINES[version](
            tokenizer=tokenizers[0],
            text_encoder=encoders[0],
            tokenizer_2=tokenizers[1],
            text_encoder_2=encoders[1],
            **({"image_processor": _image_processor()} if sees_image else {}),
            vae=AutoencoderKLHunyuanVideo(
                latent_channels=16,
                block_out_channels=(8, 8, 8, 8),
                layers_per_block=1,
                norm_num_groups=4,
                scaling_factor=0.476986,
            ),
            transformer=HunyuanVideoTransformer3DModel(
                in_channels=_HUNYUAN_CHANNELS.get(version, 16),
                out_channels=16,
                num_attention_heads=2,
                attention_head_dim=16,
                num_layers=2,
                num_single_layers=2,
                num_refiner_layers=1,
                patch_size=2,
                patch_size_t=1,
                guidance_embeds=version != "latent_concat",
                image_condition_type=version if sees_image else None,
                text_embed_dim=16,
                pooled_projection_dim=8,
                rope_axes_dim=(4, 6, 6),
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        )
    return save_pipeline(pipeline, directory)


def _hunyuan_texts(*, sees_image: bool) -> tuple[list[Any], list[Any]]:
    """Build tokenizers and text encoders: Llama (the pipeline reads its third from last state) or LLaVA, and CLIP."""
    tokenizers = [llama_tokenizer(sees_image=sees_image), clip_tokenizer()]
    common: list[dict[str, Any]] = [
        {
            "vocab_size": len(tokenizer),
            "intermediate_size": 32,
            "num_attention_heads": 4,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,  # CLIP's pooled state is read at this token
            "pad_token_id": tokenizer.pad_token_id,
        }
        for tokenizer in tokenizers
    ]
    llama = LlamaConfig(hidden_size=16, num_hidden_layers=4, max_position_embeddings=1024, **common[0])
    clip = CLIPTextConfig(hidden_size=8, num_hidden_layers=2, projection_dim=8, **common[1])
    first = LlavaForConditionalGeneration(_llava(llama, tokenizers[0])) if sees_image else LlamaModel(llama)
    return tokenizers, [first.eval(), CLIPTextModel(clip).eval()]


#: Side of the images that LLaVA sees: 24 x 24 patches, as in the published one, of 2 x 2 pixels.
_LLAVA_SIDE = 48


def _llava(llama: LlamaConfig, tokenizer: Any) -> LlavaConfig:
    vision = CLIPVisionConfig(
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=_LLAVA_SIDE,
        patch_size=2,
    )
    image = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    return LlavaConfig(
        vision_config=vision, text_config=llama, image_token_index=image, pad_token_id=tokenizer.pad_token_id
    )


def _image_processor() -> CLIPImageProcessor:
    crop_size = {"height": _LLAVA_SIDE, "width": _LLAVA_SIDE}
    return CLIPImageProcessor(size={"shortest_edge": _LLAVA_SIDE}, crop_size=crop_size)


def build_cogvideox(directory: Path | str, *, seed: int = 0, version: CogVideoXVersion = "5b", layers: int = 2) -> Path:
    """Write a tiny CogVideoX: 8x8x4 compression to 16 channels, 2x2 patches, T5.

    Raises:
        ValueError: the version is unknown.
    """
    if version not in _COGVIDEOX:
        raise InputError(f"unknown CogVideoX version {version!r}; valid: {', '.join(_COGVIDEOX)}", "unknown")
    is_2b = version == "2b"
    with seeded(seed):
        tokenizer = t5_tokenizer(model_max_length=226)
        transformer = _cogvideox_transformer(version, layers)
        pipeline = _COGVIDEOX_PIPELINES.get(version, CogVideoXPipeline)(
            tokenizer=tokenizer,
            text_encoder=t5_encoder(tokenizer),
            vae=AutoencoderKLCogVideoX(
                latent_channels=16,
                down_block_types=("CogVideoXDownBlock3D",) * 4,
                up_block_types=("CogVideoXUpBlock3D",) * 4,
                block_out_channels=(8, 8, 8, 8),
                layers_per_block=1,
                norm_num_groups=2,
                temporal_compression_ratio=4,
                scaling_factor=1.15258426 if is_2b else 0.7,
                invert_scale_latents=version == "1.5",
            ),
            transformer=transformer,
            scheduler=(CogVideoXDDIMScheduler if version in ("2b", "control") else CogVideoXDPMScheduler)(
                beta_start=0.00085,
                beta_end=0.012,
                beta_schedule="scaled_linear",
                prediction_type="v_prediction",
                clip_sample=False,
                rescale_betas_zero_snr=True,
                snr_shift_scale=3.0 if is_2b else 1.0,
                set_alpha_to_one=True,
                timestep_spacing="trailing",
            ),
        )
    return save_pipeline(pipeline, directory)


def _cogvideox_transformer(version: CogVideoXVersion, layers: int) -> CogVideoXTransformer3DModel:
    (frames, height, width), options = _COGVIDEOX[version]
    common = {
        "num_attention_heads": 4,
        "attention_head_dim": 16,
        "num_layers": layers,
        "time_embed_dim": 32,
        "patch_size": 2,
    }
    texts = {"text_embed_dim": 32, "max_text_seq_length": 226}
    sizes = {"sample_frames": frames, "sample_height": height, "sample_width": width}
    transformer = CogVideoXTransformer3DModel(
        **{"in_channels": 16, "out_channels": 16, **common, **texts, **sizes, **options}
    )
    if transformer.config.use_learned_positional_embeddings:
        positions = transformer.patch_embed.pos_embedding
        positions += 0.1 * torch.randn_like(positions)
    return transformer


def ltx_transformer(
    channels: int, *, heads: int, head_width: int, layers: int, text_width: int = 32
) -> LTXVideoTransformer3DModel:
    """Build a randomly initialized LTX-Video transformer for latents of `channels` channels."""
    return LTXVideoTransformer3DModel(
        in_channels=channels,
        out_channels=channels,
        num_attention_heads=heads,
        attention_head_dim=head_width,
        cross_attention_dim=heads * head_width,
        caption_channels=text_width,
        num_layers=layers,
    )


def t5_encoder(tokenizer: Any, *, width: int = 32) -> T5EncoderModel:
    """Build a randomly initialized T5 encoder of two layers."""
    config = T5Config(
        vocab_size=-(-len(tokenizer) // 8) * 8,
        d_model=width,
        d_kv=width // 4,
        d_ff=2 * width,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
        tie_word_embeddings=False,
    )
    return T5EncoderModel(config).eval()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw weights from torch's global generator at this seed, and restore its state afterwards."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        yield


def save_pipeline(pipeline: Any, directory: Path | str) -> Path:
    """Write a complete repository, and return its directory."""
    pipeline.save_pretrained(str(directory))
    return Path(directory)
