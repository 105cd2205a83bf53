"""Sessions of a sandbox with workers: each stays with its worker, and is what any session is."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cellwright import BusyError, PolicyError, Sandbox, Session, SessionLost
from cellwright.harness.sandbox.workers.worker_sessions import WorkerSession
from cellwright.policies.errors import LauncherLost
from cellwright.runner.audit.log import AuditLog
from cellwright.runner.audit.verification import read, verify
from cellwright.runner.settings import SessionSettings
from tests.conftest import policy_named, soon
from tests.harness.workers.test_workers import pids_of


@pytest.fixture(scope="module")
def two() -> Iterator[Sandbox]:
    def double(n: int) -> int:
        "Return twice the number."
        return 2 * n

    with Sandbox(
        policy=policy_named("workshop"), pool=2, tools=[double], workers=2
    ) as sandbox:  # fmt: skip
        yield sandbox


def worker_of(session: Session) -> int:
    assert isinstance(session, WorkerSession)
    return session.worker.pid


def test_state_stays_from_one_call_to_the_next(two: Sandbox) -> None:
    with two.session() as session:
        session.execute("total = 40")
        assert [session.execute("total += 1; total").value for _ in range(2)] == [41, 42]
        late = session.execute("while True: total += 1", timeout=0.3)
        assert (late.reason, late.session_lost) == ("wall_time", False)
        assert session.execute("total > 45").value is True
        assert session.execute("_").session_id == session.id


def test_sessions_are_spread_and_an_id_finds_its_worker(two: Sandbox) -> None:
    with two.session("a") as first, two.session("b") as second:
        assert {worker_of(first), worker_of(second)} == set(pids_of(two))
        assert two.session("a") is first
        with ThreadPoolExecutor(8) as threads:
            same = list(threads.map(lambda _: two.session("b"), range(8)))
        assert {id(each) for each in same} == {id(second)}
        with pytest.raises(PolicyError, match="runs python"):
            two.session("a", "bash")


def test_files_tools_commands_and_terminals_work(two: Sandbox) -> None:
    with two.session() as session:
        session.upload("in.txt", "given")
        made = session.execute("open('out.txt', 'w').write(open('in.txt').read() * 2)")
        assert [each.path for each in made.files] == ["out.txt"]
        assert session.download("out.txt") == b"givengiven"
        assert sorted(each.path for each in session.files()) == ["in.txt", "out.txt"]
        assert session.execute("from tools import double\ndouble(n=21)").value == 42
        assert session.run(["cat", "in.txt"]).stdout == "given"
        archive = session.snapshot()
        with session.terminal(["echo", "at a terminal"]) as terminal:
            said = b""
            while chunk := terminal.read():
                said += chunk
        assert b"at a terminal" in said
    with two.session() as other:
        other.restore(archive)
        assert other.download("out.txt") == b"givengiven"


def test_forks_and_branches_go_on_from_the_state(two: Sandbox) -> None:
    with two.session() as session:
        session.execute("from tools import double\nn = double(n=2)")
        with session.fork() as fork:
            assert (fork.execute("n").value, fork.diverged, fork.forked_by) == (4, (), "replay")
        copies = session.branch(2)
        assert [each.forked_by for each in copies] == ["memory"] * 2
        for number, each in enumerate(copies):
            assert each.execute(f"n += {number}; n").value == 4 + number
            with each.fork() as again:
                assert again.execute("n").value == 4 + number
            each.close()
        assert session.execute("n").value == 4


def test_a_session_whose_memory_cannot_be_copied_is_branched_by_replay(two: Sandbox) -> None:
    with two.session(language="bash") as shell:
        shell.execute("x=3")
        with pytest.raises(PolicyError, match="cannot be branched by memory"):
            shell.branch(replay=False)
        (branch,) = shell.branch()
        assert (branch.forked_by, bool(branch.not_copied)) == ("replay", True)
        assert branch.execute("echo $x").stdout == "3\n"
        branch.close()


def test_a_paused_session_goes_on_in_its_worker(two: Sandbox) -> None:
    session = two.session()
    session.execute("kept = [1, 2]")
    before, token = worker_of(session), session.pause()
    with pytest.raises(SessionLost):
        session.execute("1")
    with two.resume(token) as resumed:
        assert worker_of(resumed) == before
        assert resumed.execute("kept").value == [1, 2]


def test_a_session_keeps_a_named_workspace(tmp_path: Path) -> None:
    with Sandbox(
        policy=policy_named("strict"), pool=1, workspaces=tmp_path, workers=2
    ) as sandbox:  # fmt: skip
        with sandbox.session(workspace="kept") as session:
            session.execute("open('a.txt', 'w').write('one')")
            assert session.save().state == "saved"
        assert session.workspace
        assert session.workspace.state == "unchanged"
        read_back = sandbox.execute("open('a.txt').read()", workspace="kept")
        assert (read_back.value, sandbox.workspaces.list()) == ("one", ("kept",))
        with pytest.raises(PolicyError, match="no named workspace"), sandbox.session() as plain:
            plain.save()


def test_the_sessions_of_all_workers_are_counted_together() -> None:
    settings = SessionSettings(alive=3)
    with Sandbox(policy=policy_named("strict"), pool=1, sessions=settings, workers=2) as sandbox:
        opened = [sandbox.session() for _ in range(3)]
        with pytest.raises(BusyError, match="3 sessions are alive"):
            sandbox.session()
        opened[0].close()
        sandbox.session().close()


def test_the_session_that_was_idle_longest_of_all_is_evicted() -> None:
    settings = SessionSettings(alive=2, evict=True)
    with Sandbox(policy=policy_named("strict"), pool=1, sessions=settings, workers=2) as sandbox:
        first, second = sandbox.session(), sandbox.session()
        first.execute("1")
        third = sandbox.session()
        assert (bool(first.lost), bool(second.lost), bool(third.lost)) == (False, True, False)


def test_the_sessions_of_a_killed_worker_are_lost_and_recorded(tmp_path: Path) -> None:
    path = tmp_path / "trail.jsonl"
    with (
        AuditLog(path=path) as log,
        Sandbox(policy=policy_named("strict"), pool=1, audit=log, workers=2) as sandbox,
        ThreadPoolExecutor(1) as threads,
    ):
        first, second = sandbox.session("first"), sandbox.session("second")
        began = os.eventfd(0)
        program = "print(flush=True)\nimport time; time.sleep(600)"
        call = threads.submit(
            first.execute, program, on_output=lambda *_: os.eventfd_write(began, 1)
        )
        os.eventfd_read(began)
        os.kill(worker_of(first), signal.SIGKILL)
        assert type(call.exception(60)) is LauncherLost
        with pytest.raises(SessionLost):
            first.execute("1")
        assert first.lost
        assert second.execute("2").value == 2
        assert soon(lambda: len(pids_of(sandbox)) == 2)
        with sandbox.session("first") as again:
            assert again.execute("3").value == 3
        os.close(began)
    assert verify(path).ok
    told = [(each.action, each.details["session_id"]) for each in read(path)
            if each.category == "session"]  # fmt: skip
    assert told.count(("lost", "first")) == 1
    assert told.count(("opened", "first")) == 2
    assert ("closed", "second") in told
