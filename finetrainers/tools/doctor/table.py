"""The report on machines as lines of text: a table, one list of facts that are equal everywhere, and the remedies."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from finetrainers.utils.text import aligned, plural

from .columns import NOTHING, Column, clock, columns, differing
from .findings import Finding, Needs
from .hosts import Node

_MARK = "*"


def report_lines(
    nodes: Sequence[Node], findings: Sequence[Finding], needs: Needs | None, *, width: int
) -> Iterator[str]:
    """Yield the lines of the report.

    Args:
        nodes: the machines; the facts of a single one are listed below each other.
        findings: the findings about them.
        needs: bytes that a run writes.
        width: columns of the terminal.
    """
    visible = columns(needs.checkpoint if needs else None)
    if len(nodes) == 1 and nodes[0].facts is not None:
        yield from _list_facts(nodes[0], visible)
    else:
        yield from _list_machines(nodes, visible, width)
    for title, is_problem in (("problems", True), ("notes", False)):
        selected = [finding for finding in findings if finding.is_problem is is_problem]
        if selected:
            yield ""
            yield f"{title}:"
        for text, hosts in _group_by_text(selected):
            yield from textwrap.wrap(
                f"{hosts}: {text}", width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
            )
    num_problems = sum(finding.is_problem for finding in findings)
    yield ""
    yield (f"{plural(num_problems, 'problem')} on {plural(len(nodes), 'machine')}" if num_problems else "no problems")


def _group_by_text(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    """Return each text with the machines that it is about."""
    hosts: dict[str, list[str]] = {}
    for finding in findings:
        hosts.setdefault(finding.text, []).append(finding.host)
    return [(text, ", ".join(names)) for text, names in hosts.items()]


def _list_facts(node: Node, visible: Sequence[Column]) -> Iterator[str]:
    """Yield the facts of one machine, with its clock unless it is this machine."""
    rows = [(column.heading, column.of(node)) for column in visible]
    rows += [("clock", clock(node))]
    rows = [("host", node.host), *(row for row in rows if row[1] != NOTHING)]
    wide = max(len(heading) for heading, _ in rows)
    for heading, text in rows:
        yield f"{heading:<{wide}}  {text}"


def _list_machines(nodes: Sequence[Node], visible: Sequence[Column], width: int) -> Iterator[str]:
    """Yield a row for each machine. Facts that are equal on all follow in a sentence."""
    alive = [node for node in nodes if node.facts is not None]
    equal, cells = [], []
    for column in visible:
        texts = {column.of(node) for node in alive}
        odd = {node.host for node in differing(column, nodes)[1]}
        if texts <= {NOTHING}:
            continue
        if not column.measured and len(texts) == 1 and len(alive) > 1:
            equal.append(f"{column.heading} {texts.pop()}")
        else:
            marked = [column.of(node) + (_MARK if node.host in odd else "") for node in nodes]
            cells.append([column.heading, *marked])
    cells.append(["clock", *map(clock, nodes)])
    hosts = ["host", *(node.host for node in nodes)]
    # The first column marks a dead host, and the list of problems has the reason.
    cells[0] = [
        cells[0][0],
        *("no facts" if node.facts is None else text for node, text in zip(nodes, cells[0][1:], strict=True)),
    ]
    for index, band in enumerate(_split_columns(hosts, cells, width)):
        yield from [""] * (index > 0)
        yield from aligned(list(zip(hosts, *band, strict=True)))
    if any(_MARK in text for column in cells for text in column[1:]):
        yield f"{_MARK} differs from most"
    if equal:
        yield ""
        text = f"the same on {'both' if len(alive) == 2 else f'all {len(alive)}'}: {', '.join(equal)}"
        yield from textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False)


def _split_columns(hosts: Sequence[str], cells: Sequence[list[str]], width: int) -> Iterator[list[list[str]]]:
    """Yield groups of columns that fit next to each other after the names of the hosts."""
    first = max(map(len, hosts))
    band: list[list[str]] = []
    used_width = first
    for column in cells:
        column_width = 2 + max(map(len, column))
        if band and used_width + column_width > width:
            yield band
            band, used_width = [], first
        band.append(column)
        used_width += column_width
    if band:
        yield band
