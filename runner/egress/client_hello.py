"""The first message of TLS, in which a client names a server (RFC 8446, RFC 6066).  Pure.

The parser reads the client's bytes as far as the end of its ClientHello and nothing after.  It refuses
a message that servers might read in another way: a second name, an extension that occurs twice, or
lengths that do not agree.
"""

from typing import NamedTuple

MOST_BYTES = 64 * 1024
_HANDSHAKE, _CLIENT_HELLO = 22, 1
_RECORD_HEADER, _MESSAGE_HEADER = 5, 4
_MOST_RECORD_BYTES = 1 << 14
_MOST_RECORDS = 128  # clients send one record, or a few
_MOST_MESSAGE_BYTES = 48 * 1024
_SERVER_NAME = 0
# Extension numbers: encrypted_client_hello (0xFE0D), its drafts, and the older encrypted_server_name.
_ENCRYPTED_HELLO = frozenset((0xFFCE, 0xFF02, *range(0xFE08, 0xFE0E)))
_HOST_NAME = 0


class HelloError(ValueError):
    """The bytes are no ClientHello, or one that can be read in two ways."""


class ClientHello(NamedTuple):
    """The server that a ClientHello names."""

    server_name: str | None
    is_encrypted: bool  # a second, encrypted name exists, so the plain one may name another host


def begins_tls(data: bytes) -> bool:
    """Tell whether a stream that begins with `data` is TLS, or SSL 2.0, whose hello leads to it."""
    return data[:1] == bytes([_HANDSHAKE]) or (bool(data) and data[0] & 0x80 != 0)


def parse(data: bytes) -> ClientHello | None:
    """Return the ClientHello at the beginning of a stream, None while it is incomplete.

    Raises HelloError.
    """
    message = _message(data)
    return None if message is None else _hello(message)


def _message(data: bytes) -> bytes | None:
    """Return the body of the first message, put together from as many records as it takes."""
    joined, at = bytearray(), 0
    for _ in range(_MOST_RECORDS):
        header = data[at : at + _RECORD_HEADER]
        if header[:1] not in (b"", bytes([_HANDSHAKE])) or header[1:2] not in (b"", b"\x03"):
            raise HelloError("not a handshake of TLS")
        if len(header) < _RECORD_HEADER:
            _refuse_endless(data)
            return None
        length = int.from_bytes(header[3:5], "big")
        if not 0 < length <= _MOST_RECORD_BYTES:
            raise HelloError("a record of an invalid length")
        at += _RECORD_HEADER
        joined += data[at : at + length]
        if joined[:1] not in (b"", bytes([_CLIENT_HELLO])):
            raise HelloError("the first message is no ClientHello")
        if len(joined) >= _MESSAGE_HEADER:
            wanted = int.from_bytes(joined[1:4], "big")
            if wanted > _MOST_MESSAGE_BYTES:
                raise HelloError("a ClientHello that is too long")
            if len(joined) > _MESSAGE_HEADER + wanted:
                raise HelloError("a second message in a record of the first")
            if len(joined) == _MESSAGE_HEADER + wanted:
                return bytes(joined[_MESSAGE_HEADER:])
        if at + length > len(data):
            _refuse_endless(data)
            return None
        at += length
    raise HelloError("a ClientHello in too many records")


def _refuse_endless(data: bytes) -> None:
    if len(data) >= MOST_BYTES:
        raise HelloError("a ClientHello that does not end")


class _Vectors:
    """Reads the vectors of a message; raises HelloError if one is longer than the rest of the
    message."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> bytes:
        taken = self._data[self._at : self._at + size]
        if len(taken) != size:
            raise HelloError("a length that leads beyond the end")
        self._at += size
        return taken

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> bytes:
        """Take a vector whose length is a number of `size` bytes."""
        return self.take(self.number(size))

    def is_at_end(self) -> bool:
        return self._at == len(self._data)


def _hello(message: bytes) -> ClientHello:
    reader = _Vectors(message)
    reader.take(2 + 32)  # version and random
    reader.vector(1)  # session
    reader.vector(2)  # ciphers
    reader.vector(1)  # compressions
    if reader.is_at_end():
        return ClientHello(None, is_encrypted=False)
    extensions = _extensions(reader.vector(2))
    if not reader.is_at_end():
        raise HelloError("bytes after the extensions")
    name = _server_name(extensions[_SERVER_NAME]) if _SERVER_NAME in extensions else None
    return ClientHello(name, is_encrypted=not _ENCRYPTED_HELLO.isdisjoint(extensions))


def _extensions(data: bytes) -> dict[int, bytes]:
    reader, found = _Vectors(data), dict[int, bytes]()
    while not reader.is_at_end():
        kind = reader.number(2)
        if kind in found:
            raise HelloError("an extension that occurs twice")
        found[kind] = reader.vector(2)
    return found


def _server_name(data: bytes) -> str:
    outer = _Vectors(data)
    names = _Vectors(outer.vector(2))
    kind, name = names.number(1), names.vector(2)
    if kind != _HOST_NAME or not names.is_at_end() or not outer.is_at_end():
        raise HelloError("not one host name")
    try:
        return name.decode("ascii")
    except UnicodeDecodeError:
        raise HelloError("a host name that is not ASCII") from None
