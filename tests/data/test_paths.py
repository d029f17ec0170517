"""Names of media lead below the root and nowhere else, to regular files and nothing else."""

from __future__ import annotations

import json
import os
import socket
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from finetrainers.config.sections import DataSection
from finetrainers.data.reading.items import DataError, read_dataset
from finetrainers.data.reading.sources.paths import Root
from finetrainers.data.reading.status import InvalidSampleError


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A root with links inside and out, beside files that are none of its business."""
    place = tmp_path_factory.mktemp("place")
    root = place / "root"
    for folder in (root / "sub", place / "secret", place / "root-beside"):
        folder.mkdir(parents=True)
        (folder / "a.mp4").write_bytes(b"x")
    (root / "a.mp4").write_bytes(b"x")
    (root / "out").symlink_to(place / "secret")
    (root / "out.mp4").symlink_to(place / "secret" / "a.mp4")
    (root / "in").symlink_to("sub")
    (root / "in.mp4").symlink_to("sub/a.mp4")
    (root / "up").symlink_to("..")
    (root / "loop.mp4").symlink_to("loop.mp4")
    return place


PARTS = st.sampled_from(
    ["a.mp4", "sub", "in", "in.mp4", "out", "out.mp4", "up", "loop.mp4", "..", ".", "", "secret", "root"]
)


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(PARTS, max_size=6), absolute=st.booleans())
def test_what_is_found_lies_below_the_root(place: Path, parts: list[str], absolute: bool) -> None:
    name = "/".join(parts)
    name = f"{place}/{name}" if absolute else name
    root = (place / "root").resolve()
    named = os.path.join(root, name)  # noqa: PTH118 (a Path would take "a.mp4/." for "a.mp4")
    try:
        found = Root(root).find(name)
    except InvalidSampleError as problem:
        status = problem.status
    else:
        status = None
        assert found.is_file()
        assert found.resolve(strict=True).is_relative_to(root)
    if os.path.isfile(named):  # noqa: PTH113
        # Then it depends on where it really lies, and on nothing else.
        assert status == (None if Path(named).resolve(strict=True).is_relative_to(root) else "outside_root")


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("../secret/a.mp4", "outside_root"),
        ("../root-beside/a.mp4", "outside_root"),  # begins like the root
        ("../secret/none.mp4", "outside_root"),  # before it is asked whether it is there
        ("out/a.mp4", "outside_root"),
        ("out.mp4", "outside_root"),
        ("/etc/passwd", "outside_root"),
        ("sub", "not_a_file"),
        ("none.mp4", "missing"),
        ("a.mp4/b.mp4", "missing"),
        ("loop.mp4", "missing"),
        ("x" * 300, "missing"),
        ("a\0.mp4", "missing"),
        ("\ud800.mp4", "missing"),
    ],
)
def test_refused_names(place: Path, name: str, status: str) -> None:
    with pytest.raises(InvalidSampleError) as caught:
        Root(place / "root").find(name)
    assert caught.value.status == status


def test_a_root_may_be_a_link_and_outside_may_be_allowed(place: Path) -> None:
    assert Root(place / "root" / "up" / "root").find("in/../sub/a.mp4").is_file()
    assert Root(place / "root" / "in").find("a.mp4").is_file()
    for name in ("../secret/a.mp4", "out/a.mp4", str(place / "secret" / "a.mp4")):
        assert Root(place / "root", allow_outside=True).find(name).is_file()


def test_all_names_that_lead_out_are_listed(place: Path) -> None:
    file = place / "root" / "m.jsonl"
    names = ["a.mp4", "../secret/a.mp4", "out.mp4", str(place / "root" / "sub" / "a.mp4")]
    file.write_text("".join(json.dumps({"video": name, "text": "x"}) + "\n" for name in names))
    refused = [item for item in read_dataset(DataSection(dataset_file=file)).items if item.unusable]
    assert [(item.where, item.unusable.status) for item in refused] == [
        ("m.jsonl line 2", "outside_root"), ("m.jsonl line 3", "outside_root"),
    ]  # fmt: skip
    assert not any(item.unusable for item in read_dataset(DataSection(dataset_file=file, allow_outside=True)).items)


def test_a_folder_follows_links_out_only_if_allowed(place: Path, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "b.mp4").write_bytes(b"x")
    (tmp_path / "other" / "b.txt").write_text("b")
    (tmp_path / "root" / "a.mp4").write_bytes(b"x")
    (tmp_path / "root" / "a.txt").write_text("a")
    (tmp_path / "root" / "linked").symlink_to(tmp_path / "other")
    (tmp_path / "root" / "itself").symlink_to(".")
    with refused("invalid", "linked ", "other'", "--allow_outside", error=DataError):
        read_dataset(DataSection(data_root=tmp_path / "root"))
    items = read_dataset(DataSection(data_root=tmp_path / "root", allow_outside=True)).items
    assert [(item.name, item.caption) for item in items] == [("a.mp4", "a"), ("linked/b.mp4", "b")]


def test_a_link_to_itself_is_one_file_that_cannot_be_read(tmp_path: Path) -> None:
    for name in ("a.mp4", "loop.mp4"):
        (tmp_path / name).with_suffix(".txt").write_text("a")
    (tmp_path / "a.mp4").write_bytes(b"x")
    (tmp_path / "loop.mp4").symlink_to("loop.mp4")
    items = read_dataset(DataSection(data_root=tmp_path)).items
    assert [(item.name, item.unusable and item.unusable.status) for item in items] == [
        ("a.mp4", None),
        ("loop.mp4", "missing"),
    ]


def test_lists_of_names_and_captions_do_not_lead_out(place: Path, tmp_path: Path) -> None:
    """A link would make captions of any file of the machine, or messages."""
    (tmp_path / "private").write_text("a secret\n")
    root = tmp_path / "root"
    root.mkdir()
    (root / "a.mp4").write_bytes(b"x")
    (root / "videos.txt").write_text("a.mp4\n")
    (root / "prompts.txt").symlink_to(tmp_path / "private")
    options = {"data_root": root, "video_column": "videos.txt", "caption_column": "prompts.txt"}
    with refused("invalid", "prompts.txt ", "private'", "--allow_outside", error=DataError) as raised:
        read_dataset(DataSection(**options))
    assert "a secret" not in str(raised.value)
    assert read_dataset(DataSection(**options, allow_outside=True)).items[0].caption == "a secret"


@pytest.mark.timeout(20)
def test_pipes_sockets_devices_and_folders_are_never_opened(tmp_path: Path) -> None:
    """Opening the pipe would wait for ever, for there is nobody who writes to it."""
    os.mkfifo(tmp_path / "pipe.mp4")
    os.mkfifo(tmp_path / "caption.txt")
    (tmp_path / "caption.mp4").write_bytes(b"x")
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "gone.mp4").symlink_to("nowhere.mp4")
    (tmp_path / "null.mp4").symlink_to("/dev/null")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(tmp_path / "s.mp4"))
    for name in ("pipe", "s", "gone", "null"):
        (tmp_path / f"{name}.txt").write_text("x")
    found = read_dataset(DataSection(data_root=tmp_path, allow_outside=True))
    refusals = {item.name: item.unusable for item in found.items}
    assert {name: (refusal.status, refusal.reason.split()[-1]) for name, refusal in refusals.items()} == {
        "pipe.mp4": ("not_a_file", "pipe"), "s.mp4": ("not_a_file", "socket"), "null.mp4": ("not_a_file", "device"),
        "gone.mp4": ("missing", "exist"), "caption.mp4": ("caption_missing", "pipe"),
    }  # a folder that is called like a film is a folder  # fmt: skip
    assert "'nowhere.mp4'" in refusals["gone.mp4"].reason
    assert "caption.txt" in refusals["caption.mp4"].reason


ODD = [
    "two words", "it's", 'say "hi"', "line\nbreak", "$(touch gone)", "`id`", "\U0001f3ac", "-rf", "--help",
    "semi;colon", "a\\b",
    "%s %d", "trailing ", "#hash", "caf\u00e9", "\u65e5\u672c\u8a9e", "tab\t", "*", "a&b|c", "x" * 251,
]  # fmt: skip


def test_odd_names_work_in_every_source(tmp_path: Path) -> None:
    for name in ODD:
        (tmp_path / f"{name}.mp4").write_bytes(b"x")
        (tmp_path / f"{name}.txt").write_text(f"of {name}", encoding="utf-8")
    in_folder = read_dataset(DataSection(data_root=tmp_path)).items
    assert {item.path.stem for item in in_folder} == set(ODD)
    assert all(item.caption == " ".join(f"of {item.path.stem}".split()) for item in in_folder)
    listed = tmp_path / "m.jsonl"
    listed.write_text("".join(json.dumps({"video": f"{name}.mp4", "text": "x"}) + "\n" for name in ODD))
    assert [item.path.stem for item in read_dataset(DataSection(dataset_file=listed)).items] == ODD
    assert not (tmp_path / "gone").exists()


def test_case_tells_files_apart(tmp_path: Path) -> None:
    for name in ("a", "A"):
        (tmp_path / f"{name}.mp4").write_bytes(b"x")
        (tmp_path / f"{name}.txt").write_text(name)
    assert [item.caption for item in read_dataset(DataSection(data_root=tmp_path)).items] == ["A", "a"]


@pytest.mark.parametrize("on_disk", ["NFC", "NFD"])
def test_names_are_found_in_another_unicode_form(tmp_path: Path, on_disk: str) -> None:
    folder, file = (unicodedata.normalize(on_disk, name) for name in ("\u00fcber", "caf\u00e9"))
    listed = unicodedata.normalize("NFD" if on_disk == "NFC" else "NFC", "\u00fcber/caf\u00e9.mp4")
    (tmp_path / folder).mkdir()
    (tmp_path / folder / f"{file}.mp4").write_bytes(b"x")
    assert Root(tmp_path).find(listed) == tmp_path / folder / f"{file}.mp4"
    # A caption whose name an other system has put into another form still belongs to its clip.
    (tmp_path / folder / unicodedata.normalize("NFD" if on_disk == "NFC" else "NFC", f"{file}.txt")).write_text(
        "coffee"
    )
    assert [item.caption for item in read_dataset(DataSection(data_root=tmp_path)).items] == ["coffee"]


def test_a_name_that_could_be_two_files_is_ambiguous(tmp_path: Path) -> None:
    both = "\u00e9\u00e9"
    (tmp_path / f"{unicodedata.normalize('NFC', both)}.mp4").write_bytes(b"x")
    (tmp_path / f"{unicodedata.normalize('NFD', both)}.mp4").write_bytes(b"x")
    with pytest.raises(InvalidSampleError, match=" 2 ") as caught:
        Root(tmp_path).find("\u00e9e\u0301.mp4")
    assert caught.value.status == "missing"
    assert Root(tmp_path).find(f"{both}.mp4").is_file()  # as it is written on the disk


def test_names_that_are_no_text_are_a_problem(tmp_path: Path) -> None:
    try:
        (tmp_path / os.fsdecode(b"caf\xe9.mp4")).write_bytes(b"x")
    except OSError:
        pytest.skip("this file system has text names only")
    [item] = read_dataset(DataSection(data_root=tmp_path, caption_missing="empty")).items
    assert item.unusable.status == "missing"
    assert "'utf-8'" in item.unusable.reason
    item.unusable.reason.encode()
