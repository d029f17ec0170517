"""Wan 2.1 and 2.2: a flow transformer over 8x8x4- or 16x16x4-compressed latents, with UMT5 text padded by zeros.

Kinds of checkpoints, which `families` finds in their configs: text-to-video (2.1, and 2.2 A14B with two experts),
image-to-video with the image's latents and a mask on channels (2.1, which also sees CLIP's states of the image, with a
last image in "first and last frame" checkpoints; and A14B), and 2.2 5B, whose network takes a time per token, so that
given frames are clean tokens at time 0.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import diffusers
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor as StockAttnProcessor
from torch import Tensor, nn
from transformers import CLIPImageProcessor, CLIPVisionModel, T5TokenizerFast, UMT5EncoderModel

from finetrainers.config.facts import Activations
from finetrainers.diffusion.schedule import sampling_times
from finetrainers.utils.failures import InputError

from . import common, given_frames
from .batch import Batch, ModelComponents, PromptEmbeds, SampleRequest, VAEStats, VideoMeta
from .common import input_dtype, rotate_pairs
from .compiling import unwrap
from .flops import AttentionSpec, Stream, Tokens
from .pixels import FIRST_FRAME, MOMENTS, to_pil, to_unit_range
from .spec import ModelSpec
from .split.attention import AttentionFn
from .split.sequence import SequenceParallelPlan
from .tiling import tiled_alike

#: Text tokens of the pipelines' calls; their `encode_prompt` alone would take 226.
_TEXT_TOKENS = 512
#: The network's timestep of process time sigma: `num_train_timesteps` of the published schedulers.
_TIMESTEPS = 1000.0
#: CLIP's states of an image: 16 x 16 patches, and one of the whole.
_IMAGE_TOKENS = 257
#: Tensor of an encoded clip, and input of the network: CLIP's states of the image, or of the first and the last one.
IMAGE_STATES = "image_embeds"
#: Counted memory of activations as linear functions: a constant, the slope in the width of a feed-forward network over
#: that of a token, and the further memory of a time per token and of an image. See `Activations`.
_COUNTED: dict[str, dict[str, tuple[float, float, float, float]]] = {
    "lora": {
        "kept": (24.15, 1.06, 16.1, 2.0), "outside": (7.4, 0.7, 4.2, 0.0), "forward": (7.7, 1.35, 18.4, 1.0),
        "backward": (31.6, 2.09, 21.3, 2.1),
    },
    "lora without autocast": {
        "kept": (20.1, 1.06, 16.1, 2.0), "outside": (7.3, 0.72, 4.2, 0.0), "forward": (5.9, 1.65, 18.6, 1.0),
        "backward": (27.6, 2.09, 21.3, 2.1),
    },
    "full-finetune": {
        "kept": (36.2, 2.0, 16.1, 2.0), "outside": (9.8, 0.2, 16.2, 0.0), "forward": (6.2, 1.55, 21.8, 1.0),
        "backward": (45.0, 2.2, 36.0, 2.1),
    },
    "full-finetune without autocast": {
        "kept": (34.2, 2.0, 16.1, 2.0), "outside": (9.8, 0.2, 12.3, 0.0), "forward": (5.9, 1.65, 21.7, 1.0),
        "backward": (41.0, 2.2, 33.5, 2.1),
    },
}  # fmt: skip
_COUNTED["full-finetune-bf16"] = _COUNTED["full-finetune without autocast"]


@dataclass(frozen=True)
class _VAEMemory:
    """Counted memory of a VAE; see the attributes of `ModelSpec` that start with `vae_`."""

    pixel_bytes: float
    frames_at_once: int
    graph_bytes: tuple[float, float, float]
    tile: tuple[int, int]


#: The VAE of 2.1 and the residual one of 5B. Each call has 4 frames, and the features of the last 2 before each
#: convolution; pixels and latents of all frames are far less. The residual one encodes tiles of 512 x 512, which take
#: as much as decoding 336 x 336.
_VAES = {
    False: _VAEMemory(3500, 3, (19550, 1190, 11300), (256, 256)),
    True: _VAEMemory(2780, 4, (11700, 900, 9200), (336, 336)),
}


class WanAttnProcessor(StockAttnProcessor):
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
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        images = source.shape[1] - _TEXT_TOKENS if attn.add_k_proj is not None else 0
        text = source[:, images:] if images else source
        query, key, value = attn.to_q(hidden_states), attn.to_k(text), attn.to_v(text)
        query, key = attn.norm_q(query), attn.norm_k(key)
        query, key, value = (tokens.unflatten(2, (attn.heads, -1)) for tokens in (query, key, value))
        if rotary_emb is not None:
            query, key = _rotate(query, rotary_emb), _rotate(key, rotary_emb)
        attend = self.attend if encoder_hidden_states is None else self.attend.attend_locally
        outputs = attend(query, key, value, attention_mask).flatten(2, 3).type_as(query)
        if images:
            states = source[:, :images]
            image_key, image_value = attn.norm_added_k(attn.add_k_proj(states)), attn.add_v_proj(states)
            pair = (tokens.unflatten(2, (attn.heads, -1)) for tokens in (image_key, image_value))
            outputs = outputs + self.attend.attend_locally(query, *pair).flatten(2, 3).type_as(query)
        return attn.to_out[1](attn.to_out[0](outputs))


def _rotate(x_BSHD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs of channels by the positions' cosines and sines, which are repeated for both channels of a pair."""
    return rotate_pairs(x_BSHD, rotary[0][..., 0::2], rotary[1][..., 1::2]).type_as(x_BSHD)


class WanSpec(ModelSpec):
    """Wan as its pipelines run it. Conditions: `prompt_embeds` `[B, 512, D]`, zeros after the prompt."""

    parts: ClassVar = {
        "tokenizer": T5TokenizerFast,
        "text_encoder": UMT5EncoderModel,
        "image_processor": CLIPImageProcessor,
        "image_encoder": CLIPVisionModel,
        "vae": AutoencoderKLWan,
        "transformer": WanTransformer3DModel,
        "transformer_2": WanTransformer3DModel,
    }
    blocks = ("blocks",)
    guides_in_one_call = False
    attention_processor = WanAttnProcessor
    token_plan = SequenceParallelPlan(
        inputs={"timestep": 1}, outputs={"rope": 1}, entries={"blocks.0": 1}, unsplit=("patch_embedding",)
    )
    unquantized: tuple[str, ...] = ("^patch_embedding", "^condition_embedder", "norm", "^proj_out$")
    streams: ClassVar[Mapping[str, Stream]] = {
        "condition_embedder.(time_embedder|time_proj)": "time",
        r"condition_embedder.image_embedder|add_[kv]_proj": "image",
        r"condition_embedder.text_embedder|attn2\.to_[kv]": "prompt",
        "": "video",
    }
    attentions = (
        AttentionSpec("blocks", "video", "video"),
        AttentionSpec("blocks", "video", "prompt"),
    )

    # ---- memory ----------------------------------------------------------------------------------------------------

    @cached_property
    def activations(self) -> dict[str, Activations]:  # type: ignore[override]
        """Memory of activations: of the sizes of the checkpoint's network, with a time per token where it takes one."""
        config, facts = self.configs.get(self.facts.trained, {}), self.facts
        tokens = config.get("num_attention_heads", 40) * config.get("attention_head_dim", 128)
        terms = (
            1.0,
            config.get("ffn_dim", 13824) / tokens,
            float(facts.first_frame == "tokens"),
            float(facts.sees_image),
        )
        attention = 2.03 + (1.0 if facts.sees_image else 0.0)
        kinds = {}
        for kind, counted in _COUNTED.items():
            units = {name: sum(a * b for a, b in zip(line, terms, strict=True)) for name, line in counted.items()}
            kinds[kind] = Activations(kept=(units.pop("kept"),), checkpointed=1.0, attention=attention, **units)
        return kinds

    @property
    def _vae_memory(self) -> _VAEMemory:
        return _VAES[bool(self.configs.get("vae", {}).get("is_residual"))]

    @property
    def vae_pixel_bytes(self) -> float:  # type: ignore[override]
        """Peak bytes of the VAE for each pixel."""
        return self._vae_memory.pixel_bytes

    @property
    def vae_frames_at_once(self) -> float:  # type: ignore[override]
        """Frames that those bytes are for."""
        return self._vae_memory.frames_at_once

    @property
    def vae_graph_bytes(self) -> tuple[float, float, float]:  # type: ignore[override]
        """Bytes per pixel of a decode and its backward."""
        return self._vae_memory.graph_bytes

    @property
    def vae_tile(self) -> tuple[int, int]:  # type: ignore[override]
        """Height and width of tiles in pixels."""
        return self._vae_memory.tile

    # ---- pipelines -------------------------------------------------------------------------------------------------

    @property
    def pipeline_class(self) -> Any:  # type: ignore[override]
        """Pipeline of the checkpoint, imported at first use: pipelines import schedulers and much else."""
        is_image_to_video = self.facts.first_frame == "channels"
        return diffusers.WanImageToVideoPipeline if is_image_to_video else diffusers.WanPipeline

    @property
    def image_pipeline_class(self) -> Any:  # type: ignore[override]
        """Pipeline that starts from an image, or None for text-to-video checkpoints."""
        return None if self.facts.first_frame == "none" else diffusers.WanImageToVideoPipeline

    # ---- text and images -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode_text(self, encoders: ModelComponents, prompts: Sequence[str]) -> PromptEmbeds:
        """Encode prompts as the pipelines' calls do: UMT5's states, zero after the prompt, `[B, 512, D]`."""
        embeds, _ = common.build_pipeline(diffusers.WanPipeline, encoders.modules).encode_prompt(
            list(prompts),
            do_classifier_free_guidance=False,
            max_sequence_length=_TEXT_TOKENS,
            device=common.encoder_device(encoders),
        )
        return PromptEmbeds({"prompt_embeds": embeds})

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"prompt_embeds": (_TEXT_TOKENS, self.configs[self.facts.trained].get("text_dim", 4096))}

    def encode_clip(
        self,
        encoders: ModelComponents,
        video_BCTHW: Tensor,
        generators: Sequence[torch.Generator] | None,
        media: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Encode clips; where the checkpoint sees images, with CLIP's states `[B, 257, D]` of the first frame.

        With a last frame these are `[B, 514, D]`.
        """
        tensors = super().encode_clip(encoders, video_BCTHW, generators, media)
        return tensors | self._image_states(encoders, [video_BCTHW[:, :, frame] for frame in self._given_places])

    def encode_image(
        self, encoders: ModelComponents, image_CHW: Tensor, frames: int, last_CHW: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Encode an image that clips of `frames` frames start from; on channels, between gray frames."""
        still = image_CHW[None, :, None]
        if self.facts.first_frame != "channels":
            return self.encode_clip(encoders, still, None)
        clip = still.repeat(1, 1, frames, 1, 1)
        if self.facts.last_frame:
            assert last_CHW is not None, "the prompts are checked"
            clip[:, :, -1] = last_CHW
        given_video = self.given_pixels(clip)

        def encode() -> dict[str, Tensor]:
            return {n: self.encode_video(encoders["vae"], v) for n, v in ((MOMENTS, still), (FIRST_FRAME, given_video))}

        moments = tiled_alike(self, (frames, *still.shape[3:]), encode)
        return moments | self._image_states(encoders, [clip[:, :, place] for place in self._given_places])

    def clip_shapes(self, network: nn.Module, size: tuple[int, int, int]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Add CLIP's states, where the checkpoint sees images."""
        shapes = super().clip_shapes(network, size)
        if self.facts.sees_image:
            states = len(self._given_places) * _IMAGE_TOKENS, self.configs[self.facts.trained]["image_dim"]
            shapes[IMAGE_STATES] = ("image_encoder", states)
        return shapes

    @property
    def _given_places(self) -> tuple[int, ...]:
        """Frames of a clip that the network is given on channels."""
        return () if self.facts.first_frame != "channels" else (0, -1) if self.facts.last_frame else (0,)

    def given_pixels(self, video_BCTHW: Tensor) -> Tensor:
        """Return clips with gray frames in the place of all that the network is not given.

        That is the condition of `WanImageToVideoPipeline.prepare_latents`, whose zeros are gray.
        """
        places = list(self._given_places)
        pixels = torch.zeros(video_BCTHW.shape, dtype=torch.float32, device=video_BCTHW.device)
        pixels[:, :, places] = to_unit_range(video_BCTHW[:, :, places])
        return pixels

    @torch.no_grad()
    def _image_states(self, encoders: ModelComponents, images: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return CLIP's states of images `[B, 3, H, W]`, `[B, 257 * images, D]`, where the checkpoint sees them."""
        if not self.facts.sees_image:
            return {}
        parts = {name: encoders[name] for name in ("image_processor", "image_encoder")}
        pipeline = common.build_pipeline(diffusers.WanImageToVideoPipeline, parts)
        pil_images = [to_pil(image) for batch in zip(*images, strict=True) for image in batch]
        states = pipeline.encode_image(pil_images, device=next(encoders["image_encoder"].parameters()).device)
        return {IMAGE_STATES: states.unflatten(0, (-1, len(images))).flatten(1, 2)}

    @property
    def clip_version(self) -> bool | str:
        """Name of the tensors of a clip, for cache keys: those of text-to-video checkpoints are the default's."""
        if self.facts.first_frame != "channels":
            return super().clip_version
        return f"{FIRST_FRAME} of {len(self._given_places)}{f' {IMAGE_STATES}' if self.facts.sees_image else ''}"

    def image_version(self, frames: int) -> bool | str:
        """Add the number of frames: on channels, each of them is encoded."""
        return f"{self.clip_version} in {frames}" if self.facts.first_frame == "channels" else self.clip_version

    # ---- the network -----------------------------------------------------------------------------------------------

    def condition(
        self, batch: Batch, x0: Tensor, frames: Sequence[Collection[int]], vae_stats: VAEStats
    ) -> tuple[VideoMeta, Tensor | None]:
        """Implement `ModelSpec.condition`; on channels, `first_frame` is a mask and the given frames' latents.

        They are `[B, 4 + 16, T, H, W]`: the mask has a channel for each frame of a latent frame, all 1 for the first.
        All clips have them, since the network has seen an encoding there for every clip.
        """
        if self.facts.first_frame != "channels":
            return super().condition(batch, x0, frames, vae_stats)
        assert all(0 in indexes for indexes in frames), "the network was trained with an image for every clip"
        meta, _ = super().condition(batch, x0, [(0,)] * len(frames), vae_stats)
        latents, geometry = meta.extra["first_frame"], self.facts.geometry
        mask = latents.new_zeros(len(latents), geometry.temporal, *latents.shape[2:])
        mask[:, :, 0] = 1.0
        if self.facts.last_frame:
            mask[:, -1, -1] = 1.0
        states = {name: tensor for name, tensor in batch.clip.items() if name == IMAGE_STATES}
        return replace(meta, extra={**meta.extra, "first_frame": torch.cat([mask, latents], dim=1), **states}), None

    def vae_stats(self, vae: Any) -> VAEStats:
        mean, std = (torch.tensor(vae.config[name], dtype=torch.float32) for name in ("latents_mean", "latents_std"))
        return VAEStats(mean=mean, scale=1.0 / std)

    def predict(
        self, transformer: nn.Module, x_BCTHW: Tensor, t: Tensor, conditions: PromptEmbeds, meta: VideoMeta
    ) -> Tensor:
        """Predict velocity `eps - x0` in fp32; with t of `[B, T]`, each latent frame has a noise level (0: clean).

        Raises:
            ValueError: a first frame is given on channels, and the checkpoint takes none.
        """
        network = unwrap(transformer)
        dtype, first_frame = input_dtype(network), meta.extra.get("first_frame")
        x = x_BCTHW.to(dtype)
        if self.facts.first_frame == "channels":
            channels = network.config.in_channels - x.shape[1]
            shape = (len(x), channels, *x.shape[2:])
            x = torch.cat([x, x.new_zeros(shape) if first_frame is None else first_frame.to(dtype)], dim=1)
        elif first_frame is not None:
            raise InputError(
                f"this is a text-to-video checkpoint of {self.name}: it takes no first frame", "unsupported"
            )
        states = meta.extra.get(IMAGE_STATES)
        if self.facts.sees_image:
            states = self._states_or_zeros(network, x, states)
        prediction: Tensor = transformer(
            hidden_states=x,
            timestep=_TIMESTEPS * self.network_times(t.float(), x),
            encoder_hidden_states=conditions["prompt_embeds"].to(dtype),
            encoder_hidden_states_image=states,
            return_dict=False,
            **self.rate_arguments(network, meta),
        )[0]
        return prediction.float()

    def network_times(self, t: Tensor, x: Tensor) -> Tensor:
        """Return a time per token, `[B, tokens]`, from one per latent frame, `[B, T]`; one per clip stays."""
        patch = self.facts.geometry.patch
        return t if t.ndim == 1 else t.repeat_interleave(x.shape[3] // patch * (x.shape[4] // patch), dim=1)

    def rate_arguments(self, network: Any, meta: VideoMeta) -> dict[str, Any]:
        """Return the network's arguments about the frame rate: Wan's has none."""
        return {}

    def _states_or_zeros(self, network: Any, x: Tensor, states: Tensor | None) -> Tensor:
        """Return CLIP's states, one row per image, `[B * images, 257, D]`; zeros for clips that are given none."""
        images, config = len(self._given_places), network.config
        if states is None:
            states = x.new_zeros(len(x), images * _IMAGE_TOKENS, config.image_dim)
        return states.to(x.dtype).unflatten(1, (images, -1)).flatten(0, 1)

    def count_tokens(self, network: Any, call: Mapping[str, Any]) -> Tokens:
        """Count the tokens from the clip's size: processes that share it see a part of the noise levels."""
        latents, geometry = call["hidden_states"], self.facts.geometry
        frames, height, width = latents.shape[2:]
        video = frames // geometry.patch_t * (height // geometry.patch) * (width // geometry.patch)
        states = call.get("encoder_hidden_states_image")
        return Tokens(
            clips=len(latents),
            video=video,
            text=call["encoder_hidden_states"].shape[1],
            times=1 if call["timestep"].ndim == 1 else video,
            image=0 if states is None else states.shape[0] * states.shape[1] // len(latents),
        )

    def sampling_times(self, scheduler: Any, steps: int, *, num_tokens: int, shift: float | None = None) -> Tensor:
        """Return the noise levels of the pipelines' schedule, which they round down to timesteps for the network."""
        return sampling_times(scheduler, steps, num_tokens=num_tokens, shift=shift, own_sigmas=True)

    # ---- sampling --------------------------------------------------------------------------------------------------

    def pipeline_call(self, conditions: PromptEmbeds, negative: PromptEmbeds, request: SampleRequest) -> dict[str, Any]:
        """Return the pipeline's arguments; checkpoints of first and last frames also take the last image.

        Raises:
            ValueError: an image is missing, or given although the checkpoint takes none.
        """
        call = super().pipeline_call(conditions, negative, request)
        if not self.facts.last_frame:
            return call
        if request.last_image is None:
            raise InputError(f"this checkpoint of {self.name} also needs a last image", "required")
        return {**call, "last_image": request.last_image}

    def sample(
        self,
        pipeline: Any,
        conditions: PromptEmbeds,
        negative: PromptEmbeds,
        request: SampleRequest,
        generator: torch.Generator,
    ) -> Any:
        """Sample by the pipeline of the request, with further given frames clean in their places, at time 0."""
        is_in_place = self.facts.first_frame == "tokens"
        if not is_in_place or request.starts_from_image or (request.last_image is None and request.prefix is None):
            call = self.pipeline_call(conditions, negative, replace(request, image=request.first_image))
            return pipeline(**call, generator=generator, output_type="np").frames[0]
        call = self.pipeline_call(conditions, negative, replace(request, image=None))
        patch = self.facts.geometry.patch
        return given_frames.sample_in_place(
            self, pipeline, call, request, generator, tokens=lambda mask: mask[..., ::patch, ::patch].flatten(1)
        )
