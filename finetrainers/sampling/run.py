"""Sampling of a plan, on one process or several, which writes clips, ledger, contact sheet and page."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.given import RawOptions
from finetrainers.config.load import as_in_toml
from finetrainers.config.names import unknown_keywords
from finetrainers.config.prompts import PYTHON_PROMPTS, python_prompts_set
from finetrainers.config.sample import SampleSection, options_of_runs, read_options
from finetrainers.models.spec import ModelSpec
from finetrainers.parallel.strategy import Strategy
from finetrainers.plan.capabilities import capability_problems, sample_needs
from finetrainers.plan.init_distributed import join
from finetrainers.plan.trainable import check_lora_modules, check_other_expert
from finetrainers.rundir.lock import exclusive
from finetrainers.training.sampling import (
    EncodedPrompts,
    PromptRequest,
    SamplingSettings,
    after_denoising_steps,
    prompt_request,
    sample_seed,
)
from finetrainers.utils.failures import user_message
from finetrainers.utils.faults import fault_point
from finetrainers.utils.files import sweep_unfinished, write_text_atomic
from finetrainers.utils.logs import quiet_libraries
from finetrainers.utils.phases import VALIDATION, phase
from finetrainers.utils.process_state import environment_restored, restored
from finetrainers.utils.progress import Meter
from finetrainers.utils.reading import read_json_object
from finetrainers.utils.spelling import spelled
from finetrainers.utils.text import plural, shortened
from finetrainers.utils.video import write_mp4

from .grid import Cell, Grid, Group, Row, page, sheet
from .ledger import SampleIndex
from .memory import offloads
from .plan import Sample, SamplePlan, Variant, plan_samples, use_command_names
from .sampler import Sampler
from .weights import under

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from finetrainers.config.options import SampleOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SampleResult:
    """Result of a plan.

    Attributes:
        clips: files by key, of this call and of earlier ones.
        new: number of clips that this call has sampled.
        problems: reasons for missing clips, by key.
        sheet, page: the contact sheet and the page, or None without any clip and on other processes than the first.
    """

    clips: dict[str, Path]
    new: int
    problems: dict[str, str]
    sheet: Path | None = None
    page: Path | None = None


def sample(target: str | PathLike[str], *others: str | PathLike[str], **options: Unpack[SampleOptions]) -> SampleResult:
    """Sample clips of runs, checkpoints, LoRA files or models side by side; existing clips are not sampled again.

        samples = sample("runs/mystyle", "base", prompts=["a boat on a lake", "a castle"], seed=7)
        print(samples.clips, samples.sheet)

    Args:
        target: a run directory or result, a checkpoint, a LoRA in safetensors, or a model.
        others: further ones, each in a column.
        options: those of `finetrainers sample`: `prompts` (text, a file, or a list of strings or mappings with the
            keys of a `.jsonl` file), `num`, `size`, `output_dir`, ..., and options of the model; default: those of the
            run's validation. With `dry_run=True` nothing is sampled.

    Raises:
        ConfigError: all problems with targets and options, at once.
    """
    values: dict[str, Any] = as_in_toml(dict(options))
    listed = {}
    if not isinstance(prompts := values.get("prompts"), str | None):
        listed, values["prompts"] = {"validation_prompts": prompts}, str(PYTHON_PROMPTS["validation_prompts"])
    own = {name: value for name, value in values.items() if name in SampleSection.model_fields}
    section, problems = read_options(SampleSection, own)
    model = {name: value for name, value in values.items() if name not in own}
    problems += unknown_keywords(model, [*SampleSection.model_fields, *options_of_runs()])
    if problems:
        raise ConfigError(problems, of="these samples")
    flags = RawOptions(model, {name: f"--{name}" for name in model})
    with python_prompts_set(listed):
        plan = plan_samples([fspath(path) for path in (target, *others)], section, flags)
    for warning in plan.warnings:
        logger.warning("%s", spelled(warning))
    with environment_restored(), restored(), quiet_libraries():
        if section.dry_run:
            check_weights(plan)
            return SampleResult({}, 0, {})
        return draw(plan)


def draw(plan: SamplePlan) -> SampleResult:
    """Sample missing clips, and write the sheet and the page of all; every process of a launcher must call it.

    Raises:
        ConfigError: weights do not belong to the model, or the folder is in use or not writable.
    """
    check_weights(plan)
    with contextlib.closing(join(plan.config)) as parallel, exclusive(plan.output_dir, parallel):
        if parallel.is_main:
            sweep_unfinished(plan.output_dir)
        drawn = generate_missing(plan, parallel)
        return show(plan, drawn) if parallel.is_main and drawn.clips else drawn


def generate_missing(
    plan: SamplePlan, parallel: Strategy, *, sampler: Sampler | None = None, encoded: EncodedPrompts | None = None
) -> SampleResult:
    """Sample the clips that the ledger lacks, in a folder that no other process uses.

    Args:
        plan: with checked weights.
        parallel: the processes that share the work.
        sampler: stays loaded after the call; by default, a new one for this call.
        encoded: the plan's prompts and perhaps others; by default, they are encoded here.
    """
    ledger = SampleIndex(plan.output_dir, rank=parallel.rank)
    samples = plan.samples()
    # A prompt that is listed twice, or a checkpoint that is also the result, is sampled once.
    missing = list({sample.key: sample for sample in reversed(samples) if ledger.find(sample) is None}.values())[::-1]
    names = ledger.names(plan, missing)
    problems: dict[str, str] = {}
    if parallel.broadcast_object(bool(missing)):
        with phase(VALIDATION):
            problems = _Drawing(plan, parallel, ledger, names, sampler, encoded).draw(missing)
    problems = dict(parallel.gather_objects(list(problems.items())))
    complete_ledger = SampleIndex(plan.output_dir)  # with the clips of the other processes
    clips = {sample.key: file for sample in samples if (file := complete_ledger.find(sample)) is not None}
    return SampleResult(clips, sum(sample.key in clips for sample in missing), problems)


def check_weights(plan: SamplePlan) -> None:
    """Compare headers of weight files with their classes, and LoRAs' layers with the network, before loading any.

    Raises:
        ConfigError: they do not fit.
    """
    spec = plan.family.load(plan.config.model)
    problems, _ = spec.examine()
    needs = sample_needs(plan.config.model, plan.facts, plan.prompts)
    problems += use_command_names(capability_problems(needs, spec, name=plan.family.name))
    if plan.config.model.other_expert is not None and not problems:
        check_other_expert(spec)
    weights = list(dict.fromkeys(variant.weights for variant in plan.variants))
    loras = [candidate.path for candidate in weights if candidate.kind == "lora" and candidate.path is not None]
    if loras and not problems:
        network = spec.transformer_on_meta()
        for lora in loras:
            try:
                check_lora_modules(lora, spec.read_lora(lora)[0], network)
            except ValueError as error:
                problems.append(Problem.from_error("TARGET", error))
    expected = spec.parts[spec.facts.trained].__name__
    for candidate in weights:
        path = candidate.path
        if candidate.kind != "full" or path is None:
            continue
        if path.is_file():
            problems += under("TARGET", plan.family.load(candidate.on(plan.config.model)).examine()[0], candidate)
            continue
        class_name = read_json_object(path / "config.json").get("_class_name", expected)
        if class_name != expected:
            message = f"{path} holds a {class_name}, and {plan.family.name} is a {expected}"
            problems.append(Problem("TARGET", message, "mismatch"))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)), of="these samples")


@dataclass
class _Drawing:
    """The share of one process in sampling a plan."""

    plan: SamplePlan
    parallel: Strategy
    ledger: SampleIndex
    names: dict[str, str]
    sampler: Sampler | None = None
    encoded: EncodedPrompts | None = None
    problems: dict[str, str] = field(default_factory=dict)
    _steps: int = 0

    def draw(self, missing: Sequence[Sample]) -> dict[str, str]:
        """Sample this process's share, and return the reasons for its missing clips, by key."""
        plan, parallel = self.plan, self.parallel
        # Those with the same network are adjacent, and the base follows its LoRAs.
        kinds = ("lora", "base", "full")
        local_samples = {
            variant: samples[parallel.rank :: parallel.world_size]
            for variant in sorted(plan.variants, key=lambda variant: kinds.index(variant.weights.kind))
            if (samples := [sample for sample in missing if sample.variant == variant])
        }
        spec = plan.family.load(plan.config.model)
        offload, note = offloads(plan, spec, device=parallel.device)
        is_kept = self.sampler is not None  # by a process that prints a line for each plan
        if note and parallel.is_main and not is_kept:
            logger.warning("%s", note)
        sampler = self.sampler or Sampler(plan.config, plan.family, parallel, offload=offload)
        used = sorted({sample.prompt for samples in local_samples.values() for sample in samples})
        failed: dict[int, Exception] = {}
        encoded = self.encoded or sampler.encode(
            [plan.prompts[index] for index in used], negative=plan.negative, failed=failed
        )
        total = plan.config.validation.validation_inference_steps * sum(map(len, local_samples.values()))
        bar = Meter("denoised", "steps", enabled=parallel.is_main, transient=is_kept)
        with bar as meter, contextlib.ExitStack() as undo:
            meter(self._steps, total)
            settings = self._settings(sampler, meter, total, undo)
            for variant, samples in local_samples.items():
                errors = {used[index]: error for index, error in failed.items()}
                requests = self._requests(samples, sampler.spec, encoded, settings, errors)
                clips = sampler.sample(variant.weights, variant.scale, list(requests.values()))
                started = time.monotonic()
                for sample, clip in zip(requests, clips, strict=True):
                    self._write(sample, clip, seconds=time.monotonic() - started)
                    started = time.monotonic()
        if not is_kept:
            sampler.free()
        return self.problems

    def _requests(
        self, samples: Sequence[Sample], spec: ModelSpec, encoded: EncodedPrompts, settings: SamplingSettings,
        failed: Mapping[int, Exception],
    ) -> dict[Sample, PromptRequest]:  # fmt: skip
        """Return a request for each clip, except those with a prompt or control video that has failed."""
        requests = {}
        for sample in samples:
            prompt = self.plan.prompts[sample.prompt]
            assert prompt.size is not None
            try:
                if sample.prompt in failed:
                    raise failed[sample.prompt]
                requests[sample] = prompt_request(
                    spec,
                    encoded,
                    list(encoded.prompts).index(prompt),
                    size=prompt.size,
                    settings=settings,
                    seed=sample.seed,
                )
            except Exception as error:
                self._failed(sample, error)
        return requests

    def _write(self, sample: Sample, clip: np.ndarray | Exception, *, seconds: float) -> None:
        """Write a clip and its line of the ledger.

        Raises:
            OSError: no clip can be written, for example since the disk is full.
        """
        plan, name = self.plan, self.names[sample.key]
        if isinstance(clip, Exception):
            self._failed(sample, clip)
            return
        comment = f"{plan.prompts[sample.prompt].prompt}\n{sample.variant.name}, seed {sample.seed}"
        try:
            self.ledger.begin(sample, name)
            write_mp4(plan.output_dir / name, clip, fps=plan.frame_rate, comment=comment)
        except OSError:
            raise
        except Exception as error:
            self._failed(sample, error)
        else:
            fault_point("sample.record")
            self.ledger.add(sample, name, seconds=seconds)

    def _failed(self, sample: Sample, error: Exception) -> None:
        """Report a clip that cannot be sampled; the others still are."""
        prompt = " ".join(self.plan.prompts[sample.prompt].prompt.split())
        sentence = user_message(error)
        clip = f"{sample.variant.label}, seed {sample.seed}, {shortened(prompt, 60)!r}"
        reason = sentence or f"{type(error).__name__}: {error}"
        self.problems[sample.key] = f"{clip}: {reason}"
        logger.error("%s: %s", clip, reason, exc_info=error if sentence is None else None)

    def _settings(self, sampler: Sampler, meter: Meter, total: int, undo: contextlib.ExitStack) -> SamplingSettings:
        """Return the sampling settings, and count denoising steps."""
        validation, spec = self.plan.config.validation, sampler.spec

        def count() -> None:
            self._steps = min(self._steps + 1, total)
            meter(self._steps, total)

        extra = undo.enter_context(after_denoising_steps(spec, sampler.scheduler, count))
        return SamplingSettings(
            self.plan.frame_rate, validation.validation_inference_steps, validation.validation_guidance_scale,
            validation.validation_guidance_scale_2, {**extra, **dict(validation.validation_pipeline_arguments)},
        )  # fmt: skip


@dataclass(frozen=True)
class PageText:
    """Content of a page besides the samples and their settings.

    Attributes:
        title: of the page.
        facts: at its top, by name.
        of_clips: facts of clips, by their keys.
        table: below the samples; its first row and its first column are headings.
    """

    title: str
    facts: Sequence[tuple[str, str]] = ()
    of_clips: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    table: Sequence[Sequence[str]] = ()


def show(plan: SamplePlan, drawn: SampleResult, *, text: PageText | None = None) -> SampleResult:
    """Write the contact sheet and the page.

    Args:
        plan: with the columns to show.
        drawn: the clips.
        text: further content of the page.
    """
    text = text or PageText(f"Samples of {', '.join(plan.given[:3])}{', ...' if len(plan.given) > 3 else ''}")
    grid = _grid(plan, drawn, text.of_clips)
    sheet_path, page_path = plan.output_dir / "sheet.png", plan.output_dir / "index.html"
    unfinished = sheet_path.with_name(".sheet.unfinished.png")
    sheet(grid).save(unfinished)
    unfinished.replace(sheet_path)
    weights = [variant.weights for variant in plan.variants if variant.weights.path is not None]
    validation = plan.config.validation
    facts = [
        *text.facts,
        ("model", plan.config.model.pretrained_model_name_or_path),
        *(("weights", f"{w.label}: {w.path}") for w in dict.fromkeys(weights)),
        ("denoising", ", ".join([
            plural(validation.validation_inference_steps, "step"),
            validation.guidance_text or "the default guidance scale of the pipeline",
            *([f"negative prompt {plan.negative!r}"] if plan.negative else []),
        ])),
        ("frames", f"{plan.frame_rate:g} per second"),
        ("seeds", ", ".join(map(str, plan.seeds)) if len(plan.seeds) <= 12 else f"{plan.seeds[0]} to {plan.seeds[-1]}"),
        ("sampled", time.strftime("%Y-%m-%d %H:%M")),
    ]  # fmt: skip
    problems = list(drawn.problems.values())
    write_text_atomic(page_path, page(grid, title=text.title, facts=facts, problems=problems, table=text.table))
    return replace(drawn, sheet=sheet_path, page=page_path)


def _grid(plan: SamplePlan, drawn: SampleResult, clip_facts: Mapping[str, Mapping[str, str]]) -> Grid:
    """Return a group for each prompt.

    Columns are the variants, with a row for each seed; a single variant has a column for each seed.
    """
    by_place = {(sample.variant, sample.prompt, sample.seed): sample for sample in plan.samples()}

    def cell(variant: Variant, prompt: int, seed: int) -> Cell:
        key = by_place[variant, prompt, seed].key
        video, text, own_facts = drawn.clips.get(key), plan.prompts[prompt].prompt, clip_facts.get(key, {})
        facts = {
            "prompt": text,
            "seed": str(seed),
            **own_facts,
            "weights": str(variant.weights.path or "the base model"),
            **({"LoRA scale": f"{variant.scale:g}"} if variant.weights.kind == "lora" else {}),
            "file": "" if video is None else video.name,
            "in diffusers": f"generator=torch.Generator().manual_seed({sample_seed(seed, text)})",
        }
        caption = "\n".join(f"{name} {value}" for name, value in own_facts.items())
        return Cell(video, facts, drawn.problems.get(key, ""), caption)

    groups = []
    seeds = [f"seed {seed}" for seed in plan.seeds]
    for index, prompt in enumerate(plan.prompts):
        cells = [[cell(variant, index, seed) for variant in plan.variants] for seed in plan.seeds]
        frames, height, width = prompt.size or (0, 0, 0)
        note = f"{frames} frames of {height} x {width}"
        if len(plan.variants) == 1:
            rows = [Row("", [row[0] for row in cells])]
        elif len(seeds) > 1:
            rows = list(map(Row, seeds, cells))
        else:
            rows, note = [Row("", cells[0])], f"{note}, {seeds[0]}"
        groups.append(Group(prompt.prompt, rows, ", ".join(filter(None, (note, prompt.given)))))
    return Grid(seeds if len(plan.variants) == 1 else [variant.label for variant in plan.variants], groups)
