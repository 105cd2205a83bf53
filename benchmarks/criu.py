"""A small Python process that CRIU dumps and restores, to stand beside pauses and branches.

It is in no cell: a session would need its cell made around it, too.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from .measuring import seconds_of

_PROGRAM = """
import os, signal, sys
class Point:
    x = 1
points = [Point() for _ in range(10000)]
os.close(int(sys.argv[1]))  # tells that it is ready
while True:
    signal.pause()
"""
_SECONDS = 30.0


class CriuAbsent(Exception):  # noqa: N818 - no error: its rows have no numbers then
    """CRIU cannot dump and restore a process here, and why."""


class DumpedProcess:
    """A process that is dumped and restored, again and again."""

    def __init__(self, directory: Path) -> None:
        """Use `directory` for its files; raises CriuAbsent."""
        found = shutil.which("criu") or shutil.which("criu", path="/usr/sbin:/sbin")
        if found is None:
            raise CriuAbsent("CRIU is not installed")
        self._criu = found
        self._directory = directory
        self._pid = self._dumped = 0

    def __enter__(self) -> Self:
        """Start the process, and dump and restore it once; raises CriuAbsent."""
        self._pid = _started()
        try:
            self.dump()
            self.restore()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._end()

    def dump(self) -> float:
        """Write the process to files, which ends it; return the seconds."""
        seconds = seconds_of(lambda: self._run("dump", "--tree", str(self._pid)))
        _reap(self._pid)
        self._dumped, self._pid = self._pid, 0
        return seconds

    def restore(self) -> float:
        """Make the process again from its files; return the seconds."""
        seconds = seconds_of(lambda: self._run("restore", "--restore-detached"))
        self._pid = self._dumped
        return seconds

    def _run(self, action: str, *options: str) -> None:
        """Have CRIU act; raises CriuAbsent with its first error."""
        command = (self._criu, action, "--images-dir", str(self._directory), "-v1", *options)
        try:
            ran = subprocess.run(
                command, capture_output=True, text=True, timeout=_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CriuAbsent(f"CRIU does not run: {error}") from None
        if ran.returncode:
            said = (ran.stderr + ran.stdout).splitlines()
            errors = (each for each in said if each.startswith("Error"))
            why = next(errors, f"exit status {ran.returncode}")
            raise CriuAbsent(f"{self._version()} cannot {action} a process here: {why}")

    def _version(self) -> str:
        ran = subprocess.run((self._criu, "--version"), capture_output=True, text=True, check=False)
        return f"CRIU {ran.stdout.partition('Version:')[2].split()[0]}" if ran.stdout else "CRIU"

    def _end(self) -> None:
        """Kill the process: a restored one has the number that it had."""
        if not self._pid:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        _reap(self._pid)


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):  # a restored one is no child of ours
        os.waitpid(pid, 0)


def _started() -> int:
    """Start the process, in a session of its own and without a stream of ours; return its number."""
    ready, told = os.pipe()
    try:
        process = subprocess.Popen(
            (sys.executable, "-I", "-S", "-c", _PROGRAM, str(told)), pass_fds=(told,),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, cwd="/",
        )  # fmt: skip
    finally:
        os.close(told)
    os.read(ready, 1)  # b"": it was closed
    os.close(ready)
    process.returncode = 0  # it is reaped by number: CRIU ends and makes it
    return process.pid
