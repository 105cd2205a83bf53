"""What a source check costs: at first sight, when it is parsed, and at the second, when it is known.

    python benchmarks/validation.py [--runs N]

Every first sight is of a source that differs in its last line.
"""

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cellwright.policies.source.check import MAX_CHARACTERS, check

PROGRAM = """import json
import math


def total(rows):
    sums = {}
    for row in rows:
        key = row["name"].strip().lower()
        sums[key] = sums.get(key, 0) + float(row["amount"])
    return sums


class Report:
    def __init__(self, rows):
        self.sums = total(rows)

    def text(self):
        return "\\n".join(f"{key}: {value:.2f}" for key, value in sorted(self.sums.items()))


print(Report([{"name": f"n{n}", "amount": n * math.pi} for n in range(10)]).text(), json.dumps(1))
"""


def longest(text: str) -> str:
    return text * ((MAX_CHARACTERS - 20) // len(text))


SOURCES = {
    f"{len(PROGRAM.splitlines())} lines": PROGRAM,
    "1,000 lines": PROGRAM * (1000 // len(PROGRAM.splitlines())),
    "256 Ki characters of programs": longest(PROGRAM),
    "256 Ki characters, chains of attributes": longest("a" + ".b" * 900 + "\n"),
    "256 Ki characters, chains of calls": longest("f" + "()" * 900 + "\n"),
    "256 Ki characters, a finding a line": longest("eval\n"),
}


def median_microseconds(look: Callable[[int], object], runs: int) -> float:
    times = []
    for number in range(runs):
        began = time.perf_counter()
        look(number)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    runs = parser.parse_args().runs
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}"
    print(f"{machine}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}\n")
    print(f"{'median':42} {'first us':>10} {'second us':>10}")
    for name, source in SOURCES.items():
        few = max(3, min(runs, runs * len(PROGRAM) // len(source)))
        first = median_microseconds(lambda number, source=source: check(f"{source}#{number}"), few)
        check(source)
        second = median_microseconds(lambda _, source=source: check(source), few)
        print(f"{name:42} {first:10,.0f} {second:10,.1f}")


if __name__ == "__main__":
    main()
