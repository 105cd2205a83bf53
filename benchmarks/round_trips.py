"""Round trips: a tool call from a cell in each language, and an echo between two Pythons."""

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from functools import partial

from ..harness.sandbox.sandbox import Sandbox
from ..policies.errors import LaunchError
from ..runner.launching.spawn import interpreter
from .measuring import Contender, Times, percentile_columns, percentile_row, ratio, side_by_side
from .report import Column, ReportTable, Value
from .settings import Settings

_LOOPS = {  # print or return the seconds of one call
    "python": """
import time
from tools import {name}
def measured():
    began = time.perf_counter()
    for n in range({count}):
        {name}(n=n)
    return (time.perf_counter() - began) / {count}
measured()
""",
    "javascript": """
const began = process.hrtime.bigint();
for (let n = 0; n < {count}; n++) tools.{name}({{n}});
Number(process.hrtime.bigint() - began) / 1e9 / {count}
""",
    "bash": """
began=${{EPOCHREALTIME/[^0-9]/}}
for ((n = 0; n < {count}; n++)); do cellwright-call {name} "{{\\"n\\": $n}}"; done >/dev/null
printf '%d' $((${{EPOCHREALTIME/[^0-9]/}} - began))
""",
}
_ECHO = """
import socket
with socket.socket(fileno=0) as end:
    while message := end.recv(4096):
        end.send(message)
"""
_MESSAGE = b"x" * 64
_ROUND_TRIP = "two Pythons through a socketpair"
_SECONDS = 30.0  # longest time of measuring
_BASH_COUNTS_PER_SECOND = 1e6


def seconds_of_call(offering: Sandbox, name: str, count: int, language: str = "python") -> float:
    """Return the seconds that one of many calls took, as the program itself counts."""
    result = offering.execute(_LOOPS[language].format(name=name, count=count), language)
    if not result.ok:
        raise RuntimeError(result.error)
    if language == "bash":
        return int(result.stdout) / _BASH_COUNTS_PER_SECOND / count
    return float(result.value)


@contextlib.contextmanager
def echo() -> Iterator[socket.socket]:
    """Give the end of a socketpair; at the other end a Python sends back what it gets."""
    ours, theirs = socket.socketpair()
    command = [interpreter(), "-I", "-S", "-c", _ECHO]
    with ours, subprocess.Popen(command, stdin=theirs.fileno()) as process:
        theirs.close()
        yield ours
        ours.close()
        process.wait()


def seconds_of_round_trip(end: socket.socket, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        end.send(_MESSAGE)
        end.recv(4096)
    return (time.perf_counter() - began) / count


def by_language(settings: Settings, offering: Sandbox, name: str) -> ReportTable:
    """Return what a call of a tool takes from each language that this host has, next to the echo."""
    count = settings.amount(100, 10)
    absent: list[tuple[Value, ...]] = []
    with echo() as end:
        contenders = [Contender(_ROUND_TRIP, partial(seconds_of_round_trip, end, count))]
        for language in _LOOPS:
            call = partial(seconds_of_call, offering, name, count, language)
            try:
                call()
            except LaunchError as error:
                reason = str(error).partition("\n")[0]
                absent.append((language, f"absent: {reason}", *[None] * 4))
            else:
                contenders.append(Contender(language, call, offering.settle))
        times = side_by_side(contenders, settings.amount(200, 4), seconds=_SECONDS)
    return _table(times, absent)


def _table(times: Times, absent: list[tuple[Value, ...]]) -> ReportTable:
    ratios = {way: ratio(seconds, times[_ROUND_TRIP]) for way, seconds in times.items()}
    rows = (
        (way, *percentile_row(seconds)[:3], ratios[way].value, ratios[way].spread * 100)
        for way, seconds in times.items()
    )
    return ReportTable(
        title="A call from a cell, by language",
        columns=(
            Column("from"), *percentile_columns(3)[:3], Column("of a round trip"), Column("±, %", 0),
        ),
        rows=(*rows, *absent),
        note="Each program counts itself; many calls in one cell, one after the other.",
    )  # fmt: skip
