"""`Endpoint`: a route with its types, from which the application and the OpenAPI document are made; and
the answers to requests that fail, as application/problem+json (RFC 9457).

Streams of events (text/event-stream), numbered from 1, and answers as JSON that every client can
parse.

A program waits for a client that reads its events slowly; a client that takes nothing for a while is
dropped.  Answers are sent in pieces, because uvicorn buffers what it is given at once: a large answer
in one piece would stay in memory for a client that does not read, and the idle timeout would cut off
one that reads slowly.
"""

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import msgspec
from starlette.responses import Response

from ....policies.errors import CellwrightError
from ...agent.agent import Agent
from ...dashboard.dashboard_page import LiveTimeline
from ...runs.durable_runs import Runs
from ...text.terminal_text import harmless
from ..client_quota import GONE, ClientQuota, HeldAmount, Tokens
from ..http_access import MIB, AccessLimits
from ..http_server import Receive, Scope, Send, drop
from ..services import MadeByKey, OwnedSessions, ServicesByClient


class WebLimits(NamedTuple):
    """Limits of one client, and of all together."""

    executions_of_one: int = 64
    executions_of_all: int = 256
    requests_per_second: float = 200.0  # for one client
    stalled_seconds: float = 30.0  # until a client that does not read its stream is dropped
    # Bytes of unread answers. A client that reads slowly is not dropped.
    answer_bytes_of_one: int = 128 * MIB
    answer_bytes_of_all: int = 512 * MIB
    access: AccessLimits = AccessLimits()

    runs_of_one: int = 10_000  # recorded runs of one client
    run_bytes_of_one: int = 48 * MIB

    @property
    def executions(self) -> ClientQuota:
        """Return a quota for executions."""
        return ClientQuota("executions", self.executions_of_one, self.executions_of_all)

    @property
    def answer_bytes(self) -> ClientQuota:
        """Return a quota for the bytes of answers."""
        return ClientQuota(
            "bytes of answers", self.answer_bytes_of_one, self.answer_bytes_of_all,
            "read the answers to earlier requests",
        )  # fmt: skip


class DashboardSources(NamedTuple):
    """The trail for the dashboard: the records written since the server started, and their file."""

    timeline: LiveTimeline
    trail: Path | None = None


class WebState(NamedTuple):
    """The services, sessions and runs of all clients, and who they are."""

    services: ServicesByClient
    sessions: OwnedSessions
    runs: Runs
    tokens: Tokens
    limits: WebLimits = WebLimits()
    dashboard: DashboardSources | None = None
    agents: MadeByKey[str, Agent] | None = None


class ContentAnswer(NamedTuple):
    """An answer that is a file."""

    data: bytes
    name: str


class ServerEvent(NamedTuple):
    """One event of a stream; `name` is empty where the type is within `data`."""

    name: str
    data: msgspec.Struct | Mapping[str, Any] | bytes  # bytes are JSON


class WebCall(NamedTuple):
    """A request that was admitted and decoded.

    `stop` is a descriptor that becomes readable once the client has disconnected: the work should end
    then.  `traceparent` is that of the request, if it has one.  `answer_bytes` counts the bytes of its
    answer until the client has read it: a handler that reads a file counts them first.
    """

    client: str
    state: WebState
    path: Mapping[str, str]
    query: Any
    body: Any
    stop: int
    traceparent: str
    answer_bytes: HeldAmount

    @property
    def id(self) -> str:
        """The owner of what the call opens: all holders of a token are one."""
        return self.client

    @property
    def is_operator(self) -> bool:
        """Tell whether the client may see and decide for all clients."""
        return self.state.tokens.is_operator(self.client)


Handler = Callable[[WebCall], Any]  # blocks, in a thread; returns a struct, None or a ContentAnswer
StreamHandler = Callable[[WebCall], AsyncIterator[ServerEvent]]  # in the event loop


class Endpoint(NamedTuple):
    """One method of one path.

    `takes` is the type of the body: a struct for JSON, `bytes` for a file, None for no body.  `gives`
    is that of the answer.  With `stream` the answer is a stream of events, whose last one is a `gives`.
    `executes`: it counts as an execution.  `needs_operator`: only operators may call it.
    """

    method: str
    path: str
    summary: str
    gives: Any = None
    takes: Any = None
    query: type[msgspec.Struct] | None = None
    handler: Handler | None = None
    stream: StreamHandler | None = None
    status: int = 200
    executes: bool = False
    needs_operator: bool = False

    @property
    def name(self) -> str:
        """The operationId."""
        words = [each for each in self.path.split("/") if each and each != "v1"]
        parts = [each.strip("{}").partition(":")[0].replace("-", "_") for each in words]
        return "_".join((self.method.lower(), *parts))


_MOST_CHARACTERS = 8000  # characters of a message, which may quote a program


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request that failed: `title` names the kind of the error, `detail` says what failed, and `hint`
    what to do."""

    status: int
    title: str
    detail: str
    hint: str = ""


class RequestRefused(CellwrightError):  # noqa: N818 - it reads as a verdict
    """A request that cannot be answered; `status` is that of HTTP."""

    def __init__(self, status: int, title: str, detail: str, hint: str = "") -> None:
        super().__init__(detail, hint)
        self.status = status
        self.title = title


def problem_of(error: Exception) -> Problem:
    """Return the answer to a request that raised an exception; that of a bug has no details."""
    if not isinstance(error, CellwrightError):
        return Problem(status=500, title="bug", detail="the server failed: see its standard error")
    detail, hint = (harmless(each)[:_MOST_CHARACTERS] for each in (error.what, error.hint))
    return Problem(status=error.status, title=error.title, detail=detail, hint=hint)


_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"), (b"x-accel-buffering", b"no"),
    (b"cross-origin-resource-policy", b"same-origin"),
]  # fmt: skip
_QUIET_SECONDS = 15.0  # until a comment shows that the connection lives
_COMMENT = b": still here\n\n"
ERROR = "error"
_LOG = logging.getLogger(__name__)


async def send_events(
    events: AsyncIterator[ServerEvent],
    limits: WebLimits,
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Send events as they come, until the last one or until the client has disconnected.

    An exception before the first event is raised; a later one is the last event, a problem.
    """
    first = await anext(events)
    writer = _Writer(limits.stalled_seconds, scope, send)
    async with anyio.create_task_group() as beside:
        beside.start_soon(_cancel_when_gone, beside.cancel_scope, scope, receive)
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        beside.start_soon(writer.show_life)
        try:
            await writer.write(first)
            async for event in events:
                await writer.write(event)
        except Exception as error:  # noqa: BLE001 - told to the client; a bug also to the log
            if problem_of(error).title == "bug":
                _LOG.error("the stream %s failed", harmless(scope["path"]), exc_info=error)
            await writer.write(ServerEvent(ERROR, problem_of(error)))
        finally:
            with anyio.CancelScope(shield=True):
                await events.aclose()  # type: ignore[attr-defined] # a generator
        await writer.end()
        beside.cancel_scope.cancel()


async def _cancel_when_gone(own: anyio.CancelScope, scope: Scope, receive: Receive) -> None:
    while not scope[GONE].is_set():
        await receive()
    own.cancel()


def _json_of(event: ServerEvent) -> bytes:
    return event.data if isinstance(event.data, bytes) else encoded_json(event.data)


class _Writer:
    """Sends events, one at a time, and drops a connection whose client does not read."""

    def __init__(self, stalled_seconds: float, scope: Scope, send: Send) -> None:
        self._stalled_seconds = stalled_seconds
        self._scope = scope
        self._send = send
        self._lock = anyio.Lock()
        self._number = 0
        self._wrote = anyio.Event()

    async def write(self, event: ServerEvent) -> None:
        self._number += 1
        name = f"event: {event.name}\n" if event.name else ""
        head = f"{name}id: {self._number}\ndata: ".encode()
        await self._send_bytes(head + _json_of(event) + b"\n\n")

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def show_life(self) -> None:
        """Send a comment after each quiet time."""
        while True:
            self._wrote = anyio.Event()
            with anyio.move_on_after(_QUIET_SECONDS) as quiet:
                await self._wrote.wait()
            if quiet.cancelled_caught:
                await self._send_bytes(_COMMENT)

    async def _send_bytes(self, data: bytes) -> None:
        async with self._lock:
            if not await is_sent(data, self._stalled_seconds, self._scope, self._send):
                await anyio.sleep_forever()  # until the disconnect cancels it
        self._wrote.set()


def encoded_json(value: Any) -> bytes:
    """Return a value as JSON; lone surrogates, which UTF-8 cannot express, become question marks."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_without_surrogates(msgspec.to_builtins(value)))


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(each) for key, each in value.items()}
    return (
        [_without_surrogates(each) for each in value] if isinstance(value, list | tuple) else value
    )


_PIECE = 64 * 1024


class PiecewiseResponse(Response):
    """A response that is sent as quickly as its client reads it."""

    def __init__(
        self, content: bytes, status: int, headers: Mapping[str, str], media_type: str,
        stalled_seconds: float,
    ) -> None:  # fmt: skip
        super().__init__(content, status, headers, media_type)
        self._stalled_seconds = stalled_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, or drop the connection."""
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        for at in range(0, len(self.body), _PIECE):
            piece = bytes(self.body[at : at + _PIECE])
            if not await is_sent(piece, self._stalled_seconds, scope, send):
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def is_sent(data: bytes, stalled_seconds: float, scope: Scope, send: Send) -> bool:
    """Send a part of a body; if the client takes nothing for so long, drop it and return False."""
    with anyio.move_on_after(stalled_seconds) as stalled:
        await send({"type": "http.response.body", "body": data, "more_body": True})
    if stalled.cancelled_caught:
        drop(scope)
    return not stalled.cancelled_caught
