"""`CellSession`: a session in a cell of this process."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from ....policies.errors import PolicyError, SessionLost
from ....policies.policy import check_limit
from ....runner.cells.workspace import KeptWorkspace, WorkspaceFile, list_files, read_file, room
from ....runner.requests.execution import SessionPast
from ....runner.requests.request import Request
from ....runner.requests.result import SandboxResult
from ....runner.sessions.session_cell import SessionCell
from ..checks import check_branches, check_flag
from ..network.exposed_ports import ExposedPort
from ..parameters import CallArguments, CommandArguments, TerminalArguments
from ..workspaces.archive import files_of, pack
from .history import replay
from .life import SessionLife, SessionServices
from .session import Session, close_all, own

if TYPE_CHECKING:
    from ...skills.skill_store import KeptSkill, SkillStore
    from ..images.image import ImageConfig, StoredImage
    from ..images.image_store import ImageStore
    from ..programs.terminal import Terminal
    from ..workspaces.workspace_calls import NamedWorkspace

_T = TypeVar("_T")
# Seeds the generators that would draw equal numbers in each branch. Defines no name, and its value is
# None.
_RESEED = """\
(lambda modules: ([
    seed() for name in ("random", "numpy.random", "torch")
    if (seed := getattr(modules.get(name), "seed", None))
], None)[1])(__import__("sys").modules)
"""


class CellSession(Session):
    """A session in cells of this process."""

    def __init__(
        self, life: SessionLife, services: SessionServices,
        another: "Callable[[str], CellSession]",
    ) -> None:  # fmt: skip
        """`another` opens a session that is alike, and takes the reason."""
        self.id = life.id
        self.packages = tuple(life.given.packages)
        self._limits = life.cell.limits
        self._life = life
        self._admission = services.admission
        self._services = services
        self._another = another

    @property
    def language(self) -> str:
        return self._life.given.language

    @property
    def lost(self) -> str:
        return self._life.lost

    @property
    def expired(self) -> str:
        return self._life.cell.expired

    @property
    def paused(self) -> bool:
        return self._life.is_paused

    @property
    def workspace(self) -> KeptWorkspace | None:
        return self._life.kept_in.kept if self._life.kept_in else None

    def has_tool(self, name: str) -> bool:
        return self._admission.has_tool(name)

    def _with_tokens(self, given: CommandArguments) -> CommandArguments:
        return self._admission.with_tokens(given, self.id)

    def _execute(self, given: CallArguments) -> SandboxResult:
        call = self._admission.admit(own(given), self.id)
        if isinstance(call, SandboxResult):  # the call was rejected
            return call
        with call:
            self.check_language(call.language)
            result = self._performed(call.request)
        return self._noted(given, call.end(result))

    def perform(self, request: Request, given: CallArguments) -> SandboxResult:
        """Execute the request of a call that another process has checked and records."""
        return self._noted(given, self._performed(request))

    def _performed(self, request: Request) -> SandboxResult:
        return self._life.use(lambda cell, seconds: _with_resuming(cell.execute(request), seconds))

    def _noted(self, given: CallArguments, result: SandboxResult) -> SandboxResult:
        """Note a call that has ended, and return its result with the outcome of a last save."""
        if result.ok and (look_at := self._life.lease.look_at):
            look_at(given.code)
        if result.phases.run:  # the call was executed
            self._life.history.add(given, result)
        if self._services.idle:
            self._services.idle.note_rest()
        return replace(result, workspace=self.workspace) if result.session_lost else result

    def download(self, path: str) -> bytes:
        if not isinstance(path, str):
            raise PolicyError(f"path: must be text, got {path!r}")
        return self._in_workspace(lambda workspace: read_file(workspace, path, room(workspace)))

    def _in_workspace(self, look: Callable[[int], _T]) -> _T:
        def work(cell: SessionCell, _: float) -> _T:
            with cell.held() as workspace:
                return look(workspace)

        return self._life.use(work)

    def files(self) -> tuple[WorkspaceFile, ...]:
        listing = self._in_workspace(list_files)
        return tuple(WorkspaceFile(path, seen.size_bytes) for path, seen in sorted(listing.items()))

    def snapshot(self) -> bytes:
        return self._in_workspace(lambda workspace: pack(files_of(workspace)))

    def save(self) -> KeptWorkspace:
        kept_in = self._life.kept_in
        return kept_in.save(self.cell) if kept_in else super().save()

    def check_workspace(self, wanted: "NamedWorkspace | None") -> None:
        """Raise PolicyError if `wanted` is another workspace than that of this session."""
        kept_in = self._life.kept_in
        if wanted and (kept_in is None or kept_in.name != wanted.name):
            raise PolicyError(f"workspace: session {self.id!r} does not use {wanted.name!r}")

    def expose(
        self, port: int, *, path: str | os.PathLike[str] | None = None, host_port: int | None = None
    ) -> ExposedPort:
        return self._life.use(
            lambda cell, _: self._life.ports.expose(cell.network(), port, path, host_port)
        )

    def extend(self, seconds: float) -> None:
        check_limit("seconds", seconds)
        self._life.use(lambda cell, _: cell.extend(seconds))

    def freeze(self) -> bool:
        return self.paused or self.cell.freeze()

    def _terminal(self, given: TerminalArguments) -> "Terminal":
        if not self._admission.policy.processes.terminal:
            raise PolicyError(
                "terminal: the policy allows none",
                "use policy='workshop', or set processes.terminal in yours",
            )
        from ..calls.call_request import check_size
        from ..programs.terminal import command_of

        size = check_size(given.rows, given.columns)
        command = self._admission.placed(command_of(given))
        return self._life.use(lambda cell, _: self._terminal_in(cell, command, size))

    def _terminal_in(
        self, cell: SessionCell, command: CommandArguments, size: tuple[int, int]
    ) -> "Terminal":
        from ....runner.cells.cell_network import open_terminal, resize  # seldom needed
        from ..programs.terminal import Terminal

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

    def save_skill(
        self, name: str, description: str, *,
        files: Sequence[str] | Mapping[str, str | bytes] | None = None, body: str = "",
        tests: str = "", task: str = "", model: str = "", allowed_tools: Sequence[str] = (),
        store: "SkillStore | None" = None, trust: bool = False, allow_similar: bool = False,
        maker: str = "",
    ) -> "KeptSkill":  # fmt: skip
        from .skill_saving import SkillDraft, check_texts, drafted, keep, try_out

        draft = SkillDraft(name, description, body, tests, task, model, allowed_tools, maker)
        check_texts(draft)
        given, origin = self._files_of_skill(name, files)
        skill = drafted(draft, given, self.language, origin)
        self._admission.check_tokens(
            {path: each.content for path, each in skill.tree.files.items()}, self.id
        )
        policy, services = self._life.lease.supervisor.policy, self._services
        admission = self._admission.without_tools()
        try_out(skill, tests, self.language, admission, policy, services.replaying)
        return keep(skill, store, services.skills, trust=trust, allow_similar=allow_similar)

    def _files_of_skill(
        self, name: str, files: Sequence[str] | Mapping[str, str | bytes] | None
    ) -> tuple[Mapping[str, str | bytes], str]:
        from .skill_saving import chosen, script_of

        if isinstance(files, Mapping):
            return files, "given"
        if isinstance(files, str):
            raise PolicyError(f"files: must be a list of globs, got {files!r}")
        if files is not None:
            there = [each.path for each in self.files()]
            return chosen(files, there, self.download), "workspace"
        programs = [call.given.code for call in self._life.history.calls() if call.is_ok]
        texts = [
            each if isinstance(each, str) else each.decode(errors="replace") for each in programs
        ]
        return {script_of(name, self.language): "\n".join(texts) + "\n"}, "history"

    def fork(self) -> "CellSession":
        self._refuse_with_gpu("fork")
        calls = self._life.history.calls()
        branch = self._another(f"a fork of {self.id}")
        branch.forked_by = "replay"
        try:
            self._admission.continue_session(self.id, branch.id)
            branch.diverged = replay(calls, branch._execute)
        except BaseException:
            branch.close()
            raise
        return branch

    def branch(
        self, n: int = 1, reseed: bool = False, *, replay: bool = True
    ) -> tuple[Session, ...]:
        check_flag("reseed", reseed)
        may_replay = check_flag("replay", replay)
        self._refuse_with_gpu("branch")
        made = self._life.use(lambda cell, _: self._branch(cell, check_branches(n), may_replay))
        return self._reseeded(made) if reseed else tuple(made)

    def _reseeded(self, made: "list[CellSession]") -> "tuple[CellSession, ...]":
        with _closing_unless_done(made):
            for each in made:
                each.cell.execute(Request(code=_RESEED))
        return tuple(made)

    def _refuse_with_gpu(self, what: str) -> None:
        """Raise PolicyError if the session has a GPU open: no copy has what that holds, and a replay
        would take as much of its memory again."""
        if not self.cell.plan.devices:  # as most sessions
            return
        from ....runner.sessions.branches import open_gpu

        def look(cell: SessionCell, _: object) -> str:
            with cell.resting() as (held, _past):
                return open_gpu(held)

        if node := self._life.use(look):
            raise PolicyError(
                f"{what}: the session has {node} open, and what a GPU holds cannot be copied",
                "open another session, and run the calls that it needs there",
            )

    def copies(self, n: int, reseed: bool) -> "tuple[CellSession, ...]":
        """Return `n` copies of the memory of this session; raises CannotBranch."""
        self._refuse_with_gpu("branch")

        def work(cell: SessionCell, _: float) -> "list[CellSession]":
            made: list[CellSession] = []
            with _closing_unless_done(made):
                self._branch_by_memory(cell, n, made)
            return made

        made = self._life.use(work)
        return self._reseeded(made) if reseed else tuple(made)

    def _branch(self, cell: SessionCell, n: int, may_replay: bool) -> "list[CellSession]":
        """Return `n` branches, or close all of them and raise."""
        from ....runner.sessions.branches import CannotBranch  # seldom needed

        made: list[CellSession] = []
        with _closing_unless_done(made):
            try:
                self._branch_by_memory(cell, n, made)
            except CannotBranch as error:
                if not may_replay:
                    raise PolicyError(
                        f"branch: the session cannot be branched by memory: {error}"
                    ) from None
                close_all(made)
                made.clear()
                for _ in range(n):
                    made.append(self.fork())
                    made[-1].not_copied = str(error)
        return made

    def _branch_by_memory(self, cell: SessionCell, n: int, made: "list[CellSession]") -> None:
        from ....runner.sessions.branches import CannotBranch, branch_sessions

        if self.cell.plan.image:
            raise CannotBranch("the cell's changes of its image are not copied")
        with cell.resting() as (held, past):
            try:
                # Rest each branch, so that it is not evicted for the next one.
                with contextlib.ExitStack() as busy:
                    for _ in range(n):
                        made.append(self._another(f"a branch of {self.id}"))
                        busy.enter_context(made[-1].cell.resting())
                branch_sessions(held, [each.cell for each in made], self._services.branching)
            except SessionLost as error:  # one of the new sessions was lost
                raise CannotBranch(f"a fresh session ended: {error.what}") from None
            for each in made:
                each.continue_from(self, past)

    def pause(self) -> str:
        if self._life.kept_in:
            raise PolicyError(
                "pause: a session with a named workspace cannot be paused", "save() it"
            )
        if self.cell.plan.image:
            raise PolicyError(
                "pause: what the session has changed in its image is not kept",
                "commit the session, and go on in a session of the new image",
            )
        return self._life.pause()

    def commit(
        self, name: str = "", *, config: "ImageConfig | None" = None,
        store: "ImageStore | None" = None,
    ) -> "StoredImage":  # fmt: skip
        image = self._services.image
        if image is None:
            return super().commit(name, config=config)
        from ..images import image_store

        images = store or image_store.ImageStore()

        def keep(cell: SessionCell, _: object) -> "StoredImage":
            with cell.resting() as (held, _past):
                held.cell.cgroup.freeze()
                try:
                    changes = held.cell.changes
                    return images.commit(changes, image, config or image.config, name)
                finally:
                    held.cell.cgroup.thaw()

        return self._life.use(keep)

    @property
    def cell(self) -> SessionCell:
        """Its cell, the last one that it had if it is paused."""
        return self._life.cell

    def continue_from(self, source: "CellSession", past: SessionPast) -> None:
        """Go on from the calls of `source`, of whose memory this is a copy."""
        self.cell.continue_from(past)
        self._admission.continue_session(source.id, self.id)
        self._life.history = source._life.history.copy()
        self.forked_by = "memory"

    def order(self) -> tuple[str, ...]:
        """Return the executions that are kept, in the order in which they began."""
        return self._life.history.order()

    def forget_calls(self) -> None:
        """Keep a fork or a skill from being made of the calls so far: this session was paused."""
        self._life.history.forget("pause: the calls from before a session was paused are not kept")

    def end(self, why: str) -> None:
        """End the session and save nothing."""
        self._life.end(why)

    def close(self) -> None:
        """End the session and save its named workspace, if any; closing twice is fine.

        A running call is killed, and its result says that it was cancelled.  Raises WorkspaceError if
        the workspace cannot be saved.
        """
        self._close_aexecutor()
        kept_in = None if self.lost else self._life.kept_in
        if kept_in:
            kept_in.complete()
        self._life.end("it was closed")
        if kept_in and self.lost:  # not in a forked child, which ends no session
            kept_in.finish()


def _with_resuming(result: SandboxResult, seconds: float) -> SandboxResult:
    """Return a result that tells how long it took until the paused session was back."""
    if not seconds:
        return result
    took = replace(result.phases, resume=seconds)
    return replace(result, phases=took, execution_time=result.execution_time + seconds)


@contextlib.contextmanager
def _closing_unless_done(made: list[CellSession]) -> Iterator[None]:
    """Close the branches made so far if not all can be made."""
    try:
        yield
    except BaseException:
        close_all(made)
        raise
