"""Settings of reward finetuning by name: fast ones, and those of papers' code, with the source of each value.

A preset sets options that the user does not set. It has settings that apply to any model; sizes, noise shift and
guidance belong to a checkpoint, and are listed with the rest that is not set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from textwrap import fill
from typing import Any

from finetrainers.utils.launch import launched_to_split_weights

from .given import RawOptions
from .methods import trait
from .shape import value_cell

#: Values and their sources, by option.
Settings = Mapping[str, tuple[Any, str]]


@dataclass(frozen=True)
class Preset:
    """Settings of one publication, or measured ones.

    Attributes:
        title: name of the method.
        method: the `--method` whose settings these are; the default one of reward finetuning gives way to it.
        reference: paper and code, or the benchmark.
        settings: option to value, whatever is trained.
        lora: further ones for `--training_type lora`, if published.
        full: further ones for `--training_type full-finetune`, if published.
        omitted_settings: further published settings or differences, and the reason why they are not here.
        budget: GPUs that it is for, if measured.
        speed: how many times fewer passes of the network it takes to a score than the baseline of
            `benchmarks/results/grpo_cpu.md`, or empty.
    """

    title: str
    reference: str
    settings: Settings
    method: str = "grpo"
    lora: Settings = field(default_factory=dict)
    full: Settings = field(default_factory=dict)
    omitted_settings: tuple[str, ...] = ()
    budget: str = ""
    speed: str = ""

    def options(self, training_type: str) -> dict[str, Any]:
        """Return option to value, for LoRA or full finetuning."""
        extra = self.lora if training_type == "lora" else self.full
        return {name: value for name, (value, _) in {**self.settings, **extra}.items()}


def imply_method(source: RawOptions) -> None:
    """Replace policy gradients, the default of reward finetuning, by the method that the named preset belongs to."""
    options, name = source.values, source.values.get("grpo_preset")
    preset = PRESETS.get(name) if isinstance(name, str) else None
    if preset is not None and options.get("method") == Preset.method != preset.method:
        options["method"] = preset.method
        source.notes.append(f"--grpo_preset {name} implies --method {preset.method}")


def fill_preset(source: RawOptions) -> None:
    """Add the named preset's settings for options that are not given. None means not given, as TOML cannot write it."""
    options = source.values
    preset_values, strategy = preset_options(options), _splits_weights(options)
    if preset_values.get("use_ema") and options.get("use_ema") is None and strategy is not None:
        for name in ("use_ema", "ema_decay"):
            preset_values.pop(name, None)
        source.notes.append(
            f"--grpo_preset {options['grpo_preset']} without its --use_ema: the EMA requires unsharded weights, and "
            f"{strategy} shards them"
        )
    options |= {name: value for name, value in preset_values.items() if options.get(name) is None}


def fill_noise(source: RawOptions) -> None:
    """Let the clips of a prompt start from different noise, if not set, where the method adds none in the steps."""
    method = source.values.get("method")
    if trait(method, "compares") and not trait(method, "trains_steps") and source.values.get("init_same_noise") is None:
        source.values["init_same_noise"] = False


def _splits_weights(options: Mapping[str, Any]) -> str | None:
    """Return the strategy that leaves no process all weights, or None if neither options nor launcher set one."""
    if options.get("fsdp") is not None:
        return "FSDP2"
    if options.get("deepspeed") and str(options.get("zero_stage")) == "3":
        return "ZeRO-3"
    return launched_to_split_weights()


def preset_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the preset named in `options`; empty without a known one, or for another method."""
    name = options.get("grpo_preset")
    preset = PRESETS.get(name) if isinstance(name, str) else None
    if preset is None or not trait(options.get("method"), "compares"):
        return {}
    settings = preset.options(options.get("training_type") or "lora")
    # An amount of noise is in units of its kernel.
    if options.get("sampler") not in (None, settings.get("sampler")):
        settings.pop("eta", None)
    return settings


def preset_tables() -> str:
    """Return Markdown tables of all presets: option, value, source."""
    lines: list[str] = []
    for name, preset in PRESETS.items():
        lines += [
            f"### `{name}`\n",
            f"{preset.title}: {preset.reference}.\n",
            "| option | value | published in |",
            "|---|---|---|",
        ]
        for condition, settings in (("", preset.settings), ("LoRA: ", preset.lora), ("full: ", preset.full)):
            lines += [f"| {condition}`{name}` | {value_cell(v)} | {source} |" for name, (v, source) in settings.items()]
        lines += [
            "",
            "Not set:\n",
            *(fill(f"* {text}", 118, subsequent_indent="  ") for text in preset.omitted_settings),
            "",
        ]
    return "\n".join(lines)


def budget_rows() -> list[tuple[str, str, str, str]]:
    """Return budget, settings, clips per rollout and speed (see `Preset.speed`) of the ways to finetune on rewards."""
    clips = {
        name: option["prompts_per_step"] * option["num_generations"]
        for name, preset in PRESETS.items()
        for option in [preset.options("lora")]
    }
    published = [name for name, preset in PRESETS.items() if not preset.speed]
    several = [clips[name] for name in published]
    return [
        *(
            (preset.budget, f"`--grpo_preset {name}`", str(clips[name]), preset.speed)
            for name, preset in PRESETS.items()
            if preset.speed
        ),
        ("one GPU, with rollouts of 10 steps", "no preset", "32", "2.0"),
        ("one GPU, and a reward with a gradient", "`--method refl --num_generations 1`", "8", "15"),
        ("several GPUs", f"as published: {', '.join(f'`{name}`' for name in published)}",
         f"{min(several)} to {max(several)}", "-"),
    ]  # fmt: skip


def budget_table() -> str:
    """Return `budget_rows` as a Markdown table."""
    head = "| budget | settings | clips per rollout | times fewer passes, demo model |\n|---|---|---|---|"
    return "\n".join([head, *(f"| {' | '.join(row)} |" for row in budget_rows())])


def budget_text(width: int) -> str:
    """Return `budget_rows` as text for a terminal."""
    lines = ["presets by budget, clips per rollout, and times fewer passes than DanceGRPO's on the demo model:"]
    for budget, settings, clips, speed in budget_rows():
        text = f"{settings.replace('`', '')}: {budget}; {clips} clips; {speed}".removesuffix("; -")
        lines.append(fill(text, width, initial_indent="  ", subsequent_indent="      "))
    return "\n".join([*lines, "docs/how-to/grpo.md says how this was measured, and what it does not show."])


def _from(source: str, **values: Any) -> dict[str, tuple[Any, str]]:
    """Return several settings of one source."""
    return {name: (value, source) for name, value in values.items()}


_DANCE_SCRIPT = "video launch script, 4 nodes x 8 GPUs"
_DANCE_CODE = "video trainer"
_MIX_SCRIPT = "launch script, 4 nodes x 8 GPUs"
_FLOW_BASE = "`config/base.py`"
_FLOW_CODE = "`train_sd3.py`"
_FAST = "`config/grpo.py`, `geneval_sd3_fast_nocfg`"
_NFT = "`config/nft.py`, `sd3_geneval`"
_NFT_CODE = "`train_nft_sd3.py`"
_AWM = "`config/dgx_awm.py`"
_AWM_CODE = "`train_sd3_awm.py`"
_FLASH = "`config/dgx.py`"
_FLASH_CODE = "its trainer"
_EMA = "(0.9 every 8 steps, as a decay per step)"
#: Settings of all presets that build on Flow-GRPO's code.
_FLOW_SHARED = {
    **_from(_FLOW_BASE, advantage_clip=5.0, optimizer="adamw", beta2=0.999, weight_decay=1e-4, max_grad_norm=1.0),
    **_from("`rewards.py`: `avg`, the sum of weighted scores", reward_combination="weighted"),
    **_from("`stat_tracking.py`", advantage_eps=1e-4),
}
_FLOW_LORA = {**_from(_FLOW_BASE, lr=3e-4), **_from(_FLOW_CODE, rank=32, lora_alpha=64)}

_MEASURED = "measured by `benchmarks/grpo.py`"
#: Settings of both fast presets.
_SMALL = _from(_MEASURED, num_generations=8, prompts_per_step=4, updates_per_rollout=1)
PRESETS: dict[str, Preset] = {
    "few-steps": Preset(
        title="One trained step of four",
        reference="benchmarks/results/grpo_cpu.md",
        budget="one GPU",
        speed="11",
        settings={
            **_SMALL,
            **_from(_MEASURED, sampling_steps=4, window_size=1, window_range=[0.0, 0.5], window_strategy="random",
                    init_same_noise=True),
        },
        omitted_settings=(
            "of the checkpoint: the learning rate, and `shift`, as fewer steps may need more of it;",
            "only the demo model was measured. Large models need 6 steps or more, unless they are distilled.",
        ),
    ),
    "nft-few-steps": Preset(
        title="DiffusionNFT with six denoising steps and two noise levels",
        reference="arXiv:2509.16117, benchmarks/results/grpo_cpu.md",
        method="nft",
        budget="one GPU, sampling without noise",
        speed="4.4",
        settings={
            **_SMALL, **_from(_MEASURED, sampling_steps=6, noise_levels=2, init_same_noise=False, nft_kl=0.0)
        },
        omitted_settings=("the same as of `few-steps`.",),
    ),
    "dancegrpo": Preset(
        title="DanceGRPO",
        reference="arXiv:2505.07818, github.com/XueZeyue/DanceGRPO",
        settings={
            **_from(_DANCE_CODE, sampler="dance", window_size=0),
            **_from(_DANCE_SCRIPT, eta=0.25, sampling_steps=16, num_generations=24, best_of_n=8, init_same_noise=True,
                    timestep_fraction=0.6, reward_fps=8.0),
            **_from(f"{_DANCE_SCRIPT}: one prompt each", prompts_per_step=32),
            **_from(f"{_DANCE_SCRIPT}: 8 kept clips, 4 a step", updates_per_rollout=2),
            **_from(f"{_DANCE_CODE}, fixed in the code", clip_range=1e-4, advantage_clip=5.0, advantage_eps=1e-8),
            **_from(f"{_DANCE_CODE}: `torch.std`", advantage_correction=1),
            **_from(_DANCE_CODE, advantage="group_std", kl_coef=0.0, optimizer="adamw", beta2=0.999),
            **_from(f"{_DANCE_CODE}: a clipped loss for each", reward_combination="separate"),
            **_from(_DANCE_SCRIPT, weight_decay=1e-4, max_grad_norm=1.0),
            **_from(f"{_DANCE_SCRIPT}: with a warm-up of 0", lr_scheduler="constant"),
        },
        lora=_from("image LoRA script", lr=3e-4, rank=128, lora_alpha=256),
        full=_from(_DANCE_SCRIPT, lr=1e-5),
        omitted_settings=(
            "of the checkpoint: clips of 53x480x480, `shift` 5, embedded guidance 6.018;",
            "of the run: 202 rollouts, a checkpoint every 50, VideoAlign's VQ with weight 1 and MQ with 0;",
            "the best and worst clips are those of a process there, of a prompt here: the same with one prompt each;",
            "trained steps are drawn for every clip there, for every prompt here.",
        ),
    ),
    "flow-grpo": Preset(
        title="Flow-GRPO",
        reference="arXiv:2505.05470, github.com/yifan123/flow_grpo",
        settings={
            **_from("`config/grpo.py`, `geneval_sd3`", sampling_steps=10, num_generations=24, prompts_per_step=48,
                    updates_per_rollout=2, init_same_noise=False, kl_coef=0.04, advantage="global_std", use_ema=True),
            **_FLOW_SHARED,
            **_from(_FLOW_BASE, eta=0.7, clip_range=1e-4),
            **_from(_FLOW_CODE, sampler="flow", window_size=0, lr_scheduler="constant"),
            **_from(f"{_FLOW_CODE}: divided by the squared noise rate", kl_space="rate"),
            **_from(f"{_FLOW_CODE} {_EMA}", ema_decay=0.987),
        },
        lora=_FLOW_LORA,
        omitted_settings=(
            "of the checkpoint: images of 512x512, classifier-free guidance 4.5 (`rollout_cfg`);",
            "`kl_coef` is 0.04 for GenEval and OCR, 0.01 for PickScore, 0.004 for its video trainer;",
            "`timestep_fraction` 0.99 leaves out the last step, which is never trained here;",
            "evaluation takes 40 steps; nothing is published for full finetuning.",
        ),
    ),
    "flow-grpo-fast": Preset(
        title="Flow-GRPO-Fast, with the sampler of Flow-CPS and without guidance",
        reference="github.com/yifan123/flow_grpo; CPS: arXiv:2509.05952",
        settings={
            **_from(_FAST, sampler="cps", eta=0.8, sampling_steps=10, num_generations=24, prompts_per_step=48,
                    updates_per_rollout=2, window_size=3, window_range=[0.0, 0.5], clip_range=1e-5, kl_coef=0.0,
                    advantage="global_std", rollout_cfg=1.0, use_ema=True),
            **_from("its pipeline", window_strategy="random"),
            **_FLOW_SHARED,
            **_from(_FLOW_BASE, init_same_noise=False),
            **_from(_FLOW_CODE, lr_scheduler="constant"),
            **_from(f"{_FLOW_CODE} {_EMA}", ema_decay=0.987),
        },
        lora=_FLOW_LORA,
        full=_from("`config/grpo.py`, `pickscore_bagel`", lr=1e-4),
        omitted_settings=(
            "of the checkpoint: images of 512x512;",
            "their log-density lacks the division by twice the variance; here it is the true one, and `clip_range` "
            "binds differently where noise is low.",
        ),
    ),
    "mixgrpo": Preset(
        title="MixGRPO",
        reference="arXiv:2507.21802, repository MixGRPO",
        settings={
            **_from(_MIX_SCRIPT, sampler="flow", eta=0.7, sampling_steps=25, num_generations=12,
                    window_size=4, window_strategy="progressive", window_every=25, window_stride=1,
                    init_same_noise=True, clip_range=1e-4, advantage_clip=5.0, kl_coef=0.0, reward_combination="sum",
                    weight_decay=1e-4, max_grad_norm=1.0),
            **_from(f"{_MIX_SCRIPT}: one prompt each", prompts_per_step=32),
            **_from(f"{_MIX_SCRIPT}: 12 clips, 3 a step", updates_per_rollout=4),
            **_from("its trainer: `torch.std`", advantage_correction=1),
            **_from("its trainer", window_range=[0.0, 1.0], advantage="group_std", advantage_eps=1e-8,
                    optimizer="adamw", beta2=0.999),
            **_from(f"{_MIX_SCRIPT}: with a warm-up of 0", lr_scheduler="constant"),
        },
        full=_from(_MIX_SCRIPT, lr=1e-5),
        omitted_settings=(
            "of the checkpoint: images of 720x720, `shift` 3;",
            "of the run: 300 rollouts, a checkpoint every 50, up to five rewards whose weights sum to 1;",
            "the Flash variants finish a clip with fewer steps of DPM-Solver++; nothing is published for LoRA.",
        ),
    ),
    "nft": Preset(
        title="DiffusionNFT",
        reference="arXiv:2509.16117, github.com/NVlabs/DiffusionNFT",
        method="nft",
        settings={
            **_from(_NFT, sampling_steps=10, num_generations=24, prompts_per_step=48,
                    updates_per_rollout=1, rollout_cfg=1.0, nft_beta=1.0, nft_kl=1e-4),
            **_from(f"{_NFT_CODE}, `decay_type` 1", old_policy_decay=[0.0, 0.001, 0.5]),
            **_from("`config/base.py`: 0.99 of 10 steps", noise_levels=9),
            **_FLOW_SHARED,
            **_from(_FLOW_BASE, advantage="global_std", use_ema=True),
            **_from(_NFT_CODE, init_same_noise=False, ema_decay=0.9, lr_scheduler="constant"),
        },
        lora={**_from("`config/base.py`", lr=3e-4), **_from(_NFT_CODE, rank=32, lora_alpha=64)},
        omitted_settings=(
            "of the checkpoint: images of 512x512;",
            "clips are sampled with a second-order solver there, with Euler steps here;",
            "`nft_beta` is 0.1 and `sampling_steps` 25 for several rewards; for OCR `nft_beta` is 0.1, "
            "`old_policy_decay` 75:0.0075:0.999 and `updates_per_rollout` 2; full finetuning is refused there.",
        ),
    ),
    "awm": Preset(
        title="AWM, Advantage Weighted Matching",
        reference="arXiv:2509.25050, github.com/scxue/advantage_weighted_matching",
        method="awm",
        settings={
            **_from(_AWM, sampling_steps=14, num_generations=24, updates_per_rollout=1, rollout_cfg=1.0,
                    noise_levels=6, matching_loss="ghuber", matching_power=0.25, advantage="global_std",
                    use_ema=True, ema_decay=0.99),
            **_from(f"{_AWM}: 1728 images", prompts_per_step=72),
            **_from(f"{_AWM}, `discrete_wo_init` and 0.9: steps 2 to 12", noise_level_range=[0.07, 0.86]),
            **_from(f"{_AWM}, GenEval: `beta` and `ema_beta`", kl_coef=0.001, old_policy_kl=1.0),
            **_from(f"{_AWM} and {_AWM_CODE}", old_policy_decay=[0.0, 0.001, 0.3]),
            **_FLOW_SHARED,
            **_from(_AWM_CODE, init_same_noise=False, lr_scheduler="constant"),
        },
        lora={**_from(_AWM, lr=3e-4), **_from(_AWM_CODE, rank=32, lora_alpha=64)},
        omitted_settings=(
            "of the checkpoint: images of 512x512;",
            "`kl_coef` is 0.003 for OCR and 0.0001 for PickScore, which takes 24 prompts and also the first step;",
            "`clip_range` is 1, the default here, without effect on the only update of a rollout;",
            "images are sampled with SA-Solver there, with Euler steps here; the images of a batch share their noise "
            "levels there, and each clip draws separate ones here;",
            "nothing is published for full finetuning.",
        ),
    ),
    "flash": Preset(
        title="Flash-GRPO",
        reference="arXiv:2605.15980, github.com/Shredded-Pork/Flash-GRPO",
        settings={
            **_from(_FLASH, sampling_steps=20, clip_range=1e-3, kl_coef=0.0, advantage="global_std", use_ema=True),
            **_from(f"{_FLASH_CODE}: one step of the first 10", window_size=1, window_range=[0.0, 0.5],
                    window_strategy="random", window_per_prompt=True),
            **_from(f"{_FLASH_CODE}: 4 processes x 2 clips", num_generations=8),
            **_from(f"{_FLASH_CODE}, 96 GPUs: 2 batches of 24", prompts_per_step=48, updates_per_rollout=2),
            **_from(_FLASH_CODE, step_weight="flash", init_same_noise=False,
                    lr_scheduler="constant"),
            **_from("its noise rate, sigma itself, is 0.98 to 0.77 at these steps", sampler="dance", eta=0.9),
            **_FLOW_SHARED,
            **_from(f"{_FLASH_CODE} {_EMA}", ema_decay=0.987),
        },
        lora={**_from(_FLASH, lr=1e-4), **_from(_FLASH_CODE, rank=16, lora_alpha=32)},
        omitted_settings=(
            "of the checkpoint: clips of 81x480x832, classifier-free guidance 4.5 (`rollout_cfg`);",
            "of the run: 300 rollouts, HPSv3;",
            "nothing is published for full finetuning.",
        ),
    ),
}  # fmt: skip
