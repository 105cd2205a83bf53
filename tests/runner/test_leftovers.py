"""Nothing is left behind: not by a thousand executions, and not by a supervisor that was killed."""

import contextlib
import gc
import glob
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from cellwright import CellwrightError, HostSettings, PolicyError, Sandbox, SandboxStatus
from cellwright.benchmarks.census import children, descendants
from cellwright.benchmarks.leak_checks import own_temporary_files
from cellwright.policies.errors import LauncherLost
from cellwright.policies.policy import Filesystem
from cellwright.runner.supervisor import Supervisor
from cellwright.testing import inspect
from tests.conftest import OPTIONAL, ROOT, policy_named, soon


def cgroups_of(pid: int) -> set[str]:
    tops = glob.glob(f"/sys/fs/cgroup/**/cellwright-{pid}-*", recursive=True)
    return {*tops, *(cell for top in tops for cell in glob.glob(f"{top}/*/"))}


Held = tuple[Counter[str], Counter[str], Counter[str]]


def held() -> Held:
    """Return the processes by name, cgroups and descriptors that are ours, other sandboxes' included,
    once these are at rest."""
    wait_for_others()
    me = os.getpid()
    names = Counter(map(name_of, descendants(me)))
    return names, Counter(cgroups_of(me)), Counter(descriptors(me))


def wait_for_others() -> None:
    """Wait until nothing is under way: sandboxes of this process fill their pools of their own accord."""
    gc.collect()
    for each in gc.get_objects():
        if isinstance(each, Supervisor) and not each._closed:
            settle(each)


def nothing_more_than(before: Held) -> bool:
    return not any(now - then for now, then in zip(held(), before, strict=True))


def inits_of(sandbox: Sandbox) -> set[int]:
    """Return those that are ready, once their number is what it always is."""
    inspected = inspect(sandbox)
    assert soon(lambda: len(inspected.init_pids()) == 2)
    return set(inspected.init_pids())


def net_namespaces(processes: set[int]) -> set[str]:
    """Return those of `processes`: others on this machine come and go."""
    found = set()
    for pid in processes:
        try:
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
        except OSError:
            continue
    return found


def descriptors(pid: int) -> list[str]:
    found = []
    for link in glob.glob(f"/proc/{pid}/fd/*"):
        try:
            found.append(os.readlink(link).partition(":")[0])
        except OSError:
            continue
    return sorted(found)


def sleeps(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


Census = dict[str, Counter[object]]


def census(sandbox: Sandbox) -> Census:
    """Return everything that an execution could leave, of this process and of its launcher, once nothing
    is under way."""
    wait_for_others()
    launcher = inspect(sandbox).supervisor.generation.launcher.pids()
    processes = {os.getpid(), *descendants(os.getpid())}
    return {
        "processes": Counter(
            map(name_of, processes)
        ),  # each cell takes an init, and another is made
        "cgroups": Counter(cgroups_of(os.getpid())),
        "mounts": mounts(os.getpid()),
        "launcher's mounts": mounts(launcher[2]),
        "net namespaces": Counter(["net"] * len(net_namespaces(processes))),
        "descriptors": Counter(descriptors(os.getpid())),
        "launcher's descriptors": Counter(
            (role, each) for role, pid in enumerate(launcher) for each in descriptors(pid)
        ),
        "temporary files": Counter(os.listdir(tempfile.gettempdir())),
        "files of guests": Counter(
            f"{place}/{MARK}" for place in PLACES if os.path.exists(f"{place}/{MARK}")
        ),
        # Those that wait for another call of a tool go by themselves.
        "threads": Counter(
            each for each in threading.enumerate() if each.name != "cellwright-tool"
        ),
    }


def settle(supervisor: Supervisor) -> None:
    """Wait until its pool is full and its inits are made."""
    supervisor.settle()
    generation = supervisor.generation
    with contextlib.suppress(LauncherLost):
        nursery = generation.launcher.pids()[1]
        wanted = 3 + generation._living if generation.forks else 1  # the launcher, two inits, cells
        soon(lambda: len(children(nursery)) == wanted)


def name_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text()
    return ""


def mounts(pid: int) -> Counter[object]:
    """Return the mounts of a process by id and place (proc_pid_mountinfo(5)).  The rest of a line changes
    with the host: a source that is replaced, as ldconfig(8) does, is "//deleted" from then on."""
    lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    return Counter((fields[0], fields[4]) for fields in map(str.split, lines))


@contextmanager
def nothing_left_of(sandbox: Sandbox) -> Iterator[None]:
    """Fail if what is done meanwhile leaves anything.  What was there before may go: earlier tests may have
    left it to end by itself."""

    def left() -> Census:
        now = census(sandbox)
        more = {kind: now[kind] - before[kind] for kind in now}
        return {kind: found for kind, found in more.items() if found}

    with own_temporary_files():  # others on this machine come and go in /tmp
        before = census(sandbox)
        yield
        assert soon(lambda: not left()), left()


PLACES = ("/tmp", "/dev/shm", "/run")
MARK = f"left-by-a-guest-of-{os.getpid()}"
PROGRAMS = (
    "print('x'); 1 + 1",
    f"open('/workspace/f', 'w').write('x' * 1000); open('/tmp/{MARK}', 'w').write('y')",
    "raise ValueError('no')",
    "import os; os.abort()",
    "import threading; threading.Thread(target=print).start()",
    "import os; os.memfd_create('m'); os.close(3)",
    "import socket; a, b = socket.socketpair()",
    "import os, sys; os.write(1, b'x' * 300_000)",
)


@pytest.mark.slow
def test_a_thousand_executions_leave_nothing() -> None:
    def work(thread: int) -> int:
        for number in range(200):
            code = PROGRAMS[(thread + number) % len(PROGRAMS)]
            sandbox.execute(code, stdin="s", files={"in": b"x"})
        return 200

    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        for code in PROGRAMS:
            sandbox.execute(code)  # makes the objects that are made only once
        with nothing_left_of(sandbox), ThreadPoolExecutor(5) as pool:
            assert sum(pool.map(work, range(5))) == 1000


@pytest.mark.slow
def test_every_violent_end_leaves_nothing() -> None:
    violent = (
        ("import time; time.sleep(60)", {"timeout": 0.05}),
        ("import os, time\nos.write(3, b'garbage'); time.sleep(60)", {}),
        ("import os\nfor _ in range(20):\n    if not os.fork(): __import__('time').sleep(60)", {}),
        ("import os\nif not os.fork():\n    os.setsid()\n    if not os.fork(): __import__('time').sleep(60)", {}),
        ("import os\nwhile True: os.fork()", {"timeout": 0.3}),
        ("import subprocess; subprocess.Popen(['/usr/bin/sleep', '60'])", {}),
    )  # fmt: skip
    with Sandbox(policy=policy_named("standard"), pool=0) as sandbox:
        sandbox.execute("1")
        with nothing_left_of(sandbox):
            for code, given in violent:
                sandbox.execute(code, **given)  # type: ignore[arg-type]
            for _ in range(10):
                run = sandbox.start("import time; print('up', flush=True); time.sleep(60)")
                next(run.output())
                run.cancel()
                assert run.result().status is SandboxStatus.CANCELLED


def test_a_sandbox_that_is_closed_leaves_nothing() -> None:
    with Sandbox(policy=policy_named("strict")) as sandbox:
        sandbox.execute("1")
    gc.collect()
    before = held()
    for _ in range(5):
        with Sandbox(policy=policy_named("strict")) as sandbox:
            sandbox.execute("1")
            assert not nothing_more_than(before)
    assert soon(lambda: nothing_more_than(before))


def test_a_sandbox_that_could_not_be_made_leaves_nothing() -> None:
    before = held()
    for python in ("/nowhere/python3", "/etc/passwd", "/bin/false"):
        for _ in range(3):
            with contextlib.suppress(CellwrightError):
                Sandbox(policy=policy_named("strict"), host=HostSettings(python=python)).close()
    gc.collect()
    assert soon(lambda: nothing_more_than(before))


# A supervisor that was killed

VICTIM = """
import sys
sys.path[:0] = {paths!r}
from cellwright import Sandbox
from tests.conftest import policy_named
sandbox = Sandbox(policy=policy_named("standard"), pool=0)
run = sandbox.start("import os, time\\nos.fork()\\nprint('up', flush=True)\\ntime.sleep(300)")
output = run.output()
next(output)
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def victim() -> Iterator[subprocess.Popen[bytes]]:
    script = VICTIM.format(paths=[str(ROOT), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 30)[0]
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until_ended(pids: list[int], how: dict[int, int]) -> None:
    """Wait on pidfds, five seconds at most for each."""
    for pid, pidfd in how.items():
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        ended = poll.poll(60_000)
        os.close(pidfd)
        assert ended, f"process {pid} of {pids} lives on"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_a_killed_supervisor_takes_everything_along(number: int) -> None:
    with victim() as process:
        pids = descendants(process.pid)
        assert len(pids) >= 6  # keeper, nursery, launcher, init, guest and its child
        pidfds = {pid: os.pidfd_open(pid) for pid in pids}
        os.kill(process.pid, number)
        process.wait(60)
        wait_until_ended(pids, pidfds)


@pytest.mark.needs("cgroup")
def test_the_next_sandbox_sweeps_the_cgroups_of_a_killed_one() -> None:
    with victim() as process:
        pids = descendants(process.pid)
        pidfds = {pid: os.pidfd_open(pid) for pid in pids}
        left = cgroups_of(process.pid)
        assert left
        process.kill()
        process.wait(60)
        wait_until_ended(pids, pidfds)
    with Sandbox(policy=policy_named("strict")):
        assert cgroups_of(process.pid) == set()


def test_a_stopped_launcher_dies_with_its_supervisor_too() -> None:
    with victim() as process:
        pids = descendants(process.pid)
        pidfds = {pid: os.pidfd_open(pid) for pid in pids}
        os.kill(pids[1], signal.SIGSTOP)
        process.kill()
        process.wait(60)
        wait_until_ended(pids, pidfds)


@pytest.mark.skipif("cgroup_memory" in OPTIONAL, reason="the sweep is of cgroups")
@pytest.mark.needs("cgroup")
def test_a_sweep_leaves_the_cgroups_of_a_living_supervisor_alone() -> None:
    with victim() as process:
        before = cgroups_of(process.pid)
        with Sandbox(policy=policy_named("strict")) as sandbox:
            assert sandbox.execute("1 + 1").value == 2
        assert cgroups_of(process.pid) == before


def test_a_sandbox_that_cannot_be_made_leaves_no_launcher() -> None:
    before = descendants(os.getpid())
    shown = Filesystem(read=("/nowhere/at/all",))
    with pytest.raises(PolicyError):
        Sandbox(policy=policy_named("strict", filesystem=shown))
    assert descendants(os.getpid()) == before
