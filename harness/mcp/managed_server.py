"""`ManagedServer`: one server through starts, calls, failures and restarts.

An open connection to a server: lists its tools, calls them, and answers its questions.
"""

import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any, Literal, NamedTuple

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup, TaskStatus
from mcp import Client, MCPError, types
from pydantic import ValidationError

from ...policies.errors import CellwrightError, ToolFailed, ToolInvalid, ToolResultInvalid
from ..schemas.validation import compile_schema
from ..tools.tool import Vault
from .definitions import Definition, definition_of, shown
from .server_config import ServerConfig
from .transports import DEFINITIONS, Launch, Transport, open_transport

MAX_PAGES = 100
MAX_TOOLS = 5000
_MOST_QUESTIONS = 4  # questions of one server that wait for a person at once


class Elicitation(NamedTuple):
    """A server's question to its user: a form with the fields of `schema`."""

    server: str
    message: str
    schema: dict[str, Any]


Elicit = Callable[[Elicitation], dict[str, Any] | None]  # returns the answer; None declines
Progress = Callable[[float, float | None, str], None]  # arguments: done, total or None, message


class Listing(NamedTuple):
    """The tools of a server by its own names, and why others were left out."""

    definitions: dict[str, Definition]
    dropped: tuple[str, ...] = ()


class ServerConnection:
    """An open SDK client over a transport.  Runs on the event loop."""

    def __init__(self, client: Client, transport: Transport) -> None:
        self._client = client
        self.transport = transport
        self.protocol = client.protocol_version  # the SDK's client forgets it when it closes

    @property
    def has_change_stream(self) -> bool:
        """Tell whether it announces changed tools on a stream that has to be followed."""
        tools = self._client.server_capabilities.tools
        return bool(tools and tools.list_changed) and self.protocol >= "2026-07-28"

    async def list_tools(self) -> Listing:
        """Return all tools, page by page; stops after too many pages or tools, and at a repeated
        page."""
        found: dict[str, Definition] = {}
        dropped: list[str] = []
        cursors: set[str | None] = set()
        cursor: str | None = None
        while cursor not in cursors and len(cursors) < MAX_PAGES and len(found) < MAX_TOOLS:
            cursors.add(cursor)
            page = await self._client.list_tools(cursor=cursor)
            good, bad = (page.meta or {}).get(DEFINITIONS, ((), ()))
            dropped += [*bad, *_added(found, good)]
            cursor = page.next_cursor
            if not cursor:
                return Listing(found, tuple(dropped))
        dropped.append("further pages: too many, or a repeated cursor")
        return Listing(found, tuple(dropped))

    async def call(
        self, wire: str, arguments: dict[str, Any], on_progress: Progress | None = None
    ) -> types.CallToolResult:
        """Call a tool; cancelling this cancels the call at the server."""

        async def progressed(progress: float, total: float | None, message: str | None) -> None:
            if on_progress:
                on_progress(progress, total, shown(message or "")[:1000])

        return await self._client.call_tool(wire, arguments, progress_callback=progressed)

    async def follow(self, changed: Callable[[], Awaitable[None]]) -> None:
        """Call `changed` at each announcement of changed tools on the stream."""
        async with self._client.listen(tools_list_changed=True) as events:
            async for _ in events:
                await changed()


def _added(found: dict[str, Definition], page: list[dict[str, Any]]) -> list[str]:
    dropped = []
    for each in (Definition(said["name"], said) for said in page):
        if each.wire in found:
            dropped.append(f"{each.wire!a}: duplicate name")
        elif len(found) >= MAX_TOOLS:
            dropped.append(f"{each.wire!a}: more than {MAX_TOOLS} tools")
        else:
            found[each.wire] = each
    return dropped


def client_over(
    transport: Transport,
    config: ServerConfig,
    elicit: Elicit | None,
    changed: Callable[[], Awaitable[None]],
) -> Client:
    """Return an SDK client, not yet entered, that answers the server's questions."""

    async def message(message: object) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            await changed()

    return Client(
        transport, mode=config.protocol, cache=None, message_handler=message,
        client_info=types.Implementation(name="cellwright", version="1"),
        elicitation_callback=_Questions(config.name, elicit).ask,
    )  # fmt: skip


class _Questions:
    """Answers one server's questions; declines without `elicit`, and beyond a few at once."""

    def __init__(self, server: str, elicit: Elicit | None) -> None:
        self._server = server
        self._elicit = elicit
        self._waiting = 0

    async def ask(self, context: object, params: types.ElicitRequestParams) -> types.ElicitResult:
        elicit = self._elicit
        if (
            elicit is None
            or self._waiting >= _MOST_QUESTIONS
            or not isinstance(
                params, types.ElicitRequestFormParams
            )  # a URL that a person would open
        ):
            return types.ElicitResult(action="decline")
        self._waiting += 1
        try:
            return await anyio.to_thread.run_sync(
                self._answer, elicit, params, abandon_on_cancel=True
            )
        finally:
            self._waiting -= 1

    def _answer(self, elicit: Elicit, params: types.ElicitRequestFormParams) -> types.ElicitResult:
        try:
            schema = json.loads(json.dumps(params.requested_schema))
            definition_of({"name": "form", "inputSchema": schema})
            given = elicit(Elicitation(self._server, shown(params.message), schema))
            if given is None or compile_schema(schema).complaints(given):
                return types.ElicitResult(action="decline")
        except (ToolInvalid, ValueError, TypeError):
            return types.ElicitResult(action="decline")
        return types.ElicitResult(action="accept", content=given)


State = Literal["configured", "starting", "ready", "failed", "disabled"]
_BACK_OFF_SECONDS = 0.5  # after the second failure in a row; doubles up to
_PROOF_SECONDS = 5.0
_LONGEST_BACK_OFF_SECONDS = 60.0
_ERROR_CHARACTERS = 1000


class SharedContext(NamedTuple):
    """State of all servers: credentials, the callback for questions, the function that starts a
    server, and the function that checks its tools before the first call."""

    vault: Vault
    elicit: Elicit | None
    launch: Launch
    listed: Callable[[ServerConfig, Listing], Awaitable[None]]


class ManagedServer:
    """Starts a server at its first use, restarts it when it ends, and backs off when it keeps failing.

    Runs on the event loop.
    """

    def __init__(self, config: ServerConfig, context: SharedContext, group: TaskGroup) -> None:
        self.config = config
        self.state: State = "configured"
        self.error = ""
        self.starts = 0
        self.connection: ServerConnection | None = None
        self._context = context
        self._group = group
        self._starting = anyio.Lock()
        self._failures = 0
        self._not_before = 0.0
        self._start_scope = anyio.CancelScope()  # cancelled by `stop`
        self._stop = anyio.Event()
        self._changed = anyio.Event()

    async def call(
        self, wire: str, arguments: dict[str, Any], check_listed: Callable[[], None],
        on_progress: Progress | None,
    ) -> tuple[types.CallToolResult, Transport]:  # fmt: skip
        """Call a tool; return its result and the transport it came by.

        `check_listed` raises if the tool, as the server lists it now, may not be called.  Raises
        ToolFailed if the server cannot start, ends, refuses or times out, ToolResultInvalid if it
        breaks the protocol.
        """
        connection = await self.connected()
        check_listed()
        timeout = self.config.timeout
        transport, messages = connection.transport, connection.transport.messages
        heard = messages.heard
        try:
            with anyio.fail_after(timeout):
                result = await connection.call(wire, arguments, on_progress)
        except TimeoutError:
            if messages.heard == heard:
                self._group.start_soon(self._prove_alive, connection)
            raise ToolFailed(f"{self.config.name} did not answer within {timeout:g} s") from None
        except Exception as error:  # noqa: BLE001 - the SDK raises anything for what a server sends
            raise self._error_for_caller(error, transport) from None
        self._failures = 0
        return result, transport

    async def _prove_alive(self, connection: ServerConnection) -> None:
        messages = connection.transport.messages
        heard = messages.heard
        with contextlib.suppress(Exception):  # an error also shows that the server lives
            with anyio.move_on_after(min(self.config.timeout, _PROOF_SECONDS)):
                await connection.list_tools()
        if messages.heard == heard:
            messages.end("it stopped answering")

    async def refresh(self) -> None:
        """List its tools again, within `connect_timeout`; raises ToolFailed."""
        starts = self.starts
        connection = await self.connected()
        if self.starts != starts:
            return  # connecting has just listed them
        try:
            with anyio.fail_after(self.config.connect_timeout):
                await self._list(connection)
        except TimeoutError:
            connection.transport.messages.end("it did not list its tools in time")
            raise ToolFailed(
                f"{self.config.name} did not list its tools within {self.config.connect_timeout:g} s"
            ) from None
        except CellwrightError:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            raise self._error_for_caller(error, connection.transport) from None

    async def connected(self) -> ServerConnection:
        """Return a connection whose tools are listed; raises ToolFailed, at once during the
        back-off."""
        async with self._starting:
            if self.connection and not self.connection.transport.messages.ended.is_set():
                return self.connection
            if self.config.disabled:
                raise ToolFailed(f"{self.config.name} is disabled")
            if anyio.current_time() < self._not_before:
                raise ToolFailed(
                    f"{self.config.name} keeps failing: {self.error}", "try again later"
                )
            return await self._start()

    async def _start(self) -> ServerConnection:
        self.state, self.starts = "starting", self.starts + 1
        try:
            with anyio.fail_after(self.config.connect_timeout) as self._start_scope:
                started: ServerConnection = await self._group.start(self._run_connection)
                self.state, self.error = "ready", ""
                return started
            raise ToolFailed("McpServers was closed")
        except TimeoutError:
            raise self._failed(
                f"it did not answer within connect_timeout, {self.config.connect_timeout:g} s"
            ) from None
        except Exception as error:  # noqa: BLE001 - as above
            raise self._failed(_words(error)) from None

    async def _run_connection(self, *, task_status: TaskStatus[ServerConnection]) -> None:
        """Open, serve and close one connection in a single task, as the SDK requires."""
        transport: Transport | None = None
        started = False
        try:
            async with (
                open_transport(self.config, self._context.vault, self._context.launch) as transport,
                client_over(
                    transport, self.config, self._context.elicit, self._note_change
                ) as client,
            ):
                connection = ServerConnection(client, transport)
                await self._list(connection)
                self.connection, started = connection, True
                task_status.started(connection)
                await self._follow_until_end(connection)
        except Exception as error:  # noqa: BLE001 - as above
            if not started:
                why = transport.why if transport and transport.messages.why else ""
                raise ToolFailed(f"{_words(error, transport)}{': ' if why else ''}{why}") from None
        finally:
            self.connection = None
            if started and not self._stop.is_set():
                self._failed(transport.why if transport else "")

    async def _follow_until_end(self, connection: ServerConnection) -> None:
        messages = connection.transport.messages
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._follow_changes, connection)
            if connection.has_change_stream:
                tasks.start_soon(self._listen, connection)
            tasks.start_soon(self._end_on_stop, connection)
            await messages.ended.wait()
            tasks.cancel_scope.cancel()

    async def _end_on_stop(self, connection: ServerConnection) -> None:
        await self._stop.wait()
        connection.transport.patient = True
        connection.transport.messages.end("McpServers was closed")

    async def _listen(self, connection: ServerConnection) -> None:
        with contextlib.suppress(
            Exception
        ):  # not supported, or ended; then the server announces no changes
            await connection.follow(self._note_change)

    async def _note_change(self) -> None:
        self._changed.set()

    async def _follow_changes(self, connection: ServerConnection) -> None:
        """List the tools again after each change, one listing at a time however many changes come."""
        while True:
            await self._changed.wait()
            self._changed = anyio.Event()
            try:
                with anyio.fail_after(self.config.connect_timeout):
                    await self._list(connection)
            except Exception as error:  # noqa: BLE001 - as above
                words = _words(error, connection.transport)
                connection.transport.messages.end(f"its tools changed: {words}")

    async def _list(self, connection: ServerConnection) -> None:
        await self._context.listed(self.config, await connection.list_tools())

    def _failed(self, why: str) -> ToolFailed:
        self.state, self.error = "failed", why
        self._failures += 1
        if self._failures > 1:
            delay = _BACK_OFF_SECONDS * 2 ** min(self._failures - 2, 20)
            self._not_before = anyio.current_time() + min(delay, _LONGEST_BACK_OFF_SECONDS)
        return ToolFailed(f"{self.config.name} cannot be used: {why}")

    def _error_for_caller(self, error: Exception, transport: Transport) -> Exception:
        """Return the exception for the caller, with credentials redacted."""
        words = _words(error, transport)
        if isinstance(_leaf(error), ValidationError):
            return ToolResultInvalid(f"{self.config.name} broke the protocol: {words}")
        if transport.messages.ended.is_set():
            return ToolFailed(f"{self.config.name}: {words}: {transport.why}")
        return ToolFailed(f"{self.config.name}: {words}{transport.network_hint(words)}")

    def stop(self) -> None:
        """Start to end it; the task group ends once it has."""
        self._stop.set()
        self._start_scope.cancel()


def _leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _words(error: BaseException, transport: Transport | None = None) -> str:
    """Return the error in one line; a server may have written all of it."""
    leaf = _leaf(error)
    if isinstance(leaf, ValidationError):
        first = leaf.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))[:200]
        return f"{ascii(where)[1:-1]}: {first['msg']}"[:_ERROR_CHARACTERS]
    said = leaf.error.message if isinstance(leaf, MCPError) else str(leaf)
    if isinstance(leaf, CellwrightError):
        said = leaf.what
    said = shown(" ".join(said.split()))
    return (transport.clean(said) if transport else said)[:_ERROR_CHARACTERS] or type(leaf).__name__
