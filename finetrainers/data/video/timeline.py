"""The display times of a video's frames, read without decoding. Imports no torch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import av

from ..reading.media import demux_packets, open_container, video_stream
from ..reading.status import UnusableError

#: Frames count as evenly spaced if each is within this share of a period of its place. Clocks of containers are coarse
#: (1 ms in Matroska, 1/600 s on phones), and so are declared rates.
_EVEN = 0.25
#: A frame is never reordered by more than this many others: the largest picture buffer of H.264 and HEVC.
_MOST_REORDERED = 16


@dataclass(frozen=True)
class Timeline:
    """Display times of a stream's frames.

    Attributes:
        times: of each frame, ascending, in ticks of the stream's time base; the place is the frame's number.
        keys: numbers of the frames that decoding can begin at, ascending; within a few frames of the truth.
    """

    times: Sequence[int]
    keys: Sequence[int]

    def number(self, time: int | None) -> int | None:
        """Return the number of the frame that is shown from a time on; None if there is none."""
        if time is None:
            return None
        place = bisect_left(self.times, time)
        return place if place < len(self.times) and self.times[place] == time else None

    def key_before(self, number: int) -> int:
        """Return the last frame, not after a number, that decoding can begin at."""
        place = bisect_right(self.keys, number)
        return self.keys[place - 1] if place else 0


def timeline_from_index(path: Path) -> Timeline | None:
    """Return the timeline of a file whose index (MP4, MOV) says that frames are exactly evenly spaced; None for others.

    The index has decoding times; with even ones, display times are the same shifted by a constant, which the first
    packets tell. So only the beginning of the file is read, however long it is.
    """
    with open_container(path) as container:
        stream = video_stream(container)
        entries = index_of(container, stream)
        if len(entries) < max(stream.frames, 2) or stream.frames == 0 or any(entry.is_discard for entry in entries):
            return None
        step = entries[1].timestamp - entries[0].timestamp
        if step <= 0 or any(b.timestamp - a.timestamp != step for a, b in pairwise(entries)):
            return None
        opening = []
        for packet in demux_packets(container, stream):
            if packet.pts is not None:
                opening.append(packet.pts)
            if len(opening) > _MOST_REORDERED:
                break
        if not opening:
            return None
        keys = [place for place, entry in enumerate(entries) if entry.is_keyframe]
    first = min(opening)
    return Timeline(range(first, first + step * len(entries), step), keys)


def timeline_from_packets(path: Path) -> Timeline | None:
    """Return the timeline of any file, which is read once; None if the container does not give every frame its own time."""
    with open_container(path) as container:
        stream = video_stream(container)
        packets = [
            (packet.pts, packet.is_keyframe, packet.is_discard)
            for packet in demux_packets(container, stream)
            if packet.size
        ]
    times = display_times([time for time, _, discarded in packets if not discarded])
    if times is None:
        return None
    # Of an edited clip, the first key frame may come before anything is shown.
    keys = {bisect_left(times, time) for time, is_key, _ in packets if is_key and time is not None}
    return Timeline(times, sorted(keys))


def index_of(container: av.container.InputContainer, stream: av.VideoStream) -> list[av.index.IndexEntry]:
    """What a container's index says of a stream's frames; empty where it has none.

    Raises:
        UnusableError: it lists more frames than the file has bytes. A few bytes can declare 100 million.
    """
    entries = getattr(stream, "index_entries", ())  # older PyAV has no access to the index
    if len(entries) > container.size:
        raise UnusableError(f"its index lists {len(entries)} frames in {container.size} bytes", "damaged")
    return list(entries)


def display_times(times: Sequence[int | None]) -> list[int] | None:
    """Times in ascending order; None if some are missing or shared by several frames."""
    known = sorted(time for time in times if time is not None)
    return known if len(known) == len(times) == len(set(known)) else None


def shown_at(path: Path) -> list[float]:
    """Return the second at which each frame is shown, counted from the first one; the whole file is read, not decoded.

    Raises:
        ValueError: the file does not say.
    """
    timeline = timeline_from_packets(path)
    if timeline is None:
        raise ValueError(f"{path} does not say when its frames are shown")
    with open_container(path) as container:
        tick = video_stream(container).time_base
    assert tick is not None
    return [float((time - timeline.times[0]) * tick) for time in timeline.times]


def steady_rate(times: Sequence[int], *, tick: Fraction, declared: float) -> float | None:
    """Return the rate of frames shown at these times, in ticks of `tick` seconds; None if they are not evenly spaced.

    It is the declared one if the times are those of that rate. Otherwise it is their mean: a header's average may count
    a last frame of another duration.
    """
    rates = (declared, mean_rate(times, tick=tick)) if times[-1] > times[0] else (declared,)
    return next((rate for rate in rates if _is_even(times, float(tick) * rate)), None)


def mean_rate(times: Sequence[int], *, tick: Fraction) -> float:
    """Frames a second, by the times of the first and the last."""
    return (len(times) - 1) / float((times[-1] - times[0]) * tick)


def _is_even(times: Sequence[int], frames_per_tick: float) -> bool:
    return all(abs((time - times[0]) * frames_per_tick - place) <= _EVEN for place, time in enumerate(times))
