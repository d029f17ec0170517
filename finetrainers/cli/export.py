"""`finetrainers export`: write a run's LoRA or network in the formats of other programs."""

from __future__ import annotations

import argparse
from typing import Any

from finetrainers.config.arguments import path_argument
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.models.files.lora_names import FORMATS
from finetrainers.utils import exit_codes
from finetrainers.utils.files import folder_problem
from finetrainers.utils.progress import working

from .overview import described

_MORE = """A LoRA is written as diffusers, comfyui, kohya or peft, or added to the model's weights (merged). A full
finetuning is written as diffusers, or as one file for comfyui. The files are read back and compared before they get
their names. Without --output_dir they are in export/ in the run directory."""


def add_export(commands: Any) -> None:
    """Add the subcommand to the parser."""
    about = "export a LoRA or network for ComfyUI, kohya-ss, PEFT or diffusers, and verify it"
    examples = (
        "export runs/first --format comfyui",
        "export runs/first/checkpoints/step-500 --format comfyui kohya \\\n      --dtype bf16",
        "export runs/first --format merged --lora_scale 0.8",
        "export style.safetensors --format comfyui \\\n      --pretrained_model_name_or_path MODEL",
    )
    export = commands.add_parser(
        "export",
        **described(about, *examples, more=_MORE),
        usage="finetrainers export SOURCE --format FORMAT [FORMAT ...] [options]",
    )
    export.add_argument("source", metavar="SOURCE", help="a run's --output_dir, a checkpoint, or a LoRA in safetensors")
    export.add_argument(
        "--format",
        nargs="+",
        required=True,
        choices=FORMATS,
        help=f"one or more of {' '.join(FORMATS)}",
        metavar="FORMAT",
    )
    export.add_argument(
        "--output_dir",
        type=path_argument,
        metavar="FOLDER",
        help="output directory; one subdirectory per format [export/ of the run]",
    )
    export.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32"), help="dtype of the files [as trained; full networks: bf16]"
    )
    export.add_argument("--lora_scale", type=float, metavar="X", help="LoRA scale in merged weights [1]")
    export.add_argument(
        "--one_file", action="store_true", help="write diffusers' networks as one file, not several of at most 10 GB"
    )
    export.add_argument("--overwrite", action="store_true", help="replace earlier exports")
    about_ema = "export a checkpoint's EMA, if it has one, instead of its raw weights [on]"
    export.add_argument("--use_ema", action=argparse.BooleanOptionalAction, default=True, help=about_ema)
    export.add_argument("--pretrained_model_name_or_path", metavar="MODEL", help="base model [from the run]")
    export.add_argument("--model_name", metavar="NAME", help="family of the model [from its files]")
    about_expert = "expert that the weights are for, in a model with two [from the run]"
    export.add_argument("--expert", choices=("high", "low"), help=about_expert)
    about_other = "LoRA of the other expert: its run, a checkpoint or a file; both are written as a pair [from the run]"
    export.add_argument("--other_expert", metavar="PATH", help=about_other)
    export.set_defaults(run=_export, check=_check)


def _check(arguments: argparse.Namespace) -> list[Problem]:
    """Return the problems that headers show, and set the source, the formats and their directory."""
    from finetrainers.results.export_formats import (
        find_source,
        setting_problems,
        source_problems,
        unwritten_formats,
    )

    arguments.format = list(dict.fromkeys(arguments.format or ()))
    problems = [
        *setting_problems(
            arguments.format, dtype=arguments.dtype, lora_scale=arguments.lora_scale, one_file=arguments.one_file
        )
    ]
    names = ("pretrained_model_name_or_path", "model_name", "expert", "other_expert")
    model_options = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    source, place = None, arguments.output_dir
    try:
        source = find_source(arguments.source, options=model_options, use_ema=arguments.use_ema)
        place = place or source.folder
    except ConfigError as error:
        problems += error.problems
    if place is not None and (problem := folder_problem(place)) is not None:
        problems.append(Problem("--output_dir", problem))
    if source is None:
        return problems
    arguments.source, arguments.output_dir = source, place
    if not arguments.overwrite:
        formats = unwritten_formats(source, arguments.format, place, **_settings(arguments))
        if done := [name for name in arguments.format if name not in formats]:
            print(f"exported before: {', '.join(str(place / name) for name in done)}")
        arguments.format = formats
    problems += source_problems(source, arguments.format, place, overwrite=arguments.overwrite)
    return problems


def _export(arguments: argparse.Namespace) -> int:
    source = arguments.source
    with working(f"exporting to {arguments.output_dir}"):
        from finetrainers.results.export_formats import export_formats, print_exported

        for export in export_formats(
            source, arguments.format, arguments.output_dir, overwrite=arguments.overwrite, **_settings(arguments)
        ):
            print_exported(export, source, say=print)
    return exit_codes.DONE


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    scale = 1.0 if arguments.lora_scale is None else arguments.lora_scale
    return {"dtype": arguments.dtype, "lora_scale": scale, "one_file": arguments.one_file}
