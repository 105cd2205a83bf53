"""`GuestChannel`: the control channel of one guest: a program goes in, one Finished frame comes out.

Before that come calls of tools, and answers go in.  What comes in is hostile: its size is limited
before it is put together, it is decoded once, and a frame too many is a breach.
"""

import _socket
import threading
from collections import deque
from collections.abc import Callable

import msgspec

from ...policies.policy import Limits
from .. import channel
from ..messages import Answer, Call, Finished, decode, encode

_FINISHED_OR_CALL = Finished | Call
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

    Answers may be sent by any thread; everything else is for the one that supervises.
    """

    def __init__(
        self, sock: _socket.SocketType, program: bytes, limits: Limits,
        on_call: Callable[[Call], None] | None, owed: tuple[bytes, ...] = (), nonce: str = "",
    ) -> None:  # fmt: skip
        """`owed` is what the request before this one, of the same guest, left unsent; `nonce`
        is what the last word has to repeat, or it is one to another request."""
        self._sock = sock
        self._sending = threading.Lock()
        self._packets = deque((*owed, *(channel.packets(program) if program else ())))
        self._ends: deque[tuple[int, int]] = deque()  # of answers: packets until there, its number
        self._sent_packets = 0
        self._sent_in_part = False
        self._limits = limits
        self._on_call = on_call
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
                channel.send_packet(self._sock, self._packets[0])
                self._sent_in_part = channel.has_more(self._packets.popleft())
                self._sent_packets += 1
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
        frame = encode(answer)
        with self._sending:
            if not self._packets and len(frame) < channel.PACKET_BYTES:
                try:
                    self._sock.send(channel.LAST + frame)
                except OSError:
                    pass  # it waits, or the guest has closed its end: `_send_some` tells
                else:
                    self._sent_packets += 1
                    self._sent_in_part = False
                    self._ends.append((self._sent_packets, answer.number))
                    return False
            packets = channel.packets(frame)
            unsent = len(self._packets) * channel.PACKET_BYTES
            if unsent and unsent + len(answer.value or b"") > MOST_UNSENT_BYTES:
                packets = channel.packets(encode(dropped(answer)))
            self._packets.extend(packets)
            self._ends.append((self._sent_packets + len(self._packets), answer.number))
            return self._send_some()

    def take_sent(self) -> list[int]:
        """Return the numbers of the answers that were sent since."""
        sent: list[int] = []
        if not self._ends:
            return sent
        with self._sending:
            while self._ends and self._ends[0][0] <= self._sent_packets:
                sent.append(self._ends.popleft()[1])
        return sent

    def receive_some(self) -> None:
        """Take one packet; raises channel.ProtocolError if it is what no honest guest sends."""
        try:
            frame = self._receiver.receive()
        except BlockingIOError:
            return
        except ConnectionResetError:
            frame = b""
        if frame:
            self._accept(frame)
        elif frame is not None:
            self.is_open = False

    def drain(self) -> None:
        """Take what is left: the guest's last word may have come together with its end."""
        while self.is_open and not self.finished and channel.has_news(self._sock.fileno()):
            self.receive_some()

    def _accept(self, frame: bytes) -> None:
        if self.finished is not None:
            raise channel.ProtocolError("a frame after the last one")
        try:
            finished = decode(frame, _FINISHED_OR_CALL if self._on_call else Finished)
        except msgspec.DecodeError as error:
            raise channel.ProtocolError(str(error)) from None
        if self._on_call and isinstance(finished, Call):
            self._on_call(finished)
            return
        if finished.nonce != self._nonce:
            raise channel.ProtocolError("a last word that does not belong to this request")
        if len(finished.value or finished.representation or "") > self._limits.value_bytes:
            raise channel.ProtocolError(f"a value of more than {self._limits.value_bytes} bytes")
        self.finished = finished
