"""`WorkerService`: the requests of a sandbox to its worker, whose own sandbox makes the cells.

The sandbox checks and records each call, so this one records nothing itself: its trail is that of the
sandbox, which also answers tool calls and has the egress process and the shared files.
"""

import _socket
import contextlib
import os
import threading
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from ....policies.errors import CellwrightError, ClosedError, LaunchError
from ....policies.plan import Plan
from ....runner import channel
from ....runner.audit.log import AuditLog
from ....runner.audit.record import Span
from ....runner.confined.egress_process import EgressProcess
from ....runner.messages import AddCell, Become, Call, encode
from ....runner.requests.request import LongLivedProgram, Request, Streams
from ....runner.sessions.sessions import Sessions
from ....runner.settings import AuditLevel, PauseSettings, PoolSettings, SessionSettings
from ....runner.shared_files import SharedFiles
from ....runner.watching.open_calls import Orphans, Tell
from ...sandbox.calls.call_request import make_request
from ...sandbox.containers.image_cells import ImageCells
from ...sandbox.local import LocalCells
from ...sandbox.network.cell_credentials import CellCredentials
from ...sandbox.network.network_control import SandboxEgress
from ...sandbox.parameters import SessionArguments
from ...sandbox.remote import frames
from ...sandbox.remote.call_frames import given_of, packed_result
from ...sandbox.sandbox import Sandbox
from ...sandbox.sandbox_arguments import HostSettings, SandboxArguments
from ...sandbox.sessions.cell_session import CellSession
from ...sandbox.workers import worker_frames
from ..daemon.quotas import QuotaSettings, ServeLimits, TenantQuota
from ..daemon.service import OpenedSessions, Requester, Service

_A = TypeVar("_A", bound=msgspec.Struct)
_DESCRIPTORS = "stdin", "stdout", "process", "master"
_KEPT = 64  # ended programs whose standard error is kept
_FOREVER = float("inf")  # the settings of the sessions bound their lives
_LIMITS = ServeLimits(ports_per_session=1_000_000)


class Asks(Protocol):
    """Asks the sandbox (worker_main.py)."""

    def ask(self, upcall: msgspec.Struct, kind: type[_A]) -> _A: ...

    def ask_for_descriptor(
        self, upcall: msgspec.Struct, kind: type[_A]
    ) -> tuple[_A, list[int]]: ...


class WorkerService(Service):
    """Carries out the requests of the sandbox; safe from many threads."""

    def __init__(self, sandbox: "WorkerSandbox", upcalls: Asks) -> None:
        opened = OpenedSessions(TenantQuota("", QuotaSettings()))
        super().__init__(
            sandbox.policy, lambda: sandbox, (sandbox.policy.name,), _LIMITS, _FOREVER,
            opened, may_pause=True,
        )  # fmt: skip
        self.start()
        self._cells = sandbox.cells
        self.python: tuple[str, ...] = getattr(sandbox.cells, "python", ())
        self._upcalls = upcalls
        self._orphans = Orphans()
        self._streams: dict[
            str, Streams
        ] = {}  # streams of running executions that gave theirs away
        self._ended: dict[str, Callable[[], str]] = {}  # their standard error afterwards
        self._answers |= {
            worker_frames.Perform: self._perform,
            worker_frames.GetStderr: self._stderr,
            worker_frames.OpenHere: self._open_here,
            worker_frames.CopySession: self._copy,
            worker_frames.ChangeSession: self._change,
            worker_frames.MakeRoom: self._make_room,
            worker_frames.GetState: lambda *_: worker_frames.CellsState(self._cells.state()),
            worker_frames.ReplaceFiles: lambda frame, _: self._cells.replace_files(frame),
        }

    def _perform(self, frame: worker_frames.Perform, requester: Requester) -> frames.Executed:
        program = frame.program
        if frame.command:
            return self._perform_command(frame, frame.command, requester)
        given = replace(
            given_of(program), workspace=frame.workspace, clean=frame.clean,
            on_output=requester.on_output if program.stream else None, cancel=requester.fileno(),
        )  # fmt: skip
        request = replace(
            make_request(given, self._cells.policy.limits), execution_id=frame.execution_id
        )
        if frame.gives_streams:
            on_streams = partial(self._give_streams, frame.execution_id, requester)
            request = replace(request, on_streams=on_streams)
        if frame.tools is not None:
            on_call = partial(self._use_tool, frame.execution_id)
            request = replace(
                request,
                tools=frame.tools,
                sites=frame.sites,
                on_call=on_call,
                orphans=self._orphans,
            )
        if program.session:
            return packed_result(self._cell_session(program).perform(request, given))
        try:
            return packed_result(self._cells.perform_given(request, given))
        finally:
            self._forget_streams(frame.execution_id)

    def _perform_command(
        self, frame: worker_frames.Perform, command: Become, requester: Requester
    ) -> frames.Executed:
        given, limits = frame.program.given, self._cells.policy.limits
        on_streams = partial(self._give_streams, frame.execution_id, requester)
        request = Request(
            code=frame.program.code.decode(), files=command.files, limits=limits,
            trace_id=given.trace_id, cancel=requester.fileno(), execution_id=frame.execution_id,
            on_output=requester.on_output if frame.program.stream else None,
            program=LongLivedProgram(command, on_streams, frame.terminal),
        )  # fmt: skip
        try:
            return packed_result(self._cells.perform_program(request))
        finally:
            self._forget_streams(frame.execution_id)

    def _give_streams(self, execution_id: str, requester: Requester, streams: Streams) -> None:
        self._streams[execution_id] = streams
        given = {name: getattr(streams, name) for name in _DESCRIPTORS}
        given = {name: number for name, number in given.items() if number >= 0}
        opened = worker_frames.StreamsOpened(tuple(given), streams.network is not None)
        requester.hand_over(opened, tuple(given.values()))
        for number in given.values():
            os.close(number)

    def _forget_streams(self, execution_id: str) -> None:
        streams = self._streams.pop(execution_id, None)
        if streams:
            self._ended[execution_id] = streams.stderr
            while len(self._ended) > _KEPT:
                del self._ended[next(iter(self._ended))]
            if streams.network:
                streams.network.close()

    def _stderr(self, frame: worker_frames.GetStderr, _: Requester) -> frames.Content:
        streams = self._streams.get(frame.execution_id)
        text = streams.stderr if streams else self._ended.pop(frame.execution_id, str)
        return frames.Content(text().encode(errors="replace"))

    def ask_for_socket(self, execution_id: str, channel: int) -> None:
        """Have the launcher send a socket of a cell to the other end of `channel`, which is closed."""
        streams = self._streams.get(execution_id)
        with contextlib.suppress(CellwrightError):  # the other end reads the end of the channel
            if streams and streams.network:
                streams.network.ask_on(channel)
        os.close(channel)

    def _cell_session(self, frame: Any) -> CellSession:
        session = self._session(frame)
        assert isinstance(session, CellSession)  # noqa: S101 - a worker has no others
        return session

    def _open_here(self, frame: worker_frames.OpenHere, _: Requester) -> frames.Opened:
        given = SessionArguments(
            id=frame.id, language=frame.language, workspace=frame.workspace, clean=frame.clean,
            packages=frame.packages,
        )  # fmt: skip
        with self._opened.room() as put:
            return self._opened_frame(self._cells.session(given, frame.why), put)

    def _copy(self, frame: worker_frames.CopySession, _: Requester) -> worker_frames.Copied:
        from ....runner.sessions.branches import CannotBranch  # seldom needed

        with self._opened.room(frame.n) as put:
            try:
                made = self._cell_session(frame).copies(frame.n, frame.reseed)
            except CannotBranch as error:
                return worker_frames.Copied((), str(error))
            return worker_frames.Copied(tuple(self._opened_frame(each, put) for each in made))

    def _change(
        self, frame: worker_frames.ChangeSession, _: Requester
    ) -> worker_frames.SessionChanged:
        session = self._cell_session(frame)
        is_frozen = False
        if frame.what == "save":
            session.save()
        elif frame.what == "close":
            session.close()
        elif frame.what == "freeze":
            is_frozen = session.freeze()
        order = session.order() if frame.what == "order" else ()
        return worker_frames.SessionChanged(session.workspace, is_frozen, order)

    def _make_room(self, frame: worker_frames.MakeRoom, _: Requester) -> worker_frames.RoomMade:
        sessions = self._cells.counted_sessions()
        if frame.is_done:
            return worker_frames.RoomMade(sessions.make_room_for_one())
        return worker_frames.RoomMade(False, sessions.idle_since())

    def _use_tool(self, execution_id: str, call: Call, tell: Tell) -> None:
        upcall = worker_frames.UseTool(
            execution_id, call.number, call.name, call.arguments, call.site, call.alone
        )
        try:
            answer = self._upcalls.ask(upcall, worker_frames.ToolAnswered).answer
        except ClosedError:  # the sandbox is gone, and the program ends
            return
        if answer is not None:
            tell(replace(answer, number=call.number))


def opened_service(start: worker_frames.StartWorker, upcalls: Asks) -> WorkerService:
    """Return the service of a worker, whose launcher has started; raises what `Sandbox` raises."""
    from ...sandbox.packages.package_store import PackageStore  # needs an extra
    from ...sandbox.workspaces.workspace_store import Workspaces

    host = HostSettings(
        **start.host, pauses=PauseSettings(**start.pauses),
        package_store=PackageStore(**start.store) if start.store else None,
    )  # fmt: skip
    given = SandboxArguments(
        policy=start.policy, packages=start.packages, host=host,
        workspaces=Workspaces(**start.workspaces) if start.workspaces else None,
        image=start.image, pool=PoolSettings(**start.pool), sessions=SessionSettings(**start.sessions),
    )  # fmt: skip
    return WorkerService(WorkerSandbox(given, start, upcalls), upcalls)


class WorkerSandbox(Sandbox):
    """The sandbox of a worker."""

    def __init__(
        self, given: SandboxArguments, start: worker_frames.StartWorker, upcalls: Asks
    ) -> None:
        kind = ImageCellsOfWorker if given.image else CellsOfWorker
        self.cells: CellsOfWorker = kind(given, start, upcalls)
        self._own(given, self.cells)


class CellsOfWorker(LocalCells):
    """Cells whose calls the sandbox has checked and recorded."""

    def __init__(
        self, given: SandboxArguments, start: worker_frames.StartWorker, upcalls: Asks
    ) -> None:
        self._of_sandbox = start
        self._upcalls = upcalls
        # One for each language: while the files of one are asked for, those of another may change.
        self._files_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._files: dict[str, dict[str, SharedFiles]] = {}
        super().__init__(given)

    def perform_given(self, request: Request, given: Any) -> Any:
        """Execute a request outside of sessions."""
        wanted = self._wanted(given) if given.workspace is not None or given.clean else None
        return self.perform(request, given.language, given, wanted)

    def counted_sessions(self) -> Sessions:
        return self._supervisors.counted()

    def _prepare(self, given: SandboxArguments) -> None:
        start = self._of_sandbox
        self.audit = _TrailOfSandbox(self._upcalls)
        self._private = self._tools = self._skills = None
        if start.variables or start.files:
            self._credentials = _Placeholders(start.variables, start.files)

    def _way_out(self, user: int | str | None) -> SandboxEgress | None:
        control = self._of_sandbox.egress
        return None if control is None else _EgressOfSandbox(control, self._upcalls)

    def _shared_files(self, language: str) -> dict[str, SharedFiles]:
        if not self._of_sandbox.shares_files:
            return {}
        with self._files_locks[language]:  # ReplaceFiles, which may follow at once, waits
            if language not in self._files:
                given = self._upcalls.ask(
                    worker_frames.GetFiles(language), worker_frames.SharedFilesGiven
                )
                self._files[language] = {place: SharedFiles() for place in given.places}
                for place, files in given.places.items():
                    self._files[language][place].replace(files)
            return dict(self._files[language])

    def replace_files(self, frame: worker_frames.ReplaceFiles) -> worker_frames.FilesReplaced:
        with self._files_locks[frame.language]:
            found = self._files.get(frame.language, {}).get(frame.place)
        try:
            if found:
                found.replace(frame.files)
        except OSError as error:
            return worker_frames.FilesReplaced(error.errno or 0)
        return worker_frames.FilesReplaced()


class ImageCellsOfWorker(CellsOfWorker, ImageCells):
    """Such cells whose programs have an image as their root."""


class _Placeholders(CellCredentials):
    """The credentials of cells, without their values, which the egress process has."""

    encoded = b""

    def __init__(self, variables: dict[str, str], files: dict[str, str]) -> None:
        self.variables = variables
        self.files = files

    def require_hidden(self, *_: object, **__: object) -> None:
        """Do nothing: the sandbox has looked."""

    def close(self) -> None:
        """Do nothing: the files are the sandbox's."""


class _TrailOfSandbox(AuditLog):
    """Sends each event to the sandbox, which writes the trail."""

    def __init__(self, upcalls: Asks) -> None:
        super().__init__(max_entries=0)
        self._upcalls = upcalls

    def record(
        self, category: str, action: str, *, target: str = "", allowed: bool = True,
        level: AuditLevel = AuditLevel.INFO, sandbox_id: str = "", span: Span | None = None,
        owed: bool = False, **details: Any,
    ) -> bool:  # fmt: skip
        if category == "policy":  # the sandbox has recorded it
            return True
        about = {"target": target, "allowed": allowed, "level": int(level), "owed": owed, **details}
        try:
            note = worker_frames.Note(category, action, about, span)
            return self._upcalls.ask(note, worker_frames.Noted).kept
        except ClosedError:  # the sandbox is gone
            return False


class _EgressProcessOfSandbox(EgressProcess):
    """Hands the sockets of cells to the egress process of the sandbox."""

    def __init__(self, control: str, upcalls: Asks) -> None:
        super().__init__("", 0, control)
        self._upcalls = upcalls
        self._leads_to_process = -1

    def _hand_over(self, plan: Plan, descriptors: tuple[int, ...]) -> None:
        for _ in range(2):
            if self._leads_to_process < 0:
                asked = worker_frames.GetEgress(plan)
                _, (number,) = self._upcalls.ask_for_descriptor(asked, worker_frames.EgressGiven)
                self._leads_to_process = number
            try:
                with contextlib.closing(
                    _socket.socket(fileno=os.dup(self._leads_to_process))
                ) as sock:
                    channel.send(sock, encode(AddCell()), descriptors)
                return
            except (BrokenPipeError, ConnectionResetError):
                os.close(self._leads_to_process)
                self._leads_to_process = -1
        raise LaunchError("the egress process ended twice")


class _EgressOfSandbox(SandboxEgress):
    """The way of cells to the hosts that the policy names, which the sandbox owns."""

    def __init__(self, control: str, upcalls: Asks) -> None:
        self.process = _EgressProcessOfSandbox(control, upcalls)

    def listen(self) -> None:
        """Do nothing: the sandbox listens."""

    def close(self) -> None:
        self.process.close()
