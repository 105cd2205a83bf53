"""Running the programs of made tools, each in a cell: calls of them, and their own tests."""

import os
import re
from typing import Any

from msgspec.structs import replace

from ...policies.errors import (
    ToolArgumentsInvalid,
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
from ..schemas.validation import compile_schema, is_same
from ..text.terminal import harmless
from ..tools.broker import Broker
from ..tools.caller import CALLING, Caller
from .call_program import ARGUMENTS, program_of_call, program_of_test
from .sandboxes import ToolSandboxes

_OF_A_CALL = re.compile(r"tools\.ToolError: ([\w.-]+)(?= >|:)")


class ToolExecutor:
    """Runs what tools are, in cells of theirs; through `broker` they call others."""

    def __init__(self, sandboxes: ToolSandboxes, broker: Broker, caller: Caller) -> None:
        self._sandboxes = sandboxes
        self._broker = broker
        self._caller = caller

    def try_out(self, spec: ToolSpec, described: FunctionSchema) -> ToolSpec:
        """Return the tool, tested if it has tests; raises ToolTestFailed."""
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
        """Run one call in a cell and return its value; every word of it is the guest's."""
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
        """Run a program of this tool's, which may call what its spec lists and nothing else."""
        above = CALLING.get() or self._caller
        token = CALLING.set(above._replace(tools=frozenset(spec.calls)))
        try:
            with self._sandboxes.lend(spec.grants, self._broker if spec.calls else None) as sandbox:
                timeout = min(spec.timeout, sandbox.policy.limits.wall_seconds)
                return sandbox.execute(
                    program, inputs=inputs, timeout=timeout, cancel=CANCEL.get(), plain=plain
                )
        finally:
            CALLING.reset(token)


def check_arguments(spec: ToolSpec, arguments: object) -> None:
    """Raise ToolArgumentsInvalid unless the arguments are what the tool's schema says."""
    if found := compile_schema(spec.parameters).complaints(arguments):
        raise ToolArgumentsInvalid(f"{spec.name}: {'; '.join(found)}", tool=spec.name)


def check_result(spec: ToolSpec, value: object) -> None:
    """Raise ToolResultInvalid unless the result is what the tool's schema says, if it says anything."""
    if spec.output_schema is None:
        return
    if found := compile_schema(spec.output_schema).complaints(value):
        raise ToolResultInvalid(f"{spec.name}: {'; '.join(found)}", tool=spec.name)


def _failed(spec: ToolSpec, result: SandboxResult) -> ToolFailed:
    said = harmless(result.error or f"{result.status.value}, {result.reason}")
    inner = _OF_A_CALL.match(said)  # what it called failed: `a > b: why`, however deep
    if inner and inner[1] in spec.calls:
        return ToolFailed(f"{spec.name} > {said[inner.start(1) :]}", tool=spec.name, result=result)
    return ToolFailed(f"{spec.name}: {said}", tool=spec.name, result=result)


def _shown(value: object) -> str:
    return ascii(value)[:200]
