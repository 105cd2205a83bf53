"""The layout of a process's memory: read from /proc/PID/maps, compared, and made equal.

The mappings of a guest's process are hostile input: their number and sizes are bounded, a name is used
only as a path that a guest opens in its own cell, and the layouts are compared again afterwards.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

MOST_MAPPINGS = 4096
MOST_BYTES = 16 << 30  # mapped address space of a session
MAPS_BYTES = 1 << 20  # size of the file that lists mappings
SMAPS_BYTES = 8 << 20  # size of the file that lists them with their flags
_REMEMBERED_BYTES = 256  # kept of each line, because a guest chooses the names of its files
_FIXED = (b"[vdso]", b"[vvar]", b"[vvar_vclock]", b"[vsyscall]", b"[uprobes]")
_ESCAPED = re.compile(rb"\\(\d{3})")  # how the kernel writes a newline in a name (seq_path)
_FLAGGED = re.compile(rb"^([0-9a-f]+)-[0-9a-f]+ |^VmFlags:.* wf(?= )", re.M)  # wf: wiped by a fork
_DELETED = b" (deleted)"
STACK, HEAP = b"[stack]", b"[heap]"


class NotCopyable(Exception):  # noqa: N818 - no error: the session is branched in another way
    """The state of a session cannot be copied, and why."""


class Mapping(NamedTuple):
    start: int
    end: int
    rights: str  # as rw-p
    offset: int
    device: str
    inode: int
    name: bytes

    @property
    def is_file(self) -> bool:
        return self.inode != 0 or self.name.startswith(b"/")

    @property
    def is_fixed(self) -> bool:
        """Tell whether the kernel made it and no copy is needed."""
        return self.name in _FIXED

    def content(self) -> tuple[object, ...]:
        """Return the identity of a mapping's file, so that equal mappings are of the same file."""
        if self.is_file:
            return self.device, self.inode, self.offset - self.start, self.rights[3]
        return (self.name if self.is_fixed else b"", self.rights[3])


class Change(NamedTuple):
    """One step to another layout."""

    kind: Literal["unmap", "protect", "memory", "file"]
    start: int
    end: int
    mapping: Mapping  # the wanted mapping; for "unmap", the existing one

    @property
    def protection(self) -> int:
        return sum(1 << n for n, right in enumerate("rwx") if right in self.mapping.rights)

    @property
    def offset(self) -> int:
        return self.mapping.offset + self.start - self.mapping.start


def parse(text: bytes) -> list[Mapping]:
    """Return the mappings that /proc/PID/maps lists, or that a state says it listed; raises NotCopyable
    if there are too many, or in an order that no kernel lists."""
    lines = text.split(b"\n")[
        :-1
    ]  # not splitlines(), which also cuts at \r, a character that names may contain
    if len(text) >= MAPS_BYTES or len(lines) > MOST_MAPPINGS:
        raise NotCopyable(f"it has more than {MOST_MAPPINGS} mappings")
    found = [
        _remembered(line) if len(line) <= _REMEMBERED_BYTES else _parsed(line) for line in lines
    ]
    edges = [edge for each in found for edge in (each.start, each.end)]
    if edges != sorted(edges) or any(each.start == each.end for each in found):
        raise NotCopyable("its memory is laid out in a way that no process has")
    size = sum(each.end - each.start for each in found if not each.is_fixed)
    if size > MOST_BYTES:
        raise NotCopyable(f"it maps more than {MOST_BYTES >> 30} GiB")
    return found


def wiped(smaps: bytes, mappings: list[Mapping]) -> list[Mapping]:
    """Return the mappings that a fork gives no content, as /proc/PID/smaps tells (madvise(2),
    MADV_WIPEONFORK).  glibc keeps the state of getrandom(3) in one, since 2.41: with a copy of it two
    processes would get the same numbers."""
    if len(smaps) >= SMAPS_BYTES:
        raise NotCopyable("the list of its mappings is too long")
    start, found = b"", set()
    for each in _FLAGGED.finditer(smaps):
        if each[1] is None:
            found.add(int(start, 16))
        start = each[1] or start
    return [each for each in mappings if each.start in found]


def _parsed(line: bytes) -> Mapping:
    span, rights, offset, device, inode, *name = line.split(maxsplit=5)
    start, end = (int(each, 16) for each in span.split(b"-"))
    path = _ESCAPED.sub(lambda found: bytes([int(found[1], 8)]), name[0]) if name else b""
    return Mapping(
        start, end, rights.decode(), int(offset, 16), device.decode(), int(inode), path
    )  # fmt: skip


# Cells of one launcher have most mappings in common.
_remembered = lru_cache(8 * MOST_MAPPINGS)(_parsed)


def changes(source: list[Mapping], target: list[Mapping]) -> list[Change]:
    """Return the steps that make the layout `target` equal to `source`.

    Raises NotCopyable for a mapping that cannot be made.
    """
    steps = []
    common = set(source).intersection(target)  # usually most; those of a process do not overlap
    source, target = ([each for each in some if each not in common] for some in (source, target))
    for start, end, wanted, had in _pieces(source, target):
        if wanted is None:
            if had and had.name != STACK:  # a larger stack is no difference
                steps.append(Change("unmap", start, end, _movable(had)))
        elif had is None or wanted.content() != had.content():
            kind: Literal["file", "memory"] = "file" if wanted.is_file else "memory"
            steps.append(Change(kind, start, end, _makeable(wanted)))
        elif wanted.rights != had.rights:
            steps.append(Change("protect", start, end, _movable(wanted)))
    return steps


def _pieces(
    source: list[Mapping], target: list[Mapping]
) -> Iterator[tuple[int, int, Mapping | None, Mapping | None]]:
    """Yield stretches of addresses in which neither layout changes, with the mapping of each."""
    edges = sorted({edge for each in (*source, *target) for edge in (each.start, each.end)})
    wanted, had = iter(source), iter(target)
    a, b = next(wanted, None), next(had, None)
    for start, end in pairwise(edges):
        while a and a.end <= start:
            a = next(wanted, None)
        while b and b.end <= start:
            b = next(had, None)
        here = a if a and a.start <= start else None
        there = b if b and b.start <= start else None
        if here or there:
            yield start, end, here, there


def _movable(mapping: Mapping) -> Mapping:
    if mapping.is_fixed:
        raise NotCopyable(f"it has moved {mapping.name.decode()}")
    return mapping


def _makeable(mapping: Mapping) -> Mapping:
    _movable(mapping)
    if mapping.rights[3] != "p":
        raise NotCopyable("it shares memory (a shared mapping)")
    if mapping.is_file and (mapping.name.endswith(_DELETED) or not mapping.name.startswith(b"/")):
        raise NotCopyable("it has mapped a file that has no name any more")
    if mapping.name == STACK:
        raise NotCopyable("its stack cannot be grown in another cell")
    return mapping
