"""`CellSandboxEnvironment`: the sandbox "cellwright" of Inspect, a session for each sample.

Inspect finds it by the entry point of cellwright in the group `inspect_ai`.
"""

import errno
import posixpath
import threading
from typing import Any

from ...policies.errors import ClosedError, LaunchError, SessionLost
from ...runner.settings import SessionSettings
from ..sandbox.calls.background import in_thread
from ..sandbox.sandbox import Sandbox
from .common.cell_sandbox_session import AdapterSession, missing

try:
    from inspect_ai.util import (
        ExecResult,
        OutputLimitExceededError,
        SandboxEnvironment,
        SandboxEnvironmentLimits,
        SandboxUnavailableError,
        SandboxUserUnsupportedError,
        sandboxenv,
    )
except ImportError as error:
    raise missing("inspect_ai", "inspect", error) from error

_POLICY = "workshop"
_WORKING_DIR = "/workspace"
_USER = "cell"  # the only user in a cell
_NOT_EXECUTABLE = 126
_AT_ONCE = 64  # samples by default; Inspect's --max-sandboxes changes it
# A session is not evicted while its sample waits for a model.
_SESSIONS = SessionSettings(alive=4096, idle_seconds=86_400.0, lifetime_seconds=7 * 86_400.0)
_LOCK = threading.Lock()
_SANDBOXES: dict[str, tuple[Sandbox, int]] = {}  # policy -> its sandbox, and how many tasks use it


@sandboxenv(name="cellwright")
class CellSandboxEnvironment(SandboxEnvironment):
    """A session of the sandbox that all samples with one policy share.

    The configuration is the policy: `sandbox=("cellwright", "policy.toml")`, or the name of a profile;
    default workshop.
    """

    def __init__(self, cell: AdapterSession) -> None:
        super().__init__()
        self.cell = cell

    @classmethod
    def default_concurrency(cls) -> int | None:
        return _AT_ONCE

    @classmethod
    async def task_init(cls, task_name: str, config: Any) -> None:
        await in_thread(lambda: _take(_policy(config)))

    @classmethod
    async def task_cleanup(cls, task_name: str, config: Any, cleanup: bool) -> None:
        await in_thread(lambda: _give_back(_policy(config)))

    @classmethod
    async def sample_init(
        cls, task_name: str, config: Any, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        with _LOCK:
            sandbox, _ = _SANDBOXES[_policy(config)]
        cell = AdapterSession(sandbox)
        await cell.in_thread(lambda: cell.session)
        return {"default": cls(cell)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: Any,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        for each in environments.values():
            await each.as_type(CellSandboxEnvironment).cell.aclose()

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> Any:
        """Run a command; it is never retried, whatever `timeout_retry` says."""
        if user not in (None, _USER):
            raise SandboxUserUnsupportedError(f"user {user!r}: a cell has one user, {_USER!r}")
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        try:
            done = await self.cell.arun(
                cmd, cwd=_path(cwd or "."), env=env, stdin=input, timeout=timeout,
                max_output_bytes=limit,
            )  # fmt: skip
        except (SessionLost, ClosedError, LaunchError) as error:
            raise SandboxUnavailableError(str(error)) from error
        stdout, stderr = done.text
        if done.timed_out:
            raise TimeoutError(f"{cmd[0]}: took too long")
        if done.is_truncated:
            told = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR
            raise OutputLimitExceededError(limit_str=told, truncated_output=stdout or stderr)
        if done.exit_code == _NOT_EXECUTABLE and "Permission denied" in stderr:
            raise PermissionError(errno.EACCES, stderr.strip())
        return ExecResult(
            success=done.exit_code == 0, returncode=done.exit_code, stdout=stdout, stderr=stderr
        )

    async def write_file(self, file: str, contents: str | bytes) -> None:
        data = contents.encode() if isinstance(contents, str) else contents
        await self._do(lambda: self.cell.files.write(_path(file), data))

    async def read_file(self, file: str, text: bool = True) -> Any:
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        try:
            data = await self._do(lambda: self.cell.files.read(_path(file), limit))
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            told = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR
            raise OutputLimitExceededError(limit_str=told, truncated_output=None) from None
        return data.decode() if text else data

    async def _do(self, work: Any) -> Any:
        try:
            return await self.cell.in_thread(work)
        except (SessionLost, ClosedError) as error:
            raise SandboxUnavailableError(str(error)) from error


def _path(path: str) -> str:
    return posixpath.join(_WORKING_DIR, path)


def _policy(config: Any) -> str:
    if config is None:
        return _POLICY
    if not isinstance(config, str):
        raise TypeError(f"sandbox: the configuration is a policy's name or path, got {config!r}")
    return config


def _take(policy: str) -> None:
    with _LOCK:
        sandbox, users = _SANDBOXES.get(policy, (None, 0))
        _SANDBOXES[policy] = sandbox or Sandbox(policy=policy, sessions=_SESSIONS), users + 1


def _give_back(policy: str) -> None:
    with _LOCK:
        sandbox, users = _SANDBOXES.pop(policy)
        if users > 1:
            _SANDBOXES[policy] = sandbox, users - 1
            return
    sandbox.close()
