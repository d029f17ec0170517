"""Layouts of single weight files: the tensors of a network that a file holds, their names, and whether they are joined.

A network in diffusers layout has its own names. The repositories that published it first, and ComfyUI, have others: one
tensor for query, key and value, halves in another order. A layout lists, for every stored tensor, the rows of the
network's tensors that it consists of. So one table serves reading, writing, and the comparison of names and shapes by
headers. diffusers' own converters (`from_single_file`) go in one direction, need the weights, and some know one width
of network only; tests compare the tables with them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import torch
from torch import Tensor

from finetrainers.utils.failures import InputError
from finetrainers.utils.headers import open_tensors
from finetrainers.utils.text import plural

from .files import summarize

Shapes = Mapping[str, tuple[int, ...]]
#: Number of a network's names that are looked up in a file to find their common prefix.
_PROBES = 12
#: Tensors of a model's other parts, in a file that holds the whole model; and statistics that no network has.
_OTHERS = re.compile(
    r"^(vae|first_stage_model|text_encoders?|cond_stage_model|conditioner|vision_tower|multi_modal_projector|lm_head"
    r"|loss)\.|per_channel_statistics\.|position_ids$|inv_freq$|^(logit_scale|text_projection\.weight)$"
    r"|(^|\.)lm_head\.weight$|^spiece_model$"
)


@dataclass(frozen=True)
class Rows:
    """Part number `part` of `num_parts` equal parts of a network's tensor, along its first axis."""

    name: str
    part: int = 0
    num_parts: int = 1

    def cut(self, tensor: Tensor) -> Tensor:
        return tensor if self.num_parts == 1 else tensor.chunk(self.num_parts, dim=0)[self.part]


#: The rows that each stored tensor consists of, one after the other.
Layout = Mapping[str, tuple[Rows, ...]]


@dataclass(frozen=True)
class Rule:
    """Pattern of a network's tensor name, template of its stored name, and the places of its equal parts there."""

    pattern: str
    template: str
    places: tuple[int, ...] = (0,)


def build_layout(names: Iterable[str], rules: Sequence[Rule]) -> dict[str, tuple[Rows, ...]]:
    """Build the layout of a network's tensors by rules; a name without a rule is stored as it is."""
    layout: defaultdict[str, dict[int, Rows]] = defaultdict(dict)
    for name in names:
        stored: str = name
        places: tuple[int, ...] = (0,)
        for rule in rules:
            hit = re.fullmatch(rule.pattern, name)
            if hit is not None:
                stored, places = hit.expand(rule.template), rule.places
                break
        for part, place in enumerate(places):
            layout[stored][place] = Rows(name, part, len(places))
    return {stored: tuple(rows[place] for place in sorted(rows)) for stored, rows in layout.items()}


def rename_layout(layout: Layout, changes: Sequence[tuple[str, str]]) -> dict[str, tuple[Rows, ...]]:
    """Return a layout with other stored names: each change is a regular expression and its replacement."""
    renamed_layout = {}
    for stored, rows in layout.items():
        name = stored
        for pattern, replacement in changes:
            name = re.sub(pattern, replacement, name)
        renamed_layout[name] = rows
    return renamed_layout


def stored_shapes(layout: Layout, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the stored tensors of a network with these shapes."""
    layout_shapes: dict[str, tuple[int, ...]] = {}
    for stored, rows in layout.items():
        first = shapes[rows[0].name]
        layout_shapes[stored] = (sum(shapes[r.name][0] // r.num_parts for r in rows), *first[1:]) if first else first
    return layout_shapes


@dataclass(frozen=True)
class Match:
    """Layout and prefix of a network in a file.

    Attributes:
        kind: name of the layout, such as `diffusers`.
        prefix: prefix of every name in the file.
        layout: the layout, without the prefix.
        needed: shapes of the stored tensors, by the network's config.
        held: shapes of the file's tensors that have the prefix, without it.
    """

    kind: str
    prefix: str
    layout: Layout
    needed: Shapes
    held: Shapes

    @property
    def missing(self) -> list[str]:
        """Stored tensors that the file lacks."""
        return [name for name in self.needed if name not in self.held]

    @property
    def misshapen(self) -> list[str]:
        """Stored tensors of another shape, ignoring axes of length 1 at the end: 1x1 convolutions are linear layers."""
        return [
            n
            for n, shape in self.needed.items()
            if n in self.held and _without_ones(self.held[n]) != _without_ones(shape)
        ]

    @property
    def unused(self) -> list[str]:
        """The file's tensors that the network does not have, except those of the model's other parts."""
        return sorted(name for name in self.held if name not in self.layout and not _OTHERS.search(name))

    def problems(self, place: str, config: str = "the config") -> list[InputError]:
        """Return the file's problems: tensors that it lacks, with the most similar name, and those of other shapes."""
        problems = []
        if self.held and len(self.missing) == len(self.needed):
            holds = ", ".join(sorted(self.held)[:3])
            message = f"{place} holds none of the network's tensors, such as {self.missing[0]}; it holds: {holds}"
            return [InputError(message, "mismatch")]
        if self.missing:
            close = get_close_matches(self.missing[0], self.unused, n=1)
            hint = f" (it has {self.prefix}{close[0]})" if close else ""
            lacks = summarize([self.prefix + name for name in self.missing])
            message = f"{place} lacks {plural(len(self.missing), 'tensor')}: {lacks}{hint}"
            problems.append(InputError(message, "not_found"))
        return problems + self.shape_problems(place, config)

    def shape_problems(self, place: str, config: str) -> list[InputError]:
        """Return a problem if tensors of the file have other shapes than the network's."""
        if not self.misshapen:
            return []
        name = self.misshapen[0]
        more = f" ({len(self.misshapen)} such tensors)" if len(self.misshapen) > 1 else ""
        shapes = f"has shape {self.held[name]}, and {config} requires {self.needed[name]}{more}"
        return [InputError(f"{self.prefix}{name} in {place} {shapes}", "mismatch")]


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def match_file(held: Shapes, network: Shapes, layouts: Mapping[str, Layout]) -> Match:
    """Find the layout and prefix with the most tensors of a network in a file.

    Args:
        held: shapes of the file's tensors.
        network: shapes of the network's.
        layouts: candidates by name; of equals the first is taken.
    """
    best: tuple[int, int, str, str] | None = None
    for number, (kind, layout) in enumerate(layouts.items()):
        for prefix in _prefixes(held, [*layout]):
            hits = sum(prefix + name in held for name in layout)
            if best is None or (hits, -number, -len(prefix)) > (best[0], best[1], -len(best[3])):
                best = (hits, -number, kind, prefix)
    assert best is not None, "every network can be stored in diffusers layout"
    _, _, kind, prefix = best
    own = {name.removeprefix(prefix): shape for name, shape in held.items() if name.startswith(prefix)}
    return Match(kind, prefix, layouts[kind], stored_shapes(layouts[kind], network), own)


def _prefixes(held: Iterable[str], names: Sequence[str]) -> list[str]:
    """Return the possible prefixes of the names, the most frequent first."""
    held, votes = [*held], Counter({"": 1})
    step = max(1, len(names) // _PROBES)
    for name in names[::step]:
        votes.update(key[: -len(name)] for key in held if key.endswith(f".{name}"))
    return [prefix for prefix, _ in votes.most_common(4)]


def read_tensors(path: Path, match: Match, network: Shapes) -> Iterator[tuple[str, Tensor]]:
    """Yield the network's tensors by their own names, in the file's dtypes; each is read by itself.

    Args:
        path: the file.
        match: their layout in the file; without problems.
        network: shapes of the network's tensors.
    """
    parts: defaultdict[str, dict[int, Tensor]] = defaultdict(dict)
    with open_tensors(path) as file:
        for stored, rows in match.layout.items():
            if stored not in match.held:
                continue
            tensor, start = file.get_tensor(match.prefix + stored), 0
            for row in rows:
                shape = network[row.name]
                length = shape[0] // row.num_parts if shape else 0
                piece = tensor if len(rows) == 1 else tensor[start : start + length].clone()
                start += length
                parts[row.name][row.part] = piece.reshape(length, *shape[1:]) if shape else piece
                if len(parts[row.name]) == row.num_parts:
                    pieces = parts.pop(row.name)
                    tensors = [pieces[number] for number in range(row.num_parts)]
                    yield row.name, tensors[0] if row.num_parts == 1 else torch.cat(tensors)


def stored_tensors(layout: Layout, tensors: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Return a network's tensors as a layout stores them."""
    tensors_by_name = {}
    for stored, rows in layout.items():
        pieces = [row.cut(tensors[row.name]) for row in rows]
        tensors_by_name[prefix + stored] = (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).contiguous()
    return tensors_by_name
