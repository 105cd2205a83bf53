"""Ids and capabilities: nobody on the host, nothing to regain."""

import errno

import pytest

from cellwright import Sandbox
from tests.conftest import policy_named
from tests.escapes.without import errno_of, errno_of_call, sandbox_with_plan

STATUS = (
    "dict(line.split()[:2] for line in open('/proc/self/status') if line[:3] in ('Cap', 'NoN'))"
)


def test_every_capability_set_is_empty(strict: Sandbox) -> None:
    status = strict.execute(STATUS).value
    assert {status[f"Cap{name}:"] for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
    assert status["NoNewPrivs:"] == "1"


def test_one_id_is_mapped_and_it_is_not_the_hosts_root(strict: Sandbox) -> None:
    inside, outside, count = strict.execute("open('/proc/self/uid_map').read()").value.split()
    assert (inside, count) == ("1000", "1")
    assert strict.execute("import os; os.getresuid() + os.getresgid()").value == [1000] * 6
    assert outside != "0"


def test_securebits_are_locked(strict: Sandbox) -> None:
    bits = "import ctypes; ctypes.CDLL(None).prctl(27, 0, 0, 0, 0)"
    assert strict.execute(bits).value in (0xEF, -1)


def test_identity_cannot_be_changed(standard: Sandbox) -> None:
    for call in ("setresuid(0, 0, 0)", "setresgid(0, 0, 0)", "setgroups(1, b'\\0\\0\\0\\0')"):
        assert standard.execute(errno_of_call(call)).value == errno.EPERM, call


def test_a_set_uid_program_gains_nothing(standard: Sandbox) -> None:
    look = "import subprocess; subprocess.run(['/usr/bin/id', '-u'], capture_output=True, text=True).stdout"
    assert standard.execute(look).value == "1000\n"
    mounts = "[l.split()[5] for l in open('/proc/self/mountinfo') if 'nosuid' not in l.split()[5]]"
    assert standard.execute(mounts).value == []


def test_init_cannot_be_signalled_or_looked_into(standard: Sandbox) -> None:
    for number in range(1, 32):
        assert standard.execute(errno_of(f"os.kill(1, {number})")).value in (0, errno.EPERM)
    assert standard.execute(errno_of("open('/proc/1/mem', 'rb')")).value == errno.EACCES
    assert standard.execute("1 + 1").value == 2


def test_no_signal_reaches_init_where_landlock_does_not_stop_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Landlock scopes signals since ABI 6 only; pid 1 must be safe because it handles none."""
    with sandbox_with_plan(monkeypatch, policy_named("standard"), landlock_abi=0) as sandbox:
        for number in range(1, 32):
            assert sandbox.execute(errno_of(f"os.kill(1, {number})")).value == 0, number
