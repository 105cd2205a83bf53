"""`AdkCellExecutor`: the code executor of Google ADK's agents, in cells."""

import base64
import threading
from typing import Any

from ...policies.errors import SessionLost
from ...policies.policy import Policy
from ...runner.requests.result import SandboxResult
from ..sandbox.sandbox import Sandbox
from ..text.hidden import advice
from .common.cell_sandbox_session import missing

try:
    from google.adk.agents.invocation_context import InvocationContext
    from google.adk.code_executors.base_code_executor import BaseCodeExecutor
    from google.adk.code_executors.code_execution_utils import (
        CodeExecutionInput,
        CodeExecutionResult,
        CodeExecutionUtils,
        File,
    )
except ImportError as error:
    raise missing("google-adk", "adk", error) from error

_LOCK = threading.Lock()  # guards the first use of an executor


class AdkCellExecutor(BaseCodeExecutor):
    """Runs the code of an agent, each time in a fresh cell, or with `stateful` in a session of its own:
    `LlmAgent(..., code_executor=AdkCellExecutor())`.

    `policy`, default the profile workshop, and `options` are arguments of `Sandbox`; `timeout_seconds`
    limits each program.
    """

    policy: Any = "workshop"
    options: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies it
    _sandbox: Any = None

    def execute_code(
        self, invocation_context: InvocationContext, code_execution_input: CodeExecutionInput
    ) -> CodeExecutionResult:
        """Run a program with the given files; return its output and the files that it made."""
        given = code_execution_input
        files = {each.name: _content(each) for each in given.input_files}
        run = self._made()
        if self.stateful and given.execution_id:
            run = run.session(f"adk-{given.execution_id}")
        try:
            result = run.execute(
                given.code, files=files, timeout=self.timeout_seconds, collect=["*"]
            )
        except SessionLost as lost:
            return CodeExecutionResult(stderr=f"{lost}\n", exit_code=1)
        return _as_code_result(result, self._made().policy)

    def _made(self) -> Any:
        with _LOCK:
            if self._sandbox is None:
                self._sandbox = Sandbox(policy=self.policy, **self.options)
            return self._sandbox

    def close(self) -> None:
        """End all cells of this executor."""
        with _LOCK:
            sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            sandbox.close()


def _content(file: File) -> bytes:
    data = file.content.encode() if isinstance(file.content, str) else file.content
    return base64.b64decode(CodeExecutionUtils.get_encoded_file_content(data))


def _as_code_result(result: SandboxResult, policy: Policy) -> CodeExecutionResult:
    stdout = result.stdout
    if result.ok and result.value is not None:
        stdout += f"{result.value!r}\n"
    stderr = result.stderr
    if not result.ok and result.reason != "exception":
        stderr += f"{result.reason}: {result.error}\n"
    notes = advice(result.notices, result.hints, policy, is_ok=result.ok)
    stderr += "".join(f"{each}\n" for each in notes)
    made = [
        File(
            each.name, base64.b64encode(each.data).decode(), each.mime or "application/octet-stream"
        )
        for each in result.artifacts
    ]
    code = 0 if result.ok else result.exit_code or 1
    return CodeExecutionResult(stdout=stdout, stderr=stderr, output_files=made, exit_code=code)
