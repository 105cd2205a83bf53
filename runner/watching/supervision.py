"""`Supervision`: one poll loop that watches one execution."""

import select
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from ...policies.policy import Limits
from .. import channel
from ..cells.held_cell import HeldCell
from ..listening.cell_listener import REST_SECONDS, Listener
from ..listening.locks import LOOK_SECONDS
from ..messages import Call, Finished
from ..requests.result import Reason, Violation
from .guest_channel import Capture, GuestChannel, StdinWriter, Timers

if TYPE_CHECKING:
    from .call_router import CallRouter
    from .open_calls import OnCall, Orphans

# A session's program has so long to yield. CPython misses a signal that comes between its last check
# and a blocking system call (1 in 1,500, measured), so the program is interrupted again.
_GRACE_SECONDS = 1.0
_TIMES_ASKED = 2
_MEMORY_CHECK_SECONDS = 0.05
_CPU_CHECK_SECONDS = 0.001  # shortest pause between two checks
_IN = select.POLLIN


class Work(msgspec.Struct, frozen=True):
    """The work of a cell, and its bounds."""

    program: bytes  # frame for the control channel (requests/forms.py); may be empty
    stdin: bytes
    limits: Limits
    captures: tuple[Capture, ...]
    cancel: int  # a descriptor whose readability ends the execution, or negative
    stays: bool = False  # True for a request of a session: the cell outlives it
    on_call: "OnCall | None" = None  # answers its tool calls, each in a thread of its own
    orphans: "Orphans | None" = None  # counts tool calls that outlive it
    ending: bytes = b""  # the line that ends each request of a shell, which reads them from stdin
    nonce: str = ""  # nonce of a session's request, which the Finished frame must repeat


class Observation(msgspec.Struct, frozen=True):
    """The observations of an execution, all made from outside the guest except `finished`."""

    cause: Reason | None  # why the supervisor ended it; None if it ended by itself
    wait_status: (
        int | None
    )  # wait status of the guest's main process; None if nothing waited for it
    finished: Finished | None
    complaint: str | None  # how the guest broke the control protocol, or flooded the listener
    violations: tuple[Violation, ...] = ()
    sent_at: float = 0.0  # when the program was handed over, by time.monotonic
    stays: bool = False  # the cell lives on, for the next request
    captures: tuple[Capture, ...] = ()  # standard output, unless given away, and standard error

    def refused(self, more: tuple[Violation, ...]) -> "Observation":
        """Return this with `more` refused attempts."""
        return replace(self, violations=(*self.violations, *more)) if more else self


class Supervision:
    """Sends the program, reads its output, enforces deadlines, and ends with the program."""

    def __init__(self, held: HeldCell, work: Work) -> None:
        self._held = held
        self._cell = cell = held.cell
        self._limits = work.limits
        self._captures = work.captures
        self._stays = work.stays
        self._ending = work.ending
        self._interrupted: Reason | None = None  # why the program was asked to yield
        self._asked = 0
        self._will_look = False  # True while a look at locks is scheduled
        self._cause: Reason | None = None
        self._complaint: str | None = None
        self._sent_at = 0.0
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._poll = select.poll()
        self._timers = Timers()
        self._input = StdinWriter(cell, self, work.stdin, stays=bool(work.ending))
        self._guest_channel = GuestChannel(
            cell.control, work.program, work.limits, takes_calls=work.on_call is not None,
            owed=cell.owed, nonce=work.nonce,
        )  # fmt: skip
        self._router: CallRouter | None = None
        if work.on_call:
            from . import call_router  # most programs have no tools

            self._router = call_router.CallRouter(
                held, self._guest_channel, work.limits, work.on_call, self, work.orphans
            )
        if (cancel := work.cancel) >= 0:
            self.watch(cancel, _IN, lambda _: self._cancel(cancel))

    def _watch_all(self) -> None:
        self.watch(self._cell.control.fileno(), _IN, self._on_control)
        self.watch(self._cell.status.fileno(), _IN, self._on_status)
        for capture in self._captures:
            self.watch(capture.pipe, _IN, self._reader(capture))
        if self._router:
            self.watch(self._router.ready, _IN, partial(self._on_answers, self._router))
        if listener := self._held.listener:
            self.watch(self._cell.listener, _IN, partial(self._on_notification, listener))

    def run(self) -> Observation:
        """Run the program and watch it until it has ended.

        It has ended when the guest reports a good end, when its process has ended, or when we have
        killed it; the caller disposes of what still runs in the cell.  In a session it has ended
        when the guest says so; a program that takes too long is first asked to yield.  Raises
        LauncherLost.
        """
        try:
            return self._run()
        finally:
            if self._router:
                self._router.close()

    def _run(self) -> Observation:
        self._start()
        while not self._has_ended():
            for descriptor, event in self._poll.poll(self._timers.patience_milliseconds()):
                if handler := self._handlers.get(descriptor):
                    handler(event)
            self._timers.ring()
        if self._router:
            self._router.close()  # no answer is sent from here on, so the unsent rest is known
        for capture in self._captures:
            capture.drain()
        self._receive_the_rest()
        self._cell.owed = self._guest_channel.owed()
        listener, held = self._held.listener, self._held
        refused = listener and listener.has_refused
        violations = listener.take_violations() if listener and refused else ()
        finished = self._guest_channel.finished
        stays = self._stays and not self._cause and held.wait_status is None and bool(finished)
        return Observation(
            self._cause or self._interrupted, held.wait_status, finished, self._complaint,
            violations, self._sent_at, stays, self._captures,
        )  # fmt: skip

    def _start(self) -> None:
        """Send the program and start the clock: every layer is on."""
        self._held.begin()
        now = time.monotonic()
        self._timers.at(now + self._limits.wall_seconds, self._on_wall_time)
        if self._stays:  # earlier requests have used some of the CPU time
            self._check_cpu()
        else:
            self._timers.at(now + self._limits.cpu_seconds / self._limits.cpus, self._check_cpu)
        there_is_more = False
        if self._stays and self._guest_channel.speaks_first():
            self.complain("spoke before it was asked")
        else:
            there_is_more = self._guest_channel.send_some()
        self._sent_at = time.monotonic()
        self._watch_all()  # while the program begins
        if there_is_more:  # a long program is sent as fast as the guest reads it
            self._watch_control()
        self._input.begin()
        if self._cell.can_exceed:
            self._begin_memory_checks()
        if self._stays and (listener := self._held.listener):  # left by an earlier request
            self._have_locks_looked_at(listener)

    def _has_ended(self) -> bool:
        if self._cause or self._guest_channel.finished_for_good(stays=self._stays):
            return True
        return self._held.wait_status is not None

    def watch(self, descriptor: int, events: int, handler: Callable[[int], None]) -> None:
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, events)

    def unwatch(self, descriptor: int) -> None:
        if self._handlers.pop(descriptor, None):
            self._poll.unregister(descriptor)

    def _on_status(self, _: int) -> None:
        self._held.receive()

    # the control channel and streams: claims of the guest

    def _on_control(self, event: int) -> None:
        if event & select.POLLOUT and not self._guest_channel.send_some():
            self._watch_control()
        if event & (_IN | select.POLLHUP | select.POLLERR):
            self._receive_some()

    def _watch_control(self) -> None:
        """Watch the control channel for room to send, and for incoming frames unless `ControlTurn`
        reports them."""
        control = self._cell.control.fileno()
        turn = self._router.turn if self._router else None
        events = (0 if turn else _IN) | (select.POLLOUT if self._guest_channel.has_unsent else 0)
        if events and self._guest_channel.is_open:
            self.watch(control, events, self._on_control)
        else:
            self.unwatch(control)

    def _begin_call(self, router: "CallRouter", call: Call) -> None:
        if router.begin(call) and router.turn:
            self.watch(router.turn.descriptor, _IN, self._on_control)
            self._watch_control()

    def _on_answers(self, router: "CallRouter", _: int) -> None:
        router.send_kept()
        if router.turn and router.turn.wants_looks:
            self._look_at_turn()
        if router.breach:
            self._complain_of_control(router.breach)
        if self._guest_channel.send_some():
            self._watch_control()

    def _look_at_turn(self) -> None:
        if self._router and self._router.turn and self._router.turn.look():
            from .call_router import QUICK_SECONDS

            self._timers.at(time.monotonic() + QUICK_SECONDS, self._look_at_turn)

    def _receive_some(self) -> None:
        try:
            if not self._router:
                self._guest_channel.receive_some()
            elif call := self._router.receive():
                self._begin_call(self._router, call)
        except channel.ProtocolError as error:
            self._complain_of_control(str(error))
        if not self._guest_channel.is_open:
            self.unwatch(self._cell.control.fileno())
            if self._router and self._router.turn:
                self.unwatch(self._router.turn.descriptor)

    def _complain_of_control(self, why: str) -> None:
        self.complain(f"broke the control protocol: {why}")

    def _receive_the_rest(self) -> None:
        """Take a last frame that came together with the end.  An invalid frame is dropped, and
        after a breach every frame is: it may belong to the earlier request."""
        if self._complaint:
            return
        try:
            self._guest_channel.drain()
        except channel.ProtocolError as error:
            self._complain_of_control(str(error))

    def _on_notification(self, listener: Listener, event: int) -> None:
        if not event & _IN:  # POLLHUP: nothing runs under the filter any more
            self.unwatch(self._cell.listener)
            return
        listener.answer()
        self._have_locks_looked_at(listener)
        if listener.is_flooded:
            self.complain(f"attempted more than {self._limits.violations} refused calls")
        elif listener.needs_rest():
            self._poll.modify(self._cell.listener, 0)
            self._timers.at(time.monotonic() + REST_SECONDS, self._end_rest)

    def _have_locks_looked_at(self, listener: Listener) -> None:
        if listener.locks.needs_look and not self._will_look:
            self._will_look = True
            self._timers.at(time.monotonic() + LOOK_SECONDS, partial(self._look_at_locks, listener))

    def _look_at_locks(self, listener: Listener) -> None:
        self._will_look = False
        if complaint := listener.locks.look_again():
            self.complain(complaint)
        self._have_locks_looked_at(listener)

    def _end_rest(self) -> None:
        if self._cell.listener in self._handlers:
            self._poll.modify(self._cell.listener, _IN)

    def _cancel(self, descriptor: int) -> None:
        self.unwatch(descriptor)  # the descriptor stays readable
        self._end_or_interrupt("cancelled")

    def complain(self, complaint: str) -> None:
        self._complaint = self._complaint or complaint
        self._end("violation")

    def _reader(self, capture: Capture) -> Callable[[int], None]:
        def read(_: int) -> None:
            if not capture.read():
                self.unwatch(capture.pipe)
            total = 0
            for each in self._captures:
                total += each.total_bytes
            if total > self._limits.output_total_bytes:
                self._end("output")

        return read

    # ends

    def _on_wall_time(self) -> None:
        self._end_or_interrupt("wall_time")

    def _check_cpu(self) -> None:
        """End the cell if its CPU time is used up, else check again at the earliest possible
        moment."""
        used = self._cell.cgroup.cpu_seconds()
        if used is None:
            return
        left = self._limits.cpu_seconds - used
        if left <= 0:
            self._end("cpu_time")
        else:
            wait = max(left / self._limits.cpus, _CPU_CHECK_SECONDS)
            self._timers.at(time.monotonic() + wait, self._check_cpu)

    def _begin_memory_checks(self) -> None:
        """Check now in a session, whose threads and children had time to make sockets, unless the
        last check was a moment ago.  A new cell has run no program yet."""
        if self._stays and self._cell.look_is_due:
            self._check_memory()
        else:
            self._timers.at(time.monotonic() + _MEMORY_CHECK_SECONDS, self._check_memory)

    def _check_memory(self) -> None:
        if self._cell.has_exceeded():
            self._end("memory")
        else:
            self._timers.at(time.monotonic() + _MEMORY_CHECK_SECONDS, self._check_memory)

    def _end_or_interrupt(self, cause: Reason) -> None:
        """End the cell; in a session first ask the program to yield, so that its state is kept."""
        if not self._stays or self._asked == _TIMES_ASKED:
            self._end(self._interrupted or cause)
        elif not self._has_ended():
            self._interrupted = self._interrupted or cause
            self._asked += 1
            self._timers.at(time.monotonic() + _GRACE_SECONDS, self._on_wall_time)
            self._interrupt()

    def _interrupt(self) -> None:
        """Ask the program to yield; the second time its foreground children as well.

        A shell always waits for its children, so they are asked at once; background children ignore
        it.  The shell may drop input that it has read ahead, so the end of the request is sent
        again.
        """
        self._cell.interrupt(group=self._asked > 1 or bool(self._ending))
        if self._ending:
            self._input.add(self._ending)

    def _end(self, cause: Reason) -> None:
        if not self._has_ended():
            self._cause = cause
            self._cell.kill()
