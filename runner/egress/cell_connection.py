"""`CellConnection`: one connection of a cell, from its acceptance to its end, and records."""

import asyncio
import socket
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from ...policies.network.canonical import canonical_name
from ...policies.network.rule import NetworkDenial, NetworkRule
from ...policies.network.rules import (
    HttpRequest,
    NetworkRules,
    NetworkVerdict,
    RuleUse,
    any_sni,
    reads_requests,
)
from ..messages import Refusal, Relayed, Settled, decode, encode
from .connection_relay import RefusedError, Relay

if TYPE_CHECKING:
    from .credential_exchange import CellSecrets
    from .http_relay import RequestReader, RequestRelay
    from .tls_stream import TlsContexts


_MOST_NAMES = 256  # names remembered as refused
_Rules = tuple[tuple[NetworkRule, ...], tuple[NetworkDenial, ...], tuple[str, ...]]


def decoded_rules(rules: bytes) -> NetworkRules:
    """Return the rules of a NetworkPlan or a SetRules frame; raises msgspec.DecodeError."""
    return NetworkRules(*decode(rules, _Rules))


class Grant(NamedTuple):
    """The schemes and the networks of private addresses that rules allow a connection.

    `reads_requests`: over plain HTTP, each request needs a rule for its method and path.
    `any_sni`: over TLS, any server may be asked for.
    """

    schemes: frozenset[str]
    networks: frozenset[str]
    reads_requests: bool
    any_sni: bool

    def is_within(self, other: "Grant") -> bool:
        schemes = self.schemes <= other.schemes or "tcp" in other.schemes
        is_read = self.reads_requests or not (other.reads_requests and "http" in self.schemes)
        sni = other.any_sni or not self.any_sni
        return schemes and is_read and sni and self.networks <= other.networks


class CellPolicy:
    """The rules of every cell, the ports that cells listen on, and when the time of rules began."""

    def __init__(
        self, rules: NetworkRules, ports: tuple[int, ...], made_at: float,
        secrets: "CellSecrets | None" = None, tls: "TlsContexts | None" = None,
    ) -> None:  # fmt: skip
        self.rules = rules
        self.ports = ports
        self.secrets = secrets
        self.tls = tls
        self._made_at = made_at
        self._refused: OrderedDict[tuple[str, int], tuple[str, int]] = OrderedDict()
        self._connections: dict[tuple[str, int], Refusal] = {}
        self._told: list[socket.socket] = []

    def decide(self, name: str, port: int, scheme: str | None = None) -> NetworkVerdict:
        age = time.monotonic() - self._made_at
        return self.rules.decide(name, port, scheme, age_seconds=age)

    def why_not(self, text: str) -> tuple[str, str]:
        """Return why no port of a name may be reached, empty if one may, and its canonical form."""
        try:
            name = canonical_name(text)
        except ValueError as error:
            return str(error), text
        verdicts = [self.decide(name, port) for port in self.ports]
        return (
            ("", name) if any(each.is_allowed for each in verdicts) else (verdicts[0].reason, name)
        )

    def grant(self, verdict: NetworkVerdict, port: int) -> Grant:
        schemes = frozenset(each for rule in verdict.matching for each in rule.schemes_on(port))
        secrets, name = self.secrets, verdict.name
        if secrets and "tcp" in schemes and secrets.knows(name, port):
            schemes = frozenset(("http", "https"))  # the relay has to know what is spoken
        is_read = bool(secrets and secrets.knows(name) and "tcp" not in schemes)
        return Grant(
            schemes,
            frozenset(self.rules.network_texts(verdict)),
            reads_requests(verdict.matching, port),
            any_sni(verdict.matching, port) and not is_read,
        )

    def why_not_request(self, name: str, port: int, asked: HttpRequest) -> str:
        """Return why a request over plain HTTP is refused, empty if it is allowed."""
        age = time.monotonic() - self._made_at
        return self.rules.decide_request(name, port, "http", asked, age_seconds=age).reason

    def why_ended(self, name: str, port: int, grant: Grant) -> str:
        """Return why a connection that was granted must end, empty if it may go on."""
        verdict = self.decide(name, port)
        if verdict.is_allowed and grant.is_within(self.grant(verdict, port)):
            return ""
        denial = self.rules.denial_of(name, port)
        return f"ended by the rule '{denial}'" if denial else "the rule has ended"

    def note_refused(self, name: str, port: int, reason: str) -> None:
        """Remember that a name was asked for, on port 0 if it was only looked up; the least recently
        refused one is forgotten."""
        _, count = self._refused.pop((name, port), ("", 0))
        self._refused[name, port] = reason, count + 1
        if len(self._refused) > _MOST_NAMES:
            self._refused.popitem(last=False)
        if not count and self._is_undecided(name, (port,) if port else self.ports):
            self._tell(_refusal(name, port, reason, 1))

    def note_connection(self, name: str, port: int, reason: str) -> None:
        """Tell once why connections to an allowed name were refused, such as by its address."""
        if (name, port) not in self._connections and len(self._connections) < _MOST_NAMES:
            told = self._connections[name, port] = Refusal(
                "connection", name, port, reason[:300], 1
            )
            self._tell(told)

    def tell_refused(self, sock: socket.socket) -> None:
        """Send refused names on `sock`, which does not block, until it hangs up; a name for which it
        has no room is left out."""
        if all(_takes(sock, each) for each in (*self.pending(), *self._connections.values())):
            self._told.append(sock)

    def follow(self, rules: NetworkRules) -> None:
        """Decide by other rules from now on."""
        self.rules = rules
        self._tell(Settled())

    def _tell(self, frame: msgspec.Struct) -> None:
        self._told = [each for each in self._told if _takes(each, frame)]

    def pending(self) -> list[msgspec.Struct]:
        """Return the refused names that no rule allows or denies by now; the latest is last."""
        return [
            _refusal(name, port, reason, count)
            for (name, port), (reason, count) in self._refused.items()
            if self._is_undecided(name, (port,) if port else self.ports)
        ]

    def _is_undecided(self, name: str, ports: tuple[int, ...]) -> bool:
        verdicts = [self.decide(name, port) for port in ports]
        if any(each.is_allowed or not each.name for each in verdicts):  # the text may be no name
            return False
        return any(self.rules.denial_of(name, port) is None for port in ports)


def _refusal(name: str, port: int, reason: str, count: int) -> Refusal:
    return Refusal("connect" if port else "resolve", name[:253], port, reason[:300], count)


def _takes(sock: socket.socket, frame: msgspec.Struct) -> bool:
    """Send a frame if there is room; return False, with `sock` closed, if it has hung up."""
    try:
        sock.send(b"\0" + encode(frame), socket.MSG_NOSIGNAL)
    except BlockingIOError:
        pass
    except OSError:
        sock.close()
        return False
    return True


_IDLE_SECONDS = 300.0
_LIFETIME_SECONDS = 3600.0


class CellConnection:
    """A connection of the cell, from its acceptance to its end."""

    def __init__(
        self, guest: socket.socket, name: str, port: int, grant: Grant, uses: list[RuleUse]
    ) -> None:
        self.guest = guest
        self.uses = uses
        self.name = name
        self.port = port
        self.grant = grant
        self.begun_at = time.monotonic()
        self.uploaded = asyncio.Event()
        self.relay: Relay | RequestRelay | None = None
        self.reader: RequestReader | None = None  # reads its requests, if they are read
        self.task: asyncio.Task[None] | None = None
        self.why = ""  # why the egress process ended the connection
        self.is_answered = False  # the program got an answer with the reason

    def count(self, sent_bytes: int, received_bytes: int) -> None:
        """Count bytes before they are passed on; raises RefusedError."""
        for use in self.uses:
            if why := use.count(sent_bytes, received_bytes):
                raise RefusedError(why)

    def why_ended(self, now: float) -> str:
        """Return why it has to end although its name and port are allowed, empty if it may go on."""
        if now - self.begun_at > _LIFETIME_SECONDS:
            return f"longer than {_LIFETIME_SECONDS:g} s"
        if self.relay and now - self.relay.used_at > _IDLE_SECONDS:
            return f"idle for {_IDLE_SECONDS:g} s"
        return self.relay.why_not_now() if self.relay else ""


_MOST_RECORDS = 1000  # records kept in full between two requests of the supervisor

_Kind = Literal["resolve", "connect", "record", "credential"]


class Records:
    """The events of a cell: a bounded number of records, then only counts."""

    def __init__(self) -> None:
        self._refusals: dict[tuple[_Kind, str, int, str], int] = {}
        self._relayed: list[Relayed] = []
        self._left_out = 0

    def refuse(self, kind: _Kind, name: str, port: int, reason: str) -> None:
        key = (kind, name[:253], port, reason[:300])
        if key not in self._refusals and len(self._refusals) >= _MOST_RECORDS:
            key = (kind, "", 0, "more names than are recorded")
        self._refusals[key] = self._refusals.get(key, 0) + 1

    def relay(self, relayed: Relayed) -> None:
        if len(self._relayed) < _MOST_RECORDS:
            self._relayed.append(relayed)
        else:
            self._left_out += 1

    def take(self) -> list[msgspec.Struct]:
        taken: list[msgspec.Struct] = [
            Refusal(*key, count) for key, count in self._refusals.items()
        ]
        taken += self._relayed
        if self._left_out:
            taken.append(
                Refusal("record", "", 0, "more connections than are recorded", self._left_out)
            )
        self._refusals, self._relayed, self._left_out = {}, [], 0
        return taken
