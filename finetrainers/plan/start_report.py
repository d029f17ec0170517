"""Output of a run besides its progress: its plan, the loaded weights, and its results. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from finetrainers.config.root import FAMILY, TrainConfig, fields
from finetrainers.utils.device import allocator_settings, likely_device_type
from finetrainers.utils.launch import launched_rank, wrap_prose
from finetrainers.utils.phases import PHASES, label
from finetrainers.utils.reading import parse_json
from finetrainers.utils.spelling import spelled
from finetrainers.utils.text import file_size, plural, shortened, without_controls
from finetrainers.utils.train_log import PrintedLines

from .preflight import ResolvedRun

#: Descriptions of the sources of chosen values.
_SOURCES = {
    "family": "recommended settings of the model", "data": "sizes of the clips", "run": "as in the resumed run",
    "memory": "memory of the GPU", "init_from": "as in the file of --init_from",
}  # fmt: skip
#: Environment variable of a stage's process: JSON list of warnings that were printed with the plan of all stages.
SKIPPED_WARNINGS = "FINETRAINERS_SKIPPED_WARNINGS"
_ORDINALS = {"2": "second ", "3": "third "}


def print_start(checked: ResolvedRun) -> None:
    """Print the plan of the training, the weights to load, and every warning."""
    print_first_line(checked)
    sizes = sizes_on_disk(checked).items()
    print_line("to load: " + ", ".join(f"{name} {'?' if size is None else file_size(size)}" for name, size in sizes))
    print_data(checked)
    print_origin(checked)
    if likely_device_type() == "cuda" and (settings := allocator_settings()):
        print_line(f"GPU memory allocator: {settings}")
    print_remarks(checked)


def print_first_line(checked: ResolvedRun, *, before: str = "") -> None:
    """Print the training and its data, the chosen values, and the weights that come from single files."""
    config = checked.config
    print_line(
        f"{before}{config.training.method} {config.training.training_type} of {config.model.model_name} "
        f"({config.model.pretrained_model_name_or_path}) on {plural(checked.plan.count, checked.plan.noun)}"
    )
    # A note names the buckets that were just chosen; those of a resumed run have no note.
    noted = "data" if getattr(checked.plan, "chosen", {}) else None
    sources = set(config.chosen.values()) - {noted}
    print_chosen(config, *sources, noise_source=checked.facts.noise_source)
    single = checked.family.single_files(config.model)
    if single:
        print_line("from single files: " + ", ".join(f"{part_name(part)} {path}" for part, path in single.items()))


def print_chosen(config: TrainConfig, *sources: str, noise_source: str = "") -> None:
    """Print the values that the run has chosen for open options, a line for each of these sources.

    Those of samples are left out if there are none. `noise_source` is that of a checkpoint's noise levels.
    """
    plain = {
        name: " ".join(map(str, value)) if isinstance(value, list) else value for name, value in config.plain().items()
    }
    hidden = "validation" if config.validation.validation_prompts is None else None
    lines: dict[str, list[str]] = {}
    for name, source in config.chosen.items():
        section = fields()[name].section
        if source in sources and plain[name] is not None and section != hidden:
            is_noise = source == FAMILY and section == "diffusion"
            label = f"noise as in {noise_source}" if is_noise and noise_source else _SOURCES.get(source, source)
            lines.setdefault(label, []).append(f"{name} {shortened(str(plain[name]), 24)}")
    for label, values in lines.items():
        print_line(f"chosen ({label}): {', '.join(values)}")


def sizes_on_disk(checked: ResolvedRun) -> dict[str, int | None]:
    """Return the bytes of each network's weight files by its readable name, None if they are not on this disk."""
    sizes = checked.family.weights_on_disk(checked.config.model).items()
    left_out = () if checked.needs_text else checked.facts.text_parts
    return {part_name(part): size for part, size in sizes if part not in left_out}


def part_name(part: str) -> str:
    """Return the readable name of a component: `second text encoder` for `text_encoder_2`."""
    name, _, number = part.rpartition("_") if part[-1:].isdigit() else (part, "", "")
    return _ORDINALS.get(number, "") + {"vae": "VAE"}.get(name, name.replace("_", " "))


@contextlib.contextmanager
def report_loading(checked: ResolvedRun, what: str) -> Iterator[None]:
    """Print size and duration after the block, which loads the networks whose name ends with `what`."""
    started = time.perf_counter()
    yield
    if launched_rank() != 0:
        return
    sizes = {name: size or 0 for name, size in sizes_on_disk(checked).items() if name.endswith(what)}
    seconds = time.perf_counter() - started
    print_line(f"loaded the {' and '.join(sizes)}: {file_size(sum(sizes.values()))} in {seconds:.1f} s")


def print_origin(checked: ResolvedRun) -> None:
    """Print the source of each part of a run that resumes or has `--init_from`."""
    if not checked.start.rows:
        return
    resumes = checked.start.checkpoint is not None
    start = "resumes from a checkpoint" if resumes else "starts from the weights of --init_from"
    print_line(f"{start}; source of each component:")
    width = max(len(part) for part, _ in checked.start.rows)
    for part, origin in checked.start.rows:  # not a table: paths must not be wrapped
        print_line(f"  {part:<{width}}  {origin}")


def print_remarks(checked: ResolvedRun) -> None:
    """Print every note and every warning."""
    for note in (*checked.facts.notes, *checked.plan.notes):
        print_line(f"note: {note}")
    print_warnings(checked.warnings)


def print_warnings(warnings: Iterable[str]) -> None:
    """Print one line for each warning, except those in `SKIPPED_WARNINGS`."""
    skipped = parse_json(os.environ.get(SKIPPED_WARNINGS, "[]"))
    for warning in warnings:
        if warning not in skipped:
            print_line(f"warning: {warning}")


def print_data(checked: ResolvedRun) -> None:
    """Print the training data as a table."""
    headings, *rows = checked.plan.table()
    table = Table(*headings, title=checked.plan.title, title_justify="left", box=None)
    for row in rows:
        table.add_row(*row)
    print_line(table)


def print_stopped(*, step: int, by: str, resume_command: str) -> None:
    """Print the command that continues after a stop."""
    print_line(f"stopped by {by} after step {step}, with a checkpoint; to continue:\n  {resume_command}")


def print_results(root: Path, *, comfyui: bool) -> None:
    """Print the paths of all results, after training, and the next commands; `comfyui` if ComfyUI reads them."""
    paths = {
        "LoRA": root / "pytorch_lora_weights.safetensors",
        **{part_name(path.name): path for path in root.glob("transformer*")},
        "samples": root / "samples",
        "rollouts": root / "rollouts",
        "report": root / "report.html",
        "model card": root / "README.md",
        "settings": root / "config.toml",
        "metrics": root / "metrics.jsonl",
        "profile": root / "profile",
    }
    print_line("done; results:")
    width = max(map(len, paths)) + 2
    for name, path in paths.items():
        if path.exists():
            print_line(f"  {name:<{max(16, width)}}{path}")
    run = shlex.quote(str(root))
    print_line(f"next:\n  finetrainers sample {run} --prompts TEXT --compare base")
    if comfyui:
        print_line(f"  finetrainers export {run} --format comfyui")


def print_memory(peaks: Mapping[str, Mapping[str, float]]) -> None:
    """Print the measured peaks of each phase, without figures of the whole run, which repeat them."""
    table = Table(box=None, pad_edge=False)
    headings, *rows = memory_table({phase: peak for phase, peak in peaks.items() if phase in PHASES})
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    print_line(table)


def memory_table(peaks: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Return rows of the measured peaks by phase, in GiB; the first has the headings."""
    columns = [name for name in ("allocated", "reserved", "host") if any(name in peak for peak in peaks.values())]
    cells = [
        [label(phase), *(f"{peak[column]:.2f}" if column in peak else "" for column in columns)]
        for phase, peak in peaks.items()
    ]
    return [["peak memory, GiB", *columns], *cells]


def print_line(content: str | Table) -> None:
    """Print a line or a table for the user, on rank 0 for all ranks."""
    content = spelled(without_controls(content)) if isinstance(content, str) else content
    if launched_rank() == 0:
        # In a notebook rich displays what it prints, and ignores the file. FORCE_COLOR, set there, is not for the log
        # file.
        for file, is_terminal in ((None, None), (PrintedLines(), False)):
            console = Console(
                file=file, soft_wrap=True, highlight=False, force_jupyter=False, force_terminal=is_terminal
            )
            if isinstance(content, str) and file is None and sys.stdout.isatty():
                console.print(wrap_prose(content), markup=False)
            else:
                console.print(content, markup=False)
