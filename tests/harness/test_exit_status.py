"""Commands that cannot continue end with one line or none, and without a traceback."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cellwright.harness.cli import main as entry
from tests.conftest import OPTIONAL, ROOT

OPTIONS = [part for layer in OPTIONAL for part in ("--optional", layer)]
ENDLESS = ["run", *OPTIONS, "-c", "while True: print('x' * 100)"]
COMMANDS = {
    "run": ENDLESS,
    "run --json": ["run", *OPTIONS, "--json", "-c", "print('x' * 90_000)"],
    "explain": ["explain", *OPTIONS],
    "help": ["run", "--help"],
    "a command of a room": ["workspace", "list", "--json"],
}


# Whatever this process ignores, and whatever it has open, the command begins as from a shell.
SHELL = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
closed, *command = sys.argv[1:]
for descriptor in closed:
    os.close(int(descriptor))
os.execv(command[0], command)
"""


def start(*arguments: str, closed: str = "", **streams: Any) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", SHELL, closed, sys.executable, "-m", "cellwright", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, **streams
    )  # fmt: skip


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_a_reader_that_leaves_ends_a_command_without_a_word(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = start(*arguments, stdout=writing)
    os.close(writing)
    _, said = done.communicate(timeout=60)
    assert (done.returncode, said) == (141, b"")


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_a_full_disk_is_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = start(*arguments, stdout=full)
        _, said = done.communicate(timeout=60)
    assert (done.returncode, said) == (
        70,
        b"cellwright: cannot write the output: No space left on device\n",
    )


def test_ctrl_c_ends_a_command_as_a_shell_expects_and_without_a_word() -> None:
    done = start(*ENDLESS, stdout=subprocess.PIPE)
    assert done.stdout is not None
    done.stdout.read(100)  # the program runs
    done.send_signal(signal.SIGINT)
    _, said = done.communicate(timeout=60)
    assert (done.returncode, said) == (-signal.SIGINT, b"")


@pytest.mark.parametrize("closed", ["1", "012"])
def test_streams_that_the_caller_closed_are_no_failure(closed: str) -> None:
    done = start("run", *OPTIONS, "-c", "print('hi')", closed=closed)
    _, said = done.communicate(timeout=60)
    assert (done.returncode, said) == (0, b"")


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("print(1)")
    done = start("learn", *OPTIONS, f"{tmp_path}/p.py", "-o", "/nowhere/p.toml", stdout=-1)
    _, said = done.communicate(timeout=60)
    assert done.returncode == 2
    assert said.splitlines()[-1] == b"cellwright: /nowhere/p.toml: No such file or directory"


def test_a_bug_of_ours_is_never_taken_for_the_programs_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(entry, "_run_command", lambda arguments: 1 // 0)
    assert entry.main([]) == 70
    said = capsys.readouterr().err
    assert "ZeroDivisionError" in said
    assert said.endswith("cellwright: this is a bug in cellwright, please report it\n")
