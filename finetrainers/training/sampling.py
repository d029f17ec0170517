"""Sample clips with diffusers' own pipeline, from encoded prompts and a model's components. No trainer is needed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.utils import load_image
from PIL import Image
from torch import Tensor, nn

from finetrainers.config.facts import Facts
from finetrainers.config.prompts import ValidationPrompt
from finetrainers.data.buckets.clip import Clip
from finetrainers.data.buckets.frames import num_available, playback_fps
from finetrainers.data.inspect.probe import probe
from finetrainers.data.reading.media import open_image
from finetrainers.data.video.decode import load_clip, read_frames
from finetrainers.models.spec import (
    ModelComponents,
    ModelSpec,
    PromptEmbeds,
    SampleRequest,
    in_vae_dtype,
    retry_vae_on_oom,
    to_unit_range,
)
from finetrainers.utils.alive import send_heartbeat
from finetrainers.utils.failures import InputError
from finetrainers.utils.seeding import derive_seed


@dataclass(frozen=True)
class EncodedPrompts:
    """Encoded prompts, so that sampling needs no text encoder; conditions are on the CPU, each with B = 1.

    Attributes:
        prompts: the prompts.
        conditions: of each prompt.
        images: first frame of each clip, or None where it is sampled from text alone.
        last_images: last frame of each clip, or None where it is free.
        negative: conditions of the negative prompt, by default the empty one, for guidance.
    """

    prompts: Sequence[ValidationPrompt]
    conditions: Sequence[PromptEmbeds]
    images: Sequence[Any]
    last_images: Sequence[Any]
    negative: PromptEmbeds

    def select(self, start: int, stop: int) -> EncodedPrompts:
        """Return the encoded prompts from `start` to before `stop`."""
        rows = slice(start, stop)
        return EncodedPrompts(
            self.prompts[rows], self.conditions[rows], self.images[rows], self.last_images[rows], self.negative
        )


@dataclass(frozen=True)
class SamplingSettings:
    """Settings of denoising.

    Attributes:
        frame_rate: frames per second of the samples.
        num_inference_steps: denoising steps.
        guidance_scale: guidance scale, or None for the pipeline's own.
        guidance_scale_2: that of the low-noise expert, or None for the same.
        extra: further arguments of the pipeline's call.
    """

    frame_rate: float
    num_inference_steps: int
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SamplingComponents:
    """Components that samples are drawn with.

    Attributes:
        transformer: the network, in eval mode.
        vae: decodes latents, on the device.
        scheduler: the checkpoint's scheduler.
        device: where to sample.
        offload: whether parts of the pipeline that are not in use wait in host memory.
    """

    transformer: nn.Module
    vae: nn.Module
    scheduler: Any
    device: torch.device
    offload: bool = False


@dataclass(frozen=True)
class PromptRequest:
    """A clip to sample.

    Attributes:
        conditions, negative: of the prompt and of the negative one, with B = 1.
        request: size, frame rate, denoising steps, guidance, first frame.
        noise: draws the initial noise, on the host.
    """

    conditions: PromptEmbeds
    negative: PromptEmbeds
    request: SampleRequest
    noise: torch.Generator


def encode_prompts(
    spec: ModelSpec,
    encoders: ModelComponents,
    prompts: Sequence[ValidationPrompt],
    dtype: torch.dtype | None,
    *,
    negative: str = "",
    failed: dict[int, Exception] | None = None,
) -> EncodedPrompts:
    """Encode prompts and the negative prompt, and read the prompts' images or the first frames of their videos.

    Args:
        spec, encoders: the model and its text encoders.
        prompts: to encode.
        dtype: of the conditions, or None to keep that of the encoder.
        negative: the negative prompt.
        failed: gets the errors of prompts that cannot be encoded, by index, whose conditions are empty then; or None
            to raise them.
    """
    conditions: list[PromptEmbeds] = []
    images: list[Any] = []
    last_images: list[Any] = []
    for index, prompt in enumerate(prompts):
        encoded, image, last = PromptEmbeds({}), None, None
        try:
            image = None if spec.facts.media else _first_frame(prompt)
            last = _last_frame(prompt, spec.facts)
            if spec.facts.text_sees_image:
                encoded = spec.encode_with_images(encoders, [prompt.prompt], [image])
            else:
                encoded = spec.encode_text(encoders, [prompt.prompt])
            encoded = encoded.to("cpu", dtype)
        except Exception as error:
            if failed is None:
                raise
            failed[index] = error
        conditions.append(encoded)
        images.append(image)
        last_images.append(last)
    negatives = spec.encode_text(encoders, [negative]).to("cpu", dtype)
    return EncodedPrompts(prompts, conditions, images, last_images, negatives)


def sample_seed(seed: int, prompt: str) -> int:
    """Return the seed of `torch.Generator` for a sample's initial noise, derived from its seed and prompt only.

    So a sample does not depend on which others are drawn, in which order, or in which process.
    """
    return derive_seed(seed, "sample", prompt)


def prompt_request(
    spec: ModelSpec,
    encoded: EncodedPrompts,
    index: int,
    *,
    size: tuple[int, int, int],
    settings: SamplingSettings,
    seed: int,
) -> PromptRequest:
    """Return the request for a sample of an encoded prompt.

    Args:
        spec: of the model.
        encoded: the prompts.
        index: index of the prompt.
        size: frames, height and width of the sample.
        settings: settings of denoising.
        seed: of its noise; see `sample_seed`.
    """
    prompt = encoded.prompts[index]
    videos = {name: prompt.videos[name if name in prompt.videos else ""] for name in spec.facts.media}
    media = {
        name: load_video_segment(Path(path), size, frame_rate=settings.frame_rate) for name, path in videos.items()
    }
    unsupported = prompt.prefix or (prompt.last_image and not spec.facts.last_frame)
    if unsupported and not spec.facts.any_frame:
        message = f"{spec.name} supports no conditioning frame but the first; remove last_image and video_prefix"
        raise InputError(message, "unsupported")
    frames, height, width = size
    request = SampleRequest(
        num_frames=frames, height=height, width=width, frame_rate=settings.frame_rate,
        num_inference_steps=settings.num_inference_steps, guidance_scale=settings.guidance_scale,
        guidance_scale_2=settings.guidance_scale_2,
        image=encoded.images[index], last_image=encoded.last_images[index],
        prefix=_prefix(spec, prompt, size, frame_rate=settings.frame_rate), media=media, extra=settings.extra,
    )  # fmt: skip
    noise = torch.Generator("cpu").manual_seed(sample_seed(seed, prompt.prompt))
    return PromptRequest(encoded.conditions[index], encoded.negative, request, noise)


def _first_frame(prompt: ValidationPrompt) -> Any:
    """Return the image that conditions a prompt's clip, or None."""
    if prompt.image is not None:
        return load_image(open_image(prompt.image))
    return None if prompt.video is None else _read_frame(Path(prompt.video), 0)


def _last_frame(prompt: ValidationPrompt, facts: Facts) -> Any:
    """Return the image that a prompt's clip ends with, or None: of its video, where the checkpoint always has one."""
    if prompt.last_image is not None:
        return load_image(open_image(prompt.last_image))
    return _read_frame(Path(prompt.video), -1) if facts.last_frame and prompt.video else None


def _read_frame(path: Path, index: int) -> Any:
    info = probe(path)
    frames = read_frames(path, [index % info.frames], height=info.height, width=info.width)
    return Image.fromarray(frames[0].numpy())


def _prefix(
    spec: ModelSpec, prompt: ValidationPrompt, size: tuple[int, int, int], *, frame_rate: float
) -> Tensor | None:
    """Return the last frames of a prompt's video, which its clip begins with, `[1, 3, F, H, W]` in [-1, 1]; or None."""
    if prompt.prefix is None:
        return None
    path, requested = prompt.prefix
    info = probe(path)
    fps = playback_fps(info.fps, frame_rate)
    available = num_available(info.frames, source_fps=info.fps, fps=fps)
    frames = spec.facts.geometry.prefix_frames(requested, available)
    return load_video_segment(path, (frames, *size[1:]), frame_rate=frame_rate, start=available - frames)


def load_video_segment(
    path: Path, size: tuple[int, int, int], *, frame_rate: float, start: int | None = None
) -> Tensor:
    """Return a segment of a video, cut as the clips of a dataset are, `[1, 3, T, H, W]` in [-1, 1].

    Args:
        path: of the video.
        size: frames, height and width that it is cut to.
        frame_rate: of the sample.
        start: its first frame, counted at that rate, or None for the beginning.
    """
    info = probe(path)
    clip = Clip(
        index=0, path=path, caption="", kind="video", bucket=size, fps=playback_fps(info.fps, frame_rate),
        num_frames=info.frames, source_fps=info.fps, width=info.width, height=info.height, start=start,
        is_variable=info.is_variable,
    )  # fmt: skip
    return to_unit_range(load_clip(clip, generator=torch.Generator("cpu"))[None])


@contextmanager
def after_denoising_steps(spec: ModelSpec, scheduler: Any, call: Callable[[], object]) -> Iterator[dict[str, Any]]:
    """Call a function after each denoising step within the block: by the pipeline, else by the scheduler.

    Yields the arguments of the pipeline's calls that this needs.
    """
    classes = (spec.pipeline_class, spec.image_pipeline_class or spec.pipeline_class)
    if all("callback_on_step_end" in inspect.signature(cls.__call__).parameters for cls in classes):
        yield {"callback_on_step_end": lambda *_: (call(), {})[1]}
        return
    step = scheduler.step

    def counted(*arguments: Any, **options: Any) -> Any:
        result = step(*arguments, **options)
        call()
        return result

    scheduler.step = counted
    try:
        yield {}
    finally:
        del scheduler.step


@torch.no_grad()
def sample_prompts(
    spec: ModelSpec, parts: SamplingComponents, requests: Iterable[PromptRequest]
) -> Iterator[np.ndarray]:
    """Yield the clip of each request, frames `[T, H, W, 3]` uint8."""
    needs_image = spec.facts.needs_image  # then no other pipeline samples it
    for image_to_video, group in groupby(requests, key=lambda p: needs_image or p.request.starts_from_image):
        with _pipeline(spec, parts, image_to_video=image_to_video) as pipeline:
            for prompt in group:
                request = prompt.request
                conditions, negative = prompt.conditions.to(parts.device), prompt.negative.to(parts.device)
                with retry_vae_on_oom(spec, parts.vae, (request.num_frames, request.height, request.width)):
                    frames = spec.sample(pipeline, conditions, negative, request, prompt.noise)
                send_heartbeat()
                yield (np.asarray(frames) * 255).round().clip(0, 255).astype(np.uint8)


@contextmanager
def _pipeline(spec: ModelSpec, parts: SamplingComponents, *, image_to_video: bool) -> Iterator[Any]:
    """Yield a pipeline on the device; leave the trained components there, and take away what only sampling needs."""
    offload = parts.offload and parts.device.type != "cpu"
    pipeline = spec.pipeline(parts.transformer, parts.vae, parts.scheduler, image_to_video=image_to_video)
    pipeline.set_progress_bar_config(disable=True)
    # Clips may be encoded by some of these on the device between samples.
    with spec.companions.on(None if offload else parts.device), in_vae_dtype(parts.vae):
        if not offload:
            yield pipeline
            return
        pipeline.enable_model_cpu_offload(device=parts.device)
        try:
            yield pipeline
        finally:  # hooks would pull the transformer off the device in the next training step
            pipeline.remove_all_hooks()
            parts.transformer.to(parts.device)
            parts.vae.to(parts.device)
