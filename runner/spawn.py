"""Starts a launcher process, and does nothing else.

This module avoids imports, so that a command can start a launcher first and import everything else
meanwhile: the launcher needs as long for its own imports.
"""

import _socket
import os
import signal
import sys

from ..policies.errors import LaunchError

# -c, so that no path of ours stands in /proc/PID/cmdline, which a cell's processes inherit.  msgspec
# can use typing_extensions but does not need it: without, it imports a quarter faster (measured).
_BOOTSTRAP = (
    "import os,sys;"
    "paths=os.read(3,65536).decode().split('\\0');"
    "sys.path[:0]=paths;"
    "sys.modules['typing_extensions']=None;"
    "from {} import main;"
    "main(len(paths))"
)
_LAUNCHER = "cellwright.runner.launcher.main"


class Spawned:
    """A launcher process that imports, and waits for import paths and its Boot frame."""

    def __init__(self, executable: str, module: str = _LAUNCHER) -> None:
        """Start `executable` with `main` of `module`; raises LaunchError if it cannot be executed."""
        self.executable = executable
        try:
            self.stderr = os.memfd_create("launcher-stderr", os.MFD_CLOEXEC)
        except OSError as error:
            raise _cannot_start(executable, error) from None
        try:
            ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        except OSError as error:
            os.close(self.stderr)
            raise _cannot_start(executable, error) from None
        try:
            self.keeper = _spawn(executable, module, theirs.fileno(), self.stderr)
        except OSError as error:
            os.close(self.stderr)
            ours.close()
            raise _cannot_start(executable, error) from None
        finally:
            theirs.close()
        self.socket = ours.detach()

    def take_socket(self) -> int:
        """Return the socket for a Launcher, which owns the process from then on."""
        taken, self.socket = self.socket, -1
        return taken

    def close(self) -> None:
        """End a process that no Launcher has taken over; does nothing otherwise, or again."""
        if self.socket < 0:
            return
        os.close(self.take_socket())
        os.close(self.stderr)
        try:
            os.kill(self.keeper, signal.SIGKILL)
            os.waitpid(self.keeper, 0)
        except (ProcessLookupError, ChildProcessError):
            pass  # the embedding process may reap everything


def _cannot_start(executable: str, error: OSError) -> LaunchError:
    return LaunchError(f"cannot start {executable}: {error.strerror}")


def interpreter() -> str:
    """Return the interpreter that runs this process, outside any virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)


def _spawn(executable: str, module: str, sock: int, stderr: int) -> int:
    """Start it with an empty environment, no inherited descriptor, signal mask or handler."""
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDWR, 0),
        (os.POSIX_SPAWN_DUP2, 0, 1),
        (os.POSIX_SPAWN_DUP2, stderr, 2),
        (os.POSIX_SPAWN_DUP2, sock, 3),
    ]
    catchable = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    return os.posix_spawn(
        executable, [executable, "-I", "-S", "-c", _BOOTSTRAP.format(module)], {},
        file_actions=actions, setsid=True, setsigmask=[], setsigdef=catchable,
    )  # fmt: skip
