"""Network rules: which hosts, ports and requests programs may reach, and how much.  Pure.

Nothing is allowed without a rule, and a denial wins over every rule.  Names are compared in their
canonical spelling (names.py) alone.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import msgspec

from ..errors import PolicyError
from .names import HostNameError, canonical_name
from .paths import PathError, canonical_path
from .suffixes import is_public_suffix

if TYPE_CHECKING:
    from .addresses import AddressNetwork

Scheme = Literal["http", "https", "tcp"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
_STANDARD_PORTS: dict[Scheme, int] = {"http": 80, "https": 443}
_MOST_RULES = 1000
_LARGEST = 2**53


def _have_tuples(rule: msgspec.Struct, names: tuple[str, ...]) -> None:
    """Make tuples of lists, so that rules can be compared and hashed."""
    for name in names:
        if isinstance(value := getattr(rule, name), list):
            msgspec.structs.force_setattr(rule, name, tuple(value))


class NetworkRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A rule that allows connections to a host.

    host: a name; `*.example.org` stands for every name below example.org, not for itself
    any: `host` may be `*`, or have a wildcard directly below a public suffix such as `com`
    ports: default 443, or the standard ports of `schemes`
    schemes: `https`, TLS that asks for the same name; `http`; `tcp`, any bytes.  Default http on port
        80 and https on others
    methods, paths: of requests, default all; a path that ends in `*` stands for all that begin with
        it.  Only for http: nothing outside the program can read a request over https, except that of
        the tool `http.request`
    addresses: networks that are not public and that the name may resolve to, such as 10.1.0.0/16
    connections: open at a time
    connections_per_second: with a burst of one second's worth
    sent_bytes, received_bytes: of all connections of one cell together, default unlimited
    lifetime_seconds: how long the rule holds, from the moment the sandbox is made, default unlimited

    If several rules match, a connection needs only one of them to allow it, and keeps the caps of all.
    """

    host: str
    any: bool = False
    ports: tuple[int, ...] | None = None
    schemes: tuple[Scheme, ...] | None = None
    methods: tuple[str, ...] | None = None
    paths: tuple[str, ...] | None = None
    addresses: tuple[str, ...] = ()
    connections: int = 64
    connections_per_second: float = 100.0
    sent_bytes: int | None = None
    received_bytes: int | None = None
    lifetime_seconds: float | None = None

    def __post_init__(self) -> None:
        _have_tuples(self, ("ports", "schemes", "methods", "paths", "addresses"))

    def __str__(self) -> str:
        ports = ",".join(map(str, self.each_port()))
        return f"allow {self.host}:{ports}"

    def each_port(self) -> tuple[int, ...]:
        if self.ports is not None:
            return self.ports
        standard = [_STANDARD_PORTS[each] for each in self.schemes or () if each != "tcp"]
        return tuple(dict.fromkeys(standard)) or (_STANDARD_PORTS["https"],)

    def schemes_on(self, port: int) -> tuple[Scheme, ...]:
        if self.schemes is not None:
            return self.schemes
        return ("http",) if port == _STANDARD_PORTS["http"] else ("https",)


class NetworkDenial(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A rule that denies connections to a host, whatever else allows them.

    host: as in a NetworkRule; `*` is every name
    ports: default all
    """

    host: str
    ports: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _have_tuples(self, ("ports",))

    def __str__(self) -> str:
        ports = "" if self.ports is None else ":" + ",".join(map(str, self.ports))
        return f"deny {self.host}{ports}"


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
        for denial in self.deny:
            if matches_host(denial.host, name) and (denial.ports is None or port in denial.ports):
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
        self, name: str, port: int, scheme: str, method: str, path: str, *, age_seconds: float = 0.0
    ) -> NetworkVerdict:
        """Decide about an HTTP request by its method and path too; the query is no part of `path`.

        A path that servers may read in different ways matches no rule that has paths.
        """
        verdict = self.decide(name, port, scheme, age_seconds=age_seconds)
        if not verdict.is_allowed:
            return verdict
        try:
            canonical, why = canonical_path(path), ""
        except PathError as error:  # which only a rule without paths allows
            canonical, why = None, f": {error}"
        found = tuple(rule for rule in verdict.matching if _allows_request(rule, method, canonical))
        if not found:
            why = f"{verdict.name}: no rule allows {method[:20]} of this path{why}"
            return NetworkVerdict(False, verdict.rule, why, verdict.name)
        return verdict._replace(rule=str(found[0]), matching=found)

    def networks(self, verdict: NetworkVerdict) -> "tuple[AddressNetwork, ...]":
        """Return the networks that are not public and that the matching rules may reach."""
        from .addresses import networks_of  # imports ipaddress, which few policies need

        texts = (*self.addresses, *(each for rule in verdict.matching for each in rule.addresses))
        return networks_of(dict.fromkeys(texts))


def matches_host(pattern: str, name: str) -> bool:
    """Tell whether a canonical name is `pattern`, or lies below it if it begins with `*.`."""
    if pattern == "*":
        return True
    return name.endswith(pattern[1:]) if pattern.startswith("*.") else name == pattern


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
            "offer the tool http.request, whose rules hold for https too",
        )  # fmt: skip
    for method in rule.methods or ():
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
    from .addresses import networks_of  # imports ipaddress, which few policies need

    for text in texts:
        try:
            networks_of((text,))
        except ValueError as error:
            raise PolicyError(f"{where}: must be networks such as 10.1.0.0/16: {error}") from None


def _check_cap(where: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= _LARGEST:  # type: ignore[operator]
        raise PolicyError(f"{where}: must be more than 0 and at most 2^53, got {value!r}")
