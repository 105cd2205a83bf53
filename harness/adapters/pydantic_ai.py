"""`CellWorkspace`: the workspace of a Pydantic AI agent, in one cell."""

import posixpath
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ...policies.errors import ClosedError, SessionLost
from ..sandbox.calls.background import in_thread
from ..sandbox.sandbox import Sandbox
from .common.cell_sandbox_session import AdapterSession, missing

try:
    from pydantic_ai.workspaces import (
        CommandResult,
        FileEntry,
        WorkspaceOutputLimitError,
        WorkspaceRef,
        WorkspaceTimeoutError,
        WorkspaceUnavailableError,
    )
except ImportError as error:
    raise missing("pydantic_ai.workspaces", "pydantic-ai", error) from error

if TYPE_CHECKING:
    from ..sandbox.sandbox_arguments import PolicyLike

_PROVIDER = "cellwright"
_WORKING_DIR = "/workspace"
_MAX_OUTPUT_BYTES = 10 * 1024 * 1024
_LOCK = threading.Lock()
_LIVING: dict[str, AdapterSession] = {}  # by the id of a ref; `destroy` removes them
_T = TypeVar("_T")


class CellWorkspace:
    """A backend with commands and files: `agent.run(..., workspace=CellWorkspace())`.

    The session is opened by the first operation, lives on when a run ends, and ends by `destroy`, or
    when its sandbox does.  `ref`: continue in a session that another object of this process opened.
    `sandbox`: one of yours, else one is made of `policy`, default the profile workshop, and `options`,
    arguments of `Sandbox`.  `max_output_bytes`: more output of a command is an error.
    """

    def __init__(
        self,
        sandbox: Sandbox | None = None,
        *,
        ref: WorkspaceRef | None = None,
        policy: "PolicyLike | None" = None,
        max_output_bytes: int = _MAX_OUTPUT_BYTES,
        **options: Any,
    ) -> None:
        self._ref = ref
        self._cell = AdapterSession(sandbox, policy=policy, **options)
        self._max_output_bytes = max_output_bytes
        self._lock = threading.Lock()

    @property
    def ref(self) -> WorkspaceRef | None:
        """The identity of the session; None before it was opened."""
        return self._ref

    async def working_dir(self) -> str:
        await self._do(lambda cell: cell.session)
        return _WORKING_DIR

    async def run(
        self,
        command: str | Sequence[str],
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> CommandResult:
        """Run a command to its end; without `timeout` it has `limits.wall_seconds` of the policy.

        Raises WorkspaceTimeoutError, WorkspaceOutputLimitError, and WorkspaceUnavailableError if the
        session is gone.
        """
        if isinstance(command, str) is not shell:
            raise TypeError("command: a string with shell=True, else a sequence of arguments")
        if timeout is not None and not 0 < timeout < float("inf"):
            raise ValueError(f"timeout: must be > 0 and finite, or None, got {timeout!r}")
        cell = await self._opened()
        done = await _available(
            cell.arun(
                command, shell=shell, env=env, timeout=timeout, cwd=_WORKING_DIR,
                max_output_bytes=self._max_output_bytes,
            )
        )  # fmt: skip
        stdout, stderr = done.text
        if done.timed_out:
            raise WorkspaceTimeoutError("the command took too long", stdout=stdout, stderr=stderr)
        if done.is_truncated:
            limit = self._max_output_bytes
            raise WorkspaceOutputLimitError(
                f"the command wrote more than {limit} bytes",
                limit=limit,
                stdout=stdout,
                stderr=stderr,
            )
        return CommandResult(exit_code=done.exit_code, stdout=stdout, stderr=stderr)

    async def read_bytes(self, path: str) -> bytes:
        return await self._do(lambda cell: cell.files.read(path))

    async def write_bytes(self, path: str, data: bytes) -> None:
        await self._do(lambda cell: cell.files.write(path, data))

    async def stat(self, path: str) -> FileEntry:
        found = await self._do(lambda cell: cell.files.status(path))
        return _entry(path, found)

    async def list_dir(self, path: str) -> Sequence[FileEntry]:
        found = await self._do(lambda cell: cell.files.listed(path))
        return [_entry(posixpath.join(path, each.path), each) for each in found]

    async def make_dir(self, path: str) -> None:
        await self._do(lambda cell: cell.files.make_directory(path))

    async def remove(self, path: str) -> None:
        """Remove a file or a directory; ValueError for the working directory and those above it."""
        if f"{_WORKING_DIR}/".startswith(f"{posixpath.normpath(path).rstrip('/')}/"):
            raise ValueError(f"the working directory cannot be removed: {path!r}")
        await self._do(lambda cell: cell.files.remove(path))

    async def exists(self, path: str) -> bool:
        return await self._do(lambda cell: cell.files.exists(path))

    async def realpath(self, path: str) -> str:
        return await self._do(lambda cell: cell.files.resolve(path))

    async def destroy(self) -> None:
        """End the session, also one that another object opened; running commands then raise
        WorkspaceUnavailableError."""
        with _LOCK:
            cell = _LIVING.pop(self._ref.id, None) if self._ref else self._cell
        if cell is not None:
            await cell.aclose()

    async def _do(self, work: Callable[[AdapterSession], _T]) -> _T:
        cell = await self._opened()
        return await _available(cell.in_thread(lambda: work(cell)))

    async def _opened(self) -> AdapterSession:
        return await _available(in_thread(self._open))

    def _open(self) -> AdapterSession:
        """Return the session, opened if this is the first operation; it is never opened again."""
        with self._lock:
            if self._ref is None:
                session = self._cell.session
                with _LOCK:
                    _LIVING[session.id] = self._cell
                self._ref = WorkspaceRef(provider=_PROVIDER, id=session.id)
        with _LOCK:
            cell = _LIVING.get(self._ref.id)
        if cell is None or not cell.is_open:
            raise SessionLost(f"workspace {self._ref.id}: not open in this process")
        return cell


async def _available(work: Awaitable[_T]) -> _T:
    try:
        return await work
    except (SessionLost, ClosedError) as error:
        raise WorkspaceUnavailableError(str(error)) from error


def _entry(path: str, found: Any) -> FileEntry:
    return FileEntry(
        name=posixpath.basename(path.rstrip("/")), path=path, is_dir=found.is_directory,
        size=None if found.size < 0 else found.size,
    )  # fmt: skip
