"""`NetworkControl`: the socket through which a person changes the network rules of a running sandbox.

The owner of the sandbox listens; `cellwright network` connects.  Only processes of the same user that
are outside of every cell are answered: a guest never allows itself anything, not even where a policy
shows it the socket.
"""

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from ...policies.errors import CellwrightError, ClosedError, LaunchError, PolicyError
from ...policies.network.rule import NetworkDenial, NetworkRule
from ...runner import channel
from ...runner.messages import decode, encode
from .network import PendingName, SandboxNetwork
from .remote.address import peer_of
from .remote.failures import error_of, failure_of
from .remote.frames import Failure

_MOST_BYTES = 1024 * 1024
_REQUEST_SECONDS = 5.0
_REPLY_SECONDS = 30.0  # connections that a denial ends have some seconds for it
_PAUSE_SECONDS = 0.2  # before accepting again when descriptors have run out
_QUEUE = 16
_SHORT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_SO_PEERPIDFD = 77  # Linux 6.5; include/uapi/asm-generic/socket.h


class _ControlFrame(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag=True
):
    pass


class Greeting(_ControlFrame, frozen=True):
    """The first frame, from the owner; a peer that it does not serve gets a Failure instead, and has
    sent nothing yet that would be lost with the answer."""


class ShowRules(_ControlFrame, frozen=True):
    """Ask for the rules and the refused names."""


class AllowHost(_ControlFrame, frozen=True):
    rule: NetworkRule


class DenyHost(_ControlFrame, frozen=True):
    rule: NetworkDenial


class RulesShown(_ControlFrame, frozen=True):
    """The answer to each request: how things are after it."""

    policy: str
    rules: tuple[str, ...]
    pending: tuple[PendingName, ...]


_FromOwner = TypeVar("_FromOwner", Greeting, RulesShown)
ControlRequest = ShowRules | AllowHost | DenyHost


class NetworkControl:
    """Listens at `path` in a thread until it is closed."""

    def __init__(self, path: str, policy: str, network: SandboxNetwork) -> None:
        """Raises OSError if `path` cannot be listened at."""
        self._path = path
        self._policy = policy
        self._network = network
        self._owner = os.getpid()
        self._is_closed = threading.Event()
        self._listener = _listening_at(path)
        self._thread = threading.Thread(target=self._serve, name="cellwright-network", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and remove the socket; in a forked child of the owner this does nothing."""
        if os.getpid() != self._owner or self._is_closed.is_set():
            return
        self._is_closed.set()
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        self._listener.shutdown(socket.SHUT_RDWR)  # ends accept(2)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while not self._is_closed.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if error.errno in _SHORT_OF:
                    self._is_closed.wait(_PAUSE_SECONDS)
                continue
            with sock, contextlib.suppress(OSError):
                self._serve_one(sock)

    def _serve_one(self, sock: socket.socket) -> None:
        """Answer one request; raises OSError if the peer does not wait."""
        sock.settimeout(_REQUEST_SECONDS)
        try:
            require_person(sock)
            channel.send(sock, encode(Greeting()))
            frame = channel.Receiver(sock, _MOST_BYTES).receive_whole()
            reply = self._perform(decode(frame, ControlRequest)) if frame else None
        except (msgspec.DecodeError, channel.ProtocolError):
            reply = failure_of(PolicyError("invalid request", "use the same version of cellwright"))
        except CellwrightError as error:
            reply = failure_of(error)
        if reply:
            channel.send(sock, encode(reply))

    def _perform(self, request: ControlRequest) -> RulesShown | Failure:
        if isinstance(request, AllowHost):
            self._network.allow(request.rule)
        elif isinstance(request, DenyHost):
            self._network.deny(request.rule)
        return RulesShown(self._policy, self._network.rules, self._network.pending())


def require_person(sock: socket.socket) -> None:
    """Raise PolicyError unless the peer is a process of this user outside of every cell.

    A cell that an ordinary user started has that user's id on the host, but another user namespace.
    The pidfd shows that the namespace was not read of a later process with the same number.
    """
    pid, uid = peer_of(sock)
    if uid != os.geteuid():
        raise PolicyError(f"network rules: changed by user {os.geteuid()} only, not {uid}")
    try:
        with _pidfd_of_peer(sock, pid) as pidfd:
            is_outside = _user_namespace(str(pid)) == _user_namespace("self")
            is_outside &= not channel.has_news(pidfd)  # it has not ended
    except OSError:  # it has ended, or hides from us
        is_outside = False
    if not is_outside:
        raise PolicyError(
            "network rules: changed only by processes in the user namespace of their sandbox's owner"
        )


@contextlib.contextmanager
def _pidfd_of_peer(sock: socket.socket, pid: int) -> Iterator[int]:
    try:
        pidfd = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
        pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def _user_namespace(pid: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/user")


def ask(path: str, request: ControlRequest) -> RulesShown:
    """Have the owner of the socket at `path` perform a request.

    Raises ClosedError if the sandbox was closed, LaunchError if the owner does not answer, and
    what the owner answered.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(_REPLY_SECONDS)
        try:
            with _short(path) as short:
                sock.connect(short)
            _received(sock, Greeting)
            channel.send(sock, encode(request))
            return _received(sock, RulesShown)
        except (FileNotFoundError, ConnectionError):
            raise ClosedError("the sandbox was closed") from None
        except TimeoutError:
            raise LaunchError("the process of the sandbox does not answer") from None


def _received(sock: socket.socket, kind: type[_FromOwner]) -> _FromOwner:
    """Return the next frame; raises what a Failure says instead of it."""
    frame = channel.Receiver(sock, _MOST_BYTES).receive_whole()
    if not frame:
        raise ConnectionResetError
    reply: _FromOwner | Failure = decode(frame, kind | Failure)
    if isinstance(reply, Failure):
        raise error_of(reply)
    return reply


def _listening_at(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        os.fchmod(listener.fileno(), 0o600)  # the mode of the file that bind(2) makes
        with _short(path) as short:
            listener.bind(short)
        listener.listen(_QUEUE)
    except BaseException:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def _short(path: str) -> Iterator[str]:
    """Give a name of `path` that fits into sun_path (unix(7)), however long its directory's is."""
    directory, name = os.path.split(path)
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)
