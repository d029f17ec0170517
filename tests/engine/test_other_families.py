"""Whole runs of families that are not in this repository, each with something of its own that `ModelSpec` provides for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from finetrainers.models import family
from finetrainers.models.families import ltx_video
from finetrainers.models.family import Family
from finetrainers.models.ltx_video import LTXVideoSpec


def register(monkeypatch: pytest.MonkeyPatch, **entry: Any) -> None:
    """A family of this name, for one test."""
    known = Family(spec=f"{__name__}:{entry.pop('spec').__name__}", **entry)
    monkeypatch.setattr(family, "_FAMILIES", {**family.families(), known.name: known})


class Continuation(LTXVideoSpec):
    """Predicts what follows a clip's first latent frame, each frame at a noise level of its own."""

    noise_per = "frame"
    calls: list[tuple[tuple[int, ...], Tensor]] = []  # noqa: RUF012

    def section(self, latents: Tensor, generators: Sequence[torch.Generator]) -> tuple[Tensor, dict[str, Tensor]]:
        return latents[:, :, 1:], {"history": latents[:, :, :1]}

    def predict(self, transformer: Any, x: Tensor, t: Tensor, conditions: Any, meta: Any) -> Tensor:
        self.calls.append((tuple(x.shape), t.detach().clone()))
        history = meta.extra["history"]
        clip, times = torch.cat([history, x], dim=2), torch.cat([torch.zeros_like(t[:, :1]), t], dim=1)
        return super().predict(transformer, clip, times, conditions, meta)[:, :, 1:]


def test_a_section_is_trained_with_a_noise_level_for_every_frame(
    options: Callable[..., dict],
    run: Callable[..., Any],
    make_clips: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Continuation, "calls", [])
    register(
        monkeypatch, name="continuation", spec=Continuation, transformer="LTXVideoTransformer3DModel",
        read=lambda configs: replace(ltx_video(configs), first_frame="none"),
    )  # fmt: skip
    done = run(
        **options(
            train_steps=20, batch_size=2, eval_num_items=1, eval_steps=20, validation_prompts=None,
            video_resolution_buckets=["17x64x64"], data_root=str(make_clips(3, frames=17)),
        )
        | {"model_name": "continuation"}
    )  # fmt: skip
    shapes, times = zip(*Continuation.calls, strict=True)
    assert {shape[2:] for shape in shapes} == {(2, 2, 2)}
    drawn = torch.cat([t for t in times if t.shape[0] == 2])
    assert (drawn[:, 0] != drawn[:, 1]).all()
    losses = [row["loss"] for row in done.metrics if "loss" in row]
    assert len(losses) == 20
    [before, *_, after] = [row["eval_loss"] for row in done.metrics if "eval_loss" in row]
    assert after < before
