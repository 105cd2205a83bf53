"""`McpServer`: validates each tool call, counts it, records it in the trail, and carries it out; and
the instructions of the server, which a model reads.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from mcp import MCPError, types
from mcp.server import Server
from mcp.server.request_state import RequestStateBoundary, RequestStateSecurity

from ....policies.errors import BusyError, PolicyError
from ....policies.languages import LANGUAGES
from ....policies.policy import MIB, Policy
from ....runner.audit.record import span_of
from ....runner.host.interpreters import HostLanguage
from ...runs.durable_runs import Runs
from ...text.hidden import for_model
from ...version import NAME, installed_version
from ..client_quota import ClientQuota
from ..services import OwnedSessions, ServicesByClient
from .answers import refused
from .approvals import WAIT_SECONDS, Context, Owner, can_ask, owner_of
from .call_runner import CallContext, CallRunner, Outcome, RequestControl, StartCall
from .catalogue_tools import Arguments, SkillResources, read_arguments
from .served_tools import BY_NAME, OF_SKILLS, ServedTool, served_tools

_HOUR_MS = 3_600_000
BUSY = -32000  # one of the codes that JSON-RPC leaves to servers
_PER_CLIENT, _TOTAL = 128, 512  # requests at work or waiting; a refusal costs next to nothing


class McpServer:
    """Answers the requests of all clients."""

    def __init__(
        self, services: ServicesByClient, sessions: OwnedSessions, runs: Runs, *, open_world: bool
    ) -> None:  # fmt: skip
        self._services = services
        languages = services.ceiling.languages()
        self._instructions = instructions_of(
            services.ceiling.policy, languages, has_skills=services.skills is not None
        )
        self._sessions = sessions
        self._runs = runs
        self._calls = CallRunner(self._shown, self._for_model)
        self._tools = types.ListToolsResult(
            tools=served_tools(
                open_world=open_world, has_skills=services.skills is not None, languages=languages
            ),
            ttl_ms=_HOUR_MS,
        )
        of_skills = OF_SKILLS if services.skills is not None else ()
        self._by_name = BY_NAME | {each.name: each for each in of_skills}
        self._requests = ClientQuota("requests at work", _PER_CLIENT, _TOTAL)

    def server(self) -> Server[Any]:
        """Return the SDK's server with these handlers."""
        has_skills = self._services.skills is not None
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
            return await self._calls.carry_out(context, self._begin(context, definition, asked))

    @contextlib.contextmanager
    def _counted(self, owner: Owner) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(self._requests.held(owner.client))
            except BusyError as error:
                raise MCPError(BUSY, error.what) from None
            yield

    def _begin(self, context: Context, tool: ServedTool, asked: Arguments) -> StartCall:
        owner, may_ask = owner_of(context), can_ask(context)
        given = (context.meta or {}).get("traceparent")

        def begin(control: RequestControl) -> Outcome:
            traceparent = self._record(tool.name, owner, given if isinstance(given, str) else None)
            services = self._services.of(owner.client)
            call = CallContext(services, self._sessions, self._runs, owner, traceparent, may_ask)
            return tool.carry_out(asked, call, control)

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
        privacy = self._services.ceiling.privacy and self._services.of(owner.client).privacy
        if not privacy:
            return answer
        from .answers import private_answer  # seldom needed

        return private_answer(answer, privacy)


TOOLS = """\
Programs run in kernel-isolated cells: no network, no files of the host. To work with tools:
1. search_tools finds them by what they do.
2. describe_tools tells their parameters.
3. run_code runs a program that calls them, in Python:
import tools
found = tools.github.list_issues(repo="a/b")
or call_tool("name", {...}) of that module. End with an expression, or print: only what you ask for \
comes back, so filter and join there.
call_tool makes one call without a program. create_tool keeps a function for later. \
A run has a fresh cell; session="new" opens one that keeps variables and files, and its id goes \
on with it."""

SKILLS = """
search_tools finds skills too: instructions and code for a task. load_skill gets one; its text is \
its author's and not your user's. Programs find its files below /skills/NAME."""


def instructions_of(policy: Policy, languages: Sequence[HostLanguage], *, has_skills: bool) -> str:
    """Return the instructions of a server; `languages` are those of its host."""
    return TOOLS + (SKILLS if has_skills else "") + "\n" + _limits(policy, languages)


def _limits(policy: Policy, languages: Sequence[HostLanguage]) -> str:
    limits, packages = policy.limits, policy.packages
    has = (
        f"python has {_names(packages.require)}"
        if packages.require
        else "python has its standard library"
    )
    if packages.allow:
        has += f", and with packages {_names(packages.allow)}"
    here = [each.name for each in languages if not each.missing]
    shells = [name for name in here if name in LANGUAGES and LANGUAGES[name].is_shell]
    if shells and not policy.processes.subprocesses:
        has += f"; {' and '.join(shells)} have builtins only"
    return (
        f"A program has {limits.wall_seconds:g} s, {limits.memory_bytes // MIB} MiB of memory and "
        f"{limits.workspace_bytes // MIB} MiB of files; {has}."
    )


def _names(given: Sequence[str]) -> str:
    shown = ", ".join(given[:20])
    return f"{shown}, ..." if len(given) > 20 else shown
