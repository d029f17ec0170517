"""The seam between training methods and networks: what a model file must offer.

Everything above `predict` sees latents `[B, C, T, H, W]` in the model's normalized latent space and one prediction
of the same shape; token packing, rotary positions, guidance and padding live inside the model files.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from finetrainers.config.facts import Activations, Read
from finetrainers.config.parallel import SpMode
from finetrainers.config.sections import ModelSection
from finetrainers.diffusion.process import FlowMatching, Process
from finetrainers.diffusion.schedule import sampling_times
from finetrainers.utils.failures import InputError

from . import common, given_frames
from .batch import Batch, ModelComponents, PromptEmbeds, SampleRequest, VAEStats, VideoMeta, even_bounds, noised
from .common import DTYPES, fix_input_dtype, input_dtype, leave_out_unused, unused_weights
from .compiling import compile_blocks, unwrap
from .decoding import decode_gradient, decode_videos, in_vae_dtype, recompute_decoder
from .files.files import MODEL_INDEX, source_option
from .files.saving import remove_full, weight_files
from .files.weights import are_mapped, network_on_meta
from .flops import AttentionSpec, FlopMeter, Flops, Stream, Tokens, flops_formula
from .pixels import FIRST_FRAME, MOMENTS, encode_moments, pixel_size, to_unit_range
from .pretrained import PretrainedModel
from .sizes import encoded_bytes, frozen_bytes, vae_working_bytes
from .split.attention import check_attention
from .split.ring import OPERATOR_BODIES
from .split.sequence import SequenceParallelPlan, check_split, share_clips
from .tiling import Size, retry_vae_on_oom, sliced_for_memory, tiled_alike, tiled_for_memory

__all__ = [
    "DTYPES", "FIRST_FRAME", "MOMENTS", "OPERATOR_BODIES", "Batch", "Conditions", "FlopMeter", "ModelComponents",
    "ModelSpec", "Parts", "PromptEmbeds", "SampleRequest", "VAEStats", "VideoMeta", "are_mapped", "check_split",
    "decode_gradient", "encoded_bytes", "even_bounds", "fix_input_dtype", "frozen_bytes", "in_vae_dtype",
    "input_dtype", "leave_out_unused", "network_on_meta", "pixel_size", "remove_full", "source_option",
    "tiled_for_memory", "to_unit_range", "unused_weights", "unwrap", "vae_working_bytes", "weight_files",
]  # fmt: skip
Conditions, Parts = PromptEmbeds, ModelComponents  # their names in version 0.1, for families from outside

#: Bytes above which the VAE works on one clip at a time, and then on tiles of a clip: an 80 GB GPU has that much left
#: next to the largest model's LoRA training with text encoders. Equal on every GPU, since tiling changes latents.
VAE_BUDGET = 24 * 2**30


class ModelSpec(PretrainedModel):
    """A family's way to load, condition, call, decode and save its network. Holds no training state."""

    #: The diffusers pipeline that also takes a first frame, or None, so that images for samples are refused.
    image_pipeline_class: Any = None
    #: Whether the pipelines cast latents to the VAE's dtype, so that a model card may load it in another.
    casts_latents: bool = True
    #: Names of the transformer's block lists, for checkpointing, wrapping, compiling, and the memory estimate.
    blocks: tuple[str, ...] = ("transformer_blocks",)
    #: Where the network's tensors have tokens that processes can share, or None, so that `--sp_size` is refused.
    token_plan: SequenceParallelPlan | None = None
    #: Whether the pipeline's guidance is one call of the transformer with both prompts, not a call for each of them.
    guides_in_one_call: bool = True
    #: Arguments of the network that the family sets otherwise than its pipeline, by name: a value that it also forces
    #: on the pipeline's calls in samples, or None if the prediction does not depend on the argument.
    own_arguments: ClassVar[Mapping[str, Any]] = {}
    #: Arguments of the pipeline's calls that samples have otherwise than by its defaults.
    pipeline_arguments: ClassVar[Mapping[str, Any]] = {}
    #: Whether the transformer sees text of the prompt's length, not of one length.
    text_varies: bool = False
    #: Tokens that a text encoder reads, by part, and whether it keeps all layers' states. Default: `text_shapes`, no.
    text_calls: ClassVar[Mapping[str, tuple[int, bool]]] = {}
    #: Most prompts that `encode_text` gives its encoders at once.
    texts_at_once: float = math.inf
    #: Version of text embeddings beyond the weights of the encoders, for cache keys, or None.
    text_version: str | None = None
    #: Memory of activations, by `training_type`, and of LoRA without autocast; with `-bf16` for trained weights that
    #: compute in 16 bits (FSDP2, stochastic rounding), where that differs. The defaults lie between the families' here.
    activations: ClassVar[Mapping[str, Activations]] = {
        "lora": Activations(kept=(22.0,), outside=10.0, checkpointed=1.0, forward=18.0, backward=36.0),
        "lora without autocast": Activations(kept=(18.0,), outside=8.5, checkpointed=1.0, forward=14.0, backward=30.0),
        "full-finetune": Activations(kept=(36.0,), outside=15.0, checkpointed=1.0, forward=18.0, backward=44.0),
    }
    #: Linear layers that keep their dtype when frozen weights are quantized: expressions searched in module names.
    unquantized: tuple[str, ...] = (
        "patch_embed", "pos_embed", "x_embedder", "context_embedder", "time_embed", "^proj_in$", "^proj_out$", "norm",
    )  # fmt: skip
    #: Modules whose frozen weights the network's class keeps in fp32, where these are more than a few: parts of names.
    fp32_weights: tuple[str, ...] = ()
    #: Tokens that go through each layer, by the first expression that its name matches; see `flops`.
    #: Without streams, dropout is refused with `--sp_size`.
    streams: ClassVar[Mapping[str, Stream]] = {}
    attentions: ClassVar[Sequence[AttentionSpec]] = ()
    #: What gets a separate noise level in training: a clip, or each latent frame, for networks with a time per frame.
    noise_per: Literal["clip", "frame"] = "clip"
    #: Peak bytes of the VAE for each pixel, in bf16, and for how many frames at a time: counted on its operations,
    #: without weights and without cuDNN's workspace. 0 if not known: then it is never tiled by itself.
    vae_pixel_bytes: float = 0.0
    vae_frames_at_once: float = math.inf
    vae_tile: tuple[int, int] = (512, 512)  # height and width in pixels
    #: Bytes per pixel of a decode and its backward: recomputed, per frame at a time and per frame of a clip; stored.
    vae_graph_bytes: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def __init__(self, config: ModelSection, *, name: str, read: Read) -> None:
        super().__init__(config, name=name, read=read)
        self.vae_one_by_one, self.vae_too_large = set[Size](), set[Size]()  # after an OOM; see `retry_vae_on_oom`

    # ---- description -------------------------------------------------------------------------------------------

    def process(self, scheduler: Any) -> Process:
        """Return the noise process that the checkpoint was trained with; by default, flow matching.

        The shift of noise levels is a training option, not part of the process.
        """
        return FlowMatching()

    def sampling_times(self, scheduler: Any, steps: int, *, num_tokens: int, shift: float | None = None) -> Tensor:
        """Return the process times of `steps` denoising steps; see `diffusion.schedule.sampling_times`.

        A family whose sampling is not one trajectory over all latents sets it to None: methods that sample the clips
        that they train on are refused.
        """
        return sampling_times(scheduler, steps, num_tokens=num_tokens, shift=shift)

    def width(self, network: Any) -> int:
        """Return the width of a token inside the transformer's blocks, for the memory estimate."""
        return network.config.num_attention_heads * network.config.attention_head_dim

    @property
    def head_width(self) -> int:
        """Width of an attention head in the transformer's blocks; kernels support some widths."""
        return int(self.configs[self.facts.trained].get("attention_head_dim", 64))

    def latent_channels(self, network: Any) -> int:
        """Return the channels of the latents that the transformer denoises."""
        return int(network.config.out_channels or network.config.in_channels)

    def block_modules(self, network: nn.Module) -> list[nn.Module]:
        """Return the transformer's repeated blocks."""
        return [block for name in self.blocks for block in getattr(network, name)]

    def flops(self, network: nn.Module) -> Flops | None:
        """Return the formula of the operations of a network's calls, or None if the family has none."""
        if not self.attentions:
            return None
        return flops_formula(
            network, streams=self.streams, attentions=self.attentions, blocks=self.blocks, width=self.width(network),
            unused=self.facts.unused,
        )  # fmt: skip

    def count_tokens(self, network: Any, call: Mapping[str, Any]) -> Tokens:
        """Count the tokens of a call of the network from its named arguments."""
        latents, geometry = call["hidden_states"], self.facts.geometry
        clips, cell = len(latents), geometry.patch_t * geometry.patch**2
        video = latents.numel() // (clips * network.config.in_channels * cell)
        return Tokens(clips, video, call["encoder_hidden_states"].shape[1], call["timestep"].numel() // clips)

    def compile_blocks(self, network: nn.Module, *, num_sizes: int = 1) -> None:
        """Compile the network's blocks; see `compile_blocks`."""
        compile_blocks(self.block_modules(network), num_sizes=num_sizes, text_varies=self.text_varies)

    def check_attention(self, device: torch.device, dtype: torch.dtype) -> str:
        """Return the attention backend, that of the kernel of `auto`; refuse one that fails; see `check_backend`."""
        return check_attention(self, device, dtype)

    def split_tokens(self, network: nn.Module, group: Any, mode: SpMode = "ulysses") -> None:
        """Split each call of the network over a group, or not if it is None; in place, after a LoRA is attached."""
        share_clips(self, network, group, mode)

    # ---- conditioning and latents ------------------------------------------------------------------------------

    @abstractmethod
    def encode_text(self, encoders: ModelComponents, prompts: Sequence[str]) -> PromptEmbeds:
        """Encode prompts as the family's pipeline does; padded, batch first."""

    def encode_with_images(
        self, encoders: ModelComponents, prompts: Sequence[str], images: Sequence[Any]
    ) -> PromptEmbeds:
        """Encode prompts with images (PIL, or pixels `[3, H, W]` uint8), where `Facts.text_sees_image`."""
        raise NotImplementedError(f"{self.name}'s text encoders do not encode images")

    def text_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of each tensor of `encode_text` for one prompt, without the batch; `..._mask` are bool.

        Raises:
            NotImplementedError: the family has none, so that its memory cannot be counted.
        """
        raise NotImplementedError(f"{self.name} has no `text_shapes`, which is required to estimate its memory")

    def empty_inputs(self, batch_size: int) -> tuple[PromptEmbeds, VideoMeta]:
        """Return conditions and other inputs of `predict` with the right shapes and no values, to count memory."""

        def empty(name: str, shape: tuple[int, ...]) -> Tensor:
            return torch.empty(batch_size, *shape, dtype=torch.bool if name.endswith("_mask") else torch.bfloat16)

        shapes = self.text_shapes()
        masks = {name: (shape[0],) * batch_size for name, shape in shapes.items() if name.endswith("_mask")}
        lengths = masks.pop("prompt_attention_mask", None)
        conditions = PromptEmbeds({n: empty(n, s) for n, s in shapes.items()}, lengths, further_lengths=masks)
        return conditions, VideoMeta(fps=torch.full((batch_size,), 24.0))

    def given_text(self, embedding: Tensor, mask: Tensor) -> PromptEmbeds:
        """Read a prompt's conditioning, a batch of one, from DanceGRPO's tensors; ValueError if not supported."""
        raise InputError(
            f"{self.name} cannot read prompts that were encoded elsewhere; use .txt or .jsonl", "unsupported"
        )

    def to_given_text(self, row: PromptEmbeds) -> tuple[Tensor, Tensor]:
        """Return embedding and mask of a prompt as `given_text` reads them; ValueError if not supported."""
        raise InputError(f"{self.name} has no format of prompt embeddings that other tools read", "unsupported")

    def vae_bytes(self, size: tuple[int, int, int], *, gradient: bool = False) -> float:
        """Estimate the VAE's peak memory for one clip of `size` (frames, height, width), without tiling."""
        frames, height, width = size
        call, clip = self.vae_graph_bytes[:2] if gradient else (self.vae_pixel_bytes, 0.0)
        bytes_per_pixel = call * min(frames, self.vae_frames_at_once) + clip * frames
        return bytes_per_pixel * height * width * max(2, DTYPES[self.config.vae_dtype].itemsize) / 2

    def tiles_by_size(self, size: tuple[int, int, int], *, gradient: bool = False) -> bool:
        """Return whether clips of a size are encoded and decoded in tiles by default, for their memory."""
        return self.config.enable_tiling is None and self.vae_bytes(size, gradient=gradient) > VAE_BUDGET

    def vae_mode(self, size: tuple[int, int, int], *, batch: int = 1, gradient: bool = False) -> tuple[bool, bool]:
        """Return whether the VAE slices, and whether it tiles, `batch` clips of a size in pixels."""
        sliced = sliced_for_memory(self, size) or batch * self.vae_bytes(size, gradient=gradient) > VAE_BUDGET
        tiled = self.tiles_by_size(size, gradient=gradient) or tiled_for_memory(self, size)
        return sliced if self.config.enable_slicing is None else self.config.enable_slicing, bool(
            self.config.enable_tiling
        ) or tiled

    def fit_vae(self, vae: Any, size: tuple[int, int, int], *, batch: int = 1, gradient: bool = False) -> None:
        """Turn the VAE's slicing and tiling on or off for the next `batch` clips of a size in pixels."""
        slicing, tiling = self.vae_mode(size, batch=batch, gradient=gradient)
        (vae.enable_slicing if slicing else vae.disable_slicing)()
        (vae.enable_tiling if tiling else vae.disable_tiling)()

    def encode_video(self, vae: nn.Module, video_BCTHW: Tensor) -> Tensor:
        """Encode videos `[B, 3, T, H, W]` (see `to_unit_range`) to VAE moments `[B, 2C, T', H', W']`."""
        batch, _, *size = video_BCTHW.shape
        with retry_vae_on_oom(self, vae, (size[0], size[1], size[2]), batch=batch):
            return encode_moments(vae, video_BCTHW)

    @property
    def encodes_first_frame(self) -> bool:
        """True if `encode_clip` also encodes the given frames by themselves, as the first one for "channels"."""
        return self.facts.first_frame == "channels"

    @property
    def clip_version(self) -> bool | str:
        """Name of the tensors that `encode_clip` makes, for cache keys: False for moments, True with the first frame's.

        With further media it is their names. A family that makes other tensors returns a separate text.
        """
        return " ".join(sorted(self.facts.media)) or self.encodes_first_frame

    def image_version(self, frames: int) -> bool | str:
        """Return the name of the tensors that `encode_image` makes for clips of `frames` frames; see `clip_version`."""
        return self.clip_version

    def encode_clip(
        self,
        encoders: ModelComponents,
        video_BCTHW: Tensor,
        generators: Sequence[torch.Generator] | None,
        media: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Encode clips for training, by name, batch first: `moments`, and for "channels" `first_frame_moments`.

        Each further medium is also encoded to moments, such as `control_video_moments`.

        Args:
            encoders: see `load_clip_encoders`.
            video_BCTHW: clips, as pixels of 8 bits or in [-1, 1]; see `to_unit_range`.
            generators: generators of the noise added to each clip's first frame, on the CPU, or None for no noise.
            media: the further media (`Facts.media`) by name, each in the shape of the clips, and cut like them.
        """
        videos = {MOMENTS: video_BCTHW}
        if self.encodes_first_frame:
            frame, noise = self.given_pixels(video_BCTHW), self.facts.first_frame_noise
            if noise is not None and generators is not None:
                frame = noised(to_unit_range(frame), noise, generators)
            videos[FIRST_FRAME] = frame
        videos |= {f"{name}_{MOMENTS}": video for name, video in (media or {}).items()}

        def encode() -> dict[str, Tensor]:
            return {name: self.encode_video(encoders["vae"], video) for name, video in videos.items()}

        frames, height, width = video_BCTHW.shape[2:]
        return tiled_alike(self, (frames, height, width), encode)

    def clip_shapes(self, network: nn.Module, size: Size) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the part that makes each tensor of `encode_clip`, in whose dtype it is, and its shape for one clip.

        Args:
            network: the transformer, which has the channels of latents.
            size: frames, height and width of the clip.
        """
        frames = {MOMENTS: size[0], **{f"{name}_{MOMENTS}": size[0] for name in self.facts.media}}
        if self.encodes_first_frame:
            frames[FIRST_FRAME] = self.given_pixels(torch.empty(1, 3, *size, device="meta")).shape[2]
        channels, latent_shape = 2 * self.latent_channels(network), self.facts.geometry.latent_shape
        return {name: ("vae", (channels, *latent_shape(number, *size[1:]))) for name, number in frames.items()}

    def encode_image(
        self, encoders: ModelComponents, image_CHW: Tensor, frames: int, last_CHW: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Encode an image of 8-bit pixels that clips of `frames` frames are sampled from; see `encode_clip`.

        With `Facts.last_frame`, `last_CHW` is the image that they end with.
        """
        return self.encode_clip(encoders, image_CHW[None, :, None], None)

    def given_pixels(self, video_BCTHW: Tensor) -> Tensor:
        """Return the pixels of clips that are encoded as their given frames, for "channels"; by default the first."""
        return video_BCTHW[:, :, :1]

    def latent_shape(self, moments: Tensor) -> tuple[int, ...]:
        """Return the shape `(C, T, H, W)` of the latents that moments describe."""
        return (moments.shape[1] // 2, *moments.shape[2:])

    def latents(self, moments: Tensor, noise: Tensor | None, vae_stats: VAEStats) -> Tensor:
        """Sample latents from moments and normalize them, in fp32: `[B, C, T, H, W]`.

        Args:
            moments: `[B, 2C, T, H, W]`.
            noise: standard normal `[B, C, T, H, W]`, or None to take the mean.
            vae_stats: normalization constants of the VAE, so that the VAE itself need not stay loaded.
        """
        mean, logvar = moments.float().chunk(2, dim=1)
        if noise is not None:
            mean = mean + torch.exp(0.5 * logvar.clamp(-30.0, 20.0)) * noise
        return vae_stats.normalize(mean)

    def padded(self, latents_BCTHW: Tensor) -> Tensor:
        """Return clean latents as the network denoises them: with frames in front, where its patches span several.

        The added frames are noised, predicted and sampled like all others; `decode` gets the clip's own, the last ones.
        """
        return latents_BCTHW

    def section(
        self, latents_BCTHW: Tensor, generators: Sequence[torch.Generator]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the clean latents that are noised and predicted in training, and the rest, as inputs of `predict`.

        Args:
            latents_BCTHW: latents of whole clips.
            generators: a generator for each clip's random numbers, on the CPU.

        Returns:
            The latents, by default all of them, `padded`; and tensors by name, batch first, for `VideoMeta.extra`.
        """
        return self.padded(latents_BCTHW), {}

    def condition(
        self, batch: Batch, x0: Tensor, frames: Sequence[Collection[int]], vae_stats: VAEStats
    ) -> tuple[VideoMeta, Tensor | None]:
        """Return given frames and further media as network inputs, and the latent frames that are noised and trained.

        The network gets the mean latents of a further medium, normalized and padded like those of the clip.

        Args:
            batch: the encoded clips.
            x0: what `section` returns for their clean latents, `[B, C, T, H, W]`.
            frames: indexes of the latent frames that each sample is given, among its clip's own, without those that
                `padded` adds: the first or none, unless `Facts.any_frame`.
            vae_stats: normalization constants of the VAE.

        Returns:
            The `meta` of `predict`; and `[B, T]`, 1 for frames that are noised and trained, 0 for those that are given
            clean, with noise level 0, and leave the loss. Or None if all are trained, as with frames on channels.
        """
        return given_frames.condition_batch(self, batch, x0, frames, vae_stats)

    def as_channels(self, latents_BCTHW: Tensor) -> Tensor:
        """Convert normalized, `padded` latents of given frames to the image-to-video pipeline's, for "channels"."""
        return latents_BCTHW

    @abstractmethod
    def vae_stats(self, vae: nn.Module) -> VAEStats:
        """Return the constants that turn the VAE's latents into the model's normalized latents."""

    @abstractmethod
    def predict(
        self, transformer: nn.Module, x_BCTHW: Tensor, t: Tensor, conditions: PromptEmbeds, meta: VideoMeta
    ) -> Tensor:
        """Return the network's output for noisy latents, same shape. Inputs are not changed; may be called repeatedly.

        Args:
            transformer: the network, possibly wrapped.
            x_BCTHW: noisy latents in normalized space, with the frames that `padded` adds.
            t: process time as the process draws it, `[B]`; "tokens" models also take one per latent frame, `[B, T]`.
            conditions: from `encode_text`, on the transformer's device.
            meta: frame rate and further inputs, from `condition`.
        """

    @torch.no_grad()
    def decode(self, vae: nn.Module, latents_BCTHW: Tensor, vae_stats: VAEStats) -> Tensor:
        """Decode normalized latents, without the frames that `padded` adds, to videos in [0, 1], `[B, 3, T, H, W]`."""
        return decode_videos(self, vae, latents_BCTHW, vae_stats)

    def decode_latents(self, vae: nn.Module, z_BCTHW: Tensor) -> Tensor:
        """Decode the VAE's own latents, on its device and in its dtype, to videos in [-1, 1]."""
        return vae.decode(z_BCTHW, return_dict=False)[0]  # type: ignore[operator]

    def recompute_decoder(self, vae: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which the VAE's decoder is computed again in backward, for `--checkpoint_vae`.

        A family sets it to None if that is not possible for its VAE, so that the option is refused.
        """
        return recompute_decoder(vae)

    # ---- sampling ----------------------------------------------------------------------------------------------

    def pipeline(
        self,
        transformer: nn.Module,
        vae: nn.Module,
        scheduler: Any,
        encoders: ModelComponents | None = None,
        *,
        image_to_video: bool = False,
    ) -> Any:
        """Build diffusers' own pipeline; without encoders it takes `pipeline_call`'s tensors instead of prompts.

        Raises:
            ValueError: image-to-video is asked for, and the checkpoint cannot start from an image.
        """
        cls = self.image_pipeline_class if image_to_video else self.pipeline_class
        if cls is None:
            raise InputError(self._no_image, "unsupported")
        texts = encoders.modules if encoders is not None else {}
        own = {self.facts.trained: unwrap(transformer), "vae": vae, "scheduler": scheduler}
        parts = {**texts, **self.companions.modules, **own}
        return common.build_pipeline(cls, parts, settings=self.configs.get(MODEL_INDEX, {}))

    def sample(
        self,
        pipeline: Any,
        conditions: PromptEmbeds,
        negative: PromptEmbeds,
        request: SampleRequest,
        generator: torch.Generator,
    ) -> Any:
        """Sample one clip, frames `[T, H, W, 3]` in [0, 1], by a pipeline that all clips of a validation share.

        Args:
            pipeline: from `pipeline`, on its device.
            conditions: conditioning of the prompt, with B = 1.
            negative: conditioning of the empty prompt, with B = 1.
            request: size, steps and given frames of the sample.
            generator: generator of the initial noise.
        """
        arguments = self.pipeline_call(conditions, negative, replace(request, image=request.first_image))
        with given_frames.further_frames(self, pipeline, request):
            return pipeline(**arguments, generator=generator, output_type="np").frames[0]

    def pipeline_call(self, conditions: PromptEmbeds, negative: PromptEmbeds, request: SampleRequest) -> dict[str, Any]:
        """Return keyword arguments of the pipeline's call for one prompt (B = 1), given as encoded conditions.

        Raises:
            ValueError: an image is missing that the checkpoint starts from, or given although it cannot.
        """
        if request.image is None and self.facts.needs_image:
            raise InputError(
                f"this image-to-video checkpoint of {self.name} requires an image to start from; set one for each "
                "validation prompt with validation_images or validation_videos",
                "required",
            )
        if request.image is not None and self.image_pipeline_class is None:
            raise InputError(self._no_image, "unsupported")
        call: dict[str, Any] = {
            **self.pipeline_arguments,
            **conditions.tensors,
            **{f"negative_{name}": tensor for name, tensor in negative.tensors.items()},
            "height": request.height,
            "width": request.width,
            "num_frames": request.num_frames,
            "num_inference_steps": request.num_inference_steps,
        }
        optional = {name: getattr(request, name) for name in ("guidance_scale", "guidance_scale_2", "image")}
        return call | {name: value for name, value in optional.items() if value is not None} | dict(request.extra)

    @property
    def _no_image(self) -> str:
        return (
            f"this checkpoint of {self.name} cannot start from an image; remove validation_images and "
            "validation_videos, or train an image-to-video checkpoint"
        )
