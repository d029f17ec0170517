"""Videos by PyAV, whose wheels carry FFmpeg: the default backend, and the one that the others must equal."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path

import av
import numpy as np
from av.video.frame import PictureType
from av.video.reformatter import VideoReformatter

from ..reading.media import decode_frames, demux_packets, open_container, video_stream
from ..reading.status import UnusableError
from .timeline import Timeline, timeline_from_index, timeline_from_packets

# Fewer frames than this are decoded rather than jumped over: a jump empties the decoder, and often lands before the
# key frame that was meant.
_JUMP_OVER = 24
# Containers that lead to their key frames. In MPEG streams, a seek lands anywhere, and frames then get the times of
# others.
_INDEXED = ("mov", "matroska", "avi")
# Decoders that can be told, packet by packet, to leave out frames that no other refers to; dav1d is not one.
_CAN_SKIP = ("h264", "hevc")


class PyavReader:
    """A video that PyAV decodes. Far apart frames are reached by key frames; the numbers stay exact."""

    def __init__(self, path: Path) -> None:
        """See `VideoReader`."""
        self.path = path
        self._to_rgb = VideoReformatter()  # one for all frames: each sets up a scaler and its threads, 2 ms
        self._container = open_container(path)
        self._stream = video_stream(self._container)
        # One thread per slice only: frame threads read ahead of what is wanted, in every loader worker at once. The
        # decoder of H.264 does not say which frames are damaged when it has threads, and pictures mostly are one slice
        # there.
        self._stream.thread_type = "NONE" if self._stream.codec_context.name == "h264" else "SLICE"

    @property
    def num_frames(self) -> int:
        """See `VideoReader`; the file is read once."""
        with open_container(self.path) as container:
            packets = demux_packets(container, video_stream(container))
            return sum(1 for packet in packets if packet.size and not packet.is_discard)

    def frames(self, numbers: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """See `VideoReader`."""
        for number, frame in self._wanted(numbers):
            pixels = self._to_rgb.reformat(frame, format="rgb24").to_ndarray()
            yield number, np.rot90(pixels, k=round(frame.rotation / 90))

    def close(self) -> None:
        """See `VideoReader`."""
        self._container.close()

    def _wanted(self, numbers: Sequence[int]) -> Iterator[tuple[int, av.VideoFrame]]:
        """Yield the frames of ascending numbers; again from the first one if they turn out to be others."""
        is_indexed = self._container.format.name.startswith(_INDEXED)
        passed_over = numbers[-1] + 1 - len(numbers) if numbers else 0  # frames that come before the last wanted one
        timeline = timeline_from_index(self.path) if is_indexed and passed_over > _JUMP_OVER else None
        if timeline is not None:
            try:
                yield from self._along(timeline, numbers, is_complete=False)
                return
            except _UnknownTime:
                self._container.seek(0)
        far = is_indexed and any(b - a > _JUMP_OVER for a, b in pairwise([0, *numbers]))
        timeline = timeline_from_packets(self.path) if far else None
        if timeline is not None:
            yield from self._along(timeline, numbers, is_complete=True)
        else:
            self._stream.codec_context.skip_frame = "DEFAULT"
            yield from self._pick(enumerate(decode_frames(self._container, self._stream)), numbers)

    def _along(
        self, timeline: Timeline, numbers: Sequence[int], *, is_complete: bool
    ) -> Iterator[tuple[int, av.VideoFrame]]:
        """Yield the frames of ascending numbers, seeking to a key frame wherever one is far enough ahead."""
        wanted_times = {timeline.times[number] for number in numbers if number < len(timeline.times)}
        decoded = self._numbered(timeline, wanted_times, is_complete)
        position = 0  # number of the frame that is decoded next
        can_jump = True
        for wanted in numbers:
            key = timeline.key_before(wanted)
            if can_jump and key - position >= _JUMP_OVER:
                self._container.seek(timeline.times[key], stream=self._stream)
                decoded = self._numbered(timeline, wanted_times, is_complete)
                opening = next(decoded, None)
                if opening is not None and opening[0] <= wanted and opening[1].pict_type == PictureType.I:
                    decoded = chain([opening], decoded)
                else:
                    # Among key frames that are not quite in order, seeking may land too late. And where pictures are
                    # refreshed little by little, what is called a key frame depends on earlier ones.
                    can_jump = False
                    self._container.seek(0)
                    decoded = self._numbered(timeline, wanted_times, is_complete)
            yield from self._pick(decoded, [wanted])
            position = wanted + 1

    def _numbered(
        self, timeline: Timeline, wanted: Collection[int], is_complete: bool
    ) -> Iterator[tuple[int, av.VideoFrame]]:
        """What is decoded from here on, numbered by display time: frames shown at the wanted times, and some others.

        Raises:
            _UnknownTime: a frame is none of an incomplete timeline; frames that a complete one lacks are not shown.
        """
        context = self._stream.codec_context
        can_skip = context.name in _CAN_SKIP
        for packet in demux_packets(self._container, self._stream):
            # Frames that no other frame refers to are decoded only if they are wanted.
            skip = can_skip and packet.pts is not None and packet.pts not in wanted
            context.skip_frame = "NONREF" if skip else "DEFAULT"
            for frame in packet.decode():
                number = timeline.number(frame.pts)
                if number is not None:
                    yield number, frame
                elif not is_complete:
                    raise _UnknownTime

    def _pick(
        self, decoded: Iterator[tuple[int, av.VideoFrame]], numbers: Sequence[int]
    ) -> Iterator[tuple[int, av.VideoFrame]]:
        """Of numbered frames those wanted; takes none after the last.

        Raises:
            UnusableError: a frame on the way is damaged. FFmpeg mends it with what was there before and goes on, and
                later frames refer to it without being marked themselves.
        """
        left = iter(numbers)
        wanted = next(left, None)
        while wanted is not None:
            number, frame = next(decoded, (wanted, None))
            if frame is None:
                return
            if frame.is_corrupt:
                raise UnusableError(f"frame {number} is damaged", "damaged")
            if number == wanted:
                yield number, frame
                wanted = next(left, None)


class _UnknownTime(Exception):
    """A frame has a display time that its file's index does not list."""
