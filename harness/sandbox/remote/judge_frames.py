"""Programs to compile and to judge as frames; both sides check the arguments.

The arguments of `judge` are bytes in their frame, because they may hold many small things: the receiver
counts what they decode to before it decodes them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from ....policies.errors import PolicyError
from ....runner.cells.workspace import Executable
from ....runner.messages import InputFile, decode, encode
from ..calls.call_request import as_bytes, source_files
from ..judging.checkers import CHECKERS, Floats, Interactor, ProgramChecker
from ..judging.judge import Submission, submission
from ..judging.verdicts import Case, JudgeLimits
from ..languages.compiled import Build
from ..parameters import CompileArguments
from .frames import Compiled, CompileProgram, JudgeProgram

if TYPE_CHECKING:
    from ..judging.checkers import Compare

# Times the bytes of the arguments: an empty case takes a byte, and 150 of memory.
JUDGE_WEIGHT = 150


_Files = tuple[InputFile, ...]


class _SentFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    pass


class _SentCase(_SentFrame, frozen=True):
    """A `Case`."""

    input: bytes
    expected: bytes | None
    name: str = ""
    arguments: tuple[str, ...] = ()
    files: _Files = ()
    collect: tuple[str, ...] = ()


class _SentChecker(_SentFrame, frozen=True):
    """A `ProgramChecker`, or an `Interactor`."""

    source: str
    language: str
    flags: tuple[str, ...] = ()
    files: _Files = ()
    interacts: bool = False


class _JudgeArguments(_SentFrame, frozen=True):
    """The arguments of `judge`; `checker` is a name or a tolerance, without effect beside `program`."""

    source: str
    language: str | None
    cases: tuple[_SentCase, ...]
    limits: JudgeLimits
    checker: str | Floats = "tokens"
    program: _SentChecker | None = None
    flags: tuple[str, ...] = ()
    sources: _Files = ()
    all: bool = False
    strict: bool = False
    compile_timeout: float | None = None


def packed_compile(given: CompileArguments) -> CompileProgram:
    """Return the frame; raises PolicyError for invalid arguments."""
    source = given.source.encode() if isinstance(given.source, str) else given.source
    files = source_files(given.files or {})
    return CompileProgram(source, given.language, files, tuple(given.flags), given.compile_timeout)


def compile_of(frame: CompileProgram) -> CompileArguments:
    """Return the arguments of the call, which is still to check them."""
    return CompileArguments(
        source=frame.source, language=frame.language, flags=frame.flags,
        files=_content(frame.files),
        compile_timeout=frame.compile_timeout,
    )  # fmt: skip


def build_of(given: CompileArguments, compiled: Compiled) -> Build:
    """Return the build that a call of `compile` asked for."""
    files = _content(source_files(given.files or {}))
    main = files.get(compiled.main, b"") if given.source is None else given.source
    return Build(
        language=compiled.language, source=main if isinstance(main, str) else main.decode(),
        files={path: data for path, data in files.items() if path != compiled.main},
        flags=tuple(given.flags), compile=compiled.result,
    )  # fmt: skip


def packed_judging(given: Submission, cases: Sequence[Case]) -> JudgeProgram:
    """Return the frame; raises PolicyError for a checker that cannot be sent."""
    source, language, flags, sources = given.source, given.language, given.flags, given.sources
    if isinstance(source, Build):
        build = source
        source, language, flags, sources = build.source, build.language, build.flags, build.files
    check, program = given.checker, None
    if isinstance(check, ProgramChecker):
        program = _SentChecker(
            check.source, check.language, tuple(check.flags), source_files(check.files),
            isinstance(check, Interactor),
        )  # fmt: skip
    try:
        told = _JudgeArguments(
            source, language, tuple(map(_sent_case, cases)), given.limits,
            "tokens" if program else _sent(check), program, flags, source_files(sources), given.all,
            given.strict, given.compile_timeout,
        )  # fmt: skip
        return JudgeProgram(encode(told))
    except (UnicodeEncodeError, TypeError, OverflowError) as error:
        raise PolicyError(f"judge: an argument cannot be sent: {error}") from None


def judging_of(frame: JudgeProgram, cancel: int) -> tuple[Submission, tuple[Case, ...]]:
    """Return the arguments of the call, checked; raises PolicyError."""
    try:
        told: _JudgeArguments = decode(frame.given, _JudgeArguments)
    except msgspec.DecodeError as error:
        raise PolicyError(f"judge: invalid arguments: {error}") from None
    checker: str | Floats | ProgramChecker = told.checker
    if sent := told.program:
        kind = Interactor if sent.interacts else ProgramChecker
        checker = kind(
            source=sent.source, language=sent.language, flags=sent.flags, files=_content(sent.files)
        )
    given = submission(
        told.source, told.language, checker, told.limits, told.flags, _content(told.sources),
        every=told.all, strict=told.strict, compile_timeout=told.compile_timeout, cancel=cancel,
    )  # fmt: skip
    cases = (
        Case(**(msgspec.structs.asdict(each) | {"files": _content(each.files)}))
        for each in told.cases
    )
    return given, tuple(cases)


def _sent_case(case: Case) -> _SentCase:
    expected = None if case.expected is None else as_bytes("expected", case.expected)
    return _SentCase(
        as_bytes("input", case.input), expected, case.name, tuple(case.arguments),
        source_files(case.files), tuple(case.collect),
    )  # fmt: skip


def _content(files: _Files) -> dict[str, bytes]:
    return {file.path: Executable(file.data) if file.executable else file.data for file in files}


def _sent(check: "ProgramChecker | Compare") -> str | Floats:
    names = [name for name, each in CHECKERS.items() if each is check]
    if names:
        return names[0]
    if isinstance(check, Floats):
        return check
    raise PolicyError(
        "checker: a function cannot be sent to another process", "pass a ProgramChecker"
    )
