"""`SandboxNetwork`: the network rules of a sandbox, which its owner may change while cells live.

`NetworkControl`: the socket through which a person changes the network rules of a running sandbox.

The owner of the sandbox listens; `cellwright network` connects.  Only processes of the same user that
are outside of every cell are answered: a guest never allows itself anything, not even where a policy
shows it the socket.

`SandboxEgress`: the way of a sandbox's cells to the hosts that its policy names.
"""

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from ....policies.errors import CellwrightError, ClosedError, LaunchError, PolicyError
from ....policies.network.rule import NetworkDenial, NetworkRule
from ....policies.network.rule_checks import ChangingRules
from ....policies.network.rules import encode_rules
from ....policies.policy import Network, Policy
from ....runner import channel
from ....runner.confined.egress_process import EgressProcess, RefusedNames
from ....runner.host.ids import id_for
from ....runner.launching.living import new_socket_path
from ....runner.launching.spawn import interpreter
from ....runner.messages import decode, encode
from ..remote.address import peer_of
from ..remote.call_frames import error_of, failure_of
from ..remote.frames import Failure

OnChange = Callable[[NetworkRule | NetworkDenial, bool], None]


class PendingName(msgspec.Struct, frozen=True):
    """A name that programs asked for and that no rule allows or denies.

    `port` is None if it was only looked up, as is usual; `count` is how often it was refused.  Programs
    choose the names: show them to a person as untrusted text.
    """

    name: str
    port: int | None
    count: int
    reason: str


class SandboxNetwork:
    """The network rules of a running sandbox: those of its policy, and later ones.

    Each change holds for all cells at once.  Safe from many threads.
    """

    def __init__(self, network: Network, egress: EgressProcess, on_change: OnChange) -> None:
        """`on_change` records a change; its flag says that the change has already been made."""
        self._rules = ChangingRules(network.allow, network.deny, network.addresses)
        self._egress = egress
        self._on_change = on_change
        self._lock = threading.Lock()

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules in force, a line each."""
        return tuple(map(str, (*self._rules.allow, *self._rules.deny)))

    def allow(self, rule: NetworkRule | str) -> None:
        """Allow connections by a rule, or to a host over TLS on port 443.

        An earlier `deny` of the same host and ports is taken back; denials of the policy always hold.
        `lifetime_seconds` of the rule counts from now, and its caps count anew.

        Raises PolicyError for an invalid rule, one that denials forbid, and a port that no rule of the
        policy names, because cells do not listen on it; ClosedError; AuditError if the change cannot be
        recorded: nothing is allowed then.
        """
        if isinstance(rule, str):
            rule = NetworkRule(host=rule)
        with self._lock:
            changed = self._rules.with_allowed(rule, self._egress.age_seconds)
            self._egress.require_open()  # raises first, so that a recorded rule is in force
            self._on_change(rule, False)
            self._follow(changed)

    def replace(self, rules: Sequence[NetworkRule]) -> None:
        """Allow only what `rules` allow, in place of the policy's rules and of later ones, and end the
        other connections; denials of the policy always hold.

        Raises what `allow` raises; nothing is changed then.
        """
        with self._lock:
            changed = self._rules.with_only(rules)
            ended = [each for each in self._rules.allow if each not in changed.allow]
            self._egress.require_open()
            for rule in changed.allow:
                self._on_change(rule, False)
            self._follow(changed)
            for rule in ended:
                self._on_change(NetworkDenial(host=rule.host, ports=rule.each_port()), True)

    def deny(self, rule: NetworkDenial | str) -> None:
        """Deny connections by a rule, or to a host on every port, and end open ones.

        When this returns, they have ended.  A host of an earlier `allow` is denied too.  Raises
        PolicyError for an invalid rule, ClosedError.
        """
        if isinstance(rule, str):
            rule = NetworkDenial(host=rule)
        with self._lock:
            self._follow(self._rules.with_denied(rule))
            self._on_change(rule, True)

    def pending(self) -> tuple[PendingName, ...]:
        """Return names that programs asked for and no rule allows or denies, the latest last.

        At most 256, those refused last.  Raises ClosedError, and LaunchError if the egress process does
        not answer.
        """
        return tuple(
            PendingName(each.name, each.port or None, each.count, each.reason)
            for each in self._egress.pending()
        )

    def refused(self) -> RefusedNames | None:
        """Return the names that are refused from now on, after those of `pending`; None as long as no
        cell has started.  Raises ClosedError, LaunchError."""
        return self._egress.refused()

    def _follow(self, changed: ChangingRules) -> None:
        self._egress.replace_rules(encode_rules(changed.allow, changed.deny, changed.addresses))
        self._rules = changed


_MOST_BYTES = 1024 * 1024
_REQUEST_SECONDS = 5.0
_REPLY_SECONDS = 30.0  # connections that a denial ends get some seconds
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
            is_outside &= not channel.has_news(pidfd)  # the process has not ended
    except OSError:  # the process has ended, or /proc hides it
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

    Raises ClosedError if the sandbox was closed, LaunchError if the owner does not answer, and the
    owner's errors.
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


class SandboxEgress:
    """The egress process, the rules that it follows, and the socket by which a person changes them."""

    def __init__(
        self, policy: Policy, user: int | str | None, on_change: OnChange, secrets: bytes = b""
    ) -> None:
        """`user` is that of the cells; `on_change` records a change of the rules; `secrets` are
        EgressSecrets."""
        uid = 0 if os.geteuid() else id_for(user)
        self.process = EgressProcess(interpreter(), uid, new_socket_path(), secrets)
        self.rules = SandboxNetwork(policy.network, self.process, on_change)
        self._name = policy.name
        self._control: NetworkControl | None = None

    def listen(self) -> None:
        """Let `cellwright network` change the rules, if the host has a place for the socket."""

        if self.process.control:
            with contextlib.suppress(OSError):
                self._control = NetworkControl(self.process.control, self._name, self.rules)

    def close(self) -> None:
        """End every connection."""
        if self._control:
            self._control.close()
        self.process.close()
