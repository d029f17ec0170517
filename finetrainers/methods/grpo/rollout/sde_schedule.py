"""Choice of the stochastic and the trained transitions of a rollout, and the weight of each.

A choice is a pure function of (seed, rollout, slot), a slot being a prompt's place in the rollout: there is nothing to
save, and every rank and every world size finds the same. All clips of a slot share their steps.

With few stochastic steps, differences in reward come from where the gradient acts (MixGRPO's window, Flow-GRPO-Fast).
The strategies, for a window of w steps in a range of R steps of the schedule:

    fixed         the first w steps of the range, in every rollout
    progressive   moves by `stride` steps every `every` rollouts; at the end of the range it starts over (MixGRPO)
    random        starts anywhere in the range, drawn again for every rollout (Flow-GRPO-Fast), or with `per_prompt` for
                  every slot; with w = 1 that is Flash-GRPO's iso-temporal grouping (arXiv:2605.15980)
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from finetrainers.config.grpo import GRPOSection, step_range, trained_steps
from finetrainers.diffusion.policy import Transitions
from finetrainers.utils.failures import InputError
from finetrainers.utils.seeding import derive_seed
from finetrainers.utils.text import plural

StepWeight = Literal["none", "flash", "noise"]


@dataclass(frozen=True)
class SDEWindows:
    """The choice of steps of a whole run, by the options `window_*` and `timestep_fraction`.

    The last step is always deterministic and never trained: its noise would be seen in the clip, and it has no density.

    DanceGRPO draws the steps of `timestep_fraction` for every clip; here the clips of a slot share the draw. Their
    advantages sum to zero, and so do they at every step trained on all of them: the part of a step's gradient that all
    clips share cancels. With a draw for every clip it would stay, as noise.

    Attributes:
        section: the options.
        seed: seed of the run.
        own: the steps that the trained network denoises.

    Raises:
        ValueError: the window does not fit into them.
    """

    section: GRPOSection
    seed: int
    own: range

    def __post_init__(self) -> None:
        if self.num_stochastic > len(self._allowed) or not self.num_trained:
            raise InputError(
                f"a window of {plural(self.num_stochastic, 'step')} does not fit: of the trainable steps, the "
                f"trained expert denoises {len(self._allowed)}; use another --window_range, or more --sampling_steps",
                "too_large",
            )

    @property
    def _allowed(self) -> range:
        """Steps that may be trained: those of `window_range` that the trained network denoises.

        If the window does not fit into them, since another expert denoises them, the range counts from the first step
        of the trained one.
        """
        allowed, end = step_range(self.section), min(self.own.stop, self.section.sampling_steps - 1)
        steps = range(max(allowed.start, self.own.start), min(allowed.stop, end))
        if len(steps) >= max(self.section.window_size, 1):
            return steps
        first = self.own.start + allowed.start
        return range(first, min(first + len(allowed), end))

    @property
    def num_stochastic(self) -> int:
        """Number of stochastic steps of a clip, equal for every clip and rollout."""
        return self.section.window_size or len(self._allowed)

    @property
    def num_trained(self) -> int:
        """Number of trained steps of a clip, equal for every clip and rollout, so that all ranks do equal work."""
        return trained_steps(self.section, self.num_stochastic)

    def stochastic(self, rollout: int, slot: int = 0) -> tuple[int, ...]:
        """Return the steps at which the clips of a slot get noise, ascending."""
        starts = self._starts()
        if self.section.window_strategy == "random":
            key = (rollout, slot) if self.section.window_per_prompt else (rollout,)
            start = random.Random(derive_seed(self.seed, "window", *key)).choice(starts)
        else:
            start = starts[rollout // self.section.window_every % len(starts)]
        return tuple(range(start, start + self.num_stochastic))

    def trained(self, rollout: int, slot: int = 0) -> tuple[int, ...]:
        """Return the stochastic steps that the clips of a slot are trained on, ascending."""
        steps = self.stochastic(rollout, slot)
        if self.num_trained == len(steps):
            return steps
        return tuple(
            sorted(random.Random(derive_seed(self.seed, "steps", rollout, slot)).sample(steps, self.num_trained))
        )

    def pool(self) -> tuple[int, ...]:
        """Return the steps that may be trained, ascending, each as often as its share over a long run.

        Steps in the middle of the range lie in more windows than those at its ends.
        """
        return tuple(sorted(start + i for start in self._starts() for i in range(self.num_stochastic)))

    def _starts(self) -> list[int]:
        """Return the first steps of the windows, for `random` all equally likely, for `progressive` in their order."""
        allowed = self._allowed
        last = allowed.stop - self.num_stochastic
        if self.section.window_strategy == "fixed":
            return [allowed.start]
        stride = self.section.window_stride if self.section.window_strategy == "progressive" else 1
        # The last move is a shorter one if need be, so that the range is covered to its end.
        return [*range(allowed.start, last, stride), last]


def step_weights(kind: StepWeight, steps: Transitions, alpha: Tensor, sigma: Tensor, *, over: Sequence[int]) -> Tensor:
    """Return factors of the policy loss, `[S]` fp64: 0 at deterministic steps, mean 1 over the steps in `over`.

    At a sampled transition the log-density's gradient by the network's prediction v is z / std times dmean/dv, z being
    the standard normal noise drawn. These factors differ much between steps, and the weights undo them:

        none    1
        noise   std, which leaves z dmean/dv. TempFlow-GRPO (arXiv:2508.04324), eq. 7: Norm(sigma_t sqrt(dt)), scaled to
                mean 1 over the trained steps (github.com/Shredded-Pork/TempFlow-GRPO, issue 11).
        flash   std / |dmean/dv|, which leaves z. For the Euler-Maruyama step of rectified flow with noise rate
                g = std / sqrt(-dt) that is Flash-GRPO's (arXiv:2605.15980)
                lambda(t) = 1 / (sqrt(-dt) / g + g sqrt(-dt) (1 - s) / (2 s)).

    A mean `c_x0 x0_hat + c_e e_hat` has dmean/dv = c_e alpha - c_x0 sigma, both in flow matching (x0_hat = x - s v,
    e_hat = x + (1 - s) v) and in variance preserving with v-prediction (x0_hat = a x - s v, e_hat = s x + a v).

    The mean is taken over `over`, not over what one rollout happens to train: with one step per prompt and few prompts
    that would divide the weights out again. Flash-GRPO, which has hundreds of prompts, takes that of the batch.

    Args:
        kind: kind of weights.
        steps: the stochastic transitions of the whole schedule.
        alpha, sigma: the levels that they were made of, `[S + 1]`.
        over: steps whose mean weight is 1, as often as they count: `SDEWindows.pool()`.

    Raises:
        ValueError: a step in `over` is deterministic.
    """
    std = steps.std.double()
    still = sorted({step for step in over if not std[step] > 0})
    if still or not over:
        raise ValueError(f"steps {still} have no noise, so they cannot be trained" if still else "no steps to train")
    if kind == "none":
        weights = (std > 0).double()
    elif kind == "noise":
        weights = std
    else:
        weights = std / (steps.eps.double() * alpha[:-1] - steps.x0.double() * sigma[:-1]).abs()
    return weights / weights[list(over)].mean()
