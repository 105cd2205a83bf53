"""`GuestChannel`: the control channel of one guest: a program goes in, one Finished frame comes out.

Before that come calls of tools, and answers go in. Incoming data is hostile: its size is limited before
it is assembled, it is decoded once, and an extra frame is a breach.
"""

import _socket
import contextlib
import math
import os
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from ...policies.policy import Limits
from .. import channel
from ..cells.cell import Cell
from ..messages import Answer, Call, Finished, decoder, encode, encode_behind

_FINISHED_OR_CALL = Finished | Call
_NOW, WAIT = int(_socket.MSG_DONTWAIT), 0
MOST_UNSENT_BYTES = 64 * 1024 * 1024  # unread answers of one guest
_CHUNK = 64 * 1024
_PIPE_BYTES = 1024 * 1024
_SMALL = 4096  # smaller pieces are joined, because each is an object
_FRAME_OVERHEAD = 256 * 1024  # error, traceback and headers in addition to the value


def longest_frame(limits: Limits) -> int:
    """Return of how many bytes a guest's longest word may be."""
    return limits.value_bytes + limits.artifact_bytes + _FRAME_OVERHEAD


def dropped(answer: Answer) -> Answer:
    """Return the error that replaces an answer for which there is no room."""
    size = len(answer.value or b"")
    why = f"its result of {size} bytes was dropped: the program did not read the answers before"
    return Answer(answer.number, None, "too_large", why)


class GuestChannel:
    """Sends the program, if it goes this way, as fast as the guest reads, and receives the guest's
    final frame.

    Answers may be sent by any thread; everything else is for the one that supervises. The socket is in
    blocking mode; every system call but that of `receive_some(WAIT)` sets MSG_DONTWAIT.
    """

    def __init__(
        self, sock: _socket.SocketType, program: bytes, limits: Limits, *, takes_calls: bool,
        owed: tuple[bytes, ...] = (), nonce: str = "",
    ) -> None:  # fmt: skip
        """`owed`: unsent bytes of the same guest's previous request. `nonce`: the final frame must
        repeat it; another nonce belongs to another request."""
        self._sock = sock
        self._decode = decoder(_FINISHED_OR_CALL if takes_calls else Finished).decode
        self.on_sent: Callable[[int], object] = int  # called with the number of each answer
        self._sending = threading.Lock()
        self._packets = deque((*owed, *(channel.packets(program) if program else ())))
        self._ends: deque[tuple[int, int]] = (
            deque()
        )  # per answer: packets until its end, its number
        self._sent_packets = 0
        self._sent_in_part = False
        self._limits = limits
        self._nonce = nonce
        self._receiver = channel.Receiver(sock, longest_frame(limits))
        self.finished: Finished | None = None
        self.is_open = True

    @property
    def has_unsent(self) -> bool:
        """Tell whether there is something left to send."""
        return bool(self._packets)

    def speaks_first(self) -> bool:
        """Tell whether the guest has said something before it was asked anything."""
        return channel.has_news(self._sock.fileno())

    def finished_for_good(self, *, stays: bool) -> bool:
        """Tell whether the final frame has come and nothing more is expected."""
        return self.finished is not None and (stays or self.finished.ends_well)

    def send_some(self) -> bool:
        """Send as much as there is room for; return False when nothing is left."""
        with self._sending:
            return self._send_some()

    def _send_some(self) -> bool:
        try:
            while self._packets:
                self._sock.send(self._packets[0], _NOW)
                self._sent_in_part = channel.has_more(self._packets.popleft())
                self._sent_packets += 1
                if self._ends and self._ends[0][0] == self._sent_packets:
                    self.on_sent(self._ends.popleft()[1])
        except BlockingIOError:
            return True
        except OSError:  # the guest closed its end and will not receive the rest
            self._packets.clear()
        return False

    def owed(self) -> tuple[bytes, ...]:
        """Return the rest of a partly sent frame, an answer for which the program did not wait. It
        must be sent first, because the guest would take the next bytes for the rest."""
        if not self._sent_in_part:
            return ()
        rest = tuple(self._packets)  # empty if the guest has closed its end
        last = next((n for n, packet in enumerate(rest) if not channel.has_more(packet)), -1)
        return rest[: last + 1]

    def answer(self, answer: Answer) -> bool:
        """Send `answer` after earlier unsent bytes; return whether there is more to send when the
        guest reads."""
        packet = encode_behind(channel.LAST, answer)
        with self._sending:
            if not self._packets and len(packet) <= channel.PACKET_BYTES:
                try:
                    self._sock.send(packet, _NOW)
                except OSError:
                    pass  # the guest waits, or has closed its end; `_send_some` finds out
                else:
                    self._sent_in_part = False
                    self.on_sent(answer.number)
                    return False
            packets = channel.packets(bytes(packet[len(channel.LAST) :]))
            unsent = len(self._packets) * channel.PACKET_BYTES
            if unsent and unsent + len(answer.value or b"") > MOST_UNSENT_BYTES:
                packets = channel.packets(encode(dropped(answer)))
            self._packets.extend(packets)
            self._ends.append((self._sent_packets + len(self._packets), answer.number))
            return self._send_some()

    def settle(self) -> None:
        """Wait for a thread that has sent an answer and has not called `on_sent` yet."""
        with self._sending:
            pass

    def wait_at_most(self, seconds: float) -> None:
        """Have `receive_some(WAIT)` wait for so long, in recv(2) itself: no poll(2) precedes it."""
        timeout = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))  # struct timeval
        self._sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_RCVTIMEO, timeout)
        os.set_blocking(self._sock.fileno(), True)

    def stop_waiting(self) -> None:
        """End the wait of another thread. Only for a guest that is being ended: messages that it
        sends from now on are lost, earlier ones are still received."""
        if self.is_open and self.finished is None:
            with contextlib.suppress(OSError):  # the guest has closed its end
                self._sock.shutdown(_socket.SHUT_RD)

    def receive_some(self, flags: int = _NOW) -> Call | None:
        """Receive one packet and return the call that it completes. Raises channel.ProtocolError for
        a breach of the protocol, and with `WAIT` TimeoutError if no packet comes in time."""
        try:
            frame = self._receiver.receive(flags)
        except BlockingIOError:
            if flags == WAIT:
                raise TimeoutError from None
            return None
        except ConnectionResetError:
            frame = b""
        if not frame:
            self.is_open = self.is_open and frame is None
            return None
        if self.finished is not None:
            raise channel.ProtocolError("a frame after the last one")
        try:
            heard: Call | Finished = self._decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise channel.ProtocolError(str(error)) from None
        if isinstance(heard, Call):
            return heard
        self._finish(heard)
        return None

    def drain(self) -> None:
        """Receive the rest: the guest's final frame may have come together with its end."""
        while self.is_open and not self.finished and channel.has_news(self._sock.fileno()):
            self.receive_some()

    def _finish(self, finished: Finished) -> None:
        if finished.nonce != self._nonce:
            raise channel.ProtocolError("a last word that does not belong to this request")
        if len(finished.value or finished.representation or "") > self._limits.value_bytes:
            raise channel.ProtocolError(f"a value of more than {self._limits.value_bytes} bytes")
        self.finished = finished


# The parts of a poll loop.
_LONGEST_WAIT_SECONDS = 86_400.0  # poll(2) takes milliseconds as an int, at most 24 days


class Capture:
    """One stream of a guest's output: reads a pipe until its end, keeps the head and the tail, at most
    `limit` bytes, and counts the middle."""

    def __init__(
        self, name: str, pipe: int, limit: int, on_output: Callable[[str, bytes], None] | None
    ) -> None:
        self.name = name
        self.pipe = pipe
        self.total_bytes = 0
        self._head = bytearray()
        self._head_limit = limit - limit // 2
        # Kept in the pieces that arrived: copying data that is dropped later took a quarter of the time
        # of a stream (measured).
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self._tail_limit = limit // 2
        self._on_output = on_output
        self._lock = (
            threading.Lock()
        )  # guards the kept output, which other threads read while it grows

    def read(self) -> bool:
        """Read the available data; return False at the end of the stream."""
        try:
            data = os.read(self.pipe, _CHUNK)
        except BlockingIOError:
            return True
        self.take(data)
        return bool(data)

    def take(self, data: bytes) -> None:
        """Keep `data`, which came another way than through the pipe."""
        self._keep(data)
        if data and self._on_output:
            self._on_output(self.name, data)

    def drain(self) -> None:
        """Read the content of the pipe, at most 1 MiB (pipe(7)), without waiting for processes that
        still write."""
        before = -1
        end = self.total_bytes + _PIPE_BYTES
        while before != self.total_bytes < end:
            before = self.total_bytes
            self.read()

    def _keep(self, data: bytes) -> None:
        with self._lock:
            self.total_bytes += len(data)
            if (room := self._head_limit - len(self._head)) > 0:
                self._head += data[:room]
                data = data[room:]
            if data:
                self._keep_last(data)

    def _keep_last(self, data: bytes) -> None:
        tail = self._tail
        self._tail_bytes += len(data)
        if len(data) < _SMALL and tail and len(tail[-1]) < _SMALL:
            tail[-1] += data
        else:
            tail.append(data)
        while tail and self._tail_bytes - len(tail[0]) >= self._tail_limit:
            self._tail_bytes -= len(tail.popleft())

    @property
    def dropped_bytes(self) -> int:
        return self.total_bytes - len(self._head) - min(self._tail_bytes, self._tail_limit)

    def text(self) -> str:
        """Return the kept text, with undecodable bytes replaced and a notice where text is missing."""
        if not self.total_bytes:
            return ""
        with self._lock:
            dropped, head, tail = self.dropped_bytes, bytes(self._head), b"".join(self._tail)
        if not dropped:
            return (head + tail).decode("utf-8", "replace")
        kept = min(len(tail), self._tail_limit)
        notice = f"\n[... {dropped} bytes dropped ...]\n"
        return (
            head.decode("utf-8", "replace")
            + notice
            + tail[len(tail) - kept :].decode("utf-8", "replace")
        )


class Watcher(Protocol):
    """A poll loop over descriptors."""

    def watch(self, descriptor: int, events: int, handler: Callable[[int], None]) -> None:
        """Call `handler` with the events that poll(2) reports for `descriptor`."""

    def unwatch(self, descriptor: int) -> None:
        """Stop watching `descriptor`; harmless if it is not watched."""

    def complain(self, complaint: str) -> None:
        """End the cell because its guest broke the protocol."""


class Timers:
    """Actions and their moments, by time.monotonic; an action has one moment at a time.

    Events from before a moment are handled before its action, because poll(2) has been called since.
    Otherwise a process that was stopped, or whose callback took long, would end a program for a timeout
    although it had ended in time.
    """

    def __init__(self) -> None:
        self._due: dict[Callable[[], None], float] = {}
        self._asked = 0.0  # when poll(2) was asked for events
        self._first = 0.0  # the earliest deadline at that moment

    def at(self, moment: float, do: Callable[[], None]) -> None:
        """Call `do` at `moment` instead of at its earlier moment."""
        self._due[do] = moment

    def patience_milliseconds(self) -> float:
        """Return the time until the next action, as poll(2), which is asked next, takes it."""
        self._asked = time.monotonic()
        self._first = first = min(self._due.values(), default=math.inf)
        if first <= self._asked:
            return 0.0
        return min(first - self._asked, _LONGEST_WAIT_SECONDS) * 1000 + 1

    def ring(self) -> None:
        """Call every action that was due before poll(2) was asked, the earliest first."""
        if self._first > self._asked:
            return
        for do in sorted(
            (do for do, at in self._due.items() if at <= self._asked), key=self._due.__getitem__
        ):
            del self._due[do]
            do()


class StdinWriter:
    """Writes the guest's standard input, and then closes it unless it `stays` open for more."""

    def __init__(self, cell: Cell, watcher: Watcher, data: bytes, *, stays: bool) -> None:
        self._cell = cell
        self._watcher = watcher
        self._left = memoryview(data)
        self._stays = stays

    def begin(self) -> None:
        if self._left:
            self._watcher.watch(self._cell.stdin, select.POLLOUT, self._write)
        else:
            self._cell.close_stdin()

    def add(self, data: bytes) -> None:
        """Queue `data` behind the unwritten rest."""
        self._left = memoryview(bytes(self._left) + data)
        self._watcher.watch(self._cell.stdin, select.POLLOUT, self._write)

    def _write(self, event: int) -> None:
        try:
            sent = os.write(self._cell.stdin, self._left[: channel.PACKET_BYTES])
            self._left = self._left[sent:]
        except BlockingIOError:
            return
        except BrokenPipeError:  # the guest closed its end
            self._left = self._left[:0]
        if not self._left or event & select.POLLERR:
            self._watcher.unwatch(self._cell.stdin)
            if not self._stays:
                self._cell.close_stdin()
