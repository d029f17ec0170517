from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image

from finetrainers.data.buckets.clip import Clip
from finetrainers.data.inspect.decode_worker import Lost, answer, decode_task, thumbnail_task
from finetrainers.data.inspect.probe import probe
from finetrainers.data.reading.media import demux_packets
from finetrainers.data.reading.status import InvalidSample, InvalidSampleError
from finetrainers.data.video.decode import load_clip, read_image


@pytest.mark.parametrize(
    ("name", "frames", "fps", "width", "height"),
    [
        ("bigbuckbunny.mp4", 132, 25, 1280, 720),
        ("bikes.mp4", 250, 25, 640, 272),
        ("carphone_pristine.mp4", 120, 30000 / 1001, 193, 144),  # 176 stored, with pixels 128:117 wide
    ],
)
def test_real_clips(real_clips: Path, name: str, frames: int, fps: float, width: int, height: int) -> None:
    found = probe(real_clips / name)
    assert (found.frames, found.width, found.height) == (frames, width, height)
    assert found.fps == pytest.approx(fps)
    assert found.duration == pytest.approx(frames / fps)


@pytest.mark.parametrize(
    ("suffix", "codec"), [(".mp4", "libx264"), (".mkv", "libx264"), (".avi", "mpeg4"), (".mpg", "mpeg2video")]
)
def test_frames_are_exact_in_every_container(tmp_path: Path, make_video, suffix: str, codec: str) -> None:
    path = make_video(tmp_path / f"clip{suffix}", frames=37, fps=25, codec=codec)
    with av.open(str(path)) as container:
        decoded = sum(1 for _ in container.decode(video=0))
    assert probe(path).frames == decoded == 37
    assert probe(path).fps == pytest.approx(25)


def test_rotation_swaps_the_sides(tmp_path: Path, make_video) -> None:
    path = make_video(tmp_path / "phone.mp4", height=32, width=48, rotation=90)
    assert (probe(path).height, probe(path).width) == (48, 32)


def test_images_with_and_without_exif_rotation(tmp_path: Path, make_image) -> None:
    found = probe(make_image(tmp_path / "a.png", height=20, width=30), kind="image")
    assert (found.frames, found.height, found.width) == (1, 20, 30)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (30, 20)).save(tmp_path / "b.jpg", exif=exif)
    found = probe(tmp_path / "b.jpg", kind="image")
    assert (found.height, found.width) == (30, 20)


def test_a_truncated_file_is_found_without_decoding_it(tmp_path: Path, make_video) -> None:
    # With the index in front the file opens, declares all of its frames.
    whole = make_video(
        tmp_path / "whole.mp4", frames=32, height=128, width=128, container_options={"movflags": "faststart"}
    )
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size * 2 // 3])
    with av.open(str(cut)) as container:
        assert container.streams.video[0].frames == 32
    with pytest.raises(InvalidSampleError, match=r" 32 .* \d+ ") as caught:
        probe(cut)
    assert caught.value.status == "cut_off"


def test_broken_files(tmp_path: Path, make_video) -> None:
    whole = make_video(tmp_path / "whole.mp4")
    (tmp_path / "half.mp4").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    (tmp_path / "empty.mp4").write_bytes(b"")
    (tmp_path / "text.mp4").write_text("not a video at all\n" * 50)
    (tmp_path / "text.png").write_text("not a picture\n")
    for name, kind, statuses in [
        ("half.mp4", "video", {"unreadable"}),
        ("empty.mp4", "video", {"empty"}),
        ("text.mp4", "video", {"unreadable", "no_video"}),
        ("text.png", "image", {"unreadable"}),
    ]:
        with pytest.raises(InvalidSampleError) as caught:
            probe(tmp_path / name, kind=kind)
        assert caught.value.status in statuses


def test_sound_only_has_no_video_stream(tmp_path: Path) -> None:
    path = tmp_path / "sound.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(InvalidSampleError) as caught:
        probe(path)
    assert caught.value.status == "no_video"


def test_a_picture_in_a_format_that_is_a_program_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("PostScript was run"))
    path = tmp_path / "photo.jpg"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\nshowpage\n%%EOF\n")
    for read in (lambda: probe(path, kind="image"), lambda: read_image(path, height=8, width=8)):
        with pytest.raises(InvalidSampleError, match=" PIL ") as caught:
            read()
        assert caught.value.status == "unreadable"
    assert isinstance(decode_task(str(path), "image", 1), InvalidSample)
    lost = answer(thumbnail_task, (str(path), "image", (8, 8), 8))
    assert isinstance(lost, Lost)
    assert " PIL " in lost.how


def test_a_damaged_picture_rejects_only_its_file(tmp_path: Path) -> None:
    """PIL has many kinds of errors for that, and any of them would end the check of all files."""
    path = tmp_path / "a.png"
    Image.new("RGB", (64, 48)).save(path, exif=b"Exif\0\0garbage!!" + bytes(20))
    with pytest.raises(InvalidSampleError, match="not a TIFF file") as raised:
        probe(path, kind="image")
    assert (raised.value.status, raised.value.lasting) == ("unreadable", True)
    with pytest.raises(InvalidSampleError, match="not a TIFF file"):
        read_image(path, height=8, width=8)

    Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)).save(path)
    content = path.read_bytes()
    header = content.find(b"IHDR")
    path.write_bytes(content[: header - 4] + (5).to_bytes(4, "big") + content[header:])  # a header of five bytes
    with pytest.raises(InvalidSampleError, match="Truncated IHDR"):
        probe(path, kind="image")
    data = content.find(b"IDAT")
    path.write_bytes(
        content[: data - 4] + (10).to_bytes(4, "big") + content[data:]
    )  # the next chunk begins in its middle
    with pytest.raises(InvalidSampleError, match="broken PNG"):
        probe(path, kind="image")
    with pytest.raises(InvalidSampleError, match="broken PNG"):
        read_image(path, height=8, width=8)


def test_streams_that_begin_on_the_way_end_nothing() -> None:
    """After the last packet, PyAV may look for a stream that it has no object of."""

    class Container:
        def demux(self, stream: object) -> Iterator[str]:
            yield from ("first", "last", "flush")
            raise IndexError("list index out of range")

    assert list(demux_packets(Container(), None)) == ["first", "last", "flush"]  # type: ignore[arg-type]


def test_an_error_that_nobody_expects_is_the_status_of_one_file_with_its_type(
    tmp_path: Path, make_video, make_image, monkeypatch: pytest.MonkeyPatch
) -> None:
    video, image = make_video(tmp_path / "a.mp4"), make_image(tmp_path / "a.png")
    clip = Clip(0, video, "", "video", (1, 16, 16), 8.0, 9, 8.0, 48, 32)
    generator = torch.Generator()

    def wrong(*_: object, **__: object) -> None:
        raise KeyError("mistake,\nhere or there")

    monkeypatch.setattr(av, "open", wrong)
    monkeypatch.setattr(Image, "open", wrong)
    for path, kind in ((video, "video"), (image, "image")):
        with pytest.raises(InvalidSampleError, match="KeyError: 'mistake,") as raised:
            probe(path, kind=kind)
        assert (raised.value.status, raised.value.lasting) == ("unreadable", False)
        with pytest.raises(InvalidSampleError, match=rf" {path}: KeyError: 'mistake"):
            load_clip(replace(clip, path=path, kind=kind), generator=generator)
        refusal = answer(decode_task, (str(path), kind, 9))
        assert isinstance(refusal, InvalidSample)
        assert "KeyError: 'mistake" in refusal.reason
        assert "KeyError: 'mistake" in answer(thumbnail_task, (str(path), kind, (32, 48), 24)).how

    def empty(*_: object, **__: object) -> None:
        raise MemoryError

    for opening in ((av, "open"), (Image, "open")):
        monkeypatch.setattr(*opening, empty)
    for path, kind in ((video, "video"), (image, "image")):  # this process has no memory left, for the next file either
        with pytest.raises(MemoryError):
            probe(path, kind=kind)
        with pytest.raises(MemoryError):
            load_clip(replace(clip, path=path, kind=kind), generator=generator)
