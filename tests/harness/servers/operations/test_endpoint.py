"""The HTTP endpoint of operators: what slow, idle and hostile clients get, and that others go on."""

import asyncio
import contextlib
import os
import socket
import stat
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellwright import PolicyError
from cellwright.harness.servers.http_server import HttpConnection
from cellwright.harness.servers.measurements import Measurements
from cellwright.harness.servers.operators_endpoint import (
    OperatorsConnection,
    OperatorsEndpoint,
    serving_pages,
)
from cellwright.harness.servers.request_log import OperatorsPage, OperatorsPages
from tests.conftest import soon

GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
CLOSING = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")


OPEN: set[HttpConnection] = set()  # the connections of the last server


def waiting(seconds: float) -> type[HttpConnection]:
    """Return connections that are closed after so long."""
    OPEN.clear()

    class Connection(OperatorsConnection):
        wait_seconds = seconds

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            OPEN.add(self)
            super().connection_made(transport)

        def connection_lost(self, exc: Exception | None) -> None:
            OPEN.discard(self)
            super().connection_lost(exc)

    return Connection


class Place:
    def __init__(self, listener: socket.socket, served: OperatorsEndpoint) -> None:
        self.port = listener.getsockname()[1]
        self.served = served

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def say(self, words: bytes) -> bytes:
        with self.connect() as sock:
            sock.sendall(words)
            return _all_of(sock)


def _all_of(sock: socket.socket) -> bytes:
    """Return what comes until the end, which may be a reset."""
    told = b""
    with contextlib.suppress(ConnectionError):
        while piece := sock.recv(65536):
            told += piece
    return told


@pytest.fixture
def place() -> Iterator[Place]:
    listener = socket.create_server(("127.0.0.1", 0))
    served = OperatorsEndpoint(listener, OperatorsPages(Measurements()), waiting(0.3))
    with contextlib.closing(served):
        yield Place(listener, served)


def test_a_scrape_by_an_ordinary_client(place: Place) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{place.port}/metrics?x=1", timeout=10) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert b"cellwright_executions_total" in answer.read()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{place.port}/", timeout=10)


def test_head_has_the_length_and_no_body(place: Place) -> None:
    told = place.say(CLOSING.replace(b"GET", b"HEAD"))
    assert told.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"content-length: 3\r\n" in told
    assert told.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", b"405"),
        (b"GET /metrics HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/2\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", b"400"),
        (b"GET http://x/metrics HTTP/1.1\r\n\r\n", b"400"),
        (b"GET http://x/metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", b"404"),
        (b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", b"403"),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nhost: evil.example\r\n\r\n", b"400"),
        (b"GET /" + b"x" * 90_000, b"400"),
    ],
)
def test_what_is_no_request_for_a_page_is_refused(
    place: Place, request_: bytes, status: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    assert place.say(request_).split(b" ")[1] == status
    assert capfd.readouterr().err == ""  # clients cannot fill the log
    assert b"200 OK" in place.say(CLOSING)


def test_half_a_request_ends_after_the_deadline(place: Place) -> None:
    with place.connect() as sock:
        sock.sendall(GET[:-2])
        assert _all_of(sock) == b""


def test_bytes_that_trickle_win_no_time(place: Place) -> None:
    with place.connect() as sock:
        sock.settimeout(0.05)
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 200:
                sock.send(b"x")
                sent += 1
                with contextlib.suppress(TimeoutError):
                    if not sock.recv(1):
                        break
        assert 1 < sent < 200


def test_idle_connections_keep_nobody_out() -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    served = OperatorsEndpoint(listener, OperatorsPages(Measurements()), waiting(60))
    with contextlib.closing(served), contextlib.ExitStack() as idle:
        place = Place(listener, served)
        for _ in range(300):
            idle.enter_context(place.connect()).sendall(b"GET")
        assert place.say(CLOSING).startswith(b"HTTP/1.1 200 OK")
        assert soon(lambda: len(OPEN) <= OperatorsConnection.most)


def test_a_client_that_does_not_read_is_cut_off() -> None:
    class Long(OperatorsPages):
        def answer(self, path: str) -> OperatorsPage:
            return OperatorsPage(200, "text/plain", b"x" * 50_000_000)

    listener = socket.create_server(("127.0.0.1", 0))
    served = OperatorsEndpoint(listener, Long(Measurements()), waiting(0.3))
    with contextlib.closing(served):
        place = Place(listener, served)
        with place.connect() as sock:
            sock.sendall(GET)
            assert soon(lambda: len(OPEN) == 1)
            assert soon(lambda: not OPEN)


def test_the_end_waits_for_no_client() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    served = OperatorsEndpoint(listener, OperatorsPages(Measurements()), waiting(1000))
    with Place(listener, served).connect() as sock:
        sock.sendall(b"GET")
        assert soon(lambda: len(OPEN) == 1)
        served.close()
        served.close()
        assert not [each for each in threading.enumerate() if each.name == "cellwright-pages"]
        assert _all_of(sock) == b""


# where it listens


def test_a_unix_socket_is_of_this_user_alone_and_goes_at_the_end(tmp_path: Path) -> None:
    place = tmp_path / "metrics"
    with serving_pages(str(place), OperatorsPages(Measurements())):
        assert stat.S_IMODE(place.stat().st_mode) == 0o600
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            sock.connect(os.fspath(place))
            sock.sendall(CLOSING.replace(b"localhost", b"any"))
            assert b"200 OK" in _all_of(sock)
        with pytest.raises(PolicyError, match="in use"), _serving(place):
            pass
    assert os.listdir(tmp_path) == []


def test_a_stale_socket_is_replaced_and_a_file_is_not(tmp_path: Path) -> None:
    place = tmp_path / "metrics"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(os.fspath(place))
    with _serving(place):
        pass
    place.write_text("precious")
    with pytest.raises(PolicyError, match="not a socket"), _serving(place):
        pass
    assert place.read_text() == "precious"


def _serving(place: Path) -> contextlib.AbstractContextManager[None]:
    return serving_pages(str(place), OperatorsPages(Measurements()))


@pytest.mark.parametrize(
    "address",
    ["9464", "localhost:9464", "127.0.0.1:", "127.0.0.1:70000", "127.0.0.1:-1", "x:1", ""],
)
def test_an_address_is_a_number_and_a_port(address: str) -> None:
    with pytest.raises(PolicyError, match="must be ADDRESS:PORT"):
        serving_pages(address, OperatorsPages(Measurements())).__enter__()


def test_a_port_that_is_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(PolicyError, match="in use"):
            serving_pages(address, OperatorsPages(Measurements())).__enter__()
