"""Terminals of sessions: typing, reading, size, jobs and ends."""

import asyncio
import gc
import select
import signal
import threading
import time

import pytest

from cellwright import (
    BusyError,
    ClosedError,
    PolicyError,
    Sandbox,
    Session,
    SessionLost,
    SessionSettings,
    Terminal,
)
from tests.conftest import open_descriptors, policy_named, soon

pytestmark = pytest.mark.needs("userns")
_PATIENCE = 30.0


@pytest.fixture(scope="module")
def sandbox(workshop: Sandbox) -> Sandbox:
    return workshop


def until(terminal: Terminal, wanted: bytes) -> bytes:
    """Read until `wanted` was read; fails at the end of the output."""
    seen = b""
    while wanted not in seen:
        data = terminal.read(timeout=_PATIENCE)
        assert data, seen
        seen += data
    return seen


def to_the_end(terminal: Terminal) -> bytes:
    seen = b""
    while data := terminal.read(timeout=_PATIENCE):
        seen += data
    return seen


def test_a_program_has_the_terminal_and_its_size(session: Session) -> None:
    line = "tty; stty size; [ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo all; exit 7"
    with session.terminal(["sh", "-c", line], rows=30, columns=100) as terminal:
        assert to_the_end(terminal) == b"/dev/pts/0\r\n30 100\r\nall\r\n"
        assert (terminal.wait(_PATIENCE), terminal.exit_code) == (7, 7)


def test_a_shell_answers_what_is_typed(session: Session) -> None:
    with session.terminal() as terminal:
        terminal.write("echo $((6 * 7)) $TERM\n")
        until(terminal, b"42 xterm")
        terminal.write("exit 3\n")
        to_the_end(terminal)
        assert terminal.wait(_PATIENCE) == 3


def test_programs_are_told_of_another_size(session: Session) -> None:
    line = "trap 'stty size; exit' WINCH; echo ready; while :; do sleep 0.01; done"
    with session.terminal(["sh", "-c", line]) as terminal:
        until(terminal, b"ready")
        terminal.resize(50, 132)
        until(terminal, b"50 132")


def test_control_c_interrupts_the_job_in_the_foreground(session: Session) -> None:
    with session.terminal(["sh"], env={"PS1": "$ "}) as terminal:
        terminal.write("echo rea''dy; cat\n")
        until(terminal, b"ready")
        terminal.write("typed\n")
        until(terminal, b"typed\r\ntyped")  # as echo, and by cat
        terminal.write(b"\x03")
        until(terminal, b"^C\r\n$ ")
        terminal.write("echo status $?\n")
        until(terminal, b"status 130")


def test_a_program_can_switch_off_the_echo(session: Session) -> None:
    code = "import getpass; print('got', getpass.getpass())"
    with session.terminal(["python3", "-c", code]) as terminal:
        until(terminal, b"Password: ")
        terminal.write("secret\n")
        assert to_the_end(terminal) == b"\r\ngot secret\r\n"


def test_calls_of_the_session_go_on_beside_it(session: Session) -> None:
    with session.terminal(["sh"]) as terminal:
        terminal.write("echo from there >file\n")
        assert soon(lambda: session.run(["cat", "file"]).stdout == "from there\n")
        assert [each.pid for each in session.processes()] == [terminal.pid]


def test_several_are_separate(session: Session) -> None:
    with session.terminal(["cat"]) as first, session.terminal(["cat"]) as second:
        first.write("one\n")
        second.write("two\n")
        assert until(first, b"one\r\none\r\n") == b"one\r\none\r\n"
        assert until(second, b"two\r\ntwo\r\n") == b"two\r\ntwo\r\n"


def test_closing_it_hangs_up(session: Session) -> None:
    with session.terminal(["sh", "-c", "sleep 600; :"]) as terminal:
        (program,) = session.processes()
    assert program.wait(_PATIENCE) == 128 + signal.SIGHUP
    for late in (terminal.fileno, terminal.read, lambda: terminal.resize(1, 1)):
        with pytest.raises(ClosedError):
            late()


def test_asyncio_callers_type_and_read(session: Session) -> None:
    async def talk() -> tuple[bytes, int]:
        async with await session.aterminal(["cat"]) as terminal:
            with pytest.raises(TimeoutError, match="read: no output after 0.01 s"):
                await terminal.aread(timeout=0.01)
            waiting = asyncio.create_task(terminal.aread())
            await asyncio.sleep(0)
            waiting.cancel()
            await terminal.awrite("x\n")
            seen = b""
            while b"x\r\nx\r\n" not in seen:
                seen += await terminal.aread(timeout=_PATIENCE)
            await terminal.akill(signal.SIGTERM)
            while await terminal.aread(timeout=_PATIENCE):
                pass
            return seen, await terminal.await_end(_PATIENCE)

    assert asyncio.run(talk()) == (b"x\r\nx\r\n", 128 + signal.SIGTERM)


def test_asyncio_callers_wait_for_a_program_that_does_not_read(session: Session) -> None:
    async def talk() -> None:
        line = "stty raw -echo; echo ready; exec sleep 600"
        async with await session.aterminal(["sh", "-c", line]) as terminal:
            while b"ready" not in await terminal.aread(timeout=_PATIENCE):
                pass
            with pytest.raises(TimeoutError, match="does not read"):
                await terminal.awrite(b"x" * 1_000_000, timeout=0.2)

    asyncio.run(talk())


def test_one_of_a_sandbox_closes_its_session(workshop: Sandbox) -> None:
    with workshop.terminal(["sh", "-c", "echo $A; exit 5"], env={"A": "b"}) as terminal:
        assert to_the_end(terminal) == b"b\r\n"
        assert terminal.wait(_PATIENCE) == 5
        assert repr(terminal).startswith("<Terminal 'sh -c echo $A; exit 5', exit code 5")
    assert repr(terminal) == "<Terminal, closed>"
    late = workshop.terminal(["cat"])
    late.close()
    with pytest.raises(SessionLost, match="it was closed"):
        late.wait(_PATIENCE)
    with pytest.raises(PolicyError, match="command: must name a program"):
        workshop.terminal([])


def test_one_that_is_forgotten_is_closed_with_its_session(workshop: Sandbox) -> None:
    terminal = workshop.terminal(["cat"])
    ended, session = threading.Event(), terminal._on_close[1].__self__  # type: ignore[attr-defined]
    terminal._on_close.append(ended.set)
    del terminal
    gc.collect()
    assert ended.wait(_PATIENCE)
    assert session.lost == "it was closed"


def test_it_ends_with_the_session(workshop: Sandbox) -> None:
    with workshop.session() as session:
        terminal = session.terminal(["sh", "-c", "trap '' HUP TERM; while :; do sleep 1; done"])
    with terminal:
        assert to_the_end(terminal) == b""
        with pytest.raises(SessionLost):
            terminal.wait(_PATIENCE)


def test_it_keeps_an_idle_session_alive() -> None:
    settings = SessionSettings(idle_seconds=0.1, freeze_seconds=0.05)
    with (
        Sandbox(policy=policy_named("workshop"), pool=0, sessions=settings) as box,
        box.session() as session,
        session.terminal(["cat"]) as terminal,
    ):
        cell = session.cell  # type: ignore[attr-defined]
        due, now = cell.clock.used_at + 0.3, time.monotonic
        assert soon(lambda: now() > due)
        assert (cell.is_frozen, session.lost) == (False, "")
        terminal.write("x\n")
        until(terminal, b"x\r\nx")
        terminal.close()
        assert soon(lambda: bool(session.lost))


def test_a_missing_program_is_named_there(session: Session) -> None:
    with session.terminal(["no-such-program"]) as terminal:
        assert to_the_end(terminal) == b"no-such-program: No such file or directory\r\n"
        assert terminal.wait(_PATIENCE) == 127


def test_a_flood_waits_for_its_reader(session: Session) -> None:
    with session.terminal(["yes"]) as terminal:
        until(terminal, b"y\r\ny\r\n")
        assert session.execute("1 + 1").value == 2
        terminal.kill()
        assert terminal.wait(_PATIENCE) == 137


def test_typing_ends_in_time_if_nobody_reads(session: Session) -> None:
    with session.terminal(["sh", "-c", "stty raw -echo; echo ready; exec sleep 600"]) as terminal:
        until(terminal, b"ready")
        with pytest.raises(TimeoutError, match="does not read"):
            terminal.write(b"x" * 1_000_000, timeout=0.2)
        with pytest.raises(TimeoutError, match="no output"):
            terminal.read(timeout=0.01)


def test_a_program_that_takes_every_terminal_is_told_of(session: Session) -> None:
    session.execute("import os\ntaken = [os.open('/dev/pts/ptmx', os.O_RDWR) for _ in range(16)]")
    with pytest.raises(BusyError, match="programs of the cell hold every terminal"):
        session.terminal()
    session.execute("for each in taken: os.close(each)")
    session.terminal(["true"]).close()


def test_no_descriptor_is_left(session: Session) -> None:
    session.terminal(["true"]).close()
    before = open_descriptors()
    for _ in range(3):
        session.terminal(["true"]).close()
        with pytest.raises(PolicyError):
            session.terminal([])
        with pytest.raises(PolicyError):
            session.terminal(["true"], rows=0)
    assert open_descriptors() <= before


def test_poll_tells_of_output(session: Session) -> None:
    with session.terminal(["echo", "x"]) as terminal:
        assert select.select([terminal], [], [], _PATIENCE)[0] == [terminal]


def test_only_policies_that_say_so_have_terminals(standard: Sandbox) -> None:
    with standard.session() as session:
        with pytest.raises(PolicyError, match="terminal: the policy allows none") as refused:
            session.terminal()
        assert "workshop" in refused.value.hint
        assert session.run(["ls", "/dev"]).stdout.split().count("pts") == 0
    with pytest.raises(PolicyError, match="needs processes.subprocesses"):
        Sandbox(policy={"processes": {"terminal": True}})
