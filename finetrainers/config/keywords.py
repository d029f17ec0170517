"""Options in messages as keywords of Python: `--rank 8` becomes `rank=8`, and `--no-use_ema` `use_ema=False`.

Options are those of a run, and those of commands that are also functions: `sample`, `export`, `estimate`, `report`.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BeforeValidator

from finetrainers.utils.spelling import spell_keywords_by

#: A command, whose flags stay, or a flag.
_TEXT = re.compile(
    r"(?P<command>`(?!--)[^`\n]*`|\b(?:finetrainers|accelerate|torchrun|hf|python3?) [^`;)\n]*)"
    r"|(?<![\w/.=-])--(?P<no>no-)?(?P<name>[a-z]\w*(?:\.[a-z]\w*)?)"
)
_VALUE = re.compile(r"[ =]('[^'\n]*'|[^\s;()`]*(?:[^\s;()`,.:]|\.\.\.))")
_NUMBER = re.compile(r"-?(\d+(\.\d+)?|\.\d+)(e[+-]?\d+)?")
#: Values of text options: placeholders (`FILE.toml`, `49xHxW`), paths, and names that are not words.
_NAME = re.compile(r"'.*'|[A-Z][A-Zx_]*(\.\w+)?|(?!-).*[\d/=_].*")
#: Words that are values of text options.
_WORDS = {"resume_from_checkpoint": ("latest", "auto")}
#: Arguments of functions that a flag, or a command's argument, stands for.
_ARGUMENTS = {"--config": "source", "--format": "formats", "TARGET": "target", "SOURCE": "source", "RUN": "run"}
#: Arguments of `export`, `estimate` and `report`, and the types of their values; `sample.py` adds its options.
FUNCTION_ARGUMENTS: dict[str, Any] = {
    "dtype": Literal["bf16", "fp16", "fp32"],
    "format": list[Literal["diffusers", "comfyui", "kohya", "peft", "merged"]],
    "gpu": str, "host": str, "lora_scale": float, "one_file": bool, "output": str, "overwrite": bool, "videos": int,
}  # fmt: skip


def keywords(text: str) -> str:
    """Return a text with keywords instead of flags of a run's options; other flags, and commands, stay."""
    parts: list[str] = []
    start = 0
    for match in _TEXT.finditer(text):
        if match["command"] is None and match.start() >= start and (argument := _argument(match["name"])) is not None:
            keyword, end = _keyword(*argument, text, match)
            parts += [text[start : match.start()], keyword]
            start = end
    return "".join([*parts, text[start:]])


def keyword_place(where: str) -> str:
    """Return the place of a problem with the names of options instead of their flags."""
    if where in _ARGUMENTS:
        return _ARGUMENTS[where]
    return _TEXT.sub(lambda m: m["name"] if m["name"] and _argument(m["name"]) is not None else m[0], where)


def _argument(name: str) -> tuple[str, Any] | None:
    """Return the argument of a function that a flag stands for, and its type, or None for other flags."""
    from .root import fields, former_names

    if (option := fields().get(former_names().get(name, name))) is not None:
        return option.name, option.field.annotation
    keyword = _ARGUMENTS.get(f"--{name}", name)
    return (keyword, FUNCTION_ARGUMENTS[name]) if name in FUNCTION_ARGUMENTS else None


def _keyword(name: str, annotation: Any, text: str, flag: re.Match[str]) -> tuple[str, int]:
    """Return the keyword for a flag in a text, with its values as far as they are certain, and where they end."""
    leaves, end = _leaves(annotation), flag.end()
    values: list[str] = []
    is_list = list in leaves or tuple in leaves
    if bool in leaves:
        value = str(not flag["no"])
    else:
        while (match := _VALUE.match(text, end)) is not None and (is_list or not values):
            if (literal := _literal(name, match[1], leaves)) is None:
                break
            values.append(literal)
            end = match.end()
        value = f"[{', '.join(values)}]" if is_list and values else "".join(values)
    table, dot, key = name.partition(".")
    return (f'{table}={{"{key}": {value or "..."}}}' if dot else f"{name}={value}"), end


def _literal(name: str, word: str, leaves: set[Any]) -> str | None:
    """Return a value in Python, or None for a word that may belong to the sentence."""
    from .methods import METHODS

    is_number = bool(leaves & {int, float})
    if _NUMBER.fullmatch(word):
        return word if is_number else json.dumps(word)
    words = _WORDS.get(name, ()) if name != "method" else tuple(METHODS.all())
    if word in leaves or word in words:
        return json.dumps(word)
    if is_number:
        return word if re.fullmatch(r"[A-Z]", word) else None
    has_choices = any(isinstance(leaf, str) for leaf in leaves)
    return json.dumps(word.strip("'"), ensure_ascii=False) if _NAME.fullmatch(word) and not has_choices else None


def _leaves(annotation: Any) -> set[Any]:
    """Return the types in an annotation, `str` for those that are read from text, and the values of its literals."""
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return set(arguments)
    if get_origin(annotation) is Annotated:
        return {str} if any(isinstance(m, BeforeValidator) for m in arguments[1:]) else _leaves(arguments[0])
    leaves = {get_origin(annotation)} & {list, tuple}
    return leaves.union(*map(_leaves, arguments)) if arguments else {annotation}


spell_keywords_by(keywords)
