"""From a configuration to what can be run: checked, with the model's own configs, and said, before torch is imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.root import TrainConfig
from finetrainers.config.target import target_device
from finetrainers.methods.registry import method_class_problem, method_spec
from finetrainers.models.files.hub import ask

from .check_upload import check_upload
from .once_per_node import once_per_node
from .preflight import Preflight, named_as_given, preflight
from .start_report import print_start, print_warnings


def get_ready(config: TrainConfig, *, preparing: bool = False, damaged: Mapping[Path, str] | None = None) -> Preflight:
    """The preflight of a run by its model's own configs; unless it is a dry run, what it will do is printed.

    Of the processes of a machine the first one reads, and tells the others.

    Args:
        config: what to run.
        preparing, damaged: see `preflight`.

    Raises:
        ConfigError: everything that is wrong, at once; or the model is neither on this disk nor to be had from the hub.
    """
    return once_per_node(
        lambda: _get_ready(config, preparing=preparing, damaged=damaged),
        (config, preparing, damaged),
        timeout_s=config.run.idle_timeout,
    )


def _get_ready(config: TrainConfig, *, preparing: bool, damaged: Mapping[Path, str] | None) -> Preflight:
    checked = preflight_by_model(config, preparing=preparing, damaged=damaged)
    if not preparing:
        check_upload(checked.config)
        checked = check_rewards(checked)
    if not config.run.dry_run:
        print_start(checked)
    return checked


def preflight_by_model(
    config: TrainConfig, *, preparing: bool = False, damaged: Mapping[Path, str] | None = None
) -> Preflight:
    """The preflight of a run by its model's own configs, which are fetched from the hub if they are not on this disk.

    Raises:
        ConfigError: see `get_ready`.
    """
    checked = preflight(config, preparing=preparing, damaged=damaged)
    fetched = checked.family.fetch_configs(checked.config.model)
    if fetched.new:
        checked = preflight(config, preparing=preparing, damaged=damaged)
    elif fetched.missing and not config.run.dry_run:
        names = ", ".join(fetched.missing)
        message = (
            f"{names} is not on this disk, and {fetched.away}, so the name cannot be checked either; {fetched.way_out}, or "
            "give a directory"
        )
        raise ConfigError([Problem("--pretrained_model_name_or_path", message)])
    elif fetched.missing:
        checked = replace(checked, unseen=f"{', '.join(fetched.missing)} is not on this disk, and {fetched.away}")
    elif fetched.away is not None and not fetched.is_offline_by_choice:
        warning = f"{fetched.away}; {', '.join(fetched.repositories)} is used as it is on this disk"
        checked = replace(checked, warnings=[*checked.warnings, warning])
    return checked


def check_rewards(checked: Preflight) -> Preflight:
    """Return the run if the weights of its rewards can be loaded, with a warning if it is planned for another machine.

    Raises:
        ConfigError: weights are neither on this disk nor available from the hub.
    """
    entries = method_spec(checked.config).rewards(checked.config)
    if not entries:
        return checked
    from finetrainers.rewards.registry import not_to_be_had, weights_not_here

    held_out = checked.config.validation.eval_reward
    options = {
        repo: "eval_reward" if one in held_out else "reward" for one in entries for repo in weights_not_here(one)
    }
    away = ask(list(options))
    if away is None:
        return checked
    problems = [Problem(f"--{option}", not_to_be_had(repo, away)) for repo, option in options.items()]
    if not target_device(checked.config).is_elsewhere:
        raise ConfigError(problems)
    warnings = [f"{problem} (on the machine that trains)" for problem in problems]
    return replace(checked, warnings=[*checked.warnings, *warnings])


def examine_weights(checked: Preflight) -> Preflight:
    """The run, if its weight files have what the networks need, by their headers; the first step that needs torch.

    Raises:
        ConfigError: tensors are missing, or of other shapes; or the LoRA to start from is one of another model.
    """
    warnings = once_per_node(lambda: _examined(checked), checked.config, timeout_s=checked.config.run.idle_timeout)
    if not checked.config.run.dry_run:  # which prints all its warnings together
        print_warnings(warnings)
    return replace(checked, warnings=[*checked.warnings, *warnings])


@contextmanager
def collected(problems: list[Problem]) -> Iterator[None]:
    """Within the block, the problems of a configuration are added to a list."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems


def check_classes(checked: Preflight) -> None:
    """Check the classes that a run is about to use, and the servers of its rewards (imports torch).

    Raises:
        ConfigError: everything that is wrong.
    """
    from finetrainers.optim.factory import optimizer_class_problem

    config = checked.config
    problem = method_class_problem(config)
    problems = [] if problem is None else [Problem("--method", problem)]
    if (problem := optimizer_class_problem(config.optimizer)) is not None:
        problems.append(Problem("--optimizer", problem))
    for option in ("reward", "eval_reward"):
        entries = [entry for entry in config.get(option) if entry.reward.startswith(("http://", "https://"))]
        if entries:
            from finetrainers.rewards.registry import server_problem

            found = [server_problem(entry) for entry in entries]
            problems += [Problem(f"--{option}", why) for why in found if why is not None]
    if problems:
        raise ConfigError(problems)


def check_network(checked: Preflight, *, plan_known: bool = True) -> None:
    """Check a run against the model's configs and its scheduler, as far as that takes the network's classes (imports torch).

    Args:
        checked: the run.
        plan_known: whether it is known what the run works on, and not only in which sizes.

    Raises:
        ConfigError: everything that does not go together.
    """
    from finetrainers.diffusion.timesteps import resolution_shift
    from finetrainers.models.spec import check_split

    from .block_swap import check_number_of_blocks

    config, spec = checked.config, checked.family.load(checked.config.model)

    def check_scheduler() -> None:
        try:
            scheduler = spec.load_scheduler()
            spec.process(scheduler)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError([Problem("--pretrained_model_name_or_path", str(error))]) from error
        if config.diffusion.flow_resolution_shifting and "flow_resolution_shifting" not in method_spec(config).unread:
            try:
                resolution_shift(config.diffusion, scheduler.config)
            except ValueError as error:
                raise ConfigError([Problem("--flow_resolution_shifting", str(error))]) from error

    checks = [
        spec.check_attention_choice,
        lambda: check_split(
            spec, config.parallel.sp_size, config.parallel.sp_mode, dropout=config.training.lora_dropout
        ),
        lambda: check_number_of_blocks(config, spec),
        check_scheduler,
        *([lambda: method_spec(config).check(checked.plan, config, spec=spec)] if plan_known else []),
    ]
    problems: list[Problem] = []
    for check in checks:
        with collected(problems):
            check()
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def _examined(checked: Preflight) -> list[str]:
    """Warnings about the weight files of a run.

    Raises:
        ConfigError: see `examine_weights`.
    """
    spec, initial = checked.family.load(checked.config.model), checked.start.initial
    problems, warnings = spec.examine()
    if problems:
        raise ConfigError(named_as_given(problems, initial))
    is_known = checked.unseen is None
    check_classes(checked)
    if is_known:
        check_network(checked)
    if checked.start.checkpoint is None and initial is not None and initial.kind == "lora" and is_known:
        from .trainable import check_initial_lora

        check_initial_lora(initial, spec, checked.config.training)
    return warnings
