"""Access to untrusted media files: regular files only, in formats that reference no other file, with bounded frames.

FFmpeg chooses a format by content. A text file with the name of a clip could be a playlist of other files or of URLs, a
name could be taken for a protocol, and a few kilobytes can declare an image that fills the memory.

Whatever goes wrong while one file is opened, probed or decoded is the status of that file, and never an error of the
check or the run: which exceptions FFmpeg, PyAV and PIL raise for damaged files is not written down anywhere, and
changes. Three functions hold that rule: `probe`, `decoding` (for training) and `decode_worker.answer` (in processes
that decode).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import av
import numpy as np
from av.stream import Disposition
from PIL import Image, ImageOps

from finetrainers.utils.fetch import FetchError, fetch, is_url
from finetrainers.utils.files import not_a_file
from finetrainers.utils.reading import read_bytes

from .status import InvalidSampleError

#: Pixels of one image or frame; PIL's limit for images, also used for videos.
MAX_FRAME_PIXELS = 89_478_485

# PIL also chooses by content, and some of its formats run programs (PostScript) or name other files.
_IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
_FORMATS = "mov,matroska,avi,mpeg,mpegts,mpegvideo,m4v,gif,flv,asf,ogg,h264,hevc"


#: Errors about the file. PIL raises SyntaxError for broken PNG files.
_FILE_ERRORS = (av.FFmpegError, OSError, EOFError, SyntaxError, Image.DecompressionBombError, InvalidSampleError)


def error_reason(error: Exception) -> str:
    """Return the first line of an error's message, prefixed with its type unless it is a common error of files."""
    text = str(getattr(error, "strerror", None) or error).strip()
    line = text.splitlines()[0] if text else ""
    if line and isinstance(error, _FILE_ERRORS):
        return line
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def is_lasting(error: Exception) -> bool:
    """Return whether an error is due to a file's content, so that the file need not be read again before it changes."""
    if isinstance(error, OSError):
        # FFmpeg's own errors have no number of the system's; PIL raises OSError without one.
        return error.errno is None
    return isinstance(error, _FILE_ERRORS) and not isinstance(error, MemoryError)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether this process is out of memory; FFmpeg's error of that kind may come from a damaged size."""
    return isinstance(error, MemoryError) and not isinstance(error, av.FFmpegError)


@contextmanager
def decoding(path: Path | str) -> Iterator[None]:
    """Turn whatever goes wrong in the block, except a lack of memory, into an `InvalidSampleError` that names the
    file."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if isinstance(error, FetchError):  # which names the address
            raise InvalidSampleError(str(error), "missing", lasting=False) from error
        status = error.status if isinstance(error, InvalidSampleError) else "damaged"
        raise InvalidSampleError(f"cannot decode {path}: {error_reason(error)}", status) from error


def require_file(path: Path) -> os.stat_result:
    """Return the `stat` of a file that may be opened. Opening a pipe would wait for a writer.

    Raises:
        InvalidSampleError: the file must not be opened.
    """
    try:
        state = path.stat()
    except FileNotFoundError:
        reason = f"a link to {str(path.readlink())!r}, which does not exist" if path.is_symlink() else "does not exist"
        raise InvalidSampleError(reason, "missing", lasting=False) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = f"is not accessible: {getattr(error, 'strerror', None) or error}"
        raise InvalidSampleError(reason, "unreadable", lasting=False) from error
    return require_content(state)


def require_content(state: os.stat_result) -> os.stat_result:
    """Return the `stat` of a file if it may be opened; see `require_file`."""
    if (reason := not_a_file(state.st_mode)) is not None:
        raise InvalidSampleError(reason, "not_a_file", lasting=False)
    if state.st_size == 0:
        raise InvalidSampleError("the file is empty", "empty", lasting=False)
    return state


def open_image(path: Path | str, *, whole: bool = False) -> Image.Image:
    """Open an image of at most `MAX_FRAME_PIXELS`, reading only its header. Text may be a URL, which is fetched.

    Args:
        path: the file, or the URL.
        whole: whether to read the file at once, for its pixels: of a damaged PNG file PIL asks for the 4 GiB that a
            length states, and they would be allocated.

    Raises:
        InvalidSampleError: the image is not a file, of another format, or larger.
        OSError: the URL cannot be fetched; see `fetch`.
        Exception: whatever PIL raises for damaged images.
    """
    source: Path | str | BytesIO = path
    if isinstance(path, str) and is_url(path):
        source = BytesIO(fetch(path))
    else:
        state = require_file(Path(path))
        source = BytesIO(read_bytes(Path(path), limit=state.st_size)) if whole else path
    try:
        image = Image.open(source, formats=_IMAGE_FORMATS)
    except Image.UnidentifiedImageError as error:
        raise InvalidSampleError("not an image that PIL can read", "unreadable") from error
    except Image.DecompressionBombError as error:
        raise InvalidSampleError(f"cannot read the image: {error}", "too_large") from error
    if image.width * image.height > MAX_FRAME_PIXELS:
        image.close()
        raise too_large(image.width, image.height)
    return image


def to_rgb(image: Image.Image) -> Image.Image:
    """Return an image upright in RGB. Of 16 bits the upper 8 are kept, where PIL would turn values above 255 white."""
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I"):
        upright = Image.fromarray((np.asarray(upright).clip(0, 65535) >> 8).astype(np.uint8))
    return upright.convert("RGB")


def too_large(width: int, height: int) -> InvalidSampleError:
    """Return the error about frames of a size over the limit."""
    return InvalidSampleError(
        f"{width}x{height} pixels is over the limit of {MAX_FRAME_PIXELS} for a frame", "too_large"
    )


def open_container(path: Path) -> av.container.InputContainer:
    """Open a video with frames of at most `MAX_FRAME_PIXELS`.

    Raises:
        InvalidSampleError: the video is not a file, or its format is not supported.
        Exception: whatever PyAV raises for damaged files.
    """
    require_file(path)
    try:
        # Tags are not read, so they may be of any encoding.
        container = av.open(
            f"file:{path}",
            options={"format_whitelist": _FORMATS, "protocol_whitelist": "file"},
            metadata_errors="ignore",
        )
    except av.error.ArgumentError as error:
        raise InvalidSampleError(
            "unknown format or damaged header, or it names other files to be played", "unreadable"
        ) from error
    for stream in container.streams.video:
        if stream.codec_context is not None:
            stream.codec_context.options = {"max_pixels": str(MAX_FRAME_PIXELS)}
    return container


def video_stream(container: av.container.InputContainer) -> av.VideoStream:
    """Return the stream that is decoded: the first one.

    Raises:
        InvalidSampleError: no stream can be decoded.
    """
    streams = container.streams.video
    if all(Disposition.attached_pic in stream.disposition for stream in streams):
        raise InvalidSampleError("no video stream", "no_video")
    if Disposition.attached_pic in streams[0].disposition:
        raise InvalidSampleError("its first video stream is a cover image", "unreadable")
    if streams[0].codec_context is None:
        raise InvalidSampleError(
            "its codec is not supported by FFmpeg; convert the file, to H.264 for example", "unreadable"
        )
    return streams[0]


def demux_packets(container: av.container.InputContainer, stream: av.VideoStream) -> Iterator[av.Packet]:
    """Yield the packets of a stream from here to the end, then an empty one that flushes the decoder."""
    try:
        yield from container.demux(stream)
    except IndexError:
        # FLV and MPEG-TS may begin further streams on the way. At the end, after all packets, PyAV (18.1) looks for its
        # objects of these, or does not: it depends on memory that it never wrote.
        return


def decode_frames(container: av.container.InputContainer, stream: av.VideoStream) -> Iterator[av.VideoFrame]:
    """Yield the frames of a stream, decoded, from here to the end."""
    for packet in demux_packets(container, stream):
        yield from packet.decode()
