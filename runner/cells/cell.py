"""A cell as the supervisor holds it: its channels, its pidfd, its cgroup."""

import _signal  # type: ignore[import-not-found]  # without the enums of `signal`
import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator

from .. import channel
from ..cgroups import Cgroup

# The TCP connections of a cell that no process has accepted: kernel memory that no cgroup counts.
# The kernel makes the server's socket when the client's last packet arrives, outside of any
# process, and charges the socket and its data to a cgroup only in accept(2) (inet_csk_accept).
# Until then a connection costs 4 KiB, and 128 KiB with data that its client left before it closed:
# 548 MiB in six seconds where the cell's cgroup counted 7 (measured, Linux 6.18; v1 and v2 are
# alike).
# net.ipv4.tcp_rmem: the size of a receive buffer that no process has read from. SO_RCVBUF is ignored in
# cells.
_BYTES_EACH = 128 << 10
_MOST_LISTENING = 1024
_TABLES = ("tcp", "tcp6")  # proc_net(5); listening sockets come first
# The kernel's count of sockets for each table, and the file's text if there are none. Reading a table
# to its end takes 1.7 ms, because the kernel searches all sockets of the host; reading the count takes
# 2 µs (measured).
_COUNTS = (("sockstat", b"\nTCP: inuse 0 "), ("sockstat6", b"TCP6: inuse 0\n"))
_LISTENS = b"0A"
_READ_BYTES = 1 << 16


class Backlogs:
    """The backlogs of all listening sockets in the network namespace of one cell."""

    def __init__(self, init: int, most_bytes: int) -> None:
        """`init`: the pid of a process in the cell. `most_bytes`: the limit of its backlogs."""
        self._most = max(1, most_bytes // _BYTES_EACH)
        # Allocated now, because a list may not grow later when memory is short.
        self._tables = [-1] * len(_TABLES)
        self._counts = [-1] * len(_COUNTS)
        try:
            for index, name in enumerate(_TABLES):
                self._tables[index] = _open(init, name)
                self._counts[index] = _open(init, _COUNTS[index][0])
        except BaseException:  # no memory, or Ctrl-C: no caller would close the first table
            self.close()
            raise

    def are_too_long(self) -> bool:
        """Tell whether more connections wait than may, or too many sockets listen to be looked at."""
        listening = waiting = 0
        for index, table in enumerate(self._tables):
            for backlog in _backlogs(table) if self._has_sockets(index) else ():
                listening += 1
                waiting += backlog
                if listening > _MOST_LISTENING or waiting > self._most:
                    return True
        return False

    def _has_sockets(self, index: int) -> bool:
        """Tell whether a table may have any: the kernel counts each socket that listens.  A count other
        than zero says nothing: a connection that was reset is not counted, but waits."""
        if self._tables[index] < 0:
            return False
        count = self._counts[index]
        return count < 0 or _COUNTS[index][1] not in os.pread(count, _READ_BYTES, 0)

    def close(self) -> None:
        """Close the files, which keep the namespace; closing twice is fine."""
        for files in (self._tables, self._counts):
            while files:
                descriptor = files.pop()
                if descriptor >= 0:
                    os.close(descriptor)


def _open(init: int, name: str) -> int:
    # ENOENT: the cell has ended, or the kernel has no IPv6
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return os.open(f"/proc/{init}/net/{name}", os.O_RDONLY | os.O_CLOEXEC)
    return -1


def _backlogs(table: int) -> Iterator[int]:
    offset, rest = 0, b""
    while read := os.pread(table, _READ_BYTES, offset):
        offset += len(read)
        *lines, rest = (rest + read).split(b"\n")
        for line in lines:
            fields = line.split(maxsplit=5)
            if fields[:1] == [b"sl"]:  # the header
                continue
            if fields[3] != _LISTENS:
                return
            yield int(fields[4].partition(b":")[2], 16)


_OURS = (
    "status", "control", "stdin", "stdout", "stderr", "pidfd", "guest", "workspace", "listener",
    "changes",
)  # fmt: skip
_THEIRS = ("_their_status", "_their_control", "_their_stdin", "_their_stdout", "_their_stderr")
MEMORY_LOOK_SECONDS = 0.25  # pause between two checks of a session's memory
_PROCESS_GROUP = 1 << 2  # PIDFD_SIGNAL_PROCESS_GROUP (Linux 6.9)


class Cell:
    """The supervisor's end of one cell.  Closing it kills the cell and frees every descriptor."""

    def __init__(self, cgroup: Cgroup, socket_bytes: int = 0) -> None:
        """`socket_bytes` as `Plan.socket_bytes`."""
        self.cgroup = cgroup
        self._socket_bytes = socket_bytes
        self._backlogs: Backlogs | None = None
        self._within_cap_at = 0.0  # when `has_exceeded` last returned False, by time.monotonic
        self._looking = threading.Lock()  # a request and the sweep of sessions may check at once
        self.pidfd = -1  # pidfd of init
        self.guest = -1  # pidfd of the guest's main process
        self.workspace = -1
        self.listener = -1
        self.changes = -1  # directory of what the cell changes in its image
        self.owed: tuple[bytes, ...] = ()  # the unsent rest of a frame to the guest
        try:
            self.status, self._their_status = channel.pair()
            self.control, self._their_control = channel.pair()
            channel.name_for_good(self._their_control)
            self.stdout, self._their_stdout = os.pipe()
            self.stderr, self._their_stderr = os.pipe()
            self._their_stdin, self.stdin = os.pipe()
            for descriptor in (self.stdin, self.stdout, self.stderr, self.control.fileno()):
                os.set_blocking(descriptor, False)
        except BaseException:  # out of descriptors, or Ctrl-C
            self._free(_OURS + _THEIRS)
            raise

    def descriptors(self) -> tuple[int, ...]:
        """The descriptors that the launcher is sent, in the order of `cell.enter`, STATUS to TASKS."""
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
        # Before Linux 6.9. The group's number is not used again while a process of the group lives. The
        # leader lived a moment ago, and numbers cannot wrap around in that time.
        _signal.pidfd_send_signal(pidfd, 0)
        os.killpg(pid_of(pidfd), number)


def pid_of(pidfd: int) -> int:
    """Return the number behind a pidfd; raises ProcessLookupError."""
    return _numbers_of(pidfd)[0]


def number_in_launcher(guest: int) -> int:
    """Return the number that the guest behind a pidfd has in its launcher's pid namespace, the parent
    of the cell's; raises ProcessLookupError."""
    return _numbers_of(guest)[-2]


def number_of(guest: int) -> int:
    """Return the number of the guest behind a pidfd in our pid namespace, 0 if it has ended."""
    try:
        return _numbers_of(guest)[0]
    except ProcessLookupError:
        return 0


def _numbers_of(pidfd: int) -> list[int]:
    """Return the numbers of a process from our pid namespace down to its own (pidfd_open(2))."""
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        fields = dict(line.split(":", 1) for line in file)
    if int(fields["Pid"]) <= 0:  # it was reaped, or is outside of this pid namespace
        raise ProcessLookupError(errno.ESRCH, "no process behind the pidfd")
    return [int(number) for number in fields["NSpid"].split()]
