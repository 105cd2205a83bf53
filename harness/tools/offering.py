"""The tools of one sandbox, as the programs in its cells may call them."""

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from ...policies.errors import CellwrightError
from ...policies.tools import Tools, narrow_tools
from ...runner.messages import Answer, Call, decode_json
from ...runner.performance import Request
from ..calling import CALLING
from .broker import Broker, kind_of
from .meter import Meter
from .spec import Caller

if TYPE_CHECKING:
    from ...runner.audit.spans import Span

_LONGEST_NAME = 128  # of a tool that is looked for; it comes back in the answer and in records
_LONGEST_WORDS = 4000  # of a refusal
_MOST_NAMED = 500  # of more tools than these the rest can be called by call_tool only


class Offering:
    """Answers the calls that programs under one policy make.

    The guest names a tool and gives arguments, nothing else: who calls is known from the socket.
    """

    def __init__(self, broker: Broker, rules: Tools) -> None:
        self.broker = broker
        self._rules = rules

    def prepare(self, request: Request, span: "Span | None", session_id: str | None) -> Request:
        """Return `request` with what its program may call, and what answers it."""
        caller = self._caller(session_id or request.execution_id, span)
        names = dict(sorted(self.broker.offered(caller).items())[:_MOST_NAMED])
        return replace(request, tools=names, on_call=lambda call: self.answer(call, caller))

    def answer(self, call: Call, caller: Caller) -> Answer | None:
        """Call a tool for a program; None if the program is being stopped, to go on another time."""
        if len(call.name) > _LONGEST_NAME:
            return _refusal(call, "not_found", "no tool has a name as long as that")
        try:
            arguments = decode_json(call.arguments)
            if not isinstance(arguments, dict):
                raise msgspec.DecodeError("not an object")
        except msgspec.DecodeError as error:
            return _refusal(call, "invalid_arguments", f"the arguments: {error}")
        if caller.recorder is None:
            return self._call(call, arguments, caller)
        try:
            return caller.recorder.answer(
                call, arguments, lambda: self._call(call, arguments, caller)
            )
        except CellwrightError as error:  # it cannot be recorded, so it is not made
            return _refusal(call, kind_of(error), error.what)

    def _call(self, call: Call, arguments: dict[str, Any], caller: Caller) -> Answer:
        """Return what comes of a call; whatever goes wrong is the answer."""
        try:
            value = self.broker.call(call.name, arguments, caller)
            return Answer(call.number, msgspec.json.encode(value))
        except CellwrightError as error:
            return _refusal(call, kind_of(error), error.what)
        except BaseException as error:  # noqa: BLE001 - or the program would wait for ever
            return _refusal(call, "failed", f"internal error: {type(error).__name__}")

    def _caller(self, id: str, span: "Span | None") -> Caller:
        """Return who calls: the program, and what it works for if that is a tool itself."""
        trace = (span.traceparent or span.trace_id) if span else ""
        meter = Meter(self._rules.calls, self._rules.calls_per_second)
        if above := CALLING.get():
            id = above.id if above.recorder else id  # of a run, which has more than one execution
            return above._replace(
                id=id, traceparent=trace or above.traceparent, meter=above.meter or meter,
                rules=narrow_tools(above.rules, self._rules),
            )  # fmt: skip
        return Caller(id=id, traceparent=trace, rules=self._rules, meter=meter)


def _refusal(call: Call, kind: str, words: str) -> Answer:
    """Say no, in words that are short even where they repeat what the guest said."""
    return Answer(call.number, None, kind, words[:_LONGEST_WORDS])
