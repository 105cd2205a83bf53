"""A session to type into: on a terminal, and from a pipe."""

import os
import pty
import re
import select
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellwright.harness.cli.running.prompt import ProgramBuffer
from tests.conftest import OPTIONAL, ROOT

OPTIONS = [part for layer in OPTIONAL for part in ("--optional", layer)]
COMMAND = [sys.executable, "-m", "cellwright", "repl", *OPTIONS]
_PATIENCE = 300.0 if "CELLWRIGHT_TEST_EMULATED" in os.environ else 60.0
_SELECT = ("23", "270") if os.uname().machine == "x86_64" else ("72",)  # select(2), pselect6(2)
# A terminal is given to who opens it as the leader of a session; then Ctrl-C is its.
ADOPT = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"


def environment(state: Path) -> dict[str, str]:
    bare = {
        "PATH": os.environ["PATH"],
        "TERM": "dumb",
        "LC_ALL": "C.UTF-8",
        "PYTHONPATH": str(ROOT),
    }
    # an ordinary user asks systemd for cgroups there
    bus = ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")
    bare |= {name: os.environ[name] for name in bus if name in os.environ}
    return bare | {"XDG_STATE_HOME": str(state)}


class Screen:
    """A terminal with a repl on it, or another command, and all that it has shown."""

    def __init__(self, directory: Path, *command: str) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", ADOPT, *(command or COMMAND)], cwd=directory,
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env=environment(directory),
        )  # fmt: skip
        os.close(theirs)
        self._shown = b""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until(self, wanted: str) -> str:
        """Wait until something is shown; return what was shown before it."""
        deadline = time.monotonic() + _PATIENCE
        while (at := self._shown.find(wanted.encode())) < 0:
            ready, _, _ = select.select([self._ours], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"{wanted!r} was not shown, but {self._shown!r}"
            try:
                self._shown += os.read(self._ours, 65536)
            except OSError:  # EIO: nobody has it open any more
                pytest.fail(f"{wanted!r} was not shown before the end, but {self._shown!r}")
        before = self._shown[:at].decode()
        self._shown = self._shown[at + len(wanted.encode()) :]
        return before

    def interrupt(self) -> None:
        """Type Ctrl-C once it is waited for a key: before that moment CPython's readline misses it."""
        waited_for = Path(f"/proc/{self.process.pid}/syscall")
        while waited_for.read_text().split()[0] not in _SELECT:
            assert self.process.poll() is None
        self.type("\x03")

    def tell(self, line: str) -> str:
        """Type a line at the prompt and return what is shown before the next."""
        self.type(line + "\n")
        self.until("\n")  # its echo
        return self.until(">>> ").replace("\r", "")

    def end(self) -> int:
        self.process.kill()
        os.close(self._ours)
        return self.process.wait(20)


@pytest.fixture
def screen(tmp_path: Path) -> Iterator[Screen]:
    opened = Screen(tmp_path)
    opened.until(">>> ")
    yield opened
    opened.end()


def test_values_output_and_state_are_shown(screen: Screen) -> None:
    assert screen.tell("x = (1, 'two')") == ""
    assert screen.tell("x") == "(1, 'two')\n"
    assert screen.tell("_ + (3,)") == "(1, 'two', 3)\n"
    assert screen.tell("print('out')") == "out\n"
    assert screen.tell("print('no newline', end='')") == "no newline\n"
    assert "ZeroDivisionError: division by zero" in screen.tell("1 / 0")


def test_a_block_ends_with_an_empty_line(screen: Screen) -> None:
    for line in ("def twice(n):", "    return n * 2"):
        screen.type(line + "\n")
        screen.until("... ")
    assert screen.tell("") == ""
    assert screen.tell("twice(21)") == "42\n"


def test_ctrl_c_interrupts_the_program_and_keeps_its_state(screen: Screen) -> None:
    screen.tell("n = 41")
    screen.type("""exec("n = 42; print('r' + 'uns', flush=True)\\nwhile True: pass")\n""")
    screen.until("runs\r\n")
    screen.type("\x03")
    shown = screen.until(">>> ")
    assert "KeyboardInterrupt" in shown
    assert "cancelled" in shown
    assert screen.tell("n") == "42\n"


def test_ctrl_c_at_the_prompt_forgets_what_was_typed(screen: Screen) -> None:
    screen.type("def f():\n")
    screen.until("... ")
    screen.interrupt()
    screen.until(">>> ")
    assert screen.tell("1 + 1") == "2\n"


def test_ctrl_d_leaves(screen: Screen) -> None:
    screen.type("\x04")
    assert screen.process.wait(20) == 0


def test_what_a_program_says_is_made_harmless(screen: Screen) -> None:
    assert screen.tell(r"print('\x1b]0;title\x07')") == "\\x1b]0;title\\x07\n"
    assert "\x1b" not in screen.tell(r"raise ValueError('\x1b[2J')")
    shown = screen.tell(r"open('/\x1b[2J')")
    assert "cellwright: refused: openat '/\\x1b[2J'" in shown
    assert "\x1b" not in shown
    screen.tell(r"open('\x1b[2J', 'w').close()")
    assert "\x1b" not in screen.tell(":files")


def test_a_lost_session_is_reported_and_replaced(screen: Screen) -> None:
    screen.tell("x = 1")
    shown = screen.tell("import os; os._exit(3)")
    assert "exit code 3" in shown
    assert "started a new session" in shown
    assert "NameError" in screen.tell("x")


def test_commands_copy_files_and_print_the_usage(screen: Screen, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("data")
    assert ":download PATH" in screen.tell(":help")
    assert screen.tell(":upload in.txt sub/in.txt") == ""
    assert screen.tell("open('sub/in.txt').read()") == "'data'\n"
    assert screen.tell(":files").split() == ["4", "sub/in.txt"]
    assert "wrote cellwright-output/sub/in.txt" in screen.tell(":download sub/in.txt")
    assert "wrote out.txt" in screen.tell(":download sub/in.txt out.txt")
    assert "out.txt: File exists" in screen.tell(":download sub/in.txt out.txt")
    assert (tmp_path / "out.txt").read_text() == "data"
    assert "2 calls: 0." in screen.tell(":usage") or "1 calls: 0." in screen.tell(":usage")
    assert "started a new session" in screen.tell(":reset")
    assert screen.tell(":files") == ""
    for wrong in (":nope", ":upload", ":upload 'a", ":upload /nowhere", ":download nowhere"):
        assert "cellwright: " in screen.tell(wrong)
    screen.type(":quit\n")
    assert screen.process.wait(20) == 0


def test_the_history_is_the_users_alone_and_there_next_time(tmp_path: Path) -> None:
    for number in range(2):
        screen = Screen(tmp_path)
        screen.until(">>> ")
        screen.tell(f"'remember {number}'")
        screen.type("\x04")
        assert screen.process.wait(20) == 0
        screen.end()
    history = tmp_path / "cellwright" / "history"
    assert history.read_text().splitlines()[-2:] == ["'remember 0'", "'remember 1'"]
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


# From a pipe


def piped(script: str, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], input=script, cwd=directory, env=environment(directory),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_a_script_of_lines_is_a_conversation_too(tmp_path: Path) -> None:
    script = "x = 20\ndef add(n):\n    return x + n\nadd(22)\nif x:\n  print('yes')\nelse:\n  print('no')"
    done = piped(script, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "42\nyes\n", "")
    assert os.listdir(tmp_path) == []


def test_a_script_goes_on_after_a_failure_and_tells_it_at_the_end(tmp_path: Path) -> None:
    done = piped("1 / 0\nx = = 2\n3\n", tmp_path)
    assert (done.returncode, done.stdout) == (1, "3\n")
    assert "ZeroDivisionError" in done.stderr
    assert "SyntaxError" in done.stderr


def test_a_command_ends_a_block_and_runs(tmp_path: Path) -> None:
    block = "for i in range(2):\n  print(i)\n"
    done = piped(
        f"n = 1\n{block}:branch\nn = 2\n{block}:switch main\nn\n{block}:quit\n3\n", tmp_path
    )
    assert (done.returncode, done.stdout) == (0, "0\n1\n0\n1\n1\n0\n1\n")
    assert "b1 is a branch of main" in done.stderr


def test_output_from_a_pipe_is_as_it_is(tmp_path: Path) -> None:
    assert piped("print('\\x1b[1m')", tmp_path).stdout == "\x1b[1m\n"


def test_pictures_are_written_and_their_names_printed(tmp_path: Path) -> None:
    script = (
        "class P:\n def _repr_png_(self): return b'png'\n def __repr__(self): return 'P()'\n\nP()"
    )
    done = piped(script, tmp_path)
    assert (done.stdout, done.stderr) == (
        "P()\n",
        "cellwright: wrote cellwright-output/picture-1.png\n",
    )
    assert (tmp_path / "cellwright-output" / "picture-1.png").read_bytes() == b"png"


def test_its_files_are_kept_in_the_workspace_that_is_named(tmp_path: Path) -> None:
    assert piped("open('f', 'w').write('1')", tmp_path, "--workspace", "mine").stdout == "1\n"
    assert piped("open('f').read()", tmp_path, "--workspace", "mine").stdout == "'1'\n"


def test_a_call_that_takes_too_long_is_ended_and_its_usage_printed(tmp_path: Path) -> None:
    done = piped("x = 5\nwhile True: x = 6\n\nx\n", tmp_path, "--timeout", "0.3")
    assert done.stdout == "6\n"
    assert re.search(r"cellwright: timeout \(wall_time\)", done.stderr)


def test_other_languages_keep_their_state_too(tmp_path: Path) -> None:
    done = piped(
        "n=41\nfor i in 1; do \\\n  echo $((n + i)); \\\ndone\n", tmp_path, "--language", "bash"
    )
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr


def test_branches_are_switched_between(tmp_path: Path) -> None:
    script = "x = 1\n:branch\nx += 10\n:switch main\nx\n:branch 2\n:switch b3\nx += 100\n:switch b1\nx\n:switch b3\nx\n:switch\n"
    done = piped(script, tmp_path)
    assert (done.returncode, done.stdout) == (0, "1\n11\n101\n"), done.stderr
    assert "b1 is a branch of main\ncellwright: this is b1" in done.stderr
    assert done.stderr.endswith("  main\n  b1\n  b2\n* b3\n")
    assert "replay" not in done.stderr


@pytest.mark.parametrize(
    "command", [":branch x", ":branch 99", ":switch b9", ":resume x", ":pause x"]
)
def test_a_wrong_command_about_sessions_is_told(tmp_path: Path, command: str) -> None:
    done = piped(f"x = 1\n{command}\nx\n", tmp_path)
    assert (done.returncode, done.stdout) == (1, "1\n")
    assert done.stderr.startswith("cellwright: ")


def test_a_paused_session_is_resumed_by_the_next_repl(tmp_path: Path) -> None:
    done = piped("x = 41\n:pause\nx\n", tmp_path, "--pausable")
    assert "NameError" in done.stderr
    (token,) = re.findall(r":resume (cwp_\w+)", done.stderr)
    (state,) = (tmp_path / "cellwright" / "paused").glob("*.session")
    assert stat.S_IMODE(state.stat().st_mode) == 0o600
    done = piped(f":resume {token}\nx + 1\n:switch\n", tmp_path, "--pausable")
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr
    assert done.stderr.endswith("  main\n* r1\n")
    assert not state.exists()


def test_a_language_that_is_none_is_wrong_usage(tmp_path: Path) -> None:
    done = piped("", tmp_path, "--language", "cobol")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)


# Lines to programs


def programs(language: str, *lines: str) -> list[str]:
    buffer = ProgramBuffer(language)
    found = [program for line in lines for program in buffer.add(line)]
    return [*found, *buffer.finish()]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["", "1", "  ", "2"], ["1", "2"]),
        (["x = [", "1,", "", "]"], ["x = [\n1,\n\n]"]),
        (["for i in x:", "  i", "", "y"], ["for i in x:\n  i\n", "y"]),
        (["for i in x:", "  i", "y"], ["for i in x:\n  i", "y"]),
        (["try:", "  a", "except E:", "  b", "c"], ["try:\n  a\nexcept E:\n  b", "c"]),
        (["@d", "def f():", "  1", "@d", "class C: pass"], ["@d\ndef f():\n  1", "@d\nclass C: pass"]),
        (['"""', "a", "", '"""'], ['"""\na\n\n"""']),
        (["x = \\", "1"], ["x = \\\n1"]),
        (["x = = 1", "2"], ["x = = 1", "2"]),
        (["def f():", "  if 1:", "    2", "  3"], ["def f():\n  if 1:\n    2\n  3"]),
        (["await f()"], ["await f()"]),
        (["async def f():", "  await g()", "await f()"], ["async def f():\n  await g()", "await f()"]),
        (["def f():\n  1\n\n  2\nf()"], ["def f():\n  1\n\n  2\nf()"]),
        (["1\n2\nfor i in x:\n  3"], ["1\n2\nfor i in x:\n  3"]),
        (["\ud800"], ["\ud800"]),
        (["for i in x:", "  i", ":files", "y"], ["for i in x:\n  i", ":files", "y"]),
        (["1\n:files\nfor i in x:\n  i\n:quit"], ["1", ":files", "for i in x:\n  i", ":quit"]),
        (['"""', ":files", '"""'], ['"""\n:files\n"""']),
    ],
)  # fmt: skip
def test_lines_become_programs(lines: list[str], expected: list[str]) -> None:
    assert programs("python", *lines) == expected


def test_other_languages_go_on_after_a_backslash() -> None:
    assert programs("javascript", "let x = \\", "  1", "x") == ["let x = \n  1", "x"]
    assert programs("bash", "ls \\", "  -l", "pwd") == ["ls \\\n  -l", "pwd"]
    assert programs("bash", "ls \\", ":files", ":files") == ["ls \\\n:files", ":files"]
