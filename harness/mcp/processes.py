"""Server processes: their interface, and servers that run on the host."""

import os
import select
import shutil
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

from ...policies.errors import LaunchError
from .config import ServerConfig

_INHERITED = ("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "LANG")
_GRACE_SECONDS = 2.0  # to exit after its stdin is closed, and again after SIGTERM


class ServerProcess(Protocol):
    """A started server.  `stdin`, `stdout` and `stderr` are descriptors; `stderr` is -1 if there is
    none to read, and `read_stderr` returns it."""

    @property
    def pid(self) -> int: ...
    @property
    def stdin(self) -> int: ...
    @property
    def stdout(self) -> int: ...
    @property
    def stderr(self) -> int: ...
    def read_stderr(self) -> str:
        """Return its standard error if `stderr` is -1; may wait a second."""

    def close(self, *, patient: bool) -> None:
        """End it and its children; a `patient` close first gives it some seconds to end by itself."""


class HostProcess:
    """A server that runs on the host as our user, unconfined.

    It has a session of its own, so that Ctrl-C in a terminal does not reach it.  It inherits only the
    few variables that every program needs.
    """

    def __init__(self, config: ServerConfig, env: Mapping[str, str]) -> None:
        """Start it; raises LaunchError.  The kernel kills it when the thread that calls this ends
        (pdeathsig of prctl(2))."""
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        environment |= env
        command = shutil.which(config.command, path=environment.get("PATH"))
        if command is None:
            raise LaunchError(
                f"server {config.name}: command: program {config.command!r} not found",
                "install it, or use its absolute path",
            )
        try:
            self._process = subprocess.Popen(
                (*_parent_death_prefix(), command, *config.args),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env=environment, cwd=config.cwd or None, bufsize=0,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise LaunchError(f"server {config.name}: {error.strerror}: {error.filename}") from None
        self.pid = self._process.pid
        streams = (self._process.stdin, self._process.stdout, self._process.stderr)
        self.stdin, self.stdout, self.stderr = (each.fileno() for each in streams if each)

    def read_stderr(self) -> str:
        return ""

    def close(self, *, patient: bool) -> None:
        """Kill its session; a `patient` close first closes its stdin, then sends SIGTERM."""
        with self._process:  # closes the pipes and reaps it
            if self._process.stdin:
                self._process.stdin.close()
            pidfd = os.pidfd_open(self.pid)
            try:
                if patient and not _ended(pidfd):
                    self._signal(signal.SIGTERM)
                    _ended(pidfd)
                self._signal(
                    signal.SIGKILL
                )  # not reaped yet, so its pid cannot be another process's
            finally:
                os.close(pidfd)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def launch_server(config: ServerConfig, env: Mapping[str, str]) -> ServerProcess:
    """Start a server, in a cell by default; raises LaunchError, and Unenforceable where this host
    cannot build the cell."""
    if not config.sandboxed:
        return HostProcess(config, env)
    from .cells import CellProcess  # imports the sandbox: only servers in cells need it

    return CellProcess(config, env)


def _parent_death_prefix() -> tuple[str, ...]:
    """Return a command prefix that has the kernel kill the program when we are killed; empty without
    setpriv(1)."""
    setpriv = shutil.which("setpriv")
    return (setpriv, "--pdeathsig", "KILL", "--") if setpriv else ()


def _ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(_GRACE_SECONDS * 1000))
