from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from refusals import refused

from finetrainers.config.geometry import Geometry
from finetrainers.config.root import TrainConfig
from finetrainers.config.sections import DataSection, ModelSection
from finetrainers.data.inspect.plan import DatasetPlan
from finetrainers.data.inspect.survey import survey_dataset
from finetrainers.data.reading.items import DataError
from finetrainers.models.registry import get_family

GEOMETRY = Geometry(temporal=8, spatial=16, patch=1, patch_t=1, fps=8)


def plan(root: Path, **options: object) -> DatasetPlan:
    model = ModelSection(model_name="ltx_video", pretrained_model_name_or_path="x")
    return survey_dataset(TrainConfig(model=model, data=DataSection(data_root=root, **options)), GEOMETRY).checked()


def numbers(message: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", message)]


@pytest.fixture
def root(tmp_path: Path, make_video, make_image) -> Path:
    make_video(tmp_path / "long.mp4", frames=40, fps=8)
    make_video(tmp_path / "fast.mp4", frames=36, fps=16)
    make_video(tmp_path / "slow.mp4", frames=17, fps=4, height=48, width=32)
    make_image(tmp_path / "still.png")
    for name in ("long", "fast", "slow", "still"):
        (tmp_path / f"{name}.txt").write_text(f"a {name} clip")
    return tmp_path


BUCKETS = {"video_resolution_buckets": ["17x32x48", "17x48x32", "9x16x16"], "image_resolution_buckets": ["16x32"]}


def test_every_item_gets_its_bucket_and_rate(root: Path) -> None:
    made = plan(root, **BUCKETS)
    assert {clip.path.name: (clip.bucket, clip.fps) for clip in made.clips} == {
        "long.mp4": ((17, 32, 48), 8),
        "fast.mp4": ((17, 32, 48), 8),  # 36 frames at 16 fps give 18 at 8
        "slow.mp4": ((17, 48, 32), 4),
        "still.png": ((1, 16, 32), 8),
    }
    [unused] = made.notes
    assert " 9x16x16: " in unused
    [shortened, warning] = made.warnings
    assert "long.mp4 (17 of 40 " in shortened
    assert warning.startswith("1 ")
    assert " 8 fps " in warning
    assert warning.endswith(": slow.mp4 (4 fps)")
    assert made.table()[0] == ("bucket", "clips", "batches", "held out", "fps")
    assert made.table()[1:] == [
        ("17x48x32", "1", "1", "0", "4"), ("17x32x48", "2", "2", "0", "8"), ("1x16x32", "1", "1", "0", "8"),
    ]  # fmt: skip


def test_a_checkpoint_that_animates_images_trains_none(root: Path, make_video, monkeypatch) -> None:
    """They would be their own answer, and so would videos of one latent frame."""
    make_video(root / "short.mp4", frames=5, fps=8)
    (root / "short.txt").write_text("a short clip")
    family = get_family("wan").read({"transformer": {"in_channels": 36, "out_channels": 16}})
    assert (family.images, family.geometry.shortest) == ("left out", 2)
    monkeypatch.setattr(sys.modules[__name__], "GEOMETRY", replace(GEOMETRY, shortest=family.geometry.shortest))
    videos = {"video_resolution_buckets": BUCKETS["video_resolution_buckets"]}
    for options in (videos, {}, {"resolutions": ["32x48"]}):
        with refused("invalid", "still.png", "short.mp4", error=DataError):
            plan(root, **options)
        made = plan(root, **options, max_bad_samples=2)
        reasons = {item.name: item.status for item in made.items if item.use == "rejected"}
        assert reasons == {"still.png": "no_bucket", "short.mp4": "too_short"}
        assert {clip.path.name for clip in made.clips} == {"long.mp4", "fast.mp4", "slow.mp4"}
        assert all(bucket[0] > 1 for bucket in made.buckets)
    with refused("invalid", "1x16x32", error=DataError):
        plan(root, **BUCKETS)


def used(made: DatasetPlan) -> dict[str, tuple[int, int]]:
    return {item.name: (item.used_frames, item.usable_frames) for item in made.items}


def test_the_used_frames_of_clips_are_counted_once(root: Path) -> None:
    frames = {"long.mp4": 40, "fast.mp4": 18, "slow.mp4": 17}
    for options, counts in (
        ({}, (17, 17, 17)),
        ({"frame_selection": "middle"}, (17, 17, 17)),
        ({"frame_selection": "chunk"}, (34, 17, 17)),
        ({"sliding_window_size": 9, "video_resolution_buckets": ["33x32x48"]}, (33, 18, 17)),
        ({"sliding_window_size": 9, "sliding_window_stride": 20, "video_resolution_buckets": ["99x32x48"]}, (18, 9, 9)),
    ):
        made = used(plan(root, **{**BUCKETS, **options}))
        assert made.pop("still.png") == (1, 1)
        assert made == {name: (count, frames[name]) for name, count in zip(frames, counts, strict=True)}, options
    uniform = used(plan(root, **BUCKETS, frame_selection="uniform"))  # spread over all frames of the file
    assert uniform["long.mp4"] == (40, 40)
    assert uniform["fast.mp4"] == (36, 36)


def test_clips_that_lose_over_a_third_are_named_worst_first_with_a_remedy(tmp_path: Path, make_video) -> None:
    for name, frames, height, width in (("tall", 9, 64, 16), ("wide", 9, 32, 48), ("whole", 12, 32, 32)):
        make_video(tmp_path / f"{name}.mp4", frames=frames, height=height, width=width)
        (tmp_path / f"{name}.txt").write_text(name)

    def warnings(text: str, **options: object) -> list[str]:
        return [warning for warning in plan(tmp_path, **options).remarks if text in warning]

    listed: dict[str, object] = {"video_resolution_buckets": ["9x32x32"]}
    [cropped] = warnings(" area ", **listed)
    assert "tall.mp4 (75%), wide.mp4 (33%)" not in cropped  # a third is not more than a third
    assert "tall.mp4 (75%)" in cropped
    assert "`video_resolution_buckets`" in cropped
    assert "image_resolution_buckets" not in cropped
    made = plan(tmp_path, **listed)
    assert {item.name: (item.crop, item.scale) for item in made.items} == {
        "tall.mp4": (0.75, 2), "wide.mp4": (pytest.approx(1 / 3, abs=1e-4), 1), "whole.mp4": (0, 1),
    }  # fmt: skip
    [cropped] = warnings(" area ", resolutions=[32], frame_buckets=[9], min_ar=0.9, max_ar=1.0)
    assert "`min_ar`" in cropped
    assert warnings(" area ") == []  # sizes are chosen
    make_video(tmp_path / "long.mp4", frames=40)
    (tmp_path / "long.txt").write_text("long")
    [shortened] = warnings(" frames", **listed)
    assert "long.mp4 (9 of 40 " in shortened
    assert "`frame_selection`" in shortened
    assert warnings(" frames", **listed, frame_selection="random") == []  # others in every epoch
    assert len(warnings(" frames", **listed, frame_selection="random", precompute_conditions=True)) == 1
    assert warnings(" frames", **listed, frame_selection="chunk") == []
    assert "`sliding_window_stride`" in warnings(" frames", **listed, sliding_window_size=9)[0]


def test_target_fps_and_uniform(root: Path) -> None:
    made = plan(root, **BUCKETS, target_fps=4)
    assert {c.path.name: c.bucket[0] for c in made.clips} == {
        "long.mp4": 17, "fast.mp4": 9, "slow.mp4": 17, "still.png": 1,
    }  # fmt: skip
    uniform = {c.path.name: c for c in plan(root, **BUCKETS, frame_selection="uniform").clips}
    assert uniform["fast.mp4"].fps == pytest.approx(16 * 16 / 35)
    # Spread over the clip, all 36 frames count, whatever the rate.
    long = plan(root, video_resolution_buckets=["33x32x48"], frame_selection="uniform", max_bad_samples=2)
    assert {c.path.name for c in long.clips} == {"long.mp4", "fast.mp4"}


def test_a_thin_picture_that_would_fill_the_memory_is_refused(tmp_path: Path, make_image) -> None:
    """A few bytes; resized until it covers its bucket, it would have gigabytes."""
    make_image(tmp_path / "thin.png", height=1, width=20000)
    make_image(tmp_path / "wide.png", height=20, width=2000)
    for name in ("thin", "wide"):
        (tmp_path / f"{name}.txt").write_text(name)
    made = plan(tmp_path, image_resolution_buckets=["512x768"], max_bad_samples=1)
    assert [clip.path.name for clip in made.clips] == ["wide.png"]
    [thin] = [v for v in made.items if v.use == "rejected"]
    assert (thin.status, thin.name) == ("too_large", "thin.png")
    assert all(size in thin.reason for size in (" 20000x1 ", " 768x512, ", " 10240000x512, "))
    assert len(plan(tmp_path, image_resolution_buckets=["512x768"], video_reshape_mode="none").clips) == 2


def test_too_short_clips_are_an_error_or_a_named_warning(root: Path) -> None:
    options = {"video_resolution_buckets": ["33x32x48"]}
    with pytest.raises(DataError) as caught:
        plan(root, **options)
    reasons = {name: reason for name, _, reason in (text.partition(": ") for text in caught.value.problems)}
    assert reasons.keys() == {"fast.mp4", "slow.mp4", "still.png"}
    # Frames, rate, frames at the target rate, those of the shortest bucket, and those of one that it would fill.
    assert numbers(reasons["fast.mp4"]) == [36, 16, 18, 8, 33, 17]
    assert "`target_fps`" in reasons["fast.mp4"]
    assert numbers(reasons["slow.mp4"]) == [17, 4, 33, 17]
    assert "`target_fps`" not in reasons["slow.mp4"]  # it has too few frames at every rate
    assert "`image_resolution_buckets`" in reasons["still.png"]
    made = plan(root, **options, max_bad_samples=3)
    assert [c.path.name for c in made.clips] == ["long.mp4"]
    assert made.warnings[0].startswith("3 ")
    assert f": fast.mp4: {reasons['fast.mp4']}" in made.warnings[0]
    assert [v.use for v in made.items].count("rejected") == 3


@pytest.mark.parametrize(
    ("frames", "options", "expected", "option"),
    [
        (20, {}, [20, 8, 33, 17], "video_resolution_buckets"),
        (9, {"target_fps": 4}, [9, 8, 5, 4, 33, 9], "video_resolution_buckets"),
        (20, {"sliding_window_size": 25}, [20, 8, 25, 17], "sliding_window_size"),
    ],
)
def test_what_is_too_short_says_which_length_would_do(
    tmp_path: Path, make_video, frames: int, options: dict[str, object], expected: list[int], option: str
) -> None:
    make_video(tmp_path / "a.mp4", frames=frames, fps=8)
    (tmp_path / "a.txt").write_text("a clip")
    with refused("invalid", "1 of 1 ", error=DataError) as caught:
        plan(tmp_path, video_resolution_buckets=["33x32x48"], **options)
    [problem] = caught.value.problems
    assert problem.startswith("a.mp4: ")
    assert numbers(problem.partition(": ")[2]) == expected
    assert re.findall(r"`(\w+)`", problem) == [option]
    # Without this file none is left: the message does not advise to leave it out.
    assert "max_bad_samples" not in str(caught.value)


def test_unreadable_files_carry_their_reason(root: Path) -> None:
    (root / "bad.mp4").write_text("text")
    (root / "bad.txt").write_text("a caption")
    with refused("invalid", "1 of 5 ", "`max_bad_samples` ", "--max_bad_samples 1\n", "- bad.mp4: ", error=DataError):
        plan(root, **BUCKETS)


def test_a_table_in_the_folder_is_read_or_named_where_captions_are_missing(tmp_path: Path, make_image) -> None:
    make_image(tmp_path / "still.png")
    with refused("invalid", "1 of 1 ", "--caption_missing ", "still.txt", error=DataError) as caught:
        plan(tmp_path, **BUCKETS)
    assert "--dataset_file" not in str(caught.value)
    (tmp_path / "empty.json").touch()
    (tmp_path / "captions.jsonl").write_text('{"file_name": "still.png", "caption": "a caption"}')
    assert [item.caption for item in plan(tmp_path, **BUCKETS).items] == ["a caption"]  # the only one is read
    (tmp_path / "metadata.csv").write_text("file_name,caption")
    with refused("invalid", "--caption_missing ", f"--dataset_file '{tmp_path / 'captions.jsonl'}'\n", error=DataError):
        plan(tmp_path, **BUCKETS)
    make_image(tmp_path / "other.png")
    rows = [{"video": "other.png", "text": "a caption"}, {"video": "still.png", "text": None}]
    (tmp_path / "list.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with refused("invalid", "--caption_missing ", error=DataError) as caught:
        plan(tmp_path, **BUCKETS, dataset_file=str(tmp_path / "list.jsonl"))
    assert "--dataset_file" not in str(caught.value)  # the options name one


def test_default_buckets_are_noted_and_reject_nothing(root: Path) -> None:
    made = plan(root)
    assert len(made.clips) == 4
    assert made.buckets == ((33, 32, 48), (17, 48, 32), (17, 32, 48), (1, 32, 48))  # slow.mp4 is a portrait
    assert all(f" {size}" in made.notes[0] for size in ("33x32x48", "17x48x32", "17x32x48"))
    assert " 3 " in made.notes[0]
    assert all(not GEOMETRY.problems(*bucket) for bucket in made.buckets)


def test_illegal_buckets_are_refused(root: Path) -> None:
    with refused("invalid", "16x32x48: 16 ", "8*k+1", error=DataError):
        plan(root, video_resolution_buckets=["16x32x48"])


def test_held_out_items_are_stable_and_leave_something(root: Path, make_video) -> None:
    made = plan(root, **BUCKETS, eval_num_items=2)
    names = {clip.path.name for clip in made.eval_clips}
    assert len(names) == 2
    assert names.isdisjoint(clip.path.name for clip in made.clips)
    assert {c.path.name for c in plan(root, **BUCKETS, eval_num_items=2).eval_clips} == names
    assert {c.path.name for c in plan(root, **BUCKETS, eval_num_items=1).eval_clips} < names
    with refused("too_large", "`eval_num_items` 4 ", " 4 usable", error=DataError):
        plan(root, **BUCKETS, eval_num_items=4)


def test_fingerprint_follows_the_data_not_the_place(root: Path, tmp_path_factory) -> None:
    before = plan(root, **BUCKETS).fingerprint
    moved = tmp_path_factory.mktemp("moved")
    for file in root.iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    assert plan(moved, **BUCKETS).fingerprint == before
    (moved / "long.txt").write_text("another caption")
    assert plan(moved, **BUCKETS).fingerprint != before
    assert plan(root, **BUCKETS, eval_num_items=1).fingerprint != before
    assert plan(root, **BUCKETS, video_reshape_mode="none").fingerprint == before


def test_manifest_has_a_line_for_every_item(root: Path, tmp_path: Path) -> None:
    (root / "caf\u00e9.mp4").write_bytes(b"")
    (root / "caf\u00e9.txt").write_text("empty")
    plan(root, **BUCKETS, max_bad_samples=1, eval_num_items=1).write(tmp_path / "run" / "manifest.jsonl")
    lines = (tmp_path / "run" / "manifest.jsonl").read_text(encoding="utf-8").splitlines()
    records = {record["name"]: record for record in map(json.loads, lines)}
    assert len(records) == 5
    assert records["caf\u00e9.mp4"]["status"] == "empty"
    assert records["caf\u00e9.mp4"]["reason"]
    assert records["long.mp4"]["bucket"] == "17x32x48"
    assert {record["use"] for record in records.values()} == {"train", "eval", "rejected"}


def test_planning_imports_no_torch() -> None:
    code = (
        "import sys, finetrainers.data.inspect.survey, finetrainers.data.loading.batch_sampler; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_names_in_messages_do_not_act_on_the_terminal(tmp_path: Path, make_video) -> None:
    evil = "a\x1b[31m\nb.mp4"
    make_video(tmp_path / evil, frames=17)
    (tmp_path / evil).with_suffix(".txt").write_text("")
    (tmp_path / "good.txt").write_text("a clip")
    make_video(tmp_path / "good.mp4", frames=17)
    warnings = "".join(plan(tmp_path, **BUCKETS, caption_missing="empty").warnings)
    assert r"a\x1b[31m\nb.mp4" in warnings
    assert warnings.isprintable()
    with pytest.raises(DataError) as caught:
        plan(tmp_path, **BUCKETS, caption_missing="error")
    assert r"a\x1b[31m\nb.mp4" in str(caught.value)
    assert "\x1b" not in str(caught.value)
