"""Shares of cells: one cell takes all that the egress process gives it, and another is served at once."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from cellwright import Sandbox, SandboxStatus
from cellwright.policies.network.rule import NetworkRule
from tests.conftest import soon, with_limits
from tests.network import NAME, Server, answer_http, policy, resolving, serving, tcp

_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n" * 2600
_CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

_BEGIN = """
import os, socket, threading, time
threading.stack_size(1 << 20)  # where no cgroup caps memory, 60 of the usual size are too much
hold = socket.create_connection((name, held))
def often(work, count=1):
    for _ in range(count):
        threading.Thread(target=work, daemon=True).start()
def again(work):
    while True:
        try: work()
        except OSError: time.sleep(0.01)
def asked(path):
    sock = socket.create_connection((name, hostile))
    sock.sendall(b"POST " + path + b" HTTP/1.1\\r\\nTransfer-Encoding: chunked\\r\\nHost: %s:%d\\r\\n\\r\\n" % (name.encode(), hostile))
    return sock
def send_all(sock, data):
    while True: sock.sendall(data)
kept = []
"""
_END = """
hold.sendall(b"taken")
hold.recv(1)
"""
GREEDY = {
    "interim answers": "kept += [asked(b'/interim') for _ in range(8)]",
    "small chunks": """
kept += [asked(b'/chunks') for _ in range(60)]
for sock in kept: often(lambda sock=sock: send_all(sock, b'1\\r\\nx\\r\\n' * 5000))
""",
    "connections": "kept += [socket.create_connection((name, held)) for _ in range(250)]",
    "heads": """
kept += [socket.create_connection((name, hostile)) for _ in range(60)]
for byte in b"POST /" + b"a" * 200:
    for sock in kept:
        try: sock.send(bytes([byte]))
        except OSError: pass
""",
    "refused requests": """
def refused():
    sock = socket.create_connection((name, hostile))
    sock.sendall(b"GET / HTTP/1.1\\r\\nHost: other\\r\\n\\r\\n")
    while True: sock.send(b"x")
often(lambda: again(refused), 8)
""",
    "queries": """
def query():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock: sock.sendto(os.urandom(200), ("127.0.0.53", 53))
often(lambda: again(query), 4)
""",
    "queries over TCP": """
def query():
    sock = socket.create_connection(("127.0.0.53", 53), 1)
    kept.append(sock)
    one = b"\\0\\x2d\\0\\7\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0\\3api\\7example\\3org\\0\\0\\1\\0\\1"
    while True: sock.sendall(one)
often(lambda: again(query), 8)
""",
    "names": """
def lookup(numbers=iter(range(10**9))): socket.gethostbyname(f"n{next(numbers)}.{name}")
often(lambda: again(lookup), 4)
""",
}  # fmt: skip
_OTHER = """
import http.client
def ask():
    client = http.client.HTTPConnection(name, port, timeout=1)
    try:
        client.request("GET", "/")
        return client.getresponse().status
    except OSError:
        return 0
    finally:
        client.close()
next(filter(None, (ask() for _ in range(30))), "not served")
"""


class Servers:
    """What the greedy cell and the other one reach: by one name, on three ports."""

    def __init__(self, held: Server, hostile: Server, other: Server) -> None:
        self.ports = {"held": held.port, "hostile": hostile.port, "port": other.port}
        self.inputs = {"name": NAME, **self.ports}


@pytest.fixture
def taken() -> threading.Event:
    """Set once the greedy cell has all that it takes."""
    return threading.Event()


@pytest.fixture
def over() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def servers(taken: threading.Event, over: threading.Event) -> Iterator[Servers]:
    def hold(sock: socket.socket) -> None:
        if sock.recv(5):
            taken.set()
            over.wait()

    def attack(sock: socket.socket) -> None:
        answer = _INTERIM if b"/interim" in sock.recv(65536) else b"1\r\nx\r\n" * 10_000
        if answer is not _INTERIM:
            sock.sendall(_CHUNKED)
        while not over.is_set():
            sock.sendall(answer)

    with serving(hold) as held, serving(attack) as hostile, serving(answer_http) as other:
        yield Servers(held, hostile, other)


@pytest.mark.parametrize("greed", GREEDY)
def test_a_cell_is_served_beside_one_that_takes_all_it_can_get(
    greed: str, servers: Servers, taken: threading.Event, over: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It gets an answer within a second, and so does a third cell once the greedy one has ended."""
    resolving(monkeypatch, {NAME: [["127.0.0.1"]]})
    rules = (
        tcp(servers.ports["held"], connections=256, connections_per_second=1000.0),
        NetworkRule(host=NAME, ports=(servers.ports["hostile"],), schemes=("http",), methods=("POST",)),
        NetworkRule(host=NAME, ports=(servers.ports["port"],), schemes=("http",)),
        NetworkRule(host=f"*.{NAME}", ports=(servers.ports["port"],)),
    )  # fmt: skip
    program = _BEGIN + GREEDY[greed] + _END
    patient = with_limits(policy(*rules), wall_seconds=120)  # `soon` waits for the greedy one
    with Sandbox(policy=patient, pool=0) as box, ThreadPoolExecutor(1) as pool:
        quiet = box.execute(_OTHER, inputs=servers.inputs)
        greedy = pool.submit(box.execute, program, inputs=servers.inputs)
        try:
            assert soon(lambda: taken.is_set() or greedy.done())
            assert taken.is_set(), greedy.result()
            beside = box.execute(_OTHER, inputs=servers.inputs)
            assert not greedy.done()
        finally:
            over.set()
        assert greedy.result().status is SandboxStatus.COMPLETED
        after = box.execute(_OTHER, inputs=servers.inputs)
    assert [quiet.value, beside.value, after.value] == [200] * 3, (beside, after)
