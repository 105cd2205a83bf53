"""`CallRouter`: routes the tool calls of one execution, from the control channel and from doors."""

import os
import select
import threading
from collections.abc import Callable

from ...policies.policy import Limits
from ..cells.held_cell import HeldCell
from ..channel import ProtocolError
from ..messages import Answer, Call
from .guest_channel import WAIT, GuestChannel, Watcher, longest_frame
from .open_calls import Calls, Doors, OnCall, Orphans


class CallRouter:
    """Starts each call, and sends each answer to the place of the call.

    The thread that has an answer sends it; on the control channel it then waits for the next call.
    `ready` becomes readable when the poll loop's thread has to send the rest of an answer or close
    doors.
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
            self._doors = Doors(listener, longest_frame(limits), self._calls, watcher, give)
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
        """Send the rest of answers at doors; called when `ready` is readable."""
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


_IDLE_SECONDS = 3.0  # how long a tool's thread waits for the next call
# pause between two looks; the poll loop misses news for at most twice as long
QUICK_SECONDS = 0.005
_CALLS_UNTIL_ASKED = 8  # a program that calls rarely does not make the poll loop look


class ControlTurn:
    """The turn to read the guest's control channel, of the poll loop or of a thread of a tool.

    The thread of a tool that has answered waits for the next call itself and executes it, so that a
    call wakes one thread instead of two. While a tool runs, the poll loop reads the channel. Only the
    owner of the turn receives, and it never executes a tool.

    To let the poll loop listen and to take that back costs two system calls.  A program with one
    thread sends nothing before it has its answer.  So while calls come quickly, the poll loop listens
    only once a tool has run for `QUICK_SECONDS`: it looks from time to time whether the same tool
    still runs.

    The poll loop watches `descriptor`, which is readable while the control channel is and no tool's
    thread waits there.

    `open_call` counts a call that a tool's thread received; `alarm` wakes the poll loop for other
    messages.
    """

    def __init__(
        self, control: int, guest_channel: GuestChannel, open_call: Callable[[Call], None],
        alarm: Callable[[], None],
    ) -> None:  # fmt: skip
        self._control = control
        self._guest_channel = guest_channel
        self._open_call = open_call
        self._alarm = alarm
        self._lock = threading.Lock()  # held by the owner of the turn
        self._owner = 0  # the tool's thread that owns the turn
        self._is_listening = True  # the poll loop watches the channel, unless a thread waits on it
        # calls of single-threaded programs that tools' threads received
        self._calls = self._calls_seen = 0
        self.wants_looks = False  # a tool's thread asks the poll loop to call `look`
        self._has_looks = False  # the poll loop calls `look`
        self._closed = False
        self._loop = select.epoll()  # another thread may change it while the poll loop sleeps
        self._loop.register(control, select.EPOLLIN)
        guest_channel.wait_at_most(_IDLE_SECONDS)
        self.descriptor = self._loop.fileno()
        self.breach = ""  # a breach of the protocol that a tool's thread noticed

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
        """Return the next call and give up the turn. Return None if another thread is to read the
        channel, and at once in a thread without the turn."""
        if self._owner != threading.get_ident():
            return None
        try:
            call = self._receive_call()
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
        """Have the poll loop watch the channel; this thread has the turn."""
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
        if self._calls != seen:  # a call may begin at this moment without its thread noticing
            self._has_looks = True
            return True
        if self._lock.acquire(blocking=False):
            try:
                self._listen()
            finally:
                self._lock.release()
        return False

    def _receive_call(self) -> Call | None:
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
