"""Source checks in a sandbox: off, as advice, enforced; the seeds' words."""

import msgspec
import pytest

from cellwright import Sandbox, SandboxStatus
from cellwright.policies.policy import Policy, Validation
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
    with Sandbox(
        policy=policy_named("strict"), pool=0,
        blocked_imports=["os", "sys", "custom_internal_module"], blocked_builtins=["exec", "eval", "breakpoint"],
    ) as sandbox:  # fmt: skip
        assert (
            sandbox.validate_source("import custom_internal_module")[1]
            == "Blocked import: custom_internal_module"
        )
        assert sandbox.validate_source("import socket; open('x')") == (True, None)
