"""LTX-Video: a flow transformer over 32x32x8-compressed latents, one token per latent cell, with T5 text.

Positions are in seconds and pixels: the transformer's rotary embedding is scaled by the VAE's compression and by the
clip's frame rate. Image-to-video needs no extra weights: the first latent frame is given clean, with timestep 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import diffusers
import torch
from diffusers import AutoencoderKLLTXVideo, LTXVideoTransformer3DModel
from diffusers.models.transformers.transformer_ltx import LTXVideoAttnProcessor, apply_rotary_emb
from torch import Tensor, nn
from transformers import T5EncoderModel, T5TokenizerFast

from finetrainers.config.facts import Activations

from . import common
from .batch import ModelComponents, PromptEmbeds, SampleRequest, VAEStats, VideoMeta
from .common import input_dtype
from .compiling import unwrap
from .flops import AttentionSpec, Tokens
from .given_frames import sample_in_place
from .spec import ModelSpec
from .split.attention import AttentionFn
from .split.sequence import SequenceParallelPlan

#: Prompt length that the published checkpoints were trained with, and the pipeline's default.
_MAX_PROMPT_TOKENS = 128
#: The network's timestep of process time sigma: `num_train_timesteps` of the published scheduler.
_TIMESTEPS = 1000.0
_DECODE_SEED = 0
_STATISTICS = ("latents_mean", "latents_std")


class LTXAttnProcessor(LTXVideoAttnProcessor):
    """diffusers' attention, by a chosen backend."""

    def __init__(self, attend: AttentionFn) -> None:
        super().__init__()
        self.attend = attend

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        if attention_mask is not None:
            attention_mask = attn.prepare_attention_mask(attention_mask, source.shape[1], source.shape[0])
            attention_mask = attention_mask.view(source.shape[0], attn.heads, -1, attention_mask.shape[-1])
        query, key = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(source))
        value = attn.to_v(source)
        if image_rotary_emb is not None:
            query, key = apply_rotary_emb(query, image_rotary_emb), apply_rotary_emb(key, image_rotary_emb)
        query, key, value = (tokens.unflatten(2, (attn.heads, -1)) for tokens in (query, key, value))
        attend = self.attend if encoder_hidden_states is None else self.attend.attend_locally
        outputs = attend(query, key, value, attention_mask).flatten(2, 3).to(query.dtype)
        return attn.to_out[1](attn.to_out[0](outputs))


class LTXVideoSpec(ModelSpec):
    """LTX-Video, text- and image-to-video; see `ModelSpec` for each method's contract.

    Latents are packed into tokens one cell each. Every published checkpoint has patch size 1, and the stock pipelines
    unpack correctly at no other.
    """

    parts: ClassVar = {
        "tokenizer": T5TokenizerFast,
        "text_encoder": T5EncoderModel,
        "vae": AutoencoderKLLTXVideo,
        "transformer": LTXVideoTransformer3DModel,
    }
    attention_processor = LTXAttnProcessor
    token_plan = SequenceParallelPlan(inputs={"hidden_states": 1, "timestep": 1}, outputs={"rope": 1})
    activations: ClassVar = {
        "lora": Activations(
            kept=(28.5,), outside=10.2, checkpointed=1.0, forward=18.7, backward=41.4, attention=2.06, between=6.2
        ),
        "lora without autocast": Activations(
            kept=(24.5,), outside=9.4, checkpointed=1.0, forward=13.0, backward=37.4, attention=2.06, between=5.2
        ),
        "full-finetune": Activations(
            kept=(43.2,), outside=14.9, checkpointed=2.0, forward=16.5, backward=49.7, attention=2.06, between=6.8
        ),
        "lora-bf16": Activations(
            kept=(26.5,), outside=10.8, checkpointed=1.0, forward=18.7, backward=39.2, attention=2.06, between=6.2
        ),
        "full-finetune without autocast": Activations(
            kept=(39.4,), outside=11.0, checkpointed=1.0, forward=15.8, backward=46.0, attention=2.06, between=7.4
        ),
        "full-finetune-bf16": Activations(
            kept=(41.4,), outside=15.0, checkpointed=1.0, forward=18.8, backward=45.0, attention=2.06, between=9.4
        ),
    }
    unquantized: tuple[str, ...] = ("^proj_in$", "^time_embed", "^caption_projection", "norm", "^proj_out$")
    streams: ClassVar = {"time_embed": "time", r"caption_projection|attn2\.to_[kv]": "prompt", "": "video"}
    attentions = (
        AttentionSpec("transformer_blocks", "video", "video"),
        AttentionSpec("transformer_blocks", "video", "prompt"),
    )
    vae_pixel_bytes = 118
    vae_graph_bytes = (370, 0, 1080)

    @property
    def pipeline_class(self) -> Any:  # type: ignore[override]
        """Text-to-video pipeline, imported at first use: pipelines import schedulers and much else."""
        return diffusers.LTXPipeline

    @property
    def image_pipeline_class(self) -> Any:  # type: ignore[override]
        """Image-to-video pipeline, imported at first use."""
        return diffusers.LTXImageToVideoPipeline

    @torch.no_grad()
    def encode_text(self, encoders: ModelComponents, prompts: Sequence[str]) -> PromptEmbeds:
        """Encode to `prompt_embeds` `[B, 128, D]` and `prompt_attention_mask` `[B, 128]` (bool) by pipeline code."""
        pipeline = common.build_pipeline(diffusers.LTXPipeline, encoders.modules)
        embeds, mask, _, _ = pipeline.encode_prompt(
            list(prompts),
            do_classifier_free_guidance=False,
            max_sequence_length=_MAX_PROMPT_TOKENS,
            device=common.encoder_device(encoders),
        )
        return PromptEmbeds({"prompt_embeds": embeds, "prompt_attention_mask": mask.bool()})

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        width = self.configs["transformer"]["caption_channels"]
        return {"prompt_embeds": (_MAX_PROMPT_TOKENS, width), "prompt_attention_mask": (_MAX_PROMPT_TOKENS,)}

    def vae_stats(self, vae: Any) -> VAEStats:
        buffers = dict(vae.named_buffers())
        # Copies, since the VAE may change or go while these stay.
        mean, std = (buffers[name].detach().to("cpu", torch.float32, copy=True) for name in _STATISTICS)
        return VAEStats(mean=mean, scale=vae.config.scaling_factor / std)

    def predict(
        self,
        transformer: nn.Module,
        x_BCTHW: Tensor,
        t: Tensor,
        conditions: PromptEmbeds,
        meta: VideoMeta,
    ) -> Tensor:
        """Predict velocity `eps - x0` in fp32; with t of `[B, T]`, each latent frame has a noise level (0: clean)."""
        _, _, frames, height, width = x_BCTHW.shape
        dtype = input_dtype(unwrap(transformer))
        timestep = _TIMESTEPS * t.float()
        if timestep.ndim == 2:
            timestep = timestep.repeat_interleave(height * width, dim=1)  # tokens run over width, height, then time
        spatial = self.facts.geometry.spatial
        seconds_per_frame = self.facts.geometry.temporal / meta.fps.to(x_BCTHW.device, torch.float32)
        packed = transformer(
            hidden_states=diffusers.LTXPipeline._pack_latents(x_BCTHW).to(dtype),
            encoder_hidden_states=conditions["prompt_embeds"].to(dtype),
            timestep=timestep,
            encoder_attention_mask=conditions["prompt_attention_mask"],
            num_frames=frames,
            height=height,
            width=width,
            # Coordinates are `[B, 3, T, H, W]`, so the frame rate may differ from row to row.
            rope_interpolation_scale=(seconds_per_frame.view(-1, 1, 1, 1, 1), spatial, spatial),
            return_dict=False,
        )[0]
        return packed.float().transpose(1, 2).unflatten(2, (frames, height, width))

    def count_tokens(self, network: Any, call: Mapping[str, Any]) -> Tokens:
        """Count the tokens from the clip's size: processes that share it see a part of the tokens and noise levels."""
        tokens, config = super().count_tokens(network, call), network.config
        cells = call["num_frames"] * call["height"] * call["width"]
        video = cells // (config.patch_size_t * config.patch_size**2)
        return replace(tokens, video=video, times=video if tokens.times > 1 else 1)

    def decode_latents(self, vae: Any, z_BCTHW: Tensor) -> Tensor:
        """Decode like the pipeline at its default decode timestep, 0, where it adds no noise.

        Later VAEs inject noise in their decoder, from torch's global generator; here the same latents always give the
        same video, and the global generator is left as it was.
        """
        device, decode = z_BCTHW.device, vae.decode
        # One clip at a time under slicing: the VAE's own slicing does not split timesteps.
        parts = z_BCTHW.split(1 if vae.use_slicing else len(z_BCTHW))
        conditioned = vae.config.timestep_conditioning
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(_DECODE_SEED)
            videos = [decode(z, z.new_zeros(len(z)) if conditioned else None, return_dict=False)[0] for z in parts]
        return torch.cat(videos)

    def sample(
        self,
        pipeline: Any,
        conditions: PromptEmbeds,
        negative: PromptEmbeds,
        request: SampleRequest,
        generator: torch.Generator,
    ) -> Any:
        """Sample by the text-to-video pipeline, with given frames clean in their places, at timestep 0, as in training.

        diffusers' image-to-video pipeline does the same for a first frame alone, and samples that.
        """
        if request.starts_from_image or (request.last_image is None and request.prefix is None):
            return super().sample(pipeline, conditions, negative, request, generator)
        call = self.pipeline_call(conditions, negative, replace(request, image=None))
        return sample_in_place(
            self, pipeline, call, request, generator, pack=pipeline._pack_latents, tokens=lambda mask: mask.flatten(1)
        )

    def pipeline_call(self, conditions: PromptEmbeds, negative: PromptEmbeds, request: SampleRequest) -> dict[str, Any]:
        return {"frame_rate": request.frame_rate} | super().pipeline_call(conditions, negative, request)
