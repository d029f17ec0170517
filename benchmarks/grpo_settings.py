"""The settings that `grpo.py` compares, as changes of those of `finetrainers demo reward`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetrainers.demo.color_preference import CHOICES, choice_captions
from finetrainers.demo.world import caption, draw_scene

#: What the demonstration sets for speed goes back to the default; what all need stays.
ALL: dict[str, Any] = {
    "sampling_steps": None,
    "window_size": None,
    "window_range": None,
    "batch_size": 16,
    "kl_coef": 0.0,
    "lr": 6e-3,
    "checkpointing_steps": 0,
    "evaluated": 16,
}
#: How all are evaluated.
JUDGE: dict[str, Any] = {"sampling_steps": 12, "seed": 0}

#: Learning rates that the baselines are tuned over; ours have the first two.
RATES = (3e-3, 6e-3, 1e-2)
_PUBLISHED: dict[str, Any] = {"prompts_per_step": 2, "batch_size": 8, "shares_starts": False}
#: DanceGRPO's own but for learning rate and rank, and with two prompts: one a process there, and more cost more here.
_DANCEGRPO: dict[str, Any] = {
    "grpo_preset": "dancegrpo",
    "num_generations": 24,
    "best_of_n": 8,
    "reward_fps": 25,
    **_PUBLISHED,
}
#: As published but for the same, and without the EMA: the trained weights are evaluated, which are ahead of it.
_FLOW_FAST: dict[str, Any] = {
    "grpo_preset": "flow-grpo-fast",
    "num_generations": 24,
    "use_ema": False,
    "ema_decay": None,
    **_PUBLISHED,
}
_MIX: dict[str, Any] = {"grpo_preset": "mixgrpo", "num_generations": 12, **_PUBLISHED, "batch_size": 6}
_NFT: dict[str, Any] = {
    "method": "nft",
    "noise_levels": 2,
    "nft_kl": 0.0,
    "init_same_noise": False,
    "kl_coef": None,
}
_AWM: dict[str, Any] = {
    "method": "awm",
    "noise_levels": 2,
    "old_policy_kl": 0.1,
    "init_same_noise": False,
}
_FEW_STEPS: dict[str, Any] = {"sampling_steps": 4, "window_size": 1}
_GRADIENTS: dict[str, Any] = {
    "method": "refl",
    "num_generations": 1,
    "prompts_per_step": 8,
    "batch_size": 8,
    "draft_k": 3,
}


@dataclass(frozen=True)
class Contender:
    """Settings that are compared.

    Attributes:
        changes: of the options of the demonstration.
        limit: passes after which a run ends, reached or not.
        rates: learning rates; the best one is chosen on the way, with all seeds.
    """

    changes: Mapping[str, Any]
    limit: int
    rates: Sequence[float] = RATES[:2]


#: Every rollout of the baseline serves one update, so that nothing is clipped.
BASELINE = "DanceGRPO, one update"
SETTINGS: dict[str, Contender] = {
    BASELINE: Contender({**_DANCEGRPO, "updates_per_rollout": 1}, 14_400, RATES),
    "Flow-GRPO-Fast": Contender(_FLOW_FAST, 8000, RATES),
    "MixGRPO": Contender(_MIX, 8000, RATES),
    "window": Contender({}, 6000),
    "window, 4 steps": Contender(_FEW_STEPS, 2400),
    "NFT, 6 steps": Contender({**_NFT, "sampling_steps": 6}, 5376),
    "AWM, 6 steps": Contender({**_AWM, "sampling_steps": 6}, 5376),
    "reward gradients": Contender(_GRADIENTS, 1824),
}
#: What of the settings is ours, and needs nothing of a reward but its score.
OURS = ("window", "window, 4 steps", "NFT, 6 steps", "AWM, 6 steps")


#: Where most prompts teach nothing: the clips of a caption that names the preferred color alone all show it.
_SATURATED: dict[str, Any] = {**_FEW_STEPS, "reward": ["preferred_color_shown"]}
SATURATED: dict[str, Contender] = {
    "every prompt": Contender(_SATURATED, 3000, RATES[1:2]),
    "selective rollouts": Contender({**_SATURATED, "selective_rollouts": 0.5}, 3000, RATES[1:2]),
}
_CHOICES, _SATURATED_PROMPTS = 8, 24


def saturated_prompts(directory: Path) -> Path:
    """A prompt file of which a quarter leaves a choice of color."""
    captions = choice_captions(_CHOICES, name="train", held_out=False)
    for index in range(_SATURATED_PROMPTS):
        scene = draw_scene("saturated", "plain", index, held_out=False, colors=(list(CHOICES)[index % len(CHOICES)],))
        captions.append(caption(scene, phrasing=index))
    path = directory / "saturated.txt"
    path.write_text("\n".join(captions) + "\n", encoding="utf-8")
    return path


@dataclass(frozen=True)
class Task:
    """A reward to learn.

    Attributes:
        settings: by name; the first is the baseline.
        metrics: held-out scores whose mean is compared.
        score: of these, at which a run ends.
        changes: of the options of all settings.
        evaluated: held-out captions.
        prompts: writes a file of prompts into a directory, or None for those of the demonstration.
    """

    settings: Mapping[str, Contender]
    metrics: Sequence[str]
    score: float
    changes: Mapping[str, Any] = field(default_factory=dict)
    evaluated: int = 16
    prompts: Callable[[Path], Path] | None = None


TASKS: dict[str, Task] = {
    "color": Task(SETTINGS, ("preferred_color",), 0.70),
    # Read as shown or not, so a caption is a step of the score: more captions make the steps small.
    "shape and motion": Task(
        {name: SETTINGS[name] for name in (BASELINE, "window, 4 steps", "NFT, 6 steps")},
        ("demo.shape", "demo.motion"),
        0.82,
        {"reward": ["demo.shape=1", "demo.motion=1"], "eval_reward": ["demo.shape", "demo.motion"]},
        evaluated=64,
    ),
    "saturated": Task(SATURATED, ("preferred_color",), 0.70, prompts=saturated_prompts),
}


#: Of `--learning`: of the demonstration's settings, what an algorithm changes, by what is trained.
_WHOLE: dict[str, Any] = {
    "grpo_preset": "dancegrpo",
    "best_of_n": 8,
    "updates_per_rollout": 1,
    "reward_fps": 25,
    "window_size": None,
    "window_range": None,
    "timestep_fraction": 1.0,
    "train_steps": 48,
}
_FORWARD: dict[str, Any] = {
    "method": "nft",
    "noise_levels": 2,
    "init_same_noise": False,
    "nft_kl": 1e-3,
    "kl_coef": None,
    "window_size": None,
    "window_range": None,
    "train_steps": 20,
}
_MATCHED: dict[str, Any] = {
    "method": "awm",
    "noise_levels": 2,
    "init_same_noise": False,
    "old_policy_kl": 0.1,
    "kl_coef": 1e-3,
    "window_size": None,
    "window_range": None,
    "train_steps": 20,
}
ALGORITHMS: dict[str, dict[str, dict[str, Any]]] = {
    "window": {"LoRA": {"lr": 3e-3}, "full": {"lr": 4e-4}},
    "dancegrpo": {
        "LoRA": {**_WHOLE, "lr": 3e-3, "kl_coef": 2e-3},
        "full": {**_WHOLE, "lr": 3e-4, "kl_coef": 1e-3},
    },
    "nft": {"LoRA": {**_FORWARD, "lr": 3e-3}, "full": {**_FORWARD, "lr": 4e-4}},
    "awm": {"LoRA": {**_MATCHED, "lr": 6e-3}, "full": {**_MATCHED, "lr": 4e-4}},
}
WEIGHTS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "full": {"training_type": "full-finetune", "rank": None, "lora_alpha": None},
}
