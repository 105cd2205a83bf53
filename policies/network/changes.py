"""`ChangingRules`: the network rules of a policy, and what was allowed or denied after its sandbox was
made.  Pure."""

from typing import NamedTuple, Self, TypeVar

import msgspec

from ..errors import PolicyError
from .checks import check_rules
from .rule import NetworkDenial, NetworkRule
from .rules import canonical_pattern, covers_host

_Rule = TypeVar("_Rule", NetworkRule, NetworkDenial)


class ChangingRules(NamedTuple):
    """The rules of the policy always hold, its denials above all; `allowed` and `denied` are beside
    them.  Of two changes about one host and port the later one counts."""

    policy_allow: tuple[NetworkRule, ...]
    policy_deny: tuple[NetworkDenial, ...]
    addresses: tuple[str, ...]
    allowed: tuple[NetworkRule, ...] = ()
    denied: tuple[NetworkDenial, ...] = ()

    @property
    def allow(self) -> tuple[NetworkRule, ...]:
        return (*self.policy_allow, *self.allowed)

    @property
    def deny(self) -> tuple[NetworkDenial, ...]:
        return (*self.policy_deny, *self.denied)

    @property
    def ports(self) -> tuple[int, ...]:
        """Return the ports of the policy's rules: cells listen on no others."""
        return tuple(sorted({port for rule in self.policy_allow for port in rule.each_port()}))

    def with_allowed(self, rule: NetworkRule, age_seconds: float) -> Self:
        """Return the rules with one more; its lifetime begins `age_seconds` after that of the sandbox.

        Raises PolicyError for an invalid rule, a port that cells do not listen on, and a rule that
        would have no effect because denials forbid all of it.
        """
        check_rules((*self.allow, rule), self.deny, self.addresses)
        if rule.has_requests and not any(each.has_requests for each in self.policy_allow):
            raise PolicyError(
                f"network.allow: {rule.host!a}: methods and paths: no rule of the policy has them, so "
                "requests are not read",
                "write them in a rule of the policy, and make a new sandbox",
            )
        rule = msgspec.structs.replace(rule, host=canonical_pattern(rule.host))
        ports = rule.each_port()
        if unknown := sorted(set(ports) - set(self.ports)):
            raise PolicyError(
                f"network.allow: {rule.host!a}: ports: must be among those that rules of the policy "
                f"name ({_listed(self.ports)}), got {_listed(unknown)}",
                "name the port in a rule of the policy, and make a new sandbox",
            )
        kept = self._replace(
            allowed=self._without(self.allowed, rule.host, ports),
            denied=self._without(self.denied, rule.host, ports),
        )
        kept._refuse_denied(rule, ports)
        if rule.lifetime_seconds is not None:
            lifetime = rule.lifetime_seconds + age_seconds
            rule = msgspec.structs.replace(rule, lifetime_seconds=lifetime)
        return kept._replace(allowed=(*kept.allowed, rule))

    def with_denied(self, denial: NetworkDenial) -> Self:
        """Return the rules with one more denial; raises PolicyError if it is invalid."""
        check_rules(self.allow, (*self.deny, denial), self.addresses)
        denial = msgspec.structs.replace(denial, host=canonical_pattern(denial.host))
        ports = self.ports if denial.ports is None else denial.ports
        return self._replace(
            allowed=self._without(self.allowed, denial.host, ports),
            denied=(*self._without(self.denied, denial.host, ports), denial),
        )

    def _refuse_denied(self, rule: NetworkRule, ports: tuple[int, ...]) -> None:
        """Raise PolicyError if denials forbid every port of a rule."""
        found = [self._denial_of(rule.host, port) for port in ports]
        if None in found:
            return
        if found[0] in self.policy_deny:
            whose, hint = "the policy has", ""
        else:
            whose, hint = "the sandbox was told", "allow takes back a denial of the same host only"
        raise PolicyError(
            f"network.allow: {rule.host!a}: has no effect: {whose} '{found[0]}'", hint
        )

    def _denial_of(self, host: str, port: int) -> NetworkDenial | None:
        for denial in self.deny:
            of_port = denial.ports is None or port in denial.ports
            if of_port and covers_host(canonical_pattern(denial.host), host):
                return denial
        return None

    def _without(
        self, rules: tuple[_Rule, ...], host: str, ports: tuple[int, ...]
    ) -> tuple[_Rule, ...]:
        """Return `rules` without those ports of that host."""
        found: list[_Rule] = []
        for rule in rules:
            own = self._ports_of(rule)
            left = tuple(port for port in own if port not in ports)
            if rule.host != host or left == own:
                found.append(rule)
            elif left:
                found.append(msgspec.structs.replace(rule, ports=left))
        return tuple(found)

    def _ports_of(self, rule: NetworkRule | NetworkDenial) -> tuple[int, ...]:
        if isinstance(rule, NetworkRule):
            return rule.each_port()
        return self.ports if rule.ports is None else rule.ports


def _listed(ports: "tuple[int, ...] | list[int]") -> str:
    return ", ".join(map(str, ports))
