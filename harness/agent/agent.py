"""`Agent`: a model that solves tasks by programs in cells, within budgets, and can be resumed."""

import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from msgspec.structs import replace

from ...policies.argument_checks import check_encodable
from ...policies.closing import Closing
from ...policies.errors import ClosedError, PolicyError
from ...policies.policy import Policy
from ...runner.audit.log import AuditLog
from ...runner.settings import PoolSettings
from ..making.builtin import Summarise, api_query, file_tools
from ..making.factory import ToolFactory
from ..making.factory_catalogue import MergedTool
from ..runs.durable_runs import Runs
from ..runs.run_store import Approval
from ..sandbox.calls.executing import AsyncClosing, in_asyncio
from ..sandbox.sandbox import Sandbox
from ..sandbox.sandbox_arguments import HostSettings
from ..sandbox.workspaces.workspace_store import Workspaces
from ..schemas.spec import ToolOwner, ToolSpec, ToolState
from ..tools.broker import Broker
from ..tools.catalogue import Catalogue, catalogue_of
from ..tools.registry import ToolRegistry
from ..tools.tool import Caller, Tool, Vault
from ..user_data import make_private_directory
from .agent_memory import AgentMemory
from .planner import Planner, Toolsmith
from .prompts import (
    AgentLimits,
    ChatModel,
    CountTokens,
    OnText,
    estimated_tokens,
    instructions,
    summarise,
)
from .research import Research
from .task_loop import ACTIONS, AgentParts, AgentTools, Events, TaskLoop, actions, summary_tool
from .transcript import (
    INTERRUPTED,
    PAUSED,
    AgentEvent,
    AgentResult,
    AgentRun,
    AgentStep,
    Transcripts,
    run_of,
)

if TYPE_CHECKING:
    from ..sandbox.packages.package_store import PackageStore
    from ..skills.skills import Skills, SkillSet
    from ..tools.http.http_client import HttpClient

_TRAIL_ENTRIES = 1000
MAKER = "agent"  # the name under which tools are made
OnEvent = Callable[[AgentEvent], None]
_Opened = TypeVar("_Opened", bound="Closing | Transcripts")


class Agent(AsyncClosing):
    """Runs tasks.  Safe from many threads, each with a task of its own.

    `model`: a ModelClient, or any object with its `ask`; or the URL of a server. `sandbox`: cells get
    its policy, interpreter, packages and trail; without it those of `policy`, default `strict`.
    `registry`, or the path of its file, keeps the tools that are made; default `tools.db` in
    `directory`. `tools`: further tools that programs may call, functions or a catalogue such as
    McpServers; or a Broker or a ToolFactory, whose rules, filters, trail and vault hold for all tools
    of the agent then. `vault` has the credentials that tools and `http` name. `directory` keeps the
    runs, so that another process can resume them; without it they are in memory. `limits`: the budget
    of each run. `maker` names the agent as the maker of its tools. `research`: sources that programs
    can search, default none. `planner`: proposes plans, default none. `memory` keeps recipes and facts;
    default `memory.db` in `directory`. `trusted_after`: in so many completed runs a made tool must have
    served to be TRUSTED; 0 leaves that to a person. `skills`: skills that the model can load, and whose
    files programs see below /skills; default none. `workspace` names the workspace, of `workspaces` or
    by default of the user's, whose files programs read and write by `file_read`, `file_write` and
    `csv_process`; default none. `http` makes the requests of `api_query`; default one for the section
    `http` of the policy, if that has rules. `package_store`: the store of packages for made tools, if
    `sandbox` is not given; `packages.allow` of the policy names the allowed packages. `count_tokens`
    counts the tokens of a text, by which the conversation is kept within the model's context: the
    model's tokenizer; default an estimate by the text's bytes.

    Close it, or use it as a context manager.
    """

    def __init__(
        self, model: "ChatModel | str", *, sandbox: Sandbox | None = None, policy: Any = "strict",
        registry: ToolRegistry | str | os.PathLike[str] | None = None,
        tools: "Broker | Catalogue | Iterable[Tool | Callable[..., Any]]" = (),
        directory: str | os.PathLike[str] | None = None,
        limits: AgentLimits = AgentLimits(),  # noqa: B008 - a constant
        maker: str = MAKER, research: Research | None = None, planner: Planner | None = None,
        memory: AgentMemory | None = None, trusted_after: int = 10, workspace: str = "",
        workspaces: Workspaces | str | os.PathLike[str] | None = None,
        http: "HttpClient | None" = None, vault: Vault | None = None, skills: "Skills | None" = None,
        package_store: "PackageStore | None" = None, count_tokens: CountTokens = estimated_tokens,
    ) -> None:  # fmt: skip
        self.model = _client(model) if isinstance(model, str) else model
        self.limits = limits
        self._trusted_after = trusted_after
        self._opened: list[Closing | Transcripts] = []
        files = _Files.below(directory)
        try:
            self._transcripts = self._own(Transcripts(files.transcripts))
            self.calls = self._own(Runs(files.calls))
            self.memory = memory or self._own(AgentMemory(files.memory))
            base = sandbox or self._own(
                Sandbox(
                    policy=policy,
                    pool=0,
                    audit=_trail(),
                    host=HostSettings(package_store=package_store),
                )
            )
            self.factory = self._own(
                ToolFactory(base, registry or files.tools, maker=maker, pool=1)
            )
            offered = AgentTools(
                catalogue_of(
                    actions(self._build, research, base, self._skills if skills else None)
                ),
                _catalogue(tools),
                catalogue_of(
                    self._ready_made(workspace, workspaces, http or _http_of(base.policy))
                ),
                self.factory,
            )
            broker = _broker(tools, offered, base.policy, self.calls, vault)
            patient = replace(base.policy.limits, wall_seconds=limits.step_seconds)
            patient_policy = replace(base.policy, limits=patient)
            cells = self._own(
                base.sibling(patient_policy, PoolSettings(size=1), broker, skills=skills)
            )
            told = instructions(
                has_research=research is not None, skills=cells.skills.prompt() if skills else ""
            )
            self._parts = AgentParts(
                self._transcripts, self.calls, cells, self.memory, planner, offered, told, count_tokens,
            )  # fmt: skip
        except BaseException:
            self.close()
            raise
        self._working: dict[str, TaskLoop] = {}

    def _ready_made(
        self, workspace: str, workspaces: "Workspaces | str | os.PathLike[str] | None",
        http: "HttpClient | None",
    ) -> list[Tool]:  # fmt: skip
        """Return the ready-made tools that the caller has given something to work on."""
        tools = [summary_tool(self._summariser)]
        if workspace:
            kept = workspaces if isinstance(workspaces, Workspaces) else Workspaces(workspaces)
            tools += file_tools(kept, workspace)
        return [*tools, api_query(http)] if http else tools

    def _own(self, opened: _Opened) -> _Opened:
        self._opened.append(opened)
        return opened

    # working

    def run(
        self, task: str, *, on_event: OnEvent | None = None, on_text: OnText | None = None
    ) -> AgentResult:
        """Work on a new task until it is completed, failed, or waits for a person.

        `on_event` gets each event, `on_text` the model's text as it comes.  Raises ModelError,
        LaunchError and others that are not the program's fault; the run is `interrupted` then, and can
        be resumed.
        """
        return _outcome(self._events(self._begin(task), on_text), on_event)

    def resume(
        self, run: str, *, on_event: OnEvent | None = None, on_text: OnText | None = None
    ) -> AgentResult:
        """Go on with a run that is not completed, from its last finished step.

        Raises PolicyError for an unknown or completed run, and for one that a living process works on.
        """
        self._transcripts.take_up(run)
        return _outcome(self._events(run, on_text), on_event)

    def stream(self, task: str) -> Iterator[AgentEvent]:
        """Work on a new task, and yield each event as it happens; the last tells how the run ended.

        The run is interrupted if the iterator is closed before.
        """
        yield from self._events(self._begin(task), None)

    def run_batch(self, tasks: Sequence[str], *, workers: int = 2) -> list[AgentResult]:
        """Work on several tasks, `workers` at a time, then merge the tools that do the same.

        Return the results in the order of the tasks.  If a run raises, the others are worked on, and
        the first exception is raised at the end.
        """
        with ThreadPoolExecutor(max(1, workers), "cellwright-agent") as pool:
            runs = [pool.submit(self.run, each) for each in tasks]
        self.merge_tools()
        return [each.result() for each in runs]

    def merge_tools(self) -> tuple[MergedTool, ...]:
        """Merge equivalent tools of this agent, and update recipes to the remaining names."""
        merged = self.factory.merge_similar()
        for kept, retired in merged:
            self.memory.replace_tool(retired.name, kept.name)
        return merged

    arun = in_asyncio(run)

    async def astream(self, task: str) -> AsyncIterator[AgentEvent]:
        """`stream` for asyncio."""
        events = self.stream(task)
        while (event := await self._in_thread(lambda: next(events, None))) is not None:
            yield event

    def _begin(self, task: str) -> str:
        if not task.strip():
            raise PolicyError("task: must not be empty")
        check_encodable("task", task)
        return self._transcripts.begin(task, self.model.name)

    def _events(self, run: str, on_text: OnText | None) -> Events:
        loop = TaskLoop(self._transcripts.get(run), self.model, self.limits, self._parts, on_text)
        self._working[run] = loop
        try:
            result = yield from loop.go_on()
            self._learn(loop, result)
            return result
        except BaseException as error:
            why = "stopped by the caller" if isinstance(error, GeneratorExit) else f"{error}"
            self._transcripts.end(run, INTERRUPTED, f"{type(error).__name__}: {why}"[:1000])
            raise
        finally:
            del self._working[run]

    def _learn(self, loop: TaskLoop, result: AgentResult) -> None:
        """Record which tools served a finished run, and trust tools that served often enough.

        The tests that a model wrote make no trust, and neither does one run, however often it calls.
        """
        if result.status == PAUSED:
            return
        tools = loop.tools_used()
        self.memory.note_run(loop.run, loop.task, result.status, result.usage.steps, tools)
        for used in tools if self._trusted_after and result.ok else ():
            spec = self._parts.tools.spec_of(used.name)
            if spec is None or (spec.owner, spec.state) != (ToolOwner.AGENT, ToolState.TESTED):
                continue
            if spec.digest != used.digest:  # another tool has taken the name
                continue
            if self.memory.successes_of(used)[0] >= self._trusted_after:
                self.factory.registry.set_state(spec.reference, ToolState.TRUSTED)

    def _build(self, name: str, description: str, caller: Caller) -> ToolSpec:
        """Make a tool for the run whose program asked; its tokens count for that run."""
        loop = self._loop_of(caller)
        toolsmith = Toolsmith(loop, self.factory, on_draft=loop.note, check=loop.check_budget)
        return toolsmith.build_new_tool(name, description, task=loop.task)

    def _skills(self) -> "SkillSet":
        return self._parts.sandbox.skills

    def _summariser(self, caller: Caller) -> Summarise:
        loop = self._loop_of(caller)
        return lambda text, length: summarise(loop, text, length, loop.check_budget)

    def _loop_of(self, caller: Caller) -> TaskLoop:
        """Return the run whose program calls; raises ClosedError if it is over."""
        if loop := self._working.get(run_of(caller.id)):
            return loop
        raise ClosedError("the run whose program calls is over")

    @property
    def policy(self) -> Policy:
        """The policy of its programs."""
        return self._parts.sandbox.policy

    # runs

    def runs(self) -> tuple[AgentRun, ...]:
        """Return all runs, the oldest first."""
        return self._transcripts.runs()

    def show(self, run: str) -> tuple[AgentRun, list[AgentStep]]:
        """Return a run with its steps; raises PolicyError for an unknown one."""
        return self._transcripts.get(run), self._transcripts.steps(run)

    def pending(self, run: str | None = None) -> tuple[Approval, ...]:
        """Return the calls that wait for a person, of one run or of all."""
        waiting = self.calls.pending()
        return tuple(each for each in waiting if run in (None, run_of(each.run)))

    def close(self) -> None:
        """End every cell and close the files; closing twice is fine."""
        for each in reversed(self._opened):
            each.close()


class _Files(NamedTuple):
    """Where an agent keeps its runs and tools; None is in memory."""

    transcripts: Path | None = None
    calls: Path | None = None
    tools: Path | None = None
    memory: Path | None = None

    @classmethod
    def below(cls, directory: str | os.PathLike[str] | None) -> "_Files":
        if directory is None:
            return cls()
        place = Path(directory)
        make_private_directory(place, PolicyError)
        names = ("agents.db", "calls.db", "tools.db", "memory.db")
        return cls(*(place / name for name in names))


def _http_of(policy: Policy) -> "HttpClient | None":
    """Return a client for the rules in the section `http` of a policy; None without rules."""
    if not policy.http.allow:
        return None
    from ..tools.http.http_tool import client_of  # imports ssl

    return client_of(policy.http)


def _trail() -> AuditLog:
    """Return a trail in memory that a run of a thousand steps does not make large."""
    return AuditLog(max_entries=_TRAIL_ENTRIES)


def _catalogue(tools: "Broker | Catalogue | Iterable[Tool | Callable[..., Any]]") -> Catalogue:
    """Return the tools that a program may call in addition to the agent's."""
    given = _broker_of(tools)
    return given.catalogue if given else catalogue_of(tools)


def _broker(
    tools: "Broker | Catalogue | Iterable[Tool | Callable[..., Any]]", offered: AgentTools,
    policy: Policy, calls: Runs, vault: Vault | None,
) -> Broker:  # fmt: skip
    """Return the broker of an agent; the rules and filters of the caller's broker hold too."""
    if given := _broker_of(tools):
        return given.extended(
            offered, rules=policy.tools, allowed=f"{ACTIONS}.*", approve=calls.ask, vault=vault
        )
    return Broker(offered, rules=policy.tools, vault=vault, approve=calls.ask, audit=None)


def _broker_of(tools: object) -> Broker | None:
    """Return the broker that the caller gave, or that a ToolFactory has."""
    found = tools if isinstance(tools, Broker) else getattr(tools, "broker", None)
    return found if isinstance(found, Broker) else None


def _client(url: str) -> ChatModel:
    from .model import ModelClient  # httpx2 takes 100 ms to import

    return ModelClient(url)


def _outcome(events: Events, on_event: OnEvent | None) -> AgentResult:
    while True:
        try:
            event = next(events)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return] # Events returns it
        if on_event:
            on_event(event)
