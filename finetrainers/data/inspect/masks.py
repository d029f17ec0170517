"""Checks of a dataset's masks before loading: they match their clips, are grey, and leave pixels to train.

Every mask is decoded once, and its brightness is stored with the other facts of files. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from finetrainers.utils.text import plural

from ..reading.items import Item, Kind
from ..reading.media import error_reason, is_lasting, is_out_of_memory, open_image, to_rgb
from ..reading.sources.rows import printable_name
from ..reading.status import InvalidSample, InvalidSampleError, Status
from ..video.pyav import PyavReader
from .file_facts import Facts, FileFacts
from .item_report import DISTORTED, ItemReport
from .probe_all import ProbedItem, ProbeOptions, in_threads, probe_items

_COLORED = 48  # levels between channels of a pixel, beyond what compression does to grey
_BLACK = 8  # levels that compression may add to black


def probe_masks(
    probed: Sequence[ProbedItem],
    masks: Mapping[int, Item],
    *,
    facts: FileFacts,
    max_pixels: int,
    options: ProbeOptions,
    lowest: float,
) -> None:
    """Probe and decode the masks of items; a mask that cannot be used makes its item unusable.

    Args:
        probed: the items, whose `mask` and `white` are set.
        masks: see `Reading`.
        facts: the store of facts about the files, which is read and extended.
        max_pixels: frames x height x width above which a file is not decoded.
        options: how closely to probe.
        lowest: weight of black pixels; above 0, masks may be black.
    """
    if not masks:
        return
    entries = [entry for entry in probed if entry.item.index in masks]
    mask_items = [masks[entry.item.index] for entry in entries]
    for entry, mask in zip(
        entries, probe_items(mask_items, facts=facts, max_pixels=max_pixels, options=options), strict=True
    ):
        entry.mask = mask
        entry.unusable = entry.unusable or _mismatch(entry, mask)
    sound = [entry for entry in entries if entry.unusable is None]
    with facts.kept_open():
        for entry, brightness in in_threads(
            lambda entry: _find_brightness(entry.mask, facts), sound, "read masks", options.progress
        ):
            if isinstance(brightness, InvalidSample):
                entry.unusable = _mask_problem(entry, brightness)
            elif brightness == 0 and not lowest:
                reason = (
                    "black everywhere, so that nothing of the clip is trained; remove the clip, or give an "
                    "--unmasked_weight"
                )
                entry.unusable = _mask_problem(entry, InvalidSample("mismatch", reason))
            else:
                entry.white = brightness


def _mask_problem(entry: ProbedItem, problem: InvalidSample) -> InvalidSample:
    assert entry.mask is not None
    return InvalidSample(
        "missing" if problem.status == "skipped" else problem.status,
        f"its mask {printable_name(entry.mask.item.name)}: {problem.reason}",
    )


def _mismatch(entry: ProbedItem, mask: ProbedItem) -> InvalidSample | None:
    """Return the reason why a mask does not match its clip, or None if it does.

    It must be an image, or have a frame for each of the clip's, in the same shape.
    """
    if mask.unusable is not None:
        return _mask_problem(entry, mask.unusable)
    clip, mask_header = entry.header, mask.header
    if mask.item.kind == "video" and entry.item.kind == "image":
        return _mask_problem(entry, InvalidSample("mismatch", "a video, and its clip is an image; give an image"))
    if mask.item.kind == "video" and mask_header.frames != clip.frames:
        actual, required = (plural(header.frames, "frame") for header in (mask_header, clip))
        remedy = "give one with a frame for each of the clip's, or one image for all of them"
    elif abs(mask_header.width / mask_header.height * clip.height / clip.width - 1) > DISTORTED:
        actual, required = (f"{header.width}x{header.height} pixels" for header in (mask_header, clip))
        remedy = "give one of the clip's aspect ratio"
    else:
        return None
    return _mask_problem(entry, InvalidSample("mismatch", f"{actual}, and the clip has {required}; {remedy}"))


def _find_brightness(mask: ProbedItem | None, facts: FileFacts) -> float | InvalidSample:
    """Return the mean brightness of a mask, 0 only if all of it is black, or the reason why it is not a mask."""
    assert mask is not None
    item = mask.item
    stored = facts.lookup(item.path, item.state).white
    if stored is not None:
        return stored
    try:
        brightness: float | InvalidSample = mask_brightness(item.path, item.kind)
    except InvalidSampleError as error:
        brightness = error.unusable
    except Exception as error:
        if is_out_of_memory(error):
            raise
        status: Status = "damaged" if is_lasting(error) else "unreadable"
        brightness = InvalidSample(status, f"cannot be decoded: {error_reason(error)}")
    assert item.state is not None
    # An unreadable file is not stored: its disk or network may come back.
    if not isinstance(brightness, InvalidSample) or brightness.status != "unreadable":
        facts.store(item.path, item.state, Facts(white=brightness))
    return brightness


def mask_brightness(path: Path, kind: Kind) -> float:
    """Return the mean brightness of a mask's pixels, from 0 to 1; 0 only if all are black, up to compression.

    Raises:
        InvalidSampleError: the mask has colors or transparency.
        Exception: whatever PIL and PyAV raise for damaged files.
    """
    total = count = brightest = 0
    for pixels in _read_images(path, kind):
        if (pixels.max(-1) - pixels.min(-1)).max() > _COLORED:
            raise InvalidSampleError("it has colors; a mask is grey: white counts, black does not", "mismatch")
        grey = pixels[..., 1]
        total, count = total + int(grey.sum(dtype=np.int64)), count + grey.size
        brightest = max(brightest, int(grey.max()))
    if not count:
        raise InvalidSampleError("no frame can be decoded", "damaged")
    return total / count / 255 if brightest > _BLACK else 0.0


def _read_images(path: Path, kind: Kind) -> Iterator[np.ndarray]:
    """Yield the frames of a mask, `[H, W, 3]` uint8."""
    if kind == "video":
        with closing(PyavReader(path)) as video:
            for _, pixels in video.frames(range(video.num_frames)):
                yield pixels
        return
    with open_image(path) as image:
        if image.has_transparency_data and np.asarray(image.convert("RGBA"))[..., 3].min() < 255:
            raise InvalidSampleError("it has transparency; a mask is grey: white counts, black does not", "mismatch")
        yield np.asarray(to_rgb(image))


def describe_masks(reports: Sequence[ItemReport], lowest: float) -> Iterator[str]:
    """Yield a note for the user about the number of clips with a mask, and the share of their pixels that counts."""
    used_reports = [report for report in reports if report.status == "used"]
    brightness = [report.mask_white for report in used_reports if report.mask_white is not None]
    if brightness:
        share = 100 * (lowest + (1 - lowest) * sum(brightness) / len(brightness))
        yield (
            f"{len(brightness)} of {plural(len(used_reports), 'clip')} {'has' if len(brightness) == 1 else 'have'} a "
            f"mask, which on average leaves {share:.2g}% of the loss weight"
        )
