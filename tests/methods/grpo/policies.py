"""A small policy for tests of reward finetuning: a real network, a decoder without weights, and one process."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from one_of import OneOf
from torch import Tensor, nn

from finetrainers.config.facts import Facts
from finetrainers.config.geometry import Geometry
from finetrainers.config.load import load_config
from finetrainers.diffusion.process import FlowMatching, Process, VariancePreserving
from finetrainers.methods.base import MethodParts
from finetrainers.methods.grpo.awm import AWM
from finetrainers.methods.grpo.method import GRPO
from finetrainers.methods.grpo.nft import NFT
from finetrainers.methods.grpo.prompts.prompts import Prompt, PromptOrder
from finetrainers.methods.grpo.rollout.collect import RolloutCollector
from finetrainers.methods.refl import RewardGradients
from finetrainers.models.spec import ModelComponents, ModelSpec, PromptEmbeds, VideoMeta
from finetrainers.utils.files import write_json_atomic

GOLDEN = Path(__file__).parents[2] / "golden" / "preset_updates.json"
UPDATE = os.environ.get("FINETRAINERS_UPDATE_GOLDEN") == "1"
SHAPE = (4, 2, 4, 4)
NUM_PROMPTS = 4


def flow() -> tuple[Process, Tensor]:
    t = torch.linspace(1, 0, 9)[:-1]
    return FlowMatching(), 3 * t / (1 + 2 * t)


def vp() -> tuple[Process, Tensor]:
    steps = torch.linspace(0, 1, 1000, dtype=torch.float64)
    process = VariancePreserving((torch.cos(steps * math.pi / 2) ** 2).clamp(0, 1 - 1e-5))
    return process, torch.arange(999, 0, -125)


class Network(nn.Module):
    """A residual convolution with a prompt embedding and dropout."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = SimpleNamespace(out_channels=SHAPE[0])
        self.inward = nn.Conv3d(SHAPE[0] + 1, 32, 3, padding=1)
        self.hidden = nn.Conv3d(32, 32, 3, padding=1)
        self.outward = nn.Conv3d(32, SHAPE[0], 3, padding=1)
        self.prompt = nn.Linear(8, 32)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, level: Tensor, text: Tensor) -> Tensor:
        plane = level.view(-1, 1, 1, 1, 1).expand(-1, 1, *x.shape[2:])
        h = torch.relu(self.inward(torch.cat([x, plane], 1)) + self.prompt(text)[:, :, None, None, None])
        return self.outward(self.dropout(h + torch.relu(self.hidden(h))))


class _WithAdapter(nn.Module):
    def __init__(self, base: nn.Conv3d) -> None:
        super().__init__()
        self.base, self.adapter, self.is_on = base, nn.Conv3d(base.in_channels, base.out_channels, 1), True
        nn.init.normal_(self.adapter.weight, std=0.02)

    def forward(self, h: Tensor) -> Tensor:
        return self.base(h) + self.adapter(h) if self.is_on else self.base(h)


class Adapted(Network):
    """The same with an adapter on its last layer, which alone is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.outward = _WithAdapter(self.outward)  # type: ignore[assignment]

    def disable_adapters(self) -> None:
        self.outward.is_on = False

    def enable_adapters(self) -> None:
        self.outward.is_on = True


class Spec:
    """What a sampler asks of a model's spec."""

    facts = Facts(Geometry(temporal=8, spatial=8, patch=1, patch_t=1, fps=8.0))
    experts = ModelComponents({})
    network_at = ModelSpec.network_at
    latent_channels = ModelSpec.latent_channels

    def __init__(self, times: Tensor) -> None:
        self.times = times

    def sampling_times(self, scheduler: Any, steps: int, *, num_tokens: int, shift: float | None) -> Tensor:
        return self.times

    def predict(
        self, transformer: nn.Module, x: Tensor, t: Tensor, conditions: PromptEmbeds, meta: VideoMeta
    ) -> Tensor:
        level = t.float() / 1000 if not t.is_floating_point() else t.float()
        return transformer(x, level, conditions["prompt_embeds"])


class Source:
    """Four prompts, of which the odd ones want darkness."""

    plan = SimpleNamespace(eval_prompts=())
    start_frames = 0
    prompts = tuple(Prompt(f"{'dark' if i % 2 else 'bright'} {i}", "") for i in range(NUM_PROMPTS))

    def __init__(self, prompts_per_step: int = 2, seed: int = 0, *, cfg: float = 1.0) -> None:
        self.order = PromptOrder(NUM_PROMPTS, prompts_per_step=prompts_per_step, seed=seed)
        self.embeddings = torch.randn(NUM_PROMPTS + 1, 8, generator=torch.Generator().manual_seed(7))
        self.cfg = cfg

    def rollout_prompts(self, rollout: int) -> list[Prompt]:
        return [self.prompts[i] for i in self.order.prompt_indices(rollout)]

    def reward_images(self, prompts: Sequence[Prompt]) -> None:
        return None

    def embedding(self, prompt: Prompt) -> Tensor:
        return self.embeddings[self.prompts.index(prompt)]

    def conditions(self, prompts: Sequence[Prompt]) -> PromptEmbeds:
        rows = [self.embedding(prompt) for prompt in prompts]
        return PromptEmbeds(
            {"prompt_embeds": torch.stack(rows + [self.embeddings[-1]] * (len(rows) if self.cfg != 1 else 0))}
        )

    def decode(self, latents: Tensor, vae_stats: Any) -> Tensor:
        """8-bit clips, so that nothing can be learnt by differentiating."""
        return (self.pixels(latents) * 255).round() / 255

    def pixels(self, latents: Tensor) -> Tensor:
        return torch.sigmoid(latents[:, :3].transpose(1, 2))

    def decode_gradient(
        self, latents: Tensor, vae_stats: Any, score: Any, *, checkpointing: bool
    ) -> tuple[Tensor, Any]:
        z = latents.detach().requires_grad_()
        number, rest = score(self.pixels(z))
        return torch.autograd.grad(number, z)[0], rest


def signed_brightness(videos: Tensor, prompts: Sequence[str]) -> Tensor:
    """Wanted: bright clips of some prompts and dark ones of others, so that no drift can score."""
    sign = torch.tensor([1.0 if "bright" in prompt else -1.0 for prompt in prompts])
    return sign * (videos.mean(dim=(1, 2, 3, 4)) - 0.5)


signed_brightness.differentiable = True  # type: ignore[attr-defined]


def contrast_in_percent(videos: Tensor, prompts: Sequence[str]) -> Tensor:
    """On another scale than brightness."""
    return 100 * videos.std(dim=(1, 2, 3, 4))


def shuffled(videos: Tensor, prompts: Sequence[str]) -> Tensor:
    """A reward that knows nothing: noise that depends on the clip's bytes."""
    seeds = [int(video.double().sum().item() * 1e6) % 2**31 for video in videos]
    return torch.stack([torch.rand((), generator=torch.Generator().manual_seed(seed)) for seed in seeds])


def make_parts(
    make_process: Callable[[], tuple[Process, Tensor]] = flow,
    *,
    model: Any = None,
    parallel: Any = None,
    spec: Any = None,
    scheduler: Any = None,
    **options: Any,
) -> MethodParts[Any]:
    """What a method is made from in a run with these options."""
    process, times = make_process()
    given = {
        "method": "grpo", "reward": ["policies:signed_brightness"], "rollout_size": "9x32x32", "prompts_per_step": 4,
        "num_generations": 8, "batch_size": 4, "sampling_steps": len(times), "window_range": [0.0, 0.8], "seed": 0,
        "prompts": "p.txt", "train_steps": 400, "keep_rollouts_every": 0, "hacking_guard": "off", **options,
    }  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None}
    config = load_config(model_name="m", pretrained_model_name_or_path="repo", **given)
    section = config.grpo
    return MethodParts(
        config=config, spec=spec or Spec(times), process=process, scheduler=scheduler,
        geometry=Geometry(temporal=8, spatial=8, patch=1, patch_t=1, fps=8.0),
        vae_stats=SimpleNamespace(),  # type: ignore[arg-type]
        source=Source(section.prompts_per_step, cfg=section.rollout_cfg), parallel=parallel or OneOf(),
        network=model or network(), weights_dtype=torch.float32,
    )  # fmt: skip


def make_collector(*process: Any, **options: Any) -> RolloutCollector:
    return RolloutCollector(make_parts(*process, **options))


def make_grpo(*process: Any, **options: Any) -> GRPO:
    return GRPO(make_parts(*process, **options))


def make_nft(model: Any, *process: Any, **options: Any) -> NFT:
    given = {"init_same_noise": False, "noise_levels": 2, "nft_kl": 0.0, **options}
    return NFT(make_parts(*process, model=model, method="nft", **given))


def make_awm(model: Any, *process: Any, **options: Any) -> AWM:
    given = {"init_same_noise": False, "noise_levels": 2, **options}
    return AWM(make_parts(*process, model=model, method="awm", **given))


def make_refl(model: Any, *process: Any, **options: Any) -> RewardGradients:
    return RewardGradients(make_parts(*process, model=model, **{"method": "refl", "window_range": None, **options}))


def network(seed: int = 0, *, cls: type[Network] = Network, **options: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return cls(**options)


def bright_only(videos: Tensor, prompts: Sequence[str]) -> Tensor:
    """The same for every clip of a dark prompt."""
    wanted = torch.tensor([1.0 if "bright" in prompt else 0.0 for prompt in prompts])
    return wanted * videos.mean(dim=(1, 2, 3, 4))


def constant(videos: Tensor, prompts: Sequence[str]) -> Tensor:
    """The same for every clip."""
    return torch.full((len(videos),), 0.1)


def picture(gradients: Iterable[Tensor], loss: float) -> dict[str, float]:
    """Loss, norm, and what the gradient is along three fixed directions."""
    flat = torch.cat([g.flatten() for g in gradients]).double()
    draws = torch.randn(3, len(flat), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    along = {f"along {i}": float(flat @ d / d.norm()) for i, d in enumerate(draws)}
    return {"loss": loss, "norm": float(flat.norm()), **along}


def compare_with_record(name: str, found: Sequence[dict[str, float]]) -> None:
    """Compare pictures with those in tests/golden, or write them there if FINETRAINERS_UPDATE_GOLDEN is 1."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.is_file() else {}
    if UPDATE:
        write_json_atomic(GOLDEN, {**golden, name: list(found)})
        return
    for now, then in zip(found, golden[name], strict=True):
        assert now == pytest.approx(then, rel=1e-3, abs=1e-4 * then["norm"])
