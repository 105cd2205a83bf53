"""`Machine`: the registers, the instruction and the numbers by which a stopped process makes a call.

A process that waits in a system call when it is stopped shows that call in its registers.  On x86_64
the kernel puts the instruction pointer back when the process goes on (ERESTARTSYS); a copy of the
registers has that done already, so that it does not depend on what the other process waits in.
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
    extended: int  # the set of the other registers
    numbers: dict[str, int]

    def parked(self, registers: bytes) -> Parked | None:
        """Return the call that was interrupted or has just begun, None if there is none."""
        values = self._values(registers)
        answer = _signed(values[self.answer])
        if answer not in (_INTERRUPTED, _BEGUN):
            return None
        at = values[self.program_counter] - len(self.instruction)
        first = values[self.arguments[0]] & 0xFFFFFFFF
        stack = values[self.stack_pointer]
        return Parked(values[self.original], first, at, stack, answer == _INTERRUPTED)

    def repeating(self, registers: bytes) -> bytes:
        """Return `registers` of a parked process, with which another one makes the same call."""
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
    instruction=b"\x0f\x05", extended=tracing.NT_X86_XSTATE,
    numbers={
        "recvfrom": 45, "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13,
        "close": 3, "lseek": 8, "chdir": 80, "umask": 95, "prctl": 157, "clock_gettime": 228,
        "openat": 257, "dup3": 292, "madvise": 28,
    },
)  # fmt: skip

# aarch64 is left out: there a stop shows the registers with the call put back already (do_signal in
# arch/arm64/kernel/signal.c), which has not been tried.
_MACHINES = {"x86_64": _X86_64}


def machine() -> Machine | None:
    """Return this machine, None if it is of another architecture than those that were tried."""
    # Such a process starts without the module `platform` (../spawn.py).
    return _MACHINES.get(os.uname().machine)
