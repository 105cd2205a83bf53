"""Many executions by many clients of one `cellwright judge`: whether each is answered once, by its own
output, and what is left behind.  By hand: `python -m cellwright.benchmarks.judge_server`."""

import argparse
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count as numbers
from pathlib import Path
from typing import Any, NamedTuple

from ..runner.audit.verification import read
from .census import Census, descendants
from .leak_checks import LeakCheck, more, own_temporary_files, settled, whole
from .machine import facts, load
from .measuring import percentile
from .report import Criterion
from .scratch import scratch_directory

# Enough for the submissions of Judge0 that the server keeps for one client, 5,000: a quarter of all.
_WARM_UP = 21_000
_SHOWN = 3
_LEAST_BYTES = 100
_RESULTS = Path(__file__).parent / "results" / "judge_server.md"
_FUSION = {"compile_timeout": 60, "run_timeout": 60, "language": "python", "stdin": ""}


class Way(NamedTuple):
    """One dialect: its path, its body for a program, and the program's output in its answer."""

    name: str
    path: str
    body: Callable[[str], dict[str, Any]]
    output: Callable[[Any], str]


WAYS = (
    Way("SandboxFusion", "/run_code", lambda code: {**_FUSION, "code": code},
        lambda told: str(told["run_result"]["stdout"])),
    Way("Piston", "/api/v2/execute",
        lambda code: {"language": "python", "version": "*", "run_timeout": 60_000,
                      "files": [{"content": code}]},
        lambda told: str(told["run"]["stdout"])),
    Way("Judge0", "/submissions?wait=true",
        lambda code: {"source_code": code, "language_id": 71, "cpu_time_limit": 60},
        lambda told: str(told["stdout"])),
    Way("cellwright", "/v1/judge",
        lambda code: {"source": code, "cases": [{}], "time_seconds": 60},
        lambda told: str(told["cases"][0]["stdout"])),
)  # fmt: skip


class Tally:
    """What clients got; each client has its own connection, and asks in all ways in turn."""

    def __init__(self, port: int, executions: int) -> None:
        self._port = port
        self._executions = executions
        self._numbers = numbers()
        self.seconds: list[float] = []
        self.answered: Counter[int] = Counter()
        self.wrong: list[str] = []
        self._began = time.monotonic()

    def run(self, clients: int) -> None:
        with ThreadPoolExecutor(clients) as threads:
            for each in [threads.submit(self._client) for _ in range(clients)]:
                each.result()

    def _client(self) -> None:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._port)) as connection:
            while (number := next(self._numbers)) < self._executions:
                began = time.monotonic()
                try:
                    self._ask(connection, number)
                except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
                    self.wrong.append(f"{number}: {error!r}")
                    connection.close()
                self.seconds.append(time.monotonic() - began)
                self._tell()

    def _ask(self, connection: http.client.HTTPConnection, number: int) -> None:
        way = WAYS[number % len(WAYS)]
        body = json.dumps(way.body(f"print('n{number}')"))
        connection.request("POST", way.path, body)
        answer = connection.getresponse()
        data = answer.read()
        told = way.output(json.loads(data)) if answer.status in (200, 201) else ""
        if told == f"n{number}\n":
            self.answered[number] += 1
        else:
            self.wrong.append(f"{way.name} {number}: {answer.status} {data[:200]!r}")

    def _tell(self) -> None:
        done = len(self.seconds)
        if done % max(1, self._executions // 20) == 0:
            rate = done / (time.monotonic() - self._began)
            print(
                f"{done:,} of {self._executions:,}, {rate:.0f} a second",
                file=sys.stderr,
                flush=True,
            )


@contextlib.contextmanager
def _server(trail: Path, directory: str) -> Iterator[int]:
    """Start a server with its temporary files in a directory; yield its port."""
    command = [sys.executable, "-Im", "cellwright", "judge", "--http", "127.0.0.1:0", "--no-token",
               "--audit", str(trail)]  # fmt: skip
    environment = {**os.environ, "TMPDIR": directory, "XDG_CACHE_HOME": directory}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr
        try:
            yield int(process.stderr.readline().rpartition(":")[2])
        finally:
            process.send_signal(signal.SIGTERM)
            print(process.stderr.read(), end="", file=sys.stderr)
    if process.returncode:
        raise RuntimeError(f"the server ended with {process.returncode}")


def measure(executions: int, clients: int) -> tuple[list[Criterion], list[float], float]:
    """Return the verdicts, the seconds of each request, and those of all."""
    with scratch_directory() as scratch, own_temporary_files():
        import tempfile

        trail = scratch / "trail"
        with _server(trail, tempfile.gettempdir()) as port:
            Tally(port, _WARM_UP).run(clients)
            before = settled(lambda: None)
            tally, began = Tally(port, executions), time.monotonic()
            tally.run(clients)
            seconds = time.monotonic() - began
            after = settled(lambda: None, before)
        left = [each for each in Path(tempfile.gettempdir()).iterdir() if each.name != "cellwright"]
        name = f"{executions:,} executions by {clients} clients"
        censuses = _without_memory(before), _without_memory(after)
        verdicts = [
            *LeakCheck(name, executions, tally.wrong, *censuses).verdicts(),
            _grown(before, after, executions),
            _once(tally, executions),
            _ran(trail, executions),
            whole(name, trail),
            Criterion(
                "the ended server leaves no process", not descendants(os.getpid()), "counted"
            ),
            Criterion("it leaves no temporary file", not left, str(left[:_SHOWN] or "nothing")),
        ]
        print(f"more than before: {more(before, after) or 'nothing'}", file=sys.stderr)
    return verdicts, sorted(tally.seconds), seconds


def _without_memory(census: Census) -> Census:
    """Return a census without the memory of this process, which keeps the times of all executions, and
    that of the server and its launchers, which `_grown` looks at."""
    return census._replace(memory_mib=0, launchers_mib=0)


def _grown(before: Census, after: Census, executions: int) -> Criterion:
    """Say whether the server keeps less of an execution than any record of one would take.  Some of its
    heap stays in pieces; tracemalloc finds no object that becomes more."""
    kept = (after.launchers_mib - before.launchers_mib) * (1 << 20) / executions
    what = f"server and launchers keep less than {_LEAST_BYTES} bytes of an execution"
    return Criterion(what, kept < _LEAST_BYTES, f"{kept:.0f} bytes")


def _once(tally: Tally, executions: int) -> Criterion:
    """Say whether every execution has one answer."""
    lost = executions - len(tally.answered)
    twice = sum(each > 1 for each in tally.answered.values())
    return Criterion(
        "every execution is answered once", not (lost or twice), f"{lost} lost, {twice} doubled"
    )


def _ran(trail: Path, executions: int) -> Criterion:
    """Say whether each program ran once, by the server's trail."""
    began = sum(entry.category == "execution" and entry.action == "start" for entry in read(trail))
    expected = executions + _WARM_UP
    return Criterion("every program ran once", began == expected, f"{began:,} of {expected:,}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--executions", type=int, default=100_000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--write", action="store_true", help="write results/judge_server.md")
    options = parser.parse_args()
    about = f"{facts()}. {load()}"
    verdicts, times, seconds = measure(options.executions, options.clients)
    rows = "".join(
        f"| {each.what} | {'holds' if each.holds else '**does not hold**'} | {each.seen} |\n"
        for each in verdicts
    )
    text = (
        f"# Many clients of one judge\n\n{about}\n\nClients and server share the processors. A quarter "
        f"of the executions each by SandboxFusion, Piston, Judge0 and `/v1/judge`: "
        f"{options.executions / seconds:,.0f} a second; {1000 * percentile(times, 0.5):,.0f} ms p50, "
        f"{1000 * percentile(times, 0.99):,.0f} ms p99.\n\n"
        f"| criterion | | seen |\n|---|---|---|\n{rows}"
    )
    print(text)
    if options.write:
        _RESULTS.write_text(text)
    return 0 if all(each.holds for each in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
