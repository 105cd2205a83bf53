"""Network rules can only be narrowed: as properties over a small world, and as a table."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellwright import PolicyError, exceeds, narrow
from cellwright.policies.network.rule import NetworkDenial, NetworkRule
from cellwright.policies.network.rules import HttpRequest, NetworkRules, any_sni
from cellwright.policies.policy import Network, Policy, check_policy

HOSTS = ["a.example.org", "*.example.org", "*.b.example.org", "x.b.example.org", "*"]
NAMES = ["a.example.org", "x.b.example.org", "b.example.org", "other.example"]
NETWORKS = ["10.0.0.0/8", "10.1.0.0/16", "fd00::/8"]


@st.composite
def allow_rules(draw: st.DrawFn) -> NetworkRule:
    host = draw(st.sampled_from(HOSTS))
    fields: dict[str, Any] = {}
    kind = draw(st.sampled_from(["https", "http", "both", "tcp", "requests"]))
    if kind == "requests":
        fields["schemes"] = ("http",)
        fields["methods"] = draw(st.sampled_from([None, ("GET",), ("GET", "POST")]))
        fields["paths"] = draw(
            st.sampled_from([None, ("/v1/*",), ("/v1/a", "/v1/*"), ("/v1/a",), ("/*",)])
        )
    elif kind == "tcp":
        fields |= {"ports": (80,), "schemes": ("tcp",)}
    elif kind == "both":
        fields["ports"] = (80, 443)
    elif kind == "http":
        fields["ports"] = (80,)
    if kind in ("https", "both"):
        fields["sni"] = draw(st.sampled_from(["match", "any"]))
    return NetworkRule(
        host=host, any=host == "*", connections=draw(st.sampled_from([1, 2])),
        sent_bytes=draw(st.sampled_from([None, 10])), lifetime_seconds=draw(st.sampled_from([None, 5.0])),
        addresses=tuple(draw(st.lists(st.sampled_from(NETWORKS), max_size=2, unique=True))), **fields,
    )  # fmt: skip


NETWORK = st.builds(
    Network,
    allow=st.lists(allow_rules(), max_size=3).map(tuple),
    deny=st.lists(st.sampled_from([NetworkDenial(host="a.example.org"), NetworkDenial(host="*.b.example.org", ports=(80,))]), max_size=1).map(tuple),
    addresses=st.lists(st.sampled_from(NETWORKS), max_size=1).map(tuple),
)  # fmt: skip

REQUESTS = [
    (name, port, scheme, method, path, age)
    for name in NAMES
    for port, scheme in ((80, "http"), (80, "tcp"), (443, "https"))
    for method in ("GET", "POST")
    for path in ("/v1/a", "/v1/b", "/x")
    for age in (0.0, 9.0)
]


def granted(network: Network) -> dict[tuple[Any, ...], tuple[float, float, frozenset[str], bool]]:
    """Return, for every request that is allowed, its caps, the addresses that it may reach, and whether it
    may ask for any server."""
    rules = NetworkRules(network.allow, network.deny, network.addresses)
    found = {}
    for request in REQUESTS:
        name, port, scheme, method, path, age = request
        asked = HttpRequest(method, path)
        verdict = rules.decide_request(name, port, scheme, asked, age_seconds=age)
        if verdict.is_allowed:
            sent = [each.sent_bytes for each in verdict.matching if each.sent_bytes is not None]
            reach = {str(each) for each in rules.networks(verdict)}
            reach |= {"10.1.0.0/16"} if "10.0.0.0/8" in reach else set()
            connections = min(each.connections for each in verdict.matching)
            found[request] = (
                connections, min(sent, default=float("inf")), frozenset(reach),
                scheme != "http" and any_sni(verdict.matching, port),
            )  # fmt: skip
    return found


def is_within(some: Network, limit: Network) -> bool:
    mine, most = granted(some), granted(limit)
    return all(
        request in most
        and caps[0] <= most[request][0]
        and caps[1] <= most[request][1]
        and caps[2] <= most[request][2]
        and caps[3] <= most[request][3]
        for request, caps in mine.items()
    )


@settings(max_examples=300, deadline=None)
@given(NETWORK, NETWORK)
def test_narrowed_rules_allow_no_more_than_either(one: Network, other: Network) -> None:
    narrowed = narrow(Policy(network=one), Policy(network=other))
    check_policy(narrowed)
    for limit in (one, other):
        assert is_within(narrowed.network, limit)
        assert exceeds(narrowed, Policy(network=limit)) == ()


@settings(max_examples=300, deadline=None)
@given(NETWORK, NETWORK)
def test_what_exceeds_is_never_missed(one: Network, limit: Network) -> None:
    if not exceeds(Policy(network=one), Policy(network=limit)):
        assert is_within(one, limit)


@settings(deadline=None)
@given(NETWORK)
def test_rules_lie_within_themselves_and_narrowing_by_them_changes_nothing(
    network: Network,
) -> None:
    policy = Policy(network=network)
    assert exceeds(policy, policy) == ()
    assert granted(narrow(policy, policy).network) == granted(network)


LIMIT = Network(
    allow=(
        NetworkRule(host="*.example.org", ports=(80, 443), addresses=("10.1.0.0/16",), connections=5, lifetime_seconds=60),
        NetworkRule(host="a.example.com", schemes=("http",), methods=("GET",), paths=("/v1/*",)),
    ),
    deny=(NetworkDenial(host="bad.example.org"),),
)  # fmt: skip
FINE: dict[str, Any] = {"host": "a.example.org", "connections": 5, "lifetime_seconds": 60}
MORE = {
    "another host": ({"host": "a.example.net"}, "network.allow: a.example.net:443 by https"),
    "the host itself": (FINE | {"host": "example.org"}, "network.allow: example.org:443 by https"),
    "a wider wildcard": (FINE | {"host": "*.org", "any": True}, "network.allow: *.org:443 by https"),
    "another port": (FINE | {"ports": (444,)}, "network.allow: a.example.org:444 by https"),
    "another scheme": (FINE | {"ports": (443,), "schemes": ("tcp",)}, "by tcp, with more schemes, server names (SNI), methods or paths"),
    "more addresses": (FINE | {"addresses": ("10.0.0.0/8",)}, ", at addresses in 10.0.0.0/8"),
    "more connections": (FINE | {"connections": 6}, "beyond the caps of allow *.example.org:80,443"),
    "a longer life": (FINE | {"lifetime_seconds": None}, ", for longer"),
    "another method": ({"host": "a.example.com", "schemes": ("http",), "methods": ("POST",), "paths": ("/v1/*",)}, "with more schemes"),
    "another path": ({"host": "a.example.com", "schemes": ("http",), "methods": ("GET",), "paths": ("/v*",)}, "with more schemes"),
    "no denial": (FINE | {"host": "*.example.org"}, "network.deny: without deny bad.example.org"),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "said"), MORE.values(), ids=MORE)
def test_what_is_more_is_listed_with_its_field(fields: dict[str, Any], said: str) -> None:
    network = Network(allow=(NetworkRule(**fields),))
    found = exceeds(Policy(network=network), Policy(network=LIMIT))
    assert [line for line in found if said in line], found


def test_less_is_not_listed() -> None:
    narrower = (
        NetworkRule(**FINE),
        NetworkRule(**FINE | {"host": "*.b.example.org", "ports": (80,)}),
    )
    within = Network(allow=narrower, deny=LIMIT.deny)
    assert exceeds(Policy(network=within), Policy(network=LIMIT)) == ()
    assert exceeds(Policy(), Policy(network=LIMIT)) == ()
    assert exceeds(Policy(network=within), Policy()) != ()


def test_a_cap_that_expires_earlier_is_more() -> None:
    """Once the rule with the smaller cap has ended, only the larger one is left."""
    small, large = ({"host": "a.example", "connections": number} for number in (1, 2))
    limit = Network(allow=(NetworkRule(**small), NetworkRule(**large)))
    shorter = Network(allow=(NetworkRule(**small, lifetime_seconds=5), NetworkRule(**large)))
    found = exceeds(Policy(network=shorter), Policy(network=limit))
    assert found == ("network.allow: a.example: beyond the caps of allow a.example:443",)


def test_a_proxy_is_more_because_addresses_are_not_checked_then() -> None:
    direct = Policy(network=LIMIT)
    through = Policy(network=msgspec.structs.replace(LIMIT, proxy="environment"))
    assert exceeds(through, direct) == ("network.proxy: environment: addresses are not checked",)
    assert exceeds(direct, through) == exceeds(through, through) == ()
    assert narrow(through, direct).network.proxy == narrow(direct, through).network.proxy == "none"
    assert narrow(through, through).network.proxy == "environment"
    with pytest.raises(PolicyError, match=r"network\.proxy"):
        check_policy(Policy(network=Network(proxy="http://p:1")))  # type: ignore[arg-type]
