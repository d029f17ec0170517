"""The prompts of a run: read from a file, put in order, and given their random numbers. Imports no torch."""

from __future__ import annotations

import csv
import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetrainers.config.base import check_text
from finetrainers.config.prompts import python_prompts
from finetrainers.data.reading.items import DataError
from finetrainers.data.reading.media import decoding, open_image
from finetrainers.data.reading.status import InvalidSampleError
from finetrainers.utils.failures import error_kind
from finetrainers.utils.files import missing_path_problem, names_existing
from finetrainers.utils.reading import MAX_RECORDS, parse_json, read_json, read_text
from finetrainers.utils.seeding import derive_seed, generator
from finetrainers.utils.text import plural, printable, quoted

if TYPE_CHECKING:
    import torch

#: Keys that may hold the prompt in a line of JSON.
TEXT_KEYS = ("prompt", "caption", "text")
#: The keys of the images that a prompt's clips start from and end with.
IMAGE_KEYS = ("image", "last_image")
#: Keys of an entry of DanceGRPO's `videos2caption.json`, and the directories beside it that hold their files.
ENCODED_KEYS = {"prompt_embed_path": "prompt_embed", "prompt_attention_mask": "prompt_attention_mask"}
#: The list itself, as DanceGRPO's preprocessing names it.
ENCODED_LIST = "videos2caption.json"
#: The file of the empty prompt in these directories, which guidance needs; the list does not name it.
EMPTY_FILE = "empty_prompt.pt"

_SHOWN = 3  # repeated prompts named in a warning


@dataclass(frozen=True)
class Prompt:
    """One prompt, and where it was written (`prompts.txt line 3`).

    `embedding` and `mask` are the files of a prompt that DanceGRPO's preprocessing has encoded: `[257, 4096]`, the
    pooled embedding in its first row, and the mask of the others. Either all prompts of a file have them or none.
    `image` is the image that all clips of the prompt start from, and `last_image` the one that they end with. `columns`
    are further columns of its file, for rewards: all prompts of a file have the same, with None for an empty one.
    """

    text: str
    where: str
    embedding: Path | None = None
    mask: Path | None = None
    image: Path | None = None
    last_image: Path | None = None
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def images(self) -> dict[str, Path]:
        """Its images, by the key in its file."""
        images = dict(zip(IMAGE_KEYS, (self.image, self.last_image), strict=True))
        return {key: path for key, path in images.items() if path is not None}

    @property
    def name(self) -> tuple[str | Path, ...]:
        """Text and images, which distinguish it from other prompts."""
        return self.text, *self.images.values()


@dataclass(frozen=True)
class PromptFile:
    """The prompts of a file.

    Attributes:
        prompts: in the order of the file, repeated ones included.
        fingerprint: hex digest that changes with any text, their order, and the names and sizes of embeddings and
            images.
        notes: omitted lines, with counts.
        warnings: messages for the user, with counts.
        empty: the encoded empty prompt, if it lies beside encoded prompts.
    """

    prompts: tuple[Prompt, ...]
    fingerprint: str
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    empty: Prompt | None = None


def read_prompts(path: Path) -> PromptFile:
    """Read a prompt file, or the prompts that `train` was called with, as those of a `.jsonl` file.

    `.txt` holds one prompt a line; blank lines and lines starting with `#` are left out. `.jsonl` holds an object a
    line, with the prompt under `prompt`, `caption` or `text`, and `.csv` a table with such a column. `.json` is
    DanceGRPO's `videos2caption.json`: a list of objects with `caption`, `prompt_embed_path` and
    `prompt_attention_mask`, the latter two naming files in the directories `prompt_embed/` and `prompt_attention_mask/`
    beside it.

    Further keys or columns become the columns of a prompt.

    In all but `.txt`, `image` names the image that a prompt's clips start from, relative to the file's directory or to
    the current one, and `last_image` the one that they end with. Every image is decoded once, so that a damaged one is
    reported before anything is loaded.

    Raises:
        DataError: the file cannot be read or holds no prompts; its `problems` name every line that is wrong.
        ConfigError: `train` was called without the prompts.
    """
    problems: list[str] = []
    notes: list[str] = []
    prompts = _with_all_columns(list(_prompts(path, problems, notes)))
    problems += _image_problems(prompts)
    if problems:
        raise DataError(f"{path}: {plural(len(problems), 'problem')}", problems)
    if not prompts:
        raise DataError(f"{path} holds no prompts{f' ({notes[0]})' if notes else ''}", kind="required")
    return PromptFile(
        tuple(prompts), _fingerprint(prompts), tuple(notes), tuple(_repeated(path, prompts)), empty_beside(path)
    )


def _prompts(path: Path, problems: list[str], notes: list[str]) -> Iterator[Prompt]:
    """Yield the prompts of a file, or those that `train` was called with."""
    if (rows := python_prompts(path)) is not None:
        for index, row in enumerate(rows):
            yield from _from_row(row, f"{path.name.partition(':')[2]}[{index}]", path, problems)
        return
    readers = {".txt": _from_text, ".jsonl": _from_json_lines, ".csv": _from_table, ".json": _from_encoded}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"prompt file {quoted(str(path))} must end in .txt, .jsonl, .csv or .json", kind="unsupported")
    yield from reader(path, _read(path), problems, notes)


def empty_beside(path: Path) -> Prompt | None:
    """Return the encoded empty prompt beside a list of encoded prompts, or None if there is none."""
    if path.suffix.lower() != ".json":
        return None
    embedding, mask = (path.parent / folder / EMPTY_FILE for folder in ENCODED_KEYS.values())
    return (
        Prompt("", f"the empty prompt of {path.name}", embedding, mask)
        if embedding.is_file() and mask.is_file()
        else None
    )


class PromptOrder:
    """The order of prompts: an endless walk through one permutation after the other, with no state to save.

    The permutation of an epoch is a function of (seed, epoch), so it is equal at any world size. Every prompt comes
    once an epoch. A rollout at the border of two epochs takes prompts of both, and may hold one prompt twice; so it may
    if there are fewer prompts than a rollout has. They are two groups then, distinguished by their slot.
    """

    def __init__(self, num_prompts: int, *, prompts_per_step: int, seed: int) -> None:
        if num_prompts < 1 or prompts_per_step < 1:
            raise ValueError(f"{prompts_per_step} prompts a rollout of {num_prompts}: both must be at least 1")
        self.num_prompts = num_prompts
        self.prompts_per_step = prompts_per_step
        self.seed = seed
        self._epoch = lru_cache(maxsize=2)(self._permutation)

    def prompt_indices(self, rollout: int) -> list[int]:
        """Return the indices of the prompts of a rollout, counted from 0; the position in the list is the slot."""
        first = rollout * self.prompts_per_step
        return [self.prompt_at(first + slot) for slot in range(self.prompts_per_step)]

    def prompt_at(self, position: int) -> int:
        """Return the index of the prompt at a position of the walk."""
        epoch, place = divmod(position, self.num_prompts)
        return self._epoch(epoch)[place]

    def _permutation(self, epoch: int) -> tuple[int, ...]:
        order = list(range(self.num_prompts))
        random.Random(derive_seed(self.seed, "prompts", epoch)).shuffle(order)
        return tuple(order)


@dataclass(frozen=True)
class RolloutSample:
    """One clip of a rollout.

    Attributes:
        rollout: number of the rollout.
        slot: position of its group, which shares a prompt, among the groups of the rollout.
        prompt: the prompt that is sampled.
        generation: position within the group.
    """

    rollout: int
    slot: int
    prompt: Prompt
    generation: int

    def generator(self, seed: int, stream: str, *, per_group: bool = False) -> torch.Generator:
        """Return the clip's random numbers for one purpose; another stream, clip, rollout or seed gives others.

        The slot decides, not the prompt: a prompt that comes twice would otherwise give equal clips twice.

        Args:
            seed: seed of the run.
            stream: purpose of the numbers, such as `start`.
            per_group: whether all clips of the group share the numbers.
        """
        return generator("cpu", *self._purpose(seed, stream, per_group))

    def noise_seed(self, seed: int, stream: str, *, per_group: bool = False) -> int:
        """Return the seed of these random numbers for `torch.Generator.manual_seed`."""
        return derive_seed(*self._purpose(seed, stream, per_group))

    def _purpose(self, seed: int, stream: str, per_group: bool) -> tuple[int | str, ...]:
        return seed, "rollout", self.rollout, self.slot, 0 if per_group else self.generation, stream


# ---- files ---------------------------------------------------------------------------------------------------------


def _read(path: Path) -> str:
    try:
        return read_text(path, limit=MAX_RECORDS).replace("\r\n", "\n")
    except FileNotFoundError:
        raise DataError(f"prompt file {quoted(str(path))} {missing_path_problem(path)}", kind="not_found") from None
    except ValueError as error:
        raise DataError(f"prompt file {error}", kind=error_kind(error)) from error


def _from_text(path: Path, content: str, problems: list[str], notes: list[str]) -> list[Prompt]:
    prompts, blank, comments = [], 0, 0
    # Not splitlines(): a prompt may hold characters that count as line ends there.
    for number, line in enumerate(content.split("\n"), start=1):
        text = line.strip()
        if not text:
            blank += 1
        elif text.startswith("#"):
            comments += 1
        elif text := _text(text, f"{path.name} line {number}", problems):
            prompts.append(Prompt(text, f"{path.name} line {number}"))
    blank -= content.endswith("\n") or not content  # after the last line end there is not another line
    left_out = [plural(n, f"{kind} line") for n, kind in ((blank, "blank"), (comments, "comment (#)")) if n]
    notes += [f"{path.name}: left out {' and '.join(left_out)}"] if left_out else []
    return prompts


def _from_json_lines(path: Path, content: str, problems: list[str], notes: list[str]) -> list[Prompt]:
    prompts = list[Prompt]()
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path.name} line {number}"
        try:
            row = parse_json(line)
        except json.JSONDecodeError as error:
            problems.append(f"{where} is not JSON: {error.msg} at column {error.colno}")
            continue
        if not isinstance(row, dict):
            problems.append(f'{where} is {_kind(row)}, not an object such as {{"prompt": "a cat"}}')
            continue
        prompts += _from_row(row, where, path, problems)
    return prompts


def _from_table(path: Path, content: str, problems: list[str], notes: list[str]) -> list[Prompt]:
    prompts = list[Prompt]()
    rows = csv.DictReader(content.splitlines(keepends=True), strict=True)
    try:
        for row in rows:
            where = f"{path.name} line {rows.line_num}"
            if row.pop(None, None) is not None:  # type: ignore[call-overload]
                problems.append(f"{where} has more cells than the heading; quote prompts that have commas")
                continue
            prompts += _from_row({name: cell or None for name, cell in row.items()}, where, path, problems)
    except csv.Error as error:
        problems.append(f"{path.name} line {rows.line_num} is not a row of a table: {error}")
    return prompts


def _from_row(row: Mapping[str, Any], where: str, path: Path, problems: list[str]) -> Iterator[Prompt]:
    """Yield the prompt of an object or a row, or nothing after a problem."""
    keys = [key for key in TEXT_KEYS if key in row]
    if len(keys) != 1:
        names = map(repr, keys or row)
        problem = f"has {'both ' if keys else ''}{' and '.join(names) or 'no keys'}"
        problems.append(f"{where} {problem}; expected one of {', '.join(TEXT_KEYS)}")
        return
    text = _text(row[keys[0]], f"{where}: {keys[0]!r}", problems)
    image, last_image = (_image(row, key, where, path, problems) for key in IMAGE_KEYS)
    if text:
        yield Prompt(text, where, image=image, last_image=last_image, columns=_columns(row, *keys))


def _columns(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the values of an object or a row that are neither the prompt, under these names, nor its images."""
    return {name: value for name, value in row.items() if name not in (*names, *IMAGE_KEYS)}


def _with_all_columns(prompts: list[Prompt]) -> list[Prompt]:
    """Return the prompts, each with all columns of the file, in the order of their appearance."""
    names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    if not names:
        return prompts
    return [replace(prompt, columns={name: prompt.columns.get(name) for name in names}) for prompt in prompts]


def _from_encoded(path: Path, content: str, problems: list[str], notes: list[str]) -> list[Prompt]:
    try:
        rows = parse_json(content)
    except json.JSONDecodeError as error:
        message = f"{path} line {error.lineno} is not JSON: {error.msg} at column {error.colno}"
        raise DataError(message, kind="unreadable") from error
    if not isinstance(rows, list):
        raise DataError(f"{path} is {_kind(rows)}, not a list of objects with {', '.join(('caption', *ENCODED_KEYS))}")
    prompts = list[Prompt]()
    for number, row in enumerate(rows, start=1):
        where = f"{path.name} entry {number}"
        required = ("caption", *ENCODED_KEYS)
        missing = [key for key in required if not isinstance(row, dict) or not isinstance(row.get(key), str)]
        if missing:
            problems.append(
                f"{where} lacks the text {', '.join(map(repr, missing))}; this is the format of DanceGRPO's "
                "preprocessing; use a .txt or .jsonl file for plain prompts"
            )
            continue
        text = _text(row["caption"], f"{where}: 'caption'", problems)
        files = [path.parent / folder / row[key] for key, folder in ENCODED_KEYS.items()]
        absent = [str(file) for file in files if not file.is_file()]
        problems += [f"{where}: file not found: {file}" for file in absent]
        images = [_image(row, key, where, path, problems) for key in IMAGE_KEYS]
        if text and not absent:
            prompts.append(replace(Prompt(text, where, *files, *images), columns=_columns(row, *required)))
    return prompts


def overwritten_embeddings(folder: Path, prompts: Sequence[Prompt]) -> str | None:
    """Return why encoded prompts must not be written into a directory, or None if they may.

    They may if it is new, empty, or has those prompts.
    """
    if not folder.is_dir():
        return None
    own_names = {ENCODED_LIST, *ENCODED_KEYS.values()}
    names = [path.name for path in sorted(folder.iterdir())]
    others = [name for name in names if name not in own_names and not name.startswith(".")]
    if others:
        return f"{folder} holds other files, such as {printable(others[0])}; use a new or empty directory"
    try:
        rows = read_json(folder / ENCODED_LIST, limit=MAX_RECORDS)
        captions = [row["caption"] for row in rows]
    except FileNotFoundError:  # a preparation that was stopped has not written it yet
        return None
    except (OSError, ValueError, TypeError, KeyError):
        captions = []
    if captions != [prompt.text for prompt in prompts]:
        return f"{folder} holds other encoded prompts, which would be overwritten; use a new directory, or remove it"
    return None


def _text(value: Any, where: str, problems: list[str]) -> str:
    """Return the prompt without outer blanks, or an empty text after a problem."""
    if isinstance(value, str) and value.strip():
        try:
            check_text(value)
        except ValueError as error:
            problems.append(f"{where} {error}")
            return ""
        return value.strip()
    problems.append(f"{where} must be text, got {('an empty text' if isinstance(value, str) else _kind(value))}")
    return ""


def _image(row: Mapping[str, Any], key: str, where: str, path: Path, problems: list[str]) -> Path | None:
    """Return the path of an image that a row names: beside the prompts, else as validation's images are found."""
    value = row.get(key)
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip():
        problems.append(
            f"{where}: {key!r} must be a path, got {('an empty one' if isinstance(value, str) else _kind(value))}"
        )
        return None
    if value.startswith(("http://", "https://")):
        problems.append(f"{where}: {value} is an address; download it, and set its path")
        return None
    beside = path.parent / value
    return Path(value) if not names_existing(beside) and names_existing(value) else beside


def _image_problems(prompts: list[Prompt]) -> Iterator[str]:
    """Yield the problems with images; each image is decoded once."""
    first = {image: prompt for prompt in reversed(prompts) for image in prompt.images.values()}
    for image, prompt in sorted(first.items(), key=lambda pair: prompts.index(pair[1])):
        try:
            with decoding(image), open_image(image, whole=True) as picture:
                picture.load()  # all of it: a truncated file has a complete header
        except InvalidSampleError as error:
            yield f"{prompt.where}: {error}"


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _repeated(path: Path, prompts: list[Prompt]) -> Iterator[str]:
    first: dict[tuple[str | Path, ...], Prompt] = {}
    repeats = [
        (prompt, first[prompt.name]) for prompt in prompts if first.setdefault(prompt.name, prompt) is not prompt
    ]
    if repeats:
        examples = ", ".join(f"{_place(repeat)} repeats {_place(original)}" for repeat, original in repeats[:_SHOWN])
        more = f" and {len(repeats) - _SHOWN} more" if len(repeats) > _SHOWN else ""
        count = plural(len(repeats), "prompt")
        yield f"{path.name}: {count} occur more than once, and are sampled as often: {examples}{more}"


def _place(prompt: Prompt) -> str:
    return " ".join(prompt.where.split()[-2:])


def _fingerprint(prompts: list[Prompt]) -> str:
    files = [
        [(file.name, file.stat().st_size) for file in (p.embedding, p.mask, *p.images.values()) if file is not None]
        for p in prompts
    ]
    content = json.dumps([[prompt.text, names] for prompt, names in zip(prompts, files, strict=True)])
    return hashlib.sha256(content.encode()).hexdigest()
