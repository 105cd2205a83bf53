"""The cost of protected paths: making, writing and reading 10,000 files in a cell, with and without.

Run it as python -m cellwright.benchmarks.protected.  It writes
results/protected.md.
"""

import os
import tempfile
import time
from pathlib import Path

from msgspec.structs import replace

from ..harness.sandbox.sandbox import Sandbox
from ..policies.profiles.loading import load_policy

FILES = 10_000
_RESULTS = Path(__file__).with_name("results") / "protected.md"
_CODE = """
import os, time
os.chdir({directory!r})
def spent(act):
    begin = time.perf_counter()
    for n in range({files}):
        act(n)
    return (time.perf_counter() - begin) / {files} * 1e6
def make(n):
    os.close(os.open(f"f{{n}}", os.O_CREAT | os.O_WRONLY, 0o644))
def read(n):
    os.close(os.open(f"f{{n}}", os.O_RDONLY))
[spent(make), spent(make), spent(read), spent(lambda n: os.rename(f"f{{n}}", f"g{{n}}"))]
"""
_ROWS = ("make a file", "open it again to write", "open it to read", "rename it")


def measured(*, protected: bool) -> list[float]:
    """Return the microseconds of one call of each kind."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        os.chmod(place, 0o777)
        policy = load_policy("workshop")
        patterns = (f"{place}/.envrc", f"{place}/*/**/.git/hooks/*") if protected else ()
        files = replace(policy.filesystem, write=(place,), protected=patterns)
        limits = replace(policy.limits, wall_seconds=300.0, cpu_seconds=300.0)
        policy = replace(policy, filesystem=files, limits=limits)
        with Sandbox(policy=policy, pool=0) as sandbox:
            value = sandbox.execute(_CODE.format(directory=place, files=FILES)).value
    assert isinstance(value, list)
    return value


def main() -> None:
    runs = [(measured(protected=False), measured(protected=True)) for _ in range(3)]
    where = f"{os.cpu_count()} processors, Linux {os.uname().release}, {time.strftime('%Y-%m-%d')}"
    head = (
        f"# Protected paths\n\nMicroseconds of one call of {FILES:,}, the least of three; {where}, "
        "`python -m cellwright.benchmarks.protected`.\n\n| call | without | with protected paths |\n"
        "|---|---|---|\n"
    )
    rows = []
    for at, name in enumerate(_ROWS):
        without, guarded = (min(run[kind][at] for run in runs) for kind in (0, 1))
        rows.append(f"| {name} | {without:.0f} | {guarded:.0f} |\n")
    _RESULTS.write_text(head + "".join(rows))
    print(_RESULTS.read_text())


if __name__ == "__main__":
    main()
