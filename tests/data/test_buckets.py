from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from finetrainers.config.geometry import Geometry
from finetrainers.data.buckets.buckets import choose_bucket, cover_size, default_buckets, default_lengths, legal_length
from finetrainers.data.buckets.frames import is_slower, num_available, playback_fps, sampling_fps, select_frames

BUCKETS = [(17, 256, 256), (49, 512, 768), (49, 256, 384), (49, 768, 512), (1, 256, 256)]


def test_half_rate_takes_every_second_frame() -> None:
    assert select_frames(10, source_fps=50, fps=25, length=4, mode="head") == ([0, 2, 4, 6], 25)
    assert select_frames(10, source_fps=50, fps=25, length=3, mode="middle") == ([2, 4, 6], 25)


def test_thirty_to_twenty_four_keeps_the_speed() -> None:
    indices, _ = select_frames(120, source_fps=30, fps=24, length=96, mode="head")
    assert indices == [math.floor(k * 1.25 + 0.5) for k in range(96)]
    assert num_available(120, source_fps=30, fps=24) == 96


def test_random_start_covers_every_position_and_nothing_else() -> None:
    starts = {select_frames(10, source_fps=8, fps=8, length=7, mode="random", draw=d)[0][0] for d in range(50)}
    assert starts == {0, 1, 2, 3}


def test_uniform_spans_the_clip_and_says_its_rate() -> None:
    indices, fps = select_frames(101, source_fps=25, fps=8, length=5, mode="uniform")
    assert indices == [0, 25, 50, 75, 100]
    assert fps == 1.0
    assert select_frames(9, source_fps=25, fps=8, length=1, mode="uniform") == ([4], 25)


def test_too_short_is_an_error_with_numbers() -> None:
    with refused("invalid", "9 ", " 5 of 10 ", " 25 fps"):
        select_frames(10, source_fps=50, fps=25, length=9, mode="head")


def test_rates() -> None:
    assert playback_fps(30, 24) == 24
    assert playback_fps(12, 24) == 12
    assert playback_fps(24, 23.976) == 24  # the same rate in practice: nothing is dropped
    assert sampling_fps([], 24) == sampling_fps([23.976, 24, 12], 24) == 24
    assert sampling_fps([8, 24, 8], 24) == 8
    assert sampling_fps([12, 15], 24) == 12  # one that clips have, not between them
    assert sampling_fps([14.98765], 24) == 14.988
    assert is_slower(12, 24)
    assert not is_slower(23.976, 24)


@settings(max_examples=200, deadline=None)
@given(
    num_frames=st.integers(1, 400),
    source=st.sampled_from([8, 12.5, 24, 25, 30000 / 1001, 30, 50, 60, 120]),
    target=st.sampled_from([8, 16, 24, 25, 30]),
    mode=st.sampled_from(["head", "middle", "random", "uniform"]),
    draw=st.integers(0, 10**9),
    data=st.data(),
)
def test_selected_frames_exist_and_rise(num_frames, source, target, mode, draw, data) -> None:
    fps = playback_fps(source, target)
    available = num_available(num_frames, source_fps=source, fps=fps)
    # The definition, counted by hand.
    assert available == sum(math.floor(k * source / fps + 0.5) <= num_frames - 1 for k in range(num_frames + 1))
    length = data.draw(st.integers(1, available))
    indices, effective = select_frames(num_frames, source_fps=source, fps=fps, length=length, mode=mode, draw=draw)
    assert len(indices) == length
    assert indices == sorted(set(indices))
    assert indices[0] >= 0
    assert indices[-1] < num_frames
    if length > 1:  # the frames really are 1 / effective seconds apart, up to rounding to a source frame
        span = (indices[-1] - indices[0]) / source
        assert abs(span - (length - 1) / effective) <= 1.0 / source + 1e-9


def test_longest_frames_first_then_aspect_ratio() -> None:
    assert choose_bucket(60, 480, 720, BUCKETS) == (49, 512, 768)  # ties with 256x384: the larger
    assert choose_bucket(60, 720, 480, BUCKETS) == (49, 768, 512)
    assert choose_bucket(48, 480, 720, BUCKETS) == (17, 256, 256)  # a mixed list: never a bucket that does not exist
    assert choose_bucket(3, 480, 720, BUCKETS) == (1, 256, 256)
    assert choose_bucket(10, 480, 720, [(17, 256, 256)]) is None


def test_aspect_ratio_distance_is_a_factor() -> None:
    # 1:1 is a factor 1.9 from 1.9:1 and 1:1.9; with plain differences of ratios the tall one would look nearer.
    buckets = [(1, 100, 200), (1, 190, 100)]
    assert choose_bucket(1, 100, 100, buckets) == (1, 190, 100)
    assert choose_bucket(1, 100, 100, [(1, 100, 180), (1, 190, 100)]) == (1, 100, 180)


def test_default_buckets_are_legal_and_fit_every_clip() -> None:
    geometry = Geometry(temporal=8, spatial=32, patch=1, patch_t=1, fps=25)
    clips = [(20, 720, 1280), (100, 720, 1280), (120, 720, 1280)]
    buckets = default_buckets(clips, geometry)
    assert buckets == [(49, 448, 832), (17, 448, 832)]
    assert all(not geometry.problems(*bucket) for bucket in buckets)
    assert all(choose_bucket(*clip, buckets) for clip in clips)
    assert default_buckets([(1, 40, 40)], geometry) == [(1, 32, 32)]


def test_default_buckets_have_the_aspect_ratios_of_the_clips() -> None:
    geometry = Geometry(temporal=8, spatial=32, patch=1, patch_t=1, fps=25)
    landscape, portrait = (49, 512, 768), (49, 768, 512)
    assert default_buckets([landscape, landscape, portrait], geometry) == [portrait, landscape]
    assert default_buckets([(49, 512, 768), (49, 500, 760)], geometry) == [(49, 480, 736)]  # nearly the same shape
    # A small clip is not enlarged to the size of the others, and no bucket is without a clip.
    assert default_buckets([landscape, (20, 192, 96)], geometry) == [landscape, (17, 192, 96)]
    fixed = replace(geometry, sides=(480, 720))
    assert default_buckets([landscape, portrait], fixed) == [(49, 480, 720)]


@given(st.lists(st.integers(9, 300), min_size=1, max_size=30))
def test_no_clip_loses_most_of_its_frames_to_a_shorter_one(frames: list[int]) -> None:
    geometry = Geometry(temporal=4, spatial=8, patch=1, patch_t=1, fps=8)
    lengths = default_lengths(frames, geometry)
    assert lengths == sorted(set(lengths), reverse=True)
    for count in frames:
        used = max(length for length in lengths if length <= count)
        assert used >= legal_length(int(min(count, 49) * 2 / 3), geometry)
    assert default_lengths([40, 40, 40, 9], geometry) == [37, 9]
    assert default_lengths([49, 49, 41], geometry) == [49, 41]


@settings(max_examples=100, deadline=None)
@given(*[st.integers(1, 2000)] * 4)
def test_cover_size_covers(height, width, bucket_height, bucket_width) -> None:
    h, w = cover_size(height, width, bucket_height, bucket_width)
    assert h >= bucket_height
    assert w >= bucket_width
    assert h == bucket_height or w == bucket_width
