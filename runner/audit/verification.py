"""Verification: reading a trail and checking its chain of hashes."""

import functools
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from ..nesting import refuse_deep_json
from .record import GENESIS, LONGEST_LINE, AuditEntry, hash_of, parse, why_broken

_NUMBER = re.compile(r"[1-9][0-9]{0,17}")


class Link(NamedTuple):
    """A place in the chain: the number of the last record and its hash."""

    seq: int
    hash: bytes


BEGINNING = Link(0, GENESIS)


class Verdict(NamedTuple):
    """The result of `verify`; `broken` names the first invalid link, and is empty if all are valid.

    `first` is the number of the first record: above 1 if the oldest files were removed or the
    beginning was cut.
    """

    records: int
    broken: str
    head: tuple[int, str]  # of the last good record: keep it elsewhere, and a cut tail shows
    first: int

    @property
    def ok(self) -> bool:
        return not self.broken


def verify(
    path: str | os.PathLike[str], key: bytes | None = None, expect: tuple[int, str] | None = None
) -> Verdict:
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


def _verdict(begins: Link, link: Link, broken: str) -> Verdict:
    return Verdict(link.seq - begins.seq, broken, _head(link), begins.seq + 1)


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
    except ValueError:  # msgspec.DecodeError and UnicodeDecodeError are
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
