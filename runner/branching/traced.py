"""`Traced`: a stopped process: its files in /proc, registers and memory, and calls that it makes.

A process that waits in a system call when it is stopped shows that call in its registers. On x86_64 the
kernel moves the instruction pointer back when a process continues (ERESTARTSYS). A copy of the
registers has this done already, so it does not depend on the call in which the other process waits. On
aarch64 the kernel has put it back before the process stops (do_signal, arch/arm64/kernel/signal.c), and
another set of registers tells whether the process is in a call.
"""

import contextlib
import errno
import os
import signal
import struct
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .. import channel
from ..kernel import tracing
from ..kernel.tracing import Places, TransferRoom
from .layout import MAPS_BYTES, Mapping, NotCopyable, parse

# The return value of an interrupted call that the kernel will restart (ERESTARTSYS), and of a call that
# has just begun (ENOSYS).
_INTERRUPTED, _BEGUN = -512, -38
_NO_CALL = (1 << 64) - 1


class Parked(NamedTuple):
    """The call in which a stopped process waits."""

    number: int
    argument: int  # the first argument
    instruction: int  # address of the call instruction
    stack: int
    is_interrupted: bool  # otherwise the call has just begun


class Machine(NamedTuple):
    """An architecture: where its registers are in NT_PRSTATUS, by index, and its numbers of calls."""

    words: int
    program_counter: int
    stack_pointer: int
    call: int  # the register that holds the number
    original: int  # the register that holds the number of the interrupted call
    answer: int
    arguments: tuple[int, ...]
    instruction: bytes  # machine code that makes a system call
    extended: tuple[int, ...]  # numbers of the other register sets
    numbers: dict[str, int]
    ongoing: int = 0  # the register set with the number of the current call, if any
    ends: int = 0  # with such a set: the register that is 0 when a call begins and 1 when it ends

    def parked(self, registers: bytes, ongoing: bytes = b"") -> Parked | None:
        """Return the call that was interrupted or has just begun, None if there is none.

        `ongoing`: the content of that set of registers.
        """
        values = self._values(registers)
        if self.ongoing:
            return self._put_back(values, int.from_bytes(ongoing, "little", signed=True))
        answer = _signed(values[self.answer])
        if answer not in (_INTERRUPTED, _BEGUN):
            return None
        at = values[self.program_counter] - len(self.instruction)
        first = values[self.arguments[0]] & 0xFFFFFFFF
        stack = values[self.stack_pointer]
        return Parked(values[self.original], first, at, stack, answer == _INTERRUPTED)

    def _put_back(self, values: list[int], ongoing: int) -> Parked | None:
        at, first = values[self.program_counter], values[self.arguments[0]] & 0xFFFFFFFF
        stack = values[self.stack_pointer]
        if ongoing < 0:  # NO_SYSCALL: the process is about to make (or restart) the call
            return Parked(values[self.call] & 0xFFFFFFFF, first, at, stack, is_interrupted=True)
        if values[self.ends]:
            return None
        return Parked(ongoing, first, at - len(self.instruction), stack, is_interrupted=False)

    def repeating(self, registers: bytes) -> bytes:
        """Return `registers` of a parked process, with which another one makes the same call."""
        if self.ongoing:
            return registers
        values = self._values(registers)
        values[self.program_counter] -= len(self.instruction)
        values[self.call] = values[self.original]
        values[self.original] = _NO_CALL
        return self._pack(values)

    def calling(self, registers: bytes, number: int, arguments: tuple[int, ...]) -> bytes:
        """Return `registers` of a parked process, with which it makes another call."""
        values = self._values(self.repeating(registers))
        values[self.call] = number
        for register, argument in zip(self.arguments, arguments, strict=False):
            values[register] = argument
        return self._pack(values)

    def answered(self, registers: bytes) -> int:
        """Return the result of the call that was just made."""
        return _signed(self._values(registers)[self.answer])

    def _values(self, registers: bytes) -> list[int]:
        return list(struct.unpack(f"={self.words}Q", registers))

    def _pack(self, values: list[int]) -> bytes:
        return struct.pack(f"={self.words}Q", *(value & _NO_CALL for value in values))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


# struct user_regs_struct (sys/user.h), and arch/x86/entry/syscalls/syscall_64.tbl
_X86_64 = Machine(
    words=27, program_counter=16, stack_pointer=19, call=10, original=15, answer=10,
    arguments=(14, 13, 12, 7, 9, 8),
    instruction=b"\x0f\x05", extended=(tracing.NT_X86_XSTATE,),
    numbers={
        "recvfrom": 45, "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13,
        "close": 3, "lseek": 8, "chdir": 80, "umask": 95, "prctl": 157, "clock_gettime": 228,
        "openat": 257, "dup3": 292, "madvise": 28,
    },
)  # fmt: skip

# struct user_pt_regs (arch/arm64/include/uapi/asm/ptrace.h): x0 to x30, sp, pc, pstate; and
# include/uapi/asm-generic/unistd.h.  A call leaves of the vector registers what NT_PRFPREG holds.
_AARCH64 = Machine(
    words=34, program_counter=32, stack_pointer=31, call=8, original=8, answer=0,
    arguments=(0, 1, 2, 3, 4, 5),
    instruction=b"\x01\x00\x00\xd4", extended=(tracing.NT_PRFPREG, tracing.NT_ARM_TLS),
    numbers={
        "recvfrom": 207, "mmap": 222, "mprotect": 226, "munmap": 215, "brk": 214,
        "rt_sigaction": 134, "close": 57, "lseek": 62, "chdir": 49, "umask": 166, "prctl": 167,
        "clock_gettime": 113, "openat": 56, "dup3": 24, "madvise": 233,
    },
    ongoing=tracing.NT_ARM_SYSTEM_CALL, ends=7,
)  # fmt: skip

_MACHINES = {"x86_64": _X86_64, "aarch64": _AARCH64}


def machine() -> Machine | None:
    """Return this machine, None if it is of another architecture than these."""
    # os.uname, because the branching process starts without the module `platform` (../spawn.py).
    return _MACHINES.get(os.uname().machine)


_RECEIVING_FROM = 3  # the descriptor on which a session waits for its next request
# Injected calls keep their arguments below the used part of the process's stack.
_BELOW_STACK = 16 * 1024
_MOST_CALLS = 64  # system calls between a request's answer and the wait for the next request
_MOST_SECONDS = 1.0  # for those calls; branches of other sessions wait meanwhile
_DYING_SECONDS = 1.0  # between SIGKILL and the end of a process
_MOST_ERRNO = 4095
_SMALL = 64 * 1024  # longest file of /proc that is read
_MOST_WRITTEN = 0x7FFFF000  # bytes that one write(2) takes
_READ_AT_ONCE = 4096  # the kernel returns such files in pieces of this size


class Traced:
    """A process that waits for a request, stopped.

    `source` is never changed: whatever becomes of us, it goes on as it was.  A target dies with us.
    """

    def __init__(self, pidfd: int, machine: Machine, *, is_source: bool) -> None:
        """Stop the process of a pidfd; raises OSError, and NotCopyable if it is busy."""
        self.pid = number_of(pidfd)
        self._pidfd = pidfd
        self._machine = machine
        self._is_source = is_source
        self._opened: list[int] = []
        self._is_stopped = False
        self._signal = 0  # the signal that the process receives when it continues
        try:
            self._stop()
            signal.pidfd_send_signal(
                pidfd, 0
            )  # checks that the number still belongs to this process
            if not is_source:
                tracing.die_with_us(self.pid)
            self.directory = self._open_directory()
            self.parked = self._wait_for_request()
            sets = [tracing.registers(self.pid, each) for each in machine.extended]
            self.extended, self._sizes = b"".join(sets), [len(each) for each in sets]
            self._memory = self.open("mem", os.O_RDONLY if is_source else os.O_RDWR)
            if self.read(self.parked.instruction, len(machine.instruction)) != machine.instruction:
                raise NotCopyable("it does not wait for a request")
        except BaseException as error:
            if isinstance(error, tracing.Signalled):
                self._is_stopped, self._signal = True, error.number
            self.close(dies=not is_source)
            if is_source and isinstance(error, tracing.Signalled):
                raise NotCopyable("a signal came to it at this moment") from None
            raise

    def _stop(self) -> None:
        try:
            tracing.stop(self.pid)
        except PermissionError as error:
            raise NotCopyable(f"this host does not let it be traced{_yama()}") from error
        self._is_stopped = True

    def _wait_for_request(self) -> Parked:
        """Have the process go on until it waits for a request: it may have sent its answer just now."""
        waits = self._machine.numbers["recvfrom"], _RECEIVING_FROM
        deadline = time.monotonic() + _MOST_SECONDS
        for _ in range(_MOST_CALLS):
            if time.monotonic() > deadline:
                break
            self.registers = tracing.registers(self.pid)
            ongoing = self._machine.ongoing
            in_call = tracing.registers(self.pid, ongoing) if ongoing else b""
            parked = self._machine.parked(self.registers, in_call)
            if parked is None or (parked.number, parked.argument) != waits:
                tracing.go_on_to_call(self.pid)
            elif parked.is_interrupted:
                return parked
            else:  # registers changed now would be taken for the answer of this call
                tracing.stop_in_call(self.pid)
        raise NotCopyable("it does not wait for a request")

    def _open_directory(self) -> int:
        directory = os.open(f"/proc/{self.pid}", os.O_DIRECTORY | os.O_PATH | os.O_CLOEXEC)
        self._opened.append(directory)
        return directory

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Open one of its files in /proc; it is closed with this object."""
        opened = os.open(name, flags | os.O_CLOEXEC, dir_fd=self.directory)
        self._opened.append(opened)
        return opened

    def text(self, name: str, size: int = _SMALL) -> bytes:
        """Return the beginning of one of its files in /proc."""
        opened = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.directory)
        try:
            parts = []
            while size > 0 and (part := os.read(opened, min(size, _READ_AT_ONCE))):
                parts.append(part)
                size -= len(part)
        finally:
            os.close(opened)
        return b"".join(parts)

    def link(self, name: str) -> str:
        return os.readlink(name, dir_fd=self.directory)

    def mappings(self) -> list[Mapping]:
        """Return its mappings; raises NotCopyable if there are too many."""
        return parse(self.maps())

    def maps(self) -> bytes:
        """Return the file that lists its mappings."""
        return self.text("maps", MAPS_BYTES)

    def read(self, address: int, size: int) -> bytes:
        """Return some of its memory, whatever the rights of the mapping; raises OSError if a page
        cannot be read.

        Not by process_vm_readv(2), which pins pages: that gives the process a copy of each page that it
        shares with its launcher (FAULT_FLAG_UNSHARE), and has its cell pay for it.
        """
        data = os.pread(self._memory, size, address)
        if len(data) != size:
            raise self._unreadable()
        return data

    def read_into(self, address: int, room: bytearray) -> bytearray:
        """Fill `room` with memory as `read` returns it, and return it."""
        if os.preadv(self._memory, (room,), address) != len(room):
            raise self._unreadable()
        return room

    def _unreadable(self) -> OSError:
        return OSError(errno.EFAULT, os.strerror(errno.EFAULT), f"memory of {self.pid}")

    def write(self, address: int, data: bytes | memoryview) -> None:
        """Write to its memory, whatever the rights of the mapping; raises OSError if it has no room."""
        written = os.pwrite(self._memory, data, address)
        if written == _MOST_WRITTEN:
            self.write(address + written, memoryview(data)[written:])
        elif written != len(data):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), f"memory of {self.pid}")

    def read_places(self, places: Places, room: TransferRoom) -> None:
        """Fill `room` from places whose pages the process shares with no other; raises as `read`."""
        done = room.read(self.pid, places)
        for (address, size), offset in _left(places, done):
            room.view[offset : offset + size] = self.read(address, size)

    def write_places(self, places: Places, room: TransferRoom) -> None:
        """Write `room` to places, one after the other; raises as `write`."""
        done = room.write(self.pid, places)
        for (address, size), offset in _left(places, done):
            self.write(address, room.view[offset : offset + size])

    def write_content(self, places: Places, content: Sequence[memoryview]) -> None:
        """Write `content` to as many places; raises as `write`."""
        done = tracing.write(self.pid, content, places)
        for each, (address, size) in zip(content, places, strict=True):
            if done < size:
                self.write(address, each)
            done = max(0, done - size)

    def require_living(self) -> None:
        """Raise ProcessLookupError if it was killed while it was stopped."""
        tracing.registers(self.pid)

    def call(self, name: str, *arguments: int | bytes) -> int:
        """Have a target make a system call; raises OSError if its kernel refuses."""
        assert not self._is_source  # noqa: S101 - a source is only read
        place = (self.parked.stack - _BELOW_STACK) & ~15
        values = []
        for argument in arguments:
            if isinstance(argument, bytes):
                self.write(place, argument)
                values.append(place)
            else:
                values.append(argument)
        machine, number = self._machine, self._machine.numbers[name]
        tracing.set_registers(self.pid, machine.calling(self.registers, number, tuple(values)))
        tracing.step(self.pid)
        answer = machine.answered(tracing.registers(self.pid))
        if -_MOST_ERRNO <= answer < 0:
            raise OSError(-answer, os.strerror(-answer), f"{name} in a cell")
        return answer

    def become(self, registers: bytes, extended: bytes) -> None:
        """Take over the registers of a source."""
        for kind, size in zip(self._machine.extended, self._sizes, strict=True):
            tracing.set_registers(self.pid, extended[:size], kind)
            extended = extended[size:]
        tracing.set_registers(self.pid, self._machine.repeating(registers))

    def close(self, *, dies: bool) -> None:
        """Let the process go on, or end it; a second call does nothing."""
        for each in self._opened:
            os.close(each)
        self._opened.clear()
        if not self._is_stopped:
            return
        self._is_stopped = False
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it has ended
            if dies:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
                tracing.reap(self.pid)
            else:
                self._let_go()

    def _let_go(self) -> None:
        """Detach. If the process was killed meanwhile, reap it, because otherwise its parent never
        learns of its end.

        One that runs, because it did not stop in time, cannot be detached from: our end does that.
        """
        try:
            tracing.let_go(self.pid, self._signal)
        except ProcessLookupError:
            if channel.has_news(self._pidfd, _DYING_SECONDS):
                tracing.reap(self.pid)


def _left(places: Places, done: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield the places that a transfer did not reach, as those without rights, with their offsets."""
    offset = 0
    for each in places:
        if offset + each[1] > done:
            yield each, offset
        offset += each[1]


def number_of(pidfd: int) -> int:
    """Return the number of a process in our pid namespace; raises ProcessLookupError."""
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        fields = dict(line.split(":", 1) for line in file)
    if int(fields["Pid"]) <= 0:
        raise ProcessLookupError(errno.ESRCH, "the process ended")
    return int(fields["Pid"])


def _yama() -> str:
    """Return how Yama restricts tracing, for a message (Documentation/admin-guide/LSM/Yama.rst)."""
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope") as file:
            return f" (kernel.yama.ptrace_scope is {int(file.read())})"
    except (OSError, ValueError):
        return ""
