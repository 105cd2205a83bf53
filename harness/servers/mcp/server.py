"""`McpServer`: validates each tool call, counts it, records it in the trail, and carries it out."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from mcp import MCPError, types
from mcp.server import Server
from mcp.server.request_state import RequestStateBoundary, RequestStateSecurity

from ....policies.errors import BusyError, PolicyError
from ....policies.languages import language_names
from ....runner.audit.spans import span_of
from ...runs.durable_runs import Runs
from ...text.model_hints import for_model
from ...version import NAME, installed_version
from ..client_quota import ClientQuota
from ..owned_sessions import OwnedSessions
from ..services import ClientServices, ServicesByClient
from . import arguments, catalogue_tools, session_tools
from .answers import refused
from .approvals import WAIT_SECONDS, can_ask
from .arguments import Arguments, read_arguments
from .calls import CallRunner, Outcome, StartCall
from .clients import Context, Owner, owner_of
from .instructions import instructions_of
from .programs import ProgramRequest, ProgramRunner
from .request_threads import RequestControl
from .served_tools import BY_NAME, OF_SKILLS, served_tools
from .skill_resources import SkillResources
from .skill_resources import load as load_skill
from .skill_resources import save as save_skill

_HOUR_MS = 3_600_000
BUSY = -32000  # of the codes that JSON-RPC leaves to servers
_PER_CLIENT, _TOTAL = 128, 512  # requests at work or waiting; a refusal costs next to nothing


class CallContext(NamedTuple):
    """The services and the owner of a tool call, its place in the trail, and whether the client can be
    asked."""

    services: ClientServices
    owner: Owner
    traceparent: str
    can_ask: bool


class McpServer:
    """Answers the requests of all clients."""

    def __init__(
        self, services: ServicesByClient, sessions: OwnedSessions, runs: Runs, *, open_world: bool,
        languages: Sequence[str] = language_names(),
    ) -> None:  # fmt: skip
        """`languages` are those that the host can run."""
        self._services = services
        self._instructions = instructions_of(
            services.ceiling.policy, languages, has_skills=services.has_skills
        )
        self._sessions = sessions
        self._programs = ProgramRunner(runs, sessions)
        self._calls = CallRunner(self._shown, self._for_model)
        self._tools = types.ListToolsResult(
            tools=served_tools(open_world=open_world, has_skills=services.has_skills),
            ttl_ms=_HOUR_MS,
        )
        of_skills = OF_SKILLS if services.has_skills else ()
        self._by_name = BY_NAME | {each.name: each for each in of_skills}
        self._requests = ClientQuota("requests at work", _PER_CLIENT, _TOTAL)
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
            "load_skill": lambda asked, call, control: load_skill(call.services, asked),
            "save_skill": self._of_sessions(save_skill),
            "sessions": lambda asked, call, control: session_tools.sessions(
                self._sessions, call.owner, asked, call.services.sandbox
            ),
            "list_files": self._of_sessions(session_tools.list_files),
            "download_file": self._of_sessions(session_tools.download_file),
            "upload_file": self._of_sessions(session_tools.upload_file),
        }

    def server(self) -> Server[Any]:
        """Return the SDK's server with these handlers."""
        has_skills = self._services.has_skills
        resources = SkillResources(self._services)
        server: Server[Any] = Server(
            NAME, version=installed_version(),
            instructions=self._instructions,
            on_list_tools=self._list_tools, on_call_tool=self._call,
            on_list_resources=resources.list if has_skills else None,
            on_read_resource=resources.read if has_skills else None,
        )  # fmt: skip
        # The state that a client sends back to continue a call is sealed for the same call and client.
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
        """Validate a call and carry it out or continue it; an error that a model can correct is an
        answer."""
        definition = self._by_name.get(params.name)
        if definition is None:
            raise MCPError(types.INVALID_PARAMS, f"tool not found: {params.name[:64]!a}")
        try:
            asked = read_arguments(definition.takes, params.arguments)
        except PolicyError as error:
            return refused(self._for_model(str(error)))
        with self._counted(owner_of(context)):
            if params.request_state is not None:
                return await self._calls.go_on(
                    context, params.request_state, params.input_responses
                )
            return await self._calls.carry_out(context, self._begin(context, params.name, asked))

    @contextlib.contextmanager
    def _counted(self, owner: Owner) -> Iterator[None]:
        """Count a request of a client, in whichever conversation, during the block; raises MCPError."""
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(self._requests.held(owner.client))
            except BusyError as error:
                raise MCPError(BUSY, error.what) from None
            yield

    def _begin(self, context: Context, name: str, asked: Arguments) -> StartCall:
        owner, may_ask = owner_of(context), can_ask(context)
        given = (context.meta or {}).get("traceparent")
        carry_out = self._carry_out[name]

        def begin(control: RequestControl) -> Outcome:
            traceparent = self._record(name, owner, given if isinstance(given, str) else None)
            call = CallContext(self._services.of(owner.client), owner, traceparent, may_ask)
            return carry_out(asked, call, control)

        return begin

    def _record(self, name: str, owner: Owner, given: str | None) -> str:
        """Record the call in the trail; return the parent of all its records."""
        span = span_of(given)
        if audit := self._services.ceiling.audit:
            audit.record("mcp", name, target=owner.client, span=span, owner=owner.id)
        return span.traceparent or span.trace_id

    def _for_model(self, message: str) -> str:
        return for_model(message, self._services.ceiling.policy)

    def _shown(self, owner: Owner, answer: types.CallToolResult) -> types.CallToolResult:
        """Return an answer as a model may see it."""
        privacy = self._services.ceiling.privacy and self._services.of(owner.client).privacy
        if not privacy:
            return answer
        from .private_answers import private_answer  # seldom needed

        return private_answer(answer, privacy)

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
