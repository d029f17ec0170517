"""Samples by the command, with the frames that they were written from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetrainers.cli.main import main
from finetrainers.sampling import run


@pytest.fixture
def sample(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, dict[str, np.ndarray]]]:
    """`sample("RUN", ...)`: exit code, and the frames of every new clip by the name of its file."""
    frames: dict[str, np.ndarray] = {}
    write = run.write_mp4

    def keep(path: Path, clip: np.ndarray, **more: Any) -> None:
        frames[path.name] = clip
        write(path, clip, **more)

    monkeypatch.setattr(run, "write_mp4", keep)

    def start(*arguments: object) -> tuple[int, dict[str, np.ndarray]]:
        frames.clear()
        return main(["sample", *map(str, arguments)]), dict(frames)

    return start
