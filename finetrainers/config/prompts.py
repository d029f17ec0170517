"""Validation prompts: the `prompt@@@FxHxW:::...` syntax and prompt files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from finetrainers.utils.reading import parse_json, parse_toml
from finetrainers.utils.text import plural, quoted

from .base import Section
from .errors import ConfigError, Problem, value_kind, value_message
from .files import nearest_file, read_text
from .sections import ValidationSection
from .values import Place, VideoBucket, check_place

#: File formats of prompts that are read, and others, whose file names are never taken for prompts.
_FORMATS = (".txt", ".jsonl", ".toml")
_OTHER_FORMATS = (".csv", ".tsv", ".json", ".yaml", ".yml", ".md", ".parquet", ".xlsx")
#: Name of a control video, before its path.
_NAMED = re.compile(r"(?:^|,)(\w+)=")
#: Values of options that stand for prompts which `train` or `sample` was called with.
PYTHON_PROMPTS = {name: Path(f"python:{name}") for name in ("prompts", "eval_prompts", "validation_prompts")}
_rows: ContextVar[Mapping[Path, Sequence[dict[str, Any]]]] = ContextVar("prompts from Python", default={})  # noqa: B039


class ValidationPrompt(Section):
    """Prompt to sample.

    Attributes:
        prompt: the text.
        size: `(frames, height, width)`, or None for the first training bucket.
        image: path or URL of a first-frame image.
        video: path of a video whose first frame is the condition, or of the control video; see `videos`.
        last_image: path or URL of a last-frame image.
        video_prefix: path of a video that the sample begins with; behind `:F`, its last F frames.
    """

    prompt: str
    size: VideoBucket | None = None
    image: Place | None = None
    video: Place | None = None
    last_image: Place | None = None
    video_prefix: Place | None = None

    @property
    def prefix(self) -> tuple[Path, int | None] | None:
        """File of the video that the sample continues, and the number of its last frames, or None for all that fit."""
        if self.video_prefix is None:
            return None
        place, colon, frames = self.video_prefix.rpartition(":")
        if colon and frames.isdecimal() and not Path(self.video_prefix).exists():
            return Path(place), int(frames)
        return Path(self.video_prefix), None

    @property
    def videos(self) -> dict[str, str]:
        """Paths of several control videos by name, of `NAME=PATH,NAME=PATH`, or the path of the only video under ""."""
        if self.video is None or Path(self.video).is_file():
            return {} if self.video is None else {"": self.video}
        before, *named = _NAMED.split(self.video)
        return {"": self.video} if before or not named else dict(zip(named[::2], named[1::2], strict=True))

    @property
    def given(self) -> str:
        """Description of the conditioning inputs, with the names of files."""
        path, frames = self.prefix or (None, None)
        count = "" if frames is None else f"the last {frames} frames of "
        media = {"first frame ": self.image, "video ": self.video, "last frame ": self.last_image}
        phrases = [f"continues {count}{path.name}"] if path is not None else []
        return ", ".join([*phrases, *(label + place.rpartition("/")[2] for label, place in media.items() if place)])


#: Option of a run for each of the media of its prompts.
MEDIA_OPTIONS = {
    "image": "validation_images", "video": "validation_videos", "last_image": "validation_last_images",
    "video_prefix": "validation_video_prefixes",
}  # fmt: skip


def parse_validation_prompts(section: ValidationSection) -> list[ValidationPrompt]:
    """Return all validation prompts of a run; empty when none are configured.

    The text after the last `@@@` of an entry is its size; without `@@@`, or with nothing after it, the prompt has no
    separate size.

    Raises:
        ConfigError: a malformed size, an unreadable file, or a count of images or videos that differs.
    """
    text = section.validation_prompts
    separator = section.validation_separator
    if text is None:
        media_options = [n for n in MEDIA_OPTIONS.values() if getattr(section, n) is not None]
        if media_options:
            raise ConfigError(
                [Problem(f"--{media_options[0]}", "requires --validation_prompts, one prompt per entry", "required")]
            )
        return []
    if (rows := python_prompts(Path(text))) is not None:
        prompts = [_python_prompt(row, f"prompts[{index}]") for index, row in enumerate(rows)]
    elif separator not in text and is_file_name(text):
        prompts = _read_file(Path(text))
    else:
        prompts = [_parse_entry(entry) for entry in text.split(separator)]
    for medium, name in MEDIA_OPTIONS.items():
        places = _media(getattr(section, name), name, separator, len(prompts))
        prompts = [
            prompt if place is None else prompt.model_copy(update={medium: place})
            for prompt, place in zip(prompts, places, strict=True)
        ]
    return prompts


def parse_eval_prompts(section: ValidationSection) -> list[ValidationPrompt]:
    """Return the prompts of `eval_prompts`; empty when it is not given.

    Raises:
        ConfigError: an unreadable file, or a malformed size.
    """
    if section.eval_prompts is None:
        return []
    if (rows := python_prompts(section.eval_prompts)) is not None:
        return [_prompt(row, f"eval_prompts[{index}]") for index, row in enumerate(rows)]
    return _read_file(section.eval_prompts, option="--eval_prompts")


@contextmanager
def python_prompts_set(prompts: Mapping[str, Any]) -> Iterator[None]:
    """Make `python_prompts` return prompts in this thread, within the block; by option."""
    token = _rows.set({PYTHON_PROMPTS[name]: prompt_rows(values, name) for name, values in prompts.items()})
    try:
        yield
    finally:
        _rows.reset(token)


def python_prompts(path: Path) -> Sequence[dict[str, Any]] | None:
    """Return the prompts that `train` was called with, as rows of a file, or None if `path` is a file.

    Raises:
        ConfigError: it was called without them.
    """
    if path not in PYTHON_PROMPTS.values():
        return None
    if path not in _rows.get():
        name = path.name.partition(":")[2]
        message = f"prompts of a Python program; call train(config, {name}=...), or use a file"
        raise ConfigError([Problem(f"--{name}", message, "required")])
    return _rows.get()[path]


def prompt_rows(prompts: Any, name: str = "prompts") -> list[dict[str, Any]]:
    """Return prompts from Python as the rows that a JSON file of them would have; `name` is theirs in problems.

    A string is one prompt.

    Raises:
        ConfigError: they are not a list, or one is neither a string nor a mapping, or has values that JSON does not
            have.
    """
    name = name.removeprefix("validation_")
    if isinstance(prompts, str):
        if is_file_name(prompts):
            option = f"load_config(..., {name}={prompts!r})"
            raise ConfigError([Problem(name, f"a file of prompts is an option of the configuration: {option}")])
        prompts = [prompts]
    if isinstance(prompts, (bytes, Mapping)) or not hasattr(prompts, "__getitem__"):
        raise ConfigError([Problem(name, f"expected a list of strings or mappings, got {type(prompts).__name__}")])
    if not len(prompts):
        raise ConfigError([Problem(name, "is an empty list; add a prompt", "required")])
    rows: list[dict[str, Any]] = []
    problems: list[Problem] = []
    for index, prompt in enumerate(prompts):
        row: Any = {"prompt": prompt} if isinstance(prompt, str) else prompt
        message = None if isinstance(row, Mapping) else f"expected a string or a mapping, got {type(row).__name__}"
        try:
            rows.append(parse_json(json.dumps(dict(row) if message is None else {}, default=_plain)))
        except (TypeError, ValueError) as error:
            message = f"must have values as in JSON: {error}"
        problems += [] if message is None else [Problem(f"{name}[{index}]", message)]
    if problems:
        raise ConfigError(problems)
    return rows


def _plain(value: Any) -> Any:
    """Return a path as text, and a number or an array of NumPy as numbers."""
    return value.tolist() if hasattr(value, "tolist") else os.fspath(value)


def is_file_name(text: str) -> bool:
    """Return whether a text names a file of prompts, of a format that is read or not, rather than being a prompt."""
    suffix = Path(text).suffix.lower()
    if suffix in _FORMATS or (suffix in _OTHER_FORMATS and not re.search(r"\s", text)):
        return True
    try:
        return bool(suffix) and Path(text).expanduser().is_file()
    except (OSError, ValueError, RuntimeError):  # no path can be like this
        return False


def _python_prompt(row: dict[str, Any], where: str) -> ValidationPrompt:
    """Return a prompt from Python; that of a string may have a size, as in a text of several."""
    text = row.get("prompt")
    return _parse_entry(text, where) if isinstance(text, str) and len(row) == 1 else _prompt(row, where)


def _parse_entry(entry: str, where: str = "--validation_prompts") -> ValidationPrompt:
    text, mark, size = entry.rpartition("@@@")
    if not mark:
        text, size = size, ""
    return _prompt({"prompt": text.strip(), **({"size": size.strip()} if size.strip() else {})}, where)


def _read_file(path: Path, *, option: str = "--validation_prompts") -> list[ValidationPrompt]:
    suffix = path.suffix.lower()
    if suffix not in _FORMATS:
        missing = "" if path.is_file() else f", and the file does not exist{nearest_file(path)}"
        message = f"prompts are read from {', '.join(_FORMATS)} files, got {quoted(str(path))}{missing}"
        raise ConfigError([Problem(option, message, "not_found" if missing else "unsupported")])
    path, text = read_text(path, option=option)
    if suffix == ".txt":
        lines = [line.strip() for line in text.splitlines()]
        prompts = [_parse_entry(line) for line in lines if line and not line.startswith("#")]
        if not prompts:
            raise ConfigError([Problem(str(path), "holds no prompts; write one per line", "required")])
        return prompts
    try:
        if suffix == ".toml":
            entries = parse_toml(text).get("prompts", [])
        else:
            entries = [parse_json(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise ConfigError([Problem(str(path), f"cannot be read: {error}", "unreadable")]) from error
    if not entries or not isinstance(entries, list):
        raise ConfigError(
            [Problem(str(path), "holds no prompts; TOML files require [[prompts]] tables with `prompt`", "required")]
        )
    return [_prompt(entry, f"{path} entry {number}") for number, entry in enumerate(entries, start=1)]


def _prompt(entry: Any, where: str) -> ValidationPrompt:
    entry = {"prompt": entry} if isinstance(entry, str) else entry
    if not isinstance(entry, dict) or not entry.get("prompt"):
        raise ConfigError([Problem(where, "has no prompt text", "required")])
    try:
        return ValidationPrompt.model_validate(entry)
    except ValidationError as error:
        raise ConfigError([Problem(where, _message(detail), value_kind(detail)) for detail in error.errors()]) from None


def _message(error: Mapping[str, Any]) -> str:
    key = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        return f"unknown key {key!r}; valid: {', '.join(ValidationPrompt.model_fields)}"
    return f"{key}: {value_message(error)}"


def _media(text: str | None, name: str, separator: str, count: int) -> list[str | None]:
    if text is None:
        return [None] * count
    parts: list[str | None] = [part.strip() or None for part in text.split(separator)]
    if len(parts) != count:
        raise ConfigError(
            [
                Problem(
                    f"--{name}",
                    f"has {plural(len(parts), 'entry', 'entries')} for {plural(count, 'prompt')}; use one per prompt",
                    "conflict",
                )
            ]
        )
    try:
        return [part and check_place(part) for part in parts]
    except ValueError as error:
        raise ConfigError([Problem.from_error(f"--{name}", error)]) from None
