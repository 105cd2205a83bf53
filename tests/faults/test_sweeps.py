"""Leftovers are removed, even if the remover is killed or something keeps them busy."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellwright import Sandbox, SandboxStatus
from cellwright.harness.sandbox.remote.address import listening_at
from cellwright.runner.cgroups import detect, v1
from tests.conftest import ROOT, policy_named, soon
from tests.faults.injection import ASK_THROUGH, Call, Injector, program_of
from tests.faults.test_ends import Trap
from tests.runner.test_leftovers import cgroups_of

pytestmark = pytest.mark.needs("root")

HIERARCHIES = ("memory", "cpu", "cpuacct", "pids")
TOP = Path("/sys/fs/cgroup")


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A place for cgroups that no other supervisor sweeps."""
    groups = [TOP / name / f"cellwright-faults-{os.getpid()}" for name in HIERARCHIES]
    for name, group in zip(HIERARCHIES, groups, strict=True):
        group.mkdir()
        (tmp_path / name).symlink_to(group)
    yield tmp_path
    for group in groups:
        for directory in (*group.glob("*/*/"), *group.glob("*/"), group):
            directory.rmdir()


# A process that is killed in the middle

KILLED = """
import sys
sys.path[:0] = {paths!r}
from cellwright.harness.sandbox.remote.address import listening_at
from cellwright.runner.cgroups import detect
from pathlib import Path
place = {place!r}
{ask}
{code}
"""
SWEEP = "detect.open_tree(0, place)"
LISTEN = "with listening_at(Path(place, 's')): pass"


def killed_at(name: str, number: int, code: str, place: Path) -> bool:
    """Run `code` in a process that is killed when it makes a call, and tell whether it made it."""
    trap = Trap()
    injector = Injector(trap)
    try:
        channel = injector.theirs.fileno()
        os.set_inheritable(channel, True)
        ask = ASK_THROUGH.format(channel=channel, program=program_of([name], channel).hex())
        paths = [str(ROOT), *sys.path]
        script = KILLED.format(paths=paths, place=str(place), ask=ask, code=code)
        command = [sys.executable, "-I", "-c", script]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[channel]) as victim:
            trap.supervisor = injector.supervisor = victim.pid
            trap.arm(Call("guest", name, number), lambda _: victim.kill())
            return victim.wait(60) == -signal.SIGKILL
    finally:
        injector.close()


def left_by(who: str, root: Path) -> list[Path]:
    """Make what a supervisor has whose cell runs."""
    tops = [root / name / f"cellwright-{who}" for name in HIERARCHIES]
    for top in tops:
        for below in ("launcher", "cell-0"):
            (top / below).mkdir(parents=True)
    return tops


@pytest.mark.needs("v1_memory")
@pytest.mark.parametrize("name", ["getdents64", "rmdir", "mkdir"])
def test_a_sweep_that_is_killed_is_finished_by_the_next_one(name: str, root: Path) -> None:
    me = os.getpid()
    living = left_by(f"{me}-{detect.start_time(me)}-7", root)
    number = 0
    while True:
        dead = left_by(f"{me}-1-0", root)  # our number, but of one that began at another time
        killed = killed_at(name, number, SWEEP, root)
        detect.open_tree(me, str(root)).close()
        assert not any(each.exists() for each in dead), (name, number)
        assert all((each / "cell-0").exists() for each in living), (name, number)
        left = {path.name for each in HIERARCHIES for path in (root / each).glob("cellwright-*")}
        if not killed:  # it swept, and made its own; then it ended as any process does
            break
        assert left == {living[0].name}, (name, number)
        number += 1 if number < 4 else 3
    assert number >= 4


def test_a_sweep_beside_another_one_finds_nothing_and_fails_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, what another one removed between two looks cost the new sandbox its caps."""
    left = tmp_path / "cellwright-4194305-123-0"
    (left / "cell-0").mkdir(parents=True)
    scan = os.scandir

    def scan_too_late(path: object) -> object:
        if str(path) == str(left):
            (left / "cell-0").rmdir()
            left.rmdir()
        return scan(path)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", scan_too_late)
    detect.sweep([tmp_path])
    assert not left.exists()


@pytest.mark.parametrize("name", ["openat", "flock", "bind", "listen", "rename", "unlink"])
def test_a_daemon_that_is_killed_while_it_begins_or_ends_leaves_what_the_next_one_replaces(
    name: str, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    number = 0
    while killed_at(name, number, LISTEN, tmp_path):
        with listening_at(tmp_path / "s"):
            assert sorted(os.listdir(tmp_path)) == ["s", "s.lock"], (name, number)
        assert os.listdir(tmp_path) == [], (name, number)
        number += 1
    assert number or name == "openat"  # all that it opens may be open by then


# Cgroups that are busy


@contextlib.contextmanager
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is not the cell's, for its cgroup: what cannot be killed there looks like that."""
    process = subprocess.Popen(["/bin/sleep", "600"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def joining_late(process: subprocess.Popen[bytes]) -> Iterator[list[v1.CgroupV1]]:
    """Have a process join the next cgroup once all in it was killed, before it is removed."""
    joined: list[v1.CgroupV1] = []
    remove = v1.CgroupV1.remove

    def join_and_remove(cgroup: v1.CgroupV1) -> bool:
        if not joined:
            for directory in cgroup._directories.values():
                Path(directory, "cgroup.procs").write_text(str(process.pid))
            joined.append(cgroup)
        return remove(cgroup)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(v1.CgroupV1, "remove", join_and_remove)
        yield joined


def is_there(cgroup: v1.CgroupV1) -> bool:
    return any(os.path.exists(directory) for directory in cgroup._directories.values())


@pytest.mark.needs("v1_memory", "cgroup")
def test_a_cgroup_that_is_busy_is_removed_once_it_is_not() -> None:
    with Sandbox(policy=policy_named("strict"), pool=0) as box, stranger() as process:
        box.execute("1")
        before = cgroups_of(os.getpid())
        with joining_late(process) as joined:
            assert box.execute("1 + 1").value == 2
        assert is_there(joined[0])
        assert box.execute("2 + 2").value == 4
        assert is_there(joined[0])
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # nobody has reaped it
        assert box.execute("3 + 3").value == 6
        assert soon(lambda: cgroups_of(os.getpid()) == before)


@pytest.mark.needs("v1_memory", "cgroup")
def test_a_cgroup_that_is_busy_when_its_sandbox_is_closed_is_told_and_removed_later() -> None:
    before = cgroups_of(os.getpid())
    with stranger() as process:
        with Sandbox(policy=policy_named("strict"), pool=0) as box:
            with joining_late(process) as joined:
                box.execute("1")
            with pytest.warns(ResourceWarning, match="does not end"):
                box.close()
        assert is_there(joined[0])
        with Sandbox(policy=policy_named("strict"), pool=0):
            assert is_there(joined[0])
    with Sandbox(policy=policy_named("strict"), pool=0):
        assert not is_there(joined[0])
    assert soon(lambda: cgroups_of(os.getpid()) <= before)


FORKING = """
import os
print("up", flush=True)
while True:
    try:
        if os.fork() == 0: continue
    except OSError:
        pass
"""


def test_a_guest_that_forks_while_it_is_killed_is_gone_when_the_call_returns() -> None:
    with Sandbox(policy=policy_named("standard"), pool=0) as box:
        box.execute("1")
        before = cgroups_of(os.getpid())
        for _ in range(10):
            run = box.start(FORKING)
            assert next(run.output(), None)
            run.cancel()
            assert run.result().status is SandboxStatus.CANCELLED
            assert cgroups_of(os.getpid()) == before
