"""A directory as users have it: portrait, landscape and short clips, images, files that cannot be used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from finetrainers.utils.video import write_mp4

#: Name, frames, height and width; one frame is an image.
_FILES = {
    "landscape": (33, 32, 64),
    "wide": (33, 64, 128),
    "portrait": (33, 64, 32),
    "short": (21, 32, 64),
    "photo": (1, 64, 64),
}
CAPTION = 'a "red" ball rolls over grass'


def write_mixed(directory: Path, *, copies: int = 1, images_only: bool = False) -> int:
    """Write the files, each with a caption beside it; return their number."""
    directory.mkdir(parents=True)
    files = {name: size for name, size in _FILES.items() if not images_only or size[0] == 1}
    for copy in range(copies):
        for number, (name, (frames, height, width)) in enumerate(files.items()):
            stem = directory / f"{name}-{copy}"
            rng = np.random.default_rng((copy, number))
            pixels = rng.integers(0, 256, (frames, height // 8, width // 8, 3), dtype=np.uint8)
            pixels = pixels.repeat(8, axis=1).repeat(8, axis=2)
            if frames == 1:
                Image.fromarray(pixels[0]).save(stem.with_suffix(".png"))
            else:
                write_mp4(stem.with_suffix(".mp4"), pixels, fps=24.0)
            stem.with_suffix(".txt").write_text(f"{CAPTION}, {name}")
    return copies * len(files)
