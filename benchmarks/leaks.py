"""What is left after ten thousands of calls, kind and unkind: a census before and after each."""

import os
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from ..harness.sandbox import Sandbox
from ..runner.pool import PoolSettings
from ..runner.result import SandboxResult
from .census import Census, count, launcher_of, private_bytes
from .measuring import median, percentile, seconds_of
from .programs import SUM
from .report import Column, Report, Table, Value, Verdict
from .settings import Settings, sandbox

_MIB = 1024 * 1024
_MAY_GROW_MIB = 5.0
_PATIENCE = 20.0
_SAME = 5  # censuses in a row
_WARM_UP = 200  # what is made once is made in the first calls
_TIMES_FIRST = 5
_SEED = 20260101


class Passed(NamedTuple):
    """A stretch of calls: what was there before and after, and what went wrong."""

    name: str
    calls: int
    wrong: list[str]
    before: Census
    after: Census
    further: tuple[Verdict, ...] = ()


def measure(settings: Settings) -> Report:
    """Return verdicts on calls one after the other, on many at once, and on an old launcher."""
    passed = []
    for stretch in (_one_after_the_other, _at_once, _old_launcher):
        passed.append(stretch(settings))
        for verdict in _verdicts(passed[-1]):  # at once: on a busy host the next takes minutes
            print(verdict, file=sys.stderr, flush=True)
    return Report(
        name="leaks",
        title="What is left",
        tables=(_table(passed),),
        verdicts=tuple(verdict for each in passed for verdict in _verdicts(each)),
        notes=(
            "A census counts this process, keeper, nursery, launcher, and all below them.",
            f"Memory may grow by {_MAY_GROW_MIB:g} MiB, nothing else by one.",
        ),
    )


def _settled(made: Sandbox, before: Census | None = None) -> Census:
    """Return a census that stays the same for a while: inits are made ahead, and the kernel removes
    what is dead in its own time.  With one from `before`, wait as long as there is more than then."""
    end = time.monotonic() + _PATIENCE
    same, last = 0, None
    while True:
        made.settle()
        now = count(made)
        same = same + 1 if last and now[:-1] == last[:-1] else 0
        last = now
        quiet = same >= _SAME and (before is None or not _more(before, now))
        if quiet or time.monotonic() > end:
            return now
        time.sleep(0.05)


def _more(before: Census, now: Census) -> dict[str, float]:
    """Return what there is more of now."""
    grown = {
        name: after - then
        for name, then, after in zip(Census._fields, before, now, strict=True)
        if after > then
    }
    if grown.get("memory_mib", 0) <= _MAY_GROW_MIB:
        grown.pop("memory_mib", None)
    return grown


# One after the other


def _one_after_the_other(settings: Settings) -> Passed:
    calls = settings.amount(10_000, 300)
    wrong: list[str] = []
    times = []
    with sandbox(settings) as made:
        for _ in range(min(_WARM_UP, calls)):
            made.execute("print(1)")
        before = _settled(made)
        for _ in range(calls):
            began = time.perf_counter()
            result = made.execute("print(1)")
            times.append(time.perf_counter() - began)
            if result.stdout != "1\n":
                wrong.append(_said(result))
        after = _settled(made, before)
    tail = percentile(times, 0.99) / median(times)
    seen = f"{tail:.1f} times, median {median(times) * 1000:.2f} ms"
    steady = Verdict("one after the other: p99 is less than 5 times the median", tail < 5, seen)
    further = () if settings.smoke else (steady,)
    return Passed("one after the other", calls, wrong, before, after, further)


# Many at once, some of them badly


class Kind(NamedTuple):
    """What a program does after it printed its nonce, and how it must end."""

    share: int  # percent
    code: str
    reasons: tuple[str, ...]
    given: dict[str, Any]
    cancelled: bool = False


_SLEEP = "import time; time.sleep(60)"
_KINDS = (
    Kind(10, _SLEEP, ("wall_time",), {"timeout": 2.0}),
    Kind(5, "x = b'x' * (1 << 40)", ("memory", "exception"), {}),
    Kind(5, "import os; os.abort()", ("signal",), {}),
    Kind(2, _SLEEP, ("cancelled",), {}, cancelled=True),
    Kind(78, "1 + 1", ("exit",), {}),
)


def _at_once(settings: Settings) -> Passed:
    """Have 200 callers make 50 calls each; each result must be that of its own call."""
    callers = 20 if settings.smoke else 200
    rounds = max(1, settings.amount(10_000, 1000) // 200)
    chance = random.Random(_SEED)
    kinds = chance.choices(_KINDS, [kind.share for kind in _KINDS], k=callers * rounds)
    hog = f"x = bytearray({2 * settings.policy.limits.memory_bytes})"
    kinds = [kind._replace(code=hog) if "memory" in kind.reasons else kind for kind in kinds]
    waits: list[float] = []
    # A launcher that is replaced meanwhile may live on with cells that wait: that is another stretch.
    pool = PoolSettings(queue_seconds=600, cells_per_launcher=10**6)
    with sandbox(settings, pool) as made, ThreadPoolExecutor(callers) as threads:
        barrier = threading.Barrier(callers)
        list(threads.map(lambda _: barrier.wait(), range(callers)))  # every thread is there
        for _ in range(_TIMES_FIRST):  # each caller, and what it makes once (malloc's arenas)
            list(threads.map(lambda _: _call(made, _KINDS[-1], waits), range(callers)))
        for kind in _KINDS:
            _call(made, kind, waits)
        waits.clear()
        before = _settled(made)
        # A share each, not a future for each call: those would be most of what is measured.
        shares = [kinds[caller::callers] for caller in range(callers)]
        told = list(threads.map(lambda share: [_call(made, each, waits) for each in share], shares))
        complaints = [complaint for share in told for complaint in share]
        after = _settled(made, before)
    mean = sum(waits) / len(waits)
    fair = Verdict(
        "many at once: nobody waits three times as long for a cell as the mean",
        max(waits) < 3 * mean,
        f"longest {max(waits):.2f} s, mean {mean:.2f} s",
    )
    wrong = [complaint for complaint in complaints if complaint]
    further = () if settings.smoke else (fair,)
    return Passed("many at once", callers * rounds, wrong, before, after, further)


def _call(made: Sandbox, kind: Kind, waits: list[float]) -> str:
    """Make one call and say what is wrong with its result, if anything."""
    nonce = os.urandom(8).hex()
    code = f"print({nonce!r}, flush=True)\n{kind.code}"
    result = _cancelled(made, code) if kind.cancelled else made.execute(code, **kind.given)
    waits.append(result.phases.lease)
    if result.stdout.strip() != nonce or result.reason not in kind.reasons:
        return f"wanted {nonce} and {kind.reasons}, {_said(result)}"
    return ""


def _cancelled(made: Sandbox, code: str) -> SandboxResult:
    """Cancel a call as soon as it says something."""
    cancel, tell = os.pipe()
    try:
        return made.execute(code, cancel=cancel, on_output=lambda *_: _write(tell))
    finally:
        os.close(cancel)
        os.close(tell)


def _write(tell: int) -> None:
    os.write(tell, b"!")


def _said(result: SandboxResult) -> str:
    return f"got {result.stdout.strip()[:40]!r}, {result.reason}, {result.error}"


# An old launcher


def _old_launcher(settings: Settings) -> Passed:
    """Fork on and on from one launcher, and then once more than it may."""
    forks = settings.forks or (200 if settings.smoke else 5000)
    wrong: list[str] = []
    with sandbox(settings, PoolSettings(size=0, cells_per_launcher=forks)) as made:
        for _ in range(min(_WARM_UP, forks // 2)):
            made.execute(SUM.source)
        before, young = _settled(made), _launcher_mib(made)
        began = [seconds_of(partial(made.execute, SUM.source)) for _ in range(100)]
        while made._supervisor.generation.forks < forks:
            result = made.execute(SUM.source)
            if result.value != 2:
                wrong.append(_said(result))
        ended = _launcher_mib(made)
        after, old = _settled(made, before), launcher_of(made)
        made.execute(SUM.source)
        recycled = launcher_of(made)[0] != old[0]
    verdicts = (
        Verdict(
            f"an old launcher is within {_MAY_GROW_MIB:g} MiB of a young one",
            ended - young <= _MAY_GROW_MIB,
            f"{ended - young:+.2f} MiB after {forks:,} forks, median call {median(began) * 1e3:.1f} ms",
        ),
        Verdict("one that has served its time is replaced", recycled, str(recycled)),
    )
    return Passed("an old launcher", forks, wrong, before, after, verdicts)


def _launcher_mib(made: Sandbox) -> float:
    return (private_bytes(launcher_of(made)[2]) or 0) / _MIB


# What is said of it


def _verdicts(passed: Passed) -> list[Verdict]:
    more = _more(passed.before, passed.after)
    examples = "".join(f"; {complaint}" for complaint in passed.wrong[:3])
    return [
        Verdict(
            f"{passed.name}: every result is right",
            not passed.wrong,
            f"{len(passed.wrong)} of {passed.calls:,} wrong{examples}",
        ),
        Verdict(f"{passed.name}: nothing is left", not more, str(more or "nothing")),
        *passed.further,
    ]


def _table(passed: list[Passed]) -> Table:
    rows: list[tuple[Value, ...]] = []
    for each in passed:
        rows.append((each.name, "before", *each.before))
        rows.append((f"{each.calls:,} calls", "after", *each.after))
    names = (Column(name.replace("_", " "), 1) for name in Census._fields)
    return Table(title="Census", columns=(Column("what"), Column("when"), *names), rows=tuple(rows))
