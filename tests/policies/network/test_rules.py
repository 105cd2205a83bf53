"""Decisions about names, ports, schemes and requests; what a rule may not say."""

from typing import Any

import msgspec
import pytest

from cellwright.policies.advice.explanation import explain
from cellwright.policies.compiling.compile import compile_policy
from cellwright.policies.compiling.host import Host
from cellwright.policies.errors import PolicyError
from cellwright.policies.network.rule import NetworkDenial, NetworkRule
from cellwright.policies.network.rule_checks import check_rules, is_public_suffix
from cellwright.policies.network.rules import HttpRequest, NetworkRules
from cellwright.policies.policy import Network, Policy, check_policy
from cellwright.policies.profiles.loading import load_policy, policy_of_data


def rules(*allow: dict[str, Any], deny: tuple[dict[str, Any], ...] = ()) -> NetworkRules:
    allowed = tuple(NetworkRule(**each) for each in allow)
    denied = tuple(NetworkDenial(**each) for each in deny)
    check_rules(allowed, denied, ())
    return NetworkRules(allowed, denied)


def test_nothing_is_allowed_without_a_rule() -> None:
    verdict = NetworkRules().decide("example.org", 443)
    assert not verdict.is_allowed
    assert verdict.rule is None
    assert verdict.reason == "example.org: no rule allows it"


def test_a_name_is_allowed_in_every_spelling_and_told_in_one() -> None:
    verdict = rules({"host": "API.example.org."}).decide("api.EXAMPLE.org", 443, "https")
    assert verdict.is_allowed
    assert verdict.name == "api.example.org"
    assert verdict.rule == "allow api.example.org:443"


@pytest.mark.parametrize(
    "name",
    [
        "example.org", "api.example.org.evil.example", "notapi.example.org", "api.example.orgx", "xapi.example.org",
        "api-example.org", "www.api.example.org", "api.example.org\0.evil.example", "127.0.0.1", "[::1]", "",
    ],
)  # fmt: skip
def test_another_name_is_not_allowed(name: str) -> None:
    assert not rules({"host": "api.example.org"}).decide(name, 443).is_allowed


def test_a_wildcard_stands_for_names_below_and_not_for_a_suffix_without_a_dot() -> None:
    below = rules({"host": "*.example.org"})
    assert below.decide("a.example.org", 443).is_allowed
    assert below.decide("a.b.example.org", 443).is_allowed
    for name in (
        "example.org",
        "evilexample.org",
        "example.org.evil",
        ".example.org",
        "*.example.org",
    ):
        assert not below.decide(name, 443).is_allowed


def test_a_denial_wins_in_every_spelling() -> None:
    some = rules(
        {"host": "*.example.org", "ports": (80, 443)},
        {"host": "bad.example.org", "ports": (80, 443)},
        deny=({"host": "bad.example.org", "ports": (443,)}, {"host": "*.evil.example.org"}),
    )
    for name in ("bad.example.org", "BAD.example.org", "bad.example.org."):
        verdict = some.decide(name, 443)
        assert not verdict.is_allowed
        assert verdict.rule == "deny bad.example.org:443"
    assert some.decide("bad.example.org", 80).is_allowed
    assert not some.decide("a.evil.example.org", 80).is_allowed
    assert (
        not rules({"host": "a.example"}, deny=({"host": "*"},)).decide("a.example", 443).is_allowed
    )


def test_ports_and_schemes_have_narrow_defaults() -> None:
    some = rules(
        {"host": "a.example"}, {"host": "b.example", "ports": (80, 8443)}, {"host": "c.example", "schemes": ("http",)},
        {"host": "d.example", "ports": (22,), "schemes": ("tcp",)},
    )  # fmt: skip
    allowed = {
        (name, port, scheme)
        for name in ("a.example", "b.example", "c.example", "d.example")
        for port in (22, 80, 443, 8443)
        for scheme in ("http", "https", "tcp")
        if some.decide(name, port, scheme).is_allowed
    }
    assert allowed == {
        ("a.example", 443, "https"), ("b.example", 80, "http"), ("b.example", 8443, "https"), ("c.example", 80, "http"),
        ("d.example", 22, "tcp"), ("d.example", 22, "http"), ("d.example", 22, "https"),
    }  # fmt: skip


def test_a_rule_expires() -> None:
    some = rules({"host": "a.example", "lifetime_seconds": 10})
    assert some.decide("a.example", 443, age_seconds=9.9).is_allowed
    assert not some.decide("a.example", 443, age_seconds=10).is_allowed
    assert not some.decide("a.example", 443, age_seconds=float("nan")).is_allowed


def test_every_rule_that_matches_is_told_for_its_caps() -> None:
    some = rules(
        {"host": "*.example.org", "connections": 5}, {"host": "a.example.org", "connections": 9}
    )
    assert [each.connections for each in some.decide("a.example.org", 443).matching] == [5, 9]


def test_methods_and_paths_hold_for_requests() -> None:
    some = rules(
        {
            "host": "a.example",
            "schemes": ("http",),
            "methods": ("GET",),
            "paths": ("/v1/*", "/health"),
        },
        {"host": "b.example", "schemes": ("http",), "methods": ("GET",)},
    )

    def allows(name: str, method: str, path: str) -> bool:
        return some.decide_request(name, 80, "http", HttpRequest(method, path)).is_allowed

    assert allows("a.example", "GET", "/v1/users")
    assert allows("a.example", "GET", "/%76%31/users")
    assert allows("a.example", "GET", "/health")
    for method, path in (
        ("POST", "/v1/users"), ("get", "/v1/users"), ("GET", "/v1"), ("GET", "/v2/"), ("GET", "/healthy"),
        ("GET", "/v1/../admin"), ("GET", "/v1/%2e%2e/admin"), ("GET", "/v1/..%2fadmin"), ("GET", "/v1/..;/admin"),
        ("GET", "/v1/..\\admin"), ("GET", "//v1/users"), ("GET", "http://a.example/v1/x"), ("CONNECT", "/v1/x"),
    ):  # fmt: skip
        assert not allows("a.example", method, path), (method, path)
    assert allows("b.example", "GET", "/group%2Fproject")  # only rules with paths read the path
    assert not allows("b.example", "PUT", "/")


def test_a_rule_names_networks_that_are_not_public() -> None:
    rule = NetworkRule(host="db.example", addresses=("10.1.0.0/16",))
    some = NetworkRules((rule,), addresses=("fd12::/16",))
    assert [*map(str, some.networks(some.decide("db.example", 443)))] == [
        "fd12::/16",
        "10.1.0.0/16",
    ]


INVALID = {
    "a lone wildcard": ({"host": "*"}, "different owners"),
    "a top-level domain": ({"host": "*.com"}, "different owners"),
    "a public suffix": ({"host": "*.co.uk"}, "different owners"),
    "a host of others' sites": ({"host": "*.github.io"}, "different owners"),
    "a bucket": ({"host": "*.s3.eu-west-1.amazonaws.com"}, "different owners"),
    "a wildcard within": ({"host": "a.*.example.org"}, "has a wildcard"),
    "a wildcard in a part": ({"host": "*a.example.org"}, "has a wildcard"),
    "an address": ({"host": "10.0.0.1"}, "is an address"),
    "an address below a wildcard": ({"host": "*.0.0.1"}, "is an address"),
    "an IPv6 address": ({"host": "[::1]"}, "has brackets"),
    "a URL": ({"host": "https://example.org"}, "has a port"),
    "no host": ({"host": ""}, "must have from 1"),
    "not text": ({"host": 5}, "must be a name"),
    "no ports": ({"host": "a.example", "ports": ()}, "ports: must not be empty"),
    "port 0": ({"host": "a.example", "ports": (0,)}, "from 1 to 65535"),
    "port 65536": ({"host": "a.example", "ports": (65536,)}, "from 1 to 65535"),
    "port true": ({"host": "a.example", "ports": (True,)}, "from 1 to 65535"),
    "another sni": ({"host": "a.example", "sni": "none"}, "sni: must be one of match, any"),
    "no schemes": ({"host": "a.example", "schemes": ()}, "schemes: must be of"),
    "an unknown scheme": ({"host": "a.example", "schemes": ("ftp",)}, "schemes: must be of"),
    "tcp without a port": ({"host": "a.example", "schemes": ("tcp",)}, "no standard port"),
    "methods over https": ({"host": "a.example", "methods": ("GET",)}, "offer the tool http.request"),
    "paths over https": ({"host": "a.example", "paths": ("/",), "ports": (80, 443)}, "offer the tool http.request"),
    "methods over tcp": ({"host": "a.example", "ports": (80,), "schemes": ("tcp",), "methods": ("GET",)}, "tcp"),
    "a method in small letters": ({"host": "a.example", "schemes": ("http",), "methods": ("get",)}, "capital"),
    "a dot segment": ({"host": "a.example", "schemes": ("http",), "paths": ("/a/../b",)}, "dot segment"),
    "a path without /": ({"host": "a.example", "schemes": ("http",), "paths": ("*",)}, "must begin with /"),
    "a star within": ({"host": "a.example", "schemes": ("http",), "paths": ("/a/*/b",)}, "at the end only"),
    "an odd spelling": ({"host": "a.example", "schemes": ("http",), "paths": ("/%61",)}, "write '/a'"),
    "paths as text": ({"host": "a.example", "schemes": ("http",), "paths": "/a"}, "must be a list"),
    "host bits": ({"host": "a.example", "addresses": ("10.1.2.3/8",)}, "must be networks"),
    "no network": ({"host": "a.example", "addresses": ("intranet",)}, "must be networks"),
    "no connections": ({"host": "a.example", "connections": 0}, "connections: must be"),
    "NaN": ({"host": "a.example", "connections_per_second": float("nan")}, "must be more than 0"),
    "no lifetime": ({"host": "a.example", "lifetime_seconds": 0}, "lifetime_seconds: must be"),
    "true bytes": ({"host": "a.example", "sent_bytes": True}, "sent_bytes: must be"),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "said"), INVALID.values(), ids=INVALID)
def test_an_invalid_rule_is_refused_with_its_field(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(PolicyError, match=r"^network\.allow: ") as caught:
        check_policy(Policy(network=Network(allow=(NetworkRule(**fields),))))
    assert said in str(caught.value)


def test_any_is_written_out() -> None:
    anywhere = rules({"host": "*", "any": True}, {"host": "*.co.uk", "any": True})
    assert anywhere.decide("whatever.example", 443).is_allowed
    assert not anywhere.decide("169.254.169.254", 443).is_allowed


@pytest.mark.parametrize(
    "network",
    [
        {"allow": ("example.org",)}, {"deny": (NetworkRule(host="a.example"),)}, {"addresses": "10.0.0.0/8"},
        {"addresses": ("10.0.0.0/33",)}, {"deny": (NetworkDenial(host=""),)}, {"deny": (NetworkDenial(host="a", ports=()),)},
        {"allow": tuple(NetworkRule(host=f"a{n}.example") for n in range(1001))},
    ],
)  # fmt: skip
def test_other_values_are_refused(network: dict[str, Any]) -> None:
    with pytest.raises(PolicyError, match=r"^network"):
        check_policy(Policy(network=Network(**network)))


def test_methods_and_paths_of_https_are_fine_where_requests_are_read() -> None:
    check_rules(
        (NetworkRule(host="a.example", methods=("GET",), paths=("/v1/*",)),),
        (),
        (),
        reads_requests=True,
    )


def test_public_suffixes() -> None:
    for name in (
        "com",
        "uk",
        "co.uk",
        "com.au",
        "gob.mx",
        "github.io",
        "s3.amazonaws.com",
        "nip.io",
    ):
        assert is_public_suffix(name), name
    for name in (
        "example.org",
        "bbc.co.uk",
        "example.co.uk",
        "microsoft.com",
        "octocat.github.io",
        "de.example",
    ):
        assert not is_public_suffix(name), name


TOML = """
name = "orders"
[network]
addresses = ["10.1.0.0/16"]
[[network.allow]]
host = "api.example.org"
ports = [443]
[[network.deny]]
host = "bad.example.org"
"""


def test_rules_are_loaded_from_toml(tmp_path) -> None:
    file = tmp_path / "orders.toml"
    file.write_text(TOML)
    network = load_policy(str(file)).network
    assert network.allow == (NetworkRule(host="api.example.org", ports=(443,)),)
    assert network.deny == (NetworkDenial(host="bad.example.org"),)
    assert network.addresses == ("10.1.0.0/16",)
    short = '[network]\nallow = [{host = "*.com"}]\n'
    file.write_text(short)
    with pytest.raises(PolicyError, match=r"orders\.toml, line 2: network\.allow: '\*\.com'"):
        load_policy(str(file))
    with pytest.raises(PolicyError, match="hots"):
        policy_of_data({"network": {"allow": [{"hots": "a.example"}]}})


HOST = Host(landlock_abi=7, cgroups={"memory": "", "cpu": "", "pids": ""})


def test_a_policy_with_hosts_compiles_to_sockets_for_its_ports() -> None:
    rules = (
        NetworkRule(host="api.example.org"),
        NetworkRule(host="*.example.org", ports=(80, 443)),
    )
    plan = compile_policy(Policy(network=Network(allow=rules)), HOST)
    assert plan.network
    assert plan.network.ports == (80, 443)
    assert plan.network.words == ("allow api.example.org:443", "allow *.example.org:80,443")
    assert plan.loopback
    assert "loopback_sockets" in plan.groups
    assert plan.socket_bytes
    assert "network: allow api.example.org:443" in "\n".join(explain(plan, Policy()))
    assert compile_policy(Policy(), HOST).network is None


def test_requests_are_read_only_where_a_rule_has_methods_or_paths() -> None:
    plain = NetworkRule(host="a.example", schemes=("http",))
    for rule, is_read in (
        (plain, False),
        (msgspec.structs.replace(plain, methods=("GET",)), True),
        (msgspec.structs.replace(plain, paths=("/x",)), True),
    ):
        plan = compile_policy(Policy(network=Network(allow=(plain, rule))), HOST)
        assert plan.network
        assert plan.network.reads_requests is is_read


@pytest.mark.parametrize(
    "rule",
    [
        NetworkRule(host="a.example", ports=tuple(range(1000, 1013))),
        NetworkRule(host="a.example", ports=(53,), schemes=("tcp",)),
    ],
    ids=str,
)
def test_a_rule_that_the_egress_process_cannot_keep_does_not_compile(rule: NetworkRule) -> None:
    policy = check_policy(Policy(network=Network(allow=(rule,))))
    with pytest.raises(PolicyError, match=r"network\.allow"):
        compile_policy(policy, HOST)
