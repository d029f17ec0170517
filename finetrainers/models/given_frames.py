"""Given frames as inputs of a network, in training and samples: clean in their places, or on channels next to noise."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from finetrainers.utils.device import to_device

from .batch import Batch, SampleRequest, VAEStats, VideoMeta
from .pixels import FIRST_FRAME, MOMENTS


def condition_batch(
    spec: Any, batch: Batch, x0: Tensor, frames: Sequence[Collection[int]], vae_stats: VAEStats
) -> tuple[VideoMeta, Tensor | None]:
    """Implement `ModelSpec.condition`."""
    kind, meta = spec.facts.first_frame, batch.meta
    for name in spec.facts.media:
        latents = spec.padded(spec.latents(batch.clip[f"{name}_{MOMENTS}"], None, vae_stats))
        meta = replace(meta, extra={**meta.extra, name: latents})
    if kind == "channels":
        return replace(meta, extra={**meta.extra, **_on_channels(spec, batch, frames, vae_stats)}), None
    if kind == "tokens" and any(frames) and x0.shape[2] > 1:  # an image has nothing left to predict
        trained = torch.ones(len(batch), x0.shape[2])  # on the host, since a list as an index waits for the device
        for row, indexes in enumerate(frames):
            trained[row, list(indexes)] = 0.0
        return meta, to_device(trained, x0.device)
    return meta, None


def _on_channels(spec: Any, batch: Batch, frames: Sequence[Collection[int]], vae_stats: VAEStats) -> dict[str, Tensor]:
    """Return `first_frame`, and `further_frames` if any sample is given some; see `VideoMeta`.

    The first frame was encoded by itself, possibly with noise; the further ones are the mean latents of the clip.
    """
    assert FIRST_FRAME in batch.clip, "this model takes a first frame; the loader must encode it"
    first = spec.latents(batch.clip[FIRST_FRAME], None, vae_stats)
    has_first = to_device(torch.tensor([0 in indexes for indexes in frames]), first.device).view(-1, 1, 1, 1, 1)
    further = [[index for index in indexes if index > 0] for indexes in frames]
    if not any(further):
        return {"first_frame": first * has_first}
    is_given = torch.zeros(len(batch), batch.latent_size[0])
    for row, indexes in enumerate(further):
        is_given[row, indexes] = 1.0
    latents = spec.latents(batch.moments, None, vae_stats) * to_device(is_given, first.device)[:, None, :, None, None]
    return {"first_frame": first * has_first, "further_frames": spec.padded(latents)}


def encode_conditioning_frames(
    spec: Any, pipeline: Any, request: SampleRequest, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Encode the frames that a sample is given.

    The last latent frame stands for several frames, which all show the last image: it is encoded as the end of a still
    clip.

    Args:
        spec: spec of the model.
        pipeline: a pipeline on its device, whose VAE encodes.
        request: names the given frames, at least one.
        generator: generator of the posteriors' noise, or None to take their means.

    Returns:
        Normalized latents `[1, C, T, H, W]`, zero elsewhere, and the mask of the given frames, `[1, 1, T, 1, 1]`.
    """
    vae, geometry, device = pipeline.vae, spec.facts.geometry, pipeline._execution_device
    shape = geometry.latent_shape(request.num_frames, request.height, request.width)

    def still(image: Any, frames: int) -> Tensor:
        pixels = pipeline.video_processor.preprocess(image, request.height, request.width)
        return pixels.unsqueeze(2).expand(-1, -1, frames, -1, -1)

    def encoded(pixels: Tensor) -> Tensor:
        posterior = vae.encode(pixels.to(device, vae.dtype)).latent_dist
        return spec.vae_stats(vae).normalize(posterior.mode() if generator is None else posterior.sample(generator))

    parts: list[tuple[int, Tensor]] = []
    if request.image is not None or request.prefix is not None:
        parts.append((0, encoded(still(request.image, 1) if request.prefix is None else request.prefix)))
    if request.last_image is not None:
        parts.append((shape[0] - 1, encoded(still(request.last_image, 1 + geometry.temporal))[:, :, -1:]))
    latents = torch.zeros(1, parts[0][1].shape[1], *shape, device=device)
    is_given = torch.zeros(1, 1, shape[0], 1, 1, dtype=torch.bool, device=device)
    for start, part in parts:
        frames = slice(start, start + part.shape[2])
        latents[:, :, frames], is_given[:, :, frames] = part, True
    return latents, is_given


def sample_in_place(
    spec: Any,
    pipeline: Any,
    call: Mapping[str, Any],
    request: SampleRequest,
    generator: torch.Generator,
    *,
    pack: Callable[[Tensor], Tensor] = lambda latents_BCTHW: latents_BCTHW,
    tokens: Callable[[Tensor], Tensor],
) -> Any:
    """Sample by a text-to-video pipeline with given frames clean in their places, at time 0, as in training.

    Args:
        spec: spec of the model.
        pipeline: the pipeline, on its device.
        call: its arguments; see `ModelSpec.pipeline_call`.
        request: names the given frames, at least one.
        generator: generator of the noise.
        pack: converts latents `[B, C, T, H, W]` to those that the pipeline denoises.
        tokens: converts values of latent cells, `[1, 1, T, H, W]`, to those of tokens, `[1, tokens]`.

    Returns:
        Frames `[T, H, W, 3]` in [0, 1].
    """
    latents, mask = encode_conditioning_frames(spec, pipeline, request, generator)
    noise = randn_tensor(latents.shape, generator=generator, device=latents.device, dtype=torch.float32)
    is_given = mask.expand(1, 1, *latents.shape[2:])
    clean, start, keeps = pack(latents), pack(torch.where(mask, latents, noise)), pack(is_given)
    is_noisy = ~tokens(is_given)

    def zero_given_times(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        times = kwargs["timestep"]
        return args, {**kwargs, "timestep": (times[:, None] if times.ndim == 1 else times) * is_noisy}

    call = dict(call)
    after_step = call.pop("callback_on_step_end", None)

    def keep_given(pipeline: Any, step: int, t: Any, kwargs: dict[str, Tensor]) -> dict[str, Tensor]:
        outputs = after_step(pipeline, step, t, kwargs) if after_step is not None else {}
        return {**outputs, "latents": torch.where(keeps, clean, outputs.get("latents", kwargs["latents"]))}

    hook = pipeline.transformer.register_forward_pre_hook(zero_given_times, with_kwargs=True, prepend=True)
    try:
        return pipeline(
            **call, latents=start, callback_on_step_end=keep_given, generator=generator, output_type="np"
        ).frames[0]
    finally:
        hook.remove()


@contextmanager
def further_frames(spec: Any, pipeline: Any, request: SampleRequest) -> Iterator[None]:
    """Add a request's other given frames to the image latents that a pipeline puts on channels, within the block.

    These are means, as in training. So nothing is drawn for them, and all noise is that of a sample that is given the
    image alone.
    """
    if request.last_image is None and request.prefix is None:
        yield
        return
    assert spec.facts.first_frame == "channels", (
        "families that take conditioning frames as tokens have their own `sample`"
    )
    stock_prepare = pipeline.prepare_latents

    def prepare_latents(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        start, channels = stock_prepare(*args, **options)
        latents, _ = encode_conditioning_frames(spec, pipeline, replace(request, image=None), None)
        latents[:, :, :1] = 0.0  # the image's latents are already on the channels
        return start, channels + spec.as_channels(spec.padded(latents)).to(channels)

    pipeline.prepare_latents = prepare_latents  # hides the method of its class
    try:
        yield
    finally:
        del pipeline.prepare_latents
