"""A folder of clips with everything wrong that files can have wrong, and the status that each must get."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

#: What the folder is checked with.
OPTIONS = {
    "video_resolution_buckets": ["17x32x48", "17x48x32"],
    "target_fps": 8.0,
    "max_pixels": 1_000_000,
}

MARKUP = "</script><script>alert('caption')</script> & \"quotes\""


@dataclass(frozen=True)
class Fault:
    """One item.

    Attributes:
        status: by its header.
        full: by decoding all of it; None: the same.
        marks: what else is said of it by its header.
        full_marks: what decoding adds.
        size: `(height, width)` as displayed, if it is known.
        caption: in its text file; None: there is none.
        reason: a part of the reason, by its header.
        full_reason: the same by decoding.
    """

    status: str = "used"
    full: str | None = None
    marks: tuple[str, ...] = ()
    full_marks: tuple[str, ...] = ()
    size: tuple[int, int] | None = None
    caption: str | None = "a clip"
    reason: str = ""
    full_reason: str = ""


_MAKERS: list[tuple[Fault, str, Callable[[Path], None]]] = []


def _fault(name: str, **expected: object) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    def add(make: Callable[[Path], None]) -> Callable[[Path], None]:
        _MAKERS.append((Fault(**expected), name, make))  # type: ignore[arg-type]
        return make

    return add


def make_faulty(folder: Path) -> dict[str, Fault]:
    """Fill a folder; what each item, by name, must be found to be."""
    folder.mkdir(parents=True, exist_ok=True)
    for fault, name, make in _MAKERS:
        make(folder / name)
        if fault.caption is not None:
            (folder / name).with_suffix(".txt").write_text(fault.caption, encoding="utf-8")
    return {name: fault for fault, name, _ in _MAKERS}


def _pictures(count: int, height: int, width: int, *, seed: int = 0) -> Iterator[np.ndarray]:
    """A bright bar that moves over noise, so that every frame has its own bytes."""
    rng = np.random.default_rng(seed)
    for k in range(count):
        picture = rng.integers(60, 180, (height, width, 3), dtype=np.uint8)
        picture[:, k * width // count :][:, :4] = 255
        yield picture


def _video(
    path: Path,
    *,
    frames: int = 20,
    fps: int = 8,
    height: int = 32,
    width: int = 48,
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    rotation: int = 0,
    faststart: bool = False,
    pictures: list[np.ndarray] | None = None,
    times: list[int] | None = None,
    seed: int = 0,
    title: str = "",
) -> Path:
    with av.open(str(path), "w", options={"movflags": "faststart"} if faststart else {}) as container:
        if title:
            container.metadata["title"] = title
        stream = container.add_stream(codec, rate=fps, options={"bf": "0", "g": "4"} if codec == "libx264" else {})
        stream.width, stream.height, stream.pix_fmt = width, height, pix_fmt
        if rotation:
            stream.set_display_rotation(rotation)
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for k, picture in enumerate(pictures or _pictures(frames, height, width, seed=seed)):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[k], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def _packets(path: Path) -> list[tuple[int, int]]:
    """Place and size of every frame in a file."""
    with av.open(str(path)) as container:
        return [(packet.pos, packet.size) for packet in container.demux(video=0) if packet.size]


def _sound(container: av.container.OutputContainer, stream: av.AudioStream) -> None:
    frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
    frame.rate = 8000
    container.mux(stream.encode(frame))
    container.mux(stream.encode())


# Clips that can be used, some with a remark.


@_fault("a good clip.mp4", size=(32, 48), caption="a good clip, \u65e5\u672c\u8a9e")
def _good(path: Path) -> None:
    _video(path)


@_fault("copy of the good clip.mp4", marks=("same_content",))
def _copy(path: Path) -> None:
    path.write_bytes((path.parent / "a good clip.mp4").read_bytes())


@_fault("rotated.mp4", size=(48, 32))
def _rotated(path: Path) -> None:
    _video(path, rotation=90)


@_fault("variable rate.mp4", size=(32, 48))
def _variable(path: Path) -> None:
    steps = [100, 150] * 10
    _video(path, times=[sum(steps[:k]) for k in range(20)], seed=6)


@_fault("ten bits.mp4", size=(32, 48))
def _ten_bits(path: Path) -> None:
    _video(path, pix_fmt="yuv420p10le")


@_fault("alpha.mov", size=(32, 48))
def _alpha(path: Path) -> None:
    _video(path, codec="qtrle", pix_fmt="argb")


@_fault("odd size.mkv", size=(45, 71), marks=("cropped",))
def _odd(path: Path) -> None:
    _video(path, codec="ffv1", pix_fmt="yuv444p", height=45, width=71)


@_fault("small.mp4", size=(16, 24), marks=("enlarged",))
def _small(path: Path) -> None:
    _video(path, height=16, width=24)


@_fault("fast.mp4", marks=("resampled",))
def _fast(path: Path) -> None:
    _video(path, frames=40, fps=16)


@_fault("slow.mp4", marks=("slower",))
def _slow(path: Path) -> None:
    _video(path, fps=4)


@_fault("black.mp4", full_marks=("black",))
def _black(path: Path) -> None:
    _video(path, pictures=[np.zeros((32, 48, 3), np.uint8)] * 17)


@_fault("still.mp4", full_marks=("still",))
def _still(path: Path) -> None:
    _video(path, pictures=[np.repeat(np.arange(0, 240, 5, dtype=np.uint8), 96).reshape(48, 32, 3).swapaxes(0, 1)] * 17)


@_fault("uncaptioned.mp4", caption="", marks=("no_caption",))
def _uncaptioned(path: Path) -> None:
    _video(path, seed=1)


@_fault("<img src=x onerror=alert(1)> $(rm) \n\x1b[31m.mp4", caption=MARKUP)
def _odd_name(path: Path) -> None:
    _video(path, seed=2)


@_fault(os.fsdecode(b"caf\xe9.mp4"), status="missing", reason="'utf-8'")
def _not_utf8(path: Path) -> None:
    _video(path, seed=3)


@_fault("-leading.mp4")
def _leading(path: Path) -> None:
    _video(path, seed=4)


def _latin_title(path: Path, codec: str = "libx264") -> None:
    """A good clip whose title is not UTF-8."""
    content = _video(
        path, codec=codec, title="caf\u00e9 \u00e9t\u00e9", seed=len(path.suffix) + ord(path.suffix[1])
    ).read_bytes()
    title = "caf\u00e9 \u00e9t\u00e9".encode()
    assert title in content
    path.write_bytes(content.replace(title, "caf\u00e9 \u00e9t\u00e9".encode("latin-1") + b"   "))


for _suffix in (".mp4", ".mkv", ".flv", ".avi"):
    _fault(f"latin title{_suffix}", size=(32, 48))(_latin_title)


@_fault("late stream.flv", size=(32, 48))
def _late_stream(path: Path) -> None:
    """The last packet is of a stream that nobody has declared: sound of another codec."""
    with av.open(str(path), "w") as container:
        video, sound = container.add_stream("flv", rate=8), container.add_stream("aac", rate=48000, layout="mono")
        video.width, video.height, video.pix_fmt = 48, 32, "yuv420p"
        for picture in _pictures(20, 32, 48, seed=7):
            container.mux(video.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(video.encode())
        for _ in range(120):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            frame.rate = 48000
            container.mux(sound.encode(frame))
        container.mux(sound.encode())
    content = bytearray(path.read_bytes())
    place, last = 13, 0  # after the header; each packet is a kind, a length, a time, data, and the length of all that
    while place < len(content):
        last = place if content[place] == 8 else last
        place += 15 + int.from_bytes(content[place + 1 : place + 4], "big")
    content[last + 11] = 0x5F
    path.write_bytes(content)


# What is no file, or none that should be opened.


@_fault("pipe.mp4", status="not_a_file", reason=" pipe")
def _pipe(path: Path) -> None:
    os.mkfifo(path)


@_fault("device.mp4", status="outside_root", reason="'/dev/zero'")
def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@_fault("dangling.mp4", status="missing", reason="'nowhere.mp4'")
def _dangling(path: Path) -> None:
    path.symlink_to("nowhere.mp4")


@_fault("no text.mp4", status="caption_missing", caption=None, reason=" no text.txt")
def _no_text(path: Path) -> None:
    _video(path, seed=5)


# Files that are not what they are called.


@_fault("empty.mp4", status="empty", reason=" empty")
def _empty(path: Path) -> None:
    path.write_bytes(b"")


@_fault("text.mp4", status="unreadable", reason=" video: ")
def _text(path: Path) -> None:
    path.write_text("not a video at all\n" * 50)


@_fault("playlist.mp4", status="unreadable", reason=" format ")
def _playlist(path: Path) -> None:
    """FFmpeg would play the files that such a text names."""
    path.write_text("ffconcat version 1.0\nfile rotated.mp4\n")


@_fault("text.png", status="unreadable", reason=" PIL ")
def _text_image(path: Path) -> None:
    path.write_text("not a picture\n")


@_fault("sound.mp4", status="no_video", reason=" video ")
def _sound_only(path: Path) -> None:
    with av.open(str(path), "w") as container:
        _sound(container, container.add_stream("aac", rate=8000, layout="mono"))


@_fault("cover.mp4", status="no_video", reason=" video ")
def _cover(path: Path) -> None:
    with av.open(str(path), "w") as container:
        sound = container.add_stream("aac", rate=8000, layout="mono")
        cover = container.add_stream("mjpeg", rate=1)
        cover.width, cover.height, cover.pix_fmt = 48, 32, "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic
        _sound(container, sound)
        container.mux(cover.encode(av.VideoFrame.from_ndarray(next(_pictures(1, 32, 48)), format="rgb24")))
        container.mux(cover.encode())


@_fault("no rate.mp4", status="no_rate", reason=" header")
def _no_rate(path: Path) -> None:
    content = bytearray(_video(path, frames=2).read_bytes())
    table = content.find(b"stts")
    for k in range(struct.unpack(">I", content[table + 8 : table + 12])[0]):
        content[table + 16 + 8 * k : table + 20 + 8 * k] = bytes(4)
    header = content.find(b"mdhd")
    content[header + 20 : header + 24] = bytes(4)  # the duration
    path.write_bytes(content)


@_fault("one time.mp4", status="no_rate", reason=" shown ")
def _one_time(path: Path) -> None:
    content = bytearray(_video(path).read_bytes())
    table = content.find(b"stts")
    for k in range(struct.unpack(">I", content[table + 8 : table + 12])[0]):
        content[table + 16 + 8 * k : table + 20 + 8 * k] = bytes(4)
    path.write_bytes(content)


@_fault("absurd rate.mp4", status="no_rate", reason=" 12800 ")
def _absurd_rate(path: Path) -> None:
    content = bytearray(_video(path, fps=25).read_bytes())
    table = content.find(b"stts")
    content[table + 16 : table + 20] = (1).to_bytes(4, "big")
    path.write_bytes(content)


@_fault("unknown codec.mp4", status="unreadable", reason=" FFmpeg; ")
def _unknown_codec(path: Path) -> None:
    path.write_bytes(_video(path).read_bytes().replace(b"avc1", b"zzzz"))


@_fault("long index.mp4", status="damaged", reason=" 400001 ")
def _long_index(path: Path) -> None:
    """A few kilobytes that declare hundreds of thousands of frames, which would be a list of as many objects."""
    with av.open(str(path), "w", options={"movflags": "frag_keyframe+empty_moov+default_base_moof"}) as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height = 48, 32
        for picture in _pictures(1, 32, 48):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    content = bytearray(path.read_bytes())
    frames = content.find(b"mdat") - 16  # the number of frames in it, before three other numbers
    content[frames : frames + 4] = (400_001).to_bytes(4, "big")
    path.write_bytes(content)


@_fault("one frame.mp4", status="too_short", reason=" 1 frame at 8 fps")
def _one_frame(path: Path) -> None:
    _video(path, frames=1)


@_fault("picture.png", status="no_bucket", reason="`image_resolution_buckets`")
def _picture(path: Path) -> None:
    Image.new("RGB", (48, 32), (9, 99, 199)).save(path)


# Damage.


@_fault("half.mp4", status="unreadable", reason=" video: ")
def _half(path: Path) -> None:
    """Cut in the middle, with the index at its end."""
    content = _video(path).read_bytes()
    path.write_bytes(content[: len(content) // 2])


@_fault("cut.mp4", status="cut_off", reason=" 20 ")
def _cut(path: Path) -> None:
    """Cut at two thirds, with the index in front: plays without an error."""
    content = _video(path, faststart=True, height=64, width=64).read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])


@_fault("hole.mp4", full="damaged", full_reason=" of 20: ")
def _hole(path: Path) -> None:
    """Zeros where a block of the disk was lost."""
    place, size = _packets(_video(path, faststart=True, height=64, width=96))[12]
    content = bytearray(path.read_bytes())
    content[place : place + size] = bytes(size)
    path.write_bytes(content)


@_fault("dropped frames.avi", full="cut_off", full_reason=" 20 ")
def _dropped(path: Path) -> None:
    """The index is whole and has its frames in the file, but the last ones are of length zero to the decoder."""
    packets = _packets(_video(path, codec="mpeg4", height=64, width=96))
    content = bytearray(path.read_bytes())
    for place, size in packets[15:]:
        # A frame that says of itself that it is not coded.
        start = content.find(b"\x00\x00\x01\xb6", place, place + size)
        content[start + 4 : place + size] = b"\x00" * (place + size - start - 4)
    path.write_bytes(content)


# Bombs: few bytes that declare much.


@_fault("bomb.png", status="too_large", reason=" image: ")
def _bomb_image(path: Path) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 20000, 20000, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(3 * 20000 + 1) * 20)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b""))


@_fault("bomb.mp4", status="too_large", reason="`max_pixels` allows 1e+06")
def _bomb_video(path: Path) -> None:
    """The same picture again and again, which takes next to nothing."""
    _video(path, height=240, width=320, pictures=[np.zeros((240, 320, 3), np.uint8)] * 20)


@_fault("canvas.gif", status="too_large", reason="10000x10000 ")
def _canvas(path: Path) -> None:
    Image.new("P", (10000, 10000)).save(path)
