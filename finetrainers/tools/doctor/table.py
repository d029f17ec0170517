"""The report on machines as lines of text: one table, what is equal everywhere said once, and then what to do."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from finetrainers.utils.text import aligned, plural

from .columns import NOTHING, Column, clock, columns, differing
from .findings import Finding, Needs
from .hosts import Node

_MARK = "*"


def report_lines(nodes: Sequence[Node], found: Sequence[Finding], needs: Needs | None, *, width: int) -> Iterator[str]:
    """The lines.

    Args:
        nodes: the machines; facts of one that is not compared with others stand below each other.
        found: about them.
        needs: what a run writes.
        width: columns of the terminal.
    """
    shown = columns(needs.checkpoint if needs else None)
    if len(nodes) == 1 and nodes[0].facts is not None:
        yield from _list(nodes[0], shown)
    else:
        yield from _table(nodes, shown, width)
    for title, is_problem in (("wrong", True), ("notes", False)):
        some = [one for one in found if one.is_problem is is_problem]
        if some:
            yield ""
            yield f"{title}:"
        for text, hosts in _grouped(some):
            yield from textwrap.wrap(
                f"{hosts}: {text}", width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
            )
    num_problems = sum(one.is_problem for one in found)
    yield ""
    yield (
        f"{plural(num_problems, 'problem')} on {plural(len(nodes), 'machine')}" if num_problems else "nothing is wrong"
    )


def _grouped(found: Sequence[Finding]) -> list[tuple[str, str]]:
    """Texts, each with the machines that it is about."""
    hosts: dict[str, list[str]] = {}
    for one in found:
        hosts.setdefault(one.text, []).append(one.host)
    return [(text, ", ".join(names)) for text, names in hosts.items()]


def _list(node: Node, shown: Sequence[Column]) -> Iterator[str]:
    """Facts of one machine; with its clock if it is another one."""
    rows = [(column.heading, column.of(node)) for column in shown]
    rows += [("clock", clock(node))]
    rows = [("host", node.host), *(row for row in rows if row[1] != NOTHING)]
    wide = max(len(heading) for heading, _ in rows)
    for heading, text in rows:
        yield f"{heading:<{wide}}  {text}"


def _table(nodes: Sequence[Node], shown: Sequence[Column], width: int) -> Iterator[str]:
    """A row for each machine. Facts that are equal on all stand below it, in a sentence."""
    alive = [node for node in nodes if node.facts is not None]
    same, cells = [], []
    for column in shown:
        texts = {column.of(node) for node in alive}
        odd = {node.host for node in differing(column, nodes)[1]}
        if texts <= {NOTHING}:
            continue
        if not column.measured and len(texts) == 1 and len(alive) > 1:
            same.append(f"{column.heading} {texts.pop()}")
        else:
            marked = [column.of(node) + (_MARK if node.host in odd else "") for node in nodes]
            cells.append([column.heading, *marked])
    cells.append(["clock", *map(clock, nodes)])
    hosts = ["host", *(node.host for node in nodes)]
    # The first column says of a dead host that it is one, and the list of problems says why.
    cells[0] = [
        cells[0][0],
        *("no facts" if node.facts is None else text for node, text in zip(nodes, cells[0][1:], strict=True)),
    ]
    for number, band in enumerate(_bands(hosts, cells, width)):
        yield from [""] * (number > 0)
        yield from aligned(list(zip(hosts, *band, strict=True)))
    if any(_MARK in text for column in cells for text in column[1:]):
        yield f"{_MARK} differs from most"
    if same:
        yield ""
        text = f"the same on {'both' if len(alive) == 2 else f'all {len(alive)}'}: {', '.join(same)}"
        yield from textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False)


def _bands(hosts: Sequence[str], cells: Sequence[list[str]], width: int) -> Iterator[list[list[str]]]:
    """Columns that fit next to each other after the names of the hosts."""
    first = max(map(len, hosts))
    band: list[list[str]] = []
    taken = first
    for column in cells:
        wide = 2 + max(map(len, column))
        if band and taken + wide > width:
            yield band
            band, taken = [], first
        band.append(column)
        taken += wide
    if band:
        yield band
