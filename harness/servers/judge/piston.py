"""The interface of Piston: `/api/v2/runtimes` and `/api/v2/execute` (its docs/api-v2.md)."""

import base64
import binascii
import signal
from functools import partial
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....policies.errors import LaunchError, PolicyError
from ....policies.policy import MIB
from ....runner.requests.result import CompileResult, SandboxStatus
from ...sandbox.judging.verdicts import Case, CaseResult, JudgeLimits, Verdict
from .judging_core import (
    DialectError,
    JudgingCore,
    answer,
    body_of,
    client_of,
    until_gone_of,
)

_STATUS = {  # status of a run; none if it ended by itself
    Verdict.TIME_LIMIT: ("TO", "Time limit exceeded"),
    Verdict.OUTPUT_LIMIT: ("OL", "stdout length exceeded"),
    Verdict.MEMORY_LIMIT: ("SG", "Memory limit exceeded"),
    Verdict.INTERNAL_ERROR: ("XX", "Internal error"),
}
_VERSION = "0.0.0"  # clients ask for "*", or for one of these
_Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
_RUN_MILLISECONDS, _COMPILE_MILLISECONDS = 3000, 10_000


class PistonFile(msgspec.Struct, kw_only=True):
    """A file of a request; the first is the program."""

    content: str
    name: str | None = None
    encoding: str = "utf8"


class PistonExecute(msgspec.Struct, kw_only=True):
    """A request of `/api/v2/execute`.  Sizes are in bytes, -1 for none; null and a time of 0 stand for
    the default, as in Piston.  A compiler has the memory of its language."""

    language: str
    files: list[PistonFile]
    version: str = "*"
    stdin: str | None = None
    args: list[str] | None = None
    run_timeout: _Milliseconds | None = None
    compile_timeout: _Milliseconds | None = None
    run_cpu_time: _Milliseconds | None = None
    compile_cpu_time: _Milliseconds | None = None
    run_memory_limit: int | None = None
    compile_memory_limit: int | None = None


class PistonStage(msgspec.Struct, kw_only=True):
    """How a compiler or a program ended."""

    stdout: str
    stderr: str
    output: str
    code: int | None
    signal: str | None
    message: str | None = None
    status: str | None = None
    cpu_time: int | None = None
    wall_time: int | None = None
    memory: int | None = None


class Piston:
    """The routes of Piston."""

    def __init__(self, core: JudgingCore) -> None:
        self._core = core

    async def runtimes(self, request: Request) -> Response:
        """List the languages that this host has."""
        return answer(
            [
                {"language": each.name, "version": _VERSION, "aliases": list(each.aliases)}
                for each in self._core.languages
            ]
        )

    async def execute(self, request: Request) -> Response:
        """Compile and run a program once."""
        asked = await body_of(request, PistonExecute, refused=400)
        if not asked.files:
            raise DialectError(400, "files is required as an array")
        try:
            done = await self._core.work(
                client_of(request), partial(self._run, asked), until_gone_of(request)
            )
        except (PolicyError, LaunchError) as error:
            raise DialectError(400, str(error)) from None
        return answer(done)

    def _run(self, asked: PistonExecute, cancel: int) -> dict[str, Any]:
        main, *others = [(each.name, _content(each)) for each in asked.files]
        sources = {name or f"file{number}": data for number, (name, data) in enumerate(others)}
        limit = asked.run_cpu_time or asked.run_timeout or _RUN_MILLISECONDS
        compiling = asked.compile_cpu_time or asked.compile_timeout or _COMPILE_MILLISECONDS
        memory = asked.run_memory_limit or 0
        memory = max(memory, 8 * MIB) if memory > 0 else 1024 * MIB
        is_compiled = self._core.sandbox.compiles(asked.language)
        try:
            done = self._core.run_once(
                main[1].decode(), asked.language,
                Case(
                    input=asked.stdin or "", arguments=tuple(asked.args or ()),
                    files={} if is_compiled else sources,
                ),
                JudgeLimits(time_seconds=limit / 1000, memory_bytes=memory),
                sources=sources if is_compiled else None, compile_timeout=compiling / 1000,
                cancel=cancel,
            )  # fmt: skip
        except UnicodeDecodeError:
            raise PolicyError("files: the program is no UTF-8") from None
        answered: dict[str, Any] = {"language": asked.language, "version": _VERSION}
        if done.compiled:
            answered["compile"] = _of_compiler(done.compiled)
        if done.ran:
            answered["run"] = _of_run(done.ran)
        else:  # clients read it, whether the program was run or not
            answered["run"] = answered["compile"]
        return answered


def _content(file: PistonFile) -> bytes:
    try:
        if file.encoding == "base64":
            return base64.b64decode(file.content, validate=True)
        if file.encoding == "hex":
            return bytes.fromhex(file.content)
    except (binascii.Error, ValueError):
        raise PolicyError(f"files: {file.name!r} is not in {file.encoding}") from None
    if file.encoding != "utf8":
        raise PolicyError("files: encoding must be utf8, base64 or hex")
    return file.content.encode()


def _of_compiler(compiled: CompileResult) -> PistonStage:
    is_late = compiled.status is SandboxStatus.TIMEOUT
    return PistonStage(
        stdout="", stderr=compiled.output, output=compiled.output,
        code=None if is_late else compiled.exit_code, signal="SIGKILL" if is_late else None,
        status="TO" if is_late else None if compiled.ok else "RE", message=compiled.error,
        wall_time=round(1000 * compiled.seconds),
    )  # fmt: skip


def _of_run(ran: CaseResult) -> PistonStage:
    status, message = _STATUS.get(ran.verdict, (None, None))
    if ran.verdict is Verdict.INTERNAL_ERROR:
        message = ran.message
    number = ran.signal or (signal.SIGKILL if status in ("TO", "OL", "SG") else None)
    if status is None and ran.verdict is not Verdict.ACCEPTED:
        status = "SG" if ran.signal else "RE"
        message = ran.message or None
    return PistonStage(
        stdout=ran.stdout, stderr=ran.stderr, output=ran.stdout + ran.stderr,
        code=None if number else ran.exit_code, signal=_signal_name(number) if number else None,
        message=message, status=status, cpu_time=round(1000 * ran.seconds),
        wall_time=round(1000 * ran.wall_seconds), memory=ran.memory_bytes,
    )  # fmt: skip


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"
