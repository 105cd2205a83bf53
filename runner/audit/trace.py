"""The tree of one request, drawn from its records: what caused what."""

import html
from collections.abc import Iterable
from typing import NamedTuple

from .record import AuditEntry, plain

_ROW, _INDENT, _WIDTH = 26, 28, 900
_LONGEST = 4096
_COLOURS = {True: "#2f6f4f", False: "#a33a2a"}


class Node(NamedTuple):
    """One span: its records in order, and the spans that it caused."""

    entries: list[AuditEntry]
    children: list["Node"]


def tree_of(entries: Iterable[AuditEntry], trace_id: str) -> list[Node]:
    """Return the roots of a trace; a span whose parent left no record is a root."""
    nodes: dict[str, Node] = {}
    parents: dict[str, str] = {}
    for entry in entries:
        if entry.trace_id == trace_id:
            nodes.setdefault(entry.span_id, Node([], [])).entries.append(entry)
            parents.setdefault(entry.span_id, entry.parent_id)
    roots: list[Node] = []
    for span, node in nodes.items():
        parent = nodes.get(parents[span])
        (parent.children if parent and parent is not node else roots).append(node)
    return roots


def as_text(roots: list[Node]) -> str:
    """Return the tree as lines, indented by depth."""
    began = min((node.entries[0].time for node in roots), default=0.0)
    return "\n".join(f"{'  ' * depth}{_line(entry, began)}" for depth, entry in _walk(roots, 0))


def as_svg(roots: list[Node]) -> str:
    """Return the tree as a picture, a row a record."""
    began = min((node.entries[0].time for node in roots), default=0.0)
    rows = list(_walk(roots, 0))
    marks = [_mark(number, depth, entry, began) for number, (depth, entry) in enumerate(rows)]
    height = _ROW * (len(rows) + 1)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="monospace" font-size="13">'  # noqa: E501
    return "\n".join([head, *marks, "</svg>"])


def as_html(roots: list[Node], trace_id: str) -> str:
    """Return a page that shows the picture and needs nothing else."""
    title = html.escape(f"trace {trace_id}")
    return (
        f"<!doctype html><meta charset=utf-8><title>{title}</title>"
        f"<body style='font-family:monospace'><h1>{title}</h1>{as_svg(roots)}</body>"
    )


def _walk(nodes: list[Node], depth: int) -> Iterable[tuple[int, AuditEntry]]:
    for node in nodes:
        first, *rest = node.entries
        yield depth, first
        for entry in rest:
            yield depth + 1, entry
        yield from _walk(node.children, depth + 1)


def _line(entry: AuditEntry, began: float) -> str:
    refused = "" if entry.allowed else "  REFUSED"
    details = " ".join(f"{name}={value}" for name, value in entry.details.items())
    offset = f"+{(entry.time - began) * 1000:.1f} ms"
    words = (offset, f"{entry.category}.{entry.action}", entry.target, details)
    return plain(" ".join(filter(None, words)), _LONGEST) + refused  # the file may be forged


def _mark(number: int, depth: int, entry: AuditEntry, began: float) -> str:
    x, y = 16 + depth * _INDENT, _ROW * (number + 1)
    words = html.escape(_line(entry, began))
    colour = _COLOURS[entry.allowed]
    elbow = f'<path d="M{x - _INDENT + 4} {y - _ROW}V{y - 4}H{x - 6}" fill="none" stroke="#bbb"/>'
    return (
        (elbow if depth else "")
        + f'<circle cx="{x}" cy="{y - 4}" r="4" fill="{colour}"/>'
        + f'<text x="{x + 10}" y="{y}" fill="#222">{words}</text>'
    )
