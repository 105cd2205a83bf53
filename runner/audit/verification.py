"""Reading a trail and checking that its chain holds."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from .record import GENESIS, AuditEntry, hash_of, parse, why_broken


class Link(NamedTuple):
    """A place in the chain: the number of the last record and its hash."""

    seq: int
    hash: bytes


BEGINNING = Link(0, GENESIS)


class Verdict(NamedTuple):
    """What `verify` found; `broken` names the first link that does not hold, and is empty if all do."""

    records: int
    broken: str
    head: tuple[int, str]  # of the last good record: keep it elsewhere, and a cut tail shows

    @property
    def ok(self) -> bool:
        return not self.broken


def verify(
    path: str | os.PathLike[str], key: bytes | None = None, expect: tuple[int, str] | None = None
) -> Verdict:
    """Check the trail at `path` with the files that were rotated out of it, oldest first.

    `expect` is a head that was seen before: a trail that does not have it was cut or rewritten.
    Raises OSError if the trail cannot be read.
    """
    link: Link | None = None
    count = 0
    met = expect is None
    for file in files_of(Path(path)):
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                link = link or link_before(line)
                why = _why(line, link, key)
                if why:
                    return Verdict(count, f"{file.name}, line {number}: {why}", _head(link))
                link = Link(link.seq + 1, hash_of(line[:-1]))
                count += 1
                met = met or _head(link) == expect
    missing = (
        "" if met else f"record {expect[0] if expect else 0} with the expected hash is missing"
    )
    return Verdict(count, missing, _head(link or BEGINNING))


def _why(line: bytes, link: Link, key: bytes | None) -> str:
    if not line.endswith(b"\n"):
        return "it is torn"
    return why_broken(line[:-1], link.hash, link.seq + 1, key)


def _head(link: Link) -> tuple[int, str]:
    return link.seq, link.hash.decode("ascii", "replace")


def link_before(line: bytes) -> Link:
    """Return the link before the first line: the beginning, unless older files were removed."""
    try:
        fields = msgspec.json.decode(line)
        return Link(fields["seq"] - 1, fields["prev"].encode())
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError, UnicodeError):
        return BEGINNING


def files_of(path: Path) -> list[Path]:
    """Return the files of a trail, oldest first: those rotated out, then the one that grows."""
    rotated = [
        each
        for each in path.parent.glob(f"{path.name}.*")
        if each.suffix[1:].isdigit() and each.stem == path.name
    ]
    return [*sorted(rotated, key=lambda each: int(each.suffix[1:])), path]


def read(path: str | os.PathLike[str]) -> Iterator[AuditEntry]:
    """Yield the entries of a trail, oldest first; what is no record is passed over."""
    for file in files_of(Path(path)):
        with file.open("rb") as lines:
            for line in lines:
                try:
                    yield parse(line)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    continue
