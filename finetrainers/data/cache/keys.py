"""Cache keys: hashes of everything that determines an entry's content, and of nothing else."""

from __future__ import annotations

from collections.abc import Callable
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

from ..buckets.buckets import Bucket
from ..buckets.clip import Clip, Picture, Shown
from ..inspect.file_facts import FileFacts
from ..video.decode import load_clip, read_covering
from ..video.masks import load_mask
from .store import TensorCache

#: Raise when decoding, resizing or cropping changes, so that old entries are no longer found.
PIXELS_VERSION = 3

_SHOWN = 60  # characters of a caption in an entry's header
Part = Literal["text", "vae"]
_PACKAGES = ("torch", "diffusers", "transformers", "ftfy")


@dataclass(frozen=True)
class EncoderEntry:
    """A part of a model that entries were computed with.

    Attributes:
        identity: see `model_fingerprint`.
        with_first_frame: which tensors entries of clips hold; see `ModelSpec.clip_version`.
        first_frame_noise: what is added to the first frame unless that is turned off.
    """

    identity: str
    with_first_frame: bool | str = False
    first_frame_noise: tuple[float, float] | None = None


def text_key(identity: str, caption: str, image: str | None = None) -> str:
    """Key of a caption's conditioning by the text encoders of that identity, which may see an image with it."""
    seen = {} if image is None else {"image": image}
    return TensorCache.key(kind="text", encoder=identity, caption=caption, **seen)


@dataclass(frozen=True)
class CacheKeys:
    """Computes the keys of cache entries, and describes entries.

    Attributes:
        cache: the store of the entries.
        digests: content digests of the media files.
        text_identity: names the text encoders, their weights, dtypes and options.
        vae: names the VAE likewise, and says what entries of clips hold.
        data: whether captions may be dropped, and to what; whether there is noise on the first frame.
        seed: seed of the random starts and crops.
        tiled: whether the VAE works on tiles of a clip of this bucket, where its identity does not say it.
        tiled_late: whether it does so only since it ran out of memory; entries have the same names, and say it.
        text_words, vae_words: the encoders in words, for people.
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
    text_words: str = ""
    vae_words: str = ""
    texts_see_images: bool = False

    @classmethod
    def of(cls, directory: Path, config: TrainConfig) -> CacheKeys:
        """Of a run, whose encoders are not known yet, in a directory."""
        return cls(
            TensorCache(directory / "tensors"),
            FileFacts(directory / "digests"),
            text_identity="",
            vae=EncoderEntry(""),
            data=config.data,
            seed=config.training.seed,
            text_words=describe_model(config.model, "text"),
            vae_words=describe_model(config.model, "vae"),
        )

    def text(self, caption: str, shown: Shown | None = None) -> str:
        """Key of a caption's conditioning, where text encoders see images with what they are shown."""
        return text_key(self.text_identity, caption, None if shown is None else self.shown(shown))

    def shown(self, one: Shown) -> str:
        """Names the pixels of `picture` by the file's content and all that is done with it."""
        cut = {"size": one.size} if isinstance(one, Picture) else self.cut(one)
        return self.cache.key(kind="shown", file=self.digests.digest(one.path), version=PIXELS_VERSION, **cut)

    def picture(self, one: Shown) -> Tensor:
        """An image, or a clip's first frame, `[3, H, W]` uint8."""
        if isinstance(one, Picture):
            return read_covering(one.path, height=one.size[0], width=one.size[1])
        return self.pixels(one)[:3, 0]

    def video(self, clip: Clip) -> str:
        """Key of a clip's moments. It holds the files' content, not their names, and no caption."""
        noise = self.vae.first_frame_noise if self.data.first_frame_noise else None
        return self.cache.key(
            kind="video",
            vae=self.vae.identity,
            file=self.digests.digest(clip.path),
            first_frame=[*noise, self.seed] if noise else self.vae.with_first_frame,
            version=PIXELS_VERSION,
            **({"further": {one.name: self.digests.digest(one.path) for one in clip.further}} if clip.further else {}),
            **({"tiled": True} if self.tiled(clip.bucket) else {}),
            **self.cut(clip),
        )

    def mask(self, clip: Clip) -> str:
        """Key of a clip's pooled mask. That of its moments does not depend on the mask, so they are not encoded again for one."""
        assert clip.mask is not None, "the clip has no mask"
        is_random = "random" in (clip.frame_selection, clip.reshape_mode)
        return self.cache.key(
            kind="mask",
            file=self.digests.digest(clip.mask.path),
            mask=clip.mask.kind,
            grid=clip.mask.grid,
            # What decides which of its pixels are those of the clip.
            source=(clip.num_frames, clip.source_fps, clip.height, clip.width),
            times=self.digests.digest(clip.path) if clip.is_variable or is_random else None,
            version=PIXELS_VERSION,
            **self.cut(clip),
        )

    def image(self, one: Picture) -> str:
        """Key of the moments of an image that clips start from; of its content, not its name."""
        return self.cache.key(
            kind="image",
            vae=self.vae.identity,
            image=self.shown(one),
            first_frame=self.vae.with_first_frame,
            **({"tiled": True} if self.tiled((1, *one.size)) else {}),
        )

    def cut(self, clip: Clip) -> dict[str, object]:
        """All that decides which pixels are taken from the clip's file.

        This is the one place where they are listed; `pixels` must use nothing else. JSON values.
        """
        is_random = "random" in (clip.frame_selection, clip.reshape_mode)
        return {
            "media": clip.kind,
            "bucket": clip.bucket,
            "fps": clip.fps,
            "frame_selection": clip.frame_selection,
            "start": clip.start,
            "reshape_mode": clip.reshape_mode,
            "seed": self.seed if is_random else None,
        }

    def pixels(self, clip: Clip) -> Tensor:
        """The clip `[C, T, H, W]` uint8 as `load_clip` gives it, with its one random start and crop drawn from seed and file content."""
        return load_clip(clip, generator=self._generator(clip))

    def pooled(self, clip: Clip) -> Tensor:
        """The clip's mask as `load_mask` gives it, cut as `pixels` are."""
        return load_mask(clip, generator=self._generator(clip))

    def _generator(self, clip: Clip) -> torch.Generator:
        return generator("cpu", self.seed, "precomputed clip", self.digests.digest(clip.path))

    def about_text(self, caption: str) -> dict[str, str]:
        """What a caption's entry is, for people."""
        shown = caption if len(caption) <= _SHOWN else caption[: _SHOWN - 3] + "..."
        return self._about("text", shown, self.text_words, self.text_identity)

    def about_video(self, clip: Clip) -> dict[str, str]:
        """What a clip's entry is, for people; the file's name without its folders."""
        words = self.vae_words + (", tiled" if self.tiled(clip.bucket) else "")
        words += ", tiled after an OOM" if self.tiled_late(clip.bucket) else ""
        about = self._about("video", Path(clip.path).name, words, self.vae.identity)
        return {**about, "bucket": "x".join(map(str, clip.bucket))}

    def about_mask(self, clip: Clip) -> dict[str, str]:
        """What a mask's entry is, for people."""
        assert clip.mask is not None, "the clip has no mask"
        about = self._about("mask", clip.mask.path.name, "", "")
        return {**about, "bucket": "x".join(map(str, clip.bucket))}

    def about_image(self, one: Picture) -> dict[str, str]:
        """What an image's entry is, for people."""
        about = self._about("image", one.path.name, self.vae_words, self.vae.identity)
        return {**about, "bucket": "x".join(map(str, (1, *one.size)))}

    def _about(self, kind: str, what: str, model: str, identity: str) -> dict[str, str]:
        return {"kind": kind, "of": what, "model": model, "identity": identity[:12], "versions": library_versions()}


@cache
def library_versions() -> str:
    """The libraries that encode, with their versions.

    Read once: looking a package up parses its whole description, which takes longer than encoding a caption.
    """
    found = []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def describe_model(model: ModelSection, part: Part) -> str:
    """A part of a model in a few words, without the machine's folders: `FAMILY VAE of someone/model, bf16`."""
    options = encoder_options(model, part)
    own = options.get("vae_id" if part == "vae" else "text_encoder_id")
    place = str(own or model.pretrained_model_name_or_path)
    name = Path(place).name if Path(place).exists() else place
    dtype = options["vae_dtype" if part == "vae" else "text_encoder_dtype"]
    tiled = ", tiled" if part == "vae" and model.enable_tiling else ""
    kind = options.get("quantize_text_encoders")
    quantized = f", quantized to {kind}" if kind else ""
    return f"{model.model_name} {'VAE' if part == 'vae' else 'text'} of {name}, {dtype}{tiled}{quantized}"


def encoder_options(model: ModelSection, part: Part) -> dict[str, object]:
    """The options that decide what a part of a model encodes to."""
    values = {name: getattr(model, name) for name, option in fields().items() if option.encodes in (part, "both")}
    if not values["part"]:  # so that names are what they were before it was an option
        del values["part"]
    if values.get("quantize_text_encoders") == "none":
        del values["quantize_text_encoders"]
    if "enable_tiling" in values:  # which clips are tiled by default, the entries' own keys say
        values["enable_tiling"] = bool(values["enable_tiling"])
    return values
