"""HunyuanVideo (text to video): flow matching, two text encoders, guidance as an embedding.

Attention without masks: prompts have different lengths, so diffusers masks the padding of the text in every attention
of the network, and fast kernels refuse masks. Padding changes nothing else, so `load_transformer` makes the network cut
the text of a batch of one to its prompt first (`_trim_text`), and drop its masks, all ones by then
(`_UnmaskedAtBatchOne`, `_drop_refiner_mask`). The text of larger batches stays as long as it is given: if its length
followed the batch, a clip's prediction would depend, by rounding, on which others it is computed with.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLHunyuanVideo, HunyuanVideoPipeline, HunyuanVideoTransformer3DModel
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTokenizer, LlamaModel, LlamaTokenizerFast

from finetrainers.config.facts import Activations

from . import common
from .batch import Conditions, Parts, VAEStats, VideoMeta
from .common import input_dtype, unwrap
from .spec import ModelSpec

#: Guidance-distilled checkpoints take their guidance scale as an input; the unguided network is the one at 1.
TRAINING_GUIDANCE = 1.0

#: Both embedders expect their scalars, the noise level and the guidance scale, in thousandths.
EMBEDDING_SCALE = 1000.0


class HunyuanVideoSpec(ModelSpec):
    """HunyuanVideo as `HunyuanVideoPipeline` runs it.

    Conditions: `prompt_embeds`, `prompt_attention_mask` (bool), `pooled_prompt_embeds`.
    """

    parts: ClassVar = {
        "tokenizer": LlamaTokenizerFast,
        "tokenizer_2": CLIPTokenizer,
        "text_encoder": LlamaModel,
        "text_encoder_2": CLIPTextModel,
        "vae": AutoencoderKLHunyuanVideo,
        "transformer": HunyuanVideoTransformer3DModel,
    }
    pipeline_class = HunyuanVideoPipeline
    blocks = ("transformer_blocks", "single_transformer_blocks")
    activations: ClassVar = {
        "lora": Activations(kept=(22.4, 19.4), outside=15.2, checkpointed=1.01, forward=20.0, backward=36.3),
        "full-finetune": Activations(kept=(37.5, 32.5), outside=24.8, checkpointed=1.01, forward=30.2, backward=42.6),
    }
    vae_pixel_bytes, vae_frames_at_once = 2340, 17

    def load_text_encoders(self) -> Parts:
        """LLaMA and CLIP with their tokenizers.

        Raises:
            ValueError: the LLaMA tokenizer pads on the left, so that cropping the prompt template would cut the prompt.
        """
        tokenizer = common.load_part(LlamaTokenizerFast.from_pretrained, self.config, "tokenizer")
        if tokenizer.padding_side != "right":
            raise ValueError(
                "the tokenizer pads prompts on the left, but HunyuanVideo crops its prompt template from the left; "
                'set "padding_side": "right" in its tokenizer_config.json'
            )
        return super().load_text_encoders()

    def load_transformer(self, dtype: torch.dtype, *, folder: Path | None = None) -> nn.Module:
        """The transformer, set up to run without attention masks where it can."""
        transformer = super().load_transformer(dtype, folder=folder)
        run_without_masks(transformer)
        return transformer

    def transformer_on_meta(self) -> nn.Module:
        transformer = super().transformer_on_meta()
        run_without_masks(transformer)
        return transformer

    @torch.no_grad()
    def encode_text(self, encoders: Parts, prompts: Sequence[str]) -> Conditions:
        """The pipeline's encoding: LLaMA states `[B, 256, D]` without the prompt template, and CLIP's `[B, D2]`."""
        embeds, pooled, mask = common.build_pipeline(HunyuanVideoPipeline, encoders.modules).encode_prompt(
            prompt=list(prompts), device=common.encoder_device(encoders)
        )
        return Conditions(
            {"prompt_embeds": embeds, "prompt_attention_mask": mask.bool(), "pooled_prompt_embeds": pooled}
        )

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        config = self.configs["transformer"]
        return {
            "prompt_embeds": (256, config["text_embed_dim"]),
            "prompt_attention_mask": (256,),
            "pooled_prompt_embeds": (config["pooled_projection_dim"],),
        }

    def given_text(self, embedding: Tensor, mask: Tensor) -> Conditions:
        """From DanceGRPO's preprocessing: `[257, 4096]` with CLIP's pooled embedding, padded by zeros, in the first row."""
        pooled = embedding[0, : self.configs["transformer"]["pooled_projection_dim"]]
        return Conditions(
            {
                "prompt_embeds": embedding[None, 1:],
                "prompt_attention_mask": mask.flatten()[None, -(len(embedding) - 1) :].bool(),
                "pooled_prompt_embeds": pooled[None],
            }
        )

    def vae_bytes(self, size: tuple[int, int, int]) -> float:
        """Of large frames the attention masks take most: they grow with the square of the latents."""
        frames, height, width = size
        masks = 0.064 * (min(frames, self.vae_frames_at_once) / self.vae_frames_at_once * height * width) ** 2
        return max(super().vae_bytes(size), masks)

    def vae_stats(self, vae: nn.Module) -> VAEStats:
        scale = torch.tensor(vae.config.scaling_factor, dtype=torch.float32)  # type: ignore[union-attr]
        return VAEStats(mean=torch.tensor(0.0), scale=scale)

    def predict(
        self,
        transformer: nn.Module,
        x_BCTHW: Tensor,
        t: Tensor,
        conditions: Conditions,
        meta: VideoMeta,
    ) -> Tensor:
        network = unwrap(transformer)
        dtype = input_dtype(network)
        guidance = None
        if network.config.guidance_embeds:
            scale = TRAINING_GUIDANCE if meta.guidance is None else meta.guidance
            guidance = torch.full_like(t, scale * EMBEDDING_SCALE, dtype=dtype)
        return transformer(
            hidden_states=x_BCTHW.to(dtype),
            # In fp32, like the pipeline's: bf16 would round noise levels to 1/256.
            timestep=t.float() * EMBEDDING_SCALE,
            encoder_hidden_states=conditions["prompt_embeds"].to(dtype),
            encoder_attention_mask=conditions["prompt_attention_mask"],
            pooled_projections=conditions["pooled_prompt_embeds"].to(dtype),
            guidance=guidance,
            attention_kwargs=None if conditions.lengths is None else {_LENGTHS: conditions.lengths},
            return_dict=False,
        )[0]


# ---- attention without masks -----------------------------------------------------------------------------------------

#: Order of `HunyuanVideoTransformer3DModel.forward`'s arguments, for callers that pass them by position.
_FORWARD_ARGUMENTS = (
    "hidden_states",
    "timestep",
    "encoder_hidden_states",
    "encoder_attention_mask",
    "pooled_projections",
    "guidance",
    "attention_kwargs",
)
#: By which `predict` tells `_trim_text`, in `attention_kwargs`, how long the texts are.
_LENGTHS = "text_lengths"


class _UnmaskedAtBatchOne(HunyuanVideoAttnProcessor2_0):
    """diffusers' attention, which never masks a batch of one: `_trim_text` has cut its padding off."""

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Tensor | None = None,
    ) -> Tensor:
        if hidden_states.shape[0] == 1:
            attention_mask = None
        return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)


def run_without_masks(transformer: Any) -> None:
    """Make a `HunyuanVideoTransformer3DModel` trim its text and pass no mask to attention at batch size 1.

    Every way of calling it is covered (training, the pipeline, wrappers, recomputation in gradient checkpointing),
    since the parts are a forward hook of the network, one of its text refiner, and attention processors.
    """
    transformer.register_forward_pre_hook(_trim_text, with_kwargs=True)
    transformer.context_embedder.register_forward_pre_hook(_drop_refiner_mask)
    for block in (*transformer.transformer_blocks, *transformer.single_transformer_blocks):
        block.attn.set_processor(_UnmaskedAtBatchOne())


def _trim_text(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
    """Cut text and mask of a batch of one to its prompt; prompts are padded on the right."""
    call = {**dict(zip(_FORWARD_ARGUMENTS, args, strict=False)), **kwargs}
    mask = call["encoder_attention_mask"]
    extra = dict(call.get("attention_kwargs") or {})
    lengths = extra.pop(_LENGTHS, None)
    call["attention_kwargs"] = extra or None
    if lengths is None:  # from a pipeline, say; this waits for the device
        lengths = mask.bool().sum(dim=1).tolist()
    if min(lengths) == 0:
        raise ValueError(f"row {lengths.index(0)} of the batch has no text tokens: its attention mask is all zero")
    if len(lengths) == 1:
        call["encoder_hidden_states"] = call["encoder_hidden_states"][:, : lengths[0]]
        call["encoder_attention_mask"] = mask[:, : lengths[0]]
    return (), call


def _drop_refiner_mask(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The text refiner's arguments (text, timestep, mask), without the mask at batch size 1."""
    text, timestep, mask = args
    return text, timestep, None if text.shape[0] == 1 else mask
