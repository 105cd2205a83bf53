"""`Sandbox`: runs untrusted code in cells, which this process or a daemon makes."""

import os
import warnings
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, Self

from ...policies.errors import PolicyError
from ...policies.languages import PYTHON
from ...policies.plan import Plan
from ...policies.policy import Policy
from ...runner.audit.level import AuditLevel
from ...runner.capture import OnOutput
from ...runner.pool import PoolSettings
from ...runner.result import SandboxResult
from ...runner.session import SessionSettings
from ...runner.spawn import Spawned
from .config import SandboxConfig
from .executing import Executing
from .local import LocalCells, PolicyLike
from .program import Program
from .request import CallArguments
from .session import Session

if TYPE_CHECKING:
    from ...policies.source.findings import Rules
    from ...runner.audit.log import AuditLog
    from .offering import Offered
    from .workspaces.store import Workspaces

__all__ = ["Sandbox", "create_sandbox"]


# Settings that a sibling shares.
_ALIKE = ("python", "cgroup_root", "blocked_imports", "blocked_builtins", "user")


class _Cells(Protocol):
    """The implementation of a sandbox: `LocalCells`, or the cells of a daemon."""

    policy: Policy
    audit: "AuditLog | None"

    @property
    def plan(self) -> Plan: ...

    @property
    def workspaces(self) -> "Workspaces": ...

    def execute(
        self, code: str | bytes, language: str, on_output: OnOutput | None, cancel: int,
        given: CallArguments, /,
    ) -> SandboxResult: ...  # fmt: skip

    def program(self, argv: Sequence[str], given: dict[str, Any], /) -> Program: ...

    def session(
        self, id: str | None, language: str, workspace: str | None, clean: bool, /
    ) -> Session: ...

    def has_tool(self, name: str, /) -> bool: ...

    def validate_source(self, code: str, /) -> tuple[bool, str | None]: ...

    def settle(self) -> None: ...

    def close(self) -> None: ...


class Sandbox(Executing):
    """Runs untrusted code, each call in a cell of its own.  Safe from many threads.

    `Sandbox()` denies everything and requires every layer.  Use it as a context manager, or call
    `close`.

    `config`: named permissions and limits; or anything that `policy` takes.
    `policy`: the name of a shipped profile, the path of a TOML file, a mapping as TOML has it, a
    Policy or a PermissionSet; instead of `config`.
    `python`: another interpreter of the same version.
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
    `blocked_imports`, `blocked_builtins`: lists for source checks, instead of the policy's.
    `user`: the uid of cells on the host if root starts them: a number, or a name that stands for the
    same uid in every process; by default each process has another uid.
    `connect`: the socket of a daemon (`cellwright serve`) whose cells are used; `policy` is then one
    of the daemon's policy names, and no other argument can be given.

    Raises PolicyError for invalid arguments, Unenforceable if this host lacks a required layer,
    LaunchError if cells cannot be built or no daemon answers.
    """

    def __init__(
        self,
        config: SandboxConfig | PolicyLike | None = None,
        *,
        policy: PolicyLike | None = None,
        python: str | os.PathLike[str] | None = None,
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
        blocked_imports: Sequence[str] | None = None,
        blocked_builtins: Sequence[str] | None = None,
        user: int | str | None = None,
        connect: str | os.PathLike[str] | None = None,
    ) -> None:
        settings = {
            "config": config, "python": python, "cgroup_root": cgroup_root, "spawned": spawned,
            "pool": pool, "fresh_exec": fresh_exec, "language": language, "sessions": sessions,
            "interpreters": interpreters, "workspaces": workspaces, "audit": audit, "tools": tools,
            "blocked_imports": blocked_imports, "blocked_builtins": blocked_builtins, "user": user,
        }  # fmt: skip
        self._alike = {name: settings[name] for name in _ALIKE} if connect is None else None
        self._running = pool.running if isinstance(pool, PoolSettings) else PoolSettings().running
        self._cells: _Cells
        if connect is None:
            self._cells = LocalCells(policy=policy, **settings)  # type: ignore[arg-type] # as above
        else:
            _refuse_local_settings(settings)
            from .remote.client import DaemonsCells

            self._cells = DaemonsCells(connect, policy)
        self._finalizer = weakref.finalize(self, _close_forgotten, self._cells, os.getpid())

    @classmethod
    async def create(
        cls,
        config: SandboxConfig | PolicyLike | None = None,
        *,
        policy: PolicyLike | None = None,
        python: str | os.PathLike[str] | None = None,
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
        blocked_imports: Sequence[str] | None = None,
        blocked_builtins: Sequence[str] | None = None,
        user: int | str | None = None,
        connect: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Return a sandbox, made in a thread, so that the event loop goes on meanwhile.

        The arguments and exceptions are those of `Sandbox`.  A sandbox that is made after its task was
        cancelled is closed.
        """
        from .run import in_thread  # asyncio takes 40 ms to import

        return await in_thread(
            lambda: cls(
                config, policy=policy, python=python, cgroup_root=cgroup_root, spawned=spawned,
                pool=pool, fresh_exec=fresh_exec, language=language, sessions=sessions,
                interpreters=interpreters, workspaces=workspaces, audit=audit, tools=tools,
                blocked_imports=blocked_imports, blocked_builtins=blocked_builtins, user=user,
                connect=connect,
            ),
            discard=cls.close,
        )  # fmt: skip

    @property
    def _at_once(self) -> int:
        return self._running

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
    def layers(self) -> tuple[str, ...]:
        """The layers in force around every cell of this sandbox."""
        return self.plan.layers

    def has_tool(self, name: str) -> bool:
        return self._cells.has_tool(name)

    def _execute(
        self, code: str | bytes, language: str, given: CallArguments, on_output: OnOutput | None,
        cancel: int,
    ) -> SandboxResult:  # fmt: skip
        return self._cells.execute(code, language, on_output, cancel, given)

    def session(
        self, id: str | None = None, language: str = PYTHON, *, workspace: str | None = None,
        clean: bool = False,
    ) -> "Session":  # fmt: skip
        """Return a session: a cell that keeps variables and files from one call to the next.

        `id`: return the session of that name if it lives, else open one of that name.
        `workspace`: start with the files of that workspace, and save them when the session ends.
        `clean`: remove that workspace when the session is closed.
        Raises PolicyError for an unknown language, or another one than that of the session that lives;
        BusyError if too many sessions live and all are busy, or if the workspace is in use;
        LaunchError if no cell could be built or the language is not installed; WorkspaceError.
        """
        if id is not None and not (isinstance(id, str) and id):
            raise PolicyError(f"id: must be a text that is not empty, got {id!r}")
        return self._cells.session(id, language, workspace, clean)

    def program(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None,
        files: Mapping[str, str | bytes] | None = None, trace_id: str | None = None,
    ) -> Program:  # fmt: skip
        """Start a program in a cell of its own and return it; its streams are pipes to this process.

        `argv[0]`: its path as the cell sees it; the policy must let it be executed.  `env`: variables
        beside the policy's.  `cwd`: its directory, default /workspace.  `files`: path below /workspace
        -> content, put there before it starts.  The policy's limits are those of its whole life.

        Raises PolicyError for invalid arguments or a policy without subprocesses, BusyError if too many
        programs live, ClosedError after `close`, LaunchError if no cell could be built.
        """
        given = {"env": env, "cwd": cwd, "files": files, "trace_id": trace_id}
        return self._cells.program(argv, given)

    @property
    def workspaces(self) -> "Workspaces":
        """The workspaces that calls and sessions may name."""
        return self._cells.workspaces

    def sibling(
        self, policy: Policy, pool: PoolSettings, tools: "Offered | None" = None,
        sessions: SessionSettings = SessionSettings(),  # noqa: B008 - a constant
        rules: "Rules | None" = None,
    ) -> "Sandbox":  # fmt: skip
        """Return a sandbox of another policy with the same interpreter, cgroups, uid, source checks and
        trail.

        `rules` are for source checks, where this sandbox has no `blocked_imports` or
        `blocked_builtins` of its own.
        """
        if self._alike is None:
            raise PolicyError("connect: a daemon makes cells for its own policies only")
        alike: dict[str, Any] = dict(self._alike)
        for name in ("blocked_imports", "blocked_builtins") if rules else ():
            alike[name] = getattr(rules, name) if alike[name] is None else alike[name]
        return Sandbox(
            policy=policy, pool=pool, audit=self.audit or False, tools=tools, sessions=sessions,
            **alike,
        )  # fmt: skip

    def validate_source(self, code: str) -> tuple[bool, str | None]:
        """Check Python source against the names that this sandbox blocks, whatever its validation mode.

        Returns (True, None), or False and the first finding, such as "Blocked import: os".  This is
        advice: the kernel is the boundary.
        """
        return self._cells.validate_source(code)

    def leave_open_at_exit(self) -> None:
        """Do not close this sandbox, or warn about it, when the process ends: its owner closes it."""
        self._finalizer.atexit = False

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


def _refuse_local_settings(settings: dict[str, Any]) -> None:
    """Raise PolicyError if any setting differs from its default: a daemon has its own."""
    defaults = Sandbox.__init__.__kwdefaults__ or {}
    given = [name for name, value in settings.items() if value != defaults.get(name)]
    if given:
        raise PolicyError(
            f"connect: cannot be combined with {', '.join(given)}",
            'give these to the daemon when it is started; see "cellwright serve --help"',
        )


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
) -> Sandbox:
    """Return a sandbox with these fields of SandboxConfig; `timeout` is its `timeout_seconds`."""
    config = SandboxConfig(
        timeout_seconds=timeout, max_memory_mb=max_memory_mb, max_output_bytes=max_output_bytes,
        max_processes=max_processes, max_cpus=max_cpus, workspace_mb=workspace_mb,
        allow_file_read=allow_file_read, allow_file_write=allow_file_write,
        allow_network=allow_network, allow_subprocess=allow_subprocess,
        allowed_paths=allowed_paths, denied_paths=denied_paths, optional_layers=optional_layers,
        enable_audit=enable_audit, audit_level=audit_level, environment=dict(environment),
    )  # fmt: skip
    return Sandbox(config)
