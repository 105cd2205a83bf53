"""`Now`: the same calls as `Steps` takes, each made at once; for the launcher's own set-up."""

from . import _steps, libc
from .steps import Argument, Result, Text


class Now:
    """Makes system calls at once; raises OSError that names the call and what it was about."""

    def __init__(self) -> None:
        self._kept: dict[int, bytearray] = {}  # by address: what pointers lead to

    def call(self, name: str, *arguments: Argument, about: str = "") -> int:
        return libc.syscall(name, *map(_plain, arguments), about=about)

    def structure(self, data: bytes, pointers: dict[int, bytes] | None = None) -> Text:
        """Place a structure; `pointers`: offset in it -> what the pointer there leads to."""
        filled = bytearray(data)
        for where, target in (pointers or {}).items():
            filled[where : where + 8] = self._place(bytearray(target)).to_bytes(8, "little")
        return Text(self._place(filled))

    def store(self, place: Text, offset: int, value: int) -> None:
        """Write a descriptor, as an int, into a structure."""
        self._kept[place.offset][offset : offset + 4] = value.to_bytes(4, "little")

    def _place(self, data: bytearray) -> int:
        address = _steps.address(data)
        self._kept[address] = data
        return address


def _plain(argument: Argument) -> int | bytes | None:
    if isinstance(argument, Result):
        raise TypeError(f"a call that is made at once cannot use {argument}")
    return argument.offset if isinstance(argument, Text) else argument
