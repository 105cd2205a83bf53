"""Watching one execution: one poll loop over everything that can happen to it."""

import os
import select
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from ..policies.policy import Limits
from . import channel
from .calls import Calls, OnCall
from .capture import Capture
from .conversation import Conversation, most_heard
from .custody import Custody
from .doors import Doors
from .listener import REST_SECONDS, Listener
from .messages import Answer, Call, Finished
from .result import Reason, Violation

_NEVER = float("inf")
_LONGEST_WAIT_SECONDS = 86_400.0  # poll(2) counts milliseconds in an int, which ends after 24 days
# A program of a session is asked to yield, and has this long to do so.  A signal that comes between
# CPython's last look and the call in which it sleeps is not noticed there (one in 1,500, measured), so
# it is asked again.
_GRACE_SECONDS = 1.0
_TIMES_ASKED = 2
_IN = select.POLLIN


class Work(NamedTuple):
    """What a cell is to do, and within which bounds."""

    program: bytes  # for the control channel, in the guest's words (wording.py); may be empty
    stdin: bytes
    limits: Limits
    captures: tuple[Capture, ...]
    cancel: int  # a descriptor that ends it once it is readable, or negative
    stays: bool = False  # a request of a session: the cell is to outlive it
    on_call: OnCall | None = None  # answers its calls of tools, in a thread of its own
    ending: bytes = b""  # a shell's, which reads requests from stdin: how each ends there


class Observation(NamedTuple):
    """What was seen of an execution, all of it from outside the guest but `finished`."""

    cause: Reason | None  # why we ended it; None if it ended by itself
    wait_status: int | None  # of the guest's main process; None if nobody waited for that
    finished: Finished | None
    complaint: str | None  # how the guest broke the control protocol, or flooded the listener
    violations: tuple[Violation, ...] = ()
    sent_at: float = 0.0  # when the program was handed over, by time.monotonic
    stays: bool = False  # the cell lives on, for the next request


class Supervision:
    """Sends the program, reads what comes, enforces deadlines, and ends with the program."""

    def __init__(self, custody: Custody, work: Work) -> None:
        self._custody = custody
        self._cell = cell = custody.cell
        self._limits = work.limits
        self._captures = work.captures
        self._stdin = memoryview(work.stdin)
        self._stays = work.stays
        self._interrupted: Reason | None = None  # why the program was asked to yield
        self._asked = 0
        self._ending = work.ending
        on_call = self._begin_call if work.on_call else None
        self._talk = Conversation(cell.control, work.program, work.limits, on_call, cell.owed)
        self._calls = Calls(work.on_call, self._tell) if work.on_call else None
        self._doors = self._let_doors_open(self._calls) if self._calls else None
        self._cause: Reason | None = None
        self._complaint: str | None = None
        self._deadline = self._cpu_check = self._rest_ends = _NEVER
        self._sent_at = 0.0
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._poll = select.poll()
        self.watch(cell.control.fileno(), _IN, self._on_control)
        self.watch(cell.status.fileno(), _IN, self._on_status)
        for capture in work.captures:
            self.watch(capture.pipe, _IN, self._reader(capture))
        if self._calls:
            self.watch(self._calls.ready, _IN, partial(self._on_waiting_answers, self._calls.ready))
        if listener := custody.listener:
            self.watch(cell.listener, _IN, partial(self._on_notification, listener))
        if work.cancel >= 0:
            self.watch(work.cancel, _IN, lambda _: self._cancel(work.cancel))

    def run(self) -> Observation:
        """Have the program run and watch until it has ended.

        It has ended when the guest says that it ended well, when its process has ended, or when we
        have killed it; what still runs in the cell then is for whoever disposes of it.  In a session
        it has ended when the guest says so, and one that takes too long is first asked to yield.
        Raises LauncherLost.
        """
        try:
            return self._run()
        finally:
            if self._doors and self._custody.listener:
                self._custody.listener.on_door = None
                self._doors.close()
            if self._calls:
                self._calls.close()

    def _run(self) -> Observation:
        self._start()
        while not self._has_ended():
            for descriptor, event in self._poll.poll(self._patience_milliseconds()):
                if handler := self._handlers.get(descriptor):
                    handler(event)
            self._check_deadlines()
        if self._calls:
            self._calls.close()  # no answer is sent from here on: what is owed is known
        for capture in self._captures:
            capture.drain()
        self._hear_the_last()
        self._cell.owed = self._talk.owed()
        listener, custody = self._custody.listener, self._custody
        violations = listener.take_violations() if listener else ()
        finished = self._talk.finished
        stays = self._stays and not self._cause and custody.wait_status is None and bool(finished)
        return Observation(
            self._cause or self._interrupted, custody.wait_status, finished, self._complaint,
            violations, self._sent_at, stays,
        )  # fmt: skip

    def _start(self) -> None:
        """Every layer is on and the program goes: the clock starts."""
        self._custody.begin()
        now = time.monotonic()
        self._deadline = now + self._limits.wall_seconds
        self._cpu_check = now + self._limits.cpu_seconds / self._limits.cpus
        if self._stays and self._talk.speaks_first():
            self.complain("spoke before it was asked")
        elif self._talk.send_some():  # a long program goes in as the guest takes it
            self._poll.modify(self._cell.control.fileno(), _IN | select.POLLOUT)
        self._sent_at = time.monotonic()
        if self._stdin:
            self.watch(self._cell.stdin, select.POLLOUT, self._on_stdin)
        else:
            self._cell.close_stdin()

    def _has_ended(self) -> bool:
        if self._cause or self._talk.finished_for_good(stays=self._stays):
            return True
        return self._custody.wait_status is not None or self._custody.reaped is not None

    def watch(self, descriptor: int, events: int, handler: Callable[[int], None]) -> None:
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, events)

    def unwatch(self, descriptor: int) -> None:
        if self._handlers.pop(descriptor, None):
            self._poll.unregister(descriptor)

    def _on_status(self, _: int) -> None:
        self._custody.receive()

    # control and streams: the guest's word

    def _on_control(self, event: int) -> None:
        if event & select.POLLOUT and not self._send_some():
            self._poll.modify(self._cell.control.fileno(), _IN)
        if event & (_IN | select.POLLHUP | select.POLLERR):
            self._receive_some()

    def _begin_call(self, call: Call) -> None:
        if self._calls:
            self._calls.sent(self._talk.take_sent())
            self._calls.begin(call)

    def _let_doors_open(self, calls: Calls) -> Doors | None:
        """Hear programs that cannot speak on the control channel, where the kernel tells of opens."""
        listener = self._custody.listener
        if listener is None:
            return None
        doors = Doors(self._cell.listener, most_heard(self._limits), calls, self)
        listener.on_door = doors.knock
        return doors

    def _tell(self, answer: Answer) -> bool:
        """Send an answer, in the thread that has it; one for a door waits for ours."""
        if self._doors and answer.number < 0:
            return self._doors.keep(answer)
        return self._talk.answer(answer)

    def _on_waiting_answers(self, descriptor: int, _: int) -> None:
        os.eventfd_read(descriptor)
        if self._doors:
            self._doors.send_kept()
        if self._send_some() and self._talk.is_open:
            self._poll.modify(self._cell.control.fileno(), _IN | select.POLLOUT)

    def _send_some(self) -> bool:
        there_is_more = self._talk.send_some()
        if self._calls:
            self._calls.sent(self._talk.take_sent())
        return there_is_more

    def _receive_some(self) -> None:
        try:
            self._talk.receive_some()
        except channel.ProtocolError as error:
            self.complain(f"broke the control protocol: {error}")
        if not self._talk.is_open:
            self.unwatch(self._cell.control.fileno())

    def _hear_the_last(self) -> None:
        """Hear a last word that came together with the end; one that makes no sense is no word, and
        after a breach there is none: it may be of the request before."""
        if self._complaint:
            return
        try:
            self._talk.drain()
        except channel.ProtocolError as error:
            self.complain(f"broke the control protocol: {error}")

    def _on_notification(self, listener: Listener, event: int) -> None:
        if not event & _IN:  # POLLHUP: nothing runs under the filter any more
            self.unwatch(self._cell.listener)
            return
        listener.answer()
        if listener.is_flooded:
            self.complain(f"attempted more than {self._limits.violations} refused calls")
        elif listener.needs_rest():
            self._poll.modify(self._cell.listener, 0)
            self._rest_ends = time.monotonic() + REST_SECONDS

    def _cancel(self, descriptor: int) -> None:
        self.unwatch(descriptor)  # it stays readable
        self._end_or_interrupt("cancelled")

    def complain(self, complaint: str) -> None:
        self._complaint = self._complaint or complaint
        self._end("violation")

    def _on_stdin(self, event: int) -> None:
        try:
            sent = os.write(self._cell.stdin, self._stdin[: channel.PACKET_BYTES])
            self._stdin = self._stdin[sent:]
        except BlockingIOError:
            return
        except BrokenPipeError:  # the guest does not want it
            self._stdin = self._stdin[:0]
        if not self._stdin or event & select.POLLERR:
            self.unwatch(self._cell.stdin)
            if not self._ending:
                self._cell.close_stdin()

    def _reader(self, capture: Capture) -> Callable[[int], None]:
        def read(_: int) -> None:
            if not capture.read():
                self.unwatch(capture.pipe)
            if sum(each.total_bytes for each in self._captures) > self._limits.output_total_bytes:
                self._end("output")

        return read

    # ends

    def _end_or_interrupt(self, cause: Reason) -> None:
        """End the cell, but in a session first ask the program to yield, so that its state is kept."""
        if not self._stays or self._asked == _TIMES_ASKED:
            self._end(self._interrupted or cause)
        elif not self._has_ended():
            self._interrupted = self._interrupted or cause
            self._asked += 1
            self._deadline = time.monotonic() + _GRACE_SECONDS
            self._interrupt()

    def _interrupt(self) -> None:
        """Ask the program to yield; if it did not the first time, its foreground children as well.

        A shell waits for those whatever it is told, so they are asked at once; those that run in the
        background ignore it.  It may drop what it has read ahead, so it is told again how to end.
        """
        self._cell.interrupt(group=self._asked > 1 or bool(self._ending))
        if self._ending:
            self._stdin = memoryview(bytes(self._stdin) + self._ending)
            self.watch(self._cell.stdin, select.POLLOUT, self._on_stdin)

    def _end(self, cause: Reason) -> None:
        """Kill the cell because of `cause`, unless the program has ended already."""
        if not self._has_ended():
            self._cause = cause
            self._cell.kill()

    def _patience_milliseconds(self) -> float:
        next_check = min(self._deadline, self._cpu_check, self._rest_ends)
        patience = min(next_check - time.monotonic(), _LONGEST_WAIT_SECONDS)
        return max(0.0, patience) * 1000 + 1

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        if now >= self._rest_ends:
            self._rest_ends = _NEVER
            self._poll.modify(self._cell.listener, _IN)
        if now >= self._cpu_check:
            self._check_cpu(now)
        if now >= self._deadline:
            self._end_or_interrupt("wall_time")

    def _check_cpu(self, now: float) -> None:
        """End the cell if its CPU time is used up, else look again when it can be at the earliest."""
        used = self._cell.cgroup.cpu_seconds()
        if used is None:
            self._cpu_check = _NEVER
            return
        left = self._limits.cpu_seconds - used
        if left <= 0:
            self._end("cpu_time")
        else:
            self._cpu_check = now + max(left / self._limits.cpus, 0.001)
