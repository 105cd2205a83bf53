"""`LeakCheck`: a census before and after a series of calls, and the errors in between."""

import contextlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ..runner.audit.verification import read, verify
from .census import Census, count
from .report import Column, Criterion, ReportTable, Value
from .scratch import scratch_directory

_PATIENCE = 60.0  # on a busy machine, too, what is dead is gone by then
_SAME = 5  # censuses in a row
MAY_GROW_MIB = 5.0
_MAY_LINGER = (
    100  # dying cgroups: the kernel frees them late, and other users of this host have some
)
_ALLOWED = {
    "memory_mib": MAY_GROW_MIB,
    "launchers_mib": MAY_GROW_MIB,
    "dying_cgroups": _MAY_LINGER,
}
_EXACT = len(Census._fields) - len(_ALLOWED)  # fields that may differ come last
NOTES = (
    "A census counts this process, every keeper, nursery and launcher, and all below them.",
    f"Memory of this process, and of launchers, may grow by {MAY_GROW_MIB:g} MiB, nothing else by one.",
    f"Dying cgroups and objects of IPC are the host's; of those others make some too: {_MAY_LINGER}.",
)


class LeakCheck(NamedTuple):
    """Calls that were made, what was there before and after, and complaints about their results."""

    name: str
    calls: int
    wrong: list[str]
    before: Census
    after: Census
    further: tuple[Criterion, ...] = ()

    def verdicts(self) -> tuple[Criterion, ...]:
        left = more(self.before, self.after)
        examples = "".join(f"; {complaint}" for complaint in self.wrong[:3])
        return (
            Criterion(
                f"{self.name}: every result is right",
                not self.wrong,
                f"{len(self.wrong)} of {self.calls:,} wrong{examples}",
            ),
            Criterion(f"{self.name}: nothing is left", not left, str(left or "nothing")),
            *self.further,
        )


def settled(settle: Callable[[], object], before: Census | None = None) -> Census:
    """Return a census that stays the same for a while: inits are made ahead, and the kernel removes
    what is dead in its own time.  With one from `before`, wait as long as there is more than then."""
    end = time.monotonic() + _PATIENCE
    same, last = 0, None
    while True:
        settle()
        now = count()
        same = same + 1 if last and now[:_EXACT] == last[:_EXACT] else 0
        last = now
        quiet = same >= _SAME and (before is None or not more(before, now))
        if quiet or time.monotonic() > end:
            return now
        time.sleep(0.05)


def more(before: Census, now: Census) -> dict[str, float]:
    """Return what there is more of now than is allowed, and by how much."""
    return {
        name: after - then
        for name, then, after in zip(Census._fields, before, now, strict=True)
        if after - then > _ALLOWED.get(name, 0)
    }


@contextlib.contextmanager
def own_temporary_files() -> Iterator[None]:
    """Have temporary files in a directory of our own meanwhile, where nobody else's come and go."""
    others = tempfile.tempdir
    with scratch_directory() as directory:
        tempfile.tempdir = str(directory)
        try:
            yield
        finally:
            tempfile.tempdir = others


def told_at_once(checks: Iterable[LeakCheck]) -> tuple[LeakCheck, ...]:
    """Make the checks, and print what is to be said of each when it is over: the next takes
    minutes."""
    made = []
    for each in checks:
        made.append(each)
        for verdict in each.verdicts():
            print(verdict, file=sys.stderr, flush=True)
    return tuple(made)


def whole(name: str, trail: Path) -> Criterion:
    """Say whether the chain of a trail holds, and every execution that began has one end."""
    began: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    for entry in read(trail):
        if entry.category == "execution":
            (began if entry.action == "start" else ended)[str(entry.details["execution_id"])] += 1
    verdict = verify(trail)
    odd = sum(((began - ended) + (ended - began)).values())
    return Criterion(
        f"{name}: the trail holds, and every execution in it ends once",
        verdict.ok and not odd,
        f"{verdict.records:,} records, {verdict.broken or 'none broken'}, {odd} executions otherwise",
    )


def censuses(checks: Iterable[LeakCheck]) -> ReportTable:
    """Return what there was before and after each."""
    rows: list[tuple[Value, ...]] = []
    for each in checks:
        rows.append((each.name, "before", *each.before))
        rows.append((f"{each.calls:,} calls", "after", *each.after))
    names = (Column(name.replace("_", " "), 1) for name in Census._fields)
    return ReportTable(
        title="Census", columns=(Column("what"), Column("when"), *names), rows=tuple(rows)
    )
