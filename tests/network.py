"""Servers outside of cells, and names that lead to them."""

import contextlib
import json
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cellwright.policies.network.rule import NetworkRule
from cellwright.policies.policy import Network, Policy
from tests.conftest import OPTIONAL
from tests.faults.injection import shim

LOOPBACK = "127.0.0.0/8"  # loopback of the host, where servers of tests are
NAME = "api.example.org"
needs_openssl = pytest.mark.needs("openssl")  # it makes the keys

# The host's resolver is replaced in the egress process alone: each lookup of a name takes its next
# answer, and the last one again and again.
_ANSWERS = """
def _stand_in():
    import json, socket, sys
    if "cellwright.runner.egress.main" not in sys.modules:
        return
    answers, real = json.loads({answers!r}), socket.getaddrinfo
    def getaddrinfo(host, port, *rest, **more):
        left = answers.get(host)
        if left is None:
            raise socket.gaierror(socket.EAI_NONAME, "not known to the test")
        now = left.pop(0) if len(left) > 1 else left[0]
        return [found for each in now for found in real(each, port, *rest, **more)]
    socket.getaddrinfo = getaddrinfo
_stand_in()
del _stand_in
"""


def resolving(patch: pytest.MonkeyPatch, answers: dict[str, list[list[str]]]) -> None:
    """Have names resolve outside as `answers` says: for each name, one list of addresses a lookup."""
    code = _ANSWERS.format(answers=json.dumps(answers))
    shim(f"exec({code!r});".replace("{", "{{").replace("}", "}}"), patch)


def policy(*rules: NetworkRule, addresses: tuple[str, ...] = (LOOPBACK,), **more: object) -> Policy:
    network = Network(allow=rules, addresses=addresses)
    return Policy(name="network", network=network, optional_layers=OPTIONAL, **more)  # type: ignore[arg-type]


def tcp(port: int, host: str = NAME, **caps: object) -> NetworkRule:
    """Return a rule that allows any bytes on `port`."""
    return NetworkRule(host=host, ports=(port,), schemes=("tcp",), **caps)  # type: ignore[arg-type]


class Server:
    """Serves each connection in a thread; counts them."""

    def __init__(
        self, serve: Callable[[socket.socket], None], context: ssl.SSLContext | None
    ) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._serve = serve
        self._context = context
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                sock, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._one, args=(sock,), daemon=True).start()

    def _one(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError), sock:
            if self._context:
                with self._context.wrap_socket(sock, server_side=True) as encrypted:
                    self._serve(encrypted)
            else:
                self._serve(sock)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@contextlib.contextmanager
def serving(
    serve: Callable[[socket.socket], None], context: ssl.SSLContext | None = None
) -> Iterator[Server]:
    server = Server(serve, context)
    try:
        yield server
    finally:
        server.close()


def count_bytes(sock: socket.socket) -> None:
    """Read to the end, then say how many bytes there were."""
    size = 0
    while data := sock.recv(65536):
        size += len(data)
    sock.sendall(str(size).encode())


def answer_http(sock: socket.socket) -> None:
    """Answer requests of one connection with their own path, by HTTP/1.1."""
    buffer = b""
    while data := sock.recv(65536):
        buffer += data
        while b"\r\n\r\n" in buffer:
            head, _, buffer = buffer.partition(b"\r\n\r\n")
            path = head.split()[1]
            length = b"content-length: %d\r\n" % len(path)
            sock.sendall(b"HTTP/1.1 200 OK\r\n" + length + b"\r\n" + path)


def answer_with_heads(sock: socket.socket) -> None:
    """Answer requests of one connection with their heads, in `<` and `>`; one of /public/endless with
    interim answers without end."""
    buffer = b""
    while data := sock.recv(65536):
        buffer += data
        while b"\r\n\r\n" in buffer:
            head, _, buffer = buffer.partition(b"\r\n\r\n")
            while b" /public/endless " in head:
                sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 2600)
            length = b"content-length: %d\r\n" % (len(head) + 2)
            sock.sendall(b"HTTP/1.1 200 OK\r\n" + length + b"\r\n<" + head + b">")


def certificate(directory: Path, *names: str) -> tuple[Path, ssl.SSLContext]:
    """Make a certificate for `names`; return the file that a client trusts, and a server's context."""
    key, cert = directory / "key.pem", directory / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", key, "-out", cert, "-days", "2", "-subj", f"/CN={names[0]}",
         "-addext", "subjectAltName=" + ",".join(f"DNS:{name}" for name in names),
         "-addext", "basicConstraints=critical,CA:TRUE"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return cert, context
