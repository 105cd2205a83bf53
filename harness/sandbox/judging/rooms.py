"""`Rooms`: the sandboxes of a judge, one for each set of limits of space; bounded, and shared by cases.

A sandbox has launchers, which cost memory, and clients of a server choose limits: a judge that needs
one more than `most` closes the one that was unused for the longest time, and waits if all are in use.
"""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Unpack

from ....policies.errors import ClosedError
from ....runner.concurrency import NEVER
from ....runner.requests.request import Streams
from ....runner.requests.result import SandboxResult
from ..calls.call_request import cpu_seconds_of
from ..languages.compiled import Build
from ..parameters import CallOptions, FileContent
from .verdicts import JudgeLimits

_MOST = 8


class Room(Protocol):
    """The part of a sandbox that runs the programs of a judge."""

    def execute(
        self, code: str | Build, language: str | None = None, *, cancel: int = NEVER,
        **options: Unpack[CallOptions],
    ) -> SandboxResult: ...  # fmt: skip

    def execute_on_streams(
        self, code: str | Build, language: str | None, on_streams: Callable[[Streams], None],
        files: Mapping[str, FileContent], arguments: Sequence[str],
        timeout: float | None = None, cpu_seconds: float | None = None, cancel: int = NEVER,
    ) -> SandboxResult: ...  # fmt: skip

    def compiles(self, language: str) -> bool: ...

    def compile(
        self, source: str, language: str, *, files: Mapping[str, FileContent] | None,
        flags: Sequence[str], compile_timeout: float | None = None, cancel: int = NEVER,
    ) -> Build: ...  # fmt: skip

    def close(self) -> None: ...


class MeteredRoom:
    """A room that appends the CPU seconds of each cell to a list."""

    def __init__(self, room: Room, spent: list[float]) -> None:
        self._room = room
        self._spent = spent

    def execute(
        self, code: str | Build, language: str | None = None, *, cancel: int = NEVER,
        **options: Unpack[CallOptions],
    ) -> SandboxResult:  # fmt: skip
        done = self._room.execute(code, language, cancel=cancel, **options)
        self._spent.append(cpu_seconds_of(done.compile, done.usage))
        return done

    def execute_on_streams(self, *given: Any, **named: Any) -> SandboxResult:
        done = self._room.execute_on_streams(*given, **named)
        self._spent.append(cpu_seconds_of(done.compile, done.usage))
        return done

    def compiles(self, language: str) -> bool:
        return self._room.compiles(language)

    def compile(self, source: str, language: str, **given: Any) -> Build:
        done = self._room.compile(source, language, **given)
        self._spent.append(cpu_seconds_of(done.compile))
        return done

    def close(self) -> None:
        self._room.close()


class _Held:
    """A sandbox of some limits: `room` is None while it is made.  `users` hold it or wait for it."""

    def __init__(self) -> None:
        self.making = threading.Lock()
        self.room: Room | None = None
        self.users = 0


class Rooms:
    """Safe from many threads; `make` makes a sandbox, without a lock that other limits wait for."""

    def __init__(self, make: Callable[[JudgeLimits | None], Room], most: int = _MOST) -> None:
        self._make = make
        self._most = most
        self._changed = threading.Condition()
        self._held: OrderedDict[JudgeLimits | None, _Held] = (
            OrderedDict()
        )  # the last used at the end
        self._is_closed = False

    @contextlib.contextmanager
    def lent(self, limits: JudgeLimits | None, spent: list[float]) -> Iterator[Room]:
        """Lend the sandbox for cases with these limits; `spent` gets the CPU time of each cell.

        None is for checkers: it does not count, since a user of another sandbox asks for it and would
        wait for itself.
        """
        held, old = self._taken(limits)
        try:
            if old:
                old.close()
            yield MeteredRoom(self._room_of(limits, held), spent)
        finally:
            with self._changed:
                held.users -= 1
                self._changed.notify_all()

    def _taken(self, limits: JudgeLimits | None) -> tuple[_Held, Room | None]:
        """Count a user of a sandbox; return it, and the one that makes room for it."""
        old = None
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._has_place(limits))
            if self._is_closed:
                raise ClosedError("the sandbox was closed")
            if limits not in self._held:
                if limits is not None and self._count() >= self._most:
                    unused = next(key for key in self._held if self._is_unused(key))
                    old = self._held.pop(unused).room
                self._held[limits] = _Held()
            self._held.move_to_end(limits)
            held = self._held[limits]
            held.users += 1
        return held, old

    def _room_of(self, limits: JudgeLimits | None, held: _Held) -> Room:
        with held.making:
            if held.room is None:
                room = self._make(limits)
                with self._changed:
                    held.room, is_late = room, self._is_closed
                if is_late:
                    room.close()
                    raise ClosedError("the sandbox was closed")
            return held.room

    def _count(self) -> int:
        return len(self._held) - (None in self._held)

    def _is_unused(self, limits: JudgeLimits | None) -> bool:
        return limits is not None and not self._held[limits].users

    def _has_place(self, limits: JudgeLimits | None) -> bool:
        if limits is None or limits in self._held or self._count() < self._most:
            return True
        return any(self._is_unused(key) for key in self._held)

    def close(self) -> None:
        """Close all; closing twice is fine."""
        with self._changed:
            self._is_closed = True
            rooms = [each.room for each in self._held.values() if each.room]
            self._held.clear()
            self._changed.notify_all()
        for each in rooms:
            each.close()
