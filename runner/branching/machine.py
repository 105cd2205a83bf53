"""`Machine`: the registers, the instruction and the numbers by which a stopped process makes a call.

A process that waits in a system call when it is stopped shows that call in its registers.  On x86_64
the kernel puts the instruction pointer back when the process goes on (ERESTARTSYS); a copy of the
registers has that done already, so that it does not depend on what the other process waits in.  On
aarch64 the kernel has put it back before the process stops (do_signal, arch/arm64/kernel/signal.c), and
another set of registers tells whether the process is in a call.
"""

import os
import struct
from typing import NamedTuple

from ..kernel import tracing

# What the answer is of a call that was interrupted and will be made again (ERESTARTSYS), and of one
# that has just begun (ENOSYS).
_INTERRUPTED, _BEGUN = -512, -38
_NO_CALL = (1 << 64) - 1


class Parked(NamedTuple):
    """The call in which a stopped process waits."""

    number: int
    argument: int  # the first
    instruction: int  # the address at which it is made
    stack: int
    is_interrupted: bool  # else it has just begun


class Machine(NamedTuple):
    """An architecture: where its registers are in NT_PRSTATUS, by index, and its numbers of calls."""

    words: int
    program_counter: int
    stack_pointer: int
    call: int  # the register that holds the number
    original: int  # the register that holds the number of the interrupted call
    answer: int
    arguments: tuple[int, ...]
    instruction: bytes  # that makes a call
    extended: tuple[int, ...]  # the sets of the other registers
    numbers: dict[str, int]
    ongoing: int = 0  # the set with the number of the call that a process is in, if there is one
    ends: int = 0  # with such a set: the register that is 0 as a call begins, and 1 as it ends

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
        if ongoing < 0:  # NO_SYSCALL: it is about to make the call, again or for the first time
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
        """Return what the call answered that was just made."""
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
    # Such a process starts without the module `platform` (../spawn.py).
    return _MACHINES.get(os.uname().machine)
