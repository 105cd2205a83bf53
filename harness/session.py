"""`Session`: calls that build on each other."""

import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ..policies.errors import PolicyError, WorkspaceError
from ..policies.languages import PYTHON, program_that_does_nothing
from ..runner.capture import OnOutput
from ..runner.performance import NEVER, Request
from ..runner.result import SandboxResult, SandboxStatus
from ..runner.session import SessionCell
from ..runner.supervisors import Supervisors
from ..runner.workspace import KeptWorkspace, WorkspaceFile, list_files, read_file, room
from .archive import files_of, pack, unpack
from .executing import Executing
from .history import History, outcome_of
from .intake import Intake
from .request import Rejected, check_language

if TYPE_CHECKING:
    from .workspace_calls import SessionWorkspace, Wanted


class Session(Executing):
    """One cell that lives across calls: variables, imports, files, threads and the working directory
    stay.  Calls from several threads are served in order, never mixed.  Made by `Sandbox.session`.

    A call that takes too long is interrupted (KeyboardInterrupt) and the state stays; one that has
    not yielded after a second is interrupted again, and after another one killed, the session with
    it.  `lost` then says why, and any further call raises SessionLost.
    """

    id: str
    diverged: tuple[int, ...] = ()  # of a fork: the calls that went another way in replay

    @property
    @abstractmethod
    def lost(self) -> str:
        """Why it is gone; empty while it lives."""

    def upload(self, path: str, data: str | bytes) -> None:
        """Write a file below /workspace; raises WorkspaceError if there is no room for it."""
        self._write({path: data})

    def _write(self, files: Mapping[str, str | bytes]) -> None:
        result = self.execute(program_that_does_nothing(self.language), files=files)
        if not result.ok:
            said = result.stderr.strip().splitlines()[-1:] or [str(result.error)]
            raise WorkspaceError(f"cannot write {', '.join(files)}: {said[0]}")

    @abstractmethod
    def download(self, path: str) -> bytes:
        """Return the content of a file below /workspace; raises WorkspaceError if it is none, or says
        that it is larger than the workspace."""

    @abstractmethod
    def files(self) -> tuple[WorkspaceFile, ...]:
        """Return the regular files below /workspace."""

    @abstractmethod
    def snapshot(self) -> bytes:
        """Return the regular files below /workspace as a tar archive, for `restore`.

        Files only: variables and threads are not in it.  One that changes meanwhile may be missing.
        Raises WorkspaceError if files claim more than the workspace holds.
        """

    def restore(self, archive: bytes) -> None:
        """Write the regular files of a tar archive below /workspace, over what is there.

        Raises PolicyError for a name that leads elsewhere or an archive that is none, is compressed or
        holds a sparse file, WorkspaceError if there is no room.
        """
        self._write(unpack(archive))

    @property
    def workspace(self) -> KeptWorkspace | None:
        """What became of its named workspace when that was last kept; None before, or without one."""
        return None

    def save(self) -> KeptWorkspace:
        """Save the files below /workspace in the workspace that was named; closing does it too.

        Files that a thread is writing meanwhile are saved as they are.  Raises WorkspaceError if there
        are too many for its quota, and nothing is saved, PolicyError if no workspace was named.
        """
        raise PolicyError("save: no workspace was named", "sandbox.session(workspace=...)")

    @abstractmethod
    def fork(self) -> "Session":
        """Return another session that has replayed every call of this one, in a cell of its own.

        The two share nothing.  They are alike as far as programs are: time, random numbers, ids and
        addresses differ, threads do what threads do, and every call costs its time again.
        `diverged` of the new session names the calls, counted from 1, that went another way.
        Raises SessionLost if one of them ends it, PolicyError if there is too much to replay.
        """


class CellSession(Session):
    """A session whose cell is one of ours."""

    def __init__(
        self,
        id: str,
        cell: SessionCell,
        intake: Intake,
        another: Callable[[], "Session"],
        kept_in: "SessionWorkspace | None" = None,
    ) -> None:
        self.id = id
        self._cell = cell
        self._intake = intake
        self._another = another
        self._kept_in = kept_in
        self._history = History()
        cell.on_begin = self._history.begin

    @property
    def language(self) -> str:
        return self._cell.language

    @property
    def lost(self) -> str:
        return self._cell.lost

    @property
    def workspace(self) -> KeptWorkspace | None:
        return self._kept_in.kept if self._kept_in else None

    def execute(
        self,
        code: str | bytes,
        language: str | None = None,
        *,
        on_output: OnOutput | None = None,
        cancel: int = NEVER,
        **given: Any,
    ) -> SandboxResult:
        """Run `code` with what the calls before it left; the arguments are those of Sandbox.execute.

        The value of its last expression is `_` in the next.  Python may await at the top level.  Raises
        SessionLost if the session is gone, BusyError if the call before it does not end, PolicyError
        for another language than its own.
        """

        def perform(language: str, request: Request) -> SandboxResult:
            if language != self.language:
                raise PolicyError(f"language: this session runs {self.language}, not {language}")
            return self._cell.execute(request, on_output, cancel)

        result = self._intake.perform(code, language or self.language, given, perform, self.id)
        if result.status is not SandboxStatus.REJECTED and result.phases.run:  # it did begin
            self._history.add(code, given, result)
        return replace(result, workspace=self.workspace) if result.session_lost else result

    def download(self, path: str) -> bytes:
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

    def check_workspace(self, wanted: "Wanted | None") -> None:
        """Raise PolicyError if it was opened in another workspace than is wanted."""
        if wanted and (self._kept_in is None or self._kept_in.name != wanted.name):
            raise PolicyError(f"session {self.id!r} lives, and not in workspace {wanted.name!r}")

    def fork(self) -> "Session":
        calls = self._history.calls()
        branch = self._another()
        try:
            branch.diverged = tuple(
                number
                for number, call in enumerate(calls, 1)
                if outcome_of(branch.execute(call.code, **call.given)) != call.outcome
            )
        except BaseException:
            branch.close()
            raise
        return branch

    def close(self) -> None:
        """End it; what runs is killed, and cancelled by its result.  Closing twice is fine.

        Its named workspace, if any, is saved; raises WorkspaceError if that is refused.
        """
        kept_in = None if self.lost else self._kept_in
        if kept_in:
            kept_in.complete()
        self._cell.end("it was closed", "closed")
        if kept_in and self.lost:  # and not in a process that was forked from ours
            kept_in.finish()


class OpenSessions:
    """The sessions of one sandbox, by name."""

    def __init__(self, supervisors: Supervisors, intake: Intake) -> None:
        self._supervisors = supervisors
        self._intake = intake
        self._lock = threading.Lock()
        self._by_id: dict[str, CellSession] = {}

    def open(
        self, id: str | None, wanted: "Wanted | None" = None, *, language: str = PYTHON
    ) -> Session:
        if id is not None and not (isinstance(id, str) and id):
            raise PolicyError(f"session: id must be a text that is not empty, not {id!r}")
        language = _language(language)
        with self._lock:
            known = self._by_id.get(id or "")
            if known and not known.lost:
                known.check_workspace(wanted)
                if known.language != language:
                    raise PolicyError(f"session: {id!r} runs {known.language}, not {language}")
                return known
            if wanted is None:
                return self._open(id or os.urandom(8).hex(), language)
        return self._open_in(wanted, id or os.urandom(8).hex(), language)

    def _open_in(self, wanted: "Wanted", id: str, language: str) -> Session:
        """Open a session with the files of a workspace; others open theirs meanwhile."""
        from .workspace_calls import SessionWorkspace

        kept_in = SessionWorkspace(wanted, partial(self._intake.record_workspace, session_id=id))
        try:
            with self._lock:
                session = self._open(id, language, kept_in)
        except BaseException:
            kept_in.release()
            raise
        try:
            kept_in.lay(session._write)
        except BaseException:
            session._cell.end("the files of its workspace could not be put there", "closed")
            raise
        return session

    def _open(
        self, id: str, language: str, kept_in: "SessionWorkspace | None" = None
    ) -> CellSession:
        self._by_id = {key: each for key, each in self._by_id.items() if not each.lost}
        cell = self._supervisors.open_session(language)
        self._intake.record_session(id, "opened")
        cell.on_end = partial(self._intake.record_session, id)
        if kept_in:
            kept_in.attach(cell)
        another = partial(self.open, None, language=language)
        session = CellSession(id, cell, self._intake, another, kept_in)
        self._by_id[id] = session
        return session


def _language(name: str) -> str:
    try:
        return check_language(name)
    except Rejected as refusal:
        raise PolicyError(f"session: {refusal}") from None
