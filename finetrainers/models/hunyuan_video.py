"""HunyuanVideo, and from an image HunyuanVideo-I2V and SkyReels-V1: flow matching, two text encoders, guidance input.

Attention without masks: prompts have different lengths, so diffusers masks the padding of the text in every attention
of the network, and fast kernels refuse masks. Padding changes nothing else, so `load_transformer` makes the network cut
the text of a batch of one to its prompt first (`_trim_text`), and drop its masks, all ones by then
(`_UnmaskedAtBatchOne`, `_drop_refiner_mask`). The text of larger batches stays as long as it is given: if its length
followed the batch, a clip's prediction would depend, by rounding, on which others it is computed with.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import diffusers
import torch
from diffusers import AutoencoderKLHunyuanVideo, HunyuanVideoTransformer3DModel
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTokenizer, LlamaModel, LlamaTokenizerFast

from finetrainers.config.errors import Problem
from finetrainers.config.facts import Activations
from finetrainers.utils.failures import InputError
from finetrainers.utils.reading import read_json_object

from . import common, hunyuan_image_text
from .batch import ModelComponents, PromptEmbeds, VAEStats, VideoMeta
from .common import input_dtype
from .compiling import unwrap
from .files.files import folder_on_disk, read_configs, source_option
from .flops import AttentionSpec
from .spec import ModelSpec
from .split.attention import AttentionFn, set_processors
from .split.sequence import SequenceParallelPlan

#: Guidance-distilled checkpoints take their guidance scale as an input; the unguided network is the one at 1.
TRAINING_GUIDANCE = 1.0

#: Both embedders expect their scalars, the noise level and the guidance scale, in thousandths.
EMBEDDING_SCALE = 1000.0


_PADS_LEFT = (
    "the tokenizer pads prompts on the left, but HunyuanVideo crops its prompt template from the left; set "
    '"padding_side": "right" in its tokenizer_config.json'
)


class HunyuanAttnProcessor(HunyuanVideoAttnProcessor2_0):
    """diffusers' attention by a chosen backend, without a mask at batch size 1 (as `_UnmaskedAtBatchOne`)."""

    def __init__(self, attend: AttentionFn) -> None:
        super().__init__()
        self.attend = attend

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        text, mask = encoder_hidden_states, None if hidden_states.shape[0] == 1 else attention_mask
        assert text is not None, "both kinds of blocks give the text"
        if attn.add_q_proj is None:  # one set of weights for both, in single blocks
            query, key, value = _heads(attn, torch.cat([hidden_states, text], dim=1), ("to_q", "to_k", "to_v"))
        else:
            query, key, value = _heads(attn, hidden_states, ("to_q", "to_k", "to_v"))
        query, key = attn.norm_q(query), attn.norm_k(key)
        if image_rotary_emb is not None:
            query, key = (_rotate(heads, image_rotary_emb, hidden_states.shape[1]) for heads in (query, key))
        if attn.add_q_proj is not None:
            text_heads = _heads(attn, text, ("add_q_proj", "add_k_proj", "add_v_proj"))
            query = torch.cat([query, attn.norm_added_q(text_heads[0])], dim=1)
            key = torch.cat([key, attn.norm_added_k(text_heads[1])], dim=1)
            value = torch.cat([value, text_heads[2]], dim=1)
        outputs = self.attend(query, key, value, mask, text=(0, text.shape[1])).flatten(2, 3).to(query.dtype)
        video, text = outputs[:, : hidden_states.shape[1]], outputs[:, hidden_states.shape[1] :]
        if getattr(attn, "to_out", None) is not None:
            video = attn.to_out[1](attn.to_out[0](video))
        if getattr(attn, "to_add_out", None) is not None:
            text = attn.to_add_out(text)
        return video, text


def _heads(attn: Any, x_BSD: Tensor, projections: tuple[str, ...]) -> list[Tensor]:
    """Return projections of tokens, `[B, S, H, D]` each."""
    return [getattr(attn, name)(x_BSD).unflatten(2, (attn.heads, -1)) for name in projections]


def _rotate(x_BSHD: Tensor, rotary: tuple[Tensor, Tensor], video: int) -> Tensor:
    """Apply the positions of the video's tokens, which come first, to queries or keys."""
    if x_BSHD.shape[1] == video:
        return apply_rotary_emb(x_BSHD, rotary, sequence_dim=1)
    return torch.cat([apply_rotary_emb(x_BSHD[:, :video], rotary, sequence_dim=1), x_BSHD[:, video:]], dim=1)


class HunyuanVideoSpec(ModelSpec):
    """HunyuanVideo as `HunyuanVideoPipeline` runs it, SkyReels-V1 and HunyuanVideo-I2V as their pipelines do.

    Conditions: `prompt_embeds`, `prompt_attention_mask` (bool), `pooled_prompt_embeds`. `families` finds the kind of
    checkpoint in the transformer's config.
    """

    _own_parts: ClassVar = {
        "tokenizer": LlamaTokenizerFast,
        "tokenizer_2": CLIPTokenizer,
        "text_encoder": LlamaModel,
        "text_encoder_2": CLIPTextModel,
        "vae": AutoencoderKLHunyuanVideo,
        "transformer": HunyuanVideoTransformer3DModel,
    }
    blocks = ("transformer_blocks", "single_transformer_blocks")
    activations: ClassVar = {
        "lora": Activations(kept=(22.4, 19.4), outside=15.2, checkpointed=1.01, forward=20.0, backward=36.3),
        "lora without autocast": Activations(
            kept=(18.4, 16.2), outside=7.1, checkpointed=1.01, forward=17.4, backward=30.1
        ),
        "full-finetune": Activations(kept=(37.5, 32.5), outside=24.8, checkpointed=1.01, forward=30.2, backward=42.6),
        "full-finetune without autocast": Activations(
            kept=(28.4, 26.4), outside=8.9, checkpointed=1.01, forward=18.0, backward=33.0
        ),
        "full-finetune-bf16": Activations(
            kept=(35.0, 30.4), outside=12.1, checkpointed=1.01, forward=20.2, backward=40.0
        ),
    }
    unquantized = ("^x_embedder", "^context_embedder", "^time_text_embed", "norm", "^proj_out$")
    streams: ClassVar = {
        "time_text_embed|norm": "time", "^context_embedder": "prompt", "add_[qkv]_proj|to_add_out|ff_context": "text",
        "^single_transformer_blocks": "joint", "": "video",
    }  # fmt: skip
    attentions = (
        *(AttentionSpec(name, "joint", "joint") for name in blocks),
        AttentionSpec("context_embedder.token_refiner.refiner_blocks", "prompt", "prompt"),
    )
    vae_pixel_bytes, vae_frames_at_once, vae_tile = 2340, 17, (256, 256)
    vae_graph_bytes = (4610, 36, 18100)
    attention_processor = HunyuanAttnProcessor

    @cached_property
    def _kind(self) -> str | None:
        """The transformer's `image_condition_type`, which only HunyuanVideo-I2V has."""
        config = read_configs(self.config, ("transformer",)).get("transformer")
        cls = self._own_parts["transformer"]
        config = common.load_part(cls.load_config, self.config, "transformer") if config is None else config
        return config.get("image_condition_type")

    @property
    def parts(self) -> Any:  # type: ignore[override]
        """Classes of the parts; HunyuanVideo-I2V has a different text encoder."""
        return self._own_parts if self._kind is None else {**self._own_parts, **hunyuan_image_text.PARTS}

    @property
    def text_calls(self) -> Any:  # type: ignore[override]
        """Tokens that the text encoders read; 95 of HunyuanVideo's 351 belong to the prompt template."""
        read = 351 if self._kind is None else hunyuan_image_text.TOKENS_READ
        return {"text_encoder": (read, True), "text_encoder_2": (77, False)}

    @property
    def token_plan(self) -> SequenceParallelPlan | None:  # type: ignore[override]
        """Token plan, or None if the network expects the image in its first tokens, which differ between processes."""
        return None if self._kind == "token_replace" else SequenceParallelPlan(outputs={"x_embedder": 1, "rope": 0})

    @property
    def image_pipeline_class(self) -> Any:  # type: ignore[override]
        """Separate pipeline of image-to-video checkpoints, or None for others."""
        if self.facts.text_sees_image:
            return diffusers.HunyuanVideoImageToVideoPipeline
        return diffusers.HunyuanSkyreelsImageToVideoPipeline if self.facts.first_frame == "channels" else None

    @property
    def pipeline_class(self) -> Any:  # type: ignore[override]
        """Pipeline of the checkpoint, imported at first use: pipelines import schedulers and much else."""
        return self.image_pipeline_class or diffusers.HunyuanVideoPipeline

    text_varies = True  # at batch size 1

    def examine(self) -> tuple[list[Problem], list[str]]:
        """Extend `ModelSpec.examine` by the tokenizer's padding side."""
        problems, warnings = super().examine()
        folder = folder_on_disk(self.config, "tokenizer")
        path = None if folder is None else folder / "tokenizer_config.json"
        settings = read_json_object(path) if path is not None and path.is_file() else {"padding_side": "right"}
        if settings.get("padding_side", LlamaTokenizerFast.padding_side) != "right":
            problems.append(Problem(source_option(self.config, "tokenizer"), _PADS_LEFT, "unsupported"))
        return problems, warnings

    def load_text_encoders(self) -> ModelComponents:
        """Load LLaMA and CLIP with their tokenizers.

        Raises:
            ValueError: the LLaMA tokenizer pads on the left, so that cropping the prompt template would cut the prompt.
        """
        tokenizer = common.load_part(LlamaTokenizerFast.from_pretrained, self.config, "tokenizer")
        if tokenizer.padding_side != "right":
            raise InputError(_PADS_LEFT, "unsupported")
        return super().load_text_encoders()

    def load_transformer(self, dtype: torch.dtype, *, folder: Path | None = None) -> nn.Module:
        """Load the transformer, set up to run without attention masks where it can."""
        return run_without_masks(super().load_transformer(dtype, folder=folder))

    def transformer_on_meta(self) -> nn.Module:
        return run_without_masks(super().transformer_on_meta())

    @torch.no_grad()
    def encode_text(self, encoders: ModelComponents, prompts: Sequence[str]) -> PromptEmbeds:
        """Encode prompts as the pipeline: LLaMA states `[B, 256, D]` without the template, and CLIP's `[B, D2]`."""
        if self._kind is not None:
            return hunyuan_image_text.encode(encoders, prompts, None, kind=self._kind)
        embeds, pooled, mask = common.build_pipeline(diffusers.HunyuanVideoPipeline, encoders.modules).encode_prompt(
            prompt=list(prompts), device=common.encoder_device(encoders)
        )
        return PromptEmbeds(
            {"prompt_embeds": embeds, "prompt_attention_mask": mask.bool(), "pooled_prompt_embeds": pooled}
        )

    def encode_with_images(
        self, encoders: ModelComponents, prompts: Sequence[str], images: Sequence[Any]
    ) -> PromptEmbeds:
        assert self._kind is not None, "other checkpoints' text encoders do not encode an image"
        return hunyuan_image_text.encode(encoders, prompts, images, kind=self._kind)

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        config = self.configs["transformer"]
        tokens = 256 if self._kind is None else hunyuan_image_text.text_tokens(self._kind)
        return {
            "prompt_embeds": (tokens, config["text_embed_dim"]),
            "prompt_attention_mask": (tokens,),
            "pooled_prompt_embeds": (config["pooled_projection_dim"],),
        }

    def given_text(self, embedding: Tensor, mask: Tensor) -> PromptEmbeds:
        """Read DanceGRPO's embedding: `[257, 4096]` with CLIP's pooled embedding, padded by zeros, in the first row."""
        pooled = embedding[0, : self.configs["transformer"]["pooled_projection_dim"]]
        return PromptEmbeds(
            {
                "prompt_embeds": embedding[None, 1:],
                "prompt_attention_mask": mask.flatten()[None, -(len(embedding) - 1) :].bool(),
                "pooled_prompt_embeds": pooled[None],
            }
        )

    def to_given_text(self, row: PromptEmbeds) -> tuple[Tensor, Tensor]:
        embeds, pooled = row["prompt_embeds"][0], row["pooled_prompt_embeds"][0]
        first = torch.nn.functional.pad(pooled, (0, embeds.shape[1] - pooled.shape[0])).to(embeds.dtype)
        return torch.cat([first[None], embeds]), row["prompt_attention_mask"][0]

    def vae_bytes(self, size: tuple[int, int, int], *, gradient: bool = False) -> float:
        """Estimate peak bytes, for large frames mostly those of attention masks."""
        return max(super().vae_bytes(size, gradient=gradient), mask_bytes(size, self.vae_frames_at_once))

    def vae_stats(self, vae: nn.Module) -> VAEStats:
        scale = torch.tensor(vae.config.scaling_factor, dtype=torch.float32)  # type: ignore[union-attr]
        return VAEStats(mean=torch.tensor(0.0), scale=scale)

    def predict(
        self,
        transformer: nn.Module,
        x_BCTHW: Tensor,
        t: Tensor,
        conditions: PromptEmbeds,
        meta: VideoMeta,
    ) -> Tensor:
        """Implement `ModelSpec.predict`.

        Raises:
            ValueError: a first frame is given, and the checkpoint takes none.
        """
        network = unwrap(transformer)
        dtype = input_dtype(network)
        guidance = None
        if t.ndim == 2:  # the network recognizes a clean given frame by its position
            t = t[:, -1]
        if network.config.guidance_embeds:
            scale = TRAINING_GUIDANCE if meta.guidance is None else meta.guidance
            guidance = torch.full_like(t, scale * EMBEDDING_SCALE, dtype=dtype)
        x_BCTHW, first_frame = x_BCTHW.to(dtype), meta.extra.get("first_frame")
        if self.facts.first_frame == "channels":
            channels = [_image_channels(x_BCTHW, first_frame, meta.extra.get("further_frames"))]
            if self._kind == "latent_concat":
                channels.append(_image_channels(x_BCTHW[:, :1], torch.ones_like(x_BCTHW[:, :1, :1])))
            x_BCTHW = torch.cat([x_BCTHW, *channels], dim=1)
        elif first_frame is not None:
            raise InputError(
                "this is a text-to-video checkpoint of hunyuan_video, which does not take a first frame", "unsupported"
            )
        return transformer(
            hidden_states=x_BCTHW,
            # In fp32, like the pipeline's: bf16 would round noise levels to 1/256.
            timestep=t.float() * EMBEDDING_SCALE,
            encoder_hidden_states=conditions["prompt_embeds"].to(dtype),
            encoder_attention_mask=conditions["prompt_attention_mask"],
            pooled_projections=conditions["pooled_prompt_embeds"].to(dtype),
            guidance=guidance,
            attention_kwargs=None if conditions.lengths is None else {_LENGTHS: conditions.lengths},
            return_dict=False,
        )[0]


def mask_bytes(size: tuple[int, int, int], frames_at_once: float) -> float:
    """Return the bytes of the attention masks of HunyuanVideo's VAE, which grow with the square of the latents."""
    frames, height, width = size
    return 0.064 * (min(frames, frames_at_once) / frames_at_once * height * width) ** 2


def _image_channels(x_BCTHW: Tensor, first_frame_BC1HW: Tensor | None, further_BCTHW: Tensor | None = None) -> Tensor:
    """Return the channels of the given frames: the first at time 0, others in their places, zeros elsewhere."""
    channels = torch.zeros_like(x_BCTHW) if further_BCTHW is None else further_BCTHW.to(x_BCTHW.dtype, copy=True)
    if first_frame_BC1HW is not None:
        channels[:, :, :1] = first_frame_BC1HW.to(x_BCTHW.dtype)
    return channels


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
#: Key of the text lengths that `predict` passes to `_trim_text` in `attention_kwargs`.
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


def run_without_masks(transformer: Any) -> Any:
    """Make a `HunyuanVideoTransformer3DModel` trim its text and mask no attention at batch size 1, and return it.

    Every way of calling it is covered (training, the pipeline, wrappers, recomputation in gradient checkpointing),
    since the parts are a forward hook of the network, one of its text refiner, and attention processors.
    """
    transformer.register_forward_pre_hook(_trim_text, with_kwargs=True)
    transformer.context_embedder.register_forward_pre_hook(_drop_refiner_mask)
    blocks = (*transformer.transformer_blocks, *transformer.single_transformer_blocks)
    if not any(isinstance(block.attn.processor, HunyuanAttnProcessor) for block in blocks):
        set_processors(blocks, _UnmaskedAtBatchOne())
    return transformer


def _trim_text(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
    """Cut text and mask of a batch of one to its prompt; prompts are padded on the right."""
    call = {**dict(zip(_FORWARD_ARGUMENTS, args, strict=False)), **kwargs}
    mask = call["encoder_attention_mask"]
    extra = dict(call.get("attention_kwargs") or {})
    lengths = extra.pop(_LENGTHS, None)
    call["attention_kwargs"] = extra or None
    if lengths is None:  # in a pipeline's call, for example; this waits for the device
        lengths = mask.bool().sum(dim=1).tolist()
    if min(lengths) == 0:
        raise ValueError(f"row {lengths.index(0)} of the batch has no text tokens: its attention mask is all zero")
    if len(lengths) == 1:
        call["encoder_hidden_states"] = call["encoder_hidden_states"][:, : lengths[0]]
        call["encoder_attention_mask"] = mask[:, : lengths[0]]
    return (), call


def _drop_refiner_mask(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the text refiner's arguments (text, timestep, mask), without the mask at batch size 1."""
    text, timestep, mask = args
    return text, timestep, None if text.shape[0] == 1 else mask
