"""Opening media files that nobody vouches for: regular files only, in formats that name no other file, of bounded frames.

FFmpeg chooses a format by content. A text file with the name of a clip could be a playlist of other files or of URLs, a
name could be taken for a protocol, and a few kilobytes can declare a picture that fills the memory.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import av
from PIL import Image

from finetrainers.utils.files import not_a_file

from .fates import Refusal

#: Pixels of one picture or frame; PIL's own limit for images, used for videos too.
MAX_FRAME_PIXELS = 89_478_485

#: What PIL raises for damaged images, by its own account; their numbers and EXIF data are taken as they are.
IMAGE_ERRORS = (
    OSError, EOFError, SyntaxError, ValueError, IndexError, TypeError, struct.error,
    Image.DecompressionBombError, Image.DecompressionBombWarning,
)  # fmt: skip

# PIL, too, chooses by content: of the formats that it knows, some run programs (PostScript) or name other files.
_IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
_FORMATS = "mov,matroska,avi,mpeg,mpegts,mpegvideo,m4v,gif,flv,asf,ogg,h264,hevc"


def look(path: Path) -> os.stat_result | Refusal:
    """What the file system says of a file, or why it must not be opened; opens nothing."""
    try:
        found = path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            return Refusal("missing", f"a link to {str(path.readlink())!r}, which does not exist")
        return Refusal("missing", "does not exist")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        return Refusal("unreadable", f"cannot be looked up: {getattr(error, 'strerror', None) or error}")
    return judge(found)


def judge(found: os.stat_result) -> os.stat_result | Refusal:
    """`look` at a file of which it is known what the file system says."""
    if (why := not_a_file(found.st_mode)) is not None:
        return Refusal("not_a_file", why)
    if found.st_size == 0:
        return Refusal("empty", "the file is empty")
    return found


def open_image(path: Path | str) -> Image.Image:
    """Open an image of at most `MAX_FRAME_PIXELS`; only its header is read.

    Raises:
        IMAGE_ERRORS: it is damaged, of another format, or larger.
    """
    image = Image.open(path, formats=_IMAGE_FORMATS)
    if image.width * image.height > MAX_FRAME_PIXELS:
        image.close()
        raise Image.DecompressionBombError(
            f"{image.width}x{image.height} pixels is over the limit of {MAX_FRAME_PIXELS} for a frame"
        )
    return image


def open_container(path: Path) -> av.container.InputContainer:
    """Open a video whose frames are no larger than `MAX_FRAME_PIXELS`; see `look` for what should be asked before.

    Raises:
        av.FFmpegError, OSError: it cannot be opened, or is of another format.
    """
    container = av.open(f"file:{path}", options={"format_whitelist": _FORMATS, "protocol_whitelist": "file"})
    for stream in container.streams.video:
        stream.codec_context.options = {"max_pixels": str(MAX_FRAME_PIXELS)}
    return container
