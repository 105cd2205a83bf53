"""Constancy: the same program with the same result, after a rest and a thousand times in a row."""

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from msgspec.structs import replace

from ..harness.sandbox.sandbox import Sandbox
from ..policies.policy import MIB
from ..runner.settings import PoolSettings
from .callers import said
from .leak_checks import LeakCheck, settled
from .measuring import median
from .report import Criterion, Value
from .settings import Settings, sandbox

_THREADS = 8


def leak_checks(settings: Settings, rows: list[tuple[Value, ...]]) -> Iterator[LeakCheck]:
    """Yield one check of each kind; add to `rows` what else is to be told of it."""
    yield _woken(settings, rows)
    yield _the_same(settings, rows)


# Waking up

_IDLE_SECONDS = 3.0  # a census takes less, even on a busy machine
_MANY_TIMES = 5.0  # as long as one whose cell stood ready


def _woken(settings: Settings, rows: list[tuple[Value, ...]]) -> LeakCheck:
    """Ask, time and again, a sandbox that has been idle for so long that its pool has shrunk."""
    count = settings.amount(10, 1)
    wrong: list[str] = []
    ready: list[float] = []
    first: list[float] = []
    with sandbox(settings, PoolSettings(idle_seconds=_IDLE_SECONDS)) as made:
        before = settled(made.settle)
        for _ in range(count):
            for times, idle in ((ready, 0.0), (first, 2 * _IDLE_SECONDS)):
                made.settle()
                time.sleep(idle)
                result = made.execute("1 + 1")
                times.append(result.execution_time)
                wrong += [] if result.value == 2 else [said(result)]
        after = settled(made.settle, before)
    ratio = median(first) / median(ready)
    rows.append(("idle", "ms of a call whose cell stood ready, p50", median(ready) * 1e3))
    rows.append(
        ("idle", f"ms of the first after {2 * _IDLE_SECONDS:g} s, p50", median(first) * 1e3)
    )
    rows.append(("idle", "the longest", max(first) * 1e3))
    verdict = Criterion(
        f"idle: the first call takes less than {_MANY_TIMES:g} times as long as the next",
        ratio < _MANY_TIMES,
        f"{ratio:.1f} times",
    )
    further = () if settings.smoke else (verdict,)
    return LeakCheck("woken up", 2 * count, wrong, before, after, further)


# The same program over and over

_PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "ends well": ("print('x')\n1 + 1", {}),
    "raises": ("1 / 0", {}),
    "exits": ("import sys\nsys.exit(3)", {}),
    "crashes": ("import os\nos.abort()", {}),
    "needs too much memory": ("x = b'x' * (1 << 30)", {}),
    "runs too long": ("import time\ntime.sleep(60)", {"timeout": 0.1}),
    "prints too much": ("import os\nwhile True: os.write(1, b'x' * 65536)", {}),
    "breaks the protocol": ("import os\nos.write(3, b'garbage')\nimport time\ntime.sleep(60)", {}),
    "is refused": ("import socket\nsocket.socket()", {}),
    "forks": ("import os\nos.fork()", {}),
    "writes where it may not": ("open('/etc/passwd', 'w')", {}),
}


def _the_same(settings: Settings, rows: list[tuple[Value, ...]]) -> LeakCheck:
    """Run each program as often as that, and see how many ways there were for it to end."""
    times = settings.amount(1000, 10)
    limits = replace(settings.policy.limits, memory_bytes=64 * MIB, output_total_bytes=MIB)
    small = settings._replace(policy=replace(settings.policy, limits=limits))
    wrong: list[str] = []
    with sandbox(small) as made, ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(partial(_verdict_on, made), list(_PROGRAMS) * _THREADS))
        before = settled(made.settle)
        for name in _PROGRAMS:
            ends = Counter(threads.map(partial(_verdict_on, made), [name] * times))
            (usual, count), *others = ends.most_common()
            wrong += [f"{name}: {number} times {end}, not {usual}" for end, number in others]
            rows.append(("the same again", f"a program that {name}: {usual}", count))
        after = settled(made.settle, before)
    name = f"{len(_PROGRAMS)} programs, each the same again"
    return LeakCheck(name, times * len(_PROGRAMS), wrong, before, after)


def _verdict_on(made: Sandbox, name: str) -> str:
    """Run the program of that name, and return all that is to be the same every time."""
    code, given = _PROGRAMS[name]
    result = made.execute(code, **given)
    how = result.exit_code if result.signal is None else f"signal {result.signal}"
    seen = ", ".join(f"{each.syscall} {each.rule}" for each in result.violations)
    return " · ".join(map(str, filter(None, (result.status.value, result.reason, how, seen))))
