"""Resources that a supervisor loses while it works: descriptors, the right time, files, memory."""

import contextlib
import gc
import itertools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellwright import (
    AuditLog,
    CellwrightError,
    HostSettings,
    LaunchError,
    PoolSettings,
    Sandbox,
    SandboxStatus,
    Workspaces,
    verify,
)
from cellwright.policies.errors import WorkspaceError
from cellwright.runner.listening.cell_listener import Listener
from cellwright.testing import inspect
from tests.conftest import ROOT, policy_named, soon
from tests.harness.servers.daemon.daemons import serving
from tests.runner.test_leftovers import cgroups_of, descriptors, held, nothing_more_than

pytestmark = pytest.mark.needs("userns")


# descriptors


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Let this process open only so many more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    fillers = []
    while (filler := os.dup(0)) < max(numbers):  # no hole below the limit
        fillers.append(filler)
    os.close(filler)
    resource.setrlimit(resource.RLIMIT_NOFILE, (filler + count, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for each in fillers:
            os.close(each)


def test_a_call_without_descriptors_is_refused_and_leaves_nothing() -> None:
    outcomes = []
    with Sandbox(policy=policy_named("strict"), pool=0) as box:
        box.execute("1")
        before = cgroups_of(os.getpid()), descriptors(os.getpid())
        for count in (0, 1, 4, 8, 14, 29):
            try:
                with descriptors_left(count):
                    outcomes.append(box.execute("1 + 1").value)
            except LaunchError as error:
                assert "Too many open files" in error.what
                outcomes.append(None)
            assert soon(lambda: (cgroups_of(os.getpid()), descriptors(os.getpid())) == before), (
                count
            )
        assert box.execute("1 + 1").value == 2
    assert (outcomes[0], outcomes[-1]) == (None, 2)


def test_a_sandbox_without_descriptors_is_refused_and_leaves_nothing() -> None:
    outcomes = []
    policy = policy_named("strict")
    for count in (1, 3, 8, 13, 60):
        gc.collect()
        before = held()
        try:
            with descriptors_left(count), Sandbox(policy=policy, pool=0) as box:
                outcomes.append(box.execute("1 + 1").value)
        except LaunchError:
            outcomes.append(None)
        gc.collect()
        assert soon(lambda: nothing_more_than(before)), count  # noqa: B023
    assert (outcomes[0], outcomes[-1]) == (None, 2)


# time


def test_a_clock_that_jumps_moves_no_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an hour ahead and back again, whenever anybody asks."""
    jumps = itertools.cycle((0, 3600, -3600, 86_400 * 365))
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: int((right() + next(jumps)) * 1e9))
    path = tmp_path / "audit"
    with AuditLog(path=path) as log, Sandbox(policy=policy_named("strict"), audit=log) as box:
        assert [box.execute("1 + 1").value for _ in range(4)] == [2] * 4
        with box.session() as session:
            assert [session.execute("n = 7\nn").value for _ in range(4)] == [7] * 4
        stuck = box.execute("while True: pass", timeout=0.2)
        assert (stuck.status, stuck.reason) == (SandboxStatus.TIMEOUT, "wall_time")
    assert verify(path).ok


# files


@pytest.fixture
def bash() -> Iterator[Path]:
    """A copy of bash, where a cell's own /tmp does not cover it."""
    place = Path(tempfile.mkdtemp(prefix="cellwright-faults-", dir="/var/tmp"))
    place.chmod(0o755)
    yield shutil.copy("/bin/bash", place / "bash")
    shutil.rmtree(place)


@pytest.mark.parametrize("what", ["replaced", "written over", "removed"])
def test_an_interpreter_that_is_changed_while_it_is_used_stays_what_it_was(
    bash: Path, what: str
) -> None:
    """A launcher shows its cells the file that it found; who comes later is told."""
    print_42 = ("echo $((6 * 7))", "bash")
    with sandbox_with(bash) as box:
        assert box.execute(*print_42).stdout == "42\n"
        if what == "written over":  # a writer may break it
            bash.write_bytes(b"not a program")
            assert box.execute(*print_42).status is SandboxStatus.FAILED
            return
        bash.unlink()
        if what == "replaced":
            bash.write_bytes(b"not a program")
            bash.chmod(0o755)
        assert box.execute(*print_42).stdout == "42\n"
    with contextlib.suppress(CellwrightError), sandbox_with(bash) as box:
        assert box.execute(*print_42).status is SandboxStatus.FAILED


def sandbox_with(bash: Path) -> Sandbox:
    return Sandbox(
        policy=policy_named("standard"), pool=0, host=HostSettings(interpreters={"bash": str(bash)})
    )


def test_a_python_that_is_gone_is_told_once_a_launcher_is_needed(tmp_path: Path) -> None:
    from cellwright.runner.launching.spawn import interpreter

    with Sandbox(policy=policy_named("strict"), pool=0) as box:
        assert box.execute("1 + 1").value == 2
        spawned = inspect(box).supervisor._spawned
        spawned.executable = str(tmp_path / "python3")
        assert box.execute("1 + 1").value == 2
        os.kill(inspect(box).supervisor.generation.launcher.keeper, signal.SIGKILL)
        assert soon(lambda: not inspect(box).supervisor.generation.launcher.is_alive())
        with pytest.raises(LaunchError, match="cannot start .*python3: No such file"):
            box.execute("1 + 1")
        spawned.executable = interpreter()
        assert box.execute("1 + 1").value == 2


def test_a_removed_cache_directory_fails_no_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As systemd-tmpfiles does: what was kept on disk goes, with its directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with Sandbox(
        policy=policy_named("strict"), pool=PoolSettings(size=0, cells_per_launcher=1)
    ) as box:
        for _ in range(2):
            assert box.execute("1 + 1").value == 2
            shutil.rmtree(tmp_path / "cellwright")


def test_removing_workspaces_in_use_is_reported_and_does_not_harm_later_calls(
    tmp_path: Path,
) -> None:
    place = tmp_path / "workspaces"
    with Sandbox(policy=policy_named("strict"), pool=0, workspaces=place) as box:
        assert box.execute("open('a', 'w').write('x')", workspace="mine").workspace.state == "saved"
        session = box.session(workspace="mine")
        session.execute("open('b', 'w').write('y')")
        shutil.rmtree(place)
        with pytest.raises(WorkspaceError, match="not saved: .*No such file"):
            session.close()
        look = "import os; os.listdir('/workspace')"
        assert box.execute(look, workspace="mine").value == []
        assert box.execute("open('c', 'w').write('z')", workspace="mine").workspace.state == "saved"
        assert box.execute(look, workspace="mine").value == ["c"]


@pytest.mark.needs("root")
def test_a_place_for_state_that_is_another_users_is_refused_a_link_to_it_too(
    tmp_path: Path,
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (tmp_path / "link").symlink_to(theirs)
    os.chown(theirs, 65534, 65534)
    for place in (theirs, tmp_path / "link"):
        with pytest.raises(WorkspaceError, match="others may write"):
            Workspaces(place).write("mine", "f", "")
    assert os.listdir(theirs) == []


def test_a_daemon_whose_socket_was_removed_still_serves_connected_clients(
    tmp_path: Path,
) -> None:
    with serving(tmp_path / "s") as daemon:
        with daemon.sandbox() as box:
            assert box.execute("1 + 1").value == 2
            daemon.path.unlink()
            assert box.execute("1 + 1").value == 2
            with pytest.raises(LaunchError, match="no daemon answers"):
                daemon.sandbox()
        assert daemon.end() == 0
    assert b"Traceback" not in daemon.said


# memory

UNDER_PRESSURE = """
import os, sys
sys.path[:0] = {paths!r}
with open({tasks!r}, "w") as file: file.write(str(os.getpid()))
from cellwright import HostSettings, Sandbox
from tests.conftest import policy_named
with Sandbox(policy=policy_named("strict"), pool=0, host=HostSettings(cgroup_root={root!r})) as box:
    hog = box.execute("hog = bytearray(400 << 20)")
    print(hog.status.name, hog.reason, hog.value, box.execute("1 + 1").value)
"""


@pytest.mark.needs("root", "cgroup", "v1_memory")
def test_out_of_memory_kills_cells_before_the_embedding_process(tmp_path: Path) -> None:
    """Supervisor, launcher and cells together have 100 MiB, less than a cell's own cap."""
    group = Path(f"/sys/fs/cgroup/memory/cellwright-faults-{os.getpid()}")
    group.mkdir()
    (tmp_path / "memory").symlink_to(group)
    for name in ("cpu", "cpuacct", "pids"):
        (tmp_path / name).symlink_to(f"/sys/fs/cgroup/{name}")
    try:
        (group / "memory.limit_in_bytes").write_text(str(100 << 20))
        paths, tasks = [str(ROOT), *sys.path], str(group / "cgroup.procs")
        script = UNDER_PRESSURE.format(paths=paths, tasks=tasks, root=str(tmp_path))
        command = [sys.executable, "-I", "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.split() == ["KILLED", "memory", "None", "2"]
    finally:
        for directory in (*group.glob("*/*/"), *group.glob("*/"), group):
            directory.rmdir()


# limits that we were given

INHERITED = """
import json, resource, sys
sys.path[:0] = {paths!r}
from cellwright import Sandbox
from tests.conftest import policy_named
LOOK = "import resource; [resource.getrlimit(getattr(resource, 'RLIMIT_' + name)) for name in names]"
def seen():
    with Sandbox(policy=policy_named("strict"), pool=0) as box:
        asked = dict(box.plan.rlimits)
        return asked, box.execute(LOOK, inputs={{"names": list(asked)}}).value
asked, _ = seen()
for name, value in asked.items():
    number = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(number)[1]
    limit = {limit}
    if name != "CPU" and (hard == resource.RLIM_INFINITY or limit <= hard):
        resource.setrlimit(number, (limit, limit))
        asked[name] = min(limit, value)
    elif hard != resource.RLIM_INFINITY:
        asked[name] = min(hard, value)
print(json.dumps([list(asked.values()), seen()[1]]))
"""


@pytest.mark.parametrize("limit", ["value // 2", "value * 2"])
def test_a_cells_limits_are_those_of_its_policy_or_the_lower_ones_that_we_were_given(
    limit: str,
) -> None:
    script = INHERITED.format(paths=[str(ROOT), *sys.path], limit=limit)
    command = [sys.executable, "-I", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    wanted, found = json.loads(done.stdout)
    assert found == [[each, each] for each in wanted]


# the listener

FLOOD = """
import ctypes, os, signal, threading
c = ctypes.CDLL(None)
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
def flood():
    for _ in range(300): c.ptrace(16, 1, 0, 0)
for _ in range(5):
    threads = [threading.Thread(target=flood) for _ in range(8)]
    for thread in threads: thread.start()
    pid = os.fork()
    if pid == 0:
        while True: c.ptrace(16, 1, 0, 0)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    for thread in threads: thread.join()
signal.setitimer(signal.ITIMER_REAL, 0)
'survived'
"""


def kinds_open() -> Counter[str]:
    """Return what is open here, whichever cell it is of."""
    return Counter(re.sub(r"cell-\d+", "cell", each) for each in descriptors(os.getpid()))


@pytest.mark.needs("real_cpu")
def test_a_flooded_listener_does_not_disturb_other_cells() -> None:
    """Threads that flood it, processes that die while they are heard, signals meanwhile; three cells of
    them, and beside them one whose calls are served as ever."""
    with Sandbox(policy=policy_named("standard"), pool=2) as box:
        box.execute("1 + 1")
        box.settle()
        before = kinds_open()
        results = []
        floods = [
            threading.Thread(target=lambda: results.append(box.execute(FLOOD))) for _ in range(3)
        ]
        for flood in floods:
            flood.start()
        served = [box.execute("1 + 1").value]
        while any(flood.is_alive() for flood in floods):
            served.append(box.execute("1 + 1").value)
        for flood in floods:
            flood.join()
        box.settle()
        assert set(served) == {2}
        for result in results:
            assert result.value == "survived" or result.reason == "violation"
            assert sum(each.count for each in result.violations) > 5000
        assert soon(lambda: kinds_open() == before)


def test_a_listener_that_breaks_ends_its_cell_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(_: Listener) -> None:
        raise RuntimeError("a bug of ours")

    with Sandbox(policy=policy_named("strict"), pool=0) as box:
        box.execute("1")
        before = cgroups_of(os.getpid()), descriptors(os.getpid())
        with monkeypatch.context() as patch:
            patch.setattr(Listener, "answer", breaks)
            with pytest.raises(RuntimeError, match="a bug of ours"):
                box.execute("open('/etc/passwd')")
        assert soon(lambda: (cgroups_of(os.getpid()), descriptors(os.getpid())) == before)
        assert box.execute("1 + 1").value == 2
