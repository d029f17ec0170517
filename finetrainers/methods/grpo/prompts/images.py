"""The images that clips are sampled from: encoded once by the VAE, cached, and given to the network with the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TypeAlias

import torch
from torch import Tensor

from finetrainers.config.root import TrainConfig
from finetrainers.data.buckets.clip import ConditioningImage
from finetrainers.data.cache.encoder_index import remember_model
from finetrainers.data.cache.keys import CacheKeys, EncoderEntry
from finetrainers.data.cache.model_fingerprint import model_fingerprint
from finetrainers.data.cache.store import CacheError
from finetrainers.data.loading.text_conditioning import cache_directory
from finetrainers.models.spec import (
    MOMENTS,
    Batch,
    ModelComponents,
    ModelSpec,
    PromptEmbeds,
    VAEStats,
    VideoMeta,
    tiled_for_memory,
)
from finetrainers.parallel.ranks import DistributedContext

#: Inputs of the network for a conditioning image: `PromptEmbeds.extra` and `PromptEmbeds.start`.
ImageInputs: TypeAlias = tuple[Mapping[str, Tensor], Tensor | None]
#: Images that are stored in memory as pixels, for rewards that compare with them.
_CACHED_IMAGES = 64


@dataclass(frozen=True)
class ImageConditioning:
    """Conditioning of the network on images of one size.

    Every clip of a prompt is sampled from the mean of the VAE's distribution, without the noise that training on clips
    may add, so from equal latents.

    Attributes:
        keys: keys of the cache, which has every image.
        spec: the model.
        vae_stats: normalization constants of its VAE.
        frames: `(T, H, W)` of a clip's latents as the network denoises them.
    """

    keys: CacheKeys
    spec: ModelSpec
    vae_stats: VAEStats
    frames: tuple[int, int, int]

    def network_inputs(self, image: ConditioningImage) -> ImageInputs:
        """Return the network's inputs for one image.

        Raises:
            CacheError: its entry has gone.
        """
        entry = self.keys.cache.get(self.keys.image(image))
        if entry is None:
            directory = self.keys.cache.directory
            raise CacheError(
                f"the latents of {image.path} have disappeared from {directory}, or it changed; start the run again"
            )
        moments = entry[MOMENTS]
        rest = {name: tensor for name, tensor in entry.items() if name != MOMENTS}
        batch = Batch(moments, PromptEmbeds({}), VideoMeta(fps=torch.ones(1)), [(0, 0)], rest)
        latents = self.spec.latents(moments, None, self.vae_stats)
        clip = torch.zeros(1, latents.shape[1], *self.frames)
        meta, trained = self.spec.condition(batch, clip, [(0,)], self.vae_stats)
        return meta.extra, None if trained is None else latents


def encode_images(
    images: Sequence[ConditioningImage], size: tuple[int, int, int], config: TrainConfig, *,
    spec: ModelSpec, parallel: DistributedContext, keys: CacheKeys, clip_encoders: ModelComponents,
) -> ImageConditioning:  # fmt: skip
    """Encode the images, for clips of a size, that the cache does not have; each rank encodes a share."""
    identity = model_fingerprint(clip_encoders.modules, tiling=bool(config.model.enable_tiling))
    vae = EncoderEntry(identity, spec.clip_version)
    image_entry = replace(vae, with_first_frame=spec.image_version(size[0]))
    keys = replace(keys, vae=image_entry, tiled=spec.tiles_by_size, tiled_late=partial(tiled_for_memory, spec))
    keys.cache.hold()
    own_images = sorted(set(images))[parallel.rank :: parallel.world_size]
    with parallel.raise_on_all_ranks("encoding the images of prompts"):
        keys.digests.learn([path for image in own_images for path in (image.path, image.last) if path is not None])
        by_key = {keys.image(image): image for image in own_images}
        for key in keys.cache.missing(by_key):
            image = by_key[key]
            last = None if image.ending is None else keys.picture(image.ending)
            entry = spec.encode_image(clip_encoders, keys.picture(image), size[0], last)
            keys.cache.put(key, {n: t.cpu() for n, t in entry.items()}, keys.about_image(by_key[key]))
    keys.digests.refresh()  # other ranks have computed theirs
    if parallel.rank == 0:
        remember_model(cache_directory(config), config.model, "vae", vae)
    frames = spec.facts.geometry.denoised_shape(*size)
    return ImageConditioning(keys, spec, spec.vae_stats(clip_encoders["vae"]), frames)


class RewardImages:
    """The prompts' images for rewards, in the size of the clips."""

    def __init__(self, keys: CacheKeys) -> None:
        self._read = lru_cache(maxsize=_CACHED_IMAGES)(keys.picture)

    def __call__(self, images: Sequence[ConditioningImage]) -> Tensor:
        """Return images `[B, 3, H, W]` fp32 in [0, 1] on the host."""
        return torch.stack([self._read(image) for image in images]).float() / 255
