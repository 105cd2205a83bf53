"""A hostile guest in a session, and bad luck: what one request leaves must not be taken for the next
one's result, and the session, its neighbours and the host go on or say that they do not."""

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cellwright import (
    ClosedError,
    Sandbox,
    SandboxStatus,
    Session,
    SessionLost,
    SessionSettings,
    WorkspaceError,
)
from cellwright.harness.sandbox.sessions import cell_session as session_module
from cellwright.policies.policy import Limits
from cellwright.runner.cells.workspace import read_file
from cellwright.runner.cgroups.cgroup_tree import Cgroup
from cellwright.runner.channel import has_news
from cellwright.runner.messages import Finished, encode
from cellwright.runner.sessions.sessions import Sessions
from cellwright.testing import inspect
from tests.conftest import policy_named, soon
from tests.forked import exit_code_of
from tests.runner.test_leftovers import nothing_left_of


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    policy = policy_named("standard")
    limits = msgspec.structs.replace(policy.limits, processes=128)
    with Sandbox(policy=msgspec.structs.replace(policy, limits=limits), pool=2) as box:
        yield box


# Who answers


def test_a_child_that_comes_to_the_programs_end_answers_nothing(session: Session) -> None:
    """It would answer this request or the next, and take the one after that away from its parent."""
    forks = (
        "import os\nread, write = os.pipe()\npid = os.fork()\nif not pid: os.read(read, 1)\npid > 0"
    )
    assert session.execute(forks).value is True
    assert session.execute("os.write(write, b'x')\nos.waitpid(pid, 0)[1], 'mine'").value == [
        0,
        "mine",
    ]
    assert [session.execute(f"{number}, pid > 0").value for number in range(5)] == [
        [number, True] for number in range(5)
    ]


def test_a_child_ends_with_the_exit_code_of_its_program(session: Session) -> None:
    forks = "import os, sys\npid = os.fork()\nif not pid: sys.exit(7)\nos.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])"
    assert session.execute(forks).value == 7


def test_a_request_that_was_left_is_not_answered_to_the_next(session: Session) -> None:
    """The program goes on when `on_output` raises, as it does when Ctrl-C is pressed on the host."""

    def fail(stream: str, data: bytes) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.execute("print('up', flush=True)\n'of the first'", on_output=fail)
    with pytest.raises(SessionLost, match="request 1 was left: KeyboardInterrupt"):
        session.execute("'of the second'")


# Frames of the guest's own making

NONCE = "0123456789abcdef"  # in place of that of the request, which a Python program can find
FORGED = (
    b"\0" + encode(Finished(b'"forged"', None, None, None, ends_well=True, nonce=NONCE))
).hex()
FORGERIES = {
    "one, and then what is right": "os.write(3, forged)",
    "two": "os.write(3, forged)\nos.write(3, forged)",
    "the beginning of one": "os.write(3, b'\\x01' + forged[1:])",
    "the beginning of one, by a thread after the end": "later(lambda: os.write(3, b'\\x01' + forged[1:]))",
    "one for the next, by a thread after the end": "later(lambda: os.write(3, forged))",
    "one for the next, by a child after the end": "if not os.fork():\n    time.sleep(0.05)\n    os.write(3, forged)\n    os._exit(0)",
    "a thousand": "later(lambda: [os.write(3, forged) for _ in range(1000)])",
}  # fmt: skip
BEFORE = f"""
import os, sys, threading, time
frame = sys._getframe()
while not hasattr(frame.f_locals.get("run"), "nonce"): frame = frame.f_back
forged = bytes.fromhex(given).replace(b"{NONCE}", frame.f_locals["run"].nonce.encode())
def later(do): threading.Timer(0.05, do).start()
"""


@pytest.mark.parametrize("forgery", FORGERIES.values(), ids=FORGERIES)
def test_a_forged_answer_is_never_that_to_a_later_request(session: Session, forgery: str) -> None:
    """Of its own request a program may say anything; then comes a breach, or the session goes on."""
    own = session.execute(f"{BEFORE}{forgery}\n'own'", inputs={"given": FORGED})
    assert own.value in ("own", "forged", None)
    if own.session_lost:
        assert own.reason == "violation"
        return
    assert soon(lambda: has_news(session.cell._held.cell.control.fileno()))
    later = session.execute("'later'")
    assert (later.reason, later.value, later.session_lost) == ("violation", None, True)
    assert "spoke before it was asked" in str(later.error)


BLIND = {  # each sends a frame as one of a cell of single use is: it repeats no nonce
    "python": "import os\nos.write(3, bytes.fromhex('{0}'))",
    "javascript": "require('fs').writeSync(3, Buffer.from('{0}', 'hex'))",
    "bash": "printf '{1}' >&9",
    "sh": "printf '{1}' >&9",
}
AFTER = {"python": "'own'", "javascript": "'own'", "bash": "echo own", "sh": "echo own"}


@pytest.mark.parametrize("language", BLIND)
def test_an_answer_without_the_nonce_of_its_request_ends_the_session(
    sandbox: Sandbox, language: str
) -> None:
    """Else the real answer, which comes later, would be taken for that to the next request."""
    if language == "javascript" and not shutil.which("node"):
        pytest.skip("this host has no node")
    frame = b"\0" + encode(Finished(None, None, None, None, ends_well=True))
    octal = "".join(f"\\{byte:03o}" for byte in frame)
    forgery = BLIND[language].format(frame.hex(), octal)
    with sandbox.session(language=language) as session:
        assert session.execute(AFTER[language]).ok
        forged = session.execute(f"{forgery}\n{AFTER[language]}")
        assert (forged.reason, forged.session_lost) == ("violation", True)
        assert "does not belong to this request" in str(forged.error)
        with pytest.raises(SessionLost):
            session.execute(AFTER[language])


SILENCED = {
    "closed": "os.close(3)",
    "closed, and something else in its place": "os.close(3)\nos.open('f', os.O_CREAT | os.O_RDWR)",
    "a socket to itself in its place": "import socket\na, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)\nos.dup2(a.fileno(), 3)",
    "shut down for writing": "import socket\nsocket.socket(fileno=os.dup(3)).shutdown(socket.SHUT_WR)",
    "shut down for reading": "import socket\nsocket.socket(fileno=os.dup(3)).shutdown(socket.SHUT_RD)",
}  # fmt: skip


@pytest.mark.parametrize("way", SILENCED.values(), ids=SILENCED)
def test_a_session_that_cannot_speak_or_hear_is_lost(session: Session, way: str) -> None:
    ended = session.execute(f"import os\n{way}\n'own'", timeout=1)
    assert ended.value in ("own", None)
    with pytest.raises(SessionLost):
        _ask_until_lost(session)


def _ask_until_lost(session: Session) -> None:
    for number in range(3):
        assert session.execute(f"{number}").value in (number, None)


# Stopping, and printing at the wrong time


def test_a_program_that_stops_itself_is_ended_in_time(session: Session, sandbox: Sandbox) -> None:
    with sandbox.session() as other:
        stopped = session.execute("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", timeout=1)  # fmt: skip
        assert (stopped.reason, stopped.session_lost) == ("wall_time", True)
        assert other.execute("6 * 7").value == 42


def test_a_program_that_stops_itself_between_requests_is_ended_in_time(session: Session) -> None:
    code = "import os, signal, threading\nos.mkfifo('go')\ndef stop():\n    open('go').read(1)\n"
    code += "    os.kill(os.getpid(), signal.SIGSTOP)\nthreading.Thread(target=stop).start()"
    assert session.execute(code).ok
    with told_to_go(session):
        assert soon(lambda: _state_of_guest(session) == "T")
    late = session.execute("1", timeout=0.1)
    assert (late.value, late.reason, late.session_lost) == (None, "wall_time", True)


def _state_of_guest(session: Session) -> str:
    with open(f"/proc/self/fdinfo/{session.cell._held.cell.guest}") as file:
        pid = next(line.split()[1] for line in file if line.startswith("Pid:"))
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_threads_that_print_do_so_for_the_request_that_runs(session: Session) -> None:
    """What was printed when a request ended is in its result, and nothing of it in the next one's."""
    start = """
import os, threading, time
stop, go, said = threading.Event(), threading.Event(), []
def say():
    go.wait()
    while not stop.is_set():
        os.write(1, b"of the threads\\n")
        said.append(1)
threads = [threading.Thread(target=say) for _ in range(64)]
for each in threads: each.start()
"""
    assert session.execute(start).stdout == ""
    noisy = session.execute("go.set()\nwhile len(said) < 500: time.sleep(0.001)\nstop.set()\nfor each in threads: each.join()")  # fmt: skip
    assert noisy.ok
    assert "of the threads\nof the threads\n" in noisy.stdout
    assert [session.execute(f"print({number})").stdout for number in range(5)] == [
        f"{number}\n" for number in range(5)
    ]


def test_a_flood_between_requests_waits_in_the_pipe_and_ends_the_next(session: Session) -> None:
    session.execute("import os, threading\ndef say():\n    while True: os.write(1, b'x' * 65536)\nthreading.Thread(target=say, daemon=True).start()")  # fmt: skip
    flooded = session.execute("import time\ntime.sleep(60)")
    assert (flooded.reason, flooded.session_lost) == ("output", True)
    assert set(flooded.stdout.partition("\n[...")[0]) == {"x"}


# Closing while it is in use


def _begun(session: Session) -> Any:
    run = session.start("print('up', flush=True)\nimport time\ntime.sleep(60)")
    assert next(run.output()) == ("stdout", b"up\n")
    return run


def test_closing_ends_the_running_call_and_refuses_waiting_ones() -> None:
    with Sandbox(policy=policy_named("standard"), pool=0) as sandbox:
        sandbox.session().close()
        with nothing_left_of(sandbox):
            session = sandbox.session()
            running = _begun(session)
            waiting = [session.start("1") for _ in range(4)]
            assert soon(lambda: len(session.cell._concurrency._queue) == 4)
            session.close()
            ended = running.result()
            assert (ended.status, ended.stdout, ended.session_lost) == (
                SandboxStatus.CANCELLED, "up\n", True,
            )  # fmt: skip
            for run in waiting:
                with pytest.raises(SessionLost, match="it was closed"):
                    run.result()
            del running, waiting, run


def test_closing_the_sandbox_ends_what_runs_in_its_sessions() -> None:
    """The end of the program and that of the launcher may be noticed in either order."""
    sandbox = Sandbox(policy=policy_named("standard"), pool=2)
    running = [_begun(sandbox.session()) for _ in range(3)]
    sandbox.close()
    for run in running:
        try:
            assert run.result().status is SandboxStatus.CANCELLED
        except SessionLost as lost:
            assert "the sandbox was closed" in str(lost)


def test_a_download_reads_no_other_sessions_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed meanwhile, a descriptor's number would go to the next that is opened."""

    def close_and_read(workspace: int, path: str, limit: int) -> bytes:
        session.close()
        for other in (sandbox.session(), sandbox.session()):
            other.upload("f", "another's")
        return read_file(workspace, path, limit)

    monkeypatch.setattr(session_module, "read_file", close_and_read)
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        session = sandbox.session()
        session.upload("f", "mine")
        assert session.download("f") == b"mine"
        with pytest.raises(SessionLost):
            session.download("f")


def test_sessions_closed_by_many_threads_at_once_are_closed_once(sandbox: Sandbox) -> None:
    def work() -> None:
        barrier.wait()
        for session in sessions:
            try:
                session.files()
                session.download("none")
            except (SessionLost, WorkspaceError):
                pass
            session.close()

    sessions = [sandbox.session() for _ in range(8)]
    barrier = threading.Barrier(8)
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert {session.lost for session in sessions} == {"it was closed"}
    assert sandbox.execute("1 + 1").value == 2


# Between two requests


def test_what_a_child_attempts_between_two_requests_is_answered_then(session: Session) -> None:
    line = "mkfifo go; (read x <go; cat /etc/shadow; : >done) 2>/dev/null &"
    assert session.run(line, shell=True).ok
    with told_to_go(session):
        assert soon(lambda: "done" in [file.path for file in session.files()])
    (refused,) = session.execute("1").violations
    assert (refused.arguments[0], refused.rule) == ("'/etc/shadow'", "mount_ns: not shown")


def test_a_flood_of_attempts_between_two_requests_ends_the_session(sandbox: Sandbox) -> None:
    code = "import ctypes, os, threading\nos.mkfifo('go')\ndef flood():\n    open('go').read(1)\n"
    code += "    while True: ctypes.CDLL(None).mount(None, None, None, 0, None)\n"
    with sandbox.session() as session:
        session.execute(f"{code}threading.Thread(target=flood, daemon=True).start()")
        with told_to_go(session):
            assert soon(lambda: bool(session.lost))
        assert "too many refused calls between two requests" in session.lost


def test_a_thread_that_opens_without_end_keeps_nobody_waiting(
    sandbox: Sandbox, session: Session
) -> None:
    session.execute(
        "import threading\ndef opens():\n    while True: open('/workspace/x', 'w').close()\n"
        "threading.Thread(target=opens, daemon=True).start()"
    )
    with sandbox.session() as neighbour:
        for _ in range(3):
            assert session.execute("1 + 1").value == 2
            assert neighbour.execute("1 + 1").value == 2


@contextlib.contextmanager
def told_to_go(session: Session) -> Iterator[None]:
    """Write to the pipe `go` in a session's /workspace, without a request."""
    workspace = session.cell._held.cell.workspace  # type: ignore[attr-defined]
    pipe = os.open("go", os.O_RDWR, dir_fd=workspace)
    try:
        os.write(pipe, b"\n")
        yield
    finally:
        os.close(pipe)


def test_a_session_that_is_opened_while_the_sandbox_closes_is_given_back() -> None:
    given_back: list[object] = []
    sessions, held = (
        Sessions(SessionSettings()),
        SimpleNamespace(
            cell=SimpleNamespace(cgroup=Cgroup()),
            listener=None,
            workspace_at_rest=None,
            egress=None,
            plan=SimpleNamespace(language="python"),
        ),
    )
    sessions.close()
    with pytest.raises(ClosedError, match="the sandbox was closed"):
        sessions.admit(held, Limits(), given_back.append)  # type: ignore[arg-type]
    assert given_back == [held]


def test_a_process_that_was_forked_from_the_hosts_has_no_part_in_a_session(
    sandbox: Sandbox, session: Session
) -> None:
    session.execute("x = 1")

    def use() -> None:
        for attempt in (lambda: session.execute("x = 2"), session.files, sandbox.session):
            with pytest.raises(ClosedError):
                attempt()
        session.close()

    assert exit_code_of(use) == 0
    assert session.execute("x").value == 1


def test_sessions_are_evicted_after_a_launcher_died() -> None:
    settings = SessionSettings(idle_seconds=0.1)
    with Sandbox(policy=policy_named("strict"), pool=0, sessions=settings) as sandbox:
        first = sandbox.session()
        os.kill(inspect(sandbox).supervisor.generation.launcher.pids()[2], signal.SIGKILL)
        assert soon(lambda: bool(first.lost))
        second = sandbox.session()
        assert soon(lambda: bool(second.lost))
        assert "too long" in second.lost


# What a program does to the interpreter that the next one needs

TRICKS = {
    "no streams": "import sys\ndel sys.stdout, sys.stderr, sys.stdin",
    "streams that raise": "import sys\nclass Bad:\n    def write(self, t): raise KeyError(t)\n    def flush(self): raise MemoryError\nsys.stdout = sys.stderr = Bad()\n1 / 0",
    "streams that are none": "import sys\nsys.stdout = sys.stderr = sys.stdin = None",
    "closed streams": "import os\nfor number in (0, 1, 2): os.close(number)",
    "no modules": "import sys\nsys.modules.clear()",
    "no linecache": "import linecache\nlinecache.cache.clear()\ndel linecache.getlines",
    "no working directory": "import os\nos.mkdir('d')\nos.chdir('d')\nos.rmdir('../d')",
    "no main": "import sys\ndel sys.modules['__main__']",
    "no names": "globals().clear()",
    "no builtins": "__builtins__ = {}",
    "a hook for tracing": "import sys\nsys.settrace(lambda *_: 1 / 0)\nsys.setprofile(None)",
    "another hook for exceptions": "import sys\nsys.excepthook = sys.displayhook = None\n1 / 0",
    "a full workspace": "open('f', 'wb').truncate(1 << 26)\nwith open('g', 'wb') as file:\n    while True: file.write(bytes(1 << 20))",
    "signals ignored": "import signal\nfor number in range(1, 32):\n    if number not in (9, 19): signal.signal(number, signal.SIG_IGN)",
    "signals blocked": "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))",
    "recursion as deep as it goes": "import sys\nsys.setrecursionlimit(60)\ndef f(): f()\nf()",
    "a loop that is closed": "import asyncio\nawait asyncio.sleep(0)\nasyncio.get_running_loop().stop()",
    "garbage collection that raises": "import gc\ngc.callbacks.append(lambda *_: 1 / 0)\ngc.collect()",
    "our own frames": "import sys\nframe = sys._getframe()\nwhile frame:\n    frame.f_locals.clear()\n    frame = frame.f_back",
    "our own objects": "import gc\nfor each in gc.get_objects():\n    if type(each).__name__ == '_Session': each._handler = None",
}  # fmt: skip


@pytest.mark.parametrize("trick", TRICKS.values(), ids=TRICKS)
def test_what_a_program_does_to_the_interpreter_the_next_one_survives(
    session: Session, sandbox: Sandbox, trick: str
) -> None:
    with sandbox.session() as other:
        other.execute("x = 'untouched'")
        assert session.execute(trick).session_lost is False
        after = session.execute("6 * 7")
        assert (after.value, after.session_lost) == (42, False)
        assert other.execute("x").value == "untouched"


def test_garbage_is_collected(session: Session) -> None:
    """Hours of cycles would fill the session's memory."""
    code = "import weakref\nclass Node: pass\nnode = Node()\nnode.itself = node\ngone = weakref.ref(node)\ndel node\nkept = [[] for _ in range(100_000)]\ngone() is None"
    assert session.execute(code).value is True


FIFOS = {
    "python": "import os\nos.mkfifo('data.csv')",
    "javascript": "require('child_process').execSync('mkfifo data.csv')",
    "bash": "mkfifo data.csv",
    "sh": "mkfifo data.csv",
}


@pytest.mark.parametrize("language", FIFOS)
def test_a_file_for_a_fifo_is_refused_at_once(sandbox: Sandbox, language: str) -> None:
    """Else writing it would wait for a reader until the deadline."""
    if language == "javascript" and not shutil.which("node"):
        pytest.skip("this host has no node")
    with sandbox.session(language=language) as session:
        assert session.execute(FIFOS[language]).ok
        with pytest.raises(WorkspaceError, match="not a regular file|(?i:no such device)"):
            session.upload("data.csv", "1,2")
        session.upload("other.csv", "1,2")
        assert session.download("other.csv") == b"1,2"
