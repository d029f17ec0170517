"""What a model card says of a run: samples, figures, license and settings, as the run directory and the base model tell."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, metadata_load, try_to_load_from_cache
from yaml import YAMLError

from finetrainers.config.root import TrainConfig
from finetrainers.plan.preflight import Preflight
from finetrainers.rundir.run_dir import package_versions
from finetrainers.training.callbacks.samples import sheet_of
from finetrainers.training.sampling import sample_seed
from finetrainers.training.state import TrainState
from finetrainers.utils.files import read_jsonl
from finetrainers.utils.packaged import SCHEME
from finetrainers.utils.phases import PHASES, TRAINING_STEP, label
from finetrainers.utils.text import duration
from finetrainers.utils.versions import __version__

#: The newest samples below each other, in the run directory.
GRID = "samples/grid.jpg"
_GRID_ROWS = 6
_HELD_OUT = 4  # prompts whose samples are shown
_LIBRARIES = ("torch", "diffusers", "peft")


@dataclass(frozen=True)
class Sample:
    """A prompt with its newest sample.

    Attributes:
        text: the prompt.
        video, picture: its video, and the contact sheet over all steps, or of the last; paths in the run directory.
    """

    text: str
    video: str | None
    picture: str | None


@dataclass(frozen=True)
class Figure:
    """What was measured on held-out items.

    Attributes:
        name: of the number.
        first, last, best: its values, as text.
    """

    name: str
    first: str
    last: str
    best: str


def write_grid(root: Path) -> None:
    """Write the newest samples of the validation prompts, or else of held-out prompts, below each other; none if there are none."""
    folders = sorted((root / "samples").glob("step-*"))
    videos = sorted(folders[-1].glob("[!.]*.mp4")) if folders else []
    if videos:
        sheet_of(videos[:_GRID_ROWS]).save(root / GRID, quality=88)


def newest_samples(root: Path, prompts: Sequence[str]) -> list[Sample]:
    """Each validation prompt with its newest sample."""
    folders = sorted((root / "samples").glob("step-*"))
    found = []
    for index, prompt in enumerate(prompts):
        video = next(iter(sorted(folders[-1].glob(f"{index:02d}-*.mp4"))), None) if folders else None
        if video is None:
            found.append(Sample(prompt, None, None))
            continue
        pictures = (root / "samples" / f"{video.stem}.png", video.with_suffix(".png"))
        shown = next((path.relative_to(root).as_posix() for path in pictures if path.is_file()), None)
        found.append(Sample(prompt, video.relative_to(root).as_posix(), shown))
    return found


def evaluated_samples(root: Path) -> list[Sample]:
    """Held-out prompts over the steps, as rewards judged them; the first few."""
    pictures = sorted((root / "samples").glob("eval-*.png"))[:_HELD_OUT]
    return [Sample("samples of a held-out prompt", None, path.relative_to(root).as_posix()) for path in pictures]


def figures(root: Path) -> tuple[int, int, list[Figure]] | None:
    """What was measured on held-out items: the first and the last step, and each number then and at its best."""
    by_step: dict[int, dict[str, Any]] = {}  # losses and rewards have records of their own
    for record in read_jsonl(root / "metrics.jsonl")[0]:
        if any(name.startswith("eval_") for name in record):
            by_step.setdefault(int(record["step"]), {}).update(record)
    records = list(by_step.values())
    if len(records) < 2:
        return None
    first, last = records[0], records[-1]
    names = [n for n in last if n in first and (n == "eval_loss" or n.startswith("eval_reward/"))]
    found = [Figure(n, f"{first[n]:.4g}", f"{last[n]:.4g}", _best(records, n)) for n in names]
    return int(first["step"]), int(last["step"]), found


def _best(records: Sequence[dict[str, Any]], name: str) -> str:
    """`0.4008 (step 24)`: the least loss, or the greatest reward."""
    known = [(record[name], int(record["step"])) for record in records if math.isfinite(record.get(name, math.nan))]
    if not known:
        return "-"
    choose = min if name == "eval_loss" else max
    value, step = choose(known, key=lambda found: found[0])
    return f"{value:.4g} (step {step})"


def facts(state: TrainState, checked: Preflight) -> list[tuple[str, str]]:
    """When, where, how long, on how much, how the samples were drawn, and by which versions."""
    config, parallel = state.config, state.parallel
    records, _ = read_jsonl(state.run_dir.root / "metrics.jsonl")
    seconds = sum(record["step_s"] * record.get("steps", 1) for record in records if "step_s" in record)
    is_cuda = parallel.device.type == "cuda"
    device = torch.cuda.get_device_name(parallel.device) if is_cuda else parallel.device.type.upper()
    count = f"{parallel.world_size} x " if parallel.world_size > 1 else ""
    versions = package_versions()
    found = [
        ("finished", time.strftime("%Y-%m-%d")),
        ("training steps took", f"{duration(seconds)} on {count}{device}"),
        ("a step", checked.plan.step_of(config)),
        *_memory_fact(state, is_cuda=is_cuda),
        ("made with", ", ".join([f"finetrainers {__version__}", *(f"{name} {versions[name]}" for name in _LIBRARIES)])),
    ]
    if checked.prompts:
        sampling, guidance = config.validation, config.validation.validation_guidance_scale
        shown = "the pipeline's own guidance" if guidance is None else f"guidance {guidance:g}"
        steps = f"{sampling.validation_inference_steps} denoising steps"
        found.append(("samples", f"{steps}, {shown}, seed {config.training.seed}, {checked.frame_rate:g} fps"))
    return found


def sampling_arguments(config: TrainConfig, prompt: str) -> list[tuple[str, str]]:
    """What a pipeline is called with for the validation sample of a prompt, as code."""
    section, guidance = config.validation, config.validation.validation_guidance_scale
    found = [("num_inference_steps", str(section.validation_inference_steps))]
    found += [] if guidance is None else [("guidance_scale", f"{guidance:g}")]
    seed = sample_seed(config.training.seed, prompt)
    return [*found, ("generator", f"torch.Generator().manual_seed({seed})")]


def _memory_fact(state: TrainState, *, is_cuda: bool) -> Iterator[tuple[str, str]]:
    """What a training step took at most, of the process that took most."""
    peak = state.memory.all_peaks.get(TRAINING_STEP, {})
    parts = []
    if "allocated" in peak:
        reserved = f", {peak['reserved']:.2f} GiB reserved" if "reserved" in peak else ""
        total = torch.cuda.get_device_properties(state.parallel.device).total_memory / 2**30 if is_cuda else None
        parts.append(
            f"{peak['allocated']:.2f} GiB allocated{reserved}{'' if total is None else f' of {total:.1f} GiB'} on the GPU"
        )
    if "host" in peak:
        parts.append(f"{peak['host']:.2f} GiB of host memory")
    if parts:
        yield (
            "peak memory of a training step",
            f"{'; '.join(parts)}{', per process' if state.parallel.world_size > 1 else ''}",
        )


def memory_by_phase(peaks: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Headings, and a row for each phase, of the greatest peaks in GiB; empty where nothing was measured."""
    called = {"allocated": "GPU, allocated", "reserved": "GPU, reserved", "host": "host"}
    measured = {phase: peaks[phase] for phase in PHASES if phase in peaks}
    columns = [name for name in called if any(name in peak for peak in measured.values())]
    rows = [
        [label(phase), *(f"{peak[name]:.2f}" if name in peak else "" for name in columns)] for phase, peak in measured.items()
    ]  # fmt: skip
    return [["phase", *(called[name] for name in columns)], *rows] if rows else []


def at_a_glance(config: TrainConfig, plan: Any) -> list[tuple[str, str]]:
    """Base model, strength, size of the clips, and license."""
    base, training = config.model.pretrained_model_name_or_path, config.training
    on_hub = folder_of(base) is None
    rows = [("base model", f"[{base}](https://huggingface.co/{base})" if on_hub else f"`{base}`")]
    if training.training_type == "lora":
        kind = "rsLoRA" if training.use_rslora else "DoRA" if training.use_dora else "LoRA"
        numbers = f"{kind} of rank {training.rank}, alpha {training.lora_alpha:g}"
        rows.append(("strength", f"1.0 is as trained, and as in the samples; less weakens it ({numbers})"))
    sizes = ", ".join("x".join(map(str, size)) for size in plan.buckets)
    rows.append(("trained at", f"{sizes} (frames x height x width)"))
    return [*rows, ("license of the base model", _license_text(config))]


def _license_text(config: TrainConfig) -> str:
    """The license with its link, for people."""
    found = license_of(config)
    if not found:
        return "unknown: the base model's own page tells"
    name = found.get("license_name") or found.get("license", "")
    link = found.get("license_link", "")
    return f"[{name}]({link})" if link.startswith("http") else name


def license_of(config: TrainConfig) -> dict[str, Any]:
    """The base model's license, as its own card states it, where that is on this disk or the result is uploaded anyway."""
    base = config.model.pretrained_model_name_or_path
    if base.startswith(SCHEME):
        return {"license": "apache-2.0"}
    folder = folder_of(base)
    card: object = None if folder is None else folder / "README.md"
    if folder is None:
        revision, cache = config.model.revision, config.model.cache_dir
        card = try_to_load_from_cache(base, "README.md", revision=revision, cache_dir=cache)
        if config.run.push_to_hub and not isinstance(card, str):
            with contextlib.suppress(OSError, ValueError):  # what cannot be had is left out
                card = hf_hub_download(base, "README.md", revision=revision, cache_dir=cache)
    if not isinstance(card, str | Path) or not Path(card).is_file():
        return {}
    try:
        found = metadata_load(card) or {}
    except (ValueError, YAMLError):  # a card that is none
        return {}
    return {name: str(found[name]) for name in ("license", "license_name", "license_link") if found.get(name)}


def folder_of(base: str) -> Path | None:
    """Where a model lies that is not on the hub."""
    return Path(base) if base.startswith(SCHEME) or Path(base).is_dir() else None
