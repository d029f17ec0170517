"""Buckets made from areas and aspect ratios, where clips fall through to, and what a plan says of them."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from refusals import refused

from finetrainers.config.geometry import Geometry
from finetrainers.config.load import load_config
from finetrainers.config.sections import DataSection
from finetrainers.data.buckets.bucket_choice import choose_buckets, named_buckets
from finetrainers.data.buckets.buckets import (
    area_sizes,
    bucket_probabilities,
    choose_bucket,
    filled_resolution,
    legal_lengths,
    lower_buckets,
    nearest_bucket,
)
from finetrainers.data.buckets.clip import all_cuts
from finetrainers.data.inspect.survey import survey_dataset
from finetrainers.data.reading.items import DataError

GEOMETRY = Geometry(temporal=8, spatial=16, patch=1, patch_t=1, fps=8)
geometries = st.sampled_from(
    [Geometry(8, 32, 1, 1, 25.0), Geometry(4, 8, 2, 1, 24.0), Geometry(4, 8, 2, 2, 16.0, pixels=16), GEOMETRY]
)


@settings(max_examples=200, deadline=None)
@given(
    geometry=geometries, height=st.integers(128, 1100), width=st.integers(128, 1100), count=st.integers(0, 12),
    low=st.floats(0.3, 1.0), high=st.floats(1.0, 3.0),
)  # fmt: skip
def test_sizes_of_an_area_are_legal_distinct_and_of_that_area(geometry, height, width, count, low, high) -> None:
    sizes, notes = area_sizes((height, width), geometry, count=count, min_ar=low, max_ar=high)
    assert all(not geometry.problems(1, *size) for size in sizes)
    assert len(set(sizes)) == len(sizes)
    half = geometry.size_multiple / 2
    if count == 0:
        assert len(sizes) == 1
        assert 0 <= height - sizes[0][0] < 2 * half
        assert 0 <= width - sizes[0][1] < 2 * half
        assert bool(notes) == (sizes[0] != (height, width))
        return
    assert 1 <= len(sizes) <= count
    for h, w in sizes:
        # Neither side is more than half a multiple off, so the area is off by no more than both.
        assert (h - half) * (w - half) <= height * width <= (h + half) * (w + half)
        assert (w - half) / (h + half) <= high * (1 + 1e-9)
        assert (w + half) / (h - half) >= low * (1 - 1e-9)
    assert [w / h for h, w in sizes] == sorted(w / h for h, w in sizes)


def test_aspect_ratios_are_evenly_spaced_as_factors() -> None:
    fine = Geometry(1, 1, 1, 1, 24.0)
    sizes, notes = area_sizes((4000, 4000), fine, count=5, min_ar=0.25, max_ar=4.0)
    assert [w / h for h, w in sizes] == pytest.approx([0.25, 0.5, 1.0, 2.0, 4.0], rel=1e-3)
    assert notes == []
    assert area_sizes((400, 900), fine, count=1, min_ar=0.5, max_ar=2.0)[0] == [(600, 600)]
    sizes, [note] = area_sizes((572, 720), GEOMETRY, count=0, min_ar=0.5, max_ar=2.0)
    assert sizes == [(560, 720)]
    assert sizes_in(note) == ["572x720", "16", "560x720"]
    with refused("invalid", "8x720: ", " 16 ", " 16x16"):
        area_sizes((8, 720), GEOMETRY, count=0, min_ar=0.5, max_ar=2.0)


def test_lengths_are_rounded_down_and_said() -> None:
    lengths, notes = legal_lengths([33, 120, 1, 119], GEOMETRY)
    assert lengths == [113, 33, 1]
    assert [sizes_in(note) for note in notes] == [["120", "8", "1", "113"], ["119", "8", "1", "113"]]
    with refused("invalid", "5 ", "8*k+1", " 9, "):
        legal_lengths([49, 5], GEOMETRY)


clip_sizes = st.tuples(st.integers(1, 200), st.integers(64, 2000), st.integers(64, 2000))
bucket_lists = st.lists(
    st.tuples(
        st.sampled_from([1, 9, 17, 49]),
        st.integers(2, 40).map(lambda k: 32 * k),
        st.integers(2, 40).map(lambda k: 32 * k),
    ),
    min_size=1, max_size=12, unique=True,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(clip=clip_sizes, buckets=bucket_lists, shorter=st.booleans())
def test_a_clip_gets_the_longest_it_fills_then_the_nearest_shape_then_falls_to_less(clip, buckets, shorter) -> None:
    chosen = choose_bucket(*clip, buckets)
    fitting = [bucket for bucket in buckets if bucket[0] <= clip[0]]
    assert (chosen is None) == (not fitting)
    if chosen is None:
        return
    assert chosen[0] == max(bucket[0] for bucket in fitting)

    def distance(bucket) -> float:
        return abs(math.log(bucket[2] / bucket[1]) - math.log(clip[2] / clip[1]))

    assert distance(chosen) <= min(distance(b) for b in fitting if b[0] == chosen[0]) + 1e-8
    lower = lower_buckets(chosen, clip[1], clip[2], buckets, shorter=shorter)
    assert set(lower) <= set(buckets)
    way = [chosen, *lower]
    assert len(set(way)) == len(way)
    for above, below in zip(way, lower, strict=False):
        if above[0] == below[0]:
            assert below[1] * below[2] <= 0.8 * above[1] * above[2]
        else:
            assert shorter
            assert 1 < below[0] < above[0]


def test_where_clips_fall_to() -> None:
    buckets = [
        (49, 512, 768),
        (49, 768, 512),
        (49, 256, 384),
        (49, 384, 256),
        (49, 320, 320),
        (17, 512, 768),
        (1, 512, 768),
    ]
    assert lower_buckets((49, 512, 768), 720, 1280, buckets) == [(49, 256, 384)]
    assert lower_buckets((49, 768, 512), 1280, 720, buckets) == [(49, 384, 256)]
    assert lower_buckets((49, 512, 768), 720, 1280, buckets, shorter=True) == [(49, 256, 384), (17, 512, 768)]
    keep = {(49, 512, 768): 0.5, (49, 256, 384): 0.4}
    assert bucket_probabilities([(49, 512, 768), (49, 256, 384), (17, 512, 768)], keep) == pytest.approx(
        [0.5, 0.2, 0.3]
    )


def test_a_clip_takes_the_largest_resolution_that_it_fills() -> None:
    groups = [[(1, 512, 512), (1, 384, 704)], [(1, 256, 256)]]
    assert filled_resolution(480, 480, groups) is groups[0]  # nearly
    assert filled_resolution(300, 400, groups) is groups[1]
    assert filled_resolution(20, 20, groups) is groups[1]


def sizes_in(message: str) -> list[str]:
    """Return the numbers and sizes of a message."""
    return re.findall(r"\d[\dx]*", message)


def choose(videos=((60, 720, 1280),), images=(), **options):
    return choose_buckets(DataSection(**options), GEOMETRY, {"video": videos, "image": images})


def test_buckets_by_area() -> None:
    choice = choose(resolutions=["64", "128"], frame_buckets=[1, 17, 50], num_ar_buckets=3)
    assert choice.by_kind["video"] == (
        tuple((frames, *size) for frames in (49, 17) for size in [(176, 96), (128, 128), (96, 176)]),
        tuple((frames, *size) for frames in (49, 17) for size in [(96, 48), (64, 64), (48, 96)]),
    )
    # Images come in every area, 1 asked for or not.
    assert choice.by_kind["image"][1] == ((1, 96, 48), (1, 64, 64), (1, 48, 96))
    rounded, listing = choice.notes
    assert sizes_in(rounded) == ["50", "8", "1", "49"]
    assert listing.endswith("--resolutions: 176x96, 128x128, 96x176; 96x48, 64x64, 48x96")
    # As they are, in one list: the nearest shape decides.
    shapes = choose(resolutions=[[100, 64], [64, 64]], frame_buckets=[17], num_ar_buckets=0)
    assert shapes.by_kind["video"] == (((17, 96, 64), (17, 64, 64)),)
    assert sizes_in(shapes.notes[0]) == ["100x64", "16", "96x64"]
    # Lengths from the clips; sizes from the clips.
    assert {bucket[0] for bucket in choose(resolutions=[64]).by_kind["video"][0]} == {49}
    assert choose(videos=[(30, 720, 1280), (90, 720, 1280)], frame_buckets=[17]).by_kind["video"] == (
        ((17, 464, 832),),
    )
    own = choose(resolutions=[64], frame_buckets=[17], image_resolution_buckets=["128x128"])
    assert own.by_kind["image"] == (((1, 128, 128),),)
    with refused("invalid", "- 5 ", "8*k+1", error=DataError):
        choose(resolutions=[64], frame_buckets=[5])
    with refused("invalid", "- 9x9: ", " 16 ", error=DataError):
        choose(resolutions=[9], frame_buckets=[17])


def test_a_short_video_is_no_image() -> None:
    """Wherever the bucket for images is written."""
    mixed = choose(video_resolution_buckets=["49x128x128", "1x64x64"], image_resolution_buckets=["32x32"])
    assert mixed.by_kind["video"] == (((49, 128, 128),),)
    assert mixed.by_kind["image"] == (((1, 64, 64), (1, 32, 32)),)
    pictures = choose(video_resolution_buckets=["1x64x64"])
    assert pictures.by_kind["video"] == pictures.by_kind["image"] == (((1, 64, 64),),)
    with pytest.raises(ValidationError, match="max_ar"):
        DataSection(resolutions=[64], max_ar=math.inf)


def test_single_buckets_are_named_as_they_are() -> None:
    buckets = [(49, 512, 768), (17, 512, 768), (1, 512, 512)]
    assert nearest_bucket((49, 500, 768), buckets) == (49, 512, 768)
    assert named_buckets("bucket_keep_prob", [((17, 512, 768), 0.5)], buckets) == {(17, 512, 768): 0.5}
    with refused("unknown", "`bucket_batch_sizes`", "1x512x768 ", " 1x512x512", error=DataError):
        named_buckets("bucket_batch_sizes", [((1, 512, 768), 2)], buckets)


@pytest.fixture
def root(tmp_path: Path, make_video, make_image) -> Path:
    for k in range(3):
        make_video(tmp_path / f"{k}.mp4", frames=40, fps=8, height=64, width=96, seed=k)
        (tmp_path / f"{k}.txt").write_text("a clip")
    make_image(tmp_path / "still.png", height=64, width=96)
    (tmp_path / "still.txt").write_text("a picture")
    return tmp_path


def plan(root: Path, **options):
    config = load_config(model_name="ltx_video", pretrained_model_name_or_path="x", data_root=root, **options)
    return config, survey_dataset(config, GEOMETRY).checked()


def test_a_plan_with_sizes_chances_and_ends(root: Path) -> None:
    options = {"video_resolution_buckets": ["33x64x96", "33x32x48", "9x32x48"], "image_resolution_buckets": ["64x96"]}
    keep = {"bucket_keep_prob": ["33x64x96=0.5", "33x32x48=0.5"], "bucket_fall_shorter": True}
    config, made = plan(root, **options, **keep, bucket_batch_sizes=["9x32x48=8", "33x64x96=2"], eval_num_items=1)
    videos = [clip for clip in made.clips if clip.kind == "video"]
    assert {clip.buckets for clip in videos} == {((33, 64, 96), (33, 32, 48), (9, 32, 48))}
    assert len(all_cuts(made.clips)) == 3 * len(videos) + len(made.clips) - len(videos)
    assert all(clip.lower == () for clip in made.eval_clips)
    assert made.heaviest(config) == ((33, 64, 96), 2)
    config, small = plan(root, **options, bucket_batch_sizes=["1x64x96=99"])
    assert small.heaviest(config) == ((1, 64, 96), 99)
    assert [row[:3] for row in made.table()[1:2]] == [("33x64x96", str(len(videos)), f"~{len(videos) / 4:.3g}")]
    assert made.fingerprint != plan(root, **options, eval_num_items=1)[1].fingerprint
    assert plan(root, **options, epoch_end="wrap")[1].fingerprint == plan(root, **options)[1].fingerprint
    out = plan(root, **options, bucket_keep_prob=["33x64x96=0.5", "33x32x48=0.2"])[1].notes
    unused, left_out = out
    assert all(value in left_out for value in ("--bucket_keep_prob ", " 1.2 of 4 ", "(left_out)"))
    assert " 9x32x48: " in unused
    dropped = plan(root, **options, epoch_end="drop", batch_size=2)[1]
    clips, buckets = dropped.warnings[-2:]
    assert clips.startswith("--epoch_end drop ")
    assert " 2 of 4 " in clips
    assert buckets.startswith("--epoch_end drop ")
    assert ": 1x64x96 (1 " in buckets
    assert dropped.table()[1][2] == "1"
    waiting = plan(root, **options, epoch_end="wrap", batch_size=3)[1].notes[-1]
    assert waiting.startswith("--epoch_end wrap: ")
    assert " 4 " in waiting
    with refused("conflict", "--batch_size", "--epoch_end", error=DataError):
        plan(root, **options, epoch_end="drop", batch_size=9)
    with refused("unknown", "`bucket_batch_sizes`", "33x64x64 ", " 33x64x96", error=DataError):
        plan(root, **options, bucket_batch_sizes=["33x64x64=2"])


def test_a_plan_by_area(root: Path) -> None:
    made = plan(root, resolutions=["64", "32"], frame_buckets=["33", "1"], num_ar_buckets="3")[1]
    assert {clip.bucket for clip in made.clips} == {(33, 48, 96), (1, 48, 96)}
    assert "--resolutions: " in made.notes[-1]
