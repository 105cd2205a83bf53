"""Paused sessions: what they resume with, what is refused before it reaches a cell, and what is left."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cellwright import (
    AuditLog,
    HostSettings,
    LaunchError,
    PauseSettings,
    PolicyError,
    Sandbox,
    Session,
    SessionLost,
    SessionSettings,
)
from cellwright.errors import PauseDiffers, PauseError
from cellwright.harness.sandbox.sessions import pause_store, state_file
from cellwright.harness.sandbox.sessions.pause_store import PausedStates
from cellwright.harness.sandbox.sessions.state_file import PauseToken
from cellwright.runner.concurrency import begin_thread
from cellwright.runner.sessions.branches import BranchingProcess, memory_to_keep, restore_session
from tests.conftest import ROOT, policy_named
from tests.harness.test_branching import STATES, WIPED, value

KEY = "a key of at least 32 characters: "
MARK = "mark-" * 20


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("paused")


@pytest.fixture(scope="module")
def sandbox(directory: Path) -> Iterator[Sandbox]:
    settings = PauseSettings(directory)
    with Sandbox(policy=policy_named("strict"), pool=2, host=HostSettings(pauses=settings)) as box:
        yield box


def states(directory: Path) -> list[str]:
    return sorted(each.name for each in directory.iterdir() if each.suffix != ".image")


def path_of(directory: Path, token: str) -> Path:
    return directory / f"{token.split('_')[1]}.session"


@pytest.mark.parametrize("name", STATES)
def test_a_resumed_session_goes_on_as_a_twin_does(sandbox: Sandbox, name: str) -> None:
    make, show = STATES[name]
    with sandbox.session() as twin, contextlib.ExitStack() as closing:
        paused = sandbox.session()
        for each in (twin, paused):
            if "import random; random.random()" in make:
                each.execute("import random; random.seed(5)")
            assert each.execute(make).ok or not make
        resumed = closing.enter_context(sandbox.resume(paused.pause()))
        assert paused.lost == "it was paused"
        assert resumed.id == paused.id
        answers = [[value(each, show) for _ in range(3)] for each in (twin, resumed)]
        assert answers[0] == answers[1]


def test_a_session_is_paused_again_and_again(sandbox: Sandbox, directory: Path) -> None:
    session = sandbox.session(id="again")
    session.execute("n, f = 0, open('log', 'a')", files={"d/data": b"kept"})
    for number in range(1, 6):
        token = session.pause()
        assert states(directory) == [path_of(directory, token).name]
        assert path_of(directory, token).stat().st_mode & 0o7777 == 0o600
        session = sandbox.resume(token)
        assert states(directory) == []
        assert value(session, "n += 1; f.write('x'); f.flush(); n") == number
    assert value(session, "open('log').read(), open('d/data').read()") == ["xxxxx", "kept"]
    session.close()


def test_a_resumed_session_is_branched_by_memory(sandbox: Sandbox) -> None:
    session = sandbox.session()
    session.execute("x = 1")
    token = session.pause()
    with sandbox.resume(token) as resumed:
        resumed.execute("x += 1")
        (branch,) = resumed.branch()
        assert (branch.forked_by, value(branch, "x")) == ("memory", 2)
        branch.close()


def test_other_languages_and_named_workspaces_are_refused(tmp_path: Path) -> None:
    with Sandbox(policy=policy_named("workshop"), pool=0, workspaces=tmp_path / "w") as box:
        with box.session(language="bash") as shell:
            shell.execute("x=1")
            for kept, kind, why in (
                (shell, PauseError, "bash"),
                (box.session(workspace="kept"), PolicyError, "named workspace"),
            ):
                with pytest.raises(kind, match=why):
                    kept.pause()
            assert shell.execute("echo $x").stdout == "1\n"
        with (
            box.session() as session,
            session.terminal(["sh"]),
            pytest.raises(PauseError, match="terminal"),
        ):
            session.pause()


def test_a_state_is_discarded_by_its_own_token_alone(sandbox: Sandbox, directory: Path) -> None:
    token = sandbox.session().pause()
    forged = PauseToken(PauseToken.parse(token).id, os.urandom(32))
    with pytest.raises(PauseError, match="was changed"):
        sandbox.discard(str(forged))
    assert states(directory) == [path_of(directory, token).name]
    sandbox.discard(token)
    assert states(directory) == []
    for each in (sandbox.resume, sandbox.discard):
        with pytest.raises(PauseError, match="no such paused session"):
            each(token)


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def cut_at_a_piece(data: bytes) -> bytes:
    """Leave the first piece, whole."""
    at = state_file._PREFIX.size
    return data[: at + 4 + int.from_bytes(data[at : at + 4], "little")]


def flipped(at: float) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        place = int(at * (len(data) - 1))
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

    return change


def later(data: bytes) -> bytes:
    """Have it expire later than it does."""
    place = state_file._PREFIX.size - 1
    return data[:place] + bytes([data[place] ^ 0x01]) + data[place + 1 :]


def twice(data: bytes) -> bytes:
    """Repeat the first piece."""
    first = cut_at_a_piece(data)[state_file._PREFIX.size :]
    return data[: state_file._PREFIX.size] + first + data[state_file._PREFIX.size :]


CHANGES = {
    "cut": cut, "cut at a piece": cut_at_a_piece, "its end is missing": lambda data: data[:-1],
    "empty": lambda _: b"", "longer": lambda data: data + b"\0", "other": lambda data: bytes(len(data)),
    "a piece twice": twice, "expires later": later,
    **{f"a bit at {at}": flipped(at) for at in (0, 0.0001, 0.001, 0.01, 0.3, 0.6, 0.999, 1)},
}  # fmt: skip


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Record whether anything of a state reaches a cell."""
    seen: list[object] = []

    def restore(*given: object) -> None:
        seen.append(given)

    monkeypatch.setattr(BranchingProcess, "restore", restore)
    return seen


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_state_is_refused_before_it_reaches_a_cell(
    tmp_path: Path, paused: dict[str | None, tuple[Sandbox, str, bytes]], restored: list[object],
    change: str, key: str | None,
) -> None:  # fmt: skip
    box, token, data = paused[key]
    path = path_of(Path(box._given.host.pauses.directory or ""), token)
    path.write_bytes(CHANGES[change](data))
    with pytest.raises(PauseError):
        box.resume(token)
    assert not restored


@pytest.fixture(scope="module")
def paused(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str | None, tuple[Sandbox, str, bytes]]]:
    """Yield sandboxes with a paused session each, without and with a key."""
    made = {}
    with contextlib.ExitStack() as closing:
        for key in (None, KEY):
            directory = tmp_path_factory.mktemp("changed")
            settings = PauseSettings(directory, key)
            box = closing.enter_context(
                Sandbox(policy=policy_named("strict"), pool=1, host=HostSettings(pauses=settings))
            )
            session = box.session()
            session.execute(f"x = {MARK!r}")
            token = session.pause()
            made[key] = box, token, path_of(directory, token).read_bytes()
        yield made


def test_pieces_are_bound_to_their_places() -> None:
    token, file = PauseToken.new(), os.memfd_create("state")
    writer = state_file.StateWriter(file, token, None, 1.0, 1 << 20)
    for number in (1, 2):
        writer.add(state_file.MEMORY, bytes([number]) * 100)
    writer.add(state_file.END)
    found = [data for _, data in state_file.pieces(file, token, None, 1.0)]
    assert found == [b"\1" * 100, b"\2" * 100, b""]
    begin = state_file._PREFIX.size
    size = 4 + int.from_bytes(os.pread(file, 4, begin), "little")
    first, second = os.pread(file, size, begin), os.pread(file, size, begin + size)
    os.pwrite(file, second + first, begin)
    with pytest.raises(PauseError, match="was changed"):
        list(state_file.pieces(file, token, None, 1.0))
    os.close(file)


def test_memory_that_a_fork_wipes_is_not_kept(sandbox: Sandbox) -> None:
    session = sandbox.session()
    session.execute(WIPED)
    with sandbox.resume(session.pause()) as resumed:
        assert value(resumed, "m[:] == bytes(4096)") is True


def test_memory_that_only_the_fresh_cell_has_is_dropped(sandbox: Sandbox) -> None:
    with sandbox.session() as source, sandbox.session() as fresh:
        source.execute("x = [bytes(100_000) for _ in range(200)]")  # zeros that nobody touched
        fresh.execute("y = [b'y' * 100_000 for _ in range(200)]")
        process = source._services.branching  # type: ignore[attr-defined]
        with source._life.pausable().fresh_cell() as cell:  # type: ignore[attr-defined]
            image = memory_to_keep(cell, -1, process, 1 << 30)
        with source.cell.resting() as (held, past):  # type: ignore[attr-defined]
            kept = memory_to_keep(held, image, process, 1 << 30)
        restore_session(fresh.cell, (), image, kept, process)  # type: ignore[attr-defined]
        fresh.cell.continue_from(past)  # type: ignore[attr-defined]
        os.close(image)
        os.close(kept)
        assert value(fresh, "len(x), any(map(any, x))") == [200, False]


def test_only_its_own_token_opens_a_state(
    paused: dict[str | None, tuple[Sandbox, str, bytes]], restored: list[object]
) -> None:
    box, token, data = paused[None]
    path = path_of(Path(box._given.host.pauses.directory or ""), token)
    path.write_bytes(data)
    forged = PauseToken(PauseToken.parse(token).id, os.urandom(32))
    other = PauseToken.new()
    path_of(path.parent, str(other)).write_bytes(data)
    path_of(path.parent, str(other)).chmod(0o600)
    stolen = PauseToken(other.id, PauseToken.parse(token).secret)
    for each in (forged, other, stolen):
        with pytest.raises(PauseError, match="was changed"):
            box.resume(str(each))
    path_of(path.parent, str(other)).unlink()
    assert not restored
    assert PauseToken.parse(token).secret.hex() not in repr(PauseToken.parse(token))


def test_the_state_is_encrypted_with_a_key(
    paused: dict[str | None, tuple[Sandbox, str, bytes]],
) -> None:
    assert MARK.encode() in paused[None][2]
    assert MARK.encode() not in paused[KEY][2]
    box, token, data = paused[KEY]
    directory = Path(box._given.host.pauses.directory or "")
    path_of(directory, token).write_bytes(data)
    for key, why in ((None, "with a key"), (KEY + "other", "was changed")):
        settings = PauseSettings(directory, key)
        with (
            Sandbox(
                policy=policy_named("strict"), pool=0, host=HostSettings(pauses=settings)
            ) as other,
            pytest.raises(PauseError, match=why),
        ):
            other.resume(token)
    with box.resume(token) as resumed:
        assert value(resumed, "x") == MARK


@pytest.mark.parametrize("how", ["mode", "owner", "link", "directory", "fifo"])
def test_a_file_that_is_not_this_users_alone_is_refused(
    paused: dict[str | None, tuple[Sandbox, str, bytes]], tmp_path: Path, how: str
) -> None:
    if how == "owner" and os.geteuid():
        pytest.skip("only root gives files away")
    box, token, data = paused[None]
    path = path_of(Path(box._given.host.pauses.directory or ""), token)
    path.unlink(missing_ok=True)
    if how == "link":
        (tmp_path / "state").write_bytes(data)
        path.symlink_to(tmp_path / "state")
    elif how == "directory":
        path.mkdir(0o700)
    elif how == "fifo":
        os.mkfifo(path, 0o600)
    else:
        path.write_bytes(data)
        path.chmod(0o644 if how == "mode" else 0o600)
        if how == "owner":
            os.chown(path, 12345, 0)
    with pytest.raises(PauseError):
        box.resume(token)
    path.rmdir() if how == "directory" else path.unlink()
    path.write_bytes(data)
    path.chmod(0o600)


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    settings = PauseSettings(tmp_path)
    with (
        Sandbox(policy=policy_named("strict"), pool=1, host=HostSettings(pauses=settings)) as box,
        box.session() as session,
        pytest.raises(PauseError, match="others may write"),
    ):
        session.pause()


def test_states_expire_and_are_removed(tmp_path: Path) -> None:
    now = time.time()
    settings = PauseSettings(tmp_path, keep_seconds=100)
    early, late = PausedStates(settings), PausedStates(settings, lambda: now + 101)
    token = PauseToken.new()
    with early.writing(token) as writer:
        writer.add(state_file.END)
    with early.taking(token) as pieces:
        assert list(pieces) == [(state_file.END, b"")]
        with pytest.raises(PauseError, match="another caller"), early.taking(token):
            pytest.fail("taken twice")
    with early.writing(token) as writer:
        writer.add(state_file.END)
    with pytest.raises(PauseError, match="longer than it is kept"), late.taking(token):
        pytest.fail("it has expired")
    with late.writing(PauseToken.new()) as writer:
        writer.add(state_file.END)
    assert len(states(tmp_path)) == 1
    assert path_of(tmp_path, str(token)).name not in states(tmp_path)


@pytest.mark.parametrize("limit", ["most_bytes", "quota_bytes", "sandbox_bytes"])
def test_what_is_too_large_is_refused_and_goes_on(tmp_path: Path, limit: str) -> None:
    settings = PauseSettings(tmp_path)._replace(**{limit: 12 << 20})
    with Sandbox(policy=policy_named("strict"), pool=1, host=HostSettings(pauses=settings)) as box:
        session = box.session()
        session.execute("x = bytearray(b'x') * (16 << 20)")
        with pytest.raises(PauseError, match="more memory"):
            session.pause()
        assert value(session, "len(x)") == 16 << 20
        assert states(tmp_path) == []
        session.execute("import os; x = os.urandom(9 << 20)")
        first = session.pause()
        other = box.session()
        other.execute("import os; x = os.urandom(9 << 20)")
        if limit != "most_bytes":
            with pytest.raises(PauseError, match="more memory"):
                other.pause()
        box.resume(first).close()
        box.resume(other.pause()).close()


def pausable(directory: Path, policy: str = "strict") -> Sandbox:
    settings = PauseSettings(directory)
    return Sandbox(
        policy=policy_named(policy), pool=1, host=HostSettings(pausable=True, pauses=settings)
    )


def test_a_session_is_resumed_by_another_launcher(tmp_path: Path) -> None:
    with pausable(tmp_path) as box:
        assert box.layers[-1] == "fixed_addresses"
        session = box.session(id="kept")
        make = "import sqlite3, json, zlib\n" + "\n".join(
            STATES[name][0] for name in ("objects", "generators", "SQLite in memory")
        )
        session.execute(make, files={"data": b"kept"})
        expected = [value(session, STATES["generators"][1]), value(session, "hash('a')")]
        token = session.pause()
    with pausable(tmp_path) as box, box.resume(token) as resumed:
        assert resumed.id == "kept"
        found = [value(resumed, STATES["generators"][1]), value(resumed, "hash('a')")]
        assert found == [expected[0] + 3, expected[1]]
        assert value(resumed, STATES["SQLite in memory"][1]) == [1, [1]]
        assert value(resumed, "open('data').read(), json.loads('[1]')") == ["kept", [1]]
        assert resumed.execute("import decimal; decimal.Decimal(1)").ok
        with box.session() as fresh:
            assert value(fresh, "hash('a')") != expected[1]


def test_what_differs_after_a_restart_is_named(tmp_path: Path) -> None:
    with pausable(tmp_path) as box:
        session = box.session()
        session.execute("x = 1")
        token = session.pause()
    settings = PauseSettings(tmp_path)
    with Sandbox(policy=policy_named("strict"), pool=1, host=HostSettings(pauses=settings)) as box:
        with pytest.raises(PauseDiffers) as refused:
            box.resume(token)
        assert any("launcher" in each for each in refused.value.differs)
    with pausable(tmp_path, "standard") as box:
        with pytest.raises(PauseDiffers) as refused:
            box.resume(token)
        assert [each.split(":")[0] for each in refused.value.differs] == ["policy"]
    with pausable(tmp_path) as box, box.resume(token) as resumed:
        assert value(resumed, "x") == 1


def test_a_changed_image_is_refused(tmp_path: Path, restored: list[object]) -> None:
    with pausable(tmp_path) as box:
        session = box.session()
        session.execute("x = 1")
        token = session.pause()
    (image,) = tmp_path.glob("*.image")
    assert image.stat().st_mode & 0o7777 == 0o600
    data = image.read_bytes()
    image.write_bytes(flipped(0.5)(data))
    with pausable(tmp_path) as box:
        with pytest.raises(PauseError, match="was changed"):
            box.resume(token)
        image.unlink()
        with pytest.raises(PauseDiffers):
            box.resume(token)
    assert not restored


def test_a_session_without_a_pausable_sandbox_needs_its_launcher(tmp_path: Path) -> None:
    settings = PauseSettings(tmp_path)
    with Sandbox(policy=policy_named("strict"), pool=1, host=HostSettings(pauses=settings)) as box:
        session = box.session()
        session.execute("x = 1")
        token = session.pause()
        with Sandbox(
            policy=policy_named("strict"), pool=1, host=HostSettings(pauses=settings)
        ) as other:
            with pytest.raises(PauseDiffers, match="launcher") as refused:
                other.resume(token)
            assert "pausable=True" in refused.value.hint
        assert len(states(tmp_path)) == 1
    assert states(tmp_path) == []
    with Sandbox(policy=policy_named("strict"), pool=0, host=HostSettings(pauses=settings)) as box:
        with pytest.raises(PauseError, match="no such paused session") as refused:
            box.resume(token)
        assert "pausable=True" in refused.value.hint


def test_the_cpu_time_is_counted_on(sandbox: Sandbox) -> None:
    session = sandbox.session()
    session.execute(
        "t = __import__('time')\nend = t.process_time() + 0.2\nwhile t.process_time() < end: pass"
    )
    with sandbox.resume(session.pause()) as resumed:
        past = resumed.cell._turns.cpu_before  # type: ignore[attr-defined]
        assert past > 0.15 or not resumed.cell._held.cell.cgroup.cpu_seconds()  # type: ignore[attr-defined]
        assert resumed.cell._turns.requests == 1  # type: ignore[attr-defined]


def test_the_trail_tells_of_both(tmp_path: Path) -> None:
    log = AuditLog()
    settings = PauseSettings(tmp_path)
    with Sandbox(
        policy=policy_named("strict"), pool=1, audit=log, host=HostSettings(pauses=settings)
    ) as box:
        session = box.session(id="told")
        session.execute("1")
        box.resume(session.pause()).close()
    told = [(each.action, each.target) for each in log.get_entries() if each.category == "session"]
    assert told == [
        ("opened", ""), ("paused", "it was paused"), ("opened", "a paused session is resumed"),
        ("closed", "it was closed"),
    ]  # fmt: skip


def test_the_async_twins(sandbox: Sandbox) -> None:
    async def go() -> object:
        session = sandbox.session()
        await session.aexecute("x = 41")
        async with await sandbox.aresume(await session.apause()) as resumed:
            return (await resumed.aexecute("x + 1")).value

    assert asyncio.run(go()) == 42


def test_invalid_settings_are_refused() -> None:
    for settings in (
        PauseSettings(directory=7),  # type: ignore[arg-type]
        PauseSettings(keep_seconds=-1),
        PauseSettings(key="short"),
        PauseSettings(most_bytes=0.5),  # type: ignore[arg-type]
        7,
    ):
        with pytest.raises(PolicyError, match="pauses|key"):
            Sandbox(policy=policy_named("strict"), pool=0, host=HostSettings(pauses=settings))  # type: ignore[arg-type]


KILLED = """
import os, signal, sys
from pathlib import Path
from cellwright import HostSettings, PauseSettings, Sandbox
from cellwright.harness.sandbox.sessions.state_file import StateWriter
from cellwright.runner.sessions.branches import BranchingProcess
from tests.conftest import policy_named

def die(*given, **named):
    os.kill(os.getpid(), signal.SIGKILL)

places = {"keep": BranchingProcess, "restore": BranchingProcess, "add": StateWriter}
step = sys.argv[1]
host = HostSettings(pauses=PauseSettings(sys.argv[2]), pausable=True)
with Sandbox(policy=policy_named("strict"), pool=1, host=host) as box:
    session = box.session()
    session.execute("x = 1")
    if step in ("restore", "rename"):
        if step == "rename":
            os.fsync = die
        token = session.pause()
        print(token, flush=True)
    setattr(places[step], step, die)
    session.pause() if step != "restore" else box.resume(token)
"""


def _written(states: PausedStates, *, is_own: bool = False) -> PauseToken:
    token = PauseToken.new()
    with states.writing(token, is_own=is_own) as writer:
        writer.add(state_file.END)
    return token


def _open_without_name(directory: Path) -> list[str]:
    links = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return [each for each in links if each.startswith(str(directory)) and "(deleted)" in each]


def test_the_file_of_a_state_that_was_taken_is_closed_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_close = threading.Event()

    def begin_late(name: str, work: Callable[[], object]) -> threading.Thread:
        return begin_thread(name, lambda: may_close.wait(60) and work())

    monkeypatch.setattr(pause_store, "begin_thread", begin_late)
    kept = PausedStates(PauseSettings(tmp_path))
    with kept.taking(_written(kept)) as pieces:
        assert list(pieces)
    assert states(tmp_path) == []
    assert len(_open_without_name(tmp_path)) == 1
    may_close.set()
    kept.settle()
    assert _open_without_name(tmp_path) == []


def test_the_file_of_a_state_that_was_taken_is_closed_without_a_thread_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin_none(*_: object) -> threading.Thread:
        raise LaunchError("cannot start a thread")

    monkeypatch.setattr(pause_store, "begin_thread", begin_none)
    kept = PausedStates(PauseSettings(tmp_path))
    with kept.taking(_written(kept)) as pieces:
        assert list(pieces)
    assert states(tmp_path) == _open_without_name(tmp_path) == []


@pytest.mark.parametrize("step", ["keep", "add", "rename", "restore"])
def test_a_killed_supervisor_leaves_a_whole_state_or_none(tmp_path: Path, step: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", KILLED, step, str(tmp_path)], capture_output=True, text=True,
        timeout=60, cwd=ROOT, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    whole = [each for each in states(tmp_path) if each.endswith(".session")]
    assert len(whole) == (step == "restore")
    if step == "restore":  # the state is there still
        with pausable(tmp_path) as box, box.resume(ran.stdout.strip()) as resumed:
            assert value(resumed, "x") == 1
    late = PausedStates(PauseSettings(tmp_path), lambda: time.time() + 3601)
    token = PauseToken.new()
    with late.writing(token) as writer:
        writer.add(state_file.END)
    assert states(tmp_path) == [f"{token.id}.session"]


@pytest.mark.parametrize("whom", ["source", "process"])
def test_who_is_killed_during_a_pause_leaves_nothing(
    sandbox: Sandbox, directory: Path, monkeypatch: pytest.MonkeyPatch, whom: str
) -> None:
    keep = BranchingProcess.keep
    killed: list[int] = []

    def kill_first(process: BranchingProcess, held: object, image: int, *given: object) -> None:
        if image >= 0 and not killed:
            number = process.pid if whom == "process" else None
            if number:
                os.kill(number, signal.SIGKILL)
            else:
                held.cell.kill()  # type: ignore[attr-defined]
            killed.append(1)
        keep(process, held, image, *given)  # type: ignore[arg-type]

    session: Session = sandbox.session()
    session.execute("x = 1")
    token = session.pause()  # the process is there
    session = sandbox.resume(token)
    monkeypatch.setattr(BranchingProcess, "keep", kill_first)
    try:
        session = sandbox.resume(session.pause())  # a new process was started
    except PauseError:
        assert states(directory) == []
        if whom == "source":
            with pytest.raises(SessionLost):
                session.execute("x")
            return
    assert value(session, "x") == 1
    session.close()


def test_a_pause_ends_no_other_session(tmp_path: Path) -> None:
    settings, sessions = PauseSettings(tmp_path), SessionSettings(alive=1, evict=True)
    with Sandbox(
        policy=policy_named("strict"), pool=1, sessions=sessions, host=HostSettings(pauses=settings)
    ) as box:
        first = box.session()
        first.execute("x = 1")
        token = first.pause()  # with a fresh cell, which is no session
        second = box.session()
        second.execute("x = 2")
        with box.resume(token) as resumed:  # as a session that is opened evicts another one
            assert value(resumed, "x") == 1
            assert "another one was opened" in second.lost
