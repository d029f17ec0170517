"""The display times of a video's frames, read without decoding. Imports no torch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice, pairwise
from pathlib import Path

import av

from ..reading.media import demux_packets, open_container, video_stream
from ..reading.status import InvalidSampleError

#: Frames count as evenly spaced if each is within this share of a period of its position. Clocks of containers are
#: coarse (1 ms in Matroska, 1/600 s on phones), and so are declared rates.
_EVEN = 0.25
#: A frame is never reordered by more than this many others: the largest buffer of decoded frames in H.264 and HEVC.
_MAX_REORDERED = 16


@dataclass(frozen=True)
class Timeline:
    """Display times of a stream's frames.

    Attributes:
        times: of each frame, ascending, in ticks of the stream's time base; the index is the frame's number.
        keys: numbers of the frames that decoding can begin at, ascending; accurate to a few frames.
    """

    times: Sequence[int]
    keys: Sequence[int]

    def number(self, time: int | None) -> int | None:
        """Return the number of the frame that is shown from a time on, or None if there is none."""
        if time is None:
            return None
        number = bisect_left(self.times, time)
        return number if number < len(self.times) and self.times[number] == time else None

    def key_before(self, number: int) -> int:
        """Return the last frame up to `number` that decoding can begin at."""
        count = bisect_right(self.keys, number)
        return self.keys[count - 1] if count else 0


def timeline_from_index(path: Path) -> Timeline | None:
    """Return the timeline of a file with exactly evenly spaced frames in its index (MP4, MOV), or None for others.

    The index has decoding times. If these are even, display times are the same shifted by a constant, which follows
    from the first packets. So only the beginning of the file is read, however long it is.
    """
    with open_container(path) as container:
        stream = video_stream(container)
        entries = read_index(container, stream)
        if len(entries) < max(stream.frames, 2) or stream.frames == 0 or any(entry.is_discard for entry in entries):
            return None
        step = entries[1].timestamp - entries[0].timestamp
        if step <= 0 or any(b.timestamp - a.timestamp != step for a, b in pairwise(entries)):
            return None
        packet_times = (packet.pts for packet in demux_packets(container, stream) if packet.pts is not None)
        first_times = list(islice(packet_times, _MAX_REORDERED + 1))
        if not first_times:
            return None
        keys = [number for number, entry in enumerate(entries) if entry.is_keyframe]
    first = min(first_times)
    return Timeline(range(first, first + step * len(entries), step), keys)


def timeline_from_packets(path: Path) -> Timeline | None:
    """Return the timeline of any file, reading it once, or None if the container lacks distinct times of frames."""
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
    # The first key frame of an edited clip may come before the first displayed frame.
    keys = {bisect_left(times, time) for time, is_key, _ in packets if is_key and time is not None}
    return Timeline(times, sorted(keys))


def read_index(container: av.container.InputContainer, stream: av.VideoStream) -> list[av.index.IndexEntry]:
    """Return the entries of a container's index about a stream's frames, or none if it has no index.

    Raises:
        InvalidSampleError: the index lists more frames than the file has bytes. A few bytes can declare 100 million.
    """
    entries = getattr(stream, "index_entries", ())  # older PyAV has no access to the index
    if len(entries) > container.size:
        raise InvalidSampleError(f"its index lists {len(entries)} frames in {container.size} bytes", "damaged")
    return list(entries)


def display_times(times: Sequence[int | None]) -> list[int] | None:
    """Return times in ascending order, or None if some are missing or shared by several frames."""
    ordered = sorted(time for time in times if time is not None)
    return ordered if len(ordered) == len(times) == len(set(ordered)) else None


def shown_at(path: Path) -> list[float]:
    """Return the second at which each frame is shown, counted from the first one; the whole file is read, not decoded.

    Raises:
        ValueError: the file does not have the times.
    """
    timeline = timeline_from_packets(path)
    if timeline is None:
        raise ValueError(f"{path} has no frame timestamps")
    with open_container(path) as container:
        tick = video_stream(container).time_base
    assert tick is not None
    return [float((time - timeline.times[0]) * tick) for time in timeline.times]


def steady_rate(times: Sequence[int], *, tick: Fraction, declared: float) -> float | None:
    """Return the rate of frames shown at these times, in ticks of `tick` seconds, or None if they are not even.

    It is the declared rate if the times fit that. Otherwise it is their mean rate: a header's average may count a last
    frame of another duration.
    """
    rates = (declared, mean_rate(times, tick=tick)) if times[-1] > times[0] else (declared,)
    for rate in rates:
        frames_per_tick = float(tick) * rate
        if all(abs((time - times[0]) * frames_per_tick - number) <= _EVEN for number, time in enumerate(times)):
            return rate
    return None


def mean_rate(times: Sequence[int], *, tick: Fraction) -> float:
    """Return the frames per second, by the times of the first and the last."""
    return (len(times) - 1) / float((times[-1] - times[0]) * tick)
