"""`TableLanguages`: compiles programs of the languages of the table, once each, and runs them."""

import glob
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec.structs import replace

from ....policies.argument_checks import check_names
from ....policies.errors import ClosedError, PolicyError
from ....policies.languages import BUILDS, as_environment
from ....policies.languages.table import LanguageEntry, LanguageTable, fill
from ....policies.policy import MIB, Limits, Policy, check_limit
from ....policies.profiles.loading import load_policy
from ....runner.host.interpreters import find_runner, program_of
from ....runner.host.runtime import find_runtime
from ....runner.messages import Become, InputFile, new_execution_id
from ....runner.requests.request import Request
from ....runner.requests.result import CompileResult, SandboxResult, SandboxStatus
from ..calls.call_request import as_bytes, source_files
from ..parameters import CallArguments, FileContent
from .build_store import BuildStore, build_store_directory

if TYPE_CHECKING:
    from ....runner.host.interpreters import HostInterpreter
    from ....runner.supervisor import Supervisor, SupervisorSettings
    from ..parameters import CallOptions, CompileArguments, ProgramOptions

__all__ = ["Build", "Prepared", "TableLanguages", "opened_build_store"]

_PROGRAM_FILE = "/tmp/"  # noqa: S108 - of the cell: messages of interpreters name it
_BUILD = "build"  # below /workspace of the compiler's cell
_LEAST_BACKSTOP, _BACKSTOP_TIMES = 10.0, 5.0  # seconds of wall time
_RECORD = Callable[[Request, str], Callable[[SandboxResult], SandboxResult]]


class Build(msgspec.Struct, frozen=True, kw_only=True):
    """A program that was compiled: `execute` takes it in place of source. `compile` says how the
    compiler ended. The build is in the user's store of builds, and is made again if it is gone.

    language, source, files, flags: as `Sandbox.compile` was given them
    """

    language: str
    source: str
    files: dict[str, bytes] = {}
    flags: tuple[str, ...] = ()
    compile: CompileResult

    @property
    def ok(self) -> bool:
        """Whether the compiler succeeded."""
        return self.compile.ok

    @property
    def output(self) -> str:
        """The compiler's output."""
        return self.compile.output


class _Program(msgspec.Struct, frozen=True):
    """A program of the table: its language, and the files from which it is compiled."""

    entry: LanguageEntry
    sources: tuple[InputFile, ...]
    flags: tuple[str, ...]


class _BuildOutcome(msgspec.Struct, frozen=True):
    """The outcome of a compiler, and the name of its build."""

    result: CompileResult
    name: str


class Prepared(NamedTuple):
    """A request that runs a program of the table, the supervisor for it, and how its compiler ended."""

    supervisor: "Supervisor"
    request: Request
    compile: CompileResult | None


class TableLanguages:
    """The compilers and programs of one sandbox; safe from many threads.

    A compiler runs in a cell without network, tools or packages, which shows the paths of the profile
    standard and of its language's table. `settings` make supervisors; `record` records the start of a
    compiler in the trail and returns the function that records its end.
    """

    def __init__(
        self, policy: Policy, table: LanguageTable, settings: "SupervisorSettings",
        executable: str, store: BuildStore,
    ) -> None:  # fmt: skip
        self._policy = policy
        self._table = table
        self._settings = settings
        self._executable = executable
        self._store = store
        self._lock = threading.Lock()
        self._making: dict[str, threading.Lock] = {}
        self._compile_policies: dict[str, Policy] = {}  # by language; each takes milliseconds
        self._supervisors: dict[str, Supervisor] = {}
        self._is_closed = False

    def compile(self, given: "CompileArguments", record: _RECORD) -> Build:
        """Compile a program, unless that was done; raises PolicyError, LaunchError, BusyError."""
        entry = self._entry(given.language)
        if not entry.is_compiled:
            raise PolicyError(f"compile: {entry.title} is not compiled; execute runs it")
        files = dict(given.files or {})
        source = files.pop(entry.source, None) if given.source is None else given.source
        if source is None:
            raise PolicyError(f"compile: give the source, or {entry.source!r} in files")
        text = as_bytes("source", source).decode()
        program = _program(entry, text, files, given.flags)
        seconds = checked_compile_timeout(given.compile_timeout)
        compiled = self._compiled(program, seconds, given.cancel, record)
        _, *others = program.sources
        return Build(
            language=entry.name, source=text, files={file.path: file.data for file in others},
            flags=program.flags, compile=compiled.result,
        )  # fmt: skip

    def prepare(
        self, given: "CallArguments", request: Request, record: _RECORD
    ) -> SandboxResult | Prepared:
        """Compile a program of a language of the table, unless that was done; return how to run it, or
        the result of one that does not compile."""
        program = _program(
            self._entry(given.language), request.code, given.sources or {}, given.flags
        )
        compiled: _BuildOutcome | None = None
        if program.entry.is_compiled:
            asked_at = time.monotonic()
            allowed = checked_compile_timeout(given.compile_timeout)
            compiled = self._compiled(program, allowed, request.cancel, record)
            if not compiled.result.ok:
                seconds = time.monotonic() - asked_at
                return _not_compiled(program.entry, compiled.result, request, seconds)
        supervisor = self._running(program.entry)
        become = self._become(program, compiled, request, supervisor.plan.environment)
        return Prepared(
            supervisor, replace(request, become=become), compiled.result if compiled else None
        )

    def _entry(self, language: str) -> LanguageEntry:
        entry = self._table.called(language) if isinstance(language, str) else None
        if entry is None:
            known = ", ".join(each.name for each in self._table if each.is_compiled)
            raise PolicyError(f"language: must be one of {known}, got {language!r}")
        return entry

    def _become(
        self, program: _Program, compiled: _BuildOutcome | None, request: Request,
        environment: Mapping[str, str],
    ) -> Become:  # fmt: skip
        """Return the command that runs a program, with its files."""
        entry, source = program.entry, _PROGRAM_FILE + program.entry.source
        values = self._values(self._policy, f"{BUILDS}/{compiled.name if compiled else ''}", source)
        argv = fill(entry.run, values, {})
        if not argv[0].startswith("/"):
            argv = (os.path.realpath(program_of(entry, argv[0])), *argv[1:])
        own = dict(
            zip(entry.environment, fill((*entry.environment.values(),), values, {}), strict=True)
        )
        variables = {**environment, **own, **request.environment}
        if request.inputs != b"{}":
            variables |= as_environment(request.inputs)
        files = request.files
        if compiled is None:
            files = (InputFile(source, request.code.encode()), *program.sources[1:], *files)
        return Become((*argv, *request.arguments), variables, "/workspace", files)

    def _values(self, policy: Policy, build: str, source: str) -> dict[str, str]:
        limits = policy.limits
        return {
            "build": build, "source": source,
            "memory_mib": str(limits.memory_bytes // MIB),
            "processors": str(max(1, round(limits.cpus))),
        }  # fmt: skip

    def _compiled(
        self, program: _Program, seconds: float, cancel: int, record: _RECORD
    ) -> _BuildOutcome:
        """Compile a program, or return the outcome of an earlier time; threads that ask for the same
        program wait for the first."""
        store = self._store
        compiler = os.path.realpath(self._compiler_of(program.entry))
        stat = os.stat(compiler)
        policy = self._compile_policy(program.entry)
        name = store.name_of(
            msgspec.msgpack.encode(program), msgspec.msgpack.encode(policy),
            f"{compiler} {stat.st_mtime_ns} {stat.st_size}".encode(),
        )  # fmt: skip
        if found := store.find(name):
            return _BuildOutcome(replace(found, cached=True), name)
        with self._lock:
            making = self._making.setdefault(name, threading.Lock())
        try:
            with making:
                if found := store.find(name):
                    return _BuildOutcome(replace(found, cached=True), name)
                result = self._compile(program, policy, name, seconds, cancel, record)
                return _BuildOutcome(result, name)
        finally:
            with self._lock:
                self._making.pop(name, None)

    def _compile(
        self, program: _Program, policy: Policy, name: str, seconds: float, cancel: int,
        record: _RECORD,
    ) -> CompileResult:  # fmt: skip
        supervisor = self._supervisor(
            f"compile {program.entry.name}", lambda: self._settings.compiling(policy)
        )
        entry, workspace = program.entry, "/workspace"
        values = self._values(policy, f"{workspace}/{_BUILD}", entry.source)
        # gcc takes -x.c for an option, and @x.c for a file of arguments
        sources = tuple(
            f"./{file.path}" if file.path[0] in "-@" else file.path
            for file in program.sources
            if os.path.splitext(file.path)[1] in entry.extensions
        )
        argv = fill(entry.compile, values, {"flags": program.flags, "sources": sources})
        argv = (self._compiler_of(entry), *argv[1:])
        own = fill((*entry.compile_environment.values(),), values, {})
        variables = supervisor.plan.environment | dict(
            zip(entry.compile_environment, own, strict=True)
        )
        # A directory is only made for a file in it.
        files = (*program.sources, InputFile(f"{_BUILD}/.made", b""))
        request = Request(
            code=" ".join(argv), become=Become(argv, variables, workspace, files), files=files,
            limits=_within(policy.limits, seconds), collect=(f"{_BUILD}/*",), cancel=cancel,
            execution_id=new_execution_id(),
        )  # fmt: skip
        end = record(request, f"compile {entry.name}")
        done = end(supervisor.execute(request))
        made = {
            artifact.name.removeprefix(f"{_BUILD}/"): artifact.data
            for artifact in done.artifacts
            if artifact.name.startswith(f"{_BUILD}/") and artifact.name != f"{_BUILD}/.made"
        }
        result = _outcome(done, made)
        if result.ok or (done.reason == "exit" and done.status is SandboxStatus.FAILED):
            self._store.keep(name, result, made if result.ok else {})
        return result

    def _compiler_of(self, entry: LanguageEntry) -> str:
        for name in entry.programs():
            program_of(entry, name)
        return program_of(entry, entry.compile[0])

    def _compile_policy(self, entry: LanguageEntry) -> Policy:
        if entry.name not in self._compile_policies:
            self._compile_policies[entry.name] = self._made_compile_policy(entry)
        return self._compile_policies[entry.name]

    def _made_compile_policy(self, entry: LanguageEntry) -> Policy:
        standard = load_policy("standard")
        named = (*entry.shows, *entry.compile_shows)
        shown = [path for each in named for path in sorted(glob.glob(each))]
        return replace(
            standard, name=f"compile {entry.name}", limits=entry.compile_limits,
            optional_layers=self._policy.optional_layers,
            filesystem=replace(
                standard.filesystem, hidden=self._policy.filesystem.hidden,
                read=tuple(path for path in shown if not path.startswith("/usr/")),
            ),
            network=replace(standard.network, loopback=False),
        )  # fmt: skip

    def _running(self, entry: LanguageEntry) -> "Supervisor":
        def make() -> "Supervisor":
            runtime = find_runtime(self._executable)
            shown = self._store.shown if entry.is_compiled else ""
            interpreter: HostInterpreter = find_runner(entry, runtime, shown)
            return self._settings.running(self._policy, interpreter)

        return self._supervisor(f"run {entry.name}", make)

    def _supervisor(self, key: str, make: Callable[[], "Supervisor"]) -> "Supervisor":
        if found := self._supervisors.get(key):
            return found
        with self._lock:
            if self._is_closed:
                raise ClosedError("the sandbox was closed")
            if key not in self._supervisors:
                self._supervisors[key] = make()
            return self._supervisors[key]

    def settle(self) -> None:
        """Wait until the pools are full."""
        for supervisor in tuple(self._supervisors.values()):
            supervisor.settle()

    def close(self) -> None:
        """End every cell and launcher; closing twice is fine."""
        with self._lock:
            self._is_closed = True
        for supervisor in self._supervisors.values():
            supervisor.close()


def _program(
    entry: LanguageEntry, source: str, files: Mapping[str, FileContent], flags: Sequence[str]
) -> _Program:
    words = check_names("flags", flags)
    if words and not entry.is_compiled:
        raise PolicyError(f"flags: {entry.title} has no compiler that takes them")
    others = source_files(files)
    if any(each.path == entry.source for each in others):
        raise PolicyError(f"files: {entry.source!r} is the name of the program's own source")
    return _Program(entry, (InputFile(entry.source, source.encode()), *others), words)


def checked_compile_timeout(seconds: float | None) -> float:
    """Return the seconds of a compiler; raises PolicyError for invalid ones."""
    if seconds is None:
        return math.inf
    check_limit("compile_timeout", seconds, limit="cpu_seconds")
    return seconds


def _within(limits: Limits, seconds: float) -> Limits:
    """Return the limits of a compiler that may compute for so many seconds.

    They are CPU time, so that a busy machine does not decide; wall time is a generous backstop.
    """
    backstop = max(_LEAST_BACKSTOP, _BACKSTOP_TIMES * seconds)
    return replace(
        limits, cpu_seconds=min(limits.cpu_seconds, seconds * max(1.0, limits.cpus)),
        wall_seconds=min(limits.wall_seconds, backstop),
    )  # fmt: skip


def call_of_build(
    method: str, build: Build, language: str | None, options: "CallOptions | ProgramOptions"
) -> "CallArguments":
    """Return the call that runs a build; raises PolicyError if another language is named."""
    if not isinstance(build, Build) or language not in (None, build.language):
        raise PolicyError(f"{method}: a Build has its own language, got {language!r}")
    if options.keys() & {"flags", "sources"}:
        raise PolicyError(f"{method}: a Build has its own flags and sources")
    options = {**options, "flags": build.flags, "sources": build.files}
    return CallArguments.of(method, code=build.source, language=build.language, **options)


def opened_build_store() -> BuildStore:
    """Return the user's store of builds; raises LaunchError."""
    return BuildStore(build_store_directory())


def _outcome(done: SandboxResult, made: Mapping[str, bytes]) -> CompileResult:
    """Return how a compiler ended; one that made nothing, or more than is kept, has failed."""
    is_whole = bool(made) and not done.uncollected
    error = done.error
    if done.ok and not is_whole:
        error = (
            "; ".join(f"{each.path}: {each.why}" for each in done.uncollected) or "it made no file"
        )
    return CompileResult(
        ok=done.ok and is_whole, status=done.status, reason=done.reason,
        output="\n".join(text for text in (done.stderr, done.stdout) if text),
        exit_code=done.exit_code, error=error, seconds=done.execution_time, usage=done.usage,
    )  # fmt: skip


def _not_compiled(
    entry: LanguageEntry, compiled: CompileResult, request: Request, seconds: float
) -> SandboxResult:
    """Return the result of a program that did not compile."""
    is_refused = compiled.status in (SandboxStatus.COMPLETED, SandboxStatus.FAILED)
    return SandboxResult(
        status=SandboxStatus.FAILED if is_refused else compiled.status, reason="compile",
        error=f"{entry.title}: it does not compile: {compiled.error}", stderr=compiled.output,
        exit_code=compiled.exit_code, execution_time=seconds, compile=compiled,
        execution_id=request.execution_id, trace_id=request.trace_id,
    )  # fmt: skip
