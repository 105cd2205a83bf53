"""The tree of one request, drawn from its records."""

import html
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .record import AuditEntry, plain

_ROW, _INDENT, _WIDTH = 26, 28, 900
_CHARACTER = 8.2  # pixels, at most, of a monospace font of 13
_LONGEST = 4096
_SHORTEST = 4  # characters that may stand for a whole id
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


def find_trace(entries: Iterable[AuditEntry], name: str) -> str:
    """Return the id of the trace that `name` means, "" if there is none.

    `name` is a trace, execution or session id, or the beginning of exactly one trace or execution
    id; "" means the last trace.  Raises ValueError for a beginning of several ids.
    """
    last, begun = "", set()
    for entry in entries:
        details = entry.details
        if name and name in (
            entry.trace_id,
            details.get("execution_id"),
            details.get("session_id"),
        ):
            return entry.trace_id
        last = entry.trace_id or last
        ids = (entry.trace_id, str(details.get("execution_id", "")))
        if entry.trace_id and len(name) >= _SHORTEST and any(each.startswith(name) for each in ids):
            begun.add(entry.trace_id)
    if not name:
        return last
    if len(begun) > 1:
        raise ValueError(f"{name!r} begins the ids of {len(begun)} traces")
    return begun.pop() if begun else ""


def as_text(roots: list[Node]) -> str:
    """Return the tree as lines, indented by depth."""
    began = _began(roots)
    return "\n".join(f"{'  ' * depth}{_line(entry, began)}" for depth, entry in _walk(roots, 0))


def as_svg(roots: list[Node]) -> str:
    """Return the tree as a picture with one row a record, as wide as its longest row."""
    began = _began(roots)
    rows = [(depth, entry, _line(entry, began)) for depth, entry in _walk(roots, 0)]
    marks = [_mark(number, *row) for number, row in enumerate(rows)]
    longest = max(
        (_INDENT * (depth + 1) + _CHARACTER * len(words) for depth, _, words in rows), default=0
    )
    width, height = max(_WIDTH, int(longest)), _ROW * (len(rows) + 1)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="monospace" font-size="13">'  # noqa: E501
    return "\n".join([head, *marks, "</svg>"])


def as_html(roots: list[Node], trace_id: str) -> str:
    """Return a self-contained page that shows the tree and wraps long rows."""
    title, began = html.escape(f"trace {trace_id}"), _began(roots)
    rows = (
        f'<p style="margin:0 0 4px {depth * _INDENT}px;color:{_COLOURS[entry.allowed]}">'
        f"{html.escape(_line(entry, began))}</p>"
        for depth, entry in _walk(roots, 0)
    )
    return (
        f"<!doctype html><meta charset=utf-8><title>{title}</title>"
        "<body style='font:13px monospace;overflow-wrap:anywhere'>"
        f"<h1>{title}</h1>{''.join(rows)}</body>"
    )


def _began(roots: list[Node]) -> float:
    return min((node.entries[0].time for node in roots), default=0.0)


def _walk(nodes: list[Node], depth: int) -> Iterator[tuple[int, AuditEntry]]:
    """Yield the records of `nodes` and of the spans that they caused, in the order of writing.

    A record is indented below the first record of its span, a span below that of its cause.
    """
    for node in nodes:
        first, *rest = node.entries
        yield depth, first
        parts: list[tuple[int, AuditEntry | Node]] = [(each.seq, each) for each in rest]
        parts += [(child.entries[0].seq, child) for child in node.children]
        for _, part in sorted(parts, key=lambda part: part[0]):
            if isinstance(part, Node):
                yield from _walk([part], depth + 1)
            else:
                yield depth + 1, part


def _line(entry: AuditEntry, began: float) -> str:
    refused = "" if entry.allowed else "  REFUSED"
    details = " ".join(f"{name}={value}" for name, value in entry.details.items())
    offset = f"+{(entry.time - began) * 1000:.1f} ms"
    words = (offset, f"{entry.category}.{entry.action}", entry.target, details)
    return plain(" ".join(filter(None, words)), _LONGEST) + refused  # the file may be forged


def _mark(number: int, depth: int, entry: AuditEntry, line: str) -> str:
    x, y = 16 + depth * _INDENT, _ROW * (number + 1)
    words = html.escape(line)
    colour = _COLOURS[entry.allowed]
    elbow = f'<path d="M{x - _INDENT + 4} {y - _ROW}V{y - 4}H{x - 6}" fill="none" stroke="#bbb"/>'
    return (
        (elbow if depth else "")
        + f'<circle cx="{x}" cy="{y - 4}" r="4" fill="{colour}"/>'
        + f'<text x="{x + 10}" y="{y}" fill="#222">{words}</text>'
    )
