"""A run to watch, and the names of the clips that are sampled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetrainers.sampling.run import _Drawing

PROMPTS = ("a red ball", "a blue ball on a hill")


@pytest.fixture
def trained(options: Callable[..., dict], run: Callable[..., Any]) -> Path:
    """A run with two checkpoints."""
    values = options(
        train_steps=2,
        checkpointing_steps=1,
        validation_prompts=":::".join(PROMPTS),
        validation_inference_steps=2,
        seed=5,
        report_to="tensorboard",
    )
    return run(**values).root


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the clips that are sampled."""
    names: list[str] = []
    write = _Drawing._write

    def keep(self: Any, sample: Any, clip: Any, **more: Any) -> None:
        names.append(self.names[sample.key])
        write(self, sample, clip, **more)

    monkeypatch.setattr(_Drawing, "_write", keep)
    return names
