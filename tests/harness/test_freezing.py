"""Idle sessions: they stand still, go on with the next request, and end when a setting says so."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cellwright import (
    HostSettings,
    Network,
    PauseSettings,
    PolicyError,
    PoolSettings,
    Sandbox,
    Session,
    SessionLost,
    SessionSettings,
)
from cellwright.errors import SessionExpired
from cellwright.policies.policy import OPTIONAL_LAYERS
from cellwright.runner.sessions.session_cell import SessionCell
from cellwright.testing import inspect
from tests.conftest import Clock, policy_named, soon
from tests.runner.test_leftovers import nothing_left_of

pytestmark = pytest.mark.needs("userns", "cgroup")

BUSY = """
import threading
def count():
    global n
    while True: n += 1
n = 0
threading.Thread(target=count, daemon=True).start()
"""
SECONDS = 30
UNIFIED = Path("/sys/fs/cgroup/unified")  # where a host has both versions
IDLE = SessionSettings()
POLICY = msgspec.structs.replace(
    policy_named("strict"), network=Network(loopback=True), optional_layers=OPTIONAL_LAYERS
)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["the host's", "v2"])
def sandbox(clock: Clock, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Sandbox]:
    root = str(UNIFIED) if request.param == "v2" else None
    if root and not UNIFIED.is_dir():
        pytest.skip("this host has one version of cgroups")
    with Sandbox(
        policy=POLICY, pool=1, host=HostSettings(cgroup_root=root, pauses=PauseSettings(tmp_path))
    ) as box:
        inspect(box).supervisors._clock = clock
        yield box


def cell_of(session: Any) -> SessionCell:
    cell: SessionCell = session.cell
    return cell


def any_goes_on(sessions: list[Session], sandbox: Sandbox) -> bool:
    """Tell whether one of the sessions uses CPU time while another program works."""
    cgroups = [cell_of(session)._held.cell.cgroup for session in sessions]
    before = [cgroup.cpu_seconds() for cgroup in cgroups]
    assert None not in before
    sandbox.execute("for _ in range(2_000_000): pass")
    return before != [cgroup.cpu_seconds() for cgroup in cgroups]


def freeze(session: Session, clock: Clock) -> None:
    clock.now += IDLE.freeze_seconds
    cell_of(session).look()
    assert cell_of(session).is_frozen


def test_an_idle_session_stands_still_until_its_next_request(
    sandbox: Sandbox, clock: Clock
) -> None:
    with sandbox.session() as session:
        session.execute(BUSY)
        assert soon(lambda: any_goes_on([session], sandbox))  # so it does without
        clock.now += IDLE.freeze_seconds - 1
        cell_of(session).look()
        assert not cell_of(session).is_frozen
        clock.now += 1
        cell_of(session).look()
        assert cell_of(session).is_frozen
        assert soon(
            lambda: not any_goes_on([session], sandbox)
        )  # the kernel stops it at its next tick
        assert not any_goes_on([session], sandbox)
        stood = session.execute("n").value
        assert stood > 0
        assert soon(lambda: session.execute("n").value > stood)
        assert not cell_of(session).is_frozen


def test_a_frozen_session_is_branched_and_paused(sandbox: Sandbox, clock: Clock) -> None:
    session = sandbox.session()
    session.execute("steps = iter(range(9)); open('kept', 'w').write('file')")
    freeze(session, clock)
    (branch,) = session.branch()
    assert branch.forked_by == "memory"
    assert not cell_of(branch).is_frozen
    assert session.execute("next(steps), next(steps)").value == [0, 1]
    freeze(session, clock)
    token = session.pause()
    freeze(branch, clock)
    for each in (sandbox.resume(token), sandbox.resume(branch.pause())):
        assert not cell_of(each).is_frozen
        assert each.execute("next(steps)").value == (2 if each.id == session.id else 0)
        assert each.download("kept") == b"file"
        freeze(each, clock)
        each.close()


def test_files_of_a_frozen_session_are_read_and_written(sandbox: Sandbox, clock: Clock) -> None:
    with sandbox.session() as session:
        session.upload("a", b"1")
        freeze(session, clock)
        assert session.download("a") == b"1"
        assert [file.path for file in session.files()] == ["a"]
        assert cell_of(session).is_frozen
        session.upload("a", b"2")
        assert session.download("a") == b"2"


def test_every_process_of_a_session_stands_still(clock: Clock) -> None:
    """Also those that are forked meanwhile."""
    forks = "import os\nfor _ in range(5):\n    if os.fork() == 0:\n        while True:\n"
    forks += "            if os.fork() == 0: os._exit(0)\n            os.wait()"
    policy = msgspec.structs.replace(policy_named("standard"), optional_layers=OPTIONAL_LAYERS)
    with Sandbox(policy=policy, pool=0) as box:
        inspect(box).supervisors._clock = clock
        with box.session() as session:
            session.execute(forks)
            # One that forks faster than it is moved stays unfrozen until the next attempt.
            assert soon(lambda: is_frozen_at_last(session, clock))
            assert soon(lambda: not any_goes_on([session], box))


def is_frozen_at_last(session: Session, clock: Clock) -> bool:
    clock.now += IDLE.freeze_seconds
    cell_of(session).extend(2 * IDLE.freeze_seconds)
    cell_of(session).look()
    return bool(cell_of(session).is_frozen)


def test_a_running_request_is_not_frozen(sandbox: Sandbox, clock: Clock) -> None:
    with sandbox.session() as session:
        run = session.start("print('up', flush=True)\nimport time\ntime.sleep(60)")
        next(run.output())
        clock.now += IDLE.freeze_seconds
        cell_of(session).look()
        assert not cell_of(session).is_frozen
        run.cancel()
        run.result()


def test_a_frozen_session_is_closed_at_once_and_leaves_nothing(clock: Clock) -> None:
    with Sandbox(policy=POLICY, pool=0) as box:
        inspect(box).supervisors._clock = clock
        close_while_frozen(box, clock)  # the directory for all cells of the sandbox is made once
        with nothing_left_of(box):
            close_while_frozen(box, clock)
            box.settle()


def close_while_frozen(box: Sandbox, clock: Clock) -> None:
    session = box.session()
    session.execute(BUSY)
    freeze(session, clock)
    session.close()


def test_a_sandbox_with_frozen_sessions_closes(clock: Clock) -> None:
    box = Sandbox(policy=POLICY, pool=0)
    inspect(box).supervisors._clock = clock
    sessions = [box.session() for _ in range(10)]
    for session in sessions:
        session.execute("x = 1")
    clock.now += IDLE.freeze_seconds
    for session in sessions:
        cell_of(session).look()
    assert all(cell_of(session).is_frozen for session in sessions)
    assert sessions[3].execute("x").value == 1  # one goes on, and the others do not
    assert sum(cell_of(session).is_frozen for session in sessions) == 9
    box.close()
    assert {session.lost for session in sessions} == {"the sandbox was closed"}


def test_the_thread_of_sessions_freezes_and_goes_back_to_sleep(
    sandbox: Sandbox, clock: Clock
) -> None:
    with sandbox.session() as session:
        session.execute("1")
        clock.now += IDLE.freeze_seconds
        inspect(sandbox).supervisors._sessions.on_thaw()
        assert soon(lambda: cell_of(session).is_frozen)
        assert cell_of(session).due_at() == cell_of(session).clock.used_at + IDLE.idle_seconds


def test_a_connection_to_an_exposed_port_thaws_and_keeps_awake(
    sandbox: Sandbox, clock: Clock
) -> None:
    echo = """
import socket, threading
def serve():
    while True:
        sock, _ = listener.accept()
        while data := sock.recv(100): sock.sendall(data)
        sock.close()
listener = socket.create_server(("127.0.0.1", 8000))
threading.Thread(target=serve, daemon=True).start()
"""
    with sandbox.session() as session:
        session.execute(echo)
        with session.expose(8000) as exposed:
            freeze(session, clock)
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(SECONDS)
                sock.connect(exposed.address)
                sock.sendall(b"hello")
                assert sock.recv(5) == b"hello"
                assert not cell_of(session).is_frozen
                clock.now += IDLE.idle_seconds - 1
                cell_of(session).look()
                clock.now += IDLE.idle_seconds - 1
                cell_of(session).look()
                assert (session.lost, cell_of(session).is_frozen) == ("", False)
                sock.sendall(b"again")
                assert sock.recv(5) == b"again"
            assert soon(lambda: not cell_of(session).is_in_use)
            freeze(session, clock)


def test_a_host_that_cannot_freeze_goes_on(
    sandbox: Sandbox, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sandbox.session() as session:
        monkeypatch.setattr(cell_of(session)._held.cell.cgroup, "freeze", lambda: False)
        clock.now += IDLE.freeze_seconds
        cell_of(session).look()
        assert not cell_of(session).is_frozen
        assert cell_of(session).due_at() > clock.now
        assert session.execute("6 * 7").value == 42


# Lifetimes


@pytest.mark.parametrize(
    ("limit", "is_frozen"), [("idle_seconds", True), ("lifetime_seconds", False)]
)
def test_the_error_names_the_setting_that_ended_a_session(
    sandbox: Sandbox, clock: Clock, limit: str, is_frozen: bool
) -> None:
    session = sandbox.session()
    if limit == "lifetime_seconds":
        for _ in range(48):
            clock.now += IDLE.idle_seconds - 1
            cell_of(session).look()
            session.execute("1")
    elif is_frozen:
        freeze(session, clock)
    clock.now += IDLE.idle_seconds
    cell_of(session).look()
    assert session.expired == limit
    with pytest.raises(SessionExpired, match=limit) as caught:
        session.execute("1")
    assert caught.value.limit == limit
    assert isinstance(caught.value, SessionLost)


def test_a_session_that_is_closed_has_not_expired(sandbox: Sandbox) -> None:
    session = sandbox.session()
    session.close()
    assert session.expired == ""
    with pytest.raises(SessionLost) as caught:
        session.execute("1")
    assert not isinstance(caught.value, SessionExpired)


def test_a_session_lives_as_long_as_it_is_extended(sandbox: Sandbox, clock: Clock) -> None:
    session = sandbox.session()
    session.extend(100_000)
    clock.now += IDLE.lifetime_seconds + 1
    cell_of(session).look()
    assert session.execute("1").value == 1
    clock.now += 100_000 - IDLE.lifetime_seconds
    cell_of(session).look()
    assert session.expired == "lifetime_seconds"
    with pytest.raises(SessionExpired):
        session.extend(1)


@pytest.mark.parametrize("seconds", [-1, "1", True, float("inf"), float("nan")])
def test_an_extension_is_a_number_of_seconds(sandbox: Sandbox, seconds: object) -> None:
    with sandbox.session() as session, pytest.raises(PolicyError, match="^seconds: must be"):
        session.extend(seconds)  # type: ignore[arg-type]


@pytest.mark.slow
def test_two_hundred_sessions_are_frozen_and_thawed(clock: Clock) -> None:
    many = SessionSettings(alive=200)
    pool = PoolSettings(size=0)
    with Sandbox(policy=POLICY, pool=pool, sessions=many) as box:
        inspect(box).supervisors._clock = clock
        sessions = [box.session() for _ in range(200)]
        for number, session in enumerate(sessions):
            session.execute(f"{'' if number % 50 else BUSY}\nmine = {number}")
        clock.now += IDLE.freeze_seconds
        for session in sessions:
            cell_of(session).look()
        assert soon(
            lambda: all(cell_of(each).is_frozen for each in sessions)
        )  # another thread looks, too
        assert soon(lambda: not any_goes_on(sessions, box))
        for number, session in enumerate(sessions):
            assert session.execute("mine").value == number
