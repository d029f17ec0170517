"""Answers that a new configuration is made from: given by flags, asked on a terminal, or defaults."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from finetrainers.config.base import read_path
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.values import check_gpu
from finetrainers.models.registry import families
from finetrainers.utils.device import likely_device_type
from finetrainers.utils.failures import InputError
from finetrainers.utils.files import folder_problem
from finetrainers.utils.packaged import SCHEME, model_path, packaged_models
from finetrainers.utils.text import nearest, quoted

from .kinds import KINDS
from .offers import CPU, THIS_GPU, Answers, offered_models

#: Answer for no trigger word.
_NONE = "none"
_MAX_WORD = 100  # bytes of a trigger word, which names the run's directory


@dataclass(frozen=True)
class Question:
    """A question, which a flag answers too.

    Attributes:
        flag: the flag, or the placeholder of an argument.
        text: the question.
        read: returns the value of an answer; raises ValueError.
        default: returns the default by the earlier answers, or None if there is none.
        choices: returns the answers to choose from, each with a description; any other that `read` takes is valid.
        applies: returns whether to ask it, by the earlier answers; otherwise the default is taken.
    """

    flag: str
    text: str
    read: Callable[[str], Any]
    default: Callable[[Answers], str | None]
    choices: Callable[[], Mapping[str, str]] = dict
    applies: Callable[[Answers], bool] = lambda answers: True


def read_data_root(text: str) -> Path:
    """Return a directory of clips.

    Raises:
        ValueError: it does not exist, or is a file.
    """
    path = read_path(text)
    if not path.is_dir():
        raise InputError(f"{'is a file' if path.exists() else 'no such directory'}: {quoted(text)}", "not_found")
    if not any(file.is_file() for file in path.rglob("*")):
        raise InputError(f"{quoted(text)} holds no files; put clips or images there, with captions", "not_found")
    return path


def read_card(text: str) -> str:
    """Return a GPU to plan for, `cpu`, or `this`.

    Raises:
        ValueError: it is none of these, or this machine has no GPU.
    """
    name = text.strip().lower()
    if name == THIS_GPU and likely_device_type() == "cpu":
        raise InputError("this machine has no GPU; use a size such as 16GB, or cpu", "unavailable")
    return name if name in (CPU, THIS_GPU) else check_gpu(text.strip())


def read_model(text: str) -> str:
    """Return a demo model, a directory, or the Hub ID of a known checkpoint.

    Raises:
        ValueError: it is none of these.
    """
    if text.startswith(SCHEME):
        model_path(text)
        return text
    path = read_path(text)
    if path.is_dir():
        return str(path)
    published = [name for family in families().values() for name in family.published]
    if text.lower() in (name.lower() for name in published):
        return text
    names = [*packaged_models(), *published]
    words = re.sub(r"[\W_]", "", text.lower())
    alike = [name for name in names if words and words in re.sub(r"[\W_]", "", name.lower())]
    hint = f"; use one of {', '.join(alike)}" if alike else nearest(text, names)
    raise InputError(f"unknown model {quoted(text)}{hint}, or a directory in diffusers layout", "unknown")


def read_kind(text: str) -> str:
    """Return the name of a kind of LoRA.

    Raises:
        ValueError: it is not one.
    """
    if text not in KINDS:
        raise InputError(f"unknown kind {quoted(text)}{nearest(text, KINDS)}", "unknown")
    return text


def read_trigger_word(text: str) -> str:
    """Return a trigger word, or an empty text for `none`.

    Raises:
        ValueError: it would break the list of validation prompts.
    """
    if not text.isprintable() or ":::" in text or "@@@" in text:
        raise InputError(f"must be plain text without ::: and @@@, got {quoted(text)}")
    if len(text.encode()) > _MAX_WORD:
        raise InputError(f"must have at most {_MAX_WORD} bytes, got {len(text.encode())}", "too_large")
    return "" if text.strip() == _NONE else text.strip()


def read_other_clips(text: str) -> Path | str:
    """Return a directory of clips without the new concept, or an empty text for `none`.

    Raises:
        ValueError: it does not exist, is a file, or is empty.
    """
    return "" if text.strip() == _NONE else read_data_root(text)


def read_output_dir(text: str) -> Path:
    """Return the directory of the new run.

    Raises:
        ValueError: it cannot be made, or holds files.
    """
    path = read_path(text)
    if (problem := folder_problem(path)) is not None:
        raise InputError(problem)
    if path.is_dir() and any(path.iterdir()):
        raise InputError(f"{path} holds files; give a new directory", "occupied")
    return path


def _default_card(answers: Answers) -> str | None:
    """Return this machine's GPU, else `cpu` unless the model given is a published one."""
    if likely_device_type() != "cpu":
        return THIS_GPU
    model = answers.get("model")
    return CPU if model is None or model.startswith(SCHEME) or Path(model).is_dir() else None


def _default_model(answers: Answers) -> str:
    """Return the demo model for a CPU, else the first published model that fits the card by the estimate."""
    demo, published = (
        [name for name in offered_models() if name.startswith(SCHEME) is in_package] for in_package in (True, False)
    )
    if answers["card"] == CPU:
        return demo[0]
    from .fit import first_that_fits  # which imports torch

    return first_that_fits(answers, published) or demo[0]


def _default_output_dir(answers: Answers) -> str:
    """Return the first new directory below `runs` that has the name of the trigger word, else of the data."""
    words = answers.get("trigger_word") or answers.get("data_root", Path()).absolute().name
    name = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in words.lower())
    names = (f"runs/{name}" if number == 1 else f"runs/{name}-{number}" for number in count(1))
    return next(path for path in names if not Path(path).exists())


QUESTIONS = {
    "data_root": Question(
        "DIR", "Directory of clips or images, each with a caption in a text file of the same name", read_data_root,
        lambda answers: "clips" if Path("clips").is_dir() else None,
    ),
    "card": Question(
        "--card", "GPU to train on: a size such as 16GB, a card such as rtx4090, this (the GPU of this machine) or cpu",
        read_card, _default_card,
    ),
    "model": Question(
        "--model", "Model: one of these, another published checkpoint, or a directory", read_model, _default_model,
        offered_models,
    ),
    "kind": Question(
        "--kind", "Kind of LoRA", read_kind, lambda answers: "style",
        lambda: {name: kind.about for name, kind in KINDS.items()},
    ),
    "trigger_word": Question(
        "--trigger_word", "Trigger word, which calls up what the LoRA learned; use a word that the model does not know",
        read_trigger_word, lambda answers: KINDS[answers["kind"]].trigger_word,
    ),
    "other_clips": Question(
        "--other_clips", "Directory of other clips without the new concept, under their own captions, so that prompts "
        "without the trigger word stay as they were", read_other_clips, lambda answers: _NONE,
        applies=lambda answers: bool(answers["trigger_word"]),
    ),
    "output_dir": Question("--output_dir", "Directory of the run, for checkpoints and the LoRA", read_output_dir,
        _default_output_dir),
}  # fmt: skip


def complete(answers: Answers, *, ask: Callable[[str], str] | None) -> Answers:
    """Return the answers to all questions.

    Args:
        answers: those of the flags.
        ask: prints a text and returns the line that is typed, or None to take defaults.

    Raises:
        ConfigError: questions without an answer and a default, or other clips that cannot be told apart.
    """
    answers, missing = dict(answers), []
    for name, question in QUESTIONS.items():
        if name in answers:
            continue
        default = question.default(answers)
        if ask is not None and question.applies(answers):
            answers[name] = _ask(question, default, ask)
        elif default is not None:
            answers[name] = question.read(default)
        else:
            missing.append(Problem(question.flag, f"is required: {question.text}", "required"))
    if missing:
        raise ConfigError(missing, of="this command")
    if (problem := _other_clips_problem(answers)) is not None:
        raise ConfigError([Problem("--other_clips", problem, "conflict")], of="this command")
    return answers


def _other_clips_problem(answers: Answers) -> str | None:
    """Return the reason why the other clips cannot be used, or None if they can."""
    if not answers["other_clips"]:
        return None
    if not answers["trigger_word"]:
        return "requires a trigger word, which the other clips lack; set --trigger_word"
    clips, other = (answers[name].resolve() for name in ("data_root", "other_clips"))
    if clips.is_relative_to(other) or other.is_relative_to(clips):
        return f"{answers['other_clips']} and {answers['data_root']} have files in common; use separate directories"
    return None


def _ask(question: Question, default: str | None, ask: Callable[[str], str]) -> Any:
    """Return the answer to a question, which is asked until it is valid; an empty line is the default."""
    choices = question.choices()
    width = max(map(len, choices), default=0)
    listing = [f"  {index}  {name:<{width}}  {about}" for index, (name, about) in enumerate(choices.items(), start=1)]
    end = "" if default is None else f" [{default or _NONE}]"
    end = f"\n  number or name{end}: " if choices else f"{end}: "
    prompt = "\n".join([question.text, *listing]) + end
    while True:
        text = ask(prompt).strip() or default
        if text is None:
            continue
        if text.isdecimal() and 0 < int(text) <= len(choices):
            text = list(choices)[int(text) - 1]
        try:
            return question.read(text)
        except ValueError as error:
            prompt = f"{error}{end if choices else f'{chr(10)}{question.text}{end}'}"
