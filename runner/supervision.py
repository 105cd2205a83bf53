"""Watching one execution: one poll loop over everything that can happen to it."""

import os
import select
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec

from ..policies.errors import InternalError, LauncherLost, LaunchError
from ..policies.policy import Limits
from . import channel
from .capture import Capture
from .cells import Cell
from .conversation import Conversation
from .listener import REST_SECONDS, Listener
from .messages import Ended, Entered, Finished, Forked, Listening, Mounted, Reaped, Status, decode
from .result import Reason, Violation

_SETUP_SECONDS = 20.0
_REAP_SECONDS = 20.0
_IN = select.POLLIN
Listen = Callable[[int], Listener]


class Observation(NamedTuple):
    """What was seen of an execution, all of it from outside the guest but `finished`."""

    cause: Reason | None  # why we ended it; None if it ended by itself
    wait_status: int | None  # of the guest's main process; None if it was killed with its init
    finished: Finished | None
    reaped: Reaped
    complaint: str | None  # how the guest broke the control protocol, or flooded the listener
    violations: tuple[Violation, ...] = ()


class Supervision:
    """Sends the request, reads what comes, enforces deadlines, and ends when the cell is gone."""

    def __init__(
        self, cell: Cell, request: bytes, stdin: bytes, limits: Limits,
        captures: tuple[Capture, ...], cancel: int, listen: Listen,
    ) -> None:  # fmt: skip
        self._cell = cell
        self._limits = limits
        self._captures = captures
        self._stdin = memoryview(stdin)
        self._talk = Conversation(cell.control, request, limits.value_bytes)
        self._listen = listen
        self._listener: Listener | None = None
        self._cause: Reason | None = None
        self._complaint: str | None = None
        self._wait_status: int | None = None
        self._reaped: Reaped | None = None
        self._entered = False
        self._deadline = time.monotonic() + _SETUP_SECONDS
        self._cpu_check = self._rest_ends = float("inf")
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._poll = select.poll()
        self._watch(cell.status.fileno(), _IN, self._on_status)
        if cancel >= 0:
            self._watch(cancel, _IN, lambda _: self._cancel(cancel))
        # The program may wait in the socket: nothing reads it before every layer is on.
        self._watch(cell.control.fileno(), _IN | select.POLLOUT, self._on_control)
        for capture in captures:
            self._watch(capture.pipe, _IN, self._reader(capture))

    def run(self) -> Observation:
        """Watch until everything in the cell has been reaped.

        Raises LaunchError if the cell could not be built or the launcher died.
        """
        while self._reaped is None:
            for descriptor, event in self._poll.poll(self._patience_milliseconds()):
                if handler := self._handlers.get(descriptor):
                    handler(event)
            self._check_deadlines()
        for capture in self._captures:
            capture.drain()
        self._hear_the_last()
        violations = self._listener.violations() if self._listener else ()
        return Observation(
            self._cause, self._wait_status, self._talk.finished, self._reaped, self._complaint,
            violations,
        )  # fmt: skip

    def _watch(self, descriptor: int, events: int, handler: Callable[[int], None]) -> None:
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, events)

    def _unwatch(self, descriptor: int) -> None:
        if self._handlers.pop(descriptor, None):
            self._poll.unregister(descriptor)

    # status: the word of launcher and init

    def _on_status(self, _: int) -> None:
        message, descriptors = self._receive_status()
        if isinstance(message, Forked):
            (self._cell.pidfd,) = descriptors
            if self._cause:  # ended before there was anything to kill
                self._cell.kill()
        elif isinstance(message, Mounted):
            (self._cell.workspace,) = descriptors
        elif isinstance(message, Listening):
            (self._cell.listener,) = descriptors
            self._listener = listener = self._listen(self._cell.listener)
            self._watch(self._cell.listener, _IN, partial(self._on_notification, listener))
        elif isinstance(message, Entered):
            self._start()
        elif isinstance(message, Ended):
            self._wait_status = message.wait_status
            self._expect_end()
        elif isinstance(message, Reaped):
            self._reaped = message
        elif self._entered:
            raise InternalError(f"init failed while the cell ran: {message.message}")
        elif not self._cause:  # if we ended it while it was being built, a step had to fail
            raise LaunchError(f"cannot build a cell: {message.message}", hint="cellwright doctor")

    def _receive_status(self) -> tuple[Status, list[int]]:
        """Take one frame of those whom we trust; should they lie all the same, say so and stop."""
        try:
            frame, descriptors = channel.receive_with_descriptors(self._cell.status)
            if not frame:
                raise LauncherLost(cell_began=self._entered)
            message: Status = decode(frame, Status)
        except (channel.ProtocolError, msgspec.DecodeError) as error:
            raise InternalError(f"a frame on a status channel makes no sense: {error}") from None
        expected = 1 if isinstance(message, Forked | Mounted | Listening) else 0
        if len(descriptors) == expected:
            return message, descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        if expected:
            raise InternalError(f"{type(message).__name__} came without its one descriptor")
        return message, []

    def _start(self) -> None:
        """Every layer is on and the program goes: the clock starts."""
        self._entered = True
        now = time.monotonic()
        self._deadline = now + self._limits.wall_seconds
        if self._cell.cgroup.cpu_seconds() is not None:
            self._cpu_check = now + self._limits.cpu_seconds / self._limits.cpus
        if self._cell.stdin >= 0:
            self._watch(self._cell.stdin, select.POLLOUT, self._on_stdin)

    # control and streams: the guest's word

    def _on_control(self, event: int) -> None:
        if event & select.POLLOUT and not self._talk.send_some():
            self._poll.modify(self._cell.control.fileno(), _IN)
        if event & (_IN | select.POLLHUP | select.POLLERR):
            self._receive_some()

    def _receive_some(self) -> None:
        try:
            self._talk.receive_some()
        except channel.ProtocolError as error:
            self._complain(f"broke the control protocol: {error}")
        if not self._talk.is_open:
            self._unwatch(self._cell.control.fileno())

    def _hear_the_last(self) -> None:
        try:
            self._talk.drain()
        except channel.ProtocolError as error:
            self._complaint = f"broke the control protocol: {error}"

    def _on_notification(self, listener: Listener, event: int) -> None:
        if not event & _IN:  # POLLHUP: nothing runs under the filter any more
            self._unwatch(self._cell.listener)
            return
        listener.answer()
        if listener.is_flooded:
            self._complain(f"attempted more than {self._limits.violations} refused calls")
        elif listener.needs_rest():
            self._poll.modify(self._cell.listener, 0)
            self._rest_ends = time.monotonic() + REST_SECONDS

    def _cancel(self, descriptor: int) -> None:
        self._unwatch(descriptor)  # it stays readable
        self._end("cancelled")

    def _complain(self, complaint: str) -> None:
        self._complaint = complaint
        self._unwatch(self._cell.control.fileno())
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
            self._unwatch(self._cell.stdin)
            self._cell.close_stdin()

    def _reader(self, capture: Capture) -> Callable[[int], None]:
        def read(_: int) -> None:
            if not capture.read():
                self._unwatch(capture.pipe)
            if sum(each.total_bytes for each in self._captures) > self._limits.output_total_bytes:
                self._end("output")

        return read

    # ends

    def _end(self, cause: Reason) -> None:
        """Kill the cell because of `cause`, unless it is ending already."""
        if self._cause is None and self._wait_status is None:
            self._cause = cause
            self._cell.kill()
            self._expect_end()

    def _expect_end(self) -> None:
        self._cpu_check = float("inf")
        self._deadline = time.monotonic() + _REAP_SECONDS

    def _patience_milliseconds(self) -> float:
        next_check = min(self._deadline, self._cpu_check, self._rest_ends)
        return max(0.0, next_check - time.monotonic()) * 1000 + 1

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        if now >= self._rest_ends:
            self._rest_ends = float("inf")
            self._poll.modify(self._cell.listener, _IN)
        if now >= self._cpu_check:
            self._check_cpu(now)
        if now >= self._deadline:
            if self._cause or self._wait_status is not None or not self._entered:
                raise LaunchError("the cell did not start or end in time")
            self._end("wall_time")

    def _check_cpu(self, now: float) -> None:
        """End the cell if its CPU time is used up, else look again when it can be at the earliest."""
        used = self._cell.cgroup.cpu_seconds() or 0.0
        left = self._limits.cpu_seconds - used
        if left <= 0:
            self._end("cpu_time")
        else:
            self._cpu_check = now + max(left / self._limits.cpus, 0.001)
