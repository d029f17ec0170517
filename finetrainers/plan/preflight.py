"""All checks before a weight is loaded, in one pass. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetrainers.config.checks.findings import Findings
from finetrainers.config.checks.frames import argument_problems
from finetrainers.config.checks.kernels import kernel_problems
from finetrainers.config.checks.options import check_config, check_shared_sizes, quantization_problems
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.facts import Facts
from finetrainers.config.geometry import Geometry
from finetrainers.config.methods import METHODS, trait
from finetrainers.config.prompts import MEDIA_OPTIONS, ValidationPrompt, parse_eval_prompts, parse_validation_prompts
from finetrainers.config.root import TrainConfig, fields
from finetrainers.config.sections import AUTO, ValidationSection
from finetrainers.config.target import TargetDevice, target_device
from finetrainers.data.buckets.frames import sampling_fps
from finetrainers.data.inspect.probe import probe
from finetrainers.data.reading.datasets import trigger_warning
from finetrainers.data.reading.items import DataError
from finetrainers.data.reading.media import decoding, open_image
from finetrainers.data.reading.status import InvalidSampleError
from finetrainers.data.video.backends import backend_problem
from finetrainers.memory.estimate import computed_bytes
from finetrainers.methods.registry import Planner, is_method, method_spec, plan_work, spec_problem
from finetrainers.methods.spec import MethodSpec, TrainingSet
from finetrainers.models.files.lora_names import format_problem
from finetrainers.models.registry import Family, get_family, with_family
from finetrainers.optim.rules import optimizer_problems
from finetrainers.rundir.find import CheckpointInfo, find_checkpoint, read_state, scan_checkpoints
from finetrainers.rundir.run_records import result_paths
from finetrainers.utils import faults
from finetrainers.utils.fetch import is_url, start_fetching
from finetrainers.utils.files import folder_problem
from finetrainers.utils.launch import launch_problems, launched_processes, restart_warning
from finetrainers.utils.packaged import SCHEME, model_path
from finetrainers.utils.text import listed
from finetrainers.utils.versions import version_problem

from .check_videos import check_prompt_videos
from .chosen import SIZES, choose_adapter, choose_by_data, choose_defaults, choose_recommended, take_from_run
from .initial_weights import InitialWeights, check_expert, with_other_expert
from .ownership import MODEL_OPTIONS, is_run, model_sources, output_dir_problems
from .parts import CustomParts
from .resume_plan import Start, check_fits, initial_weights, new_run, resume_run

if TYPE_CHECKING:
    from finetrainers.models.spec import ModelSpec


@dataclass(frozen=True, eq=False)  # hashed by identity, as a cache key
class ResolvedRun:
    """Configuration that passed its checks, with facts learned on the way.

    Weights of `init_from` are its `transformer_id`.
    """

    config: TrainConfig
    facts: Facts
    prompts: list[ValidationPrompt]
    plan: TrainingSet
    start: Start
    warnings: list[str] = field(default_factory=list)
    checkpoints: list[CheckpointInfo] = field(default_factory=list)  # those that it has chosen among
    unseen: str | None = None  # why the model itself is unknown; for a dry run
    scored: list[ValidationPrompt] = field(default_factory=list)  # of `eval_prompts`, if the method does not sample
    parts: CustomParts = CustomParts()  # noqa: RUF009, it is immutable

    @property
    def family(self) -> Family:
        """The model's family."""
        return get_family(self.config.model.model_name)

    @property
    def spec(self) -> ModelSpec:
        """The model's spec, which needs torch."""
        return self.family.load(self.config.model, self.parts.network)

    @property
    def sampled(self) -> list[ValidationPrompt]:
        """All prompts that are sampled with the pipeline."""
        return [*self.prompts, *self.scored]

    @property
    def needs_text(self) -> bool:
        """Whether a text must be encoded, or found in the cache: not if all are already encoded."""
        return bool(self.sampled or self.plan.needs_empty_text or self.plan.all_captions())

    @property
    def sizes(self) -> list[tuple[int, int, int]]:
        """Sizes of all training clips and of all samples."""
        return _list_sizes(self.plan, self.sampled)

    @property
    def geometry(self) -> Geometry:
        """Size rules of the checkpoint."""
        return self.facts.geometry

    @property
    def frame_rate(self) -> float:
        """Frames per second of samples."""
        return self.config.validation.validation_frame_rate or self.geometry.fps


def preflight(
    config: TrainConfig,
    *,
    preparing: bool = False,
    weights: bool = True,
    writes: bool = True,
    planner: Planner = plan_work,
    damaged: Mapping[Path, str] | None = None,
) -> ResolvedRun:
    """Check a configuration against its model's rules and its data.

    Args:
        config: the configuration.
        preparing: nothing will be trained, so earlier checkpoints in the output directory are allowed.
        weights: whether weights will be loaded, so that their files are examined.
        writes: whether files will be written into the output directory.
        planner: function that determines the work of the run.
        damaged: checkpoints that must not be resumed from, with the reason.

    Raises:
        ConfigError: all problems at once.
    """
    _check_environment()
    config, family = resolve_family(config)
    findings = Findings()
    method = _find_method(config, findings)
    if weights and writes and not (preparing and config.data.precompute_dir):
        _check_output_dir(config, family, findings)
    earlier = scan_checkpoints(config.run.output_dir)
    config, checkpoint, initial = _find_weights(config, family, findings, damaged or {})
    facts, is_readable = _find_facts(config, family, initial, weights=weights, findings=findings)
    config = resolve_other_expert(config, facts, findings)
    if initial is not None and initial.kind == "lora":
        with collecting_problems(findings.errors, "--init_from"):
            check_expert(initial.path, config.model.expert)
    if method is not None and checkpoint is None:
        config = choose_recommended(choose_defaults(config, facts, unread=method.unread), facts)
    prompts = read_prompts(config, findings)
    scored = _read_scored(config, method, findings)
    rules = option_findings(config, facts, prompts, scored, device=target_device(config))
    findings.add(rules.errors, rules.warnings)
    _check_result(config, facts, findings)
    config = _with_media(config, facts)
    if not preparing:
        _check_records(config, earlier, findings)
    plan = _find_work(config, facts, method, planner, findings)
    config = choose_by_data(config, facts, plan, resumes=checkpoint is not None)
    config = _check_work(config, facts, plan, prompts, scored, findings)
    start = _find_start(config, plan, checkpoint, initial, findings) if is_readable else None
    if findings.errors or start is None:
        raise ConfigError(findings.errors)
    warnings = [*findings.warnings, *plan.warnings, *start.warnings]
    return ResolvedRun(config, facts, prompts, plan, start, warnings, earlier, scored=scored)


#: Tables and options that do not decide what a run works on.
_BESIDES_WORK = {
    "diffusion", "memory", "optimizer", "enable_slicing", "enable_tiling", "enable_model_cpu_offload",
    "validation_frame_rate",
}  # fmt: skip


def plan_work_once(checked: ResolvedRun, plan: Planner = plan_work) -> Planner:
    """Return a planner that reuses the work of an earlier preflight unless its options may differ; else `plan` is."""

    def planner(config: TrainConfig, geometry: Geometry, *, sizes_are_wrong: bool) -> TrainingSet | None:
        now, then = config.without_chosen(SIZES), checked.config.without_chosen(SIZES)
        is_same = all(
            now.get(name) == then.get(name) or not _BESIDES_WORK.isdisjoint((name, option.section))
            for name, option in fields().items()
        )
        if is_same and geometry == checked.geometry and not sizes_are_wrong:
            return checked.plan
        return plan(config, geometry, sizes_are_wrong=sizes_are_wrong)

    return planner


def _list_sizes(plan: TrainingSet, sampled: Sequence[ValidationPrompt]) -> list[tuple[int, int, int]]:
    return [*plan.buckets, *(prompt.size for prompt in sampled if prompt.size is not None)]


def _find_facts(
    config: TrainConfig, family: Family, initial: InitialWeights | None, *, weights: bool, findings: Findings
) -> tuple[Facts, bool]:
    """Return the model's facts by its configs, or of published checkpoints, and whether its files have no problem."""
    check_paths(config, findings)
    has_path_problem = _has_problem(findings, MODEL_OPTIONS)
    device = target_device(config).type
    rewarded = bool(trait(config.training.method, "samples"))
    problems = (
        []
        if has_path_problem
        else family.problems(config.model, weights=weights, device_type=device, rewarded=rewarded)
    )
    findings.errors += attribute_to_option(problems, initial)
    facts = family.facts
    with suppress(ValueError):  # which is one of the problems; others leave the configs readable
        facts = family.facts_of(config.model)
    return facts, not has_path_problem and not problems


def _find_method(config: TrainConfig, findings: Findings) -> MethodSpec | None:
    """Return the method of the configuration, or None and an error among the findings if its name is unknown."""
    name = config.training.method
    if is_method(name):
        if (problem := spec_problem(name)) is not None:
            raise ConfigError([Problem("--method", problem)])
        return method_spec(config)
    findings.error("method", METHODS.unknown(name), "unknown")
    return None


def _check_records(config: TrainConfig, earlier: Sequence[CheckpointInfo], findings: Findings) -> None:
    """Report missing trackers, and what the run does not continue: checkpoints, even damaged ones, or only a result."""
    check_tracker(config, findings)
    root = config.run.output_dir
    if earlier and config.training.resume_from_checkpoint is None:
        message = (
            f"{root} holds checkpoints of an earlier run; continue it with --resume_from_checkpoint latest, or use "
            "another directory"
        )
        findings.error("output_dir", message, "occupied")
    if not earlier and (results := result_paths(root)) and is_run(root):
        message = (
            f"{root} holds the result of an earlier run ({listed([path.name for path in results])}) without its "
            "checkpoints, so a run would start from the beginning and replace it; use another directory, or move the "
            "result away"
        )
        findings.error("output_dir", message, "occupied")


def _find_start(
    config: TrainConfig,
    plan: TrainingSet,
    checkpoint: Path | None,
    initial: InitialWeights | None,
    findings: Findings,
) -> Start | None:
    """Return the start of a new or resumed run, or None if the findings have errors about it."""
    if _has_problem(findings, ("init_from", "resume_from_checkpoint")):
        return None
    begin: Callable[..., Start] = new_run if checkpoint is None else partial(resume_run, checkpoint=checkpoint)
    with collecting_problems(findings.errors, "--resume_from_checkpoint"):
        return begin(config, plan, initial=initial, data_size=config.parallel.data_size(launched_processes()))
    return None


def _find_work(
    config: TrainConfig, facts: Facts, method: MethodSpec | None, planner: Planner, findings: Findings
) -> TrainingSet:
    """Return the work of the run.

    Raises:
        ConfigError: it cannot be determined; with all problems.
    """
    plan = None
    backend = backend_problem(config.data.video_backend)
    if backend is not None:  # it would fail for every clip
        findings.error("video_backend", backend, "not_installed")
    elif method is not None:
        with collecting_problems(findings.errors, "data", DataError):
            plan = planner(config, facts.geometry, sizes_are_wrong=_has_problem(findings, method.size_options))
    if plan is None:
        raise ConfigError(findings.errors)
    return plan


def _check_work(
    config: TrainConfig,
    facts: Facts,
    plan: TrainingSet,
    prompts: list[ValidationPrompt],
    scored: list[ValidationPrompt],
    findings: Findings,
) -> TrainConfig:
    """Check the options against the planned work; return them with the frame rate of samples."""
    rate = sampling_fps(plan.rates, facts.geometry.fps)
    if config.validation.validation_frame_rate is None and rate != facts.geometry.fps:
        # So `config.toml` has it, and later samples from the run or from a checkpoint have the same rate.
        config = with_options(config, "validation", validation_frame_rate=rate)
    check_prompt_videos(config, facts, prompts, plan.size, findings)
    check_prompt_videos(config, facts, scored, plan.size, findings, option="eval_prompts")
    check_pipeline_arguments(config, facts, [prompt.size or plan.size for prompt in (*prompts, *scored)], findings)
    findings.warnings += filter(None, [trigger_warning(config.data, [prompt.prompt for prompt in prompts])])
    sizes = _list_sizes(plan, [*prompts, *scored])
    check_shared_sizes(config, facts, sizes, findings, processes=launched_processes())
    if facts.first_frame != "unknown":
        plan_problems = method_spec(config).plan_problems(plan, config, facts)
        findings.errors += [problem for problem in plan_problems if problem not in findings.errors]
    return config


def _check_environment() -> None:
    """Refuse libraries and numbers of processes that make all other checks impossible.

    Raises:
        ConfigError: with the reasons.
    """
    version_error = version_problem()
    problems = [] if version_error is None else [Problem("", version_error, "not_installed")]
    problems += [Problem(*problem) for problem in launch_problems(joining=False)]
    if problems:
        raise ConfigError(problems)


def resolve_family(config: TrainConfig) -> tuple[TrainConfig, Family]:
    """Return the configuration with its model's family named, and that family.

    Raises:
        ConfigError: its name is unknown, or the model's files do not determine it.
    """
    try:
        config = config.model_copy(update={"model": with_family(config.model)})
        return config, get_family(config.model.model_name)
    except KeyError as error:
        findings, is_named = Findings(), config.model.model_name != AUTO
        if not is_named:
            check_paths(config, findings)
        if not findings.errors:
            findings.error("model_name", str(error.args[0]), "unknown" if is_named else "required")
        raise ConfigError(findings.errors) from None


def resolve_other_expert(config: TrainConfig, facts: Facts, findings: Findings) -> TrainConfig:
    """Return the configuration with the other expert's weights as files; see `with_other_expert`."""
    if config.model.other_expert is not None and not _has_problem(findings, ["other_expert"]):
        with collecting_problems(findings.errors, "--other_expert"):
            return config.model_copy(update={"model": with_other_expert(config.model, facts)})
    return config


def _find_weights(
    config: TrainConfig, family: Family, findings: Findings, damaged: Mapping[Path, str]
) -> tuple[TrainConfig, Path | None, InitialWeights | None]:
    """Return the checkpoint to resume from, the weights that the run begins with, and its options as then.

    No single one of several processes reads all of a checkpoint: they do so together (`restore.verified`).
    """
    checkpoint, initial = None, None
    with collecting_problems(findings.errors, "--resume_from_checkpoint"):
        requested, is_single = config.training.resume_from_checkpoint, launched_processes() == 1
        checkpoint = find_checkpoint(requested, config.run.output_dir, contents=is_single, known_damage=damaged)
        if checkpoint is not None:
            read_state(checkpoint)  # all types, or initial_weights reports them as those of --init_from
            config = take_from_run(config, checkpoint)
    if not findings.errors:
        with collecting_problems(findings.errors, "--init_from"):
            initial = initial_weights(config, checkpoint)
    with collecting_problems(findings.errors, "--init_from"):
        config = choose_adapter(config, initial, family.facts.lora_targets, resumes=checkpoint is not None)
        if initial is not None:
            check_fits(initial, config)
    if initial is not None and initial.kind == "full":
        config = with_options(config, "model", transformer_id=str(initial.path))
    return config, checkpoint, initial


def _check_output_dir(config: TrainConfig, family: Family, findings: Findings) -> None:
    """Refuse to overwrite files that are not the run's."""
    try:
        messages = list(output_dir_problems(config, trained=family.facts.trained))
    except OSError as error:
        findings.error("output_dir", f"{config.run.output_dir} cannot be read: {error.strerror}", "unreadable")
        return
    for message in messages:
        findings.error("output_dir", message, "occupied")


def _read_scored(config: TrainConfig, method: MethodSpec | None, findings: Findings) -> list[ValidationPrompt]:
    """Return the prompts of `eval_prompts`, unless the method reads and samples them itself."""
    if method is None or method.samples or not config.validation.eval_reward:
        return []
    return read_prompts(config, findings, parse_eval_prompts, "--eval_prompts")


def read_prompts(
    config: TrainConfig,
    findings: Findings,
    parse: Callable[[ValidationSection], list[ValidationPrompt]] = parse_validation_prompts,
    option: str = "",
) -> list[ValidationPrompt]:
    """Return the validation prompts, or those that `parse` reads, whose images and videos must be readable.

    Each medium has its own option, unless all are given by `option`.
    """
    prompts: list[ValidationPrompt] = []
    with collecting_problems(findings.errors):
        prompts = parse(config.validation)
    start_fetching(image for prompt in prompts for image in (prompt.image, prompt.last_image))
    problems = [problem for prompt in prompts for problem in _media_problems(prompt)]
    findings.errors += [replace(problem, where=option or problem.where) for problem in problems]
    return prompts


def _media_problems(prompt: ValidationPrompt) -> list[Problem]:
    """Return the problems of reading a prompt's images and videos. Images may be URLs, which are fetched."""
    prefix = str(prompt.prefix[0]) if prompt.prefix else None
    media = [("image", prompt.image), ("last_image", prompt.last_image), ("video_prefix", prefix)]
    findings = Findings()
    for medium, place in [*media, *(("video", path) for path in prompt.videos.values())]:
        if not place:
            continue
        option, is_video = MEDIA_OPTIONS[medium], medium.startswith("video")
        if (is_video or not is_url(place)) and not Path(place).is_file():
            findings.error(option, f"file not found: {place}{('; use a local video' if is_video else '')}", "not_found")
            continue
        try:
            if is_video:
                probe(Path(place))
                continue
            with decoding(place), open_image(place, whole=True) as loaded_image:
                loaded_image.load()  # all of it: a truncated image has a complete header
        except InvalidSampleError as error:
            is_lost = is_url(place) and not error.lasting
            message = f"{place}: {error}" if is_video else str(error)
            findings.error(option, message, "unavailable" if is_lost else "unreadable")
    return findings.errors


def option_findings(
    config: TrainConfig,
    facts: Facts,
    prompts: list[ValidationPrompt],
    scored: list[ValidationPrompt],
    *,
    device: TargetDevice,
    updates_parts: bool = False,
) -> Findings:
    """Return errors and warnings of the options together, with the method, and on a device.

    Args:
        config: the run.
        facts: of the model.
        prompts: to be sampled during training.
        scored: to be sampled and scored in addition.
        device: that it trains on.
        updates_parts: see `optimizer_problems`.
    """
    method = method_spec(config) if is_method(config.training.method) else None
    unread = {} if method is None else method.unread
    findings = check_config(config, facts=facts, prompts=prompts, scored=scored, unread=unread)
    if method is not None:
        world_size = config.parallel.data_size(launched_processes())
        findings.add(method.option_rules(config, facts, world_size=world_size))
    rules = device_findings(config, device, num_processes=launched_processes(), updates_parts=updates_parts)
    findings.errors += [*([] if method is None else method.problems(config)), *rules.errors]
    if config.optimizer.optimizer_in_backward and method is not None and method.accumulates(config):
        message = (
            "frees each gradient at once, and a step of this run adds up the gradients of several micro-batches; use "
            "--gradient_accumulation_steps 1, or remove it"
        )
        findings.error("optimizer_in_backward", message, "conflict")
    findings.warnings += rules.warnings
    if device.is_elsewhere:
        findings.allow_local()
    return findings


def device_findings(
    config: TrainConfig, device: TargetDevice, *, num_processes: int, updates_parts: bool = False
) -> Findings:
    """Return errors and warnings of the options that a device or a number of processes may not support."""
    errors, warnings = optimizer_problems(
        config, device_type=device.type, num_processes=num_processes, updates_parts=updates_parts
    )
    dtype_bytes = computed_bytes(config)
    kernels = kernel_problems(config, device_type=device.type, dtype_bytes=dtype_bytes, capability=device.capability)
    quantization = quantization_problems(config, device_type=device.type)
    return Findings([*errors, *kernels.errors, *quantization], [*warnings, *kernels.warnings])


def _check_result(config: TrainConfig, facts: Facts, findings: Findings) -> None:
    """Check formats that the result cannot have, and requested faults."""
    is_lora, is_dora = config.training.training_type == "lora", config.training.use_dora
    for export_format in config.run.export_formats:
        problem = format_problem(
            config.model.model_name, export_format, is_lora=is_lora, is_dora=is_dora, misread=facts.misread
        )
        if problem is not None:
            findings.error("export_formats", problem, "unsupported")
    findings.warnings += filter(None, [restart_warning()])
    requested = os.environ.get(faults.ENVIRONMENT, "")
    with collecting_problems(findings.errors, faults.ENVIRONMENT):
        if faults.parse_faults(requested):  # so that the variable is not forgotten
            findings.warnings.append(f"{faults.ENVIRONMENT}={requested} disturbs this run on purpose")
    with collecting_problems(findings.errors, faults.PATIENCE):
        faults.min_hang_seconds()


@contextmanager
def collecting_problems(
    problems: list[Problem], where: str | None = None, kind: type[Exception] = ValueError
) -> Iterator[None]:
    """Add the problems of a configuration error within the block to a list.

    With `where`, another error of this kind is added as a problem of that option.
    """
    try:
        yield
    except ConfigError as error:
        problems += error.problems
    except kind as error:
        if where is None:
            raise
        problems.append(Problem.from_error(where, error))


def _has_problem(findings: Findings, options: Collection[str]) -> bool:
    """Return whether a problem concerns one of these options."""
    return any(problem.where.removeprefix("--") in options for problem in findings.errors)


def for_preparing(config: TrainConfig) -> TrainConfig:
    """Return the configuration for preparing a training run: the same data, and no run to continue."""
    config = with_options(config, "training", resume_from_checkpoint=None, init_from=None, reset=[])
    if not is_method(config.training.method):  # its problem is reported with the others
        return config
    method = method_spec(config)
    config = method.for_preparing(config)
    return config if method.caches_texts(config) else with_options(config, "data", precompute_conditions=True)


def _with_media(config: TrainConfig, facts: Facts) -> TrainConfig:
    """Return a configuration that names the column of every control medium of the checkpoint, and no other column."""
    if facts.first_frame == "unknown":
        return config
    columns = dict(config.data.extra_columns)
    return with_options(config, "data", extra_columns=[(name, columns.get(name, name)) for name in facts.media])


def with_options(config: TrainConfig, table: str, **options: Any) -> TrainConfig:
    """Return a copy of the configuration with these options of a table."""
    return config.model_copy(update={table: getattr(config, table).model_copy(update=options)})


def attribute_to_option(problems: list[Problem], initial: InitialWeights | None) -> list[Problem]:
    """Return a model's problems under the user's option: a transformer may have come from `--init_from`."""
    if initial is None or initial.kind != "full":
        return problems
    return [replace(p, where="--init_from") if p.where == "--transformer_id" else p for p in problems]


def check_pipeline_arguments(
    config: TrainConfig, facts: Facts, sizes: Sequence[tuple[int, int, int]], findings: Findings
) -> None:
    """Check the arguments of the pipeline's calls for samples of these sizes."""
    arguments = config.validation.validation_pipeline_arguments
    for message, kind in argument_problems(arguments, facts, [frames for frames, _, _ in sizes]):
        findings.error("validation_pipeline_arguments", message, kind)


def check_tracker(config: TrainConfig, findings: Findings) -> None:
    """Report trackers that are not installed: no data of the run would reach them."""
    missing = []
    for tracker in config.run.report_to:
        packages = (
            ["tensorboard", "tensorboardX"] if tracker == "tensorboard" else [tracker]
        )  # as accelerate takes either
        # A folder of that name, which wandb writes to the working directory, is found too, as a package without a file.
        if not any((spec := find_spec(package)) and spec.origin for package in packages):
            missing.append(tracker)
    if missing:
        is_are = "is" if len(missing) == 1 else "are"
        message = f"{' and '.join(missing)} {is_are} not installed: pip install {' '.join(missing)}"
        findings.error("report_to", message, "not_installed")


def check_paths(config: TrainConfig, findings: Findings) -> None:
    """Report paths that cannot be right. A model that looks like a path must exist; other names are Hub ids."""
    for option, value in model_sources(config):
        if value and value.startswith(SCHEME):
            with collecting_problems(findings.errors, f"--{option}"):
                model_path(value)
        elif value and not Path(value).exists() and (value.startswith((".", "/", "~")) or value.count("/") > 1):
            message = f"{('file' if value.endswith('.safetensors') else 'directory')} not found: {value}"
            findings.error(option, message, "not_found")
    for option in [name for name, option in fields().items() if option.place == "folder"]:
        folder = config.get(option)
        if folder is not None and (problem := folder_problem(folder)) is not None:
            findings.error(option, problem)
