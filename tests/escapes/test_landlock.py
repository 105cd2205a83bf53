"""Landlock alone: a place that mount and mode would let a guest write."""

import errno

import pytest

from cellwright import Sandbox
from tests.conftest import policy_named
from tests.escapes.without import errno_of, sandbox_with_plan

pytestmark = pytest.mark.needs("landlock")
ATTEMPT = errno_of("os.close(os.open('/dev/urandom', os.O_WRONLY))")


def test_writing_a_device_that_no_rule_names_is_refused(strict: Sandbox) -> None:
    assert strict.execute(ATTEMPT).value == errno.EACCES


def test_without_landlock_the_same_write_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    with sandbox_with_plan(monkeypatch, policy_named("strict"), landlock_abi=0) as sandbox:
        assert sandbox.execute(ATTEMPT).value == 0


def test_without_its_rules_not_even_the_workspace_can_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rules allow; nothing else does."""
    with sandbox_with_plan(monkeypatch, policy_named("strict"), path_rules=()) as sandbox:
        assert sandbox.execute(errno_of("open('/workspace/x', 'w')")).value == errno.EACCES
