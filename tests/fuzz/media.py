"""Media and tables of a dataset: a damaged one is usable, or refused with a status."""

from __future__ import annotations

import csv
import io
import json
import tarfile
import zlib
from functools import partial
from pathlib import Path

import av
import numpy as np
import torch
from PIL import Image

from finetrainers.config.sections import DataSection
from finetrainers.data.buckets.clip import Clip
from finetrainers.data.inspect.decode_worker import Lost, answer, decode_task, thumbnail_task
from finetrainers.data.inspect.file_facts import Facts, FileFacts
from finetrainers.data.inspect.probe import Probe, probe
from finetrainers.data.reading.datasets import read_all, read_datasets
from finetrainers.data.reading.items import DataError
from finetrainers.data.reading.sources.rows import IMAGE_SUFFIXES
from finetrainers.data.reading.status import STATUSES, InvalidSample, InvalidSampleError
from finetrainers.data.video.decode import load_clip
from finetrainers.utils.failures import InputError

from .damage import Format
from .harness import Case

#: Container, codec, its pixels, frames a second, sound, and how it is written.
_VIDEOS = [
    (".mp4", "libx264", "yuv420p", 8, "aac", {}),
    (".mp4", "libx265", "yuv420p", 8, "", {"movflags": "faststart"}),
    (".mp4", "mpeg4", "yuv420p", 8, "aac", {"movflags": "frag_keyframe+empty_moov"}),
    (".mov", "mjpeg", "yuvj420p", 8, "", {"movflags": "faststart"}),
    (".m4v", "mpeg4", "yuv420p", 8, "aac", {}),
    (".3gp", "mpeg4", "yuv420p", 8, "", {}),
    (".mkv", "libx264", "yuv420p", 8, "aac", {}),
    (".mkv", "ffv1", "yuv420p", 8, "", {}),
    (".webm", "libvpx", "yuv420p", 8, "", {}),
    (".webm", "libvpx-vp9", "yuv420p", 8, "libopus", {}),
    (".avi", "mpeg4", "yuv420p", 8, "mp2", {}),
    (".avi", "mjpeg", "yuvj420p", 8, "", {}),
    (".mpg", "mpeg2video", "yuv420p", 25, "mp2", {}),
    (".mpeg", "mpeg1video", "yuv420p", 25, "", {}),
    (".ts", "libx264", "yuv420p", 8, "aac", {}),
    (".m2ts", "mpeg2video", "yuv420p", 25, "", {}),
    (".flv", "flv", "yuv420p", 8, "aac", {}),
    (".flv", "libx264", "yuv420p", 8, "", {}),
    (".wmv", "wmv2", "yuv420p", 8, "", {}),
    (".gif", "gif", "rgb8", 8, "", {}),
]
_MUXERS = {".m4v": "mp4", ".m2ts": "mpegts", ".wmv": "asf"}
_SOUND = {"aac": 1024, "mp2": 1152, "libopus": 960}
_FRAMES = 8
_MOST_PIXELS = 1e8  # above which a file is not decoded here; `max_pixels` is the same of a run
_FORMS: dict[str, Format] = {".json": "json", ".jsonl": "jsonl", ".toml": "toml", ".csv": "lines", ".txt": "lines"}


def make_media(folder: Path) -> list[Path]:
    """A few kilobytes in every container, and images."""
    paths = [_make_video(folder / f"{k}{row[0]}", *row) for k, row in enumerate(_VIDEOS)]
    pixels = np.random.default_rng(1).integers(0, 255, (20, 30, 3), dtype=np.uint8)
    picture, exif = Image.fromarray(pixels), Image.Exif()
    exif[0x0112] = 6
    for name, made, kind, options in (
        ("a.png", picture, "PNG", {"exif": exif}),
        ("b.png", picture.convert("P"), "PNG", {}),
        ("c.jpg", picture, "JPEG", {"exif": exif}),
        ("d.jpeg", picture, "JPEG", {"progressive": True}),
        ("e.webp", picture, "WEBP", {"exif": exif}),
        ("f.bmp", picture, "BMP", {}),
        ("g.png", picture, "GIF", {}),
        ("h.bmp", picture, "TIFF", {"compression": "tiff_lzw"}),
    ):
        made.save(folder / name, kind, **options)
        paths.append(folder / name)
    return paths


def _make_video(
    path: Path, suffix: str, codec: str, pixels: str, rate: int, sound: str, options: dict[str, str]
) -> Path:
    # x265 writes beyond its memory for smaller pictures.
    height, width = (64, 64) if codec == "libx265" else (32, 48)
    noise = np.random.default_rng(0).integers(0, 40, (height, width, 3))
    with av.open(str(path), "w", options=options, format=_MUXERS.get(suffix)) as container:
        container.metadata["title"] = "a title: caf\u00e9"
        stream = container.add_stream(
            codec, rate=rate, options={"x265-params": "log-level=none"} if codec == "libx265" else {}
        )
        stream.width, stream.height, stream.pix_fmt = width, height, pixels
        heard = container.add_stream(sound, rate=48000, layout="mono") if sound else None
        for k in range(_FRAMES):
            picture = av.VideoFrame.from_ndarray((noise + 20 * k).astype(np.uint8), format="rgb24")
            container.mux(stream.encode(picture))
            if heard is not None and k < 3:
                silence = np.zeros((1, _SOUND[sound]), np.float32 if heard.format.name == "fltp" else np.int16)
                frame = av.AudioFrame.from_ndarray(silence, format=heard.format.name, layout="mono")
                frame.rate = 48000
                container.mux(heard.encode(frame))
        container.mux(stream.encode())
        if heard is not None:
            container.mux(heard.encode())
    return path


def _expect(condition: bool, message: object) -> None:
    """Assert something about a refusal."""
    assert condition, message


def read_media(path: Path) -> None:
    """Probe a file as for a check, decode it as for training, and by turns as a whole or for a page."""
    draw = zlib.crc32(path.read_bytes())
    kind = "image" if path.suffix in IMAGE_SUFFIXES else "video"
    try:
        facts = probe(path, kind=kind)
    except InvalidSampleError as error:
        _expect(error.status in STATUSES, error.status)
        raise
    assert facts.frames > 0, facts
    assert min(facts.width, facts.height) > 0, facts
    assert kind == "image" or 0 < facts.fps <= 1000, facts
    long, short = max(facts.width, facts.height), min(facts.width, facts.height)
    if facts.frames * long * short > _MOST_PIXELS or long > 500 * short:
        return
    length = min(facts.frames, 5)
    clip = Clip(
        0, path, "", kind, (length, 16, 16), facts.fps, facts.frames, facts.fps, facts.width, facts.height,
        is_variable=facts.is_variable,
    )  # fmt: skip
    if draw % 4 == 0:
        full = answer(decode_task, (str(path), kind, facts.frames))
        assert isinstance(full, (tuple, Lost)) or full.reason.strip(), full
    elif draw % 4 == 1:
        shape = facts.height, facts.width
        assert isinstance(answer(thumbnail_task, (str(path), kind, shape, 24)), (tuple, Lost, type(None)))
    try:
        pixels = load_clip(clip, generator=torch.Generator().manual_seed(draw))
    except InvalidSampleError as error:
        _expect(str(path) in str(error), error)
        raise
    assert pixels.shape == (3, length, 16, 16), pixels.shape
    assert pixels.dtype == torch.uint8, pixels.dtype


def media_cases(directory: Path) -> list[Case]:
    """Write every kind of media; each is read from a copy under another name."""
    return [Case(path.name, path, partial(read_media, path)) for path in make_media(directory)]


def make_tables(folder: Path) -> dict[str, dict[str, object]]:
    """A small dataset in every form, by the name of the file that is mutated, with its options."""
    for name in ("a.mp4", "b.mp4"):
        (folder / name).write_bytes(name.encode())
    captions = ['a dog, that runs along a "beach"', "ein Stra\u00dfenmarkt \U0001f327"]
    records = [{"video": f"{n}.mp4", "text": c, "n": 1.5} for n, c in zip("ab", captions, strict=True)]
    text = io.StringIO()
    writer = csv.DictWriter(text, records[0].keys())
    writer.writeheader()
    writer.writerows(records)
    (folder / "t.csv").write_text(text.getvalue(), encoding="utf-8")
    (folder / "t.json").write_text(json.dumps(records))
    (folder / "t.jsonl").write_text(
        "\n".join(json.dumps(record, ensure_ascii=False) for record in records), encoding="utf-8"
    )
    (folder / "videos.txt").write_text("a.mp4\nb.mp4\n")
    (folder / "prompts.txt").write_text("\n".join(captions), encoding="utf-8")
    sidecars = folder / "sidecars"
    sidecars.mkdir()
    (sidecars / "a.mp4").write_bytes(b"a")
    (sidecars / "a.txt").write_text(captions[1], encoding="utf-8")
    for suffix, mode in ((".tar", "w"), (".tar.gz", "w:gz")):
        with tarfile.open(folder / f"t{suffix}", mode) as archive:
            for record in records:
                for kind, content in (
                    (".mp4", b"media" * 20),
                    (".txt", record["text"].encode()),
                    (".json", b'{"n": 1}'),
                ):  # type: ignore[attr-defined]
                    member = tarfile.TarInfo(record["video"].removesuffix(".mp4") + kind)  # type: ignore[attr-defined]
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    (folder / "d.toml").write_text(
        '[[dataset]]\nname = "one"\ndataset_file = "t.csv"\nnum_repeats = 2\n\n[[dataset]]\ndata_root = "sidecars"\n'
        'video_resolution_buckets = ["9x32x32"]\n'
    )
    lists = {"data_root": folder, "video_column": "videos.txt", "caption_column": "prompts.txt"}
    return {
        **{name: {"dataset_file": folder / name} for name in ("t.csv", "t.json", "t.jsonl", "t.tar", "t.tar.gz")},
        "videos.txt": lists, "prompts.txt": lists, "sidecars/a.txt": {"data_root": sidecars},
        "d.toml": {"dataset": folder / "d.toml"},
    }  # fmt: skip


def read_table(name: str, options: dict[str, object], media: Path) -> None:
    """Read the items of a dataset."""
    for journal in (media / "journals").glob("*.jsonl"):
        journal.unlink()
    _read_items(name, options, media)


def _read_items(name: str, options: dict[str, object], media: Path) -> None:
    try:
        readings = read_all(read_datasets(DataSection(**options)), media)
    except DataError as error:
        names = (Path(name).name, "unusable datasets")  # by their names
        _expect(any(text in str(error) for text in names), f"{name} is not named by: {error}")
        raise
    items = [item for reading in readings for item in reading.items]
    for item in items:
        assert item.unusable is None or item.unusable.status in STATUSES, item
        for caption in item.captions:
            caption.encode()
    if not items or any(item.unusable is not None for item in items):
        raise InputError(f"{name} has items that cannot be used")


def read_facts(folder: Path) -> None:
    """Read what was remembered of a file; it stops nothing."""
    file = folder / "a.mp4"
    known = FileFacts.for_dataset(folder, folder).lookup(file, file.stat())
    if known.header is None:
        raise InputError("nothing is remembered")
    types = (type(known.header.frames), type(known.header.fps)) if isinstance(known.header, Probe) else (int, float)
    assert types == (int, float), known
    assert isinstance(known.full, InvalidSample) or set(known.full or ()) <= {"black", "still"}, known


def table_cases(directory: Path) -> list[Case]:
    """Write metadata in every form, what this program remembers of files, and the journal of an unpacked archive."""
    media = directory / "media"
    cases = []
    for name, options in make_tables(directory).items():
        form = _FORMS.get(Path(name).suffix, "bytes")
        cases.append(Case(name, directory / name, partial(read_table, name, options, media), form))
    memory = FileFacts.for_dataset(directory, directory)
    memory.store(directory / "a.mp4", (directory / "a.mp4").stat(), Facts(Probe(9, 8.0, 48, 32, 1.1), ("still",)))
    [remembered] = memory.directory.glob("*.log")
    archive = {"dataset_file": directory / "t.tar"}
    read_all(read_datasets(DataSection(**archive)), media)
    [journal] = [path for path in (media / "journals").glob("*.jsonl") if b"t.tar/a" in path.read_bytes()[:99]]
    read_journal = partial(_read_items, "t.tar", archive, media)
    return [
        *cases,
        Case("remembered", remembered, partial(read_facts, directory), "lines"),
        Case("journal", journal, read_journal, "jsonl"),
    ]
