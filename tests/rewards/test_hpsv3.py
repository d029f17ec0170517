"""HPSv3 against the same network written by hand in float64, on a tiny random checkpoint in the published layout."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image
from refusals import refused
from safetensors.torch import save_file
from torch import Tensor

from finetrainers.config.rewards import RewardEntry, parse_reward
from finetrainers.rewards.hpsv3 import MARK, QUESTION, HPSv3
from finetrainers.rewards.registry import reward_problems


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tiny = _load("tiny_qwen2vl")

PROMPTS = ["a dog runs", "a red ball that is far away from the small blue house and moves slowly to the left"]
WORDS = QUESTION + " ".join(PROMPTS)


class Published:
    """A tiny checkpoint in the layout of MizzenAI/HPSv3: one file, with the head as `rm_head.0`, `.3`, `.5`."""

    def __init__(self, root: Path) -> None:
        generator = torch.Generator().manual_seed(0)
        self.base = root / "base"
        state = tiny.write_base(self.base, WORDS, generator=generator, marks=1)
        rows = len(tiny.tokenizer_of(WORDS)) + 1
        embeddings = state["language_model.embed_tokens.weight"][:rows].clone()
        self.state = {**state, "language_model.embed_tokens.weight": embeddings}
        sizes = {"0": (1024, 32), "3": (16, 1024), "5": (2, 16)}
        self.head = {f"{i}.weight": tiny.random_weight(size, generator) for i, size in sizes.items()}
        self.head |= {f"{i}.bias": torch.randn(size[0], generator=generator) for i, size in sizes.items()}
        self.file = root / "HPSv3.safetensors"
        save_file(
            {
                **{tiny.hub_name(name): tensor for name, tensor in self.state.items()},
                **{f"rm_head.{name}": tensor for name, tensor in self.head.items()},
                "lm_head.weight": embeddings.clone(),
            },
            self.file,
        )

    def preference(self, frame: Tensor, prompt: str) -> float:
        """By hand: of a frame `[3, H, W]` that has the size of the network's input already."""
        mean, std = (
            torch.tensor([0.48145466, 0.4578275, 0.40821073]),
            torch.tensor([0.26862954, 0.26130258, 0.27577711]),
        )
        pixels = ((frame * 255).round() / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
        tokenizer = tiny.tokenizer_of(WORDS)
        tokenizer.add_special_tokens({"extra_special_tokens": [*tiny.SPECIAL, MARK]})
        ids = tokenizer(
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
            + "<|image_pad|>" * (frame.shape[1] // 28 * frame.shape[2] // 28)
            + f"<|vision_end|>{QUESTION.format(text_prompt=prompt)}<|im_end|>\n<|im_start|>assistant\n"
        )["input_ids"]
        image_token = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        states = tiny.Reference(self.state).states(ids, image_token, torch.stack([pixels, pixels]))
        x = states[ids.index(tokenizer.convert_tokens_to_ids(MARK))]
        head = {name: tensor.double() for name, tensor in self.head.items()}
        x = (head["0.weight"] @ x + head["0.bias"]).clamp(min=0)
        x = (head["3.weight"] @ x + head["3.bias"]).clamp(min=0)
        return float((head["5.weight"] @ x + head["5.bias"])[0])


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(tmp_path_factory.mktemp("hpsv3"))


@pytest.fixture(scope="module")
def reward(published: Published) -> HPSv3:
    return HPSv3(path=str(published.file), base=str(published.base), frames=2, device="cpu", dtype="fp32")


@pytest.fixture(scope="module")
def videos() -> Tensor:
    """Clips `[2, 3, 3, 448, 448]`, 448 being the one size that is not resized."""
    generator = torch.Generator().manual_seed(1)
    small = torch.rand(6, 3, 9, 9, generator=generator)
    return torch.nn.functional.interpolate(small, (448, 448), mode="bilinear").view(2, 3, 3, 448, 448)


def test_scores_are_those_of_the_network_written_by_hand(published: Published, reward: HPSv3, videos: Tensor) -> None:
    """Two of three frames are the first and the last; a clip's score is their mean; prompts differ in length."""
    wanted = torch.tensor(
        [
            (published.preference(clip[0], prompt) + published.preference(clip[2], prompt)) / 2
            for clip, prompt in zip(videos, PROMPTS, strict=True)
        ]
    )
    found = reward.score(videos, PROMPTS, fps=8)["score"]
    assert found.dtype == torch.float32
    assert (found - wanted).abs().max() < 1e-4
    assert (wanted[0] - wanted[1]).abs() > 0.01


def test_prompt_and_own_clip_decide(reward: HPSv3, videos: Tensor) -> None:
    together = reward.score(videos, PROMPTS, fps=8)["score"]
    assert torch.equal(together, reward.score(videos, PROMPTS, fps=24)["score"])
    alone = reward.score(videos[:1], PROMPTS[:1], fps=8)["score"]
    assert torch.allclose(together[:1], alone, atol=1e-4)
    assert (alone - reward.score(videos[:1], PROMPTS[1:], fps=8)["score"]).abs() > 0.01


def test_frames_are_resized_as_pil_resizes_them(reward: HPSv3) -> None:
    """Whatever their size, to about 448x448 pixels of their shape."""
    images = torch.randint(0, 256, (1, 3, 96, 160), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    patches, grids = reward.patches(images)
    assert grids.tolist() == [[1, 26, 42]]  # ceil(96 * beta / 28), beta = sqrt(448^2 / (96 * 160)), in patches of 14
    resized = Image.fromarray(images[0].permute(1, 2, 0).numpy()).resize((42 * 14, 26 * 14), Image.Resampling.BICUBIC)
    # The first patch, its two frames equal; the first rows of 14 pixels of red.
    first = patches[0].view(3, 2, 14, 14)
    assert torch.equal(first[:, 0], first[:, 1])
    red = first[0, 0] * 0.26862954 + 0.48145466
    wanted = torch.tensor([[resized.getpixel((x, y))[0] for x in range(14)] for y in range(14)]) / 255
    assert (red - wanted).abs().max() < 1.5 / 255
    assert (red - wanted).abs().mean() < 0.1 / 255


def test_the_question_as_the_network_reads_it(reward: HPSv3) -> None:
    tokens = reward.judge.tokens(["a dog runs"], grid=torch.tensor([1, 2, 4]))
    assert reward.judge.tokenizer.decode(tokens[0], clean_up_tokenization_spaces=False) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        "<|vision_start|><|image_pad|><|image_pad|><|vision_end|>"
        + QUESTION.replace("{text_prompt}", "a dog runs")
        + "<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "Textual prompt - {text_prompt}\n\n\n\nPlease provide" in QUESTION
    assert [len(line) - len(line.rstrip()) for line in QUESTION.splitlines() if line != line.rstrip()] == [1, 2, 1, 2]


def test_what_is_refused(published: Published, reward: HPSv3, videos: Tensor, tmp_path: Path) -> None:
    with refused("invalid", f"{MARK} occurs 2"):
        reward.score(videos[:1], [f"a dog {MARK}"], fps=8)
    with refused("not_found", tmp_path, "HPSv3.safetensors"):
        HPSv3(path=str(tmp_path), base=str(published.base), device="cpu")
    save_file({"rm_head.weight": torch.zeros(3, 32)}, tmp_path / "HPSv3.safetensors")
    with refused("mismatch", tmp_path / "HPSv3.safetensors", "Missing key"):
        HPSv3(path=str(tmp_path), base=str(published.base), device="cpu")
    assert reward_problems(RewardEntry(**parse_reward("hpsv3=0.5,path=some/x,base=some/y,frames=2"))) == []
