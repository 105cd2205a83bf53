"""The comparison of both sides of a suite, and the file that keeps it."""

import collections
import subprocess
import time
from collections.abc import Collection, Generator, Iterable, Mapping
from pathlib import Path

import msgspec

from cellwright import Sandbox

from .outcomes import FAIL, MISSING, PASS, SKIP, Outcomes
from .sides import Ran, run_inside, run_outside, sandbox_for
from .suites import HERE, Suite

RESULTS = HERE / "results"


class Difference(msgspec.Struct, frozen=True, array_like=True):
    """A test whose outcome inside is another one than outside, twice."""

    test: str
    outside: str
    inside: str


class UnitResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that is kept of a unit of a suite."""

    outside: dict[str, int]
    inside: dict[str, int]
    differences: list[Difference] = []
    unstable: list[str] = []  # differed once, and not when they were run again
    ended: str = ""  # set if a side did not end by itself
    refused: dict[str, int] = {}  # refused attempts inside, by call and rule


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """All that is kept of a suite.  A unit is a word, or several that ran together."""

    suite: str
    version: str
    kernel: str
    date: str
    units: dict[str, UnitResult] = {}
    left: list[str] = []  # units without a result

    @property
    def outside(self) -> dict[str, int]:
        return _sum(each.outside for each in self.units.values())

    @property
    def inside(self) -> dict[str, int]:
        return _sum(each.inside for each in self.units.values())

    @property
    def differences(self) -> list[Difference]:
        return [found for each in self.units.values() for found in each.differences]

    @property
    def unstable(self) -> list[str]:
        return [test for each in self.units.values() for test in each.unstable]


def compare(
    suite: Suite, folder: Path, begun: Comparison | None = None, again: Collection[str] = ()
) -> Generator[Comparison, None, None]:
    """Run units on both sides, those with differences twice; yield after each unit what is known.

    With results of an earlier run, which `begun` has, run the units `again`, or those without a result."""
    units = _printed(suite.units, folder).splitlines() if suite.units else [suite.name]
    earlier = begun.units if begun else {}
    left = [each for each in units if each in again] if again else _left(units, earlier)
    known = Comparison(
        suite=suite.name, version=_printed(suite.version, folder).strip(), kernel=_printed("uname -r", folder).strip(),
        date=time.strftime("%Y-%m-%d"), units=earlier, left=left,
    )  # fmt: skip
    with sandbox_for(suite, folder) as sandbox:
        for unit in left:
            known = _with_unit(known, units, unit, _run_unit(suite, folder, unit, sandbox))
            yield known


def _left(units: list[str], results: Mapping[str, UnitResult]) -> list[str]:
    done = {word for each in results for word in each.split()}
    return [each for each in units if not set(each.split()) <= done]


def _with_unit(known: Comparison, units: list[str], unit: str, result: UnitResult) -> Comparison:
    """Return what is known with this result, which replaces those of the same words."""
    words = set(unit.split())
    all_words = {word for each in units for word in each.split()}
    results = {
        each: kept for each, kept in known.units.items()
        if set(each.split()) <= all_words and not words & set(each.split())
    } | {unit: result}  # fmt: skip
    return msgspec.structs.replace(known, units=results, left=_left(units, results))


def _run_unit(suite: Suite, folder: Path, unit: str, sandbox: Sandbox) -> UnitResult:
    there, here = run_outside(suite, folder, unit), run_inside(suite, folder, unit, sandbox)
    outside, inside = _in_unit(suite, unit, there), _in_unit(suite, unit, here)
    found = differences(outside, inside)
    _tell(suite, unit, there, here, found)
    unstable: list[str] = []
    if new := [each for each in found if not suite.expectation(each.test)]:
        twice = differences(
            _in_unit(suite, unit, run_outside(suite, folder, unit)),
            _in_unit(suite, unit, run_inside(suite, folder, unit, sandbox)),
        )
        unstable = [each.test for each in new if each not in twice]
    by_itself = (there.ended + here.ended).startswith("exit") and "(" not in here.ended
    return UnitResult(
        outside=_counts(outside, inside), inside=_counts(inside, outside), unstable=unstable,
        differences=[each for each in found if each.test not in unstable],
        ended="" if by_itself else f"{there.ended} outside, {here.ended} inside",
        refused=dict(collections.Counter(here.refused).most_common(20)),
    )  # fmt: skip


def differences(outside: Outcomes, inside: Outcomes) -> list[Difference]:
    return [
        Difference(test, outside.get(test, MISSING), inside.get(test, MISSING))
        for test in dict.fromkeys([*outside, *inside])
        if outside.get(test) != inside.get(test)
    ]


def save(comparison: Comparison) -> None:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{comparison.suite}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(comparison), indent=1) + b"\n")


def kept(name: str) -> Comparison | None:
    path = RESULTS / f"{name}.json"
    return msgspec.json.decode(path.read_bytes(), type=Comparison) if path.is_file() else None


def _in_unit(suite: Suite, unit: str, ran: Ran) -> Outcomes:
    """Name the unit before each test, unless the unit is the whole suite or a group."""
    prefix = "" if unit == suite.name or " " in unit else f"{unit}: "
    return {f"{prefix}{test}": outcome for test, outcome in ran.outcomes.items()}


def _counts(outcomes: Outcomes, others: Outcomes) -> dict[str, int]:
    counted = collections.Counter(outcomes.values())
    counts = {each: counted[each] for each in (PASS, FAIL, SKIP)}
    missing = len(others.keys() - outcomes.keys())
    return counts | ({MISSING: missing} if missing else {})


def _sum(counted: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: collections.Counter[str] = collections.Counter({PASS: 0, FAIL: 0, SKIP: 0})
    for each in counted:
        total.update(each)
    return dict(total)


def _printed(command: str, folder: Path) -> str:
    return subprocess.run(
        ["bash", "-ec", command], cwd=folder, env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "SUITE": str(folder)},
        check=True, capture_output=True, text=True, timeout=60,
    ).stdout  # fmt: skip


def _tell(suite: Suite, unit: str, outside: Ran, inside: Ran, found: list[Difference]) -> None:
    new = sum(not suite.expectation(each.test) for each in found)
    print(
        f"{suite.name} {unit}: {outside.ended}, {len(outside.outcomes)} tests outside; {inside.ended},"
        f" {len(inside.outcomes)} inside; {len(found)} differ, {new} without a reason", flush=True,
    )  # fmt: skip
