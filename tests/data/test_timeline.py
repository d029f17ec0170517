"""Frames of clips whose rate varies, by the time at which they are shown; and clips cut to consecutive chunks."""

from __future__ import annotations

import math
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from finetrainers.config.geometry import Geometry
from finetrainers.config.root import TrainConfig
from finetrainers.config.sections import DataSection, ModelSection
from finetrainers.data.buckets.frames import num_available, playback_fps, select_frames
from finetrainers.data.buckets.windows import window_starts
from finetrainers.data.cache.keys import CacheKeys, EncoderEntry
from finetrainers.data.cache.store import TensorCache
from finetrainers.data.inspect.file_facts import FileFacts
from finetrainers.data.inspect.plan import DatasetPlan
from finetrainers.data.inspect.probe import probe
from finetrainers.data.inspect.survey import survey_dataset
from finetrainers.data.reading.status import InvalidSampleError
from finetrainers.data.video.decode import load_clip
from finetrainers.utils.seeding import generator

#: Ticks of 1/30 s: a second at 30 fps, one and a half still, a second at 10 fps, and again at 30.
UNEVEN = [*range(30), *range(75, 105, 3), *range(105, 135)]


def full_decode(path: Path) -> torch.Tensor:
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return torch.from_numpy(np.stack(frames)).permute(3, 0, 1, 2)


def plan(root: Path, **options: object) -> DatasetPlan:
    model = ModelSection(model_name="ltx_video", pretrained_model_name_or_path="x")
    data = DataSection(data_root=root, **options)
    return survey_dataset(
        TrainConfig(model=model, data=data), Geometry(temporal=8, spatial=16, patch=1, patch_t=1, fps=10)
    ).checked()


def shown(seconds: float) -> int:
    """The frame of `UNEVEN` on the screen at a time, found by looking through all of them."""
    return max(number for number, tick in enumerate(UNEVEN) if tick / 30 <= seconds)


@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
@pytest.mark.parametrize("frame_selection", ["head", "middle", "uniform"])
def test_of_uneven_clips_the_frame_on_the_screen_is_taken(
    tmp_path: Path, make_video, suffix: str, frame_selection: str
) -> None:
    path = make_video(
        tmp_path / f"phone{suffix}", frames=len(UNEVEN), fps=30, times=UNEVEN, options={"g": "12", "bf": "3"}
    )
    path.with_suffix(".txt").write_text("a phone clip")
    found = probe(path)
    span = UNEVEN[-1] / 30
    assert found.is_variable
    assert found.fps == pytest.approx((len(UNEVEN) - 1) / span, rel=1e-3)
    made = plan(tmp_path, video_resolution_buckets=["33x32x48"], frame_selection=frame_selection)
    [clip] = made.clips
    assert clip.is_variable
    assert clip.fps == pytest.approx(32 / span if frame_selection == "uniform" else 10, rel=1e-3)
    cut = load_clip(clip, generator=generator("cpu", 0))
    available = math.ceil((span + 0.5 / found.fps) * 10)
    first = {"head": 0.0, "middle": (available - 33) // 2 / 10, "uniform": 0.0}[frame_selection]
    expected = [shown(first + k / clip.fps + 0.5 / found.fps) for k in range(33)]
    # Numbers of evenly spaced frames would be others: the clip stands still for 1.5 s.
    assert max(expected.count(number) for number in expected) > 5
    assert torch.equal(cut, full_decode(path)[:, expected])


def test_times_that_are_even_but_for_rounding_count_as_even(tmp_path: Path, make_video) -> None:
    jitter = [20 * k + (k * 7) % 5 - 2 for k in range(60)]  # a phone's clock of 1/600 s
    path = make_video(tmp_path / "a.mp4", frames=60, fps=600, times=[t + 2 for t in jitter], options={"bf": "0"})
    assert not probe(path).is_variable
    assert not probe(make_video(tmp_path / "b.mkv", frames=60, fps=24)).is_variable  # 41.67 ms in whole ms


def test_a_file_that_lost_frames_since_it_was_planned(tmp_path: Path, make_video) -> None:
    path = make_video(tmp_path / "a.mp4", frames=len(UNEVEN), fps=30, times=UNEVEN)
    path.with_suffix(".txt").write_text("a")
    [clip] = plan(tmp_path, video_resolution_buckets=["33x32x48"]).clips
    make_video(path, frames=50, fps=30, times=UNEVEN)
    with pytest.raises(InvalidSampleError, match=r"a\.mp4 .* 50 .* 70$") as caught:
        load_clip(clip, generator=generator("cpu", 0))
    assert caught.value.status == "damaged"


@settings(max_examples=200, deadline=None)
@given(
    gaps=st.lists(st.floats(0.004, 2.0), min_size=0, max_size=60),
    even=st.sampled_from([None, 1 / 60, 1001 / 30000, 1 / 24, 1 / 8]),
    target=st.sampled_from([8, 16, 24, 25, 30]),
    mode=st.sampled_from(["head", "middle", "random", "uniform", "chunk"]),
    draw=st.integers(0, 10**9),
    data=st.data(),
)
def test_what_is_available_by_the_header_is_there_by_the_times(gaps, even, target, mode, draw, data) -> None:
    times = [0.0]
    for gap in gaps:
        times.append(times[-1] + (even or gap))
    source = 1 / (even or 0.1) if len(times) == 1 else (len(times) - 1) / times[-1]
    fps = playback_fps(source, target)
    given_by_header = len(times) if mode == "uniform" else num_available(len(times), source_fps=source, fps=fps)
    length = data.draw(st.integers(1, given_by_header))
    indices, rate = select_frames(
        len(times), source_fps=source, fps=fps, length=length, mode=mode, draw=draw, times=times
    )
    assert len(indices) == length
    assert indices == sorted(indices)
    assert 0 <= indices[0] <= indices[-1] < len(times)
    if even:  # then times and arithmetic agree
        by_number, _ = select_frames(len(times), source_fps=source, fps=fps, length=length, mode=mode, draw=draw)
        assert np.abs(np.subtract(indices, by_number)).max() <= 1
        assert np.mean(np.not_equal(indices, by_number)) <= 0.5
    if mode != "uniform":  # no frame stays for longer than it was shown, up to a period of both rates
        longest = max(b - a for a, b in zip(times, [*times[1:], times[-1] + 1 / source], strict=True))
        stays = max(indices.count(number) for number in indices) / rate
        assert stays <= longest + 1 / rate + 1 / source + 1e-6


def test_chunks_are_consecutive_and_each_is_a_clip(tmp_path: Path, make_video, make_image) -> None:
    long = make_video(tmp_path / "long.mp4", frames=61, fps=20)  # 31 frames at 10 fps
    make_video(tmp_path / "short.mp4", frames=18, fps=20)
    make_image(tmp_path / "still.png")
    for name in ("long", "short", "still"):
        (tmp_path / f"{name}.txt").write_text(name)
    options = {
        "video_resolution_buckets": ["9x32x48"], "image_resolution_buckets": ["32x48"], "frame_selection": "chunk",
    }  # fmt: skip
    made = plan(tmp_path, **options)
    assert [(clip.path.stem, clip.start) for clip in made.clips] == [
        ("long", 0), ("long", 9), ("long", 18), ("short", 0), ("still", None),
    ]  # fmt: skip
    assert len({clip.index for clip in made.clips}) == 5
    assert [item.examples for item in made.items] == [3, 1, 1]
    [note] = made.notes
    assert note.startswith("chunks: 3 ")
    assert all(value in note for value in (" 5 ", " 9.8% "))
    cuts = [load_clip(clip, generator=generator("cpu", 0)) for clip in made.clips[:3]]
    assert torch.equal(torch.cat(cuts, dim=1), full_decode(long)[:, 0:54:2])

    data = DataSection(data_root=tmp_path, **options)
    keys = CacheKeys(TensorCache(tmp_path / "t"), FileFacts(tmp_path / "d"), "text", EncoderEntry("vae"), data, seed=7)
    assert len({keys.video(clip) for clip in made.clips}) == 5
    # No chunk of a held-out item is trained on.
    held = plan(tmp_path, **options, eval_num_items=2)
    assert {clip.path for clip in held.eval_clips}.isdisjoint(clip.path for clip in held.clips)
    assert len(held.eval_clips) + len(held.clips) == 5


def test_chunks_start_where_the_last_one_ends() -> None:
    assert list(window_starts(31, 9, stride=9)) == [0, 9, 18]
    assert list(window_starts(9, 9, stride=9)) == [0]
    with refused("invalid", "9 ", " 24, ", " 31 of 61 ", " 10 fps"):
        select_frames(61, source_fps=20, fps=10, length=9, mode="chunk", start=24)


def test_a_backend_that_would_show_other_pixels_leaves_the_clip_to_pyav(tmp_path: Path, make_video) -> None:
    pytest.importorskip("decord")
    make_video(tmp_path / "plain.mp4", frames=12, fps=10, height=64, width=96)
    make_video(tmp_path / "deep.mp4", frames=12, fps=10, height=64, width=96, pix_fmt="yuv420p10le")
    for name in ("plain", "deep"):
        (tmp_path / f"{name}.txt").write_text(name)
    made = plan(tmp_path, video_resolution_buckets=["9x64x96"], video_backend="decord")
    assert {clip.path.stem: clip.backend for clip in made.clips} == {"plain": "decord", "deep": "pyav"}
    [warning] = made.warnings
    assert warning.startswith("1 ")
    assert " decord " in warning
    assert warning.endswith(": deep.mp4 (pixel format yuv420p10le)")
    for clip in made.clips:
        cut = load_clip(clip, generator=generator("cpu", 0))
        assert torch.equal(cut, full_decode(clip.path)[:, :9])
    assert plan(tmp_path, video_resolution_buckets=["9x64x96"]).fingerprint == made.fingerprint
