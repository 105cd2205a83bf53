"""The decision about a connection by all network rules of a policy, and the use of their caps.  Pure.

Nothing is allowed without a rule, and a denial wins over every rule.  Names are compared in their
canonical spelling (canonical.py) alone.
"""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from .canonical import (
    HostNameError,
    PathError,
    canonical_name,
    canonical_path,
    header_with_path,
    overriding_header,
    parameter_with_method,
)
from .rule import NetworkDenial, NetworkRule

if TYPE_CHECKING:
    from .address_ranges import AddressNetwork


class NetworkVerdict(NamedTuple):
    """The decision about a name: `rule` is the text of the rule that decided, None if none matched.

    `name` is the canonical spelling, the only one to resolve, dial and record.  `matching` are the
    rules that allow the connection; the caps of all of them apply.
    """

    is_allowed: bool
    rule: str | None
    reason: str
    name: str = ""
    matching: tuple[NetworkRule, ...] = ()


class HttpRequest(NamedTuple):
    """A request about which rules decide: `query` may have its `?`, `headers` are names only."""

    method: str
    path: str
    query: str = ""
    headers: tuple[str, ...] = ()


class NetworkRules:
    """The rules of one policy, checked and ready for decisions.

    `addresses` are networks that every rule may reach besides its own.  Raises PolicyError.
    """

    def __init__(
        self,
        allow: Iterable[NetworkRule] = (),
        deny: Iterable[NetworkDenial] = (),
        addresses: Iterable[str] = (),
    ) -> None:
        self.addresses = tuple(addresses)
        self.allow = tuple(
            msgspec.structs.replace(rule, host=canonical_pattern(rule.host)) for rule in allow
        )
        self.deny = tuple(
            msgspec.structs.replace(each, host=canonical_pattern(each.host)) for each in deny
        )

    def decide(
        self, name: str, port: int, scheme: str | None = None, *, age_seconds: float = 0.0
    ) -> NetworkVerdict:
        """Decide about a connection, before the name is resolved: a lookup tells it to others.

        Without a scheme, decide whether any scheme may be spoken.  `age_seconds` is the time since the
        sandbox was made.
        """
        try:
            name = canonical_name(name)
        except HostNameError as error:
            return NetworkVerdict(False, None, str(error))
        if denial := self.denial_of(name, port):
            return NetworkVerdict(False, str(denial), f"{name}: a rule denies it", name)
        of_name = [rule for rule in self.allow if matches_host(rule.host, name)]
        if not of_name:
            return NetworkVerdict(False, None, f"{name}: no rule allows it", name)
        found = tuple(rule for rule in of_name if _allows(rule, port, scheme, age_seconds))
        if not found:
            spoken = f" with {scheme}" if scheme else ""
            why = f"{name}: no rule allows port {port}{spoken} now"
            return NetworkVerdict(False, str(of_name[0]), why, name)
        return NetworkVerdict(True, str(found[0]), "", name, found)

    def decide_request(
        self, name: str, port: int, scheme: str, asked: HttpRequest, *, age_seconds: float = 0.0
    ) -> NetworkVerdict:
        """Decide about an HTTP request by its method and path too.

        A path that servers may read in different ways matches no rule that has paths.  A request with
        a header or parameter that names another one matches no rule that it could get around.
        """
        verdict = self.decide(name, port, scheme, age_seconds=age_seconds)
        if not verdict.is_allowed:
            return verdict
        if header := overriding_header(asked.headers):
            why = f"the header {header[:60]} can name another request"
            return NetworkVerdict(False, verdict.rule, why, verdict.name)
        try:
            canonical, why = canonical_path(asked.path), ""
        except PathError as error:  # allowed only by a rule without paths
            canonical, why = None, f", which {error.reason}"
        if header := header_with_path(asked.headers):
            canonical, why = None, f", beside which the header {header[:60]} names another"
        method = asked.method
        if parameter := parameter_with_method(asked.query):
            method, why = "", f", and the parameter {parameter[:60]!a} can name another method"
        found = tuple(rule for rule in verdict.matching if _allows_request(rule, method, canonical))
        if not found:
            why = f"{verdict.name}: no rule allows {asked.method[:20]} of this path{why}"
            return NetworkVerdict(False, verdict.rule, why, verdict.name)
        return verdict._replace(rule=str(found[0]), matching=found)

    def denial_of(self, name: str, port: int) -> NetworkDenial | None:
        """Return the first denial of a canonical name on a port, if there is one."""
        for denial in self.deny:
            if matches_host(denial.host, name) and (denial.ports is None or port in denial.ports):
                return denial
        return None

    def networks(self, verdict: NetworkVerdict) -> "tuple[AddressNetwork, ...]":
        """Return the networks that are not public and that the matching rules may reach."""
        from .address_ranges import networks_of  # imports ipaddress, which few policies need

        return networks_of(self.network_texts(verdict))

    def network_texts(self, verdict: NetworkVerdict) -> tuple[str, ...]:
        """Return those networks as the rules have them."""
        texts = (*self.addresses, *(each for rule in verdict.matching for each in rule.addresses))
        return tuple(dict.fromkeys(texts))


def encode_rules(
    allow: Iterable[NetworkRule], deny: Iterable[NetworkDenial], addresses: Iterable[str]
) -> bytes:
    """Return rules as the egress process gets them, in msgpack."""
    return msgspec.msgpack.encode((tuple(allow), tuple(deny), tuple(addresses)))


def reads_requests(rules: Iterable[NetworkRule], port: int) -> bool:
    """Tell whether a connection by `rules` needs a decision for each request over plain HTTP: it does
    unless one of them allows every request, or any bytes."""
    spoken = [rule for rule in rules if not {"http", "tcp"}.isdisjoint(rule.schemes_on(port))]
    return bool(spoken) and all(rule.has_requests for rule in spoken)


def any_sni(rules: Iterable[NetworkRule], port: int) -> bool:
    """Tell whether TLS by `rules` may ask for any server."""
    spoken = [(rule.sni, rule.schemes_on(port)) for rule in rules]
    return any("tcp" in each or (sni == "any" and "https" in each) for sni, each in spoken)


def matches_host(pattern: str, name: str) -> bool:
    """Tell whether a canonical name is `pattern`, or lies below it if it begins with `*.`."""
    if pattern == "*":
        return True
    return name.endswith(pattern[1:]) if pattern.startswith("*.") else name == pattern


def covers_host(wide: str, narrow: str) -> bool:
    """Tell whether every name that the pattern `narrow` stands for matches the pattern `wide`."""
    if wide in (narrow, "*"):
        return True
    return wide.startswith("*.") and matches_host(wide, narrow.removeprefix("*."))


def _allows(rule: NetworkRule, port: int, scheme: str | None, age_seconds: float) -> bool:
    if rule.lifetime_seconds is not None and not age_seconds < rule.lifetime_seconds:
        return False
    if port not in rule.each_port():
        return False
    return scheme is None or not {scheme, "tcp"}.isdisjoint(rule.schemes_on(port))


def _allows_request(rule: NetworkRule, method: str, path: str | None) -> bool:
    if rule.methods is not None and method not in rule.methods:
        return False
    if rule.paths is None:
        return True
    return path is not None and any(matches_path(each, path) for each in rule.paths)


def matches_path(pattern: str, path: str) -> bool:
    """Tell whether a canonical path is `pattern`, or begins with it if it ends in `*`."""
    return path.startswith(pattern[:-1]) if pattern.endswith("*") else path == pattern


def canonical_pattern(host: str) -> str:
    """Return a host of a rule in its canonical spelling; raises HostNameError."""
    if host == "*":
        return host
    return f"*.{canonical_name(host[2:])}" if host.startswith("*.") else canonical_name(host)


class Allowance:
    """A number of events a second, and how many at once."""

    def __init__(self, a_second: float, at_once: float) -> None:
        self._a_second = a_second
        self._at_once = self._left = max(1.0, at_once)
        self._at = time.monotonic()

    def take(self) -> bool:
        """Tell whether one more event may happen now, and count it."""
        now = time.monotonic()
        self._left = min(self._at_once, self._left + (now - self._at) * self._a_second)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class RuleUse:
    """Connections and bytes under one rule.  Not safe from several threads."""

    def __init__(self, rule: NetworkRule) -> None:
        self._rule = rule
        self._allowance = Allowance(rule.connections_per_second, rule.connections_per_second)
        self._connections = self._sent_bytes = self._received_bytes = 0

    def begin(self) -> str:
        """Count a connection; return why there must not be one more, else ""."""
        rule = self._rule
        if self._connections >= rule.connections:
            return f"{rule}: more than {rule.connections} connections at a time"
        if why := self._exhausted():
            return why
        if not self._allowance.take():
            return f"{rule}: more than {rule.connections_per_second:g} connections a second"
        self._connections += 1
        return ""

    def end(self) -> None:
        self._connections -= 1

    def count(self, sent_bytes: int, received_bytes: int) -> str:
        """Count bytes; return which cap on them is exceeded, else ""."""
        self._sent_bytes += sent_bytes
        self._received_bytes += received_bytes
        return self._exhausted()

    def _exhausted(self) -> str:
        rule = self._rule
        if rule.sent_bytes is not None and self._sent_bytes > rule.sent_bytes:
            return f"{rule}: more than {rule.sent_bytes} bytes sent"
        if rule.received_bytes is not None and self._received_bytes > rule.received_bytes:
            return f"{rule}: more than {rule.received_bytes} bytes received"
        return ""
