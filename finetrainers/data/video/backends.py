"""Choice of the backend that decodes a video: it must be importable and return the same pixels as PyAV.

Imports neither torch nor an optional backend before it is requested.
"""

from __future__ import annotations

from collections.abc import Collection, Container
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

import numpy as np

from ..reading.media import decoding, demux_packets, open_container, require_file, video_stream
from ..reading.status import InvalidSampleError
from .pyav import PyavReader
from .reader import LibraryReader, VideoReader

#: A backend that decodes.
Backend = Literal["pyav", "decord", "torchcodec"]
_DEFAULT: Backend = "pyav"

_CONTAINERS = ("mov", "matroska", "avi")
_FORMATS = ("yuv420p", "yuvj420p", "yuv422p", "yuv444p")
_IDR = 5  # type of an H.264 slice that does not refer to earlier frames


@dataclass(frozen=True)
class _Optional:
    """An optional backend.

    Attributes:
        module: the module to import.
        codecs: the codecs whose frames equal PyAV's, wherever decoding begins.
        hint: how to install it.
    """

    module: str
    codecs: Collection[str]
    hint: str


# Determined by comparing every codec at random frame numbers. decord returns other frames after a seek in HEVC, and in
# MPEG-4 with B-frames.
_OPTIONAL: dict[str, _Optional] = {
    "decord": _Optional("decord", ("h264", "vp8", "vp9", "mjpeg"), "pip install decord"),
    "torchcodec": _Optional(
        "torchcodec.decoders",
        ("h264", "hevc", "av1", "libdav1d", "vp8", "vp9", "mpeg4", "mjpeg"),
        "pip install torchcodec in the version that matches the installed torch, and FFmpeg's shared libraries (4 to "
        "8), which it does not include",
    ),
}


def resolve_backend(option: str) -> str:
    """Return the backend of an option's value."""
    return _DEFAULT if option == "auto" else option


def backend_problem(option: str) -> str | None:
    """Return the reason why an option's backend cannot be used here and how to install it, or None if it can."""
    name = resolve_backend(option)
    if name == _DEFAULT:
        return None
    try:
        import_module(_OPTIONAL[name].module)
    except (ImportError, OSError, RuntimeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"{name} cannot be imported ({lines[0]}); it requires {_OPTIONAL[name].hint}. Or use `auto`"
    return None


def open_video(path: Path, backend: str = _DEFAULT) -> VideoReader:
    """Open a video, to be used within `decoding`."""
    require_file(path)  # not every backend checks it
    return PyavReader(path) if backend == _DEFAULT else LibraryReader(path, backend)


def fallback_reason(path: Path, backend: str) -> str | None:
    """Return the reason why a backend may return other pixels of a file than PyAV, or None if it returns the same.

    The header is compared with the properties of the backend, and then the first frames of both are compared. The file
    is read, but not decoded further.
    """
    if backend == _DEFAULT:
        return None
    try:
        with decoding(path):
            reason = _header_reason(path, _OPTIONAL[backend].codecs)
        if reason is not None:
            return reason
        with decoding(path), closing(open_video(path)) as reference, closing(open_video(path, backend)) as video:
            if video.num_frames != reference.num_frames:
                return f"{video.num_frames} frames instead of {reference.num_frames}"
            expected, actual = [next((pixels for _, pixels in r.frames([0])), None) for r in (reference, video)]
    except InvalidSampleError:
        return "its first frame cannot be decoded"
    if expected is None or actual is None or not np.array_equal(expected, actual):
        return "another first frame"
    return None


def _header_reason(path: Path, codecs: Container[str]) -> str | None:
    with open_container(path) as container:
        stream = video_stream(container)
        context = stream.codec_context
        has_odd_size = bool(stream.width % 2 or stream.height % 2) and stream.pix_fmt != "yuv444p"
        for applies, reason in (
            (not container.format.name.startswith(_CONTAINERS), f"container {container.format.name}"),
            (context.name not in codecs, f"codec {context.name}"),
            (stream.pix_fmt not in _FORMATS, f"pixel format {stream.pix_fmt}"),
            (has_odd_size, f"odd size {stream.width}x{stream.height} with halved color"),
            (context.field_order > 1, "interlaced"),
        ):
            if applies:
                return reason
        for packet in demux_packets(container, stream):
            if packet.is_discard:
                return "an edit list hides frames"
            is_key = packet.size and packet.is_keyframe and context.name == "h264"
            if is_key and not _has_idr(bytes(packet), context.extradata):
                return "key frames that refer to earlier frames"
    return None


def _has_idr(packet: bytes, extradata: bytes | None) -> bool:
    """Return whether an H.264 packet has a slice of an IDR frame."""
    if extradata and extradata[0] == 1:  # "avcC": each unit is preceded by its length
        size = (extradata[4] & 3) + 1
        offset = 0
        while offset + size < len(packet):
            if packet[offset + size] & 31 == _IDR:
                return True
            offset += size + int.from_bytes(packet[offset : offset + size], "big")
        return False
    return any(unit and unit[0] & 31 == _IDR for unit in packet.split(b"\0\0\1")[1:])
