"""What is known of every item's file: remembered, or found out now, by its header or by decoding all of it.

Imports no torch.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

from .fates import Refusal
from .full_decode import decode_files
from .manifest import Item
from .media import look
from .probe import Probe, ProbeError, probe
from .probe_memory import ProbeMemory

logger = logging.getLogger(__name__)
T = TypeVar("T")

_THREADS = 16  # they wait for disks, mostly
_CHUNK = 32  # items that a thread takes at once
_TRIED = 64  # items by which the disk is judged
_FAR_S = 0.5e-3  # seconds of a look at a disk that is far away
_READ = 1 << 20
_LOG_S = 10.0

#: `(what, done, total)`, as work goes on.
Progress = Callable[[str, int, int], None]


def log_progress() -> Progress:
    """Progress as a line every ten seconds, for what is done while nobody may be looking."""
    logged = time.monotonic()

    def progress(what: str, done: int, total: int) -> None:
        nonlocal logged
        if time.monotonic() - logged > _LOG_S:
            logged = time.monotonic()
            logger.info("%s: %d of %d", what, done, total)

    return progress


@dataclass(frozen=True)
class Effort:
    """How closely files are looked at. Without any, headers are read, and what is remembered counts.

    Attributes:
        decode: decode every file from end to end.
        duplicates: compare the contents of files of equal size.
        recall: whether what is remembered counts.
        jobs: processes that decode; None: as many as there are processors.
        progress: is told how far it is.
    """

    decode: bool = False
    duplicates: bool = False
    recall: bool = True
    jobs: int | None = None
    progress: Progress | None = None


class Found(NamedTuple):
    """What is known of an item's file.

    Attributes:
        item: the item.
        size_bytes: of its file; 0 where there is none.
        answer: what its header says, or why it cannot be used.
        remarks: what decoding it has shown: `black`, `still`.
        decoded: whether all of it was decoded, now or earlier, and is whole.
        same_as: the first item with the same content, if contents were compared and there is one before this.
    """

    item: Item
    size_bytes: int
    answer: Probe | Refusal
    remarks: tuple[str, ...] = ()
    decoded: bool = False
    same_as: Item | None = None


def find_out(items: Sequence[Item], *, memory: ProbeMemory, max_pixels: int, effort: Effort) -> list[Found]:
    """What is known of every item, in order.

    Args:
        items: to look at; those that are refused already are not opened.
        memory: what is known of their files, and what will be.
        max_pixels: frames x height x width above which a file is not decoded.
        effort: how closely to look.
    """
    progress = effort.progress or log_progress()
    try:
        stats, answers = _headers(items, memory, max_pixels, progress)
        fulls = _fulls(items, stats, answers, memory, progress, effort)
        firsts = _contents(items, stats, answers, memory, progress) if effort.duplicates else {}
    finally:
        memory.close()
    found = []
    for place, (item, stat, answer) in enumerate(zip(items, stats, answers, strict=True)):
        full = fulls.get(place)
        if isinstance(full, Refusal):
            answer, full = full, None
        size = stat.st_size if isinstance(stat, os.stat_result) else 0
        first = items[firsts[place]] if place in firsts else None
        found.append(Found(item, size, answer, full or (), full is not None, first))
    return found


def _headers(
    items: Sequence[Item], memory: ProbeMemory, max_pixels: int, progress: Progress
) -> tuple[list[os.stat_result | None], list[Probe | Refusal]]:
    """For each item, its file's version (None where it must not be opened) and what its header says."""
    stats: list[os.stat_result | None] = []
    answers: list[Probe | Refusal | None] = []
    for item, looked in zip(items, _looked_up(items), strict=True):
        known = None if isinstance(looked, Refusal) else memory.recall(item.path, looked)
        stats.append(None if isinstance(looked, Refusal) else looked)
        answers.append(looked if isinstance(looked, Refusal) else known.header if known else None)

    def header(place: int) -> Probe | Refusal:
        item, stat = items[place], stats[place]
        assert stat is not None
        try:
            answer: Probe | Refusal = probe(item.path, kind=item.kind)
        except ProbeError as error:
            answer = error.refusal
            if not error.lasting:
                return answer
        memory.keep(item.path, stat, header=answer)
        return answer

    unknown = [place for place, answer in enumerate(answers) if answer is None]
    with ThreadPoolExecutor(_THREADS) as pool:
        for done, (place, answer) in enumerate(zip(unknown, pool.map(header, unknown), strict=True), start=1):
            answers[place] = answer
            progress("headers", done, len(unknown))
    return stats, [_bounded(answer, max_pixels) for answer in answers if answer is not None]


def _looked_up(items: Sequence[Item]) -> Iterator[os.stat_result | Refusal]:
    """What the file system says of each item's file. Threads help where its disk is far away, and hinder elsewhere."""

    def one(item: Item) -> os.stat_result | Refusal:
        return look(item.path) if item.refused is None else item.refused

    started = time.monotonic()
    yield from map(one, items[:_TRIED])
    if time.monotonic() - started < _TRIED * _FAR_S:
        yield from map(one, items[_TRIED:])
        return
    with ThreadPoolExecutor(_THREADS) as pool:
        for chunk in pool.map(lambda chunk: [one(item) for item in chunk], _chunks(items[_TRIED:], _CHUNK)):
            yield from chunk


def _bounded(answer: Probe | Refusal, max_pixels: int) -> Probe | Refusal:
    if isinstance(answer, Probe) and (total := answer.frames * answer.height * answer.width) > max_pixels:
        size = f"{answer.frames}x{answer.height}x{answer.width}"
        reason = f"{size} is {total:.3g} pixels, and `max_pixels` allows {max_pixels:.3g}; cut it up, or allow more"
        return Refusal("too_large", reason)
    return answer


def _fulls(
    items: Sequence[Item],
    stats: Sequence[os.stat_result | None],
    answers: Sequence[Probe | Refusal],
    memory: ProbeMemory,
    progress: Progress,
    effort: Effort,
) -> dict[int, Refusal | tuple[str, ...]]:
    """By place, what decoding whole files has shown: what is remembered, and with `decode` all the others."""
    fulls: dict[int, Refusal | tuple[str, ...]] = {}
    places: dict[Path, list[int]] = defaultdict(list)
    for place, (item, stat, answer) in enumerate(zip(items, stats, answers, strict=True)):
        if stat is None or not isinstance(answer, Probe):
            continue
        known = memory.recall(item.path, stat)
        if known is not None and known.full is not None:
            fulls[place] = known.full
        elif effort.decode:
            places[item.path].append(place)
    if places:
        firsts = {path: found[0] for path, found in places.items()}
        tasks = [(path, items[place].kind, answers[place]) for path, place in firsts.items()]
        for done, (path, full) in enumerate(decode_files(tasks, jobs=effort.jobs), start=1):  # type: ignore[arg-type]
            fulls.update(dict.fromkeys(places[path], full))
            stat = stats[firsts[path]]
            assert stat is not None
            if not isinstance(full, Refusal) or full.fate != "unreadable":  # a disk or a network that may be back
                memory.keep(path, stat, full=full)
            progress("decoding", done, len(tasks))
    return fulls


def _contents(
    items: Sequence[Item],
    stats: Sequence[os.stat_result | None],
    answers: Sequence[Probe | Refusal],
    memory: ProbeMemory,
    progress: Progress,
) -> dict[int, int]:
    """By place, the first place with the same content under another path; only files of equal size are read."""
    by_size: dict[int, dict[Path, int]] = defaultdict(dict)
    for place, (item, stat, answer) in enumerate(zip(items, stats, answers, strict=True)):
        if stat is not None and isinstance(answer, Probe):
            by_size[stat.st_size].setdefault(item.path, place)
    alike = [place for paths in by_size.values() if len(paths) > 1 for place in paths.values()]

    def digest(place: int) -> tuple[int, str | None]:
        stat = stats[place]
        assert stat is not None
        known = memory.recall(items[place].path, stat)
        if known is not None and known.digest is not None:
            return place, known.digest
        try:
            made = _digest(items[place].path)
        except OSError as error:
            logger.warning("not compared with others: %s", error)
            return place, None
        memory.keep(items[place].path, stat, digest=made)
        return place, made

    firsts: dict[str, int] = {}
    same: dict[Path, int] = {}
    with ThreadPoolExecutor(_THREADS) as pool:
        for done, (place, made) in enumerate(pool.map(digest, alike), start=1):
            if made is not None and (first := firsts.setdefault(made, place)) != place:
                same[items[place].path] = first
            progress("contents", done, len(alike))
    return {place: same[item.path] for place, item in enumerate(items) if item.path in same}


def _digest(path: Path) -> str:
    """Digest of a file's content."""
    digest = hashlib.blake2b(digest_size=20)
    with open(path, "rb") as file:
        while chunk := file.read(_READ):
            digest.update(chunk)
    return digest.hexdigest()


def _chunks(items: Iterable[T], size: int) -> Iterable[list[T]]:
    rest = iter(items)
    while chunk := list(islice(rest, size)):
        yield chunk
