from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refused

from finetrainers.config.load import load_config
from finetrainers.config.sections import DataSection
from finetrainers.data.inspect.probe_all import ProbeOptions
from finetrainers.data.reading.items import DataError, clean_caption, read_dataset
from finetrainers.plan.check import examine
from finetrainers.utils.failures import Kind
from finetrainers.utils.video import write_mp4


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("a.mp4", "b.mov", "c.PNG"):
        (tmp_path / name).write_bytes(b"x")
    return tmp_path


def listed(data: DataSection) -> list[tuple[str, str, str]]:
    items = read_dataset(data).items
    assert [item.index for item in items] == list(range(len(items)))
    return [(item.path.name, item.caption, item.kind) for item in items]


ALL = [("a.mp4", "first", "video"), ("b.mov", "", "video"), ("c.PNG", "third, with comma", "image")]


def two_files(root: Path, media: str, captions: str) -> DataSection:
    (root / "videos.txt").write_bytes(media.encode())
    (root / "prompts.txt").write_bytes(captions.encode())
    return DataSection(data_root=root, video_column="videos.txt", caption_column="prompts.txt")


def test_two_files_pair_by_line_even_with_a_blank_caption(root: Path) -> None:
    assert listed(two_files(root, "a.mp4\nb.mov\nc.PNG\n", "first\n\nthird, with comma\n")) == ALL


def test_two_files_take_bom_crlf_and_trailing_blank_lines(root: Path) -> None:
    data = two_files(root, "\ufeffa.mp4\r\nb.mov\r\nc.PNG\r\n\r\n", "\ufefffirst\r\n\r\nthird, with comma\r\n\r\n\r\n")
    assert listed(data) == ALL


def test_a_caption_with_a_unicode_line_separator_stays_one_line(root: Path) -> None:
    assert listed(two_files(root, "a.mp4\nb.mov", "one\u2028two\nthree"))[0][1] == "one\u2028two"


def test_count_mismatch_names_both_counts(root: Path) -> None:
    with refused("mismatch", root / "videos.txt", " 3 ", root / "prompts.txt", " 2 ", error=DataError):
        read_dataset(two_files(root, "a.mp4\nb.mov\nc.PNG", "one\ntwo\n"))


def test_a_null_character_in_a_directory_is_that_of_its_item(root: Path) -> None:
    items = read_dataset(two_files(root, "a.mp4\nb\0c/b.mov", "one\ntwo")).items
    assert [item.unusable and item.unusable.status for item in items] == [None, "missing"]


def test_a_blank_media_line_with_a_caption_is_named(root: Path) -> None:
    with refused("required", "videos.txt line 2 ", "prompts.txt", error=DataError):
        read_dataset(two_files(root, "a.mp4\n\nc.PNG", "one\ntwo\nthree"))
    assert len(read_dataset(two_files(root, "a.mp4\n\nc.PNG", "one\n\nthree")).items) == 2


def test_one_of_two_files_missing_suggests_the_nearest(root: Path) -> None:
    (root / "videos.txt").write_text("a.mp4")
    (root / "prompt.txt").write_text("one")
    with refused("not_found", "'videos.txt'", "'prompts.txt'", "'prompt.txt'", error=DataError):
        read_dataset(DataSection(data_root=root, video_column="videos.txt", caption_column="prompts.txt"))


def test_lists_that_no_option_names_are_shown_with_their_options(root: Path) -> None:
    (root / "files.txt").write_text("a.mp4\n./b.mov\nc.PNG\n\n")
    (root / "lines.txt").write_text("first\nsecond\nthird\n")
    (root / "notes.txt").write_text("one line")
    data = DataSection(data_root=root, video_column="files.txt", caption_column="lines.txt")
    bare = DataSection(data_root=root)
    for item in read_dataset(bare).items:
        assert item.unusable is not None
        assert item.unusable.status == "caption_missing"
        assert "--video_column files.txt --caption_column lines.txt " in item.unusable.reason
    assert [caption for _, caption, _ in listed(data)] == ["first", "second", "third"]
    (root / "lines.txt").write_text("first\nsecond")
    assert not any("--video_column" in str(item.unusable) for item in read_dataset(bare).items)


def test_columns_that_are_given_are_there(root: Path) -> None:
    """Both misspelt, the captions beside the clips would be trained on, and nobody would know."""
    for name in ("a", "b", "c"):
        (root / f"{name}.txt").write_text("beside the clip")
    (root / "videos.txt").write_text("a.mp4")
    (root / "prompts.txt").write_text("listed")
    for given, suggestions in (
        ({"video_column": "video.txt", "caption_column": "prompt.txt"}, ("'videos.txt'", "'prompts.txt'")),
        ({"caption_column": "promptz.txt"}, ("'prompts.txt'",)),
    ):
        names, options = map(repr, given.values()), " and ".join(f"--{name}" for name in given)
        with refused("not_found", *names, *suggestions, f" {options} ", error=DataError):
            read_dataset(DataSection(data_root=root, **given))
    assert [caption for _, caption, _ in listed(DataSection(data_root=root))] == ["beside the clip"] * 3


def test_media_beside_a_list_that_are_not_listed_are_named(root: Path) -> None:
    for name in ("sub/d.mp4", "sub/e.mp4", "other/f.mp4", "caf\u00e9.mp4", ".hidden.mp4", "notes.md"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"x")
    found = read_dataset(two_files(root, f"./a.mp4\n{root}/sub/e.mp4\ncafe\u0301.mp4", "one\ntwo\nthree"))
    # Folders that hold nothing listed are not walked through: they may be large, and are nobody's business.
    [warning] = found.warnings
    assert warning.startswith("3 ")
    assert " videos.txt, " in warning
    assert warning.endswith(": b.mov, c.PNG, sub/d.mp4")


def records() -> list[dict[str, str]]:
    return [{"video": name, "text": caption} for name, caption, _ in ALL]


@pytest.mark.parametrize("with_root", [True, False])
def test_json(root: Path, with_root: bool) -> None:
    file = (root.parent if with_root else root) / f"{root.name}.json"
    file.write_text(json.dumps(records()), encoding="utf-8-sig")
    assert listed(DataSection(dataset_file=file, data_root=root if with_root else None)) == ALL


def test_jsonl_skips_blank_lines(root: Path) -> None:
    file = root / "meta.jsonl"
    file.write_text("\n".join(json.dumps(record) + "\n" for record in records()))
    assert listed(DataSection(dataset_file=file)) == ALL


def test_csv_quotes_commas(root: Path) -> None:
    file = root / "meta.csv"
    file.write_bytes(b'video,text\r\na.mp4,first\r\nb.mov,\r\nc.PNG,"third, with comma"\r\n')
    assert listed(DataSection(dataset_file=file)) == ALL


def test_csv_with_an_unquoted_comma_or_a_short_row_is_named(root: Path) -> None:
    file = root / "meta.csv"
    file.write_text("video,text\na.mp4,first, second\nb.mov\n")
    with pytest.raises(DataError) as caught:
        read_dataset(DataSection(dataset_file=file))
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["meta.csv line 2", "meta.csv line 3"]


def test_missing_columns_name_those_that_exist(root: Path) -> None:
    file = root / "meta.csv"
    file.write_text("videos,description\na.mp4,x\nb.mov,y\n")
    with refused(
        "not_found", "'video' and 'text'", " videos, description; ", "--video_column videos ", error=DataError
    ):
        read_dataset(DataSection(dataset_file=file))


@pytest.mark.parametrize(
    ("name", "content", "kind", "places"),
    [
        ("m.json", '{"video": "a.mp4"}', "invalid", ["m.json ", " dict"]),
        ("m.json", "[", "unreadable", ["m.json "]),
        ("m.json", '["a.mp4"]', "invalid", ["m.json entry 0: ", "'a.mp4'"]),
        ("m.json", '[{"video": 3, "text": "x"}]', "invalid", ["m.json entry 0: ", "'video'", " 3"]),
        ("m.jsonl", '{"video": "a.mp4", "text": "x"}\n{"video"', "unreadable", ["m.jsonl line 2 "]),
        ("m.txt", "", "unsupported", ["m.txt'", " .csv, .json, .jsonl, .parquet "]),
        ("m.csv", "video,text\n", "not_found", ["m.csv: "]),
    ],
)
def test_bad_metadata(root: Path, name: str, content: str, kind: Kind, places: list[str]) -> None:
    (root / name).write_text(content)
    with refused(kind, *places, error=DataError):
        read_dataset(DataSection(dataset_file=root / name))


def test_a_file_of_metadata_is_a_file_that_exists(root: Path) -> None:
    (root / "folder.csv").mkdir()
    for name, kind in (("none.csv", "not_found"), ("folder.csv", "invalid")):
        with refused(kind, f"dataset_file '{root / name}' ", error=DataError):  # type: ignore[arg-type]
            read_dataset(DataSection(dataset_file=root / name))


def test_all_problems_are_collected_and_twenty_shown(root: Path) -> None:
    (root / "m.json").write_text(json.dumps([f"entry{k}.mp4" for k in range(25)]))
    with pytest.raises(DataError) as caught:
        read_dataset(DataSection(dataset_file=root / "m.json"))
    assert len(caught.value.problems) == 25
    assert "entry19.mp4" in str(caught.value)
    assert "entry20.mp4" not in str(caught.value)
    assert " 5 more (25 " in str(caught.value)


def test_latin1_text_names_the_byte(root: Path) -> None:
    data = two_files(root, "a.mp4", "x")
    (root / "prompts.txt").write_bytes(b"caf\xe9")
    with refused("unreadable", root / "prompts.txt", " 3 ", "0xe9", error=DataError):
        read_dataset(data)


def test_folder_with_sidecars(tmp_path: Path) -> None:
    odd = '\u65e5\u672c \u8a9e\'; $(rm) "q".mp4'
    for name in ("z.mp4", f"sub/{odd}", "sub/b.jpg", ".hidden/x.mp4"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "z.txt").write_text("a cat\nruns \n")
    (tmp_path / "sub" / odd).with_suffix(".txt").write_text("odd name")
    [lacking] = [item for item in read_dataset(DataSection(data_root=tmp_path)).items if item.unusable]
    assert (lacking.path.name, lacking.unusable.status) == ("b.jpg", "caption_missing")
    assert "sub/b.txt" in lacking.unusable.reason
    (tmp_path / "sub" / "b.txt").write_text("")
    assert listed(DataSection(data_root=tmp_path)) == [
        ("b.jpg", "", "image"),
        (odd, "odd name", "video"),
        ("z.mp4", "a cat runs", "video"),
    ]


def test_a_table_in_place_of_a_folder_is_named_with_its_option(tmp_path: Path) -> None:
    table = tmp_path / "captions.jsonl"
    table.touch()
    with refused("invalid", f"data_root '{table}'", f"--dataset_file '{table}'", error=DataError):
        read_dataset(DataSection(data_root=table))
    table.unlink()
    with refused("not_found", f"data_root '{table}'", error=DataError):
        read_dataset(DataSection(data_root=table))


def test_what_is_left_alone_in_a_folder_is_said(tmp_path: Path) -> None:
    for name in (
        "a.MP4",
        "a.txt",
        "b.3gp",
        "b.TXT",
        "c.mts",
        "c.txt",
        "photo.heic",
        "photo.txt",
        "sub/d.txt",
        ".hidden",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = read_dataset(DataSection(data_root=tmp_path))
    assert {item.name: item.unusable is None for item in found.items} == {"a.MP4": True, "b.3gp": False, "c.mts": True}
    left = "b.TXT, photo.heic, photo.txt, sub/d.txt"
    [warning] = found.warnings
    assert warning.startswith("4 ")
    assert warning.endswith(f": {left}")
    for name in ("a.MP4", "b.3gp", "c.mts"):
        (tmp_path / name).unlink()
    with refused("not_found", f"'{tmp_path}'", "; 6 ", ", photo.heic", error=DataError):
        read_dataset(DataSection(data_root=tmp_path))


def test_folders_of_runs_are_no_data(tmp_path: Path) -> None:
    for name in (
        *("a.mp4", "a.txt", "config.toml", "manifest.jsonl"),  # those of somebody's dataset, at its top
        *("runs/x/config.toml", "runs/x/manifest.jsonl", "runs/x/samples/step-000001/0.mp4"),
        *("more/config.toml", "more/b.mp4", "more/b.txt"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("x")
    found = read_dataset(DataSection(data_root=tmp_path))
    assert [item.name for item in found.items] == ["a.mp4", "more/b.mp4"]
    assert found.warnings[0].startswith("1 ")
    assert found.warnings[0].endswith(": runs/x")


def test_an_empty_folder_says_what_was_looked_for(tmp_path: Path) -> None:
    with refused("not_found", f"'{tmp_path}'", " dog.txt)", "--dataset_file", "--video_column", error=DataError):
        read_dataset(DataSection(data_root=tmp_path))
    with refused("not_found", f"data_root '{tmp_path}/absent'", " 'absent' ", error=DataError):
        read_dataset(DataSection(data_root=tmp_path / "absent"))
    with refused("required", "`data_root`", "`hf_dataset`", error=DataError):
        read_dataset(DataSection())


@pytest.mark.parametrize(
    ("caption", "cleaned"),
    [
        ("This video shows a cat.", "a cat."),
        ("The clip depicts two dogs", "two dogs"),
        ("  the short video features rain", "rain"),
        ("The scene opens with a door", "a door"),
        ("The image captures the sea", "the sea"),
        ("In this video, a man runs", "a man runs"),
        ("The video showsomething", "The video showsomething"),
        ("A video shows a cat", "A video shows a cat"),
        ("The footage is old", "The footage is old"),
        ("This video shows ", "This video shows"),
        ("In this video,", "In this video,"),  # never an empty caption
    ],
)
def test_llm_prefixes(caption: str, cleaned: str) -> None:
    assert clean_caption(caption, DataSection(remove_common_llm_caption_prefixes=True)) == cleaned
    assert clean_caption(caption, DataSection()) == caption.strip()


@pytest.mark.parametrize(
    ("caption", "cleaned"),
    [
        ("The clip shows a cat", "BW a cat"),
        ("", "BW"),
        ("cat in BW, close", "cat in BW, close"),
        ("The clip shows BW", "BW"),
        ("a BWV cat", "BW a BWV cat"),  # another word
        ("a cat, [trigger] style", "a cat, BW style"),
    ],
)
def test_every_caption_has_the_trigger_word_once(caption: str, cleaned: str) -> None:
    options = {"id_token": " BW ", "remove_common_llm_caption_prefixes": True}
    assert clean_caption(caption, DataSection(**options)) == cleaned
    repeated = clean_caption(caption, DataSection(**options, repeat_id_token=True))
    assert (repeated == cleaned) == ("BW" not in caption.split() and "BW," not in caption and "[" not in caption)
    assert clean_caption(caption, DataSection()) == caption.strip()


def test_only_the_trigger_word_is_no_caption(tmp_path: Path) -> None:
    for name, caption in (("a", ""), ("b", "a cat")):
        write_mp4(tmp_path / f"{name}.mp4", np.zeros((9, 32, 32, 3), dtype=np.uint8), fps=8)
        (tmp_path / f"{name}.txt").write_text(caption)
    options = {"pretrained_model_name_or_path": "demo://ltx", "data_root": str(tmp_path), "id_token": "BW"}
    report, _ = examine(load_config(**options), ProbeOptions())
    assert report is not None
    assert [(item["caption"], "no_caption" in item["marks"]) for item in report["items"]] == [
        ("BW", True), ("BW a cat", False),
    ]  # fmt: skip


def test_the_two_files_of_the_usual_names_are_read_without_options(root: Path) -> None:
    data = two_files(root, "a.mp4\nb.mov\nc.PNG\n", "first\n\nthird, with comma\n")
    assert listed(DataSection(data_root=root)) == listed(data) == ALL
    (root / "prompts.txt").unlink()
    for name in ("a", "b", "c"):
        (root / f"{name}.txt").write_text(f"of {name}")
    assert [caption for _, caption, _ in listed(DataSection(data_root=root))] == ["of a", "of b", "of c"]


@pytest.mark.parametrize(
    ("header", "media", "caption"),
    [
        ("file_name,caption", "a.mp4", "one"),
        ("prompt,media_path", "one", "a.mp4"),
        ("video,prompt", "a.mp4", "one"),
        ("text,video,file_name", "", ""),
    ],
)
def test_columns_of_other_programs_are_read(root: Path, header: str, media: str, caption: str) -> None:
    row = "one,a.mp4,b.mov" if header.count(",") == 2 else f"{media},{caption}"
    (root / "list.csv").write_text(f"{header}\n{row}\n")
    assert listed(DataSection(dataset_file=root / "list.csv")) == [("a.mp4", "one", "video")]
    names = dict(zip(header.split(","), row.split(","), strict=True))
    for name, text in (("list.jsonl", json.dumps(names) + "\n"), ("list.json", json.dumps([names]))):
        (root / name).write_text(text)
        assert listed(DataSection(dataset_file=root / name)) == [("a.mp4", "one", "video")]
    with refused("not_found", "'clip'", error=DataError):  # a column that is given is the only one
        read_dataset(DataSection(dataset_file=root / "list.jsonl", video_column="clip"))


def test_wrong_column_names_are_one_problem_and_incomplete_rows_one_each(root: Path) -> None:
    def problems(*rows: dict[str, str]) -> list[str]:
        (root / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        with refused("not_found", error=DataError) as caught:
            read_dataset(DataSection(dataset_file=root / "list.jsonl"))
        return [problem.partition(":")[0] for problem in caught.value.problems]

    misnamed, complete = {"clip": "a.mp4", "about": "one"}, {"video": "a.mp4", "text": "one"}
    assert problems(*[misnamed] * 30) == ["list.jsonl"]
    assert problems(misnamed) == ["list.jsonl line 1"]
    assert problems(complete, misnamed, misnamed) == ["list.jsonl line 2", "list.jsonl line 3"]


def test_the_flags_that_name_unknown_columns_are_in_the_error(root: Path) -> None:
    def flags(row: dict[str, Any], **options: Any) -> str:
        (root / "list.jsonl").write_text(json.dumps(row) + "\n")
        with refused("not_found", error=DataError) as caught:
            read_dataset(DataSection(dataset_file=root / "list.jsonl", **options))
        return str(caught.value).partition("; use ")[2]

    row = {"id": "7", "my clip": "a.mp4", "description": "a dog runs"}
    assert flags(row) == "--video_column 'my clip' --caption_column description"
    assert flags({**row, "caption": "a dog"}) == "--video_column 'my clip'"
    assert flags(row, video_column="my clip") == "--caption_column description"
    assert (
        flags({**row, "caption": "x"}, caption_column="captoin") == "--video_column 'my clip' --caption_column caption"
    )
    assert flags(row, caption_columns=["short", "long"]) == "--video_column 'my clip'"
    assert flags({"n": 1}) == ""
