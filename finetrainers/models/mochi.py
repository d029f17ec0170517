"""Mochi 1: a flow transformer over 8x8x6-compressed latents, with T5 text in a narrower stream, and learned positions.

Its time runs the other way: the network is given 1 - sigma in thousandths, and predicts `x0 - eps`. Its schedule of
noise levels, linear and then quadratic, is in the pipeline, not in the scheduler.

The stock attention loops over the clips of a batch and asks the device for each prompt's length, in every block. Here
one call serves the batch, with a mask of the padding; and a batch of one, whose text is cut to the prompt before
(`_cut_text`), needs no mask, so that fast kernels run it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import diffusers
import numpy as np
import torch
from diffusers import AutoencoderKLMochi, MochiTransformer3DModel
from torch import Tensor, nn
from transformers import T5EncoderModel, T5TokenizerFast

from finetrainers.config.attention import AUTO
from finetrainers.config.facts import Activations

from . import common
from .batch import ModelComponents, PromptEmbeds, VAEStats, VideoMeta
from .common import input_dtype, rotate_pairs
from .compiling import unwrap
from .files.files import MODEL_INDEX
from .flops import AttentionSpec, Flops
from .spec import ModelSpec
from .split.attention import AttentionFn, set_processors
from .split.sequence import SequenceParallelPlan

#: Text tokens of the pipeline's call and of its `encode_prompt`.
_TEXT_TOKENS = 256
#: The network's timestep of a time from 0 to 1: `num_train_timesteps` of the published scheduler.
_TIMESTEPS = 1000.0
#: Noise that the linear half of the schedule removes: a constant of the pipeline's call.
_LINEAR_NOISE = 0.025
#: Key of the text lengths that `predict` passes to `_cut_text` in `attention_kwargs`.
_LENGTHS = "text_lengths"


class MochiAttnProcessor:
    """diffusers' attention (`MochiAttnProcessor2_0`) by a chosen backend, in one call for the batch.

    Outputs of padding differ from diffusers'; neither the clip's tokens nor the prompt's depend on them.
    """

    def __init__(self, attend: AttentionFn) -> None:
        self.attend = attend

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        query, key, value = _heads(attn, hidden_states, (attn.to_q, attn.to_k, attn.to_v))
        query, key = attn.norm_q(query), attn.norm_k(key)
        if image_rotary_emb is not None:
            query, key = _rotate(query, *image_rotary_emb), _rotate(key, *image_rotary_emb)
        text_projections = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        text_query, text_key, text_value = _heads(attn, encoder_hidden_states, text_projections)
        text_query, text_key = attn.norm_added_q(text_query), attn.norm_added_k(text_key)
        video, text = hidden_states.shape[1], encoder_hidden_states.shape[1]
        mask = None
        if len(hidden_states) > 1:  # `_cut_text` has cut the padding of a batch of one
            mask = nn.functional.pad(attention_mask.bool(), (video, 0), value=True)[:, None, None, :]
        outputs = self.attend(
            torch.cat([query, text_query], dim=1),
            torch.cat([key, text_key], dim=1),
            torch.cat([value, text_value], dim=1),
            mask,
            text=(0, text),
        )
        video_outputs, text_outputs = outputs.flatten(2, 3).to(value.dtype).split_with_sizes((video, text), dim=1)
        if hasattr(attn, "to_add_out"):  # all blocks but the last
            text_outputs = attn.to_add_out(text_outputs)
        return attn.to_out[1](attn.to_out[0](video_outputs)), text_outputs


def _heads(attn: Any, x_BSD: Tensor, projections: Sequence[Any]) -> list[Tensor]:
    """Return projections of tokens, `[B, S, H, D]` each."""
    return [projection(x_BSD).unflatten(2, (attn.heads, -1)) for projection in projections]


def _rotate(x_BSHD: Tensor, cos_SHD: Tensor, sin_SHD: Tensor) -> Tensor:
    """Rotate pairs of channels in fp32; each head has its own frequencies."""
    return rotate_pairs(x_BSHD.float(), cos_SHD, sin_SHD).to(x_BSHD.dtype)


class MochiSpec(ModelSpec):
    """Mochi as `MochiPipeline` runs it.

    Conditions: `prompt_embeds` `[B, 256, D]` and `prompt_attention_mask` `[B, 256]` (bool), all False for the empty
    prompt.
    """

    parts: ClassVar = {
        "tokenizer": T5TokenizerFast,
        "text_encoder": T5EncoderModel,
        "vae": AutoencoderKLMochi,
        "transformer": MochiTransformer3DModel,
    }
    text_varies = True  # at batch size 1
    attention_processor = MochiAttnProcessor
    token_plan = SequenceParallelPlan(
        outputs={"rope": 0}, entries={"transformer_blocks.0": 1}, unsplit=("patch_embed",)
    )
    activations: ClassVar = {
        "lora": Activations(
            kept=(30.4,), outside=11.0, checkpointed=1.0, forward=11.8, backward=39.3, attention=1.04, between=4.2
        ),
        "lora without autocast": Activations(
            kept=(27.4,), outside=11.0, checkpointed=1.0, forward=12.7, backward=37.3, attention=1.04, between=3.2
        ),
        "full-finetune": Activations(
            kept=(47.3,), outside=13.2, checkpointed=1.0, forward=10.2, backward=52.1, attention=1.04, between=8.3
        ),
        "full-finetune without autocast": Activations(
            kept=(46.9,), outside=12.2, checkpointed=1.0, forward=10.6, backward=53.7, attention=1.04, between=6.2
        ),
        "full-finetune-bf16": Activations(
            kept=(46.9,), outside=13.2, checkpointed=1.0, forward=8.7, backward=51.8, attention=1.04, between=8.2
        ),
    }
    unquantized = ("^patch_embed", "^time_embed", "norm", "^proj_out$")
    streams: ClassVar = {
        "timestep_embedder|pooler.to_(q|out)|norm": "time",
        "caption_proj|pooler.to_kv": "prompt",
        "add_[qkv]_proj|to_add_out|ff_context": "text",
        "": "video",
    }
    attentions = (AttentionSpec("transformer_blocks", "joint", "joint"),)
    vae_pixel_bytes, vae_tile = 1340, (256, 256)
    vae_graph_bytes = (3430, 0, 14500)
    casts_latents = False

    @property
    def pipeline_class(self) -> Any:  # type: ignore[override]
        """Text-to-video pipeline, imported at first use: pipelines import schedulers and much else."""
        return diffusers.MochiPipeline

    # ---- text ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode_text(self, encoders: ModelComponents, prompts: Sequence[str]) -> PromptEmbeds:
        """Encode prompts as the pipeline does one by one: it masks a whole batch whose last prompt is empty."""
        settings = self.configs.get(MODEL_INDEX, {})  # `force_zeros_for_empty_prompt`
        pipeline = common.build_pipeline(diffusers.MochiPipeline, encoders.modules, settings=settings)
        rows: dict[int, tuple[Tensor, Tensor]] = {}
        for is_empty in (False, True):
            places = [place for place, prompt in enumerate(prompts) if (prompt == "") == is_empty]
            if not places:
                continue
            embeds, mask, _, _ = pipeline.encode_prompt(
                [prompts[place] for place in places],
                do_classifier_free_guidance=False,
                max_sequence_length=_TEXT_TOKENS,
                device=common.encoder_device(encoders),
            )
            rows |= zip(places, zip(embeds, mask.bool(), strict=True), strict=True)
        embeds, masks = zip(*(rows[place] for place in range(len(prompts))), strict=True)
        return PromptEmbeds({"prompt_embeds": torch.stack(embeds), "prompt_attention_mask": torch.stack(masks)})

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        width = self.configs["transformer"].get("text_embed_dim", 4096)
        return {"prompt_embeds": (_TEXT_TOKENS, width), "prompt_attention_mask": (_TEXT_TOKENS,)}

    def given_text(self, embedding: Tensor, mask: Tensor) -> PromptEmbeds:
        """Read DanceGRPO's tensors, embeddings `[256, 4096]` and mask."""
        return PromptEmbeds({"prompt_embeds": embedding[None], "prompt_attention_mask": mask.flatten()[None].bool()})

    def to_given_text(self, row: PromptEmbeds) -> tuple[Tensor, Tensor]:
        return row["prompt_embeds"][0], row["prompt_attention_mask"][0]

    # ---- the network -----------------------------------------------------------------------------------------------

    def load_transformer(self, dtype: torch.dtype, *, folder: Path | None = None) -> nn.Module:
        """Load the transformer, with attention in one call for the batch."""
        return self._in_one_call(super().load_transformer(dtype, folder=folder))

    def transformer_on_meta(self) -> nn.Module:
        return self._in_one_call(super().transformer_on_meta())

    def _in_one_call(self, network: nn.Module) -> nn.Module:
        network.register_forward_pre_hook(_cut_text, with_kwargs=True)
        if self.config.attn_backend == AUTO:
            set_processors(self.block_modules(network), MochiAttnProcessor(AttentionFn("native")))
        return network

    def vae_bytes(self, size: tuple[int, int, int], *, gradient: bool = False) -> float:
        """Estimate peak bytes: the decoder computes a whole latent frame for the first frame, and drops the rest."""
        frames, height, width = size
        return super().vae_bytes((frames + self.facts.geometry.temporal - 1, height, width), gradient=gradient)

    def vae_stats(self, vae: Any) -> VAEStats:
        mean, std = (torch.tensor(vae.config[name], dtype=torch.float32) for name in ("latents_mean", "latents_std"))
        return VAEStats(mean=mean, scale=vae.config.scaling_factor / std)

    def predict(
        self, transformer: nn.Module, x_BCTHW: Tensor, t: Tensor, conditions: PromptEmbeds, meta: VideoMeta
    ) -> Tensor:
        """Predict velocity `eps - x0` in fp32: the opposite of the network's output at the time 1 - t."""
        dtype = input_dtype(unwrap(transformer))
        prediction: Tensor = transformer(
            hidden_states=x_BCTHW.to(dtype),
            timestep=_TIMESTEPS * (1.0 - t.float()),
            encoder_hidden_states=conditions["prompt_embeds"].to(dtype),
            encoder_attention_mask=conditions["prompt_attention_mask"],
            attention_kwargs=None if conditions.lengths is None else {_LENGTHS: conditions.lengths},
            return_dict=False,
        )[0]
        return -prediction.float()

    def sampling_times(self, scheduler: Any, steps: int, *, num_tokens: int, shift: float | None = None) -> Tensor:
        """Return the noise levels of the pipeline's schedule, shifted as its scheduler does."""
        fresh = type(scheduler).from_config(scheduler.config, **({} if shift is None else {"shift": shift}))
        schedule = diffusers.pipelines.mochi.pipeline_mochi.linear_quadratic_schedule
        fresh.set_timesteps(sigmas=np.array(schedule(steps, _LINEAR_NOISE)))
        sigmas = fresh.sigmas[:-1].to(torch.float32).clone()
        return 1.0 - sigmas if fresh.config.invert_sigmas else sigmas

    def flops(self, network: nn.Module) -> Flops | None:
        """Add the pooled caption's attention, its further key (the mean of the prompt's tokens), and the positions."""
        formula, pooler = super().flops(network), unwrap(network).time_embed.pooler
        assert formula is not None, "its attentions are declared"
        key, attention = 4.0 * pooler.to_kv.in_features**2, 4.0 * pooler.to_kv.in_features
        forward = dict(formula.forward)
        forward["time"] += key + attention
        forward["prompt"] += attention
        # Three coordinates of each token, times the frequencies of all heads.
        return replace(formula, forward=forward, shared={"video": 3.0 * self.width(unwrap(network))})


#: Order of `MochiTransformer3DModel.forward`'s arguments, for callers that pass them by position.
_FORWARD_ARGUMENTS = (
    "hidden_states",
    "encoder_hidden_states",
    "timestep",
    "encoder_attention_mask",
    "attention_kwargs",
    "return_dict",
)


def _cut_text(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
    """Cut text and mask of a batch of one to its prompt, which may be empty; prompts are padded on the right."""
    call = {**dict(zip(_FORWARD_ARGUMENTS, args, strict=False)), **kwargs}
    extra = dict(call.get("attention_kwargs") or {})
    lengths, mask = extra.pop(_LENGTHS, None), call["encoder_attention_mask"]
    call["attention_kwargs"] = extra or None
    if len(mask) == 1:
        # In a pipeline's call, for example, this waits for the device.
        length = int(mask.sum()) if lengths is None else lengths[0]
        call["encoder_hidden_states"] = call["encoder_hidden_states"][:, :length]
        call["encoder_attention_mask"] = mask[:, :length]
    return (), call
