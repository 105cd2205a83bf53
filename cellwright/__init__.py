"""A hardened single-host sandbox for AI agents: every call gets its own kernel-isolated cell."""

TYPE_CHECKING = False  # importing `typing` for it would slow down the start of every launcher
if TYPE_CHECKING:
    # The one list of public names.  Type checkers and editors execute it; `_homes` reads it.
    # isort: off
    # fmt: off
    # sandboxes and sessions
    from .harness.sandbox.sandbox import Sandbox as Sandbox
    from .harness.sandbox.faces.executor import create_sandbox as create_sandbox
    from .harness.sandbox.faces.config import SandboxConfig as SandboxConfig
    from .harness.sandbox.sandbox_arguments import HostSettings as HostSettings
    from .runner.settings import PoolSettings as PoolSettings
    from .runner.settings import SessionSettings as SessionSettings
    from .runner.settings import PauseSettings as PauseSettings
    from .harness.sandbox.sessions.session import Session as Session
    from .harness.sandbox.calls.background import Run as Run
    from .harness.sandbox.programs.program import Program as Program
    from .harness.sandbox.programs.background_processes import BackgroundProcess as BackgroundProcess
    from .harness.sandbox.programs.terminal import Terminal as Terminal
    from .harness.sandbox.network.exposed_ports import ExposedPort as ExposedPort
    from .harness.sandbox.network.network_control import SandboxNetwork as SandboxNetwork
    from .harness.sandbox.network.network_control import PendingName as PendingName
    from .harness.sandbox.workspaces.workspace_store import Workspaces as Workspaces
    from .harness.sandbox.packages.package_store import PackageStore as PackageStore
    from .harness.sandbox.packages.package_store import PackageSet as PackageSet
    from .harness.fleet.fleet import Fleet as Fleet

    # results
    from .runner.requests.result import SandboxResult as SandboxResult
    from .runner.requests.result import SandboxStatus as SandboxStatus
    from .harness.sandbox.calls.call_request import CommandResult as CommandResult
    from .runner.requests.result import Usage as Usage
    from .runner.requests.result import Violation as Violation

    # policies
    from .policies.policy import Policy as Policy
    from .policies.policy import Filesystem as Filesystem
    from .policies.policy import Limits as Limits
    from .policies.policy import Network as Network
    from .policies.network.rule import NetworkDenial as NetworkDenial
    from .policies.network.rule import NetworkRule as NetworkRule
    from .policies.policy import Processes as Processes
    from .policies.tool_rules import Tools as Tools
    from .policies.tool_rules import ToolRule as ToolRule
    from .policies.policy import Validation as Validation
    from .policies.plan import Plan as Plan
    from .policies.profiles.loading import load_policy as load_policy
    from .policies.profiles.loading import profile_names as profile_names
    from .policies.narrowing import exceeds as exceeds
    from .policies.narrowing import narrow as narrow

    # permissions, isolation and executors
    from .policies.permission_sets import PermissionSet as PermissionSet
    from .policies.permission_sets import PermissionLevel as PermissionLevel
    from .policies.permission_sets import FilePermission as FilePermission
    from .policies.permission_sets import NetworkPermission as NetworkPermission
    from .policies.permission_sets import ProcessPermission as ProcessPermission
    from .harness.sandbox.faces.executor import IsolationBackend as IsolationBackend
    from .harness.sandbox.faces.executor import IsolationConfig as IsolationConfig
    from .harness.sandbox.faces.executor import ProcessIsolation as ProcessIsolation
    from .harness.sandbox.faces.executor import ContainerIsolation as ContainerIsolation
    from .harness.sandbox.faces.executor import CodeExecutor as CodeExecutor
    from .harness.sandbox.faces.executor import ExecutionContext as ExecutionContext
    from .harness.sandbox.faces.executor import ExecutionResult as ExecutionResult
    from .policies.source.check import validate_code as validate_code

    # audit
    from .runner.audit.log import AuditLog as AuditLog
    from .runner.audit.record import AuditEntry as AuditEntry
    from .runner.settings import AuditLevel as AuditLevel
    from .runner.audit.verification import verify as verify

    # tools
    from .harness.tools.tool import tool as tool
    from .harness.tools.tool import tool_of as tool_of
    from .harness.tools.tool import Tool as Tool
    from .harness.tools.tool import Caller as Caller
    from .harness.tools.broker import Broker as Broker
    from .harness.tools.tool import Vault as Vault
    from .harness.user_data import from_environment as from_environment
    from .harness.user_data import from_file as from_file
    from .harness.user_data import from_keyring as from_keyring
    from .harness.tools.catalogue import Catalogue as Catalogue
    from .harness.tools.catalogue import Offer as Offer
    from .harness.tools.approval import ApprovalRequest as ApprovalRequest
    from .harness.runs.durable_runs import Runs as Runs
    from .harness.making.factory import ToolFactory as ToolFactory
    from .harness.tools.registry import ToolRegistry as ToolRegistry
    from .harness.schemas.spec import ToolSpec as ToolSpec
    from .harness.mcp.mcp_servers import McpServers as McpServers
    from .harness.mcp.server_config import ServerConfig as ServerConfig
    from .harness.mcp.mcp_servers import ServerStatus as ServerStatus
    from .harness.mcp.managed_server import Elicitation as Elicitation
    from .harness.mcp.server_config import read_servers as read_servers

    # skills and personal data
    from .harness.skills.skills import Skills as Skills
    from .harness.privacy.privacy import Privacy as Privacy

    # errors
    from .policies.errors import CellwrightError as CellwrightError
    from .policies.errors import BusyError as BusyError
    from .policies.errors import ClosedError as ClosedError
    from .policies.errors import LaunchError as LaunchError
    from .policies.errors import PackageError as PackageError
    from .policies.errors import PolicyError as PolicyError
    from .policies.errors import SessionLost as SessionLost
    from .policies.errors import ToolError as ToolError
    from .policies.errors import Unenforceable as Unenforceable
    from .policies.errors import WorkspaceError as WorkspaceError

_EXTRAS = {".harness.mcp": "mcp"}  # folders of which some modules need an extra
_ROOMS = {
    "errors": "policies/errors.py",
    "results": "results.py",
    "tools": "tools.py",
    "privacy": "privacy.py",
}  # fmt: skip - the modules of names that were here once, and the files that list these
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
        return _find_in_rooms(name)
    import importlib

    home = _homes()[name]
    try:
        value = getattr(importlib.import_module(home, __name__), name)
    except ImportError as error:
        if (extra := _EXTRAS.get(home.rpartition(".")[0])) is None:
            raise
        from .policies.extras import stand_in

        return stand_in(name, extra, str(error))  # looked up again: the extra may come
    notes = vars(value).get("__annotations__", {}).values() if isinstance(value, type) else ()
    # Annotations that are text can be evaluated in the module of their class only.
    if value.__module__ == __name__ + home and not any(isinstance(each, str) for each in notes):
        value.__module__ = __name__
    globals()[name] = value
    return value


def _find_in_rooms(name: str) -> object:
    """Return a name that older versions had here, from the module that has it now."""
    for room, path in _ROOMS.items() if name[:1].isalpha() else ():
        with open(f"{__path__[0]}/{path}") as file:
            source = file.read()
        if f'"{name}"' in source:
            import importlib
            import warnings

            warnings.warn(
                f"cellwright.{name} is deprecated: import it from cellwright.{room}",
                DeprecationWarning, stacklevel=3,
            )  # fmt: skip
            return getattr(importlib.import_module("." + room, __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
