"""`Evaluating`, the part of `Sandbox` that compiles, judges and maps."""

import threading
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Unpack

from msgspec.structs import replace

from ....policies.errors import CellwrightError, ClosedError, PolicyError
from ....policies.policy import Policy
from ....runner.concurrency import NEVER
from ....runner.requests.request import Streams
from ....runner.requests.result import SandboxResult
from ....runner.settings import PoolSettings
from ..parameters import CallOptions, CompileArguments, FileContent
from .executing import Executing, cancellable, checked_cancel

if TYPE_CHECKING:
    from ....policies.languages.table import LanguageTable
    from ..judging.checkers import Checker
    from ..judging.judge import Judge, Submission
    from ..judging.verdicts import Case, JudgeLimits, Judgement
    from ..languages.compiled import Build

_LOCK = threading.Lock()


class Evaluating(Executing):
    """Compiles programs, judges them by cases, and runs many of them."""

    _judge: "Judge | None" = None  # once it is needed
    _is_closed = False

    @property
    @abstractmethod
    def policy(self) -> Policy:
        """The plan of every cell of this sandbox."""

    @abstractmethod
    def sibling(self, policy: Policy, pool: PoolSettings) -> "Evaluating":
        """Return a sandbox of another policy."""

    def _room(self, policy: Policy, pool: PoolSettings) -> "Evaluating":
        """Return the sandbox of a judge."""
        return self.sibling(policy, pool)

    @abstractmethod
    def _compile(self, given: CompileArguments) -> "Build":
        """Carry out a call of `compile`."""

    def compile(
        self, source: str | bytes | None = None, language: str = "cpp", *,
        files: Mapping[str, FileContent] | None = None, flags: Sequence[str] = (),
        compile_timeout: float | None = None, cancel: int = NEVER,
    ) -> "Build":  # fmt: skip
        """Compile a program and return what `execute` runs in place of source; one that was compiled
        before, with the same flags, compiler and policy, is in the store of builds.

        `language`: c, cpp, rust, go, java or another compiled one that `cellwright languages` lists.
        `files`: further sources, path -> content; without `source` the main one is among them.
        `compile_timeout`: seconds for the compiler, at most those of its language. They are CPU time,
        divided by the processors of its cell, so that other programs do not decide whether it ends in
        time; on the clock it has five times as long, and at least 10 s. `cancel`: a descriptor; once it
        is readable the compiler is ended.
        The compiler runs in a cell of its own, without network, with limits of its own.

        A program that does not compile is a Build that is not `ok`, with the compiler's `output`.
        Raises PolicyError for invalid arguments, LaunchError that names the package of a compiler that
        the host does not have, BusyError, ClosedError.
        """
        given = CompileArguments.of(
            "compile", source=source, language=language, files=files, flags=flags,
            compile_timeout=compile_timeout,
        )  # fmt: skip
        return self._compile(replace(given, cancel=checked_cancel(cancel)))

    acompile = cancellable(compile)

    def judge(
        self, source: "str | bytes | Build", language: str | None = None,
        cases: "Sequence[Case]" = (), *, checker: "Checker" = "tokens",
        limits: "JudgeLimits | None" = None, all: bool = False, strict: bool = False,
        flags: Sequence[str] = (), sources: Mapping[str, str | bytes] | None = None,
        compile_timeout: float | None = None, cancel: int = NEVER,
    ) -> "Judgement":  # fmt: skip
        """Judge a program by its cases, each in a fresh cell, several at once.

        `checker`: "tokens", "lines", "exact", "floats", "unordered", Floats(...), a function of output
        and expected output that returns Checked, or a ProgramChecker or Interactor in cells of their
        own. The program cannot see the expected output, other cases, or a checker. `limits`: of each
        case, by default JudgeLimits(), and for a daemon at most its policy's; time is CPU time, so a
        verdict does not depend on other programs. `all`: judge every case, not only up to the first
        that fails. `strict`: refused attempts (`violations`) fail a case.
        `flags`, `sources`, `compile_timeout`: of the compiler, as in `compile`. `cancel`: a descriptor;
        once it is readable what runs is ended, and the verdict is an internal error.

        The program's behaviour is in the Judgement. Raises PolicyError for invalid arguments or a
        checker that does not compile, LaunchError if the language is not installed, ClosedError.
        """
        from ..judging.judge import submission

        if not cases:
            raise PolicyError(
                "cases: needs at least one: without a case every program would be right"
            )
        given = submission(
            source, language, checker, limits or self._default_limits(), flags, sources, every=all,
            strict=strict, compile_timeout=compile_timeout, cancel=checked_cancel(cancel),
        )  # fmt: skip
        return self._judged(given, cases)

    def _default_limits(self) -> "JudgeLimits":
        from ..judging.verdicts import JudgeLimits

        return JudgeLimits()

    def _judged(self, given: "Submission", cases: "Sequence[Case]") -> "Judgement":
        """Carry out a call of `judge`."""
        return self._judge_of_cases().judge(given, cases)

    ajudge = cancellable(judge)

    def map(
        self, programs: Iterable[str | bytes], language: str | None = None, *,
        ordered: bool = True, return_errors: bool = False, at_once: int | None = None,
        **options: Unpack[CallOptions],
    ) -> Iterator[SandboxResult | CellwrightError]:  # fmt: skip
        """Run programs, and yield the result of each once.

        `ordered`: in their order, or else as they end.  `return_errors`: yield the CellwrightError of a
        call in the place of its result, instead of raising the first.  `at_once`: how many run at once,
        by default one a processor and two more.  The other arguments are those of `execute`, the same
        for all.  Programs are read as results are taken, so that there may be any number; closing the
        iterator cancels what has not started.
        """
        from .background import mapped, width_of

        width = width_of(at_once)

        def execute(code: str | bytes) -> SandboxResult:
            return self._execute(self._call("map", code, language, options))

        return mapped(execute, programs, width, return_errors=return_errors, ordered=ordered)

    async def amap(
        self, programs: Iterable[str | bytes], language: str | None = None, *,
        ordered: bool = True, return_errors: bool = False, at_once: int | None = None,
        **options: Unpack[CallOptions],
    ) -> AsyncIterator[SandboxResult | CellwrightError]:  # fmt: skip
        """`map` for asyncio callers; the event loop goes on while programs run."""
        results = self.map(
            programs,
            language,
            ordered=ordered,
            return_errors=return_errors,
            at_once=at_once,
            **options,
        )
        try:
            while (result := await self._in_thread(lambda: next(results, None))) is not None:
                yield result
        finally:
            await self._in_thread(results.close)  # type: ignore[attr-defined]  # it is a generator

    def compiles(self, language: str) -> bool:
        """Tell whether programs of a language are compiled; raises PolicyError for an unknown one."""
        from ..checks import check_language

        table = self._language_table()
        entry = table.called(check_language(language, table=table))
        return entry is not None and entry.is_compiled

    def _language_table(self) -> "LanguageTable":
        from ....policies.languages.table import language_table

        return language_table()

    def execute_on_streams(
        self, code: "str | Build", language: str | None, on_streams: Callable[[Streams], None],
        files: Mapping[str, FileContent], arguments: Sequence[str],
        timeout: float | None = None, cpu_seconds: float | None = None, cancel: int = NEVER,
    ) -> SandboxResult:  # fmt: skip
        """Execute a program whose standard input and output are given to `on_streams`, not captured."""
        given = self._call(
            "execute", code, language,
            {
                "files": files or None, "arguments": arguments, "timeout": timeout,
                "cpu_seconds": cpu_seconds,
            },
        )  # fmt: skip
        return self._execute(replace(given, on_streams=on_streams, cancel=cancel))

    def _judge_of_cases(self) -> "Judge":
        from ..judging.judge import Judge

        with _LOCK:
            if self._is_closed:
                raise ClosedError("the sandbox was closed")
            if self._judge is None:
                self._judge = Judge(self.policy, self._room)
            return self._judge

    def _close_judge(self) -> None:
        """End the judge's cells; each implementation of `close` calls this."""
        with _LOCK:
            self._is_closed, judge = True, self._judge
        if judge:
            judge.close()
