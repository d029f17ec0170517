"""The seam between training methods and networks: what a model file must offer.

Everything above `predict` sees latents `[B, C, T, H, W]` in the model's normalized latent space and one prediction
of the same shape; token packing, rotary positions, guidance and padding live inside the model files.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from diffusers import ModelMixin
from torch import Tensor, nn

from finetrainers.config.attention import AUTO
from finetrainers.config.errors import Problem
from finetrainers.config.facts import Activations, Configs, Facts, Read, is_network
from finetrainers.config.parallel import SpMode
from finetrainers.config.sections import ModelSection
from finetrainers.diffusion.process import FlowMatching, Process
from finetrainers.diffusion.schedule import sampling_times
from finetrainers.utils.hashed_files import Written

from . import common, given_frames
from .batch import Batch, Conditions, Parts, SampleRequest, VAEStats, VideoMeta, even_bounds, noised, pixel_size
from .common import DTYPES, fix_input_dtype, input_dtype
from .compiling import compile_blocks, unwrap
from .decoding import decode_gradient, decoded
from .files import saving
from .files.files import MODEL_INDEX, part_folder, read_configs, single_file
from .files.lora_formats import Lora
from .files.saving import remove_full, weight_files
from .files.weights import are_mapped, network_problems
from .flops import Attends, FlopMeter, Flops, Stream, Tokens, flops_of
from .pixels import FIRST_FRAME, MOMENTS, moments_of, to_unit_range
from .sizes import frozen_bytes, vae_working_bytes
from .split.attention import Attend, check_attention, check_attention_choice, set_processors
from .split.ring import OPERATOR_BODIES
from .split.sequence import TokenPlan, check_split, share_clips
from .tiling import Size, fitted_vae, sliced_for_memory, tiled_alike, tiled_for_memory

__all__ = [
    "DTYPES", "FIRST_FRAME", "MOMENTS", "OPERATOR_BODIES", "Batch", "Conditions", "FlopMeter", "ModelSpec", "Parts", "SampleRequest", "VAEStats", "VideoMeta",
    "are_mapped", "check_split", "decode_gradient", "even_bounds", "fitted_vae", "fix_input_dtype", "frozen_bytes", "input_dtype", "pixel_size", "remove_full", "tiled_for_memory",
    "to_unit_range", "unwrap", "vae_working_bytes", "weight_files",
]  # fmt: skip

#: Bytes above which the VAE works on one clip at a time, and above which on tiles of a clip. It is what an 80 GB GPU has left
#: next to the largest model's LoRA training with its text encoders. It does not depend on the GPU, since tiling changes latents.
VAE_BUDGET = 24 * 2**30


class ModelSpec(ABC):
    """How one family's network is loaded, conditioned, called, decoded and saved. Holds no training state.

    Loading happens in three phases (text encoders, VAE, transformer), so that they never have to share memory.

    Attributes:
        config: names the checkpoint.
        name: of the family.
        facts: what the checkpoint's configs tell.
        configs: the configs themselves, by part.
    """

    #: Class of each tokenizer and network, by the part of a repository that holds it, in the order in which they are loaded.
    parts: ClassVar[Mapping[str, Any]] = {}
    #: The diffusers pipeline that users load the results with, and the one that also takes a first frame; None: there is none.
    pipeline_class: Any = None
    image_pipeline_class: Any = None
    #: Names of the transformer's repeated block lists: for checkpointing, wrapping, compiling, and the memory estimate.
    blocks: tuple[str, ...] = ("transformer_blocks",)
    #: Class of the processor that runs the attention of blocks by a chosen backend (`--attn_backend`); None: the family has none.
    attention_processor: type[Any] | None = None
    #: Where the network's tensors have tokens that several processes can share (`--sp_size`); None: the family does not tell.
    token_plan: TokenPlan | None = None
    #: Whether the transformer sees texts of the prompt's length, not of one length.
    text_varies: bool = False
    #: Tokens that a text encoder reads, by part, and whether it keeps all layers' states; default: those of `text_shapes`, no.
    text_calls: ClassVar[Mapping[str, tuple[int, bool]]] = {}
    #: Memory of activations, by `training_type`, and of LoRA without autocast; with `-bf16` for trained weights that are 16-bit when
    #: they compute (FSDP2, stochastic rounding), where that differs. The defaults lie between those of the families here.
    activations: ClassVar[Mapping[str, Activations]] = {
        "lora": Activations(kept=(22.0,), outside=10.0, checkpointed=1.0, forward=18.0, backward=36.0),
        "lora without autocast": Activations(kept=(18.0,), outside=8.5, checkpointed=1.0, forward=14.0, backward=30.0),
        "full-finetune": Activations(kept=(36.0,), outside=15.0, checkpointed=1.0, forward=18.0, backward=44.0),
    }
    #: Linear layers that keep their dtype when frozen weights are quantized: regular expressions, searched in module names.
    unquantized: tuple[str, ...] = (
        "patch_embed", "pos_embed", "x_embedder", "context_embedder", "time_embed", "^proj_in$", "^proj_out$", "norm",
    )  # fmt: skip
    #: Which tokens go through each layer, by the first expression found in its name, and what attends to what; see `flops`.
    streams: ClassVar[Mapping[str, Stream]] = {}
    attentions: ClassVar[Sequence[Attends]] = ()
    #: What has a noise level of its own in training: a clip, or each of its latent frames, for networks with a time per frame.
    noise_per: Literal["clip", "frame"] = "clip"
    #: Bytes that the VAE takes at its peak for each pixel, in bf16, and of how many frames at a time. They were counted on its
    #: operations without weights; what kernels take besides (cuDNN's workspace) is left out. 0: not known, never tiled by itself.
    vae_pixel_bytes: float = 0.0
    vae_frames_at_once: float = math.inf
    vae_tile: tuple[int, int] = (512, 512)  # height and width in pixels
    #: For a decode and its backward: a recomputed decoder's per frame at a time and per frame of the clip; and without that.
    vae_graph_bytes: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def __init__(self, config: ModelSection, *, name: str, read: Read) -> None:
        self.config = config
        self.name = name
        self._read = read
        self.vae_one_by_one, self.vae_too_large = set[Size](), set[Size]()  # after an OOM; see `fitted_vae`

    # ---- description -------------------------------------------------------------------------------------------

    @cached_property
    def configs(self) -> Configs:
        """The checkpoint's configs by part; those of diffusers' networks are fetched where they are not on this disk."""
        found = read_configs(self.config, ("scheduler", *self.parts))
        for part, cls in reversed([*self.parts.items()]):
            if part not in found and part in self._read(found).parts and issubclass(cls, ModelMixin):
                found[part] = common.load_part(cls.load_config, self.config, part)
        return found

    @cached_property
    def facts(self) -> Facts:
        """What they tell.

        Raises:
            ValueError: the checkpoint is of a kind that the family does not train.
        """
        return self._read(self.configs).of_expert(self.config.expert)

    def process(self, scheduler: Any) -> Process:
        """The noise process that the checkpoint was trained with; default: flow matching.

        The shift of noise levels is a training option, not part of the process.
        """
        return FlowMatching()

    def sampling_times(self, scheduler: Any, steps: int, *, num_tokens: int, shift: float | None = None) -> Tensor:
        """Process times of `steps` denoising steps; see `diffusion.schedule.sampling_times`."""
        return sampling_times(scheduler, steps, num_tokens=num_tokens, shift=shift)

    def width(self, network: Any) -> int:
        """Numbers of one token inside the transformer's blocks, for the memory estimate."""
        return network.config.num_attention_heads * network.config.attention_head_dim

    def block_modules(self, network: nn.Module) -> list[nn.Module]:
        """The transformer's repeated blocks, likewise."""
        return [block for name in self.blocks for block in getattr(network, name)]

    def flops(self, network: nn.Module) -> Flops | None:
        """The formula of the operations of a network's calls; None: the family does not tell."""
        if not self.attentions:
            return None
        return flops_of(
            network, streams=self.streams, attentions=self.attentions, blocks=self.blocks, width=self.width(network)
        )

    def tokens_of(self, network: Any, call: Mapping[str, Any]) -> Tokens:
        """The tokens of a call of the network, by the names of its arguments."""
        latents, geometry = call["hidden_states"], self.facts.geometry
        clips, cell = len(latents), geometry.patch_t * geometry.patch**2
        video = latents.numel() // (clips * network.config.in_channels * cell)
        return Tokens(clips, video, call["encoder_hidden_states"].shape[1], call["timestep"].numel() // clips)

    def examine(self) -> tuple[list[Problem], list[str]]:
        """Compare the networks' weight files with their classes, as far as they are on this disk, by headers: problems, warnings."""
        return network_problems(self.config, {n: self.parts[n] for n in self.facts.parts if is_network(n)})

    def files_of(self, part: str) -> list[Path]:
        """The files that a part would be loaded from, as far as they are on this disk."""
        folder, single = part_folder(self.config, part), single_file(self.config, part)
        return [*(sorted(folder.iterdir()) if folder else ()), *([single] if single else ())]

    # ---- loading -----------------------------------------------------------------------------------------------

    def load_text_encoders(self) -> Parts:
        """Tokenizers and text encoders, on the CPU, in eval mode, in the configured dtypes."""
        return common.load_frozen(self.parts, self.config, self.facts.text_parts)

    def load_vae(self) -> nn.Module:
        """The VAE, on the CPU, in eval mode, in `vae_dtype`, with slicing and tiling as asked for."""
        vae = common.load_frozen(self.parts, self.config, ["vae"])["vae"]
        if self.config.enable_slicing:
            vae.enable_slicing()
        if self.config.enable_tiling:
            vae.enable_tiling()
        return vae

    def load_clip_encoders(self) -> Parts:
        """What `encode_clip` needs, likewise: the VAE, and the family's other `clip_parts`."""
        others = common.load_frozen(self.parts, self.config, [p for p in self.facts.clip_parts if p != "vae"])
        return Parts({"vae": self.load_vae(), **others.modules})

    def load_transformer(self, dtype: torch.dtype, *, folder: Path | None = None) -> nn.Module:
        """The network that is trained, on the CPU, in `dtype`.

        Args:
            dtype: of its weights.
            folder: where it is read from instead of the checkpoint, such as the results of a run.

        Raises:
            ValueError: the checkpoint is of a kind that the family does not train.
        """
        part = self.facts.trained
        network = common.load_network(self.parts[part], self.config, part, {"torch_dtype": dtype}, folder=folder)
        return self._with_attention(network)

    def load_scheduler(self) -> Any:
        """The checkpoint's own scheduler."""
        return common.load_scheduler(self.config)

    def transformer_on_meta(self) -> nn.Module:
        """The network that is trained without weights (meta device), for dry runs."""
        return self._with_attention(common.on_meta(self.parts[self.facts.trained], self.config, self.facts.trained))

    def _with_attention(self, network: nn.Module) -> nn.Module:
        """The network, with the configured attention backend in its blocks."""
        if self.config.attn_backend != AUTO:
            assert self.attention_processor is not None, "`check_attention` refuses it"
            set_processors(self.block_modules(network), self.attention_processor(Attend(self.config.attn_backend)))
        return network

    def compile_blocks(self, network: nn.Module, *, num_sizes: int = 1) -> None:
        """See `compile_blocks`."""
        compile_blocks(self.block_modules(network), num_sizes=num_sizes, text_varies=self.text_varies)

    def check_attention_choice(self) -> None:
        """Refuse an attention backend that the family has no processor for."""
        check_attention_choice(self)

    def check_attention(self, device: torch.device, dtype: torch.dtype) -> None:
        """Refuse an attention backend that the family has no processor for, or that does not work; see `check_backend`."""
        check_attention(self, device, dtype)

    def split_tokens(self, network: nn.Module, group: Any, mode: SpMode = "ulysses") -> None:
        """Have the processes of a group (None: this one alone) share each call of the network; in place, its LoRA attached."""
        share_clips(self, network, group, mode)

    @cached_property
    def companions(self) -> Parts:
        """Frozen parts that only sampling needs: another expert, say. Loaded for the first sample, and on the CPU between samples."""
        return common.load_frozen(self.parts, self.config, self.facts.companions)

    def network_at(self, quantile: float, trained: nn.Module) -> nn.Module:
        """The network that denoises at a noise-level quantile when clips are sampled: the trained one, or the other expert."""
        return trained if self.facts.trains_at(quantile) else self.companions[self.facts.companions[0]]

    # ---- conditioning and latents ------------------------------------------------------------------------------

    @abstractmethod
    def encode_text(self, encoders: Parts, prompts: Sequence[str]) -> Conditions:
        """Text conditioning of the prompts, equal to what the family's pipeline computes. Padded, batch first."""

    def encode_with_images(self, encoders: Parts, prompts: Sequence[str], images: Sequence[Any]) -> Conditions:
        """`encode_text` where `Facts.text_sees_image`: of each prompt with PIL's image, or pixels `[3, H, W]` uint8."""
        raise NotImplementedError(f"{self.name}'s text encoders see no images")

    def text_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each tensor of `encode_text` for one prompt, without the batch; those named `..._mask` are bool.

        Raises:
            NotImplementedError: the family does not tell, so that its memory cannot be counted.
        """
        raise NotImplementedError(f"{self.name} has no `text_shapes`, which counting its memory needs")

    def empty_inputs(self, batch_size: int) -> tuple[Conditions, VideoMeta]:
        """Conditions and further inputs of `predict` with the right shapes and no values, to count memory with."""

        def empty(name: str, shape: tuple[int, ...]) -> Tensor:
            return torch.empty(batch_size, *shape, dtype=torch.bool if name.endswith("_mask") else torch.bfloat16)

        shapes = self.text_shapes()
        masks = [shape[0] for name, shape in shapes.items() if name.endswith("_mask")]
        conditions = Conditions({n: empty(n, s) for n, s in shapes.items()}, tuple(masks[:1] * batch_size) or None)
        return conditions, VideoMeta(fps=torch.full((batch_size,), 24.0))

    def given_text(self, embedding: Tensor, mask: Tensor) -> Conditions:
        """One prompt's conditioning from tensors of DanceGRPO's preprocessing, as a batch of one; ValueError: no format."""
        raise ValueError(f"{self.name} cannot read prompts that were encoded elsewhere; give them as .txt or .jsonl")

    def to_given_text(self, row: Conditions) -> tuple[Tensor, Tensor]:
        """The inverse: embedding and mask of one prompt, as `given_text` reads them; ValueError: no format."""
        raise ValueError(f"{self.name} has no format of encoded prompts that other tools read")

    def vae_bytes(self, size: tuple[int, int, int], *, gradient: bool = False) -> float:
        """About what the VAE takes at its peak for one clip of so many frames, height and width, without tiling."""
        frames, height, width = size
        call, clip = self.vae_graph_bytes[:2] if gradient else (self.vae_pixel_bytes, 0.0)
        of_pixel = call * min(frames, self.vae_frames_at_once) + clip * frames
        return of_pixel * height * width * max(2, DTYPES[self.config.vae_dtype].itemsize) / 2

    def tiles_by_size(self, size: tuple[int, int, int], *, gradient: bool = False) -> bool:
        """Whether clips of a size are encoded and decoded, or decoded with a gradient, in tiles although nobody asked for it."""
        return self.config.enable_tiling is None and self.vae_bytes(size, gradient=gradient) > VAE_BUDGET

    def vae_mode(self, size: tuple[int, int, int], *, batch: int = 1, gradient: bool = False) -> tuple[bool, bool]:
        """Whether the VAE slices and tiles `batch` clips of a size in pixels."""
        sliced = sliced_for_memory(self, size) or batch * self.vae_bytes(size, gradient=gradient) > VAE_BUDGET
        tiled = self.tiles_by_size(size, gradient=gradient) or tiled_for_memory(self, size)
        return sliced if self.config.enable_slicing is None else self.config.enable_slicing, bool(
            self.config.enable_tiling
        ) or tiled

    def fit_vae(self, vae: Any, size: tuple[int, int, int], *, batch: int = 1, gradient: bool = False) -> None:
        """Turn the VAE's slicing and tiling on or off, as it encodes or decodes `batch` clips of a size in pixels next."""
        slicing, tiling = self.vae_mode(size, batch=batch, gradient=gradient)
        (vae.enable_slicing if slicing else vae.disable_slicing)()
        (vae.enable_tiling if tiling else vae.disable_tiling)()

    def encode_video(self, vae: nn.Module, video_BCTHW: Tensor) -> Tensor:
        """VAE moments `[B, 2C, T', H', W']` of videos `[B, 3, T, H, W]`; see `to_unit_range`."""
        batch, _, *size = video_BCTHW.shape
        with fitted_vae(self, vae, (size[0], size[1], size[2]), batch=batch):
            return moments_of(vae, video_BCTHW)

    @property
    def clip_version(self) -> bool | str:
        """What `encode_clip` gives, as part of the cache's keys: False for moments alone, True with the first frame's.

        With further media it is their names. A family that makes other tensors names that by a text of its own.
        """
        return " ".join(sorted(self.facts.media)) or self.facts.first_frame == "channels"

    def encode_clip(
        self,
        encoders: Parts,
        video_BCTHW: Tensor,
        generators: Sequence[torch.Generator] | None,
        media: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """All that training needs of clips, by name, batch first: `moments`, and for "channels" `first_frame_moments`.

        Of each further medium it is the moments, too: `control_video_moments`, say.

        Args:
            encoders: see `load_clip_encoders`.
            video_BCTHW: clips, as pixels of 8 bits or in [-1, 1]; see `to_unit_range`.
            generators: of the noise that is added to each clip's given first frame, on the CPU; None: none is.
            media: the further media (`Facts.media`) by name, each in the shape of the clips, and cut like them.
        """
        videos = {MOMENTS: video_BCTHW}
        if self.facts.first_frame == "channels":
            frame, noise = video_BCTHW[:, :, :1], self.facts.first_frame_noise
            if noise is not None and generators is not None:
                frame = noised(to_unit_range(frame), noise, generators)
            videos[FIRST_FRAME] = frame
        videos |= {f"{name}_{MOMENTS}": one for name, one in (media or {}).items()}

        def encode() -> dict[str, Tensor]:
            return {name: self.encode_video(encoders["vae"], one) for name, one in videos.items()}

        frames, height, width = video_BCTHW.shape[2:]
        return tiled_alike(self, (frames, height, width), encode)

    def latent_shape(self, moments: Tensor) -> tuple[int, ...]:
        """`(C, T, H, W)` of the latents that moments are of."""
        return (moments.shape[1] // 2, *moments.shape[2:])

    def latents(self, moments: Tensor, noise: Tensor | None, vae_stats: VAEStats) -> Tensor:
        """Sample latents from moments and normalize them, in fp32: `[B, C, T, H, W]`.

        Args:
            moments: `[B, 2C, T, H, W]`.
            noise: standard normal `[B, C, T, H, W]`; None takes the mean.
            vae_stats: normalization constants of the VAE, so that the VAE itself need not stay loaded.
        """
        mean, logvar = moments.float().chunk(2, dim=1)
        if noise is not None:
            mean = mean + torch.exp(0.5 * logvar.clamp(-30.0, 20.0)) * noise
        return vae_stats.normalize(mean)

    def padded(self, latents_BCTHW: Tensor) -> Tensor:
        """Clean latents of clips as the network denoises them: with frames in front, where its patches span several.

        The added frames are noised, predicted and sampled like all others; `decode` is given the clip's own, the last ones.
        """
        return latents_BCTHW

    def section(
        self, latents_BCTHW: Tensor, generators: Sequence[torch.Generator]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The part of clean latents that is noised and predicted in training, and the rest, as further inputs of `predict`.

        Args:
            latents_BCTHW: of whole clips.
            generators: of each clip, on the CPU, for what is drawn at random.

        Returns:
            By default all latents, `padded`. And tensors by name, batch first, which `predict` finds in `VideoMeta.extra`.
        """
        return self.padded(latents_BCTHW), {}

    def condition(
        self, batch: Batch, x0: Tensor, given: Sequence[Collection[int]], vae_stats: VAEStats
    ) -> tuple[VideoMeta, Tensor | None]:
        """How given frames and further media reach the network, and which latent frames are noised and trained.

        Of a further medium, the network gets the mean latents, normalized and padded like those of the clip.

        Args:
            batch: what was encoded of the clips.
            x0: what `section` gives of its clean latents, `[B, C, T, H, W]`.
            given: indexes of the latent frames that each sample is given, of its clip's own, without those that `padded` adds: the
                first or none, unless `Facts.any_frame`.
            vae_stats: normalization constants of the VAE.

        Returns:
            What `predict` is told; and `[B, T]`, 1 for frames that are noised and trained, 0 for those that are given clean,
            with noise level 0, and leave the loss. None: all are trained, as they always are where frames are given on channels.
        """
        return given_frames.conditioned(self, batch, x0, given, vae_stats)

    def as_channels(self, latents_BCTHW: Tensor) -> Tensor:
        """Normalized and `padded` latents of given frames as the image-to-video pipeline has them on channels, for "channels"."""
        return latents_BCTHW

    @abstractmethod
    def vae_stats(self, vae: nn.Module) -> VAEStats:
        """The constants that turn the VAE's latents into the model's normalized latents."""

    @abstractmethod
    def predict(
        self,
        transformer: nn.Module,
        x_BCTHW: Tensor,
        t: Tensor,
        conditions: Conditions,
        meta: VideoMeta,
    ) -> Tensor:
        """The network's output for noisy latents, same shape. Inputs are not changed; may be called repeatedly.

        Args:
            transformer: the network, possibly wrapped.
            x_BCTHW: noisy latents in normalized space, with the frames that `padded` adds.
            t: process time as the process draws it, `[B]`; "tokens" models also take one per latent frame, `[B, T]`.
            conditions: from `encode_text`, on the transformer's device.
            meta: frame rate and further inputs, from `condition`.
        """

    @torch.no_grad()
    def decode(self, vae: nn.Module, latents_BCTHW: Tensor, vae_stats: VAEStats) -> Tensor:
        """Videos in [0, 1], `[B, 3, T, H, W]`, of normalized latents without the frames that `padded` adds."""
        return decoded(self, vae, latents_BCTHW, vae_stats)

    def decode_latents(self, vae: nn.Module, z_BCTHW: Tensor) -> Tensor:
        """Videos in [-1, 1] of the VAE's own latents, on its device and in its dtype."""
        return vae.decode(z_BCTHW, return_dict=False)[0]  # type: ignore[operator]

    # ---- sampling ----------------------------------------------------------------------------------------------

    def pipeline(
        self,
        transformer: nn.Module,
        vae: nn.Module,
        scheduler: Any,
        encoders: Parts | None = None,
        *,
        image_to_video: bool = False,
    ) -> Any:
        """diffusers' own pipeline around the given parts; without encoders it takes `pipeline_call`'s tensors instead of texts.

        Raises:
            ValueError: image-to-video is asked for, and the checkpoint cannot start from an image.
        """
        cls = self.image_pipeline_class if image_to_video else self.pipeline_class
        if cls is None:
            raise ValueError(self._no_image)
        texts = encoders.modules if encoders is not None else {}
        own = {self.facts.trained: unwrap(transformer), "vae": vae, "scheduler": scheduler}
        parts = {**texts, **self.companions.modules, **own}
        return common.build_pipeline(cls, parts, settings=self.configs.get(MODEL_INDEX, {}))

    def sample(
        self,
        pipeline: Any,
        conditions: Conditions,
        negative: Conditions,
        request: SampleRequest,
        generator: torch.Generator,
    ) -> Any:
        """Frames `[T, H, W, 3]` in [0, 1] of one clip, by a pipeline that all clips of a validation share.

        Args:
            pipeline: from `pipeline`, on its device.
            conditions: of the prompt, with B = 1.
            negative: of the empty prompt, likewise.
            request: what is sampled, and how.
            generator: of the initial noise.
        """
        call = self.pipeline_call(conditions, negative, replace(request, image=request.first_image))
        with given_frames.further_frames(self, pipeline, request):
            return pipeline(**call, generator=generator, output_type="np").frames[0]

    def pipeline_call(self, conditions: Conditions, negative: Conditions, request: SampleRequest) -> dict[str, Any]:
        """Keyword arguments of the pipeline's call for one prompt (B = 1) given as encoded conditions.

        Raises:
            ValueError: an image is missing that the checkpoint starts from, or given although it cannot.
        """
        if request.image is None and self.facts.needs_image:
            raise ValueError(
                f"this image-to-video checkpoint of {self.name} needs an image to start from; give each validation prompt one "
                "with validation_images or validation_videos"
            )
        if request.image is not None and self.image_pipeline_class is None:
            raise ValueError(self._no_image)
        call: dict[str, Any] = {
            **conditions.tensors,
            **{f"negative_{name}": tensor for name, tensor in negative.tensors.items()},
            "height": request.height,
            "width": request.width,
            "num_frames": request.num_frames,
            "num_inference_steps": request.num_inference_steps,
        }
        optional = {"guidance_scale": request.guidance_scale, "image": request.image}
        return call | {name: value for name, value in optional.items() if value is not None} | dict(request.extra)

    @property
    def _no_image(self) -> str:
        return (
            f"this checkpoint of {self.name} cannot start from an image; remove validation_images and validation_videos, or train "
            "an image-to-video checkpoint"
        )

    # ---- saving ------------------------------------------------------------------------------------------------

    def save_lora(
        self, directory: Path, state_dict: Mapping[str, Tensor], adapter_metadata: dict[str, Any]
    ) -> dict[Path, Written]:
        """Write `pytorch_lora_weights.safetensors`, with alpha and rank, as `load_lora_weights` reads them; what was written."""
        return saving.save_lora(directory, state_dict, adapter_metadata, part=self.lora_prefix)

    def lora_of(self, path: Path) -> Lora:
        """A LoRA file in a format of `lora_names`, or another that the family's pipeline reads; safetensors only.

        Raises:
            ValueError: the file holds no LoRA of this network, or one that is not made of numbers.
        """
        network = self.transformer_on_meta
        return saving.read_lora(self.pipeline_class, path, network, part=self.lora_prefix, family=self.name)

    def read_lora(self, path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Its adapter weights by PEFT's names, and PEFT's settings; without these, alpha is the rank."""
        lora = self.lora_of(path)
        return lora.state(), dict(lora.settings)

    def load_lora(self, transformer: nn.Module, path: Path) -> None:
        """Load a LoRA file as the adapter `default`; see `read_lora`."""
        state, metadata = self.read_lora(path)
        transformer.load_lora_adapter(state, adapter_name="default", prefix=None, metadata=metadata or None)  # type: ignore[operator]

    def merge_lora(self, transformer: nn.Module, path: Path) -> None:
        """Add a LoRA file to the weights for good; see `read_lora`."""
        self.load_lora(transformer, path)
        transformer.fuse_lora()  # type: ignore[operator]
        transformer.unload_lora()  # type: ignore[operator]

    @property
    def lora_prefix(self) -> str:
        """What the trained part is called in LoRA files: the pipeline's loader, if it has one, knows one name for both experts."""
        return getattr(self.pipeline_class, "transformer_name", self.facts.trained)

    @property
    def _lora_options(self) -> dict[str, bool] | None:
        """Options of the pipeline's own loader of LoRA files; None: it has none, and the network itself reads them."""
        if not hasattr(self.pipeline_class, "transformer_name"):
            return None
        part = self.facts.trained
        return {} if part == self.lora_prefix else {f"load_into_{part}": True}

    def load_into(self, pipeline: Any, path: Path) -> None:
        """Load a LoRA file of ours into a pipeline, as its users do."""
        part, options, folder = self.facts.trained, self._lora_options, str(path.parent)
        if options is not None:
            pipeline.load_lora_weights(folder, weight_name=path.name, **options)
        else:
            getattr(pipeline, part).load_lora_adapter(folder, prefix=part, weight_name=path.name)

    def load_call(self, location: str) -> str:
        """The call with which users load a LoRA of ours into their pipeline, for the model card."""
        part, options, place = self.facts.trained, self._lora_options, json.dumps(location)
        if options is not None:
            return f"load_lora_weights({place}{''.join(f', {name}={value}' for name, value in options.items())})"
        return f'{part}.load_lora_adapter({place}, prefix="{part}", weight_name="{saving.LORA_FILE}")'

    def save_full(
        self,
        directory: Path,
        transformer: nn.Module,
        state_dict: Mapping[str, Tensor],
        files: saving.StateDictSplit | None = None,
    ) -> dict[Path, Written]:
        """`saving.save_full` of the network that is trained, in a folder of its part's name."""
        return saving.save_full(directory / self.facts.trained, transformer, state_dict, files=files)
