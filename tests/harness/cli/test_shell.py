"""`cellwright shell` at a pty: what it shows, how it ends, and that the terminal is as it was."""

import contextlib
import itertools
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import soon

pytestmark = pytest.mark.needs("userns")
_PATIENCE = 60.0
COMMAND = (sys.executable, "-m", "cellwright", "shell", "--optional", "cgroup")


class Person:
    """The master of a terminal at which `cellwright shell`, or another command, runs."""

    def __init__(self, *arguments: str, command: tuple[str, ...] = COMMAND) -> None:
        self.master, self._own = pty.openpty()
        termios.tcsetwinsize(self.master, (30, 100))
        self.modes = termios.tcgetattr(self._own)
        self.process = subprocess.Popen(
            (*command, *arguments), stdin=self._own, stdout=self._own, stderr=self._own,
            start_new_session=True, env={**os.environ, "TERM": "xterm"},
        )  # fmt: skip
        self.seen = b""

    def until(self, wanted: bytes) -> None:
        deadline = time.monotonic() + _PATIENCE
        while wanted not in self.seen:
            assert select.select([self.master], [], [], deadline - time.monotonic())[0], self.seen
            self.seen += os.read(self.master, 65536)
        self.seen = self.seen.partition(wanted)[2]

    def type(self, text: bytes) -> None:
        os.write(self.master, text)

    def end(self) -> int:
        """Return the exit status; reads all until then, so that nothing waits for us."""
        while True:
            has_ended = self.process.poll() is not None
            if select.select([self.master], [], [], 0 if has_ended else 0.05)[0]:
                self.seen += os.read(self.master, 65536)
            elif has_ended:
                return self.process.returncode

    def is_restored(self) -> bool:
        return termios.tcgetattr(self._own) == self.modes

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for each in (self.master, self._own):
            with contextlib.suppress(OSError):
                os.close(each)


@contextlib.contextmanager
def person(*arguments: str) -> Iterator[Person]:
    made = Person(*arguments)
    try:
        yield made
    finally:
        made.close()


def test_a_command_ends_with_its_status_and_the_size_of_the_terminal() -> None:
    with person("--", "sh", "-c", "stty size; tty; exit 3") as typing:
        typing.until(b"30 100\r\n/dev/pts/0\r\n")
        assert typing.end() == 3
        assert typing.is_restored()


def test_a_shell_is_typed_into_and_resized() -> None:
    with person() as typing:
        typing.type(b"echo $((6 * 7)) $TERM\n")
        typing.until(b"42 xterm")
        assert not typing.is_restored()
        termios.tcsetwinsize(typing.master, (50, 132))
        os.kill(typing.process.pid, signal.SIGWINCH)
        typing.type(b"until [ \"$(stty size)\" = '50 132' ]; do :; done; echo re''sized\n")
        typing.until(b"resized")
        typing.type(b"exit 4\n")
        assert typing.end() == 4
        assert typing.is_restored()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_and_the_terminal_is_as_it_was(number: signal.Signals) -> None:
    with person("--", "sh", "-c", "printf '\\033[?25lready'; exec cat") as typing:
        typing.until(b"ready")
        os.kill(typing.process.pid, number)
        assert typing.end() == 128 + number
        assert typing.is_restored()
        assert typing.seen.endswith(b"\x1b[?25h\x0f\x1b(B\x1b[m")


def test_the_death_of_the_cell_ends_it_and_the_terminal_is_as_it_was() -> None:
    with person("--", "sh", "-c", "echo ready; exec cat") as typing:
        typing.until(b"ready")
        keeper = subprocess.run(
            ("pgrep", "-P", str(typing.process.pid)), capture_output=True, check=True, text=True
        ).stdout.split()[0]
        os.kill(int(keeper), signal.SIGKILL)
        assert typing.end() not in (0, None)
        assert typing.is_restored()
        assert b"cellwright: " in typing.seen


def test_programs_find_the_packages_of_the_policy(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    policy = tmp_path / "policy.toml"
    policy.write_text(f'extends = "workshop"\n[python]\npath = ["{packages}"]\n')
    command = ("sh", "-c", "echo path:$PYTHONPATH:")
    with person("--policy", str(policy), "--", *command) as typing:
        typing.until(f"path:{packages}:".encode())
        assert typing.end() == 0
    with person("--", *command) as typing:
        typing.until(b"path::")
        assert typing.end() == 0


def test_escape_sequences_that_are_answered_by_a_text_do_not_arrive() -> None:
    line = r"printf 'a\033[21t\033]52;c;eA==\007b\033[31mc'"
    with person("--", "sh", "-c", line) as typing:
        typing.until(b"ab\x1b[31mc")
        assert typing.end() == 0


def test_a_program_asks_the_terminal_and_gets_the_answers() -> None:
    code = (
        "import os, tty; tty.setraw(0); os.write(1, b'\\x1b]11;?\\x07\\x1b[6n'); got = b''\n"
        "while not got.endswith(b'R'): got += os.read(0, 99)\n"
        "os.write(1, repr(got).encode())"
    )
    with person("--", "python3", "-c", code) as typing:
        typing.until(b"\x1b]11;?\x07\x1b[6n")
        typing.type(b"\x1b]11;rgb:0000/0000/0000\x07\x1b[7;9R")
        typing.until(rb"b'\x1b]11;rgb:0000/0000/0000\x07\x1b[7;9R'")
        assert typing.end() == 0


def test_an_answer_does_not_arrive_after_the_program_that_asked() -> None:
    with person("--", "sh", "-c", r"printf '\033[6nasked'") as typing:
        typing.until(b"asked")
        typing.type(b"\x1b[1;1R")  # now or while it waits for this
        assert typing.end() == 0
        assert typing.is_restored()
        typing.type(b"next\n")
        assert os.read(typing._own, 100) == b"next\n"


def test_without_a_terminal_it_refuses() -> None:
    done = subprocess.run(COMMAND, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert done.returncode == 2
    assert b"standard input and output must be a terminal" in done.stderr
    assert done.stdout == b""


_SERVERS = itertools.count()


class Tmux:
    """A server of tmux of our own, whose one window runs a command, by default `cellwright shell`."""

    def __init__(self, *command: str, columns: int = 90, rows: int = 20) -> None:
        # Not the name of the last server: it may still be there when the next one starts.
        self._socket = f"cellwright-{os.getpid()}-{next(_SERVERS)}"
        size = ("-x", str(columns), "-y", str(rows))
        self("new-session", "-d", *size, *(command or COMMAND))

    def __call__(self, *arguments: str) -> str:
        command = ("tmux", "-L", self._socket, "-f", "/dev/null", *arguments)
        return subprocess.run(command, capture_output=True, check=False, text=True).stdout

    def type(self, *keys: str) -> str:
        return self("send-keys", *keys)

    def until(self, *wanted: str) -> None:
        """Wait until all of these are on the screen."""
        assert soon(lambda: all(each in self.screen() for each in wanted)), self.screen()

    def until_prompt(self) -> None:
        """Wait until the shell can take a line: keys that come before may be lost."""
        assert soon(lambda: self.screen().rstrip().endswith("$")), self.screen()

    def screen(self) -> str:
        return self("capture-pane", "-p")


@pytest.fixture
def tmux() -> Iterator[Tmux]:
    made = Tmux()
    try:
        yield made
    finally:
        made("kill-server")


@pytest.mark.needs("tmux")
def test_tmux_sees_its_size_and_changes_of_it(tmux: Tmux) -> None:
    tmux.until_prompt()
    tmux.type("stty size; echo do''ne", "Enter")
    tmux.until(" 90\n", "done\n")
    tmux("resize-window", "-x", "70", "-y", "15")
    tmux.type("until stty size | grep ' 70$'; do :; done; echo re''sized", "Enter")
    tmux.until(" 70\n", "resized\n")


@pytest.mark.needs("tmux")
def test_tmux_interrupts_a_program_and_controls_jobs(tmux: Tmux) -> None:
    tmux.until_prompt()
    tmux.type("echo re''ady; sleep 600", "Enter")
    tmux.until("ready\n")
    tmux.type("C-c")
    tmux.until_prompt()
    tmux.type("echo status $?", "Enter")
    tmux.until("^C", "status 130\n")
    tmux.type("""clear; echo at''sed; sed -u 's/^/got /'""", "Enter")
    tmux.until("atsed\n")
    tmux.type("C-z")
    tmux.until("Stopped")
    tmux.type("jobs; echo li''sted", "Enter")
    tmux.until("Stopped", "listed\n")
    tmux.type("fg", "Enter")
    # Keys that come while bash hands over the terminal may be lost.
    assert soon(lambda: tmux.type("key", "Enter") or "got key\n" in tmux.screen())
    tmux.type("C-d")
    tmux.type("jobs; echo none''left", "Enter")
    tmux.until("noneleft\n")
    tmux.type("exit 3", "Enter")
    assert soon(lambda: tmux.screen() == "")  # the window ended with the command
