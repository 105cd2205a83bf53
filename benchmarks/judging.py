"""Verdicts of programs near their limits, and the cost of judged cases beside a process a case."""

import contextlib
import functools
import http.server
import json
import multiprocessing
import os
import resource
import select
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ..harness.sandbox.judging.verdicts import Case, JudgeLimits
from ..harness.sandbox.sandbox import Sandbox
from ..policies.errors import LaunchError
from ..runner.launching.spawn import interpreter
from . import near_limits
from .census import roles_below, stat_of
from .commandlines import bubblewrapped
from .interference import adopted_orphans, reap_orphans
from .measuring import percentile
from .report import Column, Criterion, Report, ReportTable
from .settings import Settings, sandbox

_AT_A_TURN = 5  # programs
_SETTLE_SECONDS = 0.05  # cells are taken down
_OURS, _BARE, _POST = "judge", "a process with rlimits", "one POST a case to a server of such"
_SOURCES = {
    "python": "print(sum(map(int, input().split())))",
    "cpp": "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b; }",
    "java": (
        "import java.util.*; public class Main { public static void main(String[] x) {"
        " Scanner in = new Scanner(System.in); System.out.println(in.nextInt() + in.nextInt()); } }"
    ),
}
_CASES = [Case(input=f"{n} {n}\n", expected=f"{2 * n}") for n in range(20)]
_COMPILE = {
    "cpp": ("g++ -O2 -o main main.cpp", "main.cpp", ("./main",)),
    "java": ("javac Main.java", "Main.java", ("java", "-XX:+UseSerialGC", "-cp", ".", "Main")),
}
_TARGETS = {("python", _BARE): 3.0, ("python", _POST): 10.0, ("cpp", _BARE): 1.0}
_MORE_CPU_MS = 2.0  # of a case in C++, beyond a process's


def measure(settings: Settings) -> Report:
    """Return the verdicts that flipped, and programs a second."""
    flips = [*near_limits.measured(settings)]
    costs = dict(_speeds(settings))
    return Report(
        name="judging",
        title="Judging",
        tables=(
            ReportTable(
                title="Programs that use 0.8 or 1.25 times their CPU time or memory",
                columns=(
                    Column("how"), Column("programs", 0), Column("wrong verdicts", 0),
                    Column("tried again", 0), Column("s"),
                ),
                rows=tuple(each[:-1] for each in flips),
                note="Tried again: cases that were above their limit, and were judged alone then.",
            ),
            ReportTable(
                title="Programs with 20 cases",
                columns=(
                    Column("language"), Column("how"), Column("cases a second", 1),
                    Column("CPU ms a case"), Column("p50 of a program, ms", 1),
                    Column("p99, ms", 1),
                ),
                rows=tuple(
                    (language, how, *cost)
                    for language, of in costs.items() for how, cost in of.items()
                ),
                note="Each is compiled before, and runs as many cases at once as there are processors. "
                "CPU time is that of all processes.",
            ),
        ),
        verdicts=(*_verdicts(flips), *_speed_verdicts(costs, 0.2 if settings.smoke else 1)),
        notes=("Default policy, every layer on, audit trail in a file.",),
    )  # fmt: skip


def _verdicts(flips: list[near_limits.Flips]) -> Iterator[Criterion]:
    for each in flips:
        seen = "; ".join((f"{each.wrong} of {each.programs}", *each.examples))
        yield Criterion(f"{each.how}: no verdict is wrong", not each.wrong, seen)


def _speed_verdicts(costs: "dict[str, dict[str, _Cost]]", share: float) -> Iterator[Criterion]:
    for (language, other), target in _TARGETS.items():
        if of := costs.get(language):
            times = of[_OURS].cases_a_second / of[other].cases_a_second
            cpu = of[other].cpu_ms / of[_OURS].cpu_ms
            what = f"{language}: {target:g} times {other}"
            yield Criterion(what, times >= share * target, f"{times:.2f}; by CPU time {cpu:.2f}")
    if of := costs.get("cpp"):
        more = of[_OURS].cpu_ms - of[_BARE].cpu_ms
        what = f"cpp: at most {_MORE_CPU_MS:g} ms of CPU a case more than {_BARE}"
        yield Criterion(what, more * share <= _MORE_CPU_MS, f"{more:.2f} ms")


class _Contender(NamedTuple):
    """A way to run a program on all cases."""

    name: str
    run: Callable[[], object]


class _Cost(NamedTuple):
    """What cases took in one way: by the clock, and of CPU time of every process."""

    cases_a_second: float
    cpu_ms: float
    p50_ms: float  # of a program with all its cases
    p99_ms: float


def _speeds(settings: Settings) -> Iterator[tuple[str, dict[str, _Cost]]]:
    """Yield each language that the host has, and the cost of a case in each way."""
    for language, source in _SOURCES.items():
        with contextlib.ExitStack() as stack:
            stack.enter_context(adopted_orphans())  # of bubblewrap
            made = stack.enter_context(sandbox(settings))
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            with contextlib.suppress(LaunchError):  # the host does not have it
                contenders = [*_contenders(stack, made, language, source, folder)]
                yield language, _costs(contenders, 10 if not settings.smoke else 1)


def _contenders(
    stack: contextlib.ExitStack, made: Sandbox, language: str, source: str, folder: str
) -> Iterator[_Contender]:
    built = made.compile(source, language) if made.compiles(language) else source
    named = language if isinstance(built, str) else None
    limits = JudgeLimits(memory_bytes=512 << 20)
    command = _command(language, source, folder)

    def judge() -> None:
        done = made.judge(built, named, _CASES, limits=limits)
        if not done.ok:
            raise RuntimeError(f"{language}: {done.verdict.value}: {done.message}")

    def one_by_one(run: Callable[[Case], str]) -> Callable[[], None]:
        def every() -> None:
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
                for case, output in zip(_CASES, threads.map(run, _CASES), strict=True):
                    if output.strip() != case.expected:
                        raise RuntimeError(f"it printed {output!r}")

        return every

    yield _Contender(_OURS, judge)
    yield _Contender(_BARE, one_by_one(functools.partial(_process, command, folder)))
    wrapped = bubblewrapped("--ro-bind", folder, folder, "--chdir", folder, *command)
    if wrapped and language != "java":  # which has files outside /usr
        yield _Contender("bubblewrap", one_by_one(functools.partial(_process, wrapped, folder)))
    port = stack.enter_context(_server(command, folder))
    yield _Contender(_POST, one_by_one(functools.partial(_post, port)))


def _costs(contenders: list[_Contender], rounds: int) -> dict[str, _Cost]:
    """Let the contenders take turns of a few programs each, every other time in reverse order."""
    walls: dict[str, list[float]] = {each.name: [] for each in contenders}
    cpu = dict.fromkeys(walls, 0.0)
    for each in contenders:
        each.run()  # launchers start
    for _ in range(rounds):
        for each in contenders:
            before = _cpu_seconds()
            for _ in range(_AT_A_TURN):
                began = time.monotonic()
                each.run()
                walls[each.name].append(time.monotonic() - began)
            select.select([], [], [], _SETTLE_SECONDS)
            cpu[each.name] += _cpu_seconds() - before
        contenders.reverse()
    cases = rounds * _AT_A_TURN * len(_CASES)
    return {
        name: _Cost(
            cases / sum(found), cpu[name] / cases * 1000, percentile(found, 0.5) * 1000,
            percentile(found, 0.99) * 1000,
        )
        for name, found in walls.items()
    }  # fmt: skip


def _cpu_seconds() -> float:
    """Return what this process, every process that it waited for, and the launchers of cells used."""
    reap_orphans()
    used = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        of = resource.getrusage(who)
        used += of.ru_utime + of.ru_stime
    for _, pid in roles_below(os.getpid()):
        if stat := stat_of(
            pid
        ):  # the launcher has waited for its guests, the server for its processes
            used += stat.seconds + stat.children_seconds
    return used


def _command(language: str, source: str, folder: str) -> tuple[str, ...]:
    if language == "python":
        return (interpreter(), "-I", "-c", source)
    compile, name, command = _COMPILE[language]
    Path(folder, name).write_text(source)
    subprocess.run(compile.split(), cwd=folder, check=True)
    return command


def _limited() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 26, 1 << 26))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _process(command: Sequence[str], folder: str, case: Case) -> str:
    """Run a case as servers without a sandbox do: by a process with rlimits."""
    return subprocess.run(
        command, cwd=folder, input=str(case.input), capture_output=True, text=True, check=True,
        preexec_fn=_limited,
    ).stdout  # fmt: skip


@contextlib.contextmanager
def _server(command: Sequence[str], folder: str) -> Iterator[int]:
    """Serve a case for each POST, in a process of its own, as servers of evaluation do."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            output = _process(command, folder, Case(input=asked["stdin"]))
            body = json.dumps({"status": "Success", "stdout": output}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    process = multiprocessing.get_context("fork").Process(target=server.serve_forever, daemon=True)
    process.start()
    server.server_close()
    try:
        yield server.server_port
    finally:
        process.kill()
        process.join()


def _post(port: int, case: Case) -> str:
    body = json.dumps({"code": "", "stdin": case.input}).encode()
    address = f"http://127.0.0.1:{port}/run_code"
    with urllib.request.urlopen(urllib.request.Request(address, body)) as answer:
        return str(json.load(answer)["stdout"])
