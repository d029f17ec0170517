"""LTX-2 and LTX-2.3: the video stream of a flow transformer of video and sound, with Gemma 3 and text connectors.

The network is called with its streams isolated, so that the prediction does not depend on sound: that is how
Lightricks' trainer calls it for videos without sound. Each connector turns Gemma's states of all layers into text
tokens of its stream, always 1024, with learned tokens in the place of padding. Positions are in seconds and pixels, by
the clip's frame rate. A given frame is clean, with time 0 in each of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar

import diffusers
import torch
from diffusers import AutoencoderKLLTX2Video, LTX2VideoTransformer3DModel
from diffusers.models.transformers.transformer_ltx2 import (
    LTX2PerturbedAttnProcessor,
    apply_interleaved_rotary_emb,
    apply_split_rotary_emb,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from torch import Tensor, nn
from transformers import Gemma3ForConditionalGeneration, GemmaTokenizerFast

from finetrainers.config.facts import Activations
from finetrainers.utils.device import to_device

from . import common
from .batch import ModelComponents, PromptEmbeds, SampleRequest, VideoMeta
from .common import input_dtype
from .compiling import unwrap
from .flops import AttentionSpec
from .ltx_video import LTXVideoSpec
from .split.attention import AttentionFn
from .split.sequence import SequenceParallelPlan

#: Text tokens of the pipelines' calls.
_TEXT_TOKENS = 1024
#: The network's timestep of process time sigma: `num_train_timesteps` of the published schedulers.
_TIMESTEPS = 1000.0
#: Counted memory of activations of 2.0 and of 2.3, whose text and gates take more, with a time per token, 121x512x768,
#: and LoRAs of rank 64; see `Activations`: kept, outside, checkpointed, forward, backward, between.
_COUNTED: dict[str, dict[str, tuple[float, float, float, float, float, float]]] = {
    "LTX-2.0": {
        "lora": (42.2, 17.6, 1.0, 29.7, 60.8, 12.6),
        "lora without autocast": (37.8, 13.6, 1.0, 29.6, 56.5, 11.6),
        "lora-bf16": (39.8, 17.6, 1.0, 30.1, 58.4, 12.6),
        "full-finetune": (64.0, 28.3, 2.0, 41.0, 89.6, 19.7),
        "full-finetune without autocast": (53.0, 21.0, 1.0, 33.0, 76.8, 18.1),
    },
    "LTX-2.3": {
        "lora": (50.2, 18.3, 1.0, 35.5, 71.7, 15.3),
        "lora without autocast": (44.0, 16.3, 1.0, 35.5, 65.4, 14.3),
        "lora-bf16": (48.0, 18.3, 1.0, 36.0, 69.3, 15.3),
        "full-finetune": (81.4, 30.7, 2.0, 51.0, 111.9, 22.7),
        "full-finetune without autocast": (61.2, 23.4, 1.0, 38.6, 89.4, 20.4),
    },
}
for _counts in _COUNTED.values():
    _counts["full-finetune-bf16"] = _counts["full-finetune without autocast"]
_ROTATIONS = {"interleaved": apply_interleaved_rotary_emb, "split": apply_split_rotary_emb}


class LTX2AttnProcessor(LTX2PerturbedAttnProcessor):
    """diffusers' attention, by a chosen backend; without the perturbation, which is guidance of samples."""

    def __init__(self, attend: AttentionFn) -> None:
        super().__init__()
        self.attend = attend

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        query_rotary_emb: tuple[Tensor, Tensor] | None = None,
        key_rotary_emb: tuple[Tensor, Tensor] | None = None,
        perturbation_mask: Tensor | None = None,
        all_perturbed: bool | None = None,
    ) -> Tensor:
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        if attention_mask is not None:
            attention_mask = attn.prepare_attention_mask(attention_mask, source.shape[1], source.shape[0])
            attention_mask = attention_mask.view(source.shape[0], attn.heads, -1, attention_mask.shape[-1])
        # In the order of the stock processors, in which gradients are added up: that of 2.3 begins with values.
        gates = None if attn.to_gate_logits is None else attn.to_gate_logits(hidden_states)
        value = None if all_perturbed is None else attn.to_v(source)
        query, key = attn.to_q(hidden_states), attn.to_k(source)
        value = attn.to_v(source) if value is None else value
        query, key = attn.norm_q(query), attn.norm_k(key)
        if query_rotary_emb is not None:
            rotate = _ROTATIONS[attn.rope_type]
            query, key = rotate(query, query_rotary_emb), rotate(key, key_rotary_emb or query_rotary_emb)
        query, key, value = (tokens.unflatten(2, (attn.heads, -1)) for tokens in (query, key, value))
        attend = self.attend if encoder_hidden_states is None else self.attend.attend_locally
        outputs = attend(query, key, value, attention_mask).to(query.dtype)
        if gates is not None:
            outputs = outputs * (2.0 * torch.sigmoid(gates)).unsqueeze(-1)
        return attn.to_out[1](attn.to_out[0](outputs.flatten(2, 3)))


class LTX2Spec(LTXVideoSpec):
    """LTX-2's video stream, with the latents and given frames of LTX-Video; see `ModelSpec`.

    Conditions: `prompt_embeds` `[B, 1024, D]`, the video connector's text tokens, none of which is padding. Latents are
    packed into tokens one cell each, as in all published checkpoints.
    """

    parts: ClassVar = {
        "tokenizer": GemmaTokenizerFast,
        "text_encoder": Gemma3ForConditionalGeneration,
        "connectors": LTX2TextConnectors,
        "vae": AutoencoderKLLTX2Video,
        "transformer": LTX2VideoTransformer3DModel,
    }
    attention_processor = LTX2AttnProcessor
    token_plan = SequenceParallelPlan(inputs={"hidden_states": 1, "timestep": 1}, outputs={"rope": -2})
    unused_layers = ("audio_attn1", "audio_attn2", "audio_ff", "audio_to_video_attn", "video_to_audio_attn")
    texts_at_once = 1
    text_version = "prompt before learned tokens"  # diffusers had them interleaved until June 2026
    text_calls: ClassVar = {"text_encoder": (_TEXT_TOKENS, True)}
    unquantized = (
        "^proj_in$", "^proj_out$", "time_embed", "caption_projection", "adaln", "norm", "audio", "^av_cross_attn",
        "to_gate_logits",
    )  # fmt: skip
    own_arguments: ClassVar = {
        "isolate_modalities": True,
        # None of these changes the prediction of an isolated video stream; and there is no padding to mask.
        **dict.fromkeys((
            "audio_hidden_states", "audio_encoder_hidden_states", "audio_timestep", "audio_coords",
            "audio_encoder_attention_mask", "encoder_attention_mask",
        )),
    }  # fmt: skip
    #: Guidance by perturbed attention and by sound would each be a further call of the network.
    pipeline_arguments: ClassVar = {
        "stg_scale": 0.0, "audio_stg_scale": 0.0, "spatio_temporal_guidance_blocks": None,
        "modality_scale": 1.0, "audio_modality_scale": 1.0, "audio_guidance_scale": None,
    }  # fmt: skip
    streams: ClassVar = {
        "audio_attn|audio_ff|audio_to_video|video_to_audio": "none",  # `unused_layers`
        "audio|av_cross_attn|a2v": "clip",  # one token of sound
        "time_embed": "time",
        "prompt_adaln": "clip",
        r"caption_projection|attn2\.to_[kv]": "prompt",
        "": "video",
    }
    attentions = (
        AttentionSpec("transformer_blocks", "video", "video"),
        AttentionSpec("transformer_blocks", "video", "prompt"),
    )

    vae_pixel_bytes = 88  # of 2.0; 2.3's decoder takes less
    vae_graph_bytes = (265, 0, 1190)

    @cached_property
    def activations(self) -> dict[str, Activations]:  # type: ignore[override]
        """Memory of activations of the checkpoint's version."""
        return {
            kind: Activations((block,), outside, checkpointed, forward, backward, attention=2.03, between=between)
            for kind, (block, outside, checkpointed, forward, backward, between) in _COUNTED[
                self.facts.version or "LTX-2.0"
            ].items()
        }

    @property
    def pipeline_class(self) -> Any:  # type: ignore[override]
        """Text-to-video pipeline, imported at first use: pipelines import schedulers and much else."""
        return diffusers.LTX2Pipeline

    @property
    def image_pipeline_class(self) -> Any:  # type: ignore[override]
        """Image-to-video pipeline, imported at first use."""
        return diffusers.LTX2ImageToVideoPipeline

    # ---- text and latents ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode_text(self, encoders: ModelComponents, prompts: Sequence[str]) -> PromptEmbeds:
        """Encode to the video connector's tokens `[B, 1024, D]`, prompt by prompt: Gemma's states of all are large."""
        pipeline = common.build_pipeline(diffusers.LTX2Pipeline, encoders.modules)
        device = common.encoder_device(encoders)
        rows = []
        for prompt in prompts:
            states, mask, _, _ = pipeline.encode_prompt(
                [prompt], do_classifier_free_guidance=False, max_sequence_length=_TEXT_TOKENS, device=device
            )
            connectors = encoders["connectors"]
            states = states.to(input_dtype(connectors))
            rows.append(connectors(states, mask, padding_side=pipeline.tokenizer.padding_side)[0])
        return PromptEmbeds({"prompt_embeds": torch.cat(rows)})

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        config = self.configs["transformer"]
        is_projected = config.get("use_prompt_embeddings", True)
        return {"prompt_embeds": (_TEXT_TOKENS, config["caption_channels" if is_projected else "cross_attention_dim"])}

    # ---- the network -----------------------------------------------------------------------------------------------

    def predict(
        self, transformer: nn.Module, x_BCTHW: Tensor, t: Tensor, conditions: PromptEmbeds, meta: VideoMeta
    ) -> Tensor:
        """Predict velocity `eps - x0` in fp32; with t of `[B, T]`, each latent frame has a noise level (0: clean)."""
        batch, _, frames, height, width = x_BCTHW.shape
        network: Any = unwrap(transformer)
        dtype, config, timestep = input_dtype(network), network.config, _TIMESTEPS * t.float()
        sigma = timestep
        if timestep.ndim == 2:
            sigma = timestep.amax(dim=1)
            timestep = timestep.repeat_interleave(height * width, dim=1)  # tokens run over width, height, then time
        text = conditions["prompt_embeds"].to(dtype)
        # Made on the host, since making them on a GPU waits for it; the frame rate may differ from row to row.
        host_coordinates = network.rope.prepare_video_coords(batch, frames, height, width, torch.device("cpu"), fps=1.0)
        coordinates = to_device(host_coordinates, x_BCTHW.device)  # `[B, 3, tokens, 2]`
        coordinates[:, 0] /= to_device(meta.fps, x_BCTHW.device).float()[:, None, None]
        packed = transformer(
            hidden_states=diffusers.LTX2Pipeline._pack_latents(x_BCTHW).to(dtype),
            audio_hidden_states=text.new_zeros(batch, 1, config.audio_in_channels),
            encoder_hidden_states=text,
            audio_encoder_hidden_states=text.new_zeros(batch, 1, _audio_text_width(config)),
            timestep=timestep,
            audio_timestep=sigma,
            sigma=sigma,
            num_frames=frames,
            height=height,
            width=width,
            audio_num_frames=1,
            video_coords=coordinates,
            isolate_modalities=True,
            use_cross_timestep=True,
            return_dict=False,
        )[0]
        return packed.float().transpose(1, 2).unflatten(2, (frames, height, width))

    # ---- sampling --------------------------------------------------------------------------------------------------

    def pipeline(
        self,
        transformer: nn.Module,
        vae: nn.Module,
        scheduler: Any,
        encoders: ModelComponents | None = None,
        *,
        image_to_video: bool = False,
    ) -> Any:
        """Build diffusers' own pipeline, which makes no sound; without encoders it gets the connectors' tokens."""
        config: Any = unwrap(transformer).config
        texts = {"connectors": _StubConnectors(_audio_text_width(config))} if encoders is None else encoders.modules
        silence = _StubAudio(config.audio_in_channels)
        cls: Any = self.image_pipeline_class if image_to_video else self.pipeline_class
        own = {"transformer": unwrap(transformer), "vae": vae, "scheduler": scheduler}
        return common.build_pipeline(cls, {**texts, **own, "audio_vae": silence, "vocoder": silence})

    def sample(
        self,
        pipeline: Any,
        conditions: PromptEmbeds,
        negative: PromptEmbeds,
        request: SampleRequest,
        generator: torch.Generator,
    ) -> Any:
        """Sample by a pipeline whose network is called as in training, with given frames clean in their places."""
        with isolate_streams(pipeline.transformer):
            return super().sample(pipeline, conditions, negative, request, generator)

    def pipeline_call(self, conditions: PromptEmbeds, negative: PromptEmbeds, request: SampleRequest) -> dict[str, Any]:
        """Return the pipeline's arguments, with masks of prompts, which have no padding after the connectors."""
        call = super().pipeline_call(conditions, negative, request)
        masks = {
            f"{name.removesuffix('embeds')}attention_mask": call[name].new_ones(1, _TEXT_TOKENS, dtype=torch.long)
            for name in ("prompt_embeds", "negative_prompt_embeds")
        }
        return {**masks, **call}


def _audio_text_width(config: Any) -> int:
    """Return the width of the audio stream's text tokens, which 2.0's network projects."""
    return int(config.caption_channels if config.use_prompt_embeddings else config.audio_cross_attention_dim)


class _StubConnectors:
    """Stand-in for the text connectors in a pipeline that is given their tokens."""

    def __init__(self, audio_width: int) -> None:
        self.audio_width = audio_width

    def __call__(self, tokens: Tensor, mask: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens for the video stream, and one zero token for the sound's."""
        return tokens, tokens.new_zeros(len(tokens), 1, self.audio_width), mask


class _StubAudio:
    """Stand-in for the audio VAE and the vocoder in a pipeline, which then decodes no sound."""

    sample_rate, mel_hop_length = 16000, 160
    mel_compression_ratio = temporal_compression_ratio = mel_bins = 4
    dtype = torch.float32

    def __init__(self, channels: int) -> None:
        self.latent_channels = channels
        self.latents_mean, self.latents_std = torch.zeros(channels), torch.ones(channels)

    @property
    def config(self) -> _StubAudio:
        """The config of the audio VAE, as far as pipelines read it."""
        return self

    def decode(self, latents: Tensor, **_: Any) -> tuple[Tensor]:
        """Return the latents in the place of a spectrogram."""
        return (latents,)

    def __call__(self, spectrogram: Tensor) -> None:
        """Return no sound."""


@contextmanager
def isolate_streams(network: nn.Module) -> Iterator[None]:
    """Let the streams of a network not see each other within the block, whatever its calls ask for."""

    def isolate(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        masks = dict.fromkeys(("encoder_attention_mask", "audio_encoder_attention_mask"))  # nothing is masked
        return args, {**kwargs, **masks, "audio_timestep": kwargs["sigma"], "isolate_modalities": True}

    hook = network.register_forward_pre_hook(isolate, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
