"""Libraries and programs that speak HTTP and WebSocket, unmodified in cells, against one real server.

Its certificate is one that the host trusts; no client is told so.
"""

import hashlib
import sysconfig
from collections.abc import Iterator

import msgspec
import pytest

from cellwright import Sandbox, SandboxStatus
from cellwright.policies.network.rule import NetworkRule
from cellwright.policies.policy import Limits, Network, Policy, Python
from cellwright.runner.host import plans
from cellwright.runner.requests.result import NetworkConnection
from tests.conftest import OPTIONAL, policy_named
from tests.network import NAME, needs_openssl, policy, resolving
from tests.web_server import LARGE, WebServer

pytestmark = needs_openssl
# A client of TLS that closes without waiting for the server's close_notify may reset the connection by that.
ENDS = {"ok", "the program had ended", "reset by the program"}
DIGEST = hashlib.sha256(LARGE).hexdigest()


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    server = WebServer(tmp_path_factory.mktemp("web"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def network(outside: WebServer) -> Iterator[Network]:
    with pytest.MonkeyPatch.context() as patch:
        resolving(patch, {NAME: [["127.0.0.1"]]})
        patch.setattr(plans, "_CERTIFICATES", (str(outside.trusted),))
        yield policy(NetworkRule(host=NAME, ports=(outside.port,))).network


@pytest.fixture(scope="module")
def box(network: Network) -> Iterator[Sandbox]:
    """A sandbox whose programs have the libraries of the tests' environment."""
    given = Policy(
        network=network,
        python=Python(path=(sysconfig.get_path("purelib"),)),
        limits=Limits(memory_bytes=1 << 30, wall_seconds=120),
        optional_layers=OPTIONAL,
    )
    with Sandbox(policy=given, pool=0) as box:
        yield box


def run(
    box: Sandbox, outside: WebServer, code: str, language: str = "python"
) -> tuple[str, tuple[NetworkConnection, ...]]:
    """Return what a program printed, and its connections."""
    result = box.execute(code.replace("@URL", outside.url), language)
    assert result.status is SandboxStatus.COMPLETED, (result, result.stderr)
    assert {each.name for each in result.connections} == {NAME}
    assert {each.outcome for each in result.connections} <= ENDS
    assert not [each for each in result.violations if each.rule.startswith("network")]
    return result.stdout, result.connections


def test_requests(box: Sandbox, outside: WebServer) -> None:
    code = """
import requests
with requests.Session() as session:
    print(session.get("@URL/hello").text)
    print(session.post("@URL/digest", data=session.get("@URL/large").content).text)
"""
    out, connections = run(box, outside, code)
    assert out.splitlines() == ["hello by HTTP/1.1", DIGEST]
    assert len(connections) == 1  # it was kept alive
    assert min(connections[0].sent_bytes, connections[0].received_bytes) > len(LARGE)


@pytest.mark.parametrize(("http2", "version"), [(False, "1.1"), (True, "2")])
def test_httpx(box: Sandbox, outside: WebServer, http2: bool, version: str) -> None:
    code = f"""
import httpx
with httpx.Client(http2={http2}, timeout=60) as client:
    print(client.get("@URL/hello").text)
    print(client.post("@URL/digest", content=client.get("@URL/large").content).text)
"""
    out, connections = run(box, outside, code)
    assert out.splitlines() == [f"hello by HTTP/{version}", DIGEST]
    assert len(connections) == 1


def test_many_streams_of_one_http2_connection(box: Sandbox, outside: WebServer) -> None:
    code = """
import asyncio, hashlib, httpx
async def main():
    async with httpx.AsyncClient(http2=True, timeout=60) as client:
        await client.get("@URL/hello")
        answers = await asyncio.gather(*(client.get("@URL/large") for _ in range(8)))
        print({hashlib.sha256(each.content).hexdigest() for each in answers})
asyncio.run(main())
"""
    out, connections = run(box, outside, code)
    assert (out, len(connections)) == (f"{{{DIGEST!r}}}\n", 1)


def test_events_arrive_one_by_one(box: Sandbox, outside: WebServer) -> None:
    """The server sends the next one only after the client has told of the last."""
    code = """
import httpx
with httpx.Client(timeout=60) as client, client.stream("GET", "@URL/events") as events:
    for line in events.iter_lines():
        if line:
            print(line)
            client.post("@URL/heard")
"""
    out, _ = run(box, outside, code)
    assert out.splitlines() == ["data: 0", "data: 1", "data: 2"]


def test_aiohttp(box: Sandbox, outside: WebServer) -> None:
    code = """
import aiohttp, asyncio
async def main():
    async with aiohttp.ClientSession() as session:
        async def get(path):
            async with session.get("@URL" + path) as answer:
                return await answer.read()
        print({each.decode() for each in await asyncio.gather(*(get("/hello") for _ in range(20)))})
        async with session.post("@URL/digest", data=await get("/large")) as answer:
            print(await answer.text())
        async with session.ws_connect("@URL/echo") as socket:
            await socket.send_bytes(b"over a websocket")
            print((await socket.receive_bytes()).decode())
asyncio.run(main())
"""
    out, _ = run(box, outside, code)
    assert out.splitlines() == ["{'hello by HTTP/1.1'}", DIGEST, "over a websocket"]


def test_websockets(box: Sandbox, outside: WebServer) -> None:
    code = """
from websockets.sync.client import connect
with connect("@URL/echo".replace("https", "wss"), max_size=None) as socket:
    data = bytes(1 << 20)
    for _ in range(3):
        socket.send(data)
        assert socket.recv() == data
    print("echoed")
"""
    out, connections = run(box, outside, code)
    assert (out, len(connections)) == ("echoed\n", 1)


def test_pip_installs_from_an_index(box: Sandbox, outside: WebServer) -> None:
    code = """
import runpy, sys
sys.argv = ["pip", "install", "--no-cache-dir", "--disable-pip-version-check", "--quiet",
            "--index-url", "@URL/simple", "--target", "installed", "thing"]
try:
    runpy.run_module("pip", run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
print(open("installed/thing.py").read())
"""
    out, _ = run(box, outside, code)
    assert "answer = 42" in out


@pytest.mark.needs("node")
def test_fetch_of_node(box: Sandbox, outside: WebServer) -> None:
    code = """
(async () => {
    const large = await (await fetch("@URL/large")).arrayBuffer();
    console.log(await (await fetch("@URL/hello")).text());
    console.log(await (await fetch("@URL/digest", {method: "POST", body: large})).text());
})();
"""
    out, _ = run(box, outside, code, "javascript")
    assert out.splitlines() == ["hello by HTTP/1.1", DIGEST]


@pytest.mark.needs("ruby")
def test_net_http_of_ruby(box: Sandbox, outside: WebServer) -> None:
    code = """
require "net/http"
uri = URI("@URL/hello")
Net::HTTP.start(uri.host, uri.port, use_ssl: true) do |http|
  puts http.get("/hello").body
  puts http.post("/digest", http.get("/large").body).body
end
"""
    out, connections = run(box, outside, code, "ruby")
    assert out.splitlines() == ["hello by HTTP/1.1", DIGEST]
    assert len(connections) == 1


def test_a_connection_closed_before_its_end_was_read_is_the_programs_doing(
    box: Sandbox, outside: WebServer
) -> None:
    code = """
import select, socket, ssl, urllib.request
host, port = "@URL".removeprefix("https://").split(":")
with socket.create_connection((host, port)) as sock:
    with ssl.create_default_context().wrap_socket(sock, server_hostname=host) as wrapped:
        wrapped.sendall(b"GET /large HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
        select.select([wrapped], [], [])
urllib.request.urlopen("@URL/hello").read()
"""
    _, connections = run(box, outside, code)
    assert "reset by the program" in [each.outcome for each in connections]


@pytest.mark.needs("cgroup", "curl")
def test_curl_by_http2(network: Network, outside: WebServer) -> None:
    """And by a slow reader, which takes a body in a second or so."""
    given = msgspec.structs.replace(policy_named("workshop"), network=network)
    curl = ["curl", "--silent", "--show-error", "--http2"]
    with Sandbox(policy=given, pool=0) as box, box.session() as session:
        done = session.run([*curl, f"{outside.url}/hello"])
        assert (done.exit_code, done.stdout) == (0, "hello by HTTP/2"), done
        slow = session.run([*curl, "--limit-rate", "7M", "-o", "large", f"{outside.url}/large"])
        assert slow.exit_code == 0, slow
        assert session.download("large") == LARGE
