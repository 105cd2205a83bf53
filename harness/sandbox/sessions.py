"""`CellSession`: a session in a cell of this process."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from msgspec.structs import replace

from ...policies.errors import PolicyError
from ...policies.plan import Plan
from ...policies.policy import check_limit
from ...runner.capture import OnOutput
from ...runner.concurrency import NEVER
from ...runner.request import Request
from ...runner.result import SandboxResult, SandboxStatus
from ...runner.session import SessionCell
from ...runner.settings import SessionSettings
from ...runner.workspace import KeptWorkspace, WorkspaceFile, list_files, read_file, room
from .archive import files_of, pack
from .checks import check_branches, check_flag
from .history import History, outcome_of
from .parameters import CallArguments, CommandArguments, TerminalArguments
from .pipeline import RequestPipeline
from .ports.exposed import ExposedPort
from .returning_cell import LeasedCell, OpenAgain, ReturningCell
from .session import Session, own

if TYPE_CHECKING:
    from ...runner.branching_process import BranchingProcess
    from ..skills.store import KeptSkill, SkillStore
    from .pausing.idle_pauses import IdlePauses
    from .pausing.pausing import Pausing
    from .sandbox_skills import SandboxSkills
    from .skill_saving import MakeSupervisor
    from .terminal import Terminal
    from .workspaces.calls import NamedWorkspace, SessionWorkspace

_T = TypeVar("_T")
_PAUSED_CALLS_BYTES = 65_536  # of a paused session, so that it can still be forked


class SkillReplay(NamedTuple):
    """What tries a skill that is made of a session: a launcher whose cells see it below /skills."""

    make: "MakeSupervisor"
    skills: "SandboxSkills | None" = None  # of the sandbox: a kept skill is added to them


class SessionServices(NamedTuple):
    """What the sessions of one sandbox share.  `replay` tries the skills that are made of them."""

    settings: SessionSettings
    branching: "BranchingProcess"
    pausing: "Callable[[], Pausing]"
    idle: "IdlePauses | None" = None  # if idle sessions are paused
    replay: SkillReplay | None = None


class CellSession(Session):
    """A session whose cell this process made."""

    def __init__(
        self, first: LeasedCell, pipeline: RequestPipeline, services: SessionServices,
        another: "Callable[[str], CellSession]", open_again: OpenAgain,
        kept_in: "SessionWorkspace | None" = None,
    ) -> None:  # fmt: skip
        """`first`: its cell.  `another` opens a session that is alike, and takes the reason."""
        self.id = first.id
        self.packages = first.packages
        self._language = first.language
        self._limits = first.cell.limits
        self._pipeline = pipeline
        self._services = services
        self._another = another
        self._kept_in = kept_in
        self._history = History()
        tell = partial(pipeline.record_session, self.id)
        self._returning = ReturningCell(
            first, services.settings, services.pausing, open_again, self._adopt, tell
        )
        self._adopt(first)
        if services.idle and not kept_in:
            services.idle.add(self._returning)

    def _adopt(self, leased: LeasedCell) -> None:
        """Make a cell the session's own."""
        cell = leased.cell
        cell.on_begin = self._history.begin
        cell.on_end = partial(self._end, leased)
        cell.on_last_network = partial(self._pipeline.record_network, self.id)
        if self._services.idle and not self._kept_in:
            cell.on_idle = self._returning.try_to_pause
            cell.may_evict = lambda: self._returning.is_evictable

    @property
    def language(self) -> str:
        return self._language

    @property
    def lost(self) -> str:
        return self._returning.lost

    @property
    def expired(self) -> str:
        return self._returning.expired

    @property
    def paused(self) -> bool:
        return self._returning.is_paused

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
            return self._returning.use(
                lambda here, seconds: _with_resuming(
                    here.cell.execute(request, told, cancel), seconds
                )
            )

        with self._pipeline.streamed(on_output, self.id) as told:
            result = self._pipeline.perform(own(given), perform, self.id)
        if result.ok and (look_at := self._returning.here.lease.look_at):
            look_at(given.code)
        if result.status is not SandboxStatus.REJECTED and result.phases.run:  # it was executed
            self._history.add(given, result)
        if self._services.idle:
            self._services.idle.note_rest()
        return replace(result, workspace=self.workspace) if result.session_lost else result

    def download(self, path: str) -> bytes:
        if not isinstance(path, str):
            raise PolicyError(f"path: must be text, got {path!r}")
        return self._in_workspace(lambda workspace: read_file(workspace, path, room(workspace)))

    def _in_workspace(self, look: Callable[[int], _T]) -> _T:
        def work(here: LeasedCell, _: float) -> _T:
            with here.cell.held() as workspace:
                return look(workspace)

        return self._returning.use(work)

    def files(self) -> tuple[WorkspaceFile, ...]:
        listing = self._in_workspace(list_files)
        return tuple(WorkspaceFile(path, seen.size_bytes) for path, seen in sorted(listing.items()))

    def snapshot(self) -> bytes:
        return self._in_workspace(lambda workspace: pack(files_of(workspace)))

    def save(self) -> KeptWorkspace:
        return self._kept_in.save() if self._kept_in else super().save()

    def check_workspace(self, wanted: "NamedWorkspace | None") -> None:
        """Raise PolicyError if `wanted` is another workspace than that of this session."""
        if wanted and (self._kept_in is None or self._kept_in.name != wanted.name):
            raise PolicyError(f"workspace: session {self.id!r} does not use {wanted.name!r}")

    def expose(
        self, port: int, *, path: str | os.PathLike[str] | None = None, host_port: int | None = None
    ) -> ExposedPort:
        def work(here: LeasedCell, _: float) -> ExposedPort:
            return here.ports.expose(here.cell.network(), port, path, host_port)

        return self._returning.use(work)

    def extend(self, seconds: float) -> None:
        check_limit("seconds", seconds)
        self._returning.use(lambda here, _: here.cell.extend(seconds))

    def freeze(self) -> bool:
        return self.paused or self._cell.freeze()

    def _terminal(self, given: TerminalArguments) -> "Terminal":
        if not self._pipeline.policy.processes.terminal:
            raise PolicyError(
                "terminal: the policy allows none",
                "use policy='workshop', or set processes.terminal in yours",
            )
        from .terminal import check_size, command_of

        size = check_size(given.rows, given.columns)
        command = command_of(given)
        return self._returning.use(lambda here, _: self._terminal_in(here.cell, command, size))

    def _terminal_in(
        self, cell: SessionCell, command: CommandArguments, size: tuple[int, int]
    ) -> "Terminal":
        from ...runner.terminal import open_terminal, resize  # seldom needed
        from .terminal import Terminal

        with contextlib.ExitStack() as undone:
            cell.begin_use()
            undone.callback(cell.end_use)
            with cell.held() as workspace:
                opened = open_terminal(workspace)
            undone.callback(os.close, opened.master)
            resize(opened.master, *size)
            process = self._processes().start(command, opened.path)
            undone.pop_all()
        return Terminal(opened.master, process, cell.end_use)

    def _end(self, leased: LeasedCell, action: str, why: str) -> None:
        if action == "paused" and self.paused:  # the lease goes on
            leased.ports.close()
            self._history.shrink(_PAUSED_CALLS_BYTES)
        else:
            leased.release()
        self._pipeline.record_session(self.id, action, why)

    def save_skill(
        self, name: str, description: str, *,
        files: Sequence[str] | Mapping[str, str | bytes] | None = None, body: str = "",
        tests: str = "", task: str = "", model: str = "", allowed_tools: Sequence[str] = (),
        store: "SkillStore | None" = None, trust: bool = False, allow_similar: bool = False,
        maker: str = "",
    ) -> "KeptSkill":  # fmt: skip
        from .skill_saving import SkillDraft, check_texts, drafted, keep, try_out

        replay = self._services.replay
        if replay is None:
            return super().save_skill(name, description)
        draft = SkillDraft(name, description, body, tests, task, model, allowed_tools, maker)
        check_texts(draft)
        given, origin = self._files_of_skill(name, files)
        skill = drafted(draft, given, self.language, origin)
        self._pipeline.check_tokens(
            {path: each.content for path, each in skill.tree.files.items()}, self.id
        )
        policy = self._returning.here.lease.supervisor.policy
        pipeline = self._pipeline.without_tools()
        try_out(skill, tests, self.language, pipeline, policy, replay.make)
        return keep(skill, store, replay.skills, trust=trust, allow_similar=allow_similar)

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
        from .branching import branch  # seldom needed

        check_flag("reseed", reseed)
        may_replay = check_flag("replay", replay)
        return self._returning.use(
            lambda here, _: branch(
                self, check_branches(n), reseed=reseed, may_replay=may_replay,
                another=self._another, process=self._services.branching,
            )
        )  # fmt: skip

    def pause(self) -> str:
        if self._kept_in:
            raise PolicyError(
                "pause: a session with a named workspace cannot be paused", "save() it"
            )
        return self._returning.pause()

    @property
    def cell(self) -> SessionCell:
        """Its cell, the last one that it had if it is paused."""
        return self._returning.here.cell

    _cell = cell

    @property
    def plan(self) -> Plan:
        return self.cell.plan

    def take_history(self, source: "CellSession") -> None:
        """Go on from the calls of `source`, of which this is a branch."""
        self._pipeline.continue_session(source.id, self.id)
        self._history = source._history.copy()
        self._cell.on_begin = self._history.begin

    def forget_calls(self) -> None:
        """Keep a fork or a skill from being made of the calls so far: this session was paused."""
        self._history.forget("pause: the calls from before a session was paused are not kept")

    def end(self, why: str) -> None:
        """End the session and save nothing."""
        self._returning.end(why)

    def close(self) -> None:
        """End the session and save its named workspace, if any; closing twice is fine.

        A running call is killed, and its result says that it was cancelled.  Raises WorkspaceError if
        the workspace cannot be saved.
        """
        self._close_aexecutor()
        kept_in = None if self.lost else self._kept_in
        if kept_in:
            kept_in.complete()
        self._returning.end("it was closed")
        if kept_in and self.lost:  # not so in a forked child, which ends nothing
            kept_in.finish()


def _with_resuming(result: SandboxResult, seconds: float) -> SandboxResult:
    """Return a result that tells how long it took until the paused session was back."""
    if not seconds:
        return result
    took = replace(result.phases, resume=seconds)
    return replace(result, phases=took, execution_time=result.execution_time + seconds)
