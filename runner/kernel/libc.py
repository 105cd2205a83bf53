"""System calls, made at once.  `ctypes` could make them too, and takes 2 ms to import (measured)."""

import os

from . import _steps

AT_FDCWD = -100
# bytes are what the kernel reads, a bytearray is memory that it may write.
Argument = int | bytes | bytearray | None


def syscall(name: str, *arguments: Argument, about: str = "") -> int:
    """Make the system call `name`; raise OSError with its name and what it was `about`.

    It keeps the interpreter's lock: these calls are short.
    """
    result = _steps.syscall(_steps.NUMBERS[name], *arguments)
    if result < 0:
        raise OSError(-result, os.strerror(-result), f"{name} {about}" if about else name)
    return result
