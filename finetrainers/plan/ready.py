"""Preparation of a run: its configuration checked with the model's configs, and printed, before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.root import TrainConfig
from finetrainers.config.target import target_device
from finetrainers.methods.registry import Planner, method_class_problem, method_spec, plan_work
from finetrainers.models.files.hub import ask
from finetrainers.utils.progress import working

from .capabilities import capability_problems, run_needs
from .check_upload import check_upload
from .once_per_node import once_per_node
from .preflight import ResolvedRun, attribute_to_option, collecting_problems, plan_work_once, preflight
from .start_report import print_start, print_warnings


def get_ready(
    config: TrainConfig,
    *,
    preparing: bool = False,
    damaged: Mapping[Path, str] | None = None,
    earlier: ResolvedRun | None = None,
) -> ResolvedRun:
    """Return the preflight of a run by its model's own configs; print the plan of the run unless it is a dry run.

    The first process of each machine reads, and sends the result to the others.

    Args:
        config: the configuration to run.
        preparing, damaged: see `preflight`.
        earlier: a preflight of the same start, whose data is not read again, and whose parts are kept.

    Raises:
        ConfigError: all problems at once; or the model is neither on this disk nor available from the Hub.
    """

    def make() -> ResolvedRun:
        checked = preflight_by_model(config, preparing=preparing, damaged=damaged, earlier=earlier)
        if not preparing:
            check_upload(checked.config)
            checked = check_rewards(checked)
        if not config.run.dry_run:
            print_start(checked)
        return checked

    checked = once_per_node(make, (config, preparing, damaged), timeout_s=config.run.idle_timeout)
    return checked if earlier is None else replace(checked, parts=earlier.parts)


def preflight_by_model(
    config: TrainConfig,
    *,
    preparing: bool = False,
    damaged: Mapping[Path, str] | None = None,
    earlier: ResolvedRun | None = None,
    planner: Planner = plan_work,
    writes: bool = True,
) -> ResolvedRun:
    """Return the preflight of a run by its model's own configs, which are fetched from the Hub if necessary.

    Args and errors are those of `get_ready`; for `planner` and `writes` see `preflight`.
    """
    planner = planner if earlier is None else plan_work_once(earlier, planner)
    checked = preflight(config, preparing=preparing, damaged=damaged, planner=planner, writes=writes)
    fetched = checked.family.fetch_configs(checked.config.model)
    absence = f"{', '.join(fetched.missing)} is not on this disk, and {fetched.away}"
    if fetched.new:
        planner = plan_work_once(checked, planner)
        checked = preflight(config, preparing=preparing, damaged=damaged, planner=planner, writes=writes)
    elif fetched.missing and not config.run.dry_run:
        message = f"{absence}, so the name cannot be checked either; {fetched.way_out}, or use a directory"
        raise ConfigError([Problem("--pretrained_model_name_or_path", message, "unavailable")])
    elif fetched.missing:
        checked = replace(checked, unseen=absence)
    elif fetched.away is not None and not fetched.is_offline_by_choice:
        warning = f"{fetched.away}; {', '.join(fetched.repositories)} is used from this disk"
        checked = replace(checked, warnings=[*checked.warnings, warning])
    return checked


def missing_rewards(checked: ResolvedRun) -> dict[str, str]:
    """Return the option of each repository of reward weights that a run would download."""
    entries = method_spec(checked.config).rewards(checked.config)
    if not entries:
        return {}
    from finetrainers.rewards.registry import missing_repositories

    held_out = checked.config.validation.eval_reward
    return {
        repo: "eval_reward" if entry in held_out else "reward"
        for entry in entries
        for repo in missing_repositories(entry)
    }


def check_rewards(checked: ResolvedRun) -> ResolvedRun:
    """Return the run if the weights of its rewards can be loaded, with a warning if it is planned for another machine.

    Raises:
        ConfigError: weights are neither on this disk nor available from the Hub.
    """
    options = missing_rewards(checked)
    outage = ask(list(options)) if options else None
    if outage is None:
        return checked
    from finetrainers.rewards.registry import unavailable_weights_problem

    problems = [
        Problem(f"--{option}", unavailable_weights_problem(repo, outage), "unavailable")
        for repo, option in options.items()
    ]
    if not target_device(checked.config).is_elsewhere:
        raise ConfigError(problems)
    warnings = [f"{problem} (on the machine that trains)" for problem in problems]
    return replace(checked, warnings=[*checked.warnings, *warnings])


def examine_weights(checked: ResolvedRun) -> ResolvedRun:
    """Return the run, if its weight files' headers have the tensors of its networks; the first step that needs torch.

    Raises:
        ConfigError: tensors are missing or have other shapes; or the LoRA to start from is of another model.
    """

    def examine() -> list[str]:
        initial = checked.start.initial
        problems, warnings = checked.spec.examine()
        if problems:
            raise ConfigError(attribute_to_option(problems, initial))
        check_classes(checked)
        if checked.unseen is None:
            check_network(checked)
            if checked.start.checkpoint is None and initial is not None and initial.kind == "lora":
                from .trainable import check_initial_lora

                check_initial_lora(initial, checked.spec, checked.config.training)
            if checked.config.model.other_expert is not None:
                from .trainable import check_other_expert

                check_other_expert(checked.spec)
        return warnings

    with working("examining the weight files"):
        warnings = once_per_node(examine, checked.config, timeout_s=checked.config.run.idle_timeout)
    if not checked.config.run.dry_run:  # a dry run prints all its warnings together
        print_warnings(warnings)
    return replace(checked, warnings=[*checked.warnings, *warnings])


def check_classes(checked: ResolvedRun) -> None:
    """Check the classes that a run is about to use, and the servers of its rewards (imports torch).

    Raises:
        ConfigError: all problems.
    """
    from finetrainers.optim.factory import optimizer_class_problem

    config = checked.config
    problem = method_class_problem(config)
    problems = [] if problem is None else [Problem("--method", problem)]
    custom = checked.parts.optimizer is not None
    if not custom and (problem := optimizer_class_problem(config.optimizer)) is not None:
        problems.append(Problem("--optimizer", problem, "not_installed"))
    for option in ("reward", "eval_reward"):
        entries = [entry for entry in config.get(option) if entry.reward.startswith(("http://", "https://"))]
        if entries:
            from finetrainers.rewards.registry import server_problem

            prompts = getattr(checked.plan, "prompts" if option == "reward" else "eval_prompts", ())
            columns = getattr(prompts[0], "columns", ()) if prompts else ()
            errors = [server_problem(entry, columns) for entry in entries]
            problems += [Problem.from_error(f"--{option}", error) for error in errors if error is not None]
    if problems:
        raise ConfigError(problems)


def network_problems(checked: ResolvedRun) -> list[Problem]:
    """Return why a network that Python has given cannot take the place of the model's own."""
    network, part = checked.parts.network, checked.facts.trained
    if network is None:
        return []
    spec, expected = checked.spec, checked.spec.parts[part]
    if not isinstance(network, expected):
        message = f"expected a {expected.__name__}, got {type(network).__name__}"
        return [Problem("network", message, "mismatch")]
    problems = []
    if getattr(network, "peft_config", None):
        message = f"has adapters: {', '.join(network.peft_config)}; remove them by `network.delete_adapters(...)`"
        problems.append(Problem("network", message, "conflict"))
    for key in ("in_channels", "out_channels"):
        channels, expected_channels = network.config.get(key), spec.configs[part].get(key)
        if None not in (channels, expected_channels) and channels != expected_channels:
            message = f"has {key}={channels}, and the model's {part} {expected_channels}; use those of one model"
            problems.append(Problem("network", message, "mismatch"))
    return problems


def check_network(checked: ResolvedRun, *, plan_known: bool = True) -> None:
    """Check a run against the model's configs, network classes and scheduler (imports torch).

    Args:
        checked: the run.
        plan_known: whether the run's work is known, and not only its sizes.

    Raises:
        ConfigError: all incompatibilities.
    """
    from finetrainers.diffusion.timesteps import resolution_shift
    from finetrainers.models.spec import check_split

    from .block_swap import check_number_of_blocks

    config, spec, method = checked.config, checked.spec, method_spec(checked.config)
    problems: list[Problem] = []
    problems += (missing := capability_problems(run_needs(checked), spec, name=spec.name))
    with collecting_problems(problems):
        check_split(spec, config.parallel.sp_size, config.parallel.sp_mode)
    with collecting_problems(problems):
        check_number_of_blocks(config, spec)
    with collecting_problems(problems, "--pretrained_model_name_or_path"):
        scheduler = spec.load_scheduler()
        spec.process(scheduler)
        if config.diffusion.flow_resolution_shifting and "flow_resolution_shifting" not in method.unread:
            with collecting_problems(problems, "--flow_resolution_shifting"):
                resolution_shift(config.diffusion, scheduler.config)
    if plan_known and not any(problem.where == "--method" for problem in missing):
        with collecting_problems(problems):
            method.check(checked.plan, config, spec=spec)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
