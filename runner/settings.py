"""The settings of a pool, of sessions and of the audit trail, apart from the code that applies them.

A client of a daemon imports this module for the signature of `Sandbox`, and makes no cells itself.
"""

import enum
import os
from collections.abc import Callable
from typing import NamedTuple


class AuditLevel(enum.IntEnum):
    """The importance of a record."""

    DEBUG = 10
    INFO = 20
    WARNING = 30
    ERROR = 40
    CRITICAL = 50


MOST_BRANCHES = 8  # branches in one call, because their pidfds travel in one frame


class PoolSettings(NamedTuple):
    """How many cells wait, how many may run, and how long a call waits for its turn."""

    size: int = 8  # parked cells; with 0 each call makes a cell and takes it down before it returns
    low_water: int = 1  # parked cells after `idle_seconds` without a call
    idle_seconds: float = 60.0
    memory_bytes: int = 256 * 1024 * 1024  # memory of all parked cells together, by their cgroups
    running: int = 64  # concurrent calls, sessions and long-lived programs not counted
    programs: int = 32  # concurrent long-lived programs
    queue_seconds: float = 30.0  # how long a call waits for its turn
    # A new launcher starts after so many cells, because cells of one launcher share address layout and
    # hash seed.
    cells_per_launcher: int = 10_000
    # Cells that use one network namespace, one after the other, if they make no socket but AF_UNIX.
    cells_per_network: int = 10_000  # with 1, or without a pool, each cell has a new one
    # Cells that use one cgroup, one after the other, if each was a call with a single process.
    cells_per_cgroup: int = 10_000  # with 1, or without a pool, each cell has a new one
    # Memory of launchers for sets of packages that calls name. Beyond it the least recently used
    # launcher ends.
    packages_bytes: int = 512 * 1024 * 1024


class SessionSettings(NamedTuple):
    """How many sessions live, and how long.  The policy's limits bound each: memory and CPU time
    over all its requests together, wall time for each request."""

    alive: int = 32  # one session more raises BusyError; see also `evict` and `pause_seconds`
    freeze_seconds: float = 300.0  # without a request; then the cell is frozen until the next one
    idle_seconds: float = 1800.0
    lifetime_seconds: float = 86_400.0
    requests: int = 1_000_000
    # Either setting pauses idle sessions to disk (PauseSettings) until their next request: after so
    # many seconds, or while all cells take more memory than this by their cgroups. It also pauses the
    # longest idle session when `alive` is reached.
    pause_seconds: float | None = None
    memory_bytes: int | None = None
    evict: bool = False  # when `alive` is reached, end the longest idle session with its state

    @property
    def pauses(self) -> bool:
        """Whether idle sessions are paused."""
        return self.pause_seconds is not None or self.memory_bytes is not None


class PauseSettings(NamedTuple):
    """Where paused sessions are kept, for how long, and how many bytes of them."""

    directory: str | os.PathLike[str] | None = None  # default ~/.local/state/cellwright/paused
    # At least 32 characters, or their source. If set, states are encrypted (extra `privacy`).
    key: str | Callable[[], str] | None = None
    keep_seconds: float = 604_800.0  # after so long a state is removed
    most_bytes: int = 1 << 30  # memory and files of one session
    quota_bytes: int = 10 << 30  # all states in the directory
    sandbox_bytes: int | None = None  # all states of one sandbox; default quota_bytes
    # Tokens never leave the process, so states are removed when it ends.
    is_private: bool = False
