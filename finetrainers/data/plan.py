"""Decides, before any weight is loaded, what becomes of every item: its bucket, or why it cannot be used.

Imports no torch. The same data and options give the same plan on every machine and every rank.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from finetrainers.config.geometry import Geometry
from finetrainers.config.root import TrainConfig
from finetrainers.config.sections import DataSection
from finetrainers.utils.files import json_lines, write_text_atomic
from finetrainers.utils.garbage import no_collections
from finetrainers.utils.text import plural

from .buckets import Bucket
from .clip import Clip
from .frames import is_slower
from .manifest import DataError, read_items
from .placing import Placed, data_folder, place_items
from .probing import Effort
from .verdict import Verdict, give_verdict

#: Options that decide what is cut from the clips, beside the fingerprint; `--reset data` allows others.
_CRITICAL: Mapping[str, str | None] = dict.fromkeys(("target_fps", "frame_selection", "video_reshape_mode"), "data")
_NAMED = 5  # file names shown in a warning


@dataclass(frozen=True)
class DatasetPlan:
    """The data set as it will be trained on.

    Attributes:
        clips: training clips, in order of the data set.
        eval_clips: clips held out for the evaluation loss.
        verdicts: one for every item.
        buckets: the buckets in use, given or chosen.
        warnings: what the user should know, each with a count.
        notes: what was decided for the user.
        fingerprint: hex digest that changes with any file, caption or bucket; kept with checkpoints.
    """

    clips: tuple[Clip, ...]
    eval_clips: tuple[Clip, ...]
    verdicts: tuple[Verdict, ...]
    buckets: tuple[Bucket, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    fingerprint: str

    noun = "clip"
    fingerprint_of = "files, captions, buckets or held-out items"
    critical_options = _CRITICAL
    cut_in_batches = True
    title = "data"
    beside_memory = ""

    @property
    def count(self) -> int:
        """How many clips are trained on."""
        return len(self.clips)

    @property
    def size(self) -> Bucket:
        """The training bucket with most pixels, `(frames, height, width)`."""
        return max((clip.bucket for clip in self.clips), key=lambda b: b[0] * b[1] * b[2])

    @property
    def example(self) -> str:
        """Caption of the first clip."""
        return self.clips[0].caption

    @property
    def fps(self) -> float:
        """Frame rate of the first clip."""
        return self.clips[0].fps

    def write(self, path: Path) -> None:
        """Write the verdicts, one JSON object a line."""
        write_text_atomic(path, json_lines(verdict.record() for verdict in self.verdicts))

    def step_of(self, config: TrainConfig) -> str:
        """Clips of an optimizer step."""
        return f"{config.dataloader.batch_size * config.training.gradient_accumulation_steps} clips per process"

    def table(self) -> list[tuple[str, str, str, str]]:
        """For printing: a row of headings, then one for each bucket, largest first."""
        rows = [("bucket", "clips", "held out", "fps")]
        for bucket in sorted({clip.bucket for clip in (*self.clips, *self.eval_clips)}, reverse=True):
            train = [clip for clip in self.clips if clip.bucket == bucket]
            held_out = [clip for clip in self.eval_clips if clip.bucket == bucket]
            rates = sorted({round(clip.fps, 2) for clip in (*train, *held_out)})
            shown = f"{rates[0]:g}" if len(rates) == 1 else f"{rates[0]:g}-{rates[-1]:g}"
            rows.append(("x".join(map(str, bucket)), str(len(train)), str(len(held_out)), shown))
        return rows


def plan_clips(config: TrainConfig, geometry: Geometry, *, sizes_are_wrong: bool) -> DatasetPlan | None:
    """The plan of the configured data set; None where none is named, or where no clip can be placed.

    Raises:
        DataError: see `plan_dataset`.
    """
    if not (config.data.data_root or config.data.dataset_file):
        return None
    if sizes_are_wrong:  # whether the data is there can still be said
        read_items(config.data)
        return None
    return plan_dataset(config, geometry)


@dataclass(frozen=True)
class Survey:
    """What becomes of every item, before it is decided whether that will do.

    Attributes:
        verdicts: one for every item, in order.
        clips: training clips and held-out ones, in order of the data set.
        held_out: indices of held-out items.
        buckets: those in use, given or chosen.
        notes: what was decided for the user.
        warnings: what the user should know, each with a count.
        problem: why it cannot be trained on; None if it can.
    """

    verdicts: tuple[Verdict, ...]
    clips: tuple[Clip, ...]
    held_out: frozenset[int]
    buckets: tuple[Bucket, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    problem: DataError | None

    def plan(self) -> DatasetPlan:
        """What is trained on.

        Raises:
            DataError: `problem`.
        """
        if self.problem is not None:
            raise self.problem
        return DatasetPlan(
            clips=tuple(clip for clip in self.clips if clip.index not in self.held_out),
            eval_clips=tuple(clip for clip in self.clips if clip.index in self.held_out),
            verdicts=self.verdicts,
            buckets=self.buckets,
            warnings=self.warnings,
            notes=self.notes,
            fingerprint=_fingerprint(self.verdicts),
        )


def plan_dataset(config: TrainConfig, geometry: Geometry) -> DatasetPlan:
    """Read, probe and bucket the whole data set.

    Clips are sampled at `target_fps`, by default the model's own rate, and slower clips at their own. Held-out items
    are chosen by a hash of name and caption, so adding data does not reshuffle them.

    Raises:
        DataError: wrong metadata, illegal buckets, more than `max_bad_samples` unusable files, or nothing to train on.
    """
    return survey_dataset(config, geometry).plan()


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
    name = _namer(data)
    held_out, problem = frozenset[int](), None
    try:
        held_out = frozenset(_hold_out(placed.clips, data.eval_num_items, name))
    except DataError as error:
        problem = error
    verdicts = tuple(_verdicts(placed, held_out, name, target_fps=target_fps))
    rejected = [f"{v.name}: {v.reason}{f' ({v.where})' if v.where else ''}" for v in verdicts if v.use == "rejected"]
    if len(rejected) > data.max_bad_samples:
        allowed = f" and `max_bad_samples` allows {data.max_bad_samples}"
        problem = DataError(f"{len(rejected)} of {plural(len(items), 'item')} cannot be used{allowed}", rejected)
    return Survey(
        verdicts=verdicts,
        clips=tuple(placed.clips),
        held_out=held_out,
        buckets=tuple(dict.fromkeys(placed.buckets)),
        notes=tuple(placed.notes),
        warnings=tuple(_warnings(placed.clips, rejected, name, target_fps=target_fps)),
        problem=problem,
    )


def _hold_out(clips: Sequence[Clip], count: int, name: Callable[[Path], str]) -> set[int]:
    """Indices of the evaluation clips."""
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
    placed: Placed, held_out: frozenset[int], name: Callable[[Path], str], *, target_fps: float
) -> Iterator[Verdict]:
    clips: dict[int, list[Clip]] = defaultdict(list)
    for clip in placed.clips:
        clips[clip.index].append(clip)
    seen: set[str] = set()  # texts: hashing a path takes ten times as long
    for entry in placed.probed:
        item, first, path = entry.item, entry.found.same_as, str(entry.item.path)
        yield give_verdict(
            entry,
            clips.get(item.index, ()),
            name=name(item.path),
            refusal=placed.refusals.get(item.index),
            held_out=item.index in held_out,
            target_fps=target_fps,
            same_as=name(first.path) if first is not None else None,
            seen=path in seen,
        )
        seen.add(path)


def _fingerprint(verdicts: Sequence[Verdict]) -> str:
    digest = hashlib.sha256()
    for v in verdicts:
        digest.update(json.dumps([v.name, v.size_bytes, v.caption, v.bucket, v.use]).encode() + b"\n")
    return digest.hexdigest()


def _warnings(
    clips: Sequence[Clip], rejected: Sequence[str], name: Callable[[Path], str], *, target_fps: float
) -> list[str]:
    """One sentence for each kind of oddity, with a count and the first names."""
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
    ]
    found = []
    for what, names in kinds:
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            found.append(f"{plural(len(names), 'item')} {what}: {', '.join(names[:_NAMED])}{more}")
    return found
