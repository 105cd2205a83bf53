"""`WorkerSession`: a session whose cell is a worker's; `WorkerSessions`: those of one sandbox.

A session stays with its worker.  Its calls are checked and recorded here, and so is its history, for
forks, whose replayed calls may call tools.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from ....policies.errors import LaunchError, PolicyError, SessionLost
from ....policies.policy import Limits
from ....runner.cells.workspace import KeptWorkspace
from ....runner.requests.request import Request
from ....runner.requests.result import SandboxResult
from ....runner.sessions.events import gone
from ....runner.sessions.sessions import too_many_sessions
from ....runner.settings import SessionSettings
from ..calls.admission import Admission
from ..checks import check_branches, check_flag
from ..parameters import CallArguments, CommandArguments, SessionArguments
from ..remote import frames
from ..remote.attached_session import AttachedSession
from ..remote.call_frames import requirements_of, token_of
from ..sessions.history import History, replay
from ..sessions.session import Session, close_all, own
from . import worker_frames
from .worker_process import Worker
from .workers import Workers

if TYPE_CHECKING:
    from ...skills.skill_store import KeptSkill

Perform = Callable[[Worker, Request, CallArguments, str], SandboxResult]
_DIED = "the worker that made its cell died"
_OPENED = ("opened", "resumed")
_PAUSED = "pause: the calls from before a session was paused are not kept"
_MOST_TOKENS = 10_000


class WorkerSession(AttachedSession):
    """A session in a cell of a worker."""

    def __init__(
        self, worker: Worker, opened: frames.Opened, limits: Limits, sessions: "WorkerSessions",
        packages: tuple[str, ...],
    ) -> None:  # fmt: skip
        super().__init__(worker.requests, opened, limits)
        self.worker = worker
        self.packages = packages
        self.history = History()
        self._sessions = sessions
        self._admission = sessions.admission
        self._kept: KeptWorkspace | None = None

    def has_tool(self, name: str) -> bool:
        return self._admission.has_tool(name)

    def _with_tokens(self, given: CommandArguments) -> CommandArguments:
        return self._admission.with_tokens(given, self.id)

    def _require_worker(self) -> None:
        if self.worker.has_ended():
            raise gone(_DIED)

    def _execute(self, given: CallArguments) -> SandboxResult:
        call = self._admission.admit(own(given), self.id)
        if isinstance(call, SandboxResult):  # the call was rejected
            return call
        with call:
            self.check_language(call.language)
            self._require_worker()
            self.history.begin(call.request.execution_id)
            checked = msgspec.structs.replace(given, language=call.language)
            result = self._sessions.perform(self.worker, call.request, checked, self._key)
        result = call.end(result)
        if result.phases.run:  # the call was executed
            self.history.add(given, result)
        return result

    @property
    def workspace(self) -> KeptWorkspace | None:
        with contextlib.suppress(LaunchError, SessionLost):
            self._kept = self._change("look").kept
        return self._kept

    def save(self) -> KeptWorkspace:
        kept = self._change("save").kept
        return kept or super().save()

    def freeze(self) -> bool:
        return self._change("freeze").is_frozen

    def _change(self, what: "worker_frames.Change") -> worker_frames.SessionChanged:
        self._require_worker()
        asked = worker_frames.ChangeSession(self._key, what)
        return self.worker.ask(asked, worker_frames.SessionChanged)

    def save_skill(self, *_: object, **__: object) -> "KeptSkill":
        raise PolicyError(
            "save_skill: not available with workers=: its trial starts a launcher of its own",
            "make a Sandbox without workers=",
        )

    def fork(self) -> "WorkerSession":
        with contextlib.suppress(LaunchError, SessionLost):  # calls may come from several threads
            self.history.sort(self._change("order").order)
        calls = self.history.calls()
        branch = self._sessions.another(self, f"a fork of {self.id}")
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
        may_replay = check_flag("replay", replay)
        asked = worker_frames.CopySession(
            self._key, check_branches(n), check_flag("reseed", reseed)
        )
        self._require_worker()
        told = self.worker.ask(asked, worker_frames.Copied)
        if told.why:
            return self._replayed(n, told.why, may_replay)
        return tuple(self._copy(each) for each in told.sessions)

    def _copy(self, opened: frames.Opened) -> "WorkerSession":
        copy = self._sessions.session_of(self.worker, opened, self.packages)
        copy.forked_by = "memory"
        copy.history = self.history.copy()
        self._admission.continue_session(self.id, copy.id)
        return copy

    def _replayed(self, n: int, why: str, may_replay: bool) -> tuple[Session, ...]:
        if not may_replay:
            raise PolicyError(f"branch: the session cannot be branched by memory: {why}")
        made: list[WorkerSession] = []
        try:
            for _ in range(n):
                made.append(self.fork())
                made[-1].not_copied = why
        except BaseException:
            close_all(made)
            raise
        return tuple(made)

    def pause(self) -> str:
        self._require_worker()
        token = super().pause()
        self._sessions.note_token(token, self.worker)
        return token

    def close(self) -> None:
        """End the session and save its named workspace, if any; closing twice is fine.

        Raises WorkspaceError if the workspace cannot be saved.
        """
        self._close_aexecutor()
        try:
            self._kept = self._change("close").kept or self._kept
        except (LaunchError, SessionLost):
            return


class WorkerSessions:
    """The sessions of one sandbox, by worker; safe from many threads."""

    def __init__(
        self, workers: Workers, settings: SessionSettings, admission: Admission, limits: Limits,
        perform: Perform,
    ) -> None:  # fmt: skip
        self.admission = admission
        self.perform = perform
        self._workers = workers
        self._settings = settings
        self._limits = limits
        self._lock = threading.Lock()
        self._reserved = 0
        self._alive: dict[Worker, set[str]] = {}  # ids of those that have a cell
        self._by_id: dict[str, Worker] = {}
        self._by_key: dict[str, WorkerSession] = {}
        self._tokens: dict[str, Worker] = {}  # paused sessions by token

    def open(self, given: SessionArguments, why: str = "") -> WorkerSession:
        """Return the session of an id, or a new one."""
        packages = requirements_of(given.packages)
        asked = worker_frames.OpenHere(
            given.id, given.language, given.workspace, given.clean, packages, why
        )
        with self._placed(given.id) as worker:
            return self.session_of(worker, worker.ask(asked, frames.Opened), packages)

    def another(self, like: WorkerSession, why: str) -> WorkerSession:
        """Return a new session with the language and packages of `like`."""
        return self.open(SessionArguments(language=like.language, packages=like.packages), why)

    def session_of(
        self, worker: Worker, opened: frames.Opened, packages: tuple[str, ...]
    ) -> WorkerSession:
        """Return the session that a worker opened, the same object for each caller."""
        made = WorkerSession(worker, opened, self._limits, self, packages)
        with self._lock:
            return self._by_key.setdefault(opened.session, made)

    def resume(self, token: str) -> WorkerSession:
        """Return the session that was paused, in the worker that paused it if that lives."""
        with self._lock:
            worker = self._tokens.get(token_of(token))
        with self._placed(None, worker) as chosen:
            opened = chosen.ask(frames.ResumeSession(token), frames.Opened)
            with self._lock:
                self._tokens.pop(token, None)
            session = self.session_of(chosen, opened, ())
        session.history.forget(_PAUSED)
        return session

    def discard(self, token: str) -> None:
        """Remove the state of a paused session."""
        with self._lock:
            worker = self._tokens.pop(token_of(token), None)
        asked = frames.DiscardPaused(token)
        if worker and not worker.has_ended():
            worker.ask(asked, frames.Done)
            return
        with self._workers.lent() as any_worker:
            any_worker.ask(asked, frames.Done)

    def note_token(self, token: str, worker: Worker) -> None:
        """Remember which worker keeps the launcher of a paused session."""
        with self._lock:
            self._tokens[token] = worker
            while len(self._tokens) > _MOST_TOKENS:
                del self._tokens[next(iter(self._tokens))]

    def note(self, worker: Worker, id: str, action: str) -> None:
        """Note that a session of a worker got a cell, or gave it up."""
        with self._lock:
            alive = self._alive.setdefault(worker, set())
            if action in _OPENED:
                alive.add(id)
                return
            alive.discard(id)
            if action != "paused":
                self._by_id.pop(id, None)
                gone_ones = [
                    key for key, each in self._by_key.items()
                    if each.id == id and each.worker is worker
                ]  # fmt: skip
                for key in gone_ones:
                    del self._by_key[key]

    def note_end(self, worker: Worker) -> None:
        """Record the sessions of a worker that has died."""
        with self._lock:
            lost = sorted(self._alive.pop(worker, ()))
            self._by_id = {id: each for id, each in self._by_id.items() if each is not worker}
            self._by_key = {
                key: each for key, each in self._by_key.items() if each.worker is not worker
            }
        for id in lost:
            self.admission.record_session(id, "lost", _DIED)

    @contextlib.contextmanager
    def _placed(self, id: str | None, bound: Worker | None = None) -> Iterator[Worker]:
        """Choose the worker of a session, and keep room for it during the block.

        That of a known id or token, else the one with the fewest sessions.  Raises BusyError.
        """
        with self._lock:
            known = self._by_id.get(id) if id else None
        if known and not known.has_ended():
            with self._workers.lent(bound=known) as worker:
                yield worker
            return
        self._make_room()
        try:
            with self._workers.lent(self._load, bound) as worker:
                if id:
                    with self._lock:
                        worker = self._by_id.setdefault(id, worker)
                yield worker
        finally:
            with self._lock:
                self._reserved -= 1

    def _load(self, worker: Worker) -> int:
        return len(self._alive.get(worker, ()))

    def _make_room(self) -> None:
        """Reserve room for a session; raises BusyError."""
        while True:
            with self._lock:
                alive = sum(map(len, self._alive.values())) + self._reserved
                if alive < self._settings.alive:
                    self._reserved += 1
                    return
            if not (self._settings.evict or self._settings.pauses) or not self._one_went():
                raise too_many_sessions(alive, self._settings)

    def _one_went(self) -> bool:
        """Have the session that was idle longest of all give up its cell, or the next; tell whether
        one did."""
        idle = []
        for worker in self._workers.all():
            asked = worker.ask(worker_frames.MakeRoom(is_done=False), worker_frames.RoomMade)
            if asked.idle_since is not None:
                idle.append((asked.idle_since, worker.number, worker))
        return any(
            worker.ask(worker_frames.MakeRoom(is_done=True), worker_frames.RoomMade).is_done
            for _, _, worker in sorted(idle)
        )
