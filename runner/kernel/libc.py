"""The C library, and system calls that it does not wrap."""

import ctypes
import os

# PyDLL keeps the interpreter lock during a call.  These calls are short, and after a raw clone3 the
# child must find the lock as the parent left it.
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
prctl = _libc.prctl  # bare, for the one loop that makes forty calls of it in every cell
# What CPython does around fork(2) (docs.python.org/3/c-api/sys.html); they answer nothing.
before_fork = _libc.PyOS_BeforeFork
after_fork_parent = _libc.PyOS_AfterFork_Parent
after_fork_child = _libc.PyOS_AfterFork_Child

# Numbers from 424 on are the same on every architecture (asm-generic/unistd.h, syscall_64.tbl).
NUMBERS: dict[str, int] = {
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "clone3": 435,
    "close_range": 436,
    "openat2": 437,
    "pidfd_getfd": 438,
    "mount_setattr": 442,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
}
_OLD_NUMBERS = {
    "x86_64": {"pivot_root": 155, "capset": 126, "seccomp": 317},
    "aarch64": {"pivot_root": 41, "capset": 91, "seccomp": 277},
}
NUMBERS.update(_OLD_NUMBERS.get(os.uname().machine, {}))

Argument = int | bytes | None | ctypes.Array[ctypes.c_char]


def _convert(argument: Argument) -> object:
    return ctypes.c_long(argument) if isinstance(argument, int) else argument


def call(function: str, *arguments: Argument, about: str | None = None) -> int:
    """Call a C library function that answers -1 and errno; raise OSError with its name."""
    result: int = getattr(_libc, function)(*map(_convert, arguments))
    return _checked(result, function, about)


def syscall(name: str, *arguments: Argument, about: str | None = None) -> int:
    """Make the system call `name`; raise OSError with its name and what it was `about`."""
    number = ctypes.c_long(NUMBERS[name])
    result: int = _libc.syscall(number, *map(_convert, arguments))
    return _checked(result, name, about)


def _checked(result: int, name: str, about: str | None) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"{name} {about}" if about else name)
    return result


def address(buffer: ctypes.Array[ctypes.c_char]) -> int:
    """Return where `buffer` lies, for structures that hold pointers."""
    return ctypes.addressof(buffer)


def function(name: str) -> int:
    """Return where the C library's function `name` lies."""
    return ctypes.cast(getattr(_libc, name), ctypes.c_void_p).value or 0


def buffer(data: bytes) -> ctypes.Array[ctypes.c_char]:
    """Return `data` as memory that the kernel can read and write; keep it alive during the call."""
    return ctypes.create_string_buffer(data, len(data))
