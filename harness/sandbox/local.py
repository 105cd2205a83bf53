"""`LocalCells`: the cells, sessions and trail of a `Sandbox` that makes its own cells."""

import os
from collections.abc import Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ...policies.errors import PolicyError
from ...policies.languages import PYTHON, SPOKEN
from ...policies.plan import Plan
from ...policies.policy import Policy
from ...policies.source.findings import Rules
from ...runner.host.ids import id_for
from ...runner.launching.launch import LaunchArguments
from ...runner.launching.spawn import Spawned, interpreter
from ...runner.requests.request import Request
from ...runner.requests.result import SandboxResult
from ...runner.settings import PoolSettings, SessionSettings
from ...runner.shared_files import PLACE as TOOLS
from ...runner.shared_files import SKILLS, SharedFiles
from ...runner.supervisor import Supervisors, SupervisorSettings, SupervisorsState
from .calls.admission import Admission, rules_of
from .checks import (
    check_flag,
    check_interpreters,
    check_language,
    check_pause_settings,
    check_pool,
    check_sessions,
    check_user,
)
from .packaged import MadeOnce, PackagedCells
from .parameters import (
    CallArguments,
    CommandArguments,
    CompileArguments,
    ProgramArguments,
    SessionArguments,
)
from .sandbox_arguments import (
    HostSettings,
    SandboxArguments,
    audit_log_of,
    cgroup_root_of,
    checked_workspaces,
    credentials_of,
    evaluator_of,
    launcher_of,
    packaged,
    policy_of_arguments,
    private_calls_of,
    python_of,
    sandbox_skills,
    sandbox_tools,
    with_store_of,
)

if TYPE_CHECKING:
    from ...policies.languages.table import LanguageTable
    from ...runner.audit.execution_trail import ExecutionTrail
    from ...runner.audit.log import AuditLog
    from ...runner.sessions.branches import BranchingProcess
    from ..privacy.privacy import Privacy
    from .images.image import StoredImage
    from .languages.compiled import Build, TableLanguages
    from .network.cell_credentials import CellCredentials
    from .network.exposed_ports import SandboxPorts
    from .network.network_control import SandboxEgress, SandboxNetwork
    from .programs.program import OnStreams, Program, Programs
    from .pythons import HostPython
    from .sandbox_skills import SandboxSkills
    from .sessions.open_sessions import OpenSessions
    from .sessions.pausing import Pausing
    from .sessions.session import Session
    from .workspaces.workspace_calls import NamedWorkspace
    from .workspaces.workspace_store import Workspaces


class LocalCells:
    """The cells that this process makes."""

    image: "StoredImage | None" = None  # the root of cells, if it is an image
    judge: None = None  # the sandbox itself judges, in cells of siblings

    def __init__(self, given: SandboxArguments) -> None:
        own = policy_of_arguments(given)
        python = python_of(given.host)
        given = replace(given, host=with_store_of(python, given.host))
        self.policy, self._packages = packaged(own, given)
        self._credentials: CellCredentials | None = None
        try:
            self._start(given, own, python)
        except BaseException:
            self._release()
            raise

    def _start(self, given: SandboxArguments, own: Policy, python: "HostPython | None") -> None:
        host = given.host
        pool, sessions, rules = self._check(given)
        language, interpreters = (
            check_language(host.language),
            check_interpreters(host.interpreters),
        )
        self._evaluator = evaluator_of(self.policy)
        self._prepare(given)
        spawned = self._launcher(host, python)
        self._egress = self._way_out(host.user)
        settings = SupervisorSettings(
            spawned.again,
            LaunchArguments(
                self.policy, cgroup_root=cgroup_root_of(host), user=host.user,
                egress=self._egress.process if self._egress else None,
                variables=self._credentials.variables if self._credentials else {},
                files=self._credentials.files if self._credentials else {},
            ),
            pool, interpreters, self._shared_files,
        )  # fmt: skip
        self._branching_process = MadeOnce(partial(_branching_process, host.user))
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
        self._table_languages = MadeOnce(
            partial(self._made_languages, settings, spawned.executable)
        )
        self._ports = MadeOnce(sandbox_ports)
        self._programs = MadeOnce(self._made_programs)
        self._pausing = MadeOnce(self._made_pausing)
        self._open_sessions = MadeOnce(partial(self._made_sessions, sessions, settings))
        try:
            self._serve(rules, sessions)
        except BaseException:
            self.close()
            raise

    def _launcher(self, host: HostSettings, python: "HostPython | None") -> Spawned:
        return launcher_of(host, python)

    def _check(self, given: SandboxArguments) -> tuple[PoolSettings, SessionSettings, Rules]:
        """Return the settings of a sandbox and the rules of its policy; raises PolicyError."""
        host = given.host
        self._given_workspaces = checked_workspaces(given.workspaces)
        self._pauses = check_pause_settings(host.pauses)
        pool, sessions = check_pool(given.pool), check_sessions(given.sessions)
        if sessions.pauses and pool.cells_per_launcher == 1:
            raise PolicyError(
                "sessions.pause_seconds, sessions.memory_bytes: cannot be combined with "
                "pool.cells_per_launcher=1",
                "a paused session keeps its launcher, which takes more memory than its cell",
            )
        self._languages = partial(_language_table, host.languages)
        check_user(host.user)
        cgroup_root_of(host)
        return pool, sessions, rules_of(self.policy.validation)

    def _prepare(self, given: SandboxArguments) -> None:
        """Make the parts of a sandbox that need no cell; raises PolicyError."""
        self.audit = audit_log_of(given)
        self._private = private_calls_of(given, self.policy)
        self._tools = sandbox_tools(given.tools, self.policy, self.audit, self._private)
        self._skills = sandbox_skills(given.skills, self.policy)
        self._credentials = credentials_of(given, self.policy)

    def _serve(self, rules: Rules, sessions: SessionSettings) -> None:
        self._trail = _trail_of(self.audit, self.plan)
        self._admission = Admission(
            self.policy, self.plan.layers, rules, self._trail, self._tools, self._private
        )
        self._admission.languages = self._languages
        if self._skills:
            self._skills.has_tool = self._admission.has_tool
            self._admission.on_failure = self._skills.note
            self._skills.execute = self.execute
        if sessions.pauses:
            _ = self._sessions  # starts the search for idle sessions
        if self._egress:
            self._egress.listen()

    @property
    def _sessions(self) -> "OpenSessions":
        """The sessions, made at first use: a command that runs one program does not import them."""
        return self._open_sessions.get()

    @property
    def _branching(self) -> "BranchingProcess":
        return self._branching_process.get()

    def _made_sessions(
        self, sessions: SessionSettings, settings: SupervisorSettings
    ) -> "OpenSessions":
        from .sessions.life import IdlePauses, SessionServices
        from .sessions.open_sessions import OpenSessions

        sweep = lambda: self._pausing.get().sweep()  # noqa: E731
        services = SessionServices(
            self._supervisors, self._admission, self._ports.get(), sessions, self._branching,
            self._pausing.get, settings.replaying, self._skills,
            IdlePauses(sessions, sweep) if sessions.pauses else None, self.image,
        )  # fmt: skip
        return OpenSessions(services, self._packaged, self.policy.limits)

    def _made_languages(self, settings: SupervisorSettings, executable: str) -> "TableLanguages":
        from .languages.compiled import TableLanguages, opened_build_store

        return TableLanguages(
            self.policy, self._languages(), settings, executable, opened_build_store()
        )

    def _made_programs(self) -> "Programs":
        from .programs.program import Programs

        return Programs(self._ports.get())

    def _way_out(self, user: int | str | None) -> "SandboxEgress | None":
        """Return the egress of cells, if the policy allows any hosts."""
        if not self.policy.network.allow:
            return None
        from .network.network_control import SandboxEgress  # most policies have no rules

        record = lambda *rule: self._admission.record_rule(*rule)  # noqa: E731, PLW0108 - made later
        secrets = self._credentials.encoded if self._credentials else b""
        return SandboxEgress(self.policy, user, record, secrets)

    def _shared_files(self, language: str) -> dict[str, SharedFiles]:
        found = {TOOLS: self._tools.shared_files(language)} if self._tools else {}
        return found | ({SKILLS: self._skills.shared_files} if self._skills else {})

    @property
    def plan(self) -> Plan:
        return self.supervisor.plan

    def execute(self, given: CallArguments) -> SandboxResult:
        """Check a call, execute its program in a cell, and record both."""
        wanted = None
        if given.workspace is not None or given.clean is not False:
            wanted = self._wanted(given)
        call = self._admission.admit(given)
        if isinstance(call, SandboxResult):  # the call was rejected
            return call
        with call:
            result = self.perform(call.request, call.language, given, wanted)
        return call.end(result)

    def perform(
        self, request: Request, language: str, given: CallArguments,
        wanted: "NamedWorkspace | None",
    ) -> SandboxResult:  # fmt: skip
        """Execute the request of a call whose start was recorded."""
        if language not in SPOKEN:
            return self._execute_compiled(request, language, wanted, given)
        if wanted or given.packages or self._evaluator or self._packaged.learns:
            return self._execute_otherwise(request, language, wanted, given.packages)
        return self._supervisors.of(language).execute(request)

    def _execute_otherwise(
        self, request: Request, language: str, wanted: "NamedWorkspace | None",
        packages: Sequence[str],
    ) -> SandboxResult:  # fmt: skip
        """Execute a call without a cell if that is enough, with packages, or in a named workspace."""
        is_plain = language == PYTHON and not (wanted or packages)
        if self._evaluator and is_plain and (answered := self._evaluator.evaluate(request)):
            return answered
        seconds = request.limits.wall_seconds
        with self._packaged.lease(packages, language, seconds, request.cancel) as lease:
            if wanted:
                from .workspaces.workspace_calls import execute_in

                result = execute_in(wanted, lease.supervisor, request)
                about = request.execution_id
                self._admission.record_workspace(result.workspace, execution_id=about)
            else:
                result = lease.supervisor.execute(request)
        if lease.look_at and result.ok:
            lease.look_at(request.code)
        return result

    def _execute_compiled(
        self, request: Request, language: str, wanted: "NamedWorkspace | None",
        given: CallArguments,
    ) -> SandboxResult:  # fmt: skip
        if given.packages:
            raise PolicyError(f"packages: only Python programs have them, got {language}")
        record = self._admission.record_compiler
        prepared = self._table_languages.get().prepare(given, request, record)
        if isinstance(prepared, SandboxResult):
            return prepared
        if wanted:
            from .workspaces.workspace_calls import execute_in

            result = execute_in(wanted, prepared.supervisor, prepared.request)
            about = request.execution_id
            self._admission.record_workspace(result.workspace, execution_id=about)
        else:
            result = prepared.supervisor.execute(prepared.request)
        return replace(result, compile=prepared.compile)

    def compile(self, given: CompileArguments) -> "Build":
        return self._table_languages.get().compile(given, self._admission.record_compiler)

    def program(self, given: ProgramArguments) -> "Program":
        if self._credentials:
            self._credentials.require_hidden(given.env or {}, "of the command", given.argv)

        def work(on_streams: "OnStreams", cancel: int) -> SandboxResult:
            call = self._admission.admit_program(given, self.plan.environment, on_streams, cancel)
            with call:
                result = self.perform_program(call.request)
            return call.end(result)

        return self._programs.get().start(work)

    def perform_program(self, request: Request) -> SandboxResult:
        """Run a long-lived program: Python's supervisor starts the process that becomes it."""
        return self._supervisors.of(PYTHON).execute(request, keep=_once_at_rest)

    def session(self, given: SessionArguments, why: str = "") -> "Session":
        return self._sessions.open(given, self._wanted(given), why)

    def _made_pausing(self) -> "Pausing":
        from .sessions.pausing import Pausing  # seldom needed

        return Pausing(self._pauses, self._branching)

    def resume(self, token: str) -> "Session":
        return self._sessions.resume(token)

    def discard(self, token: str) -> None:
        self._sessions.discard(token)

    def _wanted(self, given: CallArguments | SessionArguments) -> "NamedWorkspace | None":
        clean = check_flag("clean", given.clean)
        if given.workspace is not None:
            from .workspaces.workspace_calls import NamedWorkspace  # seldom needed

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
        from .workspaces.workspace_store import workspaces_of

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
        return self._admission.with_tokens(given)

    def has_tool(self, name: str) -> bool:
        return self._admission.has_tool(name)

    def validate_source(self, code: str) -> tuple[bool, str | None]:
        findings = self._admission.check(code, "python")
        return (False, str(findings[0])) if findings else (True, None)

    def state(self) -> SupervisorsState:
        sessions = self._open_sessions.made
        paused = sessions.paused() if sessions else 0
        return self._supervisors.state()._replace(paused=paused)

    def settle(self) -> None:
        self._packaged.settle()
        if self._table_languages.made:
            self._table_languages.made.settle()
        if self._pausing.made:
            self._pausing.made.settle()

    def close(self) -> None:
        self._open_sessions.close()
        self._programs.close()
        self._packaged.close()
        self._table_languages.close()
        self._branching_process.close()
        self._pausing.close()
        self._ports.close()
        if self._evaluator:
            self._evaluator.close()
        if self._egress:
            self._egress.close()
        self._release()

    def _release(self) -> None:
        if self._credentials:
            self._credentials.close()
        if self._packages:
            self._packages.close()


def _branching_process(user: int | str | None) -> "BranchingProcess":
    from ...runner.sessions.branches import BranchingProcess  # seldom needed

    return BranchingProcess(interpreter(), 0 if os.geteuid() else id_for(user))


def sandbox_ports() -> "SandboxPorts":
    """Return what exposes the ports of the cells of a sandbox."""
    from .network.exposed_ports import SandboxPorts  # seldom needed

    return SandboxPorts()


def _once_at_rest(_: int) -> None:
    """Have the result wait until nothing runs in the cell; other processes may outlive the program."""


def _trail_of(log: "AuditLog | None", plan: Plan) -> "ExecutionTrail | None":
    if log is None:
        return None
    from ...runner.audit.execution_trail import ExecutionTrail

    return ExecutionTrail(log, plan)


def _language_table(more: str | os.PathLike[str] | None) -> "LanguageTable":
    from ...policies.languages.table import language_table  # seldom needed

    return language_table(more)
