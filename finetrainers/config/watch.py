"""Options of `finetrainers watch`, and its presets: size, denoising steps and guidance under a name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from finetrainers.utils.reading import TOMLDecodeError, parse_toml
from finetrainers.utils.text import nearest, shortened

from .base import Section
from .errors import ConfigError, Problem, value_kind, value_message
from .files import read_text
from .geometry import Geometry
from .rewards import Reward, RewardEntry, options_text
from .root import TrainConfig
from .values import MAX_FRAMES, VideoBucket

Size = tuple[int, int, int]
#: The preset that samples as the run's validation does.
AS_VALIDATION = "run"
_CLASS = re.compile(r"(?P<resolution>low|high)(?P<seconds>\d+)s", flags=re.ASCII)
_MAX_SECONDS = 3600
_EXAMPLES = (AS_VALIDATION, "low4s", "high4s", "low16s", "high16s")
_OWN = re.compile(r"(?P<name>[^=]+)=(?P<size>[^,=]+)(?:,(?P<more>.*))?")


class Preset(Section):
    """Sampling settings of a preset; omitted settings are those of the run's validation."""

    size: VideoBucket | None = None
    steps: int | None = Field(None, ge=1, le=10_000)
    guidance: float | None = Field(None, ge=0, le=1000)


class WatchSection(Section):
    """Options of `finetrainers watch`: samples of each checkpoint, their scores, and where to write."""

    presets: str = Field(
        AS_VALIDATION,
        description="names joined by commas: `run` (the run's validation), lowNs or highNs, such as low4s (4 seconds "
        "at half or all of the run's resolution), and your own [run]",
    )
    preset: list[str] = Field(
        [], description="your own presets: NAME=49x512x768,steps=30,guidance=5; a name alone is as in --presets"
    )
    presets_file: Path | None = Field(None, description="a TOML file with tables [presets.NAME]: size, steps, guidance")
    prompts: str | None = Field(
        None, description="as --prompts of `finetrainers sample` [the run's validation prompts]"
    )
    image: str | None = Field(None, description="first frames, as for `finetrainers sample`")
    video: str | None = Field(None, description="control videos, as for `finetrainers sample`")
    last_image: str | None = Field(None, description="last frames, as for `finetrainers sample`")
    video_prefix: str | None = Field(None, description="videos that samples continue, as for `finetrainers sample`")
    negative_prompt: str | None = Field(None, description="as for `finetrainers sample`")
    seed: int | None = Field(None, ge=0, description="first seed [the run's]")
    num: int = Field(1, ge=1, le=1000, description="seeds for each prompt, from the first one on [1]")
    frame_rate: float | None = Field(None, gt=0, le=1000, description="frames per second, as for `finetrainers sample`")
    no_ema: bool = Field(False, description="sample raw weights instead of the EMA")
    reward: list[Reward] = Field(
        [], description="rewards that score the clips, as --reward of reward finetuning [the run's]"
    )
    best_by: str | None = Field(
        None,
        description="also score by this reward, and mark the checkpoint with its highest mean: checkpoints/best; "
        "REWARD/trigger_gap: with the largest effect of the trigger word",
    )
    device: str | None = Field(
        None, description="cuda:1, for example, if training uses the first GPU; or cpu [the first]"
    )
    poll_seconds: float = Field(30, gt=0, le=1e6, description="seconds between checks for checkpoints [30]")
    once: bool = Field(False, description="sample the existing checkpoints, and exit")
    no_track: bool = Field(False, description="send nothing to the run's tracker")
    output_dir: Path | None = Field(
        None, description="output directory; one subdirectory per preset [watch in the run directory]"
    )
    dry_run: bool = Field(False, description="check everything, print what would be sampled, and exit")


def read_presets(section: WatchSection) -> dict[str, Preset | None]:
    """Return the named presets in order, with None for those that follow from the model (`class_size`).

    Raises:
        ConfigError: everything that is wrong, at once.
    """
    problems: list[Problem] = []
    own_presets: dict[str, Preset] = {}
    if section.presets_file is not None:
        problems += _read_presets_file(section.presets_file, own_presets)
    requested: list[tuple[str, str]] = []  # the option and the name
    for text in section.preset:
        match = _OWN.fullmatch(text.strip())
        if match is not None:
            more = [part.partition("=") for part in _names(match["more"] or "")]
            values = {"size": match["size"].strip(), **{key.strip(): value.strip() for key, _, value in more}}
            name = match["name"].strip()
            problems += _add(own_presets, name, values, f"--preset {name}")
            requested += [("--preset", name)] * (name in own_presets)
        elif "=" in text or not (names := _names(text)):
            problems.append(
                Problem("--preset", f"expected NAME=FRAMESxHEIGHTxWIDTH[,steps=N][,guidance=X], got {text!r}")
            )
        else:  # `--preset low4s` is `--presets low4s`
            requested += [("--preset", name) for name in names]
    # A preset that is defined on the command line is also requested.
    if section.presets != AS_VALIDATION or not section.preset:
        requested = [*(("--presets", name) for name in _names(section.presets)), *requested]
    presets: dict[str, Preset | None] = {}
    for option, name in requested:
        if name not in own_presets and (problem := _name_problem(option, name, own_presets)) is not None:
            problems.append(problem)
        else:
            presets[name] = own_presets.get(name, Preset() if name == AS_VALIDATION else None)
    if not presets and not problems:
        problems.append(Problem("--presets", "no preset names; set, for example, run,low4s", "required"))
    if problems:
        raise ConfigError(problems)
    return presets


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _name_problem(option: str, name: str, own: Iterable[str]) -> Problem | None:
    """Return the problem of a name that is not one of the presets that follow from the run, or None if it is."""
    match = _CLASS.fullmatch(name)
    if match and not 1 <= int(match["seconds"][:12]) <= _MAX_SECONDS:
        return Problem(option, f"{shortened(name)}: seconds must be from 1 to {_MAX_SECONDS}")
    if match or name == AS_VALIDATION:
        return None
    return Problem(option, f"unknown preset {name!r}{nearest(name, {*own, *_EXAMPLES})}", "unknown")


def _read_presets_file(path: Path, own: dict[str, Preset]) -> Iterator[Problem]:
    """Add the presets of a file, or yield the problems with it."""
    try:
        path, text = read_text(path, option="--presets_file")
        tables = parse_toml(text).get("presets")
    except ConfigError as error:
        yield from error.problems
    except TOMLDecodeError as error:
        yield Problem(str(path), f"cannot be read: {error}", "unreadable")
    else:
        if not isinstance(tables, Mapping) or not tables:
            message = "has no preset; add tables like [presets.wide] with size, steps, guidance"
            yield Problem(str(path), message, "required")
            return
        for name, values in tables.items():
            yield from _add(own, name, values, f"{path} presets.{name}")


def _add(own: dict[str, Preset], name: str, values: Any, where: str) -> Iterator[Problem]:
    """Add a preset of the user's own, or yield the problems with it."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        yield Problem(where, "the name becomes a directory, so it must consist of letters, digits, '-', '_' and '.'")
    elif name == AS_VALIDATION or _CLASS.fullmatch(name):
        yield Problem(where, f"{name} is a built-in preset; choose another name", "conflict")
    elif name in own:
        yield Problem(where, "is set twice", "duplicate")
    elif not isinstance(values, Mapping):
        yield Problem(where, "must be a table with size, steps, guidance")
    else:
        try:
            own[name] = Preset.model_validate(values)
        except ValidationError as error:
            for detail in error.errors():
                key = str(detail["loc"][0])
                message = f"{key}: {value_message(detail)}"
                if detail["type"] == "extra_forbidden":
                    message = f"unknown key {key!r}{nearest(key, Preset.model_fields)}"
                yield Problem(where, message, value_kind(detail))


def class_size(name: str, native: Size, geometry: Geometry, frame_rate: float) -> Size:
    """Return the size of `lowNs` or `highNs`: N seconds at half or all of the height and width, as the model takes.

    Args:
        name: of the preset.
        native: frames, height and width of the run's clips.
        geometry: of the model.
        frame_rate: of samples.

    Raises:
        ConfigError: it has more frames than a size may have.
    """
    match = _CLASS.fullmatch(name)
    assert match is not None, name
    frames = max(1, int(int(match["seconds"]) * frame_rate) // geometry.temporal * geometry.temporal + 1)
    factor = 2 if match["resolution"] == "low" else 1
    height, width = geometry.fitted(native[1] // factor, native[2] // factor)
    if frames > MAX_FRAMES:
        message = f"{name}: {frames} frames at {frame_rate:g} fps are more than {MAX_FRAMES}; use fewer seconds"
        raise ConfigError([Problem("--presets", message, "too_large")])
    return frames, height, width


def evaluation_rewards(config: TrainConfig) -> list[RewardEntry]:
    """Return the rewards that a run evaluates with, or else those that it trains on."""
    return list(config.get("eval_reward") or config.get("reward"))


def label_of(entry: Any, among: Sequence[Any]) -> str:
    """Return the name of a reward in ledgers and at trackers, with its options if several have that name."""
    several = sum(other.name == entry.name for other in among) > 1
    options = options_text(entry)
    return f"{entry.name},{options}" if several and options else entry.name
