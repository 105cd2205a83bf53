"""The broker: every gate that a call passes, in order, for every caller."""

import base64
import json
import threading
import urllib.parse
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellwright import AuditLog, Broker, PolicyError, ToolError, Vault
from cellwright.errors import (
    ApprovalRequired,
    ToolArgumentsInvalid,
    ToolBudgetExceeded,
    ToolDenied,
    ToolFailed,
    ToolNotFound,
    ToolResultInvalid,
    ToolResultTooLarge,
)
from cellwright.harness.schemas.spec import ToolOwner, ToolSpec
from cellwright.harness.tools.approval import ApprovalRequest
from cellwright.harness.tools.broker import Offer
from cellwright.harness.tools.results import head_of
from cellwright.harness.tools.tool import Caller, Meter, Tool
from cellwright.policies.tool_rules import ToolRule, Tools

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
SECRET = 'tr0ub4dor&3/"+'


def tool(perform: Any, name: str = "weather.get", **about: Any) -> Tool:
    about = {"parameters": CITY, "owner": ToolOwner.DEVELOPER} | about
    return Tool(ToolSpec(name=name, **about), perform)


def broker(
    perform: Any = lambda arguments, _: arguments["city"].upper(), **settings: Any
) -> Broker:
    about = settings.pop("about", {})
    return Broker(Offer([tool(perform, **about)]), **settings)


def test_a_call_returns_what_the_tool_gives() -> None:
    assert broker().call("weather.get", {"city": "Paris"}) == "PARIS"


@pytest.mark.parametrize(
    ("name", "arguments", "error", "words"),
    [
        ("weather.set", {}, ToolNotFound, "weather.set"),
        ("weather.get", {}, ToolArgumentsInvalid, "city"),
        ("weather.get", {"city": 7}, ToolArgumentsInvalid, "string"),
        ("weather.get", {"city": "x", "more": 1}, ToolArgumentsInvalid, "more"),
    ],
)
def test_invalid_arguments_do_not_reach_the_tool(
    name: str, arguments: dict[str, Any], error: type[ToolError], words: str
) -> None:
    def untouched(_: Any, __: Any) -> None:
        pytest.fail("it was called")

    with pytest.raises(error, match=words):
        broker(untouched).call(name, arguments)


def test_the_rules_of_both_sides_hold() -> None:
    deny_rome = Tools(
        rules=(ToolRule("*", "deny", {"city": "Rome"}, "closed"), ToolRule("*", "allow"))
    )
    host = broker(rules=deny_rome)
    for caller in (Caller(), Caller(rules=Tools(rules=(ToolRule("*", "allow"),)))):
        with pytest.raises(ToolDenied, match="closed"):
            host.call("weather.get", {"city": "Rome"}, caller)
        assert host.call("weather.get", {"city": "Bonn"}, caller) == "BONN"
    with pytest.raises(ToolDenied, match="closed"):
        broker().call("weather.get", {"city": "Rome"}, Caller(rules=deny_rome))


def test_a_caller_calls_only_what_is_its_own_and_no_deeper_than_allowed() -> None:
    with pytest.raises(ToolDenied, match="may not call"):
        broker().call("weather.get", {"city": "x"}, Caller("a", tools=frozenset()))
    deep = Caller(depth=4)
    with pytest.raises(ToolDenied, match="4 tools"):
        broker().call("weather.get", {"city": "x"}, deep)


def test_calls_are_counted_and_rationed() -> None:
    now = [0.0]
    caller = Caller(meter=Meter(5, 2.0, lambda: now[0]))
    host = broker()
    host.call("weather.get", {"city": "x"}, caller)
    host.call("weather.get", {"city": "x"}, caller)
    with pytest.raises(ToolBudgetExceeded, match="a second"):
        host.call("weather.get", {"city": "x"}, caller)
    for _ in range(3):
        now[0] += 0.5
        host.call("weather.get", {"city": "x"}, caller)
    now[0] += 60
    with pytest.raises(ToolBudgetExceeded, match="5 calls of tools"):
        host.call("weather.get", {"city": "x"}, caller)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("weather.set", {}),
        ("weather.get", {}),
        ("weather.get", {"city": "Rome"}),
        ("results.read", {"result_id": "x"}),
    ],
)
def test_calls_that_are_refused_are_counted_too(name: str, arguments: dict[str, Any]) -> None:
    deny = Tools(rules=(ToolRule("*", "deny", {"city": "Rome"}), ToolRule("*", "allow")))
    host, caller = broker(rules=deny), Caller("me", meter=Meter(3, 100))
    for _ in range(3):
        with pytest.raises(ToolError) as refused:
            host.call(name, arguments, caller)
        assert not isinstance(refused.value, ToolBudgetExceeded)
    for again in (arguments, {"city": "Bonn"}):
        with pytest.raises(ToolBudgetExceeded, match="3 calls of tools"):
            host.call("weather.get", again, caller)


def test_calls_beyond_the_budget_do_not_fill_the_trail() -> None:
    trail = AuditLog()
    host, caller = broker(audit=trail), Caller("me", meter=Meter(0, 1))
    for _ in range(1000):
        with pytest.raises(ToolBudgetExceeded):
            host.call("weather.get", {"city": "x"}, caller)
    told = [entry.details["times"] for entry in trail.get_entries()]
    assert told == [2**n for n in range(10)]


def test_a_rate_of_nothing_lets_nothing_through() -> None:
    meter = Meter(100, 0)
    with pytest.raises(ToolBudgetExceeded, match="more than 0 calls"):
        meter.count()


def test_many_threads_do_not_get_more_than_the_budget() -> None:
    meter = Meter(100, 1e9)
    refused = []

    def use() -> None:
        for _ in range(50):
            try:
                meter.count()
            except ToolBudgetExceeded:
                refused.append(1)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 300


def test_a_risky_call_waits_for_a_word_about_just_this_call() -> None:
    asked: list[ApprovalRequest] = []

    def approve(request: ApprovalRequest) -> bool:
        asked.append(request)
        return request.arguments["city"] == "Bonn"

    host = broker(approve=approve, about={"risky": True})
    assert host.call("weather.get", {"city": "Bonn"}, Caller("agent-7")) == "BONN"
    with pytest.raises(ApprovalRequired, match="not approved"):
        host.call("weather.get", {"city": "Rome"})
    assert [(each.tool, each.caller) for each in asked] == [
        ("weather.get", "agent-7"),
        ("weather.get", "host"),
    ]
    assert asked[0].digest != asked[1].digest


@pytest.mark.parametrize("word", [1, "yes", None])
def test_anything_but_true_is_no_approval(word: Any) -> None:
    with pytest.raises(ApprovalRequired):
        broker(approve=lambda _: word, about={"risky": True}).call("weather.get", {"city": "x"})


def test_without_anybody_to_ask_what_must_be_approved_is_refused() -> None:
    rules = Tools(rules=(ToolRule("*", "approve", reason="it costs money"),))
    with pytest.raises(ApprovalRequired, match="no approver is set"):
        broker(rules=rules).call("weather.get", {"city": "x"})


@pytest.mark.parametrize("number", [2**63, -(2**64), 10**40])
def test_an_integer_of_any_size_is_asked_about_and_noted(number: int) -> None:
    asked, trail, about = [], AuditLog(), {"parameters": {}, "risky": True}

    def approve(request: ApprovalRequest) -> bool:
        asked.append((request.arguments, request.digest))
        return True

    host = broker(lambda given, _: given["n"], about=about, approve=approve, audit=trail)
    assert host.call("weather.get", {"n": number}) == number
    assert host.call_for_json("weather.get", {"n": number}, Caller()) == str(number).encode()
    assert len(set(map(str, asked))) == 1
    assert [entry.action for entry in trail.get_entries()][:3] == ["approved", "call", "returned"]


def test_what_a_tool_raises_is_told_as_its_failure() -> None:
    def broken(_: Any, __: Any) -> None:
        raise ZeroDivisionError("by zero")

    with pytest.raises(ToolFailed, match="ZeroDivisionError: by zero"):
        broker(broken).call("weather.get", {"city": "x"})


class Unusual(ToolFailed):
    def __init__(self) -> None:
        super().__init__("in a way of its own")


@pytest.mark.parametrize("raised", [SystemExit("gone"), Unusual()])
def test_a_tool_that_exits_or_raises_an_error_of_its_own_has_failed(raised: BaseException) -> None:
    def give_up(*_: Any) -> None:
        raise raised

    trail = AuditLog()
    with pytest.raises(ToolFailed, match=str(raised)):
        broker(give_up, audit=trail).call("weather.get", {"city": "x"})
    assert [entry.action for entry in trail.get_entries()] == ["call", "failed"]


@pytest.mark.parametrize(
    "value",
    [
        object(), float("nan"), {1: {2: object()}}, b"\xff" and object, "\ud800", {"\udfff": 1},
        ["a", ["\ud83d"]],
    ],
)  # fmt: skip
def test_a_result_that_is_not_json_is_invalid(value: Any) -> None:
    with pytest.raises(ToolResultInvalid, match="JSON"):
        broker(lambda *_: value).call("weather.get", {"city": "x"})


def test_a_result_is_what_its_schema_says() -> None:
    about = {"output_schema": {"type": "integer"}}
    with pytest.raises(ToolResultInvalid, match="integer"):
        broker(about=about).call("weather.get", {"city": "x"})
    assert broker(lambda *_: 7, about=about).call("weather.get", {"city": "x"}) == 7


# credentials


def in_every_form(secret: str) -> list[str]:
    data = secret.encode()
    return [
        secret,
        json.dumps(secret),
        urllib.parse.quote(secret),
        urllib.parse.quote_plus(secret),
        urllib.parse.quote(secret).lower(),
        urllib.parse.quote(secret, safe="").replace("%2F", "%2f"),
        "".join(f"%{byte:02x}" for byte in data),
        data.hex(),
        *(
            base64.b64encode(b"x" * n + data + b"y" * m).decode()
            for n in range(4)
            for m in range(3)
        ),
        *(base64.urlsafe_b64encode(b"x" * n + data).decode() for n in range(3)),
    ]


def leaks(secret: str, text: str) -> bool:
    """Tell whether what came out still tells the secret, as an attacker would look."""
    return any(form in text for form in (secret, urllib.parse.quote(secret), secret.encode().hex()))


@pytest.mark.parametrize("form", in_every_form(SECRET))
def test_a_credential_goes_in_and_does_not_come_out(form: str) -> None:
    seen = []

    def careless(arguments: dict[str, Any], _: Any) -> Any:
        seen.append(arguments["key"])
        if arguments["city"] == "raise":
            raise RuntimeError(f"cannot use {form}")
        return {"echo": [form], form: 1}

    trail = AuditLog()
    host = Broker(
        Offer([tool(careless, credentials={"key": "WEATHER"})]),
        vault=Vault({"WEATHER": SECRET}),
        audit=trail,
    )
    returned = json.dumps(host.call("weather.get", {"city": "x"}))
    with pytest.raises(ToolFailed) as failure:
        host.call("weather.get", {"city": "raise"})
    assert seen == [SECRET, SECRET]
    for said in (returned, str(failure.value), str(failure.value.__cause__), repr(host)):
        assert form not in said
        assert not leaks(SECRET, said)
    assert not leaks(SECRET, str([entry.details for entry in trail.get_entries()]))


@pytest.mark.parametrize("cut", range(1, len(SECRET)))
def test_a_long_error_is_not_cut_within_a_credential(cut: int) -> None:
    def fail(arguments: dict[str, Any], _: Caller) -> None:
        raise ToolFailed("-" * (1000 - cut) + arguments["key"] + "-" * 1000)

    with pytest.raises(ToolFailed) as failed:
        broker(fail, about={"credentials": {"key": "K"}}, vault=Vault({"K": SECRET})).call(
            "weather.get", {"city": "x"}
        )
    assert "[credential]".startswith(str(failed.value).strip("-."))


def test_what_an_error_comes_from_holds_no_credential() -> None:
    def fail(arguments: dict[str, Any], _: Caller) -> None:
        raise PolicyError(f"bad {arguments['key']}")

    with pytest.raises(ToolFailed) as failed:
        broker(fail, about={"credentials": {"key": "K"}}, vault=Vault({"K": SECRET})).call(
            "weather.get", {"city": "x"}
        )
    assert failed.value.__cause__ is None


def test_a_credential_in_a_number_is_no_result() -> None:
    about = {"credentials": {"key": "PIN"}}
    with pytest.raises(ToolResultInvalid, match="credential"):
        broker(lambda *_: {"n": 12345678}, about=about, vault=Vault({"PIN": "234567"})).call(
            "weather.get", {"city": "x"}
        )


def test_a_caller_cannot_pass_a_credential() -> None:
    host = broker(about={"credentials": {"key": "W"}}, vault=Vault({"W": "hush-hush"}))
    with pytest.raises(ToolArgumentsInvalid, match="the host sets this"):
        host.call("weather.get", {"city": "x", "key": "mine"})


def test_a_credential_that_cannot_be_had_ends_the_call(tmp_path: Any) -> None:
    from cellwright.harness.user_data import from_environment, from_file

    (tmp_path / "open").write_text("hush-hush")
    (tmp_path / "open").chmod(0o644)
    vault = Vault(
        {
            "file": from_file(str(tmp_path / "open")),
            "variable": from_environment("CELLWRIGHT_NO_SUCH_VARIABLE"),
            "short": "abc",
        }
    )
    for name, words in {
        "file": "chmod",
        "variable": "the environment has no CELLWRIGHT_NO_SUCH_VARIABLE",
        "short": "shorter",
        "none": "not in",
    }.items():
        with pytest.raises(ToolFailed, match=words) as failure:
            vault.get(name)
        assert "hush" not in str(failure.value)
    assert "hush" not in repr(vault)
    (tmp_path / "open").chmod(0o600)
    assert vault.get("file") == "hush-hush"


# long results

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=400),
    lambda inner: (
        st.lists(inner, max_size=30) | st.dictionaries(st.text(max_size=20), inner, max_size=30)
    ),
    max_leaves=60,
)


@given(JSON, st.integers(200, 3000))
def test_the_head_of_a_result_is_json_within_its_limit(value: Any, limit: int) -> None:
    head = head_of(value, limit)
    assert len(json.dumps(head)) <= limit
    assert json.loads(json.dumps(head)) == head


def test_a_long_result_is_kept_and_read_in_slices_by_its_caller_alone() -> None:
    long = [{"n": n, "text": "é" * 50} for n in range(5000)]
    host = broker(lambda *_: long, rules=Tools(shown_bytes=4096))
    me = Caller("me", is_model=True)
    short = host.call("weather.get", {"city": "x"}, me)
    assert len(json.dumps(short)) <= 4096
    assert short["head"][0] == long[0]
    assert short["truncated"] is True
    text, start = "", 0
    while start is not None:
        part = host.call("results.read", {"result_id": short["result_id"], "start": start}, me)
        text, start = text + part["text"], part["next"]
    assert json.loads(text) == long
    assert host.call("weather.get", {"city": "x"}, Caller("me")) == long
    with pytest.raises(ToolArgumentsInvalid, match="in parts"):
        host.call("results.read_all", {}, me)
    with pytest.raises(ToolArgumentsInvalid, match="not yours"):
        host.call("results.read", {"result_id": short["result_id"]}, Caller("you"))


def test_a_result_over_the_cap_is_an_error_that_says_how_to_read_it() -> None:
    trail = AuditLog()
    host = broker(lambda *_: ["x" * 100] * 100, rules=Tools(result_bytes=4096), audit=trail)
    with pytest.raises(ToolResultTooLarge, match="tools.result_bytes .*4096") as caught:
        host.call("weather.get", {"city": "x"}, Caller("me"))
    name = caught.value.result_id
    assert f"results.read_all({name!r})" in str(caught.value)
    assert host.call("results.read_all", {"result_id": name}, Caller("me")) == ["x" * 100] * 100
    assert host.call("results.read_all", {}, Caller("me")) == ["x" * 100] * 100
    part = host.call("results.read", {"result_id": name, "characters": 3}, Caller("me"))
    assert part == {"text": '["x', "start": 0, "next": 3}
    for asked in ({"result_id": name}, {}):
        with pytest.raises(ToolArgumentsInvalid, match="not yours"):
            host.call("results.read_all", asked, Caller("you"))
    actions = [entry.action for entry in trail.get_entries(category="tool")][:2]
    assert actions == ["call", "failed"]


def test_a_result_too_long_to_be_kept_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    host = broker(lambda *_: "x" * 5000, rules=Tools(result_bytes=4096))
    monkeypatch.setattr(host._results, "_most_of_one", 4096)
    with pytest.raises(ToolResultTooLarge, match="too long to keep; ask for less") as caught:
        host.call("weather.get", {"city": "x"})
    assert caught.value.result_id == ""


# the trail


def test_every_call_and_every_refusal_lies_in_the_trail_under_what_caused_it() -> None:
    trail = AuditLog()
    host = broker(audit=trail, about={"risky": True}, approve=lambda _: True)
    parent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    host.call("weather.get", {"city": "x"}, Caller("me", traceparent=parent))
    with pytest.raises(ToolArgumentsInvalid):
        host.call("weather.get", {"city": 1}, Caller("me", traceparent=parent))
    entries = trail.get_entries(category="tool")
    assert [(entry.action, entry.allowed) for entry in entries] == [
        ("approved", True),
        ("call", True),
        ("returned", True),
        ("refused", False),
    ]
    assert {entry.parent_id for entry in entries} == {"b" * 16}
    assert {entry.trace_id for entry in entries} == {"a" * 32}
    assert len({entry.span_id for entry in entries}) == 2
    assert "arguments_sha256" in entries[1].details


def test_explaining_tells_every_rule_and_calls_nothing() -> None:
    def untouched(_: Any, __: Any) -> None:
        pytest.fail("it was called")

    lines = broker(untouched, rules=Tools(rules=(ToolRule("mail.*", "deny"),))).explain(
        "weather.get", {"city": "x"}, Tools()
    )
    assert lines == [
        "rule 1: deny mail.*: does not match",
        "no rule matches: deny",
        "weather.get: deny",
    ]
