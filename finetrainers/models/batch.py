"""Data that models and methods exchange: text conditions, batches, normalization constants, requests for samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from finetrainers.utils.device import to_device


@dataclass(frozen=True)
class PromptEmbeds:
    """Text conditioning of a batch: named tensors, batch first. Never mutated; every method returns a new object.

    Attributes:
        tensors: the tensors by name.
        lengths: number of text tokens of each row, where the host knows it, so that the device is not waited for.
        extra: addition of a given image to `VideoMeta.extra`, where clips are sampled from images.
        start: clean latents of the frames that clips start with, `[B, C, F, H, W]`, where clips are sampled from
            images, or None if all frames are sampled.
        further_lengths: `lengths` by the names of further masks.
    """

    tensors: Mapping[str, Tensor]
    lengths: tuple[int, ...] | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    start: Tensor | None = None
    further_lengths: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __len__(self) -> int:
        return next(iter(self.tensors.values())).shape[0]

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> PromptEmbeds:
        """Move to a device; floating tensors also to `dtype`, masks keep theirs."""
        moved = {k: to_device(v, device) for k, v in self.tensors.items()}
        if dtype is not None:
            moved = {k: v.to(dtype) if v.is_floating_point() else v for k, v in moved.items()}
        mask, lengths = self.tensors.get("prompt_attention_mask"), self.lengths
        if lengths is None and mask is not None and mask.device.type == "cpu":
            lengths = _lengths(mask)
        extra = {k: to_device(v, device) for k, v in self.extra.items()}
        start = None if self.start is None else to_device(self.start, device)
        return PromptEmbeds(moved, lengths, extra, start, self._count_further())

    def _count_further(self, *, waits: bool = False) -> dict[str, tuple[int, ...]]:
        """Return the lengths that further masks leave: those that the host knows, or all, after waiting for them."""
        masks = {n: t for n, t in self.tensors.items() if n.endswith("_mask") and n != "prompt_attention_mask"}
        return {
            name: self.further_lengths[name] if name in self.further_lengths else _lengths(mask)
            for name, mask in masks.items()
            if waits or name in self.further_lengths or mask.device.type == "cpu"
        }

    def rows(self, index: Sequence[int] | slice) -> PromptEmbeds:
        """Return the rows at `index` as a batch."""
        picked = index if isinstance(index, slice) else list(index)
        rows = range(len(self))[picked] if isinstance(picked, slice) else picked
        lengths = None if self.lengths is None else tuple(self.lengths[row] for row in rows)
        extra = {k: v[picked] for k, v in self.extra.items()}
        start = None if self.start is None else self.start[picked]
        further = {name: tuple(counts[row] for row in rows) for name, counts in self.further_lengths.items()}
        return PromptEmbeds({k: v[picked] for k, v in self.tensors.items()}, lengths, extra, start, further)

    def zeroed(self) -> PromptEmbeds:
        """Return a copy with zero embeddings; masks stay, since a row that attends to nothing has no softmax."""
        zeros = {k: torch.zeros_like(v) if v.is_floating_point() else v for k, v in self.tensors.items()}
        return PromptEmbeds(zeros, self.lengths, further_lengths=self.further_lengths)

    def trimmed(self, *, multiple: int = 16) -> PromptEmbeds:
        """Cut the tokens that are padding in every row, up to a multiple (so that few lengths occur).

        Only families that give a `prompt_attention_mask` are trimmed: they never attend to padding, so nothing but the
        time of a step changes. Waits, once, for the device of the mask.
        """
        mask = self.tensors.get("prompt_attention_mask")
        if mask is None:
            return self
        mask = mask.cpu()
        length = int(mask.any(0).nonzero().max()) + 1 if bool(mask.any()) else 1
        cut = self.cut(-(-length // multiple) * multiple).tensors
        return PromptEmbeds(cut, _lengths(mask), further_lengths=self._count_further(waits=True))

    def cut(self, length: int | None) -> PromptEmbeds:
        """Return the first `length` tokens of text and mask, or all if it is None."""
        if length is None:
            return self
        names = ("prompt_attention_mask", "prompt_embeds")
        return PromptEmbeds({k: v[:, :length].contiguous() if k in names else v for k, v in self.tensors.items()})

    @staticmethod
    def cat(parts: Sequence[PromptEmbeds]) -> PromptEmbeds:
        """Join batches along the batch axis."""
        part_lengths = [part.lengths for part in parts if part.lengths is not None]
        lengths = tuple(chain.from_iterable(part_lengths)) if len(part_lengths) == len(parts) else None
        extra = {k: torch.cat([p.extra[k] for p in parts]) for k in parts[0].extra}
        starts = [p.start for p in parts if p.start is not None]
        joined = {k: torch.cat([p.tensors[k] for p in parts]) for k in parts[0].tensors}
        further = {
            name: tuple(chain.from_iterable(p.further_lengths[name] for p in parts))
            for name in parts[0].further_lengths
            if all(name in p.further_lengths for p in parts)
        }
        return PromptEmbeds(joined, lengths, extra, torch.cat(starts) if starts else None, further)


def _lengths(mask: Tensor) -> tuple[int, ...]:
    """Count the tokens of each row that a mask on the host leaves."""
    return tuple(mask.bool().sum(dim=1).tolist())


@dataclass(frozen=True)
class ModelComponents:
    """Frozen parts of a model (tokenizers, encoders, a VAE), by their names in its pipeline; moved and freed as one."""

    modules: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.modules[name]

    def to(self, device: torch.device | str) -> ModelComponents:
        """Move the networks (in place, as modules do) and return self."""
        for module in self.modules.values():
            if isinstance(module, nn.Module):
                module.to(device)
        return self

    @contextmanager
    def on(self, device: torch.device | None) -> Iterator[None]:
        """Move the networks to a device within the block, unless it is None, and after it to where each was."""
        networks = [module for module in self.modules.values() if isinstance(module, nn.Module)]
        before = [next(network.parameters()).device for network in networks]
        if device is not None:
            self.to(device)
        try:
            yield
        finally:
            for network, place in zip(networks, before, strict=True):
                network.to(place)


@dataclass(frozen=True)
class VideoMeta:
    """Inputs of a network about a batch, apart from latents and text.

    Attributes:
        fps: frame rate of each clip, `[B]`, in frames per second.
        extra: further inputs of the network by name, batch first, as `ModelSpec.condition` makes them; such as those of
            "channels" models: `first_frame`, normalized latents `[B, C, 1, H, W]`, which are zero in rows that are not
            given it; and if a row is given others, `further_frames`, `[B, C, T, H, W]`, zero where they are not, at the
            first, and where `padded` adds frames.
        guidance: scale for networks that take guidance as an input, or None for the one that they are trained at.
    """

    fps: Tensor
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    guidance: float | None = None


@dataclass(frozen=True)
class Batch:
    """One micro-batch, ready for a method.

    Attributes:
        moments: VAE moments, `[B, 2C, T, H, W]` (mean, then log-variance).
        conditions: text conditioning of the captions.
        meta: see `VideoMeta`; its `extra` is empty until the method decides which rows are conditioned.
        sample_keys: per sample `(epoch, item)`, the source of its random numbers.
        clip: further tensors that `ModelSpec.encode_clip` made of the clips, by name, batch first.
        weight: this micro-batch's share of the optimizer step, so that the step's losses sum to its mean.
        prior: text conditioning of the samples' prior prompts, where there are any.
        mask: weight of each latent in its sample's loss, from 0 to 1, `[B, 1, T, H, W]`, or None if no clip of the run
            has a mask.
        inner_windows: whether each sample is a sliding window from within a clip; empty if none is.
    """

    moments: Tensor
    conditions: PromptEmbeds
    meta: VideoMeta
    sample_keys: Sequence[tuple[int, int]]
    clip: Mapping[str, Tensor] = field(default_factory=dict)
    weight: float = 1.0
    prior: PromptEmbeds | None = None
    mask: Tensor | None = None
    inner_windows: Sequence[bool] = ()

    def __len__(self) -> int:
        return self.moments.shape[0]

    @property
    def latent_size(self) -> tuple[int, ...]:
        """Frames, height and width of the latents."""
        return tuple(self.moments.shape[2:])

    def rows(self, rows: slice, *, weight: float) -> Batch:
        """Return a slice of the samples as a batch with `weight` as its share of the step."""
        extra = {name: tensor[rows] for name, tensor in self.meta.extra.items()}
        return replace(
            self,
            moments=self.moments[rows],
            conditions=self.conditions.rows(rows),
            meta=replace(self.meta, fps=self.meta.fps[rows], extra=extra),
            sample_keys=self.sample_keys[rows],
            clip={name: tensor[rows] for name, tensor in self.clip.items()},
            weight=weight,
            prior=None if self.prior is None else self.prior.rows(rows),
            mask=None if self.mask is None else self.mask[rows],
            inner_windows=self.inner_windows[rows],
        )

    def split(self, pieces: int) -> list[Batch]:
        """Split into exactly `pieces` batches of about equal size, whose weighted losses sum to this one's.

        Where there are fewer samples, the first one comes again, without weight.
        """
        count = len(self)
        bounds = even_bounds(count, min(pieces, count))
        batches = [self.rows(slice(a, b), weight=self.weight * (b - a) / count) for a, b in bounds]
        return batches + [self.rows(slice(0, 1), weight=0.0)] * (pieces - len(batches))


def even_bounds(count: int, pieces: int) -> list[tuple[int, int]]:
    """Return start and end (excluded) of `pieces` segments of `count` things; their lengths differ by one at most."""
    ends = [count * k // pieces for k in range(pieces + 1)]
    return list(pairwise(ends))


def noised(frame_BC1HW: Tensor, noise: tuple[float, float], generators: Sequence[torch.Generator]) -> Tensor:
    """Return frames plus normal noise, whose standard deviation is log-normal, one for each clip.

    Args:
        frame_BC1HW: pixels in [-1, 1].
        noise: mean and standard deviation of the logarithm of the noise's standard deviation.
        generators: a generator for each clip's noise, on the CPU.
    """
    mean, spread = noise
    noises = []
    normal = partial(torch.randn, dtype=torch.float32, device="cpu")
    for generator in generators:
        std = torch.exp(mean + spread * normal((), generator=generator))
        noises.append(std * normal(frame_BC1HW.shape[1:], generator=generator))
    return frame_BC1HW + torch.stack(noises).to(frame_BC1HW.device, non_blocking=True)


@dataclass(frozen=True)
class SampleRequest:
    """A validation sample: size in pixels and frames, how to denoise, and the frames or further media that are given.

    Attributes:
        guidance_scale_2: guidance scale of the low-noise expert, or None for that of both.
        image: first frame, PIL's image or a tensor.
        last_image: last frame, PIL's image or a tensor.
        prefix: frames that the sample begins with, `[1, 3, F, H, W]` in [-1, 1].
        media: media of the sample's size, `[1, 3, T, H, W]` in [-1, 1], by the names of `Facts.media`.
    """

    num_frames: int
    height: int
    width: int
    frame_rate: float
    num_inference_steps: int
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    image: Any = None
    last_image: Any = None
    prefix: Tensor | None = None
    media: Mapping[str, Tensor] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def first_image(self) -> Any:
        """The first frame: the image, or that of the prefix, `[1, 3, H, W]` in [0, 1], or None if none is given."""
        return self.image if self.prefix is None else self.prefix[:, :, 0] / 2 + 0.5

    @property
    def starts_from_image(self) -> bool:
        """True if only a first frame is given, so that the image-to-video pipeline samples it."""
        return self.image is not None and self.last_image is None and self.prefix is None


@dataclass(frozen=True)
class VAEStats:
    """Normalization of latents: `(z - mean) * scale`; scalar tensors, `[C]` or per channel and frame `[C, T]`, fp32."""

    mean: Tensor
    scale: Tensor
    #: Both by device, in shapes that broadcast against `[B, C, T, H, W]`: every step needs them.
    _placed: dict[torch.device, tuple[Tensor, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def _shaped(self, like: Tensor) -> list[Tensor]:
        """Return mean and scale for latents, on their device."""
        if like.device not in self._placed:
            self._placed[like.device] = tuple(_per_cell(value.to(like.device)) for value in (self.mean, self.scale))
        frames = like.shape[2]
        return [v[:, :, :frames] if v.ndim and v.shape[2] > 1 else v for v in self._placed[like.device]]

    def normalize(self, z: Tensor) -> Tensor:
        """Convert VAE latents to the model's normalized space, in fp32."""
        z = z.float()
        mean, scale = self._shaped(z)
        return (z - mean) * scale

    def denormalize(self, z: Tensor) -> Tensor:
        """Convert normalized latents back to the VAE's, in fp32."""
        z = z.float()
        mean, scale = self._shaped(z)
        return z / scale + mean


def _per_cell(value: Tensor) -> Tensor:
    """Return a scalar, `[C]` or `[C, T]` in a shape that broadcasts against `[B, C, T, H, W]`."""
    return value.view(1, *value.shape, *[1] * (4 - value.ndim)) if value.ndim else value
