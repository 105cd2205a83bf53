"""Servers outside of cells that `network` connects to, each in a process of its own: one that echoes,
sends and receives, and a small CONNECT proxy."""

import contextlib
import subprocess
from collections.abc import Iterator

from ..runner.launching.spawn import interpreter

STREAM_BYTES = 64 * 1024 * 1024

_LISTEN = """
import socket, sys, threading
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
listener = socket.create_server((sys.argv[1], 0), family=family, backlog=256)
print(listener.getsockname()[1], flush=True)
def relay(source, target):
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass
def serve_all(serve):
    while True:
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=serve, args=(sock,), daemon=True).start()
"""
# The first byte says what follows: e echoes, d sends bytes, u takes bytes and then answers.
_SERVER = """
def serve(sock):
    with sock:
        kind = sock.recv(1)
        if kind == b"d":
            for _ in range(int(sys.argv[2]) // 65536):
                sock.sendall(bytes(65536))
        elif kind == b"u":
            while sock.recv(65536): pass
            sock.sendall(b"u")
        elif kind == b"e":
            sock.sendall(b"e")
            relay(sock, sock)
"""
_PROXY = """
def serve(sock):
    head = b""
    while not head.endswith(b"\\r\\n\\r\\n"):
        head += sock.recv(4096)
    name, _, port = head.split()[1].decode().rpartition(":")
    with sock, socket.create_connection((name, int(port))) as outside:
        outside.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(b"HTTP/1.1 200 OK\\r\\n\\r\\n")
        back = threading.Thread(target=relay, args=(outside, sock))
        back.start()
        relay(sock, outside)
        back.join()
"""
_FOREVER = """
threading.Thread(target=serve_all, args=(serve,), daemon=True).start()
sys.stdin.read()
"""


def server(address: str) -> contextlib.AbstractContextManager[int]:
    """Give the port of a server on `address`, which must be loopback."""
    return _running(_SERVER, address)


def proxy(address: str) -> contextlib.AbstractContextManager[int]:
    """Give the port of a CONNECT proxy: two threads a connection, which copy 64 KiB at a time."""
    return _running(_PROXY, address)


@contextlib.contextmanager
def _running(program: str, address: str) -> Iterator[int]:
    command = [interpreter(), "-I", "-S", "-c", _LISTEN + program + _FOREVER]
    with subprocess.Popen(
        [*command, address, str(STREAM_BYTES)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()
