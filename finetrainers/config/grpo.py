"""Options of reward finetuning, each for the methods with a trait, and the few sums that follow from them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from .base import Section
from .option import option
from .rewards import Reward
from .values import ROUNDING, Fractions, VideoBucket, parse_numbers, range_between

PresetName = Literal[
    "few-steps", "nft-few-steps", "dancegrpo", "flow-grpo", "flow-grpo-fast", "mixgrpo", "nft", "awm", "flash"
]
Kernel = Literal["flow", "dance", "cps", "ddim", "ode"]
MatchingLoss = Literal["uniform", "t", "t2", "ghuber"]

_NotNegative = Annotated[float, Field(ge=0)]
_Sigma = Annotated[float, Field(gt=0, le=1)]


# fmt: off
class GRPOSection(Section):
    """Reward finetuning: sample clips for prompts, score them, and make clips with higher scores more likely."""

    methods = ("samples",)
    in_plan = True

    prompts: Path | None = option(None, "Training prompts: .txt (one per line), .jsonl or .csv (keys `prompt`, "
        "`image`, `last_image`, and columns for rewards), or DanceGRPO's `videos2caption.json`.",
        resume="free", place="input")
    reward: list[Reward] = option([], "Rewards that score the clips, as `NAME[=WEIGHT][,option=value...]`. NAME is a "
        "registered reward, one of its heads (`videoalign.vq`), `module:function` or `http://host:port`; weight 0 "
        "only logs.", resume="same")
    grpo_preset: PresetName | None = option(None, "Published or fast settings for all options that are not set.",
        resume="free", readers="compares")

    rollout_size: VideoBucket | None = option(None, "Size of sampled clips, FxHxW: frames x height x width in pixels.",
        resume="same")
    prompts_per_step: int = option(4, "Prompts per rollout, over all processes.", resume="data", ge=1, le=100_000)
    num_generations: int = option(8, "Clips per prompt (group size), compared with each other; more reduce the "
        "gradient noise. `refl` does not compare clips, so 1 is enough.", resume="same", ge=1, le=100_000)
    best_of_n: int | None = option(None, "Train only on the N/2 best and the N/2 worst clips of each prompt; an odd "
        "N adds one of the best. The default is all clips.", resume="same", ge=2)
    updates_per_rollout: int = option(1, "Optimizer steps per rollout. From the second step on, the clips are "
        "off-policy.", resume="same", ge=1)
    selective_rollouts: float = option(1.0, "Skip prompts whose clips score alike, before sampling them (GRESO): "
        "after z such rollouts in a row, a prompt is sampled with probability P^z, where P is this value. 0.5 works "
        "well; 1 skips none.", resume="free", readers="compares", gt=0, le=1)
    sampling_steps: int = option(10, "Denoising steps of a rollout; fewer than for final samples are enough to "
        "compare clips. The last step is never trained, except by `refl`.", resume="same", ge=2, le=10_000)
    sampling_sigmas: list[_Sigma] = option([], "Noise levels at which a rollout's denoising steps begin, descending "
        "from 1, such as those that a checkpoint was distilled at (flow matching). The default is the checkpoint's "
        "schedule.", resume="same")
    sampler: Kernel | None = option(None, "Noise of the sampler's steps: `flow` (Flow-GRPO), `dance` (DanceGRPO), "
        "`cps` (coefficients preserving), `ddim`, or `ode` (none). The default is `ode` for noised clips, `flow` for "
        "flow matching, else `ddim`.", resume="same", readers="compares")
    eta: float | None = option(None, "Amount of noise. The default is 0.7 for `flow` and `cps`, 0.25 for `dance`, 0.3 "
        "for `ddim`.", resume="same", readers="trains_steps", ge=0)
    shift: float | None = option(None, "Shift of the sampler's noise levels (flow matching). The default is the "
        "checkpoint's.", resume="same", gt=0, le=1000)
    rollout_guidance: float | None = option(None, "Guidance scale that a guidance-distilled network takes as an input. "
        "The default is the pipeline's.", resume="same", ge=0, le=1000)
    rollout_cfg: float = option(1.0, "Classifier-free guidance scale. Above 1, both branches are sampled and "
        "trained, which takes twice the time.", resume="same", ge=1, le=1000)
    init_same_noise: bool = option(True, "Start all clips of a prompt from the same noise, so that they differ only "
        "by the trained steps. The default is off for methods that sample without noise in the steps: `nft`, `awm`.",
        resume="same", readers="compares")

    window_size: int = option(2, "Number of consecutive denoising steps that are stochastic and trained. 0 trains all "
        "but the last.", resume="same", readers="trains_steps", ge=0)
    window_range: Fractions = option([0.0, 0.5],
        "Fractions of the schedule that bound the window. The default is the noisier half; for an expert without "
        "enough of these steps, they count from its first one.", resume="same", needs="window_size",
        readers="trains_steps", min_length=2, max_length=2)
    window_strategy: Literal["fixed", "progressive", "random"] = option("random", "Keep the window at the start of "
        "its range (`fixed`), move it through the range (`progressive`), or draw its position for each rollout "
        "(`random`).", resume="same", needs="window_size", readers="trains_steps")
    window_per_prompt: bool = option(False, "Draw the position of a `random` window for each prompt instead of each "
        "rollout.", resume="same", needs="window_strategy=random", readers="trains_steps")
    window_every: int = option(1, "Rollouts between moves of a `progressive` window.", resume="same",
        needs="window_strategy=progressive", readers="trains_steps", ge=1)
    window_stride: int = option(1, "Denoising steps that a `progressive` window moves by.", resume="same",
        needs="window_strategy=progressive", readers="trains_steps", ge=1)
    timestep_fraction: float = option(1.0, "Fraction of the window's steps to train, drawn at random. Their number "
        "is rounded down.", resume="same", readers="trains_steps", gt=0, le=1)

    clip_range: float | None = option(None, "Clip range epsilon of the probability ratio. The default is 0.1 / "
        "sqrt(D) for D latent values, and 1 for `awm`.", resume="free", readers="clips_ratio", gt=0)
    advantage: Literal["group_std", "global_std", "mean_only"] = option("group_std", "Standard deviation that "
        "advantages are divided by: of the prompt's scores, of the rollout's scores, or none.", resume="free",
        readers="compares")
    advantage_eps: float = option(1e-4, "Epsilon added to the standard deviation of the scores.", resume="free",
        readers="compares", gt=0)
    advantage_std_floor: float = option(0.0, "Smallest standard deviation to divide by, in score units. Smaller "
        "differences are treated as noise.", resume="free", readers="compares", ge=0)
    advantage_correction: int = option(0, "Bessel's correction of the standard deviation: 0 without, 1 with.",
        resume="free", readers="compares", ge=0, le=1)
    advantage_clip: float = option(5.0, "Largest absolute advantage.", resume="free", readers="compares", gt=0)
    reward_combination: Literal["sum", "separate", "weighted", "gdpo"] = option("sum", "How to combine several "
        "rewards: the weighted sum of their advantages (`sum`), one clipped loss each (`separate`), advantages of "
        "the weighted score (`weighted`), or normalized sums (`gdpo`).", resume="free", readers="compares")
    ratio_norm: bool = option(False, "Normalize probability ratios to the same mean and scale at all noise levels "
        "(GRPO-Guard).", resume="free", readers="trains_steps")
    step_weight: Literal["none", "flash", "noise"] = option("none", "Weight of a denoising step's loss: none, "
        "Flash-GRPO's, which evens out gradient norms, or its noise level.", resume="free", readers="trains_steps")
    kl_coef: float = option(0.0, "Weight of the KL penalty against the reference model, the one before training, "
        "which limits reward hacking. 0 disables it.", resume="free", readers="kl_option=kl_coef", ge=0)
    kl_space: Literal["velocity", "mean", "rate"] = option("velocity", "Quantity that the KL penalty compares: "
        "predictions (`velocity`), step means (`mean`: their KL divergence), or that divergence times the step "
        "length (`rate`, Flow-GRPO).", resume="free", needs="kl_coef", readers="trains_steps")

    nft_beta: float = option(1.0, "Distance of the implicit positive and negative policies from the old one. Published "
        "values are 1 and 0.1.", resume="free", readers="contrasts", gt=0)
    nft_kl: float = option(1e-4, "Weight of the distance from the reference model, the one before training.",
        resume="free", readers="kl_option=nft_kl", ge=0)
    old_policy_decay: Annotated[list[_NotNegative], BeforeValidator(parse_numbers)] = option([0.0, 0.001, 0.5],
        "Decay of the EMA of the sampling weights: min(uphold, (step - flat) * rate). Set it as `flat:rate:uphold`.",
        resume="free", readers="trains_noised", former_name="nft_decay", min_length=3, max_length=3)
    noise_levels: int = option(8, "Noise levels at which each clip is trained.", resume="free",
        readers="trains_noised", former_name="nft_timesteps", ge=1, le=10_000)
    noise_level_range: Fractions = option([0.0, 1.0], "Fractions of the sampler's schedule that bound these noise "
        "levels; 0 is pure noise.", resume="free", readers="trains_noised", min_length=2, max_length=2)
    old_policy_kl: float = option(1.0, "Weight of the distance from the EMA of the policy, in units of the advantage "
        "clip. 0 disables it.", resume="free", readers="matches", ge=0)
    matching_loss: MatchingLoss = option("ghuber", "Negative log-likelihood of a clip, from its mean squared error m "
        "at noise level t: m (`uniform`), t m (`t`), t^2 m (`t2`), or t m^p / p (`ghuber`), p being "
        "`matching_power`.", resume="free", readers="matches")
    matching_power: float = option(0.25, "Power of the error; 0.5 is the Huber loss.", resume="free",
        readers="matches", needs="matching_loss=ghuber", gt=0, le=1)

    trajectory_dtype: Literal["fp32", "bf16", "fp16"] = option("fp32", "Dtype in which sampled latents are stored "
        "until they are trained.", resume="free", readers="trains_steps")
    offload_trajectory: bool = option(False, "Store sampled latents in host memory.", resume="free",
        readers="trains_steps")
    reward_fps: float | None = option(None, "Frames per second at which clips are scored; it changes scores that "
        "sample frames. The default is the rate the model was trained at.", resume="free", gt=0, le=1000)
    reward_device: str | None = option(None, "Device of network rewards, such as `cpu` or `cuda:1`; a reward's own "
        "`device=` takes precedence. By default they share the GPU of their process.", resume="free")
    overlap_rewards: bool = option(False, "Score a batch of clips while the next one is sampled, with the same "
        "scores. It saves most with rewards on servers, on another GPU or on the CPU; on the sampling GPU, both need "
        "memory at once.", resume="free", readers="compares")
    keep_pairs: bool = option(False, "Write the best and the worst clip of each prompt to `pairs/`, and "
        "`pairs/pairs.jsonl`, which names them as preferred and rejected.", resume="free", readers="compares")
    keep_rollouts: int = option(0, "Write the best and worst clips of every prompt of a logged rollout, N per "
        "prompt, with `clips.jsonl`, which `--method dpo` reads. 0 writes the best and the worst clip of one prompt.",
        resume="free", ge=0, le=100_000)
    keep_rollouts_every: int | None = option(None, "Write clips with their scores to `rollouts/` every N rollouts "
        "and at the last one, for the report and trackers; 0 disables it. The default is every tenth, but at most 32.",
        resume="free", ge=0)
    dancegrpo_files: bool = option(False, "Also write the files of DanceGRPO's trainer to `output_dir`: "
        "`vq_reward.txt`, `mq_reward.txt`, `videos/` and `checkpoint-{rollout}-0`; see dancegrpo.md.", resume="free",
        readers="compares")
    prompt_embeddings_dir: Path | None = option(None, "Also write the prompt embeddings to this directory, in the "
        "layout of DanceGRPO's preprocessing, which `--prompts` reads. `finetrainers prepare` writes them without "
        "training.", resume="unlisted", local=True, place="folder")
    hacking_guard: Literal["off", "warn", "stop"] | None = option(None, "Action if a held-out reward falls while the "
        "trained reward rises (reward hacking): `off`, `warn`, or `stop` with a checkpoint and exit code 76. Without "
        "one, motion, sharpness, colors and the KL are checked; see grpo.md.", resume="free")
    hacking_patience: int = option(2, "Evaluations in a row that must show reward hacking before `hacking_guard` acts.",
        resume="free", ge=1, le=1000)
    reward_on_error: Literal["raise", "mask"] = option("raise", "Action if a reward fails or does not return a "
        "number: stop the run, or leave the clip out and count it.", resume="free")
# fmt: on


def step_range(section: GRPOSection) -> range:
    """Return the range of steps that may be trained: `window_range` rounded to whole steps, without the last step."""
    last = section.sampling_steps - 1
    if section.window_size == 0:
        return range(last)
    return range_between(section.window_range, section.sampling_steps, last)


def trained_steps(section: GRPOSection, stochastic: int | None = None) -> int:
    """Return the number of trained steps of a clip: `timestep_fraction` of the stochastic ones or the window's, rounded
    down.
    """
    stochastic = stochastic or section.window_size or section.sampling_steps - 1
    return int(stochastic * section.timestep_fraction + ROUNDING)


def prompts_per_process(section: GRPOSection, data_size: int) -> int:
    """Return the largest number of prompts of which one of `data_size` processes samples clips."""
    size, share = section.num_generations, section.prompts_per_step * section.num_generations // data_size
    return max(((rank + 1) * share - 1) // size - rank * share // size for rank in range(data_size)) + 1


def kernel(section: GRPOSection, *, is_flow: bool) -> Kernel:
    """Return the sampler of policy gradients."""
    return section.sampler or ("flow" if is_flow else "ddim")
