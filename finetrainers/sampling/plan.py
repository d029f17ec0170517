"""Which clips `finetrainers sample` draws, checked before anything is loaded. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetrainers.config.base import Section
from finetrainers.config.checks.findings import Findings
from finetrainers.config.checks.kernels import kernel_problems
from finetrainers.config.checks.options import check_sampling, quantization_problems
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.facts import Facts
from finetrainers.config.given import Given
from finetrainers.config.load import build_config
from finetrainers.config.parallel import ParallelSection
from finetrainers.config.prompts import MEDIA_OPTIONS, ValidationPrompt, parse_validation_prompts
from finetrainers.config.root import TrainConfig
from finetrainers.config.sample import VALIDATION_NAMES, SampleSection, options_of_runs
from finetrainers.memory.estimate import computed_bytes
from finetrainers.methods.registry import method_names, method_spec
from finetrainers.models.registry import Family, text_encoders_digest, transformer_digest, vae_digest
from finetrainers.parallel.sharding import with_launcher
from finetrainers.plan.ownership import samples_problem
from finetrainers.plan.preflight import check_paths, check_prompt_videos, read_prompts, resolve_family
from finetrainers.utils.device import likely_device_type
from finetrainers.utils.files import file_sha256, folder_problem, read_jsonl
from finetrainers.utils.video import slug

from .weights import BASE, Target, Weights, find_target, in_order, named_apart, under

Size = tuple[int, int, int]
#: Options of a run that no pixel depends on, or that are named by what they lead to.
_WITHOUT_EFFECT = ("enable_model_cpu_offload", "verbose", "cache_dir")


@dataclass(frozen=True)
class Variant:
    """A column: weights, and the scale of a LoRA.

    Attributes:
        label: tells it from the other columns.
        name: what it is called in file names.
    """

    weights: Weights
    scale: float
    label: str
    name: str


@dataclass(frozen=True)
class Sample:
    """One clip.

    Attributes:
        prompt: index of its prompt.
        key: digest of everything that decides over its frames.
        facts: that, and what else is recorded.
    """

    variant: Variant
    prompt: int
    seed: int
    key: str
    facts: dict[str, Any] = field(hash=False)


@dataclass(frozen=True)
class SamplePlan:
    """What is drawn, checked.

    Attributes:
        given: what is sampled, as the user named it.
        config: the model and how it computes; its `validation` has steps, guidance and frame rate.
        family, facts: of the model.
        prompts: all with a size.
        variants: the columns.
        seeds: of each prompt.
        negative: the negative prompt.
        output_dir: where clips are written.
        warnings: what the user should know.
    """

    given: Sequence[str]
    config: TrainConfig
    family: Family
    facts: Facts
    prompts: Sequence[ValidationPrompt]
    variants: Sequence[Variant]
    seeds: Sequence[int]
    negative: str
    output_dir: Path
    warnings: Sequence[str] = ()

    @property
    def frame_rate(self) -> float:
        """Frames per second of the clips."""
        return self.config.validation.validation_frame_rate or self.facts.geometry.fps

    @property
    def sizes(self) -> list[Size]:
        """Frames, height and width of the clips, each size once."""
        return list(dict.fromkeys(prompt.size for prompt in self.prompts if prompt.size is not None))

    def samples(self) -> list[Sample]:
        """All clips, by column, then by prompt, then by seed."""
        common = self._common()
        images = [_content(prompt) for prompt in self.prompts]
        found = []
        for variant in self.variants:
            for index, prompt in enumerate(self.prompts):
                for seed in self.seeds:
                    weights = variant.weights
                    facts = {
                        **common, "prompt": prompt.prompt, "size": "x".join(map(str, prompt.size or ())),
                        "given": images[index], "seed": seed, "weights": weights.digest,
                        "scale": variant.scale if weights.kind == "lora" else None,
                    }  # fmt: skip
                    text = json.dumps(facts, sort_keys=True)
                    key = hashlib.sha256(text.encode()).hexdigest()[:20]
                    facts["column"], facts["path"] = variant.name, str(weights.path or "")
                    found.append(Sample(variant, index, seed, key, facts))
        return found

    def stem(self, sample: Sample) -> str:
        """The name of a clip's file, without its ending."""
        return f"{slug(self.prompts[sample.prompt].prompt)}_{sample.variant.name}_seed-{sample.seed}"

    def _common(self) -> dict[str, Any]:
        """What decides over the frames of all clips: the model's files, and how it computes."""
        config, validation = self.config, self.config.validation
        plain = config.plain()
        places = {name: plain[name] for name in options_of_runs() if name not in _WITHOUT_EFFECT}
        model = config.model
        digests = [text_encoders_digest(model), vae_digest(model)]
        digests += [] if all(one.weights.kind == "full" for one in self.variants) else [transformer_digest(model)]
        if None not in digests:  # then it does not matter where they are
            places = {name: value for name, value in places.items() if not name.endswith(("_id", "_or_path"))}
        return {
            "model": digests, "options": {name: value for name, value in places.items() if value is not None},
            "num_inference_steps": validation.validation_inference_steps,
            "guidance_scale": validation.validation_guidance_scale, "frame_rate": self.frame_rate,
            "negative_prompt": self.negative,
        }  # fmt: skip


def plan_samples(given: Sequence[str], options: SampleSection, flags: Given) -> SamplePlan:
    """Find out what to draw, and check it.

    Args:
        given: runs, checkpoints, LoRA files or models.
        options: of the command.
        flags: options of a run that override its own.

    Raises:
        ConfigError: everything that is wrong, at once.
    """
    found = Findings()
    found.errors += _launcher_problems()
    targets = named_apart(in_order(_targets(given, options, found)))
    if len(targets) < len(given):
        raise ConfigError(found.errors)
    return plan_targets(given, targets, options, flags, found)


def plan_targets(
    given: Sequence[str], targets: Sequence[Target], options: SampleSection, flags: Given, found: Findings, *,
    fixed_size: bool = False,
) -> SamplePlan:  # fmt: skip
    """Plan samples of what has been found.

    Args:
        given, options, flags: see `plan_samples`.
        targets: with weights whose labels differ.
        found: what is known to be wrong.
        fixed_size: whether the size of the options replaces those of prompts, whoever gave them.

    Raises:
        ConfigError: everything that is wrong, at once.
    """
    config = _one_model(targets, flags, found)
    if config is None:
        raise ConfigError(found.errors)
    try:
        config, family = resolve_family(config)
    except ConfigError as error:
        raise ConfigError([*found.errors, *error.problems]) from None
    check_paths(config, found)
    for weights in [] if found.errors else dict.fromkeys(one.weights for one in targets):
        found.errors += under("TARGET", family.problems(weights.on(config.model)), weights)
    found.errors[:] = dict.fromkeys(found.errors)
    if found.errors:  # a model that is not there says nothing of its sizes
        raise ConfigError(found.errors)
    _fetch(family, config)
    facts = family.facts_of(config.model)
    config, prompts = _prompts(config, options, targets[0], found, fixed_size=fixed_size)
    _check(config, facts, prompts, options, targets, found)
    variants = _variants(targets, options, found)
    output_dir = options.output_dir or _default_place(targets[0])
    if (problem := folder_problem(output_dir)) is not None or (problem := samples_problem(output_dir)) is not None:
        found.error("output_dir", problem)
    if found.errors:
        raise ConfigError(_renamed(found.errors))
    first = config.training.seed if options.seed is None else options.seed
    return SamplePlan(
        given, config, family, facts, prompts, variants, range(first, first + options.num), options.negative_prompt, output_dir,
        [*_warnings(config, prompts), *found.warnings],
    )  # fmt: skip


def _launcher_problems() -> Iterator[Problem]:
    """Prompts are divided among processes that each hold the whole network."""
    options = with_launcher(ParallelSection())
    if options.fsdp is not None or options.deepspeed:
        kind = "DeepSpeed" if options.deepspeed else "FSDP2"
        yield Problem(
            "launcher", f"{kind} splits the network, and each process samples with all of it; launch with "
            "accelerate_configs/ddp.yaml, or start one process, with --enable_model_cpu_offload where memory is short"
        )  # fmt: skip


def _targets(given: Sequence[str], options: SampleSection, found: Findings) -> list[Target]:
    targets = []
    for one in given:
        try:
            targets.append(find_target(one, use_ema=not options.no_ema))
        except ConfigError as error:
            found.errors += error.problems
        except ValueError as error:
            found.errors.append(Problem("TARGET", str(error)))
    return targets


def _one_model(targets: Sequence[Target], flags: Given, found: Findings) -> TrainConfig | None:
    """The configuration that all of them are sampled with, without what concerns training; None, and errors, if there is none."""
    known = [one for one in targets if one.source.values]
    configs = []
    for target in known or targets[:1]:
        given = Given(dict(flags.values), dict(flags.where), list(flags.problems))
        try:
            configs.append(build_config([target.source, given]))
        except ConfigError as error:
            unknown = not known and "pretrained_model_name_or_path" not in flags.values
            hint = f"the base model of {target.given} is not known; name it"
            found.errors += [
                Problem("--pretrained_model_name_or_path", hint)
                if unknown and "is required" in problem.message
                else problem
                for problem in error.problems
            ]
            return None
    for target, other in zip(known, configs, strict=False):
        differing = [
            name for name in options_of_runs()
            if name not in (*_WITHOUT_EFFECT, "model_name") and other.get(name) != configs[0].get(name)
        ]  # fmt: skip
        if differing:
            name = differing[0]
            found.errors.append(Problem(
                "TARGET", f"{target.given} has {name} {other.get(name)}, and {known[0].given} {configs[0].get(name)}; sample "
                f"them one after the other, or give --{name} for both",
            ))  # fmt: skip
    return configs[0].model_copy(update={"parallel": ParallelSection()})


def _fetch(family: Family, config: TrainConfig) -> None:
    """Bring the configs of a model on the hub onto this disk.

    Raises:
        ConfigError: they cannot be had.
    """
    fetched = family.fetch_configs(config.model)
    if fetched.missing:
        message = f"{', '.join(fetched.missing)} is not on this disk, and {fetched.away}; {fetched.way_out}, or give a directory"
        raise ConfigError([Problem("--pretrained_model_name_or_path", message)])


def _prompts(
    config: TrainConfig, options: SampleSection, target: Target, found: Findings, *, fixed_size: bool
) -> tuple[TrainConfig, list[ValidationPrompt]]:
    """The prompts, each with a size, and the configuration with how they are sampled as its validation."""
    own, section = options.prompts is None, config.validation
    values: dict[str, Any] = {
        "validation_inference_steps": options.num_inference_steps or section.validation_inference_steps,
        "validation_frame_rate": options.frame_rate or section.validation_frame_rate,
        "validation_steps": None, "validation_epochs": None,
    }  # fmt: skip
    if options.guidance_scale is not None:
        values["validation_guidance_scale"] = options.guidance_scale
    if not own:
        values |= {"validation_prompts": options.prompts, **dict.fromkeys(MEDIA_OPTIONS.values())}
    section = section.model_copy(update=values)
    if section.validation_prompts is None:
        found.error(
            "prompts", "no prompts are given, and there is no run with validation prompts; give --prompts FILE or TEXT"
        )
        return _with(config, section), []
    try:
        count = len(parse_validation_prompts(section))
    except ConfigError as error:
        found.errors += error.problems
        return _with(config, section), []
    for medium, name in MEDIA_OPTIONS.items():
        if (media := getattr(options, medium)) is not None:
            separator = section.validation_separator
            one_for_all = separator not in media
            value = separator.join([media] * count) if one_for_all else media
            section = section.model_copy(update={name: value})
    config = _with(config, section)
    prompts = read_prompts(config, found)
    size = options.size or size_of_run(config, target)
    if any(prompt.size is None for prompt in prompts) and size is None:
        found.error("size", "is not known; give it as FRAMESxHEIGHTxWIDTH, for example 49x512x768")
    override = (own or fixed_size) and options.size is not None
    return config, [prompt.model_copy(update={"size": size if override else prompt.size or size}) for prompt in prompts]


def _with(config: TrainConfig, section: Section) -> TrainConfig:
    return config.model_copy(update={"validation": section})


def size_of_run(config: TrainConfig, target: Target) -> Size | None:
    """The size that the run's validation samples: the largest that it trains on."""
    sizes: list[Size] = []
    if target.home is not None and (target.home / "manifest.jsonl").is_file():
        records, _ = read_jsonl(target.home / "manifest.jsonl")
        buckets = {str(one["bucket"]) for one in records if one.get("bucket") and one.get("use", "train") == "train"}
        parts = [text.split("x") for text in buckets]
        sizes = [(int(p[0]), int(p[1]), int(p[2])) for p in parts if len(p) == 3 and all(map(str.isdecimal, p))]
    if not sizes and config.training.method in method_names():
        sizes = method_spec(config).sizes(config)
    return max(sizes, key=lambda size: size[0] * size[1] * size[2], default=None)


def _check(
    config: TrainConfig, facts: Facts, prompts: list[ValidationPrompt], options: SampleSection, targets: Sequence[Target],
    found: Findings,
) -> None:  # fmt: skip
    rules = check_sampling(config, facts=facts, prompts=prompts)
    device = likely_device_type()
    kernels = kernel_problems(config, device_type=device, dtype_bytes=computed_bytes(config))
    found.errors += [*rules.errors, *kernels.errors, *quantization_problems(config, device_type=device)]
    if prompts and prompts[0].size is not None:
        check_prompt_videos(config, facts, prompts, prompts[0].size, found)
    scale = config.validation.validation_guidance_scale
    if options.negative_prompt and (facts.guidance is not None or (scale is not None and scale <= 1)):
        why = (
            "this model takes guidance as an input"
            if facts.guidance is not None
            else f"the guidance scale is {scale:g}"
        )
        found.error(
            "negative_prompt", f"has no effect: {why}, so that nothing is sampled for a second prompt; remove it"
        )
    kinds = {target.weights.kind for target in targets}
    if options.lora_scale and "lora" not in kinds:
        found.error("lora_scale", "has no effect: there is no LoRA; remove it")
    if options.compare and "base" in kinds:
        found.error("compare", "is what is sampled already; remove it")


def _variants(targets: Sequence[Target], options: SampleSection, found: Findings) -> list[Variant]:
    """The columns: the base first, then all weights, each at all scales."""
    scales = list(dict.fromkeys(options.lora_scale or [1.0]))
    weights = list(dict.fromkeys(target.weights for target in targets))
    if len(weights) < len(targets):
        found.warnings.append("some of the weights are named twice; they are sampled once")
    has_base = BASE in weights or options.compare is not None or 0.0 in scales
    found_variants = [Variant(BASE, 0.0, "base", "base")] if has_base else []
    for one in weights:
        if one.kind == "base":
            continue
        for scale in [s for s in scales if s != 0] if one.kind == "lora" else [1.0]:
            several = len([s for s in scales if s != 0]) > 1
            at = f"scale {scale:g}" if one.kind == "lora" and (several or scale != 1) else ""
            label = ", ".join(part for part in (one.label if len(weights) > 1 or not at else "", at) if part)
            name = slug(one.label) + (f"_scale-{scale:g}" if one.kind == "lora" else "")
            found_variants.append(Variant(one, scale, label, name))
    return found_variants


def _default_place(target: Target) -> Path:
    if target.home is not None:
        return target.home / "samples" / "sample"
    path = target.weights.path
    if path is None:
        return Path("samples") / slug(target.given.removeprefix("demo://"))
    return path.parent / f"{path.stem if path.is_file() else path.name}-samples"


def _warnings(config: TrainConfig, prompts: Sequence[ValidationPrompt]) -> Iterator[str]:
    trigger = config.data.id_token
    if trigger and not any(trigger in prompt.prompt for prompt in prompts):
        yield f"no prompt has the trigger word of the run, {trigger} (id_token)"


def _content(prompt: ValidationPrompt) -> list[str]:
    """What names the images and videos that a prompt brings: their content, or the address."""

    def content(place: str | Path) -> str:
        return file_sha256(Path(place)) if Path(place).is_file() else str(place)

    found = [content(one) for one in (prompt.image, prompt.video) if one]
    if prompt.last_image:
        found.append(f"last {content(prompt.last_image)}")
    if prompt.prefix:
        path, frames = prompt.prefix
        found.append(f"prefix {frames} {content(path)}")
    return found


def _renamed(problems: Sequence[Problem]) -> list[Problem]:
    """Problems under the names that options have here."""
    found = []
    for problem in problems:
        where, message = problem.where, problem.message
        for name, ours in VALIDATION_NAMES.items():
            where = f"--{ours}" if where == f"--{name}" else where
            message = message.replace(f"--{name}", f"--{ours}").replace(name, f"--{ours}")
        found.append(Problem(where, message.replace("each validation prompt", "each prompt")))
    return found
