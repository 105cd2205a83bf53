"""The objects that results, and methods of `Runs`, consist of."""

from .harness.runs.durable_runs import (
    CallState,
    RunAttempt,
    RunCall,
    RunRecord,
)
from .harness.runs.run_store import (
    Approval,
    RunSummary,
)
from .harness.sandbox.workspaces.workspace_files import (
    FileChange,
    FileVersion,
    WorkspaceDiff,
)
from .policies.source.findings import (
    Finding,
)
from .runner.cells.workspace import (
    Artifact,
    Executable,
    KeptWorkspace,
    Uncollected,
    WorkspaceFile,
)
from .runner.requests.result import (
    Chart,
    ChartAxis,
    ChartSeries,
    Phases,
)

__all__ = [
    "Approval",
    "Artifact",
    "CallState",
    "Chart",
    "ChartAxis",
    "ChartSeries",
    "Executable",
    "FileChange",
    "FileVersion",
    "Finding",
    "KeptWorkspace",
    "Phases",
    "RunAttempt",
    "RunCall",
    "RunRecord",
    "RunSummary",
    "Uncollected",
    "WorkspaceDiff",
    "WorkspaceFile",
]
