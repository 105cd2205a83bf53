"""`WorkerCells`: the cells of a `Sandbox(workers=N)`, which supervisors in child processes make.

This process checks each call, records its start and its end in the one trail, counts it against the
one limit, answers its tools, and owns the rules of the network.  A worker only executes.
"""

import contextlib
import os
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec.structs import replace

from ....policies.errors import ClosedError, LauncherLost, LaunchError, PolicyError
from ....policies.plan import Plan
from ....policies.policy import Policy
from ....policies.privacy_rules import PrivacyRules
from ....runner.concurrency import NEVER, ConcurrencyLimit
from ....runner.requests.execution import called_off
from ....runner.requests.request import Request
from ....runner.requests.result import SandboxResult
from ....runner.settings import AuditLevel, PoolSettings, SessionSettings
from ....runner.supervisor import SupervisorsState
from ..checks import worker_count
from ..local import LocalCells, sandbox_ports
from ..packaged import MadeOnce
from ..parameters import CallArguments, CompileArguments, SessionArguments
from ..remote import frames
from ..remote.call_frames import packed_request, result_of
from ..sandbox_arguments import HostSettings, SandboxArguments
from . import worker_frames
from .worker_process import Worker
from .worker_sessions import WorkerSessions
from .workers import Workers

if TYPE_CHECKING:
    import msgspec

    from ....runner.shared_files import Content
    from ..languages.compiled import Build
    from ..packages.package_store import PackageStore
    from ..pythons import HostPython
    from ..sessions.session import Session
    from ..workspaces.workspace_store import Workspaces

_ATTEMPTS = 3
_WHY_NOT = {
    "spawned": "a launcher that was started ahead can serve one process only",
    "workspace": "with privacy its files are opened in the process that has the tokens",
}


class WorkerCells(LocalCells):
    """Cells of the workers of a sandbox; safe from many threads."""

    def _start(self, given: SandboxArguments, own: Policy, python: "HostPython | None") -> None:
        count = worker_count(given.workers)
        if given.host.spawned is not None:
            self._refuse("spawned")
        pool, sessions, rules = self._check(given)
        self._prepare(given)
        self._egress = self._way_out(given.host.user)
        self._turns = ConcurrencyLimit(pool.running, pool.queue_seconds)
        self._programs_at_once = ConcurrencyLimit(pool.programs, pool.queue_seconds)
        self._ports = MadeOnce(sandbox_ports)
        self._programs = MadeOnce(self._made_programs)
        self._trail = None  # both are there before a worker can have a session
        self._sessions_of_workers: WorkerSessions | None = None
        start = self._first_frame(given, own, pool, sessions, count)
        hidden = _secret_variables(given)
        try:
            self._workers = Workers(
                count,
                lambda number, on_end: Worker(number, start, hidden, self._answer, on_end),
                self._note_end,
            )
        except BaseException:
            if self._egress:
                self._egress.close()
            raise
        try:
            asked = self._workers.all()[0].ask(frames.Describe(), frames.Description)
            self.policy, self._plan = replace(asked.policy, privacy=own.privacy), asked.plan
            self._serve(rules, SessionSettings())
            self._sessions_of_workers = WorkerSessions(
                self._workers, sessions, self._admission, self.policy.limits, self._perform_in
            )
        except BaseException:
            self.close()
            raise

    def _first_frame(
        self, given: SandboxArguments, own: Policy, pool: PoolSettings, sessions: SessionSettings,
        count: int,
    ) -> worker_frames.StartWorker:  # fmt: skip
        credentials = self._credentials
        return worker_frames.StartWorker(
            replace(own, privacy=PrivacyRules()), _packages(given), _host_settings(given.host),
            _share(pool, count)._asdict(), _share_of_sessions(sessions, count)._asdict(),
            _pause_settings(given.host, count), _store_settings(given.host.package_store),
            _workspace_settings(self.workspaces),
            shares_files=bool(self._tools or self._skills),
            variables=credentials.variables if credentials else {},
            files=credentials.files if credentials else {},
            egress=self._egress.process.control if self._egress else None, image=self.image,
        )  # fmt: skip

    def _refuse(self, what: str) -> NoReturn:
        raise PolicyError(f"{what}: not available with workers=: {_WHY_NOT[what]}")

    @property
    def plan(self) -> Plan:
        return self._plan

    def perform(
        self, request: Request, language: str, given: CallArguments, wanted: Any,
    ) -> SandboxResult:  # fmt: skip
        if wanted and self._private:
            self._refuse("workspace")
        if not self._turns.acquire(request.cancel):
            return called_off(request, time.monotonic(), self._plan.layers)
        try:
            return self._perform_somewhere(request, replace(given, language=language))
        finally:
            self._turns.release()

    def _perform_somewhere(self, request: Request, given: CallArguments) -> SandboxResult:
        """Have a worker execute a request; another one, if it died before it was asked."""
        attempts = 1
        while True:
            worker = self._workers.take()
            try:
                return _performed(worker, request, given)
            except LauncherLost as lost:
                if lost.cell_began or attempts == _ATTEMPTS:
                    raise
                attempts += 1
            finally:
                self._workers.give_back(worker)

    def _perform_in(
        self, worker: Worker, request: Request, given: CallArguments, session: str
    ) -> SandboxResult:
        with self._workers.lent(bound=worker) as lent:
            if lent is not worker:  # it has died
                raise LauncherLost(cell_began=False)
            return _performed(worker, request, given, session)

    def compile(self, given: CompileArguments) -> "Build":
        from ..remote.judge_frames import build_of, packed_compile  # seldom needed

        with self._workers.lent() as worker:
            asked = packed_compile(given)
            return build_of(given, worker.ask(asked, frames.Compiled, cancel=given.cancel))

    def perform_program(self, request: Request) -> SandboxResult:
        limit = self._programs_at_once
        if not limit.acquire(request.cancel):
            return called_off(request, time.monotonic(), self._plan.layers)
        try:
            return self._perform_somewhere(request, CallArguments(code=request.code))
        finally:
            limit.release()

    def session(self, given: SessionArguments, why: str = "") -> "Session":
        if self._wanted(given) and self._private:
            self._refuse("workspace")
        return self._opened_sessions.open(given, why)

    def resume(self, token: str) -> "Session":
        return self._opened_sessions.resume(token)

    def discard(self, token: str) -> None:
        self._opened_sessions.discard(token)

    @property
    def _opened_sessions(self) -> WorkerSessions:
        if self._sessions_of_workers is None:
            raise ClosedError("the sandbox is not open yet")
        return self._sessions_of_workers

    def state(self) -> SupervisorsState:
        states = [
            each.ask(worker_frames.GetState(), worker_frames.CellsState).state
            for each in self._workers.all()
        ]
        return SupervisorsState(
            tuple(one for each in states for one in each.supervisors),
            sum(each.sessions for each in states), sum(each.frozen for each in states),
            sum(each.paused for each in states),
        )  # fmt: skip

    def settle(self) -> None:
        for each in self._workers.all():
            each.ask(frames.AwaitSettled(), frames.Done)

    def close(self) -> None:
        for each in (self._turns, self._programs_at_once):
            each.close()
        self._programs.close()
        self._workers.close()
        self._ports.close()
        if self._egress:
            self._egress.close()
        self._release()

    def _note_end(self, worker: Worker) -> None:
        if self._sessions_of_workers:
            self._sessions_of_workers.note_end(worker)

    # Upcalls of workers.

    def _answer(self, worker: Worker, upcall: "msgspec.Struct") -> "tuple[msgspec.Struct, int]":
        if isinstance(upcall, worker_frames.Note):
            return worker_frames.Noted(self._note(worker, upcall)), NEVER
        if isinstance(upcall, worker_frames.GetEgress):
            assert self._egress  # noqa: S101 - the first frame says so
            return worker_frames.EgressGiven(), self._egress.process.control_for(upcall.plan)
        assert isinstance(upcall, worker_frames.GetFiles)  # noqa: S101 - none else is left
        return worker_frames.SharedFilesGiven(self._files_for(worker, upcall.language)), NEVER

    def _note(self, worker: Worker, note: worker_frames.Note) -> bool:
        if note.category == "session" and self._sessions_of_workers:
            id = str(note.about.get("session_id", ""))
            self._sessions_of_workers.note(worker, id, note.action)
        if self._trail is None:
            return True
        about = {**note.about, "level": AuditLevel(note.about["level"])}
        return self._trail.log.record(
            note.category, note.action, sandbox_id=self._trail.sandbox_id, span=note.span, **about
        )

    def _files_for(self, worker: Worker, language: str) -> dict[str, dict[str, bytes]]:
        """Return the shared files of a language, and send the worker each change of them."""
        given = {}
        for place, files in self._shared_files(language).items():
            change = partial(_replace_files, worker, language, place)
            given[place] = _as_bytes(files.follow(change))
            worker.at_end(partial(files.unfollow, change))
        return given


def _replace_files(
    worker: Worker, language: str, place: str, files: "Mapping[str, Content]"
) -> None:
    frame = worker_frames.ReplaceFiles(language, place, _as_bytes(files))
    with contextlib.suppress(LaunchError, ClosedError):  # it has ended; another gets the files
        if number := worker.ask(frame, worker_frames.FilesReplaced).errno:
            raise OSError(number, os.strerror(number))


def _as_bytes(files: "Mapping[str, Content]") -> dict[str, bytes]:
    return {path: each.encode() if isinstance(each, str) else each for path, each in files.items()}


def _performed(
    worker: Worker, request: Request, given: CallArguments, session: str = ""
) -> SandboxResult:
    can_call, program = request.on_call is not None, request.program
    on_streams = program.on_streams if program else request.on_streams
    frame = worker_frames.Perform(
        packed_request(request, given, session, stream=request.on_output is not None),
        request.execution_id, request.tools if can_call else None, request.sites,
        given.workspace, given.clean, on_streams is not None, program.frame if program else None,
        program.terminal if program else None,
    )  # fmt: skip
    if not (can_call or on_streams):
        return result_of(worker.ask(frame, frames.Executed, request.on_output, request.cancel))
    with contextlib.ExitStack() as after:
        after.enter_context(worker.answering(request))
        on_descriptors = None
        if on_streams:
            from .worker_streams import StreamsOfWorker  # seldom needed

            streams = StreamsOfWorker(worker, request.execution_id, on_streams)
            on_descriptors = after.enter_context(streams)
        executed = worker.ask(
            frame, frames.Executed, request.on_output, request.cancel, on_descriptors
        )
    return result_of(executed)


def _packages(given: SandboxArguments) -> tuple[str, ...] | str | None:
    packages = given.packages
    if packages is None:
        return None
    return os.fspath(packages) if isinstance(packages, str | os.PathLike) else tuple(packages)


def _secret_variables(given: SandboxArguments) -> frozenset[str]:
    """Return the variables of the environment with values of credentials, which no worker gets."""
    if not given.credentials:
        return frozenset()
    from ....policies.network.credential import credential_of

    keys = [
        (credential_of(each) if isinstance(each, str) else each).key for each in given.credentials
    ]
    return frozenset(key.removeprefix("env:") for key in keys if key.startswith("env:"))


def _share(pool: PoolSettings, count: int) -> PoolSettings:
    """Return the settings of one worker's pool: of cells and memory it has its share, and this
    process counts the calls."""
    return pool._replace(
        size=-(-pool.size // count), low_water=-(-pool.low_water // count),
        memory_bytes=pool.memory_bytes // count, packages_bytes=pool.packages_bytes // count,
    )  # fmt: skip


def _share_of_sessions(sessions: SessionSettings, count: int) -> SessionSettings:
    most = sessions.memory_bytes
    return sessions._replace(memory_bytes=None if most is None else most // count)


def _host_settings(given: HostSettings) -> dict[str, Any]:
    settings = {
        name: getattr(given, name)
        for name in ("python", "backend", "runtime", "rootfs", "cgroup_root", "user", "languages",
                     "language", "pausable")
    }  # fmt: skip
    settings["interpreters"] = dict(given.interpreters)
    return {name: _plain(each) for name, each in settings.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _pause_settings(given: HostSettings, count: int) -> dict[str, Any]:
    settings = {name: _plain(each) for name, each in given.pauses._asdict().items()}
    if (most := given.pauses.sandbox_bytes) is not None:
        settings["sandbox_bytes"] = most // count
    if callable(key := settings["key"]):
        settings["key"] = key()
    return settings


def _store_settings(store: "PackageStore | None") -> dict[str, Any] | None:
    if store is None:
        return None
    source, allow = store.source, store.allow
    return {
        "directory": str(store.directory), "find_links": source.find_links, "index": source.index,
        "index_url": source.index_url, "max_bytes": store.max_bytes,
        "allow": None if allow is None else sorted(allow),
        "optional_layers": list(store.optional_layers),
        "python": None if store.interpreter.is_ours else store.interpreter.path,
    }  # fmt: skip


def _workspace_settings(workspaces: "Workspaces") -> dict[str, Any]:
    return {
        "directory": str(workspaces.directory), "max_bytes": workspaces.max_bytes,
        "max_files": workspaces.max_files, "max_age_seconds": workspaces.max_age_seconds,
        "review": workspaces.review, "wait_seconds": workspaces.wait_seconds,
    }  # fmt: skip
