"""A cell from its birth to its end, as it is reported on the status channel.

Status frames come from trusted code, but a launcher has less power than the supervisor: a frame or a
descriptor that is not as it must be raises InternalError, and ends the launcher with every cell.
"""

import _signal  # type: ignore[import-not-found]  # without the enums of `signal`
import os
import stat
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from ...policies.errors import InternalError, LauncherLost, LaunchError
from .. import channel
from ..kernel import notifications
from ..launching.generation import Generation
from ..messages import Ended, ImageChanges, Ready, Status, WaysOut, decode
from ..requests.result import NetworkRecord
from ..watching.gpu_use import NO_USE, GpuUse, what_hangs
from .cell import Cell, pid_of

if TYPE_CHECKING:
    from ...policies.plan import Plan
    from ..confined.egress_process import CellEgress
    from ..listening.cell_listener import Listener
    from ..watching.gpu_use import GpuCount
    from .cell_network import CellNetwork

_SETUP_SECONDS = 20.0
_REAP_SECONDS = 20.0
_MOST_TIMES = 6.0  # how much longer a launcher may take on a busy machine
_WORKSPACE_MODES = stat.S_IFDIR | 0o700, stat.S_IFDIR | 0o755  # the second in an image
_CHANGES_MODE = stat.S_IFDIR | 0o755
_KILL_SECONDS = 0.05  # after this time the cell is killed by its cgroup as well
_ALWAYS = 3  # descriptors in every Ready frame: init, guest, /workspace


class HeldCell:
    """A requested cell: prepares it, receives the report of its end, disposes of it."""

    def __init__(self, cell: Cell, origin: Generation) -> None:
        self.cell = cell
        self.listener: Listener | None = None
        self.egress: CellEgress | None = None  # the way out, if the policy has one
        self._sockets: list[int] = []  # sockets for `egress`, until all have arrived
        self.ended: Ended | None = None  # the launcher's report of the guest's main process
        self.origin = origin  # the launcher from which it was forked
        self._has_work = False
        self._gpu: GpuCount | None = None

    @property
    def wait_status(self) -> int | None:
        """The wait status of the guest's main process, once it has ended."""
        return self.ended.wait_status if self.ended else None

    def prepare(self) -> None:
        """Wait until every layer is on and the guest waits for its program.

        Raises LaunchError if the cell could not be built, LauncherLost if the launcher died, or took
        too long: it is ended then.
        """
        deadline = time.monotonic() + _patience(_SETUP_SECONDS)
        while self.cell.pidfd < 0 and not self.ended:
            if not self._has_frame_by(deadline):
                raise LauncherLost(cell_began=False)
            self.receive()
        if self.ended:
            raise LaunchError(f"cannot build a cell: its process ended ({self.ended.wait_status})")
        if self.origin.listens and self.listener is None:
            raise InternalError("a cell is ready, but its seccomp listener is missing")

    def is_alive(self) -> bool:
        """Tell whether a cell that waits for its program still does."""
        return self.origin.is_alive() and not channel.has_news(self.cell.status.fileno())

    def is_current(self) -> bool:
        """Tell whether a parked cell is alive and shows the same paths as a new one."""
        if not self.origin.is_current() or channel.has_news(self.cell.status.fileno()):
            return False
        return self.egress is None or self.egress.is_served()

    @property
    def plan(self) -> "Plan":
        """The plan of the cell."""
        return self.origin.plan

    def settle_egress(self, *, ends: bool) -> NetworkRecord:
        """Return the cell's use of the network since the last call."""
        return self.egress.settle(ends=ends) if self.egress else NetworkRecord()

    def memory_bytes(self) -> int:
        """Return the cell's memory by its cgroup's count; 0 without a count."""
        return self.cell.cgroup.memory_peak_bytes() or 0

    def network(self) -> "CellNetwork | None":
        """Return the cell's network, which the caller closes; None if its policy has no loopback."""
        return self.origin.network_of(self.cell.guest)

    def begin(self) -> None:
        """Note that from now on the guest may run its program."""
        if self.plan.devices and not self._has_work:
            from ..watching.gpu_use import begin_count  # few cells have a GPU

            self._gpu = begin_count(pid_of(self.cell.guest))
        self._has_work = True

    def gpu_use(self, *, ends: bool) -> GpuUse:
        """Return what the cell used of GPUs; if it `ends`, kill it, and return once its memory there is
        free, or was not for ten seconds.  Raises LaunchError for a cell that does not end."""
        if not self.plan.devices:
            return NO_USE
        if not ends:  # the last sample: to ask takes longer than a session's call
            return self._gpu.use()._replace(left_bytes=0) if self._gpu else NO_USE
        if self._gpu:
            self._gpu.look()
        self.retire()
        return self._gpu.settle() if self._gpu else NO_USE

    def receive(self) -> None:
        """Take one frame from the status channel."""
        try:
            message, descriptors = self._receive()
            if isinstance(message, Ready):
                self._take(message, descriptors)
                return
            if isinstance(message, WaysOut):
                self._sockets += descriptors
                return
            if isinstance(message, ImageChanges):
                self._take_changes(descriptors)
                return
        except InternalError:
            self.origin.give_up()
            raise
        _close(descriptors)
        if isinstance(message, Ended):
            self.ended = message
        else:
            raise LaunchError(f"cannot build a cell: {message.words}", hint="cellwright doctor")

    def _take_changes(self, descriptors: list[int]) -> None:
        mode = [os.fstat(each).st_mode for each in descriptors]
        if mode != [_CHANGES_MODE] or self.cell.changes >= 0 or not self.plan.image:
            _close(descriptors)
            raise InternalError("the changes of a cell are another file, or told twice")
        (self.cell.changes,) = descriptors

    def _take(self, ready: Ready, descriptors: list[int]) -> None:
        cell = self.cell
        if len(descriptors) != _ALWAYS + ready.listens or cell.pidfd >= 0:
            _close(descriptors)
            raise InternalError("a cell is ready without its descriptors, or twice")
        mode = _WORKSPACE_MODES[cell.changes >= 0]
        if wrong := _first_wrong(descriptors, mode):
            _close(descriptors)
            raise InternalError(f"the {wrong} of a cell is another file")
        cell.pidfd, cell.guest, cell.workspace, *listener = descriptors
        for cell.listener in listener:
            self.listener = self.origin.listen(cell.listener, cell.guest, cell.cgroup)
        try:
            self.egress = self.origin.connect(self._sockets)
        finally:
            self._close_sockets()

    def _close_sockets(self) -> None:
        _close(self._sockets)
        self._sockets = []

    def retire(self) -> None:
        """Kill the remaining processes of the cell and wait until they have ended."""
        self.cell.kill_init()
        self.cell.cgroup.thaw()  # on cgroup v1 killed processes die only when thawed
        if self.cell.pidfd >= 0 and channel.has_news(self.cell.pidfd, _KILL_SECONDS):
            return  # init ends after all others in its namespace (pid_namespaces(7))
        self.cell.kill()
        deadline = time.monotonic() + _patience(_REAP_SECONDS)
        if self.cell.pidfd < 0:  # it never was ready, so only its launcher can report its end
            while not self.ended and self._has_frame_by(deadline):
                self.receive()
        elif not channel.has_news(self.cell.pidfd, _patience(_REAP_SECONDS)):
            self.origin.give_up()
            raise LaunchError(f"the cell did not end in time{self._what_hangs()}")
        if self.ended is None and channel.has_news(self.cell.status.fileno()):
            self.receive()  # notices a launcher that died

    def _what_hangs(self) -> str:
        found = what_hangs(next(iter(self.cell.cgroup.places.values()), ""))
        return f": {found}" if found else ""

    def account(self) -> Ended:
        """Return the launcher's report of the ended cell; waits for it."""
        self.retire()
        deadline = time.monotonic() + _patience(_REAP_SECONDS)
        while self.ended is None:
            if not self._has_frame_by(deadline):
                raise LaunchError("the cell did not end in time")
            self.receive()
        return self.ended

    def workspace_at_rest(self) -> int:
        """Kill the cell and return its /workspace once nothing changes there any more.

        Asks init's pidfd, since another thread may listen to the status channel: init ends after all
        others in its namespace (pid_namespaces(7)).  Raises LaunchError if that does not happen.
        """
        self.cell.kill()
        if not channel.has_news(self.cell.pidfd, _patience(_REAP_SECONDS)):
            raise LaunchError("the cell did not end in time")
        return self.cell.workspace

    def dispose(self) -> None:
        """Kill the remaining processes of the cell and free everything that it held."""
        try:
            self.retire()
            if self.cell.pidfd >= 0:  # init ended, and so did every process
                self.cell.cgroup.leave()
        except BaseException:
            self.cell.kill()  # if memory is short, the first kill may have failed
            raise
        finally:
            if self._gpu:
                self._gpu.close()
            if self.listener:
                self.listener.close()
            if self.egress:
                self.egress.close()
            self._close_sockets()
            self.origin.free(self.cell)

    def _has_frame_by(self, deadline: float) -> bool:
        """Wait for the next frame; a launcher from which none comes is stopped or stuck, and ended."""
        patience = max(0.0, deadline - time.monotonic())
        heard = channel.has_news(self.cell.status.fileno(), patience)
        if not heard:
            self.origin.give_up()
        return heard

    def _receive(self) -> tuple[Status, list[int]]:
        try:
            frame, descriptors = channel.receive_with_descriptors(self.cell.status)
        except channel.ProtocolError as error:
            raise _malformed(error) from None
        if not frame:
            self.origin.lose()
            raise LauncherLost(cell_began=self._has_work)
        try:
            message: Status = decode(frame, Status)
        except BaseException as error:
            _close(descriptors)
            if isinstance(error, msgspec.DecodeError):
                raise _malformed(error) from None
            raise
        return message, descriptors


def make_cells(origin: Generation, count: int = 1, *, is_kept: bool = False) -> Iterator[HeldCell]:
    """Yield `count` cells as each begins to wait for its program, or fewer if there is no room.

    `is_kept`: of a launcher that may be retired, but is kept.  Raises LaunchError, LauncherLost.
    """
    ready, cells = 0, origin.fork(count, is_kept=is_kept)
    try:
        for cell in cells:
            held = HeldCell(cell, origin)
            held.prepare()
            ready += 1
            yield held
    finally:
        origin.discard(cells[ready:])


def _patience(seconds: float) -> float:
    """Return how long to wait for a launcher: as many times longer as programs wait for each processor.

    A launcher that is taken for stuck is ended with all its cells, and on a machine with 20 programs a
    processor one with 64 cells took more than 20 seconds for the next (measured).
    """
    waiting = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return seconds * min(max(1.0, waiting), _MOST_TIMES)


def _first_wrong(descriptors: list[int], workspace_mode: int) -> str:
    """Return the name of the first descriptor in a Ready frame that is of the wrong kind; "" if all
    are right."""
    init, guest, workspace, *listener = descriptors
    if not _is_pidfd(init):
        return "init"
    if not _is_pidfd(guest):
        return "guest"
    if os.fstat(workspace).st_mode != workspace_mode:
        return "workspace"
    return "" if all(map(notifications.is_listener, listener)) else "listener"


def _is_pidfd(descriptor: int) -> bool:
    try:
        _signal.pidfd_send_signal(descriptor, 0)
    except ProcessLookupError:
        return True  # it has ended by now
    except OSError:
        return False
    return True


def _malformed(error: Exception) -> InternalError:
    return InternalError(f"a frame on a status channel is malformed: {error}")


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class LauncherClaim:
    """Safe from many threads; the launcher ends with its last cell and its last claim, if it was
    replaced."""

    def __init__(self, origin: Generation) -> None:
        self._origin = origin
        origin.keep()
        self._lock = threading.Lock()
        self._is_released = False

    @property
    def launcher_id(self) -> str:
        return self._origin.id

    def is_alive(self) -> bool:
        """Tell whether the launcher is there."""
        return self._origin.is_alive()

    def make(self) -> HeldCell:
        """Return a new cell of the launcher; raises LaunchError, LauncherLost."""
        (held,) = make_cells(self._origin, is_kept=True)
        return held

    def release(self) -> None:
        """Let the launcher go; a second call does nothing."""
        with self._lock:
            is_first, self._is_released = not self._is_released, True
        if is_first:
            self._origin.free(None)
