"""Caps of network rules: connections at a time and a second, and bytes."""

import pytest

from cellwright.policies.network import rules
from cellwright.policies.network.rule import NetworkRule
from cellwright.policies.network.rules import Allowance, RuleUse


def test_an_allowance_is_used_up_and_refills(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(rules.time, "monotonic", lambda: now)
    allowance = Allowance(2.0, 4.0)
    assert [allowance.take() for _ in range(5)] == [True] * 4 + [False]
    now += 1.0
    assert [allowance.take() for _ in range(3)] == [True, True, False]
    now += 1000.0
    assert [allowance.take() for _ in range(5)] == [True] * 4 + [False]


def test_a_use_counts_connections_and_bytes() -> None:
    rule = NetworkRule(
        host="api.example.org", connections=2, connections_per_second=100, sent_bytes=10
    )
    use = RuleUse(rule)
    assert [bool(use.begin()) for _ in range(3)] == [False, False, True]
    use.end()
    assert not use.begin()
    assert not use.count(10, 1000)
    assert "more than 10 bytes sent" in use.count(1, 0)
    use.end()
    assert "more than 10 bytes sent" in use.begin()
