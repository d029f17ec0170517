"""When reward hacking is seen, on the evaluations of the embedded model and on numbers that are made up."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from finetrainers.config.hacking import WITNESSES, HackingRule
from finetrainers.rewards.hacking import RewardHacking, detect_held_out
from finetrainers.training.guards.hacking import HackingGuard

#: Evaluations of the color preference (finetrainers/demo/rewarded.py) every 4 steps: similarity to the preferred color,
#: which is trained, and the number of 16 held-out captions that show their shape. Without the KL penalty, and with it.
HACKED = [
    (0.612, 8), (0.637, 10), (0.672, 8), (0.716, 9), (0.768, 11), (0.833, 9), (0.884, 11), (0.922, 4), (0.906, 4),
    (0.899, 7), (0.860, 8), (0.859, 5), (0.876, 4), (0.891, 3), (0.905, 1), (0.910, 1), (0.920, 0),
]  # fmt: skip
HONEST = [
    (0.612, 8), (0.636, 10), (0.669, 9), (0.701, 10), (0.742, 10), (0.785, 9), (0.820, 9), (0.856, 10), (0.856, 8),
    (0.841, 7), (0.842, 9), (0.848, 10), (0.855, 9), (0.876, 10), (0.891, 10), (0.891, 11), (0.881, 12),
]  # fmt: skip
#: The same runs by what rollouts tell: their mean reward, and the KL, in 4 steps each; the first without a penalty.
HACKED_KL = [
    (0.709, 0.001), (0.701, 0.012), (0.738, 0.048), (0.798, 0.113), (0.843, 0.150), (0.925, 0.290), (0.889, 0.468),
    (0.926, 0.624), (0.931, 0.790), (0.926, 0.841), (0.886, 0.932), (0.863, 0.953), (0.901, 1.211),
]  # fmt: skip
HONEST_KL = [
    (0.709, 0.001), (0.700, 0.011), (0.731, 0.035), (0.779, 0.062), (0.825, 0.066), (0.896, 0.108), (0.850, 0.129),
    (0.877, 0.152), (0.912, 0.148), (0.912, 0.125), (0.901, 0.150), (0.873, 0.121), (0.886, 0.136), (0.909, 0.173),
]  # fmt: skip


def evaluated(trained: float, shown: float, *, step: int) -> dict[str, float]:
    """A record of 16 captions, of which so many show their shape."""
    share = shown / 16
    error = (share * (1 - share) / 15) ** 0.5
    return {"step": step, "eval_weighted_reward": trained, "eval_reward/shape": share, "eval_reward_error/shape": error}


def by_evaluation(series: Sequence[tuple[float, float]], patience: int = 2) -> tuple[int, RewardHacking] | None:
    """The step at which it is seen first, and what."""
    guard = HackingGuard(HackingRule("warn", ("shape",), patience, every=4))
    for place, (trained, shown) in enumerate(series):
        assert guard.record(evaluated(trained, shown, step=4 * place))
        if (found := guard.detect()) is not None:
            return 4 * place, found
    return None


def by_kl(series: Sequence[tuple[float, float]]) -> tuple[int, RewardHacking] | None:
    guard = HackingGuard(HackingRule("warn", (), 2, every=4))
    for place, (reward, kl) in enumerate(series):
        for step in range(4 * place + 1, 4 * place + 5):
            done = guard.record({"step": step, "weighted_reward": reward, "kl": kl})
            assert done == (step % 4 == 0)
        if (found := guard.detect()) is not None:
            return 4 * place + 4, found
    return None


def test_the_hacked_run_is_seen_and_the_honest_one_is_not() -> None:
    seen = by_evaluation(HACKED)
    assert seen is not None
    step, found = seen
    assert step == 32
    assert (found.judge, found.best_step, found.before, found.now) == ("shape", 24, 0.625, 0.25)
    assert found.trained_now > found.trained_before > 0.8
    assert by_evaluation(HONEST) is None
    assert by_evaluation(HONEST, patience=1) is None


def test_the_same_by_the_kl() -> None:
    seen = by_kl(HACKED_KL)
    assert seen is not None
    assert seen[0] == 36
    assert (seen[1].judge, seen[1].best_step) == ("kl", 24)
    assert by_kl(HONEST_KL) is None
    rising = [(0.02 * k, 0.001 * k * k) for k in range(1, 40)]  # the KL of a reward that rises steadily
    assert by_kl(rising) is None
    assert by_kl([(0.9, kl) for _, kl in HACKED_KL]) is None  # the reward has not risen: nothing was hacked


def test_single_values_do_not_decide() -> None:
    """Neither a lucky evaluation nor a bad one; nor a fall of both rewards, which is no hacking."""
    flat = [(0.5 + 0.01 * k, 8.0) for k in range(12)]
    for place, shown in ((3, 16), (6, 0), (11, 0)):
        assert by_evaluation([*flat[:place], (flat[place][0], shown), *flat[place + 1 :]]) is None
    fallen = [*flat[:6], *((trained, 1) for trained, _ in flat[6:])]
    assert by_evaluation(fallen) is not None
    assert by_evaluation([(1 - trained, shown) for trained, shown in fallen]) is None
    seen = [by_evaluation(fallen, patience) for patience in (1, 2, 4)]
    assert [one[0] for one in seen if one is not None] == [24, 28, 36]


def test_the_state_goes_into_a_checkpoint_and_back() -> None:
    """Even between two snapshots, as JSON; known records are not taken twice."""
    whole = HackingGuard(HackingRule("stop", ("shape",), 2, every=4))
    parts = HackingGuard(whole.rule)
    for place, (trained, shown) in enumerate(HACKED[:9]):
        records = [
            {"step": 4 * place, "weighted_reward": trained, "reward/similarity": trained},
            evaluated(trained, shown, step=4 * place),
        ]
        del records[1]["eval_weighted_reward"]  # the trained reward is that of the rollouts
        for record in records:
            whole.record(record)
            parts.record(record)
            assert not parts.record(record)
            saved = json.loads(json.dumps(parts.state_dict(), allow_nan=False))
            parts = HackingGuard(whole.rule)
            parts.load_state_dict(saved)
    assert repr(parts.snapshots) == repr(whole.snapshots)  # NaN differs from itself
    assert parts.detect() == whole.detect()
    assert parts.detect() is not None
    assert parts.last == 32
    parts.load_state_dict({})
    assert (parts.snapshots, parts.last) == ([], -1)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_too_few_evaluations_show_nothing(count: int) -> None:
    guard = HackingGuard(HackingRule("warn", ("shape",), 2, every=1))
    for step in range(count):
        guard.record(evaluated(0.1 * step, 16 - 8 * step, step=step))
    assert detect_held_out(guard.snapshots, "shape", 2) is None


# ---- witnesses -------------------------------------------------------------------------------------------------------

#: Rollouts of 4 prompts of the demo model: GRPO that trains brightness, with the settings of `finetrainers demo reward
#: color`, and that demonstration itself.
WHITE = [
    (0.509, 0.0243, 0.0064), (0.733, 0.0329, 0.0098), (0.540, 0.0352, 0.0073), (0.666, 0.0394, 0.0071),
    (0.496, 0.0329, 0.0075), (0.742, 0.0339, 0.0130), (0.538, 0.0339, 0.0110), (0.552, 0.0469, 0.0081),
    (0.867, 0.0310, 0.0100), (0.811, 0.0325, 0.0230), (0.864, 0.0370, 0.0110), (0.985, 0.0128, 0.0110),
    (0.989, 0.0095, 0.0110), (1.000, 0.0000, 0.0000), (0.999, 0.0014, 0.0024), (1.000, 0.0000, 0.0000),
    (1.000, 0.0001, 0.0003), (1.000, 0.0000, 0.0000),
]  # fmt: skip
COLORED = [
    (0.683, 0.0243, 0.0064), (0.731, 0.0332, 0.0100), (0.697, 0.0377, 0.0064), (0.725, 0.0437, 0.0043),
    (0.630, 0.0354, 0.0088), (0.658, 0.0368, 0.0100), (0.700, 0.0386, 0.0110), (0.810, 0.0418, 0.0095),
    (0.741, 0.0391, 0.0100), (0.712, 0.0456, 0.0070), (0.655, 0.0346, 0.0019), (0.818, 0.0559, 0.0059),
    (0.790, 0.0475, 0.0110), (0.729, 0.0445, 0.0077), (0.830, 0.0604, 0.0087), (0.767, 0.0475, 0.0057),
    (0.846, 0.0500, 0.0098), (0.823, 0.0508, 0.0085), (0.843, 0.0636, 0.0110), (0.787, 0.0490, 0.0130),
    (0.887, 0.0677, 0.0150), (0.906, 0.0778, 0.0140), (0.879, 0.0577, 0.0037), (0.911, 0.0706, 0.0130),
    (0.842, 0.0723, 0.0092), (0.787, 0.0485, 0.0150), (0.883, 0.0727, 0.0120), (0.885, 0.0860, 0.0120),
    (0.913, 0.0802, 0.0190), (0.794, 0.0612, 0.0240), (0.872, 0.0677, 0.0076), (0.930, 0.0737, 0.0055),
]  # fmt: skip
#: Rollouts of 8 prompts in which ReFL trains brightness, as in docs/how-to/reward-gradients.md: the trained reward, and
#: mean and standard deviation over prompts of saturation.
BRIGHTENED = [
    (0.505, 0.053, 0.011), (0.625, 0.051, 0.013), (0.463, 0.054, 0.011), (0.661, 0.054, 0.016), (0.854, 0.042, 0.018),
    (0.906, 0.038, 0.024), (0.983, 0.025, 0.008), (0.982, 0.020, 0.013), (1.000, 0.001, 0.002), (0.999, 0.001, 0.003),
]  # fmt: skip


def by_witness(
    series: Sequence[tuple[float, float, float]], name: str = "saturation", *, prompts: int = 8, patience: int = 2
) -> tuple[int, RewardHacking] | None:
    """Return the first step at which hacking is detected, and the hacking."""
    guard = HackingGuard(HackingRule("warn", (), patience, every=10, witnesses=(name,), prompts=prompts))
    for number, (trained, mean, std) in enumerate(series):
        witness = {f"witness/{name}": mean, f"witness_std/{name}": std}
        record = {"step": number + 1, "rollout": float(number), "weighted_reward": trained, **witness}
        is_new = guard.record(record)
        assert not guard.record(record)
        state = json.loads(json.dumps(guard.state_dict(), allow_nan=False))
        guard = HackingGuard(guard.rule)
        guard.load_state_dict(state)
        if is_new and (hacking := guard.detect()) is not None:
            return number + 1, hacking
    return None


def test_a_witness_sees_white_clips_and_not_colors_that_are_wanted() -> None:
    detected = by_witness(WHITE, prompts=4)
    assert detected is not None
    assert (detected[0], detected[1].judge) == (16, "witness/saturation")
    assert by_witness(COLORED, prompts=4) is None
    assert by_witness(COLORED, prompts=4, patience=1) is None


def test_a_witness_sees_that_clips_turn_white() -> None:
    detected = by_witness(BRIGHTENED)
    assert detected is not None
    step, hacking = detected
    assert (step, hacking.judge, hacking.best_step) == (9, "witness/saturation", 6)
    assert (hacking.before, hacking.now) == pytest.approx((0.052, 0.0105))
    assert hacking.trained_now > 0.98
    later = by_witness(BRIGHTENED, patience=3)
    assert later is not None
    assert later[0] == 10
    assert by_witness([(1 - trained, mean, std) for trained, mean, std in BRIGHTENED]) is None
    noisy = [(trained, mean, 20 * std) for trained, mean, std in BRIGHTENED[:8]]
    assert by_witness(noisy) is None, "prompts differ more than that"
    few = [(trained, mean, std) for trained, mean, std in BRIGHTENED for _ in range(4)]
    detected = by_witness(few, prompts=2)
    assert detected is not None
    assert 32 <= detected[0] <= 36, "windows have as many prompts, whatever a rollout has"


@pytest.mark.parametrize(
    ("name", "before", "after", "is_hacking"),
    [
        ("motion", 0.1, 0.04, True),
        ("motion", 0.1, 0.06, False),
        ("motion", 0.1, 10.0, False),
        ("sharpness", 100.0, 0.0, True),
        ("sharpness", 100.0, 900.0, False),
        ("brightness", 0.5, 0.3, True),
        ("brightness", 0.5, 0.78, False),
        ("brightness", 0.5, 0.82, True),
        ("saturation", 0.05, 0.1, False),
        ("saturation", 0.05, 0.25, True),
    ],
)
def test_only_large_changes_of_witnesses_are_hacking(name: str, before: float, after: float, is_hacking: bool) -> None:
    series = [(0.1, before, before / 10)] * 4 + [(0.9, after, after / 100)] * 3
    assert (by_witness(series, name) is not None) == is_hacking


def test_a_rollout_of_several_steps_counts_once() -> None:
    """Also where a record has the means of several rollouts, and where a witness was left out."""
    rule = HackingRule("warn", (), 1, every=100, witnesses=("motion",), prompts=8, updates=2)
    guard = HackingGuard(rule)
    for step in range(1, 9):
        record = {"step": step, "rollout": float((step - 1) // 2), "weighted_reward": 0.1 * step}
        guard.record({**record, "witness/motion": 0.1 if step < 5 else 0.01, "witness_std/motion": 0.0})
    assert [rollout.step for rollout in [*guard.first, *guard.recent]] == [1, 3, 5, 7]
    assert guard.detect() is not None
    assert not guard.record({"step": 9, "rollout": 4.0, "weighted_reward": 1.0})
    means = {"step": 12, "rollout": 5.0, "steps": 4.0, "weighted_reward": 1.0}
    guard.record({**means, "witness/motion": 0.1, "witness_std/motion": 0.0})
    assert guard.recent[-1].prompts == 16


def watch(
    rows: Sequence[dict[str, float]], *, prompts: int = 2, held_out: tuple[str, ...] = ()
) -> tuple[int, RewardHacking] | None:
    """Return the first rollout at which hacking is detected by all witnesses, and the hacking."""
    guard = HackingGuard(HackingRule("warn", held_out, 2, every=10, witnesses=tuple(WITNESSES), prompts=prompts))
    for number, row in enumerate(rows):
        witnesses = {f"witness/{name}": value for name, value in row.items() if name in WITNESSES}
        spreads = {name.replace("witness", "witness_std"): 0.1 * value for name, value in witnesses.items()}
        trained = {"weighted_reward": row["trained"], "weighted_reward_error": row.get("error", 0.0)}
        if guard.record({"step": number + 1, "rollout": float(number), **witnesses, **spreads, **trained}):
            state = json.loads(json.dumps(guard.state_dict(), allow_nan=False))
            guard = HackingGuard(guard.rule)
            guard.load_state_dict(state)
            if (hacking := guard.detect()) is not None:
                return number + 1, hacking
    return None


USUAL = {"trained": 0.5, "motion": 0.1, "sharpness": 120.0, "brightness": 0.4, "saturation": 0.04}
#: ReFL that trains brightness with 2 prompts: two rollouts on the way, and then nothing but white.
ON_THE_WAY = [
    {"trained": 0.83, "motion": 0.016, "sharpness": 258.0, "brightness": 0.83, "saturation": 0.016},
    {"trained": 0.96, "motion": 0.14, "sharpness": 225.0, "brightness": 0.96, "saturation": 0.030},
]
ALL_WHITE = {"trained": 1.0, "motion": 0.0, "sharpness": 0.0, "brightness": 1.0, "saturation": 0.0}


@pytest.mark.parametrize("held_out", [(), ("shape",)])
@pytest.mark.parametrize("trained", [1.0, 0.5, 0.2], ids=["rising", "equal", "falling"])
@pytest.mark.parametrize("healthy", [1, 12])
def test_clips_that_collapse_are_reported_at_once(healthy: int, trained: float, held_out: tuple[str, ...]) -> None:
    """Whatever the trained reward and the held-out ones do, with few prompts, and within the first rollouts."""
    rows = [USUAL] * healthy + ON_THE_WAY + [{**ALL_WHITE, "trained": trained}]
    detected = watch(rows, held_out=held_out)
    assert detected is not None
    step, hacking = detected
    assert (step, set(hacking.collapsed)) == (healthy + 3, {"motion", "sharpness", "brightness", "saturation"})
    assert hacking.best_step == step - 2, "the weights that have sampled the last clips that were right"
    assert hacking.judge == f"witness/{hacking.collapsed[0]}"


def test_one_witness_alone_is_no_collapse() -> None:
    """Some prompts show nothing that moves, and a reward may be meant for calm or gray clips."""
    for name in ("motion", "saturation"):
        assert watch([USUAL] * 9 + [{**USUAL, name: 0.0}] * 3) is None
    assert watch([ALL_WHITE] * 12) is None, "as from the start"


def test_the_trained_reward_must_rise_by_more_than_chance() -> None:
    rising = [{**USUAL, "trained": 0.6, "motion": 0.02} for _ in range(10)]
    detected = watch([USUAL] * 8 + rising)
    assert detected is not None
    assert detected[1].judge == "witness/motion"
    noisy = [{**row, "error": 0.3} for row in [*[USUAL] * 8, *rising]]
    assert watch(noisy) is None, "a mean over 16 prompts is uncertain by 0.1"
    assert watch([{**row, "error": 0.03} for row in noisy]) is not None
