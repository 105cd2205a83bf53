"""Commands that cannot continue end with one line or none, and without a traceback."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cellwright.harness.cli import main as entry
from cellwright.harness.cli.exit_status import EXIT_CODES
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


# How each exit status of the table comes about.
PROVOKED = {
    "0": ["run", *OPTIONS, "-c", "print(1)"],
    "1": ["run", *OPTIONS, "-c", "1 / 0"],
    "2": ["run", "--policy", "nowhere", "-c", "1"],
    "70": ["run", "--connect", "/nowhere/socket", "-c", "1"],
    "130": [*ENDLESS],
    "141": [*ENDLESS],
    "128+N": [*ENDLESS],
}


def test_every_exit_status_of_the_table_is_provoked() -> None:
    assert PROVOKED.keys() == EXIT_CODES.keys()


@pytest.mark.parametrize("code", PROVOKED)
def test_the_table_of_exit_statuses_is_right(code: str) -> None:
    """As a shell sees them: it reports the end by signal N as 128 + N."""
    with start(*PROVOKED[code], stdout=subprocess.PIPE) as done:
        assert done.stdout is not None
        if PROVOKED[code] == ENDLESS:
            done.stdout.read(100)  # the program runs
        if code == "141":
            done.stdout.close()
        elif code in ("130", "128+N"):
            done.send_signal(signal.SIGINT if code == "130" else signal.SIGTERM)
        ended = done.wait(60)
    ended = 128 - ended if ended < 0 else ended
    assert ended == (128 + signal.SIGTERM if code == "128+N" else int(code))


def test_help_lists_the_exit_statuses() -> None:
    done = start("help", "exit-codes", stdout=subprocess.PIPE)
    told, _ = done.communicate(timeout=60)
    words = " ".join(told.decode().split())
    for code, meaning in EXIT_CODES.items():
        assert f"{code} {meaning}" in words


def test_the_table_of_the_document_is_that_of_the_command() -> None:
    document = (ROOT / "harness/cli/README.md").read_text()
    for code, meaning in EXIT_CODES.items():
        assert f"| {code} | {meaning} |" in document
