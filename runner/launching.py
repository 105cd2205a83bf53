"""The supervisor's end of a launcher: start it, boot it, ask it for cells, end it."""

import contextlib
import importlib.util
import os
import select
import signal
import threading
from pathlib import Path

from ..policies.errors import ClosedError, LauncherLost, LaunchError
from . import channel
from .cells import Cell
from .messages import Boot, Failed, Fork, Forked, decode, encode

# -c, so that no path of ours stands in /proc/PID/cmdline, which a cell's processes inherit.
_BOOTSTRAP = (
    "import os,sys;"
    "paths=os.read(3,65536).decode().split('\\0');"
    "sys.path[:0]=paths;"
    "from cellwright.runner.launcher import main;"
    "main(len(paths))"
)
_BOOT_SECONDS = 30.0
_PACKAGES = ("cellwright", "msgspec", "prctl")
_CATCHABLE = set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}
_HINT = 'run "cellwright doctor": it tries every layer and says how to repair what fails'


class Launcher:
    """A running launcher process; safe from many threads once booted."""

    def __init__(self, executable: str) -> None:
        """Start `executable`; it imports while the caller goes on to prepare the boot frame."""
        self._lock = threading.Lock()
        self._sock, theirs = channel.pair()
        self._stderr = os.memfd_create("launcher-stderr", os.MFD_CLOEXEC)
        try:
            self.keeper = self._spawn(executable, theirs.fileno())
        finally:
            theirs.close()
        self._sock.send("\0".join(_import_paths()).encode())

    def _spawn(self, executable: str, sock: int) -> int:
        """Start it with an empty environment, no inherited descriptor, signal mask or handler."""
        arguments = [executable, "-I", "-S", "-c", _BOOTSTRAP]
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDWR, 0),
            (os.POSIX_SPAWN_DUP2, 0, 1),
            (os.POSIX_SPAWN_DUP2, self._stderr, 2),
            (os.POSIX_SPAWN_DUP2, sock, 3),
        ]
        try:
            return os.posix_spawn(
                executable, arguments, {}, file_actions=actions, setsid=True,
                setsigmask=[], setsigdef=_CATCHABLE,
            )  # fmt: skip
        except OSError as error:
            self._sock.close()
            os.close(self._stderr)
            raise LaunchError(f"cannot start {executable}: {error.strerror}") from None

    def boot(self, boot: Boot) -> None:
        """Send what its cells share and wait until it is ready; raises LaunchError."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            channel.send(self._sock, encode(boot))
        answer = self._receive_answer()
        if isinstance(answer, Forked):
            return
        said = os.pread(self._stderr, 4096, 0).decode("utf-8", "replace").strip()
        self.close()
        if answer is None:
            raise LaunchError(
                f"the launcher ended before it was ready: {said or 'no message'}", _HINT
            )
        raise LaunchError(f"the launcher cannot set up: {answer.message}", _HINT)

    def _receive_answer(self) -> Forked | Failed | None:
        if not select.select([self._sock], [], [], _BOOT_SECONDS)[0]:
            return Failed(0, f"no answer within {_BOOT_SECONDS:g} s")
        try:
            frame = self._sock.recv(channel.PACKET_BYTES)
        except ConnectionResetError:
            return None
        return decode(frame[1:], Forked | Failed) if frame else None

    def fork(self, cell: Cell) -> None:
        """Have it make `cell`; what comes of it arrives on the cell's status channel."""
        frame = encode(Fork(cell.cgroup.into_cgroup))
        with self._lock:
            if self._sock.fileno() < 0:
                raise ClosedError("the sandbox was closed")
            try:
                cell.hand_over(self._sock, frame)
            except (BrokenPipeError, ConnectionResetError):
                raise LauncherLost(cell_began=False) from None

    def is_alive(self) -> bool:
        """Tell whether it still holds its end of the socket."""
        poll = select.poll()
        poll.register(self._sock, 0)
        return self._sock.fileno() >= 0 and not poll.poll(0)

    def pids(self) -> tuple[int, int]:
        """Return (keeper, launcher proper)."""
        children = Path(f"/proc/{self.keeper}/task/{self.keeper}/children").read_text().split()
        return self.keeper, int(children[0])

    def close(self) -> None:
        """End it, and with it every cell; returns when nothing of it is left."""
        with self._lock:
            if self._sock.fileno() < 0:
                return
            self._sock.close()
        os.close(self._stderr)
        with contextlib.suppress(ChildProcessError):  # the embedding process may reap everything
            os.waitpid(self.keeper, 0)


def _import_paths() -> list[str]:
    """Return the directories that hold the launcher's three packages, and no others."""
    found = []
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise LaunchError(f"the package {package} is not installed", "pip install cellwright")
        depth = 2 if spec.submodule_search_locations else 1
        found.append(str(Path(spec.origin).parents[depth - 1]))
    return list(dict.fromkeys(found))
