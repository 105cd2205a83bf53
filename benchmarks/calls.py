"""The cost of system calls inside a cell, beside the same program in a bare interpreter."""

import json
import subprocess
from collections.abc import Callable

from msgspec.structs import replace

from ..runner.launching.spawn import interpreter
from .measuring import median
from .report import Column, ReportTable, Value
from .settings import Settings, sandbox

# Every call is made from Python, whose own part is in all rows alike: differences are what to read.
_PROGRAM = """
import errno, json, os, socket, time

def attempt():
    try:
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).close()
    except OSError:
        pass

def watched():
    os.close(os.open("/dev/zero", os.O_RDONLY))

zero = os.open("/dev/zero", os.O_RDONLY)
CALLS = {
    "nothing: the loop alone": (lambda: None, 20_000),
    "getppid(2)": (os.getppid, 20_000),
    "pread(2) of a byte": (lambda: os.pread(zero, 1, 0), 20_000),
    "stat(2)": (lambda: os.stat("/dev/null"), 5_000),
    "open(2), close(2)": (watched, 2_000),
    "socket(2), AF_NETLINK": (attempt, 1_000),
}

def nanoseconds(call, times):
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times * 1e9

found = {name: nanoseconds(*each) for name, each in CALLS.items()}
print(json.dumps(found))
"""
_BARE, _UNWATCHED, _CELL = "no cell", "a cell that watches no opens", "a cell"


def cost_of_calls(settings: Settings) -> ReportTable:
    """Return nanoseconds a call, as the program itself counts them; contenders take turns."""
    found: dict[str, list[dict[str, float]]] = {_BARE: [], _UNWATCHED: [], _CELL: []}
    blind = replace(settings.policy, filesystem=replace(settings.policy.filesystem, watch=False))
    with (
        sandbox(settings, pool=0) as whole,
        sandbox(settings._replace(policy=blind), pool=0) as unwatched,
    ):
        ways: dict[str, Callable[[], str]] = {
            _BARE: _bare,
            _UNWATCHED: lambda: unwatched.execute(_PROGRAM).stdout,
            _CELL: lambda: whole.execute(_PROGRAM).stdout,
        }
        for _ in range(max(1, settings.amount(150, 15) // 15)):
            for name, way in ways.items():
                found[name].append(json.loads(way()))
    return _table(found)


def _bare() -> str:
    command = [interpreter(), "-I", "-S", "-c", _PROGRAM]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _table(found: dict[str, list[dict[str, float]]]) -> ReportTable:
    rows: list[tuple[Value, ...]] = [
        (call, *(median([each[call] for each in times]) for times in found.values()))
        for call in found[_BARE][0]
    ]
    return ReportTable(
        title="System calls from Python, nanoseconds",
        columns=(Column("call"), *(Column(f"{name} ns", 0) for name in found)),
        rows=tuple(rows),
        note="Medians.  In a cell an open is noted by the supervisor, and AF_NETLINK is refused by it.",
    )
