"""Rules about calls of tools: what they say, and that narrowing says no less."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellwright.policies.errors import PolicyError
from cellwright.policies.policy import Policy, check_policy
from cellwright.policies.tool_rules import ToolRule, Tools, judge, narrow_tools, tools_exceed

DENY_SHOUTING = ToolRule("mail.*", "deny", {"text": "*!!!*"}, "we do not shout")
MAIL = Tools(rules=(DENY_SHOUTING, ToolRule("mail.send", "approve"), ToolRule("mail.*", "allow")))

RULE_LISTS = st.lists(
    st.builds(
        ToolRule,
        tool=st.sampled_from(["*", "mail.*", "mail.send", "disk.*"]),
        effect=st.sampled_from(["allow", "deny", "approve"]),
        arguments=st.sampled_from([{}, {"to": "a*"}, {"to": "*b"}]),
    ),
    max_size=4,
).map(tuple)
CALLS = st.tuples(
    st.sampled_from(["mail.send", "mail.read", "disk.wipe"]),
    st.sampled_from([{}, {"to": "ab"}, {"to": "a"}, {"to": 7}]),
)
STRICTNESS = ["allow", "approve", "deny"]


@pytest.mark.parametrize(
    ("name", "arguments", "effect"),
    [
        ("mail.send", {"text": "hello"}, "approve"),
        ("mail.send", {"text": "hello!!!"}, "deny"),
        ("mail.read", {}, "allow"),
        ("disk.wipe", {}, "deny"),
    ],
)
def test_the_first_rule_that_matches_decides(
    name: str, arguments: dict[str, Any], effect: str
) -> None:
    assert judge(MAIL, name, arguments).effect == effect


def test_a_refusal_names_its_rule() -> None:
    verdict = judge(MAIL, "mail.send", {"text": "!!!"})
    assert verdict.reason == "we do not shout"
    assert verdict.trace == ("rule 1: deny mail.* text=*!!!*: matches",)
    assert judge(MAIL, "disk.wipe", {}).trace[-1] == "no rule matches: deny"


def test_without_rules_what_is_offered_may_be_called() -> None:
    assert judge(Tools(), "anything", {}).effect == "allow"


def test_an_argument_that_is_no_text_is_compared_as_json() -> None:
    rules = Tools(rules=(ToolRule("*", "allow", {"amount": "[0-9]"}),))
    assert judge(rules, "pay", {"amount": 7}).effect == "allow"
    assert judge(rules, "pay", {"amount": 70}).effect == "deny"
    assert judge(rules, "pay", {"amount": [7]}).effect == "deny"
    assert judge(rules, "pay", {}).effect == "deny"


@pytest.mark.parametrize(
    ("pattern", "value"),
    [
        ("1000", 1000.0),
        ("*[[]1, 2]*", [1.0, 2]),
        ("*müller*", ["müller"]),
        ("*müller*", {"to": "müller"}),
        ("*müller*", {"müller": 1}),
    ],
)
def test_the_same_json_has_one_text(pattern: str, value: object) -> None:
    rules = Tools(rules=(ToolRule("*", "deny", {"to": pattern}), ToolRule("*", "allow")))
    assert judge(rules, "pay", {"to": value}).effect == "deny"
    assert judge(rules, "pay", {"to": [value, "x"]}).effect == (
        "allow" if pattern == "1000" else "deny"
    )


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value", [_nested(5000), 10**5000, [10**5000]], ids=["deep", "int", "ints"]
)
def test_what_rules_cannot_read_is_denied(value: object) -> None:
    rules = Tools(rules=(ToolRule("*", "deny", {"to": "x"}), ToolRule("*", "allow")))
    verdict = judge(rules, "pay", {"to": value})
    assert (verdict.effect, "nested too deeply, or too long" in verdict.reason) == ("deny", True)


@given(RULE_LISTS, RULE_LISTS, CALLS)
def test_narrowed_rules_are_as_strict_as_each(
    some: tuple[ToolRule, ...], others: tuple[ToolRule, ...], call: tuple[str, dict[str, Any]]
) -> None:
    both = narrow_tools(Tools(rules=some), Tools(rules=others))
    words = [judge(Tools(rules=rules), *call).effect for rules in (some, others)]
    assert judge(both, *call).effect == max(words, key=STRICTNESS.index)


@pytest.mark.parametrize(
    "cap",
    [
        "calls",
        "calls_per_second",
        "depth",
        "argument_bytes",
        "result_bytes",
        "shown_bytes",
        "result_rows",
    ],
)
def test_the_smaller_cap_holds_and_the_larger_is_told(cap: str) -> None:
    small, large = Tools(**{cap: 2}), Tools(**{cap: 3})
    for both in (narrow_tools(small, large), narrow_tools(large, small)):
        assert getattr(both, cap) == 2
    assert tools_exceed(large, small) == (f"tools.{cap}: 3 instead of 2",)
    assert tools_exceed(small, large) == ()
    with pytest.raises(PolicyError, match=cap):
        check_policy(Policy(tools=Tools(**{cap: -1})))


@pytest.mark.parametrize(
    "tools",
    [
        Tools(rules=(ToolRule("*", "maybe"),)),  # type: ignore[arg-type]
        Tools(rules=(ToolRule("", "allow"),)),
        Tools(further=((ToolRule("", "allow"),),)),
        Tools(calls=-1),
        Tools(calls_per_second=float("nan")),
        Tools(depth=True),
    ],
)
def test_what_makes_no_sense_is_refused(tools: Tools) -> None:
    with pytest.raises(PolicyError, match="tools"):
        check_policy(Policy(tools=tools))
