"""Captions: what counts as missing, several of a clip, and how malformed metadata are told."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from finetrainers.config.sections import DataSection
from finetrainers.data.buckets.clip import Clip
from finetrainers.data.reading.items import DataError, Item, read_dataset
from finetrainers.data.reading.sources.captions import LONG_CAPTION


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in "abcd":
        (tmp_path / f"{name}.mp4").write_bytes(b"x")
    return tmp_path


def captions(items: list[Item]) -> dict[str, tuple[str, ...]]:
    return {item.path.stem: item.captions for item in items}


POLICIES = [
    # policy, what is an error, what is trained and how
    (None, {"none"}, {"full": "x", "blank": "", "white": ""}),
    ("error", {"none", "blank", "white"}, {"full": "x"}),
    ("empty", set(), {"full": "x", "none": "", "blank": "", "white": ""}),
    ("skip", set(), {"full": "x"}),
]


@pytest.mark.parametrize(("policy", "wrong", "trained"), POLICIES)
@pytest.mark.parametrize("source", ["folder", "jsonl"])
def test_policy_for_missing_captions(
    tmp_path: Path, source: str, policy: str | None, wrong: set, trained: dict
) -> None:
    contents: dict[str, str | None] = {"full": "x", "none": None, "blank": "", "white": " \t\r\n"}
    records = []
    for name, text in contents.items():
        (tmp_path / f"{name}.mp4").write_bytes(b"x")
        records.append({"video": f"{name}.mp4", "text": text})
        if text is not None and source == "folder":
            (tmp_path / f"{name}.txt").write_text(text)
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, records)) if source == "jsonl" else "")
    place = {"dataset_file": tmp_path / "m.jsonl"} if source == "jsonl" else {"data_root": tmp_path}
    found = read_dataset(DataSection(caption_missing=policy, **place))
    assert {item.path.stem: item.caption for item in found.items if not item.unusable} == trained
    refused = {item.path.stem: item.unusable.status for item in found.items if item.unusable}
    # Of each item something becomes, of those that are skipped too.
    assert refused == dict.fromkeys(
        contents.keys() - trained.keys(), "skipped" if policy == "skip" else "caption_missing"
    )
    assert {name for name, status in refused.items() if status == "caption_missing"} == wrong
    if policy == "skip":
        names = sorted(contents, key=list(contents).index if source == "jsonl" else None)
        listing = ", ".join(f"{name}.mp4" for name in names if name != "full")
        assert found.warnings[-1:] == [f"3 items without a caption left out: {listing}"]


def test_a_key_that_is_left_out_counts_as_missing_with_a_policy(root: Path) -> None:
    (root / "m.jsonl").write_text('{"video": "a.mp4", "text": "x"}\n{"video": "b.mp4"}\n')
    with pytest.raises(DataError, match=r"line 2: no column 'text'"):
        read_dataset(DataSection(dataset_file=root / "m.jsonl"))
    items = read_dataset(DataSection(dataset_file=root / "m.jsonl", caption_missing="empty")).items
    assert captions(items) == {"a": ("x",), "b": ("",)}


def refusals(root: Path) -> dict[str, str]:
    return {
        item.name: item.unusable.reason for item in read_dataset(DataSection(data_root=root)).items if item.unusable
    }


def test_a_caption_that_is_no_text_and_a_clip_that_is_none_are_refused(root: Path) -> None:
    (root / "m.jsonl").write_text('{"video": "a.mp4", "text": "\\ud800"}\n{"video": "nan", "text": "x"}\n')
    items = read_dataset(DataSection(dataset_file=root / "m.jsonl")).items
    assert [(item.where, item.unusable.status) for item in items] == [
        ("m.jsonl line 1", "caption_missing"), ("m.jsonl line 2", "missing"),
    ]  # fmt: skip
    assert items[0].unusable.reason == "the caption holds half of a surrogate pair, which is no character"


def test_a_sidecar_in_another_encoding_names_the_byte(root: Path) -> None:
    for name in "abc":
        (root / f"{name}.txt").write_text("x")
    (root / "d.txt").write_bytes(b"\xef\xbb\xbfcaf\xe9")
    assert refusals(root) == {"d.mp4": "the caption d.txt file is not UTF-8 text: byte 6 is 0xe9"}
    (root / "d.txt").write_bytes(b"\xef\xbb\xbf  caf\xc3\xa9 \r\nau lait\r\n")
    assert captions(read_dataset(DataSection(data_root=root)).items)["d"] == ("caf\u00e9 au lait",)
    (root / "d.txt").write_bytes(b"x" * ((1 << 20) + 1))
    assert refusals(root)["d.mp4"].startswith("the caption d.txt has 1048577 bytes")


def test_long_captions_are_counted_and_named(root: Path) -> None:
    texts = {"a": "x" * LONG_CAPTION, "b": "x" * (LONG_CAPTION + 1), "c": "word " * 20_000, "d": "short"}
    for name, text in texts.items():
        (root / f"{name}.txt").write_text(text)
    found = read_dataset(DataSection(data_root=root))
    assert len(found.items) == 4
    [warning] = found.warnings
    assert warning.startswith("2 items with a caption of more than 1000 characters")
    assert warning.endswith("b.mp4 (1001), c.mp4 (99999)")


def test_a_caption_of_a_column_has_the_bound_of_a_file(root: Path) -> None:
    texts = {"a": "x" * (1 << 20), "b": "x" * ((1 << 20) + 1)}
    (root / "m.jsonl").write_text("\n".join(json.dumps({"video": f"{k}.mp4", "text": v}) for k, v in texts.items()))
    first, second = read_dataset(DataSection(dataset_file=root / "m.jsonl")).items
    assert len(first.caption) == 1 << 20
    assert first.unusable is None
    assert second.unusable.status == "caption_missing"
    assert second.unusable.reason.startswith("the caption has 1048577 characters, more than the 1048576 of any")


def test_files_that_share_a_caption_are_said(root: Path) -> None:
    (root / "a.png").write_bytes(b"x")
    for name in "abcd":
        (root / f"{name}.txt").write_text("x")
    found = read_dataset(DataSection(data_root=root))
    assert len(found.items) == 5
    assert found.warnings == ["1 item sharing a caption file: a.mp4 and a.png (a.txt)"]


def test_several_captions_from_every_source(root: Path) -> None:
    for name, text in (("a", "one\n\n two \n"), ("b", "single"), ("c", "\n"), ("d", "this video shows x\ny")):
        (root / f"{name}.txt").write_text(text)
    data = DataSection(data_root=root, caption_lines=True, id_token="T", remove_common_llm_caption_prefixes=True)
    assert captions(read_dataset(data).items) == {
        "a": ("T one", "T two"),
        "b": ("T single",),
        "c": ("T",),
        "d": ("T x", "T y"),
    }
    assert captions(read_dataset(DataSection(data_root=root)).items)["a"] == ("one two",)
    (root / "m.json").write_text('[{"video": "a.mp4", "text": ["one", "two", " "]}, {"video": "b.mp4", "text": "x"}]')
    assert captions(read_dataset(DataSection(dataset_file=root / "m.json")).items) == {
        "a": ("one", "two"),
        "b": ("x",),
    }
    (root / "m.csv").write_text("video,short,long,fps\na.mp4,s,l,8\nb.mp4,,l,9\n")
    items = read_dataset(DataSection(dataset_file=root / "m.csv", caption_columns=["short", "long"])).items
    assert captions(items) == {"a": ("s", "l"), "b": ("l",)}
    assert [item.extra for item in items] == [{"fps": "8"}, {"fps": "9"}]


def test_one_of_several_captions_is_drawn_for_each_epoch_and_item() -> None:
    clip = Clip(0, Path("a.mp4"), "one", "video", (9, 32, 32), 8.0, 9, 8.0, 32, 32, captions=("one", "two", "three"))
    drawn = [clip.caption_for((epoch, 7), seed=1) for epoch in range(3000)]
    assert drawn == [clip.caption_for((epoch, 7), seed=1) for epoch in range(3000)]
    assert drawn != [clip.caption_for((epoch, 8), seed=1) for epoch in range(3000)]
    assert drawn != [clip.caption_for((epoch, 7), seed=2) for epoch in range(3000)]
    counts = Counter(drawn)
    assert set(counts) == {"one", "two", "three"}
    assert min(counts.values()) > 900  # 1000 each, standard deviation 26
    assert {replace(clip, captions=()).caption_for((epoch, 7), seed=1) for epoch in range(9)} == {"one"}


MALFORMED = [
    ("m.csv", "video\na.mp4\n", "line 1: no column 'text'"),
    ("m.csv", "video,text,text\na.mp4,x,y\n", "line 1: column 'text' is there twice"),
    ("m.csv", 'video,text\na.mp4,"two\nlines"\nb.mp4\n', "line 4: fewer fields"),
    ("m.csv", 'video,text\na.mp4,x\nb.mp4,"never closed\nc.mp4,x\n', "line 4: unexpected end of data"),
    ("m.csv", 'video,text\na.mp4,"x" y\n', "line 2: ',' expected after '\"'"),
    ("m.csv", "video,text\n,x\n", "line 2: column 'video' must be a path, got ''"),
    ("m.jsonl", '{"video": "a.mp4", "text": NaN}\n', "line 1 is not JSON: NaN is no JSON value"),
    (
        "m.jsonl",
        '{"video": "a.mp4", "text": "x", "score": Infinity}\n',
        "line 1 is not JSON: Infinity is no JSON value",
    ),
    ("m.jsonl", '{"video": "a.mp4", "text": "x", "text": "y"}\n', "line 1 is not JSON: the key 'text' is there twice"),
    ("m.jsonl", '{"video": "a.mp4", "text": "x"}\n\n{"video": "b.mp4",\n', "line 3 is not JSON"),
    ("m.jsonl", '{"video": "a.mp4", "text": ["x", 1]}\n', "line 1: column 'text' must be text or a list of texts"),
    ("m.jsonl", '{"video": null, "text": "x"}\n', "line 1: column 'video' must be a path, got None"),
    ("m.jsonl", "[]\n", r"line 1: must be an object, got \[\]"),
    ("m.json", '[\n {"video": "a.mp4",\n  "text": }\n]', "is not JSON: .*line 3"),
    ("m.json", "[" * 100_000, "is not JSON: nested too deeply"),
    ("m.jsonl", '{"video": "a.mp4", "text": "x"}\n{"video": ' + "[" * 100_000, "line 2 is not JSON"),
    ("m.json", '[{"video": "a.mp4", "text": -Infinity}]', "is not JSON: -Infinity is no JSON value"),
]


@pytest.mark.parametrize(("name", "content", "message"), MALFORMED)
def test_malformed_metadata_name_the_line(root: Path, name: str, content: str, message: str) -> None:
    (root / name).write_text(content)
    with pytest.raises(DataError, match=message):
        read_dataset(DataSection(dataset_file=root / name))


def test_quoted_line_breaks_and_quotes_are_captions(root: Path) -> None:
    (root / "m.csv").write_bytes(
        b'\xef\xbb\xbfvideo,text\r\na.mp4,"two\r\nlines, ""quoted"""\r\nb.mp4,a "word"\r\n\r\n'
    )
    assert captions(read_dataset(DataSection(dataset_file=root / "m.csv")).items) == {
        "a": ('two\nlines, "quoted"',), "b": ('a "word"',),
    }  # fmt: skip


def test_max_items_takes_the_first(root: Path) -> None:
    (root / "m.jsonl").write_text("".join(json.dumps({"video": f"{n}.mp4", "text": n}) + "\n" for n in "abcd"))
    assert list(captions(read_dataset(DataSection(dataset_file=root / "m.jsonl", max_items=2)).items)) == ["a", "b"]
