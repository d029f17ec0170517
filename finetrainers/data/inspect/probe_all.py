"""Probing of all items' files: by stored facts, by their headers, or by decoding them from end to end.

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
from ..reading.status import Decoded, InvalidSample, InvalidSampleError, Mark
from .file_facts import Facts, FileFacts
from .full_decode import decode_files
from .probe import NO_PROBE, Probe, probe

R = TypeVar("R")

logger = logging.getLogger(__name__)

_THREADS = 16  # mostly waiting for disks


@dataclass(frozen=True)
class ProbeOptions:
    """Options of probing. By default headers are read, and stored facts are used.

    Attributes:
        decode: whether every file is decoded from end to end.
        duplicates: whether the contents of files of equal size are compared.
        recall: whether stored facts are used.
        jobs: number of processes that decode, or None for one per processor.
        progress: called as work proceeds.
    """

    decode: bool = False
    duplicates: bool = False
    recall: bool = True
    jobs: int | None = None
    progress: StageProgress = field(default_factory=lambda: Stages(bars=False))


@dataclass(slots=True)
class ProbedItem:
    """An item with the probe of its file, its decoder, and the clip that is cut from it; filled in step by step.

    Attributes:
        item: the item.
        unusable: the reason why it cannot be used, or None if no reason is known yet.
        header: the probe of its header, or `NO_PROBE` if the file itself cannot be used.
        marks: the marks from decoding all of it, now or earlier: `black`, `still`; or None if it was not decoded.
        same_as: the first item with the same content, if contents were compared and there is one before this.
        fps: frame rate that it is sampled at.
        available: frames that it has at that rate.
        backend: the backend that decodes it.
        fallback_reason: the reason why that is not the configured backend.
        further: its further media, by name.
        mask: its mask.
        white: mean brightness of the mask's pixels, from 0 to 1.
        clip: the clip that is cut from it; with sliding windows or chunks the first.
    """

    item: Item
    unusable: InvalidSample | None
    header: Probe = NO_PROBE
    marks: tuple[Mark, ...] | None = None
    same_as: Item | None = None
    fps: float = 0.0
    available: int = 0
    backend: str = "pyav"
    fallback_reason: str | None = None
    further: tuple[tuple[str, ProbedItem], ...] = ()
    mask: ProbedItem | None = None
    white: float | None = None
    clip: Clip | None = None

    def update(self, finding: Probe | Decoded | None) -> None:
        """Store the result of probing a file's header, or of decoding all of it."""
        if isinstance(finding, Probe):
            self.header = finding
        elif isinstance(finding, InvalidSample):
            self.unusable, self.header = finding, NO_PROBE
        else:
            self.marks = finding

    @property
    def size_bytes(self) -> int:
        """The size of its file, or 0 if there is none."""
        return 0 if self.item.state is None else self.item.state.st_size


def probe_items(items: Sequence[Item], *, facts: FileFacts, max_pixels: int, options: ProbeOptions) -> list[ProbedItem]:
    """Probe the file of every item, in order.

    Args:
        items: to probe; those that are unusable already are not opened.
        facts: the store of facts about their files, which is read and extended.
        max_pixels: frames x height x width above which a file is not decoded.
        options: how closely to probe.
    """
    probed = [ProbedItem(item, item.unusable) for item in items]
    with facts.kept_open():
        stored = [facts.lookup(item.path, item.state) for item in items]
        for entry, item_facts in zip(probed, stored, strict=True):
            entry.update(_check_size(item_facts.header, max_pixels))
        unprobed = [entry for entry in probed if entry.unusable is None and entry.header is NO_PROBE]
        for entry, header in in_threads(
            lambda entry: _probe_header(entry.item, facts), unprobed, "read headers", options.progress
        ):
            entry.update(_check_size(header, max_pixels))
        duplicates = _compare(probed, facts, options.progress) if options.duplicates else {}
        for entry, item_facts in zip(probed, stored, strict=True):
            entry.same_as = duplicates.get(entry.item.path)
            if entry.unusable is None:
                entry.update(item_facts.full)
        if options.decode:
            _decode([entry for entry in probed if entry.unusable is None and entry.marks is None], facts, options)
    return probed


def in_threads(
    function: Callable[[ProbedItem], R], entries: Sequence[ProbedItem], stage: str, progress: StageProgress
) -> Iterator[tuple[ProbedItem, R]]:
    """Yield each entry and its result, in order."""
    with ThreadPoolExecutor(_THREADS) as pool:
        for done, (entry, result) in enumerate(zip(entries, pool.map(function, entries), strict=True), start=1):
            yield entry, result
            progress(stage, done, len(entries))


def _probe_header(item: Item, facts: FileFacts) -> Probe | InvalidSample:
    """Return the probe of the file's header, or the reason why the file cannot be used."""
    try:
        header: Probe | InvalidSample = probe(item.path, kind=item.kind)
    except InvalidSampleError as error:
        header = error.unusable
        if not error.lasting:
            return header
    assert item.state is not None
    facts.store(item.path, item.state, Facts(header=header))
    return header


def _check_size(header: Probe | InvalidSample | None, max_pixels: int) -> Probe | InvalidSample | None:
    if isinstance(header, Probe) and (total := header.frames * header.height * header.width) > max_pixels:
        size = f"{header.frames}x{header.height}x{header.width}"
        reason = f"{size} is {total:.3g} pixels, and `max_pixels` allows {max_pixels:.3g}; cut it up, or allow more"
        return InvalidSample("too_large", reason)
    return header


def _decode(entries: Sequence[ProbedItem], facts: FileFacts, options: ProbeOptions) -> None:
    """Decode files from end to end, each once."""
    by_path: dict[Path, list[ProbedItem]] = defaultdict(list)
    for entry in entries:
        by_path[entry.item.path].append(entry)
    tasks = [(path, same_file[0].item.kind, same_file[0].header) for path, same_file in by_path.items()]
    for done, (path, full) in enumerate(decode_files(tasks, jobs=options.jobs), start=1):
        for entry in by_path[path]:
            entry.update(full)
        state = by_path[path][0].item.state
        assert state is not None
        # An unreadable file is not stored: its disk or network may come back.
        if not isinstance(full, InvalidSample) or full.status != "unreadable":
            facts.store(path, state, Facts(full=full))
        options.progress("decoded files", done, len(tasks))


def _compare(entries: Sequence[ProbedItem], facts: FileFacts, progress: StageProgress) -> dict[Path, Item]:
    """Return, by path, the first item with the same content under another path; reads only files of equal size."""
    by_size: dict[int, dict[Path, ProbedItem]] = defaultdict(dict)
    for entry in entries:
        if entry.unusable is None:
            by_size[entry.size_bytes].setdefault(entry.item.path, entry)
    candidates = [entry for paths in by_size.values() if len(paths) > 1 for entry in paths.values()]

    def digest(entry: ProbedItem) -> str | None:
        try:
            return facts.digest(entry.item.path)
        except OSError as error:
            logger.warning("not compared with others: %s", error)
            return None

    first_items: dict[str, Item] = {}
    duplicates: dict[Path, Item] = {}
    for entry, content in in_threads(digest, candidates, "compared files", progress):
        if content is not None and (first := first_items.setdefault(content, entry.item)) is not entry.item:
            duplicates[entry.item.path] = first
    return duplicates
