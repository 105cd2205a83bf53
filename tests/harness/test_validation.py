"""Source checks in a sandbox: off, as advice, enforced; the seeds' words."""

from typing import Any

import msgspec
import pytest

from cellwright import PolicyError, Sandbox, SandboxStatus
from cellwright.policies.policy import Policy, Validation
from cellwright.policies.source.check import MAX_CHARACTERS
from tests.conftest import policy_named

CODE = "import os\nos.getcwd()"


def policy(mode: str) -> Policy:
    validation = msgspec.convert({"mode": mode}, Validation)
    return msgspec.structs.replace(policy_named("strict"), validation=validation)


def test_advice_rides_on_the_result_and_the_program_runs(strict: Sandbox) -> None:
    result = strict.execute(CODE)
    assert result.value == "/workspace"
    assert [str(each) for each in result.findings] == [
        "Blocked import: os",
        "Blocked attribute: os.getcwd",
    ]
    assert strict.execute("1 + 1").findings == ()


def test_what_is_enforced_is_rejected_before_anything_runs() -> None:
    with Sandbox(policy=policy("enforce"), pool=0) as sandbox:
        result = sandbox.execute(CODE)
        assert (result.status, result.reason) == (SandboxStatus.REJECTED, "validation")
        assert result.error == "Blocked import: os"
        assert result.findings
        assert sandbox.execute("1 + 1").value == 2


def test_padding_does_not_pass_where_findings_are_enforced(strict: Sandbox) -> None:
    code = "1 + 1\n#" + " " * MAX_CHARACTERS
    with Sandbox(policy=policy("enforce"), pool=0) as sandbox:
        assert sandbox.execute(code).status is SandboxStatus.REJECTED
    result = strict.execute(code)
    assert result.ok
    assert [each.rule for each in result.findings] == ["size"]


NO_SENSE = [
    {"mode": "Enforce"}, {"mode": None}, {"blocked_imports": "os"}, {"allowed_imports": [1]},
    {"blocked_builtins": None},
]  # fmt: skip


@pytest.mark.parametrize("given", NO_SENSE, ids=str)
def test_a_mode_or_list_that_makes_no_sense_is_refused(given: dict[str, Any]) -> None:
    """A mode with a typing error would enforce nothing."""
    wrong = msgspec.structs.replace(policy("enforce"), validation=Validation(**given))
    with pytest.raises(PolicyError, match=f"validation.{next(iter(given))}"):
        Sandbox(policy=wrong)


def test_lists_may_be_lists() -> None:
    lists: Any = {"mode": "enforce", "blocked_imports": ["json"], "allowed_imports": []}
    given = msgspec.structs.replace(policy("enforce"), validation=Validation(**lists))
    with Sandbox(policy=given, pool=0) as sandbox:
        assert sandbox.execute("import json").error == "Blocked import: json"


def test_findings_are_in_the_json_of_a_result(strict: Sandbox) -> None:
    first, _ = strict.execute(CODE).to_dict()["findings"]
    assert first == {
        "rule": "import", "what": "os", "reason": "reaches files, programs and the environment",
        "line": 1, "column": 0,
    }  # fmt: skip


def test_off_is_off() -> None:
    with Sandbox(policy=policy("off"), pool=0) as sandbox:
        assert sandbox.execute(CODE).findings == ()


@pytest.mark.parametrize("mode", ["off", "advise", "enforce"])
def test_validate_source_judges_in_every_mode(mode: str) -> None:
    with Sandbox(policy=policy(mode), pool=0) as sandbox:
        assert sandbox.validate_source("def double(n: int) -> int:\n    return n * 2") == (
            True,
            None,
        )
        assert sandbox.validate_source("import os; os.system('rm -rf /')") == (
            False,
            "Blocked import: os",
        )


def test_the_lists_can_be_given() -> None:
    given = Validation(
        blocked_imports=("os", "sys", "custom_internal_module"),
        blocked_builtins=("exec", "eval", "breakpoint"),
    )
    with Sandbox(policy=policy_named("strict", validation=given), pool=0) as sandbox:
        assert (
            sandbox.validate_source("import custom_internal_module")[1]
            == "Blocked import: custom_internal_module"
        )
        assert sandbox.validate_source("import socket; open('x')") == (True, None)
