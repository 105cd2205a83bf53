"""Rules to BPF, by libseccomp.  The only module that imports pyseccomp.

The native architecture only: libseccomp then kills at foreign entry points (int 0x80) and adds no
socketcall companions (moby/profiles 7158007).  x32 numbers are newer than the table, and so ENOSYS.
"""

import errno
import os
import struct
import tempfile

import pyseccomp

from .syscalls import NEWEST_NUMBER, Condition, Rule

_BPF = struct.Struct("=HBBI")
_LOAD_NUMBER = _BPF.pack(0x20, 0, 0, 0)  # ld [offsetof(struct seccomp_data, nr)]
_SKIP_UNLESS_NEWER = _BPF.pack(0x25, 0, 1, NEWEST_NUMBER)  # jgt #newest, 0, 1
_RETURN_ENOSYS = _BPF.pack(0x06, 0, 0, 0x00050000 | errno.ENOSYS)  # ret SECCOMP_RET_ERRNO | ENOSYS
_BINARY_TREE = 2  # SCMP_FLTATR_CTL_OPTIMIZE: a third of the linear filter's install time


def compile_filter(
    rules: tuple[Rule, ...], unknown: tuple[str, ...], numbers: dict[str, int]
) -> bytes:
    """Return the BPF program that allows `rules`, answers ENOSYS to `unknown` and to every call
    newer than the table, and EPERM to the rest.

    The two answers differ because libraries fall back to an older call only after ENOSYS
    (moby#42680).  libseccomp has no range test, so the one for newer calls is put in front of its
    program; foreign architectures pass it and are then killed.
    """
    program = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.EPERM))
    program.set_attr(pyseccomp.Attr.CTL_OPTIMIZE, _BINARY_TREE)
    program.set_attr(pyseccomp.Attr.ACT_BADARCH, pyseccomp.KILL_PROCESS)
    for rule in rules:
        _add(program, pyseccomp.ALLOW, rule, numbers)
    for call in unknown:
        _add(program, pyseccomp.ERRNO(errno.ENOSYS), Rule(call), numbers)
    return _LOAD_NUMBER + _SKIP_UNLESS_NEWER + _RETURN_ENOSYS + _export(program)


def _add(
    program: pyseccomp.SyscallFilter, action: int, rule: Rule, numbers: dict[str, int]
) -> None:
    number = numbers.get(rule.call, -1)
    if number < 0:
        number = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, rule.call)
    if number >= 0:  # negative: this architecture never had the call
        program.add_rule(action, number, *map(_argument, rule.conditions))


def _argument(condition: Condition) -> pyseccomp.Arg:
    operator = pyseccomp.MASKED_EQ
    return pyseccomp.Arg(condition.argument, operator, condition.mask, condition.value)


def _export(program: pyseccomp.SyscallFilter) -> bytes:
    with tempfile.TemporaryFile() as file:
        program.export_bpf(file)
        return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
