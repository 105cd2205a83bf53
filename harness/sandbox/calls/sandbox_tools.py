"""`SandboxTools`: the tools of one sandbox, which programs in its cells may call."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from ....policies import errors
from ....policies.languages import PYTHON
from ....policies.policy import Policy
from ....policies.tool_rules import Tools, narrow_tools
from ....runner.messages import Answer, Call, decode_json
from ....runner.requests.request import Request
from ....runner.shared_files import SharedFiles
from ....runner.watching.open_calls import Orphans, Tell
from ...stubs.stub_tree import StubFolders
from ...tools.broker import Broker
from ...tools.catalogue import Catalogue, JoinedCatalogue, catalogue_of
from ...tools.results import READ_ALL, READ_RESULT
from ...tools.tool import CALLING, Caller, Meter, Tool

if TYPE_CHECKING:
    from ....runner.audit.log import AuditLog
    from ....runner.audit.record import Span
    from .private import PrivateCalls

_LONGEST_NAME = 128  # characters of a requested tool's name, which answers and records repeat
_REMEMBERED = 64
_LONGEST_WORDS = 4000  # characters in the message of a refusal
_MOST_NAMED = 500  # tools with a name of their own; further ones only by call_tool
_MOST_BESIDE_STUBS = 32  # with more tools the guest finds all of them as files when it imports them

_Names = dict[str, tuple[str, ...]]
_Tools = Catalogue | Iterable[Tool | Callable[..., Any]]
# The argument `tools` of a sandbox.
Offered = Broker | _Tools


def broker_of(given: Offered | None, policy: Policy, audit: "AuditLog | None") -> Broker:
    """Return the broker of a sandbox's tools; one that is given has its own tools and no others."""
    own: Any = getattr(given, "broker", given)  # a ToolFactory's broker, with its rules and filters
    if isinstance(own, Broker):
        return own
    return Broker(with_http(() if own is None else own, policy), audit=audit)


def with_http(tools: _Tools, policy: Policy) -> _Tools:
    """Return `tools` with the tool that the section `http` of the policy asks for, if it does."""
    if not policy.http.allow:
        return tools
    from ...tools.http.http_tool import http_tools  # imports ssl

    return JoinedCatalogue(catalogue_of(http_tools(policy.http)), catalogue_of(tools))


class SandboxTools:
    """Answers the calls that programs under one policy make.

    A program sends the name of a tool and arguments, nothing else; the socket identifies the caller.
    """

    def __init__(
        self, broker: Broker, rules: Tools, audit: "AuditLog | None",
        private: "PrivateCalls | None" = None,
    ) -> None:  # fmt: skip
        """`audit` is the trail of the sandbox: calls are recorded there and in the broker's trail."""
        self.broker = broker
        self._trails = (audit,) if audit else ()
        self._rules = rules
        self._private = private
        self._orphans = Orphans()
        self._known: dict[tuple[frozenset[str] | None, str], tuple[int | None, _Names]] = {}
        self._stubs = StubFolders(lambda name: broker.may_call(name, Caller(rules=rules)))

    def shared_files(self, language: str) -> SharedFiles:
        """Return the files about tools that cells of `language` see."""
        return self._stubs.shared_files(language)

    def prepare(
        self, request: Request, language: str, span: "Span | None", session_id: str | None
    ) -> Request:
        """Return `request` with the tools that its program may call, and the function that answers."""
        caller = self._caller(session_id or request.execution_id, span)
        if self._private and caller.privacy is None:
            caller = replace(caller, privacy=self._private.scope(session_id))
        names = self._names(caller, language)
        return replace(
            request, tools=names, orphans=self._orphans,
            on_call=partial(self.answer, caller), sites=caller.recorder is not None,
        )  # fmt: skip

    def _names(self, caller: Caller, language: str) -> _Names:
        revision = self.broker.revision()
        known = self._known.get((caller.tools, language))
        if known and known[0] == revision is not None:
            return known[1]
        names = self._named(caller, language)
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        self._known[caller.tools, language] = revision, names
        return names

    def _named(self, caller: Caller, language: str) -> _Names:
        specs = list(self.broker.specs(caller))
        most = _MOST_NAMED
        if (
            caller.tools is None
        ):  # otherwise it may call only a few tools, and other cells must not see them
            self._stubs.follow(language, specs)
            most = _MOST_BESIDE_STUBS if language == PYTHON else most
        few = specs if len(specs) <= most else specs[:_MOST_NAMED] if language != PYTHON else []
        named = sorted((*few, READ_RESULT, READ_ALL), key=lambda spec: spec.name)
        return {spec.name: tuple(spec.parameters.get("properties", ())) for spec in named}

    def answer(self, caller: Caller, call: Call, tell: Tell) -> None:
        """Call a tool for a program and pass on the answer; there is none if the program is stopped to
        be resumed later."""
        try:
            arguments = self._arguments(call)
            if caller.recorder is None:
                tell(self._call(call, arguments, caller))
                return
            caller.recorder.answer(
                call,
                arguments,
                lambda making: self._call(
                    call, arguments, replace(caller, intend=making.begin, call=making.call)
                ),
                tell,
                may_be_repeated=self.broker.may_repeat(call.name),
            )
        except errors.ToolError as error:  # refused before it reached the broker
            tell(_refusal(call, self.broker.refuse(call.name[:_LONGEST_NAME], caller, error)))
        except errors.CellwrightError as error:  # it cannot be recorded, so it must not be made
            tell(_refusal(call, error))

    def _arguments(self, call: Call) -> dict[str, Any]:
        if self._orphans.is_full():
            raise errors.ToolBudgetExceeded(
                "too many tools still run that were called by programs which have ended",
                "call again once some of them have returned",
            )
        if len(call.name) > _LONGEST_NAME:
            raise errors.ToolNotFound(f"the name has more than {_LONGEST_NAME} characters")
        most = min(self._rules.argument_bytes, self.broker.rules.argument_bytes)
        if len(call.arguments) > most:
            raise errors.ToolArgumentsInvalid(f"arguments: more than {most:.0f} bytes")
        try:
            arguments = decode_json(call.arguments)
        except msgspec.DecodeError as error:
            raise errors.ToolArgumentsInvalid(f"arguments: not JSON: {error}") from None
        if not isinstance(arguments, dict):
            raise errors.ToolArgumentsInvalid("arguments: must be a JSON object")
        return arguments

    def _call(self, call: Call, arguments: dict[str, Any], caller: Caller) -> Answer:
        try:
            return Answer(call.number, self.broker.call_for_json(call.name, arguments, caller))
        except errors.CellwrightError as error:
            return _refusal(call, error)
        except BaseException as error:  # noqa: BLE001 - else the program would wait forever
            return _refusal(call, errors.InternalError(f"internal error: {type(error).__name__}"))

    def _caller(self, id: str, span: "Span | None") -> Caller:
        trace = (span.traceparent or span.trace_id) if span else ""
        meter = Meter(self._rules.calls, self._rules.calls_per_second)
        if above := CALLING.get():
            id = above.id if above.recorder else id  # a durable run has more than one execution
            return replace(
                above, id=id, traceparent=trace or above.cause, within=None, meter=above.meter or meter,
                rules=narrow_tools(above.rules, self._rules), trails=above.trails + self._trails,
            )  # fmt: skip
        return Caller(id=id, traceparent=trace, rules=self._rules, meter=meter, trails=self._trails)


def _refusal(call: Call, error: errors.CellwrightError) -> Answer:
    """Return the answer for `error`; its message is cut, since it may repeat text of the program.

    Programs get only the hint about an unknown name, because it names tools that they may call.
    """
    words = error.what[:_LONGEST_WORDS]
    if isinstance(error, errors.ToolNotFound) and error.hint:
        words += f"; {error.hint[:_LONGEST_WORDS]}"
    return Answer(call.number, None, error.kind, words)
