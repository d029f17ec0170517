"""Every backend against a plain decode of the whole file, wherever it begins, and the fallback if it would differ."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from finetrainers.config.errors import ConfigError
from finetrainers.config.load import load_config
from finetrainers.data.video import pyav
from finetrainers.data.video.backends import backend_problem, fallback_reason, open_video, resolve_backend
from finetrainers.data.video.timeline import Timeline, timeline_from_index, timeline_from_packets
from finetrainers.plan.preflight import preflight

FRAMES = 60
#: Name of the file, what it is written with, and why decord and torchcodec may show other pixels; None: they may not.
FILES: dict[str, tuple[dict[str, Any], str | None, str | None]] = {
    "b_frames.mp4": ({"options": {"g": "12", "bf": "3"}}, None, None),
    "uneven.mkv": (
        {"options": {"g": "12", "bf": "3"}, "times": [k if k < 30 else 3 * k - 60 for k in range(60)]}, None, None,
    ),
    "turned.mp4": ({"rotation": 90}, None, None),
    "full_range.mp4": ({"pix_fmt": "yuvj420p"}, None, None),
    "444_odd.mp4": ({"pix_fmt": "yuv444p", "height": 63, "width": 95}, None, None),
    "vp8.webm": ({"codec": "libvpx", "options": {"g": "15"}}, None, None),
    "vp9.webm": ({"codec": "libvpx-vp9", "options": {"g": "15"}}, None, None),
    "open_gop.mkv": ({"options": {"g": "10", "bf": "3", "x264-params": "open-gop=1"}}, "key frames", "key frames"),
    "refresh.mp4": ({"options": {"g": "20", "bf": "0", "x264-params": "intra-refresh=1"}}, "key frames", "key frames"),
    "small.mp4": ({"height": 32, "width": 48}, "cannot be decoded", None),  # decord wants wider rows
    "10_bit.mp4": ({"pix_fmt": "yuv420p10le"}, "pixel format", "pixel format"),
    "interlaced.mp4": ({"options": {"x264-params": "tff=1"}}, "interlaced", "interlaced"),
    "hevc.mp4": (
        {"codec": "libx265", "options": {
            "x265-params": "log-level=none:keyint=12:min-keyint=12:scenecut=0:open-gop=1:bframes=4"}}, "codec", None
    ),
    "av1.mp4": ({"codec": "libsvtav1", "options": {"preset": "12", "g": "12"}}, "codec", None),
    "mpeg4.mp4": ({"codec": "mpeg4", "options": {"g": "12", "bf": "2"}}, "codec", None),
    "odd.mkv": ({"codec": "ffv1", "height": 63, "width": 95}, "codec", "codec"),
    "alpha.mov": ({"codec": "png", "pix_fmt": "rgba"}, "codec", "codec"),
    "alpha_prores.mov": (
        {"codec": "prores_ks", "pix_fmt": "yuva444p10le", "options": {"profile": "4444"}}, "codec", "codec"
    ),
    "colors.gif": ({"codec": "gif", "pix_fmt": "rgb8"}, "container", "container"),
    "stream.ts": ({"options": {"g": "20", "bf": "2"}}, "container", "container"),
    "program.mpg": ({"codec": "mpeg2video", "options": {"g": "12", "bf": "2"}}, "container", "container"),
    "edited.mp4": ({}, "edit list", "edit list"),
}  # fmt: skip


def moving(height: int, width: int) -> np.ndarray:
    """Pictures `[FRAMES, H, W, 3]` that differ from each other everywhere."""
    blocks = np.random.default_rng(0).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3)).repeat(8, 0).repeat(8, 1)
    return np.stack([(np.roll(blocks[:height, :width], k, axis=1) + 2 * k) % 256 for k in range(FRAMES)])


def write_edited(path: Path, source: Path) -> None:
    """Copy a clip from its eighth frame on; since no key frame is there, an edit list hides the ones before."""
    with av.open(str(source)) as container, av.open(str(path), "w", options={"avoid_negative_ts": "disabled"}) as out:
        stream = container.streams.video[0]
        copy = out.add_stream_from_template(stream)
        for packet in container.demux(stream):
            if packet.dts is not None:
                packet.pts -= round(0.32 / packet.time_base)
                packet.dts -= round(0.32 / packet.time_base)
                packet.stream = copy
                out.mux(packet)


def full_decode(path: Path) -> np.ndarray:
    """The reference: every frame in order, turned as a player turns it."""
    with av.open(str(path)) as container:
        frames = list(container.decode(video=0))
    return np.stack([np.rot90(f.to_ndarray(format="rgb24"), k=round(f.rotation / 90)) for f in frames])


@pytest.fixture(scope="module")
def files(
    tmp_path_factory: pytest.TempPathFactory, make_video: Callable[..., Path]
) -> dict[str, tuple[Path, np.ndarray]]:
    root = tmp_path_factory.mktemp("files")
    for name, (settings, _, _) in FILES.items():
        if name == "edited.mp4":
            write_edited(root / name, root / "b_frames.mp4")
            continue
        height, width = settings.get("height", 64), settings.get("width", 96)
        settings = {"height": height, "width": width, **settings}
        make_video(root / name, frames=FRAMES, fps=25, pictures=moving(height, width), **settings)
    return {name: (root / name, full_decode(root / name)) for name in FILES}


def usable(backend: str) -> bool:
    return backend_problem(backend) is None


@pytest.mark.parametrize("backend", ["pyav", "decord", "torchcodec"])
@pytest.mark.parametrize("name", FILES)
def test_every_backend_gives_the_frames_of_a_full_decode(name: str, backend: str, files) -> None:
    if not usable(backend):
        pytest.skip(f"{backend} cannot be imported")
    path, reference = files[name]
    expected = {"pyav": None, "decord": FILES[name][1], "torchcodec": FILES[name][2]}[backend]
    reason = fallback_reason(path, backend)
    assert (reason is None) == (expected is None), reason
    if expected is not None:
        assert expected in reason
        return
    assert len(reference) == (FRAMES - 8 if name == "edited.mp4" else FRAMES)
    draw = random.Random(0)
    for count in (1, 1, 1, 1, 2, 2, 3, 5, 20):
        numbers = sorted(draw.sample(range(len(reference)), count))
        with closing(open_video(path, backend)) as video:
            frames = dict(video.frames(numbers))
        assert list(frames) == numbers
        assert all(np.array_equal(frames[number], reference[number]) for number in numbers)
    with closing(open_video(path, backend)) as video:
        assert video.num_frames == len(reference)
        assert [number for number, _ in video.frames([2, 1000])] == [2]


def test_far_frames_are_jumped_to(files, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames 2, 29 and 58 of a clip with a key frame every twelve need eight of sixty decodes, by either timeline."""
    path, reference = files["b_frames.mp4"]
    asked = []
    number = Timeline.number
    monkeypatch.setattr(Timeline, "number", lambda self, time: asked.append(time) or number(self, time))
    monkeypatch.setattr(pyav, "_JUMP_OVER", 6)
    assert timeline_from_index(path).times == range(0, 60 * 512, 512)
    assert list(timeline_from_index(path).times) == timeline_from_packets(path).times
    for index in (timeline_from_index, lambda path: None):
        monkeypatch.setattr(pyav, "timeline_from_index", index)
        asked.clear()
        with closing(open_video(path)) as video:
            frames = dict(video.frames([2, 29, 58]))
        assert all(np.array_equal(frames[n], reference[n]) for n in (2, 29, 58))
        assert len(asked) < 25


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("refresh.mp4", {"options": {"g": "12", "bf": "0", "x264-params": "intra-refresh=1"}}),
        ("program.mpg", {"codec": "mpeg1video", "options": {"g": "30"}}),
        ("stream.ts", {"codec": "mpeg4", "options": {"g": "30", "bf": "2"}}),
    ],
)
def test_where_key_frames_mislead_nothing_is_jumped_over(tmp_path: Path, make_video, name: str, settings: dict) -> None:
    path = make_video(tmp_path / name, frames=FRAMES, fps=25, height=64, width=96, pictures=moving(64, 96), **settings)
    reference = full_decode(path)
    for number in range(26, len(reference), 3):
        with closing(open_video(path)) as video:
            [(found, frame)] = video.frames([number])
        assert found == number
        assert np.array_equal(frame, reference[number]), number


def test_an_index_that_lies_is_found_out(files, monkeypatch: pytest.MonkeyPatch) -> None:
    path, reference = files["b_frames.mp4"]
    true = timeline_from_index(path)
    monkeypatch.setattr(pyav, "timeline_from_index", lambda path: Timeline(range(0, 60 * 500, 500), true.keys))
    with closing(open_video(path)) as video:
        frames = dict(video.frames([0, 40, 59]))
    assert all(np.array_equal(frames[n], reference[n]) for n in (0, 40, 59))


def test_a_backend_that_is_not_there_is_refused_before_anything_is_loaded(
    tmp_path: Path, make_video, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_video(tmp_path / "clips" / "a.mp4")
    (tmp_path / "clips" / "a.txt").write_text("a")
    monkeypatch.setitem(sys.modules, "decord", None)  # as if it were not installed
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    config = load_config(
        model_name="ltx_video", pretrained_model_name_or_path="hub/model", data_root=str(tmp_path / "clips"),
        output_dir=str(tmp_path / "run"), train_steps=1, video_backend="decord",
    )  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        preflight(config)
    [problem] = [problem for problem in caught.value.problems if problem.where == "--video_backend"]
    assert problem.message.startswith("decord ")
    assert backend_problem("torchcodec").startswith("torchcodec ")
    assert backend_problem("auto") is None
    assert resolve_backend("auto") == "pyav"
