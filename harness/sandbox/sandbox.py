"""`Sandbox`: runs untrusted code in cells, which this process or a daemon makes."""

import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from msgspec.structs import replace

from ...policies.errors import LaunchError, PolicyError
from ...policies.languages import PYTHON
from ...policies.plan import Plan
from ...policies.policy import Policy
from ...runner.requests.request import OnOutput, Request
from ...runner.requests.result import SandboxResult
from ...runner.settings import PoolSettings, SessionSettings
from . import parameters
from .calls.evaluating import Evaluating
from .calls.executing import close_unused, in_asyncio
from .checks import check_host_path, worker_count
from .sandbox_arguments import SandboxArguments

if TYPE_CHECKING:
    from ...policies.languages.table import LanguageTable
    from ...policies.source.findings import Rules
    from ...runner.audit.log import AuditLog
    from ...runner.host.interpreters import HostLanguage
    from ...runner.supervisor import SupervisorsState
    from ..privacy.privacy import Privacy
    from ..skills.skills import Skills
    from .calls.sandbox_tools import Offered
    from .containers.own_kernel import OwnKernelCalls
    from .judging.judge import Submission
    from .judging.verdicts import Case, JudgeLimits, Judgement
    from .languages.compiled import Build
    from .local import LocalCells
    from .network.network_control import SandboxNetwork
    from .packages.package_store import PackageStore
    from .programs.program import Program
    from .programs.terminal import Terminal
    from .projects.project_run import ProjectRun
    from .remote.daemon_client import DaemonsCells
    from .sandbox_skills import SandboxSkills
    from .sessions.session import Session
    from .workspaces.workspace_store import Workspaces

    _Cells = LocalCells | DaemonsCells | OwnKernelCalls

__all__ = ["Sandbox"]


def _arguments_of(config: Any = None, **given: Any) -> SandboxArguments:
    """Return what a caller of `Sandbox` gave, also by the keywords of older versions.

    Raises TypeError for unknown ones, PolicyError for an argument that is given by both names.
    """
    if isinstance(config, SandboxArguments) and not given:
        return config
    if given.keys() <= set(SandboxArguments.__struct_fields__):
        return SandboxArguments(config, **given)
    from .faces.old_arguments import read  # seldom needed

    return read(config, given)


class Sandbox(Evaluating):
    """Runs untrusted code, each call in a cell of its own.  Safe from many threads.

        with Sandbox(policy="standard") as sandbox:
            result = sandbox.execute("print('hello'); 6 * 7")
            print(result.ok, result.stdout, result.value)

    `Sandbox()` denies everything and requires every layer.  Arguments:

    config      SandboxConfig: named permissions and limits; or anything that `policy` takes
    policy      a profile, the path of a TOML file, a mapping like one, a Policy or PermissionSet
    gpu         True: programs have the NVIDIA GPUs of this host; or names, such as ["nvidia0"]
    image       the root of programs: an image's name, or the path of a layout, tar or directory
    packages    requirements such as "pandas==2.3.*", or a pylock.toml or requirements file
    tools       functions or Tools that programs may call, a Broker, a ToolFactory or McpServers
    skills      Skills whose files programs see below /skills; the policy must have no network rules
    workspaces  the Workspaces that calls may name, or their directory
    audit       AuditLog to write to, which the caller closes; default one in memory; False for none
    privacy     Privacy: programs and models see tokens in place of personal data
    credentials "NAME=ENV@HOST": programs have a placeholder in NAME, and HOST gets the value of ENV
    pool        how many cells wait ready, default 8 (0: each call makes its own), or PoolSettings
    sessions    SessionSettings: how many sessions live at once, and for how long
    host        HostSettings: interpreter, container, cgroup and other parts of the host
    connect     socket of a daemon (`cellwright serve`), whose cells and policies are used
    workers     processes that make the cells, default 1, this one; "auto": by the processors

    Raises PolicyError for invalid arguments, Unenforceable if this host lacks a required layer,
    LaunchError if cells cannot be built or no daemon answers, PackageError for missing packages.
    For asyncio there are `await Sandbox.create(...)`, `aexecute`, `arun` and so on.  Methods:

    execute, start, map               run a program; in the background; many of them
    run, program, terminal            run a command; a long-lived one with pipes; one at a terminal
    exec                              run a command, such as a coding agent, on a project
    session, resume, discard          keep variables and files between calls; go on with a paused one
    compile, judge                    compile a program; judge one by its cases
    validate_source, languages        check source without running it; what this host can run
    policy, plan, layers, language    properties: what every cell may do, and by what it is confined
    audit, workspaces, network        properties: trail, workspaces, rules of the network
    skills, privacy, package_store    properties: as given
    create, settle, close, aclose     make it in asyncio; wait until the pool is full; end it
    """

    _fields = ("execute",)  # pydoc lists it first (pydoc.sort_attributes)
    execute = Evaluating.execute

    @parameters.takes(SandboxArguments, _arguments_of)
    def __init__(self, given: SandboxArguments) -> None:
        self._own(given, _cells_of(given))

    def _own(self, given: SandboxArguments, cells: "_Cells") -> None:
        self._given = given
        self._cells = cells
        self._finalizer = weakref.finalize(self, _close_forgotten, cells, os.getpid())

    @classmethod
    @parameters.takes(SandboxArguments, _arguments_of)
    async def create(cls, given: SandboxArguments) -> Self:
        """Return a sandbox, made in a thread, so that the event loop goes on meanwhile.

        The arguments and exceptions are those of `Sandbox`.  A sandbox that is made after its task was
        cancelled is closed.
        """
        from .calls.background import in_thread  # asyncio takes 40 ms to import

        made: Callable[..., Self] = cls
        return await in_thread(lambda: made(given), discard=cls.close)

    @property
    def _at_once(self) -> int:
        pool = self._given.pool
        return (pool if isinstance(pool, PoolSettings) else PoolSettings()).running

    @property
    def policy(self) -> Policy:
        """The plan of every cell of this sandbox."""
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
        return self._given.host.package_store

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers in force around every cell of this sandbox."""
        return self.plan.layers

    @property
    def _cell_python(self) -> tuple[str, ...]:
        """The command of a Python in its cells; an image may have none of its own."""
        return getattr(self._cells, "python", ("python3",))

    def has_tool(self, name: str) -> bool:
        return self._cells.has_tool(name)

    def _with_tokens(self, given: parameters.CommandArguments) -> parameters.CommandArguments:
        return self._cells.with_tokens(given)

    def _language_table(self) -> "LanguageTable":
        from ...policies.languages.table import language_table

        return language_table(self._given.host.languages)

    def languages(self) -> "tuple[HostLanguage, ...]":
        """Return the languages that programs can have here, each with what this host lacks for it."""
        from ...runner.host.interpreters import host_languages
        from ...runner.host.runtime import find_runtime
        from ...runner.launching.spawn import interpreter

        host, runtime = self._given.host, find_runtime(interpreter())
        own = {name: os.fspath(path) for name, path in host.interpreters.items()}
        found = host_languages(self._language_table(), runtime, own)
        return found[:1] if host.rootfs or self._given.image else found  # others are not the host's

    def _compile(self, given: parameters.CompileArguments) -> "Build":
        return self._cells.compile(given)

    def _judged(self, given: "Submission", cases: "Sequence[Case]") -> "Judgement":
        if judge := self._cells.judge:
            return judge(given, cases)
        return super()._judged(given, cases)

    def _default_limits(self) -> "JudgeLimits":
        limits = super()._default_limits()
        return limits.within(self.policy.limits) if self._cells.judge else limits

    def _execute(self, given: parameters.CallArguments) -> SandboxResult:
        return self._cells.execute(given)

    def session(
        self, id: str | None = None, language: str = PYTHON, *, workspace: str | None = None,
        clean: bool = False, packages: Sequence[str] = (), requirements: Sequence[str] = (),
    ) -> "Session":  # fmt: skip
        """Return a session: a cell that keeps variables and files from one call to the next.

        `id`: return the session of that name if it lives, else open one of that name. `workspace`:
        start with the files of that workspace, and save them when the session ends. `clean`: remove
        that workspace when the session is closed. `packages`, or `requirements`: packages that its
        programs can import in addition to those of the sandbox. Raises PolicyError for an unknown
        language, or another one than that of the session that lives; BusyError if too many sessions
        live and all are busy, or if the workspace is in use; LaunchError if no cell could be built or
        the language is not installed; WorkspaceError, PackageError.
        """
        if id is not None and not (isinstance(id, str) and id):
            raise PolicyError(f"id: must be a text that is not empty, got {id!r}")
        given = parameters.SessionArguments.of(
            "session", id=id, language=language, workspace=workspace, clean=clean,
            packages=packages, requirements=requirements,
        )  # fmt: skip
        return self._cells.session(given)

    def resume(self, token: str) -> "Session":
        """Return the session that `pause` of a session returned `token` for, in a fresh cell.

        It goes on from the state that it had, and has the id that it had.  The token cannot be used
        again; if this raises it can.  Raises PauseDiffers if what the session needs is different by
        now, PauseError if the token or its state is invalid, expired, or in use, or if a session of
        that id lives; and what `session` raises.
        """
        return self._cells.resume(token)

    aresume = in_asyncio(resume, close_unused)

    def discard(self, token: str) -> None:
        """Remove the state of a paused session, which cannot be resumed then.

        Raises PauseError if the token or the beginning of its state is invalid, expired, or in use.
        """
        self._cells.discard(token)

    def program(
        self, argv: Sequence[str] = (), *, env: Mapping[str, str] | None = None,
        cwd: str | None = None, user: str | None = None,
        files: Mapping[str, parameters.FileContent] | None = None, trace_id: str | None = None,
        terminal: tuple[int, int] | None = None, on_output: OnOutput | None = None,
    ) -> "Program":  # fmt: skip
        """Start a program in a cell of its own and return it; its streams are pipes to this process.

        `argv[0]`: its path as the cell sees it, or a name to look for in PATH; the policy must let it
        be executed; without `argv` an image's own command runs. `env`: variables in addition to the
        policy's. `cwd`: its directory, default /workspace, or the image's. `user`: as `run` has it.
        `files`: path below /workspace -> content, put there before it starts. `terminal`:
        rows and columns of a terminal that it gets in place of pipes. `on_output`: called with its
        standard error as it comes. The policy's limits are those of its whole life.

        Raises PolicyError for invalid arguments or a policy without subprocesses, BusyError if too many
        programs live, ClosedError after `close`, LaunchError if no cell could be built.
        """
        given = parameters.ProgramArguments.of(
            "program", argv=argv, env=env, cwd=cwd, user=user, files=files, trace_id=trace_id,
            terminal=terminal,
        )  # fmt: skip
        given = replace(given, on_output=on_output)
        return self._cells.program(given)

    def exec(
        self, command: Sequence[str], *, project: str | os.PathLike[str] = ".",
        allow: Sequence[str] = (), allow_registries: bool = False, variables: Sequence[str] = (),
        read: Sequence[str] = (), write: Sequence[str] = (), protect: Sequence[str] = (),
        unprotect: Sequence[str] = (), credentials: Sequence[str] = (), review: bool = False,
        cwd: str | None = None, terminal: tuple[int, int] | None = None,
        on_output: OnOutput | None = None,
    ) -> "ProjectRun":  # fmt: skip
        """Start a command that works on a project, in a cell of its own, and return it.

        `project`: the directory that it may change, but for what other programs obey, such as
        .git/hooks; the work tree of git around it if there is one. `allow`: hosts by name, with a port
        after a colon if it is not 443; `allow_registries`: those of package managers. `variables`: of
        this process, or NAME=VALUE. `read`, `write`: further paths. `protect`, `unprotect`: paths in
        the project. `credentials`: NAME=ENV@HOST; the command has a placeholder in the variable NAME,
        and the host gets the value of this process's ENV. `review`: leave the project as it is; changes
        wait for `cellwright changes`.
        `cwd`: default here. `terminal`, `on_output`: as `program` has them. The policy of
        the sandbox, such as "project", gives the limits.

        Raises PolicyError, LaunchError.
        """
        from ...policies.network.credential import credential_of
        from .projects.project import find_project
        from .projects.project_policy import ProjectOptions, policy_of_project
        from .projects.project_run import ONE_CELL, ProjectRun

        if self._given.image is not None:
            raise PolicyError("exec: cannot be combined with an image", "sandbox.program([...])")
        found = find_project(project, protect=tuple(protect), unprotect=tuple(unprotect))
        wanted = ProjectOptions(
            allow=tuple(allow), registries=allow_registries, variables=tuple(variables),
            read=tuple(read), write=tuple(write), review=review,
            credentials=tuple(map(credential_of, credentials)),
        )  # fmt: skip
        shown = policy_of_project(self.policy, found, command, wanted)
        options = {"terminal": terminal, "on_output": on_output}

        def open_sandbox() -> "tuple[Sandbox, Callable[..., Program]]":
            own = Sandbox(
                policy=shown.policy, pool=ONE_CELL, audit=self.audit or False,
                credentials=wanted.credentials,
            )  # fmt: skip
            return own, own.program

        return ProjectRun(shown, open_sandbox, command, cwd=cwd, **options)

    def terminal(
        self,
        command: Sequence[str] | None = None,
        *,
        workspace: str | None = None,
        packages: Sequence[str] = (),
        requirements: Sequence[str] = (),
        **options: Unpack[parameters.TerminalOptions],
    ) -> "Terminal":
        """Start a command, by default a shell, at a terminal in a cell of its own.

        As `Session.terminal` of a new session, which is closed with the terminal; `workspace`,
        `packages` and `requirements` are those of `session`.
        """
        given = parameters.TerminalArguments.of("terminal", command=command, **options)
        session = self.session(workspace=workspace, packages=packages, requirements=requirements)
        try:
            terminal = session._terminal(given)
        except BaseException:
            session.close()
            raise
        terminal.ends_with(session)
        return terminal

    aterminal = in_asyncio(terminal, close_unused)

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
        python: str | None = None, workers: int | Literal["auto"] = 1,
    ) -> "Sandbox":  # fmt: skip
        """Return a sandbox of another policy with the same interpreter, unless `python` names another,
        and the same image, cgroups, uid, source checks and trail; without the image if the policy lets
        no program of it be executed.

        `rules` are for source checks, in place of the policy's own.  Personal data is that of this
        sandbox, or only of the client that `private_to` names.
        """
        given = self._given
        if given.connect is not None:
            raise PolicyError("connect: a daemon makes cells for its own policies only")
        from .calls.admission import with_rules  # a client of a daemon has no use for it

        executes = policy.processes.subprocesses and policy.processes.execute_own
        other = Sandbox(
            policy=with_rules(policy, rules) if rules else policy, pool=pool, tools=tools,
            audit=self.audit or False, skills=skills, sessions=sessions, privacy=self.privacy,
            host=given.host.beside(python), workers=workers,
            image=given.image if executes else None,
        )  # fmt: skip
        other._cells.private_to(private_to)
        return other

    def _room(self, policy: Policy, pool: PoolSettings) -> "Sandbox":
        return self.sibling(policy, pool, workers=self._given.workers)

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

    def _probe(self, seconds: float = 5.0) -> None:
        """Run an empty program in a cell, of which the trail has no record; raises CellwrightError if
        none runs."""
        limits = self.policy.limits
        limits = replace(limits, wall_seconds=min(limits.wall_seconds, seconds))
        code = "pass"
        request = Request(code=code, limits=limits)
        result = self._cells.perform(request, PYTHON, parameters.CallArguments(code=code), None)
        if not result.ok:
            raise LaunchError(f"an empty program ended with {result.reason}: {result.error}")

    def settle(self) -> None:
        """Wait until the pool is full and nothing of any earlier call is left."""
        self._cells.settle()

    def close(self) -> None:
        """End every execution and leave nothing behind; closing twice is fine.

        A daemon keeps its pool, its sessions and the calls of other clients.
        """
        if self._finalizer.detach():
            self._cells.close()
        self._close_judge()
        self._close_aexecutor()


def _close_forgotten(cells: "_Cells", owner: int) -> None:
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


def _cells_of(given: SandboxArguments) -> "_Cells":
    if given.connect is None and given.host.backend == "oci":
        from .containers.own_kernel import own_kernel_calls  # seldom needed

        if calls := own_kernel_calls(given):
            return calls
    if given.connect is None and given.image is not None:
        if worker_count(given.workers) > 1:
            from .workers.worker_images import WorkerImageCells  # seldom needed

            return WorkerImageCells(given)
        from .containers.image_cells import ImageCells  # seldom needed

        return ImageCells(given)
    if given.connect is None:
        if worker_count(given.workers) > 1:
            from .workers.worker_cells import WorkerCells  # most sandboxes have none

            return WorkerCells(given)
        from .local import LocalCells  # a client of a daemon makes no cells

        return LocalCells(given)
    local = [name for name in given.changed() if name not in ("connect", "policy")]
    if local:
        raise PolicyError(
            f"connect: cannot be combined with {', '.join(local)}",
            'the daemon decides them: by its policies, and by options of "cellwright serve"',
        )
    from .remote.daemon_client import DaemonsCells

    return DaemonsCells(check_host_path("connect", given.connect), given.policy)
