"""Datasets whose media have to be unpacked: WebDataset tars, and what the library `datasets` reads."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from refusals import refused

from finetrainers.config.sections import DataSection
from finetrainers.data.reading.items import DataError, Reading, read_dataset
from finetrainers.data.reading.sources import hub, tars, unpacked
from finetrainers.data.reading.sources.paths import Root
from finetrainers.data.reading.sources.tables import Columns
from finetrainers.data.reading.sources.tars import expand


def write_tar(path: Path, members: list[tuple[str, bytes | None]], *, mode: str = "w") -> Path:
    """An archive; a member without content is a link of that name to `/etc/passwd`."""
    with tarfile.open(path, mode) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if content is None:
                info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return path


def media(content: bytes, suffix: str) -> str:
    digest = hashlib.sha256(content).hexdigest()
    return f"{digest[:2]}/{digest}{suffix}"


def read(place: Path, file: str | Path, **options: object) -> Reading:
    return read_dataset(DataSection(dataset_file=place / file, **options), media_dir=place / "media")


SHARD = [
    ("clips/000.mp4", b"zero"), ("clips/000.txt", b"\xef\xbb\xbfcaption\r\nzero"),
    ("clips/001.json", b'{"text": ["one", "eins"], "fps": 8}'), ("clips/001.mp4", b"one"),
    ("clips/002.PNG", b"two"), ("clips/002.caption", b"two"), ("clips/002.json", b'{"text": "other", "score": 2}'),
    ("003.mp4", b"zero"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "mode"), [("a.tar", "w"), ("a.tar.gz", "w:gz"), ("a.tgz", "w:gz")])
def test_a_tar_is_unpacked_under_names_of_its_content(tmp_path: Path, name: str, mode: str) -> None:
    write_tar(tmp_path / name, SHARD, mode=mode)
    found = read(tmp_path, name, caption_missing="empty")
    assert found.warnings == []
    assert [(item.name, item.captions, item.kind, item.extra) for item in found.items] == [
        (f"{name}/clips/000.mp4", ("caption zero",), "video", {}),
        (f"{name}/clips/001.mp4", ("one", "eins"), "video", {"fps": 8}),
        (f"{name}/clips/002.png", ("two",), "image", {"score": 2}),
        (f"{name}/003.mp4", ("",), "video", {}),
    ]
    assert [item.path.read_bytes() for item in found.items] == [b"zero", b"one", b"two", b"zero"]
    assert found.items[0].path == found.items[3].path == tmp_path / "media" / media(b"zero", ".mp4")


def test_shards_by_braces_and_wildcards_and_max_items(tmp_path: Path) -> None:
    for number in (8, 9, 10):
        write_tar(tmp_path / f"s-{number:03d}.tar", [(f"{k}.mp4", b"%d-%d" % (number, k)) for k in range(3)])
    options = {"caption_missing": "empty"}
    for pattern in ("s-{008..010}.tar", "s-{008,009,010}.tar", "s-*.tar", "s-0{08..09,10}.tar"):
        if ".." not in pattern or "," not in pattern:
            assert len(read(tmp_path, pattern, **options).items) == 9
    taken = read(tmp_path, "s-{008..010}.tar", max_items=4, **options).items
    assert [item.path.read_bytes() for item in taken] == [b"8-0", b"8-1", b"8-2", b"9-0"]
    assert [path.name for path in expand(str(tmp_path / "s-{010..009}.tar"))] == ["s-010.tar", "s-009.tar"]
    with refused("not_found", "s-{010..012}.tar'", "s-011.tar ", error=DataError):
        read(tmp_path, "s-{010..012}.tar")
    with refused("not_found", "t-*.tar'", error=DataError):
        read(tmp_path, "t-*.tar")
    with refused("too_large", "s-{0..99999999999}.tar'", " 100000 ", error=DataError):
        read(tmp_path, "s-{0..99999999999}.tar")


def test_members_that_lead_out_are_refused_and_counted(tmp_path: Path) -> None:
    write_tar(
        tmp_path / "evil.tar",
        [
            ("../../up.mp4", b"up"), ("/abs.mp4", b"abs"), ("link.mp4", None), ("good.mp4", b"good"),
            ("good.txt", b"fine"),
            ("linked.mp4", b"x"), ("linked.txt", None), ("many.mp4", b"x"), ("many.mov", b"y"), ("text.txt", b"alone"),
            ("latin.mp4", b"x"), ("latin.txt", b"caf\xe9"), ("big.mp4", b"x"), ("big.txt", b"x" * (1 << 20) + b"x"),
        ],
    )  # fmt: skip
    before = {path for path in tmp_path.parent.rglob("*") if tmp_path / "media" not in path.parents}
    found = read(tmp_path, "evil.tar", caption_missing="empty")
    assert [(item.name, item.caption) for item in found.items if item.unusable is None] == [
        ("evil.tar/good.mp4", "fine"), ("evil.tar/linked.mp4", ""),
    ]  # fmt: skip
    refusals = {item.name: item.unusable for item in found.items if item.unusable is not None}
    assert {refusal.status for refusal in refusals.values()} == {"skipped"}
    names = ("../../up", "abs", "link", "linked", "many", "text", "latin", "big")
    assert refusals.keys() == {f"evil.tar/{name}" for name in names}
    assert all(value in refusals["evil.tar/latin"].reason for value in ("latin.txt ", " 3 ", "0xe9"))
    assert all(value in refusals["evil.tar/big"].reason for value in ("1048577 ", " 1048576 "))
    # Each reason once, with the number and the names.
    assert {warning.rpartition(": ")[2]: warning.split()[0] for warning in found.warnings} == {
        "evil.tar/../../up, evil.tar//abs": "2", "evil.tar/link, evil.tar/linked": "2", "evil.tar/many": "1",
        "evil.tar/text": "1", "evil.tar/latin, evil.tar/big": "2",
    }  # fmt: skip
    after = {path for path in tmp_path.parent.rglob("*") if tmp_path / "media" not in path.parents}
    assert after - before == {tmp_path / "media"}


def test_members_that_begin_with_a_dot_part_no_sample(tmp_path: Path) -> None:
    members = [
        (f"{dot}{k}.{kind}", f"{k}{kind}".encode()) for k in range(2) for kind in ("mp4", "txt") for dot in ("._", "")
    ]
    found = read(tmp_path, write_tar(tmp_path / "mac.tar", members).name)
    assert [(item.name, item.caption) for item in found.items] == [("mac.tar/0.mp4", "0txt"), ("mac.tar/1.mp4", "1txt")]
    assert found.warnings == []


def test_a_damaged_archive_is_no_shorter_one(tmp_path: Path) -> None:
    """What is damaged looks like an end to `tarfile`, or is decompressed into something else."""
    text = " ".join(map(str, range(20_000))).encode()
    members = [(f"{k}.{kind}", content) for k in range(3) for kind, content in (("mp4", text[k:]), ("txt", b"a clip"))]
    plain = bytearray(write_tar(tmp_path / "header.tar", members).read_bytes())
    with tarfile.open(tmp_path / "header.tar") as archive:
        header = archive.getmembers()[4].offset
    plain[header + 3 : header + 20] = b"\xff" * 17
    (tmp_path / "header.tar").write_bytes(plain)
    for name, mode in (("sum.tgz", "w:gz"), ("packed.tar", "w:xz")):
        packed = bytearray(write_tar(tmp_path / name, members, mode=mode).read_bytes())
        middle = len(packed) // 2
        packed[middle : middle + 99] = bytes(range(1, 100))
        (tmp_path / name).write_bytes(packed)
    with refused("unreadable", tmp_path / "header.tar", " 2 ", f" {header}", error=DataError):
        read(tmp_path, "header.tar")
    for name in ("sum.tgz", "packed.tar"):
        for _ in range(2):  # the second start does not take what the first has unpacked for all of it
            with refused("unreadable", tmp_path / name, error=DataError):
                read(tmp_path, name)


def test_an_archive_that_is_made_to_fill_a_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tars, "_MIN_LIMIT_BYTES", 1 << 20)
    bomb = write_tar(tmp_path / "bomb.tgz", [("0.mp4", bytes(100)), ("1.mp4", bytes(5 << 20))], mode="w:gz")
    assert bomb.stat().st_size < 20_000
    for _ in range(2):
        with refused("too_large", bomb, "'1.mp4'", " 5 MiB", " 100 ", " data_root", error=DataError):
            read(tmp_path, "bomb.tgz")
    assert not any(path.stat().st_size for path in (tmp_path / "media").rglob("*") if path.is_file())
    # What a member declares counts, before any of it is read: here there is none.
    content = bytearray(write_tar(tmp_path / "far.tar", [("0.mp4", b"x")]).read_bytes())
    content[124:136] = b"77777777777\0"
    content[148:156] = b"%06o\0 " % (sum(content[:148]) + sum(content[156:512]) + 8 * 32)
    (tmp_path / "far.tar").write_bytes(content)
    with refused("too_large", tmp_path / "far.tar", " 8 GiB", error=DataError):
        read(tmp_path, "far.tar")
    # And what follows the end of an archive is decompressed, too.
    tail = gzip.decompress(write_tar(tmp_path / "tail.tgz", [("0.mp4", b"x")], mode="w:gz").read_bytes()) + bytes(
        3 << 20
    )
    (tmp_path / "tail.tgz").write_bytes(gzip.compress(tail))
    with refused("unreadable", tmp_path / "tail.tgz", " 1 MiB ", error=DataError):
        read(tmp_path, "tail.tgz")
    # Bitmaps of one color shrink a lot: a little is always unpacked.
    write_tar(tmp_path / "plain.tgz", [("0.bmp", bytes(900_000))], mode="w:gz")
    assert len(read(tmp_path, "plain.tgz", caption_missing="empty").items) == 1


def test_a_damaged_line_of_the_journal_is_unpacked_again(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [(f"{k}.mp4", b"%d" % k) for k in range(4)])

    def items() -> list[tuple[Path, str]]:
        return [(item.path, item.name) for item in read(tmp_path, "a.tar", caption_missing="empty").items]

    whole = items()
    [journal] = (tmp_path / "media" / "journals").glob("*.jsonl")
    lines = journal.read_bytes().split(b"\n")
    for damaged in (b"\xff" * 20, b"[" * 99_999, b'{"where": 3}', lines[1].replace(b"stored", b"stowed"), b"null", b""):
        journal.write_bytes(b"\n".join([lines[0], damaged, *lines[2:]]))
        assert items() == whole
        assert journal.read_bytes() == b"\n".join(lines)


def test_unpacking_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = [b"content %d" % k for k in range(6)]
    write_tar(tmp_path / "a.tar", [(f"{k}.mp4", content) for k, content in enumerate(contents)])
    stored: list[int] = []
    store = unpacked.MediaFolder.store

    def counted(self, source, **options):
        stored.append(1)
        if len(stored) == 4:
            raise OSError("power")
        return store(self, source, **options)

    monkeypatch.setattr(unpacked.MediaFolder, "store", counted)
    with refused("unreadable", tmp_path / "a.tar", " 4 ", ": power", error=DataError):
        read(tmp_path, "a.tar", caption_missing="empty")
    [journal] = (tmp_path / "media" / "journals").glob("*.jsonl")
    with open(journal, "a") as file:  # a line that a kill has cut
        file.write('{"where": "a.tar/3", "med')
    items = read(tmp_path, "a.tar", caption_missing="empty").items
    assert [item.path.read_bytes() for item in items] == contents
    assert len(stored) == 4 + 3
    read(tmp_path, "a.tar", caption_missing="empty", id_token="T")
    assert len(stored) == 7  # all is there
    items[4].path.write_bytes(b"cut")
    items = read(tmp_path, "a.tar", caption_missing="empty").items
    assert [item.path.read_bytes() for item in items] == contents
    assert len(stored) == 7 + 2  # what came after it in the journal, too


def test_an_archive_that_is_cut_off_or_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write_tar(tmp_path / "a.tar", [("0.mp4", b"x" * 5000), ("1.mp4", b"y" * 5000)]).read_bytes()
    (tmp_path / "a.tar").write_bytes(whole[:7000])
    with refused("unreadable", tmp_path / "a.tar", error=DataError):
        read(tmp_path, "a.tar", caption_missing="empty")
    (tmp_path / "a.tar").write_bytes(whole)
    assert len(read(tmp_path, "a.tar", caption_missing="empty").items) == 2
    write_tar(tmp_path / "a.tar", [("0.mp4", b"new")])
    assert [i.path.read_bytes() for i in read(tmp_path, "a.tar", caption_missing="empty").items] == [b"new"]
    monkeypatch.setattr(unpacked, "_MIN_RESERVE", 1 << 60)
    write_tar(tmp_path / "b.tar", [("0.mp4", b"new")])
    with refused("too_large", tmp_path / "media", "--precompute_dir", error=DataError):
        read(tmp_path, "b.tar")


def test_without_the_library_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    code = (
        "import sys; sys.modules['datasets'] = None\n"
        "from pathlib import Path\n"
        "from finetrainers.config.sections import DataSection\n"
        "from finetrainers.data.reading.items import DataError, read_dataset\n"
        f"data = DataSection(dataset_file=Path({str(tmp_path)!r}) / 'a.parquet')\n"
        "try:\n    read_dataset(data, media_dir=Path('m'))\n"
        "except DataError as error:\n    print(error.kind, error)\n"
        "del sys.modules['datasets']\n"
        "import finetrainers.data.inspect.survey\n"
        "print('LOADED', 'datasets' in sys.modules)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.startswith("not_installed ")
    assert "`datasets`" in result.stdout
    assert "LOADED False" in result.stdout


@pytest.fixture
def parquet(tmp_path: Path, make_image) -> Path:
    """Three rows: a video as bytes, an image as the library writes it, and nothing."""
    pytest.importorskip("datasets")
    import pyarrow
    import pyarrow.parquet

    image = make_image(tmp_path / "grey.png").read_bytes()
    rows = {
        "video": [
            {"bytes": b"....ftypisom", "path": None}, {"bytes": image, "path": "grey.png"},
            {"bytes": b"?", "path": None},
        ],
        "text": ["first", "second", "third"],
        "score": [1.5, 2.5, 3.5],
        "depth": [bytes(1000), bytes(9), b""],
    }  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "rows-0.parquet")
    return tmp_path


def test_parquet_rows_are_unpacked(parquet: Path) -> None:
    found = read(parquet, "rows-*.parquet")
    *usable, skipped = found.items
    assert skipped.unusable is not None
    assert skipped.unusable.status == "skipped"
    assert [(item.path.suffix, item.kind, item.caption, item.extra) for item in usable] == [
        (".mp4", "video", "first", {"score": 1.5, "depth": "<1000 bytes>"}),
        (".png", "image", "second", {"score": 2.5, "depth": "<9 bytes>"}),
    ]  # fmt: skip
    assert found.items[0].path == parquet / "media" / media(b"....ftypisom", ".mp4")
    [warning] = found.warnings
    assert warning.startswith("1 ")
    assert warning.endswith(f"{skipped.unusable.reason}: {parquet}/rows-*.parquet row 2")
    assert len(read(parquet, "rows-0.parquet", max_items=1).items) == 1
    with refused("not_found", "rows-0.parquet: ", "'caption'", ": video, text, score, depth", error=DataError):
        read(parquet, "rows-0.parquet", caption_column="caption")
    (parquet / "broken.parquet").write_bytes(b"PAR1 no")
    with refused("unreadable", parquet / "broken.parquet", "`datasets`", error=DataError):
        read(parquet, "broken.parquet")


def test_paths_in_parquet_stay_below_the_root(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "a.mp4").write_bytes(b"x")
    (tmp_path.parent / "outside.mp4").write_bytes(b"x")
    rows = {"video": ["a.mp4", "../outside.mp4"], "text": ["a", "b"]}
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "p.parquet")
    found = read(tmp_path, "p.parquet")
    assert [(item.name, item.unusable and item.unusable.status) for item in found.items] == [
        ("a.mp4", None), ("../outside.mp4", "outside_root"),
    ]  # fmt: skip


def test_rows_open_no_place_of_their_own_choice(tmp_path: Path) -> None:
    """Neither files of this machine nor other servers: a row is whatever the author of the dataset wrote."""
    cache, root = tmp_path / "cache", tmp_path / "root"
    for file in (cache / "a.mp4", root / "b.mp4", tmp_path / "secret.mp4"):
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"x")
    for folder in (cache, root, tmp_path):
        with zipfile.ZipFile(folder / "z.zip", "w") as archive:
            archive.writestr("in.mp4", b"zipped")
    columns, media_folder = Columns(DataSection()), unpacked.MediaFolder(tmp_path)
    of_hub = hub._Reader(columns, media_folder, local=None, downloads=[Root(cache)])
    of_folder = hub._Reader(columns, media_folder, local=Root(root), downloads=[])

    def taken(reader: hub._Reader, path: str) -> str:
        sample = reader.sample("row", {"video": {"path": path, "bytes": None}, "text": "x"})
        return str(sample.refused or sample.stored or sample.media)

    zipped = media(b"zipped", ".mp4")
    assert taken(of_hub, str(cache / "a.mp4")) == str(cache / "a.mp4")
    assert taken(of_hub, f"zip://in.mp4::{cache}/z.zip") == zipped
    assert taken(of_folder, "b.mp4") == "b.mp4"
    assert taken(of_folder, f"zip://in.mp4::{root}/z.zip") == zipped
    for path in (
        "file:///etc/passwd", f"zip://in.mp4::{tmp_path}/z.zip", f"zip://in.mp4::file://{tmp_path}/z.zip",
        "http://host/a.mp4",
        "https://huggingface.co.evil/a.mp4", "file:///etc/passwd::hf://datasets/x", "ssh://host/a.mp4",
        "memory://a.mp4",
    ):  # fmt: skip
        for reader in (of_hub, of_folder):
            assert taken(reader, path).startswith("its media "), path
    assert "--allow_outside" in taken(of_hub, str(tmp_path / "secret.mp4"))
    assert taken(of_folder, "hf://datasets/x/a.mp4").startswith("its media ")


@pytest.mark.parametrize("builder", ["imagefolder", "videofolder"])
def test_folders_of_the_library_are_read_where_they_are(
    tmp_path: Path, make_image, builder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    column, suffix = ("image", ".png") if builder == "imagefolder" else ("video", ".mp4")
    folder = tmp_path / "folder"
    for name in ("a", "b"):
        make_image(folder / f"{name}.png")
        if suffix == ".mp4":
            (folder / f"{name}.png").rename(folder / f"{name}.mp4")
    records = [{"file_name": f"{name}{suffix}", "text": f"of {name}", "fps": 8} for name in "ab"]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, records)))
    monkeypatch.chdir(tmp_path)
    data = DataSection(hf_dataset=builder, data_root=Path("folder"), video_column=column)
    found = read_dataset(data, media_dir=tmp_path / "media")
    # The library gives whole paths, but names do not depend on where the dataset lies.
    assert [(item.name, item.caption, item.extra) for item in found.items] == [
        (f"a{suffix}", "of a", {"fps": 8}), (f"b{suffix}", "of b", {"fps": 8}),
    ]  # fmt: skip
    assert all(item.path.parent == Path("folder") for item in found.items)
    records[0]["text"] = "another caption"
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, records)))
    assert read_dataset(data, media_dir=tmp_path / "media").items[0].caption == "another caption"
