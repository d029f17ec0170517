"""VideoAlign against the same network written by hand in float64, on a tiny random checkpoint in published layouts."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_qwen2vl as tiny
import torch
from refusals import refused
from tiny_videoalign import ALPHA, PROMPTS, RANK, SETTINGS, Published
from torch import Tensor
from torch.nn.functional import interpolate
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from finetrainers.config.rewards import RewardEntry, parse_reward
from finetrainers.rewards.registry import reward_problems
from finetrainers.rewards.videoalign import MARKS, QUESTION, VideoAlign
from finetrainers.rewards.videoalign_input import added_tokens, fitting_size, frame_indices, to_patches
from finetrainers.utils.failures import Kind, error_kind


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(tmp_path_factory.mktemp("videoreward"))


@pytest.fixture(scope="module")
def reward(published: Published) -> VideoAlign:
    return published.reward()


@pytest.fixture(scope="module")
def videos() -> Tensor:
    """Moving waves, `[3, 17, 3, 40, 72]`."""
    generator = torch.Generator().manual_seed(1)
    phase = torch.rand(3, 1, 3, 1, 1, generator=generator) * 6
    speed = torch.rand(3, 1, 3, 1, 1, generator=generator) * 0.8
    t, y, x = (
        torch.arange(n, dtype=torch.float32).view(s) for n, s in ((17, (-1, 1, 1, 1)), (40, (-1, 1)), (72, (-1,)))
    )
    return 0.5 + 0.5 * torch.sin(phase + speed * t + 0.2 * y + 0.1 * x)


def by_hand(published: Published, video: Tensor, prompt: str, frames: list[int], size: tuple[int, int]) -> list[float]:
    """The three scores of a clip of which these frames are looked at, at this size."""
    pixels = (video[frames] * 255).round()
    pixels = interpolate(pixels, size, mode="bicubic", antialias=True).clamp(0, 255).round() / 255
    mean, std = torch.tensor([0.48145466, 0.4578275, 0.40821073]), torch.tensor([0.26862954, 0.26130258, 0.27577711])
    pixels = (pixels - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    tokenizer = tiny.tokenizer_of(QUESTION + " ".join(PROMPTS))
    tokenizer.add_special_tokens({"extra_special_tokens": [*tiny.SPECIAL, *MARKS]})
    seen = len(frames) // 2 * size[0] // 28 * size[1] // 28
    text = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
        + "<|video_pad|>" * seen + "<|vision_end|>" + QUESTION.format(text_prompt=prompt) + "<|im_end|>\n"
        "<|im_start|>assistant\n"
    )  # fmt: skip
    ids = tokenizer(text)["input_ids"]
    states = tiny.Reference(published.state, published.lora).states(
        ids, tokenizer.convert_tokens_to_ids("<|video_pad|>"), pixels
    )
    return [
        float(states[ids.index(tokenizer.convert_tokens_to_ids(mark))] @ published.head[i].double())
        for i, mark in enumerate(MARKS)
    ]


def values(scores: Any) -> Tensor:
    """Scores `[heads, B]`."""
    assert list(scores) == ["vq", "mq", "ta"]
    assert all(s.dtype == torch.float32 and s.device.type == "cpu" for s in scores.values())
    return torch.stack(list(scores.values()))


def test_scores_are_those_of_the_network_written_by_hand(published: Published, videos: Tensor) -> None:
    """In both layouts; prompts of different lengths in one call, by hand one after the other without padding."""
    # 17 frames at 4 a second are 4.25 s: 8 frames; 40x72 has too few pixels, 252x448 is the next size of its shape.
    frames, size = [0, 2, 5, 7, 9, 11, 14, 16], (252, 448)
    wanted = torch.tensor([by_hand(published, v, p, frames, size) for v, p in zip(videos[:2], PROMPTS, strict=True)]).T
    for path in (published.complete, published.split):
        found = values(published.reward(path=path).score(videos[:2], PROMPTS, fps=4))
        assert (found - wanted).abs().max() < 5e-5
    assert (wanted[:, 0] - wanted[:, 1]).abs().min() > 0.01
    assert wanted.abs().max() > 0.5


def test_loading_leaves_the_random_numbers_alone(published: Published) -> None:
    before = torch.get_rng_state()
    published.reward(path=published.split)
    assert torch.equal(torch.get_rng_state(), before)


def test_newer_names_of_the_same_weights(
    published: Published, reward: VideoAlign, videos: Tensor, tmp_path: Path
) -> None:
    path = published.write(tmp_path / "new", complete=True, new=True)
    found = published.reward(path=path).score(videos[:1], PROMPTS[:1], fps=8)
    assert torch.equal(values(found), values(reward.score(videos[:1], PROMPTS[:1], fps=8)))


def test_only_text_alignment_sees_the_prompt(reward: VideoAlign, videos: Tensor) -> None:
    one, other = (values(reward.score(videos[:1], [prompt], fps=8)) for prompt in PROMPTS)
    assert torch.allclose(one[:2], other[:2], atol=1e-5)
    assert (one[2] - other[2]).abs() > 0.01


def test_a_score_depends_on_its_own_clip_alone(reward: VideoAlign, videos: Tensor) -> None:
    prompts = [*PROMPTS, "x"]
    kept = videos.clone()
    together = values(reward.score(videos, prompts, fps=8))
    apart = torch.cat([values(reward.score(videos[i : i + 1], prompts[i : i + 1], fps=8)) for i in range(3)], dim=1)
    assert torch.allclose(together, apart, atol=1e-5)
    assert torch.equal(together, values(reward.score(videos, prompts, fps=8)))
    assert torch.equal(videos, kept)
    assert (together[:2, 0] - together[:2, 2]).abs().min() > 0.01


def test_frame_rate_decides_what_is_seen(reward: VideoAlign, videos: Tensor) -> None:
    slow, fast = (values(reward.score(videos[:1], PROMPTS[:1], fps=fps)) for fps in (4, 24))
    assert (slow - fast).abs().min() > 1e-3


def test_bf16_is_near_and_head_stays_fp32(published: Published, reward: VideoAlign, videos: Tensor) -> None:
    half = published.reward(dtype="bf16")
    assert half.judge.network.backbone.dtype == torch.bfloat16
    found = values(half.score(videos[:2], PROMPTS, fps=24))
    assert torch.allclose(found, values(reward.score(videos[:2], PROMPTS, fps=24)), atol=0.15)
    assert not torch.equal(found, found.bfloat16().float())


def test_published_normalization() -> None:
    """What the published code computes of raw scores 1: (x - mean) / std, per head."""
    found = [float(head.normalize(torch.tensor(1.0))) for head in VideoAlign.heads.values()]
    assert found == pytest.approx([-1.190469834, -0.119180364, -0.720711755], abs=1e-6)


# ---- what the network is shown -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "fps", "count"),
    # Published: 53 frames are looked at as 14 if they play at 8 a second, as 4 at 24. 5 and 3 frames: only even counts.
    [
        (53, 8, 14),
        (53, 24, 4),
        (16, 16, 4),
        (81, 16, 10),
        (49, 8, 12),
        (5, 8, 4),
        (3, 8, 2),
        (2000, 2, 768),
        (20, 8, 4),
    ],
)
def test_frame_count(total: int, fps: float, count: int) -> None:
    found = frame_indices(total, fps=fps, sample_fps=2.0).tolist()
    assert len(found) == count
    assert (found[0], found[-1]) == (0, total - 1)
    gaps = np.diff(found)
    assert gaps.min() > 0
    assert gaps.max() - gaps.min() <= 1


def test_a_single_frame_is_no_video(reward: VideoAlign, videos: Tensor) -> None:
    with refused("invalid", "1 frame "):
        reward.score(videos[:1, :1], PROMPTS[:1], fps=8)


def test_sizes_are_those_of_qwens_processor() -> None:
    generator = torch.Generator().manual_seed(2)
    for height, width in torch.randint(28, 1400, (300, 2), generator=generator).tolist():
        wanted = smart_resize(height, width, factor=28, min_pixels=100352, max_pixels=200704)
        assert fitting_size(height, width, min_pixels=100352, max_pixels=200704) == wanted
    assert fitting_size(480, 480, min_pixels=100352, max_pixels=200704) == (448, 448)
    with refused("invalid", "4x1000", 200):
        fitting_size(4, 1000, min_pixels=100352, max_pixels=200704)


def test_patches_are_those_of_qwens_processor() -> None:
    image = torch.randint(0, 256, (3, 56, 84), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    processor = Qwen2VLImageProcessorPil(do_resize=False)
    wanted = processor(image.numpy(), input_data_format="channels_first", return_tensors="pt")
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (processor.image_mean, processor.image_std))
    patches, grid = to_patches(((image / 255 - mean) / std).expand(2, -1, -1, -1))
    assert torch.equal(grid[None], wanted["image_grid_thw"])
    assert torch.allclose(patches, wanted["pixel_values"], atol=1e-5)


def test_the_question_as_the_network_reads_it(reward: VideoAlign) -> None:
    tokens = reward.judge.tokens(["a {dog} runs"], grid=torch.tensor([1, 2, 4]))
    text = reward.judge.tokenizer.decode(tokens[0], clean_up_tokenization_spaces=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        "<|vision_start|><|video_pad|><|video_pad|><|vision_end|>"
        + QUESTION.replace("{text_prompt}", "a {dog} runs")
        + "<|im_end|>\n<|im_start|>assistant\n"
    )
    # Blanks at ends of lines belong to the training's text.
    assert [len(line) - len(line.rstrip()) for line in QUESTION.splitlines() if line != line.rstrip()] == [
        2,
        1,
        2,
        2,
        2,
    ]
    assert (
        QUESTION.index(MARKS[0]) < QUESTION.index(MARKS[1]) < QUESTION.index("{text_prompt}") < QUESTION.index(MARKS[2])
    )


# ---- what is refused -----------------------------------------------------------------------------------------------


def test_a_prompt_that_spells_out_a_mark(reward: VideoAlign, videos: Tensor) -> None:
    for token in (MARKS[2], "<|video_pad|>"):
        with refused("invalid", f"{token} occurs"):
            reward.score(videos[:1], [f"a dog {token}"], fps=8)


def test_marks_need_ids_of_their_own() -> None:
    class Deaf:
        """A tokenizer to which every new token is the unknown one."""

        def add_tokens(self, names: list[str], special_tokens: bool) -> None: ...

        def convert_tokens_to_ids(self, names: list[str]) -> list[int]:
            return [0 for _ in names]

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return ["<unk>" for _ in ids]

    for names in (MARKS, MARKS[:1]):
        with refused("duplicate", *names, [0 for _ in names]):
            added_tokens(Deaf(), names)


def test_another_tokenizer_than_in_training(published: Published, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(published.base, base)
    tokenizer = tiny.tokenizer_of(QUESTION + " ".join(PROMPTS))
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(base)
    for path in (published.complete, published.split):
        with refused("mismatch", path, base):
            published.reward(path=path, base=base)


@pytest.mark.parametrize(
    ("section", "name", "value", "kind", "expected"),
    [
        ("data_config", "prompt_template_type", "simple", "unsupported", "'detailed_special'"),
        ("data_config", "num_frames", 8, "unsupported", "None"),
        ("model_config", "output_dim", 1, "unsupported", "3"),
        ("peft_lora_config", "lora_alpha", None, "required", "model_config.json"),
    ],
)
def test_checkpoints_of_another_kind(
    published: Published, tmp_path: Path, section: str, name: str, value: Any, kind: Kind, expected: str
) -> None:
    settings = {**SETTINGS, section: {**SETTINGS[section], name: value}}
    (tmp_path / "model_config.json").write_text(json.dumps(settings))
    with refused(kind, f"{section}.{name}", expected):
        published.reward(path=tmp_path)


def test_rank_stabilised_lora_and_other_constants(
    published: Published, tmp_path: Path, caplog: pytest.LogCaptureFixture, videos: Tensor
) -> None:
    """LoRA's scale is alpha / sqrt(r) then; constants other than the published ones are pointed out."""
    path = tmp_path / "stable"
    shutil.copytree(published.complete, path)
    lora = {"lora_alpha": ALPHA / RANK**0.5, "use_rslora": True}
    settings = {**SETTINGS, "peft_lora_config": lora, "inference_config": {"VQ_mean": 1.0, "MQ_mean": 1.1646}}
    (path / "model_config.json").write_text(json.dumps(settings))
    with caplog.at_level(logging.WARNING):
        found = published.reward(path=path).score(videos[:1], PROMPTS[:1], fps=24)
    assert torch.allclose(values(found), values(published.reward().score(videos[:1], PROMPTS[:1], fps=24)), atol=1e-4)
    for value in ("VQ_mean", "1.0", "3.6757"):
        assert value in caplog.text
    assert "MQ_mean" not in caplog.text


def test_incomplete_checkpoints(published: Published, tmp_path: Path) -> None:
    with refused("not_found", tmp_path, "model_config.json"):
        published.reward(path=tmp_path)
    with refused("unavailable", "'nobody/nothing'"):
        published.reward(path="nobody/nothing")
    with refused("not_found", tmp_path / "missing"):
        published.reward(path=tmp_path / "missing")
    (tmp_path / "model_config.json").write_text(json.dumps(SETTINGS))
    with refused("not_found", tmp_path, "model.pth", "adapter_model.safetensors"):
        published.reward(path=tmp_path)
    with refused("not_found", tmp_path, "config.json", "base="):
        published.reward(base=tmp_path)

    state = published.full_state()
    del state["base_model.model.visual.blocks.0.norm1.bias"]
    torch.save(state, tmp_path / "model.pth")
    with refused("mismatch", tmp_path, "lacks visual.blocks.0.norm1.bias"):
        published.reward(path=tmp_path)
    state = published.full_state()
    state["base_model.model.visual.other"] = torch.zeros(1)
    torch.save(state, tmp_path / "model.pth")
    with refused("mismatch", tmp_path, "has visual.other"):
        published.reward(path=tmp_path)
    state = published.full_state()
    del state["base_model.model.model.layers.0.mlp.up_proj.lora_B.default.weight"]
    torch.save(state, tmp_path / "model.pth")
    with refused("not_found", "LoRA", "language_model.layers.0.mlp.up_proj.weight"):
        published.reward(path=tmp_path)


def test_a_file_that_could_run_code_is_not_loaded(published: Published, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "sprung",)

    (tmp_path / "model_config.json").write_text(json.dumps(SETTINGS))
    torch.save({**published.full_state(), "trap": Trap()}, tmp_path / "model.pth")
    with refused("unsupported", tmp_path / "model.pth"):
        published.reward(path=tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_options_and_heads_in_a_configuration() -> None:
    assert reward_problems(RewardEntry(**parse_reward("videoalign.ta=0.5,path=some/x,base=some/y,dtype=bf16"))) == []
    [error] = reward_problems(RewardEntry(**parse_reward("videoalign")))
    assert error_kind(error) == "required"
    assert "videoalign.vq" in str(error)
