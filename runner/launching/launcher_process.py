"""The supervisor's end of a launcher: start it, boot it, ask it for cells, end it."""

import _signal  # type: ignore[import-not-found]  # without the enums of `signal`
import _socket
import contextlib
import os
import select
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from ...policies.errors import CellwrightError, LauncherLost, LaunchError, PolicyError
from .. import channel
from ..cgroups.cgroup_tree import read
from ..messages import (
    LAYER,
    Boot,
    Booted,
    Failed,
    Fork,
    GuardsReady,
    OpenSocket,
    SharedFilesMade,
    Viewed,
    decode,
    encode,
)
from .spawn import Spawned

if TYPE_CHECKING:
    from ..cells.cell import Cell
    from .covers import Covers

_BOOT_SECONDS = 30.0
_END_SECONDS = 20.0
_HINT = 'run "cellwright doctor": it tries every layer and says how to repair what fails'


class Handover(NamedTuple):
    """The shared directories of a launcher, one for each place, its covers over denied paths, and the
    socket on which guards are asked for; None, and -1, if it has none."""

    shared_files: tuple[int, ...]
    covers: "Covers | None"
    guards: int


class Launcher:
    """A running launcher process; safe from many threads once booted."""

    def __init__(self, spawned: Spawned) -> None:
        """Take over a spawned process."""
        self._lock = threading.Lock()
        self._ending = threading.RLock()
        self._spawned = spawned
        self._sock = _socket.socket(fileno=spawned.take_socket())
        self._stderr = spawned.stderr
        self.keeper = spawned.keeper
        # Pidfds, once they exist: when these processes end, the launcher and all cells have ended.
        self._nursery_pidfd = self._keeper_pidfd = -1
        self._ends = select.poll()  # watches the socket, and the keeper once its pidfd exists
        self._ends.register(self._sock, 0)

    @property
    def socket(self) -> _socket.socket:
        """The channel to the launcher."""
        return self._sock

    def send_boot(self, boot: Boot) -> None:
        """Send the settings that its cells share. If it has ended, `await_booted` says why."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            channel.send(self._sock, encode(boot))

    def await_booted(self) -> Handover:
        """Wait until it is ready, and return its shared directories and covers.

        Raises LaunchError, and PolicyError if this host cannot do what the policy says.
        """
        shared_files: tuple[int, ...] = ()
        covers: Covers | None = None
        guards = -1
        answer, received = self._receive_answer()
        while isinstance(answer, SharedFilesMade | Viewed | GuardsReady):
            if isinstance(answer, SharedFilesMade):
                shared_files = tuple(received)
            elif isinstance(answer, GuardsReady):
                (guards,) = received
            else:
                covers = _covers(received)
            answer, received = self._receive_answer()
        if isinstance(answer, Booted):
            self._require_power_over_cells()
            return Handover(shared_files, covers, guards)
        for each in (*shared_files, *([guards] if guards >= 0 else ())):
            os.close(each)
        if covers:
            covers.close()
        if answer is None:
            self._say_why_it_ended()
        self.close()
        raise _failure(answer)

    def _require_power_over_cells(self) -> None:
        """Refuse root without CAP_KILL: its cells are another user's, and no deadline would hold."""
        try:
            self._keeper_pidfd = os.pidfd_open(self.keeper)
            self._ends.register(self._keeper_pidfd, select.POLLIN)
            self._nursery_pidfd = os.pidfd_open(self.pids()[1])
            _signal.pidfd_send_signal(self._nursery_pidfd, 0)
        except ProcessLookupError:
            raise LauncherLost(cell_began=False) from None
        except PermissionError:
            self.close()
            hint = "start it as an ordinary user, or add the capability KILL to the container"
            raise LaunchError("root may not signal its own cells here", hint) from None

    def require_alive(self) -> None:
        """Raise LaunchError with the launcher's last output if it ended before it was booted."""
        if not self.is_alive():
            self._say_why_it_ended()

    def _say_why_it_ended(self) -> NoReturn:
        said = os.pread(self._stderr, 4096, 0).decode("utf-8", "replace").strip()
        self.close()
        raise LaunchError(f"the launcher ended before it was ready: {said or 'no message'}", _HINT)

    def _receive_answer(
        self,
    ) -> tuple[Booted | SharedFilesMade | Viewed | GuardsReady | Failed | None, list[int]]:
        if not channel.has_news(self._sock.fileno(), _BOOT_SECONDS):
            return Failed(0, f"no answer within {_BOOT_SECONDS:g} s"), []
        try:
            frame, received = channel.receive_with_descriptors(self._sock)
        except ConnectionResetError:
            return None, []
        kinds = Booted | SharedFilesMade | Viewed | GuardsReady | Failed
        answer = decode(frame, kinds) if frame else None
        return answer, received

    def fork(self, cells: "Sequence[Cell]") -> None:
        """Have it make `cells`; each cell's outcome arrives on its status channel."""
        frame = encode(Fork(cells[0].cgroup.into_cgroup, len(cells)))
        descriptors: tuple[int, ...] = ()
        for cell in cells:
            descriptors += cell.descriptors()
        try:
            self._ask(frame, descriptors)
        finally:
            for cell in cells:
                cell.forget_their_ends()

    def ask_for_socket(self, guest: int, number: int, answer: int) -> None:
        """Have it make a TCP socket in the network namespace of a cell and send it on `answer`.

        `guest` is a pidfd of the cell's guest, `number` that guest's number in the launcher's pid
        namespace.  Raises LauncherLost.
        """
        self._ask(encode(OpenSocket(number.to_bytes(4, sys.byteorder))), (guest, answer))

    def _ask(self, frame: bytes, descriptors: tuple[int, ...]) -> None:
        with self._lock:
            if self._sock.fileno() < 0:  # another thread found it dead
                raise LauncherLost(cell_began=False)
            try:
                channel.send(self._sock, frame, descriptors)
            except (BrokenPipeError, ConnectionResetError):
                raise LauncherLost(cell_began=False) from None

    def is_alive(self) -> bool:
        """Tell whether it still holds its end of the socket, and its keeper, whom it follows, lives."""
        with self._lock:
            if self._sock.fileno() < 0:
                return False
            return not self._ends.poll(0)

    def pids(self) -> tuple[int, int, int]:
        """Return those of keeper, nursery and launcher proper; raises LauncherLost."""
        nursery = _first_child(self.keeper)
        return self.keeper, nursery, _first_child(nursery)

    def memory_bytes(self) -> int:
        """Return the anonymous memory of its three processes; 0 if it is gone."""
        try:
            return sum(map(_anonymous_memory, self.pids()))
        except (LauncherLost, OSError):
            return 0

    def kill(self) -> None:
        """Kill it and every cell at once, stopped or not; `close` frees the rest."""
        with self._lock, contextlib.suppress(ProcessLookupError, PermissionError):
            if self._nursery_pidfd >= 0:
                _signal.pidfd_send_signal(self._nursery_pidfd, _signal.SIGKILL)

    def close(self) -> None:
        """End it, and with it every cell; returns when nothing of it is left."""
        self.kill()
        with self._ending:  # a second thread waits for the end too
            self._end()

    def _end(self) -> None:
        with self._lock:
            if self._sock.fileno() < 0:
                return
            self._sock.close()
            nursery, self._nursery_pidfd = self._nursery_pidfd, -1
            keeper, self._keeper_pidfd = self._keeper_pidfd, -1
        os.close(self._stderr)
        if keeper >= 0:
            os.close(keeper)
        if nursery >= 0:  # if the keeper was killed, it cannot kill the nursery
            channel.has_news(nursery, _END_SECONDS)
            os.close(nursery)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # a stopped keeper would not notice the hang-up, and this thread waits for it
            os.kill(self.keeper, _signal.SIGCONT)
        with contextlib.suppress(ChildProcessError):  # the embedding process may reap everything
            self._spawned.reap()


def _covers(received: list[int]) -> "Covers":
    from .covers import Covers  # most policies deny nothing

    return Covers(*received)


def _failure(answer: Failed) -> CellwrightError:
    if answer.field:
        return PolicyError(f"{answer.field}: {answer.message}", answer.hint)
    if answer.message.startswith("show "):
        return LaunchError(
            f"cannot {answer.message}",
            "it has changed since the sandbox was made: put it right, then make the sandbox again",
        )
    if answer.message.startswith(LAYER):
        return LaunchError(
            f"cannot {answer.message}",
            "an overlay works there on ext4, XFS and Btrfs, and not on another overlay, as in many "
            "containers: choose the directory, such as by XDG_STATE_HOME",
        )
    return LaunchError(f"the launcher cannot set up: {answer.message}", answer.hint or _HINT)


def _first_child(pid: int) -> int:
    try:
        return int(read(f"/proc/{pid}/task/{pid}/children").split()[0])
    except (OSError, IndexError):
        raise LauncherLost(cell_began=False) from None


def _anonymous_memory(pid: int) -> int:
    """Return the bytes that are resident and of no file; anyone may read this (proc(5), statm)."""
    _, resident, shared, *_ = map(int, read(f"/proc/{pid}/statm").split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
