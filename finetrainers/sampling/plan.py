"""Plan of `finetrainers sample`: the clips to sample, checked before anything is loaded. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from finetrainers.config.checks.findings import Findings
from finetrainers.config.checks.kernels import kernel_problems
from finetrainers.config.checks.options import check_sampling, quantization_problems, unguided_reason
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.facts import Facts
from finetrainers.config.given import RawOptions
from finetrainers.config.load import build_config
from finetrainers.config.parallel import ParallelSection
from finetrainers.config.prompts import MEDIA_OPTIONS, ValidationPrompt, parse_validation_prompts
from finetrainers.config.root import TrainConfig
from finetrainers.config.sample import VALIDATION_NAMES, SampleSection, options_of_runs
from finetrainers.data.buckets.buckets import sample_size
from finetrainers.data.reading.datasets import trigger_warning
from finetrainers.memory.estimate import computed_bytes
from finetrainers.methods.registry import is_method, method_spec
from finetrainers.models.registry import (
    Family,
    other_parts_digest,
    text_encoders_digest,
    transformer_digest,
    vae_digest,
)
from finetrainers.parallel.sharding import with_launcher
from finetrainers.plan.check_videos import check_prompt_videos
from finetrainers.plan.chosen import choose_defaults
from finetrainers.plan.ownership import samples_problem
from finetrainers.plan.preflight import (
    check_paths,
    check_pipeline_arguments,
    collecting_problems,
    read_prompts,
    resolve_family,
    resolve_other_expert,
)
from finetrainers.utils.device import likely_device_type
from finetrainers.utils.files import file_sha256, folder_problem
from finetrainers.utils.reading import fits, read_jsonl
from finetrainers.utils.video import slug

from .weights import BASE, Target, Weights, find_target, in_order, named_apart, under

Size = tuple[int, int, int]
#: Options of a run that no pixel depends on, or that other facts stand for.
_WITHOUT_EFFECT = ("enable_model_cpu_offload", "verbose", "cache_dir")
#: Options of a run's validation that say how samples are drawn, where the command's own prompts and seeds do not.
_SETTINGS = [
    name for name in VALIDATION_NAMES
    if name not in ("validation_prompts", "num_validation_videos", *MEDIA_OPTIONS.values())
]  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A column: weights, and the scale of a LoRA.

    Attributes:
        label: distinguishes it from the other columns.
        name: of the column in file names.
    """

    weights: Weights
    scale: float
    label: str
    name: str


@dataclass(frozen=True)
class Sample:
    """A clip to sample.

    Attributes:
        prompt: index of its prompt.
        key: digest of everything that determines its frames.
        facts: everything that determines its frames, and further facts to record.
    """

    variant: Variant
    prompt: int
    seed: int
    key: str
    facts: dict[str, Any] = field(hash=False)


@dataclass(frozen=True)
class SamplePlan:
    """A checked plan of samples.

    Attributes:
        given: sampled runs, checkpoints, LoRA files or models, as the user named them.
        config: of the model and its computation; its `validation` has steps, guidance and frame rate.
        family, facts: of the model.
        prompts: all with a size.
        variants: the columns.
        seeds: of each prompt.
        output_dir: where clips are written.
        warnings: for the user.
    """

    given: Sequence[str]
    config: TrainConfig
    family: Family
    facts: Facts
    prompts: Sequence[ValidationPrompt]
    variants: Sequence[Variant]
    seeds: Sequence[int]
    output_dir: Path
    warnings: Sequence[str] = ()

    @property
    def negative(self) -> str:
        """The negative prompt."""
        return self.config.validation.validation_negative_prompt or ""

    @property
    def frame_rate(self) -> float:
        """Frames per second of the clips."""
        return self.config.validation.validation_frame_rate or self.facts.geometry.fps

    @property
    def sizes(self) -> list[Size]:
        """Frames, height and width of the clips, each size once."""
        return list(dict.fromkeys(prompt.size for prompt in self.prompts if prompt.size is not None))

    def samples(self) -> list[Sample]:
        """Return all clips, by column, then by prompt, then by seed."""
        common = self._common_facts()
        images = [_media_digests(prompt) for prompt in self.prompts]
        samples = []
        for variant in self.variants:
            for index, prompt in enumerate(self.prompts):
                for seed in self.seeds:
                    weights = variant.weights
                    facts = {
                        **common, "prompt": prompt.prompt, "size": "x".join(map(str, prompt.size or ())),
                        "given": images[index], "seed": seed, "weights": weights.digest,
                        "scale": variant.scale if weights.kind == "lora" else None,
                    }  # fmt: skip
                    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]
                    facts["column"], facts["path"] = variant.name, str(weights.path or "")
                    samples.append(Sample(variant, index, seed, key, facts))
        return samples

    def stem(self, sample: Sample) -> str:
        """Return the file name of a clip, without its suffix."""
        return f"{slug(self.prompts[sample.prompt].prompt)}_{sample.variant.name}_seed-{sample.seed}"

    def _common_facts(self) -> dict[str, Any]:
        """Return the facts that determine the frames of all clips: the model's files, and the options."""
        config, validation = self.config, self.config.validation
        plain = config.plain()
        names = [name for name in options_of_runs() if name not in _WITHOUT_EFFECT and plain[name] is not None]
        model = config.model
        digests = [text_encoders_digest(model), vae_digest(model)]
        if not all(variant.weights.kind == "full" for variant in self.variants):
            digests.append(transformer_digest(model))
        if (others := other_parts_digest(model, self.facts)) != "":  # so that clips of other families keep their keys
            digests.append(others)
        if model.other_expert is not None:
            digests.append(file_sha256(Path(model.other_expert)))
        if None not in digests:  # then their paths do not matter
            names = [name for name in names if not name.endswith(("_id", "_or_path", "other_expert"))]
        scale = validation.validation_guidance_scale_2
        optional: dict[str, Any] = {} if scale is None else {"guidance_scale_2": scale}  # keeps keys of other samples
        if validation.validation_pipeline_arguments:
            optional["pipeline_arguments"] = dict(sorted(validation.validation_pipeline_arguments))
        return {
            "model": digests, "options": {name: plain[name] for name in names},
            "num_inference_steps": validation.validation_inference_steps,
            "guidance_scale": validation.validation_guidance_scale, **optional, "frame_rate": self.frame_rate,
            "negative_prompt": self.negative,
        }  # fmt: skip


def plan_samples(names: Sequence[str], options: SampleSection, flags: RawOptions) -> SamplePlan:
    """Plan the clips to sample, and check the plan.

    Args:
        names: of runs, checkpoints, LoRA files or models.
        options: of the command.
        flags: options of a run that override its own.

    Raises:
        ConfigError: all problems, at once.
    """
    findings, targets = Findings(), list[Target]()
    findings.errors += _launcher_problems()
    for name in names:
        try:
            targets.append(find_target(name, use_ema=not options.no_ema))
        except ConfigError as error:
            findings.errors += error.problems
        except ValueError as error:
            findings.errors.append(Problem.from_error("TARGET", error))
    if len(targets) < len(names):
        raise ConfigError(findings.errors)
    return plan_targets(names, named_apart(in_order(targets)), options, flags, findings)


def plan_targets(
    names: Sequence[str], targets: Sequence[Target], options: SampleSection, flags: RawOptions, findings: Findings, *,
    fixed_size: bool = False,
) -> SamplePlan:  # fmt: skip
    """Plan samples of targets.

    Args:
        names, options, flags: see `plan_samples`.
        targets: with weights whose labels differ.
        findings: problems found so far.
        fixed_size: replace all sizes of prompts by the size of the options.

    Raises:
        ConfigError: all problems, at once.
    """
    config = _common_config(targets, flags, findings)
    if config is None:
        raise ConfigError(findings.errors)
    try:
        config, family = resolve_family(config)
    except ConfigError as error:
        raise ConfigError([*findings.errors, *error.problems]) from None
    check_paths(config, findings)
    for weights in [] if findings.errors else dict.fromkeys(target.weights for target in targets):
        findings.errors += under("TARGET", family.problems(weights.on(config.model)), weights)
    findings.errors[:] = dict.fromkeys(findings.errors)
    if findings.errors:  # without the model's files, its sizes are unknown
        raise ConfigError(findings.errors)
    _fetch(family, config)
    facts = family.facts_of(config.model)
    config = resolve_other_expert(config, facts, findings)
    for target in targets:
        with collecting_problems(findings.errors, "TARGET"):
            target.check_expert(config.model.expert)
    config, prompts = _prompts(config, options, targets[0], findings, fixed_size=fixed_size)
    config = choose_defaults(config, facts)
    _check(config, facts, prompts, options, targets, findings)
    variants = _variants(targets, options, findings)
    output_dir = options.output_dir or _default_place(targets[0])
    if (problem := folder_problem(output_dir)) is not None:
        findings.error("output_dir", problem)
    elif (problem := samples_problem(output_dir)) is not None:
        findings.error("output_dir", problem, "occupied")
    if findings.errors:
        raise ConfigError(use_command_names(findings.errors))
    first = config.training.seed if options.seed is None else options.seed
    if (warning := trigger_warning(config.data, [prompt.prompt for prompt in prompts])) is not None:
        findings.warnings.insert(0, warning)
    return SamplePlan(
        names, config, family, facts, prompts, variants, range(first, first + options.num), output_dir,
        findings.warnings,
    )  # fmt: skip


def _launcher_problems() -> Iterator[Problem]:
    """Yield a problem if the launcher splits the network, since each process samples with all of it."""
    options = with_launcher(ParallelSection())
    if options.fsdp is not None or options.deepspeed:
        kind = "DeepSpeed" if options.deepspeed else "FSDP2"
        yield Problem(
            "launcher", f"{kind} shards the network, and each process samples with the complete one; launch with "
                        "accelerate_configs/ddp.yaml, or start one process, with --enable_model_cpu_offload if "
                        "memory is short",
            "unsupported",
        )  # fmt: skip


def _common_config(targets: Sequence[Target], flags: RawOptions, findings: Findings) -> TrainConfig | None:
    """Return the one configuration of all targets without training options, or None, with errors, if there is none."""
    with_source = [target for target in targets if target.source.values]
    configs = []
    for target in with_source or targets[:1]:
        overrides = RawOptions(dict(flags.values), dict(flags.where), list(flags.problems))
        try:
            configs.append(build_config([target.source, overrides]))
        except ConfigError as error:
            unknown = not with_source and "pretrained_model_name_or_path" not in flags.values
            hint = f"the base model of {target.given} is unknown; set it"
            findings.errors += [
                Problem("--pretrained_model_name_or_path", hint, "required")
                if unknown and problem.kind == "required"
                else problem
                for problem in error.problems
            ]
            return None
    for target, other in zip(with_source, configs, strict=False):
        differing = [
            name for name in options_of_runs()
            if name not in (*_WITHOUT_EFFECT, "model_name") and other.get(name) != configs[0].get(name)
        ]  # fmt: skip
        if differing:
            name = differing[0]
            findings.errors.append(
                Problem(
                    "TARGET",
                    f"{target.given} has {name} {other.get(name)}, and {with_source[0].given} "
                    f"{configs[0].get(name)}; sample them separately, or set --{name} for both",
                    "conflict",
                )
            )
    return configs[0].model_copy(update={"parallel": ParallelSection()})


def _fetch(family: Family, config: TrainConfig) -> None:
    """Download the configs of a model on the Hub.

    Raises:
        ConfigError: they are neither on this disk nor can be downloaded.
    """
    fetched = family.fetch_configs(config.model)
    if fetched.missing:
        message = (
            f"{', '.join(fetched.missing)} is not on this disk, and {fetched.away}; {fetched.way_out}, or use a "
            "directory"
        )
        raise ConfigError([Problem("--pretrained_model_name_or_path", message, "unavailable")])


def _prompts(
    config: TrainConfig, options: SampleSection, target: Target, findings: Findings, *, fixed_size: bool
) -> tuple[TrainConfig, list[ValidationPrompt]]:
    """Return the configuration with sampling settings as its validation, and the prompts, each with a size."""
    use_run_prompts = options.prompts is None
    values: dict[str, Any] = {"validation_steps": None, "validation_epochs": None, "validation_at_start": None}
    settings = {name: getattr(options, VALIDATION_NAMES[name]) for name in _SETTINGS}
    if settings["validation_guidance_scale"] is not None:  # it is also that of the second expert by default
        values["validation_guidance_scale_2"] = None
    values |= {name: value for name, value in settings.items() if value not in (None, [])}
    if not use_run_prompts:
        values |= {"validation_prompts": options.prompts, **dict.fromkeys(MEDIA_OPTIONS.values())}
    config = config.with_values(values)
    section = config.validation
    if section.validation_prompts is None:
        message = "no prompts are set, and no run with validation prompts; set --prompts FILE or TEXT"
        findings.error("prompts", message, "required")
        return config, []
    try:
        count = len(parse_validation_prompts(section))
    except ConfigError as error:
        findings.errors += error.problems
        return config, []
    media, separator = dict[str, str](), section.validation_separator
    for medium, name in MEDIA_OPTIONS.items():
        if (text := getattr(options, medium)) is not None:  # one for all prompts, or one for each
            media[name] = text if separator in text else separator.join([text] * count)
    config = config.with_values(media)
    prompts = read_prompts(config, findings)
    size = options.size or size_of_run(config, target)
    if any(prompt.size is None for prompt in prompts) and size is None:
        findings.error("size", "is unknown; set it as FRAMESxHEIGHTxWIDTH, for example 49x512x768", "required")
    override = (use_run_prompts or fixed_size) and options.size is not None
    return config, [prompt.model_copy(update={"size": size if override else prompt.size or size}) for prompt in prompts]


def size_of_run(config: TrainConfig, target: Target) -> Size | None:
    """Return the default size of the run's validation samples, or None if it is unknown; see `sample_size`."""
    counts = Counter[Size]()
    if target.home is not None and (target.home / "manifest.jsonl").is_file():
        for record in read_jsonl(target.home / "manifest.jsonl")[0]:
            parts = str(record.get("bucket")).split("x")
            if record.get("use", "train") == "train" and len(parts) == 3 and all(map(str.isdecimal, parts)):
                counts[int(parts[0]), int(parts[1]), int(parts[2])] += (
                    record["examples"] if fits(record.get("examples"), int) else 1
                )
    if not counts and is_method(config.training.method):
        counts.update(method_spec(config).sizes(config))
    return sample_size(counts, has_chosen_buckets=config.has_chosen_sizes) if counts else None


def _check(
    config: TrainConfig,
    facts: Facts,
    prompts: list[ValidationPrompt],
    options: SampleSection,
    targets: Sequence[Target],
    findings: Findings,
) -> None:
    device = likely_device_type()
    findings.errors += check_sampling(config, facts=facts, prompts=prompts).errors
    findings.errors += kernel_problems(config, device_type=device, dtype_bytes=computed_bytes(config)).errors
    findings.errors += quantization_problems(config, device_type=device)
    if prompts and prompts[0].size is not None:
        check_prompt_videos(config, facts, prompts, prompts[0].size, findings)
        check_pipeline_arguments(config, facts, [prompt.size for prompt in prompts if prompt.size], findings)
    if options.negative_prompt and (reason := unguided_reason(config, facts)) is not None:
        findings.error(
            "negative_prompt",
            f"has no effect: {reason}, so no second prompt is sampled; remove it",
            "conflict" if facts.guidance is None else "unsupported",
        )
    kinds = {target.weights.kind for target in targets}
    if options.lora_scale and "lora" not in kinds:
        findings.error("lora_scale", "has no effect without a LoRA; remove it", "conflict")
    if options.compare and "base" in kinds:
        findings.error("compare", "is already sampled; remove it", "duplicate")


def _variants(targets: Sequence[Target], options: SampleSection, findings: Findings) -> list[Variant]:
    """Return the columns: the base first, then all weights, each at all scales."""
    scales = list(dict.fromkeys(options.lora_scale or [1.0]))
    nonzero = [scale for scale in scales if scale]
    weights = list(dict.fromkeys(target.weights for target in targets))
    if len(weights) < len(targets):
        findings.warnings.append("some weights are named twice; they are sampled once")
    has_base = BASE in weights or options.compare is not None or 0.0 in scales
    variants = [Variant(BASE, 0.0, "base", "base")] if has_base else []
    for column_weights in weights:
        name = slug(column_weights.label)
        if column_weights.kind == "full":
            variants.append(Variant(column_weights, 1.0, column_weights.label, name))
        for scale in nonzero if column_weights.kind == "lora" else []:
            scale_label = f"scale {scale:g}" if len(nonzero) > 1 or scale != 1 else ""
            weights_label = column_weights.label if len(weights) > 1 or not scale_label else ""
            label = ", ".join(filter(None, (weights_label, scale_label)))
            variants.append(Variant(column_weights, scale, label, f"{name}_scale-{scale:g}"))
    return variants


def _default_place(target: Target) -> Path:
    if target.home is not None:
        return target.home / "samples" / "sample"
    path = target.weights.path
    if path is None:
        return Path("samples") / slug(target.given.removeprefix("demo://"))
    return path.parent / f"{path.stem if path.is_file() else path.name}-samples"


def _media_digests(prompt: ValidationPrompt) -> list[str]:
    """Return digests of a prompt's image and video files, or their addresses."""

    def content(source: str | Path) -> str:
        return file_sha256(Path(source)) if Path(source).is_file() else str(source)

    contents = [content(prompt.image)] if prompt.image else []
    contents += [f"{name} {content(path)}".lstrip() for name, path in prompt.videos.items()]
    if prompt.last_image:
        contents.append(f"last {content(prompt.last_image)}")
    if prompt.prefix:
        path, frames = prompt.prefix
        contents.append(f"prefix {frames} {content(path)}")
    return contents


def use_command_names(problems: Sequence[Problem]) -> list[Problem]:
    """Return problems with the names that options have in this command."""
    renamed = []
    for problem in problems:
        where, message = problem.where, problem.message
        for name, sample_name in VALIDATION_NAMES.items():
            where = f"--{sample_name}" if where == f"--{name}" else where
            message = message.replace(f"--{name}", f"--{sample_name}").replace(name, f"--{sample_name}")
        message = message.replace("each validation prompt", "each prompt")
        renamed.append(replace(problem, where=where, message=message))
    return renamed
