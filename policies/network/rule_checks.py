"""Checks of network rules before they decide anything: each that fails names its field.

`ChangingRules` are the rules of a policy, and the hosts allowed or denied after its sandbox was made.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

import msgspec

from ..errors import PolicyError
from .address_ranges import networks_of
from .canonical import HostNameError, PathError, canonical_path
from .rule import SCHEMES, SNI, NetworkDenial, NetworkRule
from .rules import canonical_pattern, covers_host

_MOST_RULES = 1000
_LARGEST = 2**53


def check_rules(
    allow: Iterable[NetworkRule], deny: Iterable[NetworkDenial], addresses: Iterable[str],
    where: str = "network", *, reads_requests: bool = False,
) -> None:  # fmt: skip
    """Raise PolicyError for an invalid rule; `where` is the section that has them.

    `reads_requests`: methods and paths of https requests are known too, as the http tool knows them.
    """
    allow, deny = tuple(allow), tuple(deny)
    for kind, of_kind in ((NetworkRule, allow), (NetworkDenial, deny)):
        for each in of_kind:
            if not isinstance(each, kind):
                raise PolicyError(f"{where}: must be a {kind.__name__}, got {each!r}")
    if len(allow) + len(deny) > _MOST_RULES:
        raise PolicyError(f"{where}: must have at most {_MOST_RULES} rules, got {len(allow)}")
    if not isinstance(addresses, list | tuple):
        raise PolicyError(f"{where}.addresses: must be a list, got {addresses!r}")
    _check_addresses(f"{where}.addresses", addresses)
    for rule in allow:
        _check_rule(f"{where}.allow: {rule.host!a}", rule, reads_requests=reads_requests)
    for denial in deny:
        place = f"{where}.deny: {denial.host!a}"
        _pattern(place, denial.host)
        if denial.ports is not None and not isinstance(denial.ports, list | tuple):
            raise PolicyError(f"{place}: ports: must be a list, got {denial.ports!r}")
        _check_ports(place, denial.ports)


def _check_rule(place: str, rule: NetworkRule, *, reads_requests: bool) -> None:
    for name in ("ports", "schemes", "methods", "paths", "addresses"):
        value = getattr(rule, name)
        if value is not None and not isinstance(value, list | tuple):  # text is a sequence too
            raise PolicyError(f"{place}: {name}: must be a list, got {value!r}")
    _check_host(place, rule)
    _check_ports(place, rule.ports)
    _check_schemes(place, rule)
    if rule.sni not in SNI:
        raise PolicyError(f"{place}: sni: must be one of {', '.join(SNI)}, got {rule.sni!r}")
    _check_requests(place, rule, reads_requests=reads_requests)
    _check_addresses(f"{place}: addresses", rule.addresses)
    for name in ("connections", "connections_per_second"):
        _check_cap(f"{place}: {name}", getattr(rule, name))
    for name in ("sent_bytes", "received_bytes", "lifetime_seconds"):
        if getattr(rule, name) is not None:
            _check_cap(f"{place}: {name}", getattr(rule, name))


def _pattern(place: str, host: object) -> str:
    if not isinstance(host, str):
        raise PolicyError(f"{place}: host: must be a name, got {host!r}")
    try:
        return canonical_pattern(host)
    except HostNameError as error:
        raise PolicyError(
            f"{place}: host: {error}", "write a name, or *.example.org for the names below it"
        ) from None


def _check_host(place: str, rule: NetworkRule) -> None:
    pattern = _pattern(place, rule.host)
    is_wide = pattern == "*" or (pattern.startswith("*.") and is_public_suffix(pattern[2:]))
    if is_wide and not rule.any:
        raise PolicyError(
            f"{place}: host: must not cover names of different owners",
            "name the hosts; any = true allows it nevertheless",
        )


def _check_ports(place: str, ports: tuple[int, ...] | None) -> None:
    if ports is None:
        return
    if not ports:
        raise PolicyError(f"{place}: ports: must not be empty", "leave it out for the default")
    for port in ports:
        if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
            raise PolicyError(f"{place}: ports: must be from 1 to 65535, got {port!r}")


def _check_schemes(place: str, rule: NetworkRule) -> None:
    if rule.schemes is None:
        return
    if not rule.schemes or not set(rule.schemes) <= set(SCHEMES):
        known = ", ".join(SCHEMES)
        raise PolicyError(f"{place}: schemes: must be of {known}, got {list(rule.schemes)!r}")
    if "tcp" in rule.schemes and rule.ports is None:
        raise PolicyError(f"{place}: schemes: tcp has no standard port; name the ports")


def _check_requests(place: str, rule: NetworkRule, *, reads_requests: bool) -> None:
    if rule.methods is None and rule.paths is None:
        return
    spoken = {scheme for port in rule.each_port() for scheme in rule.schemes_on(port)}
    if "tcp" in spoken:
        raise PolicyError(f"{place}: methods and paths: must be left out with the scheme tcp")
    if "https" in spoken and not reads_requests:
        raise PolicyError(
            f"{place}: methods and paths: are for schemes = [\"http\"] only: requests over https are "
            "encrypted by the program",
            "offer the tool http.request, by a rule in [[http.allow]], which holds for https too",
        )  # fmt: skip
    for method in rule.methods or ():
        if method == "CONNECT":
            raise PolicyError(f"{place}: methods: CONNECT opens a tunnel, which no rule allows")
        if not (method.isascii() and method.isalpha() and method.isupper()):
            raise PolicyError(f"{place}: methods: must be in capital letters, got {method!a}")
    for path in rule.paths or ():
        _check_path(place, path)


def _check_path(place: str, path: str) -> None:
    bare = path.removesuffix("*")
    try:
        canonical = canonical_path(bare)
    except PathError as error:
        raise PolicyError(f"{place}: paths: {error}") from None
    if canonical != bare or "*" in bare:
        raise PolicyError(
            f"{place}: paths: must be plain, and have '*' at the end only, got {path!a}",
            f"write {canonical!a}" if "*" not in bare else "",
        )


def _check_addresses(where: str, texts: Iterable[str]) -> None:
    for text in texts:
        try:
            networks_of((text,))
        except ValueError as error:
            raise PolicyError(f"{where}: must be networks such as 10.1.0.0/16: {error}") from None


def _check_cap(where: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= _LARGEST:  # type: ignore[operator]
        raise PolicyError(f"{where}: must be more than 0 and at most 2^53, got {value!r}")


_Rule = TypeVar("_Rule", NetworkRule, NetworkDenial)


class ChangingRules(NamedTuple):
    """The denials of the policy always hold, and its rules unless `instead` is in their place;
    `allowed` and `denied` are beside them.  Of two changes about one host and port the later counts."""

    policy_allow: tuple[NetworkRule, ...]
    policy_deny: tuple[NetworkDenial, ...]
    addresses: tuple[str, ...]
    allowed: tuple[NetworkRule, ...] = ()
    denied: tuple[NetworkDenial, ...] = ()
    instead: tuple[NetworkRule, ...] | None = None

    @property
    def allow(self) -> tuple[NetworkRule, ...]:
        kept = self.policy_allow if self.instead is None else self.instead
        return (*kept, *self.allowed)

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

    def with_only(self, rules: Sequence[NetworkRule]) -> Self:
        """Return `rules` in place of all that is allowed; later denials are taken back.

        Raises PolicyError for rules that `with_allowed` refuses.
        """
        found = self._replace(instead=(), allowed=(), denied=())
        for rule in rules:
            found = found.with_allowed(rule, 0.0)
        return found

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


_MOST_LABELS = 2
_COUNTRY_CODE = 2  # letters


def is_public_suffix(name: str) -> bool:
    """Tell whether a canonical name is a top-level domain, or a suffix of public_suffixes.toml.  A rule
    for one that is missing there is accepted."""
    words, hosts = _suffixes()
    labels = name.split(".")
    # An address in a name, or a region, may come between: *.s3.eu-west-1.amazonaws.com.
    if len(labels) == 1 or name in hosts or name.endswith(".amazonaws.com"):
        return True
    is_of_country = len(labels) == _MOST_LABELS and len(labels[-1]) == _COUNTRY_CODE
    return is_of_country and labels[0] in words


@cache
def _suffixes() -> tuple[frozenset[str], frozenset[str]]:
    import tomllib  # few rules have wildcards

    tables = tomllib.loads(Path(__file__).with_name("public_suffixes.toml").read_text())
    return frozenset(tables["words"].split()), frozenset(tables["hosts"].split())
