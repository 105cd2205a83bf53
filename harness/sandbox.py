"""`Sandbox`: what a user imports.  Checks what it is given, then leaves the rest to a supervisor."""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..policies.errors import PolicyError
from ..policies.permissions import PermissionSet
from ..policies.plan import Plan
from ..policies.policy import Policy, check_policy
from ..runner.capture import OnOutput
from ..runner.performance import NEVER, Request
from ..runner.pool import PoolSettings
from ..runner.result import SandboxResult
from ..runner.session import SessionSettings
from ..runner.spawn import Spawned, interpreter
from ..runner.supervisor import Supervisor
from ..runner.supervisors import Supervisors
from .config import SandboxConfig, check_pool, check_sessions
from .executing import Executing
from .intake import Intake, rules_of
from .session import OpenSessions, Session

if TYPE_CHECKING:
    from ..runner.audit.clerk import Clerk
    from ..runner.audit.log import AuditLog
    from .tools.broker import Broker
    from .tools.offering import Offering
    from .tools.spec import Tool

__all__ = ["Sandbox", "create_sandbox"]

_OTHER_LANGUAGES_CELLS = 2
_OWN_TRAIL_ENTRIES = 1000  # two a call, 2 KiB each: who wants more passes a trail of his own


class Sandbox(Executing):
    """Runs untrusted code, each call in a cell of its own.  Safe from many threads.

    `Sandbox()` denies everything and requires every layer.  `config` widens it by named permissions;
    `policy` replaces it: the name of a shipped profile, the path of a TOML file, a Policy or a
    PermissionSet.  `python` names another interpreter of the same version, `cgroup_root` a directory
    in which to make cgroups, `spawned` a launcher started ahead, `pool` how many cells wait ready (0: a
    call makes its own and takes it down before it returns) or all settings of the pool, `fresh_exec`
    that each cell has a launcher, and so an address layout and a hash seed, of its own, `sessions` how
    many of them live and how long, `audit` the trail to write to, which stays yours to close; unless
    told it is one in memory, False is none.  `tools` are those of the host that programs may call, as
    far as the policy lets them: Tools, or a Broker.  `blocked_imports` and `blocked_builtins` take the
    place of what source checks look for.  Use it as a context manager, or call `close`.

    Raises PolicyError for arguments that make no sense, Unenforceable if this host lacks a layer
    that is required, LaunchError if cells cannot be built.
    """

    def __init__(
        self,
        config: SandboxConfig | None = None,
        *,
        policy: str | Policy | PermissionSet | None = None,
        python: str | None = None,
        cgroup_root: str | None = None,
        spawned: Spawned | None = None,
        pool: int | PoolSettings = PoolSettings(),  # noqa: B008 - a constant
        fresh_exec: bool = False,
        sessions: SessionSettings = SessionSettings(),  # noqa: B008 - a constant
        audit: "AuditLog | bool | None" = None,
        tools: "Broker | Sequence[Tool] | None" = None,
        blocked_imports: Sequence[str] | None = None,
        blocked_builtins: Sequence[str] | None = None,
    ) -> None:
        self.policy = _policy(config, policy)
        rules = rules_of(self.policy.validation, blocked_imports, blocked_builtins)
        settings = check_pool(pool, fresh_exec=fresh_exec)
        self.audit = _audit_log(config, audit)
        spawned = spawned or Spawned(python or interpreter())
        self._supervisor = Supervisor(self.policy, spawned, cgroup_root, settings)
        another = partial(_another, self.policy, spawned.executable, cgroup_root, settings)
        self._supervisors = Supervisors(self._supervisor, another)
        self._finalizer = weakref.finalize(self, self._supervisors.close)
        try:
            clerk = _clerk_of(self.audit, self.plan)
            offering = _offering(tools, self.policy, self.audit)
            self._intake = Intake(self.policy, self.layers, rules, clerk, offering)
            self._sessions = OpenSessions(self._supervisor, self._intake, check_sessions(sessions))
        except BaseException:
            self.close()
            raise

    @property
    def plan(self) -> Plan:
        """The policy, compiled for this host."""
        return self._supervisor.plan

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers in force around every cell of this sandbox."""
        return self.plan.layers

    def execute(
        self,
        code: str | bytes,
        language: str = "python",
        *,
        on_output: OnOutput | None = None,
        cancel: int = NEVER,
        **given: Any,
    ) -> SandboxResult:
        """Run `code` in a fresh cell and return what came of it.

        `language`: python, javascript, bash, sh or ruby, as far as the host has its interpreter.
        `given`: `stdin` (text or bytes), `inputs` (variables, as JSON has them), `files` (path below
        /workspace -> content), `env`, `timeout` (seconds, only shorter than the policy's),
        `trace_id`, `collect` (globs of files to bring back).  `on_output(stream, bytes)` is called as
        output comes; `cancel` is a descriptor that ends the execution once it is readable.

        What the code does wrong is in the result; raises PolicyError for arguments that make no
        sense, ClosedError after `close`, and LaunchError if no cell could be built.
        """

        def perform(language: str, request: Request) -> SandboxResult:
            return self._supervisors.of(language).execute(request, on_output, cancel)

        return self._intake.perform(code, language, given, perform)

    def session(self, id: str | None = None) -> "Session":
        """Return a session: a cell that keeps variables and files from one call to the next.

        With `id`, the one of that name if it lives, else a new one.  Raises BusyError if too many live
        and each is busy, LaunchError if no cell could be built.
        """
        return self._sessions.open(id)

    def validate_source(self, code: str) -> tuple[bool, str | None]:
        """Judge Python source by what this sandbox blocks, whatever its mode: (True, None), or False
        and the first finding, such as "Blocked import: os".  Advice: the kernel is the boundary."""
        findings = self._intake.check(code, "python")
        return (False, str(findings[0])) if findings else (True, None)

    def settle(self) -> None:
        """Wait until the pool is full and nothing of any past call is left."""
        self._supervisors.settle()

    def close(self) -> None:
        """End every execution and leave nothing behind; closing twice is fine."""
        self._finalizer()


def _another(
    policy: Policy, executable: str, cgroup_root: str | None, settings: PoolSettings, language: str
) -> Supervisor:
    """Return the supervisor of another language, which fewer cells wait for."""
    settings = settings._replace(size=min(settings.size, _OTHER_LANGUAGES_CELLS))
    return Supervisor(policy, Spawned(executable), cgroup_root, settings, language=language)


def create_sandbox(timeout: float = 30.0, **permissions: Any) -> Sandbox:
    """Return a sandbox with a wall time of `timeout` seconds and fields of SandboxConfig."""
    try:
        config = SandboxConfig(timeout_seconds=timeout, **permissions)
    except TypeError as error:
        raise PolicyError(f"create_sandbox: {error}") from None
    return Sandbox(config)


def _policy(config: SandboxConfig | None, policy: str | Policy | PermissionSet | None) -> Policy:
    if config is not None and policy is not None:
        raise PolicyError("give a config or a policy, not both")
    if isinstance(policy, str):
        from ..policies.loading import load_policy

        return load_policy(policy)
    if isinstance(policy, PermissionSet):
        from .permissions import policy_of

        return policy_of(policy)
    if config is not None:
        return config.policy()
    return check_policy(policy or Policy(name="strict"))


def _audit_log(config: SandboxConfig | None, given: "AuditLog | bool | None") -> "AuditLog | None":
    """Return the trail to write to: the given one, or one in memory as `config` has it."""
    config = config or SandboxConfig()
    if given is False or (given is None and not config.enable_audit):
        return None
    from ..runner.audit.log import AuditLog

    if isinstance(given, AuditLog):
        return given
    return AuditLog(level=config.audit_level, max_entries=_OWN_TRAIL_ENTRIES)


def _offering(
    tools: "Broker | Sequence[Tool] | None", policy: Policy, audit: "AuditLog | None"
) -> "Offering | None":
    if tools is None:
        return None
    from .tools.broker import Broker, Offer
    from .tools.offering import Offering

    broker = tools if isinstance(tools, Broker) else Broker(Offer(tools), audit=audit)
    return Offering(broker, policy.tools)


def _clerk_of(log: "AuditLog | None", plan: Plan) -> "Clerk | None":
    if log is None:
        return None
    from ..runner.audit.clerk import Clerk

    return Clerk(log, plan)
