"""Cache keys: hashes of everything that determines an entry's content, and of nothing else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from finetrainers.config.root import TrainConfig, fields
from finetrainers.config.sections import DataSection, ModelSection
from finetrainers.utils.seeding import generator

from ..buckets.buckets import Bucket, bucket_text
from ..buckets.clip import Clip, ConditioningImage, TextImageSource
from ..inspect.file_facts import FileFacts
from ..video.decode import load_clip, read_covering
from ..video.masks import load_mask
from .store import TensorCache

#: Raise when decoding, resizing or cropping changes, so that old entries are no longer found.
PIXELS_VERSION = 3

_MAX_CAPTION_CHARS = 60  # characters of a caption in an entry's header
Part = Literal["text", "vae"]
_PACKAGES = ("torch", "diffusers", "transformers", "ftfy")


@dataclass(frozen=True)
class EncoderEntry:
    """A component of a model that entries were computed with.

    Attributes:
        identity: see `model_fingerprint`.
        with_first_frame: which tensors entries of clips hold; see `ModelSpec.clip_version`.
        first_frame_noise: the noise that is added to the first frame unless that is turned off.
    """

    identity: str
    with_first_frame: bool | str = False
    first_frame_noise: tuple[float, float] | None = None


def text_key(identity: str, caption: str, image: str | None = None) -> str:
    """Return the key of a caption's conditioning by the text encoders of that identity, which may also see an image."""
    images = {} if image is None else {"image": image}
    return TensorCache.key(kind="text", encoder=identity, caption=caption, **images)


@dataclass(frozen=True)
class CacheKeys:
    """Keys and descriptions of cache entries.

    Attributes:
        cache: the store of the entries.
        digests: content digests of the media files.
        text_identity: names the text encoders, their weights, dtypes and options.
        vae: names the VAE likewise, and the tensors that entries of clips hold.
        data: options of caption dropout and of noise on the first frame.
        seed: seed of the random starts and crops.
        tiled: whether the VAE works on tiles of a clip of this bucket, where its identity does not include it.
        tiled_late: whether it does so only since it ran out of memory; entries keep their names, and record it.
        text_description, vae_description: descriptions of the encoders for users.
        texts_see_images: see `Facts.text_sees_image`.
    """

    cache: TensorCache
    digests: FileFacts
    text_identity: str
    vae: EncoderEntry
    data: DataSection
    seed: int
    tiled: Callable[[Bucket], bool] = field(default=lambda bucket: False)
    tiled_late: Callable[[Bucket], bool] = field(default=lambda bucket: False)
    text_description: str = ""
    vae_description: str = ""
    texts_see_images: bool = False

    @classmethod
    def of(cls, directory: Path, config: TrainConfig) -> CacheKeys:
        """Return the keys of a run, whose encoders are not known yet, in a directory."""
        return cls(
            TensorCache(directory / "tensors"),
            FileFacts(directory / "digests"),
            text_identity="",
            vae=EncoderEntry(""),
            data=config.data,
            seed=config.training.seed,
            text_description=describe_model(config.model, "text"),
            vae_description=describe_model(config.model, "vae"),
        )

    def text(self, caption: str, source: TextImageSource | None = None) -> str:
        """Return the key of a caption's conditioning, and of the image in `source` where text encoders see images."""
        return text_key(self.text_identity, caption, None if source is None else self.shown(source))

    def shown(self, source: TextImageSource) -> str:
        """Return a key of the pixels of the conditioning image: of the file's content and all operations on it."""
        cut = {"size": source.size} if isinstance(source, ConditioningImage) else self.cut(source)
        return self.cache.key(kind="shown", file=self.digests.digest(source.path), version=PIXELS_VERSION, **cut)

    def picture(self, source: TextImageSource) -> Tensor:
        """Return an image, or a clip's first frame, `[3, H, W]` uint8."""
        if isinstance(source, ConditioningImage):
            return read_covering(source.path, height=source.size[0], width=source.size[1])
        return self.pixels(source)[:3, 0]

    def video(self, clip: Clip) -> str:
        """Return the key of a clip's moments. It covers the files' content, but neither their names nor captions."""
        noise = self.vae.first_frame_noise if self.data.first_frame_noise else None
        digests = {medium.name: self.digests.digest(medium.path) for medium in clip.further}
        further = {"further": digests} if digests else {}
        return self.cache.key(
            kind="video",
            vae=self.vae.identity,
            file=self.digests.digest(clip.path),
            first_frame=[*noise, self.seed] if noise else self.vae.with_first_frame,
            version=PIXELS_VERSION,
            **self.cut(clip),
            **further,
            **self._tiling(clip.bucket),
        )

    def mask(self, clip: Clip) -> str:
        """Return the key of a clip's pooled mask.

        The key of the clip's moments does not depend on the mask, so that another mask does not encode them again.
        """
        assert clip.mask is not None, "the clip has no mask"
        return self.cache.key(
            kind="mask",
            file=self.digests.digest(clip.mask.path),
            mask=clip.mask.kind,
            grid=clip.mask.grid,
            # The values that decide which of its pixels are those of the clip.
            source=(clip.num_frames, clip.source_fps, clip.height, clip.width),
            times=self.digests.digest(clip.path) if clip.is_variable or clip.is_random else None,
            version=PIXELS_VERSION,
            **self.cut(clip),
        )

    def image(self, image: ConditioningImage) -> str:
        """Return the key of the moments of an image that clips start from; of its content, not its name."""
        ending = {} if image.ending is None else {"last": self.shown(image.ending)}
        return self.cache.key(
            kind="image",
            vae=self.vae.identity,
            image=self.shown(image),
            first_frame=self.vae.with_first_frame,
            **ending,
            **self._tiling((1, *image.size)),
        )

    def _tiling(self, bucket: Bucket) -> dict[str, bool]:
        return {"tiled": True} if self.tiled(bucket) else {}

    def cut(self, clip: Clip) -> dict[str, object]:
        """Return all values that decide which pixels are taken from the clip's file.

        This is the only place where they are listed; `pixels` must use nothing else, except for what follows from the
        content of the file, such as its size. JSON values.
        """
        # Only clips with another rate than their file's name it, so that entries of all others keep their names.
        row_rate = {"source_fps": clip.source_fps} if clip.has_row_rate else {}
        return {
            "media": clip.kind,
            "bucket": clip.bucket,
            "fps": clip.fps,
            "frame_selection": clip.frame_selection,
            "start": clip.start,
            "reshape_mode": clip.reshape_mode,
            "seed": self.seed if clip.is_random else None,
            **row_rate,
        }

    def pixels(self, clip: Clip) -> Tensor:
        """Return the clip `[C, T, H, W]` uint8 as `load_clip` does.

        Its random start and crop are drawn once, from seed and file content.
        """
        return load_clip(clip, generator=self._generator(clip))

    def pooled(self, clip: Clip) -> Tensor:
        """Return the clip's mask as `load_mask` does, cut as `pixels` are."""
        return load_mask(clip, generator=self._generator(clip))

    def _generator(self, clip: Clip) -> torch.Generator:
        return generator("cpu", self.seed, "precomputed clip", self.digests.digest(clip.path))

    def about_text(self, caption: str) -> dict[str, str]:
        """Return a description of a caption's entry for users."""
        text = caption if len(caption) <= _MAX_CAPTION_CHARS else caption[: _MAX_CAPTION_CHARS - 3] + "..."
        return self._about("text", text, self.text_description, self.text_identity)

    def about_video(self, clip: Clip) -> dict[str, str]:
        """Return a description of a clip's entry for users, with the file's name without its directories."""
        description = self.vae_description + (", tiled" if self.tiled(clip.bucket) else "")
        description += ", tiled after an OOM" if self.tiled_late(clip.bucket) else ""
        return self._about("video", clip.path.name, description, self.vae.identity, clip.bucket)

    def about_mask(self, clip: Clip) -> dict[str, str]:
        """Return a description of a mask's entry for users."""
        assert clip.mask is not None, "the clip has no mask"
        return self._about("mask", clip.mask.path.name, "", "", clip.bucket)

    def about_image(self, image: ConditioningImage) -> dict[str, str]:
        """Return a description of an image's entry for users."""
        return self._about("image", image.path.name, self.vae_description, self.vae.identity, (1, *image.size))

    def _about(self, kind: str, source: str, model: str, identity: str, bucket: Bucket | None = None) -> dict[str, str]:
        about = {"kind": kind, "of": source, "model": model, "identity": identity[:12], "versions": library_versions()}
        return about | {"bucket": bucket_text(bucket)} if bucket else about


@cache
def library_versions() -> str:
    """Return the libraries that encode, with their versions.

    They are read once: looking up a package parses all of its metadata, which takes longer than encoding a caption.
    """
    versions = []
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions.append(f"{package} {version(package)}")
    return ", ".join(versions)


def describe_model(model: ModelSection, part: Part) -> str:
    """Return a short description of a component, without the machine's directories: `FAMILY VAE of org/model, bf16`."""
    options = encoder_options(model, part)
    is_vae = part == "vae"
    component_id = options.get("vae_id" if is_vae else "text_encoder_id")
    source = str(component_id or model.pretrained_model_name_or_path)
    name = Path(source).name if Path(source).exists() else source
    dtype = options["vae_dtype" if is_vae else "text_encoder_dtype"]
    tiled = ", tiled" if is_vae and model.enable_tiling else ""
    quantization = options.get("quantize_text_encoders")
    quantized = f", quantized to {quantization}" if quantization else ""
    return f"{model.model_name} {'VAE' if is_vae else 'text'} of {name}, {dtype}{tiled}{quantized}"


def encoder_options(model: ModelSection, part: Part) -> dict[str, object]:
    """Return the options that determine the output of a component."""
    values = {name: getattr(model, name) for name, option in fields().items() if option.encodes in (part, "both")}
    if not values["part"]:  # keeps the keys from before it was an option
        del values["part"]
    if values.get("quantize_text_encoders") == "none":
        del values["quantize_text_encoders"]
    if "enable_tiling" in values:  # the keys of entries say which clips are tiled by default
        values["enable_tiling"] = bool(values["enable_tiling"])
    return values
