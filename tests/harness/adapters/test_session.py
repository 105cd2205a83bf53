"""The session that all adapters share: made late, commands with whole output, files anywhere."""

import asyncio
import errno
import threading
from collections.abc import Iterator

import pytest

from cellwright import ClosedError, PolicyError, Sandbox, SessionLost
from cellwright.harness.adapters.common.cell_sandbox_session import AdapterSession
from tests.conftest import policy_named, soon, with_limits

pytestmark = pytest.mark.needs("userns")


@pytest.fixture
def cell(workshop: Sandbox) -> Iterator[AdapterSession]:
    with AdapterSession(workshop) as opened:
        yield opened


def test_nothing_is_made_before_the_first_use_and_then_once(workshop: Sandbox) -> None:
    with AdapterSession(policy=policy_named("workshop"), pool=0) as own:
        assert not own.is_open
        threads = [threading.Thread(target=lambda: own.files.exists("x")) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(30)
        assert own.is_open
        assert own.run(["true"]).exit_code == 0
        assert own.files.listed("/tmp") == ()
        sandbox = own.sandbox
        assert sandbox is own.sandbox is not workshop
    with pytest.raises(ClosedError):
        sandbox.execute("1")


def test_a_sandbox_that_was_given_stays_open(workshop: Sandbox) -> None:
    with AdapterSession(workshop) as cell:
        session = cell.session
        assert cell.execute("6 * 7").value == 42
    assert session.lost
    assert workshop.execute("6 * 7").value == 42
    with pytest.raises(ClosedError):
        cell.run(["true"])
    with pytest.raises(PolicyError, match=r"^policy, pool: cannot be combined with sandbox="):
        AdapterSession(workshop, policy="strict", pool=0)


def test_a_command_has_an_exit_code_and_both_streams(cell: AdapterSession) -> None:
    done = cell.run("echo out; echo err >&2; exit 3", shell=True)
    assert (done.exit_code, done.stdout, done.stderr) == (3, b"out\n", b"err\n")
    done = cell.run("echo a; echo b >&2; echo c", shell=True, is_merged=True)
    assert (done.exit_code, done.text) == (0, ("a\nb\nc\n", ""))
    done = cell.run(["sh", "-c", "printf '\\377'; kill -TERM $$"])
    assert (done.exit_code, done.stdout, done.text[0]) == (143, b"\xff", "\ufffd")


def test_the_argument_vector_directory_variables_and_input_arrive(cell: AdapterSession) -> None:
    assert cell.run(["printf", "%s|", "a b", "$x", "'"]).stdout == b"a b|$x|'|"
    assert cell.run(["pwd"]).stdout == b"/workspace\n"
    assert cell.run(["pwd"], cwd="/tmp").stdout == b"/tmp\n"
    assert cell.run("echo $A", shell=True, env={"A": "1 2"}).stdout == b"1 2\n"
    assert cell.run(["cat"], stdin=b"\xff\0x").stdout == b"\xff\0x"
    assert cell.run(["cat"], stdin="").stdout == b""
    assert cell.run(["wc", "-c"], stdin=bytes(20 * 2**20)).stdout == b"20971520\n"
    assert cell.run(["sh", "-c", "read x || echo end"]).stdout == b"end\n"


@pytest.mark.parametrize("is_merged", [False, True])
def test_what_cannot_be_started_says_so(cell: AdapterSession, is_merged: bool) -> None:
    for command, cwd, code, words in (
        (["no-such-program"], None, 127, b"not found"),
        (["/usr/share"], None, 126, b"denied"),
        (["true"], "/no/such/directory", 127, b"/no/such/directory: No such file"),
    ):
        done = cell.run(command, cwd=cwd, is_merged=is_merged)
        assert done.exit_code == code
        assert words in (done.stdout if is_merged else done.stderr)


def test_large_output_is_whole_or_said_to_be_cut(cell: AdapterSession) -> None:
    command = "head -c 3000000 /dev/zero; head -c 10 /dev/zero >&2"
    done = cell.run(command, shell=True)
    assert (done.stdout, done.stderr, done.is_truncated) == (bytes(3_000_000), bytes(10), False)
    done = cell.run(command, shell=True, max_output_bytes=1_000_000)
    assert (done.stdout, done.sizes, done.is_truncated) == (
        bytes(1_000_000), (3_000_000, 10), True,
    )  # fmt: skip
    assert cell.files.listed("/tmp") == cell.files.listed("/workspace") == ()


def test_a_command_that_takes_too_long_is_killed_with_its_group(cell: AdapterSession) -> None:
    done = cell.run("echo begun; sleep 600 & sleep 600", shell=True, timeout=0.3)
    assert (done.timed_out, done.exit_code, done.stdout) == (True, 124, b"begun\n")
    assert soon(lambda: cell.run(["pgrep", "sleep"]).exit_code == 1)
    short = with_limits(policy_named("workshop"), wall_seconds=0.5)
    with AdapterSession(policy=short, pool=0) as hurried:
        assert hurried.run(["sleep", "600"]).timed_out
        assert hurried.run(["sleep", "600"], timeout=60).timed_out
        assert hurried.run(["true"], timeout=60).exit_code == 0


def test_commands_run_beside_each_other(cell: AdapterSession) -> None:
    waits = threading.Thread(
        target=lambda: cell.run("until [ -f go ]; do sleep 0.01; done", shell=True)
    )
    waits.start()
    assert cell.run(["touch", "go"]).exit_code == 0
    waits.join(30)
    assert not waits.is_alive()


def test_a_cancelled_task_kills_its_command(cell: AdapterSession) -> None:
    async def main() -> None:
        task = asyncio.create_task(cell.arun("echo $$ >pid; exec sleep 600", shell=True))
        while not await cell.in_thread(lambda: cell.files.exists("pid")):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await cell.arun(["true"])).exit_code == 0

    asyncio.run(main())
    assert soon(lambda: cell.run(["pgrep", "sleep"]).exit_code == 1)
    assert soon(lambda: cell.files.listed("/tmp") == ())


def test_what_a_command_left_in_the_background_lives_on(cell: AdapterSession) -> None:
    done = cell.run("(until [ -f go ]; do sleep 0.01; done; echo late) & echo now", shell=True)
    assert done.stdout == b"now\n"
    cell.run("setsid sh -c 'until [ -f go ]; do sleep 0.01; done; echo x >done' & ", shell=True)
    cell.files.write("go", b"")
    assert soon(lambda: cell.files.exists("done"))


@pytest.mark.parametrize("size", [0, 1, 300_000, 20 * 2**20])
@pytest.mark.parametrize("folder", ["/workspace", "/tmp", "new/folder"])
def test_files_are_written_and_read_anywhere(cell: AdapterSession, folder: str, size: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    cell.files.write(f"{folder}/a file", data)
    assert cell.files.read(f"{folder}/a file") == data
    assert cell.files.status(f"{folder}/a file").size == size
    assert [each.path for each in cell.files.listed(folder)] == ["a file"]


def test_files_have_the_errors_of_files(cell: AdapterSession) -> None:
    files = cell.files
    files.write("file", b"x")
    files.write("secret", b"x")
    cell.run("chmod 000 secret; mkfifo fifo; ln -s file link; ln -s loop loop; mkdir d", shell=True)
    with pytest.raises(FileNotFoundError) as caught:
        files.read("missing\n")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, "missing\n")
    for path, error in (
        ("d", IsADirectoryError), ("secret", PermissionError), ("file/x", NotADirectoryError),
        ("fifo", OSError), ("loop", OSError), ("a\0b", OSError),
    ):  # fmt: skip
        with pytest.raises(error):
            files.read(path)
        with pytest.raises(error):
            files.write(path, b"y")
        with pytest.raises(error):
            files.write(path, bytes(200_000))
    with pytest.raises(FileExistsError):
        files.make_directory("file")
    with pytest.raises(NotADirectoryError):
        files.make_directory("file/x")
    with pytest.raises(NotADirectoryError):
        files.listed("file")
    with pytest.raises(OSError, match="larger than 3 bytes") as too_large:
        files.read("/usr/bin/env", max_bytes=3)
    assert too_large.value.errno == errno.EFBIG
    assert not files.exists("missing")
    assert not files.exists("file/x")
    files.write("link", b"through")
    assert (files.read("file"), files.resolve("link")) == (b"through", "/workspace/file")
    listed = {each.path: each.is_directory for each in files.listed("/workspace")}
    assert listed == {
        "d": True, "fifo": False, "file": False, "link": False, "loop": False, "secret": False,
    }  # fmt: skip
    files.write("d/e/f", b"")
    for path in ("d", "link", "file"):
        files.remove(path)
    assert [each.path for each in files.listed(".")] == ["fifo", "loop", "secret"]


def test_more_than_the_workspace_holds_is_refused_and_leaves_nothing() -> None:
    small = with_limits(policy_named("workshop"), workspace_bytes=2 * 2**20)
    with AdapterSession(policy=small, pool=0) as cell:
        for path in ("/tmp/x", "x"):
            with pytest.raises(OSError, match="larger than the workspace"):
                cell.files.write(path, bytes(3 * 2**20))
        cell.files.write("first", bytes(2**20))
        with pytest.raises(OSError, match="no room"):
            cell.files.write("/tmp/second", bytes(2 * 2**20 - 5000))
        assert [each.path for each in cell.files.listed(".")] == ["first"]


def test_a_folder_of_many_files_and_odd_names_is_listed_whole(cell: AdapterSession) -> None:
    cell.execute(
        "import os\nos.mkdir('many')\n"
        "for n in range(3000): open(f'many/{n:04}' + 'x' * 200, 'w').close()\n"
        "open(b'many/\\xff\\n', 'w').close()"
    )
    names = [each.path for each in cell.files.listed("many")]
    assert len(names) == 3001
    assert names[-1] == "\ufffd\n"


def test_the_cell_is_believed_about_nothing_but_the_type(cell: AdapterSession) -> None:
    assert cell.files.exists("/workspace")
    lies = (
        "import sys\nmodule = sys.modules['_cellwright_cell_files']\nmodule.answer = lambda *a: {}"
    )
    for lie in ("[0, ['!', 5]]", "[0, ['', 10**30]]", "[0, 5]", "'x'", "[10**6, 'x']", "[2, 5]"):
        cell.execute(lies.format(lie))
        with pytest.raises((SessionLost, OSError)):
            cell.files.read("x")
        with pytest.raises((SessionLost, OSError)):
            cell.run(["true"])
    for count, error in ((1, "a short page"), (10_000, "more than 100000 entries")):
        cell.execute(lies.format(f"[0, [[['a', False, 1, 1]] * {count}, True]]"))
        with pytest.raises((SessionLost, OSError), match=error):
            cell.files.listed("x")
    cell.execute(lies.format("[0, ['eA==', 10**6]]"))
    with pytest.raises(OSError, match="changed while it was read"):
        cell.files.read("x")


def test_a_lost_session_is_said_and_restart_begins_anew(cell: AdapterSession) -> None:
    cell.execute("x = 1")
    cell.files.write("file", b"x")
    cell.execute("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert not cell.is_open
    for use in (lambda: cell.run(["true"]), lambda: cell.files.read("file")):
        with pytest.raises(SessionLost):
            use()
    cell.restart()
    assert not cell.files.exists("file")
    assert cell.is_open


def test_without_subprocesses_files_work_and_commands_are_refused(strict: Sandbox) -> None:
    with AdapterSession(strict) as cell:
        cell.files.write("/workspace/a/b", b"x")
        assert cell.files.read("a/b") == b"x"
        with pytest.raises(PolicyError, match="allows no subprocesses"):
            cell.run(["true"])
