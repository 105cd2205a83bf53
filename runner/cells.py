"""A cell as the supervisor holds it: its channels, its pidfd, its cgroup."""

import _signal  # type: ignore[import-not-found]  # without the enums of `signal`
import contextlib
import errno
import os
import threading
import time

from . import channel
from .backlogs import Backlogs
from .cgroups import Cgroup

_OURS = (
    "status", "control", "stdin", "stdout", "stderr", "pidfd", "guest", "workspace", "listener",
)  # fmt: skip
_THEIRS = ("_their_status", "_their_control", "_their_stdin", "_their_stdout", "_their_stderr")
MEMORY_LOOK_SECONDS = 0.25  # between two looks at its memory, while no request lasts longer
_PROCESS_GROUP = 1 << 2  # PIDFD_SIGNAL_PROCESS_GROUP (Linux 6.9)


class Cell:
    """The supervisor's end of one cell.  Closing it kills the cell and frees every descriptor."""

    def __init__(self, cgroup: Cgroup, socket_bytes: int = 0) -> None:
        """`socket_bytes` as `Plan.socket_bytes`."""
        self.cgroup = cgroup
        self._socket_bytes = socket_bytes
        self._backlogs: Backlogs | None = None
        self._within_cap_at = 0.0  # when `has_exceeded` last found it so, by time.monotonic
        self._looking = threading.Lock()  # a request and the sweep of sessions may look at once
        self.pidfd = -1  # of init
        self.guest = -1  # pidfd of the guest's main process
        self.workspace = -1
        self.listener = -1
        self.owed: tuple[bytes, ...] = ()  # to the guest: the rest of a frame that was sent in part
        try:
            self.status, self._their_status = channel.pair()
            self.control, self._their_control = channel.pair()
            self.stdout, self._their_stdout = os.pipe()
            self.stderr, self._their_stderr = os.pipe()
            self._their_stdin, self.stdin = os.pipe()
            for descriptor in (self.stdin, self.stdout, self.stderr, self.control.fileno()):
                os.set_blocking(descriptor, False)
        except BaseException:  # no descriptors, Ctrl-C
            self._free(_OURS + _THEIRS)
            raise

    def descriptors(self) -> tuple[int, ...]:
        """What the launcher is sent, in the order of `cell.enter`, STATUS to TASKS."""
        streams = (self._their_stdin, self._their_stdout, self._their_stderr)
        channels = (self._their_status.fileno(), self._their_control.fileno())
        return (*channels, *streams, *self.cgroup.descriptors)

    def kill_init(self) -> None:
        """Kill init, whose end is the end of everything in its pid namespace."""
        if self.pidfd >= 0:
            try:
                _signal.pidfd_send_signal(self.pidfd, _signal.SIGKILL)
            except ProcessLookupError:
                return

    def interrupt(self, *, group: bool) -> None:
        """Ask the program to yield: SIGINT, to its whole process `group` as Ctrl-C sends it, or not."""
        with contextlib.suppress(ProcessLookupError):
            if group:
                _signal_group(self.guest, _signal.SIGINT)
            else:
                _signal.pidfd_send_signal(self.guest, _signal.SIGINT)

    def kill(self) -> None:
        """Kill everything in the cell, by its cgroup as well in case init is beyond signals."""
        self.kill_init()
        self.cgroup.kill()

    @property
    def can_exceed(self) -> bool:
        """Tell whether the kernel may give the cell more memory than its cap."""
        return self._socket_bytes > 0 or self.cgroup.can_exceed

    @property
    def look_is_due(self) -> bool:
        """Tell whether MEMORY_LOOK_SECONDS have passed since `has_exceeded` last returned False."""
        return time.monotonic() >= self._within_cap_at + MEMORY_LOOK_SECONDS

    def has_exceeded(self) -> bool:
        """Tell whether the cell has far more memory than its cap, and is to be killed."""
        now = time.monotonic()
        if self._has_exceeded():
            return True
        self._within_cap_at = now
        return False

    def _has_exceeded(self) -> bool:
        if self.cgroup.has_exceeded():
            return True
        if not self._socket_bytes:
            return False
        with self._looking:
            if self._backlogs is None:
                try:
                    self._backlogs = Backlogs(pid_of(self.pidfd), 2 * self._socket_bytes)
                except ProcessLookupError:  # the cell has ended
                    return False
        return self._backlogs.are_too_long()

    def give_streams_away(self) -> tuple[int, int]:
        """Return our ends of standard input and output, blocking from now on and the caller's."""
        given = self.stdin, self.stdout
        self.stdin = self.stdout = -1
        for descriptor in given:
            os.set_blocking(descriptor, True)
        return given

    def close_stdin(self) -> None:
        self._free(("stdin",))

    def close(self) -> None:
        """Free everything; the caller has seen the cell end, or has killed it."""
        try:
            self._free(_OURS)
            self.forget_their_ends()
        finally:
            if self._backlogs:
                self._backlogs.close()

    def forget_their_ends(self) -> None:
        """Close the cell's own ends, which the launcher was sent."""
        self._free(_THEIRS)
        self.cgroup.close_descriptors()

    def _free(self, names: tuple[str, ...]) -> None:
        """Close what is open of these."""
        held = self.__dict__
        for name in names:
            each = held.get(name, -1)
            if not isinstance(each, int):
                each.close()
            elif each >= 0:
                held[name] = -1
                os.close(each)


def _signal_group(pidfd: int, number: int) -> None:
    try:
        _signal.pidfd_send_signal(pidfd, number, None, _PROCESS_GROUP)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Before Linux 6.9.  The number is nobody else's while a process of the group is left, and here
        # its leader lived a moment ago: numbers would have to go round in that moment.
        _signal.pidfd_send_signal(pidfd, 0)
        os.killpg(pid_of(pidfd), number)


def pid_of(pidfd: int) -> int:
    """Return the number behind a pidfd; raises ProcessLookupError."""
    return _numbers_of(pidfd)[0]


def number_in_launcher(guest: int) -> int:
    """Return the number that the guest behind a pidfd has in its launcher's pid namespace, the parent
    of the cell's; raises ProcessLookupError."""
    return _numbers_of(guest)[-2]


def _numbers_of(pidfd: int) -> list[int]:
    """Return the numbers of a process from our pid namespace down to its own (pidfd_open(2))."""
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        fields = dict(line.split(":", 1) for line in file)
    if int(fields["Pid"]) <= 0:  # it was reaped, or is not of our pid namespace
        raise ProcessLookupError(errno.ESRCH, "no process behind the pidfd")
    return [int(number) for number in fields["NSpid"].split()]
