"""Measures of work and memory that count executed Python lines, not time."""

import sys
import threading
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple


class Cost(NamedTuple):
    """`lines` of Python that were executed; the most `memory_bytes` that were held beside what was
    there before; and what came of it."""

    lines: int
    memory_bytes: int
    result: Any


class TooMuchWorkError(AssertionError):
    """More lines were executed than a test allows: what would otherwise go on for hours."""


def cost_of(work: Callable[[], Any], most_lines: int = 20_000_000) -> Cost:
    """Return what `work` takes; raises TooMuchWorkError beyond `most_lines`."""
    lines = _lines_of(work, most_lines)
    return Cost(lines, *_memory_of(work))


def _lines_of(work: Callable[[], Any], most: int) -> int:
    lines = 0

    def trace(_: FrameType, event: str, __: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        if lines > most:
            raise TooMuchWorkError(f"more than {most} lines")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


def _memory_of(work: Callable[[], Any]) -> tuple[int, Any]:
    # Other threads allocate, too; those that wait for another call of a tool do not.
    assert sum(each.name != "cellwright-tool" for each in threading.enumerate()) < 50
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        result = work()
        return tracemalloc.get_traced_memory()[1] - before, result
    finally:
        tracemalloc.stop()


def multiplied(value: Any, times: int) -> list[Any]:
    """Return copies of `value`, in each of which one list, object, text, or one level of depth is there
    `times` over."""
    found: list[Any] = [_deeper(value, times)]
    if isinstance(value, str | bytes):
        found.append(value * times)
    elif isinstance(value, list | tuple):
        found.append(value * times)
        for number, part in enumerate(value):
            for each in multiplied(part, times):
                changed = list(value)
                changed[number] = each
                found.append(type(value)(changed))
    elif isinstance(value, dict):
        found.append({
            f"{key}{number or ''}": each for number in range(times) for key, each in value.items()
        })  # fmt: skip
        found += [
            {**value, key: each} for key, part in value.items() for each in multiplied(part, times)
        ]
    return found


def _deeper(value: Any, times: int) -> Any:
    """Return `value` below `times` levels of what it is in, for a list or an object."""
    for _ in range(min(times, 40)):
        if isinstance(value, list | tuple):
            value = type(value)([value])
        elif isinstance(value, dict) and value:
            value = {next(iter(value)): value}
    return value
