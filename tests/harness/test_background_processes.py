"""Background processes of sessions: their output, input, ends and signals, and hostile ones."""

import asyncio
import signal
from collections.abc import Iterator

import pytest

from cellwright import BackgroundProcess, PolicyError, Sandbox, Session, SessionLost
from cellwright.policies.policy import Processes
from tests.conftest import policy_named, soon

pytestmark = pytest.mark.needs("userns")
_PATIENCE = 30.0  # seconds; what ends in time ends long before


@pytest.fixture
def session(standard: Sandbox) -> Iterator[Session]:
    with standard.session() as opened:
        yield opened


def output_of(process: BackgroundProcess) -> bytes:
    """Return all output of a process that ends."""
    process.wait(_PATIENCE)
    found = b""
    while data := process.read(timeout=_PATIENCE):
        found += data
    return found


def test_it_reads_writes_and_ends_between_calls(session: Session) -> None:
    process = session.start_command("while read x; do echo got $x; done; exit 3", shell=True)
    assert process.exit_code is None
    for word in ("one", "two"):
        assert process.write(f"{word}\n") == 4
        assert process.read(timeout=_PATIENCE) == f"got {word}\n".encode()
    process.close_stdin()
    assert (process.wait(_PATIENCE), process.exit_code) == (3, 3)
    assert (process.read(), process.dropped_bytes) == (b"", 0)


def test_it_goes_on_while_nobody_calls(session: Session) -> None:
    process = session.start_command("cat /usr/share/none; echo done >file", shell=True)
    assert soon(lambda: "file" in [each.path for each in session.files()])
    assert b"No such file" in output_of(process)


def test_its_directory_and_variables_are_its_own(session: Session) -> None:
    process = session.start_command("pwd; echo $A", shell=True, cwd="/tmp", env={"A": "1"})
    assert output_of(process) == b"/tmp\n1\n"
    assert session.run("echo ${A:-none}", shell=True).stdout == "none\n"


def test_arguments_that_are_no_text_reach_the_program_and_are_shown_as_text(
    session: Session,
) -> None:
    process = session.start_command(["printf", "%s", "\udce9"])
    assert output_of(process) == b"\xe9"
    assert [each.command for each in session.processes()] == [("printf", "%s", "?")]
    with pytest.raises(PolicyError, match="lone surrogate"):
        session.start_command(["printf", "\ud800"])


def test_both_streams_are_read_and_a_missing_program_is_named(session: Session) -> None:
    assert output_of(session.start_command(["sh", "-c", "echo a; echo b >&2"])) == b"a\nb\n"
    missing = session.start_command(["no-such-program", "\x1b"])
    assert missing.exit_code == 127
    assert repr(missing).endswith(": 'no-such-program \\x1b', exit code 127>")
    assert missing.read() == b"no-such-program: No such file or directory\n"
    assert missing.write("x") == 0


def test_a_long_command_is_started_and_told_in_part(session: Session) -> None:
    command = ["printf", "%s", *(["x" * 65536] * 16)]
    process = session.start_command(command)
    assert process.command == tuple(command)
    assert process.wait(_PATIENCE) == 0
    assert session.processes()[0].command == ("printf", "%s", "x" * 992)


def test_it_is_read_bit_by_bit(session: Session) -> None:
    process = session.start_command(["printf", "abcdef"])
    process.wait(_PATIENCE)
    assert [process.read(4, timeout=_PATIENCE) for _ in range(3)] == [b"abcd", b"ef", b""]


def test_they_are_listed_and_killed_one_by_one(session: Session) -> None:
    first, second = (session.start_command(["sleep", "600"]) for _ in range(2))
    first.kill()
    assert first.wait(_PATIENCE) == 128 + signal.SIGKILL
    listed = [(each.id, each.command, each.exit_code) for each in session.processes()]
    assert listed == [(first.id, ("sleep", "600"), 137), (second.id, ("sleep", "600"), None)]
    second.kill(signal.SIGTERM)
    assert second.wait(_PATIENCE) == 128 + signal.SIGTERM
    second.kill()


def test_waiting_ends_in_time(session: Session) -> None:
    process = session.start_command(["sleep", "600"])
    with pytest.raises(TimeoutError, match="after 0 s"):
        process.wait(0)
    assert process.read(timeout=0) == b""


def test_they_end_with_the_session(standard: Sandbox) -> None:
    with standard.session() as session:
        process = session.start_command(["setsid", "sleep", "600"])
    with pytest.raises(SessionLost):
        process.read()


def test_a_flood_that_ignores_signals_is_bounded_and_killed(session: Session) -> None:
    flood = session.start_command("trap '' TERM INT HUP; yes & yes & wait", shell=True)
    assert soon(lambda: len(flood.read()) > 0 and flood.dropped_bytes > 10_000_000)
    assert session.execute("1 + 1").value == 2
    flood.kill(signal.SIGTERM)
    assert flood.exit_code is None
    flood.kill()
    assert flood.wait(_PATIENCE) == 137
    assert soon(lambda: session.run("ps -e -o comm=", shell=True).stdout.count("yes") == 0)


def test_one_that_forks_without_end_is_bounded_and_killed(session: Session) -> None:
    forks = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n"
    process = session.start_command(["python3", "-c", forks])
    assert soon(lambda: (session.execute("1").usage.processes_peak or 64) >= 60)
    process.kill()
    assert process.wait(_PATIENCE) == 137


def test_one_that_does_not_read_takes_what_fits(session: Session) -> None:
    process = session.start_command(["sleep", "600"])
    taken = process.write(b"x" * 1_000_000, timeout=0.2)
    assert 0 < taken < 1_000_000


def test_no_more_than_some_run_at_once() -> None:
    policy = policy_named("workshop")
    with Sandbox(policy=policy, pool=0) as box, box.session() as session:
        for _ in range(64):
            last = session.start_command(["sleep", "600"])
        with pytest.raises(SessionLost, match="64 background processes run"):
            session.start_command(["true"])
        last.kill()
        last.wait(_PATIENCE)
        assert session.start_command(["true"]).wait(_PATIENCE) == 0


@pytest.mark.parametrize(
    "forged",
    ["5", "[]", "['x']", "['x', [1, 2, ['a'], None, 0]]", "['eA==', [1, 'x', ['a'], 0, 0]]"],
)
def test_a_program_that_answers_in_its_place_is_not_believed(forged: str, session: Session) -> None:
    process = session.start_command(["true"])
    module = "__import__('sys').modules['_cellwright_cell_processes']"
    session.execute(f"{module}.ask = lambda *_: {forged}")
    with pytest.raises(SessionLost, match="the cell told another thing"):
        process.read()


def test_a_fork_of_the_session_starts_them_again(session: Session) -> None:
    process = session.start_command(["cat"])
    with session.fork() as branch:
        (copied,) = branch.processes()
        assert (copied.id, copied.command, copied.exit_code) == (process.id, ("cat",), None)


def test_no_name_of_ours_is_left_in_the_session(session: Session) -> None:
    session.start_command(["true"])
    assert session.execute("[name for name in dir() if name[0] != '_']").value == []


def test_asyncio_callers_start_them_too(session: Session) -> None:
    async def talk() -> tuple[bytes, int]:
        process = await session.astart_command("while read x; do echo got $x; done", shell=True)
        assert await process.aread() == b""
        assert await process.awrite("one\n") == 4
        heard = await process.aread(timeout=_PATIENCE)
        with pytest.raises(TimeoutError, match="still runs after 0.01 s"):
            await process.await_end(0.01)
        await process.akill()
        return heard, await process.await_end(_PATIENCE)

    assert asyncio.run(talk()) == (b"got one\n", 137)

    async def end() -> int:
        process = await session.astart_command(["cat"])
        await process.aclose_stdin()
        return await process.await_end(_PATIENCE)

    assert asyncio.run(end()) == 0


def test_what_a_cancelled_task_has_read_is_not_lost(session: Session) -> None:
    process = session.start_command(["cat"])

    async def give_up() -> None:
        reading = asyncio.create_task(process.aread(timeout=_PATIENCE))
        await asyncio.sleep(0)  # it has begun
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(give_up())
    process.write("kept\n")
    assert process.read(timeout=_PATIENCE) == b"kept\n"


def test_what_the_policy_must_allow(strict: Sandbox) -> None:
    with strict.session() as session:
        with pytest.raises(PolicyError, match="no subprocesses"):
            session.start_command(["true"])
        assert session.processes() == ()
    policy = policy_named("standard")
    single = Processes(threads=False, subprocesses=True, execute=policy.processes.execute)
    with (
        Sandbox(policy=policy_named("standard", processes=single), pool=0) as box,
        box.session() as session,
        pytest.raises(SessionLost, match="thread"),
    ):
        session.start_command(["true"])


def test_a_session_of_another_language_has_none(standard: Sandbox) -> None:
    with (
        standard.session(language="sh") as session,
        pytest.raises(PolicyError, match="session of sh"),
    ):
        session.start_command(["true"])


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("read", (0,)), ("read", ("x",)), ("read", (1, -1.0)), ("write", (5,)), ("kill", (0,)),
        ("kill", ("TERM",)), ("wait", (float("nan"),)),
    ],
    ids=str,
)  # fmt: skip
def test_invalid_arguments_are_refused(
    method: str, arguments: tuple[object, ...], session: Session
) -> None:
    process = session.start_command(["sleep", "600"])
    with pytest.raises(PolicyError, match="must be"):
        getattr(process, method)(*arguments)
