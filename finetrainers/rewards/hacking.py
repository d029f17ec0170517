"""Rules of reward hacking: a held-out reward or a witness falls, or the KL grows, while the trained reward rises.

Clips that collapse, to white or still ones, count whatever the trained reward does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from finetrainers.config.hacking import WITNESSES

#: Prefix of the metrics of witnesses, and of the judge of hacking that one detects.
WITNESS = "witness/"
_ERRORS = 2  # standard errors below its best level at which a held-out reward has fallen
_GAINED = 0.9  # share of the trained reward's gain beyond which a growing KL brings little
_GROWTH = 2  # times the KL has grown since then
_WITNESS_ERRORS = 3  # standard errors that a witness has drifted
_FALL, _RISE = math.log(2), math.log(4)  # that a witness, or the odds of a share, must exceed
_RISE_ERRORS = 2  # standard errors that the trained reward must have risen, for drift to be hacking
_COLLAPSE = math.log(20)  # change of a witness, or of the odds of a share, in clips that have collapsed
_COLLAPSED = 2  # witnesses that must differ so: one alone may be wanted, or a matter of the prompts
_TINY = 1e-6  # smallest value of a witness: a clip may be black, or stand still


@dataclass(frozen=True)
class Snapshot:
    """Rewards and KL at a step.

    Attributes:
        step: of the weights.
        trained: the weighted sum of the trained rewards: of the evaluation, or the mean of the rollouts since the
            previous snapshot; NaN if there was none.
        kl: mean KL since the previous snapshot.
        held_out: mean and standard error of each held-out reward, by label.
    """

    step: int
    trained: float
    kl: float = math.nan
    held_out: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardHacking:
    """Detected reward hacking.

    Attributes:
        judge: the held-out reward, `kl`, or the metric of a witness: `witness/NAME`.
        best_step: the step to go back to; for a witness, the one before the rollouts that show the drift.
        before, now: the judge's value at that step, and at the last snapshot.
        trained_before, trained_now: of the trained reward.
        collapsed: names of the witnesses that show that clips have collapsed; the judge is the first of them.
    """

    judge: str
    best_step: int
    before: float
    now: float
    trained_before: float
    trained_now: float
    collapsed: Sequence[str] = ()


def detect_held_out(snapshots: Sequence[Snapshot], label: str, patience: int) -> RewardHacking | None:
    """Return the hacking if a held-out reward H has fallen while the trained reward T has risen, or None.

    The best level is the greatest mean of H over two consecutive snapshots b - 1 and b. H has fallen if at each of the
    last `patience` snapshots i, all after b,

        H_i < (H_(b-1) + H_b) / 2 - 2 max(se_(b-1), se_b, se_i)

    with standard errors over the held-out prompts. T has risen if its mean over these snapshots is above that over
    b - 1 and b. Neither a single lucky value makes the level, nor a single bad one the fall.
    """
    measured = [snapshot for snapshot in snapshots if label in snapshot.held_out]
    earlier, recent = measured[:-patience], measured[-patience:]
    if len(earlier) < 2:
        return None
    pairs = [(mean([snapshot.held_out[label][0] for snapshot in pair]), pair) for pair in pairwise(earlier)]
    level, best = max(reversed(pairs), key=lambda pair: pair[0])  # of equals the last
    error = max(snapshot.held_out[label][1] for snapshot in best)
    if any(
        snapshot.held_out[label][0] >= level - _ERRORS * max(error, snapshot.held_out[label][1]) for snapshot in recent
    ):
        return None
    before, now = mean([snapshot.trained for snapshot in best]), mean([snapshot.trained for snapshot in recent])
    if not now > before:
        return None
    step = max(best, key=lambda snapshot: (snapshot.held_out[label][0], snapshot.step)).step
    return RewardHacking(label, step, level, recent[-1].held_out[label][0], before, now)


def detect_kl(snapshots: Sequence[Snapshot], patience: int) -> RewardHacking | None:
    """Return the hacking if the KL has grown for nothing, or None.

    With T the trained reward and g the first snapshot at which it had 90 % of all that it has gained so far,

        T_g >= T_0 + 0.9 (max T - T_0)

    it has, if at each of the last `patience` snapshots, all after g, the KL is more than twice that of g.
    """
    measured = [snapshot for snapshot in snapshots if math.isfinite(snapshot.trained) and math.isfinite(snapshot.kl)]
    if len(measured) <= patience:
        return None
    first, highest = measured[0].trained, max(snapshot.trained for snapshot in measured)
    gained = next(k for k, snapshot in enumerate(measured) if snapshot.trained >= first + _GAINED * (highest - first))
    then, recent = measured[gained], measured[-patience:]
    if (
        highest <= first
        or len(measured) - gained <= patience
        or any(snapshot.kl <= _GROWTH * then.kl for snapshot in recent)
    ):
        return None
    trained_now = mean([snapshot.trained for snapshot in recent])
    return RewardHacking("kl", then.step, then.kl, recent[-1].kl, then.trained, trained_now)


@dataclass(frozen=True)
class WitnessedRollout:
    """A record of one or several rollouts.

    Attributes:
        step: of the record.
        prompts: number of prompts.
        trained: the weighted sum of the trained rewards.
        scores: mean and standard deviation over prompts of each witness, by name.
        error: standard error of `trained` over the prompts; NaN if unknown.
    """

    step: int
    prompts: int
    trained: float
    scores: Mapping[str, Sequence[float]]
    error: float = math.nan


def detect_collapse(rollouts: Sequence[WitnessedRollout], first: int) -> RewardHacking | None:
    """Return the hacking if the clips of the last rollout have collapsed, whatever the trained reward does, or None.

    They have if at least two witnesses differ from their means over the first rollouts by a factor of 20: motion,
    sharpness have fallen; the odds of brightness, saturation have fallen or risen.

    Args:
        rollouts: in their order; none may be missing before the last one, but for those in the middle.
        first: number of the first rollouts.
    """
    *earlier, last = rollouts
    compared = earlier[:first]
    if not compared:
        return None
    lost = []
    for name, (value, _) in last.scores.items():
        before = _pool(compared, name)[0]
        drift = _logarithm(value, is_share=WITNESSES[name]) - _logarithm(before, is_share=WITNESSES[name])
        if drift < -_COLLAPSE or (WITNESSES[name] and drift > _COLLAPSE):
            lost.append((name, before, value))
    if len(lost) < _COLLAPSED:
        return None
    (name, before, now), trained = lost[0], mean([rollout.trained for rollout in compared])
    names = [name for name, _, _ in lost]
    return RewardHacking(WITNESS + name, earlier[-1].step - 1, before, now, trained, last.trained, names)


def detect_witness(
    first: Sequence[WitnessedRollout], windows: Sequence[Sequence[WitnessedRollout]], name: str
) -> RewardHacking | None:
    """Return the hacking if a witness has drifted since the first rollouts while the trained reward has risen, or None.

    With w the mean of the witness over all prompts of some rollouts, s its standard deviation over these n prompts, and
    0 for the first rollouts, its logarithm has fallen by d = log w_0 - log w, with the standard error e:

        d > log 2   and   d > 3 e,   e^2 = (s / w)^2 / n + (s_0 / w_0)^2 / n_0

    For a share, its odds w / (1 - w) are compared, with the corresponding error; they may also have risen by d > log 4
    and d > 3 e. All windows of rollouts must show the same, and the mean of the trained reward must be above that of
    the first rollouts by more than two standard errors.
    """
    before = _pool(first, name)
    if any(not math.isfinite(value) for value in before):
        return None
    drifts = [_drift(before, _pool(window, name), is_share=WITNESSES[name]) for window in windows]
    if not all(drifts) or len(set(drifts)) > 1:
        return None
    (trained, error), (trained_now, error_now) = _trained(first), _trained(windows[-1])
    if not trained_now > trained + _RISE_ERRORS * math.hypot(error, error_now):
        return None
    now, _ = _pool(windows[-1], name)
    return RewardHacking(WITNESS + name, windows[0][0].step - 1, before[0], now, trained, trained_now)


def _trained(rollouts: Sequence[WitnessedRollout]) -> tuple[float, float]:
    """Return the mean of the trained reward over some rollouts, and its standard error, 0 where it is unknown."""
    errors = [rollout.error for rollout in rollouts if math.isfinite(rollout.error)]
    return mean([rollout.trained for rollout in rollouts]), math.hypot(*errors) / len(rollouts)


def _pool(rollouts: Sequence[WitnessedRollout], name: str) -> tuple[float, float]:
    """Return the mean of a witness over the prompts of rollouts, and its standard error; NaN if one lacks it."""
    scores = [(rollout.prompts, *rollout.scores.get(name, (math.nan, math.nan))) for rollout in rollouts]
    total = sum(count for count, _, _ in scores)
    mean = math.fsum(count * value for count, value, _ in scores) / total
    variance = math.fsum(count * (std**2 + (value - mean) ** 2) for count, value, std in scores) / max(total - 1, 1)
    return mean, math.sqrt(variance / total)


def _drift(before: tuple[float, float], now: tuple[float, float], *, is_share: bool) -> int:
    """Return -1 for a fall, 1 for the rise of a share, or 0 for a change that is small or not significant."""

    def relative(mean: float, error: float) -> float:
        mean = _clamped(mean, is_share=is_share)
        return error / (mean * (1 - mean) if is_share else mean)

    drift = _logarithm(now[0], is_share=is_share) - _logarithm(before[0], is_share=is_share)
    error = _WITNESS_ERRORS * math.hypot(relative(*before), relative(*now))
    if drift < -max(_FALL, error):
        return -1
    return int(is_share and drift > max(_RISE, error))


def _logarithm(value: float, *, is_share: bool) -> float:
    """Return the logarithm of a witness, of a share that of its odds."""
    value = _clamped(value, is_share=is_share)
    return math.log(value / (1 - value) if is_share else value)


def _clamped(value: float, *, is_share: bool) -> float:
    return min(max(value, _TINY), 1 - _TINY if is_share else math.inf)


def mean(values: Sequence[float]) -> float:
    """Return the mean of the finite values; NaN if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else math.nan


def hacking_text(hacking: RewardHacking, checkpoint: str | None) -> str:
    """Return a description of detected reward hacking, and its remedies."""
    change = f"{hacking.before:.3g} at the start to {hacking.now:.3g}"
    trained = f"{hacking.trained_before:.3g} to {hacking.trained_now:.3g}"
    name = hacking.judge.removeprefix(WITNESS)
    held_out = "add a held-out reward (--eval_prompts, --eval_reward)"
    if hacking.judge == "kl":
        symptom = (
            f"the KL has grown from {hacking.before:.3g} at step {hacking.best_step} to {hacking.now:.3g}, while the "
            f"trained reward has hardly gained: {hacking.trained_before:.3g}, now {hacking.trained_now:.3g}"
        )
        remedy = "measure a reward that is not trained (--eval_reward)"
    elif hacking.collapsed:
        symptom = (
            f"clips of the rollouts have collapsed in {', '.join(hacking.collapsed)}: {name} has changed from "
            f"{change}, the trained reward from {trained}"
        )
        remedy = held_out
    elif hacking.judge.startswith(WITNESS):
        symptom = f"{name} of the rollouts has changed from {change}, while the trained reward has risen from {trained}"
        remedy = f"{held_out}. If the trained reward should change {name}, set --hacking_guard off"
    else:
        symptom = (
            f"the held-out reward {hacking.judge} has fallen from {hacking.before:.3g} around step "
            f"{hacking.best_step} to {hacking.now:.3g}, while the trained reward has risen from {trained}"
        )
        remedy = f"also train on {hacking.judge} (--reward)"
    if checkpoint is None:
        way = "There is no checkpoint from before: start again with a smaller --checkpointing_steps, and"
    else:
        way = f"Resume from {checkpoint}, the nearest checkpoint from before,"
    return f"{symptom}. {way} with a lower --lr or a larger KL penalty, or {remedy}"
