"""Mutated files: whatever is in one, the answer is a usable result or a named reason, and never another exception.

    python tests/data/fuzz.py --media 50000 --tables 50000 --seed 1

does by hand what `test_fuzz.py` does with fewer files. FOLDER/at names the last file, in case one ends the process;
`--only NUMBER` makes a single one of them, and keeps it.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import random
import tarfile
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

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

R = TypeVar("R")
E = TypeVar("E", bound=Exception)

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
MEDIA_SUFFIXES_MADE = {row[0] for row in _VIDEOS} | {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
_MUXERS = {".m4v": "mp4", ".m2ts": "mpegts", ".wmv": "asf"}
_SOUND = {"aac": 1024, "mp2": 1152, "libopus": 960}
_FRAMES = 8
_MOST_PIXELS = 1e8  # above which a file is not decoded here; `max_pixels` is the same of a run
#: Numbers that sizes and counts are often not checked for.
_EDGES = [
    bytes.fromhex(x) for x in ("00000000", "ffffffff", "7fffffff", "80000000", "00000001", "ffffff7f", "01000000")
]


@dataclass
class Report:
    """What came of the files.

    Attributes:
        outcomes: how many were usable, and how many had each reason, by container.
        violations: other exceptions, and answers that are none.
        slowest_s: the longest time of this process for one file, and which.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    slowest_s: tuple[float, str] = (0.0, "")

    def try_one(self, name: str, act: Callable[[], str]) -> None:
        """Count what `act` says of a file."""
        started = time.process_time()
        try:
            self.outcomes[act()] += 1
        except Exception as error:
            self.violations.append(f"{name}: {type(error).__name__}: {error}")
        self.slowest_s = max(self.slowest_s, (time.process_time() - started, name))


def mutated(content: bytes, rng: random.Random) -> bytes:
    """A file with one to eight faults, most of them near its beginning or its end, where headers and indexes are."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        size = len(data)
        if not size:
            break
        at = rng.choice((rng.randrange(size), rng.randrange(min(size, 600)), size - 1 - rng.randrange(min(size, 1200))))
        length = rng.choice((1, 4, 16, 64, 300))
        other = rng.randrange(size)
        match rng.randrange(9):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.randrange(256)
            case 2:
                data[at : at + 4] = rng.choice(_EDGES)
            case 3:
                del data[at:]
            case 4:
                del data[at : at + length]
            case 5:
                data[at:at] = rng.randbytes(length)
            case 6:
                data[at : at + length] = bytes(min(length, size - at))
            case 7:
                data[at:at] = data[other : other + length]
            case _:
                data[at : at + length] = data[other : other + length]
    return bytes(data)


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


def try_media(path: Path, *, draw: int) -> str:
    """What becomes of a file: probed as for a check, decoded as for training, and by turns as a whole or for a page."""
    kind = "image" if path.suffix in IMAGE_SUFFIXES else "video"
    found = _refused_as(InvalidSampleError, lambda: probe(path, kind=kind))
    if isinstance(found, InvalidSampleError):
        assert found.status in STATUSES, found.status
        return f"{path.suffix}: {found.status}"
    assert found.frames > 0, found
    assert min(found.width, found.height) > 0, found
    assert kind == "image" or 0 < found.fps <= 1000, found
    long, short = max(found.width, found.height), min(found.width, found.height)
    if found.frames * long * short > _MOST_PIXELS or long > 500 * short:
        return f"{path.suffix}: too_large"
    length = min(found.frames, 5)
    clip = Clip(
        0, path, "", kind, (length, 16, 16), found.fps, found.frames, found.fps, found.width, found.height,
        is_variable=found.is_variable,
    )  # fmt: skip
    if draw % 4 == 0:
        full = answer(decode_task, (str(path), kind, found.frames))
        assert isinstance(full, (tuple, Lost)) or full.reason.strip(), full
    elif draw % 4 == 1:
        assert isinstance(
            answer(thumbnail_task, (str(path), kind, (found.height, found.width), 24)), (tuple, Lost, type(None))
        )
    pixels = _refused_as(InvalidSampleError, lambda: load_clip(clip, generator=torch.Generator().manual_seed(draw)))
    if isinstance(pixels, InvalidSampleError):
        assert str(path) in str(pixels), pixels
        return f"{path.suffix}: not decoded"
    assert pixels.shape == (3, length, 16, 16), pixels.shape
    assert pixels.dtype == torch.uint8, pixels.dtype
    return f"{path.suffix}: usable"


def _refused_as(kind: type[E], act: Callable[[], R]) -> R | E:
    """The result, or the one error that there may be, which says something."""
    try:
        return act()
    except kind as error:
        refusal = error
    assert str(refusal).strip(), "a reason without words"
    return refusal


def fuzz_media(folder: Path, *, count: int, seed: int, only: int | None = None) -> Report:
    """Mutate every kind of media file in turn; first each as it was written."""
    report = Report()
    sources = make_media(folder)
    contents = [path.read_bytes() for path in sources]
    for number in range(count) if only is None else [only]:
        (folder / "at").write_text(str(number))
        source = sources[number % len(sources)]
        content = contents[number % len(sources)]
        path = source.with_stem("mutated")
        path.write_bytes(mutated(content, random.Random(f"{seed}/{number}")) if number >= len(sources) else content)
        report.try_one(f"{source.name} number {number}", lambda path=path, number=number: try_media(path, draw=number))
    return report


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


def try_table(name: str, options: dict[str, object], media: Path) -> str:
    """What becomes of a dataset."""
    readings = _refused_as(DataError, lambda: read_all(read_datasets(DataSection(**options)), media))
    if isinstance(readings, DataError):
        named = (Path(name).name, "unusable datasets")  # by their names
        assert any(text in str(readings) for text in named), f"{name} is not named by: {readings}"
        return f"{name}: refused"
    items = [item for reading in readings for item in reading.items]
    for item in items:
        assert item.unusable is None or item.unusable.status in STATUSES, item
        for caption in item.captions:
            caption.encode()
    return f"{name}: {'usable' if items and all(item.unusable is None for item in items) else 'items refused'}"


def try_memory(folder: Path) -> str:
    """Whether what was remembered of files is known still; it stops nothing."""
    memory = FileFacts.for_dataset(folder, folder)
    file = folder / "a.mp4"
    known = memory.lookup(file, file.stat())
    if known.header is not None:
        assert isinstance(known.header, InvalidSample) or (type(known.header.frames), type(known.header.fps)) == (
            int,
            float,
        ), known
        assert isinstance(known.full, InvalidSample) or set(known.full or ()) <= {"black", "still"}, known
    return f"memory: {'usable' if known.header else 'forgotten'}"


def fuzz_tables(folder: Path, *, count: int, seed: int, only: int | None = None) -> Report:
    """Mutate metadata of every form in turn, and what this program remembers of files; first each as it was written."""
    report = Report()
    cases = make_tables(folder)
    contents = {name: (folder / name).read_bytes() for name in cases}
    memory = FileFacts.for_dataset(folder, folder)
    memory.store(folder / "a.mp4", (folder / "a.mp4").stat(), Facts(Probe(9, 8.0, 48, 32, 1.1), ("still",)))
    [remembered] = memory.directory.glob("*.log")
    names = [*cases, "journal", "memory"]
    media = folder / "media"
    for number in range(count) if only is None else [only]:
        (folder / "at").write_text(str(number))
        rng, name = random.Random(f"{seed}/{number}"), names[number % len(names)]
        is_whole = number < len(names)
        if name == "memory":
            content = contents.setdefault(name, remembered.read_bytes())
            remembered.write_bytes(content if is_whole else mutated(content, rng))
            report.try_one(f"{name} number {number}", lambda: try_memory(folder))
            continue
        source = "t.tar" if name == "journal" else name
        path = folder / source
        if name == "journal":  # what an earlier start has unpacked
            read_all(read_datasets(DataSection(dataset_file=path)), media)
            [written] = [file for file in (media / "journals").glob("*.jsonl") if b"t.tar/a" in file.read_bytes()[:99]]
            written.write_bytes(written.read_bytes() if is_whole else mutated(written.read_bytes(), rng))
        else:
            path.write_bytes(contents[name] if is_whole else mutated(contents[name], rng))
        report.try_one(f"{name} number {number}", lambda source=source: try_table(source, cases[source], media))
        path.write_bytes(contents[source])
        for journal in (media / "journals").glob("*.jsonl"):
            journal.unlink()
    return report


def main() -> None:
    """Print a report as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--media", type=int, default=0)
    parser.add_argument("--tables", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="fuzz-"))
    warnings.simplefilter("ignore")  # PIL warns of much that it finds
    torch.set_num_threads(1)
    started = time.process_time()
    reports = {}
    for name, fuzz, count in (("media", fuzz_media, given.media), ("tables", fuzz_tables, given.tables)):
        (folder / name).mkdir(parents=True)
        if count:
            reports[name] = fuzz(folder / name, count=count, seed=given.seed, only=given.only).__dict__
    print(json.dumps({**reports, "cpu_s": time.process_time() - started, "folder": str(folder)}, indent=1))


if __name__ == "__main__":
    main()
