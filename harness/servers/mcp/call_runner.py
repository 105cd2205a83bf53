"""Events of answer streams, kept so that a client whose connection broke can resume a stream.

The SDK names the streams of each conversation by the ids of its requests, and has one store for all
conversations.  So events belong to the conversation of the current context, and the id of an event is
unknown in another conversation.

`CallRunner`: carries out tool calls in threads and asks for approval where a call needs it.

The work of a request is cancelled when the request ends.
"""

import codecs
import functools
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import partial
from typing import NamedTuple, TypeVar, cast

import anyio
from anyio import from_thread
from mcp import types
from mcp.server.streamable_http import EventCallback, EventMessage, EventStore
from mcp.types import JSONRPCError, JSONRPCMessage, JSONRPCResponse

from ....policies.errors import BusyError, CellwrightError
from ....runner.requests.request import OnOutput
from ...mcp.waiting_threads import in_thread
from ...runs.durable_runs import Runs
from ...text.terminal_text import harmless
from ..client_quota import GONE, ClientQuota
from ..http_access import ClientTurns
from ..services import ClientServices, OwnedSessions
from .answers import refused, refused_if_too_large
from .approvals import (
    ApprovalQuestion,
    Context,
    Owner,
    PausedCalls,
    Verdicts,
    ask,
    is_modern,
    owner_of,
    requests_of,
    verdicts_of,
)

RETRY_MILLISECONDS = 500  # after so long a client should reconnect
RESUME_SECONDS = 5.0  # after so long without its client the work of a request is ended
# events and bytes of one conversation; an answer has at most 1 MB
_MOST_EVENTS, _MOST_BYTES = 1000, 2_000_000
BYTES_OF_ONE, BYTES_OF_ALL = (
    48 * 1024 * 1024,
    192 * 1024 * 1024,
)  # bytes of one conversation and of all
_EVENT_BYTES = 200  # bytes of an event in addition to its message


class _KeptEvent(NamedTuple):
    id: str
    stream: str
    message: JSONRPCMessage | None  # None for the first event of a stream, which has no content
    size: int


class EventReader:
    """A request whose client gets events; the client sets `gone` by disconnecting.  `last` is the id
    of the last event of the stream that the request resumed, once there is one."""

    def __init__(self, events: "ConversationEvents", gone: anyio.Event) -> None:
        self.events = events
        self.gone = gone
        self.last = ""


# The SDK runs the work of a conversation in the context of the request that began it.
READER: ContextVar[EventReader | None] = ContextVar("event_reader", default=None)


class _OpenStream:
    """A stream without its last event; `resumed` is set when another request reads it."""

    def __init__(self, reader: EventReader) -> None:
        self.reader = reader
        self.resumed = anyio.Event()


class ConversationEvents:
    """The latest events of one conversation, the oldest first."""

    def __init__(self, bytes_kept: ClientQuota, client: str) -> None:
        self._quota = bytes_kept
        self._client = client
        self._events: deque[_KeptEvent] = deque()
        self._size = 0
        self._streams: dict[str, _OpenStream] = {}

    def keep(self, stream: str, message: JSONRPCMessage | None, reader: EventReader) -> str:
        """Keep an event and return its id; "" if there is no room for it.  Without a message it begins
        the stream of the reader."""
        id = self._keep(stream, message)
        if message is None:
            self._streams.setdefault(stream, _OpenStream(reader))
        elif _is_last(message) and (over := self._streams.pop(stream, None)):
            over.reader.last = id
        return id

    def _keep(self, stream: str, message: JSONRPCMessage | None) -> str:
        size = _EVENT_BYTES
        if message is not None:
            size += len(message.model_dump_json(by_alias=True, exclude_unset=True))
        while self._events and (
            len(self._events) >= _MOST_EVENTS or self._size + size > _MOST_BYTES
        ):
            self._drop_oldest()
        try:
            self._quota.take(self._client, size)
        except BusyError:
            return ""
        event = _KeptEvent(secrets.token_hex(16), stream, message, size)
        self._events.append(event)
        self._size += size
        return event.id

    def after(self, id: str) -> tuple[str, list[_KeptEvent]] | None:
        """Return the stream of an event, and its events from this one on; None if it is not kept."""
        kept = list(self._events)
        at = next((at for at, each in enumerate(kept) if each.id == id), None)
        if at is None:
            return None
        stream = kept[at].stream
        return stream, [each for each in kept[at:] if each.stream == stream]

    def resume(self, stream: str, reader: EventReader) -> None:
        """Note that the client reads a stream by another request."""
        followed = self._streams.setdefault(stream, _OpenStream(reader))
        followed.reader = reader
        followed.resumed.set()

    async def until_abandoned(self, stream: str, reader: EventReader) -> None:
        """Wait until the client of a request has disconnected, and cannot resume its stream or has not
        done so in time."""
        followed = self._streams.setdefault(stream, _OpenStream(reader))
        while True:
            await followed.reader.gone.wait()
            if not any(each.stream == stream for each in self._events):
                return
            with anyio.move_on_after(RESUME_SECONDS):
                await followed.resumed.wait()
            if followed.reader.gone.is_set():
                return
            followed.resumed = anyio.Event()

    def clear(self) -> None:
        """Drop all events."""
        while self._events:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        oldest = self._events.popleft()
        self._size -= oldest.size
        self._quota.give_back(self._client, oldest.size)


class KeptEvents(EventStore):
    """The SDK's interface to the events of the current conversation."""

    async def store_event(self, stream_id: str, message: JSONRPCMessage | None) -> str:
        reader = READER.get()
        return reader.events.keep(stream_id, message, reader) if reader else ""

    async def replay_events_after(
        self, last_event_id: str, send_callback: EventCallback
    ) -> str | None:
        """Send the later events of a stream; return it if more will follow."""
        reader = READER.get()
        found = reader.events.after(last_event_id) if reader else None
        if reader is None or found is None:
            return None
        stream, (first, *later) = found
        for each in later:
            if each.message is not None:
                await send_callback(EventMessage(each.message, each.id))
        if any(each.message is not None and _is_last(each.message) for each in (first, *later)):
            return None
        reader.events.resume(stream, reader)
        return stream


def _is_last(message: JSONRPCMessage) -> bool:
    return isinstance(message, JSONRPCResponse | JSONRPCError)


T = TypeVar("T")
_AT_ONCE, _AT_ONCE_OF_ONE = 64, 48
_UNSENT = 64  # pieces of progress that a client has not read; further ones are dropped
_MESSAGE_CHARACTERS = 4096
_TAKING_SECONDS = 5.0  # time for a client to read the rest of the progress after the result


class RequestControl(NamedTuple):
    """The connection between work and its request: `stop` is a descriptor that is readable once the
    work should end; `on_output` reports a program's output, None if the client did not ask for it."""

    stop: int
    on_output: OnOutput | None


class RequestThreads:
    """Runs blocking work with a limit for all clients and one for each; the rest waits.  So one client
    cannot use all threads."""

    def __init__(self) -> None:
        self._turns = ClientTurns(_AT_ONCE_OF_ONE, _AT_ONCE)

    async def do(self, context: Context, work: Callable[[RequestControl], T]) -> T:
        """Return the result of `work`, or raise its exception; always waits for its end.

        The work is cancelled if the request is cancelled, or if its client disconnects and does not
        resume the answer in time.
        """
        async with self._turns.turn(owner_of(context).client):
            value, error = await _run_reporting(context, work)
        if error:
            raise error
        return cast("T", value)


async def _run_reporting(
    context: Context, work: Callable[[RequestControl], T]
) -> tuple[T | None, Exception | None]:
    """Return the result or the exception of the work, and report its progress meanwhile."""
    progress = Progress(context) if wants_progress(context) else None

    def outcome(stop: int) -> tuple[T | None, Exception | None]:
        try:
            return work(RequestControl(stop, progress.tell if progress else None)), None
        except Exception as error:  # noqa: BLE001 - raised again, outside the task group
            return None, error

    async with anyio.create_task_group() as beside:
        if progress:
            beside.start_soon(progress.relay)
        # waits for the thread, which ends the cell
        found = await in_thread(outcome, _until_abandoned(context))
        if progress:
            await progress.finish()
        beside.cancel_scope.cancel()
    return found


def _until_abandoned(context: Context) -> Callable[[], Awaitable[object]]:
    """Return an awaitable that ends when the client has disconnected and does not resume the answer."""
    if context.request is None:
        return anyio.sleep_forever
    gone: anyio.Event = context.request.scope[GONE]
    reader = READER.get()
    if reader is None or is_modern(context):
        return gone.wait
    return partial(reader.events.until_abandoned, str(context.request_id), reader)


def wants_progress(context: Context) -> bool:
    """Tell whether the client sent a progress token."""
    return (context.meta or {}).get("progress_token") is not None


class Progress:
    """Sends a program's output to its client while the program runs.

    A client that does not read it does not delay the program: it misses some, and gets all of it in the
    result.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._sending, self._receiving = anyio.create_memory_object_stream[str](_UNSENT)
        self._done = anyio.Event()
        make = codecs.getincrementaldecoder("utf-8")  # a character may be split between two pieces
        self._decoders = {"stdout": make("replace"), "stderr": make("replace")}

    def tell(self, stream: str, data: bytes) -> None:
        """Queue output; called from the thread of the work."""
        text = harmless(self._decoders[stream].decode(data))
        pieces = [
            text[at : at + _MESSAGE_CHARACTERS] for at in range(0, len(text), _MESSAGE_CHARACTERS)
        ]
        from_thread.run_sync(self._offer, pieces)

    def _offer(self, pieces: list[str]) -> None:
        for piece in pieces:
            try:
                self._sending.send_nowait(piece)
            except anyio.WouldBlock:
                return

    async def relay(self) -> None:
        """Send the queued output until the queue is closed."""
        try:
            with self._receiving:
                count = 0
                async for piece in self._receiving:
                    count += 1
                    await self._context.session.report_progress(count, None, piece)
        finally:
            self._done.set()

    async def finish(self) -> None:
        """Wait until all is sent, at most `_TAKING_SECONDS`: other requests wait for this thread."""
        self._sending.close()
        with anyio.move_on_after(_TAKING_SECONDS):
            await self._done.wait()


class PausedCall(NamedTuple):
    """A call that stopped at `questions`; `go_on` continues it with the answers, `give_up` ends it."""

    questions: list[ApprovalQuestion]
    go_on: Callable[[Verdicts, RequestControl], "Outcome"]
    give_up: Callable[[], None]


Outcome = types.CallToolResult | PausedCall


class CallContext(NamedTuple):
    """The executor of tool calls: the services and the owner of its client, the sessions and runs of
    all, its place in the trail, and whether the client can be asked."""

    services: ClientServices
    sessions: OwnedSessions
    runs: Runs
    owner: Owner
    traceparent: str
    can_ask: bool


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
        """Start a call, and return its result, or the question that must be answered first."""
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
            for each in kept:  # cancelled, so no request will continue the call
                if isinstance(each, PausedCall):
                    each.give_up()
            raise
