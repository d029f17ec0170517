"""HunyuanVideo-1.5: a flow transformer over 16x16x4-compressed latents, with Qwen2.5-VL text, and ByT5 for glyphs.

Next to the noisy latents are as many channels for those of a given first frame, and one that is 1 where there is one.
Blocks see one sequence: the video's tokens, those of the image (by SigLIP), of the quoted text of the prompt (glyphs,
by ByT5), and of the prompt. Text has no positions, so its order does not matter.

Attention without masks: diffusers pads the text to 1985 tokens, and masks pairs of tokens, which takes the square of
their number in memory. Here a batch of one has no padding and no mask (`HunyuanVideo15Transformer3DModel`), and larger
batches mask keys alone. The outputs are those of diffusers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, wraps
from typing import Any, ClassVar

import diffusers
import torch
from diffusers import AutoencoderKLHunyuanVideo15, ClassifierFreeGuidance
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock
from diffusers.models.embeddings import apply_rotary_emb
from PIL import Image
from torch import Tensor, nn
from transformers import (
    ByT5Tokenizer,
    Qwen2_5_VLTextModel,
    Qwen2Tokenizer,
    SiglipImageProcessor,
    SiglipVisionModel,
    T5EncoderModel,
)

from finetrainers.config.facts import Activations
from finetrainers.utils.device import to_device
from finetrainers.utils.failures import InputError

from . import common
from .batch import Batch, ModelComponents, PromptEmbeds, SampleRequest, VAEStats, VideoMeta
from .common import input_dtype
from .compiling import unwrap
from .flops import AttentionSpec, Tokens
from .pixels import FIRST_FRAME, to_pil
from .spec import ModelSpec
from .split.attention import AttentionFn, set_processors
from .split.sequence import SequenceParallelPlan

#: Tokens of a prompt, without the template's 108 before it; of glyphs; and of an image.
_TEXT_TOKENS, _TEMPLATE_TOKENS, _GLYPH_TOKENS, _IMAGE_TOKENS = 1000, 108, 256, 729
#: The network's timestep of process time sigma: `num_train_timesteps` of the published schedulers.
_TIMESTEPS = 1000.0
#: Text tensors by their names in the pipeline's call. Here masks end in `_mask`, as others do.
_PIPELINE_NAMES = {
    "prompt_attention_mask": "prompt_embeds_mask",
    "glyph_embeds": "prompt_embeds_2",
    "glyph_attention_mask": "prompt_embeds_mask_2",
}
#: Tensor of an encoded clip, and input of the network: SigLIP's states of the first frame.
IMAGE_STATES = "image_embeds"
#: Counted memory of activations of text-to-video and of image-to-video, whose blocks also have the tokens of the image:
#: for 49x480x832 with all tokens of prompt and glyphs, kept, outside, checkpointed, forward, backward, attention and
#: between; see `Activations`. Without autocast, the masks of larger batches take more than those of one clip.
_COUNTED: dict[bool, dict[str, tuple[float, float, float, float, float, float, float]]] = {
    False: {
        "lora": (23.3, 10.0, 1.12, 15.2, 35.1, 1.08, 4.0),
        "lora without autocast": (18.2, 9.2, 1.06, 13.7, 27.4, 1.08, 2.6),
        "full-finetune": (39.4, 13.2, 1.12, 20.2, 46.6, 1.08, 7.8),
        "full-finetune without autocast": (29.8, 6.6, 1.06, 14.5, 34.0, 1.08, 5.4),
    },
    True: {
        "lora": (23.95, 10.0, 1.19, 15.7, 36.0, 1.115, 4.2),
        "lora without autocast": (19.3, 9.2, 1.1, 14.0, 28.3, 1.115, 2.6),
        "full-finetune": (40.7, 13.2, 1.19, 20.9, 48.1, 1.115, 8.1),
        "full-finetune without autocast": (30.8, 6.6, 1.1, 15.0, 35.1, 1.115, 5.6),
    },
}
#: Key in `attention_kwargs` of what the host knows about a call; see `_TextSizes`.
_SIZES = "text_sizes"

#: Tokens of each row's prompt and of its glyphs, None where the host does not know them; whether a row has an image.
_TextSizes = tuple[Sequence[int] | None, Sequence[int] | None, bool]


class HunyuanVideo15AttnProcessor:
    """diffusers' attention, with a mask over keys or none, by a chosen backend."""

    def __init__(self, attend: AttentionFn) -> None:
        self.attend = attend

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        video, text = hidden_states, encoder_hidden_states
        query, key, value = (layer(video).unflatten(2, (attn.heads, -1)) for layer in (attn.to_q, attn.to_k, attn.to_v))
        query, key = attn.norm_q(query), attn.norm_k(key)
        if image_rotary_emb is not None:
            query, key = (apply_rotary_emb(x, image_rotary_emb, sequence_dim=1) for x in (query, key))
        projections = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        text_query, text_key, text_value = (layer(text).unflatten(2, (attn.heads, -1)) for layer in projections)
        query = torch.cat([query, attn.norm_added_q(text_query)], dim=1)
        key = torch.cat([key, attn.norm_added_k(text_key)], dim=1)
        value = torch.cat([value, text_value], dim=1)
        outputs = self.attend(query, key, value, attention_mask, text=(0, text.shape[1])).flatten(2, 3).to(query.dtype)
        video, text = outputs.split([video.shape[1], text.shape[1]], dim=1)
        return attn.to_out[1](attn.to_out[0](video)), attn.to_add_out(text)


class HunyuanVideo15Transformer3DModel(diffusers.HunyuanVideo15Transformer3DModel):
    """diffusers' network, without the padding of text in a batch of one, and without waiting for the device.

    It has the name of its base class, which its saved config states. Rows without an image have no image tokens, even
    next to rows with one; diffusers' gives them some.
    """

    # Configs are read by the keys in the signature.
    @wraps(diffusers.HunyuanVideo15Transformer3DModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        set_processors(self.transformer_blocks, HunyuanVideo15AttnProcessor(AttentionFn("native")))

    def forward(self, hidden_states: Tensor, timestep: Tensor, **call: Any) -> tuple[Tensor]:  # type: ignore[override]
        """Return the prediction in a tuple; `timestep` keeps its precision until it is embedded.

        Args:
            hidden_states: noisy latents and channels of the given frame, `[B, 2C + 1, T, H, W]`.
            timestep: noise levels in thousandths, `[B]`.
            call: the base class's further arguments: `encoder_hidden_states` `[B, L, D]` and `encoder_attention_mask`
                `[B, L]` of prompts, both with `_2` of glyphs, and `image_embeds` `[B, 729, D3]`, zeros in rows without
                an image. `attention_kwargs` may have `_TextSizes` under `_SIZES`; else the masks are asked.
        """
        prompts = call["encoder_hidden_states"], call["encoder_attention_mask"].bool()
        glyphs = call["encoder_hidden_states_2"], call["encoder_attention_mask_2"].bool()
        images = call["image_embeds"]
        sizes: _TextSizes | None = (call.get("attention_kwargs") or {}).get(_SIZES)
        if sizes is None:  # in a pipeline's call; this waits for the device
            counts = [mask.sum(dim=1).tolist() for _, mask in (prompts, glyphs)]
            sizes = counts[0], counts[1], bool((images != 0).any())
        rotary, times = self.rope(hidden_states), self.time_embed.time_proj(timestep)
        times = self.time_embed.timestep_embedder(times.to(hidden_states.dtype))
        shape, video = hidden_states.shape, self.x_embedder(hidden_states)
        text, mask = self._join_text(timestep, prompts, glyphs, images, sizes)
        if mask is not None:
            everywhere = mask.new_ones(len(mask), video.shape[1])
            mask = torch.cat([everywhere, mask], dim=1)[:, None, None, :]
        checkpoints = torch.is_grad_enabled() and self.gradient_checkpointing
        for block in self.transformer_blocks:
            inputs = video, text, times, mask, rotary
            video, text = self._gradient_checkpointing_func(block, *inputs) if checkpoints else block(*inputs)
        patches = self.proj_out(self.norm_out(video, times))
        p_t, p = self.config.patch_size_t, self.config.patch_size
        cells = (shape[2] // p_t, shape[3] // p, shape[4] // p)
        patches = patches.reshape(len(patches), *cells, -1, p_t, p, p).permute(0, 4, 1, 5, 2, 6, 3, 7)
        return (patches.flatten(6, 7).flatten(4, 5).flatten(2, 3),)

    def _join_text(
        self,
        timestep: Tensor,
        prompts: tuple[Tensor, Tensor],
        glyphs: tuple[Tensor, Tensor],
        images: Tensor,
        sizes: _TextSizes,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the embedded tokens of image, glyphs and prompt, `[B, S, D]`, and their mask `[B, S]` if any.

        Raises:
            ValueError: a row has no text.
        """
        lengths, glyph_lengths, has_image = sizes
        if lengths is not None and min(lengths) == 0:
            raise ValueError(f"row {list(lengths).index(0)} of the batch has no text tokens: its mask is all zero")
        is_single = len(images) == 1
        (prompt, prompt_mask), is_whole = _trim_padding(prompts, lengths if is_single else None)
        (glyph, glyph_mask), glyph_is_whole = _trim_padding(glyphs, glyph_lengths if is_single else None)
        images = images[:, : images.shape[1] if has_image else 0]  # no tokens, for a gradient of zero
        kinds = self.cond_type_embed(torch.arange(3, device=images.device))
        text = torch.cat(
            [
                self.image_embedder(images) + kinds[2],
                self.context_embedder_2(glyph) + kinds[1],
                self._refine(prompt, timestep, None if is_whole else prompt_mask) + kinds[0],
            ],
            dim=1,
        )
        if is_whole and glyph_is_whole:
            return text, None
        image_mask = (images != 0).flatten(1).any(1, keepdim=True).expand(images.shape[:2])
        return text, torch.cat([image_mask, glyph_mask, prompt_mask], dim=1)

    def _refine(self, text: Tensor, timestep: Tensor, mask: Tensor | None) -> Tensor:
        """Refine the prompts' states; a mask is over keys alone, since rows that attend to nothing have no gradient."""
        embedder = self.context_embedder
        if mask is None:
            refined: Tensor = embedder(text, timestep)
            return refined
        weights = mask.unsqueeze(-1).float()
        pooled = ((text * weights).sum(dim=1) / weights.sum(dim=1)).to(text.dtype)
        times, states = embedder.time_text_embed(timestep, pooled), embedder.proj_in(text)
        for block in embedder.token_refiner.refiner_blocks:
            states = block(states, times, mask[:, None, None, :])
        return states


def _trim_padding(tokens: tuple[Tensor, Tensor], lengths: Sequence[int] | None) -> tuple[tuple[Tensor, Tensor], bool]:
    """Cut a batch of one and its mask to its tokens, which are the first; return whether there is no padding left."""
    states, mask = tokens
    return (tokens, False) if lengths is None else ((states[:, : lengths[0]], mask[:, : lengths[0]]), True)


def _mask_later_frames(
    frames: int, cells: int, dtype: torch.dtype, device: torch.device, batch_size: int | None = None
) -> Tensor:
    """Return the mask `[S, S]` of a frame's cells to those of later frames, as diffusers' for each clip of a batch."""
    frame = torch.arange(frames, device=device).repeat_interleave(cells)
    mask = torch.zeros(len(frame), len(frame), dtype=dtype, device=device)
    return mask.masked_fill_(frame[None, :] > frame[:, None], float("-inf"))


class HunyuanVideo15Spec(ModelSpec):
    """HunyuanVideo-1.5 as its pipelines run it.

    Conditions: `prompt_embeds` `[B, 1000, D]` with `prompt_attention_mask`, and `glyph_embeds` `[B, 256, D2]` with
    `glyph_attention_mask`, zeros for prompts that quote nothing.
    """

    parts: ClassVar = {
        "tokenizer": Qwen2Tokenizer,
        "text_encoder": Qwen2_5_VLTextModel,
        "tokenizer_2": ByT5Tokenizer,
        "text_encoder_2": T5EncoderModel,
        "feature_extractor": SiglipImageProcessor,
        "image_encoder": SiglipVisionModel,
        "vae": AutoencoderKLHunyuanVideo15,
        "transformer": HunyuanVideo15Transformer3DModel,
    }
    guides_in_one_call = False
    text_varies = True  # at batch size 1
    text_calls: ClassVar = {
        "text_encoder": (_TEXT_TOKENS + _TEMPLATE_TOKENS, True), "text_encoder_2": (_GLYPH_TOKENS, False),
    }  # fmt: skip
    vae_pixel_bytes, vae_tile, vae_graph_bytes = 1796, (256, 256), (5400, 0, 18700)
    attention_processor = HunyuanVideo15AttnProcessor
    token_plan = SequenceParallelPlan(outputs={"x_embedder": 1, "rope": 0})
    unquantized = ("embed", "norm", "^proj_out$")
    streams: ClassVar = {
        "time_embed|time_text_embed|norm": "time", "^context_embedder_2": "glyph", "^context_embedder": "prompt",
        "^image_embedder": "image", "add_[qkv]_proj|to_add_out|ff_context": "text", "": "video",
    }  # fmt: skip
    attentions = (
        AttentionSpec("transformer_blocks", "joint", "joint"),
        AttentionSpec("context_embedder.token_refiner.refiner_blocks", "prompt", "prompt"),
    )

    @cached_property
    def activations(self) -> dict[str, Activations]:  # type: ignore[override]
        """Memory of activations of the checkpoint's kind."""
        return {
            kind: Activations((block,), *units) for kind, (block, *units) in _COUNTED[self.facts.sees_image].items()
        }

    # ---- components ------------------------------------------------------------------------------------------------

    @property
    def pipeline_class(self) -> Any:  # type: ignore[override]
        """Pipeline of the checkpoint, imported at first use: pipelines import schedulers and much else."""
        return self.image_pipeline_class or diffusers.HunyuanVideo15Pipeline

    @property
    def image_pipeline_class(self) -> Any:  # type: ignore[override]
        """Pipeline that starts from an image, or None for text-to-video checkpoints."""
        return None if self.facts.first_frame == "none" else diffusers.HunyuanVideo15ImageToVideoPipeline

    def load_vae(self) -> nn.Module:
        """Load the VAE; diffusers' mask of its attention is for one clip, and is made row by row."""
        vae = super().load_vae()
        for module in vae.modules():
            if isinstance(module, HunyuanVideo15AttnBlock):
                module.prepare_causal_attention_mask = _mask_later_frames  # type: ignore[assignment]
        return vae

    # ---- text and images -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode_text(self, encoders: ModelComponents, prompts: Sequence[str]) -> PromptEmbeds:
        """Encode prompts as the pipelines' calls do."""
        pipeline = diffusers.HunyuanVideo15Pipeline
        embeds, mask = pipeline._get_mllm_prompt_embeds(
            encoders["text_encoder"], encoders["tokenizer"], list(prompts), common.encoder_device(encoders),
            tokenizer_max_length=_TEXT_TOKENS, crop_start=_TEMPLATE_TOKENS,
        )  # fmt: skip
        glyphs, glyph_mask = pipeline._get_byt5_prompt_embeds(
            encoders["tokenizer_2"], encoders["text_encoder_2"], list(prompts),
            common.encoder_device(encoders, "text_encoder_2"), tokenizer_max_length=_GLYPH_TOKENS,
        )  # fmt: skip
        return PromptEmbeds(
            {
                "prompt_embeds": embeds, "prompt_attention_mask": mask.bool(),
                "glyph_embeds": glyphs, "glyph_attention_mask": glyph_mask.bool(),
            }
        )  # fmt: skip

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        config = self.configs["transformer"]
        return {
            "prompt_embeds": (_TEXT_TOKENS, config.get("text_embed_dim", 3584)),
            "prompt_attention_mask": (_TEXT_TOKENS,),
            "glyph_embeds": (_GLYPH_TOKENS, config.get("text_embed_2_dim", 1472)),
            "glyph_attention_mask": (_GLYPH_TOKENS,),
        }

    def empty_inputs(self, batch_size: int) -> tuple[PromptEmbeds, VideoMeta]:
        """Add an image's states, where the checkpoint sees images."""
        conditions, meta = super().empty_inputs(batch_size)
        if self.facts.sees_image:
            states = torch.empty(batch_size, *self._image_shape, dtype=torch.bfloat16)
            meta = replace(meta, extra={**meta.extra, IMAGE_STATES: states})
        return conditions, meta

    def encode_clip(
        self,
        encoders: ModelComponents,
        video_BCTHW: Tensor,
        generators: Sequence[torch.Generator] | None,
        media: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Encode clips; for image-to-video checkpoints with SigLIP's states `[B, 729, D]` of the first frame."""
        tensors = super().encode_clip(encoders, video_BCTHW, generators, media)
        return tensors | self._image_states(encoders, video_BCTHW[:, :, 0])

    @torch.no_grad()
    def _image_states(self, encoders: ModelComponents, images_BCHW: Tensor) -> dict[str, Tensor]:
        if not self.facts.sees_image:
            return {}
        encoder = encoders["image_encoder"]
        states = diffusers.HunyuanVideo15ImageToVideoPipeline._get_image_embeds(
            encoder, encoders["feature_extractor"], [to_pil(image) for image in images_BCHW],
            next(encoder.parameters()).device,
        )  # fmt: skip
        return {IMAGE_STATES: states}

    @property
    def _image_shape(self) -> tuple[int, int]:
        return _IMAGE_TOKENS, self.configs["transformer"].get("image_embed_dim", 1152)

    def clip_shapes(self, network: nn.Module, size: tuple[int, int, int]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Add SigLIP's states, where the checkpoint sees images."""
        shapes = super().clip_shapes(network, size)
        return shapes | ({IMAGE_STATES: ("image_encoder", self._image_shape)} if self.facts.sees_image else {})

    @property
    def clip_version(self) -> bool | str:
        """Name of the tensors of a clip, for cache keys: those of text-to-video checkpoints are the default's."""
        return f"{FIRST_FRAME} {IMAGE_STATES}" if self.facts.sees_image else super().clip_version

    # ---- the network -----------------------------------------------------------------------------------------------

    def condition(
        self, batch: Batch, x0: Tensor, frames: Sequence[Collection[int]], vae_stats: VAEStats
    ) -> tuple[VideoMeta, Tensor | None]:
        """Implement `ModelSpec.condition`: `first_frame` with a channel for its mask, `[B, C + 1, 1, H, W]`.

        Without a given frame in the batch, there are no states of an image.
        """
        meta, trained = super().condition(batch, x0, frames, vae_stats)
        if self.facts.first_frame != "channels":
            return meta, trained
        latents = meta.extra["first_frame"]
        is_given = to_device(torch.tensor([float(0 in indexes) for indexes in frames]), latents.device)
        mask = is_given.view(-1, 1, 1, 1, 1).expand(-1, 1, *latents.shape[2:])
        extra = {**meta.extra, "first_frame": torch.cat([latents, mask], dim=1)}
        if any(0 in indexes for indexes in frames):
            states = batch.clip[IMAGE_STATES]
            extra[IMAGE_STATES] = states * is_given.view(-1, 1, 1).to(states)
        return replace(meta, extra=extra), None

    def vae_stats(self, vae: Any) -> VAEStats:
        scale = torch.tensor(vae.config.scaling_factor, dtype=torch.float32)
        return VAEStats(mean=torch.tensor(0.0), scale=scale)

    def predict(
        self, transformer: nn.Module, x_BCTHW: Tensor, t: Tensor, conditions: PromptEmbeds, meta: VideoMeta
    ) -> Tensor:
        """Predict velocity `eps - x0` in fp32.

        Raises:
            ValueError: a first frame is given, and the checkpoint takes none.
        """
        network = unwrap(transformer)
        dtype, first_frame, states = input_dtype(network), meta.extra.get("first_frame"), meta.extra.get(IMAGE_STATES)
        if first_frame is not None and self.facts.first_frame == "none":
            raise InputError(
                "this is a text-to-video checkpoint of hunyuan_video_15, which does not take a first frame",
                "unsupported",
            )
        x = x_BCTHW.to(dtype)
        channels = x.new_zeros(len(x), x.shape[1] + 1, *x.shape[2:])
        if first_frame is not None:
            channels[:, :, :1] = first_frame.to(dtype)
        has_image = states is not None
        if states is None:
            states = x.new_zeros(len(x), *self._image_shape)
        sizes = conditions.lengths, conditions.further_lengths.get("glyph_attention_mask"), has_image
        prediction: Tensor = transformer(
            hidden_states=torch.cat([x, channels], dim=1),
            timestep=t.float() * _TIMESTEPS,
            encoder_hidden_states=conditions["prompt_embeds"].to(dtype),
            encoder_attention_mask=conditions["prompt_attention_mask"],
            encoder_hidden_states_2=conditions["glyph_embeds"].to(dtype),
            encoder_attention_mask_2=conditions["glyph_attention_mask"],
            image_embeds=states.to(dtype),
            attention_kwargs={_SIZES: sizes},
            return_dict=False,
        )[0]
        return prediction.float()

    def count_tokens(self, network: Any, call: Mapping[str, Any]) -> Tokens:
        """Count the tokens as the network cuts them: of a batch of one, those without padding."""
        latents, geometry = call["hidden_states"], self.facts.geometry
        clips, (frames, height, width) = len(latents), latents.shape[2:]
        lengths, glyph_lengths, has_image = (call.get("attention_kwargs") or {}).get(_SIZES, (None, None, True))

        def count(name: str, counts: Sequence[int] | None) -> int:
            return int(call[name].shape[1]) if counts is None or clips > 1 else counts[0]

        prompt = count("encoder_hidden_states", lengths)
        glyph = count("encoder_hidden_states_2", glyph_lengths)
        image = call["image_embeds"].shape[1] if has_image else 0
        video = frames // geometry.patch_t * (height // geometry.patch) * (width // geometry.patch)
        return Tokens(clips, video, prompt + glyph + image, image=image, prompt=prompt, glyph=glyph)

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
        """Build the pipeline, with classifier-free guidance."""
        pipeline = super().pipeline(transformer, vae, scheduler, encoders, image_to_video=image_to_video)
        pipeline.guider = ClassifierFreeGuidance(guidance_scale=6.0)
        return pipeline

    def pipeline_call(self, conditions: PromptEmbeds, negative: PromptEmbeds, request: SampleRequest) -> dict[str, Any]:
        """Return the pipeline's arguments: it has its guidance in a `guider`, and its size from an image."""
        call = super().pipeline_call(conditions, negative, request)
        for name, other in _PIPELINE_NAMES.items():
            call[other], call[f"negative_{other}"] = call.pop(name), call.pop(f"negative_{name}")
        dropped = {"guidance_scale", *(("height", "width") if request.image is not None else ())}
        return {name: value for name, value in call.items() if name not in dropped}

    def sample(
        self,
        pipeline: Any,
        conditions: PromptEmbeds,
        negative: PromptEmbeds,
        request: SampleRequest,
        generator: torch.Generator,
    ) -> Any:
        """Sample by the pipeline, at the size of the request also from an image."""
        image = request.first_image
        if request.guidance_scale is not None:
            pipeline.guider.guidance_scale = request.guidance_scale
        if image is not None and not isinstance(image, Image.Image):
            image = to_pil(image.reshape(image.shape[-3:]) * 2 - 1)
        call = self.pipeline_call(conditions, negative, replace(request, image=image))
        size = request.height, request.width
        pipeline.video_processor.calculate_default_height_width = lambda **_: size
        return pipeline(**call, generator=generator, output_type="np").frames[0]
