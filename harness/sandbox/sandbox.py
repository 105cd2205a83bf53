"""`Sandbox`: runs untrusted code in cells, which this process or a daemon makes."""

import os
import warnings
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, Self

from msgspec.structs import asdict

from ...policies.errors import PolicyError
from ...policies.languages import PYTHON
from ...policies.plan import Plan
from ...policies.policy import Policy, check_limit
from ...runner.audit.level import AuditLevel
from ...runner.capture import OnOutput
from ...runner.result import SandboxResult
from ...runner.settings import PauseSettings, PoolSettings, SessionSettings
from ...runner.spawn import Spawned
from .checks import check_host_path, suggests_parameters
from .executing import Executing
from .parameters import (
    CallArguments,
    CommandArguments,
    FileContent,
    ProgramArguments,
    SessionArguments,
    TerminalArguments,
)
from .sandbox_arguments import Backend, SandboxArguments

if TYPE_CHECKING:
    from ...policies.source.findings import Rules
    from ...runner.audit.log import AuditLog
    from ...runner.supervisors import SupervisorsState
    from ..privacy.privacy import Privacy
    from ..skills.skills import Skills
    from .config import SandboxConfig
    from .network import SandboxNetwork
    from .packages.store import PackageStore, Requirements
    from .program import Program
    from .sandbox_arguments import PolicyLike
    from .sandbox_skills import SandboxSkills
    from .sandbox_tools import Offered
    from .session import Session
    from .terminal import Terminal
    from .workspaces.store import Workspaces

__all__ = ["Sandbox", "create_sandbox"]


class _Cells(Protocol):
    """The implementation of a sandbox: `LocalCells`, or the cells of a daemon."""

    policy: Policy
    audit: "AuditLog | None"

    @property
    def plan(self) -> Plan: ...

    @property
    def privacy(self) -> "Privacy | None": ...

    def private_to(self, client: str, /) -> None: ...

    @property
    def workspaces(self) -> "Workspaces": ...

    @property
    def network(self) -> "SandboxNetwork": ...

    @property
    def skills(self) -> "SandboxSkills": ...

    def execute(
        self, given: CallArguments, on_output: OnOutput | None, cancel: int, /
    ) -> SandboxResult: ...

    def program(self, given: ProgramArguments, /) -> "Program": ...

    def session(self, given: SessionArguments, /) -> "Session": ...

    def resume(self, token: str, /) -> "Session": ...

    def discard(self, token: str, /) -> None: ...

    def with_tokens(self, given: CommandArguments, /) -> CommandArguments: ...

    def has_tool(self, name: str, /) -> bool: ...

    def validate_source(self, code: str, /) -> tuple[bool, str | None]: ...

    def state(self) -> "SupervisorsState": ...

    def settle(self) -> None: ...

    def close(self) -> None: ...


class Sandbox(Executing):
    """Runs untrusted code, each call in a cell of its own.  Safe from many threads.

    `Sandbox()` denies everything and requires every layer.  Use it as a context manager, or call
    `close`.

    `config`: named permissions and limits; or anything that `policy` takes.
    `policy`: the name of a shipped profile, the path of a TOML file, a mapping as TOML has it, a
    Policy or a PermissionSet; instead of `config`.
    `python`: another interpreter of the host: a version, such as "3.12", or a path.
    `runtime`: the same as "python:3.12"; with `backend="oci"` an OCI runtime or its path; default
    the first of crun, runc and youki that this host's cgroups permit.
    `backend`: "cells", or "oci": the launcher runs in a container of that runtime, and cells in there.
    With `fresh_exec` each cell has a container of its own.
    `rootfs`: with `backend="oci"`, the root of a file system whose files programs see in place of the
    host's.
    `cgroup_root`: a directory in which to make cgroups; by default $CELLWRIGHT_CGROUP_ROOT, else one
    that is found.
    `spawned`: a launcher process that was started ahead.
    `pool`: how many cells wait ready, default 8 (0: a call makes its own and takes it down before it
    returns), or all settings of the pool.
    `fresh_exec`: start a launcher for every cell, which then has an address layout and a hash seed of
    its own.
    `language`: start the launcher of this language now; others are started when first needed.
    `sessions`: how many sessions live at once, and for how long.
    `interpreters`: paths of interpreters that are not in the usual places, such as
    {"javascript": "/opt/node/bin/node"}.
    `workspaces`: the workspaces that calls may name, or their directory.
    `audit`: the trail to write to, which the caller closes; by default one in memory, False for none.
    `tools`: tools of the host that programs may call, as far as the policy allows: a list of functions
    or Tools, a Broker, a ToolFactory or McpServers.
    `skills`: skills whose files programs see below /skills, as they were when the sandbox was made; the
    policy must have no network rules.
    `blocked_imports`, `blocked_builtins`: lists for source checks, instead of the policy's.
    `user`: the uid of cells on the host if root starts them: a number, or a name that stands for the
    same uid in every process; by default each process has another uid.
    `privacy`: programs and models see tokens in place of personal data, and tools that it names get the
    values (harness/privacy/README.md); by default what the policy says.
    `packages`: what Python programs can import besides the standard library: requirements such as
    "pandas==2.3.*", or the path of a pylock.toml or requirements file (extra `packages`); calls can
    name more.  `requirements` is another name for it.
    `package_store`: where sets of packages are kept, and where wheels come from.
    `pausable`: paused sessions can be resumed after a restart; cells have no random addresses then.
    `pauses`: where paused sessions are kept, how long and how many, and whether they are encrypted.
    `connect`: the socket of a daemon (`cellwright serve`) whose cells are used; `policy` is then one
    of the daemon's policy names, and no other argument can be given.

    Raises PolicyError for invalid arguments, Unenforceable if this host lacks a required layer,
    LaunchError if cells cannot be built or no daemon answers, PackageError if packages cannot be had.
    """

    @suggests_parameters
    def __init__(
        self,
        config: "SandboxConfig | PolicyLike | None" = None,
        *,
        policy: "PolicyLike | None" = None,
        python: str | os.PathLike[str] | None = None,
        runtime: str | os.PathLike[str] | None = None,
        backend: Backend = "cells",
        rootfs: str | os.PathLike[str] | None = None,
        cgroup_root: str | os.PathLike[str] | None = None,
        spawned: Spawned | None = None,
        pool: int | PoolSettings = PoolSettings(),  # noqa: B008 - a constant
        fresh_exec: bool = False,
        language: str = PYTHON,
        sessions: SessionSettings = SessionSettings(),  # noqa: B008 - a constant
        interpreters: Mapping[str, str | os.PathLike[str]] = MappingProxyType({}),
        workspaces: "Workspaces | str | os.PathLike[str] | None" = None,
        audit: "AuditLog | bool | None" = None,
        tools: "Offered | None" = None,
        skills: "Skills | None" = None,
        blocked_imports: Sequence[str] | None = None,
        blocked_builtins: Sequence[str] | None = None,
        user: int | str | None = None,
        privacy: "Privacy | None" = None,
        packages: "Requirements | None" = None,
        requirements: "Requirements | None" = None,
        package_store: "PackageStore | None" = None,
        pausable: bool = False,
        pauses: PauseSettings = PauseSettings(),  # noqa: B008 - a constant
        connect: str | os.PathLike[str] | None = None,
    ) -> None:
        self._given = SandboxArguments.of(locals())
        self._cells = _cells_of(self._given)
        self._finalizer = weakref.finalize(self, _close_forgotten, self._cells, os.getpid())

    @classmethod
    async def create(
        cls,
        config: "SandboxConfig | PolicyLike | None" = None,
        *,
        policy: "PolicyLike | None" = None,
        python: str | os.PathLike[str] | None = None,
        runtime: str | os.PathLike[str] | None = None,
        backend: Backend = "cells",
        rootfs: str | os.PathLike[str] | None = None,
        cgroup_root: str | os.PathLike[str] | None = None,
        spawned: Spawned | None = None,
        pool: int | PoolSettings = PoolSettings(),  # noqa: B008 - a constant
        fresh_exec: bool = False,
        language: str = PYTHON,
        sessions: SessionSettings = SessionSettings(),  # noqa: B008 - a constant
        interpreters: Mapping[str, str | os.PathLike[str]] = MappingProxyType({}),
        workspaces: "Workspaces | str | os.PathLike[str] | None" = None,
        audit: "AuditLog | bool | None" = None,
        tools: "Offered | None" = None,
        skills: "Skills | None" = None,
        blocked_imports: Sequence[str] | None = None,
        blocked_builtins: Sequence[str] | None = None,
        user: int | str | None = None,
        privacy: "Privacy | None" = None,
        packages: "Requirements | None" = None,
        requirements: "Requirements | None" = None,
        package_store: "PackageStore | None" = None,
        pausable: bool = False,
        pauses: PauseSettings = PauseSettings(),  # noqa: B008 - a constant
        connect: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Return a sandbox, made in a thread, so that the event loop goes on meanwhile.

        The arguments and exceptions are those of `Sandbox`.  A sandbox that is made after its task was
        cancelled is closed.
        """
        given = asdict(SandboxArguments.of(locals()))
        from .run import in_thread  # asyncio takes 40 ms to import

        return await in_thread(lambda: cls(**given), discard=cls.close)

    @property
    def _at_once(self) -> int:
        pool = self._given.pool
        return (pool if isinstance(pool, PoolSettings) else PoolSettings()).running

    @property
    def policy(self) -> Policy:
        """What every cell of this sandbox may do."""
        return self._cells.policy

    @property
    def audit(self) -> "AuditLog | None":
        """The trail that is written to; None if there is none, or a daemon keeps it."""
        return self._cells.audit

    @property
    def plan(self) -> Plan:
        """The policy, compiled for this host."""
        return self._cells.plan

    @property
    def privacy(self) -> "Privacy | None":
        """Its personal data; None if programs and models see everything."""
        return self._cells.privacy

    @property
    def package_store(self) -> "PackageStore | None":
        """Where its sets of packages are kept; None is the user's store."""
        return self._given.package_store

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers in force around every cell of this sandbox."""
        return self.plan.layers

    def has_tool(self, name: str) -> bool:
        return self._cells.has_tool(name)

    def _with_tokens(self, given: CommandArguments) -> CommandArguments:
        return self._cells.with_tokens(given)

    def _execute(
        self, given: CallArguments, on_output: OnOutput | None, cancel: int
    ) -> SandboxResult:
        return self._cells.execute(given, on_output, cancel)

    def session(
        self, id: str | None = None, language: str = PYTHON, *, workspace: str | None = None,
        clean: bool = False, packages: Sequence[str] = (), requirements: Sequence[str] = (),
    ) -> "Session":  # fmt: skip
        """Return a session: a cell that keeps variables and files from one call to the next.

        `id`: return the session of that name if it lives, else open one of that name.
        `workspace`: start with the files of that workspace, and save them when the session ends.
        `clean`: remove that workspace when the session is closed.
        `packages`, or `requirements`: what its programs can import beside the packages of the sandbox.
        Raises PolicyError for an unknown language, or another one than that of the session that lives;
        BusyError if too many sessions live and all are busy, or if the workspace is in use;
        LaunchError if no cell could be built or the language is not installed; WorkspaceError,
        PackageError.
        """
        given = SessionArguments.of(locals())
        if id is not None and not (isinstance(id, str) and id):
            raise PolicyError(f"id: must be a text that is not empty, got {id!r}")
        return self._cells.session(given)

    def resume(self, token: str) -> "Session":
        """Return the session that `pause` of a session returned `token` for, in a fresh cell.

        It goes on from the state that it had, and has the id that it had.  The token cannot be used
        again; if this raises it can.  Raises PauseDiffers if what the session needs is different by
        now, PauseError if the token or its state is invalid, expired, or in use, or if a session of
        that id lives; and what `session` raises.
        """
        return self._cells.resume(token)

    async def aresume(self, token: str) -> "Session":
        """`resume` for asyncio; a session that is resumed after its task was cancelled is closed."""
        from .run import in_thread  # asyncio takes 40 ms to import

        return await in_thread(lambda: self.resume(token), discard=lambda session: session.close())

    def discard(self, token: str) -> None:
        """Remove the state of a paused session, which cannot be resumed then.

        Raises PauseError if the token or the beginning of its state is invalid, expired, or in use.
        """
        self._cells.discard(token)

    def program(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None,
        files: Mapping[str, FileContent] | None = None, trace_id: str | None = None,
    ) -> "Program":  # fmt: skip
        """Start a program in a cell of its own and return it; its streams are pipes to this process.

        `argv[0]`: its path as the cell sees it; the policy must let it be executed.  `env`: variables
        beside the policy's.  `cwd`: its directory, default /workspace.  `files`: path below /workspace
        -> content, put there before it starts.  The policy's limits are those of its whole life.

        Raises PolicyError for invalid arguments or a policy without subprocesses, BusyError if too many
        programs live, ClosedError after `close`, LaunchError if no cell could be built.
        """
        return self._cells.program(ProgramArguments.of(locals()))

    def terminal(
        self,
        command: Sequence[str] | None = None,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        rows: int = 24,
        columns: int = 80,
        trace_id: str | None = None,
        workspace: str | None = None,
        packages: Sequence[str] = (),
        requirements: Sequence[str] = (),
    ) -> "Terminal":
        """Start a command, by default a shell, at a terminal in a cell of its own.

        As `Session.terminal` of a new session, which is closed with the terminal; `workspace`,
        `packages` and `requirements` are those of `session`.
        """
        given = TerminalArguments.of(locals())
        session = self.session(workspace=workspace, packages=packages, requirements=requirements)
        try:
            terminal = session._terminal(given)
        except BaseException:
            session.close()
            raise
        terminal.ends_with(session)
        return terminal

    async def aterminal(
        self,
        command: Sequence[str] | None = None,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        rows: int = 24,
        columns: int = 80,
        trace_id: str | None = None,
        workspace: str | None = None,
        packages: Sequence[str] = (),
        requirements: Sequence[str] = (),
    ) -> "Terminal":
        """`terminal` for asyncio."""
        given = {name: value for name, value in locals().items() if name != "self"}
        from .run import in_thread  # asyncio takes 40 ms to import

        return await in_thread(
            lambda: self.terminal(**given), discard=lambda terminal: terminal.close()
        )

    @property
    def workspaces(self) -> "Workspaces":
        """The workspaces that calls and sessions may name."""
        return self._cells.workspaces

    @property
    def network(self) -> "SandboxNetwork":
        """The network rules, which can be changed while cells live.

        Raises PolicyError if the policy has no network rules, and for the cells of a daemon.
        """
        return self._cells.network

    @property
    def skills(self) -> "SandboxSkills":
        """The skills that programs see below /skills; also their texts, for a model.

        Raises PolicyError if the sandbox was made without `skills`.
        """
        return self._cells.skills

    def sibling(
        self, policy: Policy, pool: PoolSettings, tools: "Offered | None" = None,
        sessions: SessionSettings = SessionSettings(),  # noqa: B008 - a constant
        rules: "Rules | None" = None, skills: "Skills | None" = None, private_to: str = "",
        python: str | None = None,
    ) -> "Sandbox":  # fmt: skip
        """Return a sandbox of another policy with the same interpreter, unless `python` names another,
        and the same cgroups, uid, source checks and trail.

        `rules` are for source checks, where this sandbox has no `blocked_imports` or
        `blocked_builtins` of its own.  Personal data is that of this sandbox, or only of the client
        that `private_to` names.
        """
        given = self._given
        if given.connect is not None:
            raise PolicyError("connect: a daemon makes cells for its own policies only")
        imports, builtins = given.blocked_imports, given.blocked_builtins
        if rules:
            imports = rules.blocked_imports if imports is None else imports
            builtins = rules.blocked_builtins if builtins is None else builtins
        other = Sandbox(
            policy=policy, pool=pool, audit=self.audit or False, tools=tools, skills=skills,
            sessions=sessions, privacy=self.privacy,
            python=given.python if python is None else python,
            runtime=given.runtime if python is None else None,
            backend=given.backend, rootfs=given.rootfs,
            cgroup_root=given.cgroup_root, user=given.user,
            blocked_imports=imports, blocked_builtins=builtins, package_store=given.package_store,
            pauses=given.pauses,
        )  # fmt: skip
        other._cells.private_to(private_to)
        return other

    def validate_source(self, code: str) -> tuple[bool, str | None]:
        """Check Python source against the names that this sandbox blocks, whatever its validation mode.

        Returns (True, None), or False and the first finding, such as "Blocked import: os".  This is
        advice: the kernel is the boundary.
        """
        return self._cells.validate_source(code)

    def leave_open_at_exit(self) -> None:
        """Do not close this sandbox, or warn about it, when the process ends: its owner closes it."""
        self._finalizer.atexit = False

    def _state(self) -> "SupervisorsState":
        """Return what its cells do and use now; raises PolicyError for those of a daemon."""
        return self._cells.state()

    def settle(self) -> None:
        """Wait until the pool is full and nothing of any earlier call is left."""
        self._cells.settle()

    def close(self) -> None:
        """End every execution and leave nothing behind; closing twice is fine.

        A daemon keeps its pool, its sessions and the calls of other clients.
        """
        if self._finalizer.detach():
            self._cells.close()
        self._close_aexecutor()


def _close_forgotten(cells: _Cells, owner: int) -> None:
    """Close the cells of a sandbox that was garbage-collected, or that is open when the process ends,
    with a ResourceWarning."""
    try:
        if os.getpid() == owner:
            what = f"a sandbox under the policy {cells.policy.name!r} was never closed"
            warnings.warn(f"{what}: call close(), or use with", ResourceWarning, stacklevel=2)
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            cells.close()


def _cells_of(given: SandboxArguments) -> _Cells:
    """Return cells of this process, or of the daemon that `connect` names."""
    if given.connect is None and given.backend == "oci":
        from .containers.own_kernel import own_kernel_calls  # seldom needed

        if calls := own_kernel_calls(given):
            return calls
    if given.connect is None:
        from .local import LocalCells  # a client of a daemon makes no cells

        return LocalCells(given)
    local = [name for name in given.changed() if name not in ("connect", "policy")]
    if local:
        raise PolicyError(
            f"connect: cannot be combined with {', '.join(local)}",
            'the daemon decides them: by its policies, and by options of "cellwright serve"',
        )
    from .remote.client import DaemonsCells

    return DaemonsCells(check_host_path("connect", given.connect), given.policy)


@suggests_parameters
def create_sandbox(
    timeout: float = 30.0,
    *,
    max_memory_mb: float = 256,
    max_output_bytes: int = 100_000,
    max_processes: int = 64,
    max_cpus: float = 1.0,
    workspace_mb: float = 64,
    allow_file_read: bool = False,
    allow_file_write: bool = False,
    allow_network: bool = False,
    allow_subprocess: bool = False,
    allowed_paths: Sequence[str] = (),
    denied_paths: Sequence[str] = (),
    optional_layers: Sequence[str] = (),
    enable_audit: bool = True,
    audit_level: AuditLevel = AuditLevel.INFO,
    environment: Mapping[str, str] = MappingProxyType({}),
    packages: Sequence[str] = (),
) -> Sandbox:
    """Return a sandbox with these fields of SandboxConfig; `timeout` is its `timeout_seconds`."""
    given = locals()
    check_limit("timeout", timeout)
    from .config import SandboxConfig

    return Sandbox(SandboxConfig(timeout_seconds=given.pop("timeout"), **given))
