"""The route of thin plugins: one program, with the state of the session that the request names."""

import re
import sys

from ....policies.errors import CellwrightError, PolicyError
from ....policies.languages import PYTHON
from ....runner.audit.spans import span_of
from ....runner.result import SandboxResult
from ...sandbox.executing import Executing
from ...sandbox.parameters import CallArguments
from ...sandbox.pythons import find_python, pythons
from ..services import refuse_packages
from .endpoint import Endpoint, WebCall
from .messages import RunCodeAnswer, RunCodeBody

_VERSION = "{}.{}".format(*sys.version_info[:2])  # of the Python that runs cells
_SHORT_VERSION = re.compile(r"3\.[0-9]{1,2}")
_FAILED, _TIMEOUT, _SIGNALLED, _KILLED = 1, 124, 128, 137  # those of a shell and of timeout(1)
_STATUS_OF = {"timeout": _TIMEOUT, "killed": _KILLED, "cancelled": _KILLED}


def run_code(call: WebCall) -> RunCodeAnswer:
    """Run a program; programs with the same `sessionId` share variables and files."""
    body: RunCodeBody = call.body
    language, python = _language_and_version(body.runtime)
    sandbox = call.state.services.sandbox_of(call.client, python)
    refuse_packages(sandbox.policy, body.packages)
    executing: Executing = sandbox
    if body.session_id:
        name = f"{body.session_id}@{body.runtime}" if python else body.session_id
        executing = call.state.sessions.named(call, name, sandbox, language, body.packages)
    given = CallArguments(
        code=body.code, language=language, packages=() if body.session_id else body.packages,
        trace_id=body.trace_id or call.traceparent or None,
    )  # fmt: skip
    return _answer(executing._execute(given, None, call.stop).for_model())


def _language_and_version(runtime: str) -> tuple[str, str]:
    """Return the language of a runtime, and the version of Python if it is not that of the server;
    raises PolicyError for one that this host cannot run.  A client cannot name a path."""
    language, colon, version = runtime.partition(":")
    if not colon or (language, version) == (PYTHON, _VERSION):
        return language, ""
    if language != PYTHON:
        raise PolicyError(f"runtime: only python has versions, got {runtime!r}", "leave it out")
    try:
        if not _SHORT_VERSION.fullmatch(version):
            raise PolicyError("must be such as python:3.12")
        find_python(version)
    except CellwrightError as error:
        there = ", ".join(f"python:{each}" for each in _versions())
        raise PolicyError(
            f"runtime: cannot run {runtime!r}: {error.what}", f"this server has {there}"
        ) from None
    return language, version


def _versions() -> list[str]:
    """Return the versions of Python that cells can have."""
    usable = [each.version for each in pythons() if None not in each.packages]
    return sorted({f"{major}.{minor}" for major, minor, *_ in usable} | {_VERSION}, key=len)


def _answer(result: SandboxResult) -> RunCodeAnswer:
    return RunCodeAnswer(
        exit_code=_exit_code(result), stdout=result.stdout, stderr=_stderr(result),
        duration_ms=round(result.execution_time * 1000, 3),
        memory_usage=result.usage.memory_peak_bytes, status=result.status.value,
        reason=result.reason, trace_id=span_of(result.trace_id).trace_id,
    )  # fmt: skip


def _exit_code(result: SandboxResult) -> int:
    """Return 0 only for a program that succeeded: a caller looks at nothing else."""
    if result.ok:
        return 0
    if result.signal:
        return _SIGNALLED + result.signal
    return result.exit_code or _STATUS_OF.get(result.status.value, _FAILED)


def _stderr(result: SandboxResult) -> str:
    """Return standard error, and the reason of a failure that the program did not print."""
    error = (result.traceback or result.error or "").strip()
    if result.ok or not error or error in result.stderr:
        return result.stderr
    return f"{result.stderr}cellwright: {result.status.value} ({result.reason}): {error}\n"


CODE_ENDPOINTS = (
    Endpoint(
        "POST", "/v1/run-code",
        "Run a program, as a thin plugin asks for it: `exitCode` is 0 only if it succeeded.",
        RunCodeAnswer, RunCodeBody, handler=run_code, executes=True,
    ),
)  # fmt: skip
