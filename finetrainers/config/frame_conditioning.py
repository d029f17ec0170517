"""Clean-frame conditioning: latent frames of a clip that training gives to the network, and how often. No torch.

The kinds are the masks that Open-Sora trains with (`MaskGenerator` in its 1.2); its names are read as well. A latent
frame that is given is clean, has noise level 0 and leaves the loss.

"""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

from finetrainers.utils.failures import InputError, error_kind
from finetrainers.utils.text import nearest, quoted, shortened

from .facts import Facts

#: Every kind with its frames, for `--help` and the documentation. A quarter is that of the latent frames, one at least.
KINDS = {
    "first": "the first frame",
    "last": "the last latent frame",
    "first+last": "both",
    "prefix": "the beginning, up to a quarter; `prefix:F` its first F frames",
    "suffix": "the end, up to a quarter; `suffix:F` its last F frames",
    "prefix+suffix": "the same number of frames at the beginning and the end, each up to a quarter",
    "frame": "one latent frame anywhere",
    "span": "latent frames in a row anywhere, up to a quarter",
    "interpolate": "every other latent frame",
    "random": "each latent frame, with a probability drawn from 0.1 to 0.9",
}
#: The names of Open-Sora's masks, its misspelling among them.
ALIASES = {
    "image_head": "first",
    "image_tail": "last",
    "image_head_tail": "first+last",
    "image_random": "frame",
    "quarter_head": "prefix",
    "quarter_tail": "suffix",
    "quarter_head_tail": "prefix+suffix",
    "quarter_random": "span",
    "intepolate": "interpolate",
    "identity": "none",
    "mask_no": "none",
}
_WITH_LENGTH = ("prefix", "suffix")
_EXAMPLE = "first=0.1,last=0.05,prefix:9=0.05"


@dataclass(frozen=True)
class FrameKind:
    """One kind of given frames.

    Attributes:
        name: in `KINDS`.
        p: probability, per sample.
        frames: length of a prefix or suffix in frames of the clip, or None if it is drawn.
    """

    name: str
    p: float
    frames: int | None = None

    @property
    def label(self) -> str:
        """Kind as users write it, without its probability."""
        return self.name if self.frames is None else f"{self.name}:{self.frames}"

    def draw(self, latent_frames: int, temporal: int, rng: random.Random) -> Collection[int]:
        """Return the indexes of conditioning frames among `latent_frames`, which stand for `temporal` frames each."""
        everything = range(latent_frames)
        if latent_frames == 1:  # an image, which would be its own answer
            return ()
        if self.name == "first":
            return (0,)
        if self.frames is not None:
            length = -(-(self.frames - 1) // temporal) + 1 if self.name == "prefix" else -(-self.frames // temporal)
            return everything[:length] if self.name == "prefix" else everything[-length:]
        if self.name == "interpolate":
            return everything[rng.randint(0, 1) :: 2]
        if self.name == "random":
            p = rng.uniform(0.1, 0.9)
            indexes = [k for k in everything if rng.random() < p]
            return indexes[:-1] if len(indexes) == latent_frames else indexes
        length = 1 if self.name in ("last", "first+last", "frame") else rng.randint(1, max(1, latent_frames // 4))
        if self.name in ("frame", "span"):
            start = rng.randint(0, latent_frames - length)
            return everything[start : start + length]
        head = everything[:length] if self.name not in ("last", "suffix") else ()
        tail = everything[-length:] if self.name != "prefix" else ()
        return (*head, *tail)

    def grid_problem(self, temporal: int) -> str | None:
        """Return why the length does not fill latent frames of `temporal` frames each, or None if it does."""
        if self.frames is None or (self.frames - (self.name == "prefix")) % temporal == 0:
            return None
        lengths = f"1 + a multiple of {temporal}" if self.name == "prefix" else f"a multiple of {temporal}"
        return f"{self.label} must have {lengths} frames, as latent frames stand for {temporal}"

    def problem(self, frames: int, temporal: int) -> str | None:
        """Return why this kind does not fit clips (not images) of `frames` frames, or None if it does."""
        if reason := self.grid_problem(temporal):
            return reason
        latent_frames = (frames - 1) // temporal + 1
        if len(set(self.draw(latent_frames, temporal, random.Random(0)))) >= latent_frames:
            return (
                f"{self.label} would condition on all of {frames} frames, which leaves nothing to train; use "
                "longer clips"
            )
        return None


FrameConditioning = tuple[FrameKind, ...]


def draw_frames(kinds: FrameConditioning, latent_frames: int, temporal: int, rng: random.Random) -> Collection[int]:
    """Return the latent frames that one sample is given: the first number of `rng` picks a kind, in order, or none."""
    coin, reached = rng.random(), 0.0
    for kind in kinds:
        reached += kind.p
        if coin < reached:
            return kind.draw(latent_frames, temporal, rng)
    return ()


def read_frame_conditioning(value: Any) -> Any:
    """Return the kinds of `"first=0.1,prefix:9=0.05"`, of a table, or of strings in a list; kinds pass through.

    Raises:
        ValueError: all problems with them.
    """
    if isinstance(value, str) and value.strip().startswith("{"):
        with suppress(
            ValueError, SyntaxError, MemoryError, RecursionError
        ):  # a dict as a configuration in Python or JSON has it
            value = ast.literal_eval(value.strip())
    if isinstance(value, Mapping):
        pairs = [(str(name), share) for name, share in value.items()]
    elif isinstance(value, str) or (isinstance(value, Sequence) and all(isinstance(label, str) for label in value)):
        text = value if isinstance(value, str) else ",".join(value)
        parts = [part.strip() for part in text.split(",") if part.strip()]
        pairs = [(name.strip(), share.strip()) for name, _, share in (part.partition("=") for part in parts)]
    else:
        return value
    kinds, errors = [], []
    for name, share in pairs:
        try:
            kinds.append(_kind(name, share))
        except ValueError as error:
            errors.append(error)
    labels = Counter(kind.label for kind in kinds if kind is not None)
    errors += [InputError(f"{label} is set twice", "duplicate") for label in sorted(labels) if labels[label] > 1]
    nonzero_kinds = tuple(kind for kind in kinds if kind is not None and kind.p > 0)
    if (total := sum(kind.p for kind in nonzero_kinds)) > 1 + 1e-9:
        errors.append(ValueError(f"the probabilities must add up to at most 1, got {total:g}"))
    if errors:
        raise InputError("; ".join(map(str, errors)), error_kind(errors[0]))
    return nonzero_kinds


def _kind(text: str, share: Any) -> FrameKind | None:
    """Return the kind of a text, or None for Open-Sora's names of giving nothing."""
    name, colon, length = text.partition(":")
    name = ALIASES.get(name, name)
    try:
        p = float(share)
    except (TypeError, ValueError):
        p = -1.0
    if not 0 <= p <= 1:
        got = f", not {shortened(quoted(str(share)))}" if str(share) else ""
        raise ValueError(f"{shortened(quoted(text))} requires a probability from 0 to 1{got}; for example {_EXAMPLE}")
    if name == "none":
        return None
    if name not in KINDS:
        raise InputError(
            f"unknown frame-conditioning mode {shortened(quoted(name))}{nearest(name, [*KINDS, *ALIASES])}; valid: "
            f"{', '.join(KINDS)}",
            "unknown",
        )
    if not colon:
        return FrameKind(name, p)
    if name not in _WITH_LENGTH or not re.fullmatch(r"[1-9][0-9]{0,5}", length):
        raise ValueError(
            f"{shortened(quoted(text))} must be KIND, prefix:FRAMES or suffix:FRAMES, for example prefix:9"
        )
    return FrameKind(name, p, int(length))


def format_kinds(kinds: FrameConditioning) -> str:
    """Return the kinds as users write them."""
    return ",".join(f"{kind.label}={kind.p!r}" for kind in kinds)


def select_conditioning_modes(
    kinds: FrameConditioning | None, first_p: float | None, facts: Facts
) -> FrameConditioning:
    """Return the kinds that training draws from: the requested ones, or else the images of the checkpoint alone.

    Its probability is the requested one, or else that of the model's training.

    Args:
        kinds: `--frame_conditioning`.
        first_p: `--first_frame_conditioning_p`.
        facts: of the model.
    """
    if facts.first_frame == "none":
        return ()
    p = facts.first_frame_p if first_p is None else first_p
    return ((FrameKind(image_mode(facts), p),) if p else ()) if kinds is None else kinds


def image_mode(facts: Facts) -> str:
    """Return the kind that gives the images which a checkpoint's clips start from, and end with."""
    return "first+last" if facts.last_frame else "first"


#: The option's type. It also accepts a table of kinds and probabilities.
FrameKinds = Annotated[
    FrameConditioning,
    BeforeValidator(read_frame_conditioning),
    PlainSerializer(format_kinds, return_type=str),
    WithJsonSchema({"type": ["string", "object"]}),
]
