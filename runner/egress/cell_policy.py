"""`CellPolicy`: the rules of every cell, which may be replaced, and the names that they refused."""

import time
from collections import OrderedDict
from typing import NamedTuple

import msgspec

from ...policies.network.names import canonical_name
from ...policies.network.rule import NetworkDenial, NetworkRule
from ...policies.network.rules import (
    HttpRequest,
    NetworkRules,
    NetworkVerdict,
    any_sni,
    reads_requests,
)
from ..messages import Refusal, decode

_MOST_NAMES = 256  # that are remembered as refused
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

    def __init__(self, rules: NetworkRules, ports: tuple[int, ...], made_at: float) -> None:
        self.rules = rules
        self.ports = ports
        self._made_at = made_at
        self._refused: OrderedDict[tuple[str, int], tuple[str, int]] = OrderedDict()

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
        return Grant(
            schemes,
            frozenset(self.rules.network_texts(verdict)),
            reads_requests(verdict.matching, port),
            any_sni(verdict.matching, port),
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

    def pending(self) -> list[msgspec.Struct]:
        """Return the refused names that no rule allows or denies by now; the latest is last."""
        return [
            Refusal("connect" if port else "resolve", name, port, reason[:300], count)
            for (name, port), (reason, count) in self._refused.items()
            if self._is_undecided(name, (port,) if port else self.ports)
        ]

    def _is_undecided(self, name: str, ports: tuple[int, ...]) -> bool:
        verdicts = [self.decide(name, port) for port in ports]
        if any(each.is_allowed or not each.name for each in verdicts):  # without: it is no name
            return False
        return any(self.rules.denial_of(name, port) is None for port in ports)
