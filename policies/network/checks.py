"""Checks of network rules before they decide anything: each that fails names its field."""

from collections.abc import Iterable

from ..errors import PolicyError
from .addresses import networks_of
from .names import HostNameError
from .paths import PathError, canonical_path
from .rule import SCHEMES, SNI, NetworkDenial, NetworkRule
from .rules import canonical_pattern
from .suffixes import is_public_suffix

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
