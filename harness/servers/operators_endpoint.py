"""`OperatorsEndpoint`: the pages of operators and load balancers over HTTP, in a thread of its own.

The HTTP server bounds the use by a client: the length of a request, the time for it and for its answer,
and the number of connections; one too many replaces the one that waits longest, so that idle ones keep
nobody out.
"""

import asyncio
import contextlib
import errno
import ipaddress
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.from_thread
from starlette.responses import Response
from starlette.routing import Router

from ...policies.errors import PolicyError
from ..sandbox.remote.address import check_length
from .health import METRICS, HealthPages, OperatorsPage
from .http_access import run_in_thread
from .http_server import HttpConnection, Receive, Scope, Send, serve_http

WAIT_SECONDS = 5.0  # time for a request and its answer
_BACKLOG = 64
_LAST_PORT = 65_535
_TEXT = "text/plain; charset=utf-8"
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_HEADERS = {"x-content-type-options": "nosniff", "cache-control": "no-store"}


class OperatorsConnection(HttpConnection):
    """A connection, closed after its time whatever its client does: no request is admitted."""

    most = 32
    wait_seconds = WAIT_SECONDS


class OperatorsEndpoint:
    """Serves the pages of `pages` on a listening socket until it is closed."""

    def __init__(
        self, listener: socket.socket, pages: HealthPages,
        connection: type[HttpConnection] = OperatorsConnection,
    ) -> None:  # fmt: skip
        self._pages = pages
        self._checks_host = not pages.is_public and _is_loopback(listener)
        # A client that checks health on a connection of its own each time never meets one whose time
        # is over.
        more = {"connection": "close"} if pages.is_public else {}
        self._headers = {**_HEADERS, **more}
        self._being_made: dict[str, asyncio.Task[OperatorsPage]] = {}  # by path
        with contextlib.ExitStack() as stack:
            stack.callback(listener.close)
            portal = stack.enter_context(
                anyio.from_thread.start_blocking_portal(name="cellwright-pages")
            )
            ending = portal.call(anyio.Event)
            app = Router(redirect_slashes=False, default=self._answer)
            portal.start_task_soon(serve_http, app, listener, ending, connection)
            stack.callback(portal.call, ending.set)
            self._closing = stack.pop_all()

    def close(self) -> None:
        """Close every connection and the socket; closing twice is harmless."""
        self._closing.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        page = self._refusal_of(scope)
        if page is None:
            async with anyio.create_task_group() as tasks:

                async def end_with_client() -> None:
                    while (await receive())["type"] != "http.disconnect":
                        pass
                    tasks.cancel_scope.cancel()

                tasks.start_soon(end_with_client)
                page = await self._page_at(scope["path"])
                tasks.cancel_scope.cancel()
        if page is not None:
            await Response(page.body, page.status, self._headers, page.type)(scope, receive, send)

    def _refusal_of(self, scope: Scope) -> OperatorsPage | None:
        if scope["method"] not in ("GET", "HEAD"):
            return OperatorsPage(405, _TEXT, b"only GET and HEAD\n")
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if self._checks_host and not all(map(_is_local, hosts)):
            return OperatorsPage(403, _TEXT, b"this Host is not this server\n")
        return None

    async def _page_at(self, path: str) -> OperatorsPage:
        """Return a page, for which all clients that ask at the same time wait together: those that ask
        and leave while a cell is tried would otherwise each hold a thread of this process."""
        if path not in self._pages.paths:
            return self._pages.answer(path)
        if (task := self._being_made.get(path)) is None:
            task = asyncio.create_task(run_in_thread(self._pages.answer, path))
            self._being_made[path] = task
            task.add_done_callback(lambda _: self._being_made.pop(path))
        return await asyncio.shield(task)


@contextlib.contextmanager
def serving_pages(
    address: str, pages: HealthPages, group: int = -1, option: str = METRICS
) -> Iterator[None]:
    """Serve pages at HOST:PORT, or at the path of a Unix socket, during the block; raises PolicyError.

    The socket has mode 0600, or 0660 with a `group`.  `option` named the address.
    """
    with contextlib.ExitStack() as stack:
        if "/" in address:
            listener = _at_path(Path(address), group, option)
            stack.callback(_remove, address, os.stat(address).st_ino)
        else:
            listener = _at_port(*host_and_port(address, option), option)
        stack.callback(OperatorsEndpoint(listener, pages).close)
        yield


def check_address(address: str, option: str = METRICS) -> None:
    """Raise PolicyError if this host cannot serve pages at an address; one in use is not refused,
    because a daemon with the same configuration may have it."""
    if "/" in address:
        check_length(address)
        if not os.path.isdir(os.path.dirname(address) or "."):
            raise PolicyError(f"{option}: {os.path.dirname(address)} is no directory")
        return
    host, port = host_and_port(address, option)
    with socket.socket(_family_of(host)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise PolicyError(
                    f"{option}: cannot listen at {address}: {error.strerror}"
                ) from None


def _family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def host_and_port(address: str, name: str = METRICS) -> tuple[str, int]:
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


def _at_port(host: str, port: int, option: str) -> socket.socket:
    try:
        return socket.create_server((host, port), family=_family_of(host), backlog=_BACKLOG)
    except OSError as error:
        raise PolicyError(f"{option}: cannot listen at {host}:{port}: {error.strerror}") from None


def _at_path(path: Path, group: int, option: str) -> socket.socket:
    """Return a socket that listens at `path`; replaces one of ours on which no process listens."""
    check_length(path)
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid() or _is_in_use(path):
            raise PolicyError(f"{option}: {path} is in use, or not a socket of this user")
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
        raise PolicyError(f"{option}: cannot listen at {path}: {error.strerror}") from None
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


def _is_local(host: str) -> bool:
    """Tell whether a Host names this machine: a web page under another name could read the answer
    (DNS rebinding)."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    return name.strip("[]") in _LOCAL_NAMES
