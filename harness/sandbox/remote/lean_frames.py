"""The daemon's protocol (frames.py) for commands that take less time than msgspec takes to import.

It imports only modules in C and `os`.  It encodes the frames of a quick command, and decodes each frame
to lists, dicts and scalars; `ValueError` says that a frame has something else.
"""

import _socket
import os
import select
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VERSION = 10
CONNECT_SECONDS = 60  # time for the greeting, because systemd may be starting the daemon
REPLY_BYTES = 2 << 30
# The fields of `ExecuteArguments` in their order, with their defaults; later ones may be left out.
EXECUTE_ARGUMENTS: "dict[str, Any]" = {
    "stdin": None, "inputs": None, "files": [], "env": {}, "timeout": None, "cpu_seconds": None,
    "trace_id": None, "collect": [], "plain": False, "arguments": [], "filename": None,
}  # fmt: skip
_PACKET = 64 * 1024  # as in runner/channel.py
_UCRED = struct.Struct("3i")  # struct ucred: pid, uid, gid


def connected(path: str) -> _socket.SocketType | None:
    """Return a connection to the daemon of this user, or of root; None for another user's, which would
    see programs and variables.  Raises OSError."""
    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    patience = struct.pack(
        "ll", CONNECT_SECONDS, 0
    )  # for a full queue, and a slow reader (unix(7))
    try:
        sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDTIMEO, patience)
        sock.connect(path)
        credentials = sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, _UCRED.size)
    except OSError:
        sock.close()
        raise
    if _UCRED.unpack(credentials)[1] in (0, os.geteuid()):
        return sock
    sock.close()
    return None


def greet(sock: _socket.SocketType, policy: str = "") -> bytes:
    """Send the first frame; return the answer, b"" if none comes."""
    send(sock, pack(["Hello", VERSION, policy]))
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return receive(sock) if poll.poll(CONNECT_SECONDS * 1000) else b""


def send(sock: _socket.SocketType, frame: bytes) -> None:
    """Send a frame whole, in packets whose first byte tells whether more follow."""
    for start in range(0, len(frame), _PACKET - 1):
        piece = frame[start : start + _PACKET - 1]
        sock.send((b"\x01" if start + len(piece) < len(frame) else b"\x00") + piece)


def receive(sock: _socket.SocketType) -> bytes:
    """Return the next frame, b"" if the daemon has closed the connection; raises ValueError for a frame
    that is longer than any reply."""
    pieces, left = [], REPLY_BYTES
    while packet := _packet(sock):
        pieces.append(packet[1:])
        if (left := left + 1 - len(packet)) < 0:
            raise ValueError("invalid frame: too long")
        if packet[0] == 0:
            return b"".join(pieces)
    return b""


def _packet(sock: _socket.SocketType) -> bytes:
    for _ in range(2):  # the first may be ECONNRESET for data the daemon did not read; more follows
        try:
            return sock.recv(_PACKET + 1)
        except ConnectionError:
            continue
    return b""


def is_output(frame: bytes) -> bool:
    """Tell whether a frame has a part of the output of a program, and more frames follow."""
    return frame.startswith(_OUTPUT)


def pack(value: object) -> bytes:
    """Return a value as msgpack."""
    if value is None or isinstance(value, bool):
        return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
    if isinstance(value, int):
        return b"\xd3" + value.to_bytes(8, "big", signed=True)
    if isinstance(value, float):
        return struct.pack(">Bd", 0xCB, value)
    if isinstance(value, str):
        text = value.encode()
        return struct.pack(">BI", 0xDB, len(text)) + text
    if isinstance(value, bytes):
        return struct.pack(">BI", 0xC6, len(value)) + value
    if isinstance(value, dict):
        parts = b"".join(pack(each) for pair in value.items() for each in pair)
        return struct.pack(">BI", 0xDF, len(value)) + parts
    assert isinstance(value, list | tuple)  # noqa: S101 - there are no others
    return struct.pack(">BI", 0xDD, len(value)) + b"".join(map(pack, value))


def unpack(frame: bytes) -> "Any":
    """Return the value of a frame; raises ValueError for an invalid one, or an extension type."""
    try:
        value, end = _unpacked(frame, 0)
    except (LookupError, TypeError, struct.error, RecursionError) as error:
        raise ValueError(f"invalid frame: {error}") from None
    if end != len(frame):
        raise ValueError("invalid frame: too long")
    return value


_OUTPUT = b"\x93\xabOutputChunk"
_SCALARS = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS = {
    first: struct.Struct(f">{code}")
    for first, code in zip(range(0xCA, 0xD4), "fdBHIQbhiq", strict=True)
}
_LENGTHS: "dict[int, tuple[type[Any], struct.Struct]]" = {
    first: (kind, struct.Struct(f">{code}"))
    for firsts, codes, kind in (
        ((0xC4, 0xC5, 0xC6), "BHI", bytes), ((0xD9, 0xDA, 0xDB), "BHI", str),
        ((0xDC, 0xDD), "HI", list), ((0xDE, 0xDF), "HI", dict),
    )
    for first, code in zip(firsts, codes, strict=True)
}  # fmt: skip
# The length is in the first byte.
_SHORT: "tuple[tuple[int, type[Any], int], ...]" = (
    (0xA0, str, 31), (0x90, list, 15), (0x80, dict, 15),
)  # fmt: skip


def _unpacked(frame: bytes, at: int) -> "tuple[Any, int]":
    """Return the value that begins at `at`, and where the next one begins."""
    first = frame[at]
    at += 1
    if first < 0x80 or first >= 0xE0:
        return first if first < 0x80 else first - 256, at
    if first < 0xC0:
        kind, length = next((kind, first & mask) for low, kind, mask in _SHORT if first >= low)
    elif first in _SCALARS:
        return _SCALARS[first], at
    elif number := _NUMBERS.get(first):
        return number.unpack_from(frame, at)[0], at + number.size
    else:
        kind, size = _LENGTHS[first]
        length, at = size.unpack_from(frame, at)[0], at + size.size
    if kind is bytes or kind is str:
        data = frame[at : at + length]
        if len(data) < length:
            raise ValueError("invalid frame: cut")
        return data if kind is bytes else data.decode(), at + length
    items = []
    for _ in range(length if kind is list else 2 * length):
        item, at = _unpacked(frame, at)
        items.append(item)
    return items if kind is list else dict(zip(items[::2], items[1::2], strict=True)), at
