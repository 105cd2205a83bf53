"""Guests that make their pause as expensive as they can, or change meanwhile, storms of requests, and
states that are forged, copied or rolled back: what the supervisor spends is bounded, and nothing else
than the session comes back."""

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cellwright import BusyError, HostSettings, PauseSettings, Sandbox, Session, SessionSettings
from cellwright.errors import PauseError
from cellwright.harness.sandbox.sessions import pausing
from cellwright.harness.sandbox.sessions.pausing import Pausing
from cellwright.harness.sandbox.sessions.state_file import PauseToken
from tests.conftest import policy_named, soon
from tests.harness.test_branching import value
from tests.harness.test_idle_pauses import pause, states

MEBIBYTE = 1 << 20
MOST = 8 * MEBIBYTE
MAPS = """
import mmap
def mapped(size, access=3): return mmap.mmap(-1, size, flags=34 | 0x4000, prot=access)  # MAP_NORESERVE
"""
REFUSED_BY_NAME = {
    "maps more than": "m = mapped(60 << 30)\nfor at in range(0, 60 << 30, 1 << 25): m[at] = 1",
    "mappings": "kept = [mapped(4096, 1 + 2 * (n & 1)) for n in range(6000)]",
    "open descriptors": "kept = [open(f'f{n}', 'w') for n in range(200)]",
    "more memory": "x = __import__('os').urandom(16 << 20)",
    "files": "for n in range(12): open(f'big{n}', 'wb').write(bytes(range(256)) * 4096)",
    "too deep": "import os\nfor _ in range(300): os.mkdir('d'); os.chdir('d')\nos.chdir('/workspace')",
}  # fmt: skip
DEAR_AND_PAUSED = {
    "every second page": "m = mapped(6 << 20)\nfor at in range(0, 6 << 20, 8192): m[at] = 1",
    "a huge map of zeros": "m = mapped(8 << 30)\nx = sum(m[at] for at in range(0, 8 << 30, 1 << 20))",
    "sparse files": "for n in range(40): open(f's{n}', 'wb').truncate(20 << 20)",
    "many files": "for n in range(1500): open(str(n), 'w').close()",
    "memory that compresses": "x = bytes(5 << 20)",
}  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dear")


@pytest.fixture(scope="module")
def sandbox(directory: Path) -> Iterator[Sandbox]:
    limits = SessionSettings(pause_seconds=1_000_000.0)
    settings = PauseSettings(directory, most_bytes=MOST)
    with Sandbox(
        policy=policy_named("standard"), pool=1, sessions=limits, host=HostSettings(pauses=settings)
    ) as box:
        yield box


def why_not(session: Session) -> str:
    """Try to keep a session as an idle one is, and return why that is refused."""
    told: list[str] = []

    def tried() -> bool:
        with contextlib.suppress(BusyError):  # while what the guest attempts is answered
            told.append(_why_not(session))
        return bool(told)

    assert soon(tried)
    return told[0]


def _why_not(session: Session) -> str:
    life = session._life  # type: ignore[attr-defined]
    try:
        with life._services.pausing().kept(life.pausable(), is_use=False):
            raise ZeroDivisionError  # so that it goes on
    except ZeroDivisionError:
        return ""
    except PauseError as error:
        return error.what


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("why", REFUSED_BY_NAME)
def test_a_pause_that_is_too_dear_is_refused_by_name(
    sandbox: Sandbox, directory: Path, why: str
) -> None:
    with sandbox.session() as session, sandbox.session() as other:
        made = session.execute(MAPS + REFUSED_BY_NAME[why] + "\nmark = 7")
        assert made.ok, made.error
        other.execute("x = 1")
        assert pause(other)
        value(other, "x")  # the launcher's image is there
        before = resident()
        assert why in why_not(session)
        assert not pause(session)
        assert resident() - before < 2 * MOST
        assert states(directory) == []
        assert value(session, "mark") == 7
        assert pause(other)
        assert value(other, "x") == 1


@pytest.mark.parametrize("what", DEAR_AND_PAUSED)
def test_a_dear_session_takes_no_more_than_its_quota(
    sandbox: Sandbox, directory: Path, what: str
) -> None:
    with sandbox.session() as session:
        made = session.execute(MAPS + DEAR_AND_PAUSED[what] + "\nmark = 7")
        assert made.ok, made.error
        before = resident()
        assert pause(session), why_not(session)
        (path,) = directory.rglob("*.session")
        assert path.stat().st_size <= MOST
        assert value(session, "mark") == 7
        assert resident() - before < 4 * MOST


def test_a_guest_that_changes_while_it_is_idle_is_never_paused(sandbox: Sandbox) -> None:
    change = """
import os, threading
def change():
    while True:
        open('f', 'w').write('x' * 100_000); os.unlink('f'); x = bytearray(1 << 20)
threading.Thread(target=change, daemon=True).start()
mark = 7
"""
    with sandbox.session() as session:
        assert session.execute(change).ok
        for _ in range(10):
            assert "threads" in why_not(session)
        assert value(session, "mark") == 7


def test_a_guest_that_stands_still_harms_only_itself(sandbox: Sandbox) -> None:
    with sandbox.session() as session, sandbox.session() as other:
        for each in (session, other):
            each.execute("x = 1")
        guest = session.cell._held.cell.guest  # type: ignore[attr-defined]
        signal.pidfd_send_signal(guest, signal.SIGSTOP)
        assert "signal" in why_not(session)
        assert pause(other)
        assert value(other, "x") == 1
        signal.pidfd_send_signal(guest, signal.SIGCONT)
        assert value(session, "x") == 1


def test_a_storm_reads_two_states_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, now, most = threading.Lock(), [0], [0]
    restore = Pausing.restore

    def counted(*given: Any) -> Any:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        try:
            return restore(*given)
        finally:
            with lock:
                now[0] -= 1

    monkeypatch.setattr(Pausing, "restore", counted)
    limits = SessionSettings(alive=20, pause_seconds=1_000_000.0)
    settings = PauseSettings(tmp_path)
    with Sandbox(
        policy=policy_named("strict"), pool=1, sessions=limits, host=HostSettings(pauses=settings)
    ) as box:
        sessions = [box.session() for _ in range(12)]
        for number, each in enumerate(sessions):
            each.execute(f"x = {number}")
            assert pause(each)
        with ThreadPoolExecutor(36) as pool:
            asked = [pool.submit(value, each, "x") for each in sessions * 3]
            assert [each.result(120) for each in asked] == list(range(12)) * 3
    assert most[0] == pausing._AT_ONCE


def test_a_token_is_neither_guessed_nor_shared(sandbox: Sandbox, directory: Path) -> None:
    with sandbox.session(id="mine") as session:
        session.execute("x = 1")
        assert pause(session)
        (path,) = directory.rglob("*.session")
        for secret in (os.urandom(32), bytes(32)):
            guessed = str(PauseToken(path.stem, secret))
            for use in (sandbox.resume, sandbox.discard):
                with pytest.raises(PauseError, match="was changed"):
                    use(guessed)
        real = session._life._paused.kept.token  # type: ignore[attr-defined]
        with pytest.raises(PauseError, match="a session of its id lives"):
            sandbox.resume(real)
        assert real not in repr(session)
        assert value(session, "x") == 1


def test_a_state_is_not_rolled_back(sandbox: Sandbox, directory: Path, tmp_path: Path) -> None:
    session = sandbox.session()
    session.execute("money = 100")
    assert pause(session)
    (path,) = directory.rglob("*.session")
    shutil.copy2(path, tmp_path / "old")
    session.execute("money = 1")
    assert pause(session)
    (path,) = directory.rglob("*.session")
    shutil.copy2(tmp_path / "old", path)
    with pytest.raises(PauseError, match="another one's"):
        session.execute("money")
    assert "another one's" in session.lost
    assert states(directory) == []


@pytest.mark.needs("root")
def test_a_state_of_another_user_is_refused_and_can_be_put_right(
    sandbox: Sandbox, directory: Path
) -> None:
    with sandbox.session() as session:
        session.execute("x = 1")
        assert pause(session)
        (path,) = directory.rglob("*.session")
        os.chown(path, 12345, 12345)
        with pytest.raises(PauseError, match="not this user's alone"):
            session.execute("x")
        assert session.lost == ""
        os.chown(path, 0, 0)
        assert value(session, "x") == 1
