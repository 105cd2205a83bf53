"""Servers of the SDK, in both generations of the protocol, over pipes and over HTTP on loopback."""

import gzip
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from cellwright import Vault
from cellwright.harness.mcp.managed_server import Elicitation
from cellwright.harness.mcp.mcp_servers import McpServers, Progressed
from cellwright.harness.tools.broker import Broker
from cellwright.policies.errors import ToolArgumentsInvalid, ToolFailed
from tests.conftest import soon
from tests.forked import exit_code_of

SERVER = Path(__file__).with_name("sdk_server.py")
EVERYWHERE = pytest.mark.parametrize(
    ("place", "protocol"),
    [(place, protocol) for place in ("pipes", "http") for protocol in ("auto", "legacy")],
    indirect=["place"],
)
SECRET = "not-for-programs"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    argv = (sys.executable, str(SERVER), "http")
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/mcp"
        process.terminate()


PIPES = {"command": sys.executable, "args": [str(SERVER), "stdio"], "sandboxed": False}


@pytest.fixture
def place(request: pytest.FixtureRequest) -> dict[str, Any]:
    if getattr(request, "param", "http") == "http":
        return {"url": request.getfixturevalue("address"), "headers": {"X-Key": "${vault:KEY}"}}
    return PIPES


@pytest.fixture
def connect(tmp_path: Path, place: dict[str, Any]) -> Iterator[Any]:
    made: list[McpServers] = []

    def make(protocol: str, **options: Any) -> McpServers:
        given = {"mcpServers": {"sdk": {**place, "protocol": protocol}}}
        vault = Vault({"KEY": SECRET})
        made.append(McpServers(given, pins=tmp_path / "pins", vault=vault, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@EVERYWHERE
def test_a_tool_is_called(connect: Any, protocol: str) -> None:
    servers = connect(protocol)
    broker = Broker(servers)
    assert broker.call("sdk.add", {"a": 40}) == {"result": 42}
    modern = servers.status()[0].protocol == "2026-07-28"
    assert modern == (protocol == "auto")
    with pytest.raises(ToolFailed, match="not today"):
        broker.call("sdk.refuse", {})
    with pytest.raises(ToolArgumentsInvalid):
        broker.call("sdk.add", {"a": "forty"})


@EVERYWHERE
def test_progress_is_told(connect: Any, protocol: str) -> None:
    told: list[Progressed] = []
    broker = Broker(connect(protocol, on_progress=told.append))
    assert broker.call("sdk.steps", {"count": 2}) == {"result": "done"}
    assert soon(lambda: len(told) == 2)
    assert told == [("sdk.steps", 1, 2, "step"), ("sdk.steps", 2, 2, "step")]


@EVERYWHERE
def test_a_question_goes_to_the_handler_and_is_declined_without_one(
    connect: Any, protocol: str
) -> None:
    asked: list[Elicitation] = []

    def answer(question: Elicitation) -> dict[str, Any]:
        asked.append(question)
        return {"ok": True}

    arguments = {"path": "/x"}
    broker = Broker(connect(protocol, elicit=answer))
    assert broker.call("sdk.delete", arguments) == {"result": "True /x"}
    assert [(each.server, each.message) for each in asked] == [("sdk", "Delete /x?")]
    assert asked[0].schema["properties"]["ok"]["type"] == "boolean"
    assert Broker(connect(protocol)).call("sdk.delete", arguments) == {"result": "False /x"}


@pytest.mark.parametrize("given", [{"ok": "perhaps"}, {}, None])
def test_an_answer_that_is_not_what_was_asked_for_declines(connect: Any, given: Any) -> None:
    broker = Broker(connect("auto", elicit=lambda asked: given))
    assert broker.call("sdk.delete", {"path": "/x"}) == {"result": "False /x"}


def test_many_threads_call_at_once(connect: Any) -> None:
    broker = Broker(connect("auto"))
    results: list[Any] = []

    def call(number: int) -> None:
        results.append(broker.call("sdk.add", {"a": number, "b": 0})["result"])

    threads = [threading.Thread(target=call, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == list(range(16))


@pytest.mark.parametrize("protocol", ["auto", "legacy"])  # it answers in JSON, or as an event
def test_too_long_an_answer_fails_and_the_next_call_is_answered(
    connect: Any, protocol: str
) -> None:
    broker = Broker(connect(protocol))
    with pytest.raises(ToolFailed):
        broker.call("sdk.long", {"size": 5_000_000})
    assert broker.call("sdk.add", {"a": 1, "b": 1}) == {"result": 2}


def test_tools_are_called_after_a_fork_too(connect: Any) -> None:
    broker = Broker(connect("auto"))
    broker.call("sdk.add", {"a": 1})
    assert exit_code_of(lambda: broker.call("sdk.add", {"a": 1}) != {"result": 3}) == 0
    assert broker.call("sdk.add", {"a": 2}) == {"result": 4}


def test_a_credential_reaches_the_server_and_no_program(address: str, tmp_path: Path) -> None:
    given = {"mcpServers": {"sdk": {"url": address, "headers": {"X-Key": "Bearer ${vault:KEY}"}}}}
    with McpServers(given, pins=tmp_path / "pins", vault=Vault({"KEY": SECRET})) as servers:
        broker = Broker(servers)
        assert broker.call("sdk.header", {"name": "x-key"}) == {"result": "Bearer [credential]"}
        assert broker.call("sdk.header", {"name": "host"})["result"] in address
        assert SECRET not in repr(servers.status()) + repr(servers.configs)


class _Compressing(BaseHTTPRequestHandler):
    """Answers every request with a megabyte of spaces, as small as they can be."""

    asked: ClassVar[list[str | None]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.asked.append(self.headers["accept-encoding"])
        body = gzip.compress(b" " * 1_000_000)
        self.send_response(200)
        for name, value in (
            ("type", "application/json"),
            ("encoding", "gzip"),
            ("length", len(body)),
        ):
            self.send_header(f"content-{name}", str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def test_nothing_compressed_is_unfolded(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Compressing) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        given = {"mcpServers": {"sdk": {"url": f"http://127.0.0.1:{http.server_port}/mcp"}}}
        try:
            with (
                McpServers(given, pins=tmp_path / "pins") as servers,
                pytest.raises(ToolFailed, match="it sent a compressed answer"),
            ):
                servers.check("sdk")
        finally:
            http.shutdown()
            thread.join()
    assert set(_Compressing.asked) == {"identity"}


def test_a_server_that_does_not_listen_is_told(tmp_path: Path) -> None:
    given = {"mcpServers": {"sdk": {"url": "http://127.0.0.1:9/mcp", "connect_timeout": 5}}}
    with McpServers(given, pins=tmp_path / "pins") as servers:
        assert servers.list_tools() == []
        assert servers.status()[0].state == "failed"
        with pytest.raises(ToolFailed, match="sdk cannot be used"):
            servers.get("sdk.add")


def test_a_change_of_tools_is_followed(tmp_path: Path) -> None:
    given = {"mcpServers": {"sdk": PIPES}}
    with McpServers(given, pins=tmp_path / "pins") as servers:
        broker = Broker(servers)
        broker.call("sdk.add", {"a": 1})
        assert "sdk.refuse" in [spec.name for spec in servers.specs()]
        broker.call("sdk.grow", {})
        assert soon(lambda: "sdk.refuse" not in [spec.name for spec in servers.specs()])
