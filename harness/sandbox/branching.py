"""`branch`: sessions that go on from the state of another one, by its memory or else by replay."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, Self, TypeVar

from ...policies.errors import PolicyError, SessionLost
from ...policies.plan import Plan
from ...runner.branching_process import BranchingProcess, CannotBranch
from ...runner.concurrency import NEVER
from ...runner.request import Request
from ...runner.session import SessionCell
from ...runner.session_branches import branch_sessions
from .session import ForkedBy

# Seeds what draws the same numbers in each branch, and defines no name: the value is None.
_RESEED = """\
(lambda modules: ([
    seed() for name in ("random", "numpy.random")
    if (seed := getattr(modules.get(name), "seed", None))
], None)[1])(__import__("sys").modules)
"""


class OfOwnCell(Protocol):
    """A session whose cell this process made."""

    id: str
    forked_by: ForkedBy
    not_copied: str

    @property
    def cell(self) -> SessionCell: ...

    @property
    def plan(self) -> Plan: ...

    def fork(self) -> Self: ...

    def take_history(self, source: Self) -> None: ...

    def close(self) -> None: ...


_Session = TypeVar("_Session", bound=OfOwnCell)


def branch(
    source: _Session,
    n: int,
    *,
    reseed: bool,
    may_replay: bool,
    another: Callable[[str], _Session],
    process: BranchingProcess,
) -> tuple[_Session, ...]:
    """Return `n` branches of a session, or close all of them and raise; PolicyError if its calls would
    have to be repeated and that is not wanted.

    `another` opens a session that is alike; it takes the reason, for the trail.
    """
    try:
        made = _by_memory(source, n, another, process)
    except CannotBranch as error:
        if not may_replay:
            raise PolicyError(
                f"branch: the session cannot be branched by memory: {error}"
            ) from None
        made = _by_replay(source, n, str(error))
    if reseed:
        with _closing_unless_done(made):
            for each in made:
                each.cell.execute(Request(code=_RESEED), None, NEVER)
    return tuple(made)


def _by_memory(
    source: _Session, n: int, another: Callable[[str], _Session], process: BranchingProcess
) -> list[_Session]:
    made: list[_Session] = []
    with _closing_unless_done(made), source.cell.resting() as (held, past):
        try:
            with contextlib.ExitStack() as busy:  # so that none is evicted for the next one
                for _ in range(n):
                    made.append(another(f"a branch of {source.id}"))
                    busy.enter_context(made[-1].cell.resting())
            cells = [each.cell for each in made]
            branch_sessions(held, cells, process, source.plan)
        except SessionLost as error:  # one of those that were just opened
            raise CannotBranch(f"a fresh session ended: {error.what}") from None
        for each in made:
            each.cell.continue_from(past)
            each.take_history(source)
            each.forked_by = "memory"
    return made


def _by_replay(source: _Session, n: int, why: str) -> list[_Session]:
    made: list[_Session] = []
    with _closing_unless_done(made):
        for _ in range(n):
            made.append(source.fork())
            made[-1].not_copied = why
    return made


@contextlib.contextmanager
def _closing_unless_done(made: Sequence[OfOwnCell]) -> Iterator[None]:
    """Close what was made so far if not all of it can be."""
    try:
        yield
    except BaseException:
        for each in made:
            each.close()
        raise
