"""Parts of a run that only Python can give: they are used, recorded, and required again when the run is resumed."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from enum import Enum
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import LTXVideoTransformer3DModel
from peft import LoraConfig
from PIL import Image
from refusals import refused, refused_options
from safetensors.torch import load_file
from torch.optim import SGD

from finetrainers import Callback, TrainState, load_config, train
from finetrainers.config.load import build_config
from finetrainers.methods.base import micro_batch_loss
from finetrainers.methods.sft import SFT
from finetrainers.plan.digests import describe
from finetrainers.plan.parts import CustomParts, equal_parts
from finetrainers.sampling.weights import find_target


class Halved(SFT):
    """SFT with half of the loss."""

    calls = 0

    def loss(self, transformer: Any, batch: Any) -> Any:
        Halved.calls += 1
        loss, metrics = super().loss(transformer, batch)
        return loss / 2, {name: value / 2 for name, value in metrics.items()}


class Reduced(SFT):
    """SFT with a mean where the loss of each element belongs."""

    def element_loss(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (prediction - target).abs().mean()


def lr_at(step: int) -> float:
    return 0.01 * (step + 1)


def test_parts_are_used_recorded_and_required_again(options: Callable[..., dict]) -> None:
    values = options(train_steps=2, checkpointing_steps=0)
    for name in ("rank", "lora_alpha", "lr"):
        del values[name]
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["to_q", "to_k"], rank_pattern={"attn1.to_q": 2})
    sgd = partial(SGD, lr=1.0, momentum=0.9)
    parts: dict[str, Any] = {"lora": lora, "method": Halved, "optimizer": sgd, "lr_at": lr_at}
    result = train(load_config(**values), **parts)
    records = [record for record in result.metrics if "loss" in record]
    assert [record["lr"] for record in records] == [0.01, 0.02]
    assert result.weights is not None
    ranks = {name: len(tensor) for name, tensor in load_file(result.weights).items() if "lora_A" in name}
    assert {rank for name, rank in ranks.items() if "attn1.to_q" in name} == {2}
    assert {rank for name, rank in ranks.items() if "attn1.to_q" not in name} == {4}
    assert Halved.calls == 2
    checkpoint = torch.load(
        next((result.run_dir / "checkpoints").glob("step-2/*optim*")), weights_only=True, map_location="cpu"
    )
    assert "momentum_buffer" in str(checkpoint)

    # The digests are in config.toml, from which the run goes on with equal parts, also for another process.
    config = load_config(result.run_dir / "config.toml", resume_from_checkpoint="latest", train_steps=3)
    assert [part.partition("=")[0] for part in config.run.parts] == list(parts)
    assert (config.training.rank, config.training.target_modules) == (4, ["to_k", "to_q"])
    with refused_options(("--parts", "required"), ("--parts", "required")) as refusal:
        train(config, method=Halved, optimizer=sgd)
    assert "lr_at" in str(refusal.value)
    with refused_options(("--resume_from_checkpoint", "mismatch")) as refusal:
        train(config, **{**parts, "optimizer": partial(SGD, lr=1.0, momentum=0.8)})
    assert "optimizer=torch.optim.sgd:SGD" in str(refusal.value)
    assert train(config, **{**parts, "optimizer": partial(SGD, lr=1.0, momentum=0.9)}).step == 3


def two_groups(weights: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer of two groups that differ in everything."""
    groups = [
        {"params": weights[::2], "lr": 1e-3, "betas": (0.8, 0.9), "weight_decay": 0.3},
        {"params": weights[1::2], "lr": 1e-2, "eps": 1e-3, "amsgrad": True},
    ]
    return torch.optim.AdamW(groups)


class RoundedMomentum(SGD):
    """SGD that keeps its momentum in bf16."""

    def step(self, closure: Any = None) -> Any:
        for values in self.state.values():
            values["momentum_buffer"] = values["momentum_buffer"].float()
        loss = super().step(closure)
        for values in self.state.values():
            values["momentum_buffer"] = values["momentum_buffer"].bfloat16()
        return loss


class Watch(Callback):
    """Stops a run after a step, and keeps the rates of its groups and the types of its optimizer's state."""

    def __init__(self, last: int | None = None) -> None:
        self.last, self.rates, self.dtypes = last, list[list[float]](), set[torch.dtype]()

    def on_gradients(self, state: TrainState) -> None:
        self.rates.append([group["lr"] for group in state.optimizer.param_groups])
        self.dtypes |= {value.dtype for values in state.optimizer.state.values() for value in values.values()}

    def on_log(self, state: TrainState, record: dict[str, float]) -> None:
        if state.step == self.last:
            state.requests.stop = "the test"


@pytest.mark.parametrize("optimizer", [two_groups, partial(RoundedMomentum, lr=0.1, momentum=0.9)])
def test_an_optimizer_keeps_its_rates_and_settings_also_when_resumed(
    optimizer: Any, options: Callable[..., dict], tmp_path: Path
) -> None:
    values = options(train_steps=4, checkpointing_steps=0, lr_scheduler="linear", lr_warmup_steps=0)
    del values["lr"]
    watch, resumed = Watch(), Watch()
    straight = train(load_config(**values), optimizer=optimizer, callbacks=[watch])
    initial = [group["lr"] for group in optimizer([torch.nn.Parameter(torch.zeros(1)) for _ in "ab"]).param_groups]
    assert watch.rates == [[rate * factor for rate in initial] for factor in (1.0, 0.75, 0.5, 0.25)]
    logged = [[r["lr"], *(r[name] for name in r if name.startswith("lr/"))] for r in straight.metrics if "loss" in r]
    assert logged == watch.rates
    assert "\nlr =" not in (straight.run_dir / "config.toml").read_text()

    values["output_dir"] = str(tmp_path / "resumed")
    train(load_config(**values), optimizer=optimizer, callbacks=[Watch(2)])
    again = train(load_config(**values, resume_from_checkpoint="latest"), optimizer=optimizer, callbacks=[resumed])
    assert resumed.rates == watch.rates[2:]
    assert resumed.dtypes == watch.dtypes
    assert straight.weights is not None
    assert again.weights is not None
    expected = load_file(straight.weights)
    assert all(tensor.equal(expected[name]) for name, tensor in load_file(again.weights).items())


def test_parts_that_cannot_be_used_are_refused_before_loading(options: Callable[..., dict]) -> None:
    config = load_config(**options(optimizer="lion", lr_scheduler="cosine"))
    for problems, parts in {
        (("optimizer", "invalid"), ("lr_at", "invalid"), ("method", "invalid"), ("lora", "invalid")): {
            "optimizer": 3, "lr_at": lambda step: "1", "method": Reduced, "lora": {"r": 4},
        },
        (
            ("--optimizer", "conflict"), ("--lr", "conflict"), ("--lr", "conflict"), ("--lr_scheduler", "conflict"),
            ("--rank", "conflict"),
        ): {
            "optimizer": SGD, "lr_at": lr_at, "lora": LoraConfig(r=2, lora_alpha=8),
        },
        (("--optimizer", "conflict"), ("--lr", "conflict")): {"optimizer": SGD},
        (("--lr", "conflict"), ("--lr_scheduler", "conflict")): {"lr_at": lr_at},
        (("lora", "unsupported"), ("lora", "unsupported")): {
            "lora": LoraConfig(init_lora_weights="pissa", modules_to_save=["proj_in"]),
        },
    }.items():  # fmt: skip
        with refused_options(*problems):
            train(config, **parts)  # type: ignore[arg-type]
    values = options(train_steps=1)
    del values["lr"]
    plain = load_config(**values)
    with refused_options(("lr_at", "conflict")):
        train(plain, optimizer=two_groups, lr_at=lr_at)
    for make in (lambda weights: None, lambda weights: SGD(weights[1:], lr=1.0)):
        with refused_options(("optimizer", "invalid")):
            train(plain, optimizer=make)  # type: ignore[arg-type]


@pytest.mark.parametrize("result", [torch.tensor(1.0), (torch.ones(2), {}), (torch.tensor(1.0), {"loss": 1.0})])
def test_what_a_loss_must_return(result: Any) -> None:
    method: Any = SimpleNamespace(loss=lambda network, batch: result)
    with refused("invalid", "loss"):
        micro_batch_loss(method, torch.nn.Identity(), object())
    with refused("invalid", "lr_at(3)"):
        CustomParts(lr_at=lambda step: None).schedule(3)  # type: ignore[arg-type, return-value, misc]


def test_a_network_is_trained_in_a_copy(options: Callable[..., dict], tmp_path: Path) -> None:
    class Counting(LTXVideoTransformer3DModel):
        calls = 0

        def forward(self, *arguments: Any, **keywords: Any) -> Any:
            Counting.calls += 1
            return super().forward(*arguments, **keywords)

    values = options(train_steps=1, checkpointing_steps=0)
    network = Counting.from_pretrained(values["pretrained_model_name_or_path"], subfolder="transformer")
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    plain = train(load_config(**values))
    assert Counting.calls == 0
    values["output_dir"] = str(tmp_path / "custom")
    result = train(load_config(**values), network=network)
    assert Counting.calls > 0
    assert plain.weights is not None
    assert result.weights is not None
    weights, expected = load_file(result.weights), load_file(plain.weights)
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    # Nothing is left on the network, so that it can be trained again.
    assert {*network.state_dict()} == {*before}
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert all(parameter.requires_grad for parameter in network.parameters())
    with refused("unsupported", result.weights):
        result.pipeline()
    with refused_options((result.run_dir, "unsupported")):
        build_config([find_target(str(result.run_dir)).source])

    values["output_dir"] = str(tmp_path / "refused")
    with refused_options(("network", "mismatch")):
        train(load_config(**values, dry_run=True), network=torch.nn.Linear(1, 1))
    network.add_adapter(LoraConfig(target_modules=["to_q"]))
    with refused_options(("network", "conflict")):
        train(load_config(**values), network=network)
    with refused_options(("--export_formats", "conflict")):
        train(load_config(**values, export_formats=["peft"]), network=network)


CONSTANT = 1.0
KINDS = Enum("KINDS", ["A", "B"])


def test_equal_parts_have_equal_fingerprints(monkeypatch: pytest.MonkeyPatch) -> None:
    def schedule(peak: float) -> Callable[[int], float]:
        return lambda step: peak

    assert describe(schedule(0.1)) == describe(schedule(0.1)) != describe(schedule(0.2))
    assert describe(LoraConfig(r=4)) == describe(LoraConfig(r=4)) != describe(LoraConfig(r=8))
    assert describe(partial(SGD, lr=1)) != describe(SGD)

    class Reference:
        def __init__(self, value: float) -> None:
            self.image, self.array, self._calls = torch.full((2, 2), value), np.full(2, value), [object()]

    def closeness(reference: Any) -> Callable[..., Any]:
        return lambda videos, prompts: videos - reference.image

    assert describe(Reference(1.0)) == describe(Reference(1.0)) != describe(Reference(2.0))
    same, other = Reference(1.0), Reference(1.0)
    other.array[1] = 3
    assert describe(closeness(same)) == describe(closeness(Reference(1.0))) != describe(closeness(other))
    itself: list[Any] = []
    itself.append(itself)
    assert describe(itself)
    for first, second in ((Path("a"), Path("b")), (torch.float16, torch.float32), (1j, 2j), (KINDS.A, KINDS.B)):
        assert describe(partial(schedule, first)) != describe(partial(schedule, second))
    networks = [torch.nn.Dropout(p) for p in (0.1, 0.1, 0.2)]
    assert describe(networks[0]) == describe(networks[1]) != describe(networks[2])

    def reads_constant() -> float:
        return CONSTANT

    before = describe(reads_constant)
    monkeypatch.setitem(globals(), "CONSTANT", 2.0)
    assert describe(reads_constant) != before

    def unfinished() -> Any:
        return later

    assert describe(unfinished)
    later = 1


GOALS, CALLS, LOG = [0.3], 0, list[Any]()


def helper(value: float) -> float:
    return value * CONSTANT


class Base:
    factor = 1.0

    def score(self, value: float) -> float:
        return helper(value) * self.factor


class Goal(Base):
    """A reward with settings, in slots too, and with state."""

    __slots__ = ("level",)

    def __init__(self, level: float, **settings: Any) -> None:
        self.level, self.calls, self.log = level, 0, list[Any]()
        vars(self).update(settings)

    def __call__(self, videos: Any, prompts: Any) -> Any:
        self.calls += 1
        self.log.append(prompts)
        return [self.score(goal) for goal in GOALS]


def counting(videos: Any, prompts: Any) -> Any:
    """Change global variables, which are no settings."""
    global CALLS
    CALLS += 1
    LOG.append(prompts)
    return [helper(goal) for goal in GOALS]


def networks(change: int) -> torch.nn.Module:
    """Return networks, of which one is another for each change."""
    torch.manual_seed(0)
    network: Any = torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.ReLU(), torch.nn.Dropout(0.1))
    network.register_buffer("mean", torch.zeros(3), persistent=False)
    network.levels = [1, 2]
    if change == 1:
        network[1] = torch.nn.GELU()
    elif change == 2:
        network[2].p = 0.2
    elif change == 3:
        network.mean[1] = 1
    elif change == 4:
        network.levels.append(3)
    elif change == 5:
        network[0].weight.data[100, 50] += 1e-6
    return network


def test_whatever_makes_parts_differ_is_in_their_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    def nested(level: float) -> Callable[..., Any]:
        def middle() -> Callable[..., Any]:
            return lambda videos, prompts: [level] * len(prompts)

        return middle()

    values: dict[str, Callable[[int], Any]] = {
        "networks": networks,
        "nested closures": nested,
        "slots": Goal,
        "lru_cache": lambda change: lru_cache(partial(nested, change)),
        "regexes": lambda change: partial(helper, re.compile("a" * 300 + str(change))),
        "large closures": lambda change: nested([*range(10_000), change]),  # type: ignore[arg-type]
        "attributes": lambda change: Goal(0.5, image=Image.new("RGB", (2, 2), (change, 0, 0))),
        "namespaces": lambda change: Goal(0.5, settings=SimpleNamespace(change=change)),
        "one line": lambda change: [lambda step: 0.1, lambda step: 0.2, lambda step: 0.3,
                                    lambda step: 0.4, lambda step: 0.5, lambda step: 0.6][change],
    }  # fmt: skip
    for name, make in values.items():
        texts = [describe(make(change)).text for change in range(6)]
        assert len(set(texts)) == 6, name
        assert describe(make(0)) == describe(make(0)), name
    parts = {"function": counting, "class": Goal, "instance": Goal(0.5), "method": Goal(0.5).score}
    before = {name: describe(part).text for name, part in parts.items()}
    for target, attribute, value in (
        (sys.modules[__name__], "CONSTANT", 3.0), (sys.modules[__name__], "helper", lambda value: value),
        (Base, "score", lambda self, value: value), (Base, "factor", 2.0),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(target, attribute, value)
            same = {name for name, part in parts.items() if describe(part).text == before[name]}
        assert same <= ({"function"} if target is Base else set()), attribute
    GOALS.append(0.5)
    assert describe(counting).text != before["function"]
    assert describe(parts["instance"]).text != before["instance"]
    GOALS.pop()


def test_state_of_parts_is_not_compared_and_named() -> None:
    goal = Goal(0.5, stream=(index for index in range(3)), random=random.Random(0))
    before = describe(goal), describe(counting)
    goal(0, "a")
    counting(0, "a")
    assert (describe(goal), describe(counting)) == before
    assert before[0].uncompared == ["calls", "log", "random", "stream"]
    assert before[1].uncompared == ["CALLS", "LOG"]
    assert describe(partial(SGD, lr=1.0)).uncompared == []
    assert describe(LoraConfig(r=4, target_modules=["to_q"])).uncompared == []
    # The layout of a call is no part of a function that stands in it.
    first = describe(lambda step: 0.1 * step)
    second = describe(
        lambda step: 0.1 * step  # a comment
    )
    assert first == second


def test_parts_of_earlier_versions_are_compared_by_name() -> None:
    now = ["optimizer=torch.optim.sgd:SGD 0123456789abcdef", "prompts=2 prompts 0123456789ab"]
    assert equal_parts(["optimizer=torch.optim.sgd:SGD 1080a60937d9", now[1]], now)
    assert not equal_parts(["optimizer=torch.optim.adam:Adam 1080a60937d9", now[1]], now)
    assert not equal_parts([now[0], "prompts=2 prompts 1080a60937d9"], now)
    assert not equal_parts([now[0].replace("0123", "3210"), now[1]], now)
