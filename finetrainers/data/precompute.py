"""Encodes every caption and every clip once, into a cache that training then reads instead of running the encoders.

Two phases, so that text encoders and VAE never share memory. Ranks share the work; what is cached already is skipped,
so an interrupted run goes on where it stopped and several runs may share one cache.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from finetrainers.config.sections import DataSection
from finetrainers.utils.seeding import generator

from .bad_samples import BadSample, Note, Substitutes, load_clips
from .cache import CacheError, FileDigests, TensorCache
from .clip import Clip
from .decode import DecodeError, load_clip
from .encode import EMPTY, TEXT, EncodeText, EncodeVideo, encode_clip
from .loader import RawBatch
from .stream import MicroBatch

#: Raise when decoding, resizing or cropping changes, so that old entries are no longer found.
PIXELS_VERSION = 1

#: Called with (done, total) after every encoded item.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class CacheKeys:
    """Names cache entries by everything that determines them.

    Attributes:
        cache: where entries lie; digests of files are remembered beside them.
        digests: content digests of the media files.
        text_identity: names the text encoders, their weights, dtypes and options.
        vae_identity: names the VAE likewise.
        data: whether captions may be dropped, and to what.
        seed: seed of the random starts and crops.
        with_first_frame: whether entries also hold moments of the first frame alone.
    """

    cache: TensorCache
    digests: FileDigests
    text_identity: str
    vae_identity: str
    data: DataSection
    seed: int
    with_first_frame: bool = False

    def text(self, caption: str) -> str:
        """Key of a caption's conditioning."""
        return self.cache.key(kind="text", encoder=self.text_identity, caption=caption)

    def video(self, clip: Clip) -> str:
        """Key of a clip's moments. It holds the file's content, not its name, and no caption."""
        is_random = "random" in (clip.frame_selection, clip.reshape_mode)
        return self.cache.key(
            kind="video",
            vae=self.vae_identity,
            file=self.digests.of(clip.path),
            media=clip.kind,
            bucket=clip.bucket,
            fps=clip.fps,
            frame_selection=clip.frame_selection,
            reshape_mode=clip.reshape_mode,
            seed=self.seed if is_random else None,
            first_frame=self.with_first_frame,
            version=PIXELS_VERSION,
        )

    def pixels(self, clip: Clip) -> Tensor:
        """The clip `[3, T, H, W]`, with its one random start and crop drawn from seed and file content."""
        return load_clip(clip, generator=generator("cpu", self.seed, "precomputed clip", self.digests.of(clip.path)))


def precompute_text(
    captions: Iterable[str],
    encode_text: EncodeText,
    cache: TensorCache,
    key: Callable[[str], str],
    *,
    rank: int = 0,
    world_size: int = 1,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> int:
    """Encode this rank's share of the distinct captions, and the empty prompt. Returns how many were encoded."""
    share = sorted({"", *captions})[rank::world_size]
    todo = [caption for caption in share if not cache.has(key(caption))]
    for start in range(0, len(todo), batch_size):
        prompts = todo[start : start + batch_size]
        conditions = encode_text(prompts)
        for row, caption in enumerate(prompts):
            tensors = {name: tensor[row : row + 1] for name, tensor in conditions.tensors.items()}
            _refuse_non_finite(tensors, f"the caption {caption!r}")
            cache.put(key(caption), tensors)
        if progress:
            progress(start + len(prompts), len(todo))
    return len(todo)


def precompute_video(
    clips: Iterable[Clip],
    encode_video: EncodeVideo,
    keys: CacheKeys,
    *,
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 0,
    progress: Progress | None = None,
    optional: Collection[int] = (),
    unreadable: list[BadSample] | None = None,
) -> int:
    """Encode this rank's share of the clips, one at a time. Returns how many were to be encoded.

    Args:
        clips: all clips.
        encode_video: the VAE's.
        keys: names of entries.
        rank, world_size: whose share.
        num_workers: processes that decode.
        progress: called after every clip.
        optional: indices of clips that may be left out if they cannot be decoded.
        unreadable: gets these.
    """
    todo = {}
    for clip in list(clips)[rank::world_size]:
        key = keys.video(clip)
        if key not in todo and not keys.cache.has(key):
            todo[key] = clip
    loader = DataLoader(_Pixels(list(todo.values()), keys, optional), batch_size=None, num_workers=num_workers)
    for done, ((key, clip), video) in enumerate(zip(todo.items(), loader, strict=True), start=1):
        if isinstance(video, str):
            if unreadable is not None:
                unreadable.append(BadSample(clip, video))
        else:
            tensors = encode_clip(video[None], encode_video, with_first_frame=keys.with_first_frame)
            _refuse_non_finite(tensors, str(clip.path))
            keys.cache.put(key, tensors)
        if progress:
            progress(done, len(todo))
    return len(todo)


class _Pixels(Dataset["Tensor | str"]):
    """Decoded clips, so that worker processes can decode ahead of the VAE; of optional ones the reason if they cannot be."""

    def __init__(self, clips: Sequence[Clip], keys: CacheKeys, optional: Collection[int]) -> None:
        self.clips = clips
        self.keys = keys
        self.optional = optional

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, index: int) -> Tensor | str:
        clip = self.clips[index]
        try:
            return self.keys.pixels(clip)
        except DecodeError as error:
            if clip.index not in self.optional:
                raise
            return str(error)


@dataclass(frozen=True)
class CacheFetch:
    """Reads a micro-batch from the cache; the counterpart of `DecodeFetch`."""

    keys: CacheKeys
    substitutes: Substitutes | None = None

    def __call__(self, batch: MicroBatch, *, note: Note | None = None) -> RawBatch:
        """Read moments and conditioning, and that of the empty prompt where captions may be dropped.

        Raises:
            CacheError: an entry is missing or damaged, and nothing may take its place.
        """
        clips, entries, bad = load_clips(batch, self._load, substitutes=self.substitutes, note=note)
        cached = {name: torch.cat([entry[name] for entry in entries]) for name in entries[0]}
        if self.keys.data.caption_dropout_p > 0 and self.keys.data.caption_dropout_technique == "empty":
            cached.update(self._text("", EMPTY))
        return RawBatch(clips, batch.sample_keys, batch.weight, cached=cached, bad=bad)

    def _load(self, clip: Clip, key: tuple[int, int]) -> dict[str, Tensor]:
        caption = clip.caption_for(key, seed=self.keys.seed)
        return {**self._read(self.keys.video(clip), str(clip.path)), **self._text(caption, TEXT)}

    def _text(self, caption: str, prefix: str) -> dict[str, Tensor]:
        tensors = self._read(self.keys.text(caption), f"the caption {caption!r}")
        return {prefix + name: tensor for name, tensor in tensors.items()}

    def _read(self, key: str, what: str) -> dict[str, Tensor]:
        tensors = self.keys.cache.get(key)
        if tensors is None:
            raise CacheError(
                f"the cache {self.keys.cache.directory} has no sound entry for {what} (it or its file changed, or was "
                "damaged and is now removed); resume the run, which computes it again"
            )
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise CacheError(
                    f"the cache entry {self.keys.cache.path(key)} of {what} holds NaN or infinity in {name}"
                )
        return tensors


def _refuse_non_finite(tensors: dict[str, Tensor], what: str) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ValueError(f"encoding {what} gave {name} with NaN or infinity; try another `vae_dtype`, such as fp32")
