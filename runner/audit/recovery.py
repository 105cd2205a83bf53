"""What is done with a file that does not end as we would have left it, and with what was running.

The longest good beginning stays.  The rest is copied aside and synced before it is cut off, so that
whatever it was can still be looked at; while there is no room for that, nothing is cut.
"""

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ...policies.errors import AuditError
from .record import BEGINS, LONGEST_LINE, WRONG_HASH, AuditEntry, hash_of, why_broken
from .verification import (
    BEGINNING,
    Link,
    lines_of,
    link_before,
    link_of,
    parsed,
    rotated_name,
    rotations_of,
)

_SPAN = re.compile(rb'"span_id":"([0-9a-f]{16})"')
# Quotes inside of a text are escaped, so that no guest can write these words.
_EXECUTION = b'"category":"execution","action":"'
_START = _EXECUTION + b'start"'


class Repair(NamedTuple):
    """What a damaged file came to."""

    bytes_put_aside: int
    where: str


def last_good(descriptor: int, path: Path, before: Link, key: bytes | None) -> tuple[Link, int]:
    """Return the last record that holds and where it ends; `before` is where an empty file goes on.

    Raises AuditError for a file that never was a trail or was written with another key: nobody
    wants those put aside.
    """
    good, link = 0, before
    with _lines(descriptor) as lines:
        for number, line in enumerate(lines):
            if number == 0:
                _check_that_it_is_a_trail(line, path)
                link = link_before(line) if line.endswith(b"\n") else before
            why = why_broken(line[:-1], link.hash, link.seq + 1, key)
            if number == 0 and why == WRONG_HASH:
                hint = (
                    "give the key that it was written with; if its words were changed, move it away"
                )
                raise AuditError(f"the first record of {path} does not fit the key", hint)
            if why or not line.endswith(b"\n"):
                break
            link = Link(link.seq + 1, hash_of(line[:-1]))
            good += len(line)
    return (link if good else before), good


def _check_that_it_is_a_trail(line: bytes, path: Path) -> None:
    """Take a torn first record for one, and NULs: what some file systems leave after a power cut."""
    start = line[: len(BEGINS)]
    if not BEGINS.startswith(start) and start.strip(b"\0"):
        hint = "give the path of a trail, or of a file that does not exist"
        raise AuditError(f"{path} is not an audit trail", hint)


@contextlib.contextmanager
def _lines(descriptor: int) -> Iterator[Iterator[bytes]]:
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        yield lines_of(file)


def end_of_rotated(path: Path) -> Link:
    """Return the last record that was rotated out, after which a new file goes on."""
    numbers = rotations_of(path)
    if not numbers:
        return BEGINNING
    with rotated_name(path, numbers[-1]).open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 2 * LONGEST_LINE))
        ends = [link for line in lines_of(file) if (link := link_of(line))]
    return ends[-1] if ends else BEGINNING


def put_aside(descriptor: int, path: Path, good: int) -> Repair | None:
    """Cut off what follows the good beginning, once a copy of it is safe; None if nothing does.

    Raises AuditError if there is no room for the copy.
    """
    size = os.fstat(descriptor).st_size
    if size == good:
        return None
    aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    try:
        _copy(descriptor, aside, good, size)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        hint = "make room: it is kept, and nothing is cut off, until it can be copied"
        message = f"cannot put the damaged end of {path} aside: {error.strerror}"
        raise AuditError(message, hint) from None
    os.ftruncate(descriptor, good)
    return Repair(size - good, aside.name)


def _copy(descriptor: int, aside: Path, begin: int, end: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(aside, flags, 0o600), "wb") as file:
        while begin < end:
            copied = os.sendfile(file.fileno(), descriptor, begin, end - begin)
            if not copied:  # somebody cut it meanwhile
                return
            begin += copied
        os.fsync(file.fileno())


def unfinished(descriptor: int, path: Path) -> list[AuditEntry]:
    """Return the starts of executions that have no end: whoever wrote this was killed.

    Of the files that were rotated out the newest is read: no execution lasts longer.
    """
    open_: dict[bytes, bytes] = {}
    for number in rotations_of(path)[-1:]:
        with rotated_name(path, number).open("rb") as file:
            _follow(lines_of(file), open_)
    with _lines(descriptor) as lines:
        _follow(lines, open_)
    return list(parsed(open_.values()))


def _follow(lines: Iterator[bytes], open_: dict[bytes, bytes]) -> None:
    for line in lines:
        if _EXECUTION in line and (span := _SPAN.search(line)):
            if _START in line:
                open_[span[1]] = line
            else:
                open_.pop(span[1], None)


def lock(descriptor: int, path: Path) -> None:
    """Make us the only process that writes the file; raises AuditError if there is another."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        hint = "give every process a trail of its own"
        raise AuditError(f"{path} is being written by another process", hint) from None
