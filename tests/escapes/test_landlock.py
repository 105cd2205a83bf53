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


@pytest.mark.parametrize("device", ["null", "zero", "full"])
def test_a_device_without_requests_says_itself_that_it_is_no_terminal(
    strict: Sandbox, device: str
) -> None:
    """As outside: programs ask whether their input, /dev/null, is a terminal."""
    code = f"""
import fcntl, termios
def ask(request):
    try: fcntl.ioctl(open("/dev/{device}", "rb", 0), request, b" " * 64)
    except OSError as error: return error.errno
[ask(request) for request in (termios.TCGETS, termios.TIOCGWINSZ)]
"""
    assert strict.execute(code).value == [errno.ENOTTY] * 2
