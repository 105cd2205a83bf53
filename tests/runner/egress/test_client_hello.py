"""The name in a ClientHello, and messages that could be read in two ways."""

import ssl
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellwright.runner.egress import client_hello
from cellwright.runner.egress.client_hello import ClientHello, HelloError


def real(name: str | None) -> bytes:
    """Return what OpenSSL sends to a server called `name`."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    connection = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        connection.do_handshake()
    return outgoing.read()


def vector(size: int, data: bytes) -> bytes:
    return len(data).to_bytes(size, "big") + data


def extension(kind: int, data: bytes) -> bytes:
    return struct.pack("!H", kind) + vector(2, data)


def names(*texts: bytes, kind: int = 0) -> bytes:
    return vector(2, b"".join(bytes([kind]) + vector(2, text) for text in texts))


def hello(extensions: bytes | None, *, rest: bytes = b"", kind: int = 1) -> bytes:
    body = b"\3\3" + bytes(32) + vector(1, b"") + vector(2, b"\x13\1") + vector(1, b"\0")
    body += (b"" if extensions is None else vector(2, extensions)) + rest
    return bytes([kind]) + vector(3, body)


def record(message: bytes) -> bytes:
    return b"\x16\3\1" + vector(2, message)


NAMED = hello(extension(0, names(b"api.example.org")))


def test_the_name_that_openssl_asks_for_is_found() -> None:
    assert client_hello.parse(real("api.example.org")) == ClientHello("api.example.org", False)
    assert client_hello.parse(real(None)) == ClientHello(None, False)


def test_bytes_after_it_are_no_part_of_it() -> None:
    assert client_hello.parse(record(NAMED) + b"\x14\3\3\0\1\1") is not None


@pytest.mark.parametrize("size", [1, 2, 7, 40])
def test_a_message_in_many_records_is_put_together(size: int) -> None:
    pieces = [NAMED[start : start + size] for start in range(0, len(NAMED), size)]
    whole = b"".join(map(record, pieces))
    assert client_hello.parse(whole) == ClientHello("api.example.org", False)


def test_it_is_incomplete_at_every_place_but_its_end() -> None:
    data = record(NAMED)
    assert [n for n in range(1, len(data)) if client_hello.parse(data[:n]) is not None] == []


@pytest.mark.parametrize("kind", [0xFE0D, 0xFE0C, 0xFE08, 0xFF02, 0xFFCE])
def test_an_encrypted_hello_is_told(kind: int) -> None:
    """Also of a draft: a server may know it."""
    sent = hello(extension(0, names(b"front.example.org")) + extension(kind, b"\0"))
    assert client_hello.parse(record(sent)) == ClientHello("front.example.org", True)


@pytest.mark.parametrize(
    "data",
    [
        record(hello(extension(0, names(b"a.example", b"b.example")))),
        record(hello(extension(0, names(b"a.example")) * 2)),
        record(hello(extension(0, names(b"a.example", kind=1)))),
        record(hello(extension(0, names(b"a.example") + b"x"))),
        record(hello(extension(0, b""))),
        record(hello(extension(0, names("caf\u00e9.example".encode())))),
        record(hello(extension(0, names(b"a.example")), rest=b"x")),
        record(hello(b"\0")),
        record(hello(None, kind=2)),
        record(NAMED + NAMED),
        record(b""),
        b"\x16\2\1" + vector(2, NAMED),
        b"\x17\3\1" + vector(2, NAMED),
        b"\x80\x2e\1\0\2",  # SSL 2.0
        b"\x16\3\1\x40\1" + bytes(20),
        record(b"\1\xff\xff\xff" + bytes(100)),
        record(NAMED[:9]) + b"\x15\3\1\0\2\1\0",
    ],
    ids=repr,
)
def test_what_can_be_read_in_two_ways_is_refused(data: bytes) -> None:
    with pytest.raises(HelloError):
        client_hello.parse(data)


def test_one_that_does_not_end_is_refused() -> None:
    endless = record(b"\1" + (48 * 1024).to_bytes(3, "big")) + record(b"x") * 11_000
    with pytest.raises(HelloError):
        client_hello.parse(endless)


def test_one_in_very_many_records_is_refused() -> None:
    """Each costs the process that serves all cells: 10,900 of one byte cost half a second."""
    message = b"\1" + (40_000).to_bytes(3, "big") + bytes(10_896)
    records = [record(bytes([each])) for each in message]
    assert client_hello.parse(b"".join(records[:100])) is None
    with pytest.raises(HelloError, match="records"):
        client_hello.parse(b"".join(records))


@given(st.binary(max_size=300) | st.binary(max_size=200).map(lambda data: record(hello(data))))
def test_any_bytes_are_a_hello_or_incomplete_or_refused(data: bytes) -> None:
    try:
        found = client_hello.parse(data)
    except HelloError:
        return
    assert found is None or isinstance(found, ClientHello)


def test_tls_is_told_by_its_first_byte() -> None:
    assert client_hello.begins_tls(real("a.example"))
    assert client_hello.begins_tls(b"\x80\x2e\1")
    assert not client_hello.begins_tls(b"GET / HTTP/1.1")
    assert not client_hello.begins_tls(b"")
