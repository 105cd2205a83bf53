"""Somebody is killed, or stopped, in the middle: what was asked for fails with an error of ours or is done
right, what is asked for next is done right, and nothing is left."""

import contextlib
import errno
import gc
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from cellwright import CellwrightError, Sandbox, SandboxStatus
from cellwright.runner.cells import held_cell
from cellwright.runner.cgroups.cgroup_tree import processes_in
from cellwright.testing import inspect
from tests.conftest import ROOT, policy_named, soon
from tests.escapes.live_cell import children
from tests.faults.inject import policy
from tests.faults.injection import Call, Injector, injecting, line_of
from tests.runner.test_leftovers import (
    cgroups_of,
    descendants,
    held,
    nothing_more_than,
)

pytestmark = pytest.mark.needs("root")

SETTING_UP = (
    Call("keeper", "unshare", 0), Call("keeper", "clone", 0), Call("nursery", "mount", 0), Call("nursery", "pivot_root", 0),
    Call("nursery", "capset", 0), Call("launcher", "sendto", 0),
)  # fmt: skip
MAKING_A_CELL = (
    Call("launcher", "clone3", 0), Call("guest", "close_range", 0), Call("guest", "fsmount", 2), Call("guest", "seccomp", 0),
    Call("guest", "sendto", 0), Call("guest", "recvfrom", 0), Call("launcher", "wait4", 0),
)  # fmt: skip
NAMES = sorted({call.name for call in (*SETTING_UP, *MAKING_A_CELL)})
ROLES = ("keeper", "nursery", "launcher", "guest")


class Trap:
    """Does something once, when a certain call is made, while its caller waits."""

    def __init__(self) -> None:
        self._wanted: Call | None = None
        self.sprung = threading.Event()

    def arm(self, call: Call, act: Callable[[list[int]], int | None]) -> None:
        """Wait for a call; `before` counts from now.  `act` is given the caller's line, and may return an
        errno with which the call is to fail."""
        self._act, self._left = act, call.before
        self.sprung.clear()
        self._wanted = call

    def __call__(self, call: Call, pid: int) -> int:
        wanted = self._wanted
        if wanted and call[:2] == wanted[:2]:
            if not self._left:
                self._wanted = None
                number = self._act(line_of(pid, self.supervisor))
                self.sprung.set()
                return number or 0
            self._left -= 1
        return 0

    supervisor = os.getpid()


def send(number: int, role: str, pidfds: list[int] | None = None) -> Callable[[list[int]], None]:
    """Return what sends a signal to one of a line, or to every init, and notes who they are."""

    def act(line: list[int]) -> None:
        victims = (
            [pid for pid in children(line[1]) if pid not in line]
            if role == "init"
            else [line[ROLES.index(role)]]
        )
        for pid in victims:
            if pidfds is not None:
                pidfds.append(os.pidfd_open(pid))
            os.kill(pid, number)

    return act


def wait_for_all(pidfds: list[int]) -> None:
    """Wait until they have ended, and close them."""
    for pidfd in pidfds:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(10_000)
        os.close(pidfd)


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    gc.collect()
    before = held()
    yield
    gc.collect()
    assert soon(lambda: nothing_more_than(before))


def there_by(call: Call) -> tuple[str, ...]:
    """Return who lives when `call` is made."""
    return ROLES[: ROLES.index(call.role) + 1]


@pytest.mark.parametrize("call", SETTING_UP, ids=lambda call: f"{call.role} {call.name}")
def test_a_process_killed_while_a_launcher_is_set_up_leaves_nothing(call: Call) -> None:
    for victim in there_by(call):
        trap = Trap()
        with nothing_left(), injecting(NAMES, trap):
            trap.arm(call, send(signal.SIGKILL, victim))
            with contextlib.suppress(CellwrightError), Sandbox(policy=policy(), pool=0) as box:
                assert box.execute("1 + 1").value == 2
            assert trap.sprung.is_set()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [*ROLES, "init"])
def test_a_process_killed_while_a_cell_is_made_and_used_leaves_nothing(victim: str) -> None:
    trap = Trap()
    with nothing_left(), injecting(NAMES, trap), Sandbox(policy=policy(), pool=0) as box:
        assert box.execute("1 + 1").value == 2
        for call in MAKING_A_CELL:
            if victim not in (*there_by(call), "init"):
                continue
            ends: list[int] = []
            trap.arm(call, send(signal.SIGKILL, victim, ends))
            with contextlib.suppress(CellwrightError):
                result = box.execute("1 + 1")
                right = (SandboxStatus.COMPLETED, 2)
                killed = (SandboxStatus.FAILED, None)  # by a signal, as the kernel told
                # The signal may come while the guest's last word is sent: then that was heard.
                told = (SandboxStatus.FAILED, 2) if call.name == "sendto" else killed
                assert (result.status, result.value) in (right, killed, told), call
            assert trap.sprung.is_set(), call
            wait_for_all(ends)  # on a busy processor who was killed may live a moment longer
            assert box.execute("2 + 2").value == 4, call


@pytest.mark.parametrize("victim", ["init", "its parent"])
def test_an_init_that_is_killed_before_its_namespaces_are_open_is_passed_over(victim: str) -> None:
    """Before, the nursery ended, and every cell with it."""

    def act(line: list[int]) -> None:
        (pid,) = children(line[-1]) if victim == "init" else line[-1:]
        pidfd = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        wait_for_all([pidfd])

    trap = Trap()
    with nothing_left(), injecting(["openat"], trap), Sandbox(policy=policy(), pool=0) as box:
        assert box.execute("1 + 1").value == 2
        pids = inspect(box).supervisor.generation.launcher.pids()
        trap.arm(Call("nursery", "openat", 2), act)  # some of its namespaces are open already
        assert [box.execute("1 + 1").value for _ in range(4)] == [2] * 4
        assert trap.sprung.is_set()
        assert inspect(box).supervisor.generation.launcher.pids() == pids


@pytest.mark.parametrize(
    ("name", "before", "number"),
    [("sendto", 0, errno.EPIPE), ("sendto", 0, errno.ECONNRESET), ("recvmsg", 1, errno.ECONNRESET)],
)
def test_a_launcher_whose_nursery_hangs_up_is_replaced(name: str, before: int, number: int) -> None:
    """Its first sign is an error of their socket: the kernel kills the launcher a moment later.  Before, that
    error was told of the cell."""
    trap = Trap()
    with nothing_left(), injecting([name], trap), Sandbox(policy=policy(), pool=0) as box:
        assert box.execute("1 + 1").value == 2
        lost = inspect(box).supervisor.generation
        trap.arm(Call("launcher", name, before), lambda line: number)
        assert box.execute("1 + 1").value == 2
        assert trap.sprung.is_set()
        assert inspect(box).supervisor.generation is not lost


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "victim"),
    [
        (Call("launcher", "clone3", 0), "launcher"), (Call("launcher", "clone3", 0), "nursery"),
        (Call("guest", "seccomp", 0), "guest"), (Call("guest", "seccomp", 0), "init"), (Call("guest", "seccomp", 0), "keeper"),
    ],
)  # fmt: skip
def test_a_launcher_that_stops_answering_is_replaced(
    call: Call, victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, every call after it waited as long as the first, and failed."""
    monkeypatch.setattr(held_cell, "_SETUP_SECONDS", 3.0)
    monkeypatch.setattr(held_cell, "_REAP_SECONDS", 3.0)
    trap = Trap()
    with nothing_left(), injecting(NAMES, trap), Sandbox(policy=policy(), pool=0) as box:
        assert box.execute("1 + 1").value == 2
        trap.arm(call, send(signal.SIGSTOP, victim))
        assert box.execute("1 + 1").value == 2
        assert trap.sprung.is_set()
        assert box.execute("2 + 2").value == 4


@pytest.mark.parametrize("victim", ["launcher", "nursery"])
def test_a_launcher_stopped_while_a_program_runs_is_replaced(
    victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_cell, "_REAP_SECONDS", 1.0)
    with nothing_left(), Sandbox(policy=policy_named("strict"), pool=0) as box:
        run = box.start("import threading; print('up', flush=True); threading.Event().wait(60)")
        assert next(run.output(), None)
        pids = inspect(box).supervisor.generation.launcher.pids()
        os.kill(pids[ROLES.index(victim)], signal.SIGSTOP)
        run.cancel()
        with contextlib.suppress(CellwrightError):  # the error says that its end cannot be observed
            assert run.result().status is SandboxStatus.CANCELLED
        assert box.execute("2 + 2").value == 4


def test_a_stopped_program_runs_into_its_deadline() -> None:
    with nothing_left(), Sandbox(policy=policy_named("strict"), pool=0) as box:
        code = "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"
        result = box.execute(code, timeout=0.3)
        assert (result.status, result.reason) == (SandboxStatus.TIMEOUT, "wall_time")


# a supervisor that is killed

SUPERVISOR = """
import sys
sys.path[:0] = {paths!r}
import pytest
from cellwright import Sandbox
from tests.faults.inject import policy
from tests.faults.injection import ask_through
with pytest.MonkeyPatch.context() as patch:
    ask_through({channel}, {names!r}, patch)
    with Sandbox(policy=policy(), pool=0) as box:
        box.execute("1 + 1")
"""


def kill_the_supervisor_at(call: Call) -> int:
    trap, ends = Trap(), list[int]()

    def act(line: list[int]) -> None:
        for pid in descendants(trap.supervisor):
            ends.append(os.pidfd_open(pid))
        os.kill(trap.supervisor, signal.SIGKILL)

    injector = Injector(trap)
    try:
        channel = injector.theirs.fileno()
        script = SUPERVISOR.format(paths=[str(ROOT), *sys.path], channel=channel, names=[call.name])
        command = [sys.executable, "-I", "-c", script]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[channel]) as victim:
            trap.supervisor = injector.supervisor = victim.pid
            trap.arm(call, act)
            assert victim.wait(60) == -signal.SIGKILL
        assert trap.sprung.wait(10)
        wait_for_all(ends)
        return victim.pid
    finally:
        injector.close()


@pytest.mark.parametrize(
    "call", [*SETTING_UP[::3], *MAKING_A_CELL[::3]], ids=lambda call: f"{call.role} {call.name}"
)
def test_a_supervisor_that_is_killed_takes_everything_along_and_is_swept_after(call: Call) -> None:
    killed = kill_the_supervisor_at(call)
    # A keeper that was about to fork still does: what it forks ends when it finds no supervisor.
    assert soon(lambda: not any(map(processes_in, cgroups_of(killed))))
    with Sandbox(policy=policy_named("strict"), pool=0) as box:
        assert box.execute("1 + 1").value == 2
    assert cgroups_of(killed) == set()
