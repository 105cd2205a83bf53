"""Frames over SOCK_SEQPACKET: boundaries kept by the kernel, descriptors beside the bytes.

A frame longer than one packet travels as several; the first byte of each packet says whether more
follow.  The receiver limits the whole before it decodes anything.
"""

import _socket  # `socket` takes two milliseconds to import, and its socketpair makes two objects more
import array
import os
import select
from typing import Protocol

PACKET_BYTES = 64 * 1024  # below the kernel's default send buffer (net.core.wmem_default, 208 KiB)
_MAX_DESCRIPTORS = 32
_MORE = b"\x01"
LAST = b"\x00"
_CUT = int(_socket.MSG_TRUNC | _socket.MSG_CTRUNC)
_FAMILY, _TYPE = int(_socket.AF_UNIX), int(_socket.SOCK_SEQPACKET)


class Channel(Protocol):
    """What of a socket a frame without descriptors needs."""

    def recv(self, size: int, flags: int = 0, /) -> bytes: ...

    def send(self, packet: bytes | bytearray, /) -> int: ...


class ProtocolError(Exception):
    """The peer sent what no honest peer sends."""


def pair() -> tuple[_socket.SocketType, _socket.SocketType]:
    return _socket.socketpair(_FAMILY, _TYPE)


def has_news(descriptor: int, seconds: float = 0.0) -> bool:
    """Wait until there is something to read, or the end; False if there is not in time.

    By poll(2): select(2) knows no descriptor above 1023, and who embeds us may have more.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def packets(frame: bytes) -> list[bytes]:
    """Cut a frame into packets."""
    size = PACKET_BYTES - 1
    if len(frame) <= size:
        return [LAST + frame]
    pieces = [frame[start : start + size] for start in range(0, len(frame), size)]
    return [_MORE + piece for piece in pieces[:-1]] + [LAST + pieces[-1]]


def has_more(packet: bytes) -> bool:
    """Tell whether the frame goes on after this packet."""
    return packet[:1] == _MORE


def send(sock: _socket.SocketType, frame: bytes, descriptors: tuple[int, ...] = ()) -> None:
    """Send a frame whole, its descriptors with the first packet."""
    for packet in packets(frame):
        send_packet(sock, packet, descriptors)
        descriptors = ()


def send_packet(sock: _socket.SocketType, packet: bytes, descriptors: tuple[int, ...] = ()) -> None:
    if not descriptors:
        sock.send(packet)
        return
    rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", descriptors))
    sock.sendmsg([packet], [rights])


class Receiver:
    """Puts packets together again, up to `limit` bytes a frame."""

    def __init__(self, sock: Channel, limit: int) -> None:
        self._sock = sock
        self._limit = limit
        self._most_alone = min(PACKET_BYTES, limit + 1)
        self._frame = bytearray()

    @property
    def held_bytes(self) -> int:
        """How much of an unfinished frame is here."""
        return len(self._frame)

    def receive(self, flags: int = 0) -> bytes | None:
        """Return the next frame, b"" at the end of the stream, None if a packet left it unfinished.

        `flags` are those of recv(2).  Descriptors are not accepted: the kernel discards those of a
        plain recv(2).
        """
        packet = self._sock.recv(PACKET_BYTES + 1, flags)
        if not packet:
            return b""
        if packet[:1] == LAST and not self._frame and 1 < len(packet) <= self._most_alone:
            return packet[1:]
        return self._join(packet)

    def _join(self, packet: bytes) -> bytes | None:
        more, piece = packet[:1], packet[1:]
        if len(packet) > PACKET_BYTES or more not in (_MORE, LAST) or (more == _MORE and not piece):
            raise ProtocolError("a packet that is too long, or empty, or has no mark")
        if len(self._frame) + len(piece) > self._limit:
            raise ProtocolError(f"a frame of more than {self._limit} bytes")
        self._frame += piece
        if more == _MORE:
            return None
        frame, self._frame = bytes(self._frame), bytearray()
        if not frame:
            raise ProtocolError("an empty frame")
        return frame

    def receive_whole(self) -> bytes:
        """Block until a frame is complete; b"" at the end of the stream."""
        while (frame := self.receive()) is None:
            pass
        return frame


def receive_with_descriptors(sock: _socket.SocketType) -> tuple[bytes, list[int]]:
    """Receive one single-packet frame and the descriptors beside it, close-on-exec."""
    space = _socket.CMSG_SPACE(_MAX_DESCRIPTORS * 4)
    packet, ancillary, flags, _ = sock.recvmsg(PACKET_BYTES + 1, space, _socket.MSG_CMSG_CLOEXEC)
    descriptors = _descriptors(ancillary)
    cut = flags & _CUT
    if (packet or descriptors) and (packet[:1] != LAST or len(packet) < 2 or cut):
        for descriptor in descriptors:
            os.close(descriptor)
        raise ProtocolError("a status frame must be one packet, and not empty")
    return packet[1:], descriptors


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)
