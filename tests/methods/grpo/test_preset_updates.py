"""A preset changes the weights like its publication's code: derived again in float64 from recorded rollouts.

Two rewards of unequal scale, two updates of one rollout. The formulae and numbers here are written down from the
papers' code (github.com/yifan123/flow_grpo, XueZeyue/DanceGRPO, Tencent-Hunyuan/MixGRPO, NVlabs/DiffusionNFT,
scxue/advantage_weighted_matching, Shredded-Pork/Flash-GRPO), not taken from the presets. The gradients are also pinned
in tests/golden: FINETRAINERS_UPDATE_GOLDEN=1 writes the numbers again.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from policies import SHAPE, Adapted, Source, Spec, compare_with_record, make_parts, network, picture
from torch import Tensor, nn

from finetrainers.config.presets import PRESETS
from finetrainers.methods.grpo.method import GRPO
from finetrainers.methods.grpo.prompts.prompts import Prompt
from finetrainers.methods.grpo.rollout.collect import RolloutBatch
from finetrainers.methods.registry import load_method
from finetrainers.models.spec import ModelSpec
from finetrainers.optim.factory import create_optimizer

SHIFT, PROMPTS, GROUP, KEPT = 3.0, 4, 6, 4
WEIGHTS = {"policies:signed_brightness": 1.0, "policies:contrast_in_percent": 0.5}


@dataclass(frozen=True)
class Published:
    """An update as published, but for `lr`: one with which some ratios are clipped and some not.

    `combine` says what is summed over rewards: `losses`, `advantages` or `scores`.
    """

    steps: int
    kernel: str = ""
    eta: float = 0.0
    clip: float = 0.0
    combine: str = "scores"
    global_std: bool = True
    ddof: int = 0
    eps: float = 1e-4
    beta: float = 0.0
    kept: int | None = None
    flash: bool = False
    lr: float = 3e-4


PUBLISHED = {
    "dancegrpo": Published(16, "dance", 0.25, 1e-4, "losses", global_std=False, ddof=1, eps=1e-8, kept=KEPT),
    "flow-grpo": Published(10, "flow", 0.7, 1e-4, beta=0.04),
    "flow-grpo-fast": Published(10, "cps", 0.8, 1e-5),
    "mixgrpo": Published(25, "flow", 0.7, 1e-4, "advantages", global_std=False, ddof=1, eps=1e-8, lr=3e-3),
    "flash": Published(20, "dance", 0.9, 1e-3, flash=True, lr=3e-3),
    "nft": Published(10, beta=1e-4),
    "awm": Published(14, clip=1.0, beta=1e-3, lr=3e-3),
}
#: What a run does without a preset, by the descriptions of the options.
OWN = {
    "no preset": Published(10, "flow", 0.7, 0.1 / math.sqrt(math.prod(SHAPE)), "advantages", global_std=False, lr=1e-1)
}
TOLD = PUBLISHED | OWN
#: The optimizer that all presets have.
ADAMW = {"optimizer": "adamw", "beta2": 0.999, "weight_decay": 1e-4, "max_grad_norm": 1.0}


# ---- the published formulae, in float64 ----------------------------------------------------------------------------


def levels(steps: int) -> Tensor:
    t = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    return SHIFT * t / (1 + (SHIFT - 1) * t)


def transition(kernel: str, eta: float, x: Tensor, v: Tensor, sigmas: Tensor, i: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, std and noise rate of a step, in the form in which each code has it."""
    s, following = sigmas[i], sigmas[i + 1]
    dt = following - s
    if kernel == "flow":
        rate = torch.sqrt(s / (1 - (sigmas[1] if s == 1 else s))) * eta
        mean = x * (1 + rate**2 / (2 * s) * dt) + v * (1 + rate**2 * (1 - s) / (2 * s)) * dt
        return mean, rate * torch.sqrt(-dt), rate
    if kernel == "dance":
        score = -(x - (x - s * v) * (1 - s)) / s**2
        return x + dt * v - 0.5 * eta**2 * score * dt, eta * torch.sqrt(-dt), torch.tensor(eta, dtype=torch.float64)
    std = following * math.sin(eta * math.pi / 2)
    mean = (x - s * v) * (1 - following) + (x + v * (1 - s)) * torch.sqrt(following**2 - std**2)
    return mean, std, std / torch.sqrt(-dt)


def advantages(scores: Mapping[str, np.ndarray], told: Published) -> list[np.ndarray]:
    """What is weighed by the ratio, `[prompts, group]`, one term for each loss; limited to 5 as everywhere."""

    def normalized(values: np.ndarray) -> np.ndarray:
        std = values.std(ddof=told.ddof) if told.global_std else values.std(axis=1, ddof=told.ddof, keepdims=True)
        return np.clip((values - values.mean(axis=1, keepdims=True)) / (std + told.eps), -5, 5)

    if told.combine == "scores":
        return [normalized(sum(WEIGHTS[name] * values for name, values in scores.items()))]  # type: ignore[arg-type]
    each = [WEIGHTS[name] * normalized(values) for name, values in scores.items()]
    return each if told.combine == "losses" else [sum(each)]  # type: ignore[list-item]


def chosen(terms: Sequence[np.ndarray], kept: int | None) -> set[int]:
    if kept is None:
        return set(range(PROMPTS * GROUP))
    ranks = sum(terms).argsort(axis=1)  # type: ignore[union-attr]
    best = np.concatenate([ranks[:, : kept // 2], ranks[:, -(kept // 2) :]], axis=1)
    return {GROUP * row + int(i) for row, group in enumerate(best) for i in group}


class PresetSpec(Spec):
    """Times by the checkpoint's scheduler."""

    sampling_times = ModelSpec.sampling_times  # type: ignore[assignment]

    def __init__(self) -> None:
        pass


class Reference:
    """The published update of a float64 copy of the policy: gradient, norm limited to 1, AdamW."""

    def __init__(self, model: nn.Module, told: Published, scores: Mapping[str, np.ndarray], source: Source) -> None:
        self.model, self.old = copy.deepcopy(model).double(), copy.deepcopy(model).double()
        self.told, self.source, self.sigmas = told, source, levels(told.steps)
        self.terms = [torch.from_numpy(term.flatten()) for term in advantages(scores, told)]
        self.weights = [p for p in self.model.parameters() if p.requires_grad]
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.weights]
        self.count = 0

    def velocity(self, model: Any, x: Tensor, sigma: Tensor, prompt: Prompt, *, adapted: bool = True) -> Tensor:
        model.outward.is_on = adapted
        return model(x[None], sigma.view(1), self.source.embedding(prompt).double()[None])[0]

    def density(
        self, model: Any, before: Tensor, after: Tensor, i: int, prompt: Prompt
    ) -> tuple[Tensor, Tensor, Tensor]:
        v = self.velocity(model, before, self.sigmas[i], prompt)
        mean, std, rate = transition(self.told.kernel, self.told.eta, before, v, self.sigmas, i)
        log = -((after - mean) ** 2) / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)
        return log.mean(), mean, rate

    def weight(self, i: int) -> float:
        """Flash-GRPO's lambda, of mean 1 over the first half of the steps."""
        if not self.told.flash:
            return 1.0

        def value(i: int) -> float:
            s, root = float(self.sigmas[i]), math.sqrt(float(self.sigmas[i] - self.sigmas[i + 1]))
            return 1 / (root / self.told.eta + self.told.eta * root * (1 - s) / (2 * s))

        pool = [value(k) for k in range(self.told.steps // 2)]
        return value(i) * len(pool) / sum(pool)

    def policy_gradient(self, collected: RolloutBatch, clips: Sequence[int]) -> tuple[list[Tensor], float]:
        """Gradients, and the share of transitions beyond the clip range."""
        losses, beyond = [], []
        for clip in clips:
            replay, prompt = collected.replays[clip], collected.jobs[clip].prompt
            for k, i in enumerate(replay.steps.tolist()):
                before, after = replay.before[k].double(), replay.after[k].double()
                log, mean, rate = self.density(self.model, before, after, i, prompt)
                with torch.no_grad():
                    log_old, _, _ = self.density(self.old, before, after, i, prompt)
                ratio = torch.exp(log - log_old)
                held = ratio.clamp(1 - self.told.clip, 1 + self.told.clip)
                loss = sum(torch.maximum(-term[clip] * ratio, -term[clip] * held) for term in self.terms)
                if self.told.beta:
                    with torch.no_grad():
                        v = self.velocity(self.model, before, self.sigmas[i], prompt, adapted=False)
                        apart, _, _ = transition(self.told.kernel, self.told.eta, before, v, self.sigmas, i)
                    loss = loss + self.told.beta * ((mean - apart) ** 2).mean() / (2 * rate**2)
                losses.append(self.weight(i) * loss)
                beyond.append(float((ratio - 1).abs() > self.told.clip))
        return self._gradients(losses), sum(beyond) / len(beyond)

    def nft_gradient(self, batches: Sequence[Any], rows: Sequence[Sequence[int]], jobs: Sequence[Any]) -> list[Tensor]:
        """The same of DiffusionNFT, with the noise that the batches have; beta = 1."""
        losses = []
        for batch, clips in zip(batches, rows, strict=True):
            for row, clip in enumerate(clips):
                x0, x_t, t = batch.x0[row].double(), batch.x_t[row].double(), batch.time[row].double()
                v = self.velocity(self.model, x_t, t, jobs[clip].prompt)
                with torch.no_grad():
                    old = self.velocity(self.old, x_t, t, jobs[clip].prompt)
                    apart = self.velocity(self.model, x_t, t, jobs[clip].prompt, adapted=False)
                good = float(np.clip(float(self.terms[0][clip]) / 5 / 2 + 0.5, 0, 1))
                total: Any = 0.0
                for share, velocity in ((good, v), (1 - good, 2 * old - v)):
                    error = x_t - t * velocity - x0
                    total = total + share * (error**2).mean() / error.detach().abs().mean().clip(min=1e-5)
                losses.append(5 * total + self.told.beta * ((v - apart) ** 2).mean())
        return self._gradients(losses)

    def awm_gradient(self, batches: Sequence[Any], rows: Sequence[Sequence[int]], jobs: Sequence[Any]) -> list[Tensor]:
        """The same of AWM; in the first rollout, the EMA is the policy that sampled, so `old` is both."""
        losses = []
        for batch, clips in zip(batches, rows, strict=True):
            for row, clip in enumerate(clips):
                x0, noise, t = batch.x0[row].double(), batch.noise[row].double(), batch.time[row].double()
                assert min(abs(self.sigmas[1:12] - t)) < 1e-6  # the second to the twelfth of 14 steps
                x_t = (1 - t) * x0 + t * noise
                v = self.velocity(self.model, x_t, t, jobs[clip].prompt)
                with torch.no_grad():
                    old = self.velocity(self.old, x_t, t, jobs[clip].prompt)
                    apart = self.velocity(self.model, x_t, t, jobs[clip].prompt, adapted=False)

                def log(velocity: Tensor, target: Tensor = noise - x0, t: Tensor = t) -> Tensor:
                    error = ((velocity - target) ** 2).mean()
                    return -((error + 1e-10) ** 0.25 - 1e-10**0.25) * t / 0.25

                ratio = torch.exp(log(v) - log(old))
                weight = self.terms[0][clip] / 5
                loss = torch.maximum(-weight * ratio, -weight * ratio.clamp(1 - self.told.clip, 1 + self.told.clip))
                losses.append(loss + self.told.beta * ((v - apart) ** 2).mean() + ((v - old) ** 2).mean())
        return self._gradients(losses)

    def _gradients(self, losses: Sequence[Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad(torch.stack(list(losses)).mean(), self.weights))

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        self.count += 1
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients))
        for p, g, (first, second) in zip(self.weights, gradients, self.moments, strict=True):
            g = g / max(norm + 1e-6, 1.0)
            p *= 1 - self.told.lr * 1e-4
            first.lerp_(g, 0.1)
            second.lerp_(g**2, 0.001)
            root = (second / (1 - 0.999**self.count)).sqrt() + 1e-8
            p -= self.told.lr * first / (1 - 0.9**self.count) / root


# ---- the preset ----------------------------------------------------------------------------------------------------


def make(name: str, model: nn.Module, training_type: str) -> tuple[GRPO, Any, Source]:
    """The method as a run of the preset has it, on a small policy."""
    options = {"grpo_preset": name} if name in PUBLISHED else ADAMW
    parts = make_parts(
        model=model, spec=PresetSpec(), scheduler=FlowMatchEulerDiscreteScheduler(),
        reward=[f"{reward}={weight}" for reward, weight in WEIGHTS.items()], training_type=training_type,
        prompts_per_step=PROMPTS, num_generations=GROUP, shift=SHIFT, updates_per_rollout=2, lr=TOLD[name].lr,
        sampling_steps=None, window_range=None, seed=None, **({"best_of_n": KEPT} if TOLD[name].kept else {}),
        **options,
    )  # fmt: skip
    return load_method(parts.config.training.method)(parts), parts.config, parts.source


def recorded(method: GRPO) -> dict[str, list[float]]:
    """The raw scores of what will be collected, by reward."""
    said: dict[str, list[float]] = {name: [] for name in WEIGHTS}
    score = method.collector.panel.score

    def listen(*args: Any, **options: Any) -> Any:
        found = score(*args, **options)
        for name, head in found.heads.items():
            said[name] += head.raw.tolist()
        return found

    method.collector.panel.score = listen  # type: ignore[method-assign]
    return said


def updates(method: GRPO, model: nn.Module) -> Iterator[tuple[list[Any], list[list[int]]]]:
    """Micro-batches of the rollout's updates, and of each its clips, without those that fill up."""
    for step in islice(method.steps(0, model), 2):
        rows = [[clip for clip, share in zip(part.clips, part.shares, strict=True) if share] for part in step.items]
        yield list(step), rows


def test_every_preset_is_derived() -> None:
    assert PUBLISHED.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", TOLD)
def test_an_update_is_the_published_one(name: str) -> None:
    told, model = TOLD[name], network(cls=Adapted)
    method, config, source = make(name, model, "full-finetune" if name == "mixgrpo" else "lora")
    said = recorded(method)
    collected: list[RolloutBatch] = []
    collect = method.collect
    method.collect = (  # type: ignore[method-assign]
        lambda *args: collected.append(collect(*args)) or collected[-1]  # type: ignore[func-returns-value]
    )
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = create_optimizer(
        weights, config=config.optimizer, lr=config.optimizer.lr, device_type="cpu", stochastic_rounding=False
    )
    reference: Reference | None = None
    found, beyond = [], []
    for batches, rows in updates(method, model):
        if reference is None:
            scores = {reward: np.array(values).reshape(PROMPTS, GROUP) for reward, values in said.items()}
            reference = Reference(model, told, scores, source)
            assert set(collected[0].trained_clips) == chosen(advantages(scores, told), told.kept)
        losses = [method.loss(model, batch)[0] for batch in batches]
        for loss in losses:
            loss.backward()
        gradients = [p.grad.clone() for p in weights]  # type: ignore[union-attr]
        if name in ("nft", "awm"):
            wanted = getattr(reference, f"{name}_gradient")(batches, rows, collected[0].jobs)
        else:
            clips = sorted({clip for clips in rows for clip in clips})
            wanted, share = reference.policy_gradient(collected[0], clips)
            beyond.append(share)
        difference = sum(float(((g - w) ** 2).sum()) for g, w in zip(gradients, wanted, strict=True))
        assert difference < (1e-4) ** 2 * sum(float((w**2).sum()) for w in wanted)
        found.append(picture(gradients, sum(float(loss.detach()) for loss in losses)))
        torch.nn.utils.clip_grad_norm_(weights, config.optimizer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        reference.step(wanted)
    if beyond:
        assert beyond[0] == 0
        assert 0.05 < beyond[1] < 0.95, "some ratios are clipped, and some are not"
    assert reference is not None
    for ours, theirs in zip(weights, reference.weights, strict=True):
        torch.testing.assert_close(ours.double(), theirs.detach(), rtol=0, atol=0.02 * told.lr)
    compare_with_record(name, found)
