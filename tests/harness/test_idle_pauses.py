"""Idle sessions: they go to disk by a policy of idle time and memory, come back with any request as they
were, and stay as they are where that fails."""

import contextlib
import gc
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellwright import (
    AuditLog,
    HostSettings,
    PauseSettings,
    PolicyError,
    PoolSettings,
    Sandbox,
    Session,
    SessionLost,
    SessionSettings,
)
from cellwright.errors import PauseDiffers, PauseError, SessionExpired
from cellwright.harness.sandbox.sessions.life import SessionLife
from cellwright.harness.sandbox.sessions.pausing import Pausing
from cellwright.runner.sessions.branches import BranchingProcess
from cellwright.testing import inspect
from tests.conftest import Clock, policy_named, soon
from tests.harness.test_branching import REFUSED, STATES, value

NEVER = 1_000_000.0
PAUSES = SessionSettings(pause_seconds=NEVER)
MEBIBYTE = 1 << 20


def sandbox_at(directory: Path, sessions: SessionSettings = PAUSES, **given: Any) -> Sandbox:
    host = HostSettings(
        pauses=given.pop("pauses", PauseSettings(directory)), pausable=given.pop("pausable", False)
    )
    policy = policy_named(given.pop("policy", "strict"))
    return Sandbox(policy=policy, sessions=sessions, host=host, **{"pool": 1, **given})


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("idle")


@pytest.fixture(scope="module")
def sandbox(directory: Path) -> Iterator[Sandbox]:
    with sandbox_at(directory) as box:
        yield box


def states(directory: Path) -> list[str]:
    return sorted(each.name for each in directory.rglob("*.session"))


def pause(session: Session) -> bool:
    """Pause a session as if it had been idle for long; tell whether it is paused."""
    session._life.try_to_pause("it was idle")  # type: ignore[attr-defined]
    return session.paused


def paused(session: Session, code: str = "x = 1") -> Session:
    assert session.execute(code).ok
    assert pause(session)
    assert session.cell.lost == "it was idle"  # type: ignore[attr-defined]
    assert session.lost == session.expired == ""
    return session


def value_of(session: Session) -> object:
    with session:
        return value(session, "x")


REQUESTS: dict[str, Callable[[Sandbox, Session], object]] = {
    "execute": lambda _, session: value(session, "x"),
    "files": lambda _, session: session.files(),
    "download": lambda _, session: session.download("data"),
    "upload": lambda _, session: session.upload("more", b"1"),
    "snapshot": lambda _, session: len(session.snapshot()) > 0,
    "extend": lambda _, session: session.extend(5.0),
    "branch": lambda _, session: [value_of(each) for each in session.branch(2)],
    "fork": lambda _, session: value_of(session.fork()),
    "the same id": lambda box, session: value(box.session(session.id), "x"),
}  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
def test_a_paused_session_comes_back_with_any_request(
    sandbox: Sandbox, directory: Path, name: str
) -> None:
    with sandbox.session() as session, sandbox.session() as twin:
        for each in (session, twin):
            each.execute("x = 5; n = open('data', 'w').write('kept')")
        assert pause(session)
        assert len(states(directory)) == 1
        answers = [REQUESTS[name](sandbox, each) for each in (twin, session)]
        assert answers[0] == answers[1]
        assert value(session, "x") == 5
        assert not session.paused
    assert states(directory) == []


@pytest.mark.parametrize("name", STATES)
def test_a_session_goes_on_as_a_twin_that_was_never_paused(sandbox: Sandbox, name: str) -> None:
    make, show = STATES[name]
    with sandbox.session() as twin, sandbox.session() as session:
        for each in (twin, session):
            if "import random; random.random()" in make:
                each.execute("import random; random.seed(5)")
            assert each.execute(make).ok or not make
        answers = []
        for _ in range(2):
            assert pause(session)
            answers.append([value(each, show) for each in (twin, session)])
        assert [one for one, _ in answers] == [other for _, other in answers]


def test_the_thread_pauses_what_is_idle_for_so_long(tmp_path: Path) -> None:
    log = AuditLog()
    with sandbox_at(tmp_path, SessionSettings(pause_seconds=0.05), audit=log) as box:
        session = box.session(id="told")
        session.execute("x = 1")
        assert soon(lambda: session.paused)
        assert len(states(tmp_path)) == 1
        result = session.execute("x")
        assert result.value == 1
        assert 0 < result.phases.resume < result.execution_time
        session.close()
    told = [(each.action, each.target) for each in log.get_entries() if each.category == "session"]
    assert told[:3] == [
        ("opened", ""), ("paused", "it was idle for 0.05 s"), ("resumed", "a request came"),
    ]  # fmt: skip
    assert told[-1] == ("closed", "it was closed")
    ends = [each for each in log.get_entries() if "resume_seconds" in each.details]
    assert ends


def test_a_session_that_was_there_took_no_time_to_resume(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        assert session.execute("1").phases.resume == 0.0


@pytest.fixture
def keeps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the attempts to keep a session."""
    made: list[int] = []
    keep = Pausing._keep

    def counted(*given: Any, **named: Any) -> Any:
        made.append(1)
        return keep(*given, **named)

    monkeypatch.setattr(Pausing, "_keep", counted)
    return made


@pytest.mark.needs("cgroup")
@pytest.mark.parametrize("why", ["threads", "a socket"])
def test_what_cannot_be_paused_stays_frozen_and_is_tried_once(
    sandbox: Sandbox, directory: Path, keeps: list[int], why: str
) -> None:
    with sandbox.session() as session:
        assert session.execute(REFUSED[why] + "\nkept = 7").ok
        if session.freeze():
            used_at = session.cell.clock.used_at  # type: ignore[attr-defined]
            for _ in range(3):
                assert not pause(session)
            assert session.cell.is_frozen  # type: ignore[attr-defined]
            assert session.cell.clock.used_at == used_at  # type: ignore[attr-defined]
        else:
            assert not pause(session)
        assert len(keeps) == 1
        assert value(session, "kept") == 7
        assert not pause(session)
        assert len(keeps) == 2
    assert states(directory) == []


def test_a_session_that_is_used_is_not_paused(tmp_path: Path) -> None:
    with sandbox_at(tmp_path, policy="workshop") as box, box.session() as session:
        session.execute("x = 1")
        with session.expose(8000):
            assert not pause(session)
        session.execute("x")
        assert pause(session)
        with session.expose(8000):
            assert not session.paused
        session.execute("x")
        assert pause(session)
        with session.terminal(["sh"]) as terminal:
            assert not session.paused
            assert not pause(session)
            assert terminal.fileno() >= 0


def test_a_session_with_a_named_workspace_is_not_paused(tmp_path: Path) -> None:
    with (
        sandbox_at(tmp_path / "p", workspaces=tmp_path / "w") as box,
        box.session(workspace="named") as session,
    ):
        session._life.on_idle("it was idle")  # type: ignore[attr-defined]
        assert session.lost == ""
        assert not session.paused


def test_opening_one_too_many_pauses_before_it_evicts(tmp_path: Path) -> None:
    with sandbox_at(tmp_path, SessionSettings(alive=2, pause_seconds=NEVER)) as box:
        stuck, first = box.session(), box.session()
        stuck.execute(REFUSED["threads"])
        first.execute("x = 1")
        with box.session() as second:  # the stuck one was idle longest
            assert (stuck.lost, first.paused) == ("", True)
            second.execute(REFUSED["threads"])
            assert value(first, "x") == 1  # neither of the others can be paused
            assert "another one was opened" in stuck.lost
        assert box._state().sessions == 1


def test_a_request_for_a_paused_session_waits_until_another_is_idle(tmp_path: Path) -> None:
    with sandbox_at(tmp_path, SessionSettings(alive=1, pause_seconds=NEVER)) as box:
        first = paused(box.session())
        second = box.session()
        running = second.start("print('up', flush=True)\nimport time\ntime.sleep(60)")
        next(running.output())
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(value, first, "x")
            assert soon(first._life._turn.locked)  # type: ignore[attr-defined]
            running.cancel()
            assert waiting.result(60) == 1
        assert running.result().reason == "cancelled"
        assert second.lost == ""


@pytest.mark.needs("cgroup")
def test_many_sessions_take_no_more_memory_than_they_may(tmp_path: Path) -> None:
    most = 12 * MEBIBYTE
    with sandbox_at(tmp_path, SessionSettings(alive=1000, memory_bytes=most)) as box:
        sessions = []
        for number in range(40):
            sessions.append(box.session())
            sessions[-1].execute(f"x = [{number}] * 1000")
            box._cells._sessions._services.idle.make_room(0)  # type: ignore[attr-defined]
            assert memory_of(sessions) <= most
        assert sum(each.paused for each in sessions) > 25
        for number, session in reversed(list(enumerate(sessions))):
            assert value(session, "x[-1], len(x)") == [number, 1000]
            box._cells._sessions._services.idle.make_room(0)  # type: ignore[attr-defined]
            assert memory_of(sessions) <= most
        state = box._state()
        assert state.paused + state.sessions == 40
    assert states(tmp_path) == []


def memory_of(sessions: list[Session]) -> int:
    return sum(each.cell.memory_bytes() for each in sessions)  # type: ignore[attr-defined]


def test_a_storm_of_requests_is_served(tmp_path: Path) -> None:
    with sandbox_at(tmp_path, SessionSettings(alive=3, pause_seconds=NEVER)) as box:
        sessions = [box.session() for _ in range(12)]
        for number, session in enumerate(sessions):
            session.execute(f"x = {number}")
        with ThreadPoolExecutor(24) as pool:
            asked = [(n, pool.submit(value, each, "x")) for n, each in enumerate(sessions * 3)]
            assert [each.result(120) for _, each in asked] == [n % 12 for n, _ in asked]
        assert all(each.lost == "" for each in sessions)
        assert box._state().sessions <= 3


def test_requests_that_come_at_once_resume_once(sandbox: Sandbox, directory: Path) -> None:
    with sandbox.session() as session:
        session = paused(session, "x = 0")
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(value, session, "x += 1; x") for _ in range(16)]
            assert sorted(each.result(60) for each in asked) == list(range(1, 17))  # type: ignore[type-var]
    assert states(directory) == []


class Gate:
    """Stops a pause once the state is kept."""

    def __init__(self) -> None:
        self.reached, self.may_go_on = threading.Event(), threading.Event()

    def keep(self, *given: Any, **named: Any) -> Any:
        kept = KEEP(*given, **named)
        self.reached.set()
        assert self.may_go_on.wait(60)
        return kept


KEEP = Pausing._keep


@contextlib.contextmanager
def attended(session: Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Answer what a session attempts between two requests, for as long as the block takes."""
    begun, may_end = threading.Event(), threading.Event()
    cell = session.cell  # type: ignore[attr-defined]

    def answer() -> str:
        begun.set()
        assert may_end.wait(60)
        return ""

    monkeypatch.setattr(cell.attention, "answer", answer)
    with ThreadPoolExecutor(1) as pool:
        attending = pool.submit(cell.attend)
        assert begun.wait(60)
        try:
            yield
        finally:
            may_end.set()
            attending.result(60)


def tries_of(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event that is set once a session was tried to be paused."""
    tried = threading.Event()
    attempt = SessionLife.try_to_pause

    def try_to_pause(life: SessionLife, why: str) -> bool:
        is_busy = attempt(life, why)
        tried.set()
        return is_busy

    monkeypatch.setattr(SessionLife, "try_to_pause", try_to_pause)
    return tried


def test_a_session_that_is_attended_to_is_paused_later(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sandbox.session() as session:
        session.execute("x = 1")
        with attended(session, monkeypatch):
            assert not pause(session)
            assert not session._life.is_evictable  # type: ignore[attr-defined]
        assert pause(session)
        assert value(session, "x") == 1


def test_another_session_waits_until_one_is_not_attended_to_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = tries_of(monkeypatch)
    with sandbox_at(tmp_path, SessionSettings(alive=1, pause_seconds=NEVER)) as box:
        first = box.session()
        with ThreadPoolExecutor(1) as pool:
            with attended(first, monkeypatch):
                opening = pool.submit(box.session)
                assert tried.wait(60)
                assert not first.paused
            assert opening.result(60).execute("1").ok
        assert (first.paused, first.lost) == (True, "")


@pytest.mark.needs("cgroup")
def test_the_thread_looks_again_at_a_session_that_was_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = tries_of(monkeypatch)
    with (
        sandbox_at(tmp_path, SessionSettings(memory_bytes=1 << 40)) as box,
        box.session() as session,
    ):
        session.execute("x = 1")
        idle = box._cells._sessions._services.idle  # type: ignore[attr-defined]
        with attended(session, monkeypatch):
            idle._settings = SessionSettings(memory_bytes=1)
            idle.note_rest()
            assert tried.wait(60)
            assert not session.paused
        assert soon(lambda: session.paused)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    monkeypatch.setattr(Pausing, "_keep", lambda *given, **named: made.keep(*given, **named))  # noqa: PLW0108 - it binds
    yield made
    made.may_go_on.set()


def test_a_request_that_comes_during_a_pause_waits(
    sandbox: Sandbox, directory: Path, gate: Gate
) -> None:
    with sandbox.session() as session, ThreadPoolExecutor(2) as pool:
        session.execute("x = 1")
        pausing = pool.submit(pause, session)
        assert gate.reached.wait(60)
        asked = pool.submit(value, session, "x")
        life = session._life  # type: ignore[attr-defined]
        assert soon(lambda: life._wanted == 1)
        gate.may_go_on.set()
        assert asked.result(60) == 1
        assert not pausing.result(60)
        assert soon(lambda: states(directory) == [])


def test_a_session_that_is_closed_during_a_pause_leaves_nothing(
    sandbox: Sandbox, directory: Path, gate: Gate
) -> None:
    session = sandbox.session()
    session.execute("x = 1")
    with ThreadPoolExecutor(2) as pool:
        pausing = pool.submit(pause, session)
        assert gate.reached.wait(60)
        closing = pool.submit(session.close)
        assert soon(lambda: bool(session.cell.lost))  # type: ignore[attr-defined]
        gate.may_go_on.set()
        closing.result(60)
        assert not pausing.result(60)
    assert session.lost == "it was closed"
    assert states(directory) == []


def test_a_paused_session_that_is_closed_leaves_nothing(sandbox: Sandbox, directory: Path) -> None:
    session = paused(sandbox.session(id="closed"))
    session.close()
    assert (session.lost, session.paused) == ("it was closed", False)
    with pytest.raises(SessionLost, match="it was closed"):
        session.execute("x")
    assert states(directory) == []
    with sandbox.session(id="closed") as another:
        assert not another.execute("x").ok


def test_a_paused_session_gives_its_token_away(sandbox: Sandbox, directory: Path) -> None:
    session = paused(sandbox.session())
    token = session.pause()
    assert len(states(directory)) == 1
    with pytest.raises(SessionLost, match="it was paused"):
        session.execute("x")
    with sandbox.resume(token) as resumed:
        assert value(resumed, "x") == 1


def test_the_trail_tells_that_a_token_was_given_away(tmp_path: Path) -> None:
    log = AuditLog()
    with sandbox_at(tmp_path, audit=log) as box:
        paused(box.session()).pause()
    told = [(each.action, each.target) for each in log.get_entries() if each.category == "session"]
    assert told == [("opened", ""), ("paused", "it was idle"), ("paused", "it was paused")]


def gone(path: Path) -> None:
    path.unlink()


def changed(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def others(path: Path) -> None:
    """Put the state of another session in its place."""
    (other,) = (each for each in path.parent.glob("*.session") if each != path)
    shutil.copy(other, path)


@pytest.mark.parametrize(
    ("change", "why"),
    [(gone, "no such paused session"), (changed, "was changed"), (others, "another one's")],
)
def test_a_session_whose_state_is_not_there_is_lost_and_says_so(
    sandbox: Sandbox, directory: Path, change: Callable[[Path], None], why: str
) -> None:
    session = paused(sandbox.session(id="changed"))
    (path,) = directory.rglob("*.session")
    other = paused(sandbox.session(), "x = 'other'")
    change(path)
    with pytest.raises(PauseError, match=why):
        session.execute("x")
    assert why in session.lost
    with pytest.raises(SessionLost, match=why):
        session.execute("x")
    with sandbox.session(id="changed") as another:  # its id is free
        assert another.execute("1").ok
    assert value(other, "x") == "other"
    other.close()
    assert sandbox._state().paused == 0


def test_a_state_that_cannot_be_written_leaves_the_session_as_it_was(tmp_path: Path) -> None:
    small = PauseSettings(tmp_path, most_bytes=4 * MEBIBYTE)
    with sandbox_at(tmp_path, pauses=small) as box, box.session() as session:
        session.execute("import os; x = os.urandom(16 << 20)")
        session.freeze()
        was_frozen = session.cell.is_frozen  # type: ignore[attr-defined]
        assert not pause(session)
        assert session.cell.is_frozen == was_frozen  # type: ignore[attr-defined]
        assert states(tmp_path) == []
        assert value(session, "x = x[:10]; len(x)") == 10
        assert pause(session)


def test_a_session_whose_launcher_ended_says_what_differs(tmp_path: Path) -> None:
    with sandbox_at(tmp_path) as box:
        session = paused(box.session())
        os.kill(inspect(box).launcher_pids().keeper, signal.SIGKILL)
        assert soon(lambda: not inspect(box).generation.is_alive())
        with pytest.raises(PauseDiffers, match="launcher ended") as refused:
            session.execute("x")
        assert refused.value.differs
        assert "launcher" in session.lost
        assert states(tmp_path) == []


def test_only_images_of_launchers_that_are_there_are_kept(tmp_path: Path) -> None:
    def images() -> int:
        links = (f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd"))
        return sum("memfd:kept" in os.readlink(each) for each in links if os.path.lexists(each))

    with sandbox_at(tmp_path) as box:
        before = images()
        gc.disable()
        try:
            for _ in range(3):
                with box.session() as session:
                    session.pause()
                os.kill(inspect(box).launcher_pids().keeper, signal.SIGKILL)
                assert soon(lambda: not inspect(box).generation.is_alive())
            box.session().pause()
            assert images() == before + 1
        finally:
            gc.enable()


def test_a_pausable_session_comes_back_though_its_launcher_ended(tmp_path: Path) -> None:
    with sandbox_at(tmp_path, pausable=True) as box:
        session = paused(box.session())
        os.kill(inspect(box).launcher_pids().keeper, signal.SIGKILL)
        assert soon(lambda: not inspect(box).generation.is_alive())
        assert value(session, "x") == 1


def test_a_launcher_that_was_replaced_stays_for_its_paused_sessions(tmp_path: Path) -> None:
    pool = PoolSettings(size=1, cells_per_launcher=4)
    settings = PauseSettings(tmp_path)
    with Sandbox(
        policy=policy_named("strict"),
        pool=pool,
        sessions=PAUSES,
        host=HostSettings(pauses=settings),
    ) as box:
        sessions = [paused(box.session(), f"x = {number}") for number in range(3)]
        before = inspect(box).generation
        for _ in range(8):
            box.execute("1")
        assert inspect(box).generation is not before
        assert before.is_alive()
        for _ in range(2):
            assert [value(each, "x") for each in sessions] == [0, 1, 2]
            assert all(map(pause, sessions))
        with pytest.raises(PauseError, match="its launcher was replaced"):
            sessions[0].pause()  # a token keeps no launcher
        for each in sessions:
            each.close()
        assert soon(lambda: not before.is_alive())


def test_the_lifetime_goes_on_while_a_session_is_paused_and_idleness_does_not(
    tmp_path: Path,
) -> None:
    clock, limits = Clock(), SessionSettings(pause_seconds=10, idle_seconds=100)
    with sandbox_at(tmp_path, limits._replace(lifetime_seconds=1000)) as box:
        inspect(box).supervisors._clock = clock
        session, kept = box.session(), box.session()
        for each in (session, kept):
            each.execute("x = 1")
        kept.extend(5000)
        clock.now += 11
        box._cells._sessions._services.idle.look()  # type: ignore[attr-defined]
        assert soon(lambda: session.paused and kept.paused)
        clock.now += 500  # longer than idle_seconds
        assert value(session, "x") == 1
        assert pause(session)
        clock.now += 600
        with pytest.raises(SessionExpired) as refused:
            session.execute("x")
        assert refused.value.limit == session.expired == "lifetime_seconds"
        assert len(states(tmp_path)) == 1
        assert value(kept, "x") == 1


def test_a_closed_sandbox_leaves_no_states(tmp_path: Path) -> None:
    box = sandbox_at(tmp_path)
    sessions = [paused(box.session()) for _ in range(3)]
    box.close()
    assert states(tmp_path) == []
    for each in sessions:
        with pytest.raises(SessionLost, match="the sandbox was closed"):
            each.execute("x")


def test_calls_are_kept_for_a_fork_if_they_are_few(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        paused(session)
        with session.fork() as fork:
            assert value(fork, "x") == 1
        session.execute(f"y = {'y' * 70_000!r}")
        assert pause(session)
        with pytest.raises(PolicyError, match="up to 65536 bytes"):
            session.fork()


def test_invalid_settings_are_refused(tmp_path: Path) -> None:
    for wrong in ({"pause_seconds": -1}, {"memory_bytes": 0.5}, {"memory_bytes": "1"}):
        with pytest.raises(PolicyError, match="sessions"):
            sandbox_at(tmp_path, SessionSettings(**wrong))  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="cells_per_launcher=1"):
        sandbox_at(tmp_path, pool=PoolSettings(cells_per_launcher=1))


def test_a_process_that_dies_during_a_pause_harms_nobody(
    sandbox: Sandbox, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, killed = BranchingProcess.keep, []

    def kill_first(process: BranchingProcess, held: Any, image: int, *given: Any) -> None:
        if image >= 0 and not killed and process.pid:
            os.kill(process.pid, signal.SIGKILL)
            killed.append(1)
        keep(process, held, image, *given)

    with sandbox.session() as session:
        paused(session)
        assert value(session, "x") == 1  # the process is there
        monkeypatch.setattr(BranchingProcess, "keep", kill_first)
        pause(session)
        assert killed
        assert value(session, "x") == 1
        assert states(directory) == []


STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["run", "pause", "file", "branch", "freeze"])),
    min_size=4, max_size=14,
)  # fmt: skip


@given(STEPS)
@settings(max_examples=12, suppress_health_check=list(HealthCheck))
def test_any_interleaving_gives_the_answers_of_twins(
    sandbox: Sandbox, steps: list[tuple[int, str]]
) -> None:
    with contextlib.ExitStack() as closing:
        pairs = [[closing.enter_context(sandbox.session()) for _ in range(2)] for _ in range(3)]
        for session in (each for pair in pairs for each in pair):
            session.execute("import random; random.seed(3); log = []; it = iter(range(999))")
        for at, step in steps:
            twin, session = pairs[at]
            if step == "pause":
                assert pause(session) or session.paused
            elif step == "freeze":
                session.freeze()
            elif step == "file":
                for each in (twin, session):
                    value(each, "n = open('log', 'a').write('x')")
                assert twin.download("log") == session.download("log")
            elif step == "branch":
                for index, each in enumerate((twin, session)):
                    (pairs[at][index],) = each.branch()
                    closing.enter_context(pairs[at][index])
            else:
                show = "log.append(next(it)); (log, random.random(), sum(log))"
                assert value(twin, show) == value(session, show)
