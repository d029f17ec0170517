"""Small helpers: seeds, atomic files, text, videos."""

import errno
import os
import re
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from finetrainers.draw.contact_sheet import Strip, contact_sheet
from finetrainers.utils import device, files
from finetrainers.utils.files import sweep_unfinished, unfinished_path
from finetrainers.utils.seeding import derive_seed, generator
from finetrainers.utils.text import duration, nearest, plural
from finetrainers.utils.video import evenly_spaced, slug, write_mp4


def test_seeds_are_pinned_distinct_and_fit_a_generator():
    assert derive_seed(42, "noise", 0, 7) == 2776219553725432291
    seeds = {derive_seed(42, purpose, e, i) for purpose in ("a", "b") for e in range(20) for i in range(20)}
    assert len(seeds) == 800
    assert derive_seed(1, 23) != derive_seed(12, 3)
    assert torch.equal(
        torch.randn(3, generator=generator("cpu", 1, "x")), torch.randn(3, generator=generator("cpu", 1, "x"))
    )


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "state.json"
    files.write_json_atomic(path, {"step": 1})

    def fail(_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        files.write_json_atomic(path, {"step": 2})
    assert path.read_text() == '{\n  "step": 1\n}\n'


def test_jsonl_is_appended(tmp_path, monkeypatch):
    path = tmp_path / "m.jsonl"
    files.append_jsonl(path, {"a": 1})
    files.append_jsonl(path, {"a": 2})
    assert path.read_text() == '{"a": 1}\n{"a": 2}\n'
    path.write_text('{"a": 1}\n{"a":')  # a kill cut the line short
    files.append_jsonl(path, {"a": 3})
    assert path.read_text() == '{"a": 1}\n{"a":\n{"a": 3}\n'
    path.rename(tmp_path / "m.jsonl.1")  # while the run goes on
    files.append_jsonl(path, {"a": 4})
    assert path.read_text() == '{"a": 4}\n'
    monkeypatch.setattr(os, "write", lambda descriptor, data: len(data) - 1)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        files.append_jsonl(path, {"a": 5})


def test_nearest_and_plural():
    assert nearest("batch_siz", ["batch_size", "rank"]).endswith(" 'batch_size'?")
    assert nearest("zzz", ["a", "b"]).endswith(": a, b")
    assert nearest("zzz", [str(i) for i in range(20)]) == ""
    assert (plural(1, "clip"), plural(2, "clip")) == ("1 clip", "2 clips")


def test_durations():
    seconds = (-3, 0, 0.04, 0.38, 7.2, 9.7, 45, 89, 720, 12240, 400_000)
    shown = ["0 s", "0 s", "0.04 s", "0.4 s", "7 s", "10 s", "45 s", "89 s", "12 min", "3.4 h", "5 d"]
    assert [duration(each) for each in seconds] == shown


def test_slugs_are_file_names():
    assert slug("A cat, 3/4 view: ../../etc!") == "a-cat-3-4-view-etc"
    assert slug("???") == "empty"
    assert len(slug("x" * 100)) == 40


def test_mp4_keeps_frames_size_and_rate(tmp_path):
    frames = np.stack([np.full((33, 48, 3), 20 * k, np.uint8) for k in range(7)])
    write_mp4(tmp_path / "out" / "v.mp4", frames, fps=29.97)
    with av.open(str(tmp_path / "out" / "v.mp4")) as container:
        stream = container.streams.video[0]
        decoded = [f.to_ndarray(format="rgb24") for f in container.decode(stream)]
        assert (stream.width, stream.height) == (48, 32)
        assert float(stream.average_rate) == pytest.approx(29.97, abs=0.01)
    assert len(decoded) == 7
    assert np.abs(decoded[5].astype(int) - 100).max() < 6


def test_processes_may_write_the_same_clip_at_once(tmp_path, monkeypatch):
    """Those that share samples keep the same clips of a rollout: neither takes the other's unfinished file away."""
    path, pixels, others = tmp_path / "best.mp4", np.full((100, 32, 48, 3), 100, np.uint8), []

    class Frames:
        shape = pixels.shape

        def __iter__(self):
            for number, frame in enumerate(pixels):
                if number == 99:  # most packets are in the file by now
                    with monkeypatch.context() as patch:
                        patch.setattr(os, "getpid", lambda: -1)
                        write_mp4(path, pixels, fps=8)
                        others.append(path.stat().st_size)
                yield frame

    write_mp4(path, Frames(), fps=8)
    assert others == [path.stat().st_size]
    with av.open(str(path)) as container:
        assert sum(1 for _ in container.decode(video=0)) == 100
    assert [file.name for file in tmp_path.iterdir()] == ["best.mp4"]
    with pytest.raises(ValueError):
        write_mp4(path, np.zeros((1, 32, 48, 5), np.uint8), fps=8)
    assert [file.name for file in tmp_path.iterdir()] == ["best.mp4"]


def test_frames_are_spaced_evenly_where_they_can_be():
    assert [evenly_spaced(count, 8) for count in (1, 5, 9, 17, 49, 12)] == [
        [0], [0, 1, 2, 3, 4], [0, 2, 4, 6, 8], [0, 4, 8, 12, 16], [0, 8, 16, 24, 32, 40, 48], [0, 2, 3, 5, 6, 8, 9, 11]
    ]  # fmt: skip


def test_a_contact_sheet_has_gutters_and_fits_a_page():
    frames = np.stack([np.full((32, 40, 3), 10 * k, np.uint8) for k in range(17)])
    small = np.asarray(contact_sheet([("a heading\npaler", [Strip.of("", frames), Strip.of("", frames + 80)])]))
    # Enlarged by a whole factor, with white between frames and rows.
    assert small.shape[1] == 5 * 120 + 4 * 4 + 2 * 12
    rows = [y for y in range(small.shape[0]) if small[y, 12 + 119, 0] == 0]
    assert len(rows) == 96
    middle = small[rows[50], 12:-12, 0]
    assert [middle[124 * k + 60] for k in range(5)] == [0, 40, 80, 120, 160]
    assert all((middle[124 * k + 120 : 124 * (k + 1)] == 214).all() for k in range(4))
    assert (small[rows[-1] + 1 : rows[-1] + 5, 12 + 60] == 214).all()
    assert small[rows[-1] + 5, 12 + 60, 0] == 80
    # Large frames are made smaller, and letters grow with the sheet, which is shown smaller.
    large = np.asarray(contact_sheet([("a heading", [Strip.of("step 20", np.full((9, 480, 832, 3), 200, np.uint8))])]))
    assert 2000 < large.shape[1] < 2300
    heights = [
        np.ptp(np.flatnonzero((sheet[: y - 4, :, 0] < 75).any(1))) for sheet, y in ((small, rows[0]), (large, 70))
    ]
    assert heights[1] > 1.5 * heights[0]


@pytest.mark.parametrize(
    ("build", "signs", "environment", "expected"),
    [
        ("2.13.0", ["/dev/nvidiactl"], {}, "cuda"),
        ("2.13.0+cu130", ["/dev/dxg"], {}, "cuda"),  # WSL2 has no other sign
        ("2.13.0", [], {}, "cpu"),
        ("2.13.0+cpu", ["/dev/nvidiactl"], {}, "cpu"),
        ("2.13.0", ["/dev/nvidiactl"], {"CUDA_VISIBLE_DEVICES": ""}, "cpu"),
        ("2.13.0", ["/dev/nvidiactl"], {"CUDA_VISIBLE_DEVICES": "0"}, "cuda"),
        ("2.13.0", ["/dev/nvidiactl"], {"ACCELERATE_USE_CPU": "True"}, "cpu"),
    ],
)
def test_the_guess_of_the_device(build, signs, environment, expected, monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(device, "version", lambda _: build)
    monkeypatch.setattr(device.Path, "exists", lambda path: str(path) in signs)
    assert device.likely_device_type() == expected


def test_a_gpu_that_torch_cannot_use_is_a_problem(monkeypatch):
    """With a driver that is too old, say, torch says that there is no GPU, and a run would be one on the CPU."""

    reason = "The NVIDIA driver is too old (found version 11040)"

    def refuse():
        raise RuntimeError(f"{reason}. Please update it.")

    monkeypatch.setattr(device, "likely_device_type", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    problem = device.device_problem()
    assert f": {reason}. Update" in problem
    assert "ACCELERATE_USE_CPU=true" in problem
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device.device_problem() is None
    monkeypatch.setattr(device, "likely_device_type", lambda: "cpu")
    assert device.device_problem() is None


@pytest.mark.parametrize(
    ("path", "folder", "names"),
    [
        ("clipz", True, ["clipz", "{here}", "clips"]),
        ("clips/sup/x", True, ["sup", "{here}/clips", "clips/sub"]),
        ("{here}/clips/sup", True, ["sup", "{here}/clips", "{here}/clips/sub"]),
        ("/nowhere-at-all/x", True, ["nowhere-at-all", "/"]),
        ("table.cvs", False, ["table.cvs", "{here}", "table.csv"]),
        ("table.cvs", True, ["table.cvs", "{here}"]),
        ("table.csv", True, ["."]),
        ("clips", False, []),
        ("C:\\Users\\me", True, ["/mnt/c/Users/me"]),
    ],
)
def test_a_path_that_leads_nowhere(tmp_path, monkeypatch, path, folder, names):
    (tmp_path / "clips" / "sub").mkdir(parents=True)
    (tmp_path / "table.csv").touch()
    monkeypatch.chdir(tmp_path)
    problem = files.missing_path_problem(Path(path.format(here=tmp_path)), folder=folder)
    assert re.findall("'(.*?)'", problem) == [name.format(here=tmp_path) for name in names]


def test_only_regular_files_are_opened(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    with files.open_regular(tmp_path / "file") as file:
        assert file.read() == b"content"
    os.mkfifo(tmp_path / "pipe")
    for name, kind in (("pipe", "a named pipe"), ("/dev/zero", "a device"), (".", "a directory")):
        with pytest.raises(OSError, match=kind) as raised:
            files.open_regular(tmp_path / name)
        assert (raised.value.errno, raised.value.filename) == (errno.EINVAL, str(tmp_path / name))


def test_unfinished_files_of_killed_processes_are_swept(tmp_path: Path) -> None:
    """Not those of living processes, nor new ones of other machines; what was being replaced is restored."""
    replaced = [unfinished_path(tmp_path / name, "replaced") for name in ("a", "b")]
    for folder in replaced:
        folder.mkdir()
    (tmp_path / "b").mkdir()
    mine, group = unfinished_path(tmp_path / "x.json"), unfinished_path(tmp_path / "x").name.split(".")[2].split("-")[0]
    others = [tmp_path / f".{name}.000000-7.tmp" for name in ("new", "old")]
    dead = [tmp_path / f".dead.{group}-999999999{suffix}" for suffix in (".tmp", ".tmp.mp4", "-3.tmp")]
    earlier = {".x.1.tmp", ".a b.mp4.71.unfinished.mp4", ".0.pt.unfinished"}  # versions
    for path in (mine, *others, *dead, *(tmp_path / name for name in (*earlier, ".env", ".step-1.tmp"))):
        path.write_text("")
    os.utime(others[1], (0, 0))
    sweep_unfinished(tmp_path)  # this process lives
    gone = {others[1].name, *(path.name for path in dead)}
    left = {path.name for path in (*replaced, mine, others[0])}
    assert mine != unfinished_path(tmp_path / "x.json"), "threads may write one file at the same time"
    assert {path.name for path in tmp_path.iterdir()} == left | earlier | {"b", ".env", ".step-1.tmp"}
    assert not gone & left
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))  # before this process: of an earlier one with its number
    sweep_unfinished(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", ".env", ".step-1.tmp"}
    sweep_unfinished(tmp_path / "none")
