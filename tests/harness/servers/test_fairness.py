"""Fairness: one client takes all that it can get of a limit, and another client is served meanwhile.

Each server runs with its default limits.  `HOLDS` has an attack for each limit of each server; the
quotas themselves leave a part of every total to others, which `test_every_quota_...` reads from the code.
"""

import ast
import contextlib
import http.client
import json
import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cellwright.harness.sandbox.remote.frames import VERSION, Hello, Welcome
from cellwright.harness.servers.services import OwnedSessions
from tests.conftest import OPTIONAL, ROOT
from tests.harness.servers.daemon.daemons import Daemon, RawClient, program
from tests.harness.servers.daemon.daemons import serving as serving_daemon
from tests.harness.servers.web.web_servers import ANN as ANNS
from tests.harness.servers.web.web_servers import BOB as BOBS
from tests.harness.servers.web.web_servers import web_server

ANN, BOB = "ann-" + "k" * 24, "bob-" + "q" * 24
WAIT_SECONDS = 10.0  # a second is usual; emulated and loaded hosts need more
MIB = 1024 * 1024
SERVERS = ROOT / "harness" / "servers"
SLEEPS = "import time; time.sleep(20)"
pytestmark = pytest.mark.needs("userns")


class Served(NamedTuple):
    """A server over HTTP in a process of its own."""

    kind: str
    port: int

    def send(
        self, head: str, body: bytes = b"", length: int | None = None, key: str = ANN
    ) -> socket.socket:
        """Send a request, perhaps without all of its body, and return the connection."""
        name = "X-API-Key: " if self.kind == "e2b" else "Authorization: Bearer "
        size = len(body) if length is None else length
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_SECONDS)
        head = f"{head}\r\nHost: 127.0.0.1:{self.port}\r\n{name}{key}\r\nContent-Length: {size}"
        kinds = "Content-Type: application/json\r\nAccept: application/json, text/event-stream"
        sock.sendall(f"{head}\r\n{kinds}\r\n\r\n".encode() + body)
        return sock

    def ask(
        self, method: str, path: str, body: Any = None, key: str = ANN, **headers: str
    ) -> tuple[int, bytes, http.client.HTTPMessage]:
        """Return the status, the beginning and the headers of an answer."""
        name = {"X-API-Key": key} if self.kind == "e2b" else {"Authorization": f"Bearer {key}"}
        usual = {"Accept": "application/json, text/event-stream", **name, **headers}
        data = None if body is None else json.dumps(body)
        usual |= {} if body is None else {"Content-Type": "application/json"}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, data, usual)
            answer = connection.getresponse()
            return answer.status, answer.read1(1 << 20), answer.headers


@contextlib.contextmanager
def served(kind: str, directory: Path) -> Iterator[Served]:
    tokens = directory / "tokens"
    tokens.write_text(f"ann {ANN}\nbob {BOB}\n")
    tokens.chmod(0o600)
    optional = [word for layer in OPTIONAL for word in ("--optional", layer)]
    policy = ["--policy", "standard"] if kind == "web" else []
    process = subprocess.Popen(
        [sys.executable, "-m", "cellwright", kind, "--http", "127.0.0.1:0", "--token-file", tokens,
         *policy, *optional],
        cwd=ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(directory)},
    )  # fmt: skip
    try:
        assert process.stderr
        said = ""
        while not (found := re.search(r"127\.0\.0\.1:(\d+)", said)):
            said += (line := process.stderr.readline())
            assert line, said
        yield Served(kind, int(found[1]))
    finally:
        process.terminate()
        process.communicate(timeout=60)


# What another client does: an ordinary request of each server.


def web_request(server: Served) -> bool:
    """Run a program, in a fresh cell and in a session."""
    status, data, _ = server.ask("POST", "/v1/sessions", {}, BOB)
    if status != 201:
        return False
    id = json.loads(data)["session"]
    for path in ("/v1/executions", f"/v1/sessions/{id}/executions"):
        status, data, _ = server.ask("POST", path, {"code": "6 * 7"}, BOB)
        if status != 200 or json.loads(data)["value"] != 42:
            return False
    return server.ask("DELETE", f"/v1/sessions/{id}", None, BOB)[0] == 204


def mcp_begin(server: Served, key: str) -> str:
    given = {"protocolVersion": "2025-11-25", "capabilities": {}}
    params = {**given, "clientInfo": {"name": "x", "version": "1"}}
    hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
    return str(server.ask("POST", "/mcp", hello, key)[2].get("mcp-session-id", ""))


def mcp_call(code: str, **given: str) -> dict[str, Any]:
    params = {"name": "run_code", "arguments": {"code": code, **given}}
    return {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params}


def mcp_request(server: Served) -> bool:
    id = mcp_begin(server, BOB)
    body = json.dumps(mcp_call("6 * 7", session="new")).encode()
    with server.send(f"POST /mcp HTTP/1.1\r\nMcp-Session-Id: {id}", body, key=BOB) as sock:
        data = b""
        while b'"value":42' not in data and (piece := sock.recv(65536)):
            data += piece
    ended = server.ask("DELETE", "/mcp", None, BOB, **{"Mcp-Session-Id": id})[0]
    return b'"value":42' in data and ended == 200


def e2b_request(server: Served) -> bool:
    given = {"templateID": "base", "timeout": 60}
    status, data, _ = server.ask("POST", "/sandboxes", given, BOB)
    if status != 201:
        return False
    id = json.loads(data)["sandboxID"]
    return server.ask("DELETE", f"/sandboxes/{id}", None, BOB)[0] == 204


REQUESTS = {"web": web_request, "mcp": mcp_request, "e2b": e2b_request}
POSTS = {
    "web": "POST /v1/executions HTTP/1.1",
    "mcp": "POST /mcp HTTP/1.1",
    "e2b": "POST /sandboxes HTTP/1.1",
}
Held = list[socket.socket]


# What the first client takes.


def connections(server: Served, held: Held) -> None:
    for _ in range(1100):
        held.append(socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_SECONDS))


def unfinished_requests(server: Served, held: Held) -> None:
    for _ in range(800):
        held.append(server.send(POSTS[server.kind], length=100))


def unfinished_bodies(server: Served, held: Held) -> None:
    for _ in range(20):
        held.append(server.send(POSTS[server.kind], b"[" * 1000, length=16 * MIB))


def executions(server: Served, held: Held) -> None:
    body = json.dumps({"code": SLEEPS}).encode()
    for _ in range(80):
        held.append(server.send(POSTS["web"], body))


def unread_output(server: Served, held: Held) -> None:
    body = json.dumps({"code": "while True: print('x' * 4096)"}).encode()
    for _ in range(8):
        held.append(server.send("POST /v1/executions/stream HTTP/1.1", body))


def web_session(server: Served) -> str:
    status, data, _ = server.ask("POST", "/v1/sessions", {})
    return str(json.loads(data)["session"]) if status == 201 else ""


def waiting_threads(server: Served, held: Held) -> None:
    """Requests that wait for a session at work, each in a thread."""
    id = web_session(server)
    body = json.dumps({"code": SLEEPS}).encode()
    held.append(server.send(f"POST /v1/sessions/{id}/executions HTTP/1.1", body))
    for _ in range(60):
        held.append(server.send(f"GET /v1/sessions/{id}/files HTTP/1.1"))


def unread_answers(server: Served, held: Held) -> None:
    id = web_session(server)
    code = "open('f', 'wb').truncate(40 << 20)"
    server.ask("POST", f"/v1/sessions/{id}/executions", {"code": code})
    for _ in range(6):
        held.append(server.send(f"GET /v1/sessions/{id}/files/f HTTP/1.1"))


def sessions(server: Served, held: Held) -> None:
    while web_session(server):
        continue


def paused_sessions(server: Served, held: Held) -> None:
    while id := web_session(server):
        if server.ask("POST", f"/v1/sessions/{id}/pause")[0] != 204:
            return


def kept_answers(server: Served, held: Held) -> None:
    for number in range(300):
        server.ask("POST", "/v1/executions", {"code": ""}, **{"Idempotency-Key": str(number)})


def many_requests(server: Served, held: Held) -> None:
    for _ in range(400):
        held.append(server.send("GET /v1/server HTTP/1.1"))


def recorded_runs(server: Served, held: Held) -> None:
    source = {"code": "1\n#" + "x" * 4 * MIB}
    for _ in range(80):
        if server.ask("POST", "/v1/runs", source)[0] == 429:
            return


def conversations(server: Served, held: Held) -> None:
    while mcp_begin(server, ANN):
        continue


def calls(server: Served, held: Held) -> None:
    body = json.dumps(mcp_call(SLEEPS)).encode()
    for _ in range(4):
        id = mcp_begin(server, ANN)
        for number in range(40):
            own = body.replace(b'"id": 7', b'"id": %d' % (number + 10))
            held.append(server.send(f"POST /mcp HTTP/1.1\r\nMcp-Session-Id: {id}", own))


def abandoned_calls(server: Served, held: Held) -> None:
    """Calls whose client goes away, and which it could resume."""
    calls(server, held)
    while held:
        held.pop().close()


def mcp_sessions(server: Served, held: Held) -> None:
    for _ in range(4):
        id = mcp_begin(server, ANN)
        body = json.dumps(mcp_call("1", session="new")).encode()
        for _ in range(9):
            with server.send(f"POST /mcp HTTP/1.1\r\nMcp-Session-Id: {id}", body) as sock:
                while b"jsonrpc" not in (piece := sock.recv(65536)) and piece:
                    continue


def kept_events(server: Served, held: Held) -> None:
    """Answers of which nothing is read, so that their events are kept."""
    body = json.dumps(mcp_call("print('x' * 90_000)")).encode()
    for _ in range(60):
        id = mcp_begin(server, ANN)
        held.append(server.send(f"POST /mcp HTTP/1.1\r\nMcp-Session-Id: {id}", body))


def sandboxes(server: Served, held: Held) -> None:
    given = {"templateID": "base", "timeout": 60}
    while server.ask("POST", "/sandboxes", given)[0] == 201:
        continue


EVERY_SERVER = (connections, unfinished_requests, unfinished_bodies)
HOLDS: dict[str, tuple[Callable[[Served, Held], None], ...]] = {
    "web": (
        *EVERY_SERVER, executions, unread_output, waiting_threads, unread_answers, sessions,
        paused_sessions, kept_answers, many_requests, recorded_runs,
    ),
    "mcp": (*EVERY_SERVER, conversations, calls, abandoned_calls, mcp_sessions, kept_events),
    "e2b": (*EVERY_SERVER, sandboxes),
}  # fmt: skip
CASES = [(kind, take) for kind, takes in HOLDS.items() for take in takes]


@pytest.mark.parametrize(
    ("kind", "take"), CASES, ids=[f"{kind}-{each.__name__}" for kind, each in CASES]
)
def test_another_client_is_served_whatever_one_client_holds(
    kind: str, take: Callable[[Served, Held], None], tmp_path: Path
) -> None:
    held: Held = []
    with served(kind, tmp_path) as server, contextlib.ExitStack() as closing:
        closing.callback(lambda: [each.close() for each in held])
        assert REQUESTS[kind](server)
        take(server, held)
        begun = time.monotonic()
        assert REQUESTS[kind](server)
        assert time.monotonic() - begun < WAIT_SECONDS


# The daemon: a client is a process.


def connect(daemon: Daemon, held: list[RawClient]) -> RawClient:
    """Connect once more; raises AssertionError if the daemon refuses it."""
    client = RawClient(daemon.path, greets=False)
    held.append(client)
    client.say(Hello(VERSION))
    assert isinstance(client.hear(), Welcome)
    return client


def daemon_connections(daemon: Daemon, held: list[RawClient]) -> None:
    with contextlib.suppress(AssertionError, OSError):
        while len(held) < 300:
            connect(daemon, held)


def daemon_requests(daemon: Daemon, held: list[RawClient]) -> None:
    with contextlib.suppress(AssertionError, OSError):
        for _ in range(300):
            connect(daemon, held).say(program(SLEEPS))


def daemon_bytes(daemon: Daemon, held: list[RawClient]) -> None:
    """The first packets of frames that never end."""
    with contextlib.suppress(AssertionError, OSError):
        for _ in range(60):
            client = connect(daemon, held)
            client.socket.setblocking(False)
            packets = iter(_packets_of(program("#" * (20 * MIB))))
            for packet in packets:
                if not select.select([], [client.socket], [], 1)[1]:
                    break
                client.socket.send(packet)


def _packets_of(frame: Any) -> list[bytes]:
    from cellwright.runner import channel
    from cellwright.runner.messages import encode

    return list(channel.packets(encode(frame)))[:-1]


@pytest.mark.parametrize("take", [daemon_connections, daemon_requests, daemon_bytes])
def test_another_process_is_served_whatever_one_holds(
    take: Callable[[Daemon, list[RawClient]], None], tmp_path: Path
) -> None:
    held: list[RawClient] = []
    with serving_daemon(tmp_path / "socket") as daemon, contextlib.ExitStack() as closing:
        closing.callback(lambda: [each.close() for each in held])
        assert daemon.is_well()
        take(daemon, held)
        assert len(held) > 10
        begun = time.monotonic()
        assert daemon.is_well()  # this starts an interpreter, too
        assert time.monotonic() - begun < WAIT_SECONDS


# The quotas of the code and of the documents.


def quotas() -> dict[str, list[str]]:
    """Return where the code makes a quota, by what it counts."""
    found: dict[str, list[str]] = {}
    for file in sorted(SERVERS.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
                "ClientQuota",
                "quota",
            ):
                what = node.args[0]
                name = what.value if isinstance(what, ast.Constant) else ""
                if name:
                    found.setdefault(str(name), []).append(str(file.relative_to(SERVERS)))
    return found


def test_every_quota_stands_in_the_table() -> None:
    rows = (SERVERS / "README.md").read_text()
    assert len(quotas()) > 10
    assert [what for what in quotas() if f"| {what} " not in rows] == []


def test_no_line_of_waiting_requests_is_one_for_all_clients() -> None:
    """A limiter of anyio knows no clients, and its default one has 40 threads: one client could hold
    them all."""
    found = [
        f"{file.relative_to(SERVERS)}: {line.strip()}"
        for file in sorted(SERVERS.rglob("*.py")) if file.name != "http_access.py"
        for line in file.read_text().splitlines()
        if re.search(r"CapacityLimiter\(|to_thread\.run_sync\(", line)
    ]  # fmt: skip
    assert found == []


def test_a_session_that_is_resumed_delays_no_other_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading its state from a slow disk takes long."""
    begun, may_end = threading.Event(), threading.Event()
    with web_server() as web, contextlib.ExitStack() as closing:
        closing.callback(may_end.set)
        id = web.post("/v1/sessions", {}, ANNS)["session"]
        get = OwnedSessions.get

        def slow(self: OwnedSessions, owner: Any, name: str) -> Any:
            if name == id:
                begun.set()
                assert may_end.wait(60)
            return get(self, owner, name)

        monkeypatch.setattr(OwnedSessions, "get", slow)
        path = f"/v1/sessions/{id}/executions/stream"
        with ThreadPoolExecutor(1) as ann:
            answer = ann.submit(web.ask, "POST", path, ANNS, json={"code": "1"})
            assert begun.wait(60)
            assert web.post("/v1/executions", {"code": "6 * 7"}, BOBS)["value"] == 42
            may_end.set()
            assert answer.result().is_success
