"""`Steps`: a list of system calls, laid out as data that steps.c executes without Python.

A step is a system call with up to six arguments.  An argument is a number, bytes that the kernel
reads, or the `Result` of an earlier step.  Nothing is executed here: the list can be printed, counted
and changed before any process is forked.  `Now` takes the same calls and makes each at once.
"""

import struct
from collections.abc import Collection
from typing import NamedTuple, Protocol, TypeVar

from . import _steps, syscall

_HEADER = struct.Struct("=6I")
_STEP = struct.Struct("=HHIII6q")
_RELOCATION = struct.Struct("=2I")
_MAGIC = 0x50455453
_INPUTS = 16
_ARGUMENTS = 6
_LITERAL, _DATA, _RESULT = range(3)
_MOST_STEPS, _MOST_DATA = 4096, 1 << 20  # steps.c
_CALL, _STORE, _KEEP_ONLY, _TELL, _OWN_PAGES, _MAP_IDS = range(6)
MAY_FAIL = 1


class Result(NamedTuple):
    """The value of an input or an earlier step, usually a descriptor."""

    at: int


class Text(NamedTuple):
    """A place in the list's data, or of a call that is made at once: an address."""

    offset: int


Argument = int | bytes | Result | Text | None
Descriptor = TypeVar("Descriptor", bound=int | Result)


class SystemCalls(Protocol[Descriptor]):
    """The interface of a function that makes system calls: `Steps` records them, `Now` makes them at
    once."""

    def call(self, name: str, *arguments: Argument, about: str = "") -> Descriptor: ...

    def structure(self, data: bytes, pointers: dict[int, bytes] | None = None) -> Text: ...

    def store(self, place: Text, offset: int, value: Descriptor) -> None: ...


class Step(NamedTuple):
    """One step: its layer, the name and the object of the call, and its layout."""

    layer: str
    name: str
    about: str
    operation: int
    flags: int
    arguments: tuple[Argument, ...]

    @property
    def is_call(self) -> bool:
        """Tell whether it asks the kernel for something."""
        return self.operation != _STORE

    def __str__(self) -> str:
        return f"{self.name}: {self.about}" if self.about else self.name


class Steps:
    """A list of steps under construction; `layout` gives what `serve` and `execute` take."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._layer = ""
        self._data = bytearray()
        self._places: dict[bytes, int] = {}
        self._pointers: list[tuple[int, int]] = []

    def layer(self, name: str) -> None:
        """Name the layer that the steps after this belong to."""
        self._layer = name

    def up_to(self, layers: Collection[str]) -> "Steps":
        """Return a list that ends with the last step of `layers`."""
        part = Steps()
        vars(part).update(vars(self))
        ends = [n for n, step in enumerate(self.steps, 1) if step.layer in layers]
        part.steps = self.steps[: max(ends, default=0)]
        return part

    def fullness(self) -> float:
        """Return the part of what steps.c loads that the list takes; it refuses more than 1."""
        count = max(len(self.steps), len(self._pointers))
        return max(count / _MOST_STEPS, len(self._data) / _MOST_DATA)

    def input(self, number: int) -> Result:
        """Return the descriptor that a cell is given as its `number`-th, -1 if it is given none."""
        if not 0 <= number < _INPUTS:
            raise ValueError(f"number: must be from 0 to {_INPUTS - 1}, got {number}")
        return Result(number)

    def call(self, name: str, *arguments: Argument, about: str = "", flags: int = 0) -> Result:
        """Add the system call `name`; return a reference to its result."""
        return self._add(name, about, _CALL, flags, arguments)

    def keep_only(self, *descriptors: int) -> None:
        """Close every descriptor but 0 to 3, the status channel, the inputs after them that were given,
        and `descriptors`."""
        self._add("close_range", "every other descriptor", _KEEP_ONLY, 0, descriptors)

    def own_pages(self) -> None:
        """Copy the pages that a rehearsal has written: on the first touch each would be a fault of its
        own."""
        self._add("madvise", "pages that any program writes", _OWN_PAGES, 0, ())

    def enter_mapped(self, proc: int, uids: str, gids: str) -> None:
        """Move into a new user namespace with the maps `uids` and `gids`, of several ids, which a child
        writes through the /proc at `proc`; the process must be dumpable."""
        maps = self._text(uids.encode()), self._text(gids.encode())
        self._add(
            "unshare", "new user namespace with several ids", _MAP_IDS, 0, (proc, *map(Text, maps))
        )

    def tell(self, frame: bytes, *descriptors: Result, about: str) -> None:
        """Send `frame`, with `descriptors`, on the status channel."""
        place = Text(self._append(frame))
        self._add("sendmsg", about, _TELL, 0, (place, len(frame), *descriptors))

    def structure(self, data: bytes, pointers: dict[int, bytes] | None = None) -> Text:
        """Place a structure of its own; `pointers`: offset in it -> the bytes to which the pointer
        there leads."""
        offset = self._append(data)
        for where, target in (pointers or {}).items():
            self._pointers.append((offset + where, self._append(target)))
        return Text(offset)

    def store(self, place: Text, offset: int, value: Result) -> None:
        """Write a descriptor, as an int, into a structure."""
        self._add("store", "", _STORE, 0, (Text(place.offset + offset), value))

    def layout(self, status: int, inputs: int, without: int = -1) -> bytes:
        """Return the list as steps.c reads it; the status channel is to be descriptor `status`,
        and a cell is given exactly `inputs` descriptors.

        Step `without` is one that the kernel refuses (ENOSYS): for tests.
        """
        laid = [self._lay(step) for step in self.steps]
        if without >= 0:
            _, flags, _, kinds, words, *rest = laid[without]
            laid[without] = (_CALL, flags & ~MAY_FAIL, 0xFFFF, kinds, words, *rest)
        header = (_MAGIC, len(laid), len(self._data), len(self._pointers), status, inputs)
        parts = [_HEADER.pack(*header)]
        parts += [_STEP.pack(*step) for step in laid]
        parts += [_RELOCATION.pack(*pair) for pair in self._pointers]
        return b"".join((*parts, self._data))

    def _add(
        self, name: str, about: str, operation: int, flags: int, arguments: tuple[Argument, ...]
    ) -> Result:
        step = Step(self._layer, name, about, operation, flags, arguments)
        if len(step.arguments) > _ARGUMENTS:
            raise ValueError(f"{step}: has more than {_ARGUMENTS} arguments")
        self.steps.append(step)
        return Result(_INPUTS + len(self.steps) - 1)

    def _lay(self, step: Step) -> tuple[int, ...]:
        kinds, values = 0, [0] * _ARGUMENTS
        arguments = step.arguments
        for at, argument in enumerate(arguments):
            kind, values[at] = self._argument(argument)
            kinds |= kind << (4 * at)
        number = _steps.NUMBERS[step.name] if step.operation == _CALL else 0
        return step.operation, step.flags, number, kinds, self._text(str(step).encode()), *values

    def _argument(self, argument: Argument) -> tuple[int, int]:
        if argument is None:
            return _LITERAL, 0
        if isinstance(argument, Result):
            return _RESULT, argument.at
        if isinstance(argument, Text):
            return _DATA, argument.offset
        if isinstance(argument, bytes):
            return _DATA, self._text(argument)
        return _LITERAL, argument

    def _text(self, text: bytes) -> int:
        """Place a NUL-terminated string; equal ones once."""
        if text not in self._places:
            self._places[text] = self._append(text + b"\0")
        return self._places[text]

    def _append(self, data: bytes) -> int:
        self._data += bytes(-len(self._data) % 8)
        self._data += data
        return len(self._data) - len(data)


class Now:
    """Makes system calls at once; raises an OSError that names the call and its object."""

    def __init__(self) -> None:
        self._kept: dict[int, bytearray] = {}  # buffers by address, kept alive for pointers to them

    def call(self, name: str, *arguments: Argument, about: str = "") -> int:
        return syscall(name, *map(_plain, arguments), about=about)

    def structure(self, data: bytes, pointers: dict[int, bytes] | None = None) -> Text:
        """Place a structure; `pointers`: offset in it -> the bytes to which the pointer there leads."""
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
