"""Suites by other authors, run in cells and outside; RESULTS.md tells each difference and its reason.

    scripts/conformance                 # all suites
    scripts/conformance git coreutils   # these
    scripts/conformance --continue git  # the units that a run of git that was stopped left
    scripts/conformance --again go os  # these units of a suite, whose earlier results are replaced
    scripts/conformance --table         # RESULTS.md again, from the results that are kept
    scripts/conformance --show git t0001-init.sh   # what one unit prints inside and outside

The exit status is 1 if a difference has no reason.
"""

import sys
from pathlib import Path

from .comparing import compare, kept, save
from .preparing import prepare
from .sides import run_inside, run_outside, sandbox_for
from .suites import load_suite, suite_names
from .table import unexplained, write_table


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--show"]:
        return show(arguments[1], arguments[2] if arguments[2:] else "")
    option = arguments[0] if arguments and arguments[0].startswith("--") else ""
    arguments, again = arguments[bool(option) :], []
    if option == "--again":
        arguments, again = arguments[:1], arguments[1:]
    names = [] if option == "--table" else arguments or list(suite_names())
    if unknown := set(names) - set(suite_names()):
        print(
            f"unknown suites: {sorted(unknown)}; known: {', '.join(suite_names())}", file=sys.stderr
        )
        return 2
    for name in names:
        suite = load_suite(name)
        print(f"{name}: prepare", flush=True)
        for comparison in compare(suite, prepare(suite), kept(name) if option else None, again):
            save(comparison)
    write_table()
    left = {name: tests for name in names or suite_names() if (tests := unexplained(name))}
    for name, tests in left.items():
        print(f"{name}: {len(tests)} differences without a reason:")
        for each in tests[:100]:
            print(f"  {each.test}: {each.outside} outside, {each.inside} inside")
    return 1 if left else 0


def show(name: str, unit: str) -> int:
    suite = load_suite(name)
    folder: Path = prepare(suite)
    outside = run_outside(suite, folder, unit)
    with sandbox_for(suite, folder) as sandbox:
        inside = run_inside(suite, folder, unit, sandbox)
    for side, ran in (("outside", outside), ("inside", inside)):
        print(f"==== {side}: {ran.ended}\n{ran.printed}")
    print(
        "==== refused:",
        *(f"{count} x {what}" for what, count in inside.refused.items()),
        sep="\n  ",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
