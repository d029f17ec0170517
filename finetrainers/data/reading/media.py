"""Opens untrusted media files: regular files only, in formats that reference no other file, with bounded frames.

FFmpeg chooses a format by content. A text file with the name of a clip could be a playlist of other files or of URLs, a
name could be taken for a protocol, and a few kilobytes can declare a picture that fills the memory.

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
from av.stream import Disposition
from PIL import Image

from finetrainers.utils.fetch import FetchError, fetch, is_url
from finetrainers.utils.files import not_a_file

from .status import UnusableError

#: Pixels of one picture or frame; PIL's own limit for images, used for videos too.
MAX_FRAME_PIXELS = 89_478_485

# PIL, too, chooses by content: of the formats that it knows, some run programs (PostScript) or name other files.
_IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
_FORMATS = "mov,matroska,avi,mpeg,mpegts,mpegvideo,m4v,gif,flv,asf,ogg,h264,hevc"


#: Errors that speak of the file. PIL raises SyntaxError for broken PNG files.
_OF_FILES = (av.FFmpegError, OSError, EOFError, SyntaxError, Image.DecompressionBombError, UnusableError)


def reason_of(error: Exception) -> str:
    """The first line of an error's message; after its type, unless it is one that libraries raise for damaged files."""
    text = str(getattr(error, "strerror", None) or error).strip()
    line = text.splitlines()[0] if text else ""
    if line and isinstance(error, _OF_FILES):
        return line
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def is_lasting(error: Exception) -> bool:
    """Whether an error is due to a file's content, so that the file need not be read again before it changes."""
    if isinstance(error, OSError):
        # FFmpeg's own errors have no number of the system's; PIL raises OSError without one.
        return error.errno is None
    return isinstance(error, _OF_FILES) and not isinstance(error, MemoryError)


def is_out_of_memory(error: Exception) -> bool:
    """Whether this process has no memory left. FFmpeg says so, too, of damaged sizes, which is about the file."""
    return isinstance(error, MemoryError) and not isinstance(error, av.FFmpegError)


@contextmanager
def decoding(path: Path | str) -> Iterator[None]:
    """Turn whatever goes wrong in the block, except a lack of memory, into an `UnusableError` that names the file."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if isinstance(error, FetchError):  # which names the address
            raise UnusableError(str(error), "missing", lasting=False) from error
        status = error.status if isinstance(error, UnusableError) else "damaged"
        raise UnusableError(f"cannot decode {path}: {reason_of(error)}", status) from error


def require_file(path: Path) -> os.stat_result:
    """The `stat` of a file that may be opened. Opening a pipe would wait for somebody to write into it.

    Raises:
        UnusableError: it may not.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        why = f"a link to {str(path.readlink())!r}, which does not exist" if path.is_symlink() else "does not exist"
        raise UnusableError(why, "missing", lasting=False) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = f"cannot be looked up: {getattr(error, 'strerror', None) or error}"
        raise UnusableError(why, "unreadable", lasting=False) from error
    return require_content(found)


def require_content(found: os.stat_result) -> os.stat_result:
    """`require_file` of a file whose `stat` is known."""
    if (why := not_a_file(found.st_mode)) is not None:
        raise UnusableError(why, "not_a_file", lasting=False)
    if found.st_size == 0:
        raise UnusableError("the file is empty", "empty", lasting=False)
    return found


def open_image(path: Path | str) -> Image.Image:
    """Open an image of at most `MAX_FRAME_PIXELS`; of a file only the header is read. Text may be a URL, which is fetched.

    Raises:
        UnusableError: it is no file, of another format, or larger.
        OSError: the URL gives nothing; see `fetch`.
        Exception: whatever PIL raises for damaged images.
    """
    source: Path | str | BytesIO = path
    if isinstance(path, str) and is_url(path):
        source = BytesIO(fetch(path))
    else:
        require_file(Path(path))
    try:
        image = Image.open(source, formats=_IMAGE_FORMATS)
    except Image.UnidentifiedImageError as error:
        raise UnusableError("not an image that PIL can read", "unreadable") from error
    except Image.DecompressionBombError as error:
        raise UnusableError(f"cannot read the image: {error}", "too_large") from error
    if image.width * image.height > MAX_FRAME_PIXELS:
        image.close()
        raise too_large(image.width, image.height)
    return image


def too_large(width: int, height: int) -> UnusableError:
    """The error about frames of a size over the limit."""
    return UnusableError(f"{width}x{height} pixels is over the limit of {MAX_FRAME_PIXELS} for a frame", "too_large")


def open_container(path: Path) -> av.container.InputContainer:
    """Open a video whose frames are no larger than `MAX_FRAME_PIXELS`.

    Raises:
        UnusableError: it is no file, or of a format that is not opened.
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
        raise UnusableError(
            "its format is unknown, or its header damaged, or it names other files to be played", "unreadable"
        ) from error
    for stream in container.streams.video:
        if stream.codec_context is not None:
            stream.codec_context.options = {"max_pixels": str(MAX_FRAME_PIXELS)}
    return container


def video_stream(container: av.container.InputContainer) -> av.VideoStream:
    """The stream that is decoded: the first one.

    Raises:
        UnusableError: there is none that can be.
    """
    streams = container.streams.video
    if all(Disposition.attached_pic in stream.disposition for stream in streams):
        raise UnusableError("no video stream", "no_video")
    if Disposition.attached_pic in streams[0].disposition:
        raise UnusableError("its first video stream is a cover picture", "unreadable")
    if streams[0].codec_context is None:
        raise UnusableError("its codec is unknown to FFmpeg; convert the file, to H.264 for example", "unreadable")
    return streams[0]


def packets_of(container: av.container.InputContainer, stream: av.VideoStream) -> Iterator[av.Packet]:
    """The packets of a stream from here to the end, and an empty one that makes the decoder give what it has left."""
    try:
        yield from container.demux(stream)
    except IndexError:
        # FLV and MPEG-TS may begin further streams on the way. At the end, after all packets, PyAV (18.1) looks for its
        # objects of these, or does not: it depends on memory that it never wrote.
        return


def frames_of(container: av.container.InputContainer, stream: av.VideoStream) -> Iterator[av.VideoFrame]:
    """The frames of a stream, decoded, from here to the end."""
    for packet in packets_of(container, stream):
        yield from packet.decode()
