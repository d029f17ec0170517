"""Whole runs over sliding windows."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from every_family import FAMILIES, short_clip

from finetrainers.config.flags import parse_flags
from finetrainers.runs.training import train

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.rotating
@pytest.mark.parametrize("family", FAMILIES)
def test_every_window_is_seen_once_in_an_epoch(
    family: str, options: Callable[..., dict], run: Callable[..., Any], make_clips: Callable[..., Path]
) -> None:
    """A clip of three more frames has four windows: two steps of two, and the loss of each is the mean over both."""
    window = short_clip(family)
    finished = run(
        **options(
            family, data_root=str(make_clips(1, frames=window + 3)), video_resolution_buckets=["1000x64x64"],
            sliding_window_size=window, target_fps=8, train_epochs=1, batch_size=2,
        )
        | {"train_steps": None}
    )  # fmt: skip
    assert [record["step"] for record in finished.metrics if "loss" in record] == [1, 2]
    stream = finished.state.method.batches.sampler
    steps = [stream.step(step) for step in (0, 1)]
    assert sorted(clip.start for [batch] in steps for clip in batch.clips) == [0, 1, 2, 3]


@pytest.mark.rotating
def test_the_published_file_trains(
    tiny_repo: Callable[..., Path], make_clips: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """diffusion-pipe's file with its paths replaced; 36 frames give four windows of 33, two of them to a step."""
    clips = make_clips(1, frames=36)
    text = (EXAMPLES / "framepack.toml").read_text().replace("/path/to/HunyuanVideo", str(tiny_repo("hunyuan_video")))
    text = text.replace("/path/to/output", str(tmp_path / "run"))
    sizes = (EXAMPLES / "framepack_dataset.toml").read_text().replace("/path/to/videos", str(clips))
    sizes = sizes.replace("[[572, 720], [640, 640]]", "[[64, 64]]")
    flags = ["--target_fps", "8", "--train_epochs", "1"]
    (tmp_path / "dataset.toml").write_text(sizes)
    text = text.replace("examples/framepack_dataset.toml", str(tmp_path / "dataset.toml"))
    (tmp_path / "main.toml").write_text(text)
    config, _ = parse_flags(["--config", str(tmp_path / "main.toml"), *flags])
    assert config is not None
    assert train(config).step == 2
    assert re.search(r"\b4 .*windows of 33 frames, 1 frame .* 1 clip;", capsys.readouterr().out)
    assert (tmp_path / "run" / "pytorch_lora_weights.safetensors").is_file()


def test_all_windows_of_a_clip_in_one_step(
    options: Callable[..., dict], run: Callable[..., Any], make_clips: Callable[..., Path], tmp_path: Path
) -> None:
    """The step is that of the mean over its clips' windows, cached or not, and resuming changes nothing."""
    given = options(
        "ltx_video", data_root=str(make_clips(3, frames=12)), video_resolution_buckets=["1000x64x64"],
        sliding_window_size=9, sliding_window_batching="clip", target_fps=8, batch_size=2, lr=1e-2,
    )  # fmt: skip
    epochs = {**given, "train_steps": None, "train_epochs": 2, "checkpointing_steps": 1}
    cached = {**epochs, "precompute_conditions": True}
    plain, whole = (
        run(**{**one, "output_dir": str(tmp_path / name)}) for one, name in ((epochs, "plain"), (cached, "cached"))
    )
    assert whole.state.step == 4  # two of 2 and 1 clips each epoch
    for key in ("loss", "grad_norm"):
        assert [record[key] for record in whole.metrics if key in record] == pytest.approx(
            [record[key] for record in plain.metrics if key in record], rel=1e-3
        )
    resumed = run(**{
        **cached, "output_dir": str(tmp_path / "resumed"),
        "resume_from_checkpoint": str(tmp_path / "cached" / "checkpoints" / "step-1"),
    })  # fmt: skip
    assert resumed.steps_done == 3
    assert all(torch.equal(value, resumed.weights[name]) for name, value in whole.weights.items())

    method = plain.state.method
    scale = torch.nn.Parameter(torch.tensor(0.7))
    spec = type("Stub", (), {"__getattr__": lambda _, name: getattr(plain.state.spec, name)})()
    spec.predict = lambda network, x_t, *others: network * x_t
    method.spec = spec
    batches = list(next(iter(method.steps(0, plain.state.transformer))))
    assert [len(batch) for batch in batches] == [2, 2, 2, 2]
    for batch in batches:
        method.loss(scale, batch)[0].backward()
    windows = [method.noise_batch(batch) for batch in batches]
    x_t = torch.cat([one.x_t for one in windows]).double()
    target = torch.cat([method.process.target(one.x0, one.eps, one.t) for one in windows]).double()
    counts = torch.cat([torch.ones_like(one.x_t) * (1 if one.trained is None else one.trained[:, None, :, None, None])
                        for one in windows]).double()  # fmt: skip
    weights = method.noise_levels.weight(torch.cat([one.t for one in windows]))
    weights = torch.ones(8) if weights is None else weights
    errors = (2 * (0.7 * x_t - target) * x_t * counts).flatten(1).sum(1) / counts.flatten(1).sum(1)
    by_hand = (errors * weights.double()).mean()
    assert scale.grad is not None
    assert scale.grad.item() == pytest.approx(by_hand.item(), rel=1e-5)
