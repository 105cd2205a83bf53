"""Landlock: path and scope rules that a process puts on itself (landlock(7))."""

import os
import struct

from . import AT_FDCWD, syscall

TYPE_CHECKING = False  # spares an import to a supervisor that asks only for the ABI
if TYPE_CHECKING:
    from .steps import Descriptor, SystemCalls

_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1

EXECUTE = 1 << 0
WRITE_FILE = 1 << 1
READ_FILE = 1 << 2
READ_DIR = 1 << 3
REMOVE_DIR = 1 << 4
REMOVE_FILE = 1 << 5
MAKE_CHAR = 1 << 6
MAKE_DIR = 1 << 7
MAKE_REG = 1 << 8
MAKE_SOCK = 1 << 9
MAKE_FIFO = 1 << 10
MAKE_BLOCK = 1 << 11
MAKE_SYM = 1 << 12
REFER = 1 << 13
TRUNCATE = 1 << 14
IOCTL_DEV = 1 << 15
RESOLVE_UNIX = 1 << 16  # restricts connect(2) and sendmsg(2) to pathname sockets made outside

READ = READ_FILE | READ_DIR
WRITE = (
    WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_SOCK | MAKE_FIFO | MAKE_SYM
    | REFER | TRUNCATE
)  # fmt: skip  # no device nodes: MAKE_CHAR, MAKE_BLOCK
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV

_NET_TCP = 0b11
_SCOPE_ALL = 0b11  # abstract Unix sockets, signals


def abi() -> int:
    """Return the kernel's Landlock ABI, 0 where there is none."""
    try:
        return syscall("landlock_create_ruleset", None, 0, _CREATE_RULESET_VERSION)
    except OSError:
        return 0


def handled_filesystem_rights(version: int) -> int:
    """Return every file right that ABI `version` knows (linux/landlock.h)."""
    known = {1: 13, 2: 14, 3: 15, 4: 15}
    return (1 << known.get(version, 17 if version >= 9 else 16)) - 1


def _ruleset(version: int, rights: int, deny_tcp: bool) -> bytes:
    """Describe a ruleset that refuses the file `rights`, and all else that ABI `version` handles, where
    no rule allows it."""
    if version < 4:
        return struct.pack("=Q", rights)
    tcp = _NET_TCP if deny_tcp else 0
    if version < 6:
        return struct.pack("=2Q", rights, tcp)
    return struct.pack("=3Q", rights, tcp, _SCOPE_ALL)


def restrict(
    do: "SystemCalls[Descriptor]",
    version: int,
    rules: list[tuple[str, int]],
    deny_tcp: bool,
    unhandled: int = 0,
) -> None:
    """Make the calls that allow a process, from then on, only `rules`: (path, rights beneath it).  The
    rights `unhandled` are not judged."""
    handled = handled_filesystem_rights(version) & ~unhandled
    attributes = _ruleset(version, handled, deny_tcp)
    ruleset = do.call("landlock_create_ruleset", do.structure(attributes), len(attributes), 0)
    for path, rights in rules:
        parent = do.call(
            "openat", AT_FDCWD, os.fsencode(path), os.O_PATH | os.O_CLOEXEC, about=path
        )
        rule = do.structure(struct.pack("=Qi", rights & handled, 0))
        do.store(rule, 8, parent)
        do.call("landlock_add_rule", ruleset, _RULE_PATH_BENEATH, rule, 0, about=path)
        do.call("close", parent)
    do.call("landlock_restrict_self", ruleset, 0)
    do.call("close", ruleset)
