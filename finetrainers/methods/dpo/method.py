"""Direct preference optimization of flow-matching and v-prediction models (Diffusion-DPO, Flow-DPO).

The trained network shall predict the preferred clip of a pair better, compared with the reference model, than the
rejected clip. With e the mean squared error of the network's prediction, r that of the reference model, w and l the
preferred and the rejected clip, at one noise level t and with one noise for both:

    L = -log sigmoid(-beta / 2 * omega(t) * ((e_w - r_w) - (e_l - r_l)))

This is the loss of Diffusion-DPO (arXiv:2311.12908), whose T is part of beta in its code, and of Flow-DPO (VideoAlign,
arXiv:2501.13918), where e is the error of the velocity and beta does not depend on t. For v-prediction models e is the
error of v. omega is the loss weight of the noise level (`--flow_weighting_scheme`), by default 1. Errors are means over
a latent's elements, as in the code of Diffusion-DPO, so that beta means the same at all sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from finetrainers.data.loading.training_data import TrainingData
from finetrainers.methods.base import Evaluation, MethodParts, Metrics, Step, Summary
from finetrainers.methods.held_out import held_out_means
from finetrainers.methods.reference import reference_model
from finetrainers.methods.sft import SFT
from finetrainers.models.spec import Batch, even_bounds
from finetrainers.utils.failures import InputError


@dataclass(frozen=True)
class Pairs:
    """A micro-batch of pairs.

    Attributes:
        clips: rows 2k and 2k + 1 are the preferred and the rejected clip of pair k; both have one sample key.
    """

    clips: Batch

    @property
    def latent_size(self) -> tuple[int, ...]:
        """Frames, height and width of every clip's latents."""
        return self.clips.latent_size

    def __len__(self) -> int:
        return len(self.clips) // 2

    def split(self, pieces: int) -> list[Pairs]:
        """Return exactly `pieces` parts; with fewer pairs, the first pair repeats without weight."""
        count, rows, weight = len(self), self.clips.rows, self.clips.weight
        bounds = even_bounds(count, min(pieces, count))
        parts = [Pairs(rows(slice(2 * a, 2 * b), weight=weight * (b - a) / count)) for a, b in bounds]
        return parts + [Pairs(rows(slice(0, 2), weight=0.0))] * (pieces - len(parts))


def preference_margin(gains: Tensor, beta: Tensor | float) -> Tensor:
    """Return the argument of the sigmoid, `[B]`: how much more preferred clips have improved than rejected ones.

    Args:
        gains: reduction of the network's errors against the reference model's, `[2B]`, in the order of `Pairs`.
        beta: beta times omega, a number or `[B]`.
    """
    return beta / 2 * (gains[0::2] - gains[1::2])


class DPO:
    """Direct preference optimization of any registered model."""

    headline: tuple[str, ...] = ("loss", "accuracy", "eval_accuracy", "eval_loss", "eval_reward/")
    summaries: Mapping[str, Summary] = SFT.summaries

    def __init__(self, parts: MethodParts[TrainingData]) -> None:
        self.sft = SFT(parts)  # provides batches, and the improvement of predictions
        self.reference = reference_model(parts)
        self.beta = parts.config.dpo.beta

    def steps(self, start: int, transformer: nn.Module) -> Iterator[Step[Pairs]]:
        for step in self.sft.steps(start, transformer):
            yield Step([Pairs(batch) for batch in step], metrics=step.metrics, events=step.events)

    def dry_steps(self, transformer: nn.Module) -> Iterator[tuple[str, Step[Pairs]]]:
        for name, step in self.sft.dry_steps(transformer):
            yield name, Step([Pairs(batch) for batch in step])

    def benchmark_steps(self, bucket: tuple[int, int, int], clips: int, *, micro_batches: int) -> Iterator[Step[Pairs]]:
        """Yield steps without end, each of `micro_batches` micro-batches of `clips` pairs from one bucket."""
        for step in self.sft.benchmark_steps(bucket, clips, micro_batches=micro_batches):
            yield Step([Pairs(batch) for batch in step])

    def can_stop_after(self, step: int) -> bool:
        return True

    def loss(self, transformer: nn.Module, batch: Pairs) -> tuple[Tensor, Metrics]:
        margin, gain = self._compare(transformer, batch.clips, purpose="train", quantile=None)
        loss = -logsigmoid(margin).mean() * batch.clips.weight
        values = {"margin": margin, "accuracy": _wins(margin), "gain_chosen": gain[0::2], "gain_rejected": gain[1::2]}
        metrics = {name: value.detach().mean() * batch.clips.weight for name, value in values.items()}
        return loss, {"loss": loss.detach(), **metrics}

    def _compare(
        self, transformer: nn.Module, clips: Batch, *, purpose: str, quantile: float | None
    ) -> tuple[Tensor, Tensor]:
        """Return the margin of every pair `[B]`, and by how much the error of every clip has fallen `[2B]`."""
        gains, weight = self.sft.gains(transformer, self.reference, clips, purpose=purpose, quantile=quantile)
        return preference_margin(gains, self.beta if weight is None else self.beta * weight[0::2]), gains

    @property
    def evaluates(self) -> bool:
        return self.sft.evaluates

    def evaluate(self, transformer: nn.Module) -> Evaluation:
        """Return the share of held-out pairs whose preferred clip improved more, and the loss, at fixed levels."""

        def values(clips: Batch, level: float) -> Mapping[str, Tensor]:
            margin, _ = self._compare(transformer, clips, purpose="eval", quantile=level)
            return {"eval_loss": -logsigmoid(margin), "eval_accuracy": _wins(margin)}

        data = self.sft.batches
        levels = data.config.validation.eval_num_timesteps
        return Evaluation(held_out_means(data.eval_batches(), values, num_levels=levels, parallel=data.parallel))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise InputError(f"direct preference optimization has no state to restore, got {sorted(state)}", "mismatch")


def _wins(margin: Tensor) -> Tensor:
    """Return 1 where the preferred clip has improved more, 0 where the other has, 1/2 where neither has."""
    return (margin > 0).float() + 0.5 * (margin == 0).float()
