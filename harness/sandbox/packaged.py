"""`PackagedCells`: chooses the launcher of a call: that of its language, or of its set of packages.

`MadeOnce`: a part of a sandbox that is made when it is first used.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from ...policies.closing import Closing
from ...policies.errors import ClosedError, PolicyError
from ...policies.languages import PYTHON
from ...policies.policy import Policy
from ...runner.concurrency import NEVER
from ...runner.supervisor import Supervisor, Supervisors
from .sandbox_arguments import SandboxArguments

if TYPE_CHECKING:
    from .packages.package_store import OpenSet
    from .packages.required import HotSets, PreloadLearner

LookAt = Callable[[str | bytes], None]


class Lease(Closing):
    """A supervisor that stays until this is closed.  `look_at` learns from a program that completed."""

    def __init__(
        self, supervisor: Supervisor, look_at: LookAt | None, close: Callable[[], None]
    ) -> None:
        self.supervisor = supervisor
        self.look_at = look_at
        self._close = close

    def close(self) -> None:
        """Return the supervisor; closing twice is fine."""
        self._close()


class PackagedCells:
    """The supervisors of one sandbox, by language and by the packages that a call names.

    `policy`: of the sandbox, without its own packages, whose set is `opened`.  `make` returns the
    supervisor of another policy.  Safe from many threads.
    """

    def __init__(
        self, supervisors: Supervisors, policy: Policy, given: SandboxArguments,
        opened: "OpenSet | None", most_bytes: int, make: Callable[[Policy], Supervisor],
    ) -> None:  # fmt: skip
        self._supervisors = supervisors
        self._policy = policy
        self._given = given
        self._most_bytes = most_bytes
        self._make = make
        self._lock = threading.Lock()
        self._hot_sets: HotSets | None = None
        self._learner: PreloadLearner | None = None
        if opened and policy.packages.learn_preload:
            from .packages import required

            self._learner = required.PreloadLearner(supervisors.of(PYTHON), opened.made.directory)
        # True if imports of completed programs are learnt for preloading.
        self.learns = self._learner is not None

    def lease(
        self, packages: Sequence[str], language: str, seconds: float, cancel: int = NEVER
    ) -> Lease:
        """Lend the supervisor of `language`, or with `packages` that of a set, which is built within
        `seconds` if it is missing.

        Raises PolicyError, PackageError if packages cannot be had in time, and LaunchError.
        """
        if not packages:
            look_at = self._learner.look_at if self._learner and language == PYTHON else None
            return Lease(self._supervisors.of(language), look_at, _nothing)
        if language != PYTHON:
            raise PolicyError(f"packages: only Python programs have them, got {language}")
        lent = contextlib.ExitStack()
        hot = lent.enter_context(self._sets().lend(packages, seconds, cancel))
        return Lease(hot.supervisor, hot.look_at, lent.close)

    def _sets(self) -> "HotSets":
        with self._lock:
            if self._hot_sets is None:
                from .packages.required import HotSets  # seldom needed

                given = self._given
                self._hot_sets = HotSets(
                    self._policy,
                    given.packages,
                    given.host.package_store,
                    self._most_bytes,
                    self._make,
                )
            return self._hot_sets

    def settle(self) -> None:
        """Wait until the pools are full and learnt modules are preloaded."""
        if self._learner:
            self._learner.settle()
        self._supervisors.settle()
        if self._hot_sets:
            self._hot_sets.settle()

    def close(self) -> None:
        """End every cell and launcher; closing twice is fine."""
        if self._learner:
            self._learner.close()
        self._supervisors.close()
        with self._lock:
            hot_sets = self._hot_sets
        if hot_sets:
            hot_sets.close()


def _nothing() -> None:
    """Close nothing: the supervisor of a language stays as long as the sandbox."""


class _Closeable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closeable)


class MadeOnce(Generic[T]):
    """Makes one part when it is first asked for it, so that a sandbox without use for it imports
    nothing of it; safe from many threads."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._is_closed = False
        self.made: T | None = None  # None until then

    def get(self) -> T:
        """Return the part; raises ClosedError if it was not made before `close`."""
        with self._lock:
            if self.made is None:
                if self._is_closed:
                    raise ClosedError("the sandbox was closed")
                self.made = self._make()
            return self.made

    def close(self) -> None:
        """Close the part, if there is one, and make none any more."""
        with self._lock:
            self._is_closed = True
        if self.made:
            self.made.close()
