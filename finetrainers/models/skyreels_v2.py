"""SkyReels-V2: networks of Wan 2.1's design, text-to-video, image-to-video, and diffusion forcing.

Diffusion forcing trains each latent frame at a separate noise level, so that samples can be made of causal blocks, one
after the other, and continued beyond the network's length.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar, Literal

import diffusers
import torch
from diffusers import SkyReelsV2Transformer3DModel
from torch import Tensor, nn
from transformers import CLIPVisionModelWithProjection

from . import given_frames
from .batch import PromptEmbeds, SampleRequest, VideoMeta
from .compiling import unwrap
from .flops import Stream, Tokens
from .split.sequence import SequenceParallelPlan
from .wan import WanSpec

#: Frame rate whose embedding is the first of two; all others have the second one.
_FIRST_RATE = 16

# The network copies the rates' indexes from a tensor, since numbers would make the host wait for the device.
warnings.filterwarnings("ignore", "To copy construct from a tensor")


class SkyReelsV2Spec(WanSpec):
    """SkyReels-V2 as its pipelines run it; see `WanSpec`. "Tokens" are the frames of diffusion forcing."""

    parts: ClassVar = {
        **{n: c for n, c in WanSpec.parts.items() if n != "transformer_2"},
        "image_encoder": CLIPVisionModelWithProjection,
        "transformer": SkyReelsV2Transformer3DModel,
    }
    unquantized = (*WanSpec.unquantized, "^fps_projection")
    streams: ClassVar[Mapping[str, Stream]] = {"fps_projection": "clip", **WanSpec.streams}

    # ---- kinds of checkpoints --------------------------------------------------------------------------------------

    @property
    def is_forcing(self) -> bool:
        """Whether the network takes a noise level for each latent frame."""
        return self.facts.first_frame == "tokens"

    @property
    def noise_per(self) -> Literal["clip", "frame"]:  # type: ignore[override]
        """Unit that has a separate noise level in training."""
        return "frame" if self.is_forcing else "clip"

    @property
    def sampling_times(self) -> Callable[..., Tensor] | None:  # type: ignore[override]
        """Noise levels of a sample's steps, or None for diffusion forcing, whose frames have separate ones."""
        return None if self.is_forcing else super().sampling_times

    @property
    def token_plan(self) -> SequenceParallelPlan | None:  # type: ignore[override]
        """Places of tokens in the network, or None for diffusion forcing, which makes times of tokens by itself."""
        return None if self.is_forcing else replace(WanSpec.token_plan, inputs={})

    @property
    def pipeline_class(self) -> Any:  # type: ignore[override]
        """Pipeline of the checkpoint."""
        if self.is_forcing:
            return diffusers.SkyReelsV2DiffusionForcingPipeline
        is_image_to_video = self.facts.first_frame == "channels"
        return diffusers.SkyReelsV2ImageToVideoPipeline if is_image_to_video else diffusers.SkyReelsV2Pipeline

    @property
    def image_pipeline_class(self) -> Any:  # type: ignore[override]
        """Pipeline that starts from an image, or None for text-to-video checkpoints."""
        if self.is_forcing:
            return diffusers.SkyReelsV2DiffusionForcingImageToVideoPipeline
        return None if self.facts.first_frame == "none" else diffusers.SkyReelsV2ImageToVideoPipeline

    def load_scheduler(self) -> Any:
        """Load the checkpoint's scheduler, with the recommended shift where it states none (1), as published ones."""
        scheduler = super().load_scheduler()
        if scheduler.config.get("flow_shift") != 1.0:
            return scheduler
        return type(scheduler).from_config(scheduler.config, flow_shift=self.facts.defaults["flow_shift"])

    @property
    def own_arguments(self) -> Mapping[str, Any]:  # type: ignore[override]
        """Index of the model's frame rate, if the network has any: only pipelines of diffusion forcing give it."""
        has_rates = self.configs[self.facts.trained].get("inject_sample_info") and not self.is_forcing
        return {"fps": [1]} if has_rates else {}

    # ---- the network -----------------------------------------------------------------------------------------------

    def predict(
        self, transformer: nn.Module, x_BCTHW: Tensor, t: Tensor, conditions: PromptEmbeds, meta: VideoMeta
    ) -> Tensor:
        """Implement `ModelSpec.predict`; diffusion forcing takes `[B, T]`, or `[B]` for frames of one noise level."""
        network: Any = unwrap(transformer)
        if not network.config.inject_sample_info:
            return super().predict(transformer, x_BCTHW, t, conditions, meta)
        separate = self._rates_of_clips(network, meta) if self.is_forcing and len(x_BCTHW) > 1 else nullcontext()
        with separate:
            return super().predict(transformer, x_BCTHW, t, conditions, meta)

    def network_times(self, t: Tensor, x: Tensor) -> Tensor:
        """Return a time per latent frame, `[B, T]`, for diffusion forcing; else one per clip."""
        return t[:, None].expand(-1, x.shape[2]) if self.is_forcing and t.ndim == 1 else t

    def rate_arguments(self, network: Any, meta: VideoMeta) -> dict[str, Any]:
        """Return the index of the frame rate's embedding, if the network has one.

        For diffusion forcing it is the first clip's; see `_rates_of_clips` for the others.
        """
        arguments = {"enable_diffusion_forcing": True} if self.is_forcing else {}
        if not network.config.inject_sample_info:
            return arguments
        indexes = _rate_indexes(meta)
        return {**arguments, "fps": indexes[:1] if self.is_forcing else indexes}

    @contextmanager
    def _rates_of_clips(self, network: Any, meta: VideoMeta) -> Iterator[None]:
        """Let clips of a batch have separate frame rates within the block.

        diffusers' network adds the projection of one rate to the times of all clips, and fails for several. So it is
        added before, for each clip, and the network adds zeros.
        """
        projection, hooks = network.fps_projection, []

        def add_rates(_: nn.Module, args: Any, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            rates = projection(network.fps_embedding(_rate_indexes(meta)))
            hooks.append(projection.register_forward_pre_hook(lambda _, args: args[0][:0]))
            hooks.append(projection.register_forward_hook(lambda _, args, none: none.new_zeros(1, none.shape[1])))
            return (outputs[0], outputs[1] + rates[:, None], *outputs[2:])

        hooks.append(network.condition_embedder.register_forward_hook(add_rates))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def count_tokens(self, network: Any, call: Mapping[str, Any]) -> Tokens:
        """Count the noise levels of frames, not of tokens, for diffusion forcing."""
        tokens = super().count_tokens(network, call)
        return replace(tokens, times=call["hidden_states"].shape[2]) if self.is_forcing else tokens

    # ---- sampling --------------------------------------------------------------------------------------------------

    def pipeline_call(self, conditions: PromptEmbeds, negative: PromptEmbeds, request: SampleRequest) -> dict[str, Any]:
        """Add the frame rate and the length of a window for diffusion forcing."""
        call = super().pipeline_call(conditions, negative, request)
        if not self.is_forcing:
            return call
        window = {} if "overlap_history" in call else {"base_num_frames": request.num_frames}
        return {"prompt": None, "fps": round(request.frame_rate), **window, **call}

    def sample(
        self,
        pipeline: Any,
        conditions: PromptEmbeds,
        negative: PromptEmbeds,
        request: SampleRequest,
        generator: torch.Generator,
    ) -> Any:
        """Sample by the pipeline; diffusion forcing with given frames clean in their places, at time 0."""
        if not self.is_forcing:
            index = _rate_indexes(VideoMeta(torch.tensor([request.frame_rate]))).tolist()
            with _arguments_of_calls(pipeline.transformer, {"fps": index} if self.own_arguments else {}):
                return super().sample(pipeline, conditions, negative, request, generator)
        image = request.first_image if request.starts_from_image else None
        call = self.pipeline_call(conditions, negative, replace(request, image=image))
        network, seed = pipeline.transformer, generator.initial_seed()
        block = network.config.num_frame_per_block
        adds_noise, device = "addnoise_condition" in call, pipeline._execution_device
        devices = [device] if device.type == "cuda" else []
        # Noise on frames of an earlier window comes from the global generator.
        with _frames_in_place(self, pipeline, request), torch.random.fork_rng(devices, enabled=adds_noise):
            if adds_noise:
                torch.manual_seed(seed)
            try:
                return pipeline(**call, generator=generator, output_type="np").frames[0]
            finally:
                network.register_to_config(num_frame_per_block=block)  # the pipeline leaves the sample's


def _rate_indexes(meta: VideoMeta) -> Tensor:
    """Return the index of each clip's frame rate among the network's embeddings, `[B]`."""
    return (meta.fps.round() != _FIRST_RATE).long()


@contextmanager
def _frames_in_place(spec: SkyReelsV2Spec, pipeline: Any, request: SampleRequest) -> Iterator[None]:
    """Give a diffusion-forcing pipeline the frames of a request within the block: clean, at time 0, and not denoised.

    Its own calls continue no video, end with no image, and denoise an image again if causal blocks have several frames.
    """
    if request.first_image is None and request.last_image is None:
        yield
        return
    latents, mask = given_frames.encode_conditioning_frames(spec, pipeline, request, None)
    is_given = mask.flatten().tolist()
    stock_prepare, stock_matrix = pipeline.prepare_latents, pipeline.generate_timestep_matrix
    window = slice(0, 0)

    def prepare_latents(*args: Any, **options: Any) -> tuple[Any, ...]:
        nonlocal window
        noise, frames, history, ready = stock_prepare(*args, **options)
        end = frames + window.stop - (options["overlap_history_latent_frames"] if window.stop else 0)
        window = slice(end - frames, end)
        return torch.where(mask[:, :, window], latents[:, :, window], noise), frames, history, ready

    def generate_timestep_matrix(
        frames: int, steps: Tensor, base: int, ar_step: int, ready: int, block: int
    ) -> tuple[Any, ...]:
        first = (*is_given[window], False).index(False)
        times, indexes, updates, intervals = stock_matrix(frames, steps, base, ar_step, max(ready, first), block)
        clean = mask[0, 0, window, 0, 0].to(updates.device)
        return times.masked_fill(clean.to(times.device), 0), indexes, updates & ~clean, intervals

    pipeline.prepare_latents, pipeline.generate_timestep_matrix = prepare_latents, generate_timestep_matrix
    try:
        yield
    finally:
        del pipeline.prepare_latents, pipeline.generate_timestep_matrix


@contextmanager
def _arguments_of_calls(network: nn.Module, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Call the network with further arguments within the block."""
    hook = network.register_forward_pre_hook(lambda _, args, kwargs: (args, {**kwargs, **arguments}), with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
