"""Filters on the way back: what they take out, what the trail is told of it, and that they fail closed."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from cellwright import AuditLog, Broker, PolicyError, Sandbox
from cellwright.errors import ToolFailed, ToolResultInvalid
from cellwright.harness.schemas.spec import ToolOwner, ToolSpec
from cellwright.harness.tools.broker import Offer
from cellwright.harness.tools.results import CapRows, Filtered, RedactSecrets
from cellwright.harness.tools.tool import Caller, Tool
from cellwright.policies.tool_rules import Tools
from tests.conftest import policy_named

KEY = "gh" + "p_" + "a1B2" * 9
SPEC = ToolSpec(name="look", owner=ToolOwner.DEVELOPER)


def broker(value: Any, *filters: Any, **settings: Any) -> Broker:
    perform = value if callable(value) else lambda *_: value
    return Broker(Offer([Tool(SPEC, perform)]), filters=filters, **settings)


def filtered(value: Any) -> Any:
    return RedactSecrets()(SPEC, value).value


def test_secrets_are_taken_out_of_texts_names_and_lists() -> None:
    assert filtered({"note": f"use {KEY}", "more": [[KEY]], KEY: 1}) == {
        "note": "use [redacted github_token]",
        "more": [["[redacted github_token]"]],
        "[redacted github_token]": 1,
    }


def test_the_name_of_a_value_says_that_it_is_secret() -> None:
    given = {"password": "correct-horse-battery", "user": "ann", "nested": {"apiKey": "q8rT2zz1"}}
    assert filtered(given) == {
        "password": "[redacted assignment]",
        "user": "ann",
        "nested": {"apiKey": "[redacted assignment]"},
    }
    assert filtered({"Authorization": "Basic QWxhZGRpbjpv"}) == {
        "Authorization": "[redacted authorization]"
    }


def test_an_id_stays_however_random_it_looks() -> None:
    looks_random = "1BxiMVs0XRA5nFMdKvBdBZjgmUUqptlbs74OgvE2upms"
    assert filtered({"fileId": looks_random}) == {"fileId": looks_random}
    assert filtered({"note": looks_random}) == {"note": "[redacted random]"}


def test_no_entry_is_lost_when_two_names_become_the_same() -> None:
    other = KEY.replace("a1", "z9")
    assert filtered({KEY: 1, other: 2}) == {
        "[redacted github_token]": 1,
        "[redacted github_token] 2": 2,
    }


def test_many_names_that_become_the_same_take_no_long() -> None:
    secrets = {f"{KEY}{n}": n for n in range(2000)}
    taken = {f"[redacted github_token] {n}": n for n in range(2000)}
    assert len(filtered(taken | secrets)) == 4000


def test_what_holds_no_secret_is_the_same_object() -> None:
    value = {"a": [1, None, "text"]}
    assert filtered(value) is value


def test_lists_are_cut_and_it_is_said() -> None:
    host = broker({"rows": list(range(10)), "few": [1, [2] * 9]}, CapRows(3))
    assert host.call("look", {}) == {
        "truncated": True, "rows": 10, "kept_rows": 3,
        "notice": "lists were cut to 3 items: ask for less",
        "head": {"rows": [0, 1, 2], "few": [1, [2, 2, 2]]},
    }  # fmt: skip
    assert broker([1, 2, 3], CapRows(3)).call("look", {}) == [1, 2, 3]


@pytest.mark.parametrize(
    ("of_policy", "of_broker", "kept"), [(2, 10, 2), (10, 3, 3), (10, 10, None)]
)
def test_the_rows_of_a_policy_hold_and_the_rest_is_kept_nowhere(
    of_policy: int, of_broker: int, kept: int | None
) -> None:
    trail = AuditLog()
    host = broker(list(range(9)), rules=Tools(result_rows=of_broker), audit=trail)
    value = host.call("look", {}, Caller(rules=Tools(result_rows=of_policy)))
    told = trail.get_entries()[-1].details.get("filtered")
    if kept is None:
        assert (value, told) == (list(range(9)), None)
        return
    assert (value["rows"], value["kept_rows"], value["head"]) == (9, kept, list(range(kept)))
    assert "result_id" not in value
    assert told == [f"rows: {9 - kept}"]


def test_the_trail_has_kinds_and_counts_and_no_text() -> None:
    trail = AuditLog()
    host = broker(
        [f"{KEY} and {KEY}", {"password": "correct-horse-battery"}], RedactSecrets(), audit=trail
    )
    host.call("look", {})
    entry = trail.get_entries()[-1]
    assert (entry.action, entry.details["filtered"]) == (
        "returned", ["github_token: 2", "assignment: 1"],
    )  # fmt: skip
    assert KEY not in str(trail.get_entries())
    assert "correct-horse" not in str(trail.get_entries())


def test_errors_pass_the_filters_too() -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError(f"cannot use {KEY}")

    trail = AuditLog()
    with pytest.raises(
        ToolFailed, match="RuntimeError: cannot use .redacted github_token"
    ) as raised:
        broker(fail, RedactSecrets(), audit=trail).call("look", {})
    assert raised.value.__cause__ is None
    entry = trail.get_entries()[-1]
    assert (entry.action, entry.details["filtered"]) == ("failed", ["github_token: 1"])
    assert KEY not in str(entry)


def broken(_: ToolSpec, __: Any) -> Any:
    raise ZeroDivisionError(KEY)


@pytest.mark.parametrize(
    ("each", "words"),
    [
        (broken, "broken raised ZeroDivisionError"),
        (lambda *_: object(), "not JSON"),
        (lambda *_: {1: "\ud800"}, "not JSON"),
        (lambda *_: float("nan"), "not JSON"),
    ],
)
def test_a_filter_that_fails_ends_the_call(each: Callable[..., Any], words: str) -> None:
    trail = AuditLog()
    with pytest.raises(ToolResultInvalid, match=words) as raised:
        broker({"x": KEY}, each, audit=trail).call("look", {})
    assert KEY not in f"{raised.value} {raised.value.__cause__} {trail.get_entries()}"
    assert trail.get_entries()[-1].action == "failed"


def test_a_filter_that_fails_on_an_error_withholds_that() -> None:
    def fail(*_: Any) -> None:
        raise PolicyError(KEY)

    for each in (broken, lambda *_: 7):
        with pytest.raises(ToolResultInvalid, match="withheld") as raised:
            broker(fail, each).call("look", {})
        assert KEY not in f"{raised.value} {raised.value.__cause__}"


def test_filters_of_ones_own_run_in_order_and_know_the_tool() -> None:
    def tokenise(spec: ToolSpec, value: Any) -> Any:
        return Filtered(json.loads(json.dumps(value).replace("Ann", "<P1>")), {"person": 1})

    def shout(spec: ToolSpec, value: Any) -> Any:
        return {spec.name: str(value).upper()}

    trail = AuditLog()
    host = broker({"name": "Ann"}, tokenise, shout, audit=trail)
    assert host.call("look", {}) == {"look": "{'NAME': '<P1>'}"}
    assert trail.get_entries()[-1].details["filtered"] == ["person: 1", "shout: 1"]


def test_programs_and_readers_of_kept_results_get_the_filtered_result() -> None:
    long = Tool(SPEC, lambda *_: [f"{KEY} {'x' * 50}"] * 2000)
    code = (
        "import tools\ntry:\n    short = tools.look()\n"
        "except tools.ToolError as error:\n    short = error\n"
        "str(short) + str(tools.results.read_all())"
    )
    broker = Broker(Offer([long]), filters=(RedactSecrets(),), rules=Tools(result_bytes=65_536))
    with Sandbox(policy=policy_named("strict"), tools=broker, pool=0) as box:
        value = box.execute(code).value
    assert KEY not in value
    assert value.count("[redacted github_token]") > 50
