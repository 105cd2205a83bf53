"""`CellSandboxClient`: the sandboxes of the OpenAI Agents SDK, each of them one cell."""

import functools
import io
import secrets
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from uuid import UUID, uuid4

from ...policies.errors import CellwrightError
from ..sandbox.sandbox import Sandbox
from .common.cell_sandbox_session import AdapterSession, OpenProcesses, missing

try:
    from agents.sandbox import Manifest, User, resolve_snapshot
    from agents.sandbox.errors import (
        ConfigurationError,
        ErrorCode,
        ExecTimeoutError,
        ExecTransportError,
        ExposedPortUnavailableError,
        PtySessionNotFoundError,
        WorkspaceArchiveReadError,
        WorkspaceArchiveWriteError,
        WorkspaceReadNotFoundError,
        WorkspaceWriteTypeError,
    )
    from agents.sandbox.session import (
        BaseSandboxClient,
        BaseSandboxClientOptions,
        BaseSandboxSession,
        SandboxSession,
        SandboxSessionState,
    )
    from agents.sandbox.session.pty_types import (
        PtyExecUpdate,
        clamp_pty_yield_time_ms,
        resolve_pty_write_yield_time_ms,
        truncate_text_by_tokens,
    )
    from agents.sandbox.types import ExecResult, ExposedPortEndpoint
    from agents.sandbox.util.tar_utils import UnsafeTarMemberError, validate_tar_bytes
except ImportError as error:
    raise missing("agents.sandbox", "openai-agents", error) from error

if TYPE_CHECKING:
    from ..sandbox.sandbox_arguments import PolicyLike

_WORKING_DIR = "/workspace"
_TRUNCATED = "\n[cellwright: only the first {} bytes of a stream are here]"
_T = TypeVar("_T")


class CellSandboxClientOptions(BaseSandboxClientOptions):
    """Options of one sandbox.  `exposed_ports`: what `resolve_exposed_port` may name."""

    type: Literal["cellwright"] = "cellwright"
    exposed_ports: tuple[int, ...] = ()


class CellSandboxSessionState(SandboxSessionState):
    """The stored state of a sandbox: its manifest and its snapshot, without the cell."""

    type: Literal["cellwright"] = "cellwright"


class CellSandboxSession(BaseSandboxSession):
    """One cell as the workspace of an agent; made by `CellSandboxClient`."""

    def __init__(self, state: CellSandboxSessionState, cell: AdapterSession) -> None:
        self.state = state
        self.cell = cell
        self._endpoints: dict[int, ExposedPortEndpoint] = {}
        self._processes = OpenProcesses()

    async def _ensure_backend_started(self) -> None:
        await self.cell.in_thread(lambda: self.cell.session)

    async def _shutdown_backend(self) -> None:
        await self.cell.aclose()

    async def running(self) -> bool:
        return self.cell.is_open

    async def _validate_path_access(self, path: Path | str, *, for_write: bool = False) -> Path:
        """Check a path against the links in the cell, never against the host's files."""
        return Path(await self._validate_remote_path_access(path, for_write=for_write))

    def _prepare_exec_command(
        self, *command: str | Path, shell: bool | list[str], user: str | User | None
    ) -> list[str]:
        _refuse_user(user)
        return super()._prepare_exec_command(*command, shell=shell, user=None)  # type: ignore[no-any-return]

    async def _exec_internal(self, *command: str | Path, timeout: float | None = None) -> Any:
        argv = [str(each) for each in command]
        cwd, environment = await self._place()
        try:
            done = await self.cell.arun(argv, cwd=cwd, env=environment, timeout=timeout)
        except CellwrightError as error:
            raise ExecTransportError(command=argv, cause=error, retryable=False) from error
        if done.timed_out:
            raise ExecTimeoutError(command=argv, timeout_s=timeout)
        stderr = done.stderr
        if done.is_truncated:
            stderr += _TRUNCATED.format(max(len(done.stdout), len(done.stderr))).encode()
        return ExecResult(stdout=done.stdout, stderr=stderr, exit_code=done.exit_code)

    async def _place(self) -> tuple[str, dict[str, str]]:
        manifest = self.state.manifest
        root = manifest.root if self.state.workspace_root_ready else _WORKING_DIR
        return root, await manifest.environment.resolve()

    def supports_pty(self) -> bool:
        return True

    async def pty_exec_start(
        self,
        *command: str | Path,
        timeout: float | None = None,
        shell: bool | list[str] = True,
        user: str | User | None = None,
        tty: bool = False,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> Any:
        """Start a command, and return its output of `yield_time_s`; it goes on until it ends, or the
        sandbox does, whatever `timeout` says."""
        argv = self._prepare_exec_command(*command, shell=shell, user=user)
        cwd, environment = await self._place()
        try:
            session = await self.cell.in_thread(lambda: self.cell.session)
            number = await self._processes.start(session, argv, cwd, environment, is_terminal=tty)
            wanted = 10_000 if yield_time_s is None else int(yield_time_s * 1000)
            return await self._update(number, clamp_pty_yield_time_ms(wanted), max_output_tokens)
        except CellwrightError as error:
            raise ExecTransportError(command=argv, cause=error, retryable=False) from error

    async def pty_write_stdin(
        self,
        *,
        session_id: int,
        chars: str,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> Any:
        """Type at a terminal, or nothing, and return the output since then."""
        wanted = 250 if yield_time_s is None else int(yield_time_s * 1000)
        wanted = resolve_pty_write_yield_time_ms(yield_time_ms=wanted, input_empty=not chars)
        try:
            if chars:
                await self._processes.write(session_id, chars)
            return await self._update(session_id, wanted, max_output_tokens)
        except KeyError:
            raise PtySessionNotFoundError(session_id=session_id) from None
        except CellwrightError as error:
            raise ExecTransportError(command=("write_stdin",), cause=error) from error

    async def _update(self, number: int, milliseconds: int, max_tokens: int | None) -> Any:
        output, code = await self._processes.update(number, milliseconds / 1000)
        text, tokens = truncate_text_by_tokens(output.decode(errors="replace"), max_tokens)
        return PtyExecUpdate(
            process_id=number if code is None else None,
            output=text.encode(errors="replace"), exit_code=code, original_token_count=tokens,
        )  # fmt: skip

    async def pty_terminate_all(self) -> None:
        await self._processes.end_all()

    async def read(self, path: Path, *, user: str | User | None = None) -> io.IOBase:
        _refuse_user(user)
        inside = await self._validate_path_access(path)
        return io.BytesIO(await self._read(path, lambda: self.cell.files.read(str(inside))))

    async def _read_bounded(self, path: Path, *, max_bytes: int) -> bytes:
        inside = str(await self._validate_path_access(path))
        data, _ = await self._read(path, lambda: self.cell.files.read_start(inside, max_bytes))
        return data

    async def _read(self, path: Path, work: Callable[[], _T]) -> _T:
        try:
            return await self.cell.in_thread(work)
        except FileNotFoundError as error:
            raise WorkspaceReadNotFoundError(path=path, cause=error) from error
        except (OSError, CellwrightError) as error:
            raise WorkspaceArchiveReadError(path=path, cause=error, retryable=False) from error

    async def write(self, path: Path, data: io.IOBase, *, user: str | User | None = None) -> None:
        _refuse_user(user)
        content = _content(path, data)
        inside = await self._validate_path_access(path, for_write=True)
        await self._write(path, str(inside), content)

    async def _write(self, path: Path, inside: str, content: bytes) -> None:
        try:
            await self.cell.in_thread(lambda: self.cell.files.write(inside, content))
        except (OSError, CellwrightError) as error:
            raise WorkspaceArchiveWriteError(path=path, cause=error, retryable=False) from error

    async def persist_workspace(self) -> io.IOBase:
        """Return a tar of the workspace without the entries that the manifest calls ephemeral."""
        root = self._workspace_root_path()
        skipped = sorted(each.as_posix() for each in self._persist_workspace_skip_relpaths())
        excluded = [f"--exclude=./{each}" for each in skipped]
        archive = _archive()
        try:
            await self._tar(
                WorkspaceArchiveReadError, "-cf", archive, "--anchored", "--no-wildcards",
                *excluded, "-C", str(root), ".",
            )  # fmt: skip
            return io.BytesIO(await self._read(root, lambda: self.cell.files.read(archive)))
        finally:
            await self._forget(archive)

    async def hydrate_workspace(self, data: io.IOBase) -> None:
        """Unpack a tar of `persist_workspace`; one with members outside the workspace is refused."""
        root = self._workspace_root_path()
        content = _content(root, data)
        try:
            validate_tar_bytes(content, allow_external_symlink_targets=False)
        except UnsafeTarMemberError as error:
            raise WorkspaceArchiveWriteError(path=root, cause=error, retryable=False) from error
        archive = _archive()
        try:
            await self._write(root, archive, content)
            await self._tar(
                WorkspaceArchiveWriteError, "-xf", archive, "--no-same-owner", "-C", str(root)
            )
        finally:
            await self._forget(archive)

    async def _tar(self, failure: Any, *arguments: str) -> None:
        done = await self._exec_internal("tar", *arguments)
        if not done.ok():
            text = done.stderr[:4096].decode(errors="replace")
            raise failure(path=self._workspace_root_path(), context={"stderr": text})

    async def _forget(self, archive: str) -> None:
        """Remove a file; the cell may be gone, or a program may have removed it."""
        try:
            await self.cell.in_thread(lambda: self.cell.files.remove(archive))
        except (OSError, CellwrightError):
            return

    async def _resolve_exposed_port(self, port: int) -> Any:
        if port not in self._endpoints:
            try:
                exposed = await self.cell.in_thread(
                    lambda: self.cell.session.expose(port, host_port=0)
                )
            except CellwrightError as error:
                raise ExposedPortUnavailableError(
                    port=port, exposed_ports=self.state.exposed_ports,
                    reason="backend_unavailable", cause=error,
                ) from error  # fmt: skip
            self._endpoints[port] = ExposedPortEndpoint(host="127.0.0.1", port=exposed.address[1])
        return self._endpoints[port]


class CellSandboxClient(BaseSandboxClient[CellSandboxClientOptions]):
    """Makes a cell for each sandbox: `SandboxRunConfig(client=CellSandboxClient())`.

    `sandbox`: one of yours for all of them, else each has one of its own, which ends with it; it is
    made of `policy`, default the profile workshop, and `options`, arguments of `Sandbox`.
    """

    backend_id = "cellwright"
    supports_default_options = True

    def __init__(
        self,
        sandbox: Sandbox | None = None,
        *,
        policy: "PolicyLike | None" = None,
        **options: Any,
    ) -> None:
        self._new_cell = functools.partial(AdapterSession, sandbox, policy=policy, **options)
        self._new_cell()  # refuses arguments that contradict each other; makes nothing yet
        self._living: weakref.WeakValueDictionary[UUID, AdapterSession] = (
            weakref.WeakValueDictionary()
        )

    async def create(
        self,
        *,
        snapshot: Any = None,
        manifest: Manifest | None = None,
        options: CellSandboxClientOptions | None = None,
    ) -> SandboxSession:
        """Return a sandbox, whose cell begins when it is started.

        Raises ConfigurationError for users, groups, mounts and files of the host in the manifest.
        """
        manifest = self._validate_manifest_for_create(Manifest() if manifest is None else manifest)
        _refuse_what_no_cell_has(manifest)
        identity = uuid4()
        state = CellSandboxSessionState(
            session_id=identity, manifest=manifest,
            snapshot=resolve_snapshot(snapshot, str(identity)),
            exposed_ports=() if options is None else options.exposed_ports,
        )  # fmt: skip
        return self._session(state, self._new_cell())

    async def delete(self, session: SandboxSession) -> SandboxSession:
        """End the cell of a sandbox of this client, if it has not ended."""
        await _inner(session).cell.aclose()
        return session

    async def resume(self, state: SandboxSessionState) -> SandboxSession:
        """Return the sandbox of a state: in its cell if that lives, else in a new one, into which its
        snapshot is unpacked when it is started."""
        if not isinstance(state, CellSandboxSessionState):
            raise TypeError(f"state: must be a CellSandboxSessionState, got {type(state).__name__}")
        state.assert_path_grants_rebound()
        _refuse_what_no_cell_has(state.manifest)
        cell = self._living.get(state.session_id)
        is_living = cell is not None and cell.is_open
        if cell is None or not is_living:
            cell = self._new_cell()
            state.workspace_root_ready = False
        session = self._session(state, cell)
        _inner(session)._set_start_state_preserved(is_living)
        return session

    def deserialize_session_state(self, payload: dict[str, object]) -> SandboxSessionState:
        return self._deserialize_session_state_payload(payload, CellSandboxSessionState)

    def _session(self, state: CellSandboxSessionState, cell: AdapterSession) -> SandboxSession:
        self._living[state.session_id] = cell
        return self._wrap_session(CellSandboxSession(state, cell))


def _inner(session: SandboxSession) -> CellSandboxSession:
    inner = session._inner
    if not isinstance(inner, CellSandboxSession):
        raise TypeError("session: must be one of CellSandboxClient")
    return inner


def _refuse_what_no_cell_has(manifest: Manifest) -> None:
    found = {
        "users and groups": bool(manifest.users or manifest.groups),
        "mounts": bool(manifest.mount_targets()),
        "files of the host": any(each.host_path for each in manifest.extra_path_grants),
    }
    for name, is_there in found.items():
        if is_there:
            raise _configuration(f"{name} in the manifest: a cell has none")


def _refuse_user(user: str | User | None) -> None:
    if user is not None:
        raise _configuration(f"user {user!r}: a cell has one user; leave it out")


def _configuration(message: str) -> ConfigurationError:
    return ConfigurationError(
        message=message, error_code=ErrorCode.SANDBOX_CONFIG_INVALID, op="start", context={},
        retryable=False,
    )  # fmt: skip


def _content(path: Path, data: io.IOBase) -> bytes:
    content: Any = data.read()
    if isinstance(content, str):
        content = content.encode()
    if not isinstance(content, bytes | bytearray):
        raise WorkspaceWriteTypeError(path=path, actual_type=type(content).__name__)
    return bytes(content)


def _archive() -> str:
    return f"/tmp/.cellwright-{secrets.token_hex(8)}.tar"  # noqa: S108 - of the cell
