"""`branch`: make fresh cells equal to the cell of a session, in order.

Every step before the pages reads the source and has the targets, which no guest has used yet, make
calls of their own: so each call passes the filter, the mounts and the caps of the target's cell.
"""

import contextlib
import os
from typing import NamedTuple

from . import layout
from .layout import Change, Mapping, NotCopyable
from .machine import Machine, machine
from .pages import copy_pages
from .state import (
    State,
    copy_limits,
    copy_state,
    require_alone,
    require_copyable,
    require_equal,
    state_of,
)
from .traced import Traced, number_of

_FIXED, _PRIVATE, _ANONYMOUS, _NORESERVE = 0x10, 0x2, 0x20, 0x4000  # mmap(2)
_AT_FDCWD = -100
_CLOCK_REALTIME = 0


class BranchedProcesses(NamedTuple):
    """Pidfds: of the session's process, of the init of its cell, and of fresh cells' processes.

    `maps` are the page maps of the source and of each target, if root has opened them.
    """

    source: int
    init: int
    targets: tuple[int, ...]
    maps: tuple[int, ...] = ()


def branch(given: BranchedProcesses) -> None:
    """Make every target equal to the source.

    If anything fails every target is killed, and the source goes on in any case.  Raises NotCopyable
    with the reason why this session cannot be copied, and OSError if a target failed.
    """
    known = machine()
    if known is None:
        raise NotCopyable(f"branching by memory is not available on {os.uname().machine}")
    with contextlib.ExitStack() as opened:
        source = Traced(given.source, known, is_source=True)
        opened.callback(source.close, dies=False)
        targets = _stopped(given.targets, known, opened)
        mappings, wanted = checked(source, number_of(given.init))
        fresh = [state_of(each) for each in targets]
        for had in fresh:
            require_copyable(wanted, had)
        for target, had in zip(targets, fresh, strict=True):
            lay_out(target, mappings)
            copy_state(wanted, had, target)
        copy_pages(source, targets, mappings, given.maps)
        for target, had in zip(targets, fresh, strict=True):
            copy_limits(wanted, had, target)
            require_equal(wanted, state_of(target))
            target.become(source.registers, source.extended)
        for target in targets:
            target.close(dies=False)


def _stopped(pidfds: tuple[int, ...], known: Machine, opened: contextlib.ExitStack) -> list[Traced]:
    targets = []
    for pidfd in pidfds:
        targets.append(Traced(pidfd, known, is_source=False))
        opened.callback(targets[-1].close, dies=True)
    return targets


def checked(source: Traced, init: int) -> tuple[list[Mapping], State]:
    """Return the layout and the state of a session whose process is alone; raises NotCopyable."""
    require_alone(source, init)
    return source.mappings(), state_of(source)


def lay_out(target: Traced, wanted: list[Mapping]) -> None:
    """Give `target` the layout `wanted`."""
    had = target.mappings()
    _require_code(target, wanted, had)
    if _grow(target, wanted, had):
        had = target.mappings()
    steps = layout.changes(wanted, had)
    files: dict[bytes, list[Change]] = {}
    for step in steps:
        if step.kind == "file":
            files.setdefault(step.mapping.name, []).append(step)
        else:
            _change(target, step)
    for path, pieces in files.items():
        _map_file(target, path, pieces)
    if steps and layout.changes(wanted, target.mappings()):
        raise NotCopyable("its memory is laid out in a way that a copy cannot have")


def _require_code(target: Traced, wanted: list[Mapping], had: list[Mapping]) -> None:
    """Raise NotCopyable if the source has other memory where the target makes its calls."""
    at = target.parked.instruction
    ours, theirs = (
        [each for each in some if each.start <= at < each.end] for some in (wanted, had)
    )
    if not ours or ours[0].content() != theirs[0].content() or ours[0].rights != theirs[0].rights:
        raise NotCopyable("it has mapped something else in place of the C library")


def _grow(target: Traced, wanted: list[Mapping], had: list[Mapping]) -> bool:
    """Grow the heap and the stack of `target`: the kernel grows a stack that a call writes to.

    Return whether one of them had to grow.
    """
    heap, before = _named(wanted, layout.HEAP), _named(had, layout.HEAP)
    if grows := bool(heap and (not before or heap[-1].end != before[-1].end)):
        target.call("brk", heap[-1].end)
    stack, before = _named(wanted, layout.STACK), _named(had, layout.STACK)
    if stack and before and stack[0].start < before[0].start:
        grows = True
        with contextlib.suppress(OSError):  # then the layouts differ still
            target.call("clock_gettime", _CLOCK_REALTIME, stack[0].start)
    return grows


def _named(mappings: list[Mapping], name: bytes) -> list[Mapping]:
    return [each for each in mappings if each.name == name]


def _change(target: Traced, step: Change) -> None:
    size = step.end - step.start
    if step.kind == "unmap":
        target.call("munmap", step.start, size)
    elif step.kind == "protect":
        target.call("mprotect", step.start, size, step.protection)
    else:
        flags = _FIXED | _PRIVATE | _ANONYMOUS | _NORESERVE
        target.call("mmap", step.start, size, step.protection, flags, -1, 0)


def _map_file(target: Traced, path: bytes, pieces: list[Change]) -> None:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        opened = target.call("openat", _AT_FDCWD, path + b"\0", flags)
        for step in pieces:
            size, flags = step.end - step.start, _FIXED | _PRIVATE
            target.call("mmap", step.start, size, step.protection, flags, opened, step.offset)
        target.call("close", opened)
    except OSError as error:
        raise NotCopyable(f"a file that it has mapped cannot be mapped again: {error}") from None
