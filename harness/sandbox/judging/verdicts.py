"""Arguments and results of a judge: `Case`, `JudgeLimits`, `CaseResult`, `Judgement`."""

import enum
from collections.abc import Mapping

import msgspec

from ....policies.errors import PolicyError
from ....policies.policy import MIB, Limits, Policy, check_limit
from ....runner.cells.workspace import Artifact
from ....runner.requests.result import CompileResult

_LEAST_WALL_SECONDS = (
    10.0  # seconds of the backstop; a cell that waits for a processor rarely needs more
)
_WALL_TIMES = 5.0
_MOST_SECONDS = 3600.0
# Beside others a program uses more CPU time for the same work: caches and hyperthreads are shared.
GRACE = 2.0


class Verdict(enum.Enum):
    """How a case or a program was judged."""

    ACCEPTED = "accepted"
    WRONG_ANSWER = "wrong answer"
    PRESENTATION_ERROR = "presentation error"
    TIME_LIMIT = "time limit exceeded"
    MEMORY_LIMIT = "memory limit exceeded"
    OUTPUT_LIMIT = "output limit exceeded"
    RUNTIME_ERROR = "runtime error"
    COMPILE_ERROR = "compile error"
    SECURITY_VIOLATION = "security violation"
    INTERNAL_ERROR = "internal error"


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One case: the program's input and the expected output.

    input: its standard input
    expected: the right output, which only the checker sees; None if every output is right that the
        checker or interactor accepts
    arguments, files: of the program, path below /workspace -> content
    collect: globs of files that it makes, which its result brings back
    """

    input: str | bytes = b""
    expected: str | bytes | None = None
    name: str = ""
    arguments: tuple[str, ...] = ()
    files: Mapping[str, str | bytes] = {}
    collect: tuple[str, ...] = ()


class JudgeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of each case.

    time_seconds: CPU time of its cell, user and system, of all threads and processes
    wall_seconds: a backstop for programs that wait; by default five times `time_seconds`, at least 10 s
    memory_bytes: memory of its cell, files in /workspace and /tmp too
    output_bytes: of each of the two streams
    stack_bytes: stack of its main thread
    processes: processes and threads
    """

    time_seconds: float = 2.0
    wall_seconds: float | None = None
    memory_bytes: int = 256 * MIB
    output_bytes: int = 16 * MIB
    stack_bytes: int = 64 * MIB
    processes: int = 64

    def check_times(self) -> None:
        """Raise PolicyError for an invalid time."""
        check_limit("limits.time_seconds", self.time_seconds, limit="cpu_seconds")
        if max(self.backstop(), GRACE * self.time_seconds) > _MOST_SECONDS:
            raise PolicyError(
                f"limits: no time may be more than {_MOST_SECONDS:g} s with its grace"
            )

    def without_times(self) -> "JudgeLimits":
        """Return the limits of space alone: cases of all times can share launchers."""
        return msgspec.structs.replace(self, time_seconds=1.0, wall_seconds=None)

    def check_within(self, most: Limits, owner: str) -> None:
        """Raise PolicyError for limits above `most`, which `owner` allows."""
        for name, asked, allowed in (
            ("memory_bytes", self.memory_bytes, most.memory_bytes),
            ("output_bytes", self.output_bytes, most.output_bytes),
            ("processes", self.processes, most.processes),
            ("wall_seconds", self.backstop(), most.wall_seconds),
        ):
            if asked > allowed:
                raise PolicyError(f"{name}: {owner} allows at most {allowed:g}, got {asked:g}")

    def within(self, most: Limits) -> "JudgeLimits":
        """Return these limits, lowered to `most`."""
        return msgspec.structs.replace(
            self, memory_bytes=min(self.memory_bytes, most.memory_bytes),
            output_bytes=min(self.output_bytes, most.output_bytes),
            processes=min(self.processes, most.processes),
            time_seconds=min(self.time_seconds, most.wall_seconds),
            wall_seconds=min(self.backstop(), most.wall_seconds),
        )  # fmt: skip

    def under(self, policy: Policy) -> Policy:
        """Return `policy` with these limits of space; raises PolicyError for an invalid one."""
        for name in ("memory_bytes", "output_bytes", "stack_bytes", "processes"):
            check_limit(f"limits.{name}", getattr(self, name), whole=True, limit=name)
        limits = msgspec.structs.replace(
            policy.limits,
            cpu_seconds=_MOST_SECONDS, wall_seconds=_MOST_SECONDS,
            memory_bytes=self.memory_bytes, stack_bytes=self.stack_bytes, processes=self.processes,
            output_bytes=2 * self.output_bytes, output_total_bytes=2 * self.output_bytes,
        )  # fmt: skip
        return msgspec.structs.replace(policy, name=f"{policy.name}, judged", limits=limits)

    def backstop(self) -> float:
        """Return the seconds of wall time after which a case is ended."""
        if self.wall_seconds is None:
            return max(_LEAST_WALL_SECONDS, _WALL_TIMES * self.time_seconds)
        check_limit("limits.wall_seconds", self.wall_seconds)
        if self.wall_seconds < self.time_seconds:
            raise PolicyError(
                "limits.wall_seconds: must not be less than time_seconds, which is CPU time"
            )
        return self.wall_seconds


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """How one case was judged.

    seconds: CPU time, user and system; `wall_seconds` also counts waiting
    memory_bytes: the peak of its cell; 0 where the host does not count
    message: the checker's words, or the error
    times: 2 if it was tried again alone, because others ran beside it and the limit was near
    points: of a checker that gives points, else 1 or 0
    artifacts: the files that `collect` of the case asked for
    dropped: whether its outputs and files were left out, because those of the cases before took 64 MiB
    """

    verdict: Verdict
    name: str = ""
    seconds: float = 0.0
    wall_seconds: float = 0.0
    memory_bytes: int = 0
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    signal: int | None = None
    message: str = ""
    violations: int = 0
    times: int = 1
    points: float = 0.0
    artifacts: tuple[Artifact, ...] = ()
    dropped: bool = False


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict of a program: that of the first case that failed, by their order.

    cases: those that were judged; the rest was left out after the first failure unless all were asked
        for
    compile: how the compiler ended, for compiled languages
    cpu_seconds: CPU time of all that ran: compilers, every try of every case, checkers
    """

    verdict: Verdict
    cases: tuple[CaseResult, ...] = ()
    total: int = 0
    compile: CompileResult | None = None
    message: str = ""
    cpu_seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every case was accepted."""
        return self.verdict is Verdict.ACCEPTED

    @property
    def passed(self) -> int:
        """The number of accepted cases."""
        return sum(each.verdict is Verdict.ACCEPTED for each in self.cases)

    @property
    def score(self) -> float:
        """The mean of the cases' points, from 0 to 1."""
        return sum(each.points for each in self.cases) / self.total if self.total else 0.0

    @property
    def seconds(self) -> float:
        """The CPU time of the slowest case."""
        return max((each.seconds for each in self.cases), default=0.0)

    @property
    def memory_bytes(self) -> int:
        """The peak of the case that needed most memory."""
        return max((each.memory_bytes for each in self.cases), default=0)


def checker_limits(limits: Limits) -> Limits:
    """Return the limits of checkers and interactors: those of the policy, with room for an output."""
    return msgspec.structs.replace(
        limits, workspace_bytes=max(limits.workspace_bytes, 128 * MIB),
        memory_bytes=max(limits.memory_bytes, 512 * MIB),
    )  # fmt: skip
