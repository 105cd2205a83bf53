"""Idle HTTP connections do not keep the server from other clients."""

import contextlib
import socket
from collections.abc import Iterator
from typing import NamedTuple

import anyio
import anyio.from_thread
import pytest
from starlette.responses import Response

from cellwright.harness.servers.client_quota import Tokens
from cellwright.harness.servers.http_access import AccessLimits, AccessMiddleware
from cellwright.harness.servers.http_server import (
    HttpConnection,
    Receive,
    Scope,
    Send,
    listening,
    serve_http,
)  # fmt: skip
from tests.conftest import soon

TOKEN, OTHER = "a-token-that-is-anns-alone", "a-token-that-is-bobs-alone"
BEGUN = b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "
LONG = 600.0  # seconds that no test waits


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the length of the body, once all of it is there."""
    if scope["type"] == "lifespan":
        for phase in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{phase}.complete"})
        return
    length = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        length += len(message.get("body", b""))
        if not message.get("more_body", False):
            break
    await Response(f"{length} bytes")(scope, receive, send)


class Served(NamedTuple):
    address: tuple[str, int]

    def connect(self, data: bytes = b"") -> socket.socket:
        sock = socket.create_connection(self.address, timeout=30)
        sock.sendall(data)
        return sock

    def ask(self, token: str = TOKEN) -> bytes:
        """Return the answer to a request on a connection of its own, b"" if there is none."""
        with self.connect(request(token, close=True)) as sock, contextlib.suppress(ConnectionError):
            return b"".join(iter(lambda: sock.recv(4096), b""))
        return b""


def request(token: str = "", length: int = 0, *, close: bool = False) -> bytes:
    head = ["POST /mcp HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {length}"]
    head += [f"Authorization: Bearer {token}"] if token else []
    head += ["Connection: close"] if close else []
    return "\r\n".join([*head, "", ""]).encode()


def is_closed(sock: socket.socket) -> bool:
    """Tell whether the server has closed a connection; what it said before is thrown away."""
    sock.setblocking(False)
    try:
        while sock.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@contextlib.contextmanager
def served(most: int, wait_seconds: float, **limits: float) -> Iterator[Served]:
    class Bounded(HttpConnection):
        pass

    Bounded.most, Bounded.wait_seconds = most, wait_seconds
    tokens = Tokens({"ann": TOKEN, "bob": OTHER})
    access = AccessMiddleware(app, tokens, AccessLimits()._replace(**limits), [b"mcp-session-id"])
    with (
        listening("127.0.0.1", 0) as listener,
        anyio.from_thread.start_blocking_portal("asyncio") as portal,
    ):
        ending = portal.call(anyio.Event)
        done = portal.start_task_soon(serve_http, access, listener, ending, Bounded)
        yield Served(listener.getsockname())
        portal.call(ending.set)
        done.result(30)


@contextlib.contextmanager
def held(sockets: list[socket.socket]) -> Iterator[list[socket.socket]]:
    try:
        yield sockets
    finally:
        for each in sockets:
            each.close()


@pytest.mark.parametrize(
    "sent", [b"", BEGUN, request(length=10)], ids=["nothing", "half", "no token"]
)
def test_a_full_server_still_accepts_a_new_connection(sent: bytes) -> None:
    """A client without a token fills the server; each new connection takes the place of the oldest."""
    with (
        served(most=20, wait_seconds=LONG) as server,
        held([server.connect(sent) for _ in range(40)]) as sockets,
    ):
        assert server.ask().endswith(b"0 bytes")
        assert soon(lambda: sum(map(is_closed, sockets)) >= 20)
        assert not is_closed(sockets[-1])


def test_a_request_at_work_is_not_dropped_for_a_new_connection() -> None:
    with served(most=20, wait_seconds=LONG) as server, server.connect(request(TOKEN, 5)) as first:
        assert server.ask().endswith(b"0 bytes")  # the first one was let in before this
        with held([server.connect(BEGUN) for _ in range(40)]):
            assert server.ask().endswith(b"0 bytes")
            first.sendall(b"12345")
            assert first.recv(4096).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "sent", [b"", BEGUN, request(length=10)], ids=["nothing", "half", "no token"]
)
def test_a_connection_that_sends_bytes_and_no_welcome_request_is_closed(sent: bytes) -> None:
    """However often a byte comes: each would put off a deadline that starts with the last byte."""

    def is_closed_after(byte: bytes) -> bool:
        with contextlib.suppress(ConnectionError):
            sock.sendall(byte)
        return is_closed(sock)

    with served(most=20, wait_seconds=0.5) as server, server.connect(sent) as sock:
        assert soon(lambda: is_closed_after(b"x"))


def test_one_client_never_has_all_connections() -> None:
    with (
        served(most=20, wait_seconds=LONG, requests=20, requests_per_client=15) as server,
        held([server.connect(request(TOKEN, 5)) for _ in range(15)]),
    ):
        assert soon(lambda: b"503" in server.ask())
        assert server.ask(OTHER).endswith(b"0 bytes")


def test_a_body_that_does_not_come_is_given_up() -> None:
    with served(most=20, wait_seconds=LONG, body_seconds=0.2) as server:
        with server.connect(request(TOKEN, 5)) as slow:
            assert soon(lambda: is_closed(slow))
        assert server.ask().endswith(b"0 bytes")


def test_an_answer_of_several_writes_does_not_wait_for_an_acknowledgement() -> None:
    """A connection has TCP_NODELAY, which it inherits: else each answer takes 40 ms longer."""
    with (
        listening("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname(), timeout=30),
    ):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("name", ["Authorization", "Host", "Origin", "Mcp-Session-Id"])
def test_a_header_that_decides_is_there_once(name: str) -> None:
    with served(most=20, wait_seconds=LONG) as server:
        twice = f"{name}: 127.0.0.1\r\n".encode() * 2
        lines = request(TOKEN, close=True).replace(b"\r\n", b"\r\n" + twice, 1)
        with server.connect(lines) as sock:
            assert sock.recv(4096).split()[1] in (b"400", b"401")
