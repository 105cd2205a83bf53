"""Transports to a server, with limits: the pipes of a process, or streamable HTTP.

`MessageFilter`: checks every message of a server before the SDK sees it, for all transports.

It limits the rate of messages.  In a list of tools it leaves the SDK's session only names and input
schemas of valid tools: one invalid tool would otherwise fail the whole list, and the session would
check results against output schemas without a limit.  The broker checks results, within a budget.
"""

import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import httpx2
from anyio.abc import ObjectReceiveStream, ObjectSendStream
from mcp.client._transport import ReadStream, TransportStreams, WriteStream
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.dispatcher import coerce_request_id
from mcp.shared.message import SessionMessage
from mcp.types import JSONRPCRequest, JSONRPCResponse

from ...policies.errors import ToolInvalid
from ..text.redaction import Redaction
from ..tools.tool import Vault
from .definitions import Definition, definition_of
from .server_config import ServerConfig, from_vault
from .server_processes import ServerProcess
from .stdio_transport import MAX_LINE_BYTES, AtEnd, ProtocolViolation, StderrTail, pipe_streams

# Messages of Python, Node, curl and others when getaddrinfo(3) or connect(2) fails in a cell.
_NO_NETWORK = re.compile(
    "EAI_AGAIN|ENOTFOUND|ENETUNREACH|fetch failed|name resolution|Name or service not known|"
    "Network is unreachable|Could not resolve|nodename nor servname|All connection attempts failed",
    re.IGNORECASE,
)
# Lines below the message of an error: its stack, its fields, and the version of Node.
_BELOW_AN_ERROR = re.compile(r"\s|[\]})]+,?$|Node\.js v[\d.]+$")
_ERROR = re.compile(r"(Uncaught )?[\w$.]*(Error|Exception)\b|(error|fatal|panic)\b", re.IGNORECASE)
_LAST_LINES = 5
_LAST_CHARACTERS = 300
Launch = Callable[[ServerConfig, Mapping[str, str]], ServerProcess]


NO_NETWORK_HINT = (
    "; cells have no network: set sandboxed: false, or run the server elsewhere by url"
)


class Transport:
    """An open transport to one server; `secrets` are the credentials that it was opened with."""

    def __init__(
        self, streams: TransportStreams, secrets: tuple[str, ...] = (), pid: int = 0,
        tail: StderrTail | None = None,
    ) -> None:  # fmt: skip
        self.messages = MessageFilter(*streams)
        self.secrets = secrets
        self.pid = pid
        self.in_cell = False
        self.patient = False  # the server did nothing wrong and gets time to end by itself
        self._tail = tail or StderrTail()

    def clean(self, text: str) -> str:
        """Return `text` with the credentials of the connection redacted."""
        return Redaction(self.secrets).text(text) if self.secrets else text

    @property
    def why(self) -> str:
        """Return why it ended, with the last lines of the server's stderr."""
        said = self._tail.text
        last = last_line(
            self.clean(said)
        )  # redact first: cutting could leave a part of a credential
        why = self.clean(self.messages.why)
        words = f"{why}, after {last!a}" if last else why
        return words + self.network_hint(said)

    def network_hint(self, said: str) -> str:
        """Return a hint that cells have no network if the failure `said` looks like that, else ""."""
        return NO_NETWORK_HINT if self.in_cell and _NO_NETWORK.search(said) else ""

    async def __aenter__(self) -> Any:
        return self.messages, self.messages.writer

    async def __aexit__(self, *_: object) -> None:
        """Do nothing: the function that opened it closes it."""


def last_line(said: str) -> str:
    """Return the end of a program's standard error that tells why it failed: the line of the error if
    only its stack follows (Node adds its version), else the last five lines."""
    lines = [each.rstrip() for each in said.splitlines() if each.strip()]
    for line in reversed(lines):
        if not _BELOW_AN_ERROR.match(line):
            if _ERROR.match(line):
                return line[-_LAST_CHARACTERS:]
            break
    return " | ".join(each.strip() for each in lines[-_LAST_LINES:])[-_LAST_CHARACTERS:]


def open_transport(
    config: ServerConfig, vault: Vault, launch: Launch
) -> "contextlib.AbstractAsyncContextManager[Transport]":
    """Return a transport, to be entered and left in the same task; raises LaunchError, ToolFailed."""
    return _over_http(config, vault) if config.url else _over_pipes(config, vault, launch)


@contextlib.asynccontextmanager
async def _over_pipes(
    config: ServerConfig, vault: Vault, launch: Launch
) -> AsyncIterator[Transport]:
    env, secrets = _filled(config.env, vault)
    processes: list[ServerProcess] = []
    transport: Transport | None = None
    try:
        await _launch(config, env, launch, processes)
        tail = StderrTail()
        ending = _ending(processes[0], tail)
        async with pipe_streams(processes[0].stdin, processes[0].stdout, ending) as streams:
            transport = Transport(streams, secrets, processes[0].pid, tail)
            transport.in_cell = config.sandboxed
            async with anyio.create_task_group() as tasks:
                if processes[0].stderr >= 0:
                    tasks.start_soon(tail.follow, processes[0].stderr)
                yield transport
                tasks.cancel_scope.cancel()
    finally:
        patient = transport is not None and transport.patient
        with anyio.CancelScope(shield=True):  # takes some seconds at most
            for process in processes:
                await anyio.to_thread.run_sync(partial(process.close, patient=patient))


async def _launch(
    config: ServerConfig, env: Mapping[str, str], launch: Launch, processes: list[ServerProcess]
) -> None:
    """Append the started server to `processes`, even if this is cancelled meanwhile: it has to be
    closed."""
    if config.sandboxed:  # building a cell takes time
        await anyio.to_thread.run_sync(lambda: processes.append(launch(config, env)))
    else:  # start the process in this thread, because pdeathsig ends it with the thread that started it
        processes.append(launch(config, env))


def _ending(process: ServerProcess, tail: StderrTail) -> AtEnd:
    async def ask() -> None:
        tail.text = await anyio.to_thread.run_sync(process.read_stderr, abandon_on_cancel=True)

    return tail.wait_until_complete if process.stderr >= 0 else ask


@contextlib.asynccontextmanager
async def _over_http(config: ServerConfig, vault: Vault) -> AsyncIterator[Transport]:
    headers, secrets = _filled(config.headers, vault)
    http = httpx2.AsyncClient(
        transport=_BoundedHttp(), headers=headers, trust_env=False,  # no proxy and no .netrc
        timeout=httpx2.Timeout(config.connect_timeout, read=None),
    )  # fmt: skip
    opened = streamable_http_client(config.url, http_client=http, max_sse_event_size=MAX_LINE_BYTES)
    async with http, opened as streams:
        yield Transport(streams, (*secrets, *config.secrets))


def _filled(values: Mapping[str, str], vault: Vault) -> tuple[dict[str, str], tuple[str, ...]]:
    filled = {key: from_vault(value, vault) for key, value in values.items()}
    secrets = tuple(value for each in filled.values() for value in each.values)
    return {key: each.text for key, each in filled.items()}, secrets


class _BoundedHttp(httpx2.AsyncHTTPTransport):
    """Limits the length of each answer; the SDK limits each event of a stream of events.

    Compressed answers are refused: some hundred kilobytes could expand to gigabytes behind the limit.
    """

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        request.headers["accept-encoding"] = "identity"
        response = await super().handle_async_request(request)
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            await response.aclose()
            raise httpx2.DecodingError("it sent a compressed answer", request=request)
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            response.stream = _BoundedStream(response.stream)
        return response


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = MAX_LINE_BYTES
        async for chunk in self._stream:
            left -= len(chunk)
            if left < 0:
                raise ProtocolViolation(f"it sent an answer of more than {MAX_LINE_BYTES} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


MESSAGES_AT_ONCE = 2000  # a burst; each request allows one more
MESSAGES_PER_SECOND = 500.0
_MOST_IN_A_PAGE = 2000
DEFINITIONS = "cellwright/definitions"  # key of the definitions in a page's _meta
_Received = SessionMessage | Exception


class MessageFilter(ObjectReceiveStream[_Received]):
    """Both streams of one connection.  `why` is the reason once the connection has ended."""

    def __init__(
        self, read: ReadStream[_Received], write: WriteStream[SessionMessage],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._read = read
        self._write = write
        self._clock = clock
        self._allowance = float(MESSAGES_AT_ONCE)
        self._listings: set[str | int] = set()
        self.heard = clock()  # time of the last message
        self.why = ""
        self.ended = anyio.Event()

    # reading

    async def receive(self) -> _Received:
        try:
            item = await self._read.receive()
            self._count()
        except anyio.EndOfStream:
            self.end("it closed the connection")
            raise
        except ProtocolViolation as violation:
            self.end(str(violation))
            raise anyio.EndOfStream from None
        if isinstance(item, ProtocolViolation):
            self.end(str(item))
            raise anyio.EndOfStream
        return await self._filtered(item) if isinstance(item, SessionMessage) else item

    def end(self, why: str) -> None:
        """End the connection; only the first reason is kept."""
        self.why = self.why or why
        self.ended.set()

    def _count(self) -> None:
        """Refill and spend the allowance (a token bucket); raises ProtocolViolation if it is empty."""
        now = self._clock()
        filled = self._allowance + (now - self.heard) * MESSAGES_PER_SECOND
        self._allowance = min(max(self._allowance, MESSAGES_AT_ONCE), filled) - 1
        self.heard = now
        if self._allowance < 0:
            raise ProtocolViolation(f"it sends more than {MESSAGES_PER_SECOND:g} messages a second")

    async def _filtered(self, received: SessionMessage) -> SessionMessage:
        message = received.message
        if isinstance(message, JSONRPCResponse):
            id = coerce_request_id(message.id)  # the SDK's session takes "7" for 7
            is_listing = id in self._listings
            self._listings.discard(id)
            if is_listing:  # in a thread: up to 4 MiB, and all servers share the event loop
                message.result = await anyio.to_thread.run_sync(_page, message.result)
            else:
                message.result = _without_mark(message.result)
        return received

    async def aclose(self) -> None:
        await self._read.aclose()

    @property
    def writer(self) -> "FilteredWriter":
        return FilteredWriter(self._write, self._note)

    def _note(self, sent: SessionMessage) -> None:
        if isinstance(sent.message, JSONRPCRequest):
            self._allowance += 1
            if sent.message.method == "tools/list":
                self._listings.add(sent.message.id)


class FilteredWriter(ObjectSendStream[SessionMessage]):
    """The stream to a server; `note` is called with each sent message."""

    def __init__(
        self, write: WriteStream[SessionMessage], note: Callable[[SessionMessage], None]
    ) -> None:
        self._write = write
        self._note = note

    async def send(self, item: SessionMessage, /) -> None:
        self._note(item)
        await self._write.send(item)

    async def aclose(self) -> None:
        await self._write.aclose()


def _page(result: dict[str, Any]) -> dict[str, Any]:
    """Return a page of tools for the session, with the valid definitions, and why others are invalid,
    in `_meta`."""
    tools = result.get("tools")
    if not isinstance(tools, list):
        return _without_mark(result)  # the session reports the error
    good: list[Definition] = []
    dropped: list[str] = []
    for each in tools[:_MOST_IN_A_PAGE]:
        try:
            good.append(definition_of(each))
        except ToolInvalid as error:
            name = each.get("name") if isinstance(each, dict) else each
            dropped.append(f"{ascii(name)[:80]}: {error.what}")
    if len(tools) > _MOST_IN_A_PAGE:
        dropped.append(f"{len(tools) - _MOST_IN_A_PAGE} more than {_MOST_IN_A_PAGE} in one page")
    meta = result.get("_meta") if isinstance(result.get("_meta"), dict) else {}
    return {
        **result,
        "tools": [_for_session(each) for each in good],
        "_meta": {**(meta or {}), DEFINITIONS: [[each.said for each in good], dropped]},
    }


def _without_mark(result: dict[str, Any]) -> dict[str, Any]:
    """Return another result without our key in its `_meta`: a server must not forge definitions."""
    meta = result.get("_meta")
    if not isinstance(meta, dict) or DEFINITIONS not in meta:
        return result
    return {**result, "_meta": {key: each for key, each in meta.items() if key != DEFINITIONS}}


def _for_session(definition: Definition) -> dict[str, Any]:
    schema = {"type": "object", **definition.said["inputSchema"]}
    return {"name": definition.wire, "inputSchema": schema}
