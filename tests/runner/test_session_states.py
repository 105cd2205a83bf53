"""A session's cell goes only the ways of its states, tells each change once, and is taken down once."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellwright import SessionLost, SessionSettings
from cellwright.policies.policy import Limits
from cellwright.runner.sessions.events import WAYS, SessionEvents, SessionState
from cellwright.runner.sessions.session_cell import SessionCell
from tests.forked import exit_code_of


class Freezer:
    """A cgroup that can be frozen."""

    def freeze(self) -> bool:
        return True

    def thaw(self) -> None:
        return


class Told(SessionEvents):
    """The session of a cell, which writes down what it is told."""

    def __init__(self) -> None:
        self.left: list[tuple[SessionState, str]] = []
        self.looks = 0

    def on_leave(self, state: SessionState, action: str, why: str) -> None:
        self.left.append((state, action))

    def on_last_look(self, workspace_at_rest: Any) -> None:
        self.looks += 1


def cell_without_processes(given_back: list[object]) -> SessionCell:
    cell = SimpleNamespace(cgroup=Freezer(), listener=-1, workspace=-1, kill=lambda: None)
    held: Any = SimpleNamespace(
        cell=cell, listener=None, egress=None, plan=SimpleNamespace(language="python"),
        workspace_at_rest=None,
    )  # fmt: skip
    return SessionCell(held, Limits(), SessionSettings(), given_back.append, SessionEvents())


STEPS = {
    "freeze": lambda cell: cell.freeze(),
    "use": lambda cell: cell.begin_use(),
    "end of use": lambda cell: cell.end_use() if cell.is_in_use else None,
    "pause": lambda cell: cell.pause("it was idle", lambda: True),
    "pause of one that is wanted": lambda cell: cell.pause("it was idle", lambda: False),
    "eviction": lambda cell: cell.try_to_evict("room"),
    "end": lambda cell: cell.end("it was closed", "closed"),
}  # fmt: skip


@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=12))
def test_a_cell_goes_only_the_ways_of_its_states(steps: list[str]) -> None:
    given_back: list[object] = []
    told, cell = Told(), cell_without_processes(given_back)
    cell.report_to(told)
    for step in steps:
        before = cell.state
        try:
            STEPS[step](cell)
        except SessionLost:
            assert before in (SessionState.PAUSED, SessionState.ENDED)
            assert step == "use"
        assert cell.state is before or cell.state in WAYS[before]
        assert bool(cell.lost) == (cell.state in (SessionState.PAUSED, SessionState.ENDED))
    states = [state for state, _ in told.left]
    assert states in ([], [SessionState.PAUSED], [SessionState.ENDED], [*WAYS][2:])
    assert len(given_back) == told.looks == bool(states)


def test_what_uses_a_cell_keeps_it_from_freezing_and_pausing() -> None:
    cell = cell_without_processes([])
    cell.begin_use()
    assert not cell.freeze()
    assert not cell.pause("it was idle", lambda: True)
    cell.end_use()
    assert cell.freeze()
    assert cell.pause("it was idle", lambda: True)
    with pytest.raises(SessionLost, match="it was idle"):
        cell.begin_use()


def test_the_last_holder_takes_the_cell_down() -> None:
    given_back: list[object] = []
    cell = cell_without_processes(given_back)
    with cell.held():
        cell.end("it was closed", "closed")
        assert given_back == []
    assert len(given_back) == 1


def test_a_cell_that_ended_before_it_had_a_session_tells_it_so() -> None:
    told, cell = Told(), cell_without_processes([])
    assert not cell.is_evictable  # it is being set up
    cell.end("the sandbox was closed", "closed")
    cell.report_to(told)
    cell.end("again")
    assert told.left == [(SessionState.ENDED, "closed")]


def test_a_forked_child_changes_no_state() -> None:
    told, cell = Told(), cell_without_processes([])
    cell.report_to(told)

    def change() -> None:
        cell.end("it was closed")
        assert not cell.pause("it was idle", lambda: True)
        assert (cell.state, told.left) == (SessionState.LIVE, [])

    assert exit_code_of(change) == 0
