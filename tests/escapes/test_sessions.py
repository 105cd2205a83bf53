"""A hostile guest in a session, and bad luck: what one request leaves must not be taken for the next
one's result, and the session, its neighbours and the host go on or say that they do not."""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

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
from cellwright.harness import session as session_module
from cellwright.runner.session import Sessions
from cellwright.runner.workspace import read_file
from tests.conftest import policy_named, soon
from tests.runner.test_leftovers import state


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(policy=policy_named("standard"), pool=2) as box:
        yield box


@pytest.fixture
def session(sandbox: Sandbox) -> Iterator[Session]:
    with sandbox.session() as opened:
        yield opened


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


# Closing while it is in use


def _begun(session: Session) -> Any:
    run = session.start("print('up', flush=True)\nimport time\ntime.sleep(60)")
    assert next(run.output()) == ("stdout", b"up\n")
    return run


def test_closing_ends_what_runs_and_turns_away_who_waits() -> None:
    with Sandbox(policy=policy_named("standard"), pool=0) as sandbox:
        sandbox.session().close()
        before = state(sandbox)
        session = sandbox.session()
        running = _begun(session)
        waiting = [session.start("1") for _ in range(4)]
        assert soon(lambda: len(session._cell._turns._queue) == 4)
        session.close()
        ended = running.result()
        assert (ended.status, ended.stdout, ended.session_lost) == (
            SandboxStatus.CANCELLED, "up\n", True,
        )  # fmt: skip
        for run in waiting:
            with pytest.raises(SessionLost, match="it was closed"):
                run.result()
        del running, waiting, run
        assert soon(lambda: state(sandbox) == before)


def test_closing_the_sandbox_ends_what_runs_in_its_sessions() -> None:
    """Who hears first of the end, that of the program or that of the launcher, is not settled."""
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


def test_a_session_that_is_opened_while_the_sandbox_closes_is_given_back() -> None:
    given_back: list[object] = []
    sessions, custody = Sessions(SessionSettings()), object()
    sessions.close()
    with pytest.raises(ClosedError, match="the sandbox was closed"):
        sessions.admit(custody, (), given_back.append)  # type: ignore[arg-type]
    assert given_back == [custody]


def test_a_process_that_was_forked_from_the_hosts_has_no_part_in_a_session(
    sandbox: Sandbox, session: Session
) -> None:
    session.execute("x = 1")
    pid = os.fork()
    if pid == 0:
        refused = 0
        for attempt in (lambda: session.execute("x = 2"), session.files, sandbox.session):
            try:
                attempt()
            except ClosedError:
                refused += 1
        session.close()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert session.execute("x").value == 1


def test_sessions_are_evicted_after_a_launcher_died() -> None:
    settings = SessionSettings(idle_seconds=0.1)
    with Sandbox(policy=policy_named("strict"), pool=0, sessions=settings) as sandbox:
        first = sandbox.session()
        os.kill(sandbox._supervisor.generation.launcher.pids()[2], signal.SIGKILL)
        assert soon(lambda: bool(first.lost))
        second = sandbox.session()
        assert soon(lambda: bool(second.lost))
        assert "too long" in second.lost
