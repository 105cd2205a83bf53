#!/usr/bin/env python3
"""Measure what an idle daemon takes on a small host, and say it as one line of JSON that begins with `edge: `.

    scripts/test-hosts --record g -- python3 tests/hosts/edge.py    # 512 MiB, one processor, by emulation
    .venv/bin/python tests/hosts/edge.py                            # here

Where the clock counts instructions, as on host g, times are numbers of instructions: a nanosecond each.  PSS is
resident memory in which a page of several processes counts once (proc_pid_smaps(5)).  Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

COMMAND = (sys.executable, "-I", "-m", "cellwright")
# As a bundle installs it: without the extra `systemd`, in whose place busctl(1) is called.
BUNDLED = (
    sys.executable, "-I", "-c",
    "import sys; sys.modules['pystemd'] = None; from cellwright.harness.cli.main import command; command()",
)  # fmt: skip
TRIES = 3  # the best one counts: the first reads from the disk, and writes compiled modules
IDLE_SECONDS = 3.0


def main() -> int:
    measured = {
        "date": time.strftime("%Y-%m-%d"),
        "memory_mib": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20,
        "processors": os.cpu_count(),
        "python": best(python_once),
        "start": best(lambda: daemon_once()["start"]),
        "call": best(lambda: daemon_once(calls=1)["calls"]),
        "idle_with_extra_systemd": daemon_once(command=COMMAND, idle_seconds=IDLE_SECONDS)[
            "memory"
        ],
        "idle": daemon_once(idle_seconds=IDLE_SECONDS)["memory"],
        "after_calls": daemon_once(calls=3, idle_seconds=IDLE_SECONDS)["memory"],
        "eight_ready": daemon_once(("--pool", "8"), calls=1, idle_seconds=IDLE_SECONDS)["memory"],
    }
    print("edge:", json.dumps(measured), flush=True)
    return 0


def best(measure: Any) -> float:
    return float(min(measure() for _ in range(TRIES)))


def python_once() -> float:
    began = time.monotonic()
    subprocess.run((sys.executable, "-c", "pass"), check=True)
    return time.monotonic() - began


def daemon_once(
    options: tuple[str, ...] = (), *, calls: int = 0, idle_seconds: float | None = None,
    command: tuple[str, ...] = BUNDLED,
) -> dict[str, Any]:  # fmt: skip
    """Start a daemon, make `calls` calls, and stop it; return the seconds of both, and the memory that it
    has after so many idle seconds."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = f"{folder}/socket"
        arguments = (*command, "serve", "--socket", place, *options)
        began = time.monotonic()
        with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as daemon:
            assert daemon.stderr is not None
            try:
                said = daemon.stderr.readline()
                found["start"] = time.monotonic() - began
                assert "serving" in said, said + daemon.stderr.read()
                began = time.monotonic()
                for _ in range(calls):
                    call = (*COMMAND, "run", "--connect", place, "-c", "print(6 * 7)")
                    subprocess.run(call, check=True, stdout=subprocess.DEVNULL)
                found["calls"] = time.monotonic() - began
                if idle_seconds is not None:
                    time.sleep(idle_seconds)
                    found["memory"] = memory_of(daemon.pid)
            finally:
                daemon.terminate()
    return found


def memory_of(pid: int) -> dict[str, Any]:
    """Return PSS and RSS of each process from `pid` on, in KiB, and of all together.

    Inits are left out: they share the memory of their nursery (CLONE_VM), which smaps shows for each anew.
    """
    processes = [
        {"name": name, "pss": sizes["Pss"], "rss": sizes["Rss"], "anonymous": sizes["Anonymous"]}
        for each in tree(pid)
        for name, sizes in [(_read(each, "comm").strip(), sizes_of(each))]
        if name != "cell-init"
    ]
    total = {key: sum(each[key] for each in processes) for key in ("pss", "rss")}
    return total | {"processes": processes}


def tree(pid: int) -> list[int]:
    """Return `pid` and the processes below it.

    /proc/PID/task/TID/children is no way to ask: where one of them ends meanwhile it leaves out others (proc(5)).
    """
    parents = {}
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            parents[int(each.name)] = int(
                _read(int(each.name), "stat").rpartition(")")[2].split()[1]
            )
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found


def sizes_of(pid: int) -> dict[str, int]:
    lines = _read(pid, "smaps_rollup").splitlines()[1:]
    return {name: int(size) for name, size, _ in (line.replace(":", "").split() for line in lines)}


def _read(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


if __name__ == "__main__":
    sys.exit(main())
