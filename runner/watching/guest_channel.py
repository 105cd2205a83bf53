"""`GuestChannel`: the control channel of one guest: a program goes in, one Finished frame comes out.

Before that come calls of tools, and answers go in.  What comes in is hostile: its size is limited
before it is put together, it is decoded once, and a frame too many is a breach.
"""

import _socket
import contextlib
import os
import struct
import threading
from collections import deque
from collections.abc import Callable

import msgspec

from ...policies.policy import Limits
from .. import channel
from ..messages import Answer, Call, Finished, decoder, encode, encode_behind

_FINISHED_OR_CALL = Finished | Call
_NOW, WAIT = int(_socket.MSG_DONTWAIT), 0
MOST_UNSENT_BYTES = 64 * 1024 * 1024  # of answers that one guest does not read
_FRAME_OVERHEAD = 256 * 1024  # error, traceback and headers beside the value


def most_heard(limits: Limits) -> int:
    """Return of how many bytes a guest's longest word may be."""
    return limits.value_bytes + limits.artifact_bytes + _FRAME_OVERHEAD


def dropped(answer: Answer) -> Answer:
    """Return the error that replaces an answer for which there is no room."""
    size = len(answer.value or b"")
    why = f"its result of {size} bytes was dropped: the program did not read the answers before"
    return Answer(answer.number, None, "too_large", why)


class GuestChannel:
    """Sends the program, if it goes this way, as the guest takes it and hears the guest's last word.

    Answers may be sent by any thread; everything else is for the one that supervises.  The
    socket itself may block: each system call but that of `receive_some(WAIT)` says that it must not.
    """

    def __init__(
        self, sock: _socket.SocketType, program: bytes, limits: Limits, *, takes_calls: bool,
        owed: tuple[bytes, ...] = (), nonce: str = "",
    ) -> None:  # fmt: skip
        """`owed` is what the request before this one, of the same guest, left unsent; `nonce`
        is what the last word has to repeat, or it is one to another request."""
        self._sock = sock
        self._decode = decoder(_FINISHED_OR_CALL if takes_calls else Finished).decode
        self.on_sent: Callable[[int], object] = int  # called with the number of each answer
        self._sending = threading.Lock()
        self._packets = deque((*owed, *(channel.packets(program) if program else ())))
        self._ends: deque[tuple[int, int]] = deque()  # of answers: packets until there, its number
        self._sent_packets = 0
        self._sent_in_part = False
        self._limits = limits
        self._nonce = nonce
        self._receiver = channel.Receiver(sock, most_heard(limits))
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
        """Tell whether the last word was heard, and nothing more is to be waited for."""
        return self.finished is not None and (stays or self.finished.ends_well)

    def send_some(self) -> bool:
        """Send what there is room for; False once there is nothing left to send."""
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
        except OSError:  # the guest closed its end: it will not hear the rest
            self._packets.clear()
        return False

    def owed(self) -> tuple[bytes, ...]:
        """Return what is left of a frame that was sent in part, an answer that the program did not wait
        for: the guest would take what comes next for the rest of it."""
        if not self._sent_in_part:
            return ()
        rest = tuple(self._packets)  # none, if the guest has closed its end
        last = next((n for n, packet in enumerate(rest) if not channel.has_more(packet)), -1)
        return rest[: last + 1]

    def answer(self, answer: Answer) -> bool:
        """Send `answer`, behind what is still to be sent; tell whether there is more to send, as the
        guest takes it."""
        packet = encode_behind(channel.LAST, answer)
        with self._sending:
            if not self._packets and len(packet) <= channel.PACKET_BYTES:
                try:
                    self._sock.send(packet, _NOW)
                except OSError:
                    pass  # it waits, or the guest has closed its end: `_send_some` tells
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
        """End the wait of another thread.  Only for a guest that is being ended: what it sends from now
        on is lost, and what it has sent is still received."""
        if self.is_open and self.finished is None:
            with contextlib.suppress(OSError):  # it has closed its end
                self._sock.shutdown(_socket.SHUT_RD)

    def receive_some(self, flags: int = _NOW) -> Call | None:
        """Take one packet, and return the call that it completes; raises channel.ProtocolError if it is
        what no honest guest sends, and with `WAIT` TimeoutError if none comes in time."""
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
        """Take what is left: the guest's last word may have come together with its end."""
        while self.is_open and not self.finished and channel.has_news(self._sock.fileno()):
            self.receive_some()

    def _finish(self, finished: Finished) -> None:
        if finished.nonce != self._nonce:
            raise channel.ProtocolError("a last word that does not belong to this request")
        if len(finished.value or finished.representation or "") > self._limits.value_bytes:
            raise channel.ProtocolError(f"a value of more than {self._limits.value_bytes} bytes")
        self.finished = finished
