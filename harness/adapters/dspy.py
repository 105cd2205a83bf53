"""`CellInterpreter`: the code interpreter of DSPy's `RLM` and its other modules, in a cell."""

import asyncio
import inspect
import keyword
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...policies.errors import CellwrightError, PolicyError
from ...runner.requests.result import SandboxResult, SandboxStatus
from ..text.hidden import advice
from ..tools.broker import Broker
from .common.cell_sandbox_session import AdapterSession, HostFunctions, missing

try:
    from dspy.primitives.code_interpreter import (
        CodeExecutionError,
        CodeInterpreterError,
        FinalOutput,
    )
except ImportError as error:
    raise missing("dspy", "dspy", error) from error

if TYPE_CHECKING:
    from ..sandbox.sandbox_arguments import PolicyLike

_SUBMIT = "SUBMIT"
_SUBMITTED = "submitted_output"  # the tool by which a program hands over its output
# Runs in the cell: sends the output to the host and ends the program.
_PRELUDE = """
def _cellwright_bind(tools, fields):
    import tools as called
    def bound(tool):
        return lambda *args, **kwargs: called.call_tool(tool, {"args": args, "kwargs": kwargs})
    def SUBMIT(*args, **kwargs):
        if args and kwargs:
            raise TypeError("SUBMIT accepts positional or keyword values, not both")
        if fields is None:
            if len(args) + len(kwargs) != 1 and not kwargs:
                raise TypeError("SUBMIT requires one output value")
            output = {"output": args[0]} if args else kwargs
        else:
            output = dict(zip(fields, args)) if args else kwargs
            if len(args) > len(fields) or output.keys() != set(fields):
                raise TypeError(f"SUBMIT takes {', '.join(fields)}")
        called.call_tool("submitted_output", {"args": [output], "kwargs": {}})
        raise SystemExit
    globals().update({name: bound(tool) for name, tool in tools.items()}, SUBMIT=SUBMIT)
"""


class CellInterpreter:
    """Executes the programs of a module in a session: `RLM(..., interpreter_factory=CellInterpreter)`.

    `tools` are functions of this process that programs call, through the broker of the sandbox.
    `policy`, default the profile workshop, and `options` are arguments of `Sandbox`.  `timeout`:
    seconds of each program.  Raises PolicyError for invalid arguments.
    """

    def __init__(
        self, tools: Mapping[str, Callable[..., Any]] | None = None, *,
        output_fields: list[dict[str, Any]] | None = None,
        policy: "PolicyLike | None" = None, timeout: float | None = None, **options: Any,
    ) -> None:  # fmt: skip
        if refused := {"sandbox", "connect"} & options.keys():
            raise PolicyError(
                f"{', '.join(sorted(refused))}: the tools of this interpreter are those of its module",
                "give it policy= and other arguments of Sandbox",
            )
        self._tools = dict(tools or {})
        self.output_fields = output_fields
        self._functions = HostFunctions()
        self._bound: tuple[object, ...] = ()
        self._submitted: list[Any] = []
        self._timeout = timeout
        self.cell = AdapterSession(policy=policy, tools=Broker(self._functions), **options)

    @property
    def tools(self) -> dict[str, Callable[..., Any]]:
        """The tools; those that are added are offered to the next program."""
        return self._tools

    def start(self) -> None:
        """Open the session, which the first program would else do."""
        self._answered(lambda: self.cell.session)

    def execute(self, code: str, variables: dict[str, Any] | None = None) -> Any:
        """Run a program; return its output, the value of its last expression if it printed nothing, or
        the FinalOutput of SUBMIT.

        Raises SyntaxError and CodeExecutionError for its failures, CodeInterpreterError for ours.
        """
        self._bind()
        self._submitted.clear()
        result = self._answered(
            lambda: self.cell.execute(code, inputs=variables or {}, timeout=self._timeout)
        )
        if self._submitted:
            return FinalOutput(self._submitted[0])
        if result.session_lost:
            raise CodeInterpreterError(f"the cell has ended: {self._failure(result)}")
        if not result.ok:
            words = self._failure(result)
            raise SyntaxError(words) if _is_syntax(result) else CodeExecutionError(words)
        return result.stdout or result.value

    def shutdown(self) -> None:
        """End the session and its sandbox."""
        self.cell.close()

    def _bind(self) -> None:
        """Give tools and SUBMIT their names in the session, if they are others than before."""
        fields = None if self.output_fields is None else [e["name"] for e in self.output_fields]
        wanted = (tuple(self._tools.items()), tuple(fields or ()), fields is None)
        if wanted == self._bound:
            return
        self._functions.clear()
        self._functions.add(_SUBMITTED, lambda given: self._submitted.append(given["args"][0]))
        names: dict[str, str] = {}
        for name, function in self._tools.items():
            if not name.isidentifier() or keyword.iskeyword(name) or name == _SUBMIT:
                raise CodeInterpreterError(f"tools: {name!r} cannot be the name of a tool")
            names[name] = self._functions.add(_name_of(name, names), _called(function))
        code = f"{_PRELUDE}\n_cellwright_bind({names!r}, {fields!r})\ndel _cellwright_bind"
        bound = self._answered(lambda: self.cell.execute(code))
        if not bound.ok:
            raise CodeInterpreterError(f"tools: {self._failure(bound)}")
        self._bound = wanted

    def _failure(self, result: SandboxResult) -> str:
        words = result.traceback or result.error or str(result.reason)
        if result.status is SandboxStatus.TIMEOUT:
            words = result.error or "the program took too long"
        policy = self.cell.sandbox.policy
        return "\n".join((words, *advice(result.notices, result.hints, policy, is_ok=False)))

    def _answered(self, do: Callable[[], Any]) -> Any:
        try:
            return do()
        except CellwrightError as error:
            raise CodeInterpreterError(str(error)) from error


def _name_of(name: str, names: Mapping[str, str]) -> str:
    """Return a name that a tool can have: some of DSPy's own begin with underscores."""
    plain = name.strip("_").lower() or "tool"
    return plain if plain not in {_SUBMITTED, *names.values()} else f"{plain}-{len(names)}"


def _called(function: Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
    """Return a function, plain or async, that calls a tool; DSPy's own functions take arguments by
    name only."""
    names = [
        each.name for each in inspect.signature(function).parameters.values()
        if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]  # fmt: skip

    def call(given: dict[str, Any]) -> Any:
        args, named = given["args"], dict[str, Any]()
        if len(args) <= len(names):
            args, named = (), dict(zip(names, args, strict=False))
        value = function(*args, **named, **given["kwargs"])
        return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value

    return call


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _is_syntax(result: SandboxResult) -> bool:
    return (result.error or "").startswith(("SyntaxError", "IndentationError", "TabError"))
