"""Clients as programs have them, unmodified and without settings, against servers outside the cell."""

import hashlib
import http.server
import select
import socket
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from cellwright import Sandbox, SandboxStatus
from cellwright.policies.network.rule import NetworkRule
from cellwright.testing import inspect
from tests.conftest import policy_named, soon
from tests.network import (
    NAME,
    answer_http,
    certificate,
    count_bytes,
    needs_openssl,
    policy,
    resolving,
    serving,
    tcp,
)

pytestmark = needs_openssl
BODY = bytes(range(256)) * (16 << 12)  # 16 MiB


class Web(http.server.SimpleHTTPRequestHandler):
    """Serves a directory, and large bodies both ways."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path != "/large":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        told = hashlib.sha256(body).hexdigest().encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    def log_message(self, *_: object) -> None: ...


class Outside:
    """An HTTPS server for NAME, what it serves, and the certificate that clients trust."""

    def __init__(self, directory: Path) -> None:
        cert, context = certificate(directory, NAME)
        self.trusted = cert.read_text()
        self.directory = directory / "served"
        self.directory.mkdir()
        (self.directory / "hello").write_text("hello from outside\n")
        web = partial(Web, directory=str(self.directory))
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), web)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.port: int = self.server.server_address[1]
        self.url = f"https://{NAME}:{self.port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    made = Outside(tmp_path_factory.mktemp("outside"))
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, {NAME: [["127.0.0.1"]]})


@pytest.fixture
def box(outside: Outside) -> Iterator[Sandbox]:
    with Sandbox(policy=policy(NetworkRule(host=NAME, ports=(outside.port,))), pool=0) as box:
        yield box


def run(box: Sandbox, outside: Outside, code: str, language: str = "python") -> str:
    files = {"ca.pem": outside.trusted.encode()}
    given = {"url": outside.url} if language == "python" else {}
    code = code.replace("@URL", outside.url)
    result = box.execute(code, language, files=files, inputs=given or None)
    assert result.status is SandboxStatus.COMPLETED, result
    assert result.connections
    assert {each.name for each in result.connections} == {NAME}
    return result.stdout


_URLLIB = """
import hashlib, ssl, urllib.request
context = ssl.create_default_context(cafile="ca.pem")
def get(path, data=None): return urllib.request.urlopen(url + path, data, context=context).read()
"""


def test_urllib(box: Sandbox, outside: Outside) -> None:
    assert (
        run(box, outside, _URLLIB + "print(get('/hello').decode(), end='')")
        == "hello from outside\n"
    )


def test_large_bodies_both_ways(box: Sandbox, outside: Outside) -> None:
    code = """
body = get("/large")
print(hashlib.sha256(body).hexdigest(), get("/", body).decode())
"""
    digest = hashlib.sha256(BODY).hexdigest()
    assert run(box, outside, _URLLIB + code).split() == [digest, digest]


def test_asyncio(box: Sandbox, outside: Outside) -> None:
    code = """
import asyncio, ssl, urllib.parse
async def get(host, port):
    context = ssl.create_default_context(cafile="ca.pem")
    reader, writer = await asyncio.open_connection(host, port, ssl=context)
    writer.write(f"GET /hello HTTP/1.1\\r\\nHost: {host}\\r\\nConnection: close\\r\\n\\r\\n".encode())
    answer = await reader.read()
    writer.close()
    return answer.split()[1].decode()
async def main():
    parts = urllib.parse.urlsplit(url)
    print(*await asyncio.gather(*(get(parts.hostname, parts.port) for _ in range(30))))
asyncio.run(main())
"""
    assert run(box, outside, code).split() == ["200"] * 30


@pytest.mark.needs("node")
def test_https_of_node(box: Sandbox, outside: Outside) -> None:
    code = """
const tls = require("tls"), fs = require("fs"), https = require("https");
const ca = fs.readFileSync("ca.pem");
https.get("@URL/hello", {ca}, answer => answer.on("data", data => process.stdout.write(data)));
"""
    assert run(box, outside, code, "javascript") == "hello from outside\n"


def workshop(port: int) -> Sandbox:
    """Return a sandbox in which programs of the host run."""
    given = policy_named("workshop")
    network = policy(NetworkRule(host=NAME, ports=(port,))).network
    return Sandbox(policy=msgspec.structs.replace(given, network=network), pool=0)


@pytest.mark.needs("cgroup", "curl")
def test_curl(outside: Outside) -> None:
    with workshop(outside.port) as box, box.session() as session:
        session.upload("ca.pem", outside.trusted.encode())
        done = session.run(["curl", "-sS", "--cacert", "ca.pem", f"{outside.url}/hello"])
    assert (done.exit_code, done.stdout) == (0, "hello from outside\n"), done


@pytest.mark.needs("cgroup", "git")
def test_git_over_https(outside: Outside, tmp_path: Path) -> None:
    source = tmp_path / "source"
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (
        ["init", "-q", str(source)],
        ["-C", str(source), *identity, "commit", "-q", "--allow-empty", "-m", "first"],
    ):
        subprocess.run(["git", *command], check=True, capture_output=True)
    bare = outside.directory / "project.git"
    subprocess.run(["git", "clone", "-q", "--bare", source, bare], check=True, capture_output=True)
    subprocess.run(["git", "-C", bare, "update-server-info"], check=True)
    with workshop(outside.port) as box, box.session() as session:
        session.upload("ca.pem", outside.trusted.encode())
        done = session.run(
            "GIT_SSL_CAINFO=$PWD/ca.pem git clone -q $URL/project.git"
            " && git -C project log --format=%s",
            shell=True, env={"URL": outside.url},
        )  # fmt: skip
    assert (done.exit_code, done.stdout) == (0, "first\n"), done


def test_http_without_tls_and_keep_alive() -> None:
    with serving(answer_http) as server:
        rule = NetworkRule(host=NAME, ports=(server.port,), schemes=("http",))
        with Sandbox(policy=policy(rule), pool=0) as box:
            result = box.execute(
                "import http.client, ssl, socket\n"
                "client = http.client.HTTPConnection(name, port)\n"
                "found = []\n"
                "for path in ('/a', '/b', '/c'):\n"
                "    client.request('GET', path); found.append(client.getresponse().read().decode())\n"
                "try: ssl.create_default_context().wrap_socket(socket.create_connection((name, port)), server_hostname=name)\n"
                "except OSError as error: found.append(type(error).__name__)\n"
                "found",
                inputs={"name": NAME, "port": server.port},
            )
    assert result.value[:3] == ["/a", "/b", "/c"], result
    assert result.value[3] in ("ConnectionResetError", "SSLError", "SSLEOFError")
    assert [each.rule for each in result.violations] == ["network: TLS, which no rule allows"]
    assert len(result.connections) == 2


def test_a_slow_reader_slows_the_writer_down() -> None:
    """What is on its way is bounded: the egress process reads no more than it can pass on."""
    written = 0
    is_stuck = threading.Event()

    def serve(sock: socket.socket) -> None:
        nonlocal written
        if sock.recv(1) == b"c":
            is_stuck.wait()
            sock.sendall(b"read")
            return
        sock.setblocking(False)
        while written < 1 << 28 and select.select([], [sock], [], 0.5)[1]:
            written += sock.send(bytes(65536))
        is_stuck.set()

    code = """
import socket
writer, control = (socket.create_connection((name, port)) for _ in range(2))
writer.sendall(b"w")
control.sendall(b"c")
control.recv(9)
size = 0
while data := writer.recv(65536): size += len(data)
size
"""
    with serving(serve) as server, Sandbox(policy=policy(tcp(server.port)), pool=0) as box:
        result = box.execute(code, inputs={"name": NAME, "port": server.port})
    assert result.value == written, result
    assert 0 < written < 1 << 26


def test_each_direction_ends_by_itself() -> None:
    """The server ends its direction first, and still gets what comes after."""
    got: list[bytes] = []
    done = threading.Event()

    def serve(sock: socket.socket) -> None:
        sock.sendall(b"first")
        sock.shutdown(socket.SHUT_WR)
        while data := sock.recv(65536):
            got.append(data)
        done.set()

    with serving(serve) as server, Sandbox(policy=policy(tcp(server.port)), pool=0) as box:
        result = box.execute(
            "import socket\n"
            "sock = socket.create_connection((name, port))\n"
            "heard = b''\n"
            "while data := sock.recv(99): heard += data\n"
            "sock.sendall(b'second')\n"
            "heard.decode()",
            inputs={"name": NAME, "port": server.port},
        )
        assert done.wait(10)
    assert (result.value, b"".join(got)) == ("first", b"second")


def test_hundreds_of_connections_and_none_is_left() -> None:
    code = """
import socket
def one():
    with socket.create_connection((name, port)) as sock:
        sock.sendall(b"12345"); sock.shutdown(socket.SHUT_WR)
        return sock.recv(9)
found = {one() for _ in range(150)}
many = [socket.create_connection((name, port)) for _ in range(60)]
for sock in many: sock.sendall(b"12345"); sock.shutdown(socket.SHUT_WR)
found | {sock.recv(9) for sock in many} == {b"5"}
"""
    with serving(count_bytes) as server:
        given = policy(tcp(server.port, connections_per_second=1000.0))
        with Sandbox(policy=given, pool=0) as box:
            for _ in range(3):
                result = box.execute(code, inputs={"name": NAME, "port": server.port})
                assert result.value is True, result
                assert len(result.connections) == 210
            pid = inspect(box).egress_pid()
            # Its channel to the supervisor, and the pair by which asyncio wakes itself.
            assert soon(lambda: len(sockets_of(pid)) == 3), sockets_of(pid)
        assert not Path(f"/proc/{pid}").exists()


def sockets_of(pid: int | None) -> list[str]:
    links = [str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()]
    return [link for link in links if link.startswith("socket:")]
