"""Stopping a process, and reading and changing its registers and its memory: ptrace(2),
process_vm_readv(2).

A seized process continues when its tracer detaches or dies, unless `die_with_us` makes it die too. The
calling process has one thread, and blocks SIGCHLD, which reports every stop.
"""

import errno
import os
import signal
import struct
import time
from collections.abc import Sequence

from . import _steps, syscall

NT_PRSTATUS, NT_PRFPREG, NT_X86_XSTATE = 1, 2, 0x202  # register sets (elf.h)
NT_ARM_TLS, NT_ARM_SYSTEM_CALL = 0x401, 0x404
_SEIZE, _INTERRUPT, _DETACH, _SINGLESTEP, _SYSCALL, _CONT = 0x4206, 0x4207, 17, 9, 24, 7
_WAIT_SECONDS = 2.0
_SETOPTIONS, _EXITKILL = 0x4200, 1 << 20
_GETREGSET, _SETREGSET = 0x4204, 0x4205
_SETSIGMASK, _GET_RSEQ = 0x420B, 0x420F
_SIGNALS_BYTES = 8
_RSEQ_BYTES = 24
_MOST_REGISTER_BYTES = 16 * 1024  # the state of AMX takes 11 KiB
_EVENT_STOP = 128  # PTRACE_EVENT_STOP
_WALL = 0x40000000  # wait for threads of any kind
_VECTOR = struct.Struct("=2Q")  # struct iovec
MOST_PLACES = 1024  # places of one transfer (UIO_MAXIOV)
Places = Sequence[tuple[int, int]]  # addresses and sizes


class Signalled(InterruptedError):  # noqa: N818 - it happens to the traced process
    """A signal that comes to a traced process has stopped it: `number`, 0 for a stop of its group."""

    def __init__(self, pid: int, status: int) -> None:
        super().__init__(errno.EINTR, "a signal came at this moment", str(pid))
        self.number = status if status < _EVENT_STOP else 0


def stop(pid: int) -> None:
    """Attach to a process and stop it; raises OSError, among them Signalled."""
    syscall("ptrace", _SEIZE, pid, 0, 0, about=f"seize {pid}")
    _interrupt(pid)


def stop_in_call(pid: int) -> None:
    """Have a process that was stopped as it began a call make it, and stop it there; raises
    Signalled."""
    syscall("ptrace", _CONT, pid, 0, 0, about=f"continue {pid}")
    _interrupt(pid)


def _interrupt(pid: int) -> None:
    syscall("ptrace", _INTERRUPT, pid, 0, 0, about=f"interrupt {pid}")
    _expect(pid, signal.SIGTRAP | _EVENT_STOP << 8)


def die_with_us(pid: int) -> None:
    """Have a seized process die if we do before we let it go."""
    syscall("ptrace", _SETOPTIONS, pid, 0, _EXITKILL, about=f"options of {pid}")


def let_go(pid: int, number: int = 0) -> None:
    """Detach: the process goes on, with the signal `number` if one stopped it: else that is lost."""
    syscall("ptrace", _DETACH, pid, 0, number, about=f"detach {pid}")


def reap(pid: int) -> None:
    """Take note of the end of a traced process that was killed: until then it is not gone."""
    while os.WIFSTOPPED(os.waitpid(pid, _WALL)[1]):
        continue


def go_on_to_call(pid: int) -> None:
    """Have a stopped process go on until it begins a system call, or ends one; raises Signalled."""
    syscall("ptrace", _SYSCALL, pid, 0, 0, about=f"next call of {pid}")
    _expect(pid, signal.SIGTRAP)


def step(pid: int) -> None:
    """Have a stopped process execute one instruction; raises Signalled."""
    syscall("ptrace", _SINGLESTEP, pid, 0, 0, about=f"step {pid}")
    _expect(pid, signal.SIGTRAP)


def _expect(pid: int, stop: int) -> None:
    if (status := _wait(pid)) != stop:
        raise Signalled(pid, status)


def _wait(pid: int) -> int:
    """Return the next stop of a traced process: the signal, and the event above it.

    Raises TimeoutError, after which we may only end.
    """
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        waited, status = os.waitpid(pid, _WALL | os.WNOHANG)
        if waited:
            break
        patience = deadline - time.monotonic()
        if patience <= 0 or signal.sigtimedwait((signal.SIGCHLD,), patience) is None:
            raise TimeoutError(errno.ETIMEDOUT, "it does not stop", str(pid))
    if not os.WIFSTOPPED(status):
        raise ProcessLookupError(errno.ESRCH, "the process ended", str(pid))
    return status >> 8


def registers(pid: int, kind: int = NT_PRSTATUS) -> bytes:
    """Return a set of registers of a stopped process."""
    room = bytearray(_MOST_REGISTER_BYTES)
    vector = bytearray(_VECTOR.pack(_steps.address(room), _MOST_REGISTER_BYTES))
    syscall("ptrace", _GETREGSET, pid, kind, vector, about=f"registers of {pid}")
    return bytes(room[: _VECTOR.unpack(vector)[1]])


def set_registers(pid: int, values: bytes, kind: int = NT_PRSTATUS) -> None:
    """Replace a set of registers of a stopped process."""
    room = bytearray(values)
    vector = bytearray(_VECTOR.pack(_steps.address(room), len(values)))
    syscall("ptrace", _SETREGSET, pid, kind, vector, about=f"set registers of {pid}")


def set_blocked_signals(pid: int, mask: int) -> None:
    """Replace the set of blocked signals of a stopped process."""
    signals = bytearray(mask.to_bytes(_SIGNALS_BYTES, "little"))
    syscall("ptrace", _SETSIGMASK, pid, _SIGNALS_BYTES, signals, about=f"mask of {pid}")


def rseq(pid: int) -> bytes:
    """Return where a stopped process has registered its rseq area; b"" before Linux 5.13."""
    room = bytearray(_RSEQ_BYTES)
    try:
        syscall("ptrace", _GET_RSEQ, pid, _RSEQ_BYTES, room, about=f"rseq of {pid}")
    except OSError as error:
        if error.errno in (errno.EIO, errno.EINVAL):
            return b""
        raise
    return bytes(room)


def robust_list(pid: int) -> int:
    """Return the head of a process's list of robust futexes, 0 for none (get_robust_list(2))."""
    head, length = bytearray(8), bytearray(8)
    syscall("get_robust_list", pid, head, length, about=str(pid))
    return int.from_bytes(head, "little")


class TransferRoom:
    """A buffer of this process into which the memory of a traced process is read, or from which it is
    written.

    One call moves many pages, which by /proc/PID/mem takes as many and copies each twice.
    """

    def __init__(self, size: int) -> None:
        self._room = bytearray(size)
        self.view = memoryview(self._room)

    def read(self, pid: int, places: Places) -> int:
        """Fill it from `places` of a process; return how many bytes were read, from the first on.

        Only pages that the process shares with no other may be read in this way.  Reading pins them,
        which gives the process a copy of a page that it shares (FAULT_FLAG_UNSHARE), at the cost of its
        cell.
        """
        return self._transfer("process_vm_readv", pid, places)

    def write(self, pid: int, places: Places) -> int:
        """Write it to `places` of a process; return how many bytes were written, from the first on."""
        return self._transfer("process_vm_writev", pid, places)

    def _transfer(self, call: str, pid: int, places: Places) -> int:
        ours = ((_steps.address(self._room), sum(size for _, size in places)),)
        return _transfer(call, pid, ours, places)


def write(pid: int, content: Sequence[memoryview], places: Places) -> int:
    """Write `content` to as many places of a process; return how many bytes were written, from the
    first on."""
    ours = [(_steps.address(each), len(each)) for each in content]
    return _transfer("process_vm_writev", pid, ours, places)


def _transfer(call: str, pid: int, ours: Places, theirs: Places) -> int:
    here, there = (
        bytearray(b"".join(_VECTOR.pack(*each) for each in some)) for some in (ours, theirs)
    )
    try:
        return syscall(call, pid, here, len(ours), there, len(theirs), 0, about=f"memory of {pid}")
    except OSError as error:
        if error.errno in (errno.EFAULT, errno.ENOMEM, errno.ENOSYS):
            return 0
        raise
