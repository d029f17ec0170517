"""Several datasets of one run, from a TOML file; those of diffusion-pipe too."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from refusals import refused

from finetrainers.config.checks.data import check_data
from finetrainers.config.checks.findings import Findings
from finetrainers.config.facts import Facts
from finetrainers.config.geometry import Geometry
from finetrainers.config.load import load_config
from finetrainers.config.root import TrainConfig
from finetrainers.config.sections import DataSection, ModelSection
from finetrainers.data.buckets.bucket_choice import choose_buckets
from finetrainers.data.buckets.windows import frame_limit, with_window_buckets
from finetrainers.data.inspect.plan import DatasetPlan
from finetrainers.data.inspect.survey import survey_dataset
from finetrainers.data.reading.datasets import Dataset, epoch_repeats, read_datasets
from finetrainers.data.reading.items import read_dataset
from finetrainers.data.reading.sources.rows import DataError
from finetrainers.utils.failures import Kind

GEOMETRY = Geometry(temporal=8, spatial=16, patch=1, patch_t=1, fps=8)

#: As it stands in the documentation of a fork of diffusion-pipe.
FRAMEPACK = """
# Dataset config
frame_buckets = [120]  # Videos with 151 frames
resolutions = [[572, 720], [640, 640]]

[[directory]]
path = '/path/to/videos'
num_repeats = 1
"""


@pytest.fixture
def place(tmp_path: Path, make_video, make_image) -> Path:
    for name in ("a", "b", "c"):
        make_video(tmp_path / "phone" / f"{name}.mp4", frames=20, fps=8)
        (tmp_path / "phone" / f"{name}.txt").write_text(f"clip {name}")
    make_image(tmp_path / "stills" / "s.png")
    (tmp_path / "stills" / "m.jsonl").write_text('{"image": "s.png", "caption": ["one", "two"], "by": "me"}\n')
    return tmp_path


BOTH = """
id_token = "T"
video_resolution_buckets = ["9x32x48"]

[[dataset]]
data_root = "phone"
num_repeats = 2
frame_selection = "middle"
target_fps = 4

[[dataset]]
name = "pictures"
dataset_file = "stills/m.jsonl"
video_column = "image"
caption_column = "caption"
id_token = "P"
video_resolution_buckets = []
image_resolution_buckets = ["16x32"]
"""


def write(place: Path, text: str) -> DataSection:
    (place / "sets.toml").write_text(text, encoding="utf-8")
    return DataSection(dataset=place / "sets.toml")


def plan(place: Path, text: str, **options: object) -> DatasetPlan:
    model = ModelSection(model_name="ltx_video", pretrained_model_name_or_path="x")
    data = write(place, text).model_copy(update=options)
    return survey_dataset(TrainConfig(model=model, data=data), GEOMETRY).checked()


def test_each_data_set_has_its_own_options(place: Path) -> None:
    made = plan(place, BOTH)
    assert [(c.index, c.path.name, c.caption, c.bucket, c.repeats, c.dataset) for c in made.clips] == [
        (0, "a.mp4", "T clip a", (9, 32, 48), 2, 0),
        (1, "b.mp4", "T clip b", (9, 32, 48), 2, 0),
        (2, "c.mp4", "T clip c", (9, 32, 48), 2, 0),
        (3, "s.png", "P one", (1, 16, 32), 1, 1),
    ]
    assert made.clips[0].frame_selection == "middle"
    assert made.clips[0].fps == 4
    assert made.clips[3].captions == ("P one", "P two")
    assert made.buckets == ((9, 32, 48), (1, 16, 32))


def test_the_run_keeps_what_the_data_sets_were(place: Path) -> None:
    made = plan(place, BOTH)
    made.write(place / "run" / "manifest.jsonl")
    assert (place / "run" / "dataset.toml").read_text() == BOTH
    records = [json.loads(line) for line in (place / "run" / "manifest.jsonl").read_text().splitlines()]
    assert [(r["name"], r["dataset"]) for r in records] == [
        ("phone/a.mp4", "phone"), ("phone/b.mp4", "phone"), ("phone/c.mp4", "phone"), ("pictures/s.png", "pictures"),
    ]  # fmt: skip
    assert records[3]["extra"] == {"by": "me"}
    assert records[3]["captions"] == ["P one", "P two"]
    assert "extra" not in records[0]
    # Comments change nothing; options, captions beyond the first, and shares do.
    assert plan(place, BOTH + "# more").fingerprint == made.fingerprint
    for old, new in (
        ("num_repeats = 2", "num_repeats = 3"),
        ('"middle"', '"head"'),
        ('"P"', '"Q"'),
        ("16x32", "16x16"),
    ):
        assert old in BOTH
        assert plan(place, BOTH.replace(old, new)).fingerprint != made.fingerprint, old
    (place / "stills" / "m.jsonl").write_text('{"image": "s.png", "caption": ["one", "three"]}\n')
    assert plan(place, BOTH).fingerprint != made.fingerprint


def test_held_out_items_have_one_caption_and_weights_share_the_rest(place: Path) -> None:
    weighted = BOTH.replace("num_repeats = 2", "weight = 3").replace(
        'name = "pictures"', 'name = "pictures"\nweight = 1'
    )
    made = plan(place, weighted)
    # 4 items: three quarters of an epoch's 4 samples are of 3 clips, a quarter of 1.
    assert [clip.repeats for clip in made.clips] == pytest.approx([1, 1, 1, 1])
    assert all(not clip.captions for clip in plan(place, BOTH, eval_num_items=3).eval_clips)
    lone = [Dataset("x", DataSection(), weight=1.0), Dataset("y", DataSection(), weight=3.0)]
    assert epoch_repeats(lone, [10, 10]) == pytest.approx([0.5, 1.5])
    assert epoch_repeats(lone, [30, 10]) == pytest.approx([1 / 3, 3])
    assert epoch_repeats(lone, [0, 10]) == pytest.approx([0, 1])


def test_messages_say_which_data_set(place: Path) -> None:
    (place / "phone" / "c.txt").unlink()
    (place / "stills" / "s.png").unlink()
    with pytest.raises(DataError) as caught:
        plan(place, BOTH)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["phone/c.mp4", "pictures/s.png"]
    (place / "phone" / "c.txt").write_text("c")
    with refused("invalid", "phone: ", "16x32x48: 16 ", "8*k+1", error=DataError):
        plan(place, '[[dataset]]\ndata_root = "phone"\nvideo_resolution_buckets = ["16x32x48"]')
    with refused("invalid", "phone/a.mp4: ", " 20 ", " 33; ", error=DataError):
        plan(place, '[[dataset]]\ndata_root = "phone"\nvideo_resolution_buckets = ["33x32x48"]')
    made = plan(place, '[[dataset]]\ndata_root = "phone"\n[[dataset]]\ndata_root = "phone"\nid_token = "T"')
    assert [note.partition(":")[0] for note in made.notes] == ["phone", "phone-2"]


WRONG = """
targt_fps = 8
max_bad_samples = 3

[[dataset]]
data_root = "phone"
frame_selection = "last"
num_repeats = 0
max_ar = 0

[[dataset]]
name = "second"
data_roots = "phone"
weight = 1
num_repeats = 1
resolutions = [512]
[dataset.more]
x = 1

[[dataset]]
video_resolution_buckets = ["49x512"]
"""


def test_everything_that_is_wrong_is_told_at_once(place: Path) -> None:
    with pytest.raises(DataError) as caught:
        read_datasets(write(place, WRONG))
    assert caught.value.args[0].startswith(f"{place}/sets.toml: {len(caught.value.problems)} ")
    for where, *values in (
        ("at the top: targt_fps: ", "'target_fps'"),
        ("at the top: max_bad_samples: ",),
        ("[[dataset]] 1: frame_selection: ", "'last'", " head, middle, random, uniform, chunk"),
        ("[[dataset]] 1: num_repeats: ", " 0, ", " 0"),
        ("[[dataset]] 1: max_ar: ", " 0, ", " 0"),
        ("[[dataset]] 2 (second): data_roots: ", "'data_root'"),
        ("[[dataset]] 2 (second): weight ", " num_repeats "),
        ("[[dataset]] 2 (second): more: ",),
        ("[[dataset]] 3: video_resolution_buckets: ", "'49x512'", " 49x512x768 ", " 1x512x768)"),
    ):
        [problem] = [text for text in caught.value.problems if text.startswith(where)]
        assert all(value in problem for value in values), problem
    assert len(caught.value.problems) == 9


@pytest.mark.parametrize(
    ("text", "kind", "places"),
    [
        ("", "required", ["[[dataset]]"]),
        ("[dataset]\nx = 1", "required", ["[[dataset]]"]),
        ("[[dataset]", "unreadable", ["TOML"]),
        ('[[dataset]]\ndata_root = "a"\n[[directory]]\npath = "b"', "conflict", ["[[directory]]"]),
        ('[[dataset]]\nname="x"\ndata_root = "a"\n[[dataset]]\nname="x"\ndata_root = "b"', "duplicate", ["'x'", " 2 "]),
        ('[[dataset]]\nweight=1\ndata_root = "a"\n[[dataset]]\ndata_root = "b"', "required", [" 1 of 2 "]),
        (
            '[[dataset]]\ndata_root="x"\nweight=1\nnum_repeats=1',
            "conflict",
            ["[[dataset]] 1: weight ", " num_repeats "],
        ),
        ('max_bad_samples = 3\n[[dataset]]\ndata_root="x"', "unsupported", ["at the top: max_bad_samples: "]),
        ('[[dataset]]\ndata_root="x"\n[dataset.more]\nx = 1', "unknown", ["[[dataset]] 1: more: "]),
        (
            '[[dataset]]\ndata_root="x"\nframe_selection="last"',
            "unknown",
            ["[[dataset]] 1: frame_selection: ", "'last'"],
        ),
        ('[[dataset]]\ndata_root="x"\nnum_repeats=0', "invalid", ["[[dataset]] 1: num_repeats: ", " 0"]),
        ('cache_shuffle_num = 5\n[[directory]]\npath="x"', "unsupported", ["at the top: cache_shuffle_num: "]),
        ('[[directory]]\npath="x"\nresolutions = "512"', "invalid", ["[[directory]] 1: resolutions: ", "'512'"]),
        ('[[directory]]\npath="x"\nsize_buckets = [5]', "invalid", ["[[directory]] 1: size_buckets: ", "[5]"]),
        ('[[directory]]\npath="x"\nnum_repeat = 5', "unknown", ["[[directory]] 1: num_repeat: ", "'num_repeats'"]),
    ],
)
def test_files_that_are_refused(place: Path, text: str, kind: Kind, places: list[str]) -> None:
    with refused(kind, place / "sets.toml", *places, error=DataError):
        read_datasets(write(place, text))


@pytest.mark.parametrize(
    ("text", "option", "other"),
    [
        ("[[dataset]]", "data_root", "--hf_dataset"),
        ('[[dataset]]\nhf_dataset="x"\ndataset_file = "a.csv"', "hf_dataset", "--dataset_file"),
        (
            '[[dataset]]\ndata_root="x"\nresolutions=[9]\nvideo_resolution_buckets=["9x8x8"]', "resolutions",
            "--video_resolution_buckets",
        ),
    ],
)  # fmt: skip
def test_options_of_a_dataset_have_the_rules_of_the_run(place: Path, text: str, option: str, other: str) -> None:
    with pytest.raises(DataError) as caught:
        read_datasets(write(place, text))
    [problem] = caught.value.problems
    assert problem.startswith(f"[[dataset]] 1: {option}: ")
    assert other in problem


def test_a_file_of_datasets_is_a_file_that_exists(place: Path) -> None:
    for name, kind in (("none.toml", "not_found"), ("phone", "invalid")):
        with refused(kind, f"dataset '{place / name}' ", error=DataError):  # type: ignore[arg-type]
            read_datasets(DataSection(dataset=place / name))


def test_columns_at_the_top_are_those_of_tables(place: Path) -> None:
    """A folder of clips with captions beside them has none; but those of its own table have to be there."""
    text = (
        'video_column = "image"\ncaption_column = "caption"\n[[dataset]]\ndata_root = "phone"\n'
        '[[dataset]]\ndataset_file = "stills/m.jsonl"\n'
    )
    first, second = read_datasets(write(place, text))
    assert (first.data.video_column, first.data.caption_column) == ("video", "text")
    assert [item.caption for item in read_dataset(first.data).items] == ["clip a", "clip b", "clip c"]
    assert [item.captions for item in read_dataset(second.data).items] == [("one", "two")]
    own = text.replace('data_root = "phone"', 'data_root = "phone"\ncaption_column = "prompts.txt"')
    with refused("not_found", "'image'", "'prompts.txt'", error=DataError):
        read_dataset(read_datasets(write(place, own))[0].data)


def test_home_is_expanded_in_paths_of_a_file(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(place))
    (place / "elsewhere").mkdir()
    (place / "elsewhere" / "d.toml").write_text('[[dataset]]\ndata_root = "~/phone"\n')
    [only] = read_datasets(DataSection(dataset=Path("~/elsewhere/d.toml")))
    assert only.data.data_root == place / "phone"
    (place / "phone" / "t.csv").write_text(f"video,text\n~/phone/a.mp4,x\n~/stills/s.png,y\n{place}/phone/b.mp4,z\n")
    found = read_dataset(DataSection(dataset_file=place / "phone" / "t.csv")).items
    assert [item.unusable and item.unusable.status for item in found] == [None, "outside_root", None]


def test_options_of_the_run_are_defaults_and_paths_are_relative_to_the_file(place: Path) -> None:
    text = (
        'caption_missing = "skip"\n[[dataset]]\ndata_root = "phone"\n[[dataset]]\ndata_root = "/abs"\nid_token = "B"\n'
    )
    data = write(place, text).model_copy(update={"id_token": "A", "target_fps": 5.0})
    first, second = read_datasets(data)
    assert (first.name, first.data.data_root, first.data.id_token) == ("phone", place / "phone", "A")
    assert (second.name, second.data.data_root, second.data.id_token) == ("abs", Path("/abs"), "B")
    assert first.data.target_fps == second.data.target_fps == 5
    assert first.data.caption_missing == second.data.caption_missing == "skip"
    assert read_datasets(DataSection(data_root=place)) == [Dataset("", DataSection(data_root=place))]


def test_the_framepack_file_as_it_stands(place: Path) -> None:
    [found] = read_datasets(write(place, FRAMEPACK))
    assert (found.name, found.data.data_root, found.repeats) == ("videos", Path("/path/to/videos"), 1)
    geometry = Geometry(temporal=4, spatial=8, patch=2, patch_t=1, fps=24)
    choice = choose_buckets(found.data, geometry, {"video": [(200, 720, 572)], "image": []})
    # Width first there, height first here; 120 frames are not 4*k+1, and 572 is no multiple of 16.
    assert choice.by_kind["video"] == (((117, 720, 560), (117, 640, 640)),)
    assert choice.by_kind["image"] == (((1, 720, 560), (1, 640, 640)),)
    assert any("120" in note and "117" in note for note in choice.notes)
    assert any("720x572" in note and "720x560" in note for note in choice.notes)
    # Windows are cut from 120 frames as they stand.
    windows = with_window_buckets(found.data.model_copy(update={"sliding_window_size": 33}))
    assert choose_buckets(windows, geometry, {"video": [(200, 720, 572)], "image": []}).by_kind["video"] == (
        ((33, 720, 560), (33, 640, 640)),
    )
    assert frame_limit(found.data, (33, 720, 560)) == 120
    areas, ratios = found.warnings
    assert areas.startswith("at the top: resolutions: ")
    assert " 2 " in areas
    assert ": enable_ar_bucket: " in ratios


def test_an_option_that_needs_another_one_is_named_where_it_stands(place: Path) -> None:
    """Each dataset may have the one that is needed, so the run's own option is not judged."""
    text = """
        [[dataset]]
        data_root = "phone"
        hf_split = "test"
        [[dataset]]
        data_root = "stills"
        resolutions = [32]
        num_ar_buckets = 0
        max_ar = 3.0
        sliding_window_stride = 2
    """
    warnings = [warning for found in read_datasets(write(place, text)) for warning in found.warnings]
    assert [(warning.partition(": ")[0], *re.findall(r"--\w+", warning)) for warning in warnings] == [
        ("[[dataset]] 1", "--hf_split", "--hf_dataset"),
        ("[[dataset]] 2", "--max_ar", "--num_ar_buckets"),
        ("[[dataset]] 2", "--sliding_window_stride", "--sliding_window_size"),
    ]
    config = load_config(pretrained_model_name_or_path="x", dataset=place / "datasets.toml", min_ar=0.6)
    (found := Findings()).add(check_data(config, Facts(GEOMETRY)))
    assert (found.errors, found.warnings) == ([], [])


def test_a_directory_of_diffusion_pipe_is_planned(place: Path) -> None:
    text = """
        resolutions = [32]
        enable_ar_bucket = true
        min_ar = 0.5
        max_ar = 2.0
        num_ar_buckets = 3
        frame_buckets = [1, 9, 17]
        skip_empty_caption = true
        cache_shuffle_num = 0
        [[directory]]
        path = 'phone'
        num_repeats = 5
        caption_prefix = 'T, '
    """
    made = plan(place, text)
    # Clips are 3:2. Of 1:1, 1:2 and 2:1 (32 * sqrt(2) = 45 and 23 pixels, which become 48 and 16) the first is nearest.
    assert {clip.bucket for clip in made.clips} == {(17, 32, 32)}
    assert made.clips[0].caption == "T, clip a"
    assert [clip.repeats for clip in made.clips] == [5] * 3
    explicit = plan(place, "size_buckets = [[48, 32, 17]]\n[[directory]]\npath = 'phone'")
    assert {clip.bucket for clip in explicit.clips} == {(17, 32, 48)}
    ratios = plan(
        place, "resolutions=[32]\nframe_buckets=[17]\nar_buckets=[[4, 1], [1, 4]]\n[[directory]]\npath='phone'"
    )
    assert {clip.bucket for clip in ratios.clips} == {(17, 16, 64)}
