"""`CellSession`, a session in a cell of this process, and `OpenSessions`, those of one sandbox."""

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from ...policies.errors import PauseError, PolicyError
from ...policies.plan import Plan
from ...policies.policy import Limits, check_limit
from ...runner.capture import OnOutput
from ...runner.concurrency import NEVER
from ...runner.request import Request
from ...runner.result import SandboxResult, SandboxStatus
from ...runner.session import SessionCell
from ...runner.supervisors import Supervisors
from ...runner.workspace import KeptWorkspace, WorkspaceFile, list_files, read_file, room
from .archive import files_of, pack
from .checks import check_flag
from .history import History, outcome_of
from .packaged import Lease, PackagedCells
from .parameters import CallArguments, CommandArguments, SessionArguments, TerminalArguments
from .pipeline import RequestPipeline
from .ports.exposed import ExposedPort, ExposedPorts, SandboxPorts
from .request import Rejected, check_language
from .session import Session, own

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ...runner.branching_process import BranchingProcess
    from ...runner.held_cell import HeldCell
    from ..skills.store import KeptSkill, SkillStore
    from .pausing.pausing import Pausing
    from .sandbox_skills import SandboxSkills
    from .skill_saving import MakeSupervisor
    from .terminal import Terminal
    from .workspaces.calls import NamedWorkspace, SessionWorkspace


class SkillReplay(NamedTuple):
    """What tries a skill that is made of a session: a launcher whose cells see it below /skills."""

    make: "MakeSupervisor"
    skills: "SandboxSkills | None" = None  # of the sandbox: a kept skill is added to them


class CellSession(Session):
    """A session whose cell this process made."""

    def __init__(
        self,
        id: str,
        cell: SessionCell,
        pipeline: RequestPipeline,
        another: "Callable[[str], CellSession]",
        branching: "BranchingProcess",
        pausing: "Callable[[], Pausing]",
        ports: ExposedPorts,
        lease: Lease,
        packages: tuple[str, ...] = (),
        kept_in: "SessionWorkspace | None" = None,
        replay: "SkillReplay | None" = None,
    ) -> None:
        """`lease`: of the launcher, returned when the session ends; `packages`: what it was opened
        with; `replay`: tries the skills that are made of it."""
        self.id = id
        self.packages = packages
        self._cell = cell
        self._limits = cell.limits
        self._pipeline = pipeline
        self._another = another
        self._branching = branching
        self._pausing = pausing
        self._ports = ports
        self._lease = lease
        self._kept_in = kept_in
        self._replay = replay
        self._history = History()
        cell.on_begin = self._history.begin
        cell.on_end = self._end
        cell.on_last_network = partial(pipeline.record_network, id)

    @property
    def language(self) -> str:
        return self._cell.language

    @property
    def lost(self) -> str:
        return self._cell.lost

    @property
    def expired(self) -> str:
        return self._cell.expired

    @property
    def workspace(self) -> KeptWorkspace | None:
        return self._kept_in.kept if self._kept_in else None

    def has_tool(self, name: str) -> bool:
        return self._pipeline.has_tool(name)

    def _with_tokens(self, given: CommandArguments) -> CommandArguments:
        return self._pipeline.with_tokens(given, self.id)

    def _execute(
        self, given: CallArguments, on_output: OnOutput | None, cancel: int
    ) -> SandboxResult:
        def perform(language: str, request: Request) -> SandboxResult:
            if language != self.language:
                raise PolicyError(
                    f"language: this session runs {self.language} only, got {language}"
                )
            return self._cell.execute(request, told, cancel)

        with self._pipeline.streamed(on_output, self.id) as told:
            result = self._pipeline.perform(own(given), perform, self.id)
        if result.ok and (look_at := self._lease.look_at):
            look_at(given.code)
        if result.status is not SandboxStatus.REJECTED and result.phases.run:  # it was executed
            self._history.add(given, result)
        return replace(result, workspace=self.workspace) if result.session_lost else result

    def download(self, path: str) -> bytes:
        if not isinstance(path, str):
            raise PolicyError(f"path: must be text, got {path!r}")
        with self._cell.held() as workspace:
            return read_file(workspace, path, room(workspace))

    def files(self) -> tuple[WorkspaceFile, ...]:
        with self._cell.held() as workspace:
            listing = list_files(workspace)
        return tuple(WorkspaceFile(path, seen.size_bytes) for path, seen in sorted(listing.items()))

    def snapshot(self) -> bytes:
        with self._cell.held() as workspace:
            return pack(files_of(workspace))

    def save(self) -> KeptWorkspace:
        return self._kept_in.save() if self._kept_in else super().save()

    def check_workspace(self, wanted: "NamedWorkspace | None") -> None:
        """Raise PolicyError if `wanted` is another workspace than that of this session."""
        if wanted and (self._kept_in is None or self._kept_in.name != wanted.name):
            raise PolicyError(f"workspace: session {self.id!r} does not use {wanted.name!r}")

    def expose(
        self, port: int, *, path: str | os.PathLike[str] | None = None, host_port: int | None = None
    ) -> ExposedPort:
        return self._ports.expose(self._cell.network(), port, path, host_port)

    def extend(self, seconds: float) -> None:
        check_limit("seconds", seconds)
        self._cell.extend(seconds)

    def freeze(self) -> bool:
        return self._cell.freeze()

    def _terminal(self, given: TerminalArguments) -> "Terminal":
        if not self._pipeline.policy.processes.terminal:
            raise PolicyError(
                "terminal: the policy allows none",
                "use policy='workshop', or set processes.terminal in yours",
            )
        from ...runner.terminal import open_terminal, resize  # seldom needed
        from .terminal import Terminal, check_size, command_of

        size = check_size(given.rows, given.columns)
        command = command_of(given)
        with contextlib.ExitStack() as undone:
            self._cell.begin_use()
            undone.callback(self._cell.end_use)
            with self._cell.held() as workspace:
                opened = open_terminal(workspace)
            undone.callback(os.close, opened.master)
            resize(opened.master, *size)
            process = self._processes().start(command, opened.path)
            undone.pop_all()
        return Terminal(opened.master, process, self._cell.end_use)

    def _end(self, action: str, why: str) -> None:
        self._ports.close()
        self._lease.close()
        self._pipeline.record_session(self.id, action, why)

    def save_skill(
        self, name: str, description: str, *,
        files: Sequence[str] | Mapping[str, str | bytes] | None = None, body: str = "",
        tests: str = "", task: str = "", model: str = "", allowed_tools: Sequence[str] = (),
        store: "SkillStore | None" = None, trust: bool = False, allow_similar: bool = False,
        maker: str = "",
    ) -> "KeptSkill":  # fmt: skip
        from .skill_saving import SkillDraft, check_texts, drafted, keep, try_out

        if self._replay is None:
            return super().save_skill(name, description)
        draft = SkillDraft(name, description, body, tests, task, model, allowed_tools, maker)
        check_texts(draft)
        given, origin = self._files_of_skill(name, files)
        skill = drafted(draft, given, self.language, origin)
        self._pipeline.check_tokens(
            {path: each.content for path, each in skill.tree.files.items()}, self.id
        )
        policy = self._lease.supervisor.policy
        pipeline = self._pipeline.without_tools()
        try_out(skill, tests, self.language, pipeline, policy, self._replay.make)
        return keep(skill, store, self._replay.skills, trust=trust, allow_similar=allow_similar)

    def _files_of_skill(
        self, name: str, files: Sequence[str] | Mapping[str, str | bytes] | None
    ) -> tuple[Mapping[str, str | bytes], str]:
        """Return the files of a skill, and where they come from."""
        from .skill_saving import chosen, script_of

        if isinstance(files, Mapping):
            return files, "given"
        if isinstance(files, str):
            raise PolicyError(f"files: must be a list of globs, got {files!r}")
        if files is not None:
            there = [each.path for each in self.files()]
            return chosen(files, there, self.download), "workspace"
        programs = [call.given.code for call in self._history.calls() if call.is_ok]
        texts = [
            each if isinstance(each, str) else each.decode(errors="replace") for each in programs
        ]
        return {script_of(name, self.language): "\n".join(texts) + "\n"}, "history"

    def fork(self) -> "CellSession":
        calls = self._history.calls()
        branch = self._another(f"a fork of {self.id}")
        branch.forked_by = "replay"
        try:
            self._pipeline.continue_session(self.id, branch.id)
            branch.diverged = tuple(
                number
                for number, call in enumerate(calls, 1)
                if outcome_of(branch._execute(call.given, None, NEVER)) != call.outcome
            )
        except BaseException:
            branch.close()
            raise
        return branch

    def branch(
        self, n: int = 1, reseed: bool = False, *, replay: bool = True
    ) -> tuple[Session, ...]:
        from .branching import branch, check_branches  # seldom needed

        check_flag("reseed", reseed)
        may_replay = check_flag("replay", replay)
        return branch(
            self, check_branches(n), reseed=reseed, may_replay=may_replay, another=self._another,
            process=self._branching,
        )  # fmt: skip

    def pause(self) -> str:
        if self._kept_in:
            raise PolicyError(
                "pause: a session with a named workspace cannot be paused", "save() it"
            )
        return self._pausing().pause(self)

    def fresh_cell(self) -> "AbstractContextManager[HeldCell]":
        """Lend a cell of the launcher that makes those of such sessions now."""
        return self._lease.supervisor.fresh_cell()

    @property
    def cell(self) -> SessionCell:
        return self._cell

    @property
    def plan(self) -> Plan:
        return self._lease.supervisor.plan

    def take_history(self, source: "CellSession") -> None:
        """Go on from the calls of `source`, of which this is a branch."""
        self._pipeline.continue_session(source.id, self.id)
        self._history = source._history.copy()
        self._cell.on_begin = self._history.begin

    def forget_calls(self) -> None:
        """Keep a fork or a skill from being made of the calls so far: this session was paused."""
        self._history.forget("pause: the calls from before a session was paused are not kept")

    def close(self) -> None:
        """End the session and save its named workspace, if any; closing twice is fine.

        A running call is killed, and its result says that it was cancelled.  Raises WorkspaceError if
        the workspace cannot be saved.
        """
        self._close_aexecutor()
        kept_in = None if self.lost else self._kept_in
        if kept_in:
            kept_in.complete()
        self._cell.end("it was closed", "closed")
        if kept_in and self.lost:  # not so in a forked child, which ends nothing
            kept_in.finish()


class OpenSessions:
    """The sessions of one sandbox, by id."""

    def __init__(
        self, supervisors: Supervisors, pipeline: RequestPipeline, ports: SandboxPorts,
        packaged: PackagedCells, limits: Limits, branching: "BranchingProcess",
        pausing: "Callable[[], Pausing]",
        replay: "SkillReplay | None" = None,
    ) -> None:  # fmt: skip
        """`limits`: of the policy; a set of packages is built within their wall time.  `replay` tries
        the skills that are made of sessions."""
        self._supervisors = supervisors
        self._pipeline = pipeline
        self._ports = ports
        self._packaged = packaged
        self._limits = limits
        self._replay = replay
        self._branching = branching
        self._pausing = pausing
        self._lock = threading.Lock()
        self._by_id: dict[str, CellSession] = {}

    def open(
        self, given: SessionArguments, wanted: "NamedWorkspace | None" = None, why: str = ""
    ) -> CellSession:
        """Return the session of an id, or a new one, of which the trail says `why` it was opened."""
        language = _language(given.language)
        with self._lock:
            if known := self._known(given, wanted, language):
                return known
        # Without blocking other sessions meanwhile: the set may have to be built.
        lease = self._packaged.lease(given.packages, language, self._limits.wall_seconds)
        try:
            return self._open_new(given, wanted, language, lease, why)
        except BaseException:
            lease.close()
            raise

    def resume(self, token: str) -> CellSession:
        """Return the session that was paused; raises PauseError."""
        return self._pausing().resume(token, self.open_new)

    def discard(self, token: str) -> None:
        """Remove the state of a paused session; raises PauseError."""
        self._pausing().discard(token)

    def open_new(self, given: SessionArguments, why: str) -> CellSession:
        """Return a new session; raises PauseError if one of that id lives."""
        with self._lock:
            known = self._by_id.get(given.id or "")
        if known and not known.lost:
            raise PauseError(
                f"token: a session of its id lives: {given.id!a}", "close that session"
            )
        return self.open(given, None, why)

    def _known(
        self, given: SessionArguments, wanted: "NamedWorkspace | None", language: str
    ) -> CellSession | None:
        """Return the session of that id if it lives; raises PolicyError if it is of another kind."""
        known = self._by_id.get(given.id or "")
        if known is None or known.lost:
            return None
        known.check_workspace(wanted)
        if known.language != language:
            raise PolicyError(
                f"language: session {given.id!r} runs {known.language}, got {language}"
            )
        if given.packages and tuple(given.packages) != known.packages:
            raise PolicyError(f"packages: session {given.id!r} was opened with others")
        return known

    def _open_new(
        self, given: SessionArguments, wanted: "NamedWorkspace | None", language: str, lease: Lease,
        why: str,
    ) -> CellSession:  # fmt: skip
        id = given.id or os.urandom(16).hex()
        if wanted:
            return self._open_in(wanted, id, given, lease)
        with self._lock:
            if known := self._known(given, wanted, language):  # another thread was first
                lease.close()
                return known
            return self._open(id, given, lease, why=why)

    def _open_in(
        self, wanted: "NamedWorkspace", id: str, given: SessionArguments, lease: Lease
    ) -> CellSession:
        """Open a session with the files of a workspace, without blocking other sessions meanwhile."""
        from .workspaces.calls import SessionWorkspace

        kept_in = SessionWorkspace(
            wanted, partial(self._pipeline.record_workspace, session_id=id), id
        )
        try:
            with self._lock:
                session = self._open(id, given, lease, kept_in)
        except BaseException:
            kept_in.release()
            raise
        try:
            kept_in.lay(session._write)
        except BaseException:
            session._cell.end("the files of its workspace could not be written", "closed")
            raise
        return session

    def _open(
        self, id: str, given: SessionArguments, lease: Lease,
        kept_in: "SessionWorkspace | None" = None, why: str = "",
    ) -> CellSession:  # fmt: skip
        self._by_id = {key: each for key, each in self._by_id.items() if not each.lost}
        cell = self._supervisors.open_session(lease.supervisor)
        self._pipeline.record_session(id, "opened", why)
        cell.keep_record(id, self._pipeline.policy.name)
        if kept_in:
            kept_in.attach(cell)
        alike = SessionArguments(language=given.language, packages=given.packages)
        another = partial(self.open, alike, None)
        ports, packages = self._ports.of_cell(cell), tuple(given.packages)
        session = CellSession(
            id, cell, self._pipeline, another, self._branching, self._pausing, ports, lease, packages,
            kept_in, self._replay,
        )  # fmt: skip
        self._by_id[id] = session
        return session


def _language(name: str) -> str:
    try:
        return check_language(name)
    except Rejected as refusal:
        raise PolicyError(f"language: {refusal}") from None
