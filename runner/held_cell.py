"""A cell from its birth to its end, as it is reported on the status channel.

Status frames come from trusted code, but a launcher has less power than the supervisor: a frame or a
descriptor that is not as it must be raises InternalError, and ends the launcher with every cell.
"""

import _signal  # type: ignore[import-not-found]  # without the enums of `signal`
import os
import stat
import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from ..policies.errors import InternalError, LauncherLost, LaunchError
from . import channel
from .cells import Cell
from .cgroups import Cgroup
from .kernel import notifications
from .messages import Ended, Failed, Ready, Status, WaysOut, decode
from .result import NetworkRecord
from .watching.listener import Listener

if TYPE_CHECKING:
    from ..policies.plan import Plan
    from .cell_network import CellNetwork
    from .egress_process import CellEgress

_SETUP_SECONDS = 20.0
_REAP_SECONDS = 20.0
_WORKSPACE_MODE = stat.S_IFDIR | 0o700  # as it is mounted; nothing has run yet
_KILL_SECONDS = 0.05  # after it, what is left of a cell is killed by its cgroup as well
_ALWAYS = 3  # descriptors that a Ready frame brings: init, guest, /workspace


class Origin(Protocol):
    """Where a cell comes from."""

    @property
    def id(self) -> str:
        """Names the launcher among all launchers."""

    @property
    def plan(self) -> "Plan":
        """What its cells may do."""

    def keep(self) -> None:
        """Keep the launcher, even if it is retired, until `free`."""

    def make_kept(self) -> "HeldCell":
        """Return a new cell, though the launcher may be retired; raises LaunchError, LauncherLost."""

    @property
    def listens(self) -> bool:
        """Tell whether its cells have a listener, without which none is lent."""

    def is_alive(self) -> bool:
        """Tell whether the launcher is there."""

    def is_current(self) -> bool:
        """Tell whether its cells see what new ones would."""

    def uncovered(self) -> str:
        """Return a path that the policy hides and its cells can see by now, if there is one."""

    def lose(self) -> None:
        """Note that the launcher died: a cell has lost it."""

    def give_up(self) -> None:
        """End a launcher that does not answer, and with it every cell."""

    def listen(self, descriptor: int, cgroup: Cgroup) -> Listener: ...

    def network_of(self, guest: int) -> "CellNetwork | None":
        """Return the network of the cell of `guest`, a pidfd; None if its policy has no loopback."""

    def connect(self, sockets: list[int]) -> "CellEgress | None":
        """Have the sockets of a cell served, if the policy allows any name; raises InternalError for
        others than it should have."""

    def free(self, cell: Cell | None) -> None:
        """Free what a cell held that is gone, or that never came to be."""


class HeldCell:
    """Holds a cell that the launcher was asked for: prepares it, hears of its end, disposes of it."""

    def __init__(self, cell: Cell, origin: Origin) -> None:
        self.cell = cell
        self.listener: Listener | None = None
        self.egress: CellEgress | None = None  # the way out, if the policy has one
        self._sockets: list[int] = []  # for it, until all have come
        self.ended: Ended | None = None  # what the launcher reported of the guest's main process
        self._origin = origin
        self._has_work = False

    @property
    def wait_status(self) -> int | None:
        """The wait status of the guest's main process, once it has ended."""
        return self.ended.wait_status if self.ended else None

    def prepare(self) -> None:
        """Wait until every layer is on and the guest waits for its program.

        Raises LaunchError if the cell could not be built, LauncherLost if the launcher died, or took
        too long: it is ended then.
        """
        deadline = time.monotonic() + _SETUP_SECONDS
        while self.cell.pidfd < 0 and not self.ended:
            if not self._hears_by(deadline):
                raise LauncherLost(cell_began=False)
            self.receive()
        if self.ended:
            raise LaunchError(f"cannot build a cell: its process ended ({self.ended.wait_status})")
        if self._origin.listens and self.listener is None:
            raise InternalError("a cell is ready, but its seccomp listener is missing")

    def is_alive(self) -> bool:
        """Tell whether a cell that waits for its program still does."""
        return self._origin.is_alive() and not channel.has_news(self.cell.status.fileno())

    def is_current(self) -> bool:
        """Tell whether a cell that waits still does, and sees what a new one would."""
        if not self._origin.is_current() or channel.has_news(self.cell.status.fileno()):
            return False
        return self.egress is None or self.egress.is_served()

    def is_sibling_of(self, other: "HeldCell") -> bool:
        """Tell whether both cells were forked from one launcher."""
        return self._origin is other._origin

    @property
    def launcher_id(self) -> str:
        """Names the launcher from which it was forked."""
        return self._origin.id

    @property
    def plan(self) -> "Plan":
        """What it may do."""
        return self._origin.plan

    @property
    def origin(self) -> Origin:
        return self._origin

    def settle_egress(self, *, ends: bool) -> NetworkRecord:
        """Return what the cell did with the network since the last time."""
        return self.egress.settle(ends=ends) if self.egress else NetworkRecord()

    def uncovered(self) -> str:
        """Return a path that the policy hides and the cell can see by now; empty if there is none."""
        return self._origin.uncovered()

    def memory_bytes(self) -> int:
        """Return what the cell holds by its cgroup's count, 0 where nobody counts."""
        return self.cell.cgroup.memory_peak_bytes() or 0

    def network(self) -> "CellNetwork | None":
        """Return the cell's network, which the caller closes; None if its policy has no loopback."""
        return self._origin.network_of(self.cell.guest)

    def begin(self) -> None:
        """Note that from now on the guest may run its program."""
        self._has_work = True

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
        except InternalError:
            self._origin.give_up()
            raise
        _close(descriptors)
        if isinstance(message, Ended):
            self.ended = message
        else:
            raise LaunchError(f"cannot build a cell: {_words(message)}", hint="cellwright doctor")

    def _take(self, ready: Ready, descriptors: list[int]) -> None:
        cell = self.cell
        if len(descriptors) != _ALWAYS + ready.listens or cell.pidfd >= 0:
            _close(descriptors)
            raise InternalError("a cell is ready without its descriptors, or twice")
        if wrong := _first_wrong(descriptors):
            _close(descriptors)
            raise InternalError(f"the {wrong} of a cell is another file")
        cell.pidfd, cell.guest, cell.workspace, *listener = descriptors
        for cell.listener in listener:
            self.listener = self._origin.listen(cell.listener, cell.cgroup)
        try:
            self.egress = self._origin.connect(self._sockets)
        finally:
            self._close_sockets()

    def _close_sockets(self) -> None:
        _close(self._sockets)
        self._sockets = []

    def retire(self) -> None:
        """Kill what is left of the cell and wait until nothing of it runs."""
        self.cell.kill_init()
        self.cell.cgroup.thaw()  # on v1 the killed die only then
        if self.cell.pidfd >= 0 and channel.has_news(self.cell.pidfd, _KILL_SECONDS):
            return  # init ends after all others in its namespace (pid_namespaces(7))
        self.cell.kill()
        deadline = time.monotonic() + _REAP_SECONDS
        if self.cell.pidfd < 0:  # it never was ready: only its launcher knows of its end
            while not self.ended and self._hears_by(deadline):
                self.receive()
        elif not channel.has_news(self.cell.pidfd, _REAP_SECONDS):
            self._origin.give_up()
            raise LaunchError("the cell did not end in time")
        if self.ended is None and channel.has_news(self.cell.status.fileno()):
            self.receive()  # notices a launcher that died

    def account(self) -> Ended:
        """Return what the launcher reports of the ended cell, once it does."""
        self.retire()
        deadline = time.monotonic() + _REAP_SECONDS
        while self.ended is None:
            if not self._hears_by(deadline):
                raise LaunchError("the cell did not end in time")
            self.receive()
        return self.ended

    def workspace_at_rest(self) -> int:
        """Kill the cell and return its /workspace once nothing changes there any more.

        Asks init's pidfd, since another thread may listen to the status channel: init ends after all
        others in its namespace (pid_namespaces(7)).  Raises LaunchError if that does not happen.
        """
        self.cell.kill()
        if not channel.has_news(self.cell.pidfd, _REAP_SECONDS):
            raise LaunchError("the cell did not end in time")
        return self.cell.workspace

    def dispose(self) -> None:
        """Kill what is left of the cell; afterwards nothing of it is there."""
        try:
            self.retire()
        except BaseException:
            self.cell.kill()  # where memory is short, killing it may be what failed
            raise
        finally:
            if self.listener:
                self.listener.close()
            if self.egress:
                self.egress.close()
            self._close_sockets()
            self._origin.free(self.cell)

    def _hears_by(self, deadline: float) -> bool:
        """Wait for the next frame; a launcher from which none comes is stopped or stuck, and ended."""
        patience = max(0.0, deadline - time.monotonic())
        heard = channel.has_news(self.cell.status.fileno(), patience)
        if not heard:
            self._origin.give_up()
        return heard

    def _receive(self) -> tuple[Status, list[int]]:
        try:
            frame, descriptors = channel.receive_with_descriptors(self.cell.status)
        except channel.ProtocolError as error:
            raise _nonsense(error) from None
        if not frame:
            self._origin.lose()
            raise LauncherLost(cell_began=self._has_work)
        try:
            message: Status = decode(frame, Status)
        except BaseException as error:
            _close(descriptors)
            if isinstance(error, msgspec.DecodeError):
                raise _nonsense(error) from None
            raise
        return message, descriptors


def _first_wrong(descriptors: list[int]) -> str:
    """Return which of a Ready frame's descriptors is not what it stands for; "" if none is."""
    init, guest, workspace, *listener = descriptors
    if not _is_pidfd(init):
        return "init"
    if not _is_pidfd(guest):
        return "guest"
    if os.fstat(workspace).st_mode != _WORKSPACE_MODE:
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


def _words(failed: Failed) -> str:
    return f"{failed.message}: {os.strerror(failed.errno)}" if failed.errno else failed.message


def _nonsense(error: Exception) -> InternalError:
    return InternalError(f"a frame on a status channel is malformed: {error}")


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
