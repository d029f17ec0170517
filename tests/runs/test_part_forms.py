"""Every object that a host passes to `train`, in its most natural forms: each is seen to have its effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import LTXVideoTransformer3DModel
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from finetrainers import Callback, Reward, TrainState, load_config, train
from finetrainers.methods.sft import SFT
from finetrainers.utils.reading import read_jsonl


class Half(SFT):
    """Half of the loss."""

    def loss(self, transformer: Any, batch: Any) -> Any:
        loss, metrics = super().loss(transformer, batch)
        return loss / 2, {**metrics, "half": loss.detach() / 2}


class Absolute(SFT):
    """An error of 7 for every element."""

    def element_loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        return (prediction - target) * 0 + 7


class Blind(SFT):
    """Targets of zero."""

    def element_loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        return (prediction * 0).square()


class Network(LTXVideoTransformer3DModel):
    """A subclass, which counts its calls."""

    calls = 0

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        Network.calls += 1
        return super().forward(*arguments, **keywords)


def momentum(weights: list[nn.Parameter]) -> Optimizer:
    return SGD(weights, lr=0.5, momentum=0.25)


class Rate:
    """A schedule as an object."""

    def __call__(self, step: int) -> np.float64:
        return np.float64(0.2) / (step + 1)


class Dataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows as a dataset of PyTorch."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        return row(index)


class See(Callback):
    """Sees the optimizer, its rates and the network of a run."""

    def __init__(self) -> None:
        self.rates, self.seen = list[float](), dict[str, Any]()

    def on_start(self, state: TrainState) -> None:
        weights = dict(state.transformer.named_parameters())
        self.seen["mark"] = next(weight for name, weight in weights.items() if "time_embed.linear.bias" in name)[
            0
        ].item()

    def on_gradients(self, state: TrainState) -> None:
        [group] = state.optimizer.param_groups
        self.rates.append(float(group["lr"]))
        self.seen["settings"] = {name: group.get(name) for name in ("betas", "momentum")}

    def on_step(self, state: TrainState) -> dict[str, Any]:
        return {"seen": torch.tensor(state.step)}


class Other(Callback):
    def on_step(self, state: TrainState) -> dict[str, Any]:
        return {"other": 3}


def row(index: int) -> dict[str, Any]:
    return {"video": np.full((9, 64, 64, 3), 40 * index, np.uint8), "caption": f"a wall {index}"}


def rows() -> Iterator[dict[str, Any]]:
    yield from (row(index) for index in range(2))


FORMS: list[dict[str, Any]] = [
    {"optimizer": partial(AdamW, lr=0.02, betas=(0.7, 0.8)), "method": Half, "data": [row(0)]},
    {"optimizer": momentum, "method": Absolute, "data": rows},
    {
        "optimizer": lambda weights: AdamW(weights, betas=(0.6, 0.7)),
        "lr_at": Rate(),
        "method": Blind,
        "data": Dataset(),
    },
]  # fmt: skip


@pytest.mark.parametrize("form", range(3))
def test_every_object_has_its_effect(options: Callable[..., dict], form: int) -> None:
    values = options(train_steps=2, checkpointing_steps=0)
    del values["data_root"], values["lr"]
    see, parts = See(), dict(FORMS[form])
    callbacks: Sequence[Callback] = ([see], (see, Other()), [Other(), see])[form]
    network = (LTXVideoTransformer3DModel, Network, LTXVideoTransformer3DModel)[form].from_pretrained(
        values["pretrained_model_name_or_path"], subfolder="transformer"
    )
    nn.init.constant_(network.time_embed.linear.bias, form + 0.5)
    calls = Network.calls
    parts["data"] = parts["data"]() if form == 1 else parts["data"]
    result = train(load_config(**values), network=network, callbacks=callbacks, **parts)

    assert see.rates == ([0.02] * 2, [0.5] * 2, [0.2, 0.1])[form]
    betas, factor = ((0.7, 0.8), None, (0.6, 0.7))[form], (None, 0.25, None)[form]
    assert see.seen["settings"] == {"betas": betas, "momentum": factor}
    assert see.seen["mark"] == form + 0.5
    assert (Network.calls > calls) == (form == 1)
    assert [record["seen"] for record in result.metrics if "seen" in record] == [1, 2]
    assert len([record for record in result.metrics if "other" in record]) == (0, 2, 2)[form]
    losses = [record for record in result.metrics if "loss" in record]
    assert [record["lr"] for record in losses] == see.rates
    if form == 0:
        assert [record["half"] for record in losses] == pytest.approx([record["loss"] / 2 for record in losses])
    elif form == 1:
        assert [record["loss"] for record in losses] == [7, 7]
    else:
        assert [record["loss"] for record in losses] == [0, 0]
    names = [item["name"] for item in read_jsonl(result.run_dir / "manifest.jsonl")[0]]
    assert names == [f"data[{index}]" for index in range(form + 1)]


def test_every_reward_has_its_effect(tiny_repo: Callable[..., Path], tmp_path: Path) -> None:
    class Level(Reward):
        def __init__(self, level: float = 4.0) -> None:
            self.level = level

        def score(self, videos: Tensor, prompts: Sequence[str], *, fps: float) -> dict[str, Any]:
            return {"score": [self.level] * len(prompts)}

    class Judge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(5.0))

        def forward(self, videos: Tensor, prompts: Sequence[str]) -> Tensor:
            return self.weight.expand(len(prompts))

    async def later(videos: Tensor, prompts: Sequence[str]) -> np.ndarray:
        return np.full(len(prompts), 6.0, np.float32)

    config = load_config(
        method="grpo", pretrained_model_name_or_path=tiny_repo("ltx_video"), rollout_size="1x64x64", num_generations=2,
        prompts_per_step=2, batch_size=4, sampling_steps=3, train_steps=1, transformer_dtype="fp32", vae_dtype="fp32",
        text_encoder_dtype="fp32", output_dir=tmp_path / "run",
    )  # fmt: skip
    rewards: dict[str, Any] = {
        "function": lambda videos, prompts: [len(prompt) for prompt in prompts], "later": later, "class": Level,
        "instance": Level(4.5), "module": Judge(),
    }  # fmt: skip
    prompts: Any = ({"prompt": "a ball"}, "a cat ")  # of 6 and, without the space, of 5 letters
    [record] = [r for r in train(config, prompts=prompts, rewards=rewards).metrics if "rollout" in r]
    means = {name.removeprefix("reward/"): value for name, value in record.items() if name.startswith("reward/")}
    assert means == {"function": 5.5, "later": 6, "class": 4, "instance": 4.5, "module": 5}
