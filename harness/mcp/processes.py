"""Servers as processes: how one is started, and how it ends."""

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
_GRACE_SECONDS = 2.0  # to exit after its input ended, and again after SIGTERM


class ServerProcess(Protocol):
    """A server that was started.  `stdin`, `stdout` and `errors` are descriptors; no errors: -1."""

    @property
    def pid(self) -> int: ...
    @property
    def stdin(self) -> int: ...
    @property
    def stdout(self) -> int: ...
    @property
    def errors(self) -> int: ...
    def said(self) -> str:
        """Return what it wrote to its standard error, where that is no descriptor of ours."""

    def close(self, *, patient: bool) -> None:
        """End it and leave nothing of it; a `patient` one lets it end by itself for some seconds."""


class HostProcess:
    """A server that runs on the host as whoever started us: nothing confines it.

    It has a session of its own, so that a terminal's Ctrl-C is ours alone, and of our environment
    only what a program cannot do without.
    """

    def __init__(self, config: ServerConfig, env: Mapping[str, str]) -> None:
        """Start it; raises LaunchError.  Linux kills it with the thread that calls this."""
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        environment |= env
        command = shutil.which(config.command, path=environment.get("PATH"))
        if command is None:
            raise LaunchError(
                f"server {config.name}: there is no program {config.command!r}",
                "install it, or give its whole path as command",
            )
        try:
            self._process = subprocess.Popen(
                (*_with_us(), command, *config.args), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, env=environment, cwd=config.cwd or None, bufsize=0,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise LaunchError(f"server {config.name}: {error.strerror}: {error.filename}") from None
        self.pid = self._process.pid
        streams = (self._process.stdin, self._process.stdout, self._process.stderr)
        self.stdin, self.stdout, self.errors = (each.fileno() for each in streams if each)

    def said(self) -> str:
        return ""

    def close(self, *, patient: bool) -> None:
        """SIGKILL to all of its session; before that, if patient, its input ends, then SIGTERM."""
        with self._process:  # closes the pipes and reaps it
            if self._process.stdin:
                self._process.stdin.close()
            pidfd = os.pidfd_open(self.pid)
            try:
                if patient and not _ended(pidfd):
                    self._signal(signal.SIGTERM)
                    _ended(pidfd)
                self._signal(signal.SIGKILL)  # it is not reaped yet, so its number is still its own
            finally:
                os.close(pidfd)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def _with_us() -> tuple[str, ...]:
    """Return what makes a program end when we are killed, where the host has that."""
    setpriv = shutil.which("setpriv")
    return (setpriv, "--pdeathsig", "KILL", "--") if setpriv else ()


def _ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(_GRACE_SECONDS * 1000))
