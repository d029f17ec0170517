"""HunyuanVideo-I2V's text conditioning, which includes the image: LLaVA reads both, CLIP the text alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import diffusers
import torch
from PIL import Image
from torch import Tensor
from transformers import CLIPImageProcessor, LlavaForConditionalGeneration

from . import common
from .batch import ModelComponents, PromptEmbeds
from .pixels import to_pil

#: The classes of the parts that differ from HunyuanVideo's.
PARTS: Mapping[str, Any] = {"text_encoder": LlavaForConditionalGeneration, "image_processor": CLIPImageProcessor}
#: Tokens that LLaVA reads: 103 of the prompt template and 256 of the prompt, and instead of one of them 576 of the
#: image.
TOKENS_READ = 103 + 256 - 1 + 576
#: Tokens of the prompt, without those of the template's last header.
_TEXT_TOKENS = 256 - 4
#: Stride of the image tokens that the network is given, by the kind of its checkpoint.
_INTERLEAVE = {"latent_concat": 2, "token_replace": 4}
#: Stride that the pipeline takes for the negative prompt of any checkpoint.
_INTERLEAVE_OF_NEGATIVE = 2


def text_tokens(kind: str) -> int:
    """Return the number of image and text tokens that a kind of checkpoint is given."""
    return 576 // _INTERLEAVE[kind] + _TEXT_TOKENS


@torch.no_grad()
def encode(
    encoders: ModelComponents, prompts: Sequence[str], images: Sequence[Any] | None, *, kind: str
) -> PromptEmbeds:
    """Encode prompts with images as the pipeline does, one by one: it cannot tell long prompts of a batch apart.

    Args:
        encoders: tokenizers, text encoders and image processor.
        prompts: the prompts.
        images: PIL's, or pixels `[3, H, W]` uint8, or None for the pipeline's negative conditioning, which has a black
            image.
        kind: the checkpoint's `image_condition_type`.
    """
    pipeline = common.build_pipeline(diffusers.HunyuanVideoImageToVideoPipeline, encoders.modules)
    device = common.encoder_device(encoders)
    interleave = _INTERLEAVE_OF_NEGATIVE if images is None else _INTERLEAVE[kind]
    black = Image.new("RGB", (64, 64), 0)
    images = [black] * len(prompts) if images is None else images
    pil_images = [to_pil(image) if isinstance(image, Tensor) else image for image in images]
    rows = []
    for prompt, image in zip(prompts, pil_images, strict=True):
        embeds, pooled, mask = pipeline.encode_prompt(
            image=image, prompt=[prompt], device=device, image_embed_interleave=interleave
        )
        rows.append(
            PromptEmbeds(
                {"prompt_embeds": embeds, "prompt_attention_mask": mask.bool(), "pooled_prompt_embeds": pooled}
            )
        )
    return PromptEmbeds.cat(rows)
