"""A hardened single-host sandbox for AI agents: every call gets its own kernel-isolated cell."""

import importlib

TYPE_CHECKING = False  # typing's own would cost a slow import in every launcher
if TYPE_CHECKING:
    from .harness.making.factory import ToolFactory as ToolFactory
    from .harness.runs.runs import Runs as Runs
    from .harness.sandbox.config import SandboxConfig as SandboxConfig
    from .harness.sandbox.executor import CodeExecutor as CodeExecutor
    from .harness.sandbox.executor import ExecutionContext as ExecutionContext
    from .harness.sandbox.executor import ExecutionResult as ExecutionResult
    from .harness.sandbox.isolation import ContainerIsolation as ContainerIsolation
    from .harness.sandbox.isolation import IsolationBackend as IsolationBackend
    from .harness.sandbox.isolation import IsolationConfig as IsolationConfig
    from .harness.sandbox.isolation import ProcessIsolation as ProcessIsolation
    from .harness.sandbox.program import Program as Program
    from .harness.sandbox.run import Run as Run
    from .harness.sandbox.sandbox import Sandbox as Sandbox
    from .harness.sandbox.sandbox import create_sandbox as create_sandbox
    from .harness.sandbox.session import Session as Session
    from .harness.sandbox.workspaces.store import Workspaces as Workspaces
    from .harness.schemas.spec import Provenance as Provenance
    from .harness.schemas.spec import ToolSpec as ToolSpec
    from .harness.schemas.spec import ToolState as ToolState
    from .harness.tools.broker import Broker as Broker
    from .harness.tools.caller import Caller as Caller
    from .harness.tools.caller import Tool as Tool
    from .harness.tools.decorator import tool as tool
    from .harness.tools.registry import ToolRegistry as ToolRegistry
    from .harness.tools.vault import Vault as Vault
    from .policies.errors import ApprovalRequired as ApprovalRequired
    from .policies.errors import AuditError as AuditError
    from .policies.errors import BusyError as BusyError
    from .policies.errors import CellwrightError as CellwrightError
    from .policies.errors import ClosedError as ClosedError
    from .policies.errors import InternalError as InternalError
    from .policies.errors import LaunchError as LaunchError
    from .policies.errors import PolicyError as PolicyError
    from .policies.errors import RegistryError as RegistryError
    from .policies.errors import SessionLost as SessionLost
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
    from .policies.errors import Unenforceable as Unenforceable
    from .policies.errors import WorkspaceError as WorkspaceError
    from .policies.narrowing import exceeds as exceeds
    from .policies.narrowing import narrow as narrow
    from .policies.permissions import FilePermission as FilePermission
    from .policies.permissions import NetworkPermission as NetworkPermission
    from .policies.permissions import PermissionLevel as PermissionLevel
    from .policies.permissions import PermissionSet as PermissionSet
    from .policies.permissions import ProcessPermission as ProcessPermission
    from .policies.policy import Policy as Policy
    from .policies.source.check import validate_code as validate_code
    from .policies.source.findings import Finding as Finding
    from .runner.audit.level import AuditLevel as AuditLevel
    from .runner.audit.log import AuditLog as AuditLog
    from .runner.audit.record import AuditEntry as AuditEntry
    from .runner.audit.verification import verify as verify
    from .runner.pool import PoolSettings as PoolSettings
    from .runner.result import Phases as Phases
    from .runner.result import SandboxResult as SandboxResult
    from .runner.result import SandboxStatus as SandboxStatus
    from .runner.result import Usage as Usage
    from .runner.result import Violation as Violation
    from .runner.session import SessionSettings as SessionSettings
    from .runner.workspace import Artifact as Artifact
    from .runner.workspace import Executable as Executable
    from .runner.workspace import KeptWorkspace as KeptWorkspace
    from .runner.workspace import Uncollected as Uncollected
    from .runner.workspace import WorkspaceFile as WorkspaceFile

# Where each public name lives; imported on first use, because importing
# `cellwright.runner.launcher.main` runs this file too and has to stay quick.
_HOMES = {
    "harness.sandbox.config": ("SandboxConfig",),
    "harness.sandbox.executor": ("CodeExecutor", "ExecutionContext", "ExecutionResult"),
    "harness.sandbox.isolation": (
        "ContainerIsolation", "IsolationBackend", "IsolationConfig", "ProcessIsolation",
    ),
    "harness.sandbox.program": ("Program",),
    "harness.sandbox.run": ("Run",),
    "harness.sandbox.sandbox": ("Sandbox", "create_sandbox"),
    "harness.sandbox.session": ("Session",),
    "harness.tools.broker": ("Broker",),
    "harness.runs.runs": ("Runs",),
    "harness.tools.vault": ("Vault",),
    "harness.sandbox.workspaces.store": ("Workspaces",),
    "harness.tools.decorator": ("tool",),
    "harness.making.factory": ("ToolFactory",),
    "harness.tools.registry": ("ToolRegistry",),
    "harness.schemas.spec": ("Provenance", "ToolSpec", "ToolState"),
    "harness.tools.caller": ("Caller", "Tool"),
    "policies.errors": (
        "ApprovalRequired", "AuditError", "BusyError", "CellwrightError", "ClosedError",
        "InternalError", "LaunchError", "PolicyError", "RegistryError", "SessionLost",
        "ToolArgumentsInvalid", "ToolBudgetExceeded", "ToolDenied", "ToolError", "ToolExists",
        "ToolFailed", "ToolDiverged", "ToolInvalid", "ToolNotFound", "ToolOutcomeUnknown",
        "ToolQuotaExceeded", "ToolResultInvalid", "ToolResultTooLarge", "ToolTestFailed",
        "Unenforceable", "WorkspaceError",
    ),
    "policies.narrowing": ("exceeds", "narrow"),
    "policies.permissions": (
        "FilePermission", "NetworkPermission", "PermissionLevel", "PermissionSet", "ProcessPermission",
    ),
    "policies.policy": ("Policy",),
    "policies.source.check": ("validate_code",),
    "policies.source.findings": ("Finding",),
    "runner.audit.log": ("AuditLog",),
    "runner.audit.level": ("AuditLevel",),
    "runner.audit.record": ("AuditEntry",),
    "runner.audit.verification": ("verify",),
    "runner.pool": ("PoolSettings",),
    "runner.result": ("Phases", "SandboxResult", "SandboxStatus", "Usage", "Violation"),
    "runner.session": ("SessionSettings",),
    "runner.workspace": ("Artifact", "Executable", "KeptWorkspace", "Uncollected", "WorkspaceFile"),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605 - the table above is the one list


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
