"""Text form of a reward: `NAME[=WEIGHT][,option=value...]`, or a table with the same keys."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

from finetrainers.utils.failures import InputError

from .base import Section

_REWARD = re.compile(r"^(?P<name>[^=,\s]+)(=(?P<weight>[^,]*))?(,(?P<options>.*))?$")
_OWN = ("mean", "std", "every", "batch_size")


def _plain_text(value: Any) -> Any:
    """Return numbers, truth values and paths as the text that a flag would have; other values pass through."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, (int, float, Path)) else value


class RewardEntry(Section):
    """One reward of a run.

    `NAME` is a registered reward (`brightness`), one head of a reward that has several (`videoalign.vq`), a Python
    callable (`module:function`) or a server (`http://host:port`).
    """

    name: str = Field(description="Registered name, `name.head`, `module:function`, or `http://host:port`.")
    weight: float = Field(1.0, description="Share in the advantage; 0 only logs it.")
    mean: float | None = Field(None, description="Normalized score is (raw - mean) / std; default: the reward's own.")
    std: float | None = Field(None, gt=0, description="See `mean`.")
    every: int = Field(1, ge=1, description="Score only in every N-th rollout.")
    batch_size: int | None = Field(None, ge=1, description="Clips scored at once; default: the reward's own.")
    options: dict[str, Annotated[str, BeforeValidator(_plain_text)]] = Field(
        {}, description="Options of the reward itself: `path`, `device`, ..."
    )

    @property
    def reward(self) -> str:
        """Name without its head."""
        return _split(self.name)[0]

    @property
    def head(self) -> str | None:
        """Head named (of a server: `http://host:port#head`), or None for a reward's only one."""
        return _split(self.name)[1]


def _split(name: str) -> tuple[str, str | None]:
    """Split a name into reward and head. With `module:`, only a dot after the colon separates a head."""
    if name.startswith(("http://", "https://")):
        return name, None
    module, colon, attribute = name.rpartition(":")
    reward, _, head = attribute.partition(".")
    return module + colon + reward, head or None


def parse_reward(value: Any) -> Any:
    """Return `"videoalign.vq=0.5,path=/ckpt"` as the fields of a `RewardEntry`; tables pass through.

    Raises:
        ValueError: the text has another form.
    """
    if not isinstance(value, str):
        return value
    match = _REWARD.match(value.strip())
    if not match:
        raise ValueError(f"expected NAME[=WEIGHT][,option=value...], for example brightness=0.5, got {value!r}")
    fields: dict[str, Any] = {"name": match["name"], "options": {}}
    if match["weight"] is not None:
        fields["weight"] = match["weight"]
    for part in match["options"].split(",") if match["options"] is not None else []:
        key, equals, text = part.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ValueError(f"{value!r}: expected option=value, got {part!r}")
        place = fields if key in _OWN else fields["options"]
        if key in place:
            raise InputError(f"{value!r}: option {key} is set twice", "duplicate")
        place[key] = text
    return fields


def reward_text(entry: RewardEntry) -> str | dict[str, Any]:
    """Return the text that `parse_reward` reads back as an equal entry, or a table if an option has a comma."""
    options = entry.model_dump(include=set(_OWN), exclude_defaults=True) | entry.options
    text = ",".join([f"{entry.name}={entry.weight!r}", *(f"{key}={value}" for key, value in options.items())])
    try:
        is_equal = RewardEntry.model_validate(parse_reward(text)) == entry
    except ValueError:
        is_equal = False
    return text if is_equal else entry.model_dump(exclude_none=True)


def options_text(entry: RewardEntry) -> str:
    """Return the options of the reward itself, as text that is equal for equal options."""
    return ",".join(f"{key}={text}" for key, text in sorted(entry.options.items()))


def reward_labels(entries: Sequence[RewardEntry]) -> list[str]:
    """Return the name of each entry in records, with its options if entries of that name have different ones."""
    return labels_for_keys([(entry.name, options_text(entry)) for entry in entries])


def labels_for_keys(keys: Sequence[tuple[str, str]]) -> list[str]:
    """Return a label for each pair of name and options: the name if all pairs of that name have its options."""
    variants: dict[str, set[str]] = {}
    for name, options in keys:
        variants.setdefault(name, set()).add(options)
    return [f"{name},{options}" if len(variants[name]) > 1 and options else name for name, options in keys]


Reward = Annotated[
    RewardEntry,
    BeforeValidator(parse_reward),
    PlainSerializer(reward_text),
    WithJsonSchema({"anyOf": [{"type": "string"}, RewardEntry.model_json_schema()]}),
]
