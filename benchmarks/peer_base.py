"""A peer: another way to run Python, and the isolation between it and the machine."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from .programs import SampleProgram

_PATIENCE = 60


class AbsentError(Exception):
    """It is not here, or it cannot do this: the message says why."""


class Isolation(NamedTuple):
    """What a call is kept apart by, a few words each, so that nobody compares unlike things."""

    fresh: str  # new for each call
    namespaces: str
    filter: str  # filter of system calls
    files: str
    network: str
    caps: str
    kernel: str
    python: str


class Peer(Protocol):
    """Runs programs, one a call."""

    name: str
    isolation: Isolation

    def find(self, place: Path) -> str:
        """Make ready, with files below `place`; return the version.  Raises AbsentError."""

    def run(self, program: SampleProgram) -> float:
        """Run a program and return its seconds; raises AbsentError if what it printed is wrong."""

    def close(self) -> None:
        """End what `find` began."""


class Command:
    """A peer that is started anew for every call."""

    def __init__(
        self,
        name: str,
        isolation: Isolation,
        line: Callable[[Path, SampleProgram], list[str]],
        version: Callable[[], str],
        remove: Callable[[], None] = lambda: None,
    ) -> None:
        """`line` returns its command line, `version` its version: both raise AbsentError; `remove`
        takes away what it leaves on the host."""
        self.name = name
        self.isolation = isolation
        self._line = line
        self._version = version
        self._remove = remove
        self._place = Path()
        self._lines: dict[str, list[str]] = {}

    def find(self, place: Path) -> str:
        self._place = place
        return self._version()

    def run(self, program: SampleProgram) -> float:
        if program.name not in self._lines:
            self._lines[program.name] = self._tried(program)
        line = self._lines[program.name]
        began = time.perf_counter()
        done = _run(line, self._place)
        seconds = time.perf_counter() - began
        check(program, done)
        return seconds

    def _tried(self, program: SampleProgram) -> list[str]:
        """Return the command line, once it was seen to work."""
        line = self._line(self._place, program)
        try:
            done = _run(line, self._place)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise AbsentError(f"it does not run here: {error}") from None
        check(program, done)
        return line

    def close(self) -> None:
        self._remove()


def _run(line: list[str], place: Path) -> "subprocess.CompletedProcess[str]":
    """Run a command with nothing of ours but a path to look for programs, in a session of its own: by
    that `interference` knows what it leaves."""
    environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(place)}
    return subprocess.run(
        line, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
        env=environment, cwd=place, timeout=_PATIENCE, check=False, start_new_session=True,
    )  # fmt: skip


def check(program: SampleProgram, done: "subprocess.CompletedProcess[str]") -> None:
    """Raise AbsentError unless a program ended well and printed what it prints everywhere."""
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise AbsentError(f"it does not run here: {lines[-1][:160] if lines else 'no message'}")
    check_output(program, done.stdout)


def check_output(program: SampleProgram, printed: str) -> None:
    """Raise AbsentError unless the program printed what it prints everywhere."""
    if printed.strip() != program.prints:
        raise AbsentError(f"it cannot run this: printed {printed.strip()[:60]!r}")


def version_of(*command: str) -> Callable[[], str]:
    """Return a function that asks a program for its version; it raises AbsentError."""

    def ask() -> str:
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_PATIENCE, check=True
            )
        except FileNotFoundError:
            raise AbsentError(f"{command[0]} is not installed") from None
        except (OSError, subprocess.SubprocessError) as error:
            raise AbsentError(f"{command[0]}: {error}") from None
        return next((word for word in done.stdout.split() if word[:1].isdigit()), "?")

    return ask
