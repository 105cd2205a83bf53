"""What one call costs: a cell that stood ready and one made on demand, against bubblewrap and a plain
interpreter, side by side.

    python benchmarks/latency.py [--runs N] [--optional LAYER]... [--json FILE]

Every round runs each contender once, in alternating order, so that a noisy moment hits all of them.
Read the ratios first: absolute times differ between machines and minutes.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cellwright import Sandbox
from cellwright.policies.policy import Policy
from cellwright.runner.runtime import find_runtime
from cellwright.runner.spawn import interpreter

PROGRAM = "1+1"
Contender = Callable[[], object]


def bubblewrap(arguments: list[str]) -> list[str] | None:
    """Return the command line of the same interpreter in bubblewrap, with /usr to load from."""
    if not shutil.which("bwrap"):
        return None
    runtime = find_runtime(interpreter())
    outside = [
        path for path in (*runtime.files, runtime.executable) if not path.startswith("/usr/")
    ]
    shown = [part for path in ("/usr", *outside) for part in ("--ro-bind", path, path)]
    top = [link for link in runtime.links if link[0].count("/") == 1]
    links = [part for path, target in top for part in ("--symlink", target, path)]
    filesystems = ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/workspace"]
    isolation = ["--unshare-all", "--die-with-parent", "--clearenv"]
    return ["bwrap", *isolation, *shown, *links, *filesystems, runtime.executable, *arguments]


def run(command: list[str]) -> Contender:
    def once() -> None:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={})

    return once


def contenders(pooled: Sandbox, on_demand: Sandbox) -> dict[str, Contender]:
    def ready() -> None:
        if not pooled.execute(PROGRAM).pool_hit:
            raise RuntimeError("no cell stood ready")

    found: dict[str, Contender] = {
        "cellwright, a cell that stood ready": ready,
        "cellwright, a cell made on demand": lambda: on_demand.execute(PROGRAM),
    }
    if bwrap := bubblewrap(["-I", "-S", "-c", PROGRAM]):
        found["bwrap --unshare-all python3 -I -S"] = run([shutil.which("bwrap") or "", *bwrap[1:]])
    found["python3 -I -S, no isolation"] = run([interpreter(), "-I", "-S", "-c", PROGRAM])
    return found


def cold_contenders(optional: list[str]) -> dict[str, Contender]:
    """Whole commands, from nothing to the printed answer."""
    options = [part for layer in optional for part in ("--optional", layer)]
    command = [sys.executable, "-I", "-m", "cellwright", "run", *options, "-c", "print(1)"]
    found = {"cellwright run, cold": run_in_environment(command)}
    if bwrap := bubblewrap(["-I", "-c", "print(1)"]):
        found["bwrap --unshare-all python3 -I, cold"] = run(
            [shutil.which("bwrap") or "", *bwrap[1:]]
        )
    return found


def run_in_environment(command: list[str]) -> Contender:
    """Run `command` with a home, so that its cache is found as a user's would be."""

    def once() -> None:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    return once


def measure(rivals: dict[str, Contender], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in rivals}
    order = list(rivals)
    for each in rivals.values():
        each()
    for _ in range(rounds):
        for name in order:
            began = time.perf_counter()
            rivals[name]()
            times[name].append(time.perf_counter() - began)
        order.reverse()
    return times


def table(times: dict[str, list[float]]) -> str:
    first = statistics.median(next(iter(times.values())))
    lines = [f"{'':38} {'p50 ms':>8} {'p99 ms':>8} {'ratio':>7}"]
    for name, values in times.items():
        ordered = sorted(values)
        median, p99 = statistics.median(ordered), ordered[int(len(ordered) * 0.99)]
        lines.append(f"{name:38} {median * 1e3:8.2f} {p99 * 1e3:8.2f} {median / first:6.2f}x")
    return "\n".join(lines)


def facts() -> str:
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}"
    return f"{machine}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--optional", action="append", default=[])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    policy = Policy(name="strict", optional_layers=tuple(options.optional))
    with Sandbox(policy=policy) as pooled, Sandbox(policy=policy, pool=0) as on_demand:
        pooled.settle()
        warm = measure(contenders(pooled, on_demand), options.runs)
    cold = measure(cold_contenders(options.optional), max(10, options.runs // 10))
    print(facts(), table(warm), table(cold), sep="\n\n")
    if options.json:
        options.json.write_text(json.dumps({"facts": facts(), "warm": warm, "cold": cold}))


if __name__ == "__main__":
    main()
