"""`LocalCells`: the cells, sessions and trail of a `Sandbox` that makes its own cells."""

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ...policies.errors import PolicyError
from ...policies.languages import PYTHON, interpreter_of, language_called
from ...policies.plan import Plan
from ...policies.policy import Policy, check_policy
from ...runner.branching_process import BranchingProcess
from ...runner.capture import OnOutput
from ...runner.concurrency import NEVER
from ...runner.egress_process import EgressProcess
from ...runner.host.ids import id_for
from ...runner.request import Request
from ...runner.result import SandboxResult
from ...runner.settings import PauseSettings, PoolSettings
from ...runner.shared_files import PLACE as TOOLS
from ...runner.shared_files import SKILLS, SharedFiles
from ...runner.spawn import Spawned, interpreter
from ...runner.supervisor import Supervisor
from ...runner.supervisors import Supervisors, SupervisorsState
from .checks import (
    check_flag,
    check_host_path,
    check_interpreters,
    check_pool,
    check_sessions,
)
from .packaged import PackagedCells
from .parameters import CallArguments, CommandArguments, ProgramArguments, SessionArguments
from .pipeline import RequestPipeline, rules_of
from .ports.exposed import SandboxPorts
from .program import OnStreams, Program, Programs
from .sandbox_arguments import SandboxArguments
from .session import Session
from .sessions import OpenSessions, SkillReplay

if TYPE_CHECKING:
    from ...runner.audit.execution_trail import ExecutionTrail
    from ...runner.audit.log import AuditLog
    from ..privacy.privacy import Privacy
    from ..skills.skills import Skills
    from .config import SandboxConfig
    from .network import SandboxNetwork
    from .network_control import NetworkControl
    from .packages.store import OpenSet
    from .pausing.pausing import Pausing
    from .private import PrivateCalls
    from .pythons import HostPython
    from .sandbox_arguments import PolicyLike
    from .sandbox_skills import SandboxSkills
    from .sandbox_tools import Offered, SandboxTools
    from .workspaces.calls import NamedWorkspace
    from .workspaces.store import Workspaces


OTHERS_CELLS = 2
_POLICIES = (
    "the name of a profile, the path of a TOML file, a mapping as TOML has it, a Policy or "
    "a PermissionSet"
)
_OWN_TRAIL_ENTRIES = 1000  # two a call, 2 KiB each; callers that want more pass a trail


class LocalCells:
    """The cells that this process makes."""

    def __init__(self, given: SandboxArguments) -> None:
        own = _policy(given.config, given.policy)
        python = _python(given)
        given = _with_store_of(python, given)
        self.policy, self._packages = _packaged(own, given)
        try:
            self._start(given, own, python)
        except BaseException:
            self._release_packages()
            raise

    def _start(self, given: SandboxArguments, own: Policy, python: "HostPython | None") -> None:
        """Start the launcher; `own` is the policy without the packages of the sandbox."""
        self._given_workspaces = _checked_workspaces(given.workspaces)
        rules = rules_of(self.policy.validation, given.blocked_imports, given.blocked_builtins)
        settings = check_pool(given.pool, fresh_exec=given.fresh_exec)
        sessions, language = check_sessions(given.sessions), _language(given.language)
        known = check_interpreters(given.interpreters)
        self._pauses = _checked_pauses(given.pauses)
        user = _checked_user(given.user)
        root = given.cgroup_root
        cgroup_root = None if root is None else check_host_path("cgroup_root", root)
        if not isinstance(given.spawned, Spawned | None):
            raise PolicyError(f"spawned: must be a Spawned, got {given.spawned!r}")
        self.audit = _audit_log(given)
        self._private = _private_calls(given, self.policy)
        sandbox_tools = _sandbox_tools(given.tools, self.policy, self.audit, self._private)
        self._skills = _sandbox_skills(given.skills, self.policy)
        shared_files = partial(_shared_files, sandbox_tools, self._skills)
        spawned = _spawned(given, python)
        self._egress = _egress_process(self.policy, interpreter(), user)
        self._branching = BranchingProcess(interpreter(), 0 if os.geteuid() else id_for(user))
        try:
            self.supervisor = Supervisor(
                self.policy, spawned, cgroup_root, settings,
                language=language, interpreter=_interpreter(known, language),
                shared_files=shared_files(language),
                user=user, egress=self._egress,
            )  # fmt: skip
        except BaseException:
            spawned.close()
            if self._egress:
                self._egress.close()
            raise
        another = partial(
            _another,
            spawned.again,
            cgroup_root,
            settings,
            known,
            shared_files,
            user,
            self._egress,
        )
        self._replay = SkillReplay(
            partial(_replaying, spawned.again, cgroup_root, settings, known, user), self._skills
        )
        self._supervisors = Supervisors(
            language, self.supervisor, partial(another, self.policy), sessions
        )
        self._ports = SandboxPorts()
        self._programs = Programs(self._ports)
        self._control: NetworkControl | None = None
        self._packaged = PackagedCells(
            self._supervisors, own, given, self._packages, settings.packages_bytes,
            lambda policy: another(policy, PYTHON),
        )  # fmt: skip
        try:
            trail = _trail_of(self.audit, self.plan)
            self._pipeline = RequestPipeline(
                self.policy, self.plan.layers, rules, trail, sandbox_tools, self._private
            )
            if self._skills:
                self._skills.has_tool = self._pipeline.has_tool
                self._skills.execute = lambda given: self.execute(given, None, NEVER)
            self._sessions = OpenSessions(
                self._supervisors, self._pipeline, self._ports, self._packaged, self.policy.limits,
                self._branching, lambda: self._pausing, self._replay,
            )  # fmt: skip
            self._network = _network(self.policy, self._egress, self._pipeline)
            self._control = _control(self.policy, self._egress, self._network)
        except BaseException:
            self.close()
            raise

    @property
    def plan(self) -> Plan:
        return self.supervisor.plan

    def execute(
        self, given: CallArguments, on_output: OnOutput | None, cancel: int
    ) -> SandboxResult:
        wanted = self._wanted(given)
        if on_output is None:
            return self._perform(given, wanted, None, cancel)
        with self._pipeline.streamed(on_output) as told:
            return self._perform(given, wanted, told, cancel)

    def _perform(
        self, given: CallArguments, wanted: "NamedWorkspace | None", on_output: OnOutput | None,
        cancel: int,
    ) -> SandboxResult:  # fmt: skip
        def perform(language: str, request: Request) -> SandboxResult:
            lease = self._packaged.lease(
                given.packages, language, request.limits.wall_seconds, cancel
            )
            with lease:
                result = perform_by(lease.supervisor, request)
            if lease.look_at and result.ok:
                lease.look_at(request.code)
            return result

        def perform_by(supervisor: Supervisor, request: Request) -> SandboxResult:
            if wanted is None:
                return supervisor.execute(request, on_output, cancel)
            from .workspaces.calls import execute_in

            result = execute_in(wanted, supervisor, request, on_output, cancel)
            self._pipeline.record_workspace(result.workspace, execution_id=request.execution_id)
            return result

        return self._pipeline.perform(given, perform)

    def program(self, given: ProgramArguments) -> Program:
        def work(on_streams: OnStreams, cancel: int) -> SandboxResult:
            def perform(request: Request) -> SandboxResult:
                supervisor = self._supervisors.of(PYTHON)  # its process executes the program
                return supervisor.execute(request, cancel=cancel, keep=_once_at_rest)

            environment = self.plan.environment
            return self._pipeline.perform_program(given, environment, on_streams, perform)

        return self._programs.start(work)

    def session(self, given: SessionArguments) -> Session:
        return self._sessions.open(given, self._wanted(given))

    @cached_property
    def _pausing(self) -> "Pausing":
        from .pausing.pausing import Pausing  # seldom needed

        return Pausing(self._pauses, self._branching)

    def resume(self, token: str) -> Session:
        return self._sessions.resume(token)

    def _wanted(self, given: CallArguments | SessionArguments) -> "NamedWorkspace | None":
        clean = check_flag("clean", given.clean)
        if given.workspace is not None:
            from .workspaces.calls import NamedWorkspace  # seldom needed

            if clean and self.workspaces.review:
                raise PolicyError(
                    "clean: a workspace with review=True is not removed by a call",
                    "remove it with Workspaces.remove, or `cellwright workspace remove`",
                )
            show = self._private.workspace if self._private else None
            return NamedWorkspace(self.workspaces, given.workspace, clean, show)
        if clean:
            raise PolicyError(
                "clean: there is no workspace to remove", "name one with workspace= (--workspace)"
            )
        return None

    @property
    def privacy(self) -> "Privacy | None":
        return self._private.privacy if self._private else None

    def private_to(self, client: str) -> None:
        """Let this sandbox share no values with those of other clients."""
        if self._private:
            self._private.of = client

    @cached_property
    def workspaces(self) -> "Workspaces":
        from .workspaces.store import workspaces_of

        return workspaces_of(self._given_workspaces)

    @property
    def network(self) -> "SandboxNetwork":
        if self._network is None:
            raise PolicyError(
                "network: the policy has no network rules, so cells have nothing to reach others by",
                "name at least one host in [[network.allow]] of the policy",
            )
        return self._network

    @property
    def skills(self) -> "SandboxSkills":
        if self._skills is None:
            raise PolicyError("skills: this sandbox has none", "pass Sandbox(skills=Skills())")
        return self._skills

    def with_tokens(self, given: CommandArguments) -> CommandArguments:
        return self._pipeline.with_tokens(given)

    def has_tool(self, name: str) -> bool:
        return self._pipeline.has_tool(name)

    def validate_source(self, code: str) -> tuple[bool, str | None]:
        findings = self._pipeline.check(code, "python")
        return (False, str(findings[0])) if findings else (True, None)

    def state(self) -> SupervisorsState:
        return self._supervisors.state()

    def settle(self) -> None:
        self._packaged.settle()

    def close(self) -> None:
        self._programs.close()
        self._packaged.close()
        self._branching.close()
        if "_pausing" in vars(self):
            self._pausing.close()
        self._ports.close()
        if self._control:
            self._control.close()
        if self._egress:
            self._egress.close()
        self._release_packages()

    def _release_packages(self) -> None:
        if self._packages:
            self._packages.close()


def _checked_pauses(given: PauseSettings) -> PauseSettings:
    if given == PauseSettings():
        return given
    from .pausing.pauses import check_pauses  # seldom needed

    return check_pauses(given)


def _spawned(given: SandboxArguments, python: "HostPython | None") -> Spawned:
    """Return the launcher process of a sandbox."""
    has_fixed_addresses = check_flag("pausable", given.pausable)
    if given.spawned:
        if has_fixed_addresses and not given.spawned.has_fixed_addresses:
            given.spawned.close()
            raise PolicyError("pausable: the launcher was spawned without has_fixed_addresses")
        return given.spawned
    if python:
        return python.spawn(has_fixed_addresses=has_fixed_addresses)
    return Spawned(interpreter(), has_fixed_addresses=has_fixed_addresses)


def _python(given: SandboxArguments) -> "HostPython | None":
    """Return the Python that the arguments name; None for the one that runs this process."""
    if given.python is None and given.runtime is None:
        return None
    from .pythons import find_python  # seldom needed

    return find_python(given.python, given.runtime)


def _with_store_of(python: "HostPython | None", given: SandboxArguments) -> SandboxArguments:
    """Return `given` with a store of packages for `python` if that is of another version than this
    process; raises PolicyError if the given store is for another one."""
    store = given.package_store
    wanted = python.tag if python else sys.implementation.cache_tag
    if store is not None and store.python != wanted:
        raise PolicyError(
            f"package_store: must be for {wanted}, got one for {store.python}",
            "PackageStore(python=...)",
        )
    if store is not None or python is None or python.is_ours:
        return given
    from ...policies.errors import PackageError
    from .packages.store import PackageStore

    with contextlib.suppress(PackageError):  # the extra is not installed: the first use says so
        given = replace(given, package_store=PackageStore(python=python.path))
    return given


def _packaged(policy: Policy, given: SandboxArguments) -> "tuple[Policy, OpenSet | None]":
    """Return `policy` with the packages that it and the arguments ask for, and the set of these."""
    if given.packages is None and not policy.packages.require:
        return policy, None
    from .packages.required import open_required  # seldom needed

    return open_required(policy, given.packages, given.package_store)


def _private_calls(given: SandboxArguments, policy: Policy) -> "PrivateCalls | None":
    """Return what the argument `privacy` and the policy ask for; None if programs see everything."""
    if given.privacy is None and not policy.privacy.enabled:
        return None
    from .private import private_calls  # seldom needed

    return private_calls(given.privacy, policy)


def _once_at_rest(_: int) -> None:
    """Have the result wait until nothing runs in the cell; other processes may outlive the program."""


def _another(
    spawn: Callable[[], Spawned], cgroup_root: str | None, settings: PoolSettings,
    interpreters: Mapping[str, str], shared_files: Callable[[str], Mapping[str, SharedFiles]],
    user: int | str | None, egress: EgressProcess | None, policy: Policy, language: str,
) -> Supervisor:  # fmt: skip
    """Return the supervisor of another language or set of packages, with a smaller pool."""
    settings = settings._replace(size=min(settings.size, OTHERS_CELLS))
    return Supervisor(
        policy, spawn(), cgroup_root, settings,
        language=language, interpreter=_interpreter(interpreters, language),
        shared_files=shared_files(language), user=user, egress=egress,
    )  # fmt: skip


def _replaying(
    spawn: Callable[[], Spawned], cgroup_root: str | None, settings: PoolSettings,
    interpreters: Mapping[str, str], user: int | str | None, policy: Policy, language: str,
    skills: SharedFiles,
) -> Supervisor:  # fmt: skip
    """Return a supervisor without a pool, whose cells see `skills` and what the policy shows."""
    return _another(
        spawn, cgroup_root, settings._replace(size=0), interpreters, lambda _: {SKILLS: skills}, user,
        None, policy, language,
    )  # fmt: skip


def _checked_workspaces(
    given: "Workspaces | str | os.PathLike[str] | None",
) -> "Workspaces | str | os.PathLike[str] | None":
    if not isinstance(given, str | os.PathLike | None):
        from .workspaces.store import Workspaces

        if not isinstance(given, Workspaces):
            raise PolicyError(f"workspaces: must be Workspaces or their directory, got {given!r}")
    return given


def _checked_user(user: int | str | None) -> int | str | None:
    known = isinstance(user, str) or (isinstance(user, int) and not isinstance(user, bool))
    if user is not None and (not known or not user or (isinstance(user, int) and user < 0)):
        raise PolicyError(f"user: must be a number above 0 or a name, got {user!r}")
    if isinstance(user, int) and os.geteuid() not in (0, user):
        raise PolicyError(f"user: only root can start cells as another user, got {user}")
    return user


def _egress_process(
    policy: Policy, executable: str, user: int | str | None
) -> EgressProcess | None:
    """Return what serves the cells, if the policy allows them any name."""
    if not policy.network.allow:
        return None
    from ...runner.living import new_socket_path

    return EgressProcess(executable, 0 if os.geteuid() else id_for(user), new_socket_path())


def _network(
    policy: Policy, egress: EgressProcess | None, pipeline: RequestPipeline
) -> "SandboxNetwork | None":
    """Return the rules of a sandbox that has an egress process."""
    if egress is None:
        return None
    from .network import SandboxNetwork

    return SandboxNetwork(policy.network, egress, pipeline.record_rule)


def _control(
    policy: Policy, egress: EgressProcess | None, network: "SandboxNetwork | None"
) -> "NetworkControl | None":
    """Return the socket through which `cellwright network` reaches the rules, if there are any; None
    where there is no directory for it, or no room, as for records of living sandboxes."""
    if egress is None or network is None or not egress.control:
        return None
    from .network_control import NetworkControl

    with contextlib.suppress(OSError):
        return NetworkControl(egress.control, policy.name, network)
    return None


def _shared_files(
    tools: "SandboxTools | None", skills: "SandboxSkills | None", language: str
) -> dict[str, SharedFiles]:
    """Return the files that cells of `language` see, by their places."""
    found = {TOOLS: tools.shared_files(language)} if tools else {}
    return found | ({SKILLS: skills.shared_files} if skills else {})


def _sandbox_skills(given: "Skills | None", policy: Policy) -> "SandboxSkills | None":
    if given is None:
        return None
    from .sandbox_skills import SandboxSkills  # seldom needed

    return SandboxSkills(given, policy)


def _interpreter(interpreters: Mapping[str, str], language: str) -> str:
    return "" if language == PYTHON else interpreters.get(interpreter_of(language), "")


def _policy(config: "SandboxConfig | PolicyLike | None", policy: "PolicyLike | None") -> Policy:
    if config is not None and policy is not None:
        raise PolicyError(
            "config: cannot be combined with policy", "give a config or a policy, not both"
        )
    given: object = config if policy is None else policy
    if given is None:
        return check_policy(Policy(name="strict"))
    if isinstance(given, Policy):
        return check_policy(given)
    from ...policies.permissions import PermissionSet
    from .config import SandboxConfig

    if isinstance(config, SandboxConfig):
        return config.policy()
    if isinstance(given, PermissionSet):
        from .permissions import policy_of

        return policy_of(given)
    if isinstance(given, str | os.PathLike | Mapping):
        from ...policies.loading import load_policy, policy_of_data

        if isinstance(given, Mapping):
            return policy_of_data(given)
        return load_policy(given if isinstance(given, str) else os.path.abspath(given))
    where = "policy: must be" if config is None else "config: must be a SandboxConfig,"
    raise PolicyError(
        f"{where} {_POLICIES}, got {type(given).__name__}",
        "Sandbox(config)" if isinstance(given, SandboxConfig) else "",
    )


def _language(name: str) -> str:
    if found := language_called(name):
        return found
    raise PolicyError(f"language: unknown language {name!r}")


def _audit_log(arguments: SandboxArguments) -> "AuditLog | None":
    """Return the trail to write to: the given one, or one in memory as the configuration says."""
    given = arguments.audit
    if given is False:
        return None
    from ...runner.audit.log import AuditLog
    from .config import SandboxConfig

    config = arguments.config if isinstance(arguments.config, SandboxConfig) else SandboxConfig()
    if given is None and not config.enable_audit:
        return None
    if isinstance(given, AuditLog):
        return given
    if not isinstance(given, bool | None):
        raise PolicyError(
            f"audit: must be an AuditLog, True or False, got {given!r}",
            "AuditLog(path=...) writes to a file; close it yourself",
        )
    return AuditLog(level=config.audit_level, max_entries=_OWN_TRAIL_ENTRIES)


def _sandbox_tools(
    tools: "Offered | None",
    policy: Policy,
    audit: "AuditLog | None",
    private: "PrivateCalls | None",
) -> "SandboxTools | None":
    if tools is None and not policy.http.allow:
        return None
    from .sandbox_tools import SandboxTools, broker_of

    return SandboxTools(broker_of(tools, policy, audit), policy.tools, audit, private)


def _trail_of(log: "AuditLog | None", plan: Plan) -> "ExecutionTrail | None":
    if log is None:
        return None
    from ...runner.audit.execution_trail import ExecutionTrail

    return ExecutionTrail(log, plan)
