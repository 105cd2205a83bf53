"""The names of the Alita blueprint, as a thin layer: its programs run with the import changed.

Everything behind them is the agent of this folder: programs and tools run in cells.
"""

import io
import json
import os
import re
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ...policies.closing import Closing
from ...policies.errors import CellwrightError, PolicyError, ToolError, ToolNotFound
from ...policies.source.python_check import TooDeep, parse
from ...runner.requests.result import SandboxResult, SandboxStatus
from ..making.builtin import api_query, file_tools, text_summarize
from ..making.factory import ToolFactory
from ..sandbox.calls.background import in_thread
from ..sandbox.sandbox import Sandbox
from ..sandbox.workspaces.workspace_store import Workspaces
from ..schemas.spec import ToolSpec
from ..tools.broker import Broker
from ..tools.catalogue import Catalogue, Offer
from ..tools.http.http_client import HttpClient
from ..tools.tool import Vault
from .agent import Agent
from .agent_memory import AgentMemory
from .planner import Planner, Toolsmith
from .prompts import AgentLimits, ChatModel, summarise
from .research import Research

# Names that the blueprint gives to an agent's first tools.
_READY_MADE = {
    "ApiQueryTool": "api_query", "FileReadTool": "file_read", "FileWriteTool": "file_write",
    "TextSummarizer": "text_summarize", "CsvProcessor": "csv_process",
}  # fmt: skip
_OPERATIONS = {"select": "columns", "filter": "where"}
_FILES = "files"  # the workspace in which these tools keep files
_URL = "OPENAI_BASE_URL"
_DEFAULT_URL = "https://api.openai.com/v1"


class AlitaError(CellwrightError):
    """The root of the blueprint's exceptions."""


class ToolCreationError(AlitaError):
    """A tool cannot be created."""


class ToolExecutionError(AlitaError):
    """A tool fails to execute."""


class PlanningError(AlitaError):
    """No plan could be made."""


class AlitaConfig(msgspec.Struct, kw_only=True):
    """The blueprint's configuration.

    `model_url` and `model_name` name the model's server; by default the variables OPENAI_BASE_URL and
    OPENAI_MODEL, of the environment or of a file `.env` in the working directory that this user owns
    and no other user may write. A key of the environment is not sent to a server that only the file
    names. `planning["max_react_steps"]` is the budget of steps, and `mcp["execution_timeout"]` the
    seconds of a call of a tool. `security["sandbox_enabled"]` must stay True: there is no other way of
    running anything. `security["allowed_imports"]` is kept for programs that read it, and decides
    nothing: a cell confines whatever is imported.
    """

    openai_api_key: str | None = None
    anthropic_api_key: str | None = None
    workspace_dir: str = "workspace"
    model_url: str = ""
    model_name: str = ""
    memory: dict[str, Any] = {}
    planning: dict[str, Any] = {}
    mcp: dict[str, Any] = {}
    security: dict[str, Any] = {}

    def __post_init__(self) -> None:
        file = _file_variables()
        known = file | os.environ
        is_of_file = not self.model_url and not os.environ.get(_URL) and bool(file.get(_URL))
        keys = (
            file if is_of_file else known
        )  # a repository's file must not make the user's key leave
        self.openai_api_key = self.openai_api_key or keys.get("OPENAI_API_KEY")
        self.anthropic_api_key = self.anthropic_api_key or known.get("ANTHROPIC_API_KEY")
        self.model_url = self.model_url or known.get(_URL) or _DEFAULT_URL
        self.model_name = self.model_name or known.get("OPENAI_MODEL") or ""
        self.memory = {"max_episodes": 1000} | self.memory
        self.planning = {"max_react_steps": 10} | self.planning
        self.mcp = {"execution_timeout": 60} | self.mcp
        allowed = ["json", "aiohttp", "math", "random"]
        self.security = {"sandbox_enabled": True, "allowed_imports": allowed} | self.security
        if self.security["sandbox_enabled"] is not True:
            raise PolicyError("security: sandbox_enabled: must be True: nothing runs outside cells")

    def get_workspace_path(self, sub_dir: str) -> Path:
        """Return a directory below the workspace, made if it is missing."""
        path = Path(self.workspace_dir).resolve() / sub_dir
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    @property
    def mcp_box_path(self) -> Path:
        """The directory to which made tools are written."""
        return self.get_workspace_path("tools")

    def client(self) -> ChatModel:
        """Return the client of the configured model."""
        from .model import ModelClient  # httpx2 takes 100 ms to import

        return ModelClient(self.model_url, self.model_name, key=self.openai_api_key or "")


def _file_variables() -> dict[str, str]:
    """Return the variables of a `.env` file of this user."""
    try:
        descriptor = os.open(".env", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, encoding="utf-8") as file:
            about = os.fstat(descriptor)
            is_own = about.st_uid == os.geteuid() and not about.st_mode & 0o022
            text = file.read(65_536) if is_own and stat.S_ISREG(about.st_mode) else ""
    except (OSError, UnicodeDecodeError):
        return {}
    from dotenv import dotenv_values  # part of the extra `agent`

    # ${OPENAI_API_KEY} in a URL must stay as it is.
    values = dotenv_values(stream=io.StringIO(text), interpolate=False)
    return {name: value for name, value in values.items() if value}


Call = Callable[[str, dict[str, Any]], Any]  # name, arguments


class WebAgent:
    """Looks things up, as a Research with which it is made allows; by default in nothing but the
    packages that are installed."""

    def __init__(self, config: AlitaConfig | None = None, research: Research | None = None) -> None:
        self.config = config or AlitaConfig()
        self.research = research or Research(installed=True)

    async def search(self, query: str) -> list[dict[str, str]]:
        """Return the findings: title, source and text, which is untrusted."""
        found = await in_thread(lambda: self.research.search(query))
        return [each._asdict() for each in found]


class HierarchicalMemorySystem(AgentMemory):
    """The agent's memory in the workspace: episodes, recipes of tools, and facts."""

    def __init__(self, config: AlitaConfig | None = None) -> None:
        super().__init__((config or AlitaConfig()).get_workspace_path("memory") / "memory.db")


class HybridPlanner(Planner):
    """The planner, with the settings `plans` and `seed` of `config.planning`."""

    def __init__(self, config: AlitaConfig | None = None) -> None:
        planning = (config or AlitaConfig()).planning
        super().__init__(planning.get("plans", 3), planning.get("seed", 0))


class AlitaTool:
    """A tool of the registry that can be run."""

    def __init__(self, spec: ToolSpec, call: Call) -> None:
        self.spec, self._call = spec, call
        self.name, self.description = spec.name, spec.description

    async def run(self, input: dict[str, Any]) -> Any:
        """Call it; raises ToolExecutionError."""
        try:
            return await in_thread(lambda: self._call(self.spec.name, input))
        except ToolError as error:
            raise ToolExecutionError(error.what, error.hint) from error


class AlitaRegistry:
    """The blueprint's view of the tools that a factory has made, and of the ready-made ones."""

    def __init__(
        self, factory: ToolFactory, ready_made: Catalogue | None = None, vault: Vault | None = None
    ) -> None:
        self._factory, self._ready_made = factory, ready_made or Offer([])
        self._broker = Broker(self._ready_made, vault=vault)

    async def find_tool_by_description(self, description: str) -> AlitaTool | None:
        """Return the tool that fits a description best, None if none does."""
        found = self._factory.search(description, limit=1, detail="name")["tools"]
        return self.get(found[0]["name"]) if found else None

    def get(self, name: str) -> AlitaTool:
        """Return a tool: `EmailValidator` is `email_validator` too; raises ToolExecutionError."""
        try:
            if own := _READY_MADE.get(name):
                call = (
                    _process_csv(self._broker.call) if own == "csv_process" else self._broker.call
                )
                return AlitaTool(self._ready_made.get(own).spec, call)
            return AlitaTool(_named(self._factory, name), self._factory.call)
        except ToolError as error:
            raise ToolExecutionError(error.what, error.hint) from error


class McpBox(AlitaRegistry, Closing):
    """The blueprint's ToolRegistry: the tools that were written to a directory, `config.mcp_box_path`.

    Each is checked again, and called in cells.  Close it, or use it as a context manager.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        factory = ToolFactory(pool=0)
        super().__init__(factory)
        for about in sorted(Path(path).glob("*.mcp.json")):
            told = msgspec.json.decode(about.read_bytes(), type=dict[str, Any])
            source = about.with_name(f"{about.name.removesuffix('.mcp.json')}.py").read_text()
            factory.create_tool(
                told["name"], told["description"], source, told["parameters"], allow_similar=True,
            )  # fmt: skip

    def close(self) -> None:
        self._factory.close()


def _named(factory: ToolFactory, name: str) -> ToolSpec:
    """Return the made tool that is called `name`, in the blueprint's way of writing it or in ours."""
    try:
        return factory.get_tool(name)
    except ToolNotFound:
        return factory.get_tool(_with_underscores(name))


def _with_underscores(name: str) -> str:
    """Return `EmailValidator` as `email_validator`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _process_csv(call: Call) -> Call:
    """Return `call` for which the blueprint's `operation` names columns and rows."""

    def process(name: str, given: dict[str, Any]) -> Any:
        if not isinstance(operation := given.get("operation"), dict):
            return call(name, given)
        asked = {_OPERATIONS.get(str(key), str(key)): each for key, each in operation.items()}
        answer = call(name, {"filepath": given.get("filepath"), **asked})
        return {"result_json": json.dumps(answer["rows"])}

    return process


class Orchestrator(Closing):
    """Works on tasks in words, and keeps the tools that it makes in the workspace.

    `model` stands in for the configured one.  `http` makes the requests of its
    ApiQueryTool, with credentials of `vault`.  Close it, or use it as a context manager.
    """

    def __init__(
        self, config: AlitaConfig | None = None, *, model: ChatModel | None = None,
        research: Research | None = None, planner: Planner | None = None,
        http: HttpClient | None = None, vault: Vault | None = None,
    ) -> None:  # fmt: skip
        self.config = config or AlitaConfig()
        files = Workspaces(self.config.get_workspace_path("files"))
        self.web_agent = WebAgent(self.config, research)
        self.agent = Agent(
            model or self.config.client(), directory=self.config.get_workspace_path("agent"),
            limits=AgentLimits(steps=self.config.planning["max_react_steps"]),
            research=self.web_agent.research, planner=planner, workspace=_FILES,
            workspaces=files, http=http, vault=vault,
        )  # fmt: skip
        told = text_summarize(lambda text, length: summarise(self.agent.model, text, length))
        ready_made = Offer([*file_tools(files, _FILES), told, api_query(http)])
        self.memory, self.llm = self.agent.memory, self.agent.model
        self.tool_registry = AlitaRegistry(self.agent.factory, ready_made, vault)
        self.toolsmith = AlitaToolsmith(self.agent, self.config)
        self.mcp_system = MCPSystem(self.config, self.web_agent, orchestrator=self)

    async def process_task(self, task: str) -> Any:
        """Return the answer to a task; raises AlitaError if there is none."""
        result = await self.agent.arun(task)
        if not result.ok:
            raise AlitaError(f"run {result.run_id} is {result.status}: {result.reason}")
        return result.answer

    def close(self) -> None:
        """End every cell and close the files; closing twice is fine."""
        self.agent.close()


class AlitaToolsmith:
    """Makes tools, and writes each to the workspace as `Name.py` with `Name.mcp.json`."""

    def __init__(self, agent: Agent, config: AlitaConfig) -> None:
        self._agent, self._config = agent, config

    async def build_new_tool(self, name: str, description: str) -> AlitaTool:
        """Return a tested tool; raises ToolCreationError.

        `EmailValidator` makes the tool `email_validator`, and the files of the given name.
        """
        smith = Toolsmith(self._agent.model, self._agent.factory)
        try:
            spec = await in_thread(
                lambda: smith.build_new_tool(_with_underscores(name), description)
            )
        except ToolError as error:
            raise ToolCreationError(error.what, error.hint) from error
        self._write(spec, name)
        return AlitaTool(spec, self._agent.factory.call)

    def _write(self, spec: ToolSpec, name: str) -> None:
        tools = self._config.mcp_box_path
        about = {"name": spec.name, "description": spec.description, "parameters": spec.parameters,
                 "version": spec.version, "state": spec.state.value,
                 "requirements": spec.requirements}  # fmt: skip
        (tools / f"{name}.py").write_text(spec.source_code)
        text = msgspec.json.format(msgspec.json.encode(about), indent=2)
        (tools / f"{name}.mcp.json").write_bytes(text)


class ToolExecutionResult(NamedTuple):
    """The outcome of a call of a tool."""

    success: bool
    result: Any
    error: str | None = None


class MCPSystem(Closing):
    """The blueprint's life of a tool: made, found and called by name.

    `orchestrator` has the tools; by default one of its own, with `model` for the configured one.
    """

    def __init__(
        self, config: AlitaConfig | None = None, web_agent: WebAgent | None = None, *,
        model: ChatModel | None = None, orchestrator: Orchestrator | None = None,
    ) -> None:  # fmt: skip
        self._own = None
        if orchestrator is None:
            research = web_agent.research if web_agent else None
            self._own = orchestrator = Orchestrator(config, model=model, research=research)
        self._orchestrator = orchestrator

    async def create_tool(self, name: str, task_description: str) -> None:
        """Have the model write a tool with its tests; raises ToolCreationError."""
        await self._orchestrator.toolsmith.build_new_tool(name, task_description)

    async def execute_tool(self, tool_name: str, parameters: dict[str, Any]) -> ToolExecutionResult:
        """Call a tool; raises ToolExecutionError if it does not exist."""
        tool = self._orchestrator.tool_registry.get(tool_name)
        try:
            return ToolExecutionResult(True, await tool.run(parameters))
        except ToolExecutionError as error:
            return ToolExecutionResult(False, None, str(error))

    async def get_tool(self, tool_name: str) -> dict[str, Any] | None:
        """Return name and description of a tool; None if it does not exist."""
        try:
            tool = self._orchestrator.tool_registry.get(tool_name)
        except ToolExecutionError:
            return None
        return {"name": tool.name, "description": tool.description}

    def close(self) -> None:
        """End the cells of its own orchestrator; closing twice is fine."""
        if self._own:
            self._own.close()


class SandboxExecutor(Closing):
    """The blueprint's executor: a script in a cell, with parameters as JSON on standard input.

    `policy` is the policy of its cells, default `strict`, and `options` are arguments of Sandbox.
    """

    def __init__(
        self, config: AlitaConfig | None = None, *, policy: Any = "strict", **options: Any
    ) -> None:
        self.config = config or AlitaConfig()
        self._sandbox = Sandbox(policy=policy, pool=0, **options)

    async def execute_code(self, code: str, parameters: dict[str, Any]) -> ToolExecutionResult:
        """Run a script; the last line that it prints is its result, as JSON."""
        result = await self.run_in_container(code, (), json.dumps(parameters))
        if result.status is SandboxStatus.TIMEOUT:
            return ToolExecutionResult(False, None, "Execution timed out.")
        if not result.ok:
            return ToolExecutionResult(False, None, result.stderr or result.error)
        try:
            value = json.loads(result.stdout.strip().split("\n")[-1])
        except (ValueError, RecursionError):
            return ToolExecutionResult(False, None, "Failed to decode tool output as JSON.")
        return ToolExecutionResult(True, value)

    async def run_in_container(
        self, code: str, requirements: Sequence[str] = (), input_json: str = "{}"
    ) -> SandboxResult:
        """Run a script with packages; the result has stdout, stderr and exit_code."""
        most = self._sandbox.policy.limits.wall_seconds
        return await self._sandbox.aexecute(
            code, stdin=input_json, packages=requirements,
            timeout=min(self.config.mcp["execution_timeout"], most),
        )  # fmt: skip

    async def validate_code(self, code: str) -> bool:
        """Tell whether code is Python; its cell decides what it may do."""
        try:
            parse(code)
        except (TooDeep, SyntaxError, ValueError, RecursionError, MemoryError):
            return False
        return True

    def close(self) -> None:
        self._sandbox.close()


class ManagerAgent(Orchestrator):
    """The Orchestrator, whose answers say whether they are one."""

    async def process_task(self, user_query: str) -> dict[str, Any]:
        """Return `{"success": True, "result": answer}`, or False with the `error`."""
        try:
            return {"success": True, "result": await super().process_task(user_query)}
        except CellwrightError as error:
            return {"success": False, "error": error.what}
