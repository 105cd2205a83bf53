"""`ControlTurn`: the turn to read a guest's control channel, of the poll loop or of a thread of a tool.

The thread of a tool that has answered waits for the next call itself and executes it, so that a call
wakes one thread instead of two.  While a tool runs, the poll loop listens: it hears all that comes
meanwhile.  Only the owner of the turn receives, and it never executes a tool.

To let the poll loop listen and to take that back costs two system calls.  A program with one thread
sends nothing before it has its answer.  So while calls come quickly, the poll loop listens only once
a tool has run for `QUICK_SECONDS`: it looks from time to time whether the same tool still runs.
"""

import select
import threading
from collections.abc import Callable

from ..channel import ProtocolError
from ..messages import Call
from .guest_channel import WAIT, GuestChannel

_IDLE_SECONDS = 3.0  # of a tool's thread that waits for the next call
QUICK_SECONDS = 0.005  # between two looks: the poll loop hears nothing for at most twice as long
_CALLS_UNTIL_ASKED = 8  # a program that calls seldom does not wake the poll loop for looks


class ControlTurn:
    """The turn of one execution.  The poll loop watches `descriptor`, which is readable while the
    control channel is and no tool's thread waits there.

    `open_call` counts a call that a tool's thread heard; `alarm` wakes the poll loop, for what is not a
    call.
    """

    def __init__(
        self, control: int, guest_channel: GuestChannel, open_call: Callable[[Call], None],
        alarm: Callable[[], None],
    ) -> None:  # fmt: skip
        self._control = control
        self._guest_channel = guest_channel
        self._open_call = open_call
        self._alarm = alarm
        self._lock = threading.Lock()  # its owner has the turn
        self._owner = 0  # the tool's thread that has the turn
        self._is_listening = True  # the poll loop is told of what comes, unless a thread waits
        self._calls = self._calls_seen = 0  # of programs with one thread, that tools' threads heard
        self.wants_looks = False  # a tool's thread asks the poll loop to call `look`
        self._has_looks = False  # the poll loop does
        self._closed = False
        self._loop = select.epoll()  # another thread may change it while the poll loop sleeps
        self._loop.register(control, select.EPOLLIN)
        guest_channel.wait_at_most(_IDLE_SECONDS)
        self.descriptor = self._loop.fileno()
        self.breach = ""  # of the protocol, that a tool's thread heard

    def receive(self) -> Call | None:
        """Take one packet in the poll loop, unless a tool's thread takes it; return the call that it
        completes."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self._guest_channel.receive_some()
        finally:
            self._lock.release()

    def take(self) -> None:
        """Take the turn for a tool's thread that is about to answer, if no thread has it.

        Before the answer: otherwise the poll loop may wake for the call that follows.
        """
        if self._lock.acquire(blocking=False):
            self._owner = threading.get_ident()
            if self._is_listening and self._guest_channel.is_open:
                self._loop.unregister(self._control)
                self._is_listening = False

    def wait(self) -> Call | None:
        """Return the next call, without the turn; None if another thread is to hear what comes, and
        at once in a thread that has not taken the turn."""
        if self._owner != threading.get_ident():
            return None
        try:
            call = self._hear()
            is_quick = call is not None and call.alone and self._is_quick()
        except BaseException:
            self.give_back()
            raise
        self._give_back(listens=not is_quick)
        return call

    def give_back(self) -> None:
        """Let other threads have the turn, if this thread has it, and the poll loop listen at once."""
        if self._owner == threading.get_ident():
            self._give_back(listens=True)

    def _give_back(self, *, listens: bool) -> None:
        self._owner = 0
        try:
            if listens:
                self._listen()
        finally:
            self._lock.release()

    def _listen(self) -> None:
        """Tell the poll loop of what comes; this thread has the turn."""
        if self._guest_channel.is_open and not self._is_listening:
            self._loop.register(self._control, select.EPOLLIN)
            self._is_listening = True

    def _is_quick(self) -> bool:
        """Tell whether nothing need listen until a look finds that the tool of a call takes long."""
        self._calls += 1  # before the next line: `look` writes and reads in the opposite order
        if self._has_looks:
            return True
        if self._calls % _CALLS_UNTIL_ASKED == 0:
            self.wants_looks = True
            self._alarm()
        return False

    def look(self) -> bool:
        """Listen in the poll loop again if no call has begun since the last look.

        Return whether to look again, in QUICK_SECONDS.
        """
        self.wants_looks = False
        self._has_looks = True
        seen, self._calls_seen = self._calls_seen, self._calls
        if seen != self._calls_seen:
            return True
        self._has_looks = False
        if (
            self._calls != seen
        ):  # a call began at this moment, and its thread may not have seen that
            self._has_looks = True
            return True
        if self._lock.acquire(blocking=False):
            try:
                self._listen()
            finally:
                self._lock.release()
        return False

    def _hear(self) -> Call | None:
        while self._guest_channel.is_open and not (self._guest_channel.finished or self.breach):
            try:
                if call := self._guest_channel.receive_some(WAIT):
                    self._open_call(call)
                    return call
            except TimeoutError:
                return None
            except ProtocolError as error:
                self.breach = str(error)
        self._alarm()
        return None

    def close(self) -> None:
        """Keep the turn from every other thread; may be called twice."""
        if self._closed:
            return
        if not self._lock.acquire(blocking=False):
            self._guest_channel.stop_waiting()
            self._lock.acquire()
        self._closed = True
        self._loop.close()
