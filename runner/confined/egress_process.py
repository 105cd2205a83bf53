"""`EgressProcess`: the supervisor's end of the process through which cells of a sandbox reach names.

The process starts with the first cell that needs it.  When it ends, every connection of every cell
ends, and the next cell gets a new process.
"""

import contextlib
import os
import time
from typing import TYPE_CHECKING

import msgspec

from ...policies.errors import InternalError, LaunchError, PolicyError
from ...policies.extras import how_to_install
from ...policies.network.upstream_proxy import ENVIRONMENT, UpstreamProxy, proxy_of
from ...policies.plan import Plan
from .. import channel
from ..fixed_root import ANY_ADDRESS, DNS_ADDRESS
from ..messages import (
    AddCell,
    EgressBoot,
    ListPending,
    Manage,
    Refusal,
    Relayed,
    SetRules,
    Settle,
    Settled,
    TellRefused,
    decode,
    encode,
)
from ..requests.result import NetworkConnection, NetworkRecord, Violation
from .confined_process import ConfinedProcess, ProcessOnDemand

if TYPE_CHECKING:
    import socket

_MODULE = "cellwright.runner.egress.main"
_SETTLE_SECONDS = 10.0
_MOST_FRAMES = 10_000  # frames of one answer
_NO_ANSWER = OSError, EOFError, msgspec.DecodeError, channel.ProtocolError


class CellEgress:
    """The supervisor's end of the channel on which the egress process tells of one cell."""

    def __init__(self, reports: "socket.SocketType") -> None:
        self._reports = reports

    def is_served(self) -> bool:
        """Tell whether the egress process is there; between two requests it says nothing."""
        return self._reports.fileno() >= 0 and not channel.has_news(self._reports.fileno())

    def settle(self, *, ends: bool) -> NetworkRecord:
        """Return what happened since the last time; with `ends`, end the cell's connections first.

        An egress process that is gone, stopped or speaks nonsense is a violation in the record: it
        says that records are missing, and no connection is left.
        """
        refused: list[Violation] = []
        connections: list[NetworkConnection] = []
        try:
            channel.send(self._reports, encode(Settle(ends)))
            for record in _until_settled(self._reports):
                if isinstance(record, Refusal):
                    refused.append(_violation(record))
                else:
                    connections.append(NetworkConnection(*msgspec.structs.astuple(record)))
        except _NO_ANSWER as error:
            why = f"network: the egress process ended ({type(error).__name__}); records are missing"
            refused.append(Violation("egress", (), why, "egress"))
            self.close()
        return NetworkRecord(tuple(refused), tuple(connections))

    def close(self) -> None:
        """End every connection of the cell; a second call does nothing."""
        self._reports.close()


def _until_settled(sock: "socket.SocketType") -> "list[Refusal | Relayed]":
    records: list[Refusal | Relayed] = []
    receiver = channel.Receiver(sock, channel.PACKET_BYTES)
    deadline = time.monotonic() + _SETTLE_SECONDS
    while len(records) < _MOST_FRAMES:
        if not channel.has_news(sock.fileno(), max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        frame = receiver.receive_whole()
        if not frame:
            raise EOFError
        record = decode(frame, Refusal | Relayed | Settled)
        if isinstance(record, Settled):
            return records
        records.append(record)
    raise channel.ProtocolError("more records than the egress process keeps")


def _violation(refusal: Refusal) -> Violation:
    words = tuple(
        filter(None, (_printable(refusal.name), str(refusal.port) if refusal.port else ""))
    )
    return Violation(
        refusal.what, words, f"network: {_printable(refusal.reason)}", "?", refusal.count
    )


def _printable(text: str) -> str:
    return ascii(text)[1:-1]


class RefusedNames:
    """Names as the egress process refuses them, until that ends or `close` is called."""

    def __init__(self, sock: "socket.SocketType") -> None:
        sock.settimeout(None)
        self._sock = sock
        self._receiver = channel.Receiver(sock, channel.PACKET_BYTES)

    def fileno(self) -> int:
        """The descriptor that becomes readable when `next` returns at once."""
        return self._sock.fileno()

    def next(self) -> Refusal | Settled | None:
        """Wait for the next name; return Settled when rules have changed, None at the end."""
        try:
            frame = self._receiver.receive_whole()
            return decode(frame, Refusal | Settled) if frame else None
        except _NO_ANSWER:
            return None

    def end(self) -> None:
        """Let `next` return None, in another thread, too."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(2)  # SHUT_RDWR

    def close(self) -> None:
        self._sock.close()


def _asked(
    control: "socket.socket", question: SetRules | ListPending | TellRefused
) -> "socket.SocketType":
    """Return the channel on which the egress process answers a question."""
    ours, theirs = channel.pair()
    try:
        channel.send(control, encode(Manage()), (theirs.fileno(),))
        ours.settimeout(_SETTLE_SECONDS)  # a request can be larger than the socket's buffer
        channel.send(ours, encode(question))
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return ours


class EgressProcess:
    """Starts the process, hands it the sockets of cells, and starts another one when it has died."""

    def __init__(self, executable: str, uid: int, control: str = "", secrets: bytes = b"") -> None:
        """`uid` is whom the process becomes if this one is root, else 0.  `control` is the path of the
        socket by which other processes may change the rules, for the records of living sandboxes.
        `secrets` are EgressSecrets."""
        self.control = control
        self._secrets = secrets
        self._executable = executable
        self._uid = uid
        self._made_at = time.monotonic()
        self._process = ProcessOnDemand()
        self._rules: bytes | None = None  # rules that replace the plan's

    @property
    def age_seconds(self) -> float:
        """The time since the sandbox was made, from which lifetimes of rules count."""
        return time.monotonic() - self._made_at

    @property
    def pid(self) -> int | None:
        """The process, if there is one."""
        return self._process.pid

    def add(self, plan: Plan, sockets: list[int]) -> CellEgress:
        """Have the process serve a cell through its `sockets`.

        Raises LaunchError, and InternalError for sockets that are not those of a cell.
        """
        if plan.network is None or _wrong(sockets, plan.network.ports):
            raise InternalError(
                "a cell is ready without its sockets for the network, or with others"
            )
        with self._process.lock:
            ours, theirs = channel.pair()
            try:
                self._hand_over(plan, (theirs.fileno(), *sockets))
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
        return CellEgress(ours)

    def control_for(self, plan: Plan) -> int:
        """Return a copy of the descriptor that leads to the process, which may start now; raises
        LaunchError."""
        with self._process.lock:
            process = self._process.ready(lambda: self._start(plan))
            return os.dup(process.control.fileno())

    def replace_rules(self, rules: bytes) -> None:
        """Apply `rules`, as in a NetworkPlan, to all cells, and end connections that they do not allow.

        A process that does not answer is ended, and with it every connection.  Raises ClosedError.
        """
        with self._process.lock:
            self._process.require_open()
            self._rules = rules
            if running := self._process.running:
                try:
                    self._ask(running.control, SetRules(rules))
                except _NO_ANSWER:
                    self._process.end()

    def pending(self) -> list[Refusal]:
        """Return the names that were refused and are neither allowed nor denied by now.

        Those that a process knew which has ended are lost.  Raises ClosedError, and LaunchError if the
        process does not answer.
        """
        with self._process.lock:
            self._process.require_open()
            running = self._process.running
            if running is None:
                return []
            try:
                return [
                    each
                    for each in self._ask(running.control, ListPending())
                    if isinstance(each, Refusal)
                ]
            except (EOFError, ConnectionError):
                return []
            except _NO_ANSWER as error:
                why = f"the egress process does not answer ({type(error).__name__})"
                raise LaunchError(why) from None

    def refused(self) -> "RefusedNames | None":
        """Return the names that the process refuses from now on, None if there is no process.

        Raises ClosedError, and LaunchError if the process does not answer.
        """
        with self._process.lock:
            self._process.require_open()
            try:
                running = self._process.running
                return RefusedNames(_asked(running.control, TellRefused())) if running else None
            except _NO_ANSWER as error:
                why = f"the egress process does not answer ({type(error).__name__})"
                raise LaunchError(why) from None

    def require_open(self) -> None:
        """Raise ClosedError if the sandbox was closed, and in a forked child of its owner."""
        self._process.require_open()

    def _ask(
        self, control: "socket.socket", question: SetRules | ListPending
    ) -> "list[Refusal | Relayed]":
        with contextlib.closing(_asked(control, question)) as ours:
            return _until_settled(ours)

    def _hand_over(self, plan: Plan, descriptors: tuple[int, ...]) -> None:
        for _ in range(2):
            process = self._process.ready(lambda: self._start(plan))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                channel.send(process.control, encode(AddCell()), descriptors)
                return
        raise LaunchError("the egress process ended twice")

    def _start(self, plan: Plan) -> ConfinedProcess:
        network = plan.network
        assert network  # noqa: S101 - `add` has looked
        if self._rules is not None:
            network = msgspec.structs.replace(network, rules=self._rules)
        parser = _http_parser() if network.reads_requests or self._secrets else ""
        proxy = _proxy() if network.has_proxy else None
        boot = EgressBoot(
            network, self._uid, plan.landlock_abi, self._made_at, parser, proxy, self._secrets
        )
        return ConfinedProcess(self._executable, _MODULE, boot, "the egress process")

    def close(self) -> None:
        """End the process, and so every connection; does nothing in a forked child of the owner."""
        self._process.close()


def _proxy() -> UpstreamProxy:
    """Return the host's proxy; raises LaunchError without: nothing is dialled directly then."""
    try:
        return proxy_of(ENVIRONMENT, "network.proxy")
    except PolicyError as error:
        raise LaunchError(str(error)) from None


def _http_parser() -> str:
    """Return the directory of the package that parses requests; raises LaunchError without it."""
    import importlib.util

    spec = importlib.util.find_spec("h11")
    if spec is None or spec.origin is None:
        raise LaunchError(
            "network.allow: methods, paths and credentials: the package h11 is not installed",
            how_to_install("network"),
        )
    return os.path.dirname(os.path.dirname(spec.origin))


def _wrong(descriptors: list[int], ports: tuple[int, ...]) -> bool:
    """Tell whether sockets are not bound, or do not listen, as the steps of a cell have them."""
    import socket  # slow to import

    queries = [(socket.SOCK_DGRAM, (DNS_ADDRESS, 53)), (socket.SOCK_STREAM, (DNS_ADDRESS, 53))]
    wanted = queries + [(socket.SOCK_STREAM, (ANY_ADDRESS, port)) for port in ports]
    found = []
    for descriptor in descriptors:
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            if sock.type == socket.SOCK_STREAM and not _listens(sock):
                return True
            found.append((sock.type, sock.getsockname()))
    return found != wanted


def _listens(sock: "socket.socket") -> bool:
    import socket  # slow to import

    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
