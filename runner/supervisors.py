"""`Supervisors`: one supervisor for each language in use, with a launcher and a pool of its own.

`SupervisorSettings` makes them.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ..policies.errors import ClosedError
from ..policies.languages import PYTHON, interpreter_of
from ..policies.policy import Policy
from .settings import PoolSettings, SessionSettings
from .shared_files import SKILLS, SharedFiles
from .spawn import Spawned
from .supervisor import Supervisor, SupervisorState

if TYPE_CHECKING:
    from .egress_process import EgressProcess
    from .launcher_claim import LauncherClaim
    from .session import SessionCell
    from .sessions import Sessions

OTHERS_CELLS = 2  # of a pool that is not the first


class SupervisorSettings(NamedTuple):
    """What the supervisors of one sandbox share.

    `spawn` starts another launcher.  `interpreters` are those of other languages than Python, and
    `shared_files` returns the files that cells of a language see.
    """

    spawn: Callable[[], Spawned]
    cgroup_root: str | None
    pool: PoolSettings
    interpreters: Mapping[str, str]
    shared_files: Callable[[str], Mapping[str, SharedFiles]]
    user: int | str | None
    egress: "EgressProcess | None"

    def first(self, policy: Policy, language: str, spawned: Spawned) -> Supervisor:
        """Return the supervisor of a launcher that was `spawned`; raises what Supervisor raises."""
        is_python = language == PYTHON
        return Supervisor(
            policy, spawned, self.cgroup_root, self.pool, language=language,
            interpreter="" if is_python else self.interpreters.get(interpreter_of(language), ""),
            shared_files=self.shared_files(language), user=self.user, egress=self.egress,
        )  # fmt: skip

    def another(self, policy: Policy, language: str) -> Supervisor:
        """Return the supervisor of another language or set of packages, with a smaller pool."""
        pool = self.pool._replace(size=min(self.pool.size, OTHERS_CELLS))
        return self._replace(pool=pool).first(policy, language, self.spawn())

    def replaying(self, policy: Policy, language: str, skills: SharedFiles) -> Supervisor:
        """Return a supervisor without a pool or network, whose cells see only `skills`."""
        alone = self._replace(
            pool=self.pool._replace(size=0), shared_files=lambda _: {SKILLS: skills}, egress=None
        )
        return alone.another(policy, language)


class SupervisorsState(NamedTuple):
    """What the cells of one sandbox do now; `frozen` sessions are among those that are alive."""

    supervisors: tuple[SupervisorState, ...]
    sessions: int
    frozen: int
    paused: int = 0  # these have no cell, and are not among those that are alive


class Supervisors:
    """The supervisors of one sandbox: the first, and others made when their language is first used;
    safe from many threads."""

    def __init__(
        self, language: str, first: Supervisor, make: Callable[[str], Supervisor],
        settings: SessionSettings, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._language = language
        self.first = first
        self._make = make
        self._settings = settings
        self._clock = clock
        self._sessions: Sessions | None = None
        self._lock = threading.Lock()
        self._others: dict[str, Supervisor] = {}
        self._closed = False

    def of(self, language: str) -> Supervisor:
        """Return the supervisor of `language`; raises LaunchError that names a missing package."""
        if language == self._language:
            return self.first
        with self._lock:
            if self._closed:
                raise ClosedError("the sandbox was closed")
            if language not in self._others:
                self._others[language] = self._make(language)
            return self._others[language]

    def open_session(
        self, supervisor: Supervisor, claim: "LauncherClaim | None" = None
    ) -> "SessionCell":
        """Return a session cell of a supervisor, which may be that of a set of packages; of the
        launcher of `claim`, if there is one.

        Raises BusyError if too many sessions of the sandbox live, and LaunchError.
        """
        return supervisor.open_session(self._counted(), claim)

    def make_room(self, patience_seconds: float) -> None:
        """Pause or evict idle sessions if there are too many; raises BusyError if each is busy for so
        long."""
        self._counted().make_room(patience_seconds)

    def _counted(self) -> "Sessions":
        from .sessions import Sessions  # a command that runs one program opens none

        with self._lock:
            if self._closed:
                raise ClosedError("the sandbox was closed")
            if self._sessions is None:
                self._sessions = Sessions(self._settings, self._clock)
            return self._sessions

    def state(self) -> "SupervisorsState":
        """Return what the supervisors of all languages do now."""
        alive, frozen = self._sessions.count() if self._sessions else (0, 0)
        return SupervisorsState(tuple(each.state() for each in self._all()), alive, frozen)

    def settle(self) -> None:
        for supervisor in self._all():
            supervisor.settle()

    def close(self) -> None:
        """End every cell and launcher.  May be called twice."""
        with self._lock:
            self._closed = True
        if self._sessions:
            self._sessions.close()
        for supervisor in self._all():
            supervisor.close()

    def _all(self) -> list[Supervisor]:
        with self._lock:
            return [self.first, *self._others.values()]
