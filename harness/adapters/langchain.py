"""`CellExecutionPolicy`: where the shell of LangChain's `ShellToolMiddleware` runs, a cell."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .common.cell_sandbox_session import missing
from .stdio import DEFAULT_POLICY, SCRIPT, ShellArguments

try:
    from langchain.agents.middleware.shell_tool import SHELL_TEMP_PREFIX, BaseExecutionPolicy
except ImportError as error:
    raise missing("langchain", "langchain", error) from error


@dataclass
class CellExecutionPolicy(BaseExecutionPolicy):
    """Runs the shell in a cell: `ShellToolMiddleware(execution_policy=CellExecutionPolicy())`.

    `policy`: a profile, the path of a TOML file, or a mapping as TOML has it.  Its limits count for the
    whole life of the shell.  The directory `workspace_root` of the middleware is shown writable, at the
    same place, if it was given; else the shell begins in an empty /workspace.
    """

    policy: str | Mapping[str, Any] = field(default_factory=lambda: DEFAULT_POLICY)

    def spawn(
        self, *, workspace: Path, env: Mapping[str, str], command: Sequence[str]
    ) -> "subprocess.Popen[str]":
        """Start the shell; its standard error comes on its standard output, in order."""
        shown = None if workspace.name.startswith(SHELL_TEMP_PREFIX) else str(workspace.resolve())
        given = ShellArguments(
            policy=self.policy, command=tuple(command), env=dict(env), shown=shown
        )  # fmt: skip
        with given.passed() as descriptor:
            return subprocess.Popen(
                [sys.executable, "-Im", SCRIPT, str(descriptor)], pass_fds=(descriptor,),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, encoding="utf-8", errors="replace", bufsize=1, start_new_session=True,
            )  # fmt: skip
