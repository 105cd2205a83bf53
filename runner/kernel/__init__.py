"""Thin functions over Linux system calls: the only place in cellwright that makes them beside
Python's own.

Each function is named after the call it makes, raises OSError naming that call, and knows nothing
of cells or policies.  Everything here may run in a process that was just forked.
"""

import os

from ._steps import NUMBERS
from ._steps import syscall as _make

AT_FDCWD = -100
# Arguments: the kernel reads `bytes`, and may write into a `bytearray`.
Argument = int | bytes | bytearray | None


def syscall(name: str, *arguments: Argument, about: str = "") -> int:
    """Make the system call `name`; raises OSError with its name and its object, `about`.

    It keeps the interpreter's lock: these calls are short.
    """
    result = _make(NUMBERS[name], *arguments)
    if result < 0:
        raise OSError(-result, os.strerror(-result), f"{name} {about}" if about else name)
    return result
