"""Text of `--help`: the options that most people set, all options, or those that match a word."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetrainers.utils.packaged import SHARED, recipes
from finetrainers.utils.reading import read_text

from .errors import ConfigError, Problem
from .methods import METHODS
from .names import DEPENDENT, INSTEAD, SAME, other_names, suggest_option
from .presets import budget_text
from .root import TrainConfig, fields, has_table, readers, sections
from .shape import choices, is_list, is_switch, kind, value_text

_END = """more help:
  --help all     every option
  --help recipes the recipes that --config takes by name
  --help WORD    a section, an option, or part of a name: --help optimizer

{sections}

Defaults are in brackets. Switches have a --no- form, which overrides a file.
All options are also listed in docs/reference/configuration.md."""
_CONFIG = "TOML file of options, or the name of a recipe; --help recipes lists them."
_WIDE = 40  # characters of choices above which they are not shown after the flag
_LONG = 100  # characters of choices above which only the help of the option lists them
_METAVARS = {
    "integer": "N",
    "number": "X",
    "path": "PATH",
    "size": "SIZE",
    "reward": "REWARD",
    "kinds": "KIND=P,...",
    "steps": "FIRST:LAST",
}


@dataclass(frozen=True)
class Guide:
    """First part of the help of a command.

    Attributes:
        description: summary of the command.
        examples: its arguments, in commands that people give.
        common: options that most people set, by title.
    """

    description: str
    examples: Sequence[str]
    common: Mapping[str, Sequence[str]]


TRAIN = Guide(
    "Finetune a video diffusion model. Options come from --config FILE.toml and from flags, which override the file."
    "\n\nSeveral GPUs: accelerate launch --num_processes 8 -m finetrainers train ...",
    (
        "--pretrained_model_name_or_path MODEL --data_root clips \\\n      --output_dir runs/first",
        "--config run.toml --lr 5e-5",
        "--config run.toml --dry_run",
    ),
    {
        "model and data": (
            "pretrained_model_name_or_path", "data_root", "dataset_file", "video_resolution_buckets", "resolutions",
            "id_token", "precompute_conditions",
        ),
        "training": (
            "method", "training_type", "rank", "lora_alpha", "train_steps", "batch_size", "gradient_accumulation_steps",
            "optimizer", "lr", "lr_scheduler",
        ),
        "memory": ("memory_budget", "gradient_checkpointing", "quantize_frozen", "blocks_to_swap"),
        "samples and metrics": ("validation_prompts", "validation_steps", "eval_num_items", "report_to"),
        "run": ("output_dir", "checkpointing_steps", "resume_from_checkpoint", "dry_run"),
    },
)  # fmt: skip

PREPARE = Guide(
    "Encode captions and clips into the cache that `train --precompute_conditions` reads, and exit. It loads the "
    "text encoders, then the VAE, and never the transformer. Run it again to resume; cached entries are not encoded "
    "again. Several runs may share one --precompute_dir. The options are those of `train`.\n\nSeveral GPUs: "
    "accelerate launch --num_processes 8 -m finetrainers prepare ...",
    ("--config run.toml --precompute_dir cache",),
    {
        "model": ("pretrained_model_name_or_path", "enable_slicing", "enable_tiling"),
        "data": (
            "data_root", "dataset_file", "dataset", "video_resolution_buckets", "resolutions", "id_token",
            "precompute_dir", "precompute_batch_size", "max_bad_samples", "seed",
        ),
        "run": ("output_dir",),
    },
)  # fmt: skip


def help_text(prog: str, word: str | None, *, guide: Guide = TRAIN) -> str:
    """Return the help of a command that takes the options of a run.

    Args:
        prog: the command.
        word: `all`, `recipes`, a section, an option, a part of a name, or None for the options that most people set.
        guide: the first part of the help.

    Raises:
        ConfigError: nothing is called `word`.
    """
    if word == "recipes":
        return _recipes_text()
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [--config FILE] [options]",
        add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    name = str(word).lstrip("-").replace("-", "_").lower()
    if word == "all":
        METHODS.all()
    elif word is not None and name not in fields():
        has_table(name.partition(".")[0])
    names_by_section = _by_section(fields())
    if word in (None, "all"):
        examples = "\n".join(f"  {prog} {example}" for example in guide.examples)
        paragraphs = [_wrapped(paragraph) for paragraph in guide.description.split("\n\n")]
        parser.description = "\n\n".join([*paragraphs, f"examples:\n{examples}"])
        parser.epilog = _END.format(sections=_wrapped(f"sections: {' '.join(names_by_section)}"))
        general = parser.add_argument_group("general")
        general.add_argument("--config", metavar="FILE", help=_CONFIG)
        general.add_argument("--list_models", action="store_true", help="Print the model families and exit.")
        groups = guide.common if word is None else names_by_section
    else:
        parser.usage = argparse.SUPPRESS
        parser.description = _wrapped((DEPENDENT | INSTEAD).get(name, ""))
        groups = {name: names_by_section[name]} if name in names_by_section else _by_section(_matching_options(name))
        if not groups and not parser.description:
            nothing = f"unknown option or section {name!r}; sections: {' '.join(names_by_section)}"
            raise ConfigError([Problem("--help", nothing, "unknown")], of="this command")
    if name in ("preset", "grpo_preset"):
        parser.epilog = budget_text(shutil.get_terminal_size().columns - 2)
    for title, names in groups.items():
        description = TrainConfig.model_fields[title].description if word is not None else None
        group = parser.add_argument_group(title, _wrapped(description) if description else None)
        for option_name in names:
            _add(group, option_name, in_full=word not in (None, "all"))
    return parser.format_help()


def _recipes_text() -> str:
    """Return the names and first sentences of all recipes, and where they and the files for launchers are."""
    width, columns = max(map(len, recipes()), default=0) + 2, shutil.get_terminal_size().columns
    lines = []
    for name, path in recipes().items():
        head = read_text(path).partition("\n\n")[0].replace("\n#", "").removeprefix("# ")
        title = f"  {name:<{width}}{re.split(r'[.](?= |$)', head, maxsplit=1)[0]}"
        lines.append(textwrap.fill(title, columns, subsequent_indent=" " * (width + 2)))
    return "\n".join([
        f"Recipes for --config, by name; README.md in {SHARED / 'examples'} describes them:", "", *lines, "",
        f"Files for `accelerate launch --config_file` are in {SHARED / 'accelerate_configs'}. Two GPUs, from anywhere:",
        f"  accelerate launch --config_file {SHARED / 'accelerate_configs' / 'ddp.yaml'} --num_processes 2 \\",
        "      -m finetrainers train --config run.toml", "",
    ])  # fmt: skip


def _wrapped(text: str) -> str:
    return textwrap.fill(text, shutil.get_terminal_size().columns - 4)


def _matching_options(word: str) -> list[str]:
    """Return the options that match a word: by name, another trainer's, part of it, a value, help text, or a typo."""
    if word in fields():
        return [word]
    if word in SAME:
        return [SAME[word]]
    if (advice := (DEPENDENT | INSTEAD).get(word)) is not None:
        return [name for name in dict.fromkeys(re.findall(r"--(\w+)", advice)) if name in fields()]
    pattern = re.compile(rf"\b{re.escape(word.replace('_', ' '))}", re.IGNORECASE)
    matches = [
        name for name, o in fields().items()
        if word in name or word in choices(o.field.annotation) or pattern.search(o.field.description or "")
    ]  # fmt: skip
    suggestion = None if matches else suggest_option(word, fields())
    return matches if suggestion is None else [suggestion]


def _by_section(names: Iterable[str]) -> dict[str, list[str]]:
    names_by_section: dict[str, list[str]] = {}
    for name in names:
        names_by_section.setdefault(fields()[name].section, []).append(name)
    return names_by_section


def _add(group: Any, name: str, *, in_full: bool) -> None:
    """Add an option to a group; `in_full` shows all its values and all its names."""
    option = fields()[name]
    field, text = option.field, option.field.description or ""
    choice = ",".join(choices(field.annotation))
    in_line = 0 < len(choice) <= _WIDE and not is_list(field)
    if choice and not in_line:
        listed = in_full or len(choice) <= _LONG
        text += f" One of: {choice.replace(',', ', ')}." if listed else f" Values: see --help {name}."
    if in_full and (sections()[option.section].methods or option.readers):
        text += f" Methods: {', '.join(readers(name))}."
    if in_full and other_names(name):
        text += f" Also accepted: {', '.join(f'--{other}' for other in other_names(name))}."
    if field.default not in (None, []):
        text += f" [{'required' if field.is_required() else value_text(field.default)}]"
    options: dict[str, Any] = {"help": text.replace("%", "%%")}
    if is_switch(field):
        options["action"] = "store_true"
    else:
        value = _METAVARS.get(kind(field.annotation)) or option.key.rsplit("_", 1)[-1].upper()
        options["metavar"] = f"{{{choice}}}" if in_line else value.removesuffix("S") if is_list(field) else value
        options |= {"nargs": "+"} if is_list(field) else {}
    group.add_argument(f"--{name}", **options)
