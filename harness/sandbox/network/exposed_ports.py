"""`ExposedPort`: a port of a cell that the host reaches, and the ports of one cell and one sandbox."""

import contextlib
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ....policies.closing import Closing
from ....policies.errors import ClosedError, PolicyError
from ....runner.launching.living import directory_prefix
from ..checks import check_host_path, check_whole

if TYPE_CHECKING:
    import socket

    from ....runner.cells.cell_network import CellNetwork
    from ....runner.sessions.session_cell import SessionCell
    from .port_relay import PortRelay

_HOST = "127.0.0.1"
_DAY = 86_400.0
HostPort = int | tuple[str, int]  # a port of 127.0.0.1, or an address with a port
_QUEUE = 16  # connections that the kernel queues while the limit is reached
_LAST_PORT = 65_535


class ExposedPort(Closing):
    """A TCP port of a cell that the host can reach at `address`; a context manager.

    Made by `Session.expose` and `Program.expose`.  Each connection to `address` becomes one to ::1 in
    the cell, or if none listens there to 127.0.0.1, and is closed if no server listens at all.
    """

    port: int  # in the cell
    address: str | tuple[str, int]  # the path of a Unix socket, or a host and port
    url: str

    def __init__(
        self, port: int, address: str | tuple[str, int], close: Callable[[], None]
    ) -> None:
        """`close`: may be called twice."""
        self.port = port
        self.address = address
        self.url = _url(address)
        self._close = close
        self._owner = os.getpid()
        self.is_closed = False

    def __repr__(self) -> str:
        return f"<ExposedPort {self.port}: {self.url}>"

    def close(self) -> None:
        """Close the host's end and every connection; closing twice is fine.

        In a forked child of the process that made it this does nothing.
        """
        if os.getpid() == self._owner:
            self.is_closed = True
            self._close()


class ExposedPorts:
    """The exposed ports of one cell; safe from many threads."""

    def __init__(self, of_sandbox: "SandboxPorts", use: "SessionCell | None" = None) -> None:
        self._of_sandbox = of_sandbox
        self._use = use
        self._lock = threading.Lock()
        self._open: list[ExposedPort] = []
        self._closed = False

    def expose(
        self, network: "CellNetwork | None", port: int, path: str | os.PathLike[str] | None,
        host_port: HostPort | None,
    ) -> ExposedPort:  # fmt: skip
        """Return the exposed `port` of the cell whose `network` is given, and is closed with it."""
        if network is None:
            raise PolicyError(
                "expose: the policy has no loopback in the cell",
                "use policy='standard', or set network.loopback in yours",
            )
        try:
            exposed = self._of_sandbox.expose(network, self._use, port, path, host_port)
        except BaseException:
            network.close()
            raise
        with self._lock:
            self._open.append(exposed)
            closed = self._closed
        if closed:
            exposed.close()
            raise ClosedError("expose: the cell has ended")
        return exposed

    @property
    def are_open(self) -> bool:
        """Whether the host can reach any of them."""
        with self._lock:
            self._open = [each for each in self._open if not each.is_closed]
            return bool(self._open)

    def close(self) -> None:
        """Close all; the cell has ended."""
        with self._lock:
            self._closed = True
            ports, self._open = self._open, []
        for exposed in ports:
            exposed.close()


class SandboxPorts:
    """The exposed ports of one sandbox, with the one thread that serves them once there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._relay: PortRelay | None = None
        self._closed = False

    def of_cell(self, use: "SessionCell | None" = None) -> ExposedPorts:
        """Return those of a cell, which a connection uses as long as it is open."""
        return ExposedPorts(self, use)

    def expose(
        self, network: "CellNetwork", use: "SessionCell | None", port: int,
        path: str | os.PathLike[str] | None, host_port: HostPort | None,
    ) -> ExposedPort:  # fmt: skip
        from .port_relay import PortLimits, RelayedPort

        check_port("port", port, least=1)
        relay = self._serving()
        place = _listen(path, host_port, port)
        # A connection keeps the cell of a session from being frozen; a program's goes on anyway.
        limits = PortLimits() if use else PortLimits(idle_seconds=_DAY)
        relayed = RelayedPort(place.listener, port, network, limits, use)
        try:
            relay.open_port(relayed)
        except BaseException:
            place.listener.close()
            place.remove()
            raise

        def close() -> None:
            relay.close_port(relayed)
            network.close()
            place.remove()

        return ExposedPort(port, place.address, close)

    def _serving(self) -> "PortRelay":
        from .port_relay import PortRelay

        with self._lock:
            if self._closed:
                raise ClosedError("the sandbox was closed")
            if self._relay is None:
                self._relay = PortRelay()
            return self._relay

    def close(self) -> None:
        with self._lock:
            self._closed = True
        if self._relay:
            self._relay.close()


class _Listening(NamedTuple):
    """The address of the host's end, and the files to remove when it closes."""

    listener: "socket.socket"
    address: str | tuple[str, int]
    identity: tuple[int, int] = (0, 0)  # device and inode of a Unix socket's file
    directory: str = ""  # directory made for the socket; empty if the caller gave a path

    def remove(self) -> None:
        if not isinstance(self.address, str):
            return
        with contextlib.suppress(OSError):  # its user may have removed or replaced it
            if _identity(self.address) == self.identity:
                os.unlink(self.address)
        if self.directory:
            with contextlib.suppress(OSError):
                os.rmdir(self.directory)


def _listen(
    path: str | os.PathLike[str] | None, host_port: HostPort | None, port: int
) -> _Listening:
    if path is not None and host_port is not None:
        raise PolicyError("path: cannot be combined with host_port", "give one of the two")
    if host_port is not None:
        address, number = host_port if isinstance(host_port, tuple) else (_HOST, host_port)
        return _listen_on(address, check_port("host_port", number, least=0))
    if path is not None:
        place = check_host_path("path", path)
        if "\0" in place:  # it would name an abstract socket, which has no permissions
            raise PolicyError(f"path: must be a path without NUL, got {place!r}")
        return _listen_at(place)
    import tempfile  # seldom needed, and imports twenty modules

    directory = tempfile.mkdtemp(prefix=directory_prefix())  # made with mode 0700
    try:
        return _listen_at(os.path.join(directory, str(port)), directory)
    except BaseException:
        os.rmdir(directory)
        raise


def _listen_on(address: str, port: int) -> _Listening:
    import socket  # slow to import

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        return _Listening(_listen_to(listener), (address, listener.getsockname()[1]))
    except OSError as error:
        listener.close()
        raise PolicyError(
            f"host_port: cannot listen on {address}:{port}: {error.strerror}", "0 takes a free one"
        ) from None


def _listen_at(path: str, directory: str = "") -> _Listening:
    import socket  # slow to import

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # The mode of the socket becomes that of the file (unix(7)).  A chmod of the path would follow a
        # link that took its place, in a directory where others may write.
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(path)
        return _Listening(_listen_to(listener), path, _identity(path), directory)
    except OSError as error:
        listener.close()
        # bind(2) has no strerror for a path that is too long
        raise PolicyError(f"path: cannot listen at {path}: {error.strerror or error}") from None


def _listen_to(listener: "socket.socket") -> "socket.socket":
    listener.setblocking(False)
    listener.listen(_QUEUE)
    return listener


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def _url(address: str | tuple[str, int]) -> str:
    """Return the URL of an HTTP server at `address`; clients know `http+unix` for Unix sockets."""
    if isinstance(address, str):
        from urllib.parse import quote

        return f"http+unix://{quote(address, safe='')}"
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"http://{host}:{address[1]}"


def check_port(name: str, port: object, *, least: int) -> int:
    """Return a port number; raises PolicyError for an invalid one."""
    return check_whole(name, port, least, _LAST_PORT)
