"""`Tool`: a tool that can be called; `Caller`: the execution, session or agent for which it is called.

A call that a tool makes in turn belongs to the caller of that tool: in the trail, in depth, and in the
tools that it may call.

`@tool`: marks a function of the host as a tool, which runs on the host.

`Vault`: credentials that the broker adds to calls and redacts from results.

They never enter a cell, a record or an error message, as far as `Redaction` (text/redaction.py)
recognises them.  A credential that a tool returns in another form reaches the caller.

`Meter`: the budget and the rate limit of one caller's tool calls; refused calls count too.
"""

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, overload

import msgspec

from ...policies.errors import (
    CellwrightError,
    ToolArgumentsInvalid,
    ToolBudgetExceeded,
    ToolFailed,
    ToolInvalid,
    ToolResultInvalid,
)
from ...policies.tool_rules import Tools
from ...runner.audit.record import Span
from ...runner.cell.plain_values import plain
from ...runner.messages import Answer, Call
from ..schemas.functions import describe_function, hints_of
from ..schemas.spec import ToolOwner, ToolSpec, ToolState, normalised
from ..text.redaction import SHORTEST
from ..user_data import SecretSource, SecretUnreadable, read_secret


class Vault:
    """Credentials by name; each is text, or a function that returns it."""

    def __init__(self, credentials: Mapping[str, str | SecretSource] = {}) -> None:
        self._sources = dict(credentials)

    def __repr__(self) -> str:
        return f"Vault({', '.join(sorted(self._sources))})"

    def __len__(self) -> int:
        return len(self._sources)

    def get(self, name: str) -> str:
        """Return a credential; raises ToolFailed, without the credential, if it cannot be read."""
        source = self._sources.get(name)
        if source is None:
            raise ToolFailed(f"credential {name!r} is not in the vault", "Vault({name: ...})")
        try:
            value = read_secret(source)
        except SecretUnreadable as error:
            raise ToolFailed(f"credential {name!r} cannot be read: {error}") from None
        if len(value) < SHORTEST:
            raise ToolFailed(f"credential {name!r} is shorter than {SHORTEST} characters")
        return value


class Meter:
    """Counts the calls of one execution, or of one caller on the host.  Safe from many threads.

    The rate limit is a token bucket that holds one second's calls and refills at `per_second`; 0
    allows no call.
    """

    def __init__(
        self, most: float, per_second: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = most
        self._per_second = per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._made = 0
        self._most_room = self._room = max(1.0, per_second) if per_second > 0 else 0.0
        self._looked_at = clock()
        self._refused = 0

    def count(self) -> None:
        """Count a call; raises ToolBudgetExceeded beyond the budget or the rate limit."""
        with self._lock:
            now = self._clock()
            filled = self._room + (now - self._looked_at) * self._per_second
            self._room = min(self._most_room, filled)
            self._looked_at = now
            if self._made < self._most and self._room >= 1.0:
                self._made += 1
                self._room -= 1.0
                return
            self._refused += 1
            exceeded = self._exceeded()
            exceeded.times = self._refused
            raise exceeded

    def _exceeded(self) -> ToolBudgetExceeded:
        if self._made >= self._most:
            return ToolBudgetExceeded(
                f"{self._made} calls of tools were made, as many as the policy allows",
                "raise tools.calls of the policy",
            )
        return ToolBudgetExceeded(
            f"more than {self._per_second:g} calls of tools a second",
            "wait, or raise tools.calls_per_second of the policy",
        )


if TYPE_CHECKING:
    from ...runner.audit.log import AuditLog
    from ..privacy.scope import PrivacyScope
else:  # their imports take long; help() has msgspec evaluate the annotations of Caller
    AuditLog = PrivacyScope = Any


class PendingCall(Protocol):
    """A call that a run records (`LiveCall` in runs/recorder.py); `call` identifies it in the run."""

    call: str

    def begin(self, tool_digest: str) -> None:
        """Record the call of a tool with this digest; on RegistryError it must not be made."""


class CallRecorder(Protocol):
    """Answers the calls of a durable run (`RunRecorder` in runs/recorder.py)."""

    @property
    def run(self) -> str:
        """The id of the run."""

    def answer(
        self, call: Call, arguments: dict[str, Any], anew: Callable[[PendingCall], Answer],
        tell: Callable[[Answer], None], *, may_be_repeated: bool,
    ) -> None:  # fmt: skip
        """Pass the answer to `call` to `tell`: the recorded one, or the one that `anew` returns."""


class Caller(msgspec.Struct, frozen=True):
    """The execution, session or agent for which a tool is called.

    `id` is its id or name; `traceparent` is the span that causes the call, or `within` is, if a tool
    makes it; `depth` counts the tools that called each other before this call; `tools` are the only
    tools that it may call, None means all; `rules` are those of its policy; `meter` counts its calls;
    `privacy` holds the personal data that it gets as tokens.
    """

    id: str = ""
    traceparent: str = ""
    depth: int = 0
    tools: frozenset[str] | None = None
    rules: Tools = Tools()
    meter: Meter | None = None
    recorder: CallRecorder | None = None  # the recorder of a durable run
    intend: Callable[[str], None] | None = None  # gets ToolSpec.digest just before a tool is called
    is_model: bool = False  # a model reads results itself, so long ones come in parts
    trails: "tuple[AuditLog, ...]" = ()  # trails of the sandboxes whose programs made the call
    call: str = ""  # the identity of the call within the run
    privacy: "PrivacyScope | None" = None
    within: Span | None = None  # span of the tool that makes the call

    @property
    def cause(self) -> str:
        """The span that causes the call, as text."""
        span = self.within
        return (span.traceparent or span.trace_id) if span else self.traceparent


Perform = Callable[[dict[str, Any], Caller], Any]


class Tool(NamedTuple):
    """A tool that can be called: `perform` executes one call, whose arguments were checked."""

    spec: "ToolSpec"
    perform: Perform


CALLING: contextvars.ContextVar[Caller | None] = contextvars.ContextVar("calling", default=None)


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
        setattr(function, _MARK, _marked(function, **about))
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
    return found if isinstance(found, Tool) else _marked(function)


def is_same(one: Tool, other: Tool) -> bool:
    """Tell whether two tools are the same function, or the same Tool, with the same description."""
    return one.spec == other.spec and _function(one) == _function(other)


def _function(tool: Tool) -> object:
    return getattr(tool.perform, "__wrapped__", tool.perform)


def is_marked(function: object) -> bool:
    """Tell whether `function` is marked with `@tool`."""
    return isinstance(getattr(function, _MARK, None), Tool)


def _marked(
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
