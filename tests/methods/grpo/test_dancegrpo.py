"""DanceGRPO's update, written down from its formulae, gives the same weights on the same rollout."""

from __future__ import annotations

import copy
import math

import torch
from policies import make_grpo, network, signed_brightness
from torch import Tensor, nn

from finetrainers.methods.grpo.method import Transition

ETA, CLIP, LR = 0.25, 1e-4, 1e-3


def flux_step(model: nn.Module, batch: Transition, sigmas: Tensor) -> Tensor:
    """Log-density of the kept next latents, by the closed form of DanceGRPO's step, in double precision."""
    values = []
    before, time, texts = map(batch.by_clip, (batch.before, batch.time, batch.conditions["prompt_embeds"]))
    for row in range(len(batch.after)):
        x, following = before[row].double(), batch.after[row].double()
        step = int((sigmas - time[row]).abs().argmin())
        sigma, dt = sigmas[step].double(), (sigmas[step + 1] - sigmas[step]).double()
        v = model(before[row : row + 1], time[row : row + 1], texts[row : row + 1])[0].double()
        std = ETA * torch.sqrt(-dt)
        denoised = x - sigma * v
        score = -(x - denoised * (1 - sigma)) / sigma**2
        mean = x + dt * v - 0.5 * ETA**2 * score * dt
        density = -((following - mean) ** 2) / (2 * std**2) - torch.log(std) - math.log(math.sqrt(2 * math.pi))
        values.append(density.mean())
    return torch.stack(values)


def test_two_updates_of_one_rollout() -> None:
    ours, theirs = network(), network()
    old = copy.deepcopy(theirs)
    method = make_grpo(
        sampler="dance", eta=ETA, window_size=0, timestep_fraction=0.6, best_of_n=4, advantage_eps=1e-8,
        advantage_correction=1, updates_per_rollout=2, clip_range=CLIP,
    )  # fmt: skip
    collector, tables = method.collector, method.sampler.tables
    sigmas = torch.cat([collector.sampler.times, torch.zeros(1)])
    assert tables.num_trained == int((len(sigmas) - 2) * 0.6)

    videos, decode = [], collector.source.decode
    collector.source.decode = (  # type: ignore[method-assign]
        lambda *a: videos.append(decode(*a)) or videos[-1]  # type: ignore[func-returns-value]
    )
    collected = collector.collect(ours.eval(), 0)
    scores = signed_brightness(torch.cat(videos), [job.prompt.text for job in collected.jobs]).double().view(4, 8)
    advantages = (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-8)
    torch.testing.assert_close(collected.advantages.double(), advantages.flatten()[:, None], rtol=1e-4, atol=1e-4)
    for group, row in enumerate(advantages):
        ranked = row.argsort().tolist()
        kept = {8 * group + i for i in (*ranked[:2], *ranked[-2:])}
        assert kept == {i for i in collected.trained_clips if i // 8 == group}

    mine = torch.optim.AdamW(ours.parameters(), lr=LR)
    reference = torch.optim.AdamW(theirs.parameters(), lr=LR)
    for step in method.update_steps(ours, collected, 0):
        batches = list(step)
        for batch in batches:
            method.loss(ours, batch)[0].backward()
        mine.step()
        mine.zero_grad()
        terms = sum(int((batch.share > 0).sum()) for batch in batches)  # without clips that fill up
        for batch in batches:
            with torch.no_grad():
                log_old = flux_step(old, batch, sigmas)
            ratio = torch.exp(flux_step(theirs, batch, sigmas) - log_old)
            advantage = batch.advantage.double().sum(1).clamp(-5.0, 5.0)
            unclipped = -advantage * ratio
            clipped = -advantage * torch.clamp(ratio, 1 - CLIP, 1 + CLIP)
            loss = (torch.maximum(unclipped, clipped) * (batch.share > 0)).sum() / terms
            loss.backward()
        reference.step()
        reference.zero_grad()
    moved = max(float((a - b).detach().abs().max()) for a, b in zip(theirs.parameters(), old.parameters(), strict=True))
    assert moved > LR
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        # Adam turns rounding in near-zero gradients into whole steps, so a few weights may differ by more.
        close = (a - b).abs() < 0.05 * LR
        assert close.double().mean() > 0.99
