"""Sessions: what stays, what is kept apart, and how one ends."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import msgspec
import pytest

from cellwright import (
    AuditLog,
    BusyError,
    ClosedError,
    LaunchError,
    PolicyError,
    Sandbox,
    SandboxStatus,
    Session,
    SessionLost,
    SessionSettings,
    WorkspaceError,
)
from cellwright.runner.watching import supervision
from cellwright.testing import inspect
from tests.conftest import policy_named, soon

DEAF = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"


def test_it_is_shown_by_its_id_and_language(sandbox: Sandbox) -> None:
    with sandbox.session("mine\x1b") as session:
        assert repr(session) == "<Session 'mine\\x1b': python>"


# What stays


def test_threads_go_on_between_calls(session: Session) -> None:
    session.execute(
        "import threading\nleft = threading.Event()\nt = threading.Thread(target=left.wait)\nt.start()"
    )
    assert session.execute("t.is_alive()").value is True
    assert session.execute("left.set()\nt.join()\nt.is_alive()").value is False


def test_the_value_before_is_underscore(session: Session) -> None:
    assert session.execute("6 * 7").value == 42
    session.execute("y = 1")
    assert session.execute("_ + 1").value == 43


def test_a_list_that_held_itself_is_json_once_it_does_not(session: Session) -> None:
    assert session.execute("x = []; x.append(x); x").value == "[[...]]"
    assert session.execute("x[:] = [1]; [x]").value == [[1]]


def test_await_works_at_the_top_level_and_its_loop_stays(session: Session) -> None:
    session.execute("import asyncio\nasync def later(n):\n    await asyncio.sleep(0)\n    return n")
    assert session.execute("await later(3)").value == 3
    session.execute("task = asyncio.ensure_future(later(4))\nawait asyncio.sleep(0)")
    assert session.execute("[await task for _ in '.'][0]").value == 4


def test_tracebacks_show_lines_of_earlier_calls(session: Session) -> None:
    session.execute("def divide(n):\n    return n / 0  # told")
    failed = session.execute("divide(1)")
    assert (failed.status, failed.reason, failed.session_lost) == (
        SandboxStatus.FAILED, "exception", False,
    )  # fmt: skip
    assert 'File "<cell 1>", line 2, in divide\n    return n / 0  # told' in str(failed.traceback)
    assert 'File "<cell 2>", line 1' in str(failed.traceback)
    assert "cellwright" not in str(failed.traceback)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import sys\nsys.exit()", SandboxStatus.COMPLETED),
        ("import sys\nsys.exit(3)", SandboxStatus.FAILED),
        ("x = = 1", SandboxStatus.FAILED),
        ("raise KeyboardInterrupt", SandboxStatus.FAILED),
        ("import sys\nsys.stdout.close()", SandboxStatus.COMPLETED),
    ],
)
def test_what_a_program_does_to_itself_leaves_the_session(
    session: Session, code: str, status: SandboxStatus
) -> None:
    session.execute("x = 5")
    assert session.execute(code).status is status
    assert session.execute("x").value == 5


def test_input_is_of_one_call_alone(session: Session) -> None:
    assert session.execute("input(), input()", stdin="one\ntwo\nthree\n").value == ["one", "two"]
    assert "EOFError" in str(session.execute("input()").error)
    assert (
        session.execute("import sys\nsys.stdin.read()", stdin="s\u00fc\u00df").value
        == "s\u00fc\u00df"
    )


def test_output_belongs_to_the_call_that_wrote_it(session: Session) -> None:
    assert session.execute("print('one')\nimport os\nos.write(2, b'raw')").stderr == "raw"
    assert session.execute("print('two', end='')").stdout == "two"
    assert session.execute("None").stdout == ""


def test_inputs_and_environment_are_given_and_stay(session: Session) -> None:
    session.execute("pass", inputs={"given": [1]}, env={"GIVEN": "e"})
    assert session.execute("import os\ngiven, os.environ['GIVEN']").value == [[1], "e"]


def test_usage_and_violations_are_of_one_call(session: Session) -> None:
    session.execute("import os\nsum(range(3_000_000))")
    assert session.execute("1").usage.cpu_user_seconds < 0.05
    attempt = (
        "import socket\ntry: socket.socket(socket.AF_PACKET)\nexcept OSError as e: print(e.errno)"
    )
    assert [each.syscall for each in session.execute(attempt).violations] == ["socket"]
    assert session.execute("1").violations == ()
    assert session.execute(attempt).violations[0].count == 1


def test_refused_attempts_are_counted_call_by_call() -> None:
    policy = policy_named("strict")
    limits = msgspec.structs.replace(policy.limits, violations=5)
    attempts = "import socket\nfor _ in range({}):\n    try: socket.socket(socket.AF_PACKET)\n    except OSError: pass"
    with (
        Sandbox(policy=msgspec.structs.replace(policy, limits=limits), pool=0) as sandbox,
        sandbox.session() as session,
    ):
        for _ in range(3):
            assert session.execute(attempts.format(4)).violations[0].count == 4
        flooded = session.execute(attempts.format(7))
        assert (flooded.reason, flooded.session_lost) == ("violation", True)


# Apart from others


def test_a_single_use_cell_sees_nothing_of_a_session(sandbox: Sandbox, session: Session) -> None:
    session.execute("open('/workspace/f', 'w').write('x')")
    assert sandbox.execute("import os\nos.listdir('/workspace')").value == []


def test_calls_from_many_threads_are_served_whole_and_in_order(session: Session) -> None:
    session.execute("log = []")
    begun, asked = [], threading.Lock()

    def call(number: int) -> None:
        with asked:
            begun.append(number)
        code = f"for _ in range(50): log.append({number})"
        assert session.execute(code).ok

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(call, range(24)))
    log = session.execute("log").value
    runs = [log[start] for start in range(0, len(log), 50)]
    assert sorted(runs) == sorted(begun)
    assert all(log[i * 50 : i * 50 + 50] == [number] * 50 for i, number in enumerate(runs))


# Taking too long


def test_a_program_that_does_not_yield_is_killed_and_the_session_is_lost(session: Session) -> None:
    late = session.execute(DEAF, timeout=1)  # deaf by then, on a busy machine too
    assert (late.status, late.reason, late.session_lost) == (
        SandboxStatus.TIMEOUT,
        "wall_time",
        True,
    )
    assert "wall_time" in session.lost
    with pytest.raises(SessionLost, match="request 1 ended it: wall_time"):
        session.execute("1")
    with pytest.raises(SessionLost):
        session.files()


def test_a_program_that_misses_an_interrupt_is_interrupted_again(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two signals that wait together are one, so the first must arrive before the second is sent."""
    monkeypatch.setattr(
        supervision, "_GRACE_SECONDS", 3.0
    )  # a busy machine stops cells for over 1 s
    session.execute("x = 1")
    misses_one = """
import time
try:
    print("up", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("missed")
time.sleep(60)
"""
    run = session.start(misses_one)
    assert next(run.output()) == ("stdout", b"up\n")
    run.cancel()
    ended = run.result()
    assert (ended.stdout, ended.status, ended.session_lost) == (
        "up\nmissed\n",
        SandboxStatus.CANCELLED,
        False,
    )
    assert session.execute("x").value == 1


def test_a_cancelled_call_leaves_the_session(session: Session) -> None:
    session.execute("x = 1")
    run = session.start("print('up', flush=True)\nimport time\ntime.sleep(60)")
    assert next(run.output()) == ("stdout", b"up\n")
    run.cancel()
    assert run.result().status is SandboxStatus.CANCELLED
    assert session.execute("x").value == 1


def test_a_late_interrupt_has_no_effect(session: Session) -> None:
    session.execute("x = 1")
    os.kill(_guest_of(session), signal.SIGINT)
    assert session.execute("x").value == 1
    session.execute(
        "import threading\nt = threading.Thread(target=threading.Event().wait, daemon=True)\nt.start()"
    )
    os.kill(_guest_of(session), signal.SIGINT)
    assert session.execute("x").value == 1


def _guest_of(session: Session) -> int:
    with open(f"/proc/self/fdinfo/{session.cell._held.cell.guest}") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pid:"))


def test_a_handler_of_its_own_decides_what_an_interrupt_does(session: Session) -> None:
    session.execute(
        "import signal\ndef enough(*_): raise ValueError('enough')\nsignal.signal(signal.SIGINT, enough)"
    )
    late = session.execute("while True: pass", timeout=0.2)
    assert (late.status, late.session_lost) == (SandboxStatus.TIMEOUT, False)
    assert "ValueError: enough" in str(late.traceback)


# Ends


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        ("import os\nos._exit(3)", SandboxStatus.FAILED, "exit"),
        ("import os\nos.abort()", SandboxStatus.FAILED, "signal"),
        ("import os\nos.write(3, b'garbage')", SandboxStatus.KILLED, "violation"),
        ("import os\nwhile True: os.write(1, b'x' * 65536)", SandboxStatus.KILLED, "output"),
    ],
)
def test_what_ends_the_process_ends_the_session_and_says_so(
    session: Session, code: str, status: SandboxStatus, reason: str
) -> None:
    ended = session.execute(code)
    assert (ended.status, ended.reason, ended.session_lost) == (status, reason, True)
    with pytest.raises(SessionLost, match=f"request 1 ended it: {reason}"):
        session.execute("1")


@pytest.mark.needs("cgroup")
def test_a_session_out_of_memory_is_lost(session: Session) -> None:
    ended = session.execute("hog = bytearray(1 << 30)")
    assert (ended.reason, ended.session_lost) == ("memory", True)


def test_a_process_that_ends_between_calls_is_noticed(session: Session) -> None:
    session.execute("import os, threading\nthreading.Timer(0, os._exit, [0]).start()")
    with pytest.raises(SessionLost, match=r"ended between two requests|request \d ended it"):
        _call_until_it_fails(session)


def _call_until_it_fails(session: Session) -> None:
    for _ in range(1000):
        session.execute("1")


def test_words_out_of_turn_end_the_session(session: Session) -> None:
    forged = "import os, threading\nthreading.Timer(0.05, os.write, [3, b'\\x00\\x90']).start()"
    session.execute(forged)
    cell = session.cell._held.cell
    assert soon(lambda: bool(__import__("select").select([cell.control], [], [], 0)[0]))
    broken = session.execute("1")
    assert (broken.reason, broken.session_lost) == ("violation", True)
    assert "spoke before it was asked" in str(broken.error)


def test_closing_the_sandbox_ends_its_sessions() -> None:
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        session = sandbox.session()
        session.execute("x = 1")
    with pytest.raises((SessionLost, ClosedError)):
        session.execute("x")


def test_a_session_whose_launcher_died_is_lost() -> None:
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        session = sandbox.session()
        session.execute("x = 1")
        os.kill(inspect(sandbox).launcher_pids().launcher, signal.SIGKILL)
        with pytest.raises((SessionLost, LaunchError)):
            _call_until_it_fails(session)
        with pytest.raises(SessionLost):
            session.execute("x")
        with sandbox.session() as another:
            assert another.execute("1 + 1").value == 2


def test_a_session_is_opened_however_late_the_launcher_died() -> None:
    """The launcher dies before, or while, it is asked for the cell: another one makes it."""
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        for _ in range(12):
            os.kill(inspect(sandbox).launcher_pids().launcher, signal.SIGKILL)
            with sandbox.session() as session:
                assert session.execute("1 + 1").value == 2


# How many, how long


def test_one_session_too_many_takes_the_place_of_the_one_idle_longest() -> None:
    settings = SessionSettings(alive=2, evict=True)
    with Sandbox(policy=policy_named("strict"), pool=0, sessions=settings) as sandbox:
        first, second = sandbox.session(), sandbox.session()
        second.execute("x = 1")
        first.execute("x = 1")
        third = sandbox.session()
        assert (second.lost, first.lost, third.lost) == (
            "it was idle longest, and another one was opened", "", "",
        )  # fmt: skip
        with pytest.raises(SessionLost, match="idle longest"):
            second.execute("x")


def test_one_session_too_many_is_refused_and_no_state_is_lost() -> None:
    settings = SessionSettings(alive=2)
    with Sandbox(policy=policy_named("strict"), pool=0, sessions=settings) as sandbox:
        first, second = sandbox.session(), sandbox.session()
        first.execute("x = 1")
        with pytest.raises(BusyError, match="2 sessions are alive, as many as") as refused:
            sandbox.session()
        assert "evict=True" in refused.value.hint
        assert first.execute("x").value == 1
        second.close()
        assert sandbox.session().execute("1").ok


def test_busy_sessions_are_not_evicted() -> None:
    settings = SessionSettings(alive=1, evict=True)
    with Sandbox(policy=policy_named("strict"), pool=0, sessions=settings) as sandbox:
        run = sandbox.session().start("print('up', flush=True)\nimport time\ntime.sleep(60)")
        next(run.output())
        with pytest.raises(BusyError, match="1 sessions are alive, and each is busy"):
            sandbox.session()
        run.cancel()
        run.result()


def test_a_session_goes_when_its_lifetime_is_over() -> None:
    settings = SessionSettings(lifetime_seconds=0.1)
    with Sandbox(policy=policy_named("strict"), pool=0, sessions=settings) as sandbox:
        session = sandbox.session()
        assert soon(lambda: bool(session.lost))
        with pytest.raises(SessionLost, match="too long"):
            session.execute("1")


def test_a_session_serves_as_many_requests_as_it_may() -> None:
    settings = SessionSettings(requests=2)
    with Sandbox(policy=policy_named("strict"), pool=0, sessions=settings) as sandbox:
        session = sandbox.session()
        session.execute("1")
        session.execute("2")
        with pytest.raises(SessionLost, match="has served 2 requests"):
            session.execute("3")


@pytest.mark.parametrize(
    "settings",
    [SessionSettings(alive=0), SessionSettings(idle_seconds=-1.0), SessionSettings(requests=0)],
)
def test_settings_that_make_no_sense_are_refused(settings: SessionSettings) -> None:
    with pytest.raises(PolicyError, match=r"sessions\."):
        Sandbox(policy=policy_named("strict"), sessions=settings).close()


def test_the_trail_has_sessions_and_which_call_was_whose() -> None:
    log = AuditLog()
    with Sandbox(policy=policy_named("strict"), pool=0, audit=log) as sandbox:
        session = sandbox.session("mine")
        result = session.execute("1")
        session.close()
        lost = sandbox.session()
        lost.execute("import os\nos._exit(0)")
    assert result.session_id == "mine"
    told = [
        (each.category, each.action) for each in log.get_entries() if each.category == "session"
    ]
    assert told == [
        ("session", "opened"),
        ("session", "closed"),
        ("session", "opened"),
        ("session", "lost"),
    ]
    starts = [each for each in log.get_entries() if each.action == "start"]
    assert starts[0].details["session_id"] == "mine"


def test_many_sessions_leave_nothing() -> None:
    from tests.runner.test_leftovers import nothing_left_of

    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        with sandbox.session() as session:
            session.execute("1")
        with nothing_left_of(sandbox):
            for number in range(20):
                with sandbox.session(str(number)) as session:
                    session.execute("import threading\nthreading.Timer(60, print).start()")


def test_an_archive_from_elsewhere_leads_nowhere_else(session: Session) -> None:
    import io
    import tarfile

    for name in ("../out", "/etc/x", "a/../../b"):
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as archive:
            archive.addfile(tarfile.TarInfo(name))
        with pytest.raises(PolicyError, match="is not a plain relative path"):
            session.restore(data.getvalue())
    with pytest.raises(PolicyError, match="not a tar archive"):
        session.restore(b"nothing")
    with pytest.raises(PolicyError, match="together larger than the workspace"):
        session.restore(_archive_of(63 << 20, 2 << 20))
    session.execute("open('full', 'wb').write(bytes(50 << 20))")
    with pytest.raises(WorkspaceError, match="cannot write 0: .*No space left"):
        session.restore(_archive_of(20 << 20))


def _archive_of(*sizes: int) -> bytes:
    import io
    import tarfile

    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for number, size in enumerate(sizes):
            member = tarfile.TarInfo(str(number))
            member.size = size
            archive.addfile(member, io.BytesIO(bytes(size)))
    return data.getvalue()


# Branches


def test_calls_that_failed_or_took_too_long_are_replayed_too(session: Session) -> None:
    session.execute("n = 1\nraise ValueError('told')")
    session.execute("n = 2\nwhile True: pass", timeout=1)
    with session.fork() as branch:
        assert branch.execute("n").value == 2
        assert 1 not in branch.diverged


def test_too_much_to_replay_is_said(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    session.upload("large", b"x" * 1000)
    monkeypatch.setattr(session._life.history, "_left", 10)
    session.execute("x = '" + "x" * 20 + "'")
    with pytest.raises(PolicyError, match="calls of this session take more"):
        session.fork()


def test_variables_count_as_something_to_replay(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session._life.history, "_left", 5000)
    session.execute("1", inputs={"numbers": [1] * 100})
    with session.fork() as branch:
        assert branch.execute("sum(numbers)").value == 100
    session.execute("1", inputs={"numbers": [1] * 100, "more": {"text": "x" * 3000}})
    with pytest.raises(PolicyError, match="calls of this session take more"):
        session.fork()


def test_a_fork_is_given_what_the_calls_were_given_then(session: Session) -> None:
    numbers = [1, 2]
    session.execute("total = sum(numbers)", inputs=MappingProxyType({"numbers": numbers}))
    numbers.append(3)
    with session.fork() as branch:
        assert branch.execute("total, numbers").value == [3, [1, 2]]


def test_a_fork_replays_a_call_with_a_plain_value(session: Session) -> None:
    given = "import datetime\ndatetime.date(2026, 1, 2)"
    assert session.execute(given, plain=True).value == "2026-01-02"
    assert session.execute(given).value != "2026-01-02"
    with session.fork() as branch:
        assert branch.diverged == ()


def test_a_fork_replays_in_the_order_in_which_calls_ran(session: Session) -> None:
    session.execute("log = []")
    with ThreadPoolExecutor(8) as threads:
        list(
            threads.map(
                lambda number: session.execute(f"log.append({number})\nlen(log)"), range(40)
            )
        )
    with session.fork() as branch:
        assert branch.diverged == ()
        assert branch.execute("log").value == session.execute("log").value


def test_a_call_that_never_began_is_not_replayed(session: Session) -> None:
    run = session.start("print('up', flush=True)\nimport time\ntime.sleep(60)")
    next(run.output())
    waiting = session.start("x = 1")
    waiting.cancel()
    assert waiting.result().error == "cancelled while it waited"
    run.cancel()
    run.result()
    assert len(session._life.history.calls()) == 1
