"""The MCP server: which request does what."""

from collections.abc import Callable
from typing import Any, NamedTuple

from mcp import MCPError, types
from mcp.server import Server
from mcp.server.request_state import RequestStateBoundary, RequestStateSecurity

from ....policies.errors import PolicyError
from ....runner.audit.spans import span_of
from ...runs.durable_runs import Runs
from ...version import NAME, installed_version
from . import arguments
from . import catalogue_tools as catalogue_tools
from . import session_tools as session_tools
from .answers import refused
from .approvals import WAIT_SECONDS, can_ask
from .arguments import Arguments, read_arguments
from .calls import CallRunner, Outcome, StartCall
from .clients import Context, Owner, owner_of
from .gate import Gate
from .programs import ProgramRequest, ProgramRunner
from .request_threads import RequestControl
from .served_tools import BY_NAME, INSTRUCTIONS, served_tools
from .services import ClientServices, ServicesByClient
from .sessions import OwnedSessions

_HOUR_MS = 3_600_000


class CallContext(NamedTuple):
    """A call of one of our tools, by whom, and where it belongs in the trail."""

    services: ClientServices
    owner: Owner
    traceparent: str
    can_ask: bool


class McpServer:
    """Answers the requests of one server's clients."""

    def __init__(
        self, services: ServicesByClient, sessions: OwnedSessions, runs: Runs, *, open_world: bool
    ) -> None:
        self._services = services
        self._sessions = sessions
        self._programs = ProgramRunner(runs, sessions)
        self._calls = CallRunner()
        self._tools = types.ListToolsResult(
            tools=served_tools(open_world=open_world), ttl_ms=_HOUR_MS
        )
        self._gate = Gate()
        self._carry_out: dict[str, Callable[[Any, CallContext, RequestControl], Outcome]] = {
            "search_tools": lambda asked, call, control: catalogue_tools.search(
                call.services, asked
            ),
            "describe_tools": lambda asked, call, control: catalogue_tools.describe(
                call.services, asked
            ),
            "run_code": self._run_code,
            "call_tool": self._call_tool,
            "create_tool": lambda asked, call, control: catalogue_tools.create(
                call.services, asked
            ),
            "sessions": self._of_sessions(session_tools.sessions),
            "list_files": self._of_sessions(session_tools.list_files),
            "download_file": self._of_sessions(session_tools.download_file),
            "upload_file": self._of_sessions(session_tools.upload_file),
        }

    def server(self) -> Server[Any]:
        """Return the server that the SDK runs."""
        server: Server[Any] = Server(
            NAME, version=installed_version(), instructions=INSTRUCTIONS,
            on_list_tools=self._list_tools, on_call_tool=self._call,
        )  # fmt: skip
        # What a client brings back to go on with is sealed: for the same call, by the same client.
        security = RequestStateSecurity.ephemeral(ttl=WAIT_SECONDS)
        security.bind_principal = lambda context: owner_of(context).id
        server.middleware.append(RequestStateBoundary(security, default_audience=NAME))
        return server

    async def _list_tools(
        self, context: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return self._tools

    async def _call(
        self, context: Context, params: types.CallToolRequestParams
    ) -> types.CallToolResult | types.InputRequiredResult:
        """Check a call, and carry it out or go on with it; what a model can mend is an answer."""
        definition = BY_NAME.get(params.name)
        if definition is None:
            raise MCPError(types.INVALID_PARAMS, f"there is no tool {params.name[:64]!a}")
        try:
            asked = read_arguments(definition.takes, params.arguments)
        except PolicyError as error:
            return refused(str(error))
        with self._gate.room_for(owner_of(context)):
            if params.request_state is not None:
                return await self._calls.go_on(
                    context, params.request_state, params.input_responses
                )
            return await self._calls.carry_out(context, self._begin(context, params.name, asked))

    def _begin(self, context: Context, name: str, asked: Arguments) -> StartCall:
        owner, may_ask = owner_of(context), can_ask(context)
        given = (context.meta or {}).get("traceparent")
        carry_out = self._carry_out[name]

        def begin(control: RequestControl) -> Outcome:
            traceparent = self._note(name, owner, given if isinstance(given, str) else None)
            call = CallContext(self._services.of(owner.client), owner, traceparent, may_ask)
            return carry_out(asked, call, control)

        return begin

    def _note(self, name: str, owner: Owner, given: str | None) -> str:
        """Write down who asked for what, under which all that comes of it stands in the trail."""
        span = span_of(given)
        if audit := self._services.ceiling.audit:
            audit.record("mcp", name, target=owner.client, span=span, owner=owner.id)
        return span.traceparent or span.trace_id

    def _run_code(
        self, asked: arguments.RunCodeArguments, call: CallContext, control: RequestControl
    ) -> Outcome:
        request = ProgramRequest(call.owner, asked, call.traceparent, call.can_ask)
        return self._programs.begin(call.services, request, control)

    def _call_tool(
        self, asked: arguments.CallToolArguments, call: CallContext, control: RequestControl
    ) -> Outcome:
        about = call.owner.id, call.traceparent
        return catalogue_tools.call(call.services, asked, about, control, can_ask=call.can_ask)

    def _of_sessions(
        self, do: Callable[[OwnedSessions, Owner, Any], Outcome]
    ) -> Callable[[Any, CallContext, RequestControl], Outcome]:
        return lambda asked, call, control: do(self._sessions, call.owner, asked)
