"""Contracts of a session, the same through each face that `faces.py` lists."""

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cellwright import (
    ExposedPort,
    PolicyError,
    Session,
    SessionLost,
    SessionSettings,
    WorkspaceError,
)
from cellwright.errors import PauseError, SessionExpired
from tests.conftest import soon
from tests.contracts.faces import FACES, Face
from tests.harness.test_branching import REFUSED, value
from tests.harness.test_terminal import until

pytestmark = pytest.mark.needs("userns", "cgroup")
_PATIENCE = 30.0
MANY = SessionSettings(alive=16)
SERVER = """
import socket, threading
listener = socket.create_server(("127.0.0.1", 8000))
def serve():
    while True:
        sock, _ = listener.accept()
        with sock:
            sock.sendall(b"from the cell")
threading.Thread(target=serve, daemon=True).start()
"""


def face_named(name: str, place: Path, policy: str = "strict") -> Iterator[Face]:
    with FACES[name](place, policy, MANY) as face:
        yield face


@pytest.fixture(scope="module", params=FACES)
def face(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Face]:
    """Every face."""
    yield from face_named(request.param, tmp_path_factory.mktemp("face"))


@pytest.fixture(scope="module", params=["local", "daemon", "fleet"])
def library(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Face]:
    """The faces of the library, whose sessions are of class `Session`."""
    yield from face_named(request.param, tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module", params=["local", "daemon"])
def host(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Face]:
    """The faces that have the cells of this host."""
    yield from face_named(request.param, tmp_path_factory.mktemp("host"))


@pytest.fixture(scope="module", params=["local", "daemon"])
def workshop(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Face]:
    """The same under a policy that has programs, terminals and a loopback."""
    yield from face_named(request.param, tmp_path_factory.mktemp("workshop"), "workshop")


# Every face


def test_variables_imports_files_and_directory_stay(face: Face) -> None:
    with face.open() as session:
        make = "import os, json\nx = [1]\nos.makedirs('d')\nos.chdir('d')\nopen('f', 'w').write('here')"
        assert session.execute(make).ok
        assert session.execute("x.append(2)\nx").value == [1, 2]
        shown = session.execute("json.dumps(os.getcwd()), open('f').read()").value
        assert shown == ['"/workspace/d"', "here"]


def test_files_are_written_listed_and_read(face: Face) -> None:
    with face.open() as session:
        session.upload("d/f", b"\0\xff")
        session.execute("open('made', 'w').write(str(len(open('d/f', 'rb').read())))")
        listed = [(each.path, each.size_bytes) for each in session.files()]
        assert listed == [("d/f", 2), ("made", 1)]
        assert (session.download("d/f"), session.download("made")) == (b"\0\xff", b"2")
        with pytest.raises(WorkspaceError, match="cannot read 'none'"):
            session.download("none")
        assert session.execute("open('g').read()", files={"g": "given"}).value == "given"


def test_two_sessions_share_nothing(face: Face) -> None:
    with face.open() as one, face.open() as other:
        one.execute("import os\nsecret = 1\nopen('f', 'w').write('x')\nos.environ['S'] = 's'")
        assert "NameError" in str(other.execute("secret").error)
        seen = other.execute("import os\nos.listdir('/workspace'), os.environ.get('S')").value
        assert seen == [[], None]
        assert one.execute("os.listdir('/workspace')").value == ["f"]
        assert one.id != other.id


def test_a_program_that_takes_too_long_is_interrupted_and_its_state_stays(face: Face) -> None:
    with face.open() as session:
        session.execute("n = 0")
        late = session.execute("while True: n += 1", timeout=1)
        assert (late.reason, late.session_lost) == ("wall_time", False)
        assert "KeyboardInterrupt" in late.stderr
        assert session.execute("n > 0").value is True


def test_a_program_that_ends_its_process_ends_the_session(face: Face) -> None:
    session = face.open()
    ended = session.execute("import os; os.kill(os.getpid(), 9)")
    assert (ended.ok, ended.session_lost) == (False, True)
    for late in (lambda: session.execute("1"), session.files, lambda: session.upload("f", b"")):
        with pytest.raises(SessionLost):
            late()
    session.close()


def test_calls_from_many_threads_are_served_whole(face: Face) -> None:
    with face.open() as session:
        session.execute("log = []")
        with ThreadPoolExecutor(4) as threads:
            calls = [f"for _ in range(50): log.append({number})" for number in range(12)]
            assert all(each.ok for each in threads.map(session.execute, calls))
        log = session.execute("log").value
        runs = [log[at : at + 50] for at in range(0, len(log), 50)]
        assert sorted(runs) == [[number] * 50 for number in range(12)]


def test_a_closed_session_runs_nothing(face: Face) -> None:
    session = face.open()
    session.close()
    session.close()
    with pytest.raises(SessionLost):
        session.execute("1")


def test_another_language_is_refused_and_the_session_goes_on(face: Face) -> None:
    with pytest.raises(PolicyError, match="language"):
        face.open(language="cobol")
    with face.open() as session:
        session.execute("x = 1")
        with pytest.raises(PolicyError, match="language"):
            session.execute("true", language="sh")
        assert session.execute("x").value == 1


# The library


def test_its_end_has_a_reason(library: Face) -> None:
    session: Session = library.open()
    assert (session.lost, session.expired, session.paused) == ("", "", False)
    assert session.execute("x = 20").session_id == session.id
    session.close()
    assert (session.lost, session.expired, session.paused) == ("it was closed", "", False)
    with pytest.raises(SessionLost, match="it was closed"):
        session.execute("x")


def test_the_files_of_a_session_can_be_kept_and_put_into_another(library: Face) -> None:
    make = (
        "import os\nos.mkdir('d')\nopen('d/\u00fc', 'w').write('1')\n"
        "open('e', 'wb').write(bytes(range(256)))\nos.symlink('/etc/passwd', 'l')\nos.mkfifo('f')"
    )
    with library.open() as one, library.open() as other:
        one.execute(make)
        other.execute("open('e', 'w').write('older and longer than the other one' * 10)")
        other.restore(one.snapshot())
        assert [file.path for file in other.files()] == ["d/\u00fc", "e"]
        assert other.download("e") == bytes(range(256))


def test_a_fork_has_the_state_and_goes_its_own_way(library: Face) -> None:
    with library.open() as session:
        session.upload("data", "1 2 3")
        session.execute("total = sum(map(int, open('data').read().split()))\nprint(total)")
        session.execute("def twice(n): return n * given", inputs={"given": 2}, env={"E": "e"})
        with session.fork() as branch:
            assert (branch.diverged, branch.id != session.id) == ((), True)
            assert branch.execute("import os\ntwice(total), os.environ['E']").value == [12, "e"]
            branch.execute("total = 0\nopen('data', 'w').write('0')")
            assert session.execute("total, open('data').read()").value == [6, "1 2 3"]
            with branch.fork() as third:
                assert third.execute("total").value == 0


def test_a_fork_says_what_went_another_way(library: Face) -> None:
    with library.open() as session:
        for code in ("x = 1", "import os, random\nrandom.random(), os.urandom(4).hex()", "x + 1"):
            session.execute(code)
        with session.fork() as branch:
            assert (branch.diverged, branch.forked_by) == ((2,), "replay")
            assert branch.execute("x").value == 1


def test_a_session_is_extended_and_invalid_seconds_are_refused(library: Face) -> None:
    with library.open() as session:
        session.extend(1)
        with pytest.raises(PolicyError, match="seconds: must be"):
            session.extend(float("nan"))
    with pytest.raises(SessionLost):
        session.extend(1)


def test_asyncio_callers_are_served_in_turn(library: Face) -> None:
    async def both(session: Session) -> list[object]:
        await session.aexecute("x = 20")
        results = await asyncio.gather(session.aexecute("x + 1"), session.aexecute("x + 2"))
        return [each.value for each in results]

    with library.open() as session:
        assert asyncio.run(both(session)) == [21, 22]


# The cells of this host


def test_a_name_leads_to_the_session_that_lives(host: Face) -> None:
    first = host.open("agent-1")
    first.execute("x = 1")
    assert host.open("agent-1").execute("x").value == 1
    with host.open("agent-2") as second:
        assert second.id == "agent-2"
    first.close()
    with host.open("agent-1") as again:
        assert "NameError" in str(again.execute("x").error)
    for wrong in ("", 5):
        with pytest.raises(PolicyError, match="id: must be a text"):
            host.open(wrong)


def test_a_session_is_branched_by_memory(host: Face) -> None:
    with host.open() as source:
        source.execute("x, it = [1], iter(range(9)); n = next(it)")
        for branch in source.branch(2, reseed=True):
            with branch:
                assert (branch.forked_by, branch.not_copied) == ("memory", "")
                assert value(branch, "x.append(2); x, next(it)") == [[1, 2], 1]
        assert value(source, "x, next(it)") == [[1], 1]
        for n in (0, 9, True):
            with pytest.raises(PolicyError, match="n: must be"):
                source.branch(n)


def test_what_cannot_be_copied_is_replayed_or_refused(host: Face) -> None:
    with host.open() as source:
        source.execute(REFUSED["threads"])
        with pytest.raises(PolicyError, match="it runs threads"):
            source.branch(replay=False)
        (replayed,) = source.branch()
        with replayed:
            assert replayed.forked_by == "replay"
            assert "threads" in replayed.not_copied


def test_a_session_is_paused_and_resumed_once(host: Face) -> None:
    session = host.open("kept")
    session.execute("x = 41", files={"data": b"kept"})
    token = session.pause()
    assert session.lost == "it was paused"
    with pytest.raises(SessionLost, match="it was paused"):
        session.execute("x")
    with host.open("kept") as other:
        assert not other.execute("x").ok
        with pytest.raises(PauseError, match="a session of its id lives"):
            host.sandbox.resume(token)
    with host.sandbox.resume(token) as resumed:
        assert (resumed.id, value(resumed, "x + 1")) == ("kept", 42)
        assert resumed.download("data") == b"kept"
        with pytest.raises(PolicyError, match="before a session was paused"):
            resumed.fork()
    for again in (host.sandbox.resume, host.sandbox.discard):
        with pytest.raises(PauseError, match="no such paused session"):
            again(token)


def test_a_state_that_was_discarded_is_gone(host: Face) -> None:
    token = host.open().pause()
    host.sandbox.discard(token)
    with pytest.raises(PauseError, match="no such paused session"):
        host.sandbox.resume(token)


@pytest.mark.parametrize("why", ["threads", "a socket", "shares memory", "special file"])
def test_what_cannot_be_paused_is_named_and_goes_on(host: Face, why: str) -> None:
    with host.open() as session:
        assert session.execute(REFUSED[why] + "\nkept = 7").ok
        with pytest.raises(PauseError, match=why):
            session.pause()
        assert value(session, "kept") == 7


@pytest.mark.parametrize(
    "token",
    ["", "cwp_", "cwp_../../etc/passwd_00", "x" * 10_000, 7, None, f"cwp_{'a' * 32}_{'b' * 63}", "cwp_" + "\u0661" * 32 + "_" + "b" * 64],
)  # fmt: skip
def test_an_invalid_token_is_refused(host: Face, token: str) -> None:
    for use in (host.sandbox.resume, host.sandbox.discard):
        with pytest.raises(PauseError, match="is no token") as refused:
            use(token)
        assert "etc" not in str(refused.value)


@pytest.mark.parametrize("name", ["local", "daemon"])
def test_an_idle_session_is_ended_and_says_which_setting_did_it(name: str, tmp_path: Path) -> None:
    settings = SessionSettings(alive=4, idle_seconds=0.1)
    with FACES[name](tmp_path, "strict", settings) as face:
        session = face.open()
        assert soon(lambda: session.lost == "it was idle for too long (idle_seconds)")
        assert session.expired == "idle_seconds"
        with pytest.raises(SessionExpired, match="too long") as refused:
            session.execute("1")
        assert refused.value.limit == "idle_seconds"


# Programs, terminals and ports


def heard_at(exposed: ExposedPort) -> bytes:
    family = socket.AF_UNIX if isinstance(exposed.address, str) else socket.AF_INET
    with socket.socket(family) as sock:
        sock.connect(exposed.address)
        return sock.recv(100)


def test_a_port_is_reached_until_it_is_closed(workshop: Face, tmp_path: Path) -> None:
    with workshop.open() as session:
        assert session.execute(SERVER).ok
        with session.expose(8000) as exposed, session.expose(8000, path=tmp_path / "p") as at_path:
            assert (exposed.port, at_path.address) == (8000, str(tmp_path / "p"))
            assert exposed.url.startswith("http+unix://")
            assert heard_at(exposed) == heard_at(at_path) == b"from the cell"
            assert os.stat(at_path.address).st_mode & 0o777 == 0o600
        assert not os.path.exists(at_path.address)
        exposed.close()
        with session.expose(8000, host_port=0) as on_loopback:
            assert heard_at(on_loopback) == b"from the cell"
        with pytest.raises(ConnectionError):
            heard_at(on_loopback)
        for given in ({"port": 0}, {"port": 8000, "host_port": -1}, {"port": 8000, "path": 5}):
            with pytest.raises(PolicyError, match=f"{list(given)[-1]}: must be"):
                session.expose(**given)
        left = session.expose(8001)
    assert not os.path.exists(left.address)
    left.close()


def test_background_processes_are_those_of_the_session(workshop: Face) -> None:
    with workshop.open("shared") as session:
        attached = workshop.open("shared")
        process = session.start_command("read x; echo got $x; exit 3", shell=True)
        assert process.write("line\n") == 5
        assert process.read(timeout=_PATIENCE) == b"got line\n"
        assert process.wait(_PATIENCE) == 3
        assert [each.pid for each in attached.processes()] == [process.pid]


def test_a_terminal_is_typed_into_resized_and_ends(workshop: Face) -> None:
    with workshop.open() as session:
        with session.terminal(["sh"], rows=30, columns=100, env={"PS1": "$ "}) as terminal:
            terminal.write("stty size; echo $TERM\n")
            until(terminal, b"30 100\r\nxterm")
            terminal.resize(50, 132)
            terminal.write("stty size; cat\n")
            until(terminal, b"50 132")
            terminal.write("typed\n")
            until(terminal, b"typed\r\ntyped")  # as echo, and by cat
            terminal.write(b"\x03")
            until(terminal, b"^C\r\n$ ")
            assert session.execute("6 * 7").value == 42
            terminal.write("exit 3\n")
            while terminal.read(timeout=_PATIENCE):
                pass
            assert (terminal.wait(_PATIENCE), terminal.exit_code) == (3, 3)
        with pytest.raises(PolicyError, match="rows: must be"):
            session.terminal(rows=0)


def test_a_terminal_of_a_sandbox_ends_with_its_session(workshop: Face) -> None:
    with workshop.sandbox.terminal(["sh", "-c", "echo ready; exec cat"]) as terminal:
        until(terminal, b"ready")
        terminal.kill(signal.SIGTERM)
        assert terminal.wait(_PATIENCE) == 128 + signal.SIGTERM

    async def talk() -> bytes:
        async with await workshop.sandbox.aterminal(["cat"]) as terminal:
            await terminal.awrite("x\n")
            return bytes(await terminal.aread(timeout=_PATIENCE))

    assert asyncio.run(talk()).startswith(b"x")
