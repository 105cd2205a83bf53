"""Rules that are allowed and denied after a sandbox was made."""

import pytest

from cellwright.policies.errors import PolicyError
from cellwright.policies.network.rule import NetworkDenial, NetworkRule
from cellwright.policies.network.rule_checks import ChangingRules
from cellwright.policies.network.rules import NetworkRules

NAME, OTHER = "api.example.org", "files.example.org"
POLICY = ChangingRules(
    (NetworkRule(host=NAME), NetworkRule(host=NAME, ports=(80,))),
    (NetworkDenial(host="*.internal.example.org"),),
    (),
)


def allows(rules: ChangingRules, name: str, port: int = 443, age: float = 0.0) -> bool:
    decided = NetworkRules(rules.allow, rules.deny, rules.addresses)
    return decided.decide(name, port, age_seconds=age).is_allowed


def test_a_host_is_allowed_and_denied_again() -> None:
    assert not allows(POLICY, OTHER)
    allowed = POLICY.with_allowed(NetworkRule(host=OTHER.upper() + "."), 0.0)
    assert allows(allowed, OTHER)
    assert not allows(allowed, OTHER, 80)
    denied = allowed.with_denied(NetworkDenial(host=OTHER))
    assert not allows(denied, OTHER)
    assert denied.allowed == ()


def test_a_rule_of_the_policy_is_denied_and_comes_back() -> None:
    denied = POLICY.with_denied(NetworkDenial(host=NAME))
    assert not allows(denied, NAME)
    assert not allows(denied, NAME, 80)
    again = denied.with_allowed(NetworkRule(host=NAME), 0.0)
    assert allows(again, NAME)
    assert not allows(again, NAME, 80)  # only what was allowed again


def test_repeated_changes_take_no_room() -> None:
    rules = POLICY
    for _ in range(5):
        rules = rules.with_allowed(NetworkRule(host=OTHER), 0.0)
        rules = rules.with_denied(NetworkDenial(host=OTHER))
    assert (len(rules.allowed), len(rules.denied)) == (0, 1)


@pytest.mark.parametrize("host", ["a.internal.example.org", "*.x.internal.example.org"])
def test_what_the_policy_denies_cannot_be_allowed(host: str) -> None:
    with pytest.raises(PolicyError, match="the policy has 'deny"):
        POLICY.with_allowed(NetworkRule(host=host), 0.0)
    wide = POLICY.with_allowed(NetworkRule(host="*.example.org"), 0.0)
    assert allows(wide, "b.example.org")
    assert not allows(wide, "a.internal.example.org")


def test_a_wider_denial_is_not_taken_back_by_a_narrower_rule() -> None:
    denied = POLICY.with_denied(NetworkDenial(host="*"))
    with pytest.raises(PolicyError, match="the sandbox was told 'deny"):
        denied.with_allowed(NetworkRule(host=OTHER), 0.0)


def test_a_rule_about_requests_needs_one_in_the_policy() -> None:
    """Without, the process outside has no parser."""
    policy = NetworkRule(host=NAME, schemes=("http",), methods=("GET",))
    rules = ChangingRules((policy,), (), ())
    rule = NetworkRule(host=OTHER, schemes=("http",), paths=("/a",))
    assert rules.with_allowed(rule, 0.0).allowed == (rule,)


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (NetworkRule(host=OTHER, ports=(443, 8443)), "got 8443"),
        (NetworkRule(host="*"), "different owners"),
        (NetworkRule(host="127.0.0.1"), "is an address"),
        (NetworkRule(host=OTHER, ports=(80,), methods=("GET",)), "methods and paths"),
        (OTHER, "must be a NetworkRule"),
    ],
)
def test_an_invalid_rule_is_refused(rule: NetworkRule, why: str) -> None:
    with pytest.raises(PolicyError, match=why):
        POLICY.with_allowed(rule, 0.0)


def test_an_invalid_denial_is_refused() -> None:
    with pytest.raises(PolicyError, match="is an address"):
        POLICY.with_denied(NetworkDenial(host="10.0.0.1"))


def test_a_lifetime_counts_from_the_moment_of_the_change() -> None:
    rules = POLICY.with_allowed(NetworkRule(host=OTHER, lifetime_seconds=60), 1000.0)
    assert allows(rules, OTHER, age=1059.0)
    assert not allows(rules, OTHER, age=1061.0)


def test_the_number_of_rules_is_bounded() -> None:
    rules = ChangingRules(tuple(NetworkRule(host=f"n{n}.example.org") for n in range(999)), (), ())
    full = rules.with_allowed(NetworkRule(host=OTHER), 0.0)
    with pytest.raises(PolicyError, match="at most 1000"):
        full.with_denied(NetworkDenial(host=NAME))
