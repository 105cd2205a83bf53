"""`@tool`: marks a function of the host as a tool, which runs on the host."""

import asyncio
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any, TypeVar, overload

import msgspec

from ...policies.errors import (
    CellwrightError,
    ToolArgumentsInvalid,
    ToolFailed,
    ToolInvalid,
    ToolResultInvalid,
)
from ...runner.cell.values import plain
from ..schemas.functions import describe_function, hints_of
from ..schemas.spec import ToolOwner, ToolSpec, ToolState
from ..schemas.tool_names import normalised
from .caller import Caller, Perform, Tool

Function = TypeVar("Function", bound=Callable[..., Any])
_MARK = "__cellwright_tool__"
_SCALARS = frozenset((str, int, float, bool, type(None)))  # are JSON without a conversion


@overload
def tool(function: Function) -> Function: ...
@overload
def tool(
    *, name: str | None = None, description: str | None = None, risky: bool = False,
    idempotent: bool = False, calls: Sequence[str] = (), tags: Sequence[str] = (),
) -> Callable[[Function], Function]: ...  # fmt: skip


def tool(function: Any = None, **about: Any) -> Any:
    """Mark a function as a tool, and return it unchanged.

    Its schema comes from its signature, its annotations and its docstring.  `risky`: each call needs
    approval.  `idempotent`: calling it twice has the same effect as calling it once.  Raises
    ToolInvalid for a function whose parameters cannot be passed by name.
    """
    if function is None:
        return lambda function: tool(function, **about)
    try:
        setattr(function, _MARK, _tool(function, **about))
    except AttributeError:
        raise ToolInvalid(
            f"{function!r} has no attributes and cannot be marked", "wrap it in a function"
        ) from None
    return function


def tool_of(function: Callable[..., Any] | Tool) -> Tool:
    """Return the tool of a function, marked or not."""
    if isinstance(function, Tool):
        return function
    found = getattr(function, _MARK, None)
    return found if isinstance(found, Tool) else _tool(function)


def is_same(one: Tool, other: Tool) -> bool:
    """Tell whether two tools are the same function, or the same Tool, with the same description."""
    return one.spec == other.spec and _function(one) == _function(other)


def _function(tool: Tool) -> object:
    return getattr(tool.perform, "__wrapped__", tool.perform)


def is_marked(function: object) -> bool:
    """Tell whether `function` is marked with `@tool`."""
    return isinstance(getattr(function, _MARK, None), Tool)


def _tool(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    description: str | None = None,
    risky: bool = False,
    idempotent: bool = False,
    calls: Sequence[str] = (),
    tags: Sequence[str] = (),
) -> Tool:
    described = describe_function(function, filled_in=Caller)
    spec = ToolSpec(
        name=normalised(name or described.function),
        description=description or described.description,
        parameters=described.parameters,
        output_schema=described.output,
        state=ToolState.TRUSTED,
        owner=ToolOwner.DEVELOPER,
        function=described.function,
        calls=tuple(calls),
        risky=risky,
        idempotent=idempotent,
        tags=tuple(tags),
    )
    return Tool(spec, _perform_with(function))


def _perform_with(function: Callable[..., Any]) -> Perform:
    """Return a `Perform` that converts arguments to the annotated types, and the result to JSON."""

    @cache
    def hints() -> tuple[dict[str, Any], tuple[str, ...]]:
        """Evaluate at the first call: annotations may name classes that are defined later."""
        found = hints_of(function)
        return found, tuple(name for name, hint in found.items() if hint is Caller)

    @wraps(function, assigned=(), updated=())
    def perform(arguments: dict[str, Any], caller: Caller) -> Any:
        types, callers = hints()
        given = {}
        for name, value in arguments.items():
            is_typed = type(value) is types.get(name) and type(value) in _SCALARS
            given[name] = value if is_typed else _typed(name, value, types)
        for name in callers:
            given[name] = caller
        try:
            result = function(**given)
            if type(result) in _SCALARS:
                return result
            if asyncio.iscoroutine(result):
                result = asyncio.run(result)
        except CellwrightError:
            raise
        except Exception as error:
            said = f"{function.__name__}: {type(error).__name__}: {error}"
            raise ToolFailed(said, tool=function.__name__) from error
        return _plain(function.__name__, result)

    return perform


def _typed(name: str, value: Any, hints: dict[str, Any]) -> Any:
    try:
        return msgspec.convert(value, hints.get(name, Any))
    except msgspec.ValidationError as error:
        raise ToolArgumentsInvalid(f"{name}: {error}") from None
    except TypeError:  # a type that msgspec does not know
        return value


def _plain(name: str, result: Any) -> Any:
    try:
        return msgspec.to_builtins(result, str_keys=True, enc_hook=plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolResultInvalid(f"{name}: the result is not JSON: {error}", tool=name) from None
