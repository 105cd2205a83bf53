"""Verification: reading a trail, checking its chain of hashes, and counting its records."""

import collections
import functools
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from ..channel import refuse_deep_json
from .record import GENESIS, LONGEST_LINE, AuditEntry, hash_of, parse, plain, why_broken

_NUMBER = re.compile(r"[1-9][0-9]{0,17}")


class Link(NamedTuple):
    """A place in the chain: the number of the last record and its hash."""

    seq: int
    hash: bytes


BEGINNING = Link(0, GENESIS)


class ChainVerdict(NamedTuple):
    """The result of `verify`; `broken` names the first invalid link, and is empty if all are valid.

    `first` is the number of the first record: above 1 if the oldest files were removed or the
    beginning was cut.
    """

    records: int
    broken: str
    head: tuple[int, str]  # the last good record; compare with a saved copy to find a cut tail
    first: int

    @property
    def ok(self) -> bool:
        return not self.broken


def verify(
    path: str | os.PathLike[str], key: bytes | None = None, expect: tuple[int, str] | None = None
) -> ChainVerdict:
    """Check the trail at `path` with its rotated files, oldest first.

    `expect` is a head that was saved before: a trail without it was cut or rewritten.  Raises
    OSError if the trail cannot be read.
    """
    begins: Link | None = None
    link = BEGINNING
    met = expect in (None, _head(BEGINNING))
    for file in files_of(Path(path)):
        with file.open("rb") as lines:
            for number, line in enumerate(lines_of(lines), 1):
                if begins is None:
                    begins = link = link_before(line)
                if why := _why(line, link, key):
                    return _verdict(begins, link, f"{file.name}, line {number}: {why}")
                link = Link(link.seq + 1, hash_of(line[:-1]))
                met = met or _head(link) == expect
    missing = f"record {expect[0]} with the expected hash is missing" if expect and not met else ""
    return _verdict(begins or BEGINNING, link, missing)


def _verdict(begins: Link, link: Link, broken: str) -> ChainVerdict:
    return ChainVerdict(link.seq - begins.seq, broken, _head(link), begins.seq + 1)


def _why(line: bytes, link: Link, key: bytes | None) -> str:
    if not line.endswith(b"\n"):
        return "it is torn" if len(line) < LONGEST_LINE else "it is longer than a record can be"
    return why_broken(line[:-1], link.hash, link.seq + 1, key)


def _head(link: Link) -> tuple[int, str]:
    return link.seq, link.hash.decode("ascii", "replace")


class _Ends(msgspec.Struct):
    prev: str
    seq: int
    hash: str


_ENDS = msgspec.json.Decoder(_Ends)


def link_before(line: bytes) -> Link:
    """Return the link before the first line: the beginning, unless older files were removed."""
    ends = _ends(line)
    return Link(ends.seq - 1, ends.prev.encode()) if ends else BEGINNING


def link_of(line: bytes) -> Link | None:
    """Return the link that a line claims; None if the line is torn or not a record."""
    ends = _ends(line)
    return Link(ends.seq, ends.hash.encode()) if ends else None


def _ends(line: bytes) -> _Ends | None:
    try:
        refuse_deep_json(line)
        return _ENDS.decode(line)
    except ValueError:  # includes msgspec.DecodeError and UnicodeDecodeError
        return None


def lines_of(file: IO[bytes]) -> Iterator[bytes]:
    """Yield lines with their newlines; a line too long for a record comes in pieces."""
    return iter(functools.partial(file.readline, LONGEST_LINE), b"")


def files_of(path: Path) -> list[Path]:
    """Return the files of a trail, oldest first: the rotated ones, then the growing one.

    The last is missing if a process was killed while it rotated.
    """
    rotated = [rotated_name(path, number) for number in rotations_of(path)]
    return [*rotated, path] if path.exists() or not rotated else rotated


def rotations_of(path: Path) -> list[int]:
    """Return the numbers of the rotated files, oldest first."""
    begin = f"{path.name}."
    names = [name for name in os.listdir(path.parent) if name.startswith(begin)]
    numbers = [name.removeprefix(begin) for name in names]
    return sorted(int(number) for number in numbers if _NUMBER.fullmatch(number))


def rotated_name(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def read(path: str | os.PathLike[str]) -> Iterator[AuditEntry]:
    """Yield the entries of a trail, oldest first; invalid lines are skipped."""
    for file in files_of(Path(path)):
        with file.open("rb") as lines:
            yield from parsed(lines_of(lines))


def parsed(lines: Iterable[bytes]) -> Iterator[AuditEntry]:
    """Yield the entries of the lines that are records."""
    for line in lines:
        try:
            yield parse(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue


_MOST_HOSTS = 20  # listed at most of each kind, because programs choose the names
_MOST_COUNTED = 10_000
_NAME_LIMIT = 260


def summary_of(entries: Iterable[AuditEntry]) -> dict[str, Any]:
    """Return the number of entries, by category and level, and the number of refusals.

    If programs used the network, also the connections to each host and port, and how often each name
    or connection was refused, the most frequent ones.
    """
    counts: collections.Counter[Any] = collections.Counter()
    hosts: collections.Counter[str] = collections.Counter()
    refused: collections.Counter[str] = collections.Counter()
    for entry in entries:
        counts[
            entry.allowed, entry.level.name, entry.category, f"{entry.category}.{entry.action}"
        ] += 1
        if (entry.category, entry.action) == ("network", "connection"):
            _count(hosts, entry.target, 1)
        elif entry.category == "violation" and _is_of_network(entry):
            _count(refused, entry.target.replace(" ", ":"), entry.details.get("count"))

    def by(place: int) -> dict[Any, int]:
        sums: collections.Counter[Any] = collections.Counter()
        for what, count in counts.items():
            sums[what[place]] += count
        return dict(sums)

    return {
        "total_entries": counts.total(),
        "allowed": by(0).get(True, 0),
        "denied": by(0).get(False, 0),
        "by_level": by(1),
        "by_category": by(2),
        "by_action": by(3),
        **_most(connections=hosts, refused_hosts=refused),
    }


def _is_of_network(entry: AuditEntry) -> bool:
    return str(entry.details.get("rule", "")).startswith("network: ")


def _count(found: "collections.Counter[str]", name: str, times: object) -> None:
    key = plain(name, _NAME_LIMIT)
    if key not in found and len(found) >= _MOST_COUNTED:
        key = "others"
    found[key] += times if isinstance(times, int) else 1


def _most(**found: "collections.Counter[str]") -> dict[str, dict[str, int]]:
    return {name: dict(each.most_common(_MOST_HOSTS)) for name, each in found.items() if each}


def summary_of_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the same counts for a trail on disk."""
    return summary_of(read(path))


# The tree of one request, drawn from its records.
_ROW, _INDENT, _WIDTH = 26, 28, 900
_CHARACTER = 8.2  # largest width, in pixels, of a character of the 13-pixel monospace font
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
    from html import escape  # its table of entities is large

    title, began = escape(f"trace {trace_id}"), _began(roots)
    rows = (
        f'<p style="margin:0 0 4px {depth * _INDENT}px;color:{_COLOURS[entry.allowed]}">'
        f"{escape(_line(entry, began))}</p>"
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
    from html import escape

    words = escape(line)
    colour = _COLOURS[entry.allowed]
    elbow = f'<path d="M{x - _INDENT + 4} {y - _ROW}V{y - 4}H{x - 6}" fill="none" stroke="#bbb"/>'
    return (
        (elbow if depth else "")
        + f'<circle cx="{x}" cy="{y - 4}" r="4" fill="{colour}"/>'
        + f'<text x="{x + 10}" y="{y}" fill="#222">{words}</text>'
    )
