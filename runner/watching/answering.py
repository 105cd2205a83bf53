"""The calls of tools of one execution, wherever they are made: on the control channel or at a door."""

import os

from ...policies.policy import Limits
from ..custody import Custody
from ..messages import Answer, Call
from .calls import Calls, OnCall, Orphans
from .conversation import Conversation, most_heard
from .doors import Doors
from .watcher import Watcher


class Answering:
    """Has each call answered, and each answer sent to where the call was made.

    On the control channel the thread that has an answer sends it; one for a door waits for the thread
    that watches, as does what takes more than one go: then `ready` becomes readable.
    """

    def __init__(
        self, custody: Custody, talk: Conversation, limits: Limits, on_call: OnCall,
        watcher: Watcher, orphans: Orphans | None = None,
    ) -> None:  # fmt: skip
        self._talk = talk
        self._calls = Calls(on_call, self._tell, orphans)
        self.ready = self._calls.ready
        self._listener = custody.listener
        self._doors: Doors | None = None  # where the kernel tells of opens
        if self._listener:
            listener = custody.cell.listener
            self._doors = Doors(listener, most_heard(limits), self._calls, watcher)
            self._listener.on_door = self._doors.knock

    def begin(self, call: Call) -> None:
        """Have `call` answered; raises ProtocolError for one that no honest guest makes."""
        self.make_room()
        self._calls.begin(call)

    def make_room(self) -> None:
        """Let calls whose answers were sent no longer count as open."""
        self._calls.sent(self._talk.take_sent())

    def send_kept(self) -> None:
        """Send what waits at doors, once `ready` is readable."""
        os.eventfd_read(self.ready)
        if self._doors:
            self._doors.send_kept()

    def close(self) -> None:
        """Answer nobody any more, and let nobody in; closing twice is fine."""
        self._calls.close()
        if self._listener and self._doors:
            self._listener.on_door = None
            self._doors.close()

    def _tell(self, answer: Answer) -> bool:
        if self._doors and answer.number < 0:
            return self._doors.keep(answer)
        return self._talk.answer(answer)
