"""Reward finetuning from images: what the network is given, what is sampled and compared, and what is recorded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from plain_replay import compare_with_plain_replay
from torch import Tensor, nn

from finetrainers.cli.cache import _needed_keys
from finetrainers.config.errors import ConfigError
from finetrainers.config.load import load_config
from finetrainers.data.cache.store import TensorCache
from finetrainers.diffusion.policy import transition_mean
from finetrainers.models.registry import families
from finetrainers.models.spec import ModelSpec, PromptEmbeds, VideoMeta
from finetrainers.plan.preflight import preflight
from finetrainers.runs.run import run

#: Of each way in which an image reaches a network, a checkpoint.
FROM_IMAGES = [
    ("ltx_video", None),
    ("hunyuan_video", "i2v"),
    ("hunyuan_video", "token_replace"),
    ("cogvideox", "i2v"),
    ("wan", "i2v"),
    ("skyreels_v2", "i2v"),
]
SIZE = (9, 64, 64)


def likeness(videos: Tensor, prompts: Sequence[str], *, images: Tensor) -> Tensor:
    """How much the last frame is like the image."""
    assert images.shape == (len(videos), 3, *SIZE[1:])
    return -(videos[:, -1] - images).abs().mean((1, 2, 3))


likeness.differentiable = True  # type: ignore[attr-defined]


def stripes(path: Path, number: int, size: tuple[int, int] = (64, 64)) -> Path:
    x = np.arange(size[0] * size[1] * 3, dtype=np.float64).reshape(size[1], size[0], 3)
    Image.fromarray(((np.sin(x * (number + 1) / 40) + 1) * 127).astype(np.uint8)).save(path)
    return path


@pytest.fixture
def options(tiny_repo: Callable[..., Path], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    for number in range(3):
        stripes(tmp_path / f"{number}.png", number)
    rows = [{"prompt": f"pattern number {number}", "image": f"{number}.png"} for number in range(2)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "held.csv").write_text('caption,image\n"a pattern, held out",2.png\n')

    def build(family: str, version: str | None = None, **changes: Any) -> dict[str, Any]:
        values = {
            "method": "grpo", "model_name": family,
            "pretrained_model_name_or_path": str(tiny_repo(family, version=version)),
            "prompts": str(tmp_path / "prompts.jsonl"), "eval_prompts": str(tmp_path / "held.csv"),
            "reward": [f"{__name__}:likeness"], "rollout_size": "x".join(map(str, SIZE)), "prompts_per_step": 2,
            "num_generations": 2, "batch_size": 2, "sampling_steps": 3, "window_range": [0.0, 1.0],
            "transformer_dtype": "fp32", "vae_dtype": "fp32", "optimizer": "adamw", "lr": 1e-3, "rank": 4,
            "lora_alpha": 8, "train_steps": 1, "keep_rollouts": 2, "keep_rollouts_every": 1,
            "output_dir": str(tmp_path / "run"), "precompute_dir": str(tmp_path / "cache"), "logging_steps": 1,
            **changes,
        }  # fmt: skip
        parts = families()[family].facts.parts
        values = {f"{part}_dtype": "fp32" for part in parts if part.startswith("text_encoder")} | values
        return {name: value for name, value in values.items() if value is not None}

    return build


def train(given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    state = run(preflight(load_config(**given)))
    found = [json.loads(line) for line in (Path(given["output_dir"]) / "metrics.jsonl").read_text().splitlines()]
    return state, {name: value for record in found for name, value in record.items()}


class Calls:
    """What the network was given."""

    def __init__(self, spec: type[ModelSpec], monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[Tensor, Tensor, VideoMeta]] = []
        self.encoded = 0
        predict, encode = spec.predict, spec.encode_image

        def predicts(
            one: Any, network: nn.Module, x: Tensor, t: Tensor, texts: PromptEmbeds, meta: VideoMeta
        ) -> Tensor:
            self.found.append((x.detach().clone(), t, meta))
            return predict(one, network, x, t, texts, meta)

        def encodes(one: Any, *given: Any) -> Any:
            self.encoded += 1
            return encode(one, *given)

        monkeypatch.setattr(spec, "predict", predicts)
        monkeypatch.setattr(spec, "encode_image", encodes)


@pytest.fixture
def expected(tmp_path: Path) -> Callable[[Any, Any], list[Tensor]]:
    def build(spec: Any, vae: Any) -> list[Tensor]:
        """The image's latents by the VAE alone."""
        found = []
        for number in range(3):
            pixels = torch.from_numpy(np.array(Image.open(tmp_path / f"{number}.png"))).permute(2, 0, 1)
            with torch.no_grad():
                mean = vae.encode(pixels[None, :, None].float() / 127.5 - 1).latent_dist.mean
            found.append(spec.vae_stats(vae).normalize(mean))
        return found

    return build


def check_density_and_samples(state: Any) -> None:
    """Against the density of whole clips less their given frame, in float64, and diffusers' own loop."""
    method, spec = state.method, state.spec
    collector, sampler, network = method.collector, method.sampler, state.transformer.eval()
    jobs = collector.jobs(0)[:2]
    conditions = collector.source.conditions([job.prompt for job in jobs])
    clean, replays = sampler.rollout(network, jobs, conditions)
    assert clean.shape[2] == sampler.shape[1] == 1
    for row, (job, replay) in enumerate(zip(jobs, replays, strict=True)):
        start, here = conditions.start[row : row + 1], conditions.rows([row])
        for k, step in enumerate(replay.steps.tolist()):
            time = sampler.times[step].reshape(1).float()
            whole = torch.cat([start, replay.before[k][None]], dim=2)
            levels = torch.tensor([[0.0, float(time)]])
            with torch.no_grad():
                prediction = spec.predict(network, whole, levels, here, VideoMeta(fps=torch.tensor([25.0])))
            now = sampler.tables.group_transitions(job.rollout, job.slot).at_steps(torch.tensor([step]), sampler.device)
            mean = transition_mean(sampler.process, prediction, whole, time, now)[:, :, 1:].double()
            std = now.std.double()
            each = -((replay.after[k][None].double() - mean) ** 2) / (2 * std**2) - std.log() - np.log(2 * np.pi) / 2
            assert float(replay.log_old[k]) == pytest.approx(float(each.mean()), abs=1e-5)
    noise = torch.randn(1, *sampler.shape, generator=torch.Generator().manual_seed(3))
    here = conditions.rows([0])
    ours = sampler.clips(sampler.denoise(network, noise, here)[0], here)
    pipeline = spec.pipeline(network, collector.source.vae, spec.load_scheduler(), image_to_video=True)
    pipeline.set_progress_bar_config(disable=True)
    theirs = pipeline(
        image=Image.new("RGB", SIZE[:0:-1]),
        latents=diffusers.LTXPipeline._pack_latents(torch.cat([here.start, noise], dim=2)),
        **dict(here.tensors), num_frames=SIZE[0], height=SIZE[1], width=SIZE[2], num_inference_steps=len(sampler.times),
        guidance_scale=1.0, frame_rate=25, output_type="latent", return_dict=False,
    )[0]  # fmt: skip
    theirs = diffusers.LTXPipeline._unpack_latents(theirs, *ours.shape[2:])
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.rotating
@pytest.mark.parametrize(("family", "version"), FROM_IMAGES)
def test_clips_of_a_prompt_start_from_its_image(
    family: str, version: str | None, options: Any, expected: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = options(family, version)
    spec = families()[family].load(load_config(**given).model)
    calls = Calls(type(spec), monkeypatch)
    state, found = train(given)
    assert found["ratio_error"] == 0.0
    assert {"reward/likeness", "eval_reward/likeness"} <= {name.replace(f"{__name__}:", "") for name in found}
    images = expected(state.spec, spec.load_vae())
    seen = set()
    for x, t, meta in calls.found:
        assert x.shape[2] == state.spec.facts.geometry.latent_shape(*SIZE)[0]
        is_token = state.spec.facts.first_frame == "tokens"
        frames = x[:, :, :1] if is_token else meta.extra["first_frame"]
        which = [
            # On channels there may be a mask before the image's latents, and gray frames after them.
            [i for i, image in enumerate(images) if torch.allclose(frame[-len(image[0]) :, :1], image[0], atol=1e-5)]
            for frame in frames
        ]
        assert all(len(one) == 1 for one in which)
        seen |= {one[0] for one in which}
        if is_token:  # the image is clean, and the network is told so
            assert (t[:, 0] == 0).all()
            assert (t[:, 1:] > 0).all()
        else:
            assert t.shape == (len(x),)
    assert seen == {0, 1, 2}
    assert calls.encoded == 3
    rows = [json.loads(line) for line in (tmp_path / "run/rollouts/step-000001/clips.jsonl").read_text().splitlines()]
    assert {(row["prompt"], Path(row["image"]).name) for row in rows} == {
        (f"pattern number {i}", f"{i}.png") for i in range(2)
    }
    cache = TensorCache(tmp_path / "cache" / "tensors")
    assert cache.indexed() <= _needed_keys(tmp_path / "cache", [tmp_path / "run" / "config.toml"])
    if family == "ltx_video":  # once encoded, images are in the cache
        check_density_and_samples(state)
        train({**given, "output_dir": str(tmp_path / "again")})
        assert calls.encoded == 3


@pytest.mark.rotating
@pytest.mark.parametrize(("family", "version"), FROM_IMAGES)
def test_clips_from_an_image_learn_as_by_plain_replay(
    family: str, version: str | None, options: Any, tmp_path: Path
) -> None:
    given = options(family, version, batch_size=1, reward=["brightness"], eval_prompts=None, sampling_steps=4)

    def gradient(name: str) -> float:
        return train({**given, "output_dir": str(tmp_path / name)})[1]["ratio_error"]

    assert compare_with_plain_replay(gradient) == (0.0, 0.0)


@pytest.mark.rotating
@pytest.mark.parametrize(
    "changes",
    [{"method": "nft", "init_same_noise": False}, {"method": "refl", "draft_k": 2}, {"rollout_cfg": 3.0}],
    ids=["nft", "refl", "grpo"],
)  # fmt: skip
def test_other_ways_to_learn_start_from_images(
    changes: dict[str, Any], options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = options("ltx_video", **changes, eval_prompts=None, keep_rollouts=None)
    calls = Calls(type(families()["ltx_video"].load(load_config(**given).model)), monkeypatch)
    _, found = train(given)
    assert found["grad_norm"] > 0
    for x, t, _ in calls.found:
        assert (t[:, 0] == 0).all()
        assert (t[:, 1:] > 0).all()
        assert len({frame.sum().item() for frame in x[:, :, 0]}) <= 2  # of two prompts


def test_what_cannot_start_from_images_is_refused_before_anything_is_loaded(options: Any, tmp_path: Path) -> None:
    def problems(family: str, version: str | None = None, **changes: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            preflight(load_config(**options(family, version, **changes)))
        return str(caught.value)

    (tmp_path / "none.txt").write_text("a cat\na dog\n")
    (tmp_path / "some.jsonl").write_text('{"prompt": "a cat", "image": "0.png"}\n{"prompt": "a dog"}\n')
    none, some = str(tmp_path / "none.txt"), str(tmp_path / "some.jsonl")
    assert re.search("--prompts: .* image-to-video ", problems("hunyuan_video"))
    said = problems("cogvideox", "i2v", prompts=none, eval_prompts=some)
    assert re.search("--prompts: .* animates ", said)
    assert "none.txt line 1, none.txt line 2 without" in said
    assert "some.jsonl line 2 without" in said
    said = problems("ltx_video", prompts=some)
    assert "--prompts: either all " in said
    assert "some.jsonl line 2 without" in said
    assert "--rollout_size: 1x64x64: " in problems("ltx_video", rollout_size="1x64x64")
    said = problems("ltx_video", prompts=none, eval_prompts=none)
    assert re.search("--reward: .*likeness ", said)
