"""`Judge`: runs a program on its cases, each in a cell of its own, and says how it did.

Time is the CPU time that the cgroup of the cell counted.  It grows when other programs share caches and
cores, so a case that was above its limit is tried again while no other case of this judge runs, and its
least time counts; one that used twice the limit is not tried again.  Load can only make a program
slower: a case that was within its limit stays accepted.
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
from msgspec.structs import replace

from ....policies.errors import CellwrightError, ClosedError, LauncherLost, PolicyError
from ....policies.policy import MIB, Policy
from ....runner import channel
from ....runner.concurrency import NEVER
from ....runner.requests.result import SandboxResult
from ....runner.settings import PoolSettings
from ..languages.compiled import Build
from .checkers import (
    Checked,
    Checker,
    Compare,
    Interactor,
    ProgramChecker,
    by_exit_code,
    checker_called,
)
from .interaction import LIMITS, interact
from .rooms import Room, Rooms
from .verdicts import (
    GRACE,
    Case,
    CaseResult,
    JudgeLimits,
    Judgement,
    Verdict,
    checker_limits,
)

_LAUNCHER_BYTES = 16 * MIB  # a program's peak begins with that of the process that was forked
_WAITING = 0.1  # a program that used less of its share of the processors only waited
_TIMES = 3  # tries of a case near its limit
_KEPT_BYTES = 64 * MIB  # outputs and files of a judgement, which may have 10,000 cases
_BY_REASON = {
    "output": Verdict.OUTPUT_LIMIT,
    "memory": Verdict.MEMORY_LIMIT,
    "violation": Verdict.SECURITY_VIOLATION,
    "cpu_time": Verdict.TIME_LIMIT,
    "wall_time": Verdict.TIME_LIMIT,
    "validation": Verdict.COMPILE_ERROR,
    "cancelled": Verdict.INTERNAL_ERROR,
}
# Endings of an interactor that its program notices as a broken pipe; they come before what the program
# then did.
_BROKE_PIPE = (Verdict.OUTPUT_LIMIT, Verdict.INTERNAL_ERROR)


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A program to judge, and how."""

    source: str | Build
    language: str | None
    checker: ProgramChecker | Compare
    limits: JudgeLimits
    flags: tuple[str, ...] = ()
    sources: Mapping[str, str | bytes] = {}
    all: bool = False
    strict: bool = False
    compile_timeout: float | None = None
    cancel: int = NEVER
    spent: list[float] = []  # CPU seconds of each cell


class _Gate:
    """Lets many cases run side by side, or one alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._alone = False
        self._waiting = 0

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not (self._alone or self._waiting))
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: not (self._alone or self._running))
            self._waiting -= 1
            self._alone = True
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()


class Judge:
    """Judges programs under the policy of a sandbox; safe from many threads."""

    def __init__(
        self,
        policy: Policy,
        make: Callable[[Policy, PoolSettings], Room],
        at_once: int | None = None,
    ) -> None:
        """`make` returns a sandbox of another policy.  `at_once`: cases that run side by side, by
        default one a processor."""
        self._policy = policy
        self._make = make
        self._width = at_once or len(os.sched_getaffinity(0))
        self._threads = ThreadPoolExecutor(self._width, "cellwright-judge")
        self._gate = _Gate()
        self._rooms = Rooms(self._made)

    def judge(self, given: Submission, cases: Sequence[Case]) -> Judgement:
        """Return how a program did; raises PolicyError, LaunchError, ClosedError."""
        with self._rooms.lent(given.limits.without_times(), given.spent) as room:
            program, refused = self._compiled(room, given, len(cases))
            if refused:
                return replace(refused, cpu_seconds=sum(given.spent))
            judge_one = self._judge_of(room, given, program)
            done = self._each(judge_one, cases, given)
        failed = next((each for each in done if each.verdict is not Verdict.ACCEPTED), None)
        if failed is None and len(done) < len(cases):
            failed = CaseResult(verdict=Verdict.INTERNAL_ERROR, message="cancelled")
        return Judgement(
            verdict=failed.verdict if failed else Verdict.ACCEPTED, cases=tuple(done),
            total=len(cases), message=failed.message if failed else "",
            compile=program.compile if isinstance(program, Build) else None,
            cpu_seconds=sum(given.spent),
        )  # fmt: skip

    def _compiled(
        self, room: Room, given: Submission, total: int
    ) -> tuple[str | Build, Judgement | None]:
        """Return the program as `execute` takes it, and the judgement of one that does not compile."""
        source, language = given.source, given.language
        if isinstance(source, str):
            if language is None or not room.compiles(language):
                return source, None
            with self._gate.beside():
                source = room.compile(
                    source, language, files=given.sources, flags=given.flags,
                    compile_timeout=given.compile_timeout, cancel=given.cancel,
                )  # fmt: skip
        if source.ok:
            return source, None
        refused = Judgement(
            verdict=Verdict.COMPILE_ERROR, total=total, compile=source.compile,
            message=source.compile.error or "",
        )  # fmt: skip
        return source, refused

    def _judge_of(
        self, room: Room, given: Submission, program: str | Build
    ) -> Callable[[int, Case], CaseResult]:
        language = None if isinstance(program, Build) else given.language
        check = given.checker
        built = self._built(check, given.spent) if isinstance(check, ProgramChecker) else None
        run = _runner(room, program, language, given)

        def judge_one(number: int, case: Case) -> CaseResult:
            name = case.name or str(number + 1)
            try:
                if isinstance(check, Interactor) and built:
                    with self._gate.beside(), self._rooms.lent(None, given.spent) as own:
                        spoken = None if isinstance(built, Build) else check.language
                        result, checked = interact(
                            run, own, built, spoken, case, given.limits.output_bytes, given.cancel
                        )
                    found = _case_result(name, result, given, 1, lambda _: checked)
                    if found.verdict is Verdict.RUNTIME_ERROR and checked.verdict in _BROKE_PIPE:
                        return replace(found, verdict=checked.verdict, message=checked.message)
                    return found
                return self._run(name, case, given, run, self._check_of(given, built, case))
            except (ClosedError, PolicyError):
                raise
            except CellwrightError as error:
                return CaseResult(verdict=Verdict.INTERNAL_ERROR, name=name, message=str(error))

        return judge_one

    def _run(
        self, name: str, case: Case, given: Submission, run: "Run",
        check: Callable[[str], Checked],
    ) -> CaseResult:  # fmt: skip
        """Run a case, again if others may have made it slow, and check its output."""
        with self._gate.beside():
            result = _run_again_if_lost(run, case)
        times, limit = 1, given.limits.time_seconds
        while times < _TIMES and _may_be_slow(result, limit):
            with self._gate.alone():
                again = _run_again_if_lost(run, case)
            times += 1
            if _seconds(again) <= _seconds(result) or result.reason == "wall_time":
                result = again
            if result.reason == "wall_time":
                break
        return _case_result(name, result, given, times, check)

    def _check_of(
        self, given: Submission, built: Build | str | None, case: Case
    ) -> Callable[[str], Checked]:
        check = given.checker
        if case.expected is None and not built:
            return lambda _: Checked(Verdict.ACCEPTED, "", 1.0)
        if isinstance(check, ProgramChecker):
            return lambda output: self._ask(built or check.source, check, case, output, given)
        expected = _text(case.expected or "")
        return lambda output: check(output, expected)

    def _ask(
        self, built: Build | str, check: ProgramChecker, case: Case, output: str, given: Submission
    ) -> Checked:
        """Have the checker, in a cell of its own, judge an output."""
        language = None if isinstance(built, Build) else check.language

        def ask(output: str | bytes) -> SandboxResult:
            files = {"input": case.input, "output": output, "answer": case.expected or ""}
            with self._gate.beside(), self._rooms.lent(None, given.spent) as room:
                return room.execute(
                    built, language, files=files, arguments=[*files], cancel=given.cancel
                )

        done = ask(output)
        if done.reason in LIMITS and ask(case.expected or "").reason not in LIMITS:
            # A checker that can read the answer failed because of this output.
            words = f"the checker failed on this output: {done.error}"
            return Checked(Verdict.WRONG_ANSWER, words)
        if done.reason not in ("exit", "exception"):
            return Checked(Verdict.INTERNAL_ERROR, f"the checker failed: {done.error}")
        return by_exit_code(done.exit_code, done.stderr or done.stdout)

    def _built(self, check: ProgramChecker, spent: list[float]) -> Build | str:
        """Return a checker as `execute` takes it; raises PolicyError if it does not compile."""
        with self._rooms.lent(None, spent) as room:
            if not room.compiles(check.language):
                return check.source
            build = room.compile(check.source, check.language, files=check.files, flags=check.flags)
        if not build.ok:
            raise PolicyError(f"checker: it does not compile: {build.output[:2000]}")
        return build

    def _each(
        self, judge_one: Callable[[int, Case], CaseResult], cases: Sequence[Case], given: Submission
    ) -> list[CaseResult]:
        """Return the results of cases in their order, up to the first that failed unless `all`, and up
        to the cancellation."""
        done: list[CaseResult] = []
        room = _KEPT_BYTES
        waiting: deque[Future[CaseResult]] = deque()
        left = iter(enumerate(cases))
        try:
            while True:
                if given.cancel != NEVER and channel.has_news(given.cancel):
                    left = enumerate(())
                while len(waiting) < self._width and (pair := next(left, None)):
                    waiting.append(self._threads.submit(judge_one, *pair))
                if not waiting:
                    return done
                result = waiting.popleft().result()
                room -= _kept_bytes(result)
                if room < 0 and done:
                    result = replace(result, stdout="", stderr="", artifacts=(), dropped=True)
                done.append(result)
                if result.verdict is not Verdict.ACCEPTED and not given.all:
                    return done
        finally:
            for each in waiting:
                each.cancel()

    def _made(self, limits: JudgeLimits | None) -> Room:
        policy = self._policy
        if limits is None:
            policy = replace(policy, name="checkers", limits=checker_limits(policy.limits))
        else:
            policy = limits.under(policy)
        settings = PoolSettings(
            size=min(PoolSettings().size, 2 * self._width), running=2 * self._width
        )
        return self._make(policy, settings)

    def close(self) -> None:
        """End every cell and launcher; closing twice is fine."""
        self._rooms.close()
        self._threads.shutdown()


Run = Callable[[Case, Callable[..., None] | None], SandboxResult]


def _runner(room: Room, program: str | Build, language: str | None, given: Submission) -> Run:
    wall, cpu = given.limits.backstop(), GRACE * given.limits.time_seconds

    def run(case: Case, on_streams: Callable[..., None] | None) -> SandboxResult:
        files = case.files or {}
        if on_streams:
            return room.execute_on_streams(
                program, language, on_streams, files, case.arguments, wall, cpu, given.cancel
            )
        return room.execute(
            program, language, stdin=case.input, files=files or None, arguments=case.arguments,
            timeout=wall, cpu_seconds=cpu, collect=case.collect, cancel=given.cancel,
        )  # fmt: skip

    return run


def _run_again_if_lost(run: Run, case: Case) -> SandboxResult:
    """Run a case again if its launcher ended, and all its cells with it: another cell, a neighbour or
    the host's lack of memory may have been the cause.  A judged program changes nothing outside."""
    for _ in range(_TIMES - 1):
        with contextlib.suppress(LauncherLost):
            return run(case, None)
    return run(case, None)


def submission(
    source: "str | bytes | Build", language: str | None, checker: Checker, limits: JudgeLimits,
    flags: Sequence[str], sources: Mapping[str, str | bytes] | None, *, every: bool, strict: bool,
    compile_timeout: float | None = None, cancel: int = NEVER,
) -> Submission:  # fmt: skip
    """Return what `judge` is given, checked; raises PolicyError."""
    if not isinstance(limits, JudgeLimits):
        raise PolicyError(f"limits: must be JudgeLimits, got {limits!r}")
    limits.check_times()
    text = source.decode() if isinstance(source, bytes) else source
    spoken = language or ("python" if isinstance(text, str) else None)
    return Submission(
        source=text, language=spoken, checker=checker_called(checker), limits=limits,
        flags=tuple(flags), sources=dict(sources or {}), all=every, strict=strict,
        compile_timeout=compile_timeout, cancel=cancel,
    )  # fmt: skip


def _may_be_slow(result: SandboxResult, limit: float) -> bool:
    """Tell whether a case failed because of its time, which others may have made longer.

    A program that only waited is not tried again: it would make all other cases wait for its wall time.
    On a busy machine one that wanted to run had a share of the processors.
    """
    if result.reason == "wall_time":
        share = _fair_share()
        waiting = _WAITING * share * result.usage.wall_seconds
        return share < 1 and waiting < _seconds(result) <= limit
    return result.reason != "cpu_time" and limit < _seconds(result) <= GRACE * limit


def _fair_share() -> float:
    """Return the part of a processor that each program could have in the last minute."""
    return min(1.0, len(os.sched_getaffinity(0)) / max(os.getloadavg()[0], 1.0))


def _kept_bytes(result: CaseResult) -> int:
    files = sum(len(each.data) for each in result.artifacts)
    return len(result.stdout) + len(result.stderr) + files


def _seconds(result: SandboxResult) -> float:
    return result.usage.cpu_user_seconds + result.usage.cpu_system_seconds


def _case_result(
    name: str, result: SandboxResult, given: Submission, times: int,
    check: Callable[[str], Checked],
) -> CaseResult:  # fmt: skip
    verdict, message, points = _verdict(result, given), result.error or "", 0.0
    if verdict is Verdict.ACCEPTED:
        verdict, message, points = check(result.stdout)
    return CaseResult(
        verdict=verdict, name=name, seconds=_seconds(result),
        wall_seconds=result.usage.wall_seconds, memory_bytes=result.usage.memory_peak_bytes,
        stdout=result.stdout, stderr=result.stderr, exit_code=result.exit_code,
        signal=result.signal, message=message, violations=len(result.violations), times=times,
        points=points, artifacts=result.artifacts,
    )  # fmt: skip


def _verdict(result: SandboxResult, given: Submission) -> Verdict:
    """Return the verdict of an execution before its output is checked."""
    usage = result.usage
    too_long = max(
        len(result.stdout) + result.truncated.get("stdout", 0),
        len(result.stderr) + result.truncated.get("stderr", 0),
    )
    if result.reason in _BY_REASON:
        return _BY_REASON[result.reason]
    if _seconds(result) > given.limits.time_seconds:
        return Verdict.TIME_LIMIT
    if given.strict and result.violations:
        return Verdict.SECURITY_VIOLATION
    if usage.killed_for_memory or _was_too_large(result, given.limits.memory_bytes):
        return Verdict.MEMORY_LIMIT
    if too_long > given.limits.output_bytes:
        return Verdict.OUTPUT_LIMIT
    return Verdict.ACCEPTED if result.ok else Verdict.RUNTIME_ERROR


def _was_too_large(result: SandboxResult, limit: int) -> bool:
    """Tell whether a program without a memory cgroup had more memory than its limit: RLIMIT_AS, which
    stands in, has room for what runtimes reserve."""
    has_cgroup = "cgroup_memory" in result.layers
    return not has_cgroup and result.usage.memory_peak_bytes > max(limit, _LAUNCHER_BYTES)


def _text(data: str | bytes) -> str:
    return data.decode(errors="replace") if isinstance(data, bytes) else data
