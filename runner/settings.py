"""The settings of a pool and of sessions, apart from the code that applies them.

A client of a daemon imports this module for the signature of `Sandbox`, and makes no cells itself.
"""

import os
from collections.abc import Callable
from typing import NamedTuple

MOST_BRANCHES = 8  # of a session in one call: their pidfds travel in one frame


class PoolSettings(NamedTuple):
    """How many cells wait, how many may run, and how long a call waits for its turn."""

    size: int = 8  # parked cells; 0: a call makes its own and takes it down before it returns
    low_water: int = 1  # parked cells that stay after `idle_seconds` without a call
    idle_seconds: float = 60.0
    memory_bytes: int = 256 * 1024 * 1024  # that parked cells hold together, as their cgroups count
    running: int = 64  # cells in use at once, without those of sessions and long-lived programs
    programs: int = 32  # long-lived programs at once
    queue_seconds: float = 30.0  # how long a call waits for its turn
    # The cells of one launcher share address layout and hash seed: after so many a new one starts.
    cells_per_launcher: int = 10_000
    # Cells that have one network namespace, one after the other, if they make no socket but AF_UNIX.
    cells_per_network: int = 10_000  # 1, or no pool: each cell has a new one
    # Of the launchers of sets of packages that calls name; beyond it the least recently used one ends.
    packages_bytes: int = 512 * 1024 * 1024


class SessionSettings(NamedTuple):
    """How many sessions live, and how long.  The policy's limits bound each: memory and CPU time
    over all its requests together, wall time for each request."""

    alive: int = 32  # one more raises BusyError, or see `evict` and `pause_seconds`
    freeze_seconds: float = 300.0  # without a request, until one comes, the cell stands still
    idle_seconds: float = 1800.0
    lifetime_seconds: float = 86_400.0
    requests: int = 1_000_000
    # With one of these, an idle session goes to disk (PauseSettings) and its cell away, until its next
    # request: after so many seconds, or, idle longest first, while all cells take more memory by the
    # count of their cgroups.  Before another session is opened beyond `alive`, too.
    pause_seconds: float | None = None
    memory_bytes: int | None = None
    evict: bool = False  # end the session that was idle longest, with its state, for one more

    @property
    def pauses(self) -> bool:
        """Whether idle sessions are paused."""
        return self.pause_seconds is not None or self.memory_bytes is not None


class PauseSettings(NamedTuple):
    """Where paused sessions are kept, for how long, and how many bytes of them."""

    directory: str | os.PathLike[str] | None = None  # default ~/.local/state/cellwright/paused
    # At least 32 characters, or a source of them: then the state is encrypted (extra `privacy`).
    key: str | Callable[[], str] | None = None
    keep_seconds: float = 604_800.0  # after which it cannot be resumed and is removed
    most_bytes: int = 1 << 30  # of one session, its memory and files
    quota_bytes: int = 10 << 30  # of all in the directory
    sandbox_bytes: int | None = None  # of those of one sandbox; default quota_bytes
    # Tokens never leave the process: what is kept is of no use, and removed, once it has ended.
    is_private: bool = False
