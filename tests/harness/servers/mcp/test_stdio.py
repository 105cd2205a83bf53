"""A server behind a pipe, in a process of its own: bad clients, and ends of all kinds."""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from mcp import Client

from cellwright.harness.servers.mcp.mcp_lifecycle import LineReader, LineWriter
from cellwright.runner.audit.verification import read
from tests.conftest import ROOT, soon
from tests.harness.servers.mcp.servers import (
    BOUND_SECONDS,
    COMMAND,
    OPTIONS,
    call,
    drive,
    environment,
    piped,
    tools_file,
    yes,
)  # fmt: skip
from tests.runner.test_leftovers import cgroups_of, descendants

pytestmark = pytest.mark.needs("userns")

HELLO = {
    "jsonrpc": "2.0", "id": 0, "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
}  # fmt: skip
READY = {"jsonrpc": "2.0", "method": "notifications/initialized"}
ENDLESS = "import time\nprint('begun', flush=True)\nwhile True: time.sleep(1)"


def request(id: int, name: str, arguments: Any, **params: Any) -> dict[str, Any]:
    return {
        "jsonrpc": "2.0", "id": id, "method": "tools/call",
        "params": {"name": name, "arguments": arguments, **params},
    }  # fmt: skip


class Piped:
    """A server, spoken to by hand."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        assert process.stdin
        assert process.stdout
        self._stdin, self._stdout = process.stdin, process.stdout

    def send(self, *messages: Any) -> None:
        for message in messages:
            data = message if isinstance(message, bytes) else json.dumps(message).encode()
            self._stdin.write(data + b"\n")
        self._stdin.flush()

    def read(self) -> Any:
        """Return the next message; raises ValueError for anything else on stdout."""
        return json.loads(self._stdout.readline())

    def answer(self, id: int) -> Any:
        while True:
            message = self.read()
            if message.get("id") == id:
                return message

    def shake_hands(self) -> None:
        self.send(HELLO)
        assert self.answer(0)["result"]["serverInfo"]["name"] == "cellwright"
        self.send(READY)

    def begin_endless(self, id: int) -> None:
        """Start a program that never ends, and wait until it runs."""
        self.send(request(id, "run_code", {"code": ENDLESS}, _meta={"progressToken": id}))
        while True:
            message = self.read()
            if message.get("method") == "notifications/progress":
                assert message["params"]["message"] == "begun\n"
                return

    def close(self) -> None:
        self._stdin.close()


@contextmanager
def by_hand(*options: str, **variables: str) -> Iterator[Piped]:
    """Give a server with these variables beside the few that it needs, and see that it ends."""
    with subprocess.Popen(
        [*COMMAND, *OPTIONS, *options], cwd=ROOT, env=environment() | variables, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        timer = threading.Timer(BOUND_SECONDS, process.kill)
        timer.start()
        try:
            yield Piped(process)
        finally:
            timer.cancel()
            if process.poll() is None:
                process.kill()


def left_by(process: "subprocess.Popen[bytes]", before: list[int]) -> list[object]:
    """Return what is left of a server that has ended."""
    alive = [
        pid for pid in before if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"
    ]
    return [*alive, *cgroups_of(process.pid)]


@pytest.mark.slow
def test_a_client_of_the_sdk_is_served(tmp_path: Path) -> None:
    """In the mode in which it finds out by itself, and in either."""
    heard: list[str] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append(message or "")

    async def body(client: Client) -> None:
        assert (await call(client, "run_code", code="import tools\ntools.add(1, 2)"))["value"] == 3
        told = await call(client, "call_tool", name="pay", arguments={"to": "ann", "amount": 1})
        assert told == {"result": "paid 1 to ann"}
        await client.call_tool("run_code", {"code": "print('hi')"}, progress_callback=hear)

    for mode in ("auto", "legacy", "2026-07-28"):
        heard.clear()
        drive(piped("--tools", str(tools_file(tmp_path)), mode=mode, person=yes()), body)
        assert heard == ["hi\n"]


@pytest.mark.parametrize("end", ["its input is closed", "SIGTERM", "SIGINT"])
def test_a_server_that_ends_leaves_nothing(end: str) -> None:
    with by_hand() as server:
        server.shake_hands()
        server.send(request(1, "run_code", {"code": "x = 1", "session": "new"}))
        assert server.answer(1)["result"]["structuredContent"]["status"] == "completed"
        server.begin_endless(2)
        below = descendants(server.process.pid)
        assert below
        if end.startswith("SIG"):
            server.process.send_signal(getattr(signal, end))
        else:
            server.close()
        rest = server.process.stdout.read() if server.process.stdout else b""
        assert server.process.wait(BOUND_SECONDS) == 0
        for line in rest.splitlines():
            assert json.loads(line)["jsonrpc"] == "2.0"
        assert soon(lambda: not left_by(server.process, below)), left_by(server.process, below)


def test_a_server_whose_client_is_gone_without_a_word_ends() -> None:
    """Both ends at once, as of a client that was killed."""
    with by_hand() as server:
        server.shake_hands()
        server.begin_endless(1)
        below = descendants(server.process.pid)
        assert server.process.stdout
        server.process.stdout.close()
        server.close()
        server.process.wait(BOUND_SECONDS)
        assert soon(lambda: not left_by(server.process, below))


def test_a_server_ends_although_its_output_is_not_read() -> None:
    with by_hand() as server:
        server.shake_hands()
        code = "print('x' * 90_000)"
        server.send(*(request(id, "run_code", {"code": code}) for id in range(1, 9)))
        server.read()  # they are under way, and fill the pipe
        below = descendants(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(BOUND_SECONDS) == 0
        assert soon(lambda: not left_by(server.process, below))


def ends_in(trail: Path) -> list[str]:
    """Return how programs ended that the trail knows of, so far."""
    actions = [entry.action for entry in read(trail) if entry.category == "execution"]
    return [action for action in actions if action != "start"]


def test_a_call_that_is_cancelled_is_killed(tmp_path: Path) -> None:
    trail = tmp_path / "trail"
    with by_hand("--audit", str(trail)) as server:
        server.shake_hands()
        server.begin_endless(2)
        assert ends_in(trail) == []
        cancel = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 2}}
        server.send(cancel)
        assert soon(lambda: ends_in(trail) == ["cancelled"])
        server.send(request(3, "run_code", {"code": "2 + 2"}))
        assert server.read()["id"] == 3  # and the protocol wants no answer to the other
        server.close()
        server.process.wait(BOUND_SECONDS)


@pytest.mark.slow
def test_a_storm_of_calls_and_cancellations_is_survived() -> None:
    with by_hand() as server:
        server.shake_hands()
        for id in range(1, 301):
            server.send(
                request(id, "run_code", {"code": "import time\ntime.sleep(60)"}),
                {
                    "jsonrpc": "2.0",
                    "method": "notifications/cancelled",
                    "params": {"requestId": id},
                },
            )
        server.send(request(1000, "run_code", {"code": "2 + 2"}))
        assert server.answer(1000)["result"]["structuredContent"]["value"] == 4
        server.close()
        assert server.process.wait(BOUND_SECONDS) == 0


@pytest.mark.slow
def test_thousands_of_requests_are_all_answered() -> None:
    count = 3000
    with by_hand() as server:
        server.shake_hands()
        sending = threading.Thread(
            target=lambda: server.send(
                *(request(id, "search_tools", {"query": "x"}) for id in range(1, count + 1))
            )
        )
        sending.start()
        answers = {}
        while len(answers) < count:
            message = server.read()
            answers[message["id"]] = message
        sending.join()
        assert answers.keys() == set(range(1, count + 1))
        refused = [each for each in answers.values() if "error" in each]
        assert {each["error"]["code"] for each in refused} <= {-32000}
        server.close()
        assert server.process.wait(BOUND_SECONDS) == 0


GARBAGE = [
    b"", b"\x00\xff\xfe", b"{", b"[]", b"[" * 100_000, b'{"jsonrpc": "2.0"}', b"null", b"1" * 10_000,
    b'{"jsonrpc": "1.0", "id": 1, "method": "tools/list"}', b'{"jsonrpc":"2.0","id":{},"method":"ping"}',
    b'{"jsonrpc":"2.0","id":null,"method":7}', b'"\\ud800"',
]  # fmt: skip
ODD = [
    {"jsonrpc": "2.0", "id": 101, "method": "no/such/method"},
    {"jsonrpc": "2.0", "id": 102, "method": "tools/call"},
    {"jsonrpc": "2.0", "id": 103, "method": "tools/call", "params": []},
    {"jsonrpc": "2.0", "id": 104, "method": "tools/call", "params": {"name": 7}},
    {
        "jsonrpc": "2.0",
        "id": 105,
        "method": "tools/call",
        "params": {"name": "run_code", "arguments": "1"},
    },
    {
        "jsonrpc": "2.0",
        "id": 106,
        "method": "tools/call",
        "params": {"name": "\ud800", "arguments": {}},
    },
    {
        "jsonrpc": "2.0",
        "id": 107,
        "method": "resources/read",
        "params": {"uri": "file:///etc/shadow"},
    },
    {"jsonrpc": "2.0", "id": 108, "method": "logging/setLevel", "params": {"level": "debug"}},
    {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 9999}},
    {"jsonrpc": "2.0", "id": 55, "result": {"action": "accept", "content": {"approve": True}}},
]


def test_garbage_is_survived() -> None:
    with by_hand() as server:
        server.send(*GARBAGE)
        server.shake_hands()
        server.send(*GARBAGE, *ODD, request(1, "run_code", {"code": "2 + 2"}))
        assert server.answer(1)["result"]["structuredContent"]["value"] == 4
        server.close()
        assert server.process.wait(BOUND_SECONDS) == 0


def test_a_message_that_is_too_long_is_not_kept() -> None:
    with by_hand() as server:
        server.shake_hands()
        before = psutil.Process(server.process.pid).memory_info().rss
        line = b'{"jsonrpc":"2.0","id":1,"method":"ping","params":{"x":"' + b"x" * (1 << 20)
        for _ in range(64):
            server._stdin.write(line)
        server.send(b'"}}', request(2, "run_code", {"code": "2 + 2"}))
        assert server.answer(2)["result"]["structuredContent"]["value"] == 4
        assert psutil.Process(server.process.pid).memory_info().rss - before < 150 * (1 << 20)
        server.close()
        assert server.process.wait(BOUND_SECONDS) == 0
        assert server.process.stderr
        assert b"is not read" in server.process.stderr.read()


LOUD = """
import atexit, os, sys, threading
from cellwright import tool
print("at import", sys.stdin.read())
os.system("echo from a child at import")
atexit.register(print, "at exit")

@tool
def loud() -> int:
    "Be loud."
    print("in a call")
    os.system("echo from a child in a call")
    return 1
"""


@pytest.mark.parametrize("buffered", [True, False])
def test_what_a_tool_of_the_host_prints_is_no_part_of_the_protocol(
    tmp_path: Path, buffered: bool
) -> None:
    """Whenever it is flushed: while the file is imported, in a call, and as the process ends."""
    file = tmp_path / "loud.py"
    file.write_text(LOUD)
    variables = {} if buffered else {"PYTHONUNBUFFERED": "1"}
    with by_hand("--tools", str(file), **variables) as server:
        server.shake_hands()
        server.send(request(1, "call_tool", {"name": "loud"}))
        assert server.read()["id"] == 1
        server.close()
        assert server.process.stdout
        assert server.process.stdout.read() == b""
        assert server.process.wait(BOUND_SECONDS) == 0
        assert server.process.stderr
        told = server.process.stderr.read()
    for words in (b"at import", b"from a child at import", b"in a call", b"in a call", b"at exit"):
        assert words in told


# Parts


def lines_of(data: bytes, longest: int) -> list[str]:
    reading, writing = os.pipe()

    def write() -> None:
        with os.fdopen(writing, "wb") as file:
            file.write(data)

    async def read() -> list[str]:
        return [line async for line in LineReader(reading, longest)]

    thread = threading.Thread(target=write)
    thread.start()
    try:
        return anyio.run(read)
    finally:
        thread.join()
        os.close(reading)


def test_lines_are_read_whole_or_not_at_all() -> None:
    assert lines_of(b"one\ntwo\n\nthree", 10) == ["one", "two", ""]
    assert lines_of(b"one\n" + b"x" * 200_000 + b"\ntwo\n", 1000) == ["one", "", "two"]
    assert lines_of(b"\xff\n", 10) == ["\ufffd"]


def test_a_line_that_decodes_to_many_times_its_size_is_not_read() -> None:
    hostile = b"[" + b"{}," * 100_000 + b"{}]"
    honest = b"[" + b"1234567," * 100_000 + b"1]"
    found = lines_of(hostile + b"\n" + honest + b"\ntwo\n", 1 << 20)
    assert found == ["", honest.decode(), "two"]


def test_text_is_written_whole_as_it_is_taken() -> None:
    reading, writing = os.pipe()
    taken: list[bytes] = []

    def read() -> None:
        with os.fdopen(reading, "rb") as file:
            taken.append(file.read())

    thread = threading.Thread(target=read)
    thread.start()
    anyio.run(LineWriter(writing).write, "ü" * 300_000 + "\ud800")
    os.close(writing)
    thread.join()
    assert taken == ["ü".encode() * 300_000 + b"?"]
