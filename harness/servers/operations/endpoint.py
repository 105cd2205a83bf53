"""`OperatorsEndpoint`: a small HTTP server for the pages of operators, in a thread of its own.

It answers GET and HEAD, one request a connection.  What a client can take from it is bounded: the
length of a request, the time for it and for the answer, and the number of connections; one too many
replaces the one that waits longest, so that idle ones keep nobody out.
"""

import asyncio
import contextlib
import errno
import ipaddress
import os
import socket
import stat
import threading
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

from ....policies.errors import PolicyError
from ...sandbox.remote.address import check_length
from .pages import OperatorsPage, OperatorsPages

MOST_CONNECTIONS = 32
WAIT_SECONDS = 5.0  # for the head of a request, and again for the answer to be read
_HEAD_BYTES = 8192
_BACKLOG = 64
_LAST_PORT = 65_535
_TEXT = "text/plain; charset=utf-8"
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


class OperatorsEndpoint:
    """Serves the pages of `pages` on a listening socket until it is closed."""

    def __init__(
        self, listener: socket.socket, pages: OperatorsPages, wait_seconds: float = WAIT_SECONDS
    ) -> None:
        self._listener = listener
        self._pages = pages
        self._wait_seconds = wait_seconds
        self._is_loopback = _is_loopback(listener)
        self._waiting: dict[asyncio.Task[None], asyncio.StreamWriter] = {}  # the oldest first
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="cellwright-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close every connection and the socket; closing twice is harmless."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._connected, sock=self._listener, limit=_HEAD_BYTES, backlog=_BACKLOG
        )
        await self._stopping.wait()
        self._loop.remove_reader(self._listener)
        while len(asyncio.all_tasks()) > 1:  # also those that accept: they need an open server
            for task in self._waiting:
                task.cancel()
            await asyncio.sleep(0)
        server.close()
        await asyncio.sleep(0)  # an aborted transport closes its socket in the loop's next turn

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task  # noqa: S101 - asyncio calls this in one
        self._waiting[task] = writer
        if len(self._waiting) > MOST_CONNECTIONS:
            oldest = next(iter(self._waiting))
            self._waiting.pop(oldest).transport.abort()
            oldest.cancel()
        try:
            await self._answer(reader, writer)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            self._waiting.pop(task, None)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._wait_seconds):
                head = await reader.readuntil(b"\r\n\r\n")
            page, with_body = self._page_of(head)
        except asyncio.LimitOverrunError:
            page, with_body = OperatorsPage(431, _TEXT, b"the request is too long\n"), True
        writer.write(_head_of(page) + (page.body if with_body else b""))
        async with asyncio.timeout(self._wait_seconds):
            await writer.drain()
            writer.close()
            await writer.wait_closed()

    def _page_of(self, head: bytes) -> tuple[OperatorsPage, bool]:
        """Return the answer to a request, and whether it has its body."""
        line, *headers = head.decode("latin-1").split("\r\n")
        method, _, rest = line.partition(" ")
        path, _, version = rest.partition(" ")
        if not version.startswith("HTTP/1.") or not path.startswith("/"):
            return OperatorsPage(400, _TEXT, b"not a request of HTTP/1.1\n"), True
        if method not in ("GET", "HEAD"):
            return OperatorsPage(405, _TEXT, b"only GET and HEAD\n"), True
        if self._is_loopback and not all(map(_is_local, _hosts_of(headers))):
            return OperatorsPage(403, _TEXT, b"this Host is not this server\n"), True
        return self._pages.answer(path.partition("?")[0]), method == "GET"


@contextlib.contextmanager
def serving_pages(address: str, pages: OperatorsPages, group: int = -1) -> Iterator[None]:
    """Serve pages at HOST:PORT, or at the path of a Unix socket, during the block; raises PolicyError.

    The socket has mode 0600, or 0660 with a `group`.
    """
    with contextlib.ExitStack() as stack:
        if "/" in address:
            listener = _at_path(Path(address), group)
            stack.callback(_remove, address, os.stat(address).st_ino)
        else:
            listener = _at_port(*host_and_port(address))
        stack.callback(OperatorsEndpoint(listener, pages).close)
        yield


def check_address(address: str) -> None:
    """Raise PolicyError if this host cannot serve pages at an address; one in use is not refused,
    because a daemon with the same configuration may have it."""
    if "/" in address:
        check_length(address)
        if not os.path.isdir(os.path.dirname(address) or "."):
            raise PolicyError(f"--metrics: {os.path.dirname(address)} is no directory")
        return
    host, port = host_and_port(address)
    with socket.socket(_family_of(host)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise PolicyError(
                    f"--metrics: cannot listen at {address}: {error.strerror}"
                ) from None


def _family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def host_and_port(address: str, name: str = "--metrics") -> tuple[str, int]:
    """Return the parts of HOST:PORT; raises PolicyError."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        ipaddress.ip_address(host)
        number = int(port) if port.isascii() and port.isdigit() else -1
    except ValueError:
        number = -1
    if not 0 <= number <= _LAST_PORT:
        raise PolicyError(
            f"{name}: must be ADDRESS:PORT or the path of a socket, got {address!r}",
            "such as 127.0.0.1:9464 or /run/cellwright-metrics.sock",
        )
    return host, number


def _at_port(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=_family_of(host), backlog=_BACKLOG)
    except OSError as error:
        raise PolicyError(f"--metrics: cannot listen at {host}:{port}: {error.strerror}") from None


def _at_path(path: Path, group: int) -> socket.socket:
    """Return a socket that listens at `path`; replaces one of ours on which no process listens."""
    check_length(path)
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid() or _is_in_use(path):
            raise PolicyError(f"--metrics: {path} is in use, or not a socket of this user")
        path.unlink()
    listener = socket.socket(socket.AF_UNIX)
    try:
        os.fchmod(listener.fileno(), 0o600)  # the mode of the file that bind(2) makes
        listener.bind(os.fspath(path))
        if group >= 0:
            os.chown(path, -1, group, follow_symlinks=False)
            os.chmod(path, 0o660)  # here, because bind(2) applies the umask
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise PolicyError(f"--metrics: cannot listen at {path}: {error.strerror}") from None
    return listener


def _is_in_use(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        return sock.connect_ex(os.fspath(path)) == 0


def _remove(path: str, inode: int) -> None:
    with contextlib.suppress(OSError):
        if os.lstat(path).st_ino == inode:
            os.unlink(path)


def _is_loopback(listener: socket.socket) -> bool:
    if listener.family == socket.AF_UNIX:
        return False
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def _hosts_of(headers: list[str]) -> Iterator[str]:
    for header in headers:
        name, _, value = header.partition(":")
        if name.strip().lower() == "host":
            yield value.strip()


def _is_local(host: str) -> bool:
    """Tell whether a Host names this machine: a web page under another name could read the answer
    (DNS rebinding)."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    return name.strip("[]") in _LOCAL_NAMES


def _head_of(page: OperatorsPage) -> bytes:
    phrase = HTTPStatus(page.status).phrase
    return (
        f"HTTP/1.1 {page.status} {phrase}\r\nContent-Type: {page.type}\r\n"
        f"Content-Length: {len(page.body)}\r\nX-Content-Type-Options: nosniff\r\n"
        "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    ).encode("latin-1")
