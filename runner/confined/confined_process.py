"""A confined process beside the launcher, such as the egress process: its start and its end."""

import _signal  # type: ignore[import-not-found]  # without the enums of `signal`
import contextlib
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from ...policies.errors import ClosedError, LaunchError
from .. import channel
from ..launching.spawn import Spawned
from ..messages import Booted, Failed, decode, encode

if TYPE_CHECKING:
    import socket

_BOOT_SECONDS = 30.0


class ConfinedProcess:
    """One process that was started, and has said that it is confined; `control` leads to it."""

    def __init__(self, executable: str, module: str, boot: msgspec.Struct, name: str) -> None:
        """Start `module`, hand it `boot` and wait until it is confined; raises LaunchError."""
        from socket import socket  # slow to import, and not needed by most sandboxes

        self._spawned = spawned = Spawned(executable, module)
        self.pid = spawned.keeper
        self.control = socket(fileno=spawned.take_socket())
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            channel.send(self.control, encode(boot))
        if why := _why_not_booted(self.control):
            said = os.pread(spawned.stderr, 4096, 0).decode("utf-8", "replace").strip()
            self.end()
            raise LaunchError(f"{name} cannot start: {said or why}")

    def has_ended(self) -> bool:
        """Tell whether it has ended, if it says nothing unasked."""
        return channel.has_news(self.control.fileno())

    def end(self) -> int:
        """Kill it; return the number of the signal that ended it, 0 if none or unknown."""
        self.control.close()
        os.close(self._spawned.stderr)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, _signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # the embedding process may reap everything
            return os.WTERMSIG(os.waitpid(self.pid, 0)[1])
        return 0


class ProcessOnDemand:
    """A confined process that starts when it is needed, and again when it has ended.

    Hold `lock` around `running`, `ready`, `end` and all messages to the process between them.
    """

    def __init__(self) -> None:
        """Start nothing."""
        self.lock = threading.Lock()
        self.running: ConfinedProcess | None = None
        self._owner = os.getpid()
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The process, if there is one."""
        return self.running.pid if self.running else None

    def require_open(self) -> None:
        """Raise ClosedError after `close`, and in a forked child of the owner."""
        if self._is_closed or os.getpid() != self._owner:
            raise ClosedError("the sandbox was closed")

    def ready(self, start: Callable[[], ConfinedProcess]) -> ConfinedProcess:
        """Return the process, which `start` makes if none lives; raises ClosedError, or as `start`."""
        self.require_open()
        if self.running is None or self.running.has_ended():
            self.end()
            self.running = start()
        return self.running

    def end(self) -> None:
        """Kill the process, if there is one."""
        process, self.running = self.running, None
        if process:
            process.end()

    def close(self) -> None:
        """Kill the process and start no other one; does nothing in a forked child of the owner."""
        if os.getpid() != self._owner:
            return
        with self.lock:
            self._is_closed = True
            self.end()


def _why_not_booted(sock: "socket.socket") -> str:
    if not channel.has_news(sock.fileno(), _BOOT_SECONDS):
        return f"no answer within {_BOOT_SECONDS:g} s"
    try:
        frame = channel.Receiver(sock, channel.PACKET_BYTES).receive_whole()
    except ConnectionResetError:
        frame = b""
    if not frame:
        return "it ended"
    answer: Booted | Failed = decode(frame, Booted | Failed)
    return "" if isinstance(answer, Booted) else answer.words
