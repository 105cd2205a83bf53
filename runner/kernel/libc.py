"""The C library, and system calls that it does not wrap."""

import ctypes
import os

from ._steps import NUMBERS

# PyDLL keeps the interpreter lock during a call: these calls are short.
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

Argument = int | bytes | None | ctypes.Array[ctypes.c_char]


def _convert(argument: Argument) -> object:
    return ctypes.c_long(argument) if isinstance(argument, int) else argument


def call(function: str, *arguments: Argument, about: str = "") -> int:
    """Call a C library function that answers -1 and errno; raise OSError with its name."""
    result: int = getattr(_libc, function)(*map(_convert, arguments))
    return _checked(result, function, about)


def syscall(name: str, *arguments: Argument, about: str = "") -> int:
    """Make the system call `name`; raise OSError with its name and what it was `about`."""
    number = ctypes.c_long(NUMBERS[name])
    result: int = _libc.syscall(number, *map(_convert, arguments))
    return _checked(result, name, about)


def _checked(result: int, name: str, about: str) -> int:
    if result < 0:
        number = ctypes.set_errno(0)  # returns what it was; cells inherit a copy of it
        raise OSError(number, os.strerror(number), f"{name} {about}" if about else name)
    return result


def advise(start: int, length: int, advice: int) -> None:
    """Give advice about memory, which the kernel need not take (madvise(2))."""
    _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice)


def address(buffer: ctypes.Array[ctypes.c_char]) -> int:
    """Return where `buffer` lies, for structures that hold pointers."""
    return ctypes.addressof(buffer)


def write(place: int, data: bytes) -> None:
    """Write `data` to the address `place`."""
    ctypes.memmove(place, data, len(data))


def function(name: str) -> int:
    """Return where the C library's function `name` lies."""
    return ctypes.cast(getattr(_libc, name), ctypes.c_void_p).value or 0


def buffer(data: bytes) -> ctypes.Array[ctypes.c_char]:
    """Return `data` as memory that the kernel can read and write; keep it alive during the call."""
    return ctypes.create_string_buffer(data, len(data))
