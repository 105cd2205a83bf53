"""The interface of SandboxFusion, which verl and others call: `/run_code` and `/run_jupyter`.

Fields and statuses are those of bytedance/SandboxFusion, sandbox/server/sandbox_api.py.  verl tries a
request again for status 504 alone, and takes every other error for a wrong answer.
"""

import base64
import binascii
import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....policies.errors import CellwrightError, PolicyError
from ....policies.policy import MIB
from ....runner.requests.result import CompileResult, SandboxStatus
from ...sandbox.judging.verdicts import Case, CaseResult, JudgeLimits, Verdict
from .judging_core import (
    DialectError,
    JudgingCore,
    LateError,
    Seconds,
    answer,
    body_of,
    client_of,
    until_gone_of,
)

# verl's client waits 10 s longer than both timeouts, and tries again what was answered by 504.  Every
# answer comes before that: a program that sleeps has to be told from a busy server.
_MARGIN_SECONDS = 8.0
_BUSY = "the server is busy: try again"
# Their names of languages, where ours differ.
_LANGUAGES = {
    "nodejs": "javascript",
    "ts": "typescript",
    "R": "r",
    "D_ut": "d",
    "pytest": "python",
    "go_test": "go",
}
_DEFAULT_MIB = 1024
_LEAST_SECONDS = 0.001  # for a call


class RunCode(msgspec.Struct, kw_only=True):
    """A request of `/run_code`."""

    code: str
    language: str
    stdin: str | None = None
    compile_timeout: Seconds = 10
    run_timeout: Seconds = 10
    memory_limit_MB: int = -1  # noqa: N815 - their name
    files: dict[str, str | None] = {}
    fetch_files: list[str] = []
    args: list[str] = []


class CommandRun(msgspec.Struct, kw_only=True):
    """How a compiler or a program ended."""

    status: str  # Finished, Error, TimeLimitExceeded
    execution_time: float | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class RunCodeResponse(msgspec.Struct, kw_only=True):
    status: str  # Success, Failed, SandboxError
    message: str = ""
    compile_result: CommandRun | None = None
    run_result: CommandRun | None = None
    executor_pod_name: str | None = None
    files: dict[str, str] = {}


class RunJupyter(msgspec.Struct, kw_only=True):
    """A request of `/run_jupyter`."""

    cells: list[str]
    cell_timeout: Annotated[float, msgspec.Meta(ge=0, le=1e15)] = 0  # 0: no limit
    total_timeout: Seconds = 45
    memory_limit_MB: int = -1  # noqa: N815 - their name
    kernel: str = "python3"
    files: dict[str, str | None] = {}
    fetch_files: list[str] = []


class CellOutput(msgspec.Struct, kw_only=True):
    stdout: str = ""
    stderr: str = ""
    display: list[dict[str, Any]] = []
    error: list[dict[str, Any]] = []


class RunJupyterResponse(msgspec.Struct, kw_only=True):
    status: str
    message: str = ""
    driver: CommandRun | None = None
    cells: list[CellOutput] = []
    executor_pod_name: str | None = None
    files: dict[str, str] = {}


class SandboxFusion:
    """The routes of SandboxFusion."""

    def __init__(self, core: JudgingCore) -> None:
        self._core = core

    async def run_code(self, request: Request) -> Response:
        """Compile and run a program once."""
        asked = await body_of(request, RunCode)
        patience = asked.compile_timeout + _MARGIN_SECONDS
        until = time.monotonic() + patience + asked.run_timeout
        return await self._answered(request, partial(self._run, asked, until), patience, until)

    async def _answered(
        self, request: Request, work: Callable[[int], Any], patience: float, until: float
    ) -> Response:
        """Answer 504 if there is no turn within `patience` seconds, or no answer until a time."""
        done = None
        with anyio.move_on_after(until - time.monotonic()), contextlib.suppress(LateError):
            done = await self._core.work(client_of(request), work, until_gone_of(request), patience)
        if done is None or time.monotonic() >= until:  # cancelled work has an answer, too
            raise DialectError(504, _BUSY)
        return answer(done)

    def _run(self, asked: RunCode, until: float, cancel: int) -> RunCodeResponse:
        name = _LANGUAGES.get(asked.language, asked.language)
        try:
            left = until - time.monotonic() - 1.0
            if self._core.sandbox.compiles(name):
                left -= asked.compile_timeout
            files = _decoded(asked.files)
            done = self._core.run_once(
                asked.code, name,
                Case(
                    input=asked.stdin or "", files=files, arguments=tuple(asked.args),
                    collect=tuple(asked.fetch_files),
                ),
                _limits(asked.run_timeout, max(asked.run_timeout, left), asked.memory_limit_MB),
                compile_timeout=asked.compile_timeout, cancel=cancel,
            )  # fmt: skip
        except CellwrightError as error:
            return RunCodeResponse(status="SandboxError", message=str(error))
        if done.ran and done.ran.verdict is Verdict.INTERNAL_ERROR:
            return RunCodeResponse(status="SandboxError", message=done.ran.message)
        compiled = _of_compiler(done.compiled) if done.compiled else None
        ran = _of_case(done.ran) if done.ran else None
        status, message = _judged(compiled, ran)
        fetched = (
            {each.name: _encoded(each.data) for each in done.ran.artifacts} if done.ran else {}
        )
        return RunCodeResponse(
            status=status, message=message, compile_result=compiled, run_result=ran, files=fetched
        )

    async def run_jupyter(self, request: Request) -> Response:
        """Run the cells of a notebook in one session."""
        asked = await body_of(request, RunJupyter)
        until = time.monotonic() + asked.total_timeout + _MARGIN_SECONDS
        work = partial(self._run_cells, asked)
        return await self._answered(request, work, _MARGIN_SECONDS, until)

    def _run_cells(self, asked: RunJupyter, cancel: int) -> RunJupyterResponse:
        if asked.kernel not in ("python3", "python"):
            return RunJupyterResponse(status="SandboxError", message=f"no kernel {asked.kernel!r}")
        cells: list[CellOutput] = []
        left = min(asked.total_timeout, self._core.sandbox.policy.limits.wall_seconds)
        status, said, began = "Finished", "", left
        try:
            files = _decoded(asked.files)
            with self._core.sandbox.session() as session:
                for name, data in files.items():
                    session.upload(name, data)
                for code in asked.cells:
                    timeout = min(left, asked.cell_timeout or left)
                    if timeout < _LEAST_SECONDS:
                        status, said = "TimeLimitExceeded", "total_timeout is over"
                        break
                    done = session.execute(code, timeout=timeout, cancel=cancel)
                    left -= done.execution_time
                    cells.append(_cell_output(done))
                    if done.status is SandboxStatus.TIMEOUT:
                        status, said = "TimeLimitExceeded", done.error or ""
                        break
                    if session.lost or not done.ok:
                        status, said = "Error" if session.lost else "Finished", done.error or ""
                        break
                fetched = {
                    name: _encoded(session.download(name))
                    for name in asked.fetch_files
                    if not session.lost and name in {each.path for each in session.files()}
                }
        except CellwrightError as error:
            return RunJupyterResponse(status="SandboxError", message=str(error))
        driver = CommandRun(status=status, execution_time=began - left)
        return RunJupyterResponse(
            status="Success" if status == "Finished" else "Failed", message=said, driver=driver,
            cells=cells, files=fetched,
        )  # fmt: skip


def _cell_output(done: Any) -> CellOutput:
    display: list[dict[str, Any]] = [
        {each.mime: _encoded(each.data)} for each in done.artifacts if each.mime
    ]
    if done.value is not None:
        display.append({"text/plain": repr(done.value)})
    failed = []
    if not done.ok:
        name, _, value = (done.error or "").partition(": ")
        failed = [
            {"ename": name, "evalue": value, "traceback": (done.traceback or "").splitlines()}
        ]
    return CellOutput(stdout=done.stdout, stderr=done.stderr, display=display, error=failed)


def _limits(seconds: float, wall_seconds: float, mib: int) -> JudgeLimits:
    memory = (mib if mib > 0 else _DEFAULT_MIB) * MIB
    return JudgeLimits(
        time_seconds=seconds, wall_seconds=wall_seconds, memory_bytes=max(memory, 8 * MIB)
    )


def _decoded(files: dict[str, str | None]) -> dict[str, bytes]:
    try:
        return {
            path.removeprefix("./").lstrip("/"): base64.b64decode(content or "", validate=True)
            for path, content in files.items()
        }
    except (binascii.Error, ValueError):
        raise PolicyError("files: must be in base64") from None


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _of_compiler(compiled: CompileResult) -> CommandRun:
    is_late = compiled.status is SandboxStatus.TIMEOUT
    return CommandRun(
        status="TimeLimitExceeded" if is_late else "Finished", execution_time=compiled.seconds,
        return_code=None if is_late else compiled.exit_code, stdout="", stderr=compiled.output,
    )  # fmt: skip


def _of_case(ran: CaseResult) -> CommandRun:
    if ran.verdict is Verdict.TIME_LIMIT:
        return CommandRun(
            status="TimeLimitExceeded", execution_time=ran.wall_seconds, stdout=ran.stdout,
            stderr=ran.stderr,
        )  # fmt: skip
    code = ran.exit_code if ran.exit_code is not None else -(ran.signal or 9)
    return CommandRun(
        status="Finished", execution_time=ran.wall_seconds, return_code=code, stdout=ran.stdout,
        stderr=ran.stderr,
    )  # fmt: skip


def _judged(*parts: CommandRun | None) -> tuple[str, str]:
    for part in parts:
        if part and part.status == "Error":
            return "SandboxError", part.stderr or ""
    for part in parts:
        if part and (part.status == "TimeLimitExceeded" or part.return_code != 0):
            return "Failed", ""
    return "Success", ""
