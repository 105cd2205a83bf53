"""A hardened single-host sandbox for AI agents: every call gets its own kernel-isolated cell."""

TYPE_CHECKING = False  # importing `typing` for it would slow down the start of every launcher
if TYPE_CHECKING:
    # The one list of public names.  Type checkers and editors execute it; `_homes` reads it.
    from .harness.fleet.fleet import Fleet as Fleet
    from .harness.making.factory import ToolFactory as ToolFactory
    from .harness.mcp.config import ServerConfig as ServerConfig
    from .harness.mcp.config import read_servers as read_servers
    from .harness.mcp.connection import Elicitation as Elicitation
    from .harness.mcp.servers import McpServers as McpServers
    from .harness.mcp.status import ServerStatus as ServerStatus
    from .harness.privacy.adapters import PiighostDetector as PiighostDetector
    from .harness.privacy.adapters import PresidioDetector as PresidioDetector
    from .harness.privacy.detector import Detector as Detector
    from .harness.privacy.detector import FoundValue as FoundValue
    from .harness.privacy.privacy import Privacy as Privacy
    from .harness.privacy.value_file import ValueFile as ValueFile
    from .harness.privacy.values import ValueVault as ValueVault
    from .harness.runs.durable_runs import CallState as CallState
    from .harness.runs.durable_runs import RunAttempt as RunAttempt
    from .harness.runs.durable_runs import RunCall as RunCall
    from .harness.runs.durable_runs import RunRecord as RunRecord
    from .harness.runs.durable_runs import Runs as Runs
    from .harness.runs.store import Approval as Approval
    from .harness.runs.store import RunSummary as RunSummary
    from .harness.sandbox.command_result import CommandResult as CommandResult
    from .harness.sandbox.config import SandboxConfig as SandboxConfig
    from .harness.sandbox.executor import CodeExecutor as CodeExecutor
    from .harness.sandbox.executor import ExecutionContext as ExecutionContext
    from .harness.sandbox.executor import ExecutionResult as ExecutionResult
    from .harness.sandbox.isolation import ContainerIsolation as ContainerIsolation
    from .harness.sandbox.isolation import IsolationBackend as IsolationBackend
    from .harness.sandbox.isolation import IsolationConfig as IsolationConfig
    from .harness.sandbox.isolation import ProcessIsolation as ProcessIsolation
    from .harness.sandbox.network import PendingName as PendingName
    from .harness.sandbox.network import SandboxNetwork as SandboxNetwork
    from .harness.sandbox.packages.store import PackageSet as PackageSet
    from .harness.sandbox.packages.store import PackageStore as PackageStore
    from .harness.sandbox.ports.exposed import ExposedPort as ExposedPort
    from .harness.sandbox.processes import BackgroundProcess as BackgroundProcess
    from .harness.sandbox.program import Program as Program
    from .harness.sandbox.run import Run as Run
    from .harness.sandbox.sandbox import Sandbox as Sandbox
    from .harness.sandbox.sandbox import create_sandbox as create_sandbox
    from .harness.sandbox.session import Session as Session
    from .harness.sandbox.terminal import Terminal as Terminal
    from .harness.sandbox.workspaces.changes import FileChange as FileChange
    from .harness.sandbox.workspaces.changes import FileVersion as FileVersion
    from .harness.sandbox.workspaces.changes import WorkspaceDiff as WorkspaceDiff
    from .harness.sandbox.workspaces.store import Workspaces as Workspaces
    from .harness.schemas.spec import Provenance as Provenance
    from .harness.schemas.spec import ToolOwner as ToolOwner
    from .harness.schemas.spec import ToolSpec as ToolSpec
    from .harness.schemas.spec import ToolState as ToolState
    from .harness.skills.manifest import SkillManifest as SkillManifest
    from .harness.skills.skill import Skill as Skill
    from .harness.skills.skill import read_skill as read_skill
    from .harness.skills.skills import FoundSkill as FoundSkill
    from .harness.skills.skills import Skills as Skills
    from .harness.skills.store import KeptSkill as KeptSkill
    from .harness.skills.store import SkillStore as SkillStore
    from .harness.sources import from_environment as from_environment
    from .harness.sources import from_file as from_file
    from .harness.sources import from_keyring as from_keyring
    from .harness.stubs.tree import python_tree as python_tree
    from .harness.stubs.tree import typescript_tree as typescript_tree
    from .harness.tools.approval import ApprovalRequest as ApprovalRequest
    from .harness.tools.broker import Broker as Broker
    from .harness.tools.caller import Caller as Caller
    from .harness.tools.caller import Tool as Tool
    from .harness.tools.catalogue import Catalogue as Catalogue
    from .harness.tools.catalogue import Offer as Offer
    from .harness.tools.decorator import tool as tool
    from .harness.tools.decorator import tool_of as tool_of
    from .harness.tools.filters import CapRows as CapRows
    from .harness.tools.filters import RedactSecrets as RedactSecrets
    from .harness.tools.http.client import HttpCaps as HttpCaps
    from .harness.tools.http.client import HttpClient as HttpClient
    from .harness.tools.http.headers import HttpCredential as HttpCredential
    from .harness.tools.http.tool import http_tool as http_tool
    from .harness.tools.registry import ToolRegistry as ToolRegistry
    from .harness.tools.vault import Vault as Vault
    from .policies.errors import ApprovalRequired as ApprovalRequired
    from .policies.errors import AuditError as AuditError
    from .policies.errors import BudgetExceeded as BudgetExceeded
    from .policies.errors import BusyError as BusyError
    from .policies.errors import CellwrightError as CellwrightError
    from .policies.errors import ClosedError as ClosedError
    from .policies.errors import InternalError as InternalError
    from .policies.errors import LaunchError as LaunchError
    from .policies.errors import NodeLost as NodeLost
    from .policies.errors import OutcomeUnknown as OutcomeUnknown
    from .policies.errors import PackageError as PackageError
    from .policies.errors import PackageNotFound as PackageNotFound
    from .policies.errors import PauseDiffers as PauseDiffers
    from .policies.errors import PauseError as PauseError
    from .policies.errors import PolicyError as PolicyError
    from .policies.errors import QuotaExceeded as QuotaExceeded
    from .policies.errors import RegistryError as RegistryError
    from .policies.errors import SessionExpired as SessionExpired
    from .policies.errors import SessionLost as SessionLost
    from .policies.errors import SessionNodeLost as SessionNodeLost
    from .policies.errors import SkillError as SkillError
    from .policies.errors import SkillInvalid as SkillInvalid
    from .policies.errors import SkillNotFound as SkillNotFound
    from .policies.errors import SkillUntrusted as SkillUntrusted
    from .policies.errors import ToolArgumentsInvalid as ToolArgumentsInvalid
    from .policies.errors import ToolBudgetExceeded as ToolBudgetExceeded
    from .policies.errors import ToolDenied as ToolDenied
    from .policies.errors import ToolDiverged as ToolDiverged
    from .policies.errors import ToolError as ToolError
    from .policies.errors import ToolExists as ToolExists
    from .policies.errors import ToolFailed as ToolFailed
    from .policies.errors import ToolInvalid as ToolInvalid
    from .policies.errors import ToolNotFound as ToolNotFound
    from .policies.errors import ToolOutcomeUnknown as ToolOutcomeUnknown
    from .policies.errors import ToolQuotaExceeded as ToolQuotaExceeded
    from .policies.errors import ToolResultInvalid as ToolResultInvalid
    from .policies.errors import ToolResultTooLarge as ToolResultTooLarge
    from .policies.errors import ToolTestFailed as ToolTestFailed
    from .policies.errors import Unavailable as Unavailable
    from .policies.errors import Unenforceable as Unenforceable
    from .policies.errors import WorkspaceError as WorkspaceError
    from .policies.loading import load_policy as load_policy
    from .policies.loading import profile_names as profile_names
    from .policies.narrowing import exceeds as exceeds
    from .policies.narrowing import narrow as narrow
    from .policies.network.rule import NetworkDenial as NetworkDenial
    from .policies.network.rule import NetworkRule as NetworkRule
    from .policies.permissions import FilePermission as FilePermission
    from .policies.permissions import NetworkPermission as NetworkPermission
    from .policies.permissions import PermissionLevel as PermissionLevel
    from .policies.permissions import PermissionSet as PermissionSet
    from .policies.permissions import ProcessPermission as ProcessPermission
    from .policies.plan import Plan as Plan
    from .policies.policy import Filesystem as Filesystem
    from .policies.policy import Limits as Limits
    from .policies.policy import Network as Network
    from .policies.policy import Policy as Policy
    from .policies.policy import Processes as Processes
    from .policies.policy import Validation as Validation
    from .policies.privacy import PrivacyRules as PrivacyRules
    from .policies.source.check import validate_code as validate_code
    from .policies.source.findings import Finding as Finding
    from .policies.tools import ToolRule as ToolRule
    from .policies.tools import Tools as Tools
    from .runner.audit.level import AuditLevel as AuditLevel
    from .runner.audit.log import AuditLog as AuditLog
    from .runner.audit.record import AuditEntry as AuditEntry
    from .runner.audit.verification import verify as verify
    from .runner.charts import Chart as Chart
    from .runner.charts import ChartAxis as ChartAxis
    from .runner.charts import ChartSeries as ChartSeries
    from .runner.result import Phases as Phases
    from .runner.result import SandboxResult as SandboxResult
    from .runner.result import SandboxStatus as SandboxStatus
    from .runner.result import Usage as Usage
    from .runner.result import Violation as Violation
    from .runner.settings import PauseSettings as PauseSettings
    from .runner.settings import PoolSettings as PoolSettings
    from .runner.settings import SessionSettings as SessionSettings
    from .runner.workspace import Artifact as Artifact
    from .runner.workspace import Executable as Executable
    from .runner.workspace import KeptWorkspace as KeptWorkspace
    from .runner.workspace import Uncollected as Uncollected
    from .runner.workspace import WorkspaceFile as WorkspaceFile

_EXTRAS = {
    ".harness.mcp": "mcp"
}  # folders of which some modules cannot be imported without an extra
_HOMES: dict[str, str] = {}  # the module that defines each public name, once one was asked for


def _homes() -> dict[str, str]:
    """Return the module that defines each public name, read from the list above."""
    if not _HOMES:
        source = __spec__.loader.get_source(__name__)  # type: ignore[union-attr]
        for line in source.splitlines():
            match line.split():
                case ["from", module, "import", name, "as", _]:
                    _HOMES[name] = module
    return _HOMES


def _find(name: str) -> object:
    """Import a public name on its first use: importing `cellwright.runner.launcher.main` executes
    this file too, and has to stay quick."""
    if name == "__all__":
        return sorted(_homes())
    if name not in _homes():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    home = _homes()[name]
    try:
        value = getattr(importlib.import_module(home, __name__), name)
    except ImportError as error:
        if (extra := _EXTRAS.get(home.rpartition(".")[0])) is None:
            raise
        from .policies.extras import stand_in

        return stand_in(name, extra, str(error))  # looked up again: the extra may come
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # or a type checker would believe that every name exists
    __getattr__ = _find


def __dir__() -> list[str]:
    return sorted({*globals(), *_homes()})


def load_ipython_extension(shell: object) -> None:
    """Add the magic `%%cellwright` to IPython; `%load_ext cellwright` calls this."""
    from .harness.adapters.jupyter.magic import load

    load(shell)


def unload_ipython_extension(shell: object) -> None:
    """Take the magic away and end its session; `%unload_ext cellwright` calls this."""
    from .harness.adapters.jupyter.magic import unload

    unload(shell)
