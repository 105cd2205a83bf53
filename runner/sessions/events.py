"""The states of a session, and the events that its cell reports."""

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

from ...policies.errors import SessionExpired, SessionLost

if TYPE_CHECKING:
    from ..requests.result import NetworkRecord


class SessionState(Enum):
    """The state of a session."""

    LIVE = "live"
    FROZEN = "frozen"  # its processes stand still
    PAUSED = "paused"  # its state is on disk, and its cell is gone
    ENDED = "ended"


# The ways of a cell.  A paused session becomes live again in a fresh cell, which takes the place of the
# last one; runner/README.md has the drawing.
WAYS = {
    SessionState.LIVE: (SessionState.FROZEN, SessionState.PAUSED, SessionState.ENDED),
    SessionState.FROZEN: (SessionState.LIVE, SessionState.PAUSED, SessionState.ENDED),
    SessionState.PAUSED: (SessionState.ENDED,),
    SessionState.ENDED: (),
}


class SessionEvents:
    """The events of a session's cell.  The table of its sandbox takes the first two, and the session
    itself the others; each is called in the thread that caused it, without a lock of the cell."""

    def on_thaw(self) -> None:
        """The cell was frozen and goes on, so it may be due earlier than it was."""

    def on_rest(self) -> None:
        """The cell is idle again, or gone."""

    @property
    def is_evictable(self) -> bool:
        """Whether the state may be lost: not before the cell, which is being set up, has a session."""
        return False

    def on_begin(self, execution_id: str) -> None:
        """A request begins to run."""

    def on_idle(self, why: str) -> None:
        """The cell is idle and its room is wanted: the session may be paused."""

    def on_leave(self, state: SessionState, action: str, why: str) -> None:
        """The session is paused or has ended; the trail calls it `action`."""

    def on_last_look(self, workspace_at_rest: Callable[[], int]) -> None:
        """The cell is about to be taken down; `workspace_at_rest` kills it and returns /workspace."""

    def on_last_network(self, record: "NetworkRecord") -> None:
        """The connections have ended, and no result will have this record of them."""


def gone(why: str, expired: str = "") -> SessionLost:
    """Return the error for a session that has ended; `expired` is the setting that ended it, if any."""
    message = f"the session is gone: {why}"
    if expired:
        hint = f"open another one; more {expired}, or extend(), lets it live longer"
        return SessionExpired(message, hint, limit=expired)
    return SessionLost(message, "open another one")
