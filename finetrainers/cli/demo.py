"""`finetrainers demo ...`: demonstrations on the demo model, and how it was built and measured."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from finetrainers.config.arguments import new_directory, output_directory, path_argument
from finetrainers.config.base import read_path
from finetrainers.config.errors import Problem
from finetrainers.utils.addresses import resolve
from finetrainers.utils.logs import quiet_progress_bars
from finetrainers.utils.packaged import model_path
from finetrainers.utils.text import nearest

from .options import positive_integer
from .overview import described

_WORLD = (
    "The demo model knows only a small world: colored shapes that move over a plain background, and captions that "
    "describe them. Training, rewards and measurements take minutes on a CPU"
)


def add_demo(commands: Any) -> None:
    """Add the subcommands to the parser."""
    about = "work with the demo model: make clips, train it with rewards, rebuild it, measure it"
    examples = ("demo data clips --items 20", "demo reward first-reward", "demo measure figures --lora quickstart")
    demo = commands.add_parser("demo", **described(about, *examples, more=f"{_WORLD}."))
    parts = demo.add_subparsers(dest="part", metavar="PART", required=True)

    data = parts.add_parser("data", help="write captioned clips of colored shapes that move, as mp4 and captions.jsonl")
    data.add_argument("directory", type=new_directory, help="new or empty directory")
    data.add_argument("--items", type=positive_integer, default=20, help="number of clips [20]")
    data.add_argument("--look", default="plain", help="plain, or striped, which the demo model has never seen")
    data.add_argument("--motion", help="one motion only, such as zigzag, which the demo model has never seen")
    data.add_argument("--seed", type=int, default=0, help="seed; equal seeds give equal clips [0]")
    data.add_argument("--held_out", action="store_true", help="only combinations that the model was not trained on")
    data.set_defaults(run=_data, check=_check_data)

    vae = parts.add_parser("vae", help="fit the demo model's VAE (seconds) and measure it on other clips")
    vae.add_argument("directory", type=new_directory, help="new or empty directory")
    vae.set_defaults(run=_vae)

    build = parts.add_parser("build", help="train the demo model from random weights (two hours); resumes if stopped")
    build.add_argument("directory", type=output_directory, help="output directory; existing results are kept")
    build.add_argument("--steps", type=positive_integer, help="optimizer steps [those of the shipped model]")
    build.add_argument("--clips", type=positive_integer, help="training clips [those of the shipped model]")
    build.set_defaults(run=_build)

    measure = parts.add_parser("measure", help="sample captions and measure what the samples show")
    measure.add_argument("directory", type=output_directory, help="directory of the figures and a contact sheet")
    measure.add_argument("--model", help="model in diffusers layout [the demo model]")
    measure.add_argument("--lora", type=path_argument, help="LoRA, or a run directory with one")
    measure.add_argument("--items", type=positive_integer, default=200, help="number of captions [200]")
    measure.add_argument("--look", default="plain", help="look that the captions ask for [plain]")
    measure.set_defaults(run=_measure, check=_check_measure)

    about = "train a preference into the demo model with a reward, on any CPU, in two minutes"
    place = "new or empty directory, or that of an earlier `demo reward`"
    reward = parts.add_parser("reward", **described(about, "demo reward first-reward"))
    add_demonstration(reward, "rewarded:rewarded", steps=32, help=place)

    scratch = parts.add_parser("scratch", help="train a small model from random weights on two real clips")
    add_demonstration(scratch, "scratch:from_scratch", steps=700, help=place.replace("reward", "scratch"))


def add_demonstration(parser: argparse.ArgumentParser, function: str, *, steps: int, **directory: Any) -> None:
    """Add the arguments of a demonstration, `module:name` in `finetrainers.demo`, which knows its number of steps."""
    parser.add_argument("directory", type=output_directory, **directory)
    parser.add_argument("--steps", type=positive_integer, help=f"optimizer steps [{steps}]")
    parser.set_defaults(run=_run_demonstration, demonstration=function)


def _run_demonstration(arguments: argparse.Namespace) -> int:
    """Run the function `module:name` of `finetrainers.demo` that the arguments name."""
    quiet_progress_bars()
    resolve(f"finetrainers.demo.{arguments.demonstration}")(arguments.directory, steps=arguments.steps)
    return 0


def _check_data(arguments: argparse.Namespace) -> list[Problem]:
    from finetrainers.demo.world import LOOKS, MOTIONS

    problems = _unknown("--look", arguments.look, LOOKS)
    if arguments.motion is not None:
        problems += _unknown("--motion", arguments.motion, tuple(MOTIONS))
    return problems


def _data(arguments: argparse.Namespace) -> int:
    from finetrainers.demo.data import held_out_scenes, training_scenes, write_clips

    draw_scenes = held_out_scenes if arguments.held_out else training_scenes
    motions = None if arguments.motion is None else (arguments.motion,)
    scenes = draw_scenes(arguments.items, seed=arguments.seed, look=arguments.look, motions=motions)
    metadata = write_clips(arguments.directory, scenes)
    print(f"wrote {arguments.items} clips and {metadata}")
    return 0


def _vae(arguments: argparse.Namespace) -> int:
    from finetrainers.demo.base import build_vae, measure_vae

    quiet_progress_bars()
    vae = build_vae()
    vae.save_pretrained(str(arguments.directory))
    for name, value in measure_vae(vae).items():
        print(f"{name:<24}{value:5.1f} dB PSNR")
    return 0


def _build(arguments: argparse.Namespace) -> int:
    from finetrainers.demo.build import CLIPS, STEPS, build

    quiet_progress_bars()
    build(arguments.directory, steps=arguments.steps or STEPS, clips=arguments.clips or CLIPS)
    return 0


def _check_measure(arguments: argparse.Namespace) -> Iterator[Problem]:
    """Yield the problems with the command's arguments, and set the path of the model."""
    from finetrainers.demo.measure import MODEL, find_lora
    from finetrainers.demo.world import LOOKS

    yield from _unknown("--look", arguments.look, LOOKS)
    try:
        arguments.model = read_path(model_path(MODEL if arguments.model is None else arguments.model))
        if not (arguments.model / "model_index.json").is_file():
            message = f"{arguments.model} is not a directory in diffusers layout (no model_index.json)"
            yield Problem("--model", message, "not_found")
    except ValueError as error:
        yield Problem.from_error("--model", error)
    if arguments.lora is not None:
        try:
            arguments.lora = find_lora(arguments.lora)
        except ValueError as error:
            yield Problem.from_error("--lora", error)


def _measure(arguments: argparse.Namespace) -> int:
    from finetrainers.demo.build import measure_weights

    quiet_progress_bars()
    measure_weights(
        arguments.model, arguments.directory, lora=arguments.lora, items=arguments.items, look=arguments.look
    )
    return 0


def _unknown(option: str, value: str, valid: tuple[str, ...]) -> list[Problem]:
    return [] if value in valid else [Problem(option, f"unknown value {value!r}{nearest(value, valid)}", "unknown")]
