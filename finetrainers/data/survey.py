"""What becomes of every item of the data: its bucket, or why it cannot be used. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from finetrainers.config.geometry import Geometry
from finetrainers.config.root import TrainConfig
from finetrainers.config.sections import DataSection
from finetrainers.utils.garbage import no_collections
from finetrainers.utils.text import plural

from .bucket_choice import named_buckets
from .buckets import Bucket
from .clip import Clip, cut_to
from .frames import is_slower
from .manifest import DataError, read_items
from .placing import Placed, data_folder, place_items
from .probing import Effort
from .verdict import Verdict, give_verdict
from .windows import apart, first_of_items, item_of

_NAMED = 5  # file names shown in a warning


@dataclass(frozen=True)
class Survey:
    """What becomes of every item, before it is decided whether that will do.

    Attributes:
        verdicts: one for every item, in order.
        clips: what would be trained on, in order of the items.
        eval_clips: what is held out for the evaluation loss.
        buckets: those in use, given or chosen.
        notes: what was decided for the user.
        warnings: what the user should know, each with a count.
        problem: why it cannot be trained on; None if it can.
    """

    verdicts: tuple[Verdict, ...]
    clips: tuple[Clip, ...]
    eval_clips: tuple[Clip, ...]
    buckets: tuple[Bucket, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    problem: DataError | None

    @property
    def fingerprint(self) -> str:
        """Hex digest that changes with any file, caption or bucket, and with what is held out."""
        digest = hashlib.sha256()
        others = [
            [c.index, c.lower, c.repeats, c.dataset]
            for c in self.clips
            if (c.lower, c.repeats, c.dataset) != ((), 1.0, 0)
        ]
        if others:
            digest.update(json.dumps(others).encode() + b"\n")
        for v in self.verdicts:
            digest.update(json.dumps([v.name, v.size_bytes, v.caption, v.bucket, v.use, v.examples]).encode() + b"\n")
        return digest.hexdigest()


def survey_dataset(config: TrainConfig, geometry: Geometry, *, effort: Effort | None = None) -> Survey:
    """What becomes of every item of the data set.

    Args:
        config: names the data set.
        geometry: which sizes the model takes, and its frame rate.
        effort: how closely to look at the files; None: their headers, unless they are remembered.

    Raises:
        DataError: wrong metadata, or illegal buckets.
    """
    with no_collections():
        return _survey(config, geometry, effort or Effort())


def _survey(config: TrainConfig, geometry: Geometry, effort: Effort) -> Survey:
    data = config.data
    target_fps = data.target_fps or geometry.fps
    items = read_items(data)
    placed = place_items(items, data=data, geometry=geometry, effort=effort)
    for option, named in (
        ("bucket_keep", data.bucket_keep),
        ("bucket_batch_sizes", config.dataloader.bucket_batch_sizes),
    ):
        named_buckets(option, named, placed.buckets)
    name = _namer(data)
    held_out, problem = frozenset[int](), None
    try:
        held_out = frozenset(_hold_out(first_of_items(placed.clips), data.eval_num_items, name))
    except DataError as error:
        problem = error
    clips = tuple(clip for clip in placed.clips if item_of(clip.index) not in held_out)
    # Always measured in the same bucket.
    evaluated = apart(cut_to(clip, clip.bucket) for clip in placed.clips if item_of(clip.index) in held_out)
    verdicts = tuple(_verdicts(placed, (*clips, *evaluated), held_out, name, target_fps=target_fps))
    rejected = [f"{v.name}: {v.reason}{f' ({v.where})' if v.where else ''}" for v in verdicts if v.use == "rejected"]
    if len(rejected) > data.max_bad_samples:
        allowed = f" and `max_bad_samples` allows {data.max_bad_samples}"
        problem = DataError(f"{len(rejected)} of {plural(len(items), 'item')} cannot be used{allowed}", rejected)
    return Survey(
        verdicts=verdicts,
        clips=clips,
        eval_clips=tuple(evaluated),
        buckets=tuple(dict.fromkeys(placed.buckets)),
        notes=tuple(placed.notes),
        warnings=tuple(_warnings(placed, rejected, name, data=data, target_fps=target_fps)),
        problem=problem,
    )


def _hold_out(clips: Sequence[Clip], count: int, name: Callable[[Path], str]) -> set[int]:
    """Indices of the items that are evaluated. Windows of an item stay together: they overlap."""
    if count and count >= len(clips):
        raise DataError(
            f"`eval_num_items` {count} leaves nothing to train on: there are {plural(len(clips), 'usable item')}"
        )
    if not clips:
        raise DataError("no usable item")
    if not count:
        return set()

    def digest(clip: Clip) -> bytes:
        return hashlib.sha256(f"{name(clip.path)}\0{clip.caption}".encode(errors="surrogateescape")).digest()

    return {clip.index for clip in sorted(clips, key=digest)[:count]}


def _namer(data: DataSection) -> Callable[[Path], str]:
    """A function from a path to its name below the data set's folder, which does not depend on the machine."""
    prefix = f"{data_folder(data)}{os.sep}"

    def name(path: Path) -> str:
        return str(path).removeprefix(prefix).replace(os.sep, "/")

    return name


def _verdicts(
    placed: Placed, clips: Sequence[Clip], held_out: frozenset[int], name: Callable[[Path], str], *, target_fps: float
) -> Iterator[Verdict]:
    of_item: dict[int, list[Clip]] = defaultdict(list)
    for clip in clips:
        of_item[item_of(clip.index)].append(clip)
    seen: set[str] = set()  # texts: hashing a path takes ten times as long
    for entry in placed.probed:
        item, first, path = entry.item, entry.found.same_as, str(entry.item.path)
        yield give_verdict(
            entry,
            of_item.get(item.index, ()),
            name=name(item.path),
            refusal=placed.refusals.get(item.index),
            held_out=item.index in held_out,
            target_fps=target_fps,
            same_as=name(first.path) if first is not None else None,
            seen=path in seen,
        )
        seen.add(path)


def _warnings(
    placed: Placed, rejected: Sequence[str], name: Callable[[Path], str], *, data: DataSection, target_fps: float
) -> list[str]:
    """One sentence for each kind of oddity, with a count and the first names."""
    clips = first_of_items(placed.clips)
    videos = [clip for clip in clips if clip.kind == "video"]
    captions = Counter((str(clip.path), clip.caption) for clip in clips)
    kinds: list[tuple[str, list[str]]] = [
        ("cannot be used and left out", list(rejected)),
        ("without a caption", [name(clip.path) for clip in clips if not clip.caption]),
        (
            f"slower than {target_fps:g} fps and trained at their own rate",
            [f"{name(c.path)} ({c.source_fps:.4g} fps)" for c in videos if is_slower(c.source_fps, target_fps)],
        ),
        (
            "smaller than their bucket and enlarged",
            [name(c.path) for c in clips if c.height < c.bucket[1] or c.width < c.bucket[2]],
        ),
        ("listed more than once", [name(Path(path)) for (path, _), count in captions.items() if count > 1]),
        (
            f"decoded by PyAV, since {data.video_backend} may show other pixels",
            [f"{name(entry.item.path)} ({entry.against})" for entry in placed.probed if entry.against],
        ),
    ]
    found = []
    for what, names in kinds:
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            found.append(f"{plural(len(names), 'item')} {what}: {', '.join(names[:_NAMED])}{more}")
    return found
