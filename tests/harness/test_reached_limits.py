"""Limits that a child of a program reaches: the result tells, even if the program goes on."""

from collections.abc import Iterator

import pytest

from cellwright import Sandbox
from cellwright.policies.policy import MIB
from tests.conftest import policy_named, with_limits

pytestmark = pytest.mark.needs("cgroup")

_HOG = "b'x' * (200 << 20)"
_CHILD = f'python3 -c "{_HOG}"'


@pytest.fixture(scope="module")
def small() -> Iterator[Sandbox]:
    policy = with_limits(policy_named("standard"), memory_bytes=64 * MIB, processes=16)
    with Sandbox(policy=policy) as sandbox:
        yield sandbox


@pytest.mark.parametrize("end", ["; echo went on", "; exit 3", ""])
def test_a_child_that_was_killed_for_memory_is_told(end: str, small: Sandbox) -> None:
    roomy = with_limits(policy_named("standard"), memory_bytes=512 * MIB)
    with Sandbox(policy=roomy) as sandbox:
        usage = sandbox.execute(_CHILD, "bash").usage
    assert usage.killed_for_memory == 0
    assert not usage.memory_limit_reached
    result = small.execute(f"{_CHILD}{end}", "bash")
    assert result.usage.killed_for_memory >= 1
    assert result.usage.memory_limit_reached
    assert any("limits.memory_bytes" in hint for hint in result.hints)
    # With cgroup v2 the kernel kills the whole cell (memory.oom.group).
    assert result.reason == "memory" or "killed 1 process:" in result.notices[0]


def test_a_command_that_was_killed_for_memory_is_told(small: Sandbox) -> None:
    result = small.run(["python3", "-c", _HOG])
    assert result.exit_code == 137
    assert result.usage.killed_for_memory >= 1
    assert result.notices or result.error
    assert any("limits.memory_bytes" in hint for hint in result.hints)


def test_a_kill_in_a_session_is_told_in_its_own_request(small: Sandbox) -> None:
    with small.session() as session:
        assert session.execute("1").usage.killed_for_memory == 0
        killed = session.execute(f"import os; os.system({_CHILD!r})")
        assert killed.usage.killed_for_memory >= 1
        if not killed.session_lost:  # cgroup v1
            assert "killed 1 process" in killed.notices[0]
            after = session.execute("2")
            assert (after.usage.killed_for_memory, after.notices) == (0, ())


@pytest.mark.parametrize(
    ("language", "program"),
    [
        ("bash", "for i in $(seq 40); do sleep 0.2 & done; wait"),
        ("python", "import threading; e = threading.Event()\nfor _ in range(40): threading.Thread(target=e.wait, args=(0.2,)).start()"),
        ("python", "import subprocess\nfor _ in range(40): subprocess.Popen(['sleep', '0.2'])"),
    ],
    ids=["bash", "threads", "subprocesses"],
)  # fmt: skip
def test_the_limit_of_processes_is_named_in_every_language(
    language: str, program: str, small: Sandbox
) -> None:
    roomy = with_limits(policy_named("standard"), processes=100)
    with Sandbox(policy=roomy) as sandbox:
        result = sandbox.execute(program, language)
    assert (result.ok, result.usage.forks_refused, result.notices) == (True, 0, ())
    result = small.execute(program, language)
    assert result.usage.forks_refused >= 1
    assert any("limits.processes" in hint for hint in result.hints)
    assert any("at most 16 live at once" in notice for notice in result.notices)
