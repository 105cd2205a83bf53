"""`Sandbox`: what a user imports.  A face: its own cells stand behind it, or those of a daemon."""

import os
import warnings
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from ...policies.errors import PolicyError
from ...policies.languages import PYTHON
from ...policies.plan import Plan
from ...policies.policy import Policy
from ...runner.capture import OnOutput
from ...runner.pool import PoolSettings
from ...runner.result import SandboxResult
from ...runner.session import SessionSettings
from ...runner.spawn import Spawned
from ...runner.supervisor import Supervisor
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


_ALIKE = ("python", "cgroup_root", "blocked_imports", "blocked_builtins", "user")


class _Cells(Protocol):
    """What stands behind a sandbox; its methods are those of `Sandbox`."""

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

    def validate_source(self, code: str, /) -> tuple[bool, str | None]: ...

    def settle(self) -> None: ...

    def close(self) -> None: ...


class Sandbox(Executing):
    """Runs untrusted code, each call in a cell of its own.  Safe from many threads.

    `Sandbox()` denies everything and requires every layer.  `config` widens it by named
    permissions; `policy` replaces it: the name of a shipped profile, the path of a TOML file, a
    mapping as TOML has it, a Policy or a PermissionSet; each of these may stand in the place of
    `config` too.  `python` names another interpreter of the same version, `cgroup_root` a directory
    in which to make cgroups, `spawned` a launcher started ahead, `pool` how many cells wait ready
    (0: a call makes its own and takes it down before it returns) or all settings of the pool,
    `fresh_exec` that each cell has a launcher, and so an address layout and a hash seed, of its
    own, `language` whose launcher is started now (another's is when it is first asked for),
    `sessions` how many of them live and how long, `interpreters` the paths of those of other
    languages that are not in the usual places ({"javascript": "/opt/node/bin/node"}), `workspaces`
    those that calls may name, or their directory, `audit` the trail to write to, which stays yours
    to close; unless told it is one in memory, False is none.  `tools` are those of the host that
    programs may call, as far as the policy lets them: a list of functions or Tools, a Broker, a
    ToolFactory or McpServers.  `blocked_imports` and `blocked_builtins` take the place of what
    source checks look for.  `user` is whose id cells have on the host where root starts them: a
    number, or a name of your own for one that is the same in every process; by default each process
    has another.  Use it as a context manager, or call `close`.

    `connect` names the socket of a daemon (`cellwright serve`), whose cells it then uses; `policy` is
    one of the names that the daemon has, and everything else is the daemon's to say.

    Raises PolicyError for arguments that make no sense, Unenforceable if this host lacks a layer
    that is required, LaunchError if cells cannot be built, or no daemon answers.
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
            _leave_to_the_daemon(settings)
            from .remote.client import DaemonsCells

            self._cells = DaemonsCells(connect, policy)
        self._finalizer = weakref.finalize(self, _close_forgotten, self._cells, os.getpid())

    @property
    def _at_once(self) -> int:
        return self._running

    @property
    def policy(self) -> Policy:
        """What every cell of this sandbox may do."""
        return self._cells.policy

    @property
    def audit(self) -> "AuditLog | None":
        """The trail that is written to; none where a daemon keeps it."""
        return self._cells.audit

    @property
    def plan(self) -> Plan:
        """The policy, compiled for this host."""
        return self._cells.plan

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers in force around every cell of this sandbox."""
        return self.plan.layers

    @property
    def _supervisor(self) -> Supervisor:
        """The first one, for those who measure it."""
        assert isinstance(self._cells, LocalCells)  # noqa: S101 - a daemon's is not within reach
        return self._cells.supervisor

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

        With `id`, the one of that name if it lives, else a new one.  With `workspace`, the files of
        that name are there, and are kept when the session ends; with `clean` the workspace is removed
        when it is closed.  Raises PolicyError for an unknown language, or another than that of the
        session that lives, BusyError if too many live and each is busy, or if somebody else has the
        workspace, LaunchError if no cell could be built or the language is not installed,
        WorkspaceError.
        """
        if id is not None and not (isinstance(id, str) and id):
            raise PolicyError(f"session: id must be a text that is not empty, not {id!r}")
        return self._cells.session(id, language, workspace, clean)

    def program(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None,
        files: Mapping[str, str | bytes] | None = None, trace_id: str | None = None,
    ) -> Program:  # fmt: skip
        """Start a program in a cell of its own and return it, to be spoken with over its streams.

        `argv[0]` is its path as the cell sees it: one that the policy lets be executed.  Its variables
        are the policy's and those of `env`, its directory is `cwd`, /workspace unless told; `files` are
        below /workspace before it starts.  The limits of the policy are those of its whole life.

        Raises PolicyError for arguments that make no sense or a policy without subprocesses, BusyError
        if too many live, ClosedError after `close`, LaunchError if no cell could be built.
        """
        given = {"env": env, "cwd": cwd, "files": files, "trace_id": trace_id}
        return self._cells.program(argv, given)

    @property
    def workspaces(self) -> "Workspaces":
        """The named workspaces that calls and sessions can be given."""
        return self._cells.workspaces

    def sibling(
        self, policy: Policy, pool: PoolSettings, tools: "Offered | None" = None,
        sessions: SessionSettings = SessionSettings(),  # noqa: B008 - a constant
        rules: "Rules | None" = None,
    ) -> "Sandbox":  # fmt: skip
        """Return another sandbox of the same interpreter, cgroups, source checks and trail.

        Source checks go by `rules` as far as this sandbox was not given lists of its own.
        """
        if self._alike is None:
            raise PolicyError("connect: a daemon makes no cells for other policies than its own")
        alike: dict[str, Any] = dict(self._alike)
        for name in ("blocked_imports", "blocked_builtins") if rules else ():
            alike[name] = getattr(rules, name) if alike[name] is None else alike[name]
        return Sandbox(
            policy=policy, pool=pool, audit=self.audit or False, tools=tools, sessions=sessions,
            **alike,
        )  # fmt: skip

    def validate_source(self, code: str) -> tuple[bool, str | None]:
        """Judge Python source by what this sandbox blocks, whatever its mode: (True, None), or False
        and the first finding, such as "Blocked import: os".  Advice: the kernel is the boundary."""
        return self._cells.validate_source(code)

    def leave_open_at_exit(self) -> None:
        """Let what keeps this sandbox close it when the process ends, and not tell that nobody did."""
        self._finalizer.atexit = False

    def settle(self) -> None:
        """Wait until the pool is full and nothing of any past call is left."""
        self._cells.settle()

    def close(self) -> None:
        """End every execution and leave nothing behind; closing twice is fine.

        What a daemon keeps goes on: other clients' calls, its pool, and every session.
        """
        if self._finalizer.detach():
            self._cells.close()
        self._close_aexecutor()


def _close_forgotten(cells: _Cells, owner: int) -> None:
    """Close what stands behind a sandbox that nobody closed and nobody refers to any more, at the
    latest when the process ends; what then takes longer to go is told with that."""
    try:
        if os.getpid() == owner:
            words = f"a sandbox under the policy {cells.policy.name!r} was never closed"
            warnings.warn(f"{words}: call close(), or use with", ResourceWarning, stacklevel=2)
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            cells.close()


def _leave_to_the_daemon(settings: dict[str, Any]) -> None:
    """Raise PolicyError if one of them was given: who connects has no say in what a daemon was told."""
    usual = Sandbox.__init__.__kwdefaults__ or {}
    told = [name for name, value in settings.items() if value != usual.get(name)]
    if told:
        raise PolicyError(
            f"connect: {', '.join(told)} cannot be given as well",
            'the daemon was told when it was started; see "cellwright serve --help"',
        )


def create_sandbox(timeout: float = 30.0, **permissions: Any) -> Sandbox:
    """Return a sandbox with a wall time of `timeout` seconds and fields of SandboxConfig."""
    try:
        config = SandboxConfig(timeout_seconds=timeout, **permissions)
    except TypeError as error:
        raise PolicyError(f"create_sandbox: {error}") from None
    return Sandbox(config)
