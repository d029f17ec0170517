"""Videos by PyAV, whose wheels contain FFmpeg: the default backend, and the reference for the others."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import TypeAlias

import av
import numpy as np
from av.video.frame import PictureType
from av.video.reformatter import VideoReformatter

from ..reading.media import decode_frames, demux_packets, open_container, video_stream
from ..reading.status import InvalidSampleError
from .timeline import Timeline, timeline_from_index, timeline_from_packets

# Fewer frames than this are decoded rather than jumped over: a jump empties the decoder, and often lands before the
# intended key frame.
_JUMP_OVER = 24
# Containers that can seek to their key frames. In MPEG streams, a seek lands anywhere, and frames then get the times of
# others.
_INDEXED = ("mov", "matroska", "avi")
# Decoders that can skip, packet by packet, the frames that no other refers to; dav1d cannot.
_CAN_SKIP = ("h264", "hevc")


#: Frames with their numbers.
NumberedFrames: TypeAlias = Iterator[tuple[int, av.VideoFrame]]


class PyavReader:
    """A video that PyAV decodes. Far apart frames are reached by key frames; the numbers stay exact."""

    def __init__(self, path: Path) -> None:
        """Open a video; see `VideoReader`."""
        self.path = path
        self._to_rgb = VideoReformatter()  # reused, since each one sets up a scaler and its threads in 2 ms
        self._container = open_container(path)
        self._stream = video_stream(self._container)
        # Threads only per slice: frame threads read ahead of the requested frames, in every loader worker at once. With
        # threads, the decoder of H.264 does not report which frames are damaged, and its frames mostly have one slice.
        self._stream.thread_type = "NONE" if self._stream.codec_context.name == "h264" else "SLICE"

    @property
    def num_frames(self) -> int:
        """The number of frames; see `VideoReader`. The file is read once."""
        with open_container(self.path) as container:
            packets = demux_packets(container, video_stream(container))
            return sum(1 for packet in packets if packet.size and not packet.is_discard)

    def frames(self, numbers: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """Decode frames; see `VideoReader`."""
        for number, frame in self._select(numbers):
            pixels = self._to_rgb.reformat(frame, format="rgb24").to_ndarray()
            yield number, np.rot90(pixels, k=round(frame.rotation / 90))

    def close(self) -> None:
        """Close the file; see `VideoReader`."""
        self._container.close()

    def _select(self, numbers: Sequence[int]) -> NumberedFrames:
        """Yield the frames of ascending numbers, restarting from the first one if the index turns out to be wrong."""
        is_indexed = self._container.format.name.startswith(_INDEXED)
        skipped = numbers[-1] + 1 - len(numbers) if numbers else 0  # frames before the last requested one
        timeline = timeline_from_index(self.path) if is_indexed and skipped > _JUMP_OVER else None
        if timeline is not None:
            try:
                yield from self._along(timeline, numbers, is_complete=False)
                return
            except _UnknownTime:
                self._container.seek(0)
        has_gaps = is_indexed and any(b - a > _JUMP_OVER for a, b in pairwise([0, *numbers]))
        timeline = timeline_from_packets(self.path) if has_gaps else None
        if timeline is not None:
            yield from self._along(timeline, numbers, is_complete=True)
        else:
            self._stream.codec_context.skip_frame = "DEFAULT"
            yield from self._pick(enumerate(decode_frames(self._container, self._stream)), numbers)

    def _along(self, timeline: Timeline, numbers: Sequence[int], *, is_complete: bool) -> NumberedFrames:
        """Yield the frames of ascending numbers, seeking to a key frame wherever one is far enough ahead."""
        times = {timeline.times[number] for number in numbers if number < len(timeline.times)}
        decoded = self._decode_numbered(timeline, times, is_complete)
        position = 0  # number of the frame that is decoded next
        can_jump = True
        for number in numbers:
            key = timeline.key_before(number)
            if can_jump and key - position >= _JUMP_OVER:
                self._container.seek(timeline.times[key], stream=self._stream)
                decoded = self._decode_numbered(timeline, times, is_complete)
                first = next(decoded, None)
                if first is not None and first[0] <= number and first[1].pict_type == PictureType.I:
                    decoded = chain([first], decoded)
                else:
                    # With key frames that are not quite in order, seeking may land too late. With gradual refresh, a
                    # frame marked as key frame depends on earlier ones.
                    can_jump = False
                    self._container.seek(0)
                    decoded = self._decode_numbered(timeline, times, is_complete)
            yield from self._pick(decoded, [number])
            position = number + 1

    def _decode_numbered(self, timeline: Timeline, times: Collection[int], is_complete: bool) -> NumberedFrames:
        """Yield decoded frames from here on, numbered by display time: those shown at `times`, and some others.

        Raises:
            _UnknownTime: a frame is not in an incomplete timeline; frames that a complete one lacks are not shown.
        """
        context = self._stream.codec_context
        can_skip = context.name in _CAN_SKIP
        for packet in demux_packets(self._container, self._stream):
            # Frames that no other frame refers to are decoded only if they are requested.
            skip = can_skip and packet.pts is not None and packet.pts not in times
            context.skip_frame = "NONREF" if skip else "DEFAULT"
            for frame in packet.decode():
                number = timeline.number(frame.pts)
                if number is not None:
                    yield number, frame
                elif not is_complete:
                    raise _UnknownTime

    def _pick(self, decoded: NumberedFrames, numbers: Sequence[int]) -> NumberedFrames:
        """Yield the numbered frames in `numbers`; consume none after the last.

        Raises:
            InvalidSampleError: a frame on the way is damaged. FFmpeg fills it with earlier content and goes on, and
                later frames refer to it without being marked themselves.
        """
        remaining = iter(numbers)
        target = next(remaining, None)
        while target is not None:
            number, frame = next(decoded, (target, None))
            if frame is None:
                return
            if frame.is_corrupt:
                raise InvalidSampleError(f"frame {number} is damaged", "damaged")
            if number == target:
                yield number, frame
                target = next(remaining, None)


class _UnknownTime(Exception):
    """A frame with a display time that its file's index does not list."""
