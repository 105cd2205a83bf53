"""The tests in parts that run side by side: what `scripts/test` does without names of tests.

Most tests wait for cells, so there are two workers a processor.  Each takes the longest part that is
left, by the seconds that durations.json has for each file.  `record` writes that file anew.

A failed test fails the run.  At most _UNSTEADY tests are tried once more, alone, when all others have
ended, and the last line names them: of some 15,000, each on a busy machine, one may miss its turn.  No
test of security is (_NEVER_AGAIN), because a race there is a defect.  A test that hangs fails after five
minutes, with the stack of every thread.
"""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[1]
DURATIONS = ROOT / "tests" / "durations.json"
# These need no privilege and no network; the last two need user namespaces, for cells.
QUICK = (
    "tests/policies", "tests/harness/privacy", "tests/harness/schemas", "tests/harness/search",
    "tests/harness/text", "tests/runner/audit", "tests/runner/egress", "tests/test_documents.py",
    "tests/test_layout.py", "tests/test_wording.py",
    "tests/harness/test_sandbox.py", "tests/harness/test_session.py",
)  # fmt: skip
_NEVER_AGAIN = re.compile(
    r"tests/(escapes|faults|policies|runner)/|[^:]*(attack|credential|escape|hostile|(?<!s)kill|redact|refusal|trust)"
)
_UNSTEADY = 2
# These plant the same canaries and listeners on the host, so they are in one part.
_TOGETHER = tuple(
    f"tests/escapes/test_{name}.py"
    for name in (
        "payloads",
        "payloads_in_sessions",
        "payloads_in_containers",
        "payloads_in_images",
        "branches",
    )
)
_PARTS_A_WORKER = 5
_UNKNOWN_SECONDS = 5.0  # seconds of a file that was never timed
_PART_SECONDS = 2400
_AGAIN_SECONDS = 900
_FAILED = 1  # pytest's exit status if tests failed; a higher one: it could not run them
_NO_TESTS = 5  # pytest's exit status if all were deselected
_REPORT = os.environ.pop("CELLWRIGHT_TEST_REPORT", "")  # a test that runs tests reports nothing
_PYTEST = (sys.executable, "-Im", "pytest", "--timeout", "300", "-p", "no:cacheprovider")


class Part(NamedTuple):
    """Files of tests that one process runs."""

    files: list[str]
    seconds: float  # seconds that the files took before


class Outcome(NamedTuple):
    """The outcome of one test, as conftest reports it."""

    test: str
    outcome: str  # empty for what passed before and after the test itself
    seconds: float


def pytest_runtest_logreport(report: "pytest.TestReport") -> None:
    """Write the outcome for the process that runs the parts: conftest has this hook of pytest."""
    if _REPORT:
        is_step = report.when != "call" and report.outcome == "passed"
        line = json.dumps([report.nodeid, "" if is_step else report.outcome, report.duration])
        with open(_REPORT, "a") as file:
            file.write(f"{line}\n")


class Running:
    """A part and its process; `log` and `report` are files in a folder."""

    def __init__(self, part: Part, place: Path, options: Sequence[str]) -> None:
        self.log, self._report = place.with_suffix(".log"), place.with_suffix(".report")
        self._report.touch()
        self._due = time.monotonic() + _PART_SECONDS
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*_PYTEST, *options, *part.files], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=os.environ | {"CELLWRIGHT_TEST_REPORT": str(self._report)}, cwd=ROOT,
                process_group=0,  # Ctrl-C at a terminal reaches it once, by `close`
            )  # fmt: skip
        self.ended = os.pidfd_open(self.process.pid)

    def outcomes(self) -> list[Outcome]:
        lines = self._report.read_text().splitlines(keepends=True)
        return [Outcome(*json.loads(line)) for line in lines if line.endswith("\n")]

    def end_if_overdue(self) -> None:
        if time.monotonic() > self._due:
            self.process.kill()

    def close(self) -> None:
        """End the process as Ctrl-C does, so that what it made is removed."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.ended)


def test_files(places: Iterable[str]) -> list[str]:
    """Return the files of tests in folders, and the files that are named."""
    found = [
        path
        for place in places
        for path in ([ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("test_*.py"))
    ]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def divide(files: Sequence[str], seconds: Mapping[str, float], count: int) -> list[Part]:
    """Return `count` parts of about the same length, or fewer; the longest first."""
    together = [name for name in files if name in _TOGETHER]
    groups = [[name] for name in files if name not in _TOGETHER] + ([together] if together else [])
    parts: list[Part] = [Part([], 0) for _ in range(min(count, len(groups)))]
    units = [
        Part(group, sum(seconds.get(name, _UNKNOWN_SECONDS) for name in group)) for group in groups
    ]
    for unit in sorted(units, key=lambda each: -each.seconds):
        shortest = min(range(len(parts)), key=lambda n: parts[n].seconds)
        have = parts[shortest]
        parts[shortest] = Part([*have.files, *unit.files], have.seconds + unit.seconds)
    return sorted(parts, key=lambda part: -part.seconds)


def run(parts: list[Part], options: Sequence[str], workers: int, folder: Path) -> list[Running]:
    """Run parts side by side and return them, ended; print how far they are."""
    waiting, running, done = [*parts], list[Running](), list[Running]()
    progress = Progress(len(parts))
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                place = folder / f"part-{len(parts) - len(waiting)}"
                running.append(Running(waiting.pop(0), place, options))
            _wait(running, progress.seconds)
            for each in running:
                each.end_if_overdue()
            ended = [each for each in running if each.process.poll() is not None]
            running = [each for each in running if each not in ended]
            done += ended
            progress.show(done, running)
    finally:
        for each in running:
            each.close()
    for each in done:
        os.close(each.ended)
    return done


def _wait(running: Sequence[Running], seconds: float) -> None:
    """Wait until a part has ended, or it is time to print how far they are."""
    poll = select.poll()
    for each in running:
        poll.register(each.ended, select.POLLIN)
    poll.poll(seconds * 1000)


class Progress:
    """A line that says how far the parts are: each second on a terminal, else each minute."""

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._began = time.monotonic()
        self._is_terminal = sys.stdout.isatty()
        self.seconds = 1.0 if self._is_terminal else 60.0

    def show(self, done: Sequence[Running], running: Sequence[Running]) -> None:
        found = [one for each in (*done, *running) for one in each.outcomes()]
        ended = sum(bool(one.outcome) for one in found)
        failed = sum(one.outcome == "failed" for one in found)
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        line = (
            f"test: {len(done)} of {self._parts} parts done, {ended} tests, {failed} failed, "
            f"{minutes}:{seconds:02}"
        )
        if self._is_terminal:
            is_last = len(done) == self._parts
            print(f"\r{line}\x1b[K", end="\n" if is_last else "", flush=True)
        else:
            print(line, flush=True)


def main(arguments: Sequence[str]) -> int:
    """Run all tests, or with `quick` those that need nothing of the host; return the exit status."""
    mode = arguments[0] if arguments else ""
    is_quick = mode == "quick"
    files = test_files(QUICK if is_quick else ["tests"])
    workers = 2 * (os.cpu_count() or 1)
    seconds = json.loads(DURATIONS.read_text())
    parts = divide(files, seconds, workers * (1 if is_quick else _PARTS_A_WORKER))
    with tempfile.TemporaryDirectory() as folder:
        done = run(parts, ["-m", "not slow"] if is_quick else [], workers, Path(folder))
        found = [one for each in done for one in each.outcomes()]
        for each in done:
            print("".join(_worth_showing(each)), end="")
    if mode == "record":
        _record(found)
    failed = list(dict.fromkeys(one.test for one in found if one.outcome == "failed"))
    status = max(
        0 if (code := each.process.returncode) == _NO_TESTS else code % 256 for each in done
    )
    for test in failed:
        print(f"test: failed: {test}")
    unsteady = ""
    if status == _FAILED and failed and _pass_again(failed):
        status = 0
        unsteady = f"; unsteady, passed when tried again: {', '.join(failed)}"
    print(f"test: {summary(found)}{unsteady}")
    return status


def _worth_showing(part: Running) -> Iterator[str]:
    """Yield what a part that failed printed, and of another one the reasons why tests were skipped."""
    lines = part.log.read_text(errors="replace").splitlines(keepends=True)
    if part.process.returncode:
        yield from lines
    else:
        yield from (line for line in lines if line.startswith(("SKIPPED", "XFAIL")))


def summary(found: Sequence[Outcome]) -> str:
    """Return how many tests ended how, and which files took longest."""
    counts = [
        f"{sum(one.outcome == outcome for one in found)} {outcome}"
        for outcome in ("passed", "failed", "skipped")
    ]
    longest = sorted(_seconds_of_files(found).items(), key=lambda item: -item[1])[:5]
    return ", ".join(counts) + "; longest: " + ", ".join(f"{n} {s:.0f} s" for n, s in longest)


def _seconds_of_files(found: Iterable[Outcome]) -> dict[str, float]:
    taken: dict[str, float] = {}
    for one in found:
        name = one.test.partition("::")[0]
        taken[name] = taken.get(name, 0) + one.seconds
    return taken


def _record(found: Iterable[Outcome]) -> None:
    taken = {name: round(each, 1) for name, each in sorted(_seconds_of_files(found).items())}
    DURATIONS.write_text(json.dumps(taken, indent=0) + "\n")


def _pass_again(failed: Sequence[str]) -> bool:
    """Tell whether the failed tests are few, none of security, and pass when they are tried once more."""
    if len(failed) > _UNSTEADY or any(map(_NEVER_AGAIN.match, failed)):
        return False
    try:
        again = subprocess.run(
            [*_PYTEST, "-q", *failed], cwd=ROOT, timeout=_AGAIN_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return again.returncode == 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the parts end
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
    sys.exit(130)
