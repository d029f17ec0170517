"""Probes the files of all items: by stored facts, by their headers, or by decoding all of them.

Imports no torch.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from finetrainers.utils.progress import StageProgress, Stages

from ..buckets.clip import Clip
from ..reading.items import Item
from ..reading.status import Mark, Unusable, UnusableError
from .file_facts import Facts, FileFacts
from .full_decode import decode_files
from .probe import NO_PROBE, Probe, probe

R = TypeVar("R")

logger = logging.getLogger(__name__)

_THREADS = 16  # they wait for disks, mostly


@dataclass(frozen=True)
class ProbeOptions:
    """How closely files are probed. By default headers are read, and stored facts count.

    Attributes:
        decode: decode every file from end to end.
        duplicates: compare the contents of files of equal size.
        recall: whether stored facts count.
        jobs: processes that decode; None: as many as there are processors.
        progress: called as work proceeds.
    """

    decode: bool = False
    duplicates: bool = False
    recall: bool = True
    jobs: int | None = None
    progress: StageProgress = field(default_factory=lambda: Stages(bars=False))


@dataclass(slots=True)
class ProbedItem:
    """An item with what is known of its file, how it will be decoded, and what is cut from it; filled in step by step.

    Attributes:
        item: the item.
        unusable: why it cannot be used; None: it can, as far as is known.
        header: what its header says; `NO_PROBE` where the file itself cannot be used.
        marks: what decoding all of it has shown, now or earlier: `black`, `still`; None: it was not decoded.
        same_as: the first item with the same content, if contents were compared and there is one before this.
        fps: frame rate that it is sampled at.
        available: frames that it has at that rate.
        backend: what decodes it.
        against: why that is not the backend that was asked for.
        further: its further media, by name.
        mask: its mask.
        white: mean brightness of the mask's pixels, from 0 to 1.
        clip: what is cut from it; with sliding windows or chunks the first.
    """

    item: Item
    unusable: Unusable | None
    header: Probe = NO_PROBE
    marks: tuple[Mark, ...] | None = None
    same_as: Item | None = None
    fps: float = 0.0
    available: int = 0
    backend: str = "pyav"
    against: str | None = None
    further: tuple[tuple[str, ProbedItem], ...] = ()
    mask: ProbedItem | None = None
    white: float | None = None
    clip: Clip | None = None

    def learn(self, found: Probe | Unusable | tuple[Mark, ...] | None) -> None:
        """Take what a file's header, or decoding all of it, has shown."""
        if isinstance(found, Probe):
            self.header = found
        elif isinstance(found, Unusable):
            self.unusable, self.header = found, NO_PROBE
        else:
            self.marks = found

    @property
    def size_bytes(self) -> int:
        """Of its file; 0 where there is none."""
        return 0 if self.item.state is None else self.item.state.st_size


def probe_items(items: Sequence[Item], *, facts: FileFacts, max_pixels: int, options: ProbeOptions) -> list[ProbedItem]:
    """Probe the file of every item, in order.

    Args:
        items: to probe; those that are unusable already are not opened.
        facts: what is known of their files, and what will be.
        max_pixels: frames x height x width above which a file is not decoded.
        options: how closely to look.
    """
    probed = [ProbedItem(item, item.unusable) for item in items]
    with facts.kept_open():
        known = [facts.of(item.path, item.state) for item in items]
        for entry, found in zip(probed, known, strict=True):
            entry.learn(_bounded(found.header, max_pixels))
        unknown = [e for e, found in zip(probed, known, strict=True) if e.unusable is None and found.header is None]
        for entry, answer in in_threads(lambda e: _header(e.item, facts), unknown, "read headers", options.progress):
            entry.learn(_bounded(answer, max_pixels))
        same = _compare(probed, facts, options.progress) if options.duplicates else {}
        for entry, found in zip(probed, known, strict=True):
            entry.same_as = same.get(entry.item.path)
            if entry.unusable is None:
                entry.learn(found.full)
        if options.decode:
            _decode([e for e in probed if e.unusable is None and e.marks is None], facts, options)
    return probed


def in_threads(
    function: Callable[[ProbedItem], R], entries: Sequence[ProbedItem], stage: str, progress: StageProgress
) -> Iterator[tuple[ProbedItem, R]]:
    """Yield each entry and its result, in order."""
    with ThreadPoolExecutor(_THREADS) as pool:
        for done, (entry, result) in enumerate(zip(entries, pool.map(function, entries), strict=True), start=1):
            yield entry, result
            progress(stage, done, len(entries))


def _header(item: Item, facts: FileFacts) -> Probe | Unusable:
    """What the file's header says, or why the file cannot be used."""
    try:
        answer: Probe | Unusable = probe(item.path, kind=item.kind)
    except UnusableError as error:
        answer = error.unusable
        if not error.lasting:
            return answer
    assert item.state is not None
    facts.keep(item.path, item.state, Facts(header=answer))
    return answer


def _bounded(answer: Probe | Unusable | None, max_pixels: int) -> Probe | Unusable | None:
    if isinstance(answer, Probe) and (total := answer.frames * answer.height * answer.width) > max_pixels:
        size = f"{answer.frames}x{answer.height}x{answer.width}"
        reason = f"{size} is {total:.3g} pixels, and `max_pixels` allows {max_pixels:.3g}; cut it up, or allow more"
        return Unusable("too_large", reason)
    return answer


def _decode(entries: Sequence[ProbedItem], facts: FileFacts, options: ProbeOptions) -> None:
    """Decode files from end to end, each once."""
    alike: dict[Path, list[ProbedItem]] = defaultdict(list)
    for entry in entries:
        alike[entry.item.path].append(entry)
    tasks = [(path, same[0].item.kind, same[0].header) for path, same in alike.items()]
    for done, (path, full) in enumerate(decode_files(tasks, jobs=options.jobs), start=1):
        for entry in alike[path]:
            entry.learn(full)
        state = alike[path][0].item.state
        assert state is not None
        if not isinstance(full, Unusable) or full.status != "unreadable":  # a disk or a network that may be back
            facts.keep(path, state, Facts(full=full))
        options.progress("decoded files", done, len(tasks))


def _compare(entries: Sequence[ProbedItem], facts: FileFacts, progress: StageProgress) -> dict[Path, Item]:
    """By path, the first item with the same content under another path; only files of equal size are read."""
    by_size: dict[int, dict[Path, ProbedItem]] = defaultdict(dict)
    for entry in entries:
        if entry.unusable is None:
            by_size[entry.size_bytes].setdefault(entry.item.path, entry)
    alike = [entry for paths in by_size.values() if len(paths) > 1 for entry in paths.values()]

    def digest(entry: ProbedItem) -> str | None:
        try:
            return facts.digest(entry.item.path)
        except OSError as error:
            logger.warning("not compared with others: %s", error)
            return None

    firsts: dict[str, Item] = {}
    same: dict[Path, Item] = {}
    for entry, made in in_threads(digest, alike, "compared files", progress):
        if made is not None and (first := firsts.setdefault(made, entry.item)) is not entry.item:
            same[entry.item.path] = first
    return same
