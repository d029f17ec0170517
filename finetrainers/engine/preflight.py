"""Everything that can be refused before a weight is loaded, checked in one go. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from finetrainers.config.checks.options import check_config
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.facts import Facts
from finetrainers.config.geometry import Geometry
from finetrainers.config.prompts import ValidationPrompt, parse_validation_prompts
from finetrainers.config.root import TrainConfig, fields
from finetrainers.config.sections import AUTO
from finetrainers.data.reading.items import DataError
from finetrainers.data.video.backends import backend_problem
from finetrainers.methods.registry import Planner, method_names, method_spec, plan_work
from finetrainers.methods.spec import MethodSpec, WorkPlan
from finetrainers.models.registry import Family, get_family, with_family
from finetrainers.optim.rules import optimizer_problems
from finetrainers.utils import faults
from finetrainers.utils.device import likely_device_type
from finetrainers.utils.launch import launch_problems, launched_processes
from finetrainers.utils.packaged import SCHEME, model_path
from finetrainers.utils.text import nearest
from finetrainers.utils.versions import version_problem

from .checkpoints.find import Found, find_checkpoint, scan_checkpoints
from .initial_weights import InitialWeights
from .resume_plan import Start, check_initial, initial_weights, new_run, resume_run

_MODEL_PLACES = [name for name, option in fields().items() if option.place == "model"]
#: Folders that a run creates if they do not exist.
_FOLDERS = [name for name, option in fields().items() if option.place == "folder"]


@dataclass(frozen=True)
class Preflight:
    """A configuration that passed, with what was learnt on the way; weights of `init_from` are its `transformer_id`."""

    config: TrainConfig
    family: Family
    facts: Facts
    prompts: list[ValidationPrompt]
    plan: WorkPlan
    start: Start
    warnings: list[str] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)  # the checkpoints among which it has chosen
    unseen: str | None = None  # why nothing is known of the model itself; for a dry run

    @property
    def geometry(self) -> Geometry:
        """Size rules of the checkpoint."""
        return self.facts.geometry


def preflight(
    config: TrainConfig, *, preparing: bool = False, weights: bool = True, planner: Planner = plan_work
) -> Preflight:
    """Check a configuration against its model's rules and its data.

    Args:
        config: what to check.
        preparing: nothing will be trained, so earlier checkpoints in the output directory are not in the way.
        weights: whether weights will be loaded, so that their files are examined.
        planner: what finds out what the run will work on.

    Raises:
        ConfigError: everything that is wrong, at once.
    """
    _check_environment()
    config, family = _resolve_family(config)
    config = _with_targets(config, family.facts)
    problems: list[Problem] = []
    method = _find_method(config, problems)
    earlier = scan_checkpoints(config.run.output_dir)
    checkpoint, initial = _find_weights(config, problems)
    config = _with_base(config, initial)
    problems += _check_paths(config)

    misplaced = _concern(problems, _MODEL_PLACES)
    model_problems = [] if misplaced else family.problems(config.model, weights=weights)
    problems += named_as_given(model_problems, initial)
    readable = not misplaced and not model_problems  # else its rules are those of the published checkpoints
    facts = family.facts_of(config.model) if readable else family.facts
    prompts = _read_prompts(config, problems)
    problems += [] if preparing else _check_tracker(config)
    warnings = _check_options(config, facts, prompts, method, problems)
    if config.training.resume_from_checkpoint is None and earlier and not preparing:  # damaged ones too
        message = (
            f"{config.run.output_dir} holds checkpoints of an earlier run; continue it with "
            "--resume_from_checkpoint latest, or give another directory"
        )
        problems.append(Problem("--output_dir", message))

    plan, start = None, None
    backend = backend_problem(config.data.video_backend)
    if backend is not None:
        problems.append(Problem("--video_backend", backend))
    elif method is not None:  # the backend is asked about every clip
        with _noted(problems, "data", DataError):
            plan = planner(config, facts.geometry, sizes_are_wrong=_concern(problems, method.size_options))
    if plan is not None and not model_problems and not _concern(problems, ("init_from", "resume_from_checkpoint")):
        with _noted(problems, "--resume_from_checkpoint"):
            start = _start(config, plan, checkpoint, initial)
    if problems or plan is None or start is None:
        raise ConfigError(problems)
    warnings += [*plan.warnings, *start.warnings]
    return Preflight(config, family, facts, prompts, plan, start, warnings, earlier)


def _check_environment() -> None:
    """Refuse libraries and numbers of processes with which nothing else can be checked.

    Raises:
        ConfigError: with the reasons.
    """
    outdated = version_problem()
    problems = [] if outdated is None else [Problem("", outdated)]
    problems += [Problem(name, message) for name, message in launch_problems(joining=False)]
    if problems:
        raise ConfigError(problems)


def _resolve_family(config: TrainConfig) -> tuple[TrainConfig, Family]:
    """The model's family, which the configuration then names.

    Raises:
        ConfigError: there is none of this name, or the model's files do not tell it.
    """
    try:
        config = config.model_copy(update={"model": with_family(config.model)})
        return config, get_family(config.model.model_name)
    except KeyError as error:
        misplaced = _check_paths(config) if config.model.model_name == AUTO else []
        raise ConfigError(misplaced or [Problem("--model_name", str(error.args[0]))]) from None


def _find_method(config: TrainConfig, problems: list[Problem]) -> MethodSpec | None:
    name, known = config.training.method, method_names()
    if name in known:
        return method_spec(config)
    problems.append(Problem("--method", f"unknown method {name!r}{nearest(name, known)}"))
    return None


def _find_weights(config: TrainConfig, problems: list[Problem]) -> tuple[Path | None, InitialWeights | None]:
    """The checkpoint to resume from, and the weights that the run begins with."""
    checkpoint, initial = None, None
    with _noted(problems, "--resume_from_checkpoint"):
        checkpoint = find_checkpoint(config.training.resume_from_checkpoint, config.run.output_dir)
    if not problems:
        with _noted(problems, "--init_from"):
            initial = initial_weights(config, checkpoint)
            if initial is not None:
                check_initial(initial, config)
    return checkpoint, initial


def _read_prompts(config: TrainConfig, problems: list[Problem]) -> list[ValidationPrompt]:
    """The validation prompts, with their images and videos checked."""
    try:
        prompts = parse_validation_prompts(config.validation)
    except ConfigError as error:
        problems += error.problems
        return []
    problems += _check_media(prompts)
    return prompts


def _check_options(
    config: TrainConfig,
    facts: Facts,
    prompts: list[ValidationPrompt],
    method: MethodSpec | None,
    problems: list[Problem],
) -> list[str]:
    """Add what is wrong with the options among each other, with the method and on this device; their warnings."""
    found = check_config(config, facts=facts, prompts=prompts)
    fault_problems, fault_warnings = _check_faults()
    device, processes = likely_device_type(), launched_processes()
    errors, optimizer_warnings = optimizer_problems(config, device_type=device, num_processes=processes)
    problems += [*found.errors, *([] if method is None else method.problems(config)), *fault_problems, *errors]
    return [*found.warnings, *optimizer_warnings, *fault_warnings]


@contextmanager
def _noted(problems: list[Problem], where: str, kind: type[Exception] = ValueError) -> Iterator[None]:
    """Within the block, an error of this kind becomes a problem of an option."""
    try:
        yield
    except kind as error:
        problems.append(Problem(where, str(error)))


def _concern(problems: list[Problem], options: Collection[str]) -> bool:
    """Whether a problem is one of these options."""
    return any(problem.where.removeprefix("--") in options for problem in problems)


def for_preparing(config: TrainConfig) -> TrainConfig:
    """The configuration of a training run as that of its preparation: the same data, and nothing to continue."""
    training = config.training.model_copy(update={"resume_from_checkpoint": None, "init_from": None, "reset": []})
    data = config.data
    known = config.training.method in method_names()  # what is wrong is said with the rest
    if known and not method_spec(config).caches_texts(config):
        data = data.model_copy(update={"precompute_conditions": True})
    return config.model_copy(update={"training": training, "data": data})


def _with_targets(config: TrainConfig, facts: Facts) -> TrainConfig:
    """A configuration whose LoRA adapts the family's own modules, unless others are named."""
    own = list(facts.lora_targets)
    is_lora = config.training.training_type == "lora"
    if not is_lora or config.changed("target_modules") or config.training.target_modules == own:
        return config
    return config.model_copy(update={"training": config.training.model_copy(update={"target_modules": own})})


def _with_base(config: TrainConfig, initial: InitialWeights | None) -> TrainConfig:
    """A configuration whose transformer is the one that a run starts from, if it is a whole one."""
    if initial is None or initial.kind != "full":
        return config
    model = config.model.model_copy(update={"transformer_id": str(initial.path)})
    return config.model_copy(update={"model": model})


def _start(config: TrainConfig, plan: WorkPlan, checkpoint: Path | None, initial: InitialWeights | None) -> Start:
    data_size = launched_processes()
    if checkpoint is None:
        return new_run(config, plan, initial=initial, data_size=data_size)
    return resume_run(config, plan, checkpoint, initial=initial, data_size=data_size)


def named_as_given(problems: list[Problem], initial: InitialWeights | None) -> list[Problem]:
    """What is wrong with a model, under the option that was given: a transformer may have come from `--init_from`."""
    if initial is None or initial.kind != "full":
        return problems
    return [Problem("--init_from", p.message) if p.where == "--transformer_id" else p for p in problems]


def _check_faults() -> tuple[list[Problem], list[str]]:
    """What is wrong with the faults that were asked for; and that there are any, so that nobody forgets the variable."""
    asked = os.environ.get(faults.ENVIRONMENT, "")
    try:
        found = faults.parse_faults(asked)
    except ValueError as error:
        return [Problem(faults.ENVIRONMENT, str(error))], []
    return [], [f"{faults.ENVIRONMENT}={asked} will disturb this run on purpose"] if found else []


def _check_media(prompts: list[ValidationPrompt]) -> list[Problem]:
    """First frames of validation prompts that are not there; images may also be URLs."""
    problems = []
    for prompt in prompts:
        image, video = prompt.image, prompt.video
        if image and not image.startswith(("http://", "https://")) and not Path(image).is_file():
            problems.append(Problem("--validation_images", f"no such file: {image}"))
        if video and not Path(video).is_file():
            problems.append(Problem("--validation_videos", f"no such file: {video}; give a local video"))
    return problems


def _check_tracker(config: TrainConfig) -> list[Problem]:
    """A tracker that is not installed: nothing of the run would reach it."""
    tracker = config.run.report_to
    packages = ["tensorboard", "tensorboardX"] if tracker == "tensorboard" else [tracker]  # as accelerate takes either
    if tracker == "none" or any(find_spec(package) for package in packages):
        return []
    return [Problem("--report_to", f"{tracker} is not installed: pip install {tracker}")]


def _check_paths(config: TrainConfig) -> list[Problem]:
    """Paths that cannot be right. A model that looks like a path must exist; other names are hub ids."""
    problems = []
    for option in _MODEL_PLACES:
        value = config.get(option)
        if value and value.startswith(SCHEME):
            try:
                model_path(value)
            except ValueError as error:
                problems.append(Problem(f"--{option}", str(error)))
        elif value and not Path(value).exists() and (value.startswith((".", "/", "~")) or value.count("/") > 1):
            problems.append(Problem(f"--{option}", f"no such directory: {value}"))
    for option in _FOLDERS:
        folder = config.get(option)
        if folder is not None and (file := _file_on_the_way(folder)) is not None:
            problems.append(Problem(f"--{option}", f"{file} is a file; give a directory"))
    return problems


def _file_on_the_way(folder: Path) -> Path | None:
    """What is no directory of a path that is to be made as one."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), None)
    return there if there is not None and not there.is_dir() else None
