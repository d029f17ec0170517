"""Memory of a new run by the estimate: options that make it fit a card, and models that fit one. Nothing is loaded."""

from __future__ import annotations

from typing import Any

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.load import load_config
from finetrainers.config.target import planned_gpu, target_device
from finetrainers.memory.fit import usable_host, with_reserve
from finetrainers.memory.phases import RunPlan
from finetrainers.plan.dry_run import unseen_reason, with_packaged_configs
from finetrainers.plan.memory_lines import time_lines
from finetrainers.plan.memory_plan import RunMemory, planned_gib
from finetrainers.plan.preflight import ResolvedRun, preflight
from finetrainers.plan.sizes_plan import plan_sizes
from finetrainers.utils.packaged import SCHEME
from finetrainers.utils.text import file_size

from .offers import CPU, THIS_GPU, Answers, offered_models

#: Options of a run whose size is estimated before its data is read: encoded beforehand, with a sample.
_USUAL: dict[str, Any] = {
    "precompute_conditions": True, "validation_prompts": "a", "validation_steps": 1, "output_dir": "runs/estimate",
    "data_root": ".",
}  # fmt: skip


def planning_options(card: str) -> dict[str, Any]:
    """Return the options of a dry run that plans for a card."""
    return {"dry_run": True, **({} if card in (CPU, THIS_GPU) else {"gpu": card})}


def memory_options(checked: ResolvedRun, answers: Answers) -> tuple[dict[str, Any], dict[str, str], str]:
    """Return the options that make the run fit, a comment on each, and one on the planned peak.

    Published models without configs on this disk are planned by packaged ones.

    Raises:
        ConfigError: nothing makes it fit.
    """
    gib, unseen = _gib(checked, answers), unseen_reason(checked)
    sized = checked if unseen is None else with_packaged_configs(checked)
    if sized is None:
        card = answers["card"]
        budget = {} if gib is None else {"memory_budget": int(10 * gib) / 10 if card == THIS_GPU else card}
        return budget, {}, f"training chooses memory options by the model's size when it starts, since {unseen}"
    memory = RunMemory(sized, host_gib=answers.get("host_gib"))
    plan, source = memory.plan(), "" if unseen is None else ", by packaged configs"
    if gib is None:
        planned = f"{file_size(plan.peak + plan.machine_bytes)} of host memory"
        if not _fits_cpu(memory, plan):
            raise _too_large(answers, f"{file_size(memory.host)} of host memory", planned, memory.other_remedies(plan))
        return {}, {}, "\n".join([f"planned peak{source}: {planned}", *time_lines(memory)])
    gpu = planned_gpu(checked.config)
    size = f"{gib:.3g} GiB" if gpu is None else gpu.name
    options: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    peak, host = plan.peak, plan.machine_bytes
    if not memory.fits(plan, gib):
        advice = memory.advice(gib, device=target_device(checked.config))
        if advice is None:
            raise _too_large(
                answers,
                f"{size} with {file_size(memory.host)} of host memory",
                _describe(peak, host, "on the GPU"),
                memory.other_remedies(plan),
            )
        peak, host = advice.outcome.peak, advice.outcome.host
        for applied in advice.switches:
            options |= applied.switch.options
            reasons[next(iter(applied.switch.options))] = applied.switch.cost
    planned = _describe(peak, host, f"of {size} on the GPU")
    automatic = "options that leave results the same are chosen when training starts"
    return options, reasons, "\n".join([f"planned peak{source}: {planned}; {automatic}", *time_lines(memory)])


def _describe(peak: float, host: float, place: str) -> str:
    """Return the memory of a run on a GPU as text, from bytes of tensors and of host memory."""
    return f"{file_size(with_reserve(peak))} {place} and {file_size(host)} of host memory"


def first_that_fits(answers: Answers, models: list[str]) -> str | None:
    """Return the first model of which a LoRA fits the card and the host by the estimate, or None."""
    return next((model for model in models if model.startswith(SCHEME) or _fits(model, answers)), None)


def _fits(model: str, answers: Answers) -> bool:
    """Return whether a LoRA of a published model fits, with clips of the largest size that a run chooses by itself."""
    config = load_config(pretrained_model_name_or_path=model, **_USUAL, **planning_options(answers["card"]))
    config = config.model_copy(update={"model": config.model.for_estimate()})
    checked = preflight(config, preparing=True, weights=False, planner=plan_sizes)
    if checked.family.configs_not_here(checked.config.model):
        return False
    memory, gib = RunMemory(checked, host_gib=answers.get("host_gib")), _gib(checked, answers)
    plan = memory.plan()
    if gib is None:
        return _fits_cpu(memory, plan)
    return memory.fits(plan, gib) or memory.advice(gib, device=target_device(config)) is not None


def _gib(checked: ResolvedRun, answers: Answers) -> float | None:
    """Return the GiB of the card, or None for a CPU."""
    return None if answers["card"] == CPU else planned_gib(checked.config)


def _fits_cpu(memory: RunMemory, plan: RunPlan) -> bool:
    """Return whether a run on a CPU, which has everything in host memory, fits the machine."""
    return plan.peak + plan.machine_bytes <= usable_host(memory.host)


def _too_large(answers: Answers, machine: str, planned: str, remedies: list[str]) -> ConfigError:
    """Return the error of a model that does not fit a machine, with one that does."""
    smaller_first = [model for model in offered_models() if model != answers["model"]]
    # A CPU is too slow for more than the demo model.
    fitting = first_that_fits(answers, smaller_first if answers["card"] == CPU else smaller_first[::-1])
    models = [] if fitting is None else [f"--model {fitting}, which fits"]
    lines = "".join(f"\n    * {remedy}" for remedy in [*models, *remedies])
    message = (
        f"{answers['model']} does not fit {machine}: {planned} are planned, and no set of options makes it fit; "
        f"use one of:{lines}"
    )
    return ConfigError([Problem("--card", message, "too_large")], of="this command")
