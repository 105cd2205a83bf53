"""`ToolExecutor`: executes calls of made tools, and their own tests, each in a cell."""

import os
import re
from typing import Any

from msgspec.structs import replace

from ...policies.errors import (
    ToolError,
    ToolFailed,
    ToolResultInvalid,
    ToolTestFailed,
)
from ...runner.budget import CANCEL
from ...runner.messages import NOT_JSON
from ...runner.result import SandboxResult
from ..schemas.functions import FunctionSchema
from ..schemas.spec import ToolSpec, ToolState, ToolTest
from ..schemas.validation import is_same
from ..text.terminal import harmless
from ..tools.broker import Broker
from ..tools.caller import CALLING, Caller
from ..tools.checks import check_arguments, check_result
from .call_program import ARGUMENTS, program_of_call, program_of_test
from .sandboxes import ToolSandboxes

_OF_A_CALL = re.compile(r"tools\.ToolError: ([\w.-]+)(?= >|:)")


class ToolExecutor:
    """Executes made tools in cells of `sandboxes`; they call other tools through `broker`."""

    def __init__(self, sandboxes: ToolSandboxes, broker: Broker, caller: Caller) -> None:
        self._sandboxes = sandboxes
        self._broker = broker
        self._caller = caller

    def try_out(self, spec: ToolSpec, described: FunctionSchema) -> ToolSpec:
        """Execute a tool's tests, and return it, tested if it has any; raises ToolTestFailed."""
        for number, test in enumerate(spec.tests, 1):
            try:
                self._test(spec, described, test)
            except ToolError as error:
                raise ToolTestFailed(
                    f"{spec.name}: test {number}: {error}", tool=spec.name,
                    result=getattr(error, "result", None),
                ) from None  # fmt: skip
        return replace(spec, state=ToolState.TESTED) if spec.tests else spec

    def _test(self, spec: ToolSpec, described: FunctionSchema, test: ToolTest) -> None:
        if test.source:
            word = os.urandom(8).hex()
            result = self._execute(spec, program_of_test(spec.source_code, test.source, word), {})
            if not result.ok or result.value != word:
                raise _failed(spec, result)
            return
        check_arguments(spec, test.input)
        value = self.run(spec, program_of_call(spec.source_code, described), test.input)
        if not is_same(value, test.expected):
            raise ToolFailed(f"expected {_shown(test.expected)}, not {_shown(value)}")

    def run(self, spec: ToolSpec, program: str, arguments: dict[str, Any]) -> Any:
        """Execute one call in a cell, and return its value, which is as untrusted as the tool."""
        result = self._execute(spec, program, {ARGUMENTS: arguments}, plain=True)
        said = result.error or ""
        if said.startswith(NOT_JSON):
            raise ToolResultInvalid(f"{spec.name}: the result is {harmless(said)}", tool=spec.name)
        if not result.ok:
            raise _failed(spec, result)
        check_result(spec, result.value)
        return result.value

    def _execute(
        self, spec: ToolSpec, program: str, inputs: dict[str, Any], *, plain: bool = False
    ) -> SandboxResult:
        """Execute a program of this tool, which may call only the tools in its spec's `calls`."""
        above = CALLING.get() or self._caller
        token = CALLING.set(replace(above, tools=frozenset(spec.calls)))
        try:
            with self._sandboxes.lend(spec.grants, self._broker if spec.calls else None) as sandbox:
                timeout = min(spec.timeout, sandbox.policy.limits.wall_seconds)
                return sandbox.execute(
                    program, inputs=inputs, timeout=timeout, cancel=CANCEL.get(), plain=plain,
                    packages=spec.provenance.packages,
                )  # fmt: skip
        finally:
            CALLING.reset(token)


def _failed(spec: ToolSpec, result: SandboxResult) -> ToolFailed:
    said = harmless(result.error or f"{result.status.value}, {result.reason}")
    inner = _OF_A_CALL.match(said)  # a tool that it called failed: `a > b: why`, at any depth
    if inner and inner[1] in spec.calls:
        return ToolFailed(f"{spec.name} > {said[inner.start(1) :]}", tool=spec.name, result=result)
    return ToolFailed(f"{spec.name}: {said}", tool=spec.name, result=result)


def _shown(value: object) -> str:
    return ascii(value)[:200]
