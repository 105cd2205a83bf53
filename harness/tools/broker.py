"""`Broker`: the one path on the host that every call of a tool takes, whoever calls.

Its gates are the lines of `Broker._pass`, in order; none is skipped for any caller.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from ...policies.errors import (
    ApprovalRequired,
    CellwrightError,
    ToolArgumentsInvalid,
    ToolDenied,
    ToolError,
    ToolFailed,
    ToolNotFound,
    ToolResultInvalid,
)
from ...policies.tools import Tools, Verdict, judge
from ...runner.audit.level import AuditLevel
from ...runner.audit.spans import Span, span_of
from ..calling import CALLING
from .approval import Approve, Asked, nobody
from .meter import Meter
from .results import Results
from .spec import Caller, Tool, ToolOwner, ToolSpec
from .validation import compile_schema
from .vault import Redaction, Vault

if TYPE_CHECKING:
    from ...runner.audit.log import AuditLog

_ERROR_CHARACTERS = 1000
_ENCODE = json.JSONEncoder(allow_nan=False).encode


class Catalogue(Protocol):
    """Where tools are found."""

    def get(self, name: str) -> Tool:
        """Return a tool; raises ToolNotFound."""

    def specs(self) -> Iterable[ToolSpec]:
        """Return those that may be offered to a program."""


class Offer:
    """A few tools, by name."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._tools = {tool.spec.name: tool for tool in tools}

    def get(self, name: str) -> Tool:
        if name not in self._tools:
            raise ToolNotFound(f"there is no tool {name!r}", tool=name)
        return self._tools[name]

    def specs(self) -> Iterable[ToolSpec]:
        return [tool.spec for tool in self._tools.values()]


class _Passing(NamedTuple):
    """A call on its way."""

    tool: Tool
    arguments: dict[str, Any]
    caller: Caller
    span: Span


class Broker:
    """Calls tools for programs in cells, for made tools and for whoever embeds it.  Safe from many
    threads.

    `rules` hold for every caller, beside those of the caller's own policy.  `approve` is asked about
    calls that the rules, or the tool itself, want approved.
    """

    def __init__(
        self,
        tools: Catalogue,
        *,
        rules: Tools = Tools(),  # noqa: B008 - a constant
        vault: Vault | None = None,
        approve: Approve = nobody,
        audit: "AuditLog | None" = None,
    ) -> None:
        self._tools = tools
        self._rules = rules
        self._vault = vault or Vault()
        self._approve = approve
        self._audit = audit
        self._results = Results()
        self._host = Caller(id="host", meter=Meter(float("inf"), rules.calls_per_second))

    def call(self, name: str, arguments: dict[str, Any], caller: Caller | None = None) -> Any:
        """Return what the tool gives; raises a ToolError that says at which gate the call ended."""
        caller = caller or CALLING.get() or self._host
        span = span_of(caller.traceparent)
        try:
            return self._pass(name, arguments, caller, span)
        except ToolError as error:
            self._note_refusal(name, caller, span, error)
            raise

    def _pass(self, name: str, arguments: dict[str, Any], caller: Caller, span: Span) -> Any:
        tool = self._find(name, caller)
        passing = _Passing(tool, arguments, caller, span)
        self._check_arguments(passing)
        verdict = self._judge(passing)
        self._count(passing)
        self._ask(passing, verdict)
        secrets = self._credentials(tool.spec)
        redaction = Redaction(secrets.values()) if secrets else _NOTHING
        self._note("call", passing, **_summary(arguments))
        value = self._perform(passing, secrets, redaction)
        value, text = self._check_result(tool.spec, value, redaction)
        self._note("returned", passing, result_bytes=len(text))
        limit = min(self._rules.result_bytes, caller.rules.result_bytes)
        return self._results.fit(value, text, limit, caller.id)

    def explain(self, name: str, arguments: dict[str, Any], rules: Tools) -> list[str]:
        """Return what the rules say of a call, each that was looked at, without calling."""
        verdicts = [judge(self._rules, name, arguments), judge(rules, name, arguments)]
        return [line for verdict in verdicts for line in verdict.trace] + [
            f"{name}: {_strictest(verdicts).effect}"
        ]

    def offered(self, caller: Caller) -> dict[str, tuple[str, ...]]:
        """Return the tools that `caller` can name, and the names of their parameters."""
        specs = self._tools.specs() if caller.tools is None else self._named(caller.tools)
        return {
            spec.name: tuple(spec.parameters.get("properties", ()))
            for spec in (*specs, _READ_RESULT)
        }

    def _named(self, names: Iterable[str]) -> list[ToolSpec]:
        """Return the specs of those of `names` that can be called."""
        found = []
        for name in sorted(names):
            with contextlib.suppress(ToolError):
                found.append(self._tools.get(name).spec)
        return found

    # the gates

    def _find(self, name: str, caller: Caller) -> Tool:
        if name == _READ_RESULT.name:
            return Tool(_READ_RESULT, self._read_result)
        tool = self._tools.get(name)
        if caller.tools is not None and tool.spec.name not in caller.tools:
            raise ToolDenied(f"{caller.id} may not call {name}", tool=name)
        if caller.depth >= min(self._rules.depth, caller.rules.depth):
            raise ToolDenied(f"{caller.depth} tools have called each other already", tool=name)
        return tool

    def _check_arguments(self, passing: _Passing) -> None:
        spec = passing.tool.spec
        if given := spec.credentials.keys() & passing.arguments.keys():
            names = ", ".join(sorted(given))
            raise ToolArgumentsInvalid(f"{names}: only the host gives that", tool=spec.name)
        if complaints := compile_schema(spec.parameters).complaints(passing.arguments):
            raise ToolArgumentsInvalid("; ".join(complaints), tool=spec.name)

    def _judge(self, passing: _Passing) -> Verdict:
        name = passing.tool.spec.name
        if passing.tool.spec is _READ_RESULT:
            return _ALLOWED
        rules = (self._rules, passing.caller.rules)
        verdict = _strictest([judge(each, name, passing.arguments) for each in rules])
        if verdict.effect == "deny":
            raise ToolDenied(f"{name}: {verdict.reason or 'a rule denies it'}", tool=name)
        return verdict

    def _count(self, passing: _Passing) -> None:
        if passing.caller.meter:
            passing.caller.meter.count()

    def _ask(self, passing: _Passing, verdict: Verdict) -> None:
        spec = passing.tool.spec
        if verdict.effect != "approve" and not spec.risky:
            return
        reason = verdict.reason or (
            "the tool is risky" if spec.risky else "a rule wants it approved"
        )
        caller = passing.caller
        run = caller.recorder.run if caller.recorder else ""
        version = f"{spec.version} {spec.source_hash}"  # another may be made before there is a word
        asked = Asked(
            spec.name, spec.description, passing.arguments, caller.id, reason, run, version
        )
        if self._approve(asked) is not True:
            raise ApprovalRequired(f"{spec.name} was not approved", tool=spec.name)
        self._note("approved", passing, digest=asked.digest)

    def _credentials(self, spec: ToolSpec) -> dict[str, str]:
        return {name: self._vault.get(key) for name, key in spec.credentials.items()}

    def _perform(self, passing: _Passing, secrets: dict[str, str], redaction: Redaction) -> Any:
        tool, caller = passing.tool, passing.caller
        made = tool.spec.owner is ToolOwner.AGENT
        inner = caller._replace(
            depth=caller.depth + 1,
            recorder=None,  # what a tool calls is part of its answer, which is recorded as one
            traceparent=passing.span.traceparent or passing.span.trace_id,
            tools=frozenset(tool.spec.calls) if made else caller.tools,
        )
        token = CALLING.set(inner)
        try:
            return tool.perform(passing.arguments | secrets, inner)
        except ToolError as error:
            told = _kind(error)(_short(redaction.text(str(error))), tool=tool.spec.name)
            if isinstance(told, ToolFailed) and not secrets:
                told.result = getattr(error, "result", None)
            raise told from None
        except CellwrightError as error:
            words = _short(redaction.text(str(error)))
            raise ToolFailed(words, tool=tool.spec.name) from (None if secrets else error)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a tool raises
            words = _short(redaction.text(f"{type(error).__name__}: {error}"))
            raise ToolFailed(words, tool=tool.spec.name) from (None if secrets else error)
        finally:
            CALLING.reset(token)

    def _check_result(self, spec: ToolSpec, value: Any, redaction: Redaction) -> tuple[Any, str]:
        """Return `value` as JSON has it, and as JSON, in which no credential stands."""
        try:
            plain = msgspec.to_builtins(value, str_keys=True)
            text = _ENCODE(plain)
        except (TypeError, ValueError, RecursionError) as error:
            raise ToolResultInvalid(f"the result is not JSON: {error}", tool=spec.name) from None
        if redaction is not _NOTHING:
            text = redaction.text(text)
            try:
                plain = json.loads(text)
            except ValueError:  # what was taken out was no text: a number, or part of one
                raise ToolResultInvalid("a credential stands in it", tool=spec.name) from None
        if spec.output_schema:
            complaints = compile_schema(spec.output_schema).complaints(plain)
            if complaints:
                raise ToolResultInvalid("; ".join(complaints), tool=spec.name)
        return plain, text

    def _read_result(self, arguments: dict[str, Any], caller: Caller) -> Any:
        start, characters = arguments.get("start", 0), arguments.get("characters", 10_000)
        most = min(self._rules.result_bytes, caller.rules.result_bytes) // 8
        return self._results.read(arguments["result_id"], start, min(characters, most), caller.id)

    # the trail

    def _note(self, action: str, passing: _Passing, **details: Any) -> None:
        if self._audit:
            self._audit.record(
                "tool", action, target=passing.tool.spec.name, span=passing.span,
                caller=passing.caller.id, depth=passing.caller.depth, **details,
            )  # fmt: skip

    def _note_refusal(self, name: str, caller: Caller, span: Span, error: ToolError) -> None:
        if self._audit:
            refused = not isinstance(error, ToolFailed | ToolResultInvalid)
            action = "refused" if refused else "failed"
            self._audit.record(
                "tool", "waiting" if kind_of(error) == "paused" else action, target=name,
                span=span, allowed=not refused, level=AuditLevel.WARNING, caller=caller.id,
                kind=kind_of(error), why=error.what,
            )  # fmt: skip


_READ_RESULT = ToolSpec(
    name="results.read",
    description="Read a slice of a long result, as the text of its JSON.",
    owner=ToolOwner.DEVELOPER,
    parameters={
        "type": "object",
        "properties": {
            "result_id": {"type": "string"},
            "start": {"type": "integer", "minimum": 0},
            "characters": {"type": "integer", "minimum": 1},
        },
        "required": ["result_id"],
        "additionalProperties": False,
    },
)


_ALLOWED = Verdict("allow", "", ())
_NOTHING = Redaction(())


def _strictest(verdicts: list[Verdict]) -> Verdict:
    order = ("allow", "approve", "deny")
    return max(verdicts, key=lambda verdict: order.index(verdict.effect))


def _summary(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return what the trail keeps of arguments: not their text, which may hold anything."""
    text = msgspec.json.encode(arguments, order="deterministic")
    return {"arguments_sha256": hashlib.sha256(text).hexdigest(), "arguments_bytes": len(text)}


def _short(text: str) -> str:
    return text if len(text) <= _ERROR_CHARACTERS else text[:_ERROR_CHARACTERS] + "..."


def _kind(error: ToolError) -> type[ToolError]:
    """Return the nearest class of ours: one of the tool's own may be made of other arguments."""
    kinds = type(error).__mro__
    return next(kind for kind in kinds if kind.__module__.startswith(_OURS))


_OURS = f"{__package__.split('.')[0]}."
_KINDS = {
    "ToolNotFound": "not_found",
    "Pausing": "paused",
    "ToolArgumentsInvalid": "invalid_arguments",
    "ApprovalRequired": "not_approved",
    "ToolDenied": "denied",
    "ToolBudgetExceeded": "budget",
    "ToolResultInvalid": "invalid_result",
}


def kind_of(error: Exception) -> str:
    """Return the word by which a program in a cell knows `error`."""
    return _KINDS.get(type(error).__name__, "failed")
