"""Frames over SOCK_SEQPACKET: boundaries kept by the kernel, descriptors beside the bytes.

A frame longer than one packet travels as several; the first byte of each packet says whether more
follow.  The receiver limits the whole before it decodes anything.
"""

import _socket  # `socket` takes 2 ms to import, and its socketpair makes two more objects
import os
import re
import select
import sys
from typing import Protocol

import msgspec

PACKET_BYTES = 64 * 1024  # below the kernel's default send buffer (net.core.wmem_default, 208 KiB)
_MAX_DESCRIPTORS = 32
_MORE = b"\x01"
LAST = b"\x00"
_CUT = int(_socket.MSG_TRUNC | _socket.MSG_CTRUNC)
_FAMILY, _TYPE = int(_socket.AF_UNIX), int(_socket.SOCK_SEQPACKET)


class Channel(Protocol):
    """The methods of a socket that a frame without descriptors needs."""

    def recv(self, size: int, flags: int = 0, /) -> bytes: ...

    def send(self, packet: bytes | bytearray, /) -> int: ...


class ProtocolError(Exception):
    """The peer sent something that only a hostile or broken peer sends."""


def pair() -> tuple[_socket.SocketType, _socket.SocketType]:
    return _socket.socketpair(_FAMILY, _TYPE)


def name_for_good(theirs: _socket.SocketType) -> None:
    """Give a socket that a guest will have a name, chosen by the kernel (unix(7), autobind).

    It is of the host's network namespace, whatever the guest is in; a socket without a name could take
    any abstract one there, which a server of the host then cannot have.
    """
    theirs.bind("")


def has_news(descriptor: int, seconds: float = 0.0) -> bool:
    """Wait until there is something to read, or the end; False if there is not in time.

    By poll(2), because select(2) takes no descriptor above 1023, and the embedding process may have
    more.
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
    if len(frame) < PACKET_BYTES and not descriptors:  # as most
        sock.send(LAST + frame)
        return
    for packet in packets(frame):
        send_packet(sock, packet, descriptors)
        descriptors = ()


def send_packet(sock: _socket.SocketType, packet: bytes, descriptors: tuple[int, ...] = ()) -> None:
    if not descriptors:
        sock.send(packet)
        return
    numbers = b"".join([each.to_bytes(4, sys.byteorder) for each in descriptors])
    sock.sendmsg([packet], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers)])


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
    """Receive a frame of one packet with its descriptors, close-on-exec."""
    space = _socket.CMSG_SPACE(_MAX_DESCRIPTORS * 4)
    packet, ancillary, flags, _ = sock.recvmsg(PACKET_BYTES + 1, space, _socket.MSG_CMSG_CLOEXEC)
    descriptors = descriptors_of(ancillary)
    cut = flags & _CUT
    if (packet or descriptors) and (packet[:1] != LAST or len(packet) < 2 or cut):
        for descriptor in descriptors:
            os.close(descriptor)
        raise ProtocolError("a status frame must be one packet, and not empty")
    return packet[1:], descriptors


def descriptors_of(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors that recvmsg(2) received."""
    found: list[int] = []
    for level, kind, data in ancillary:
        if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
            found += memoryview(data[: len(data) & ~3]).cast("i")
    return found


# Limits on JSON before it is decoded: its depth, and the size of the decoded value. Decoders
# recurse: on the small stack of an embedding thread, or without a recursion limit, they crash
# (msgspec#1033). And `[[],[],...` decodes to twenty times its size.
_MAX_DEPTH = 64
HARMLESS_BYTES = _MAX_DEPTH  # so few bytes can neither nest too deeply nor decode to much memory
# An unterminated string matches too. Otherwise each quote in it would be tried as the start of a
# string, and 32 KiB would take four seconds.
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_NO_BRACKETS = re.compile(rb"[^][{}]++")

# Bytes of one decoded object with its place in its container (measured, 3.11).
_ARRAY_BYTES, _OBJECT_BYTES, _MEMBER_BYTES = 64, 232, 40
_MOST_TIMES = 16  # so many times the size of the JSON
_MOST_BESIDES = 8 * 1024 * 1024
_NEVER_LARGE = _MOST_BESIDES // _OBJECT_BYTES  # no byte of JSON decodes to more than an object


def decoded_bytes(data: bytes | bytearray) -> int:
    """Return an upper estimate of the memory that the parts of JSON take once decoded, without
    texts."""
    arrays, objects = data.count(b"["), data.count(b"{")
    return arrays * _ARRAY_BYTES + objects * _OBJECT_BYTES + data.count(b",") * _MEMBER_BYTES


def refuse_large_json(data: bytes | bytearray) -> None:
    """Raise msgspec.DecodeError if `data`, which need not be JSON, decodes to many times its size."""
    if len(data) > _NEVER_LARGE:
        refuse_expansion(len(data), decoded_bytes(data))


def refuse_expansion(length: int, size: int) -> None:
    """Raise msgspec.DecodeError if JSON of `length` bytes must not decode to `size` bytes.

    Both are sums over its parts, so JSON that arrives in parts needs no copy.
    """
    if size > _MOST_BESIDES + _MOST_TIMES * length:
        raise msgspec.DecodeError(f"{length} bytes that decode to some {size}")


def refuse_deep_json(data: bytes) -> None:
    """Raise msgspec.DecodeError if `data`, which need not be JSON, nests too deeply to be decoded."""
    if data.count(b"[") + data.count(b"{") <= _MAX_DEPTH:
        return
    depth = deepest = 0
    for bracket in _NO_BRACKETS.sub(b"", _STRINGS.sub(b"", data)):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    if deepest > _MAX_DEPTH:
        raise msgspec.DecodeError(f"nested {deepest} deep")
