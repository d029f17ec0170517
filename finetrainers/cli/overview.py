"""Text of `finetrainers --help`, with commands grouped by task, and hints for commands that do not exist."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from difflib import get_close_matches
from typing import Any

from finetrainers.config.arguments import ArgumentParser
from finetrainers.config.load import SCRIPT_ADVICE, SCRIPTS
from finetrainers.config.names import invert_groups

_TASKS = {
    "get started": ("quickstart", "init", "demo", "models", "tiny"),
    "train": ("doctor", "check", "estimate", "search-batch", "prepare", "train", "run"),
    "evaluate": ("sample", "report", "watch", "plot", "ckpt"),
    "export": ("export", "sync"),
    "tools": ("cache", "serve-reward", "schema", "docs"),
}
_EXAMPLES = """examples:
  finetrainers quickstart                         a first LoRA, on any CPU
  finetrainers init clips                         a config file for your clips
  finetrainers check run.toml --html check.html   what happens to every clip
  finetrainers estimate run.toml --gpu 24GB       check that it fits
  finetrainers train --config run.toml --dry_run  check all, print the plan
  finetrainers train --config run.toml --lr 5e-5  train; flags override the file
  finetrainers sample runs/mystyle                sample the result
  finetrainers report runs/mystyle                an HTML report of the run
  finetrainers export runs/mystyle --format comfyui
                                                  for ComfyUI
  finetrainers train --help                       the options most people set
  finetrainers COMMAND --help                     more on any command

Several GPUs, here 2:
  accelerate launch --num_processes 2 -m finetrainers train --config run.toml
"""
#: Advice, and the command names that it is for.
_INSTEAD = {
    "`sample RUN --prompts PROMPTS` generates clips with a run, a checkpoint, a LoRA or a model":
        "generate inference infer predict",
    "`train` trains a LoRA or all weights (--training_type), on clips or with rewards (--method)":
        "lora sft grpo finetune fine-tune fit full-finetune",
    "`run` trains the stages of a stage file in order": "pipeline stages stage",
    "`train` continues a run: the same command with --resume_from_checkpoint latest": "resume continue",
    "`check` reports what happens to every clip, and `prepare` encodes clips and captions before training":
        "precompute preprocess encode data dataset inspect validate",
    "`watch RUN` samples a run's checkpoints as they appear": "inference-server",
    "`export` writes a LoRA or network for ComfyUI, kohya-ss or PEFT, or merges it": "convert merge comfyui",
    "`search-batch` finds the batch size of each bucket that fits the GPU":
        "search_batch search-bs batch-size batchsize autobatch",
    "`init` writes a config file for your clips, `train --help recipes` lists config files to start from":
        "config configure new setup wizard recipe recipes example examples",
    "`train --eval_num_items N --eval_steps N` measures the loss on held-out clips": "eval evaluate",
    "`report RUN` writes an HTML page of a run, and `plot RUN` draws its curves":
        "curves log logs summary compare dashboard",
    "`ckpt` lists, verifies and compares checkpoints": "checkpoint checkpoints verify",
    "`demo reward` demonstrates reward finetuning; `train --method grpo` runs it": "reward rewards",
    "`doctor` diagnoses this machine, or compares several": "env environment diagnose nodes hosts nvtop",
    "clips need caption files NAME.txt, which a captioning tool can write; `check` lists clips without one":
        "caption captions captioning",
    "`report RUN` writes an HTML page of a run, even while it trains, and `train --report_to` sends it to a tracker":
        "ui gui webui web",
    "`report RUN` shows the progress of a run, and `ckpt ls RUN` its checkpoints": "status progress",
    "press Ctrl-C, or create the file control/stop in the run directory: the run saves a checkpoint and exits":
        "stop cancel kill",
    "`train --push_to_hub` uploads the result to the Hub, and `hf upload` an export": "upload push publish",
    "`estimate run.toml --gpu 24GB` estimates GPU memory and suggests options that fit": "vram memory gpu oom",
    "`finetrainers --help` lists the commands": "help",
    "`finetrainers --version` prints it": "version",
}  # fmt: skip


class CommandParser(ArgumentParser):
    """Parser of the `finetrainers` command, whose help groups the commands by task."""

    commands: argparse._SubParsersAction[ArgumentParser]

    def format_help(self) -> str:
        """Return the text of `finetrainers --help`."""
        help_by_command = {action.dest: action.help or "" for action in self.commands._choices_actions}
        grouped = {name for names in _TASKS.values() for name in names}
        tasks = {**_TASKS, "tools": (*_TASKS["tools"], *(name for name in help_by_command if name not in grouped))}
        width = min(shutil.get_terminal_size().columns, 100)
        lines = ["usage: finetrainers COMMAND ...", "", self.description or ""]
        for task, names in tasks.items():
            lines += ["", f"{task}:"]
            for name in (name for name in names if name in help_by_command):
                lines += textwrap.wrap(f"  {name:<14}{help_by_command[name]}", width, subsequent_indent=" " * 16)
        return "\n".join([*lines, "", _EXAMPLES])


def described(about: str, *examples: str, more: str = "") -> dict[str, Any]:
    """Return arguments of a command's parser: its help, and a description with examples, which keeps its lines."""
    lines = "\n".join(f"  finetrainers {example}" for example in examples)
    paragraphs = [textwrap.fill(text, 80) for text in (f"{about[0].upper()}{about[1:]}.", more) if text]
    description = "\n\n".join([*paragraphs, f"examples:\n{lines}"])
    return {"help": about, "description": description, "formatter_class": argparse.RawDescriptionHelpFormatter}


def unknown_command(name: str, commands: list[str]) -> str:
    """Return the error for a command that does not exist, with advice."""
    advice = invert_groups(_INSTEAD).get(name, SCRIPT_ADVICE if name.endswith(SCRIPTS) else None)
    if advice is None:
        close = get_close_matches(name, commands, n=1, cutoff=0.7)
        advice = f"did you mean {close[0]!r}?" if close else f"valid: {', '.join(commands)}"
    return f"unknown command {name!r}; {advice}"
