"""Ports of cells that the host reaches: what gets through, what does not, and when it ends."""

import _socket
import base64
import hashlib
import os
import socket
import stat
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cellwright import ExposedPort, Network, PolicyError, Sandbox, Session
from cellwright.runner.launching.spawn import interpreter
from tests.conftest import policy_named

pytestmark = pytest.mark.needs("userns")

SECONDS = 30
SERVER = """
import http.server, threading
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        body = f"{name} {self.path}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
"""
WEBSOCKET = """
import base64, hashlib, socket, threading
def serve():
    while True:
        sock, _ = listener.accept()
        head = b""
        while b"\\r\\n\\r\\n" not in head:
            head += sock.recv(1000)
        key = next(l for l in head.split(b"\\r\\n") if l.startswith(b"Sec-WebSocket-Key: "))[19:]
        digest = hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
        sock.sendall(b"HTTP/1.1 101 Switching Protocols\\r\\nUpgrade: websocket\\r\\n"
            b"Connection: Upgrade\\r\\nSec-WebSocket-Accept: " + base64.b64encode(digest) + b"\\r\\n\\r\\n")
        while len(frame := sock.recv(1000)) > 6:
            mask, masked = frame[2:6], frame[6:]
            text = bytes(byte ^ mask[n % 4] for n, byte in enumerate(masked)).upper()
            sock.sendall(bytes([0x81, len(text)]) + text)
listener = socket.create_server(("127.0.0.1", 9000))
threading.Thread(target=serve, daemon=True).start()
"""
LOOPBACK = msgspec.structs.replace(policy_named("strict"), network=Network(loopback=True))


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(policy=LOOPBACK, pool=2) as box:
        yield box


@pytest.fixture
def session(sandbox: Sandbox) -> Iterator[Session]:
    with sandbox.session() as opened:
        assert opened.execute(SERVER, inputs={"name": "first"}).ok
        yield opened


def connect(exposed: ExposedPort) -> socket.socket:
    if isinstance(exposed.address, str):
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(exposed.address)
        except OSError:
            sock.close()
            raise
    else:
        sock = socket.create_connection(exposed.address)
    sock.settimeout(SECONDS)
    return sock


def everything_of(sock: socket.socket) -> bytes:
    with sock.makefile("rb") as file:
        return file.read()


def asked(exposed: ExposedPort, path: str = "/") -> bytes:
    with connect(exposed) as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        return everything_of(sock).partition(b"\r\n\r\n")[2]


# What gets through


def test_a_server_answers_on_a_unix_socket_of_this_user_alone(session: Session) -> None:
    with session.expose(8000) as exposed:
        assert isinstance(exposed.address, str)
        assert exposed.port == 8000
        assert stat.S_IMODE(os.stat(exposed.address).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(os.path.dirname(exposed.address)).st_mode) == 0o700
        assert asked(exposed, "/a") == b"first /a"
        assert exposed.url.startswith("http+unix://%2F")


def test_the_mode_of_no_other_file_changes(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a cell that may write to the directory put a link in the place of the socket."""
    other, place = tmp_path / "other", tmp_path / "port"
    other.touch(0o644)
    modes = []

    def bind(sock: socket.socket, address: str) -> None:
        _socket.socket.bind(sock, address)
        modes.append(stat.S_IMODE(os.lstat(address).st_mode))
        os.unlink(address)
        os.symlink(other, address)

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "bind", bind, raising=False)
        session.expose(8000, path=place).close()
    assert modes == [0o600]
    assert stat.S_IMODE(other.stat().st_mode) == 0o644


def test_a_server_answers_on_a_port_of_the_host(session: Session) -> None:
    with session.expose(8000, host_port=0) as exposed:
        with urllib.request.urlopen(f"{exposed.url}/b", timeout=SECONDS) as answer:
            assert answer.read() == b"first /b"
        assert exposed.address[0] == "127.0.0.1"


def test_a_server_answers_at_a_path(session: Session, tmp_path: Path) -> None:
    with session.expose(8000, path=tmp_path / "s") as exposed:
        assert exposed.address == str(tmp_path / "s")
        assert asked(exposed) == b"first /"
    assert list(tmp_path.iterdir()) == []


def test_a_websocket_stays_open_both_ways(session: Session) -> None:
    assert session.execute(WEBSOCKET).ok
    key = base64.b64encode(os.urandom(16))
    with session.expose(9000) as exposed, connect(exposed) as sock:
        sock.sendall(
            b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + key + b"\r\n\r\n"
        )
        head = b""
        while b"\r\n\r\n" not in head:
            head += sock.recv(1000)
        accept = hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
        assert base64.b64encode(accept) in head
        for text in (b"one", b"two", b"three"):
            sock.sendall(bytes([0x81, 0x80 | len(text)]) + bytes(4) + text)
            answer = sock.recv(2 + len(text), socket.MSG_WAITALL)
            assert answer == bytes([0x81, len(text)]) + text.upper()


def test_many_connections_at_once_mix_nothing_up(session: Session) -> None:
    with session.expose(8000) as exposed:
        socks = [connect(exposed) for _ in range(20)]
        for number, sock in enumerate(socks):
            sock.sendall(b"GET /%d HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % number)
        for number, sock in enumerate(socks):
            with sock:
                assert everything_of(sock).endswith(b"\r\n\r\nfirst /%d" % number)


def test_a_long_lived_program_is_reached_too() -> None:
    server = policy_named("server")
    policy = msgspec.structs.replace(server, network=Network(loopback=True))
    code = (
        "import http.server\n"
        "server = http.server.HTTPServer(('127.0.0.1', 8000), http.server.SimpleHTTPRequestHandler)\n"
        "print('up', flush=True)\nserver.serve_forever()"
    )
    with Sandbox(policy=policy, pool=0) as box:
        argv = (interpreter(), "-I", "-S", "-c", code)
        with box.program(argv, files={"hello.txt": b"from a program"}) as program:
            assert os.read(program.stdout, 3) == b"up\n"
            with program.expose(8000) as first, program.expose(8000, host_port=0) as second:
                assert (
                    asked(first, "/hello.txt") == asked(second, "/hello.txt") == b"from a program"
                )
            last = program.expose(8000)
        with pytest.raises(FileNotFoundError):
            connect(last)


# What does not


def test_each_exposed_port_leads_to_its_own_cell(session: Session, sandbox: Sandbox) -> None:
    with sandbox.session() as second:
        assert second.execute(SERVER, inputs={"name": "second"}).ok
        with session.expose(8000) as one, second.expose(8000) as two:
            assert [asked(each) for each in (one, two, one)] == [
                b"first /", b"second /", b"first /",
            ]  # fmt: skip


def test_a_cell_does_not_reach_what_the_host_exposes(session: Session) -> None:
    """Its loopback is another network: the same program on the host would connect."""
    with session.expose(8000, host_port=0) as exposed:
        connect(exposed).close()
        program = (
            "import socket\nsocket.socket().connect_ex(('127.0.0.1', port)), "
            "socket.socket(socket.AF_UNIX).connect_ex(path)"
        )
        with session.expose(8000) as other:
            inputs = {"port": exposed.address[1], "path": other.address}
            assert session.execute(program, inputs=inputs).value == [111, 2]


def test_a_port_without_a_server_closes_the_connection(session: Session) -> None:
    with session.expose(8001) as exposed, connect(exposed) as sock:
        assert sock.recv(1) == b""


@pytest.mark.parametrize(
    "given",
    [
        {"port": 0}, {"port": 65_536}, {"port": True}, {"port": "8000"},
        {"port": 8000, "host_port": -1}, {"port": 8000, "host_port": 0, "path": "/tmp/x"},
        {"port": 8000, "path": "relative\0"}, {"port": 8000, "path": "/" + "x" * 200},
    ],
)  # fmt: skip
def test_invalid_arguments_are_named(session: Session, given: dict[str, object]) -> None:
    with pytest.raises(PolicyError, match="^(port|host_port|path): "):
        session.expose(**given)  # type: ignore[arg-type]


def test_an_address_in_use_is_refused_and_left_alone(session: Session, tmp_path: Path) -> None:
    with session.expose(8000, path=tmp_path / "s", host_port=None) as exposed:
        with pytest.raises(PolicyError, match="path: cannot listen at .*in use"):
            session.expose(8000, path=tmp_path / "s")
        assert asked(exposed) == b"first /"
    refusal = pytest.raises(PolicyError, match="host_port: cannot listen on .*in use")
    with session.expose(8000, host_port=0) as exposed, refusal:
        session.expose(8000, host_port=exposed.address[1])


def test_a_policy_without_loopback_exposes_nothing() -> None:
    refusal = pytest.raises(
        PolicyError, match="expose: .*\nhint: use policy='standard', or set network.loopback"
    )
    with Sandbox(pool=0) as box, box.session() as opened, refusal:
        opened.expose(8000)


# When it ends


def test_it_ends_with_its_session(sandbox: Sandbox) -> None:
    opened = sandbox.session()
    assert opened.execute(SERVER, inputs={"name": "x"}).ok
    exposed, on_port = opened.expose(8000), opened.expose(8000, host_port=0)
    with connect(exposed) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        heard = b""
        while not heard.endswith(b"x /"):
            heard += sock.recv(1000)
        opened.close()
        assert sock.recv(1) == b""
    assert not os.path.exists(os.path.dirname(exposed.address))
    with pytest.raises(ConnectionRefusedError):
        connect(on_port)
    exposed.close()


def test_it_ends_with_a_session_that_is_lost(sandbox: Sandbox) -> None:
    with sandbox.session() as opened:
        exposed = opened.expose(8000)
        opened.execute("import os; os._exit(3)")
        assert opened.lost
        with pytest.raises(FileNotFoundError):
            connect(exposed)


def test_it_ends_with_its_sandbox() -> None:
    with Sandbox(policy=LOOPBACK, pool=0) as box:
        exposed = box.session().expose(8000)
    with pytest.raises(FileNotFoundError):
        connect(exposed)


def test_a_socket_that_its_user_has_replaced_is_left_alone(
    session: Session, tmp_path: Path
) -> None:
    with session.expose(8000, path=tmp_path / "s"):
        (tmp_path / "s").unlink()
        (tmp_path / "s").write_text("mine")
    assert (tmp_path / "s").read_text() == "mine"
