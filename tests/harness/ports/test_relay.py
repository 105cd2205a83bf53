"""The relay between sockets of the host and servers in cells: what a bad server or client costs."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cellwright.harness.sandbox.network.port_relay import (
    CHUNK_BYTES,
    PortLimits,
    PortRelay,
    RelayedPort,
)
from cellwright.runner import channel
from cellwright.runner.messages import Failed, SocketMade, encode
from tests.conftest import Clock

SECONDS = 30
BUFFER = 256 * 1024
MOST = 256 * 1024 * 1024


class FakeNetwork:
    """Sends sockets of this host's namespace, so that a test can be the server."""

    def __init__(self, failure: Failed | None = None) -> None:
        self.failure = failure

    def ask(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, socket.socket() as made:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
            if self.failure:
                channel.send(theirs, encode(self.failure))
            else:
                channel.send(theirs, encode(SocketMade()), (made.fileno(),))
        return ours


class Bench:
    """A relay, a server of this process, and what connects to it."""

    def __init__(
        self, limits: PortLimits | None = None, network: FakeNetwork | None = None
    ) -> None:
        self.clock = Clock()
        self.relay = PortRelay(self.clock)
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.settimeout(SECONDS)
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        self.address = listener.getsockname()
        given: Any = network or FakeNetwork()
        self.port = RelayedPort(
            listener, self.server.getsockname()[1], given, limits or PortLimits()
        )
        self.relay.open_port(self.port)

    def client(self) -> socket.socket:
        return socket.create_connection(self.address, SECONDS)

    def accept(self) -> socket.socket:
        sock, _ = self.server.accept()
        sock.settimeout(SECONDS)
        return sock

    def close(self) -> None:
        self.relay.close()
        self.server.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def sent_until_full(sock: socket.socket) -> int:
    """Send until a second passes without room; return how much was taken."""
    sock.settimeout(1)
    sent = 0
    try:
        while sent < MOST:
            sent += sock.send(bytes(CHUNK_BYTES))
    except TimeoutError:
        return sent
    raise AssertionError("it takes whatever is sent")


@pytest.fixture(params=["client first", "server first"])
def ends(bench: Bench, request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, ...]]:
    """The two ends of one connection, in both orders."""
    with bench.client() as client, bench.accept() as server:
        yield (client, server) if request.param == "client first" else (server, client)


def test_a_side_that_does_not_read_stops_the_other_and_costs_a_chunk(
    bench: Bench, ends: tuple[socket.socket, ...]
) -> None:
    """What was taken lies in the buffers of the kernel, but for one chunk."""
    sender, reader = ends
    taken = sent_until_full(sender)
    (connection,) = bench.port.connections
    assert sum(len(flow._pending) for flow in connection._flows) <= CHUNK_BYTES
    sender.settimeout(SECONDS)
    sender.shutdown(socket.SHUT_WR)
    read = 0
    while chunk := reader.recv(1 << 20):
        read += len(chunk)
    assert read == taken  # nothing was lost
    reader.close()
    assert sender.recv(1) == b""


def test_either_side_may_end_first_and_still_gets_what_the_other_sends(
    ends: tuple[socket.socket, ...],
) -> None:
    first, second = ends
    first.sendall(b"question")
    first.shutdown(socket.SHUT_WR)
    assert second.recv(8, socket.MSG_WAITALL) == b"question"
    assert second.recv(1) == b""
    answer = threading.Thread(target=second.sendall, args=(b"answer" * 100_000,))
    answer.start()
    with first.makefile("rb") as file:
        assert file.read(600_000) == b"answer" * 100_000
        answer.join()
        second.close()
        assert file.read() == b""


def test_a_server_that_answers_and_closes_without_reading_is_heard(bench: Bench) -> None:
    with bench.client() as client:
        server = bench.accept()
        server.sendall(b"too busy")
        server.close()
        assert client.recv(8, socket.MSG_WAITALL) == b"too busy"
        assert client.recv(1) == b""


def test_a_client_that_sends_and_leaves_is_heard(bench: Bench) -> None:
    client = bench.client()
    client.sendall(b"x" * 300_000)
    client.close()
    with bench.accept() as server, server.makefile("rb") as file:
        assert file.read() == b"x" * 300_000


def test_connections_beyond_the_limit_wait_for_one_to_end() -> None:
    bench = Bench(PortLimits(connections=2))
    clients = [bench.client() for _ in range(3)]
    servers = [bench.accept() for _ in range(2)]
    for client in clients:
        client.sendall(b"?")
    assert len(bench.port.connections) == 2
    bench.server.settimeout(0.2)
    with pytest.raises(TimeoutError):
        bench.accept()
    bench.server.settimeout(SECONDS)
    for each in (servers[0], clients[0]):
        each.close()
    servers.append(bench.accept())
    assert servers[2].recv(1) == b"?"
    for each in (*servers, *clients):
        each.close()
    bench.close()


@pytest.mark.parametrize(("half_closed", "seconds"), [(False, 600.0), (True, 60.0)])
def test_a_connection_without_a_byte_is_closed(
    bench: Bench, half_closed: bool, seconds: float
) -> None:
    with bench.client() as client, bench.accept() as server:
        server.sendall(b"hello")
        assert client.recv(5) == b"hello"
        if half_closed:
            client.shutdown(socket.SHUT_WR)
            assert server.recv(1) == b""
        (connection,) = bench.port.connections
        assert connection.expires_at() == bench.clock.now + seconds
        bench.clock.now += seconds
        assert client.recv(1) == b""


def test_a_socket_that_cannot_be_made_closes_the_connection() -> None:
    bench = Bench(network=FakeNetwork(Failed(3, "the cell has ended")))
    with bench.client() as client:
        assert client.recv(1) == b""
    assert bench.port.connections == set()
    bench.close()


def test_closing_a_port_closes_its_connections_and_no_others(bench: Bench) -> None:
    other = Bench()
    survivor = other.client()
    with bench.client() as client, bench.accept(), survivor, other.accept() as server:
        bench.relay.close_port(bench.port)
        bench.relay.close_port(bench.port)
        assert client.recv(1) == b""
        server.sendall(b"x")
        assert survivor.recv(1) == b"x"
    with pytest.raises(ConnectionRefusedError):
        bench.client()
    other.close()
