"""`cellwright exec --keep`: the cell of a project stays open in a daemon, for commands with the same options."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cellwright.harness.cli import open_cell_client
from cellwright.harness.sandbox.remote import frames, lean_frames
from cellwright.harness.servers.daemon.open_cells import OpenCells
from cellwright.policies.errors import PolicyError
from cellwright.runner.settings import SessionSettings
from tests.harness.cli.test_shell import Person
from tests.harness.projects.test_exec import COMMAND, home, project

__all__ = ["home", "project"]  # fixtures

pytestmark = pytest.mark.needs("userns")


@pytest.fixture
def daemon(home: Path, tmp_path: Path) -> Iterator[str]:
    """The socket of a daemon of this user."""
    path = str(tmp_path / "daemon.sock")
    command = (sys.executable, "-m", "cellwright", "serve", "--pool", "0", "--socket", path)
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        assert process.stderr
        assert b"serving" in process.stderr.readline()
        yield path
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)


def ran(daemon: str, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = (*COMMAND, "--connect", daemon, *words)
    return subprocess.run(command, input=stdin, capture_output=True, timeout=120, check=False)


def said(daemon: str, *words: str) -> bytes:
    done = ran(daemon, *words)
    assert done.returncode == 0, done
    return done.stdout


@contextlib.contextmanager
def begun(daemon: str, line: str) -> Iterator[subprocess.Popen[bytes]]:
    command = (*COMMAND, "--connect", daemon, "--shell", line)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        try:
            yield process
        finally:
            process.kill()


# What differs from cell to cell.
NAME = "[ -s /tmp/name ] || head -c 8 /dev/urandom | od -An -tx1 > /tmp/name; cat /tmp/name"


def test_commands_share_a_cell_and_what_runs_in_the_background_stays(
    project: Path, daemon: str
) -> None:
    background = "sleep 1000 & echo $!"
    told = said(daemon, "--keep", "--shell", f"{background}; {NAME}").split(maxsplit=1)
    number, first = told[0].decode(), told[1]
    assert said(daemon, "--shell", f"kill -0 {number} && {{ {NAME}; }}") in (first, b" " + first)
    assert ran(daemon, "--close").stderr == b"cellwright: open cells that were closed: 1\n"
    assert said(daemon, "--shell", NAME).strip() != first.strip()  # it has a cell of its own
    assert ran(daemon, "--close").stderr == b"cellwright: open cells that were closed: 0\n"


def test_a_server_in_the_background_answers_later_commands(project: Path, daemon: str) -> None:
    (project / "index.html").write_text("served\n")
    said(daemon, "--keep", "--shell", "python3 -m http.server 8000 2>&1 & exit 0")
    line = "until curl -s http://127.0.0.1:8000/index.html; do sleep 0.1; done"
    assert b"served\n" in said(daemon, "--shell", line)
    assert b"served\n" in said(daemon, "--shell", line)  # a log without a reader ends no server


def test_a_command_has_the_streams_directory_and_variables_and_gives_its_status(
    project: Path, daemon: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "first")
    assert ran(daemon, "--keep", "--", "true").returncode == 0
    monkeypatch.setenv("TERM", "second")
    (project / "deep").mkdir()
    monkeypatch.chdir(project / "deep")
    data = os.urandom(3_000_000)
    done = ran(daemon, "--shell", "cat; echo problem >&2; exit 3", stdin=data)
    assert (done.stdout, done.stderr, done.returncode) == (data, b"problem\n", 3)
    assert said(daemon, "--shell", "pwd; echo $TERM") == f"{project}/deep\nsecond\n".encode()
    assert ran(daemon, "--shell", "kill -9 $$").returncode == 137
    done = ran(daemon, "--", "nosuch")
    assert (done.stderr, done.returncode) == (b"nosuch: No such file or directory\n", 127)
    word = os.fsdecode(b"\xff\xfe")
    assert said(daemon, "--", "printf", "%s", word) == b"\xff\xfe"


def test_signals_reach_the_command_and_a_killed_client_ends_it(project: Path, daemon: str) -> None:
    assert ran(daemon, "--keep", "--", "true").returncode == 0
    with begun(daemon, 'trap "echo caught; exit 5" INT; echo ready; sleep 600 & wait') as process:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == b"caught\n"
        assert process.wait(60) == 5
    with begun(daemon, "echo $$; exec cat") as process:
        assert process.stdout
        number = process.stdout.readline().decode().strip()
        process.kill()
        process.wait(60)
    waits = f"while kill -0 {number} 2>/dev/null; do sleep 0.1; done; echo ended"
    assert said(daemon, "--shell", waits) == b"ended\n"


def test_a_reader_that_leaves_ends_the_command_by_sigpipe(project: Path, daemon: str) -> None:
    assert ran(daemon, "--keep", "--", "true").returncode == 0
    with begun(daemon, "exec yes") as process:
        assert process.stdout
        assert process.stdout.readline() == b"y\n"
        process.stdout.close()
        assert process.wait(60) == 128 + signal.SIGPIPE


def test_a_terminal_has_its_size_and_controls_the_command(project: Path, daemon: str) -> None:
    assert ran(daemon, "--keep", "--", "true").returncode == 0
    person = Person(*["--connect", daemon, "--", "sh"], command=COMMAND)
    try:
        person.type(b"stty size; tty; cat\n")
        person.until(b"30 100\r\n/dev/pts/0\r\n")
        person.type(b"words\n")
        person.until(b"words\r\nwords\r\n")
        person.type(b"\x03")  # Ctrl-C ends cat, and not the shell
        person.until(b"^C")
        person.until(b"$ ")  # the signal drops words that are typed before
        person.type(b"exit 3\n")
        assert person.end() == 3
        assert person.is_restored()
    finally:
        person.close()


def test_other_options_have_a_cell_of_their_own_and_it_is_said(
    project: Path, daemon: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = said(daemon, "--keep", "--shell", NAME)
    done = ran(daemon, "--allow", "example.org", "--shell", NAME)
    assert done.stdout != opened
    assert done.stderr.decode() == (
        "cellwright: a cell of its own: the open cell of this project has other options: none\n"
    )
    both = "--allow", "example.org", "--keep", "--shell", NAME
    assert said(daemon, *both) == said(daemon, *both) != opened
    assert said(daemon, "--shell", NAME) == opened  # each set of options has its cell
    monkeypatch.setenv("SECRET", "of the host")
    with_secret = "--env", "SECRET", "--keep", "--shell", f"{NAME}; echo $SECRET"
    assert said(daemon, *with_secret).splitlines()[1] == b"of the host"
    assert said(daemon, "--shell", f"{NAME}; echo $SECRET") == opened + b"\n"


def test_another_project_never_gets_into_it(
    project: Path, daemon: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = said(daemon, "--keep", "--shell", NAME)
    other = project.parent / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    done = ran(daemon, "--shell", NAME)
    assert (done.stdout == opened, done.stderr) == (False, b"")
    assert b"No such file" in ran(daemon, "--keep", "--", "ls", str(project)).stderr
    assert b"closed: 1" in ran(daemon, "--close").stderr
    monkeypatch.chdir(project)
    assert said(daemon, "--shell", NAME) == opened


def test_what_an_open_cell_cannot_do_is_refused(project: Path, daemon: str, tmp_path: Path) -> None:
    done = ran(daemon, "--keep", "--review", "--", "true")
    assert done.returncode == 2
    assert b"--review cannot be combined with an open cell" in done.stderr
    done = ran(str(tmp_path / "nothing.sock"), "--keep", "--", "true")
    assert done.returncode == 2
    assert b'start one: "cellwright serve"' in done.stderr


def test_a_cell_that_a_program_has_ended_is_replaced(project: Path, daemon: str) -> None:
    opened = said(daemon, "--keep", "--shell", NAME)
    assert ran(daemon, "--shell", "kill -9 -1").returncode in (70, 137)
    assert said(daemon, "--keep", "--shell", NAME) != opened


def test_a_cell_that_puts_a_link_in_the_place_of_its_socket_leads_nowhere(
    project: Path, daemon: str
) -> None:
    """Else the daemon would send commands and pipes to a server of this host."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(project / "server.sock"))
        server.listen()
        server.setblocking(False)
        line = f"ln -sf {project}/server.sock /workspace/.cellwright"
        assert said(daemon, "--keep", "--shell", line) == b""
        done = ran(daemon, "--", "echo", "own")
        assert done.stdout == b"own\n"  # in a cell of its own
        assert b"takes no commands any more" in done.stderr
        with pytest.raises(BlockingIOError):
            server.accept()


def test_another_user_gets_no_open_cell() -> None:
    cells = OpenCells(lambda *_: pytest.fail("prepared"), SessionSettings())
    asked = frames.RunOnProject((), b"/", ())
    with pytest.raises(PolicyError, match="open cells are those of user"):
        cells.answer(asked, os.geteuid() + 1, None)  # type: ignore[arg-type]


def test_a_client_sends_what_the_daemon_decodes() -> None:
    words = [b"--", b"\xff" * 300]
    frame = ["RunOnProject", words, b"/place", [b"A=b"] * 20, [30, 100]]
    read = msgspec.msgpack.decode(lean_frames.pack(frame), type=frames.ClientRequest)
    assert read == frames.RunOnProject(tuple(words), b"/place", (b"A=b",) * 20, (30, 100))
    none = msgspec.msgpack.encode(frames.NoOpenCell())
    assert none == open_cell_client.NONE_WAS_USED
    assert msgspec.msgpack.encode(frames.CommandStarted()) == open_cell_client._STARTED


def test_the_client_imports_nothing_that_takes_long() -> None:
    code = (
        "import sys; import cellwright.harness.cli.main, cellwright.harness.cli.open_cell_client; "
        "print(*sys.modules)"
    )
    done = subprocess.run(
        (sys.executable, "-c", code), capture_output=True, check=True, timeout=120, text=True
    )
    assert not {"msgspec", "argparse", "socket", "threading", "typing"} & {*done.stdout.split()}
