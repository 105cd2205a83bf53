"""`Activity`: what `cellwright top` shows, from the sources that other commands have.

Cells and sessions are those of `cellwright ps`, hosts those of `cellwright network pending`, tenants
those of `cellwright status`; refusals and connections come from an audit trail as it grows.  Each is
bounded: the number of cells, of sandboxes that are asked, and of bytes and records of a trail.
"""

import os
import time
from collections import deque
from pathlib import Path
from typing import IO, NamedTuple

from ....policies.errors import CellwrightError, ClosedError, PolicyError
from ....runner.audit.record import AuditEntry
from ....runner.audit.verification import parsed, summary_of
from ...dashboard.overview import CellView, Overview, add_cells
from ...sandbox.network.network_control import ShowRules, ask
from ...sandbox.remote.connections import Requests, daemon_connections
from ...sandbox.remote.frames import DaemonStatus, GetStatus
from ..serving.network import sandboxes_with_rules

_MOST_ASKED = 64  # sandboxes with network rules
_KEPT = 500  # records of refusals, and as many of connections
_BACK_BYTES = 256 * 1024  # bytes at the end of a trail that are read at the start
_MOST_BYTES = 4 * 1024 * 1024  # bytes of a trail that are read at one look


class CellRow(NamedTuple):
    """A sandbox or session, and the part of a processor that it used since the last look, at the first
    one since its start; None if nothing counts it."""

    view: CellView
    cpu_percent: float | None


class HostRow(NamedTuple):
    """A host that programs asked for.  `name` was chosen by a program."""

    name: str
    asked: int
    outcome: str  # `refused` or `connected`
    where: str  # the id of a sandbox that can allow it, or empty


class ActivitySnapshot(NamedTuple):
    """The state at one time; `daemon` and `refusals` are None if they were not asked for."""

    at: float
    cells: tuple[CellRow, ...]
    left_out: int
    hosts: tuple[HostRow, ...]
    daemon: DaemonStatus | None
    refusals: tuple[AuditEntry, ...] | None
    problems: tuple[str, ...]


class Activity:
    """Looks when it is asked to; for one thread."""

    def __init__(self, connect: str | None = None, trail: str | None = None) -> None:
        """`connect` is the socket of a daemon.  Raises PolicyError for a trail that cannot be read."""
        self._requests = Requests(daemon_connections(connect, "")) if connect else None
        self._trail = GrowingTrail(trail) if trail else None
        self._used: dict[str, tuple[float, float]] = {}  # id -> CPU seconds, when they were read
        self._silent: set[str] = set()  # sockets of sandboxes that did not answer
        self._problems: list[str] = []

    def look(self) -> ActivitySnapshot:
        """Return what there is now; a source that fails is a problem of the snapshot."""
        self._problems = []
        overview = Overview(source="server", name="", made=time.time())
        add_cells(overview)
        cells = self._rows(overview.cells or [])
        daemon = self._daemon()
        if self._trail:
            self._trail.read()
        hosts = (*self._pending(), *(self._trail.hosts() if self._trail else ()))
        return ActivitySnapshot(
            overview.made, cells, overview.left_out.get("cells", 0), hosts, daemon,
            tuple(self._trail.refusals) if self._trail else None, tuple(self._problems),
        )  # fmt: skip

    def close(self) -> None:
        if self._requests:
            self._requests.pool.close()
        if self._trail:
            self._trail.close()

    def _rows(self, views: list[CellView]) -> tuple[CellRow, ...]:
        now, before, self._used = time.monotonic(), self._used, {}
        rows = []
        for view in views:
            used, percent = view.cpu_seconds, None
            if used is not None:
                earlier, at = before.get(view.id, (0.0, now - view.age_seconds))
                percent = 100 * max(0.0, used - earlier) / max(now - at, 0.01)
                self._used[view.id] = (used, now)
            rows.append(CellRow(view, percent))
        return tuple(rows)

    def _daemon(self) -> DaemonStatus | None:
        if not self._requests:
            return None
        try:
            return self._requests.ask(GetStatus(), DaemonStatus)
        except CellwrightError as error:
            self._problems.append(error.what)
            return None

    def _pending(self) -> list[HostRow]:
        rows = []
        for sandbox in sandboxes_with_rules()[:_MOST_ASKED]:
            if sandbox.path in self._silent:
                continue
            try:
                shown = ask(sandbox.path, ShowRules())
            except ClosedError:  # it ended meanwhile
                continue
            except CellwrightError as error:
                self._silent.add(sandbox.path)
                self._problems.append(f"{sandbox.id}: {error.what}")
                continue
            rows += [
                HostRow(_with_port(each.name, each.port), each.count, "refused", sandbox.id)
                for each in shown.pending
            ]
        return rows


def _with_port(name: str, port: int | None) -> str:
    return name if port is None else f"{name}:{port}"


class GrowingTrail:
    """The latest records of refusals and connections in the file of a trail that others write."""

    def __init__(self, path: str) -> None:
        """Raises PolicyError if the file cannot be read."""
        self._path = Path(path)
        self.refusals: deque[AuditEntry] = deque(maxlen=_KEPT)
        self._network: deque[AuditEntry] = deque(maxlen=_KEPT)
        self._line = b""
        try:
            self._file = self._opened()
        except OSError as error:
            raise PolicyError(f"--audit: cannot read {path}: {error.strerror}") from None
        self._file.seek(max(0, os.fstat(self._file.fileno()).st_size - _BACK_BYTES))

    def read(self) -> None:
        """Take the records that were written since the last call, also to the file that has taken this
        one's place since it was rotated."""
        data = self._file.read(_MOST_BYTES) or b""
        if not data and self._is_replaced():
            self._line = b""
            data = self._file.read(_MOST_BYTES) or b""
        *lines, self._line = (self._line + data).split(b"\n")
        self._line = self._line[-_MOST_BYTES:]
        for entry in parsed(lines):
            if (entry.category, entry.action) == ("network", "connection"):
                self._network.append(entry)
            elif not entry.allowed:
                self.refusals.append(entry)

    def hosts(self) -> list[HostRow]:
        """Return the hosts that programs asked for, the most frequent ones first."""
        found = summary_of((*self.refusals, *self._network))
        return [
            HostRow(name, count, outcome, "")
            for kind, outcome in (("refused_hosts", "refused"), ("connections", "connected"))
            for name, count in found.get(kind, {}).items()
        ]

    def close(self) -> None:
        self._file.close()

    def _opened(self) -> IO[bytes]:
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        return open(descriptor, "rb", buffering=0)

    def _is_replaced(self) -> bool:
        """Open the file that has this one's name now; tell whether it is another, or was emptied."""
        try:
            now, mine = os.stat(self._path), os.fstat(self._file.fileno())
            if os.path.samestat(now, mine) and mine.st_size >= self._file.tell():
                return False
            other = self._opened()
        except OSError:
            return False  # rotated, and the next one is not there yet
        self._file.close()
        self._file = other
        return True
