"""Facts for a model card: samples, figures, license and settings, from the run directory and the base model."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, metadata_load, try_to_load_from_cache
from yaml import YAMLError

from finetrainers.config.root import TrainConfig
from finetrainers.draw.curves import is_number, read_metrics
from finetrainers.draw.sample_files import video_sheet
from finetrainers.plan.preflight import ResolvedRun
from finetrainers.rundir.run_dir import package_versions
from finetrainers.training.sampling import sample_seed
from finetrainers.training.state import TrainState
from finetrainers.utils.packaged import SCHEME
from finetrainers.utils.phases import PHASES, TRAINING_STEP, label
from finetrainers.utils.reading import read_jsonl
from finetrainers.utils.text import duration
from finetrainers.utils.versions import __version__

from .markdown import code, link

#: The newest samples below each other, in the run directory.
GRID = "samples/grid.jpg"
_GRID_ROWS = 6
_HELD_OUT = 4  # prompts with samples on the card
_LIBRARIES = ("torch", "diffusers", "peft")


@dataclass(frozen=True)
class Sample:
    """A prompt with its newest sample.

    Attributes:
        text: the prompt.
        video, picture: its video, and the contact sheet over all steps or of the last; paths in the run directory.
    """

    text: str
    video: str | None
    picture: str | None


@dataclass(frozen=True)
class Figure:
    """A number measured on held-out items.

    Attributes:
        name: of the number.
        first, last, best: its values, as text.
    """

    name: str
    first: str
    last: str
    best: str


def write_grid(root: Path) -> None:
    """Write the newest samples of the validation prompts, or else of held-out prompts, below each other.

    Without samples, nothing is written.
    """
    folders = sorted((root / "samples").glob("step-*"))
    videos = sorted(folders[-1].glob("[!.]*.mp4")) if folders else []
    if videos:
        video_sheet(videos[:_GRID_ROWS]).save(root / GRID, quality=88)


def newest_samples(root: Path, prompts: Sequence[str]) -> list[Sample]:
    """Return each validation prompt with its newest sample."""
    folders = sorted((root / "samples").glob("step-*"))
    samples = []
    for index, prompt in enumerate(prompts):
        video = min(folders[-1].glob(f"{index:02d}-*.mp4"), default=None) if folders else None
        if video is None:
            samples.append(Sample(prompt, None, None))
            continue
        sheets = (root / "samples" / f"{video.stem}.png", video.with_suffix(".png"))
        sheet = next((path.relative_to(root).as_posix() for path in sheets if path.is_file()), None)
        samples.append(Sample(prompt, video.relative_to(root).as_posix(), sheet))
    return samples


def evaluated_samples(root: Path) -> list[Sample]:
    """Return the first held-out prompts with samples over the steps, as rewards scored them."""
    sheets = sorted((root / "samples").glob("eval-*.png"))[:_HELD_OUT]
    return [Sample("samples of a held-out prompt", None, path.relative_to(root).as_posix()) for path in sheets]


def figures(root: Path) -> tuple[int, int, list[Figure]] | None:
    """Return the first and last evaluated step, and the figures measured on held-out items, or None with under two."""
    by_step: dict[int, dict[str, Any]] = {}  # losses and rewards have separate records
    for record in read_metrics(root / "metrics.jsonl"):
        if any(name.startswith("eval_") for name in record):
            by_step.setdefault(int(record["step"]), {}).update(record)
    records = list(by_step.values())
    if len(records) < 2:
        return None
    first, last = records[0], records[-1]
    names = [n for n in last if n == "eval_loss" or n.startswith("eval_reward/")]
    names = [n for n in names if all(isinstance(record.get(n), int | float) for record in (first, last))]
    measured = [Figure(n, f"{first[n]:.4g}", f"{last[n]:.4g}", _best(records, n)) for n in names]
    return int(first["step"]), int(last["step"]), measured


def _best(records: Sequence[dict[str, Any]], name: str) -> str:
    """Return `0.4008 (step 24)`: the lowest loss or the highest reward."""
    finite = [(record[name], int(record["step"])) for record in records if is_number(record.get(name))]
    if not finite:
        return "-"
    choose = min if name == "eval_loss" else max
    value, step = choose(finite, key=lambda pair: pair[0])
    return f"{value:.4g} (step {step})"


def facts(state: TrainState, checked: ResolvedRun) -> list[tuple[str, str]]:
    """Return date, duration, hardware, sampling settings and versions, with their labels."""
    config, parallel = state.config, state.parallel
    records, _ = read_jsonl(state.run_dir.root / "metrics.jsonl")
    times = [(record.get("step_s"), record.get("steps", 1)) for record in records]
    seconds = sum(time_s * steps for time_s, steps in times if is_number(time_s) and is_number(steps))
    is_cuda = parallel.device.type == "cuda"
    device = torch.cuda.get_device_name(parallel.device) if is_cuda else parallel.device.type.upper()
    count = f"{parallel.world_size} x " if parallel.world_size > 1 else ""
    versions = package_versions()
    rows = [
        ("finished", time.strftime("%Y-%m-%d")),
        ("training steps took", f"{duration(seconds)} on {count}{device}"),
        ("a step", checked.plan.step_of(config)),
        *_memory_fact(state, is_cuda=is_cuda),
        ("made with", ", ".join([f"finetrainers {__version__}", *(f"{name} {versions[name]}" for name in _LIBRARIES)])),
    ]
    if checked.prompts:
        sampling = config.validation
        guidance_text = sampling.guidance_text or "the default guidance scale of the pipeline"
        steps = f"{sampling.validation_inference_steps} denoising steps"
        rows.append(("samples", f"{steps}, {guidance_text}, seed {config.training.seed}, {checked.frame_rate:g} fps"))
    return rows


def sampling_arguments(config: TrainConfig, prompt: str) -> list[tuple[str, str]]:
    """Return the pipeline arguments for the validation sample of a prompt, as code."""
    section = config.validation
    arguments = [("num_inference_steps", str(section.validation_inference_steps))]
    for name in ("guidance_scale", "guidance_scale_2"):
        if (scale := getattr(section, f"validation_{name}")) is not None:
            arguments.append((name, f"{scale:g}"))
    arguments += [(name, str(value)) for name, value in section.validation_pipeline_arguments]
    if section.validation_negative_prompt:
        arguments.append(("negative_prompt", json.dumps(section.validation_negative_prompt, ensure_ascii=False)))
    seed = sample_seed(config.training.seed, prompt)
    return [*arguments, ("generator", f"torch.Generator().manual_seed({seed})")]


def _memory_fact(state: TrainState, *, is_cuda: bool) -> Iterator[tuple[str, str]]:
    """Yield the peak memory of a training step, the maximum over processes."""
    peak = state.memory.all_peaks.get(TRAINING_STEP, {})
    parts = []
    if "allocated" in peak:
        reserved = f", {peak['reserved']:.2f} GiB reserved" if "reserved" in peak else ""
        total = torch.cuda.get_device_properties(state.parallel.device).total_memory / 2**30 if is_cuda else None
        parts.append(
            f"{peak['allocated']:.2f} GiB allocated{reserved}"
            f"{'' if total is None else f' of {total:.1f} GiB'} on the GPU"
        )
    if "host" in peak:
        parts.append(f"{peak['host']:.2f} GiB of host memory")
    if parts:
        yield (
            "peak memory of a training step",
            f"{'; '.join(parts)}{', per process' if state.parallel.world_size > 1 else ''}",
        )


def memory_by_phase(peaks: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Return headings and a row for each phase with its peaks in GiB, or an empty list if nothing was measured."""
    headings = {"allocated": "GPU, allocated", "reserved": "GPU, reserved", "host": "host"}
    measured = {phase: peaks[phase] for phase in PHASES if phase in peaks}
    columns = [name for name in headings if any(name in peak for peak in measured.values())]
    rows = [
        [label(phase), *(f"{peak[name]:.2f}" if name in peak else "" for name in columns)]
        for phase, peak in measured.items()
    ]
    return [["phase", *(headings[name] for name in columns)], *rows] if rows else []


def at_a_glance(config: TrainConfig, plan: Any) -> list[tuple[str, str]]:
    """Return base model, strength, size of the clips, and license."""
    base, training = config.model.pretrained_model_name_or_path, config.training
    on_hub = local_model_folder(base) is None
    rows: list[tuple[str, str]] = [
        ("base model", link(base, f"https://huggingface.co/{base}") if on_hub else code(base))
    ]
    if training.training_type == "lora":
        kind = "rsLoRA" if training.use_rslora else "DoRA" if training.use_dora else "LoRA"
        numbers = f"{kind} of rank {training.rank}, alpha {training.lora_alpha:g}"
        rows.append(("strength", f"1.0 is as trained, and as in the samples; less weakens it ({numbers})"))
    sizes = ", ".join("x".join(map(str, size)) for size in plan.buckets)
    rows.append(("trained at", f"{sizes} (frames x height x width)"))
    return [*rows, ("license of the base model", _license_text(config))]


def _license_text(config: TrainConfig) -> str:
    """Return the license as a Markdown link, or its name if it has no link."""
    base_license = read_license(config)
    if not base_license:
        return "unknown: see the base model's page"
    name = base_license.get("license_name") or base_license.get("license", "")
    address = base_license.get("license_link", "")
    return link(name, address) if address.startswith(("http://", "https://")) else name


def read_license(config: TrainConfig) -> dict[str, Any]:
    """Return the base model's license, as its own card states it.

    The card is read from this disk, or downloaded if the result is uploaded anyway.
    """
    base = config.model.pretrained_model_name_or_path
    if base.startswith(SCHEME):
        return {"license": "apache-2.0"}
    folder = local_model_folder(base)
    card: object = None if folder is None else folder / "README.md"
    if folder is None:
        revision, cache = config.model.revision, config.model.cache_dir
        # Without the card, the license is left out.
        with contextlib.suppress(OSError, ValueError):
            card = try_to_load_from_cache(base, "README.md", revision=revision, cache_dir=cache)
            if config.run.push_to_hub and not isinstance(card, str):
                card = hf_hub_download(base, "README.md", revision=revision, cache_dir=cache)
    if not isinstance(card, str | Path) or not Path(card).is_file():
        return {}
    try:
        metadata = metadata_load(card) or {}
    except (ValueError, YAMLError):  # an invalid card
        return {}
    return {name: str(metadata[name]) for name in ("license", "license_name", "license_link") if metadata.get(name)}


def local_model_folder(base: str) -> Path | None:
    """Return the folder of a local or demo model, or None if it is on the Hub."""
    # A directory that was removed meanwhile is not a name on the Hub.
    is_path = base.startswith((SCHEME, "/", ".", "~")) or base.count("/") > 1
    return Path(base) if is_path or Path(base).is_dir() else None
