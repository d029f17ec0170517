"""Layouts of single weight files: which tensors of a network a file holds, under which names, joined or not.

A network in diffusers layout has its own names. The repositories that published it first, and ComfyUI, have others: one
tensor for query, key and value, halves in another order. A layout says for every stored tensor of which rows of the
network's tensors it consists. So one table serves reading, writing, and the comparison of names and shapes by headers.
diffusers' own converters (`from_single_file`) go in one direction, need the weights, and some know one width of network
only; tests compare the tables with them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from finetrainers.utils.text import plural

from .files import some

Shapes = Mapping[str, tuple[int, ...]]
#: How many names of a network are looked for in a file to find what stands before all of them.
_PROBES = 12
#: In a file that holds the whole model, what belongs to its other parts; and statistics that no network has.
_OTHERS = re.compile(
    r"^(vae|first_stage_model|text_encoders?|cond_stage_model|conditioner|vision_tower|multi_modal_projector|lm_head|loss)\."
    r"|per_channel_statistics\.|position_ids$|inv_freq$|^(logit_scale|text_projection\.weight)$|(^|\.)lm_head\.weight$"
)


@dataclass(frozen=True)
class Rows:
    """Part number `part` of `of` equal parts of a network's tensor, along its first axis."""

    name: str
    part: int = 0
    of: int = 1

    def cut(self, tensor: Tensor) -> Tensor:
        return tensor if self.of == 1 else tensor.chunk(self.of, dim=0)[self.part]


#: The rows that each stored tensor consists of, one after the other.
Layout = Mapping[str, tuple[Rows, ...]]


@dataclass(frozen=True)
class Rule:
    """A name of a network's tensor (a pattern), its stored name (a template), and where each of its equal parts stands in it."""

    pattern: str
    template: str
    places: tuple[int, ...] = (0,)


def layout_of(names: Iterable[str], rules: Sequence[Rule]) -> dict[str, tuple[Rows, ...]]:
    """The layout that rules give for a network's tensors; a name without a rule is stored as it is."""
    found: defaultdict[str, dict[int, Rows]] = defaultdict(dict)
    for name in names:
        stored: str = name
        places: tuple[int, ...] = (0,)
        for rule in rules:
            hit = re.fullmatch(rule.pattern, name)
            if hit is not None:
                stored, places = hit.expand(rule.template), rule.places
                break
        for part, place in enumerate(places):
            found[stored][place] = Rows(name, part, len(places))
    return {stored: tuple(rows[place] for place in sorted(rows)) for stored, rows in found.items()}


def renamed(layout: Layout, changes: Sequence[tuple[str, str]]) -> dict[str, tuple[Rows, ...]]:
    """A layout with other stored names: each change is a regular expression and what replaces it."""
    found = {}
    for stored, rows in layout.items():
        name = stored
        for pattern, replacement in changes:
            name = re.sub(pattern, replacement, name)
        found[name] = rows
    return found


def stored_shapes(layout: Layout, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Shapes of the stored tensors of a network with these shapes."""
    found: dict[str, tuple[int, ...]] = {}
    for stored, rows in layout.items():
        first = shapes[rows[0].name]
        found[stored] = (sum(shapes[r.name][0] // r.of for r in rows), *first[1:]) if first else first
    return found


@dataclass(frozen=True)
class Match:
    """How a file holds a network.

    Attributes:
        kind: name of the layout, such as `diffusers`.
        prefix: what stands before every name in the file.
        layout: without the prefix.
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
        """Stored tensors that have another shape. Axes of length 1 at the end do not count: 1x1 convolutions are linear layers."""
        return [n for n, shape in self.needed.items() if n in self.held and _bare(self.held[n]) != _bare(shape)]

    @property
    def unused(self) -> list[str]:
        """The file's tensors that the network does not have, but for those of the model's other parts."""
        return sorted(name for name in self.held if name not in self.layout and not _OTHERS.search(name))

    def problems(self, place: str, config: str = "the config") -> list[str]:
        """What makes the file unfit for the network: all tensors that it lacks, with the nearest it has, and those of other shapes."""
        found = []
        if self.held and len(self.missing) == len(self.needed):
            holds = ", ".join(sorted(self.held)[:3])
            return [f"{place} holds none of the network's tensors, such as {self.missing[0]}; it holds: {holds}"]
        if self.missing:
            close = get_close_matches(self.missing[0], self.unused, n=1)
            hint = f" (it has {self.prefix}{close[0]})" if close else ""
            lacks = some([self.prefix + name for name in self.missing])
            found.append(f"{place} lacks {plural(len(self.missing), 'tensor')}: {lacks}{hint}")
        return found + self.shape_problems(place, config)

    def shape_problems(self, place: str, config: str) -> list[str]:
        """Return a problem if tensors of the file have other shapes than the network's."""
        if not self.misshapen:
            return []
        name = self.misshapen[0]
        more = f" ({len(self.misshapen)} such tensors)" if len(self.misshapen) > 1 else ""
        shapes = f"has shape {self.held[name]}, and {config} asks for {self.needed[name]}{more}"
        return [f"{self.prefix}{name} in {place} {shapes}"]


def _bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def match_file(held: Shapes, network: Shapes, layouts: Mapping[str, Layout]) -> Match:
    """The layout and the prefix by which a file holds most of a network.

    Args:
        held: shapes of the file's tensors.
        network: shapes of the network's.
        layouts: to choose from, by name, the first of equals.
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
    """What may stand before the names: the most frequent first."""
    held, votes = [*held], Counter({"": 1})
    step = max(1, len(names) // _PROBES)
    for name in names[::step]:
        votes.update(key[: -len(name)] for key in held if key.endswith(f".{name}"))
    return [prefix for prefix, _ in votes.most_common(4)]


def read_tensors(path: Path, match: Match, network: Shapes) -> Iterator[tuple[str, Tensor]]:
    """The network's tensors by their own names, in the file's dtypes; each is read by itself.

    Args:
        path: the file.
        match: how it holds them; without problems.
        network: shapes of the network's tensors.
    """
    parts: defaultdict[str, dict[int, Tensor]] = defaultdict(dict)
    with safe_open(path, framework="pt") as file:
        for stored, rows in match.layout.items():
            if stored not in match.held:
                continue
            tensor, start = file.get_tensor(match.prefix + stored), 0
            for row in rows:
                shape = network[row.name]
                length = shape[0] // row.of if shape else 0
                piece = tensor if len(rows) == 1 else tensor[start : start + length].clone()
                start += length
                parts[row.name][row.part] = piece.reshape(length, *shape[1:]) if shape else piece
                if len(parts[row.name]) == row.of:
                    whole = parts.pop(row.name)
                    yield row.name, whole[0] if row.of == 1 else torch.cat([whole[n] for n in range(row.of)])


def stored_tensors(layout: Layout, tensors: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """A network's tensors as a layout stores them."""
    found = {}
    for stored, rows in layout.items():
        pieces = [row.cut(tensors[row.name]) for row in rows]
        found[prefix + stored] = (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).contiguous()
    return found
