"""`HotSets`: a launcher with warm cells for each set of packages that calls of one sandbox name."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator

from ....policies.errors import PolicyError
from ....policies.policy import Policy
from ....runner.concurrency import NEVER
from ....runner.supervisor import Supervisor
from ..cache import LendingCache
from .deadline import Deadline
from .preloading import PreloadLearner
from .required import importing_from, listed, requiring
from .store import OpenSet, PackageStore, Requirements

_REMEMBERED = 1000  # lists of packages
MakeSupervisor = Callable[[Policy], Supervisor]


class HotSet:
    """An open set of packages and the launcher of its cells."""

    def __init__(self, opened: OpenSet, policy: Policy, make: MakeSupervisor) -> None:
        directory = opened.made.directory
        self.supervisor = make(importing_from(policy, directory))
        self._opened = opened
        self._learner = (
            PreloadLearner(self.supervisor, directory) if policy.packages.learn_preload else None
        )

    def look_at(self, code: str | bytes) -> None:
        """Learn from a program of this set that has completed, if the policy says so."""
        if self._learner:
            self._learner.look_at(code)

    def settle(self) -> None:
        """Wait until what was learnt is preloaded, and the pool is full."""
        if self._learner:
            self._learner.settle()
        self.supervisor.settle()

    def close(self) -> None:
        """End the launcher and every cell of it, then let the set be removed."""
        try:
            if self._learner:
                self._learner.close()
            self.supervisor.close()
        finally:
            self._opened.close()


class HotSets:
    """Lends the launchers of sets of packages, and ends the least recently used one when those
    together have more than `most_bytes` of memory.

    `policy`: of the sandbox, before its own packages are in it.  `packages`: its own, which every set
    has too.  `make` returns the supervisor of a policy.  Safe from many threads.
    """

    def __init__(
        self, policy: Policy, packages: Requirements | None, store: PackageStore | None,
        most_bytes: int, make: MakeSupervisor,
    ) -> None:  # fmt: skip
        self._policy = policy
        self._packages = packages
        self._store = store
        self._make = make
        self._known: dict[tuple[str, ...], str] = {}  # the set of each list
        self._cache = LendingCache[HotSet](
            most_bytes, "the sandbox", lambda each: each.supervisor.memory_bytes()
        )

    def __iter__(self) -> Iterator[HotSet]:
        """Yield the launchers that are kept, the least recently used first."""
        return iter(self._cache)

    @contextlib.contextmanager
    def lend(
        self, packages: Iterable[str], seconds: float, cancel: int = NEVER
    ) -> Iterator[HotSet]:
        """Lend the launcher of a set that has `packages`; a missing set is built, which may take
        `seconds`.

        Raises PolicyError for invalid packages, PackageError if they cannot be had in time, and what
        Supervisor raises.
        """
        wanted = tuple(listed("packages", packages))
        deadline = Deadline(seconds, cancel)
        opened: OpenSet | None = None
        if (id := self._known.get(wanted, "")) not in self._cache:
            opened = self._open(wanted, deadline)
            id = opened.made.id
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[wanted] = id

        def make() -> HotSet:
            nonlocal opened
            taken, opened = opened or self._open(wanted, deadline), None
            try:
                return HotSet(taken, self._policy, self._make)
            except BaseException:
                taken.close()
                raise

        try:
            with self._cache.lend(id, make) as hot:
                yield hot
        finally:
            if opened:  # another thread was first
                opened.close()

    def _open(self, packages: Iterable[str], deadline: Deadline) -> OpenSet:
        if isinstance(self._packages, os.PathLike):
            raise PolicyError(
                "packages: a call cannot add packages to the lock file of its sandbox",
                "make another sandbox for them",
            )
        own = () if self._packages is None else listed("packages", self._packages)
        wanted = requiring(self._policy, [*own, *packages]).packages.require
        if self._store is None:
            self._store = PackageStore()
        return self._store.limited_to(self._policy).open(wanted, deadline=deadline)

    def settle(self) -> None:
        """Wait until the pool of each launcher is full."""
        self._cache.settle()

    def close(self) -> None:
        """End every launcher, with its cells."""
        self._cache.close()
