"""Precomputation of captions and clips into a cache, which training reads instead of running the encoders.

There are two phases, so that text encoders and VAE never share memory. Ranks share the work. Entries that are cached
already are skipped, so an interrupted run resumes where it stopped and several runs may share a cache.
"""

from __future__ import annotations

import errno
import logging
import math
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, islice

import torch
from torch import Tensor

from finetrainers.config.sections import DataloaderSection
from finetrainers.parallel.ranks import DistributedContext
from finetrainers.utils.host_memory import freed_memory_is_reused
from finetrainers.utils.progress import Meter
from finetrainers.utils.seeding import generator
from finetrainers.utils.text import file_size

from ..buckets.clip import Clip, TextImageSource
from ..buckets.windows import cut_latents, encoded_clip
from ..cache.keys import CacheKeys
from ..cache.store import CacheError, TensorCache, is_finite
from ..reading.prior_prompts import PriorPrompts
from ..video.masks import latent_weights
from .bad_samples import PROBLEMS, BadSample, ReplacementClips, load_clips
from .batch_sampler import MicroBatch
from .encode import EMPTY, PRIOR, TEXT, EncodeClip, EncodeText, stack_videos
from .loader import PixelFetch, RawBatch
from .prefetch import AHEAD, prefetch
from .workers import Workers

logger = logging.getLogger(__name__)

#: Number of captions that are encoded at a time.
TEXT_BATCH_SIZE = 8
#: The name of the tensor in an entry of a mask.
_MASK = "mask"


@dataclass(frozen=True)
class Encoded:
    """Counts of a precomputation, of one process or of all together.

    Attributes:
        encoded: entries that were written.
        found: entries that were cached already.
        bad: clips that could not be read or decoded.
        size_bytes: of the entries that were written.
    """

    encoded: int = 0
    found: int = 0
    bad: tuple[BadSample, ...] = ()
    size_bytes: int = 0

    def __add__(self, other: Encoded) -> Encoded:
        return Encoded(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


@contextmanager
def _progress(noun: str, parallel: DistributedContext) -> Iterator[Meter]:
    """Show the progress of this rank's share; its failure is raised on all ranks, which would wait for it otherwise."""
    label = noun if parallel.world_size == 1 else f"{noun} of this process's share"
    meter = Meter("encoded", label, enabled=parallel.rank == 0)
    with parallel.raise_on_all_ranks(f"encoding {noun} before training"), meter:
        yield meter


def precompute_text(
    captions: Iterable[str],
    encode_text: EncodeText,
    keys: CacheKeys,
    parallel: DistributedContext,
    *,
    noun: str = "captions",
) -> Encoded:
    """Encode the distinct captions and the empty prompt, a share on each rank, and return the counts of all ranks."""
    inputs = [(caption, None) for caption in sorted({"", *captions})]
    return _encode_texts(inputs, encode_text, keys, parallel, noun=noun, batch_size=TEXT_BATCH_SIZE)


def precompute_with_images(
    texts: Collection[tuple[str, TextImageSource]],
    encode: EncodeText,
    keys: CacheKeys,
    parallel: DistributedContext,
    *,
    optional: bool = False,
) -> Encoded:
    """Encode prompts together with images, one by one, a share on each rank, and return the counts of all ranks.

    A clip is decoded for it, and again when its latents are encoded: text encoders and VAE never share memory.

    Args:
        texts: distinct prompts, each with the source of its image.
        encode: see `ModelSpec.encode_with_images`.
        keys: names of entries.
        parallel: the processes of the run.
        optional: whether clips that cannot be decoded are skipped here; encoding their latents then handles them.
    """
    inputs = sorted(texts, key=repr)
    return _encode_texts(inputs, encode, keys, parallel, noun="captions with images", batch_size=1, optional=optional)


def _encode_texts(
    inputs: Sequence[tuple[str, TextImageSource | None]],
    encode: EncodeText,
    keys: CacheKeys,
    parallel: DistributedContext,
    *,
    noun: str,
    batch_size: int,
    optional: bool = False,
) -> Encoded:
    """Encode a share of the captions, each with the source of its image or None; return the counts of all ranks."""
    rank_inputs = inputs[parallel.rank :: parallel.world_size]
    with _progress(noun, parallel) as progress:
        keys.digests.learn({source.path for _, source in rank_inputs if source is not None})
        inputs_by_key = {keys.text(caption, source): (caption, source) for caption, source in rank_inputs}
        todo = [(key, *inputs_by_key[key]) for key in keys.cache.missing(inputs_by_key)]
        size = 0
        progress(0, len(todo))
        for start in range(0, len(todo), batch_size):
            batch = todo[start : start + batch_size]
            try:
                images = [keys.picture(source) for _, _, source in batch if source is not None]
            except PROBLEMS:
                if not optional:
                    raise
                continue
            conditions = encode([caption for _, caption, _ in batch], *([images] if images else []))
            for row, (key, caption, source) in enumerate(batch):
                tensors = {name: tensor[row : row + 1] for name, tensor in conditions.tensors.items()}
                name = f"the caption {caption!r}" + (f" with {source.path}" if source else "")
                _refuse_non_finite(tensors, name, "text_encoder_dtype")
                size += keys.cache.put(key, tensors, keys.about_text(caption))
            if start == 0 and not images:
                remaining_bytes = size / len(batch) * (len(todo) - len(batch))
                check_free_space(keys.cache, remaining_bytes * parallel.world_size, noun=noun)
            progress(start + len(batch), len(todo))
        counts = Encoded(encoded=len(todo), found=len(inputs_by_key) - len(todo), size_bytes=size)
    total = sum(parallel.gather_objects([counts]), Encoded())
    keys.digests.refresh()
    return total


def precompute_video(
    clips: Iterable[Clip],
    encode_clip: EncodeClip,
    keys: CacheKeys,
    parallel: DistributedContext,
    *,
    loading: DataloaderSection,
    optional: Collection[int] = (),
) -> Encoded:
    """Encode the clips, a share on each rank, and return the counts of all ranks.

    Args:
        clips: all clips.
        encode_clip: the encoder of the model.
        keys: names of entries.
        parallel: the processes of the run.
        loading: worker processes that decode; those that die or hang are restarted.
        optional: indices of clips that may be left out if they cannot be read or decoded.

    Raises:
        WorkersLost: workers die or hang at the same clip again and again.
    """
    # Clips that differ only in their captions are encoded once. Sorted, so that batches are full and shares cost about
    # the same; the largest bucket first, so that running out of memory happens at once.
    distinct = {repr((clip.files, keys.cut(clip))): clip for clip in clips}
    largest_first = sorted(distinct.values(), key=lambda clip: (-math.prod(clip.bucket), clip.bucket, clip.index))
    rank_clips = largest_first[parallel.rank :: parallel.world_size]
    with _progress("clips", parallel) as progress, freed_memory_is_reused():
        keys.digests.learn(path for clip in rank_clips for path in clip.files)
        todo, num_cached, bad_samples = _find_missing(rank_clips, keys, optional, make_key=keys.video)
        done = encoded = size = 0
        progress(0, len(todo))
        remaining_pixels = sum(
            math.prod(clip.bucket) for _, clip in todo
        )  # pixels times frames, as entries' sizes are proportional
        videos = _decode([clip for _, clip in todo], keys, loading, optional)
        for batch in _bucket_batches(todo, videos, keys.data.precompute_batch_size):
            decodable = [(key, clip, video) for key, clip, video in batch if isinstance(video, Tensor)]
            bad_samples += [BadSample(clip, reason) for _, clip, reason in batch if isinstance(reason, str)]
            written = _encode_batch(decodable, encode_clip, keys) if decodable else 0
            remaining_pixels -= sum(math.prod(clip.bucket) for _, clip, _ in batch)
            if decodable and not encoded:
                per_pixel = written / sum(math.prod(clip.bucket) for _, clip, _ in decodable)
                check_free_space(keys.cache, per_pixel * remaining_pixels * parallel.world_size, noun="clips")
            size += written
            encoded += len(decodable)
            done += len(batch)
            progress(done, len(todo))
        counts = Encoded(encoded, num_cached, tuple(bad_samples), size)
    total = sum(parallel.gather_objects([counts]), Encoded())
    # Keys of other ranks' entries need the digests that those ranks have computed; worker processes inherit them.
    keys.digests.refresh()
    return total


def precompute_masks(
    clips: Iterable[Clip],
    keys: CacheKeys,
    parallel: DistributedContext,
    *,
    threads: int,
    optional: Collection[int] = (),
) -> Encoded:
    """Pool the masks of clips to their latents, a share on each rank, and return the counts of all ranks.

    Args:
        clips: all clips; those without a mask are skipped.
        keys: names of entries.
        parallel: the processes of the run.
        threads: the number of threads that decode.
        optional: indices of clips that may be left out if their mask cannot be decoded.
    """
    masked = {repr((clip.mask, clip.path, keys.cut(clip))): clip for clip in clips if clip.mask is not None}
    if not masked:
        return Encoded()
    rank_clips = [masked[name] for name in sorted(masked)][parallel.rank :: parallel.world_size]
    with _progress("masks", parallel) as progress:
        keys.digests.learn(
            path for clip in rank_clips for path in (clip.path, clip.mask.path if clip.mask else clip.path)
        )
        todo, num_cached, bad_samples = _find_missing(rank_clips, keys, optional, make_key=keys.mask)
        size = 0
        order = [MicroBatch(0, (clip,)) for _, clip in todo]
        pooled = prefetch(order, PixelFetch(keys, optional, keys.pooled), threads=threads, ahead=AHEAD)
        for position, ((key, clip), mask) in enumerate(zip(todo, pooled, strict=True), start=1):
            if isinstance(mask, str):
                bad_samples.append(BadSample(clip, mask))
            else:
                size += keys.cache.put(key, {_MASK: mask}, keys.about_mask(clip))
            progress(position, len(todo))
        counts = Encoded(len(todo), num_cached, tuple(bad_samples), size)
    total = sum(parallel.gather_objects([counts]), Encoded())
    keys.digests.refresh()
    return total


def _find_missing(
    clips: Sequence[Clip], keys: CacheKeys, optional: Collection[int], *, make_key: Callable[[Clip], str]
) -> tuple[list[tuple[str, Clip]], int, list[BadSample]]:
    """Return keys and clips without an entry, the number of entries, and the clips whose file cannot be read."""
    clips_by_key: dict[str, Clip] = {}
    bad_samples: list[BadSample] = []
    for clip in clips:
        try:
            clips_by_key.setdefault(make_key(clip), clip)
        except OSError as error:
            if clip.index not in optional:
                raise
            bad_samples.append(BadSample(clip, str(error)))
    missing = [(key, clips_by_key[key]) for key in keys.cache.missing(clips_by_key)]
    return missing, len(clips_by_key) - len(missing), bad_samples


def _decode(
    clips: Sequence[Clip], keys: CacheKeys, loading: DataloaderSection, optional: Collection[int]
) -> Iterator[Tensor | str]:
    """Return the pixels of each clip, or the reason why an optional one cannot be decoded.

    A whole batch is decoded while the VAE encodes the one before.
    """
    order = [MicroBatch(0, (clip,)) for clip in clips]
    fetch = PixelFetch(keys, optional, keys.pixels)
    count, timeout_s = loading.dataloader_num_workers, loading.dataloader_timeout
    ahead = max(AHEAD, math.ceil(keys.data.precompute_batch_size / max(1, count)))
    if not count or not clips:
        return prefetch(order, fetch, threads=1, ahead=ahead)
    return Workers(order, fetch, clips=clips, count=count, ahead=ahead, timeout_s=timeout_s).batches()


def _encode_batch(batch: Sequence[tuple[str, Clip, Tensor]], encode_clip: EncodeClip, keys: CacheKeys) -> int:
    """Encode clips of one bucket, write their entries and return the bytes of these."""
    videos = stack_videos([video for _, _, video in batch])
    encoded = encode_clip(videos, [generator("cpu", keys.seed, "first frame noise", key) for key, _, _ in batch])
    size = 0
    for row, (key, clip, _) in enumerate(batch):
        tensors = {name: tensor[row : row + 1] for name, tensor in encoded.items()}
        _refuse_non_finite(tensors, str(clip.path), "vae_dtype")
        size += keys.cache.put(key, tensors, keys.about_video(clip))
    return size


def check_free_space(cache: TensorCache, needed: float, *, noun: str) -> None:
    """Raise if the disk cannot hold the remaining entries, estimated from the first ones.

    Args:
        cache: the cache into which entries are written.
        needed: estimated bytes of the remaining entries, of all ranks.
        noun: the name of their sources in the message.

    Raises:
        OSError: the disk has less free space than that (ENOSPC).
    """
    free = shutil.disk_usage(cache.directory).free
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"not enough disk space in {cache.directory}: the remaining {noun} need about "
            f"{file_size(round(needed))}, and {file_size(free)} is free; free up space, or set another "
            "--precompute_dir (existing entries are kept)",
        )


def _bucket_batches(
    todo: Sequence[tuple[str, Clip]], videos: Iterable[Tensor | str], size: int
) -> Iterator[list[tuple[str, Clip, Tensor | str]]]:
    """Yield clips of one bucket at a time, with their pixels, or the reason why there are none."""
    decoded = ((key, clip, video) for (key, clip), video in zip(todo, videos, strict=True))
    for _, same_bucket in groupby(decoded, key=lambda entry: entry[1].bucket):
        while batch := list(islice(same_bucket, size)):
            yield batch


@dataclass(frozen=True)
class CacheFetch:
    """A loader of micro-batches from the cache; the counterpart of `DecodeFetch`."""

    keys: CacheKeys
    substitutes: ReplacementClips | None = None
    prior: PriorPrompts | None = None

    def __call__(self, batch: MicroBatch) -> RawBatch:
        """Read moments and conditioning, including that of the empty prompt where captions may be dropped.

        Raises:
            CacheError: an entry is missing or damaged, and has no substitute.
        """
        clips, loaded, bad_samples = load_clips(batch, self._load, substitutes=self.substitutes)
        entries, masks = zip(*loaded, strict=True)
        cached = {name: torch.cat([entry[name] for entry in entries]) for name in entries[0]}
        if self._drops_to_empty and not self.keys.texts_see_images:
            cached.update(self._read_text("", EMPTY))
        return RawBatch(clips, batch.sample_keys, batch.weight, cached=cached, bad=bad_samples, masks=masks)

    def _load(self, clip: Clip, key: tuple[int, int]) -> tuple[dict[str, Tensor], Tensor | None]:
        tensors, mask = self._read_tensors(clip, key), None
        if clip.mask is not None:
            mask = latent_weights(clip, cut_latents(self._read_mask(encoded_clip(clip)), clip))
        return tensors, mask

    def _read_mask(self, clip: Clip) -> Tensor:
        """Return the pooled mask of a clip; unlike other entries, a damaged one is made again: that takes no model."""
        key = self.keys.mask(clip)
        if (entry := self.keys.cache.get(key)) is not None:
            return entry[_MASK]
        pooled = self.keys.pooled(clip)
        self.keys.cache.put(key, {_MASK: pooled}, self.keys.about_mask(clip))
        logger.warning("made the cache entry %s again", self.keys.cache.path(key))
        return pooled

    def _read_tensors(self, clip: Clip, key: tuple[int, int]) -> dict[str, Tensor]:
        encoded = encoded_clip(clip)
        moments = self._read(self.keys.video(encoded), str(clip.path))
        # Copied, so that a window does not keep its whole segment in memory.
        moments = {name: cut_latents(tensor, clip).clone() for name, tensor in moments.items()}
        caption = clip.caption_for(key, seed=self.keys.seed)
        prior = {} if self.prior is None else self._read_text(self.prior.of(caption, key), PRIOR)
        if not self.keys.texts_see_images:
            return {**moments, **self._read_text(caption, TEXT), **prior}
        empty = self._read_text("", EMPTY, encoded) if self._drops_to_empty else {}
        return {**moments, **self._read_text(caption, TEXT, encoded), **empty}

    @property
    def _drops_to_empty(self) -> bool:
        """True if the conditioning of the empty prompt is needed."""
        return self.keys.data.caption_dropout_p > 0 and self.keys.data.caption_dropout_technique == "empty"

    def _read_text(self, caption: str, prefix: str, source: TextImageSource | None = None) -> dict[str, Tensor]:
        tensors = self._read(self.keys.text(caption, source), f"the caption {caption!r}")
        return {prefix + name: tensor for name, tensor in tensors.items()}

    def _read(self, key: str, name: str) -> dict[str, Tensor]:
        tensors = self.keys.cache.get(key)
        if tensors is None:
            raise CacheError(
                f"the cache {self.keys.cache.directory} has no valid entry for {name} (it or its file changed, or "
                "was damaged and is now removed); resume the run, which computes it again. To look for others after "
                f"a power cut, run: finetrainers cache verify {self.keys.cache.directory.parent} --repair"
            )
        for tensor_name, tensor in tensors.items():
            if not is_finite(tensor):
                raise CacheError(
                    f"the cache entry {self.keys.cache.path(key)} of {name} holds NaN or infinity in {tensor_name}; "
                    f"remove it with: finetrainers cache verify {self.keys.cache.directory.parent} --repair"
                )
        return tensors


def _refuse_non_finite(tensors: dict[str, Tensor], source: str, option: str) -> None:
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise ValueError(
                f"encoding {source} produced {name} with NaN or infinity; use another --{option}, such as fp32"
            )
