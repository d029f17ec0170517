"""Inputs of methods and the results that follow, derived in float64 by code that shares only the seeding with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetrainers.config.root import TrainConfig
from finetrainers.config.sections import DiffusionSection, ModelSection
from finetrainers.methods.base import MethodParts
from finetrainers.methods.sft import SFT
from finetrainers.models.registry import get_family
from finetrainers.models.spec import Batch, PromptEmbeds, VideoMeta
from finetrainers.utils.seeding import derive_seed

SEED = 7
KEYS = ((0, 3), (0, 1), (2, 3))


class Setting:
    """A method around a real spec whose network is replaced by a recorder with a fixed answer."""

    def __init__(
        self,
        repository: Path,
        family: str,
        *,
        given: str = "",
        window_context: int = 0,
        window: int | None = None,
        prior_preservation_weight: float = 0.0,
        expert: Any = None,
        part: Sequence[str] = (),
        **diffusion: Any,
    ) -> None:
        self.spec = get_family(family).load(
            ModelSection(
                model_name=family,
                pretrained_model_name_or_path=str(repository),
                vae_dtype="fp32",
                transformer_dtype="fp32",
                expert=expert,
                part=list(part),
            )
        )
        self.vae = self.spec.load_vae()
        self.scheduler = self.spec.load_scheduler()
        self.process = self.spec.process(self.scheduler)
        self.parts: Any = MethodParts(
            config=TrainConfig(
                model=self.spec.config, diffusion=DiffusionSection(**diffusion),
                training={"seed": SEED},  # type: ignore[arg-type]
                data={  # type: ignore[arg-type]
                    "window_context": window_context, "sliding_window_size": window, "frame_conditioning": given,
                },
                sft={"prior_preservation_weight": prior_preservation_weight},  # type: ignore[arg-type]
            ),
            spec=self.spec, process=self.process, scheduler=self.scheduler, geometry=self.spec.facts.geometry,
            vae_stats=self.spec.vae_stats(self.vae), source=None, parallel=None,
            network=torch.nn.Identity(), weights_dtype=torch.float32,
        )  # fmt: skip
        self.method = SFT(self.parts)
        self.method.tokens_per_latent = 0.25
        self.seen: list[tuple[Tensor, Tensor, PromptEmbeds, VideoMeta]] = []
        self.answers: list[Tensor] = []
        self.spec.predict = self._predict  # type: ignore[method-assign]

    def _predict(self, transformer: Any, x: Tensor, t: Tensor, conditions: PromptEmbeds, meta: VideoMeta) -> Tensor:
        self.seen.append((x.clone(), t.clone(), conditions, meta))
        answers = [torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(i)) for i in range(len(x))]
        self.answers.append(torch.stack(answers).requires_grad_())
        return self.answers[-1]


def make_batch(
    setting: Setting,
    *,
    frames: int = 3,
    keys: Sequence[tuple[int, int]] = KEYS,
    weight: float = 1.0,
    within: Sequence[tuple[int, int]] = (),
) -> Batch:
    """Return random moments, each row's a function of its key; the samples `within` are windows from within a clip."""
    config = setting.spec.configs["transformer"]
    channels = setting.spec.facts.channels or config["out_channels"] or config["in_channels"]

    def rows(t: int) -> Tensor:
        generators = [torch.Generator().manual_seed(100 * e + i) for e, i in keys]
        return torch.stack([torch.randn(2 * channels, t, 4, 4, generator=g) for g in generators])

    return Batch(
        moments=rows(frames),
        conditions=PromptEmbeds({"embeds": torch.zeros(len(keys), 2, 2)}),
        meta=VideoMeta(fps=torch.full((len(keys),), 8.0)),
        sample_keys=keys,
        clip={"first_frame_moments": rows(1)},
        weight=weight,
        inner_windows=[key in within for key in keys],
    )


def normalize(family: str, vae: Any, z: Tensor) -> Tensor:
    """VAE latents to what the network sees, written out from the VAE's config; float64."""
    scale, statistics = vae.config.get("scaling_factor", 1.0), ("latents_mean", "latents_std")
    if isinstance(getattr(vae, statistics[0], None), Tensor):
        mean, std = (getattr(vae, name) for name in statistics)
    elif vae.config.get(statistics[0]) is not None:
        mean, std = (torch.tensor(vae.config[name]) for name in statistics)
    else:
        return z * scale
    return (z - mean.double()[:, None, None, None]) / std.double()[:, None, None, None] * scale


def derive(
    setting: Setting, family: str, batch: Batch, purpose: str, quantile: Callable[..., float]
) -> list[dict[str, Any]]:
    """Every sample by itself, in float64: noisy latents, time, target.

    `quantile(generator)` gives the noise-level quantile, drawn after posterior noise and noise.
    """
    found = []
    for row, (epoch, item) in enumerate(batch.sample_keys):
        generator = torch.Generator().manual_seed(derive_seed(SEED, purpose, epoch, item))
        mean, logvar = batch.moments[row].double().chunk(2)
        posterior = torch.randn(mean.shape, generator=generator).double()
        eps = torch.randn(mean.shape, generator=generator).double()
        u = quantile(generator)
        x0 = normalize(family, setting.vae, mean + (0.5 * logvar).exp() * posterior)
        if family == "cogvideox":
            t = min(int(u * 1000), 999)
            alpha_bar = setting.scheduler.alphas_cumprod.double()[t]
            a, s = alpha_bar.sqrt(), (1 - alpha_bar).sqrt()
            found.append({"t": t, "x": a * x0 + s * eps, "target": a * eps - s * x0, "x0": x0})
        else:
            found.append({"t": u, "x": (1 - u) * x0 + u * eps, "target": eps - x0, "x0": x0})
    return found
