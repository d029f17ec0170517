"""Write clips of the little world as an ordinary dataset: mp4 files and `captions.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from finetrainers.utils.files import write_text_atomic
from finetrainers.utils.video import write_mp4

from .world import Pixels, Scene, caption, draw_scene, render

FRAMES, HEIGHT, WIDTH, FPS = 9, 32, 64, 25.0


def write_clips(directory: Path, scenes: Iterable[Scene], *, reword: Callable[[str], str] = str) -> Path:
    """Write one mp4 per scene with a caption in varying words, passed through `reword`; return the metadata file."""
    clips = (
        (f"{index:05d}", render(scene, frames=FRAMES, height=HEIGHT), reword(caption(scene, phrasing=index)))
        for index, scene in enumerate(scenes)
    )
    return write_dataset(directory, clips, fps=FPS)


def write_dataset(directory: Path, clips: Iterable[tuple[str, Pixels, str]], *, fps: float) -> Path:
    """Write clips, each a name, frames `[T, H, W, 3]` and a caption; return the metadata file."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = []
    for name, frames, text in clips:
        write_mp4(directory / f"{name}.mp4", frames, fps=fps)
        lines.append(json.dumps({"video": f"{name}.mp4", "text": text}))
    metadata = directory / "captions.jsonl"
    write_text_atomic(metadata, "\n".join(lines) + "\n")
    return metadata


def training_scenes(items: int, *, seed: int = 0, **only: Any) -> list[Scene]:
    """Draw random scenes of the combinations that may be trained on; `only` restricts them, see `draw_scene`."""
    return [draw_scene(seed, "training", index, **only) for index in range(items)]


def held_out_scenes(items: int, *, seed: int = 0, **only: Any) -> list[Scene]:
    """Draw random scenes of the combinations of color, shape and motion that no training set holds."""
    return [draw_scene(seed, "test", index, held_out=True, **only) for index in range(items)]


def scene_captions(scenes: Iterable[Scene]) -> list[str]:
    """Return captions of scenes, in varying words."""
    return [caption(scene, phrasing=i) for i, scene in enumerate(scenes)]
