"""Commands at the prompt of an interactive shell: Ctrl-C, Ctrl-Z, `bg`, `fg`, and who has the terminal."""

import os
import signal
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import OPTIONAL as OPTIONAL_LAYERS
from tests.conftest import soon
from tests.harness.test_repl import OPTIONS, Screen

pytestmark = pytest.mark.needs("userns")
CELLWRIGHT = f"{sys.executable} -m cellwright"
READY = "print('rea' + 'dy', flush=True)"
ENDLESS = f"{READY}\nwhile True: pass"
OPTIONAL = " ".join(OPTIONS)
# A job that forks nothing: dash waits in vfork(2), and cannot be stopped, if its child is stopped before exec.
PAUSES = (
    "import os, signal; signal.signal(signal.SIGCONT, lambda *_: os.write(1, b'cont' + b'inued')); "
    f"{READY}\nwhile True: signal.pause()"
)
SHELL = "shell --optional cgroup -- sh -i"


class Prompt(Screen):
    """A terminal with an interactive bash on it, which controls jobs."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, "/bin/bash", "--norc", "--noprofile", "-i")
        self.type("PS1='out''> '\n")

    def start(self, command: str, until: str) -> None:
        self.type(f"{CELLWRIGHT} {command}\n")
        self.until(until)

    def stop(self) -> None:
        """Type Ctrl-Z and wait until the shell has the terminal."""
        self.type("\x1a")
        self.until_stopped()

    def until_stopped(self) -> str:
        before = self.until("Stopped")
        self.until("out> ")
        return before

    def go_on(self) -> None:
        """Type `fg` and wait until the job has the terminal, or has ended: keys that come before are the
        shell's."""
        job = self.job()
        self.type("fg\n")
        self.until("python")  # the shell names the job
        assert soon(
            lambda: has_ended(job) or (os.tcgetpgrp(self._ours) == job and not is_stopped(job))
        )

    def status(self) -> int:
        self.until("out> ")
        self.type("echo status''=$?=\n")
        self.until("status=")
        status = int(self.until("="))
        self.until("out> ")
        return status

    def is_raw(self) -> bool:
        return not termios.tcgetattr(self._ours)[3] & (termios.ICANON | termios.ISIG)

    def job(self) -> int:
        """Return the pid of the only job."""
        (pid,) = children(self.process.pid)
        return pid


def children(pid: int) -> list[int]:
    return [int(each) for each in read(f"/proc/{pid}/task/{pid}/children").split()]


def descendants(pid: int) -> list[int]:
    return [one for child in children(pid) for one in (child, *descendants(child))]


def stat(pid: int) -> list[str]:
    """Return the fields of proc_pid_stat(5) from the state on; those of a dead one if it is gone."""
    return read(f"/proc/{pid}/stat").rpartition(")")[2].split() or ["X", "0", "0", "0", "0"]


def read(path: str) -> str:
    """Return a file of /proc, empty if the process has ended meanwhile, as one that makes cells may."""
    try:
        return Path(path).read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def has_ended(pid: int) -> bool:
    return stat(pid)[0] in "XZ"


def has_terminal(pid: int) -> bool:
    return stat(pid)[4] != "0"


def is_stopped(pid: int) -> bool:
    return stat(pid)[0] == "T"


@pytest.fixture
def prompt(tmp_path: Path) -> Iterator[Prompt]:
    opened = Prompt(tmp_path)
    try:
        opened.until("out> ")
        yield opened
    finally:
        opened.end()


def test_ctrl_c_ends_a_program_and_its_cell(prompt: Prompt) -> None:
    prompt.start(f'run {OPTIONAL} -c "{ENDLESS}"', "ready")
    cells = descendants(prompt.job())
    assert cells
    prompt.type("\x03")
    assert prompt.status() == 128 + signal.SIGINT
    assert soon(lambda: not any(Path(f"/proc/{pid}").exists() for pid in cells))


def test_a_program_is_stopped_and_goes_on(prompt: Prompt) -> None:
    prompt.start(f'run {OPTIONAL} --policy workshop -c "{ENDLESS}"', "ready")
    prompt.stop()
    prompt.type("bg\n")
    prompt.until("out> ")
    prompt.type("jobs\n")
    prompt.until("Running")
    prompt.until("out> ")
    prompt.go_on()
    prompt.stop()
    prompt.go_on()
    prompt.type("\x03")
    assert prompt.status() == 128 + signal.SIGINT


def test_a_program_that_ends_in_time_while_its_command_is_stopped_has_ended_well(
    prompt: Prompt,
) -> None:
    seconds = 4
    code = f"{READY}; import time; time.sleep(0.2); print('en' + 'ded')"
    prompt.start(f'run {OPTIONAL} --timeout {seconds} -c "{code}"', "ready")
    due = time.monotonic() + seconds
    prompt.stop()
    assert soon(lambda: time.monotonic() > due)
    prompt.go_on()
    shown = prompt.until("out> ")
    prompt.type("\n")
    assert (prompt.status(), "ended" in shown) == (0, True), shown


def test_a_repl_is_stopped_at_its_prompt_and_while_a_program_runs(prompt: Prompt) -> None:
    prompt.start(f"repl {OPTIONAL}", ">>> ")
    prompt.tell("n = 41")
    prompt.stop()
    prompt.go_on()
    prompt.type("\n")
    prompt.until(">>> ")
    prompt.type("""exec("n += 1; print('r' + 'uns', flush=True)\\nwhile True: pass")\n""")
    prompt.until("runs\r\n")
    prompt.stop()
    prompt.go_on()
    prompt.type("\x03")
    assert "KeyboardInterrupt" in prompt.until(">>> ")
    assert prompt.tell("n") == "42\n"
    prompt.type("\x04")
    assert prompt.status() == 0


def test_keys_at_a_shell_in_a_cell_are_for_its_jobs(prompt: Prompt) -> None:
    prompt.start(SHELL, "$ ")
    prompt.type(f'python3 -c "{PAUSES}"\n')
    prompt.until("ready\r\n")
    prompt.type("\x1a")
    prompt.until("Stopped")
    prompt.until("$ ")
    prompt.type("fg\n")
    prompt.until("continued")  # it has the terminal
    prompt.type("\x03")
    prompt.until("^C")
    prompt.until("$ ")
    prompt.type("echo in''ner $?; exit 3\n")
    prompt.until("inner 130\r\n")
    assert prompt.status() == 3


@pytest.mark.parametrize("number", [signal.SIGTSTP, signal.SIGSTOP])
def test_a_shell_in_a_cell_has_every_key_again_when_it_goes_on(
    prompt: Prompt, number: signal.Signals
) -> None:
    prompt.start(SHELL, "$ ")
    prompt.type("printf '\\033[?25lhid''den'\n")
    prompt.until("hidden")
    os.kill(prompt.job(), number)
    is_shown = "\x1b[?25h" in prompt.until_stopped()
    assert is_shown == (number == signal.SIGTSTP)  # the other signal is not reported
    prompt.type("stty -a | grep -o ' icanon'\n")
    prompt.until("\n icanon")
    prompt.until("out> ")
    prompt.go_on()
    # By a child, which is in the foreground by then: a shell that still starts one has no use for Ctrl-C.
    prompt.type("sh -c \"echo st''arted; exec cat\"\n")
    prompt.until("started\r\n")
    assert prompt.is_raw()
    prompt.type("\x03")
    prompt.until("^C")
    prompt.until("$ ")
    prompt.type("echo in''ner $?; exit 3\n")
    prompt.until("inner 130\r\n")
    assert prompt.status() == 3


def test_a_shell_in_a_cell_waits_in_the_background_for_the_terminal(prompt: Prompt) -> None:
    prompt.type(f"{CELLWRIGHT} {SHELL} &\n")
    prompt.until("out> ")
    assert soon(lambda: is_stopped(prompt.job()))  # SIGTTOU
    prompt.go_on()
    prompt.until("$ ")
    prompt.type("exit 3\n")
    assert prompt.status() == 3
    prompt.type("stty -a | grep -o ' echo '\n")
    prompt.until("\n echo")


def test_an_interactive_python_keeps_the_terminal_and_ctrl_c(prompt: Prompt) -> None:
    """A process that embeds us: nothing that it starts has its terminal, so that no key stops or ends it."""
    prompt.type(f"{sys.executable} -q\n")
    prompt.until(">>> ")
    prompt.tell("from cellwright import Policy, Sandbox")
    prompt.tell(f"box = Sandbox(policy=Policy(optional_layers={OPTIONAL_LAYERS}), pool=0)")
    prompt.type(f"box.execute({ENDLESS!r}, on_output=lambda name, text: print(text.decode()))\n")
    prompt.until("ready\r\n")
    made = descendants(prompt.job())
    assert has_terminal(prompt.job())
    assert made
    assert not any(map(has_terminal, made))
    prompt.type("\x1a")
    prompt.until_stopped()
    assert not any(map(is_stopped, made))
    prompt.go_on()
    prompt.type("\x03")
    assert "KeyboardInterrupt" in prompt.until(">>> ")
    assert prompt.tell("box.execute('6 * 7').value") == "42\n"
    prompt.type("box.close(); exit(5)\n")
    assert prompt.status() == 5


def test_a_program_in_the_background_writes_only_if_the_terminal_permits_it(prompt: Prompt) -> None:
    """SIGTTOU stops the command, and no process of the cell, which it knows nothing of."""
    prompt.type("stty tostop\n")
    prompt.until("out> ")
    prompt.type(f'{CELLWRIGHT} run {OPTIONAL} --policy workshop -c "{ENDLESS}" &\n')
    prompt.until("out> ")
    assert soon(lambda: is_stopped(prompt.job()))
    assert not any(map(is_stopped, descendants(prompt.job())))
    prompt.go_on()
    prompt.until("ready\r\n")
    prompt.type("\x03")
    assert prompt.status() == 128 + signal.SIGINT
