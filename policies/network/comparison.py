"""Comparison of network rules: the rules that two policies share, and where one allows more.  Pure."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from .address_ranges import AddressNetwork, networks_of
from .rule import NetworkDenial, NetworkRule, Scheme
from .rules import canonical_pattern, covers_host, matches_path

_Number = TypeVar("_Number", int, float)
_CAPS = ("connections", "connections_per_second", "sent_bytes", "received_bytes")


class RuleSet(NamedTuple):
    """The rules of one policy: `addresses` are networks that every rule may reach."""

    allow: Sequence[NetworkRule] = ()
    deny: Sequence[NetworkDenial] = ()
    addresses: Sequence[str] = ()


class _Region(NamedTuple):
    """A set of requests to one port by one scheme; None means all methods, or all paths."""

    host: str
    port: int
    scheme: Scheme
    any_sni: bool  # for https and tcp
    methods: tuple[str, ...] | None
    paths: tuple[str, ...] | None


def common_rules(some: RuleSet, others: RuleSet) -> RuleSet:
    """Return rules that allow what both allow, with the caps of both."""
    allow = [
        shared
        for one in _with_addresses(some)
        for other in _with_addresses(others)
        for shared in _shared(one, other)
    ]
    return RuleSet(tuple(dict.fromkeys(allow)), tuple(dict.fromkeys((*some.deny, *others.deny))))


def rules_exceed(some: RuleSet, limit: RuleSet) -> list[str]:
    """Return as text where `some` allows more than `limit`, or may: it never misses a case."""
    own, most = _with_addresses(some), _with_addresses(limit)
    found = [
        f"network.allow: {rule.host}:{region.port} by {region.scheme}{_missing(rule, region, most)}"
        for rule in own
        for region in _regions(rule)
        if not any(_lies_within(rule, region, other) for other in most)
    ]
    for capped in most:
        found += [
            f"network.allow: {rule.host}: beyond the caps of {capped}"
            for rule in own
            if any(_escapes(rule, region, capped, own) for region in _regions(rule))
        ]
    for denial in limit.deny:
        if denial not in some.deny and any(_denies_some(denial, rule) for rule in own):
            found.append(f"network.deny: without {denial}")
    return list(dict.fromkeys(found))


def _with_addresses(rules: RuleSet) -> tuple[NetworkRule, ...]:
    return tuple(
        msgspec.structs.replace(
            rule,
            host=canonical_pattern(rule.host),
            addresses=tuple(dict.fromkeys((*rule.addresses, *rules.addresses))),
        )
        for rule in rules.allow
    )


def _regions(rule: NetworkRule) -> Iterator[_Region]:
    for port in rule.each_port():
        for scheme in dict.fromkeys(rule.schemes_on(port)):
            any_sni = scheme == "tcp" or (scheme == "https" and rule.sni == "any")
            methods = None if rule.methods is None else tuple(sorted({*rule.methods}))
            paths = _plain(rule.paths)
            yield _Region(rule.host, port, scheme, any_sni, methods, paths)


def _plain(paths: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Return paths without those that others among them include."""
    if paths is None:
        return None
    given = set(paths)
    return tuple(
        sorted(
            path
            for path in given
            if not any(_common_path(path, other) == path for other in given - {path})
        )
    )


def _shared(one: NetworkRule, other: NetworkRule) -> list[NetworkRule]:
    """Return rules for what two rules both allow, one for all ports with the same requests."""
    ports: dict[tuple[Any, ...], list[int]] = {}
    host = _common_host(one.host, other.host)
    for mine in _regions(one):
        for theirs in _regions(other):
            if region := _overlap(mine, theirs):
                same = ports.setdefault(region[2:], [])
                same += [region.port] if region.port not in same else []
    return [
        NetworkRule(
            host=host or "",
            any=one.any if host == one.host else other.any,
            ports=tuple(of_requests),
            schemes=(scheme,),
            sni="any" if any_sni and scheme == "https" else "match",
            methods=methods,
            paths=paths,
            addresses=_common_addresses(one.addresses, other.addresses),
            connections=min(one.connections, other.connections),
            connections_per_second=min(one.connections_per_second, other.connections_per_second),
            sent_bytes=_least(one.sent_bytes, other.sent_bytes),
            received_bytes=_least(one.received_bytes, other.received_bytes),
            lifetime_seconds=_least(one.lifetime_seconds, other.lifetime_seconds),
        )
        for (scheme, any_sni, methods, paths), of_requests in ports.items()
    ]


def _least(one: _Number | None, other: _Number | None) -> _Number | None:
    return min((each for each in (one, other) if each is not None), default=None)


def _overlap(one: _Region, other: _Region) -> _Region | None:
    host = _common_host(one.host, other.host)
    scheme = _common_scheme(one.scheme, other.scheme)
    methods = _common_methods(one.methods, other.methods)
    paths = _common_paths(one.paths, other.paths)
    if one.port != other.port or not (host and scheme) or methods == () or paths == ():
        return None
    return _Region(host, one.port, scheme, one.any_sni and other.any_sni, methods, paths)


def _common_host(one: str, other: str) -> str | None:
    for narrow, wide in ((one, other), (other, one)):
        if covers_host(wide, narrow):
            return narrow
    return None


def _common_scheme(one: Scheme, other: Scheme) -> Scheme | None:
    if one == other or other == "tcp":
        return one
    return other if one == "tcp" else None


def _common_methods(
    one: tuple[str, ...] | None, other: tuple[str, ...] | None
) -> tuple[str, ...] | None:
    if one is None or other is None:
        return other if one is None else one
    return tuple(method for method in one if method in other)


def _common_paths(
    one: tuple[str, ...] | None, other: tuple[str, ...] | None
) -> tuple[str, ...] | None:
    if one is None or other is None:
        return other if one is None else one
    pairs = (_common_path(mine, theirs) for mine in one for theirs in other)
    return _plain(tuple(path for path in pairs if path is not None))


def _common_path(one: str, other: str) -> str | None:
    """Return the narrower of two patterns if it lies in the other."""
    for narrow, wide in ((one, other), (other, one)):
        if narrow == wide or (wide.endswith("*") and matches_path(wide, narrow)):
            return narrow
    return None


def _common_addresses(some: tuple[str, ...], others: tuple[str, ...]) -> tuple[str, ...]:
    found = [str(each) for each in networks_of(some) if _is_in(each, others)]
    found += [str(each) for each in networks_of(others) if _is_in(each, some)]
    return tuple(dict.fromkeys(found))


def _is_in(network: AddressNetwork, others: tuple[str, ...]) -> bool:
    return any(
        network.version == each.version and network.subnet_of(each)  # type: ignore[arg-type]
        for each in networks_of(others)
    )


def _lies_within(rule: NetworkRule, region: _Region, limit: NetworkRule) -> bool:
    """Tell whether one rule of the limit allows all of a region, for as long, at the same addresses."""
    return (
        any(_overlap(region, each) == region for each in _regions(limit))
        and all(_is_in(each, limit.addresses) for each in networks_of(rule.addresses))
        and _within(rule.lifetime_seconds, limit.lifetime_seconds)
    )


def _escapes(
    rule: NetworkRule, region: _Region, capped: NetworkRule, own: tuple[NetworkRule, ...]
) -> bool:
    """Tell whether a part of a region has the caps of `capped` in the limit, and larger ones here.

    Here the part keeps the caps if a rule that matches all of it has them, for as long as needed.
    """
    needed = _least(rule.lifetime_seconds, capped.lifetime_seconds)
    for each in _regions(capped):
        part = _overlap(region, each)
        if part and not any(
            any(_overlap(part, mine) == part for mine in _regions(other))
            and all(_within(getattr(other, cap), getattr(capped, cap)) for cap in _CAPS)
            and _within(needed, other.lifetime_seconds)
            for other in own
        ):
            return True
    return False


def _within(value: float | None, limit: float | None) -> bool:
    return limit is None or (value is not None and value <= limit)


def _missing(rule: NetworkRule, region: _Region, limit: tuple[NetworkRule, ...]) -> str:
    """Return the part of a rule that exceeds the limit's rules for the same port, if that is known."""
    near = [each for each in limit if _common_host(rule.host, each.host) == rule.host]
    ported = [each for each in near if region.port in each.each_port()]
    if not ported:
        return ""
    networks = networks_of(rule.addresses)
    if not any(all(_is_in(one, each.addresses) for one in networks) for each in ported):
        return f", at addresses in {', '.join(rule.addresses)}"
    if not any(_within(rule.lifetime_seconds, each.lifetime_seconds) for each in ported):
        return ", for longer"
    return ", with more schemes, server names (SNI), methods or paths"


def _denies_some(denial: NetworkDenial, rule: NetworkRule) -> bool:
    host = _common_host(canonical_pattern(denial.host), rule.host)
    ports = rule.each_port()
    return bool(host) and (denial.ports is None or not set(denial.ports).isdisjoint(ports))
