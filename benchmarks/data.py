"""How fast data reaches the network.

    OMP_NUM_THREADS=1 python benchmarks/data.py            everything, in minutes
    OMP_NUM_THREADS=1 python benchmarks/data.py --decode   frames of a clip, against decoding and resizing all of it
    OMP_NUM_THREADS=1 python benchmarks/data.py --range    49 consecutive frames, against a plain read by PyAV
    OMP_NUM_THREADS=1 python benchmarks/data.py --check    checking files, and a start with 100,000 known ones
    OMP_NUM_THREADS=1 python benchmarks/data.py --wait     how long steps wait for their batches (data_cache.py)
    OMP_NUM_THREADS=1 python benchmarks/data.py --startup  a start with a cache of 100 000 entries (data_cache.py)
    OMP_NUM_THREADS=1 python benchmarks/data.py --fill     filling the cache, against a plain loop (data_fill.py)
    OMP_NUM_THREADS=1 python benchmarks/data.py --memory   what is held after each of ten epochs (data_memory.py)

Each part prints a table; ratios are between ways that took turns in one process. The scripts in brackets have the sizes
as flags.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout need not be installed

import av  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from finetrainers.data.buckets.buckets import cover_size  # noqa: E402
from finetrainers.data.buckets.clip import Clip  # noqa: E402
from finetrainers.data.buckets.frames import Selection, select_frames  # noqa: E402
from finetrainers.data.inspect.probe import probe  # noqa: E402
from finetrainers.data.video.backends import backend_problem  # noqa: E402
from finetrainers.data.video.decode import load_clip, read_frames, resize  # noqa: E402
from finetrainers.data.video.pyav import PyavReader  # noqa: E402
from finetrainers.demo.clips import video_folder  # noqa: E402

#: Parts that have scripts of their own: script, its arguments, what it measures.
OTHERS: dict[str, tuple[str, list[str], str]] = {
    "check": ("data_check", [], "how fast files are checked, and a start with many known ones"),
    "wait": ("data_cache", ["--wait"], "how long steps wait for their batches"),
    "startup": ("data_cache", ["--startup"], "a start with a large cache"),
    "fill": ("data_fill", [], "how long filling the cache takes"),
    "memory": ("data_memory", [], "what is held after each epoch"),
}
#: Decoding what is wanted should be this much faster than decoding and resizing everything.
TARGET_DECODE = 3.0
#: Of a plain read of consecutive frames, reading a clip should take at most this much of the CPU and wall time; and so
#: many MB in all, of a process that does nothing else.
TARGET_RANGE, TARGET_TOTAL = 1.05, 500.0
_SECONDS, _FRAMES, _SIZE = 10, 49, (480, 832)
_RANGE, _RANGE_SIZE = range(100, 149), (512, 768)
#: Which frames: name, rate, selection. None: the clip's own rate.
_CUTS: tuple[tuple[str, float | None, Selection], ...] = (
    ("49 frames of the middle, 25 fps", None, "middle"),
    ("49 frames of the middle, 8 fps (6 s)", 8.0, "middle"),
    ("49 frames of all 10 s (`uniform`)", None, "uniform"),
)


# ---- decoding --------------------------------------------------------------------------------------------------


@dataclass
class Way:
    """One way of getting the wanted frames, and the CPU and wall seconds that it took each time."""

    name: str
    run: Callable[[Path, Sequence[int], int, int], Tensor]
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    def measure(self, path: Path, indices: Sequence[int], height: int, width: int) -> Tensor:
        """The frames, and how long they took."""
        cpu, wall = time.process_time(), time.perf_counter()
        frames = self.run(path, indices, height, width)
        self.cpu.append(time.process_time() - cpu)
        self.wall.append(time.perf_counter() - wall)
        return frames


def everything(path: Path, indices: Sequence[int], height: int, width: int) -> Tensor:
    """Every frame is decoded, then every frame is resized, and then the wanted ones are taken."""
    resized = [resize(frame, height, width) for frame in _all_frames(path)]
    return torch.stack([resized[index] for index in indices])


def resized_last(path: Path, indices: Sequence[int], height: int, width: int) -> Tensor:
    """Every frame is decoded, and the wanted ones are resized."""
    frames = _all_frames(path)
    return torch.stack([resize(frames[index], height, width) for index in indices])


def by_pyav(path: Path, indices: Sequence[int], height: int, width: int) -> Tensor:
    """The wanted frames are decoded and resized one by one."""
    return read_frames(path, indices, height=height, width=width, backend="pyav")


def decoded_only(path: Path, indices: Sequence[int], height: int, width: int) -> Tensor:
    """The wanted frames and those that they may refer to are decoded, and nothing is done with them: what cannot be
    saved."""
    with closing(PyavReader(path)) as reader:
        count = sum(1 for _ in reader._select(sorted(set(indices))))
    return torch.tensor(count)


def by_decord(path: Path, indices: Sequence[int], height: int, width: int) -> Tensor:
    """The same by decord."""
    return read_frames(path, indices, height=height, width=width, backend="decord")


def by_torchcodec(path: Path, indices: Sequence[int], height: int, width: int) -> Tensor:
    """The same by torchcodec."""
    return read_frames(path, indices, height=height, width=width, backend="torchcodec")


_WAYS: dict[str, Callable[[Path, Sequence[int], int, int], Tensor]] = {
    "all frames, all resized afterwards": everything,
    "all frames, 49 resized afterwards": resized_last,
    "pyav": by_pyav,
    "decord": by_decord,
    "torchcodec": by_torchcodec,
}


def decode(directory: Path, *, repeats: int) -> bool:
    """Compare the ways on ten seconds of 720p; whether the default backend reaches the aim for frames that lie
    together."""
    path = write_clip(directory / "clip.mp4")
    found = probe(path)
    height, width = cover_size(found.height, found.width, *_SIZE)
    there = {name: run for name, run in _WAYS.items() if name not in ("decord", "torchcodec") or usable(name)}
    ratios = []
    bounds = []
    print(
        f"{found.frames} frames of {found.width}x{found.height}, H.264, {found.fps:g} fps; resized to {width}x{height}"
    )
    for cut, fps, mode in _CUTS:
        indices, _ = select_frames(found.frames, source_fps=found.fps, fps=fps or found.fps, length=_FRAMES, mode=mode)
        ways = [Way(name, run) for name, run in there.items()]
        alone = Way("pyav, decoding alone", decoded_only)
        for _ in range(repeats):
            pictures = [way.measure(path, indices, height, width) for way in ways]
            alone.measure(path, indices, height, width)
            if not all(torch.equal(pictures[0], other) for other in pictures[1:]):
                sys.exit(f"the ways do not give the same frames: {cut}")
        slowest = statistics.median(ways[0].cpu)
        print(f"\n{cut}\n\n| way | CPU s | wall s | times as fast (CPU) | memory MB |\n|---|---|---|---|---|")
        for way in ways:
            cpu, wall = statistics.median(way.cpu), statistics.median(way.wall)
            memory = peak_memory(way.name, path, indices, height, width)
            print(f"| {way.name} | {cpu:.2f} | {wall:.2f} | {slowest / cpu:.1f} | {memory:.0f} |", flush=True)
            if way.name == "pyav":
                ratios.append(slowest / cpu)
        cpu = statistics.median(alone.cpu)
        bounds.append(slowest / cpu)
        print(f"| {alone.name} | {cpu:.2f} | {statistics.median(alone.wall):.2f} | {slowest / cpu:.1f} | |", flush=True)
    print(f"\naim: {TARGET_DECODE:g} times as fast; pyav gives {', '.join(f'{r:.1f}' for r in ratios)}")
    print(f"if pictures were converted and resized in no time: {', '.join(f'{r:.1f}' for r in bounds)}")
    return ratios[0] >= TARGET_DECODE


def usable(backend: str) -> bool:
    """Whether a backend is there; says so if not."""
    problem = backend_problem(backend)
    if problem is not None:
        print(f"without {backend}: {problem}")
    return problem is None


def write_clip(path: Path) -> Path:
    """Ten seconds of 720p: a real clip forwards, backwards and forwards again, with x264's default settings."""
    with av.open(str(video_folder() / "bigbuckbunny.mp4")) as container:
        frames = [frame.to_ndarray(format="yuv420p") for frame in container.decode(video=0)]
    order = [*range(len(frames)), *reversed(range(len(frames) - 1))]
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=25)
        stream.width, stream.height, stream.pix_fmt = 1280, 720, "yuv420p"
        for place in range(_SECONDS * 25):
            picture = av.VideoFrame.from_ndarray(frames[order[place % len(order)]], format="yuv420p")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return path


def peak_memory(name: str, path: Path, indices: Sequence[int], height: int, width: int) -> float:
    """MB by which a process that does nothing else grows at most."""
    return peaks(name, path, indices, height, width)[0]


def peaks(name: str, path: Path, indices: Sequence[int], height: int, width: int) -> tuple[float, float]:
    """MB by which a process that does nothing else grows at most, and what it has then, its imports included."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_grown, (name, path, indices, height, width))


def _grown(name: str, path: Path, indices: Sequence[int], height: int, width: int) -> tuple[float, float]:
    torch.set_num_threads(1)
    if name in ("decord", "torchcodec"):
        backend_problem(name)  # its libraries are not counted
    before = _memory("VmRSS")
    (_WAYS | _RANGE_WAYS)[name](path, indices, height, width)
    return _memory("VmHWM") - before, _memory("VmHWM")


def _memory(field: str) -> float:
    """MB of this process: now (`VmRSS`) or at most so far (`VmHWM`). `getrusage` would count the parent's, too."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1e3


def _all_frames(path: Path) -> list[Tensor]:
    with av.open(str(path)) as container:
        container.streams.video[0].thread_type = "SLICE"
        return [torch.from_numpy(np.asarray(f.to_ndarray(format="rgb24"))) for f in container.decode(video=0)]


# ---- consecutive frames ----------------------------------------------------------------------------------------


def as_a_clip(path: Path, indices: Sequence[int], height: int, width: int) -> Tensor:
    """What training reads: consecutive frames, resized to cover the bucket and cropped, `[3, T, H, W]`."""
    clip = Clip(0, path, "", "video", (len(indices), height, width), 25.0, 250, 25.0, 1280, 720, start=indices[0])
    return load_clip(clip, generator=torch.Generator())


def plainly(path: Path, indices: Sequence[int], height: int, width: int, *, threads: str | None = None) -> Tensor:
    """The same without care for memory: PyAV seeks and decodes, frames are kept as they are stored, and resized
    together."""
    frames = []
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        if threads is not None:
            stream.thread_type = threads
        container.seek(round(indices[0] / 25 / stream.time_base), stream=stream)
        for frame in container.decode(stream):
            number = round(frame.time * 25)
            if number > indices[-1]:
                break
            if number >= indices[0]:
                frames.append(frame.to_ndarray(format="rgb24"))
    video = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)
    full = cover_size(720, 1280, height, width)
    video = F.interpolate(video, size=full, mode="bicubic", antialias=True)
    top, left = (full[0] - height) // 2, (full[1] - width) // 2
    return video[:, :, top : top + height, left : left + width].transpose(0, 1)


_RANGE_WAYS: dict[str, Callable[[Path, Sequence[int], int, int], Tensor]] = {
    "reading a clip": as_a_clip,
    "plain PyAV": plainly,
    "plain PyAV, frame threads": partial(plainly, threads="AUTO"),
}


def consecutive(directory: Path, *, repeats: int) -> bool:
    """Compare reading a clip with a plain read of the same frames; whether time and memory reach the aims."""
    path = write_clip(directory / "clip.mp4")
    ways = [Way(name, run) for name, run in _RANGE_WAYS.items()]
    for _ in range(repeats):
        pictures = [way.measure(path, _RANGE, *_RANGE_SIZE) for way in ways]
        if not all(torch.equal(pictures[0], other) for other in pictures[1:]):
            sys.exit("the ways do not give the same frames")
    print(f"frames {_RANGE[0]} to {_RANGE[-1]} of 1280x720, H.264, resized to 910x512 and cropped to 768x512\n")
    print("| way | CPU s | wall s | CPU, ratio | wall, ratio | MB more | MB in all |\n|---|---|---|---|---|---|---|")
    reached = True
    for way in ways:
        cpu, wall = (statistics.median(times) for times in (way.cpu, way.wall))
        ratios = [
            statistics.median(a / b for a, b in zip(getattr(ways[0], kind), getattr(way, kind), strict=True))
            for kind in ("cpu", "wall")
        ]
        grown, peak = peaks(way.name, path, _RANGE, *_RANGE_SIZE)
        shown = " | ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"| {way.name} | {cpu:.2f} | {wall:.2f} | {shown} | {grown:.0f} | {peak:.0f} |", flush=True)
        reached &= max(ratios) <= TARGET_RANGE and (way is not ways[0] or peak <= TARGET_TOTAL)
    print(f"\nratios are of reading a clip to each; aim: at most {TARGET_RANGE:g}, and {TARGET_TOTAL:.0f} MB in all")
    return reached


# ---- command ---------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    """Run the parts that were asked for and print them; exit with 1 if one misses its aim."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decode", action="store_true", help="frames of a clip against decoding all of it")
    parser.add_argument("--range", action="store_true", help="consecutive frames against a plain read by PyAV")
    for part, (script, _, what) in OTHERS.items():
        parser.add_argument(f"--{part}", action="store_true", help=f"{what} ({script}.py)")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each way, for --decode and --range [5]")
    options = parser.parse_args(argv)
    parts = [part for part in ("decode", "range", *OTHERS) if getattr(options, part)]
    parts = parts or ["decode", "range", *OTHERS]
    machine = platform.processor() or platform.machine()
    print(
        f"{machine}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads, torch {torch.__version__}, PyAV "
        f"{av.__version__}\n"
    )
    reached = True
    for part, measure in (("decode", decode), ("range", consecutive)):
        if part in parts:
            with tempfile.TemporaryDirectory() as directory:
                reached &= measure(Path(directory), repeats=options.repeats)
    sys.path.insert(0, str(Path(__file__).parent))
    for part in parts:
        if part in OTHERS:
            script, arguments, _ = OTHERS[part]
            print(f"\n{script}.py {' '.join(arguments)}\n", flush=True)
            reached &= importlib.import_module(script).main(arguments) == 0
    sys.exit(0 if reached else 1)


if __name__ == "__main__":
    main()
