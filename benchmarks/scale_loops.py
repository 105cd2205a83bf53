"""Processes that each do one thing over and over: as many as it takes to see which part is serial."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..runner.cgroups.cgroup_tree import Caps
from ..runner.cgroups.detect import open_tree

PROCESS, CGROUP = "a process", "a cgroup"
_CAPS = Caps(memory_bytes=256 << 20, cpus=1.0, processes=64)
_LOOP = "import sys; from cellwright.benchmarks.scale_loops import loop; loop(sys.argv[1])"
_TRUE = "/bin/true"


def rate(kind: str, processes: int, seconds: float) -> float:
    """Return how often a second so many processes together make and remove one of that kind."""
    command = [sys.executable, "-I", "-c", _LOOP, kind]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(processes)
    ]
    try:
        for each in started:
            assert each.stdout
            each.stdout.readline()  # it is ready
        for each in started:
            assert each.stdin
            each.stdin.write(b"%f\n" % seconds)
            each.stdin.flush()
        return sum(float(each.stdout.readline()) for each in started if each.stdout)
    finally:
        for each in started:
            each.communicate()


def loop(kind: str) -> None:
    """Do one thing over and over for the seconds of the line that is read; print how often a second."""
    with {PROCESS: _processes, CGROUP: _cgroups}[kind]() as step:
        step()
        print("ready", flush=True)
        seconds, began, count = float(sys.stdin.readline()), time.perf_counter(), 0
        while (took := time.perf_counter() - began) < seconds:
            step()
            count += 1
    print(count / took, flush=True)


@contextmanager
def _processes() -> Iterator[Callable[[], object]]:
    yield lambda: os.waitpid(os.posix_spawn(_TRUE, [_TRUE], {}), 0)


@contextmanager
def _cgroups() -> Iterator[Callable[[], object]]:
    tree = open_tree(os.getpid())
    try:
        yield lambda: tree.create("cell-0", _CAPS).remove()
    finally:
        tree.close()
