"""What a run is going to do, said before it does it: the start-up lines and the dry run."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from torch import nn

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.load import dump_toml
from finetrainers.memory.plan import estimate_for
from finetrainers.models.registry import build_tiny
from finetrainers.parallel.launched import expected_split
from finetrainers.utils.packaged import model_path
from finetrainers.utils.text import plural

from .preflight import Preflight
from .trainable import attach, trainable_parameters

if TYPE_CHECKING:
    from finetrainers.parallel.engine import Parallel


def print_start(checked: Preflight, parallel: Parallel) -> None:
    """On the main process: what trains on what, and every warning."""
    if not parallel.is_main:
        return
    console = Console(soft_wrap=True, highlight=False)
    config = checked.config
    console.print(
        f"{config.training.method} {config.training.training_type} of {config.model.model_name} "
        f"({config.model.pretrained_model_name_or_path}) on {plural(checked.plan.count, checked.plan.noun)}; {parallel.describe()}"
    )
    _print_data(console, checked)
    _print_origin(console, checked)
    _print_remarks(console, checked)


def _print_origin(console: Console, checked: Preflight) -> None:
    """What comes from where, of a run that does not start from the model's own weights."""
    if not checked.start.rows:
        return
    title = "initialised" if checked.start.checkpoint is None else "continued"
    console.print(f"{title}; what comes from where:")
    width = max(len(part) for part, _ in checked.start.rows)
    for part, origin in checked.start.rows:  # no table: paths must not be broken into lines
        console.print(f"  {part:<{width}}  {origin}", markup=False)


def _print_remarks(console: Console, checked: Preflight) -> None:
    for note in checked.plan.notes:
        console.print(f"note: {note}")
    for warning in checked.warnings:
        console.print(f"warning: {warning}")


def _print_data(console: Console, checked: Preflight) -> None:
    table = Table(title=checked.plan.title, title_justify="left", box=None)
    headings, *rows = checked.plan.table()
    for heading in headings:
        table.add_column(heading)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def dry_run_report(checked: Preflight) -> None:
    """Build what can be built without weights, print the plan and the configuration.

    Raises:
        ConfigError: the model's parts do not go with the options (a LoRA target that matches nothing, say).
    """
    config = checked.config
    console = Console(soft_wrap=True, highlight=False)
    transformer, is_real = _transformer_without_weights(checked)
    try:
        attach(transformer, config.training)
    except ValueError as error:
        raise ConfigError([Problem("", str(error))]) from None
    trained = sum(p.numel() for p in trainable_parameters(transformer).values())
    total = sum(p.numel() for p in transformer.parameters())
    console.print(f"dry run of {config.model.model_name} {config.training.training_type}: everything checks out")
    what = (
        "built without weights"
        if is_real
        else "of a tiny stand-in: the model's config is neither on disk nor on the hub"
    )
    console.print(f"transformer: {total / 1e6:.4g} M weights, {trained / 1e6:.4g} M of them trained ({what})")
    if is_real:
        bucket, clips = checked.plan.heaviest(config)
        split = expected_split(config.parallel)
        memory = estimate_for(config, checked.geometry, transformer, bucket=bucket, batch_size=clips, split=split)
        for name, gib in memory.table():
            console.print(f"  {name:<28}{gib}")
        if checked.plan.beside_memory:
            console.print(f"  and beside that: {checked.plan.beside_memory}")
    else:
        console.print("  memory: estimated only from the model's own config")
    _print_data(console, checked)
    steps = config.training.train_steps
    console.print(
        f"{plural(steps, 'step') if steps else plural(config.training.train_epochs, 'epoch')} of "
        f"{checked.plan.step_of(config)}; output in {config.run.output_dir}"
    )
    _print_origin(console, checked)
    _print_remarks(console, checked)
    console.print("\n" + dump_toml(config), markup=False)


def print_stopped(*, step: int, by: str, resume_command: str) -> None:
    """How to continue after a stop."""
    print_line(f"stopped by {by} after step {step}, with a checkpoint; to continue:\n  {resume_command}")


def print_results(root: Path) -> None:
    """Where everything is, after training."""
    places = {
        "LoRA": root / "pytorch_lora_weights.safetensors",
        "transformer": root / "transformer",
        "samples": root / "samples",
        "model card": root / "README.md",
        "settings": root / "config.toml",
        "metrics": root / "metrics.jsonl",
    }
    print_line("done; results:")
    for name, path in places.items():
        if path.exists():
            print_line(f"  {name:<16}{path}")


def print_line(text: str) -> None:
    """One line for the user."""
    Console(soft_wrap=True, highlight=False).print(text, markup=False)


def _transformer_without_weights(checked: Preflight) -> tuple[nn.Module, bool]:
    """The transformer on the meta device, and whether it is the real one: where its config is not to be had, a tiny one."""
    config = checked.config.model
    spec = checked.family.load(config)
    try:
        return spec.transformer_on_meta(), True
    except ValueError:
        if Path(model_path(config.pretrained_model_name_or_path)).is_dir():
            raise
    with tempfile.TemporaryDirectory() as directory:
        build_tiny(config.model_name, Path(directory) / "tiny")
        local = config.model_copy(
            update={"pretrained_model_name_or_path": str(Path(directory) / "tiny"), "transformer_id": None}
        )
        return checked.family.load(local).transformer_on_meta(), False
