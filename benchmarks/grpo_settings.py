"""The settings that `grpo.py` compares, as changes of those of `finetrainers demo reward`."""

from __future__ import annotations

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

#: DanceGRPO's own but for learning rate and rank, and with two prompts: one a process there, and more cost more here.
#: The rate is the best of 3e-3, 6e-3 and 1e-2 for the baseline; of ours, the second was better than the first.
_DANCEGRPO: dict[str, Any] = {
    "grpo_preset": "dancegrpo",
    "num_generations": 24,
    "best_of_n": 8,
    "prompts_per_step": 2,
    "batch_size": 8,
    "reward_fps": 25,
    "lr": 1e-2,
    "shares_starts": False,
}
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
#: Every rollout of the baseline serves one update, so that nothing is clipped.
BASELINE = "DanceGRPO, one update"
SETTINGS: dict[str, dict[str, Any]] = {
    "DanceGRPO": _DANCEGRPO,
    BASELINE: {**_DANCEGRPO, "updates_per_rollout": 1},
    "DanceGRPO, one update, 4 steps": {**_DANCEGRPO, "updates_per_rollout": 1, "sampling_steps": 4},
    "window": {},
    "window, 4 steps": _FEW_STEPS,
    # The demonstration's own window: its colors are decided in the third step.
    "third of 4 steps": {**_FEW_STEPS, "window_range": [0.5, 0.75]},
    "NFT": _NFT,
    "NFT, 6 steps": {**_NFT, "sampling_steps": 6},
    "AWM": _AWM,
    "AWM, 6 steps": {**_AWM, "sampling_steps": 6},
    "reward gradients": {
        "method": "refl",
        "num_generations": 1,
        "prompts_per_step": 8,
        "batch_size": 8,
        "draft_k": 3,
        "lr": 3e-3,
    },
}
#: Those that are compared with the baseline for the aim: they need nothing of a reward but its score.
OURS = [name for name in SETTINGS if not name.startswith("DanceGRPO") and name != "reward gradients"]

#: Where most prompts teach nothing: the clips of a caption that names the preferred color alone all show it.
_SATURATED: dict[str, Any] = {**_FEW_STEPS, "reward": ["preferred_color_shown"]}
SATURATED: dict[str, dict[str, Any]] = {
    "every prompt": _SATURATED,
    "selective rollouts": {**_SATURATED, "selective_rollouts": 0.5},
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
