"""Draw the samples of a plan, on one process or several, and write clips, ledger, contact sheet and page."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.models.spec import ModelSpec
from finetrainers.parallel.strategy import Strategy
from finetrainers.plan.init_distributed import join
from finetrainers.plan.trainable import check_modules
from finetrainers.rundir.lock import exclusive
from finetrainers.training.sampling import EncodedPrompts, PromptRequest, SamplingSettings, prompt_request, sample_seed
from finetrainers.utils.failures import sentence_of
from finetrainers.utils.faults import fault_point
from finetrainers.utils.files import write_text_atomic
from finetrainers.utils.phases import VALIDATION, phase
from finetrainers.utils.progress import Meter
from finetrainers.utils.text import plural, shortened
from finetrainers.utils.video import write_mp4

from .grid import Cell, Grid, Group, Row, page, sheet
from .ledger import Ledger
from .memory import offloads
from .plan import Sample, SamplePlan, Variant
from .sampler import Sampler
from .weights import under

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Drawn:
    """What came of a plan.

    Attributes:
        clips: files by key, of this call and of earlier ones.
        new: how many this call has drawn.
        problems: why clips are missing, by key.
        sheet, page: the contact sheet and the page; None where not one clip is there, and on other processes than the first.
    """

    clips: dict[str, Path]
    new: int
    problems: dict[str, str]
    sheet: Path | None = None
    page: Path | None = None


def draw(plan: SamplePlan) -> Drawn:
    """Draw what is missing, and write the sheet and the page of all; every process of a launcher must call it.

    Raises:
        ConfigError: weights do not belong to the model; another process uses the folder, or nothing can be written to it.
    """
    check_weights(plan)
    with contextlib.closing(join(plan.config)) as parallel, exclusive(plan.output_dir, parallel):
        drawn = draw_missing(plan, parallel)
        return show(plan, drawn) if parallel.is_main and drawn.clips else drawn


def draw_missing(
    plan: SamplePlan, parallel: Strategy, *, sampler: Sampler | None = None, encoded: EncodedPrompts | None = None
) -> Drawn:
    """Draw what the ledger does not have, in a folder that nobody else uses.

    Args:
        plan: whose weights have been checked.
        parallel: the processes that share the work.
        sampler: what draws, and stays loaded; None: one for this call.
        encoded: the plan's prompts and perhaps others; None: they are encoded here.
    """
    ledger = Ledger(plan.output_dir, rank=parallel.rank)
    samples = plan.samples()
    # A prompt that is given twice, or a checkpoint that is the result, too, is drawn once.
    missing = list({sample.key: sample for sample in reversed(samples) if ledger.find(sample) is None}.values())[::-1]
    names = ledger.names(plan, missing)
    problems: dict[str, str] = {}
    if parallel.same_on_all(bool(missing)):
        with phase(VALIDATION):
            problems = _Drawing(plan, parallel, ledger, names, sampler, encoded).draw(missing)
    problems = dict(parallel.gather_objects(list(problems.items())))
    found = Ledger(plan.output_dir)  # with what the others have drawn
    clips = {sample.key: file for sample in samples if (file := found.find(sample)) is not None}
    return Drawn(clips, sum(sample.key in clips for sample in missing), problems)


def check_weights(plan: SamplePlan) -> None:
    """Compare all weight files with the classes that take them, by their headers and by LoRAs' layers, before any is loaded.

    Raises:
        ConfigError: they do not fit.
    """
    spec = plan.family.load(plan.config.model)
    problems, _ = spec.examine()
    weights = list(dict.fromkeys(variant.weights for variant in plan.variants))
    loras = [one.path for one in weights if one.kind == "lora" and one.path is not None]
    if loras and not problems:
        network = spec.transformer_on_meta()
        for path in loras:
            try:
                check_modules(path, spec.read_lora(path)[0], network)
            except ValueError as error:
                problems.append(Problem("TARGET", str(error)))
    expected = spec.parts[spec.facts.trained].__name__
    for one in weights:
        if one.kind == "full" and one.path is not None and one.path.is_file():
            problems += under("TARGET", plan.family.load(one.on(plan.config.model)).examine()[0], one)
        elif one.kind == "full" and one.path is not None:
            found = json.loads((one.path / "config.json").read_text(encoding="utf-8")).get("_class_name", expected)
            if found != expected:
                problems.append(
                    Problem("TARGET", f"{one.path} holds a {found}, and {plan.family.name} is a {expected}")
                )
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)), of="these samples")


@dataclass
class _Drawing:
    """The share of a process."""

    plan: SamplePlan
    parallel: Strategy
    ledger: Ledger
    names: dict[str, str]
    sampler: Sampler | None = None
    encoded: EncodedPrompts | None = None
    problems: dict[str, str] = field(default_factory=dict)
    _steps: int = 0

    def draw(self, missing: Sequence[Sample]) -> dict[str, str]:
        """Draw this process's share; why clips of it are missing, by key."""
        plan, parallel = self.plan, self.parallel
        by_variant = {variant: [one for one in missing if one.variant == variant] for variant in self._order()}
        mine = {variant: some[parallel.rank :: parallel.world_size] for variant, some in by_variant.items() if some}
        spec = plan.family.load(plan.config.model)
        offload, note = offloads(plan, spec, device=parallel.device)
        if note and parallel.is_main and self.sampler is None:
            logger.warning("%s", note)
        sampler = self.sampler or Sampler(plan.config, plan.family, parallel, offload=offload)
        used = sorted({sample.prompt for some in mine.values() for sample in some})
        failed: dict[int, Exception] = {}
        encoded = self.encoded or sampler.encode(
            [plan.prompts[index] for index in used], negative=plan.negative, failed=failed
        )
        total = plan.config.validation.validation_inference_steps * sum(map(len, mine.values()))
        stays = self.sampler is not None  # of a process that tells of each plan in a line of its own
        with Meter("denoised", "steps", enabled=parallel.is_main, transient=stays) as meter:
            settings = self._settings(sampler.spec, meter, total)
            for variant, some in mine.items():
                requests = self._requests(
                    some, sampler.spec, encoded, settings, {used[k]: e for k, e in failed.items()}
                )
                clips = sampler.sample(variant.weights, variant.scale, list(requests.values()))
                begun = time.monotonic()
                for one, clip in zip(requests, clips, strict=True):
                    self._write(one, clip, seconds=time.monotonic() - begun)
                    begun = time.monotonic()
        if self.sampler is None:
            sampler.free()
        return self.problems

    def _requests(
        self, samples: Sequence[Sample], spec: ModelSpec, encoded: EncodedPrompts, settings: SamplingSettings,
        failed: Mapping[int, Exception],
    ) -> dict[Sample, PromptRequest]:  # fmt: skip
        """A request for each clip, but for those whose prompt or control video has failed."""
        found = {}
        for one in samples:
            prompt = self.plan.prompts[one.prompt]
            assert prompt.size is not None
            try:
                if one.prompt in failed:
                    raise failed[one.prompt]
                found[one] = prompt_request(
                    spec,
                    encoded,
                    list(encoded.prompts).index(prompt),
                    size=prompt.size,
                    settings=settings,
                    seed=one.seed,
                )
            except Exception as error:
                self._failed(one, error)
        return found

    def _write(self, sample: Sample, clip: np.ndarray | Exception, *, seconds: float) -> None:
        """Write a clip and its line of the ledger.

        Raises:
            OSError: the disk is full, say, which ends all of it.
        """
        plan, name = self.plan, self.names[sample.key]
        if isinstance(clip, Exception):
            self._failed(sample, clip)
            return
        comment = f"{plan.prompts[sample.prompt].prompt}\n{sample.variant.name}, seed {sample.seed}"
        try:
            write_mp4(plan.output_dir / name, clip, fps=plan.frame_rate, comment=comment)
        except OSError:
            raise
        except Exception as error:
            self._failed(sample, error)
        else:
            fault_point("sample.record")
            self.ledger.add(sample, name, seconds=seconds)

    def _order(self) -> list[Variant]:
        """Variants whose network is the same follow each other, and the base comes after the LoRAs on it."""
        kinds = ("lora", "base", "full")
        return sorted(self.plan.variants, key=lambda one: kinds.index(one.weights.kind))

    def _failed(self, sample: Sample, error: Exception) -> None:
        """A clip that cannot be drawn is reported, and the others are drawn."""
        prompt = " ".join(self.plan.prompts[sample.prompt].prompt.split())
        sentence = sentence_of(error)
        what = f"{sample.variant.label}, seed {sample.seed}, {shortened(prompt, 60)!r}"
        said = sentence or f"{type(error).__name__}: {error}"
        self.problems[sample.key] = f"{what}: {said}"
        logger.error("%s: %s", what, said, exc_info=error if sentence is None else None)

    def _settings(self, spec: ModelSpec, meter: Meter, total: int) -> SamplingSettings:
        """How clips are denoised, with a count of the steps where the pipeline tells when one is done."""
        validation = self.plan.config.validation

        def count(*arguments: Any) -> dict[str, Any]:
            self._steps = min(self._steps + 1, total)
            meter(self._steps, total)
            return {}

        classes = (spec.pipeline_class, spec.image_pipeline_class or spec.pipeline_class)
        tells = all("callback_on_step_end" in inspect.signature(cls.__call__).parameters for cls in classes)
        extra = {"callback_on_step_end": count} if tells else {}
        return SamplingSettings(
            self.plan.frame_rate, validation.validation_inference_steps, validation.validation_guidance_scale, extra
        )


@dataclass(frozen=True)
class Told:
    """What a page tells besides the samples and how they were drawn.

    Attributes:
        title: of the page.
        facts: at its top, by name.
        of_clips: of a clip, by its key.
        table: below the samples; its first row and its first column are headings.
    """

    title: str
    facts: Sequence[tuple[str, str]] = ()
    of_clips: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    table: Sequence[Sequence[str]] = ()


def show(plan: SamplePlan, drawn: Drawn, *, told: Told | None = None) -> Drawn:
    """Write the contact sheet and the page.

    Args:
        plan: with the columns that are shown.
        drawn: the clips.
        told: what else the page tells.
    """
    told = told or Told(f"Samples of {', '.join(plan.given[:3])}{', ...' if len(plan.given) > 3 else ''}")
    grid = _grid(plan, drawn, told.of_clips)
    places = plan.output_dir / "sheet.png", plan.output_dir / "index.html"
    unfinished = places[0].with_name(".sheet.unfinished.png")
    sheet(grid).save(unfinished)
    unfinished.replace(places[0])
    weights = [variant.weights for variant in plan.variants if variant.weights.path is not None]
    guidance = plan.config.validation.validation_guidance_scale
    common = [
        ("model", plan.config.model.pretrained_model_name_or_path),
        *(("weights", f"{one.label}: {one.path}") for one in dict.fromkeys(weights)),
        ("denoising", ", ".join([
            plural(plan.config.validation.validation_inference_steps, "step"),
            "the pipeline's own guidance" if guidance is None else f"guidance {guidance:g}",
            *([f"negative prompt {plan.negative!r}"] if plan.negative else []),
        ])),
        ("frames", f"{plan.frame_rate:g} per second"),
        ("seeds", ", ".join(map(str, plan.seeds)) if len(plan.seeds) <= 12 else f"{plan.seeds[0]} to {plan.seeds[-1]}"),
        ("sampled", time.strftime("%Y-%m-%d %H:%M")),
    ]  # fmt: skip
    facts, problems = [*told.facts, *common], list(drawn.problems.values())
    text = page(grid, title=told.title, facts=facts, problems=problems, table=told.table)
    write_text_atomic(places[1], text)
    return replace(drawn, sheet=places[0], page=places[1])


def _grid(plan: SamplePlan, drawn: Drawn, told: Mapping[str, Mapping[str, str]]) -> Grid:
    """A group for each prompt. Columns are the variants, with a row for each seed; of one variant they are the seeds."""
    by_place = {(sample.variant, sample.prompt, sample.seed): sample for sample in plan.samples()}

    def cell(variant: Variant, prompt: int, seed: int) -> Cell:
        sample = by_place[variant, prompt, seed]
        video = drawn.clips.get(sample.key)
        text = plan.prompts[prompt].prompt
        facts = {
            "prompt": text, "seed": str(seed), **told.get(sample.key, {}), "weights": str(variant.weights.path or "the base model"),
            **({"LoRA scale": f"{variant.scale:g}"} if variant.weights.kind == "lora" else {}),
            "file": "" if video is None else video.name,
            "in diffusers": f"generator=torch.Generator().manual_seed({sample_seed(seed, text)})",
        }  # fmt: skip
        caption = "\n".join(f"{name} {value}" for name, value in told.get(sample.key, {}).items())
        return Cell(video, facts, drawn.problems.get(sample.key, ""), caption)

    groups = []
    for index, prompt in enumerate(plan.prompts):
        if len(plan.variants) == 1:
            rows = [Row("", [cell(plan.variants[0], index, seed) for seed in plan.seeds])]
        else:
            label = "seed {}" if len(plan.seeds) > 1 else ""
            rows = [Row(label.format(s), [cell(variant, index, s) for variant in plan.variants]) for s in plan.seeds]
        frames, height, width = prompt.size or (0, 0, 0)
        seeds = "" if len(plan.variants) == 1 or len(plan.seeds) > 1 else f", seed {plan.seeds[0]}"
        given = f", {prompt.given}" if prompt.given else ""
        groups.append(Group(prompt.prompt, rows, f"{frames} frames of {height} x {width}{seeds}{given}"))
    one = len(plan.variants) == 1
    columns = [f"seed {seed}" for seed in plan.seeds] if one else [variant.label for variant in plan.variants]
    return Grid(columns, groups)
