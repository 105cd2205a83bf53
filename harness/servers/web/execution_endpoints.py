"""Programs in fresh cells: with an answer at the end, or as a stream of their output."""

import codecs
import contextlib
from collections.abc import AsyncIterator

import anyio

from ....policies.errors import CellwrightError
from ....policies.policy import Policy
from ...sandbox.executing import Executing
from ...sandbox.parameters import CallArguments
from ...sandbox.run import Run
from ..client_turns import run_in_thread
from ..services import refuse_packages
from .endpoint import Endpoint, ServerEvent, WebCall
from .messages import ExecuteBody, ExecutionAnswer, OutputEvent, StartedEvent, execution_answer

STARTED, OUTPUT, RESULT = "started", "output", "result"


def execute(call: WebCall) -> ExecutionAnswer:
    """Run a program in a fresh cell."""
    sandbox = call.state.services.of(call.client).sandbox
    given = given_of(call, sandbox.policy)
    return execution_answer(sandbox._execute(given, None, call.stop).for_model())


async def stream_execution(call: WebCall) -> AsyncIterator[ServerEvent]:
    """Run a program in a fresh cell, and send its output as it comes."""
    services = await run_in_thread(call.state.services.of, call.client)
    given = given_of(call, services.sandbox.policy)
    async for event in stream_of(services.sandbox, given):
        yield event


async def stream_of(executing: Executing, given: CallArguments) -> AsyncIterator[ServerEvent]:
    """Execute, and yield the output as it comes and the result; ends the program if it is closed."""
    run = Run(lambda on_output, cancel: executing._execute(given, on_output, cancel))
    try:
        yield ServerEvent(STARTED, StartedEvent())
        async for event in _output(run):
            yield event
        yield ServerEvent(RESULT, execution_answer((await run.aresult()).for_model()))
    finally:
        run.cancel()
        with anyio.CancelScope(shield=True), contextlib.suppress(CellwrightError):
            await run.aresult()  # it counts as an execution until its cell is gone


async def _output(run: Run) -> AsyncIterator[ServerEvent]:
    make = codecs.getincrementaldecoder("utf-8")  # a character may be split between two pieces
    decoders = {"stdout": make("replace"), "stderr": make("replace")}
    async for stream, data in run.output():
        if text := decoders[stream].decode(data):
            yield ServerEvent(OUTPUT, OutputEvent(stream=stream, text=text))
    for stream, decoder in decoders.items():
        if text := decoder.decode(b"", final=True):
            yield ServerEvent(OUTPUT, OutputEvent(stream=stream, text=text))


def given_of(call: WebCall, policy: Policy, language: str = "python") -> CallArguments:
    """Return the arguments of a call; raises PolicyError for packages that clients may not choose."""
    body: ExecuteBody = call.body
    refuse_packages(policy, body.packages)
    return body.call(call.traceparent, language)


EXECUTION_ENDPOINTS = (
    Endpoint(
        "POST", "/v1/executions", "Run a program in a fresh cell, and answer when it has ended.",
        ExecutionAnswer, ExecuteBody, handler=execute, executes=True,
    ),
    Endpoint(
        "POST", "/v1/executions/stream",
        "Run a program in a fresh cell: `started`, `output` as it comes, and `result`.",
        ExecutionAnswer, ExecuteBody, stream=stream_execution, executes=True,
    ),
)  # fmt: skip
