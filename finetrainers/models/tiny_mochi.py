"""Tiny Mochi repositories, with the stock classes; see `tiny`."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKLMochi, FlowMatchEulerDiscreteScheduler, MochiPipeline, MochiTransformer3DModel

from .tiny import save_pipeline, seeded, t5_encoder
from .tiny_tokenizers import t5_tokenizer

#: The VAE's norms have 32 groups of channels.
_CHANNELS = (32, 32, 32, 32)


def build_mochi(directory: Path | str, *, seed: int = 0, layers: int = 2) -> Path:
    """Write a tiny Mochi: 8x8x6 compression to 12 channels, 2x2 patches, T5, frequencies of positions for each head."""
    with seeded(seed):
        tokenizer = t5_tokenizer(model_max_length=256)
        transformer = MochiTransformer3DModel(
            num_attention_heads=4, attention_head_dim=16, num_layers=layers, pooled_projection_dim=32,
            text_embed_dim=32, time_embed_dim=32,
        )  # fmt: skip
        transformer.pos_frequencies.copy_(torch.randn_like(transformer.pos_frequencies))  # the class has zeros
        pipeline = MochiPipeline(
            tokenizer=tokenizer,
            text_encoder=t5_encoder(tokenizer),
            vae=AutoencoderKLMochi(
                encoder_block_out_channels=_CHANNELS,
                decoder_block_out_channels=_CHANNELS,
                layers_per_block=(1, 1, 1, 1, 1),
            ),
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
            force_zeros_for_empty_prompt=True,
        )
    return save_pipeline(pipeline, directory)
