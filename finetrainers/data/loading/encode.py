"""Encoding of clips in memory into the batches of a method: VAE moments and text conditioning.

Encoding happens on the fly, or once before training into a cache. Both ways give the same batches, including caption
dropout. Only a random start or crop, and the noise of a given first frame, are drawn once per clip with the cache
instead of once per epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from finetrainers.config.sections import DataSection
from finetrainers.models.spec import MOMENTS, Batch, ModelComponents, ModelSpec, PromptEmbeds, VideoMeta
from finetrainers.utils.device import to_device
from finetrainers.utils.phases import ENCODING_CLIPS, ENCODING_TEXT, phase
from finetrainers.utils.seeding import generator

from ..buckets.windows import cut_latents, is_inner_window
from ..reading.prior_prompts import PriorPrompts
from .loader import RawBatch

#: Text conditioning of prompts, batch first; with an image for each where text encoders see images, `[3, H, W]` uint8.
EncodeText = Callable[..., PromptEmbeds]
#: Named tensors of videos `[B, C, T, H, W]` with 8 bits, where each further medium has three channels, given the
#: generator of each clip's noise; see `ModelSpec.encode_clip`.
EncodeClip = Callable[[Tensor, Sequence[torch.Generator]], Mapping[str, Tensor]]

#: Prefixes of text conditioning in a cached batch: for the caption, the empty prompt, and the prior prompt.
TEXT, EMPTY, PRIOR = "text.", "empty.", "prior."


def text_encoder(spec: ModelSpec, encoders: ModelComponents) -> EncodeText:
    """Return the function that encodes captions, with images where the text encoders see them."""

    @phase(ENCODING_TEXT)
    def encode(captions: Sequence[str], images: Sequence[Tensor] | None = None) -> PromptEmbeds:
        if images is None:
            return spec.encode_text(encoders, captions)
        return spec.encode_with_images(encoders, captions, images)

    return encode


def clip_encoder(spec: ModelSpec, encoders: ModelComponents, data: DataSection) -> EncodeClip:
    """Return the function that encodes clips; `data` decides whether a given first frame gets noise."""

    @phase(ENCODING_CLIPS)
    def encode(video: Tensor, generators: Sequence[torch.Generator]) -> Mapping[str, Tensor]:
        clip, *media = video.split(3, dim=1)
        media_by_name = dict(zip(sorted(spec.facts.media), media, strict=True))
        return spec.encode_clip(encoders, clip, generators if data.first_frame_noise else None, media_by_name)

    return encode


def draw_caption_dropout(sample_keys: Sequence[tuple[int, int]], *, probability: float, seed: int) -> list[bool]:
    """Return whether each sample loses its caption by caption dropout, drawn for each (epoch, item)."""
    if probability == 0.0:
        return [False] * len(sample_keys)
    generators = (generator("cpu", seed, "caption_dropout", *key) for key in sample_keys)
    draws = (torch.rand((), generator=rng, dtype=torch.float32, device="cpu") for rng in generators)
    return [draw.item() < probability for draw in draws]


def stack_videos(videos: Sequence[Tensor]) -> Tensor:
    """Return videos as a batch; a single one is not copied."""
    return videos[0][None] if len(videos) == 1 else torch.stack(list(videos))


@dataclass(frozen=True)
class Encoder:
    """A builder of a method's batches: from pixels with the text encoders and the VAE, or from cached tensors.

    Attributes:
        encode_text, encode_clip: the model's encoders, or None if everything is in the cache.
        data: caption dropout options.
        seed: seed of the run.
        device: the device of the batches.
        prior: see `DatasetPlan`.
        shows_frames: whether text encoders see the first frame of the clip.
        is_masked: whether any clip of the run has a mask; then all batches have one.
    """

    encode_text: EncodeText | None
    encode_clip: EncodeClip | None
    data: DataSection
    seed: int
    device: torch.device | str = "cpu"
    prior: PriorPrompts | None = None
    shows_frames: bool = False
    is_masked: bool = False

    def __call__(self, raw: RawBatch, *, dropout: bool = True) -> Batch:
        """Return the encoded batch; evaluation turns caption dropout off."""
        probability = self.data.caption_dropout_p if dropout else 0.0
        drop = draw_caption_dropout(raw.sample_keys, probability=probability, seed=self.seed)
        to_empty = self.data.caption_dropout_technique == "empty"
        if raw.pixels:
            conditions = self._encode_captions(raw, drop if to_empty else [False] * len(drop))
            clip = self._encode_clip(raw)
        else:
            conditions = _select_prefix(raw.cached, TEXT)
            if to_empty and any(drop):
                conditions = _replace_rows(conditions, _select_prefix(raw.cached, EMPTY), drop)
            clip = {name: tensor for name, tensor in raw.cached.items() if not name.startswith((TEXT, EMPTY, PRIOR))}
        if not to_empty and any(drop):
            conditions = _replace_rows(conditions, conditions.zeroed(), drop)
        tensors = {name: to_device(tensor, self.device) for name, tensor in clip.items()}
        moments = tensors.pop(MOMENTS)
        return Batch(
            moments=moments,
            conditions=conditions.trimmed().to(self.device),
            meta=VideoMeta(
                fps=to_device(torch.tensor([clip.fps for clip in raw.clips], dtype=torch.float32), self.device)
            ),
            sample_keys=raw.sample_keys,
            clip=tensors,
            weight=raw.weight,
            prior=None if self.prior is None else self._encode_prior(raw, self.prior).trimmed().to(self.device),
            mask=self._stack_masks(raw, moments) if self.is_masked else None,
            inner_windows=[is_inner_window(clip) for clip in raw.clips],
        )

    def _stack_masks(self, raw: RawBatch, moments: Tensor) -> Tensor:
        """Return the weights of the clips' latents, 1 for clips without a mask."""
        shape = (1, 1, *moments.shape[2:])
        masks = [torch.ones(shape) if mask is None else mask for mask in raw.masks]
        mismatched = [clip for clip, mask in zip(raw.clips, masks, strict=True) if mask.shape != shape]
        assert not mismatched, f"the mask of {mismatched} does not have the size of its latents"
        return to_device(torch.cat(masks), self.device)

    def _encode_prior(self, raw: RawBatch, prior: PriorPrompts) -> PromptEmbeds:
        if not raw.pixels:
            return _select_prefix(raw.cached, PRIOR)
        assert self.encode_text is not None, "clips that are not in the cache need the text encoders"
        return self.encode_text(list(map(prior.of, self._captions(raw), raw.sample_keys)))

    def _captions(self, raw: RawBatch) -> list[str]:
        return [clip.caption_for(key, seed=self.seed) for clip, key in zip(raw.clips, raw.sample_keys, strict=True)]

    def _encode_captions(self, raw: RawBatch, drop: Sequence[bool]) -> PromptEmbeds:
        assert self.encode_text is not None, "clips that are not in the cache need the text encoders"
        texts = ["" if is_dropped else caption for caption, is_dropped in zip(self._captions(raw), drop, strict=True)]
        images = [[pixels[:3, 0] for pixels in raw.pixels]] if self.shows_frames else []
        return self.encode_text(texts, *images)

    def _encode_clip(self, raw: RawBatch) -> Mapping[str, Tensor]:
        assert self.encode_clip is not None, "clips that are not in the cache need the VAE"
        videos = [pixels.to(self.device, non_blocking=True) for pixels in raw.pixels]
        if all(clip.latent_segment is None for clip in raw.clips):
            generators = [generator("cpu", self.seed, "first frame noise", *key) for key in raw.sample_keys]
            return self.encode_clip(stack_videos(videos), generators)
        encoded = [
            {name: cut_latents(tensor, clip) for name, tensor in self.encode_clip(segment[None], ()).items()}
            for segment, clip in zip(videos, raw.clips, strict=True)  # may be of any lengths
        ]
        return {name: torch.cat([tensors[name] for tensors in encoded]) for name in encoded[0]}


def _select_prefix(cached: Mapping[str, Tensor], prefix: str) -> PromptEmbeds:
    return PromptEmbeds({name[len(prefix) :]: t for name, t in cached.items() if name.startswith(prefix)})


def _replace_rows(conditions: PromptEmbeds, other: PromptEmbeds, rows: Sequence[bool]) -> PromptEmbeds:
    """Return `conditions` with the marked rows taken from `other`."""

    def pick(original: Tensor, replacement: Tensor) -> Tensor:
        mask = to_device(torch.tensor(rows), original.device).view(-1, *[1] * (original.ndim - 1))
        return torch.where(mask, replacement, original)

    return PromptEmbeds({name: pick(tensor, other[name]) for name, tensor in conditions.tensors.items()})
