"""Advantages: how much better a clip was judged than the other clips of its prompt.

Everything is computed in float64 with exactly rounded sums, so the result does not depend, not even in its last bit, on
the order in which ranks deliver their clips. With r a score, i a clip of the group g of one prompt, and R the rollout:

    group_std    A_i = (r_i - mean_g) / (max(std_g, floor) + eps)      GRPO, DanceGRPO
    global_std   A_i = (r_i - mean_g) / (max(std_R, floor) + eps)      Flow-GRPO (`stat_tracking.py`, global_std)
    mean_only    A_i = r_i - mean_g                                    Dr. GRPO (arXiv:2503.20783)

std_R is taken around the mean of the whole rollout, so that it includes how prompts differ, as in the reference. The
standard deviation of a group is that of a population (numpy's, as Flow-GRPO; the group's advantages then have deviation
1) or, with `correction=1`, the sample estimate (torch's, as DanceGRPO and MixGRPO).

Several rewards k with weights w_k are combined in one of four ways:

    sum          A = sum_k w_k clip(A_k)                               MixGRPO
    separate     as sum, but each w_k clip(A_k) has a separate         DanceGRPO (VQ and MQ)
                 clipped loss, which matters once ratios leave 1
    weighted     r = sum_k w_k r_k, and A from r                       Flow-GRPO, DiffusionNFT, Flash-GRPO
    gdpo         a = sum_k w_k A_k,  A = a / (std_R(a) + eps)          GDPO (arXiv:2601.05242), Flow-Factory's default

A clip without a score of a reward k has A_k = 0 and no share in its means and deviations. In `weighted`, r is the sum
over the scores that the clip has.

GDPO also subtracts the rollout's mean of a, which is zero already, because every group's is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from finetrainers.config.grpo import GRPOSection
from finetrainers.utils.failures import InputError
from finetrainers.utils.text import plural

_SHOWN = 3  # number of positions in an error message


@dataclass(frozen=True)
class Advantages:
    """The advantages of a rollout, and the statistics of its groups.

    Attributes:
        values: float64, shaped like the scores; exactly 0 for failed clips and for groups that teach nothing.
        terms: `[P, G, K]` float64, the summands of the values: one term for each reward that is clipped separately.
        group_std: by reward, the population standard deviation within every group, `[P]`; NaN where no clip has a
            score.
        constant: indices of the groups in which every advantage is exactly 0: no update comes from them.
        failed: mask of clips without a score, `[P, G]`, which took no part.
    """

    values: Tensor
    terms: Tensor
    group_std: Mapping[str, Tensor]
    constant: tuple[int, ...]
    failed: Tensor

    @property
    def constant_share(self) -> float:
        """Share of groups that teach nothing; near 1 means that the reward cannot tell clips apart."""
        return len(self.constant) / len(self.values)


def compute_advantages(
    scores: Mapping[str, Tensor], *, weights: Mapping[str, float], failed: Tensor, section: GRPOSection
) -> Advantages:
    """Return the advantages of all clips of a rollout, over all ranks.

    Args:
        scores: scores by reward, `[P, G]` (prompts, generations), on a common scale if weights are to be meaningful in
            `weighted`; NaN for a clip that the reward does not score.
        weights: weights by reward; a reward of weight 0 takes no part, and its scores are only used for `group_std`.
        failed: boolean mask of clips without a score, shaped like the scores. They have no share in any mean or
            deviation.
        section: the options `advantage`, `advantage_*` and `reward_combination`.

    Raises:
        ValueError: a score of a clip that did not fail is infinite, or it has none, or no reward has a weight.
    """
    members = _members(failed)
    table = {name: _values(name, raw, failed, counts=weights[name] != 0) for name, raw in scores.items()}
    weighted = {name: values for name, values in table.items() if weights[name]}
    if not weighted:
        raise InputError(
            f"advantages require a weighted reward; scored: {', '.join(scores) or 'none'}. At least one reward with "
            "a weight other than 0 must be scored in every rollout (every=1)",
            "required",
        )
    for group in members:
        lacking = [i for i in group if all(math.isnan(values[i]) for values in weighted.values())]
        if lacking:
            raise ValueError(f"clip {lacking[0]} did not fail and has no score")
    terms = _terms(weighted, weights, members, section)
    result = terms[0] if len(terms) == 1 else [math.fsum(row) for row in zip(*terms, strict=True)]
    return Advantages(
        values=torch.tensor(result, dtype=torch.float64).view(failed.shape),
        terms=torch.tensor(terms, dtype=torch.float64).T.reshape(*failed.shape, len(terms)),
        group_std={name: _spreads(values, members) for name, values in table.items()},
        constant=tuple(
            prompt for prompt, group in enumerate(members) if not any(term[i] for term in terms for i in group)
        ),
        failed=failed,
    )


def _terms(
    scores: Mapping[str, Sequence[float]],
    weights: Mapping[str, float],
    members: Sequence[Sequence[int]],
    section: GRPOSection,
) -> list[list[float]]:
    """Return the terms whose sum is the advantage: one term, or with `separate` one for each reward."""
    limit = section.advantage_clip
    if section.reward_combination == "weighted":
        return [_clip(_normalize(_sum(scores, weights), members, section), limit)]
    each = {name: _normalize(values, members, section) for name, values in scores.items()}
    if section.reward_combination == "gdpo":
        total = _sum(each, weights)
        _, std = _moments([total[i] for group in members for i in group], section.advantage_correction)
        return [_clip([value / (std + section.advantage_eps) if value else 0.0 for value in total], limit)]
    clipped = {name: _clip(values, limit) for name, values in each.items()}
    if section.reward_combination == "sum":
        return [_sum(clipped, weights)]
    return [[weights[name] * value for value in values] for name, values in clipped.items()]


def best_of_n(advantages: Tensor, n: int, *, failed: Tensor) -> Tensor:
    """Return indices of the n/2 best and the n/2 worst clips of every group, `[P, n]`, ascending in each row.

    An odd n takes one more of the best, as in DanceGRPO.

    DanceGRPO's best-of-n takes them from all clips of a rank, whatever their prompt; here no group loses its share. The
    advantages stay those of the complete group: they are not recomputed from the selected clips.

    Among equal advantages the clip that comes first counts as the worse. Failed clips are taken only where a group has
    fewer than n others, to give every group an equal count: they have advantage 0 and change nothing.

    Args:
        advantages: `[P, G]`; the indices are those of the flattened tensor.
        n: number of clips to select from every group.
        failed: as in `compute_advantages`.

    Raises:
        ValueError: n is below 2, or more than a group has.
    """
    size = advantages.shape[1]
    if n < 2 or n > size:
        raise ValueError(f"best of {n}: must be at least 2 and at most the {size} clips of a group")
    values, is_failed = advantages.double().flatten().tolist(), failed.flatten().tolist()
    rows = []
    for group in torch.arange(advantages.numel()).view(-1, size).tolist():
        ranked = sorted((i for i in group if not is_failed[i]), key=lambda i: (values[i], i))
        if len(ranked) >= n:
            selected = ranked[: n // 2] + ranked[n // 2 - n :]
        else:
            selected = ranked + [i for i in group if is_failed[i]][: n - len(ranked)]
        rows.append(sorted(selected))
    return torch.tensor(rows)


# ---- arithmetic on lists of floats ---------------------------------------------------------------------------------


def _normalize(scores: Sequence[float], members: Sequence[Sequence[int]], section: GRPOSection) -> list[float]:
    """Return scores relative to their group; 0 outside all groups, and exactly 0 in a group of equal scores."""
    result = [0.0] * len(scores)
    mode, correction = section.advantage, section.advantage_correction
    _, overall = _moments([scores[i] for group in members for i in group if not math.isnan(scores[i])], correction)
    for all_clips in members:
        group = [i for i in all_clips if not math.isnan(scores[i])]
        values = [scores[i] for i in group]
        # Equal scores less their mean are not exactly 0, and dividing by eps makes the rounding error an advantage.
        if not values or min(values) == max(values):
            continue
        mean, std = _moments(values, correction)
        divisor = 1.0
        if mode != "mean_only":
            divisor = max(std if mode == "group_std" else overall, section.advantage_std_floor) + section.advantage_eps
        for i in group:
            result[i] = (scores[i] - mean) / divisor
    return result


def _moments(values: Sequence[float], correction: int) -> tuple[float, float]:
    """Return mean and standard deviation; a single value has deviation 0."""
    if not values:
        return 0.0, 0.0
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / max(len(values) - correction, 1))


def _spreads(values: Sequence[float], members: Sequence[Sequence[int]]) -> Tensor:
    """Return the population standard deviation of the finite scores of every group, `[P]`; NaN if it has none."""
    finite = [[values[i] for i in group if math.isfinite(values[i])] for group in members]
    spreads = [0.0 if len(set(group)) == 1 else _moments(group, 0)[1] if group else math.nan for group in finite]
    return torch.tensor(spreads, dtype=torch.float64)


def _sum(terms: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> list[float]:
    """Return the weighted sum of the scores of each clip; NaN if it has none."""
    sums = []
    for row in zip(*terms.values(), strict=True):
        values = [weights[name] * value for name, value in zip(terms, row, strict=True) if not math.isnan(value)]
        sums.append(math.fsum(values) if values else math.nan)
    return sums


def _clip(values: Sequence[float], limit: float) -> list[float]:
    return [min(max(value, -limit), limit) for value in values]


def _members(failed: Tensor) -> list[list[int]]:
    """Return for each group the indices of its clips that did not fail, among all clips of the rollout."""
    index = torch.arange(failed.numel()).view(failed.shape)
    return [row[~lost].tolist() for row, lost in zip(index, failed, strict=True)]


def _values(name: str, scores: Tensor, failed: Tensor, *, counts: bool) -> list[float]:
    """Return scores as a list, with NaN for failed clips, whatever their score; others must not be infinite."""
    values = scores.double().masked_fill(failed, math.nan).flatten()
    wrong = values.isinf().nonzero().flatten().tolist() if counts else []
    if wrong:
        examples = ", ".join(f"{i} ({values[i]})" for i in wrong[:_SHOWN])
        raise ValueError(
            f"scores of {name!r} are infinite for {plural(len(wrong), 'clip')} that did not fail: {examples}"
        )
    return values.tolist()
