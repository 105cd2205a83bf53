"""`CallRunner`: carries out tool calls and asks for approval where a call needs it."""

import functools
from collections.abc import Callable
from typing import NamedTuple

from mcp import types

from ....policies.errors import CellwrightError
from .answer_sizes import refused_if_too_large
from .answers import refused
from .approvals import ApprovalQuestion, PausedCalls, Verdicts, ask, requests_of, verdicts_of
from .clients import Context, Owner, is_modern, owner_of
from .request_threads import RequestControl, RequestThreads


class PausedCall(NamedTuple):
    """A call that stopped at `questions`; `go_on` continues it with the answers, `give_up` ends it."""

    questions: list[ApprovalQuestion]
    go_on: Callable[[Verdicts, RequestControl], "Outcome"]
    give_up: Callable[[], None]


Outcome = types.CallToolResult | PausedCall
StartCall = Callable[[RequestControl], Outcome]
ShowAnswer = Callable[[Owner, types.CallToolResult], types.CallToolResult]


class CallRunner:
    """Carries out calls.  Clients with a handshake are asked during the request.  Others get the
    questions as the answer and send a new request; meanwhile the call has no cell and no thread."""

    def __init__(self, shown: ShowAnswer, for_model: Callable[[str], str]) -> None:
        """`shown` returns an answer as the client may see it, `for_model` the message of an error."""
        self._shown = shown
        self._for_model = for_model
        self._threads = RequestThreads()
        self._waiting = PausedCalls()

    async def carry_out(
        self, context: Context, begin: StartCall
    ) -> types.CallToolResult | types.InputRequiredResult:
        """Start a call, and return what comes of it, or what has to be answered first."""
        return await self._ask_until_done(context, await self._run_part(context, begin))

    async def go_on(
        self, context: Context, state: str, responses: types.InputResponses | None
    ) -> types.CallToolResult | types.InputRequiredResult:
        """Continue a paused call with the answers."""
        held = self._waiting.take(owner_of(context), state)
        if held is None:
            return refused("no call waits for this answer: it came too late, or twice")
        verdicts = verdicts_of(held.questions, responses)
        outcome = await self._run_part(context, functools.partial(held.go_on, verdicts))
        return await self._ask_until_done(context, outcome)

    async def _ask_until_done(
        self, context: Context, outcome: Outcome
    ) -> types.CallToolResult | types.InputRequiredResult:
        while isinstance(outcome, PausedCall):
            if is_modern(context):
                return self._store(context, outcome)
            try:
                verdicts = await ask(context, outcome.questions)
            except BaseException:
                outcome.give_up()
                raise
            outcome = await self._run_part(context, functools.partial(outcome.go_on, verdicts))
        return refused_if_too_large(outcome, owner_of(context).answer_bytes)

    def _store(
        self, context: Context, asking: PausedCall
    ) -> types.CallToolResult | types.InputRequiredResult:
        try:
            state = self._waiting.hold(
                owner_of(context), asking.questions, asking.go_on, asking.give_up
            )
        except CellwrightError as error:
            return refused(self._for_model(str(error)))
        return types.InputRequiredResult(
            input_requests=requests_of(asking.questions), request_state=state
        )

    async def _run_part(self, context: Context, begin: StartCall) -> Outcome:
        """Run a call until it ends or pauses; an error of the caller's is an answer."""
        kept: list[Outcome] = []
        owner = owner_of(context)

        def work(control: RequestControl) -> Outcome:
            kept.append(begin(control))
            outcome = kept[0]
            return outcome if isinstance(outcome, PausedCall) else self._shown(owner, outcome)

        try:
            return await self._threads.do(context, work)
        except CellwrightError as error:
            return self._shown(owner, refused(self._for_model(str(error))))
        except BaseException:
            for each in kept:  # cancelled: no request will continue it
                if isinstance(each, PausedCall):
                    each.give_up()
            raise
