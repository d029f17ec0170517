from __future__ import annotations

import contextlib
import tracemalloc
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from diffusers.utils import export_to_video, load_video
from PIL import Image

from finetrainers.data.buckets.clip import Clip
from finetrainers.data.inspect.probe import probe
from finetrainers.data.reading.status import InvalidSampleError
from finetrainers.data.video.decode import load_clip, read_frames, read_image, resize
from finetrainers.data.video.pyav import PyavReader
from finetrainers.models.spec import to_unit_range
from finetrainers.utils.seeding import generator
from finetrainers.utils.video import write_mp4


def full_decode(path: Path) -> np.ndarray:
    """The independent reference: every frame, in order, unscaled."""
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def clip_of(path: Path, bucket: tuple[int, int, int], *, fps: float | None = None, kind: str = "video") -> Clip:
    found = probe(path, kind=kind)
    return Clip(0, path, "", kind, bucket, fps or found.fps, found.frames, found.fps, found.width, found.height)


def test_videos_written_by_diffusers_are_read_and_it_reads_ours(tmp_path: Path) -> None:
    """`export_to_video` and `load_video` work as installed; in both directions colors differ only by compression."""
    shades = [40, 80, 120, 160, 200]
    frames = np.stack([np.full((64, 96, 3), shade, np.uint8) for shade in shades])
    export_to_video([Image.fromarray(frame) for frame in frames], str(tmp_path / "theirs.mp4"), fps=8)
    found = probe(tmp_path / "theirs.mp4", kind="video")
    assert (found.frames, found.fps, found.width, found.height) == (5, 8, 96, 64)
    assert abs(full_decode(tmp_path / "theirs.mp4").mean(axis=(1, 2, 3)) - shades).max() < 3
    write_mp4(tmp_path / "ours.mp4", frames, fps=8)
    read = load_video(str(tmp_path / "ours.mp4"))
    assert [frame.size for frame in read] == [(96, 64)] * 5
    assert abs(np.stack(read).mean(axis=(1, 2, 3)) - shades).max() < 3


@pytest.mark.parametrize("first", [0, 3, 30, 117, 200, 249])
def test_frames_equal_a_full_decode_wherever_they_start(real_clips: Path, first: int) -> None:
    path = real_clips / "bikes.mp4"  # six key frames and B-frames
    indices = [i for i in range(first, first + 40, 7) if i < 250]
    frames = read_frames(path, indices, height=272, width=640)
    assert np.array_equal(frames.numpy(), full_decode(path)[indices])


@pytest.mark.parametrize(
    ("suffix", "codec", "options"),
    [
        (".mp4", "libx264", {"g": "10", "bf": "3"}),
        (".mkv", "libx264", {"g": "10", "x264-params": "open-gop=1"}),
        (".avi", "mpeg4", {"g": "12"}),  # no display times
        (".mpg", "mpeg2video", {"g": "12", "bf": "2"}),
        (".webm", "libvpx", {"g": "15"}),
        (".3gp", "mpeg4", {"g": "12"}),
        (".flv", "flv1", {"g": "12"}),
        (".wmv", "wmv2", {"g": "12"}),
        (".ts", "libx264", {"g": "20", "bf": "2"}),  # no index: seeking may land late
    ],
)
def test_every_container_gives_the_right_frames(tmp_path: Path, make_video, suffix, codec, options) -> None:
    path = make_video(tmp_path / f"clip{suffix}", frames=60, fps=25, codec=codec, options=options)
    reference = full_decode(path)
    for indices in ([0, 5], [30, 31, 32], [41, 59], [59]):
        assert np.array_equal(read_frames(path, indices, height=32, width=48).numpy(), reference[indices])


@pytest.mark.parametrize("rotation", [90, 180, -90])
def test_rotated_clips_come_out_upright(tmp_path: Path, make_video, rotation: int) -> None:
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 255, (3, 4, 6, 3)).repeat(16, axis=1).repeat(16, axis=2)
    path = make_video(tmp_path / "phone.mp4", frames=3, height=64, width=96, rotation=rotation, pictures=pictures)
    found = probe(path)
    upright = read_frames(path, [1], height=found.height, width=found.width)[0].numpy().astype(int)
    # A player turns the stored picture counterclockwise by the angle.
    expected = np.rot90(pictures[1], k=rotation // 90)
    assert np.abs(upright - expected).mean() < 12
    assert np.abs(upright - np.rot90(expected, k=2)).mean() > 40


def test_two_decoded_frames_are_in_memory_at_a_time(real_clips: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is resized and the one that is decoded meanwhile, however many a clip has."""
    alive, most, frames = 0, 0, PyavReader.frames

    def gone() -> None:
        nonlocal alive
        alive -= 1

    def counted(self: PyavReader, numbers: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        nonlocal alive, most
        for number, pixels in frames(self, numbers):
            alive += 1
            most = max(most, alive)
            weakref.finalize(pixels if pixels.base is None else pixels.base, gone)
            yield number, pixels
            del pixels

    monkeypatch.setattr(PyavReader, "frames", counted)
    clip = clip_of(real_clips / "bikes.mp4", (49, 32, 64))
    assert load_clip(clip, generator=torch.Generator()).dtype == torch.uint8
    assert alive == 0
    assert most <= 2


def test_resize_is_pils_antialiased_bicubic(real_clips: Path) -> None:
    frame = full_decode(real_clips / "carphone_pristine.mp4")[5]
    ours = resize(torch.from_numpy(frame), 60, 88).numpy().astype(int)
    pils = np.asarray(Image.fromarray(frame).resize((88, 60), Image.Resampling.BICUBIC)).astype(int)
    assert np.abs(ours - pils).max() <= 1


def test_images_are_turned_upright(tmp_path: Path) -> None:
    pixels = np.zeros((20, 30, 3), np.uint8)
    pixels[:, 20:] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned a quarter clockwise: right becomes bottom
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    frame = read_image(tmp_path / "a.png", height=30, width=20)[0, :, :, 0]
    assert frame.shape == (30, 20)
    assert (frame[:20] == 0).all()
    assert (frame[20:] == 255).all()


def test_center_crop_keeps_the_aspect_ratio(tmp_path: Path) -> None:
    pixels = np.zeros((40, 100, 3), np.uint8)
    pixels[:, 40:60] = 255  # a white square's width of 20 in the middle
    Image.fromarray(pixels).save(tmp_path / "a.png")
    clip = clip_of(tmp_path / "a.png", (1, 20, 20), kind="image")
    cut = load_clip(clip, generator=generator("cpu", 0))
    assert cut.shape == (3, 1, 20, 20)
    assert (cut > 127).float().mean() == pytest.approx(0.5)  # the middle 40 of 100 columns, half of them white
    plain = load_clip(replace(clip, reshape_mode="none"), generator=generator("cpu", 0))
    assert (plain > 127).float().mean() == pytest.approx(0.2)


def test_videos_are_cropped_frame_by_frame(tmp_path: Path, make_video) -> None:
    path = make_video(tmp_path / "a.mp4", frames=9, height=64, width=160)
    whole = read_frames(path, range(9), height=32, width=80)
    cut = load_clip(clip_of(path, (9, 32, 48)), generator=generator("cpu", 0))
    assert torch.equal(cut, whole[:, :, 16:64].permute(3, 0, 1, 2))
    part = read_frames(path, [0], height=32, width=80, box=(0, 16, 32, 48))
    assert torch.equal(part[0], whole[0, :, 16:64])


def test_random_crop_depends_on_the_generator_only(tmp_path: Path) -> None:
    Image.fromarray(np.arange(100, dtype=np.uint8)[None, :, None].repeat(20, 0).repeat(3, 2)).save(tmp_path / "a.png")
    clip = clip_of(tmp_path / "a.png", (1, 20, 20), kind="image")

    def left(seed: int) -> float:
        cut = load_clip(replace(clip, reshape_mode="random"), generator=generator("cpu", seed))
        return cut[0, 0, 0, 0].item()

    found = [left(seed) for seed in range(40)]
    assert found == [left(seed) for seed in range(40)]
    assert min(found) < 15
    assert max(found) > 65
    assert max(found) <= 80


def test_values_and_layout(tmp_path: Path, make_video) -> None:
    path = make_video(tmp_path / "a.mp4", frames=20, fps=16)
    cut = load_clip(clip_of(path, (9, 32, 48), fps=8), generator=generator("cpu", 0))
    assert cut.is_contiguous()  # what was cut away is not kept
    pixels = torch.from_numpy(full_decode(path)[0:18:2]).permute(3, 0, 1, 2)
    assert torch.equal(cut, pixels)
    unit = to_unit_range(cut[None])[0]
    assert unit.dtype == torch.float32
    assert torch.equal(unit, pixels / 127.5 - 1)
    assert torch.equal(to_unit_range(cut[None], dtype=torch.bfloat16)[0], unit.bfloat16())
    assert to_unit_range(unit) is unit


def test_random_start_moves_between_generators(tmp_path: Path, make_video) -> None:
    path = make_video(tmp_path / "a.mp4", frames=40)
    clip = replace(clip_of(path, (9, 32, 48)), frame_selection="random")
    cuts = [load_clip(clip, generator=generator("cpu", seed)).sum().item() for seed in range(5)]
    assert len(set(cuts)) > 1


def test_uniform_ignores_the_rate(tmp_path: Path, make_video) -> None:
    path = make_video(tmp_path / "a.mp4", frames=17)
    clip = clip_of(path, (9, 32, 48), fps=4.0)
    cut = load_clip(replace(clip, frame_selection="uniform"), generator=generator("cpu", 0))
    assert torch.equal(cut, torch.from_numpy(full_decode(path)[0:17:2]).permute(3, 0, 1, 2))


def test_a_file_that_ends_early_says_how_far_it_got(tmp_path: Path, make_video) -> None:
    path = make_video(tmp_path / "a.mp4", frames=9)
    for indices, numbers in (([0, 4, 12], " 2 of 3 .* 12; "), ([99], " 0 of 1 .* 99; ")):
        with pytest.raises(InvalidSampleError, match=rf"a\.mp4 .*{numbers}") as caught:
            read_frames(path, indices, height=32, width=48)
        assert caught.value.status == "damaged"


def test_damaged_files_name_the_file(tmp_path: Path, make_video) -> None:
    whole = make_video(tmp_path / "whole.mp4", frames=32, container_options={"movflags": "faststart"})
    (tmp_path / "cut.mp4").write_bytes(whole.read_bytes()[: whole.stat().st_size * 2 // 3])
    (tmp_path / "text.mp4").write_text("text")
    (tmp_path / "empty.png").write_bytes(b"")
    for name in ("cut.mp4", "text.mp4", "absent.mp4"):
        with pytest.raises(InvalidSampleError, match=name):
            read_frames(tmp_path / name, range(32), height=32, width=48)
    with pytest.raises(InvalidSampleError, match=r"empty\.png"):
        read_image(tmp_path / "empty.png", height=8, width=8)


def test_lengths_that_a_file_states_are_not_allocated(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    content = bytearray((tmp_path / "a.png").read_bytes())
    at = content.index(b"IDAT") - 4
    content[at : at + 4] = (0x7FFFFFF0).to_bytes(4, "big")
    (tmp_path / "a.png").write_bytes(content)
    tracemalloc.start()
    with contextlib.suppress(InvalidSampleError):
        read_image(tmp_path / "a.png", height=8, width=8)
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


def test_pictures_that_are_mended_are_an_error(tmp_path: Path, make_video) -> None:
    """FFmpeg conceals what is lost in H.264 and goes on; what it shows from there on is not the clip."""
    path = make_video(tmp_path / "a.mp4", frames=60, fps=25, height=64, width=96, options={"g": "20"})
    with av.open(str(path)) as container:
        at = [packet.pos for packet in container.demux(video=0) if packet.is_keyframe][1]
    content = bytearray(path.read_bytes())
    content[at + 150 : at + 450] = np.random.default_rng(0).bytes(300)
    path.write_bytes(content)
    assert read_frames(path, [0, 5], height=64, width=96).shape[0] == 2
    for wanted in ([20], [3, 30], [25, 26, 27]):
        with pytest.raises(InvalidSampleError, match=r"a\.mp4: frame 20 ") as caught:
            read_frames(path, wanted, height=64, width=96)
        assert caught.value.status == "damaged"
    assert read_frames(path, [55], height=64, width=96).shape[0] == 1  # a later key frame refers to none of it


def test_images_of_sixteen_bits_become_eight(tmp_path: Path) -> None:
    grey = np.linspace(0, 65535, 600).astype(np.uint16).reshape(20, 30)
    Image.fromarray(grey).save(tmp_path / "a.png")
    frame = read_image(tmp_path / "a.png", height=20, width=30)[0].numpy()
    assert np.array_equal(frame, (grey >> 8).astype(np.uint8)[..., None].repeat(3, axis=2))
