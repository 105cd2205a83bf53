"""`CellExecutor`: the Python executor of smolagents' `CodeAgent`, in a cell."""

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...policies.errors import PolicyError
from ...policies.policy import Policy
from ...runner.requests.result import SandboxResult, SandboxStatus
from ..schemas.spec import function_name
from ..text.hidden import advice
from ..tools.approval import refuse_approval
from ..tools.broker import Broker
from .common.cell_sandbox_session import AdapterSession, HostFunctions, missing

try:
    from smolagents.local_python_executor import CodeOutput, PythonExecutor
except ImportError as error:
    raise missing("smolagents", "smolagents", error) from error

if TYPE_CHECKING:
    from ..sandbox.sandbox_arguments import PolicyLike
    from ..tools.approval import Approve

_FINAL = "final_answer"
# Runs in the cell: sends the answer to the host, which ends the agent's run, and ends the program.
_FINAL_ANSWER = """
def final_answer(*args, **kwargs):
    import json, tools

    def told(value):
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            return repr(value)
        return value

    tools.final_answer(*map(told, args), **{name: told(value) for name, value in kwargs.items()})
    raise SystemExit
"""
_JSON_TYPES = {"string", "boolean", "integer", "number", "array", "object", "null"}


class CellExecutor(PythonExecutor):
    """Executes the programs of one `CodeAgent` in a session: `CodeAgent(..., executor=CellExecutor())`.

    The agent's tools and managed agents are called on the host, through the broker of the sandbox.
    `policy`, default the profile workshop, and `options` are arguments of `Sandbox`.  `timeout`:
    seconds of each program.  `approve`: decides about calls for which the policy requires approval.
    Raises PolicyError for invalid arguments.
    """

    def __init__(
        self,
        *,
        policy: "PolicyLike | None" = None,
        timeout: float | None = None,
        approve: "Approve" = refuse_approval,
        **options: Any,
    ) -> None:
        if refused := {"sandbox", "tools", "connect"} & options.keys():
            raise PolicyError(
                f"{', '.join(sorted(refused))}: the tools of this executor are those of its agent",
                "pass tools to CodeAgent",
            )
        self.state: dict[str, Any] = {"_print_outputs": ""}  # smolagents shows it after a failure
        self.cell = AdapterSession(
            policy=policy, tools=Broker(self._functions(), approve=approve), **options
        )
        self._timeout = timeout
        self._bindings = ""
        self._lock = threading.Lock()
        self._answer: list[Any] = []

    def _functions(self) -> HostFunctions:
        self._offered = HostFunctions()
        return self._offered

    def send_tools(self, tools: dict[str, Any]) -> None:
        """Offer these tools, and no others, to the programs that follow."""
        self._offered.clear()
        lines = []
        for name, tool in tools.items():
            offered = self._offered.add(
                name, self._caller_of(name, tool),
                description=getattr(tool, "description", ""),
                parameters=_parameters(getattr(tool, "inputs", None)),
            )  # fmt: skip
            if name != _FINAL:
                lines.append(f"from tools import {function_name(offered)} as {name}")
        self._bindings = "\n".join(lines) + (_FINAL_ANSWER if _FINAL in tools else "")

    def _caller_of(self, name: str, tool: Any) -> Any:
        def call(arguments: dict[str, Any]) -> Any:
            value = tool(**arguments)
            if name == _FINAL:
                self._answer.append(value)
                return None
            return value

        return call

    def send_variables(self, variables: dict[str, Any]) -> None:
        """Set variables of the session; raises PolicyError for values that JSON cannot express."""
        if variables:
            self.cell.execute("pass", inputs=variables)

    def __call__(self, code_action: str) -> Any:
        """Run a program and return its last value, or the final answer that it gave.

        Raises RuntimeError, with the words of the program's error, if it fails; what `Session.execute`
        raises if cellwright fails.
        """
        with self._lock:
            self._bind()
            self._answer.clear()
            result = self.cell.execute(code_action, timeout=self._timeout)
            logs = self.state["_print_outputs"] = _logs(result)
            if self._answer:
                return CodeOutput(output=self._answer[0], logs=logs, is_final_answer=True)
        if result.session_lost:
            self.cell.restart()
        if not result.ok:
            raise RuntimeError(_failure(result, self.cell.sandbox.policy))
        return CodeOutput(output=result.value, logs=logs, is_final_answer=False)

    def _bind(self) -> None:
        """Give the agent's tools their names, whatever the programs before made of these."""
        if self._bindings:
            bound = self.cell.execute(self._bindings)
            if not bound.ok:
                raise RuntimeError(f"tools: {_failure(bound, self.cell.sandbox.policy)}")

    def cleanup(self) -> None:
        """End the session and its sandbox; `CodeAgent.cleanup` calls this."""
        self.cell.close()


def _parameters(inputs: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Any]:
    given = inputs or {}
    required = [name for name, each in given.items() if not each.get("nullable")]
    return {
        "type": "object",
        "properties": {name: _parameter(each) for name, each in given.items()},
        "required": required,
        "additionalProperties": False,
    }


def _parameter(given: Mapping[str, Any]) -> dict[str, Any]:
    schema = {"description": str(given.get("description", ""))}
    kinds = given.get("type", "any")
    named = [kinds] if isinstance(kinds, str) else list(kinds)
    if not _JSON_TYPES.issuperset(named):  # any, image, audio
        return schema
    return schema | {"type": [*named, *(["null"] if given.get("nullable") else [])]}


def _logs(result: SandboxResult) -> str:
    """Return the output of a program; the standard error of a failed one ends with the traceback."""
    return result.stdout + result.stderr if result.ok else result.stdout


def _failure(result: SandboxResult, policy: Policy) -> str:
    """Return why a program failed, as its model should read it."""
    words = result.traceback or result.error or str(result.reason)
    if result.status is SandboxStatus.TIMEOUT:
        words = f"{result.error or 'the program took too long'}"
    if result.session_lost:
        words += "\nThe interpreter was restarted: variables, imports and files are lost."
    return "\n".join((words, *advice(result.notices, result.hints, policy, is_ok=result.ok)))
