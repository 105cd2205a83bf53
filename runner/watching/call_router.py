"""`CallRouter`: routes the tool calls of one execution, from the control channel and from doors."""

import os

from ...policies.policy import Limits
from ..held_cell import HeldCell
from ..messages import Answer, Call
from .calls import Calls, OnCall, Orphans
from .control_turn import ControlTurn
from .doors import Doors
from .guest_channel import GuestChannel, most_heard
from .poll_loop import Watcher


class CallRouter:
    """Starts each call, and sends each answer to the place of the call.

    The thread that has an answer sends it; on the control channel it then waits for the next call.
    For what is left of an answer, and to close doors, `ready` becomes readable to the poll loop's
    thread.
    """

    def __init__(
        self, held: HeldCell, guest_channel: GuestChannel, limits: Limits, on_call: OnCall,
        watcher: Watcher, orphans: Orphans | None = None,
    ) -> None:  # fmt: skip
        self._guest_channel = guest_channel
        self.turn: ControlTurn | None = None  # to read the control channel, from the first call on
        self._control = held.cell.control.fileno()
        self._calls = Calls(on_call, self._tell, orphans, guest_channel.settle)
        guest_channel.on_sent = self._calls.sent
        self.ready = self._calls.ready
        self._listener = held.listener
        self._doors: Doors | None = None  # needs the seccomp listener
        if self._listener:
            listener = held.cell.listener
            give = self._listener.giver.give
            self._doors = Doors(listener, most_heard(limits), self._calls, watcher, give)
            self._listener.on_door = self._doors.open_door

    @property
    def breach(self) -> str:
        """How a frame broke the protocol that the thread of a tool received; "" if none did."""
        return self.turn.breach if self.turn else ""

    def receive(self) -> Call | None:
        """Take one packet from the control channel, and return the call that it completes; raises
        ProtocolError."""
        return self.turn.receive() if self.turn else self._guest_channel.receive_some()

    def begin(self, call: Call) -> bool:
        """Start a call from the control channel; raises ProtocolError if it breaks the protocol.

        Returns whether the poll loop has to watch `turn` instead of the control channel from now on.
        """
        is_first = self.turn is None and self._calls.ready >= 0
        if is_first:
            calls = self._calls
            self.turn = ControlTurn(self._control, self._guest_channel, calls.open, calls.alarm)
            calls.turn = self.turn
        self._calls.begin(call)
        return is_first

    def send_kept(self) -> None:
        """Send what is left of answers at doors; called when `ready` is readable."""
        os.eventfd_read(self.ready)
        if self._doors:
            self._doors.send_kept()

    def close(self) -> None:
        """Send no more answers and open no more doors; may be called twice."""
        self._calls.close()
        if self._listener and self._doors:
            self._listener.on_door = None
            self._doors.close()

    def _tell(self, answer: Answer) -> bool:
        if self._doors and answer.number < 0:
            return self._doors.answer(answer)
        if self.turn:
            self.turn.take()
        return self._guest_channel.answer(answer)
