"""`ExposedPort`: a port of a cell that the host reaches, and the ports of one cell and one sandbox."""

import contextlib
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Self

from ....policies.errors import ClosedError, PolicyError
from ....runner.living import directory_prefix
from ..checks import check_host_path

if TYPE_CHECKING:
    import socket

    from ....runner.cell_network import CellNetwork
    from .relay import CellUse, PortRelay

_HOST = "127.0.0.1"
_QUEUE = 16  # connections that the kernel keeps while as many are open as may be
_LAST_PORT = 65_535


class ExposedPort:
    """A TCP port of a cell that the host can reach at `address`; a context manager.

    Made by `Session.expose` and `Program.expose`.  Each connection to `address` becomes one to
    127.0.0.1 in the cell, and is closed if no server listens there.
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ExposedPorts:
    """The exposed ports of one cell; safe from many threads."""

    def __init__(self, of_sandbox: "SandboxPorts", use: "CellUse | None" = None) -> None:
        self._of_sandbox = of_sandbox
        self._use = use
        self._lock = threading.Lock()
        self._open: list[ExposedPort] = []
        self._closed = False

    def expose(
        self, network: "CellNetwork | None", port: int, path: str | os.PathLike[str] | None,
        host_port: int | None,
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

    def of_cell(self, use: "CellUse | None" = None) -> ExposedPorts:
        """Return those of a cell, which a connection uses as long as it is open."""
        return ExposedPorts(self, use)

    def expose(
        self, network: "CellNetwork", use: "CellUse | None", port: int,
        path: str | os.PathLike[str] | None, host_port: int | None,
    ) -> ExposedPort:  # fmt: skip
        from .connection import PortLimits  # seldom needed
        from .relay import RelayedPort

        check_port("port", port, least=1)
        relay = self._serving()
        place = _listen(path, host_port, port)
        relayed = RelayedPort(place.listener, port, network, PortLimits(), use)
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
        from .relay import PortRelay

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
    """Where the host's end listens, and what is removed once it does not."""

    listener: "socket.socket"
    address: str | tuple[str, int]
    identity: tuple[int, int] = (0, 0)  # of the file of a Unix socket: device and inode
    directory: str = ""  # made for it

    def remove(self) -> None:
        if not isinstance(self.address, str):
            return
        with contextlib.suppress(OSError):  # its user may have removed or replaced it
            if _identity(self.address) == self.identity:
                os.unlink(self.address)
        if self.directory:
            with contextlib.suppress(OSError):
                os.rmdir(self.directory)


def _listen(path: str | os.PathLike[str] | None, host_port: int | None, port: int) -> _Listening:
    if path is not None and host_port is not None:
        raise PolicyError("path: cannot be combined with host_port", "give one of the two")
    if host_port is not None:
        return _listen_on_loopback(check_port("host_port", host_port, least=0))
    if path is not None:
        place = check_host_path("path", path)
        if "\0" in place:  # it would be a name in the abstract namespace, which has no permissions
            raise PolicyError(f"path: must be a path without NUL, got {place!r}")
        return _listen_at(place)
    import tempfile  # seldom needed, and imports twenty modules

    directory = tempfile.mkdtemp(prefix=directory_prefix())  # of mode 0700
    try:
        return _listen_at(os.path.join(directory, str(port)), directory)
    except BaseException:
        os.rmdir(directory)
        raise


def _listen_on_loopback(port: int) -> _Listening:
    import socket  # slow to import

    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_HOST, port))
        return _Listening(_listen_to(listener), (_HOST, listener.getsockname()[1]))
    except OSError as error:
        listener.close()
        raise PolicyError(
            f"host_port: cannot listen on {_HOST}:{port}: {error.strerror}", "0 takes a free one"
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
    return f"http://{address[0]}:{address[1]}"


def check_port(name: str, port: object, *, least: int) -> int:
    """Return a port number; raises PolicyError for an invalid one."""
    if not isinstance(port, int) or isinstance(port, bool) or not least <= port <= _LAST_PORT:
        raise PolicyError(
            f"{name}: must be a whole number from {least} to {_LAST_PORT}, got {port!r}"
        )
    return port
