"""Seccomp filters: rules compiled to BPF by libseccomp.  Only this module imports pyseccomp.

Filters are for the native architecture only: libseccomp then kills the process at foreign entry points
(int 0x80) and adds no socketcall companions (moby/profiles 7158007).  x32 numbers are above the newest
number of the table, so they answer ENOSYS.
"""

import errno
import os
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from ..errors import LaunchError
from ..plan import Condition, Rule
from .ranges import with_ranges
from .syscalls import NEWEST_NUMBER, SyscallTable

_BUNDLED = f"{sys.prefix}/lib/cellwright/libseccomp.so.2"  # where scripts/install_bundle.py puts it

try:
    import pyseccomp
except (OSError, RuntimeError):  # the import looks for the library
    if not os.path.exists(_BUNDLED):
        raise LaunchError(
            "libseccomp was not found",
            "apt-get install libseccomp2, or dnf install libseccomp, or apk add libseccomp",
        ) from None
    _search: Any = sys.modules["ctypes.util"]  # pyseccomp imported it
    _find_library = _search.find_library
    _search.find_library = {"c": _find_library("c"), "seccomp": _BUNDLED}.get
    try:
        import pyseccomp
    finally:
        _search.find_library = _find_library

_RETURN_ENOSYS = 0x00050000 | errno.ENOSYS  # SECCOMP_RET_ERRNO
_BINARY_TREE = 2  # SCMP_FLTATR_CTL_OPTIMIZE: `with_ranges` descends less deep


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
    the rest, or leaves the rest to a listener. A call in `answered` is not executed and returns its
    errno; 0 is success.

    The two answers differ because libraries fall back to an older call only after ENOSYS
    (moby#42680).  libseccomp has no range test, which that for newer calls is; foreign architectures
    pass it and are then killed.
    """
    refuse = pyseccomp.ERRNO(errno.EPERM)
    program = pyseccomp.SyscallFilter(pyseccomp.NOTIFY if listened else refuse)
    program.set_attr(pyseccomp.Attr.CTL_OPTIMIZE, _BINARY_TREE)
    program.set_attr(pyseccomp.Attr.ACT_BADARCH, pyseccomp.KILL_PROCESS)
    quiet, watched = listened or Listened((), ())
    allowed = [rule for rule in rules if rule.call not in watched]  # the default action is NOTIFY
    _add_all(program, pyseccomp.ALLOW, allowed, table)
    _add_all(program, pyseccomp.ERRNO(errno.ENOSYS), map(Rule, table.unknown), table)
    errnos = {each.rule.call: each.errno for each in table.answers if each.rule.call in quiet}
    for call in quiet:
        _add_all(program, pyseccomp.ERRNO(errnos.get(call, errno.EPERM)), (Rule(call),), table)
    for rule, number in answered:
        _add_all(program, pyseccomp.ERRNO(number), (rule,), table)
    return with_ranges(_export(program), NEWEST_NUMBER, _RETURN_ENOSYS)


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
