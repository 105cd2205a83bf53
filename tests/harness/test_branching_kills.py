"""Kills at each step of a branch, a pause and a resumption: of the session's process, of the fresh
cell's, of the branching process and of the supervisor.

The branching process stops itself before the step, and goes on once the victim is dead.
"""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cellwright import HostSettings, PauseSettings, PolicyError, Sandbox, Session, SessionLost
from cellwright.benchmarks.census import Census, count
from cellwright.benchmarks.leak_checks import more, own_temporary_files, settled
from cellwright.errors import PauseError
from cellwright.runner import channel
from cellwright.runner.cells.held_cell import HeldCell
from cellwright.runner.confined.confined_process import ConfinedProcess
from cellwright.runner.sessions import branches
from cellwright.runner.sessions.branches import BranchingProcess
from tests.conftest import ROOT, policy_named, soon
from tests.harness.test_branching import box_process
from tests.runner.branching.stopping import module_that_stops
from tests.runner.test_leftovers import cgroups_of, descendants, wait_until_ended

BRANCH = [
    ("copying", each)
    for each in (
        "checked", "require_copyable", "lay_out", "copy_state", "copy_pages", "copy_limits",
        "require_equal", "Traced.become", "Traced.close",
    )
]  # fmt: skip
PAUSE = [("keeping", each) for each in ("checked", "_keep_pages", "files_of", "Traced.close")]
RESUME = [
    ("keeping", each)
    for each in (
        "state_of", "require_copyable", "lay_out", "files_of", "copy_state", "_restore_pages",
        "copy_limits", "require_equal", "Traced.become", "Traced.close",
    )
]  # fmt: skip
KINDS = {"branch": BRANCH, "pause": PAUSE, "resume": RESUME}
# A source is killed in a branch and a pause, a fresh cell's process in a branch and a resumption.
VICTIMS = {"branch": ("source", "target", "process"), "pause": ("source", "process"),
           "resume": ("target", "process")}  # fmt: skip
CASES = [
    (kind, whom, *step) for kind, steps in KINDS.items() for whom in VICTIMS[kind] for step in steps
]
ERRORS = PolicyError, PauseError, SessionLost
SECONDS = 30.0
# Others on the host make and free some meanwhile, and the tests themselves take memory.
NOT_COMPARED = {"ipc_objects", "dying_cgroups", "memory_mib"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("paused")


@pytest.fixture(scope="module")
def sandbox(directory: Path) -> Iterator[Sandbox]:
    settings = PauseSettings(directory)
    with (
        own_temporary_files(),
        Sandbox(policy=policy_named("strict"), pool=1, host=HostSettings(pauses=settings)) as box,
    ):
        yield box


class Stopping:
    """The branching process as one that stops at a step, and what it works on."""

    def __init__(self, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
        self._sandbox = sandbox
        self._patch = monkeypatch
        self._started: queue.Queue[int] = queue.Queue()
        self.victims: dict[str, int] = {}  # pidfds

    def use(self, module: str, step: str) -> None:
        """Let the next branching process be one that stops."""
        process = box_process(self._sandbox)
        with process._process.lock:
            process._process.end()
        self._patch.setattr(branches, "_MODULE", module_that_stops(module, step))
        self._record("branch", lambda source, targets, *_: (source, targets[0]))
        self._record("keep", lambda held, *_: (held, None))
        self._record("restore", lambda fresh, *_: (None, fresh))
        start = BranchingProcess._start

        def told(process: BranchingProcess, seccomp_filter: bytes) -> ConfinedProcess:
            made = start(process, seccomp_filter)
            self._patch.setattr(branches, "_MODULE", branching_process_module)
            self._started.put(made.pid)
            return made

        self._patch.setattr(BranchingProcess, "_start", told)

    def _record(self, name: str, cells: Callable[..., tuple[HeldCell | None, ...]]) -> None:
        wrapped = getattr(BranchingProcess, name)

        def record(process: BranchingProcess, *given: Any) -> None:
            for whom, held in zip(("source", "target"), cells(*given), strict=True):
                if held is not None and whom not in self.victims:
                    self.victims[whom] = os.dup(held.cell.guest)
            wrapped(process, *given)

        self._patch.setattr(BranchingProcess, name, record)

    def kill(self, whom: str) -> None:
        """Wait until the process stops, kill the victim, and have the process go on."""
        pid = self._started.get(timeout=SECONDS)
        stopped = os.waitid(os.P_PID, pid, os.WSTOPPED)
        assert stopped
        assert stopped.si_status == signal.SIGSTOP
        self.victims["process"] = os.pidfd_open(pid)
        signal.pidfd_send_signal(self.victims[whom], signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def close(self) -> None:
        while self.victims:
            os.close(self.victims.popitem()[1])
        self._patch.undo()


branching_process_module = branches._MODULE


@pytest.fixture
def stopping(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stopping]:
    made = Stopping(sandbox, monkeypatch)
    yield made
    made.close()


def outcome_of(run: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run it in a thread; the list gets what it returns, or one of ERRORS."""
    outcome: list[Any] = []

    def keep() -> None:
        try:
            outcome.append(run())
        except ERRORS as error:
            outcome.append(error)

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    return thread, outcome


@pytest.fixture(scope="module")
def before(sandbox: Sandbox) -> Census:
    """What there is once a branch, a pause and a resumption are over."""
    with sandbox.session() as session:
        session.execute("x = 41")
        session.branch()[0].close()
        token = session.pause()
    with sandbox.resume(token):
        pass
    return settled(sandbox.settle)


@pytest.mark.parametrize(("kind", "whom", "module", "step"), CASES)
def test_a_kill_at_a_step_harms_nothing_else_and_leaves_nothing(
    sandbox: Sandbox, directory: Path, stopping: Stopping, before: Census,
    kind: str, whom: str, module: str, step: str,
) -> None:  # fmt: skip
    with sandbox.session() as source:
        source.execute("x = 41")
        token = source.pause() if kind == "resume" else ""
        stopping.use(module, step)
        runs: dict[str, Callable[[], Any]] = {
            "branch": lambda: source.branch(replay=False)[0],
            "pause": source.pause,
            "resume": lambda: sandbox.resume(token),
        }
        thread, outcome = outcome_of(runs[kind])
        stopping.kill(whom)
        thread.join(SECONDS)
        stopping.close()
        (ended,) = outcome  # a value or a typed error, and no other
        checks = {"branch": _check_branch, "pause": _check_pause, "resume": _check_resume}
        checks[kind](sandbox, source, whom, ended, token)
        with sandbox.session() as fresh, fresh.branch(replay=False)[0] as again:
            assert again.forked_by == "memory"
    assert not list(directory.iterdir())
    assert soon(lambda: not left_since(sandbox, before)), left_since(sandbox, before)


def left_since(sandbox: Sandbox, before: Census) -> dict[str, float]:
    sandbox.settle()
    left = more(before, count())
    return {name: left[name] for name in left.keys() - NOT_COMPARED}


def value(session: Session) -> object:
    return session.execute("x").value


def is_lost(session: Session) -> bool:
    try:
        return session.execute("x").session_lost
    except SessionLost:
        return True


def _check_source(source: Session, whom: str) -> None:
    if whom == "source":
        assert is_lost(source)
    else:
        assert value(source) == 41


def _check_branch(sandbox: Sandbox, source: Session, whom: str, ended: object, token: str) -> None:
    _check_source(source, whom)
    if isinstance(ended, Session):  # it was done, but for the one that was killed
        with ended:
            if whom == "target":
                assert is_lost(ended)
            else:
                assert value(ended) == 41
    else:
        assert isinstance(ended, PolicyError | SessionLost)


def _check_pause(sandbox: Sandbox, source: Session, whom: str, ended: object, token: str) -> None:
    if isinstance(ended, str):
        with sandbox.resume(ended) as resumed:
            assert value(resumed) == 41
    else:
        assert isinstance(ended, PauseError | SessionLost)
        _check_source(source, whom)


def _check_resume(sandbox: Sandbox, source: Session, whom: str, ended: object, token: str) -> None:
    if isinstance(ended, Session):
        with ended:
            if whom == "target":
                assert is_lost(ended)
            else:
                assert value(ended) == 41
    else:  # the token can be used again
        assert isinstance(ended, PauseError | SessionLost)
        with sandbox.resume(token) as again:
            assert value(again) == 41


SUPERVISOR = """
import os, signal, sys, threading
from cellwright import HostSettings, PauseSettings, Sandbox
from cellwright.runner.sessions import branches as branching_process
from cellwright.runner.sessions.branches import BranchingProcess
from tests.conftest import policy_named
from tests.runner.branching.stopping import module_that_stops

kind, module, step, directory = sys.argv[1:]
start, pids = BranchingProcess._start, []

def told(*given):
    made = start(*given)
    pids.append(made.pid)
    began.set()
    return made

began = threading.Event()
with Sandbox(policy=policy_named("strict"), pool=1, host=HostSettings(pauses=PauseSettings(directory))) as box:
    session = box.session()
    session.execute("x = 1")
    if kind == "resume":
        token = session.pause()
        with box._cells._branching._process.lock:
            box._cells._branching._process.end()
    BranchingProcess._start = told
    branching_process._MODULE = module_that_stops(module, step)
    runs = {"branch": session.branch, "pause": session.pause, "resume": lambda: box.resume(token)}
    threading.Thread(target=runs[kind], daemon=True).start()
    began.wait(30)
    os.waitid(os.P_PID, pids[0], os.WSTOPPED)
    print(pids[0], flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "module", "step"), [(kind, *step) for kind, steps in KINDS.items() for step in steps]
)
def test_a_supervisor_that_is_killed_at_a_step_leaves_nothing(
    tmp_path: Path, kind: str, module: str, step: str
) -> None:
    command = [sys.executable, "-c", SUPERVISOR, kind, module, step, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment
    ) as supervisor:
        assert supervisor.stdout
        assert channel.has_news(supervisor.stdout.fileno(), SECONDS)
        branching = int(supervisor.stdout.readline())
        pids = descendants(supervisor.pid)
        assert branching in pids
        assert len(pids) >= 5  # keeper, nursery, launcher, inits, guests
        pidfds = {pid: os.pidfd_open(pid) for pid in pids}
        stopped = os.dup(pidfds[branching])
        supervisor.kill()
    signal.pidfd_send_signal(stopped, signal.SIGCONT)
    os.close(stopped)
    wait_until_ended(pids, pidfds)
    left = [each.name for each in tmp_path.rglob("*") if not each.name.endswith(".session")]
    assert left == [] or kind == "pause"
    assert len(list(tmp_path.glob("*.session"))) == (kind == "resume")
    with Sandbox(policy=policy_named("strict"), pool=0):  # the new sandbox sweeps
        assert cgroups_of(supervisor.pid) == set()
