"""Rows that Python passes to `train` and `check`: their arrays become media files, and the rows a `.rows` file.

A `.rows` file has a JSON object for each row. Arrays, tensors and images are stored once and without loss, under a
digest of their pixels; bytes under a digest of their content. Imports no torch.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetrainers.config.facts import MEDIA
from finetrainers.config.sections import DataSection
from finetrainers.utils.files import sweep_unfinished, write_text_atomic
from finetrainers.utils.reading import parse_json

from ..status import InvalidSample, InvalidSampleError
from .hub import as_text, media_suffix, undecoded
from .masks import MASK
from .rows import DataError, Row, read_lines
from .tables import Columns, with_known_columns
from .unpacked import MediaFolder, has_digest

if TYPE_CHECKING:
    import numpy as np

#: Suffix of the files that list rows.
SUFFIX = ".rows"
#: Column of single images, beside that of videos, and of the frame rate of arrays.
IMAGE, RATE = "image", "fps"
#: Frame rate of the files of arrays, where players need one; the rows have the rate that counts.
_FILE_FPS = 24
_MAX_FPS = 1000
#: Largest distance of a float from the interval of 0 to 1: rounding of half precision.
_ROUNDING = 1e-3
_VIDEO_SHAPES = "[T, H, W, 3] uint8, or [T, 3, H, W] floats from 0 to 1"
_IMAGE_SHAPES = "[H, W, 3] uint8, or [3, H, W] floats from 0 to 1"


@dataclass(frozen=True)
class StoredRows:
    """Rows that are on disk, or that are to be stored.

    Attributes:
        path: the `.rows` file, named by its content; empty before they are stored.
        count: number of rows.
    """

    path: Path = Path()
    count: int = 0

    @property
    def fingerprint(self) -> str:
        """The number of rows, and a digest of all of their content."""
        return f"{self.count} rows {self.path.stem}"


def store_rows(
    rows: Any, data: DataSection, media_dir: Path, *, name: str, columns: Collection[str] = ()
) -> StoredRows:
    """Store rows and their arrays, one row at a time; a row that cannot be stored is listed with the reason.

    Args:
        rows: a sequence or dataset, read by item, or another iterable, read once.
        data: names of the columns of media, and the number of rows to read.
        media_dir: see `media_dir`.
        name: of the rows in messages: `data`.
        columns: further columns of media, besides those that the options name.

    Raises:
        DataError: these are not rows, the iterable raises, or there is not enough disk space.
    """
    media_dir.mkdir(parents=True, exist_ok=True)
    sweep_unfinished(media_dir)
    media = MediaFolder(media_dir)
    further = {column for _, column in data.extra_columns}
    columns = {data.video_column, IMAGE, data.mask_column or MASK, *MEDIA, *further, *columns}
    lines: list[str] = []
    for record in _iterate(rows, name):
        where = f"{name}[{len(lines)}]"
        if isinstance(record, Mapping):
            rate = record.get(RATE)
            values = {
                str(column): _stored(value, rate, media, is_image=column == IMAGE) if column in columns else value
                for column, value in record.items()
            }
            line: dict[str, Any] = {"row": where, "columns": values}
        elif isinstance(record, InvalidSample):
            line = {"row": where, "unusable": record.reason}
        else:
            reason = f"expected a mapping with {data.video_column!r} or {IMAGE!r}, and 'caption'"
            line = {"row": where, "unusable": f"{reason}, got {type(record).__name__}"}
        lines.append(json.dumps(line, default=_plain, skipkeys=True) + "\n")
        if len(lines) == data.max_items:
            break
    text = "".join(lines)
    path = media_dir / "rows" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}{SUFFIX}"
    if not has_digest(path, path.stem):
        write_text_atomic(path, text)
    return StoredRows(path, len(lines))


def _iterate(rows: Any, name: str) -> Iterator[Any]:
    """Yield the items of rows; of one that cannot be read by its index, the reason.

    Raises:
        DataError: these are not rows, or the iterable raises.
    """
    is_sequence = hasattr(type(rows), "__len__") and hasattr(type(rows), "__getitem__")
    is_iterable = is_sequence or hasattr(type(rows), "__iter__")
    if not is_iterable or isinstance(rows, (Mapping, str, bytes, os.PathLike)):
        raise DataError(f"expected rows, such as a list of dictionaries or a dataset, got {type(rows).__name__}")
    if type(rows).__module__.partition(".")[0] == "datasets":
        rows = undecoded(rows)
    if is_sequence:
        for index in range(len(rows)):
            try:
                yield rows[index]
            except Exception as error:  # of the user's dataset
                yield InvalidSample("unreadable", f"{type(error).__name__}: {error}")
        return
    iterator, count = iter(rows), 0
    while True:
        try:
            record = next(iterator)
        except StopIteration:
            return
        except Exception as error:  # of the user's generator, which has no further rows then
            message = f"raised {type(error).__name__} after {count} rows: {error}"
            raise DataError(message, kind="unreadable") from error
        yield record
        count += 1


def _stored(value: Any, rate: Any, media: MediaFolder, *, is_image: bool) -> Any:
    """Return the entry of a medium in a `.rows` file: of a path its text, of others their file, or the reason.

    Args:
        value: path, array, tensor, image, or a dictionary with the bytes or the path of a file.
        rate: frame rate of an array, as the row has it.
        media: where arrays and bytes are stored.
        is_image: whether it is a single image.
    """
    if isinstance(value, (bytes, bytearray)):
        value = {"bytes": bytes(value)}
    if isinstance(value, Mapping) and value.get("bytes") is not None:
        suffix = media_suffix(value.get("path") or "", value["bytes"])
        if suffix is None:
            return {"unusable": "its bytes are not those of a known format of images or videos"}
        return {"file": str(media.store(io.BytesIO(value["bytes"]), suffix=suffix, size=len(value["bytes"]))[0])}
    if isinstance(value, Mapping):
        value = value.get("path")
    if value is None:
        return None
    if isinstance(value, (str, os.PathLike)):
        return {"path": os.fspath(value), "absolute": os.path.abspath(os.path.expanduser(os.fspath(value)))}
    try:
        fps = None if is_image else _read_rate(rate)
        pixels = _read_pixels(value, is_image=is_image)
    except Exception as error:  # of the user's object
        return {"unusable": str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"}
    digest = hashlib.sha256(repr(pixels.shape).encode())
    digest.update(pixels.data)
    write = partial(_write_image if is_image else _write_video, pixels=pixels)
    try:
        file = media.store_as(digest.hexdigest(), write, suffix=".png" if is_image else ".mp4", size=pixels.nbytes)
    except InvalidSampleError as error:
        return {"unusable": str(error)}
    return {"file": str(file), RATE: fps}


def _read_rate(rate: Any) -> float:
    """Return the frame rate of an array, or 0 for the one of training.

    Raises:
        ValueError: it is not a frame rate.
    """
    if rate is None:
        return 0.0
    value = rate.item() if getattr(rate, "ndim", None) == 0 else rate
    if isinstance(value, bool) or not isinstance(value, (int, float, Fraction)) or not 0 < value <= _MAX_FPS:
        raise ValueError(f"{RATE} must be a number above 0 and at most {_MAX_FPS}, got {rate!r}")
    return float(value)


def _read_pixels(value: Any, *, is_image: bool) -> np.ndarray:
    """Return the pixels of an array, a tensor, or an image of PIL: `[T, H, W, 3]`, of an image `[H, W, 3]`, uint8.

    Raises:
        ValueError: they are of another type or shape, or not finite numbers from 0 to 1.
    """
    import numpy as np

    shapes, ndim = (_IMAGE_SHAPES, 3) if is_image else (_VIDEO_SHAPES, 4)
    is_array = isinstance(value, np.ndarray)
    if type(value).__module__.startswith("PIL."):
        if not is_image:
            raise ValueError(f"is an image; give it as {IMAGE!r}")
        pixels = np.asarray(value.convert("RGB"))
    elif is_array or hasattr(value, "detach"):
        tensor = value if is_array else value.detach().cpu()
        if not is_array and tensor.dtype.is_floating_point:
            tensor = tensor.float()  # NumPy has no bfloat16
        pixels = np.asarray(tensor)
    else:
        raise ValueError(f"expected a path, or an array or tensor of {shapes}, got {type(value).__name__}")
    shape, dtype = pixels.shape, value.dtype if hasattr(value, "dtype") else pixels.dtype
    is_float = pixels.dtype.kind == "f"
    if len(shape) != ndim or 0 in shape or shape[-3 if is_float else -1] != 3 or not (is_float or pixels.dtype == "u1"):
        raise ValueError(f"expected {shapes}, got {list(shape)} {dtype}")
    if is_float:
        low, high = float(pixels.min()), float(pixels.max())
        if not (math.isfinite(low) and low >= -_ROUNDING and high <= 1 + _ROUNDING):
            raise ValueError(f"floats must be from 0 to 1, got {low:g} to {high:g}")
        pixels = np.moveaxis((pixels.clip(0, 1) * 255).round().astype(np.uint8), -3, -1)
    return np.ascontiguousarray(pixels)


def _write_image(path: Path, pixels: np.ndarray) -> None:
    from PIL import Image

    Image.fromarray(pixels).save(path, "PNG")


def _write_video(path: Path, pixels: np.ndarray) -> None:
    """Write frames as H.264 in RGB without loss, with a key frame every second.

    Raises:
        InvalidSampleError: the encoder refuses them: they are too large.
        OSError: the file cannot be written.
    """
    import av

    try:
        with av.open(str(path), "w", format="mp4") as container:
            stream = container.add_stream("libx264rgb", rate=_FILE_FPS)
            stream.height, stream.width = pixels.shape[1:3]
            stream.pix_fmt = "rgb24"
            stream.options = {"qp": "0", "preset": "ultrafast", "g": str(_FILE_FPS)}
            for frame in pixels:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(stream.encode())
    except av.FFmpegError as error:
        if isinstance(error, OSError):
            raise
        message = f"frames of {pixels.shape[2]}x{pixels.shape[1]} pixels cannot be encoded: {error}"
        raise InvalidSampleError(message, "too_large") from error


def _plain(value: Any) -> Any:
    """Return a value for JSON: numbers and arrays as such, UTF-8 as a text, and else a description."""
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return value.tolist() if hasattr(value, "ndim") and hasattr(value, "tolist") else as_text(value)


def read_rows(path: Path, data: DataSection) -> list[Row]:
    """Return the rows of a `.rows` file, each with the medium of the column `video_column`.

    Raises:
        DataError: the file cannot be read.
    """
    rows = []
    try:
        for line in read_lines(path):
            if line:
                rows.append(_read_row(parse_json(line), data, path.parent.parent))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        message = f"{path} is not a file that `train` has written: {type(error).__name__}: {error}"
        raise DataError(message, kind="unreadable") from error
    return rows


def _read_row(line: Mapping[str, Any], data: DataSection, media_dir: Path) -> Row:
    """Return a row, whose files of arrays are below the directory of media."""
    name = line["row"]
    if "unusable" in line:
        return Row("", name, unusable=InvalidSample("unreadable", line["unusable"]), rate=0)
    record = line["columns"]
    columns = Columns(with_known_columns(data, record))
    medium = record.get(columns.media)
    if not columns.is_further and medium is not None and record.get(IMAGE) is not None and columns.media != IMAGE:
        reason = f"has both {columns.media!r} and {IMAGE!r}; give one row for each"
        return Row("", name, unusable=InvalidSample("unreadable", reason), rate=0)
    if medium is None and not columns.is_further:
        medium = record.get(IMAGE)
    if medium is None:
        present = ", ".join(map(repr, record)) or "nothing"
        reason = f"it has {present}, and {columns.media!r} holds no media"
        return Row("", name, unusable=InvalidSample("missing", reason), rate=0)
    if "unusable" in medium:
        return Row("", name, unusable=InvalidSample("unreadable", medium["unusable"]), rate=0)
    try:
        captions = columns.read_captions(record)
    except ValueError as error:
        return Row("", name, unusable=InvalidSample("caption_missing", str(error)), rate=0)
    extra = {column: value for column, value in columns.extra(record).items() if column not in (IMAGE, RATE)}
    expected = f"{columns.captions[0]!r}" if columns.option in data.model_fields_set else "'caption'"
    if "path" in medium:
        row = Row(name, medium["path"], captions, extra, Path(medium["absolute"]))
    else:
        row = Row("", name, captions, extra, media_dir / medium["file"], rate=medium.get(RATE))
    return row._replace(expected=f"the column {expected}")


def is_rows(path: Path | None) -> bool:
    """Return whether a file lists rows of Python."""
    return path is not None and path.suffix == SUFFIX
