"""Captions: what counts as missing, several of a clip, and how malformed metadata are told."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from refusals import refused

from finetrainers.config.sections import DataSection
from finetrainers.data.buckets.clip import Clip
from finetrainers.data.reading.items import DataError, Item, read_dataset
from finetrainers.data.reading.sources.captions import LONG_CAPTION
from finetrainers.utils.failures import Kind


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
        assert found.warnings[-1].startswith("3 ")
        assert found.warnings[-1].endswith(f": {listing}")


def test_a_key_that_is_left_out_counts_as_missing_with_a_policy(root: Path) -> None:
    (root / "m.jsonl").write_text('{"video": "a.mp4", "text": "x"}\n{"video": "b.mp4"}\n')
    with refused("not_found", "m.jsonl line 2: ", "'text'", error=DataError):
        read_dataset(DataSection(dataset_file=root / "m.jsonl"))
    items = read_dataset(DataSection(dataset_file=root / "m.jsonl", caption_missing="empty")).items
    assert captions(items) == {"a": ("x",), "b": ("",)}


def refused_item(root: Path) -> tuple[str, str, str]:
    """Return name, status and reason of the only item that cannot be used."""
    [item] = [item for item in read_dataset(DataSection(data_root=root)).items if item.unusable]
    return item.name, item.unusable.status, item.unusable.reason


def test_a_caption_that_is_no_text_and_a_clip_that_is_none_are_refused(root: Path) -> None:
    (root / "m.jsonl").write_text('{"video": "a.mp4", "text": "\\ud800"}\n{"video": "nan", "text": "x"}\n')
    items = read_dataset(DataSection(dataset_file=root / "m.jsonl")).items
    assert [(item.where, item.unusable.status) for item in items] == [
        ("m.jsonl line 1", "caption_missing"), ("m.jsonl line 2", "missing"),
    ]  # fmt: skip
    assert "surrogate" in items[0].unusable.reason


def test_a_sidecar_in_another_encoding_names_the_byte(root: Path) -> None:
    for name in "abc":
        (root / f"{name}.txt").write_text("x")
    (root / "d.txt").write_bytes(b"\xef\xbb\xbfcaf\xe9")
    name, status, reason = refused_item(root)
    assert (name, status) == ("d.mp4", "caption_missing")
    assert all(value in reason for value in ("d.txt", " 6 ", "0xe9"))
    (root / "d.txt").write_bytes(b"\xef\xbb\xbf  caf\xc3\xa9 \r\nau lait\r\n")
    assert captions(read_dataset(DataSection(data_root=root)).items)["d"] == ("caf\u00e9 au lait",)
    (root / "d.txt").write_bytes(b"x" * ((1 << 20) + 1))
    name, status, reason = refused_item(root)
    assert (name, status) == ("d.mp4", "caption_missing")
    assert all(value in reason for value in ("d.txt", " 1048577 ", " 1048576 "))


def test_long_captions_are_counted_and_named(root: Path) -> None:
    texts = {"a": "x" * LONG_CAPTION, "b": "x" * (LONG_CAPTION + 1), "c": "word " * 20_000, "d": "short"}
    for name, text in texts.items():
        (root / f"{name}.txt").write_text(text)
    found = read_dataset(DataSection(data_root=root))
    assert len(found.items) == 4
    [warning] = found.warnings
    assert warning.startswith("2 ")
    assert " 1000 " in warning
    assert warning.endswith("b.mp4 (1001), c.mp4 (99999)")


def test_a_caption_of_a_column_has_the_bound_of_a_file(root: Path) -> None:
    texts = {"a": "x" * (1 << 20), "b": "x" * ((1 << 20) + 1)}
    (root / "m.jsonl").write_text("\n".join(json.dumps({"video": f"{k}.mp4", "text": v}) for k, v in texts.items()))
    first, second = read_dataset(DataSection(dataset_file=root / "m.jsonl")).items
    assert len(first.caption) == 1 << 20
    assert first.unusable is None
    assert second.unusable.status == "caption_missing"
    assert all(value in second.unusable.reason for value in (" 1048577 ", " 1048576"))


def test_files_that_share_a_caption_are_said(root: Path) -> None:
    (root / "a.png").write_bytes(b"x")
    for name in "abcd":
        (root / f"{name}.txt").write_text("x")
    found = read_dataset(DataSection(data_root=root))
    assert len(found.items) == 5
    [warning] = found.warnings
    assert warning.startswith("1 ")
    assert warning.endswith(": a.mp4 and a.png (a.txt)")


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


MALFORMED: list[tuple[str, str, Kind, tuple[str, ...]]] = [
    ("m.csv", "video\na.mp4\n", "not_found", ("m.csv line 1: ", "'text'")),
    ("m.csv", "video,text,text\na.mp4,x,y\n", "duplicate", ("m.csv line 1: ", "'text'")),
    ("m.csv", 'video,text\na.mp4,"two\nlines"\nb.mp4\n', "invalid", ("m.csv line 4: ",)),
    ("m.csv", 'video,text\na.mp4,x\nb.mp4,"never closed\nc.mp4,x\n', "unreadable", ("m.csv line 4: ",)),
    ("m.csv", 'video,text\na.mp4,"x" y\n', "unreadable", ("m.csv line 2: ", "','")),
    ("m.csv", "video,text\n,x\n", "invalid", ("m.csv line 2: ", "'video'", "''")),
    ("m.jsonl", '{"video": "a.mp4", "text": NaN}\n', "unreadable", ("m.jsonl line 1 ", "NaN ")),
    ("m.jsonl", '{"video": "a.mp4", "text": "x", "a": Infinity}\n', "unreadable", ("m.jsonl line 1 ", "Infinity ")),
    ("m.jsonl", '{"video": "a.mp4", "text": "x", "text": "y"}\n', "duplicate", ("m.jsonl line 1 ", "'text'")),
    ("m.jsonl", '{"video": "a.mp4", "text": "x"}\n\n{"video": "b.mp4",\n', "unreadable", ("m.jsonl line 3 ",)),
    ("m.jsonl", '{"video": "a.mp4", "text": ["x", 1]}\n', "invalid", ("m.jsonl line 1: ", "'text'", "['x', 1]")),
    ("m.jsonl", '{"video": null, "text": "x"}\n', "invalid", ("m.jsonl line 1: ", "'video'", "None")),
    ("m.jsonl", "[]\n", "invalid", ("m.jsonl line 1: ", "[]")),
    ("m.json", '[\n {"video": "a.mp4",\n  "text": }\n]', "unreadable", ("m.json ", "line 3")),
    ("m.json", '[{"video": "a.mp4", "text": "x", "text": "y"}]', "duplicate", ("m.json ", "'text'")),
    ("m.json", "[" * 100_000, "unreadable", ("m.json ",)),
    ("m.jsonl", '{"video": "a.mp4", "text": "x"}\n{"video": ' + "[" * 100_000, "unreadable", ("m.jsonl line 2 ",)),
    ("m.json", '[{"video": "a.mp4", "text": -Infinity}]', "unreadable", ("m.json ", "-Infinity ")),
]


@pytest.mark.parametrize(("name", "content", "kind", "places"), MALFORMED)
def test_malformed_metadata_name_the_line(
    root: Path, name: str, content: str, kind: Kind, places: tuple[str, ...]
) -> None:
    (root / name).write_text(content)
    with refused(kind, *places, error=DataError):
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
