"""What training feeds the network of given images, against the first call of the stock pipeline from the same ones."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import diffusers
import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import Image
from torch import Tensor

from finetrainers.config.load import load_config
from finetrainers.models.compiling import unwrap
from finetrainers.models.registry import families
from finetrainers.models.spec import ModelSpec
from finetrainers.utils.addresses import resolve

#: Checkpoints that take images on channels, each with a method. The others are compared with `same_calls`.
FED = [
    ("wan", "i2v", "sft"), ("wan", "flf2v", "sft"), ("wan", "a14b_i2v", "sft"), ("skyreels_v2", "i2v", "sft"),
    ("skyreels_v2", "flf2v", "sft"), ("hunyuan_video_15", "i2v", "sft"), ("cogvideox", "i2v", "sft"),
    ("hunyuan_video", "i2v", "sft"), ("hunyuan_video", "latent_concat", "sft"), ("skyreels_v2", "i2v", "dpo"),
    ("wan", "flf2v", "grpo"), ("hunyuan_video_15", "i2v", "nft"), ("wan", "a14b_i2v", "awm"), ("wan", "i2v", "refl"),
]  # fmt: skip
#: Arguments with the states of an image encoder.
STATES = ("encoder_hidden_states_image", "image_embeds")
FRAMES, PROMPT = 9, "a red ball"


class Reached(Exception):
    """The stock pipeline has called its network."""


def write_clip(path: Path, seed: int, fps: float) -> list[Image.Image]:
    """Write a clip with its caption, and return its frames as they are decoded."""
    pixels = np.random.default_rng(seed).integers(0, 256, (FRAMES, 8, 8, 3), dtype=np.uint8).repeat(8, 1).repeat(8, 2)
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=round(fps))
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for frame in pixels:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())
    path.with_suffix(".txt").write_text(PROMPT)
    with av.open(str(path)) as file:
        return [frame.to_image() for frame in file.decode(video=0)]


def fed(family: str, call: dict[str, Any], channels: int) -> dict[str, Tensor]:
    """Return what a call of the network has of given images: channels `[B, C, T, H, W]`, and states of an encoder."""
    x = call["hidden_states"].transpose(1, 2) if family == "cogvideox" else call["hidden_states"]
    states = {name: call[name] for name in STATES if call.get(name) is not None}
    return {name: tensor.detach().double() for name, tensor in {"channels": x[:, channels:], **states}.items()}


def stock_inputs(pipeline: Any, **inputs: Any) -> dict[str, Any]:
    """Return the arguments of the first call of a pipeline's network; images are encoded to their mean."""
    calls: list[dict[str, Any]] = []

    def stop(_: Any, args: Any, arguments: dict[str, Any]) -> None:
        calls.append(arguments)
        raise Reached

    pipeline.set_progress_bar_config(disable=True)
    if isinstance(pipeline, diffusers.HunyuanVideo15ImageToVideoPipeline):  # whose size is one of a list
        pipeline.video_processor.calculate_default_height_width = lambda **_: (64, 64)
    hook = pipeline.transformer.register_forward_pre_hook(stop, with_kwargs=True)
    size = {"height": 64, "width": 64} if "height" in inspect.signature(pipeline.__call__).parameters else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiagonalGaussianDistribution, "sample", lambda posterior, generator=None: posterior.mode())
        with pytest.raises(Reached):
            pipeline(prompt=PROMPT, num_inference_steps=2, **size, **inputs)
    hook.remove()
    return calls[0]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[ModelSpec]], list[dict[str, Any]]]:
    """`calls(spec)`: arguments of all calls of a family's network."""

    def record(spec: type[ModelSpec]) -> list[dict[str, Any]]:
        recorded: list[dict[str, Any]] = []
        predict = spec.predict

        def predicts(one: Any, network: Any, *inputs: Any) -> Tensor:
            def keep(_: Any, args: Any, arguments: dict[str, Any]) -> None:
                recorded.append(arguments)

            hook = unwrap(network).register_forward_pre_hook(keep, with_kwargs=True)
            try:
                return predict(one, network, *inputs)
            finally:
                hook.remove()

        monkeypatch.setattr(spec, "predict", predicts)
        return recorded

    return record


def work(method: str, folder: Path, frames: list[Image.Image]) -> dict[str, Any]:
    """Return the options of a method that trains on one clip, or samples from its images."""
    if method == "sft":
        return {"data_root": str(folder), "video_resolution_buckets": [f"{FRAMES}x64x64"]}
    if method == "dpo":
        shutil.copy(folder / "0.mp4", folder / "1.mp4")
        row = {"prompt": PROMPT, "chosen": "0.mp4", "rejected": "1.mp4"}
        (folder / "pairs.jsonl").write_text(json.dumps(row))
        return {"dataset_file": str(folder / "pairs.jsonl"), "video_resolution_buckets": [f"{FRAMES}x64x64"]}
    frames[0].save(folder / "first.png")
    frames[-1].save(folder / "last.png")
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": PROMPT, "image": "first.png"}))
    return {
        "prompts": str(folder / "prompts.jsonl"), "reward": ["brightness"], "rollout_size": f"{FRAMES}x64x64",
        "prompts_per_step": 1, "num_generations": 2, "sampling_steps": 6,
    }  # fmt: skip


@pytest.mark.rotating
@pytest.mark.parametrize(("family", "version", "method"), FED)
def test_training_feeds_what_the_pipeline_feeds(
    family: str,
    version: str,
    method: str,
    options: Callable[..., dict],
    run: Callable[..., Any],
    calls: Callable[..., Any],
    tmp_path: Path,
) -> None:
    values = options(family, version=version, train_steps=1, method=method, first_frame_noise=False)
    section = load_config(**values | {"data_root": "x"}).model
    facts = families()[family].facts_of(section)
    (folder := tmp_path / "data").mkdir()
    frames = write_clip(folder / "0.mp4", 1, facts.geometry.fps)
    values |= {"part": [f"{part}=,fp32" for part in facts.clip_parts if part == "image_encoder"]}
    del values["data_root"], values["video_resolution_buckets"]
    values |= work(method, folder, frames)
    if method == "refl" or facts.first_frame_noise is None:
        values.pop("first_frame_noise")
    if facts.last_frame and "prompts" in values:
        row = {"prompt": PROMPT, "image": "first.png", "last_image": "last.png"}
        (folder / "prompts.jsonl").write_text(json.dumps(row))
    if facts.images == "from text" and method == "sft":
        frames[3].save(folder / "1.png")
        (folder / "1.txt").write_text(PROMPT)
        values |= {"image_resolution_buckets": ["64x64"], "train_steps": 2}
    recorded = calls(resolve(families()[family].spec))
    spec = run(**values).state.spec
    channels = spec.latent_channels(spec.transformer_on_meta())

    repository = values["pretrained_model_name_or_path"]
    pipeline = spec.image_pipeline_class.from_pretrained(repository)
    last = {"last_image": frames[-1]} if facts.last_frame else {}
    expected = fed(family, stock_inputs(pipeline, image=frames[0], num_frames=FRAMES, **last), channels)
    clips = [call for call in recorded if fed(family, call, channels)["channels"].shape[2] > 1]
    assert clips
    for call in clips:
        for name, tensor in fed(family, call, channels).items():
            each = 2 if facts.last_frame and name in STATES else 1  # rows of a clip
            rows = expected[name][:each].repeat(len(tensor) // each, *[1] * (tensor.ndim - 1))
            assert rows.any()
            torch.testing.assert_close(tensor, rows, rtol=1e-4, atol=1e-4)

    images = [call for call in recorded if fed(family, call, channels)["channels"].shape[2] == 1]
    assert bool(images) == (facts.images == "from text" and method == "sft")
    for call in images:
        if family == "hunyuan_video_15":  # as its trainer trains images, and its pipeline samples from text
            names = inspect.signature(diffusers.HunyuanVideo15Pipeline.__init__).parameters
            parts = {name: part for name, part in pipeline.components.items() if name in names}
            from_text = diffusers.HunyuanVideo15Pipeline(**parts)
            expected = fed(family, stock_inputs(from_text, num_frames=1), channels)
        else:  # SAT's `diffusion_video.py` drops images to zeros
            expected = {"channels": torch.zeros(1, channels, 1, 8, 8).double()}
        for name, tensor in fed(family, call, channels).items():
            torch.testing.assert_close(tensor, expected[name][:1])
