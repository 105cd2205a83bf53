"""A call, from start to end: what has to be asked in between is asked."""

import functools
from collections.abc import Callable
from typing import NamedTuple

from mcp import types

from ....policies.errors import CellwrightError
from .answer_sizes import refused_if_too_large
from .answers import refused
from .approvals import ApprovalQuestion, PausedCalls, Verdicts, ask, requests_of, verdicts_of
from .clients import Context, is_modern, owner_of
from .request_threads import RequestControl, RequestThreads


class PausedCall(NamedTuple):
    """A call that got as far as `questions`, and goes on, or is given up."""

    questions: list[ApprovalQuestion]
    go_on: Callable[[Verdicts, RequestControl], "Outcome"]
    give_up: Callable[[], None]


Outcome = types.CallToolResult | PausedCall
StartCall = Callable[[RequestControl], Outcome]


class CallRunner:
    """Carries calls out.  Who can be asked back is asked at once; others are told to come again with
    answers, and the call waits for that, with no cell and no thread."""

    def __init__(self) -> None:
        self._threads = RequestThreads()
        self._waiting = PausedCalls()

    async def carry_out(
        self, context: Context, begin: StartCall
    ) -> types.CallToolResult | types.InputRequiredResult:
        """StartCall a call, and return what comes of it, or what has to be answered first."""
        return await self._until_answered(context, await self._do(context, begin))

    async def go_on(
        self, context: Context, state: str, responses: types.InputResponses | None
    ) -> types.CallToolResult | types.InputRequiredResult:
        """Go on with a call that waited."""
        held = self._waiting.take(owner_of(context), state)
        if held is None:
            return refused("nothing waits for this answer: it came too late, or a second time")
        verdicts = verdicts_of(held.questions, responses)
        outcome = await self._do(context, functools.partial(held.go_on, verdicts))
        return await self._until_answered(context, outcome)

    async def _until_answered(
        self, context: Context, outcome: Outcome
    ) -> types.CallToolResult | types.InputRequiredResult:
        while isinstance(outcome, PausedCall):
            if is_modern(context):
                return self._to_come_again(context, outcome)
            try:
                verdicts = await ask(context, outcome.questions)
            except BaseException:
                outcome.give_up()
                raise
            outcome = await self._do(context, functools.partial(outcome.go_on, verdicts))
        return refused_if_too_large(outcome, owner_of(context).answer_bytes)

    def _to_come_again(
        self, context: Context, asking: PausedCall
    ) -> types.CallToolResult | types.InputRequiredResult:
        try:
            state = self._waiting.hold(
                owner_of(context), asking.questions, asking.go_on, asking.give_up
            )
        except CellwrightError as error:
            return refused(str(error))
        return types.InputRequiredResult(
            input_requests=requests_of(asking.questions), request_state=state
        )

    async def _do(self, context: Context, begin: StartCall) -> Outcome:
        """Do one stretch of a call; what the caller got wrong is an answer."""
        kept: list[Outcome] = []

        def work(control: RequestControl) -> Outcome:
            kept.append(begin(control))
            return kept[0]

        try:
            return await self._threads.do(context, work)
        except CellwrightError as error:
            return refused(str(error))
        except BaseException:
            for each in kept:  # it was cancelled, and nobody will go on with it
                if isinstance(each, PausedCall):
                    each.give_up()
            raise
