"""Judges the masks of a dataset before anything is loaded: they match their clips, are grey, and leave something to train.

Every mask is decoded once, and what it shows is stored with the other facts of files. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from PIL import ImageOps

from finetrainers.utils.text import plural

from ..reading.items import Item, Kind
from ..reading.media import error_reason, is_lasting, is_out_of_memory, open_image
from ..reading.sources.rows import printable_name
from ..reading.status import Unusable, UnusableError
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
        facts: what is known of the files, and what will be.
        max_pixels: frames x height x width above which a file is not decoded.
        options: how closely to look.
        lowest: weight of black pixels; above 0, masks may be black.
    """
    if not masks:
        return
    entries = [entry for entry in probed if entry.item.index in masks]
    for entry, mask in zip(
        entries,
        probe_items([masks[one.item.index] for one in entries], facts=facts, max_pixels=max_pixels, options=options),
        strict=True,
    ):
        entry.mask = mask
        if entry.unusable is None:
            entry.unusable = _mismatch(entry, mask)
    sound = [entry for entry in entries if entry.unusable is None]
    with facts.kept_open():
        for entry, white in in_threads(lambda one: _white(one.mask, facts), sound, "read masks", options.progress):
            if isinstance(white, Unusable):
                entry.unusable = _of(entry, white)
            elif white == 0 and not lowest:
                reason = "black everywhere, so that nothing of the clip is trained; remove the clip, or give an --unmasked_weight"
                entry.unusable = _of(entry, Unusable("mismatch", reason))
            else:
                entry.white = white


def _of(entry: ProbedItem, why: Unusable) -> Unusable:
    assert entry.mask is not None
    return Unusable(
        "missing" if why.status == "skipped" else why.status,
        f"its mask {printable_name(entry.mask.item.name)}: {why.reason}",
    )


def _mismatch(entry: ProbedItem, mask: ProbedItem) -> Unusable | None:
    """Why a mask cannot be that of its clip: it is an image, or has a frame for each of the clip's, in the same shape."""
    if mask.unusable is not None:
        return _of(entry, mask.unusable)
    ours, theirs = entry.header, mask.header
    if mask.item.kind == "video" and entry.item.kind == "image":
        return _of(entry, Unusable("mismatch", "a video, and its clip is an image; give an image"))
    if mask.item.kind == "video" and theirs.frames != ours.frames:
        has, needs = (plural(one.frames, "frame") for one in (theirs, ours))
        way_out = "give one with a frame for each of the clip's, or one image for all of them"
    elif abs(theirs.width / theirs.height * ours.height / ours.width - 1) > DISTORTED:
        has, needs = (f"{one.width}x{one.height} pixels" for one in (theirs, ours))
        way_out = "give one of the clip's aspect ratio"
    else:
        return None
    return _of(entry, Unusable("mismatch", f"{has}, and the clip has {needs}; {way_out}"))


def _white(mask: ProbedItem | None, facts: FileFacts) -> float | Unusable:
    """Mean brightness of a mask, 0 only if all of it is black, or why it is no mask."""
    assert mask is not None
    item = mask.item
    known = facts.of(item.path, item.state).white
    if known is not None:
        return known
    try:
        found: float | Unusable = mask_brightness(item.path, item.kind)
    except UnusableError as error:
        found = error.unusable
    except Exception as error:
        if is_out_of_memory(error):
            raise
        found = Unusable("damaged" if is_lasting(error) else "unreadable", f"cannot be decoded: {error_reason(error)}")
    assert item.state is not None
    if not isinstance(found, Unusable) or found.status != "unreadable":  # a disk or a network that may be back
        facts.keep(item.path, item.state, Facts(white=found))
    return found


def mask_brightness(path: Path, kind: Kind) -> float:
    """Mean brightness of a mask's pixels, from 0 to 1; 0 only if all of them are black, up to compression.

    Raises:
        UnusableError: it has colors or transparency.
        Exception: whatever PIL and PyAV raise for damaged files.
    """
    total = count = brightest = 0
    for pixels in _pictures(path, kind):
        if (pixels.max(-1) - pixels.min(-1)).max() > _COLORED:
            raise UnusableError("it has colors; a mask is grey: white counts, black does not", "mismatch")
        grey = pixels[..., 1]
        total, count = total + int(grey.sum(dtype=np.int64)), count + grey.size
        brightest = max(brightest, int(grey.max()))
    if not count:
        raise UnusableError("no frame can be decoded", "damaged")
    return total / count / 255 if brightest > _BLACK else 0.0


def _pictures(path: Path, kind: Kind) -> Iterator[np.ndarray]:
    """Yield the pictures of a mask, `[H, W, 3]` uint8."""
    if kind == "video":
        with closing(PyavReader(path)) as video:
            for _, pixels in video.frames(range(video.num_frames)):
                yield pixels
        return
    with open_image(path) as image:
        upright = ImageOps.exif_transpose(image)
        if upright.has_transparency_data and np.asarray(upright.convert("RGBA"))[..., 3].min() < 255:
            raise UnusableError("it has transparency; a mask is grey: white counts, black does not", "mismatch")
        if upright.mode.startswith("I"):
            yield np.repeat((np.asarray(upright).clip(0, 65535) >> 8).astype(np.uint8)[..., None], 3, axis=2)
        else:
            yield np.asarray(upright.convert("RGB"))


def describe_masks(reports: Sequence[ItemReport], lowest: float) -> Iterator[str]:
    """Yield a note for the user: how many clips have a mask, and how much of their pictures counts."""
    used = [report for report in reports if report.status == "used"]
    white = [report.mask_white for report in used if report.mask_white is not None]
    if white:
        share = 100 * (lowest + (1 - lowest) * sum(white) / len(white))
        yield (
            f"{len(white)} of {plural(len(used), 'clip')} {'has' if len(white) == 1 else 'have'} a mask, which on average leaves "
            f"{share:.2g} % of the picture's loss weight"
        )
