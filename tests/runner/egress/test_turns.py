"""Turns in the egress process: peers that never make it wait do not keep it from its other work."""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from cellwright.policies.network.rule import NetworkRule
from cellwright.policies.network.rules import NetworkRules
from cellwright.policies.network.upstream_proxy import UpstreamProxy
from cellwright.runner.egress import http_relay
from cellwright.runner.egress.addresses import budgets
from cellwright.runner.egress.cell_connection import CellPolicy
from cellwright.runner.egress.connection_relay import PlainStream, Relay, Turns, first_bytes
from cellwright.runner.egress.http_relay import RequestReader, RequestRelay
from cellwright.runner.egress.name_resolution import Resolver, Upstream, resolving_threads
from cellwright.runner.egress.served_cell import ServedCell
from cellwright.runner.egress.tls_stream import TlsStream
from tests.runner.egress.test_dns import query

NAME = "api.example.org"
REQUEST = b"POST /a HTTP/1.1\r\nHost: api.example.org\r\nTransfer-Encoding: chunked\r\n\r\n"
HINT = b"HTTP/1.1 103 Early Hints\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
_LARGEST = 1 << 20  # calls that no loop may make in ten rounds


class Peers:
    """Peers that always have bytes, and take them: no call on a socket waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads = 0
        self.bytes: dict[socket.socket, Callable[[int], bytes]] = {}
        patch = asyncio.selector_events.BaseSelectorEventLoop  # type: ignore[attr-defined]
        monkeypatch.setattr(patch, "sock_recv", self._recv)
        monkeypatch.setattr(patch, "sock_sendall", self._sendall)

    async def _recv(self, sock: socket.socket, size: int) -> bytes:
        self.reads += 1
        if self.reads > 3000:
            pytest.fail("nothing else had a turn")
        return self.bytes[sock](size)

    async def _sendall(self, sock: socket.socket, data: bytes) -> None: ...


def endless(data: bytes, *before: bytes) -> Callable[[int], bytes]:
    """Return a peer that sends `before`, each in one piece, and then `data` again and again."""
    pieces = list(before)
    return lambda _: pieces.pop(0) if pieces else data


def _reader(guest: socket.socket, first: bytes = b"") -> RequestReader:
    return RequestReader(PlainStream(guest), first, NAME, 80, lambda *_: "", Turns())


async def _relay(guest: socket.socket, outside: socket.socket) -> None:
    await Relay(guest, outside, b"", lambda *_: None, Turns()).run(asyncio.Event())


async def _requests(guest: socket.socket, outside: socket.socket) -> None:
    reader = _reader(guest)
    request = await reader.next()
    assert request
    await RequestRelay(reader, request, PlainStream(outside), lambda *_: None).run(asyncio.Event())


async def _refused(guest: socket.socket, _: socket.socket) -> None:
    await _reader(guest).refused(403, "no")


async def _head(guest: socket.socket, _: socket.socket) -> None:
    await _reader(guest).next()


async def _hello(guest: socket.socket, _: socket.socket) -> None:
    await first_bytes(guest, NAME, ("https",), Turns())


async def _handshake(guest: socket.socket, _: socket.socket) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    await TlsStream(guest, context, Turns()).handshake()


async def _tunnel(_: socket.socket, outside: socket.socket) -> None:
    await Upstream(UpstreamProxy("proxy.example.org", 3128))._open_tunnel(outside, NAME, 443)


async def _queries(guest: socket.socket, _: socket.socket) -> None:
    cell = _cell()
    cell._queries._left = float(_LARGEST)
    try:
        await cell._serve_queries(guest)
    finally:
        cell.close()


def _cell() -> ServedCell:
    policy = CellPolicy(NetworkRules([NetworkRule(host=NAME)]), (443,), 0.0)
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM)]
    sockets += [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    reports, supervisor = socket.socketpair()
    supervisor.close()
    resolver = Resolver(resolving_threads())
    return ServedCell(policy, resolver, None, reports, sockets, budgets(1024), lambda _: None)


def _message() -> bytes:
    asked = query()
    return len(asked).to_bytes(2, "big") + asked


def _in_turn(data: bytes) -> Callable[[int], bytes]:
    """Return a peer that sends `data` again and again, as much as is read."""
    left = bytearray()

    def read(size: int) -> bytes:
        if not left:
            left.extend(data)
        taken = bytes(left[:size])
        del left[:size]
        return taken

    return read


@pytest.mark.parametrize(
    ("work", "guest", "outside"),
    [
        (_relay, endless(b"x"), endless(b"x")),
        (_requests, endless(b"1\r\nx\r\n", REQUEST), endless(b"1\r\nx\r\n", ANSWER)),
        (_requests, endless(b"1\r\nx\r\n" * 5000, REQUEST), endless(b"", ANSWER)),
        (_requests, endless(b"0\r\n\r\n", REQUEST), endless(HINT * 2000)),
        (_requests, endless(b"0\r\n\r\n", REQUEST), endless(b"a", b"HTTP/1.1 200 OK\r\n")),
        (_refused, endless(b"x"), endless(b"")),
        (_head, endless(b"G"), endless(b"")),
        (_hello, endless(b"\x01", b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc"), endless(b"")),
        (_handshake, endless(b"\x01", b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc"), endless(b"")),
        (_tunnel, endless(b""), endless(b"H")),
        (_queries, _in_turn(_message()), endless(b"")),
    ],
    ids=[
        "bytes", "chunks", "many chunks in one piece", "interim answers", "head of an answer",
        "request that is refused", "head", "ClientHello", "handshake", "answer of a proxy", "queries over TCP",
    ],
)  # fmt: skip
def test_other_work_is_done_beside_a_peer_that_never_waits(
    work: Callable[..., Awaitable[None]],
    guest: Callable[[int], bytes],
    outside: Callable[[int], bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is cancelled after ten rounds of the loop, which none of them may have left out."""
    peers = Peers(monkeypatch)
    monkeypatch.setattr(http_relay, "_MOST_INTERIM", _LARGEST)
    monkeypatch.setattr(http_relay, "_MOST_PIECES", _LARGEST)

    async def run() -> None:
        one, other = socket.socketpair()
        with one, other:
            peers.bytes = {one: guest, other: outside}
            task: asyncio.Task[Any] = asyncio.ensure_future(work(one, other))  # type: ignore[arg-type]
            for _ in range(10):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled() and isinstance(task.exception(), pytest.fail.Exception):
                raise task.exception()  # type: ignore[misc]

    asyncio.run(run())
    assert 0 < peers.reads < 100


def test_a_cell_of_many_connections_has_the_turns_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = Peers(monkeypatch)
    counts = {"greedy": 0, "other": 0}

    def of(whose: str) -> Callable[[int], bytes]:
        def read(_: int) -> bytes:
            counts[whose] += 1
            return b"x"

        return read

    async def run() -> None:
        pairs = [socket.socketpair() for _ in range(51)]
        turns = {"greedy": Turns(), "other": Turns()}
        tasks = []
        for number, pair in enumerate(pairs):
            whose = "greedy" if number else "other"
            peers.bytes.update(dict.fromkeys(pair, of(whose)))
            one = Relay(*pair, b"", lambda *_: None, turns[whose])
            tasks.append(asyncio.create_task(one.run(asyncio.Event())))
        for _ in range(400):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one_end, other_end in pairs:
            one_end.close()
            other_end.close()

    asyncio.run(run())
    first_reads = 2 * 50  # none of these reads had to wait for a turn
    assert counts["other"] > 50
    assert counts["greedy"] - first_reads < 4 * counts["other"]
