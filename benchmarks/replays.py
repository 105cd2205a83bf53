"""Runs with parallel calls, killed at random: whether each call is made once, and each run is finished.

A process of its own runs the programs, approves their calls and resumes them.  It is killed again and
again, and a new one resumes what it left.  Each call writes a line, which says what was really
done: it decides about calls whose outcome is unknown, as a person would who looks.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from ..harness.runs.durable_runs import CallState, RunAttempt, Runs
from ..harness.sandbox.sandbox import Sandbox
from ..harness.schemas.spec import ToolOwner, ToolSpec
from ..harness.tools.broker import Broker, Offer
from ..harness.tools.tool import Caller, Tool
from ..policies.errors import InternalError
from ..runner.requests.result import SandboxStatus
from .callers import languages
from .report import Column, Criterion, Report, ReportTable, Value
from .scratch import scratch_directory
from .settings import Settings

_ASYNC = "import asyncio, tools\n{}\nasync def main():\n    {}\nsorted(asyncio.run(main()))"
_POOL = (
    "import tools\nfrom concurrent.futures import ThreadPoolExecutor, as_completed\n"
    "with ThreadPoolExecutor(5) as pool:\n    {}\nsorted(made)"
)
FORMS: dict[str, str] = {
    "gather on one line": _ASYNC.format(
        "",
        "return await asyncio.gather("
        "tools.send('a'), tools.note('b'), tools.send('c'), tools.send('d'))",
    ),
    "gather, a line each": _ASYNC.format(
        "",
        "return await asyncio.gather(\n        tools.send('a'),\n        tools.note('b'),\n"
        "        tools.send('c'),\n        tools.send('d'))",
    ),
    "comprehension": _ASYNC.format(
        "", "return await asyncio.gather(*[tools.send(each) for each in 'abcd'])"
    ),
    "through a helper": _ASYNC.format(
        "async def one(to):\n    return await tools.note(to), await tools.send(to)",
        "pairs = await asyncio.gather(*[one(each) for each in 'abc'])\n"
        "    return [word for pair in pairs for word in pair]",
    ),
    "TaskGroup": _ASYNC.format(
        "",
        "async with asyncio.TaskGroup() as group:\n"
        "        made = [group.create_task(tools.send(each)) for each in 'abcd']\n"
        "    return [each.result() for each in made]",
    ),
    "asyncio.as_completed": _ASYNC.format(
        "",
        "made = []\n    for each in asyncio.as_completed([tools.note(each) for each in 'abc']):\n"
        "        said = await each\n        made += [said, await tools.send(said[-1])]\n"
        "    return made",
    ),
    "equal calls": _ASYNC.format(
        "", "return await asyncio.gather(*[tools.send('a') for _ in range(4)])"
    ),
    "thread pool": _POOL.format("made = list(pool.map(tools.send, 'abcd'))"),
    "thread pool, as_completed": _POOL.format(
        "sent = [pool.submit(tools.send, to) for to in 'abcd']\n"
        "    made = [each.result() for each in as_completed(sent)]"
    ),
    "JavaScript Promise.all": (
        "Promise.all(['a', 'b', 'c'].map(async (to) => tools.send({ to }))).then((made) => made.sort())"
    ),
}  # fmt: skip
# What each program has to do: lines that its calls write.
_EFFECTS: dict[str, list[str]] = {
    name: ["note b", "send a", "send c", "send d"] for name in FORMS if name.startswith("gather")
} | {
    "through a helper": [f"{tool} {to}" for tool in ("note", "send") for to in "abc"],
    "asyncio.as_completed": [f"{tool} {to}" for tool in ("note", "send") for to in "abc"],
    "equal calls": ["send a"] * 4,
    "JavaScript Promise.all": [f"send {to}" for to in "abc"],
}
_USUAL = [f"send {to}" for to in "abcd"]
_ROUNDS, _SMOKE_ROUNDS = 1000, 3
_LANES = 8  # runs at the same time
_LONGEST_SECONDS = 3.0  # between two kills
_MOST_ATTEMPTS = 20  # attempts of one run in one process
_SEED = 20261122
_PARAMETERS = {"type": "object", "properties": {"to": {"type": "string"}}}


def expected_of(form: str) -> list[str]:
    """Return what a program's calls do and return, each once, sorted."""
    return sorted(_EFFECTS.get(form, _USUAL))


def language_of(form: str) -> str:
    """Return the language in which a form is written."""
    return "javascript" if form.startswith("JavaScript") else "python"


class Outcome(NamedTuple):
    """What became of all runs of one form."""

    form: str
    rounds: int
    completed: int
    twice: int  # runs in which a call was made more often than the program says
    wrong: int  # runs that completed with another value, or with a call missing
    diverged: int
    unknown: int  # calls whose outcome a kill left unknown
    kills: int
    pauses: int
    seconds: float


def measure(settings: Settings) -> Report:
    """Return what became of runs of every form of parallel calls."""
    rounds = settings.amount(_ROUNDS, _SMOKE_ROUNDS)
    chance = random.Random(_SEED)
    here = languages()
    outcomes = [outcome_of(form, rounds, chance) for form in FORMS if language_of(form) in here]
    bad = [each.form for each in outcomes if each.twice or each.wrong or each.diverged]
    unfinished = [each.form for each in outcomes if each.completed != each.rounds]
    return Report(
        name="replays",
        title="Runs with parallel calls",
        tables=(_table(outcomes),),
        verdicts=(
            Criterion(
                "no call is made twice, and no run diverges", not bad, ", ".join(bad) or "none"
            ),
            Criterion("every run is finished", not unfinished, ", ".join(unfinished) or "all"),
        ),
        notes=(
            "`send` needs approval, `note` does not; neither may be repeated.",
            f"{_LANES} runs at a time; SIGKILL ends their process within {_LONGEST_SECONDS:g} s.",
            "The next process resumes what the one before left.",
            "A call with an unknown outcome is marked as made or not by what it really did.",
        ),
    )


def outcome_of(form: str, rounds: int, chance: random.Random) -> Outcome:
    """Run one form `rounds` times, under kills at random, and return what became of it."""
    began = time.monotonic()
    kills = 0
    with scratch_directory() as folder:
        while not _worker(form, rounds, str(folder), chance):
            kills += 1
        effects = [line.split(" ", 1) for line in _lines(Path(folder, "effects"))]
        notes = Counter(line.split()[1] for line in _lines(Path(folder, "notes")))
        done: dict[str, list[str]] = {}
        for run, what in effects:
            done.setdefault(run, []).append(what)
        expected = expected_of(form)
        with Runs(str(Path(folder, "runs.db"))) as runs:
            states = Counter(each.state for each in runs.kept())
            names = [each.run for each in runs.kept()]
        twice = sum(bool(Counter(done.get(run, [])) - Counter(expected)) for run in names)
        missing = sum(bool(Counter(expected) - Counter(done.get(run, []))) for run in names)
    return Outcome(
        form, len(names), states["completed"], twice, missing + notes["wrong"], notes["diverged"],
        notes["unknown"], kills, notes["paused"], time.monotonic() - began,
    )  # fmt: skip


def _worker(form: str, rounds: int, folder: str, chance: random.Random) -> bool:
    """Run a process that works; kill it at some time, and tell whether it had finished before."""
    command = [sys.executable, "-c", _WORKER, form, str(rounds), folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if process.stdout.readline() != b"begun\n":
            raise InternalError(
                f"replays: the process that runs programs ended with {process.wait()}"
            )
        try:
            status = process.wait(chance.uniform(0, _LONGEST_SECONDS))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            return False
    if status:
        raise InternalError(f"replays: {form}: the process that runs programs ended with {status}")
    return True


_WORKER = (
    f"import sys; from {__name__} import work; work(sys.argv[1], int(sys.argv[2]), sys.argv[3])"
)


def work(form: str, rounds: int, folder: str) -> None:
    """Bring runs of one form to their end, until there are `rounds` of them."""
    effects, notes = (
        os.open(Path(folder, name), os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        for name in ("effects", "notes")
    )
    with Runs(str(Path(folder, "runs.db"))) as runs:
        broker = Broker(Offer([_tool("send", effects), _tool("note", effects)]), approve=runs.ask)
        with Sandbox(policy="strict", pool=_LANES, tools=broker) as sandbox:
            working = Workload(form, rounds, runs, sandbox, Path(folder), notes)
            print("begun", flush=True)
            lanes = [threading.Thread(target=working.go_on) for _ in range(_LANES)]
            for lane in lanes:
                lane.start()
            for lane in lanes:
                lane.join()
    os._exit(1 if working.failed else 0)


class Workload:
    """The runs of one form, as several threads of one process bring them to their end."""

    def __init__(
        self, form: str, rounds: int, runs: Runs, sandbox: Sandbox, folder: Path, notes: int
    ) -> None:
        self.failed = False
        self._form = form
        self._runs = runs
        self._sandbox = sandbox
        self._folder = folder
        self._notes = notes
        self._lock = threading.Lock()
        kept = runs.kept()
        self._left = [each.run for each in kept if each.state != "completed"]
        self._new = rounds - len(kept)

    def go_on(self) -> None:
        """Take one run after the other."""
        try:
            while (run := self._next()) is not None:
                self._finish(run)
        except BaseException:
            self.failed = True
            raise

    def _next(self) -> str | None:
        with self._lock:
            if self._left:
                return self._left.pop()
            self._new -= 1
            return "" if self._new >= 0 else None

    def _finish(self, run: str) -> None:
        if run:
            attempt = self._resumed(run)
        else:
            attempt = self._runs.start(self._sandbox, FORMS[self._form], language_of(self._form))
        for _ in range(_MOST_ATTEMPTS):
            if attempt.result.ok:
                break
            self._note(attempt)
            attempt = self._resumed(attempt.run)
        if not self._is_right(attempt.result.value) and not self._had_unknown(attempt.run):
            self._write(f"{attempt.run} wrong {attempt.result.value!r} {attempt.result.error!r}")

    def _is_right(self, value: object) -> bool:
        return bool(value == expected_of(self._form))

    def _had_unknown(self, run: str) -> bool:
        return any(line.startswith(f"{run} unknown") for line in _lines(self._folder / "notes"))

    def _note(self, attempt: RunAttempt) -> None:
        if attempt.result.status is SandboxStatus.PENDING:
            self._write(f"{attempt.run} paused")
        elif attempt.result.reason == "diverged":
            self._write(f"{attempt.run} diverged {attempt.result.error!r}")
        else:
            self._write(f"{attempt.run} failed {attempt.result.error!r}")

    def _resumed(self, run: str) -> RunAttempt:
        """Decide what a person decides, and resume a run."""
        shown = self._runs.show(run)
        unknown = [each for each in shown.calls if each.state is CallState.UNKNOWN]
        really = Counter(
            line.split(" ", 1)[1]
            for line in _lines(self._folder / "effects")
            if line.startswith(run)
        )
        for each in shown.calls:
            if each.state is CallState.DONE:
                really[json.loads(each.answer)] -= 1
        for each in unknown:
            what = f"{each.tool} {each.arguments['to']}"
            self._write(f"{run} unknown {what}")
            made = really[what] > 0
            really[what] -= made
            self._runs.mark(run, each.number, made=made, value=what)
        for approval in shown.approvals:
            self._runs.approve(approval.approval)
        return self._runs.resume(self._sandbox, run, abandoned=True)

    def _write(self, line: str) -> None:
        os.write(self._notes, f"{line}\n".encode())


def _tool(name: str, effects: int) -> Tool:
    def perform(arguments: dict[str, Any], caller: Caller) -> str:
        time.sleep(random.uniform(0, 0.003))  # a kill may come before the effect, and after it
        what = f"{name} {arguments['to']}"
        os.write(effects, f"{caller.id} {what}\n".encode())
        time.sleep(random.uniform(0, 0.003))
        return what

    spec = ToolSpec(
        name=name, owner=ToolOwner.DEVELOPER, risky=name == "send", parameters=_PARAMETERS
    )
    return Tool(spec, perform)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _table(outcomes: list[Outcome]) -> ReportTable:
    rows: list[tuple[Value, ...]] = [tuple(each) for each in outcomes]
    titles = (
        "form", "runs", "completed", "made twice", "wrong", "diverged", "unknown calls", "kills",
        "pauses", "seconds",
    )  # fmt: skip
    columns = tuple(Column(title, 0) for title in titles)
    return ReportTable(title="Runs by the form of their calls", columns=columns, rows=tuple(rows))
