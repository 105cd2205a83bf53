"""Seccomp filters: rules compiled to BPF by libseccomp.  Only this module imports pyseccomp.

Filters are for the native architecture only: libseccomp then kills the process at foreign entry points
(int 0x80) and adds no socketcall companions (moby/profiles 7158007).  x32 numbers are above the newest
number of the table, so they answer ENOSYS.
"""

import errno
import os
import struct
from collections.abc import Iterable
from typing import NamedTuple

from .errors import LaunchError

try:
    import pyseccomp
except (OSError, RuntimeError):  # the import looks for the library
    raise LaunchError("libseccomp was not found", "apt-get install libseccomp2") from None

from .plan import Condition, Rule
from .syscalls import NEWEST_NUMBER, SyscallTable

_BPF = struct.Struct("=HBBI")
_LOAD_NUMBER = _BPF.pack(0x20, 0, 0, 0)  # ld [offsetof(struct seccomp_data, nr)]
_SKIP_UNLESS_NEWER = _BPF.pack(0x25, 0, 1, NEWEST_NUMBER)  # jgt #newest, 0, 1
_RETURN_ENOSYS = _BPF.pack(0x06, 0, 0, 0x00050000 | errno.ENOSYS)  # ret SECCOMP_RET_ERRNO | ENOSYS
_BINARY_TREE = 2  # SCMP_FLTATR_CTL_OPTIMIZE: a third of the linear filter's install time


class Listened(NamedTuple):
    """Exceptions of the listener: `quiet` calls are refused without notice, `watched` calls are allowed
    with notice."""

    quiet: tuple[str, ...]
    watched: tuple[str, ...]


def compile_filter(
    rules: tuple[Rule, ...],
    table: SyscallTable,
    listened: Listened | None = None,
    answered: tuple[tuple[Rule, int], ...] = (),
) -> bytes:
    """Return the BPF program of a filter.

    It allows `rules`, answers ENOSYS to the table's unknown calls and to every newer call, and EPERM to
    the rest, or leaves the rest to a listener.  A call in `answered` is not executed and returns the
    errno beside it; 0 is success.

    The two answers differ because libraries fall back to an older call only after ENOSYS
    (moby#42680).  libseccomp has no range test, so the test for newer calls is prepended to its
    program; foreign architectures pass that test and are then killed.
    """
    refuse = pyseccomp.ERRNO(errno.EPERM)
    program = pyseccomp.SyscallFilter(pyseccomp.NOTIFY if listened else refuse)
    program.set_attr(pyseccomp.Attr.CTL_OPTIMIZE, _BINARY_TREE)
    program.set_attr(pyseccomp.Attr.ACT_BADARCH, pyseccomp.KILL_PROCESS)
    quiet, watched = listened or Listened((), ())
    allowed = [rule for rule in rules if rule.call not in watched]  # those get the default: NOTIFY
    _add_all(program, pyseccomp.ALLOW, allowed, table)
    _add_all(program, pyseccomp.ERRNO(errno.ENOSYS), map(Rule, table.unknown), table)
    errnos = {each.rule.call: each.errno for each in table.answers if each.rule.call in quiet}
    for call in quiet:
        _add_all(program, pyseccomp.ERRNO(errnos.get(call, errno.EPERM)), (Rule(call),), table)
    for rule, number in answered:
        _add_all(program, pyseccomp.ERRNO(number), (rule,), table)
    return _LOAD_NUMBER + _SKIP_UNLESS_NEWER + _RETURN_ENOSYS + _export(program)


def number_of(call: str, table: SyscallTable) -> int:
    """Return the number of `call` on this architecture; negative if it never had the call."""
    number = table.numbers.get(call, -1)
    return number if number >= 0 else pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, call)


def _add_all(
    program: pyseccomp.SyscallFilter, action: int, rules: Iterable[Rule], table: SyscallTable
) -> None:
    for rule in rules:
        number = number_of(rule.call, table)
        if number >= 0:
            program.add_rule(action, number, *map(_argument, rule.conditions))


def _argument(condition: Condition) -> pyseccomp.Arg:
    operator = pyseccomp.MASKED_EQ
    return pyseccomp.Arg(condition.argument, operator, condition.mask, condition.value)


def _export(program: pyseccomp.SyscallFilter) -> bytes:
    # In memory: a container with a read-only file system has no directory for temporary files.
    with open(os.memfd_create("seccomp"), "wb+") as file:
        program.export_bpf(file)
        return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
