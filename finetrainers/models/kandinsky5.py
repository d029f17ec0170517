"""Kandinsky 5.0 Video, Lite and Pro: a flow transformer over HunyuanVideo's latents, with Qwen2.5-VL and CLIP.

The network has channels last and its own names for everything. Prompts go through a few separate blocks, and the
video's tokens attend to the result. The pipelines give prompts without a mask, and so does training at batch size 1,
where the padding is cut. In larger batches attention masks the padding, as in the authors' repository, so that each row
is what the pipeline computes of it alone.

A given first frame is clean in its place, marked on a channel, and encoded by itself. The network gets one noise level,
that of the other frames.

Attention is dense. Checkpoints for 10 seconds and for high resolution were trained with sparse attention (NABLA), which
leaves out pairs of blocks of tokens with little weight.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, ClassVar

import diffusers
import torch
from diffusers import AutoencoderKLHunyuanVideo
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.transformers.transformer_kandinsky import Kandinsky5RoPE1D, Kandinsky5RoPE3D
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTokenizer, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from finetrainers.config.facts import Activations
from finetrainers.diffusion.schedule import sampling_times
from finetrainers.utils.failures import InputError

from . import common
from .batch import Batch, ModelComponents, PromptEmbeds, SampleRequest, VAEStats, VideoMeta
from .common import input_dtype, rotate_pairs
from .compiling import unwrap
from .flops import AttentionSpec, Flops, Tokens, flops_formula
from .hunyuan_video import HunyuanVideoSpec, mask_bytes
from .pixels import FIRST_FRAME
from .spec import ModelSpec
from .split.attention import AttentionFn, set_processors
from .split.sequence import SequenceParallelPlan

#: Tokens of a prompt, without the template's 128 before it; CLIP's. The pipelines' calls take 512 by default, and the
#: authors' configs 256 (`text_embedder`).
_TEXT_TOKENS, _TEMPLATE_TOKENS, _CLIP_TOKENS = 256, 128, 77
#: The network's timestep of process time sigma: `num_train_timesteps` of the published schedulers.
_TIMESTEPS = 1000.0
#: Input of the network for the first frame, encoded by itself.
_FIRST = "first_frame"

#: Cosines and sines of positions, `[1, S, 1, D / 2]`, and a mask of keys or None.
_Positions = tuple[Tensor, ...]


class Kandinsky5AttnProcessor:
    """diffusers' attention by a chosen backend, with a mask of the text's padding where there is one.

    That mask comes with the text's positions in blocks of text, and with the text in others.
    """

    def __init__(self, attend: AttentionFn) -> None:
        self.attend = attend

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | tuple[Tensor, Tensor] | None = None,
        rotary_emb: _Positions | None = None,
        sparse_params: Any = None,
    ) -> Tensor:
        source, mask = hidden_states, None
        if isinstance(encoder_hidden_states, tuple):
            source, mask = encoder_hidden_states
        elif encoder_hidden_states is not None:
            source = encoder_hidden_states
        projections = ((attn.to_query, hidden_states), (attn.to_key, source), (attn.to_value, source))
        query, key, value = (layer(tokens).unflatten(-1, (attn.num_heads, -1)) for layer, tokens in projections)
        query = attn.query_norm(query.float()).type_as(query)
        key = attn.key_norm(key.float()).type_as(key)
        if rotary_emb is not None:
            cos, sin, *masks = rotary_emb
            query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
            mask = masks[0] if masks else None
        attend = self.attend if encoder_hidden_states is None else self.attend.attend_locally
        return attn.out_layer(attend(query, key, value, mask).flatten(-2))


def _rotate(x_BSHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of channels in fp32, rounded to bf16 as in the pipeline, whatever the dtype of the network.

    Gradients of a network in fp32 are not rounded.
    """
    rotated = rotate_pairs(x_BSHD.float(), cos, sin)
    if x_BSHD.dtype == torch.bfloat16:
        return rotated.to(torch.bfloat16)
    rounding = rotated.detach().to(torch.bfloat16).float() - rotated.detach()  # exact, and so is its sum with `rotated`
    return (rotated + rounding).type_as(x_BSHD)


class _TextPositions(Kandinsky5RoPE1D):
    """Positions of text tokens, as cosines and sines."""

    def forward(self, pos: Tensor) -> _Positions:
        angles = self.args[pos][None, :, None]
        return torch.cos(angles), torch.sin(angles)


class _VideoPositions(Kandinsky5RoPE3D):
    """Positions of a clip's tokens in the order of the sequence, as cosines and sines."""

    def forward(self, shape: Sequence[int], pos: Sequence[Tensor], scale_factor: Sequence[float]) -> _Positions:
        frames, height, width = shape[1:]
        axes = zip((self.args_0, self.args_1, self.args_2), pos, scale_factor, strict=True)
        time, rows, columns = (angles[places] / scale for angles, places, scale in axes)
        cells = (
            time[:, None, None].expand(-1, height, width, -1),
            rows[None, :, None].expand(frames, -1, width, -1),
            columns[None, None].expand(frames, height, -1, -1),
        )
        angles = torch.cat(cells, dim=-1).flatten(0, 2)[None, :, None]
        return torch.cos(angles), torch.sin(angles)


class Kandinsky5Transformer3DModel(diffusers.Kandinsky5Transformer3DModel):
    """diffusers' network with dense attention, and a mask of the text in batches of several prompts.

    It has the name of its base class, which its saved config states.
    """

    # Configs are read by the keys in the signature.
    @wraps(diffusers.Kandinsky5Transformer3DModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        axes = self.config.axes_dims
        self.text_rope_embeddings, self.visual_rope_embeddings = _TextPositions(sum(axes)), _VideoPositions(axes)
        frequencies = self.time_embeddings.freqs
        del self.time_embeddings.freqs
        self.time_embeddings.register_buffer("freqs", frequencies, persistent=False)  # moves with the network
        for blocks in (self.text_transformer_blocks, self.visual_transformer_blocks):
            set_processors(blocks, Kandinsky5AttnProcessor(AttentionFn("native")))

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        timestep: Tensor,
        *,
        text_mask: Tensor | None = None,
        return_dict: bool = True,
        **call: Any,
    ) -> Any:
        """Return the prediction `[B, T, H, W, C]`, in a tuple or in diffusers' class.

        Args:
            hidden_states: noisy latents, with channels of the condition and its mask where the network has them.
            encoder_hidden_states: states of the prompts `[B, L, D]`.
            timestep: noise levels in thousandths, `[B]`.
            text_mask: `[B, L]`, False for padding, or None if there is none.
            return_dict: whether to return diffusers' class.
            call: the base class's further arguments: `pooled_projections` `[B, D2]` of CLIP, `visual_rope_pos` along
                each axis, divided by `scale_factor`, and `text_rope_pos`. `sparse_params` are not used.
        """
        times = self.time_embeddings(timestep) + self.pooled_text_embeddings(call["pooled_projections"])
        tokens, text = self.visual_embeddings(hidden_states), self.text_embeddings(encoder_hidden_states)
        positions = self.text_rope_embeddings(call["text_rope_pos"])
        keys = None if text_mask is None else text_mask[:, None, None, :]
        for block in self.text_transformer_blocks:
            text = block(text, times, positions if keys is None else (*positions, keys))
        shape = tokens.shape[:4]
        tokens, context = tokens.flatten(1, 3), text if keys is None else (text, keys)
        positions = self.visual_rope_embeddings(shape, call["visual_rope_pos"], call["scale_factor"])
        checkpoints = torch.is_grad_enabled() and self.gradient_checkpointing
        for block in self.visual_transformer_blocks:
            inputs = tokens, context, times, positions, None
            tokens = self._gradient_checkpointing_func(block, *inputs) if checkpoints else block(*inputs)
        prediction = self._unpatchify(tokens, times, shape)
        return Transformer2DModelOutput(sample=prediction) if return_dict else (prediction,)

    def _unpatchify(self, tokens: Tensor, times: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the prediction of tokens `[B, S, D]`, or of a process's part of them, `[B, T, H, W, C]`."""
        last, (p_t, p_h, p_w) = self.out_layer, self.config.patch_size
        shift, scale = last.modulation(times).unsqueeze(1).chunk(2, dim=-1)
        normed = (last.norm(tokens.float()) * (scale.float() + 1.0) + shift.float()).type_as(tokens)
        patches = last.out_layer(normed).unflatten(1, tuple(shape[1:])).unflatten(-1, (-1, p_t, p_h, p_w))
        return patches.permute(0, 1, 5, 2, 6, 3, 7, 4).flatten(1, 2).flatten(2, 3).flatten(3, 4)


def even_start(latents_BTHWC: Tensor) -> Tensor:
    """Return latents whose first four frames have about the mean and deviation of the next, clip by clip.

    That is what `Kandinsky5I2VPipeline` does after sampling. Of clips without further frames it makes NaN; here they
    stay as they are.
    """
    if latents_BTHWC.shape[1] <= 4:
        return latents_BTHWC
    pipeline = diffusers.Kandinsky5I2VPipeline
    return torch.cat([pipeline.normalize_first_frame(pipeline, clip) for clip in latents_BTHWC.split(1)])


class Kandinsky5Spec(ModelSpec):
    """Kandinsky 5.0 Video as its pipelines run it.

    Conditions: `prompt_embeds` `[B, 256, D]` with `prompt_attention_mask`, and `pooled_prompt_embeds` `[B, D2]`.
    """

    parts: ClassVar = {
        # The repositories have a processor, which needs torchvision for images; prompts need its tokenizer alone.
        "tokenizer": Qwen2Tokenizer,
        "text_encoder": Qwen2_5_VLForConditionalGeneration,
        "tokenizer_2": CLIPTokenizer,
        "text_encoder_2": CLIPTextModel,
        "vae": AutoencoderKLHunyuanVideo,
        "transformer": Kandinsky5Transformer3DModel,
    }
    blocks = ("visual_transformer_blocks",)
    guides_in_one_call = False
    text_varies = True  # at batch size 1
    text_version = "256 tokens"
    texts_at_once = 1
    text_calls: ClassVar = {
        "text_encoder": (_TEXT_TOKENS + _TEMPLATE_TOKENS, True), "text_encoder_2": (_CLIP_TOKENS, False),
    }  # fmt: skip
    #: Counted for 49x512x768 on Lite.
    activations: ClassVar = {
        "lora": Activations(kept=(28.5,), outside=9.6, checkpointed=1.0, forward=12.5, backward=39.1, attention=2.06),
        "lora without autocast": Activations(
            kept=(24.45,), outside=11.1, checkpointed=1.0, forward=12.4, backward=34.9, attention=2.06
        ),
        "full-finetune": Activations(
            kept=(47.3,), outside=13.2, checkpointed=1.0, forward=12.4, backward=52.0, attention=2.06
        ),
        "full-finetune without autocast": Activations(
            kept=(47.3,), outside=13.0, checkpointed=1.0, forward=13.4, backward=52.0, attention=2.06
        ),
        "full-finetune-bf16": Activations(
            kept=(47.3,), outside=13.0, checkpointed=1.0, forward=13.4, backward=52.0, attention=2.06
        ),
    }
    attention_processor = Kandinsky5AttnProcessor
    token_plan = SequenceParallelPlan(
        outputs={"visual_rope_embeddings": 1}, entries={"visual_transformer_blocks.0": 1},
        unsplit=("visual_embeddings",), last="out_layer.out_layer",
    )  # fmt: skip
    unquantized = ("embeddings", "^text_transformer_blocks", "modulation", "norm", "^out_layer")
    fp32_weights = ("modulation", "time_embeddings")
    streams: ClassVar = {
        "^time_embeddings|^pooled_text_embeddings|modulation": "time", "^text_embeddings": "prompt",
        r"^text_transformer_blocks|cross_attention\.to_(key|value)": "text", "": "video",
    }  # fmt: skip
    attentions = (
        AttentionSpec("text_transformer_blocks", "text", "text"),
        AttentionSpec("visual_transformer_blocks", "video", "video"),
        AttentionSpec("visual_transformer_blocks", "video", "text"),
    )
    # Its VAE is HunyuanVideo's.
    vae_pixel_bytes, vae_frames_at_once = HunyuanVideoSpec.vae_pixel_bytes, HunyuanVideoSpec.vae_frames_at_once
    vae_tile, vae_graph_bytes = HunyuanVideoSpec.vae_tile, HunyuanVideoSpec.vae_graph_bytes
    vae_stats = HunyuanVideoSpec.vae_stats
    casts_latents = False

    # ---- description -----------------------------------------------------------------------------------------------

    @property
    def pipeline_class(self) -> Any:  # type: ignore[override]
        """Pipeline of the checkpoint, imported at first use: pipelines import schedulers and much else."""
        return self.image_pipeline_class or diffusers.Kandinsky5T2VPipeline

    @property
    def image_pipeline_class(self) -> Any:  # type: ignore[override]
        """Pipeline that starts from an image, or None for text-to-video checkpoints."""
        return None if self.facts.first_frame == "none" else diffusers.Kandinsky5I2VPipeline

    @property
    def encodes_first_frame(self) -> bool:
        """True if clips start from an image: encoded together, latents of a clip depend on all of its frames."""
        return self.facts.first_frame != "none"

    @property
    def head_width(self) -> int:
        return sum(self.configs["transformer"].get("axes_dims", (16, 24, 24)))

    def width(self, network: Any) -> int:
        return network.config.model_dim

    def latent_channels(self, network: Any) -> int:
        return network.config.out_visual_dim

    def flops(self, network: nn.Module) -> Flops | None:
        """Return the formula of the operations, in which gradients also reach the blocks of the text."""
        blocks = ("text_transformer_blocks", *self.blocks)
        return flops_formula(
            network, streams=self.streams, attentions=self.attentions, blocks=blocks, width=self.width(unwrap(network))
        )

    def vae_bytes(self, size: tuple[int, int, int], *, gradient: bool = False) -> float:
        """Estimate peak bytes, for large frames mostly those of attention masks."""
        return max(super().vae_bytes(size, gradient=gradient), mask_bytes(size, self.vae_frames_at_once))

    def count_tokens(self, network: Any, call: Mapping[str, Any]) -> Tokens:
        clips, frames, height, width = call["hidden_states"].shape[:4]
        p_t, p_h, p_w = network.config.patch_size
        video = (frames // p_t) * (height // p_h) * (width // p_w)
        return Tokens(clips, video, call["encoder_hidden_states"].shape[1])

    # ---- conditioning and latents ----------------------------------------------------------------------------------

    @torch.no_grad()
    def encode_text(self, encoders: ModelComponents, prompts: Sequence[str]) -> PromptEmbeds:
        """Encode each prompt as the pipelines' calls do, which pad the prompts of a batch and attend to the padding."""
        pipeline = common.build_pipeline(diffusers.Kandinsky5T2VPipeline, encoders.modules)
        states, pooled = [], []
        for prompt in prompts:
            device = common.encoder_device(encoders)
            embeds, clip, _ = pipeline.encode_prompt([prompt], device=device, max_sequence_length=_TEXT_TOKENS)
            states.append(embeds[0, :_TEXT_TOKENS])
            pooled.append(clip)
        mask = torch.zeros(len(states), _TEXT_TOKENS, dtype=torch.bool)
        for row, state in enumerate(states):
            mask[row, : len(state)] = True
        padded = [nn.functional.pad(state, (0, 0, 0, _TEXT_TOKENS - len(state))) for state in states]
        return PromptEmbeds(
            {
                "prompt_embeds": torch.stack(padded), "prompt_attention_mask": mask.to(padded[0].device),
                "pooled_prompt_embeds": torch.cat(pooled),
            }
        )  # fmt: skip

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        config = self.configs["transformer"]
        return {
            "prompt_embeds": (_TEXT_TOKENS, config.get("in_text_dim", 3584)),
            "prompt_attention_mask": (_TEXT_TOKENS,),
            "pooled_prompt_embeds": (config.get("in_text_dim2", 768),),
        }

    def condition(
        self, batch: Batch, x0: Tensor, frames: Sequence[Collection[int]], vae_stats: VAEStats
    ) -> tuple[VideoMeta, Tensor | None]:
        """Add the first frame's latents, encoded by itself, where a sample is given it."""
        meta, trained = super().condition(batch, x0, frames, vae_stats)
        if trained is None or FIRST_FRAME not in batch.clip:
            return meta, trained
        latents = self.latents(batch.clip[FIRST_FRAME], None, vae_stats)
        return replace(meta, extra={**meta.extra, _FIRST: latents}), trained

    def predict(
        self, transformer: nn.Module, x_BCTHW: Tensor, t: Tensor, conditions: PromptEmbeds, meta: VideoMeta
    ) -> Tensor:
        """Predict velocity `eps - x0` in fp32; with t of `[B, T]`, a first frame of noise level 0 is given.

        Raises:
            ValueError: a first frame is given, and the network has no mask for it.
        """
        network = unwrap(transformer)
        dtype, device = input_dtype(network), x_BCTHW.device
        is_given = None
        if t.ndim == 2:
            is_given, t = (t[:, 0] == 0).view(-1, 1, 1, 1, 1), t[:, -1]
            if _FIRST in meta.extra:
                first = torch.where(is_given, meta.extra[_FIRST].to(x_BCTHW.dtype), x_BCTHW[:, :, :1])
                x_BCTHW = torch.cat([first, x_BCTHW[:, :, 1:]], dim=2)
        x = x_BCTHW.to(dtype)
        if network.config.visual_cond:
            mask = x.new_zeros(len(x), 1, *x.shape[2:])
            if is_given is not None:
                mask[:, :, :1] = is_given.to(dtype)
            x = torch.cat([x, torch.zeros_like(x), mask], dim=1)
        elif is_given is not None:
            raise InputError("this transformer of kandinsky5 does not take a first frame", "unsupported")
        text, text_mask = _cut_text(conditions)
        patches = network.config.patch_size
        cells = (size // patch for size, patch in zip(x.shape[2:], patches, strict=True))
        prediction: Tensor = transformer(
            hidden_states=x.permute(0, 2, 3, 4, 1),
            encoder_hidden_states=text.to(dtype),
            # In fp32: bf16 would round noise levels to 1/256.
            timestep=t.float() * _TIMESTEPS,
            pooled_projections=conditions["pooled_prompt_embeds"].to(dtype),
            visual_rope_pos=[torch.arange(count, device=device) for count in cells],
            text_rope_pos=torch.arange(text.shape[1], device=device),
            scale_factor=self._position_scale(*x.shape[3:]),
            **({} if text_mask is None else {"text_mask": text_mask}),
            return_dict=False,
        )[0]
        return prediction.permute(0, 4, 1, 2, 3).float()

    def _position_scale(self, height: int, width: int) -> tuple[float, float, float]:
        """Return the divisors of positions of a clip by the size of its latents, as the pipelines."""
        sides = (self.facts.geometry.spatial * side for side in (height, width))
        is_small = all(480 <= side <= 854 for side in sides)
        return (1, 2, 2) if is_small else (1, 3.16, 3.16)

    def decode_latents(self, vae: Any, z_BCTHW: Tensor) -> Tensor:
        """Decode as the pipeline of the checkpoint, which evens the first frames of clips that start from an image."""
        if self.facts.animates:
            scale = vae.config.scaling_factor
            even = even_start((z_BCTHW.float() * scale).permute(0, 2, 3, 4, 1)).permute(0, 4, 1, 2, 3)
            z_BCTHW = (even / scale).to(z_BCTHW.dtype)
        return super().decode_latents(vae, z_BCTHW)

    # ---- sampling --------------------------------------------------------------------------------------------------

    def sampling_times(self, scheduler: Any, steps: int, *, num_tokens: int, shift: float | None = None) -> Tensor:
        """Return the noise levels of the scheduler's own schedule, as the pipelines."""
        return sampling_times(scheduler, steps, num_tokens=num_tokens, shift=shift, own_sigmas=True)

    def pipeline(
        self,
        transformer: nn.Module,
        vae: nn.Module,
        scheduler: Any,
        encoders: ModelComponents | None = None,
        *,
        image_to_video: bool = False,
    ) -> Any:
        """Build the pipeline, with dense attention, and for short clips without their first frames becoming NaN."""
        pipeline = super().pipeline(transformer, vae, scheduler, encoders, image_to_video=image_to_video)
        pipeline.get_sparse_params = lambda *_: None
        if image_to_video:
            pipeline.normalize_first_frame = even_start
        return pipeline

    def pipeline_call(self, conditions: PromptEmbeds, negative: PromptEmbeds, request: SampleRequest) -> dict[str, Any]:
        """Return the pipeline's arguments, with prompt embeddings without padding."""
        call = super().pipeline_call(conditions, negative, request)
        for prefix, texts in (("", conditions), ("negative_", negative)):
            for name in texts.tensors:
                del call[f"{prefix}{name}"]
            text, _ = _cut_text(texts)
            call |= {
                f"{prefix}prompt_embeds_qwen": text,
                f"{prefix}prompt_embeds_clip": texts["pooled_prompt_embeds"],
                f"{prefix}prompt_cu_seqlens": torch.tensor([0, text.shape[1]], dtype=torch.int32),
            }
        return call


def _cut_text(conditions: PromptEmbeds) -> tuple[Tensor, Tensor | None]:
    """Return the prompt embeddings of a batch, cut if they have one length, else with the mask of their padding."""
    text, mask, lengths = conditions["prompt_embeds"], conditions["prompt_attention_mask"], conditions.lengths
    if lengths is None and len(text) == 1:  # this waits for the device
        lengths = (int(mask.sum()),)
    if lengths is None or len(set(lengths)) > 1:
        return text, mask.bool()
    return text[:, : lengths[0]], None
