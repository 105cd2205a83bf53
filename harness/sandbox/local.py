"""`LocalCells`: the cells, sessions and trail of a `Sandbox` that makes its own cells."""

import os
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING

from ...policies.errors import PolicyError
from ...policies.languages import PYTHON
from ...policies.plan import Plan
from ...policies.policy import Policy
from ...policies.source.findings import Rules
from ...runner.capture import OnOutput
from ...runner.concurrency import NEVER
from ...runner.host.ids import id_for
from ...runner.request import Request
from ...runner.result import SandboxResult
from ...runner.settings import SessionSettings
from ...runner.shared_files import PLACE as TOOLS
from ...runner.shared_files import SKILLS, SharedFiles
from ...runner.spawn import interpreter
from ...runner.supervisor import Supervisor
from ...runner.supervisors import Supervisors, SupervisorSettings, SupervisorsState
from .checks import (
    check_flag,
    check_host_path,
    check_interpreters,
    check_language,
    check_pause_settings,
    check_pool,
    check_sessions,
    check_user,
)
from .made_once import MadeOnce
from .packaged import PackagedCells
from .parameters import CallArguments, CommandArguments, ProgramArguments, SessionArguments
from .pipeline import RequestPipeline, rules_of
from .sandbox_arguments import (
    SandboxArguments,
    audit_log_of,
    launcher_of,
    packaged,
    policy_of_arguments,
    python_of,
    with_store_of,
)

if TYPE_CHECKING:
    from ...runner.audit.execution_trail import ExecutionTrail
    from ...runner.audit.log import AuditLog
    from ...runner.branching_process import BranchingProcess
    from ..privacy.privacy import Privacy
    from ..skills.skills import Skills
    from .egress import SandboxEgress
    from .monty_evaluator import MontyEvaluator
    from .network import SandboxNetwork
    from .open_sessions import OpenSessions
    from .pausing.idle_pauses import IdlePauses
    from .pausing.pausing import Pausing
    from .ports.exposed import SandboxPorts
    from .private import PrivateCalls
    from .program import OnStreams, Program, Programs
    from .pythons import HostPython
    from .sandbox_skills import SandboxSkills
    from .sandbox_tools import Offered, SandboxTools
    from .session import Session
    from .workspaces.calls import NamedWorkspace
    from .workspaces.store import Workspaces


class LocalCells:
    """The cells that this process makes."""

    def __init__(self, given: SandboxArguments) -> None:
        own = policy_of_arguments(given)
        python = python_of(given)
        given = with_store_of(python, given)
        self.policy, self._packages = packaged(own, given)
        try:
            self._start(given, own, python)
        except BaseException:
            self._release_packages()
            raise

    def _start(self, given: SandboxArguments, own: Policy, python: "HostPython | None") -> None:
        """Start the launcher; `own` is the policy without the packages of the sandbox."""
        self._given_workspaces = _checked_workspaces(given.workspaces)
        self._pauses = check_pause_settings(given.pauses)
        rules = rules_of(self.policy.validation, given.blocked_imports, given.blocked_builtins)
        pool = check_pool(given.pool, fresh_exec=given.fresh_exec)
        sessions = check_sessions(given.sessions)
        if sessions.pauses and given.fresh_exec:
            raise PolicyError(
                "sessions.pause_seconds, sessions.memory_bytes: cannot be combined with fresh_exec",
                "a paused session keeps its launcher, which takes more memory than its cell",
            )
        language = check_language(given.language)
        interpreters, user = check_interpreters(given.interpreters), check_user(given.user)
        root = given.cgroup_root
        cgroup_root = None if root is None else check_host_path("cgroup_root", root)
        self.audit = audit_log_of(given)
        self._evaluator = _evaluator_of(self.policy)
        self._private = _private_calls(given, self.policy)
        self._tools = _sandbox_tools(given.tools, self.policy, self.audit, self._private)
        self._skills = _sandbox_skills(given.skills, self.policy)
        spawned = launcher_of(given, python)
        self._egress = self._way_out(user)
        settings = SupervisorSettings(
            spawned.again, cgroup_root, pool, interpreters, self._shared_files, user,
            self._egress.process if self._egress else None,
        )  # fmt: skip
        self._branching_process = MadeOnce(partial(_branching_process, user))
        try:
            self.supervisor = settings.first(self.policy, language, spawned)
        except BaseException:
            spawned.close()
            if self._egress:
                self._egress.close()
            raise
        another = partial(settings.another, self.policy)
        self._supervisors = Supervisors(language, self.supervisor, another, sessions)
        self._packaged = PackagedCells(
            self._supervisors, own, given, self._packages, pool.packages_bytes,
            lambda policy: settings.another(policy, PYTHON),
        )  # fmt: skip
        self._ports = MadeOnce(_sandbox_ports)
        self._programs = MadeOnce(self._made_programs)
        self._pausing = MadeOnce(self._made_pausing)
        self._open_sessions = MadeOnce(partial(self._made_sessions, sessions, settings))
        try:
            self._serve(rules, sessions, settings)
        except BaseException:
            self.close()
            raise

    def _serve(self, rules: Rules, sessions: SessionSettings, settings: SupervisorSettings) -> None:
        """Make what requests and sessions of the started launcher pass through."""
        trail = _trail_of(self.audit, self.plan)
        self._pipeline = RequestPipeline(
            self.policy, self.plan.layers, rules, trail, self._tools, self._private
        )
        if self._skills:
            self._skills.has_tool = self._pipeline.has_tool
            self._pipeline.on_failure = self._skills.note
            self._skills.execute = lambda given: self.execute(given, None, NEVER)
        if sessions.pauses:
            _ = self._sessions  # it looks for idle ones from now on
        if self._egress:
            self._egress.listen()

    @property
    def _sessions(self) -> "OpenSessions":
        """The sessions, of which a command that runs one program imports nothing."""
        return self._open_sessions.get()

    @property
    def _branching(self) -> "BranchingProcess":
        return self._branching_process.get()

    def _made_sessions(
        self, sessions: SessionSettings, settings: SupervisorSettings
    ) -> "OpenSessions":
        from .open_sessions import OpenSessions
        from .sessions import SessionServices, SkillReplay

        replay = SkillReplay(settings.replaying, self._skills)
        return OpenSessions(
            self._supervisors, self._pipeline, self._ports.get(), self._packaged, self.policy.limits,
            SessionServices(
                sessions, self._branching, self._pausing.get,
                _idle_pauses(sessions, lambda: self._pausing.get().sweep()), replay,
            ),
        )  # fmt: skip

    def _made_programs(self) -> "Programs":
        from .program import Programs

        return Programs(self._ports.get())

    def _way_out(self, user: int | str | None) -> "SandboxEgress | None":
        """Return what leads cells to hosts, if the policy allows them any."""
        if not self.policy.network.allow:
            return None
        from .egress import SandboxEgress  # most policies have no rules

        record = lambda *rule: self._pipeline.record_rule(*rule)  # noqa: E731, PLW0108 - made later
        return SandboxEgress(self.policy, user, record)

    def _shared_files(self, language: str) -> dict[str, SharedFiles]:
        """Return the files that cells of `language` see, by their places."""
        found = {TOOLS: self._tools.shared_files(language)} if self._tools else {}
        return found | ({SKILLS: self._skills.shared_files} if self._skills else {})

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
            is_plain = language == PYTHON and not (wanted or given.packages)
            if self._evaluator and is_plain and (answered := self._evaluator.evaluate(request)):
                return answered
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

    def program(self, given: ProgramArguments) -> "Program":
        def work(on_streams: "OnStreams", cancel: int) -> SandboxResult:
            def perform(request: Request) -> SandboxResult:
                supervisor = self._supervisors.of(PYTHON)  # its process executes the program
                return supervisor.execute(request, cancel=cancel, keep=_once_at_rest)

            environment = self.plan.environment
            return self._pipeline.perform_program(given, environment, on_streams, perform)

        return self._programs.get().start(work)

    def session(self, given: SessionArguments) -> "Session":
        return self._sessions.open(given, self._wanted(given))

    def _made_pausing(self) -> "Pausing":
        from .pausing.pausing import Pausing  # seldom needed

        return Pausing(self._pauses, self._branching)

    def resume(self, token: str) -> "Session":
        return self._sessions.resume(token)

    def discard(self, token: str) -> None:
        self._sessions.discard(token)

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
        if self._egress is None:
            raise PolicyError(
                "network: the policy has no network rules, so cells have nothing to reach others by",
                "name at least one host in [[network.allow]] of the policy",
            )
        return self._egress.rules

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
        sessions = self._open_sessions.made
        paused = sessions.paused() if sessions else 0
        return self._supervisors.state()._replace(paused=paused)

    def settle(self) -> None:
        self._packaged.settle()
        if self._pausing.made:
            self._pausing.made.settle()

    def close(self) -> None:
        self._open_sessions.close()
        self._programs.close()
        self._packaged.close()
        self._branching_process.close()
        self._pausing.close()
        self._ports.close()
        if self._evaluator:
            self._evaluator.close()
        if self._egress:
            self._egress.close()
        self._release_packages()

    def _release_packages(self) -> None:
        if self._packages:
            self._packages.close()


def _checked_workspaces(
    given: "Workspaces | str | os.PathLike[str] | None",
) -> "Workspaces | str | os.PathLike[str] | None":
    if not isinstance(given, str | os.PathLike | None):
        from .workspaces.store import Workspaces

        if not isinstance(given, Workspaces):
            raise PolicyError(f"workspaces: must be Workspaces or their directory, got {given!r}")
    return given


def _evaluator_of(policy: Policy) -> "MontyEvaluator | None":
    """Return what answers pure expressions without a cell, if the policy allows that."""
    if not policy.evaluator.monty:
        return None
    from .monty_evaluator import MontyEvaluator  # an extra

    return MontyEvaluator(policy)


def _private_calls(given: SandboxArguments, policy: Policy) -> "PrivateCalls | None":
    """Return what the argument `privacy` and the policy ask for; None if programs see everything."""
    if given.privacy is None and not policy.privacy.enabled:
        return None
    from .private import private_calls  # seldom needed

    return private_calls(given.privacy, policy)


def _idle_pauses(settings: SessionSettings, sweep: Callable[[], None]) -> "IdlePauses | None":
    if not settings.pauses:
        return None
    from .pausing.idle_pauses import IdlePauses  # seldom needed

    return IdlePauses(settings, sweep)


def _branching_process(user: int | str | None) -> "BranchingProcess":
    from ...runner.branching_process import BranchingProcess  # seldom needed

    return BranchingProcess(interpreter(), 0 if os.geteuid() else id_for(user))


def _sandbox_ports() -> "SandboxPorts":
    from .ports.exposed import SandboxPorts  # seldom needed

    return SandboxPorts()


def _once_at_rest(_: int) -> None:
    """Have the result wait until nothing runs in the cell; other processes may outlive the program."""


def _sandbox_skills(given: "Skills | None", policy: Policy) -> "SandboxSkills | None":
    if given is None:
        return None
    from .sandbox_skills import SandboxSkills  # seldom needed

    return SandboxSkills(given, policy)


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
