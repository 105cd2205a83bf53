"""Caps: memory, tasks, CPU, files, descriptors, output."""

import errno

import msgspec
import pytest

from cellwright import Sandbox, SandboxStatus
from cellwright.runner.listening.cell_listener import Listener
from tests.conftest import policy_named
from tests.escapes.without import errno_of

FORKS = """
import os, time
n = 0
try:
    while n < 400:
        if os.fork() == 0:
            time.sleep(20)
        n += 1
except OSError as error:
    reason = error.errno
[n, reason]
"""


@pytest.mark.needs("cgroup")
def test_memory_is_capped_and_the_result_says_so(strict: Sandbox) -> None:
    assert strict.execute("x = bytearray(128 << 20); len(x)").value == 128 << 20
    result = strict.execute("x = bytearray(600 << 20)")
    assert (result.status, result.reason) == (SandboxStatus.KILLED, "memory")
    assert result.usage.memory_peak_bytes <= 256 << 20


@pytest.mark.needs("cgroup")
def test_files_count_as_memory() -> None:
    policy = policy_named("strict")
    limits = msgspec.structs.replace(policy.limits, memory_bytes=64 << 20, workspace_bytes=1 << 30)
    with Sandbox(policy=msgspec.structs.replace(policy, limits=limits)) as sandbox:
        result = sandbox.execute("open('/workspace/x', 'wb').write(bytes(1 << 20) * 200)")
    assert result.reason in ("memory", "exception")
    assert result.usage.memory_peak_bytes <= 64 << 20


def test_a_fork_bomb_stops_at_the_cap(standard: Sandbox) -> None:
    count, reason = standard.execute(FORKS).value
    assert 32 < count < 64
    assert reason == errno.EAGAIN


def test_the_workspace_is_full_at_its_cap(strict: Sandbox) -> None:
    fill = "with open('/workspace/x', 'wb') as f:\n        for _ in range(100): f.write(bytes(1 << 20))"
    result = strict.execute(errno_of(fill))
    assert result.value in (errno.ENOSPC, errno.EFBIG)
    inodes = "for n in range(20000): os.symlink('x', f'/workspace/{n}')"
    assert strict.execute(errno_of(inodes)).value == errno.ENOSPC


def test_descriptors_are_capped(strict: Sandbox) -> None:
    assert strict.execute(errno_of("[os.dup(0) for _ in range(5000)]")).value == errno.EMFILE


def test_output_is_cut_in_the_middle_and_counted(strict: Sandbox) -> None:
    result = strict.execute("print('a' * 1_000_000 + 'z')")
    assert result.truncated == {"stdout": 1_000_002 - 100_000}
    assert result.stdout.startswith("aaa")
    assert result.stdout.endswith("az\n")
    assert "900002 bytes dropped" in result.stdout


def test_endless_output_is_ended() -> None:
    policy = policy_named("strict")
    limits = msgspec.structs.replace(policy.limits, output_total_bytes=1 << 20)
    with Sandbox(policy=msgspec.structs.replace(policy, limits=limits)) as sandbox:
        result = sandbox.execute("while True: print('x' * 1000)")
    assert (result.status, result.reason) == (SandboxStatus.KILLED, "output")


def test_limits_cannot_be_raised(standard: Sandbox) -> None:
    code = "import resource\ns, h = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
    raised = (
        code
        + "try:\n    resource.setrlimit(resource.RLIMIT_NOFILE, (s, h + 1)); v = True\nexcept (ValueError, OSError): v = False\nv"
    )
    assert standard.execute(raised).value is False


@pytest.mark.parametrize("place", ["/workspace", "/tmp"])
def test_many_files_together_are_no_larger_than_the_workspace(strict: Sandbox, place: str) -> None:
    """Each is below the limit of a single file, and all below the cap on memory."""
    code = (
        "import errno\nwritten = 0\ntry:\n"
        "    for number in range(5):\n"
        f"        with open(f'{place}/{{number}}', 'wb') as file: file.write(bytes(20 << 20))\n"
        "        written += 20\n"
        "except OSError as error: code = errno.errorcode[error.errno]\n"
        "written, code"
    )
    assert strict.execute(code).value == [60, "ENOSPC"]


_LIMITS_OF_INIT = """
import resource
try: resource.prlimit(1, resource.RLIMIT_NOFILE, (9, 9)); refused = 0
except OSError as error: refused = error.errno
refused
"""


def test_no_guest_sets_the_limits_of_init(strict: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel permits it, since init has the same id."""
    assert strict.execute(_LIMITS_OF_INIT).value == errno.EPERM
    monkeypatch.setattr(Listener, "_answer_limits", Listener._let_go_on)
    assert strict.execute(_LIMITS_OF_INIT).value == 0
