"""The requests of clients under one policy: each returns a reply or raises."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import msgspec
from msgspec.structs import asdict

from ....policies.errors import BusyError, ClosedError, PolicyError
from ....policies.policy import Policy
from ....runner.request import new_execution_id
from ....runner.result import SandboxResult, SandboxStatus
from ....runner.session import gone
from ....runner.supervisors import SupervisorsState
from ...sandbox.parameters import TerminalArguments
from ...sandbox.remote.arguments import given_of, packed_result, text_of, weight_of
from ...sandbox.remote.frames import (
    AwaitSettled,
    BranchSession,
    CheckSession,
    ClosePort,
    CloseSession,
    Content,
    Describe,
    Description,
    DiscardPaused,
    Done,
    Download,
    Execute,
    Executed,
    ExposePort,
    ExtendSession,
    Files,
    ForkSession,
    ListSessionFiles,
    LostReason,
    Opened,
    OpenedBranches,
    OpenSession,
    OpenTerminal,
    Paused,
    PauseSession,
    PortExposed,
    ResumeSession,
    TakeSnapshot,
    TerminalOpened,
    Validate,
    Validated,
)
from ...sandbox.sandbox import Sandbox
from ...sandbox.session import Session
from .limits import ServeLimits
from .ports import DaemonsPorts
from .quotas import TenantQuota

_REMEMBERED = 1000  # lost sessions whose reason is kept
_UNKNOWN = LostReason("unknown to the daemon")
_COPIES = 3  # of content while it is sent: itself, its frame, and the packets


class Requester(Protocol):
    """The client of a running request."""

    def fileno(self) -> int:
        """Return the descriptor that cancels the request once it is readable."""

    def weigh(self, extra: int) -> None:
        """Count bytes that the request needs; raises BusyError."""

    def on_output(self, stream: str, data: bytes) -> None: ...

    def terminal_quota(self) -> AbstractContextManager[None]: ...

    def lend(self, frame: msgspec.Struct, terminal: int) -> None: ...

    def is_gone(self) -> bool: ...


class Service:
    """Carries out requests; safe from many threads."""

    def __init__(
        self, policy: Policy, make: Callable[[], Sandbox], policies: tuple[str, ...],
        limits: ServeLimits, lifetime_seconds: float, quota: TenantQuota,
        count_sessions: Callable[[], int], opened: "OpenedSessions | None" = None,
        *, may_pause: bool = False,
    ) -> None:  # fmt: skip
        """`make` makes the sandbox when it is first needed.

        `lifetime_seconds`: the most by which a client can extend the life of a session.
        `count_sessions`: of the tenant.  `opened`: the sessions of the service whose place this one
        takes, which clients go on using.
        """
        if policy.privacy.enabled:
            raise PolicyError(
                f"policy {policy.name!r}: privacy is not available in a daemon",
                "make a Sandbox in the process that holds the personal data",
            )
        self.name = policy.name
        self.policies = policies
        self.opened = opened or OpenedSessions()
        self._make = make
        self._making = threading.Lock()
        self._made: Sandbox | None = None
        self._closed = False
        self._held = 0  # requests that use it
        self._lock = threading.Lock()
        self._quota = quota
        self._count_sessions = count_sessions
        self._lifetime_seconds = lifetime_seconds
        self._may_pause = may_pause
        self._ports = DaemonsPorts(limits.ports_per_session)
        self._answers: dict[type, Callable[[Any, Requester], msgspec.Struct]] = {
            Execute: self._execute,
            Describe: self._describe,
            Validate: self._validate,
            AwaitSettled: self._settle,
            OpenSession: self._open,
            CheckSession: lambda frame, requester: self.opened.why_lost(frame.session),
            ListSessionFiles: lambda frame, requester: Files(self._session(frame).files()),
            Download: self._download,
            TakeSnapshot: self._snapshot,
            ForkSession: self._fork,
            BranchSession: self._branch,
            PauseSession: self._pause,
            ResumeSession: self._resume,
            DiscardPaused: self._discard,
            ExtendSession: self._extend,
            ExposePort: self._expose,
            ClosePort: self._close_port,
            OpenTerminal: self._terminal,
            CloseSession: self._close,
        }

    def answer(self, request: Any, requester: Requester) -> msgspec.Struct:
        """Return the reply; raises what the same call of a Sandbox or Session raises."""
        return self._answers[type(request)](request, requester)

    def hold(self) -> None:
        """Keep it from being idle until `release`."""
        with self._lock:
            self._held += 1

    def release(self) -> None:
        with self._lock:
            self._held -= 1

    def start(self) -> None:
        """Make the sandbox now; raises what making it raises."""
        _ = self._sandbox

    def state(self) -> SupervisorsState | None:
        """Return what its cells do and use now; None before the sandbox is made, and after the end."""
        return self._made._state() if self._made and not self._closed else None

    def sessions(self) -> int:
        """Return how many sessions of its sandbox live, or are paused until their next request."""
        state = self.state()
        return state.sessions + state.paused if state else 0

    def is_idle(self) -> bool:
        """Tell whether neither a request nor a session uses it."""
        return not self._held and not self.sessions()

    def close(self) -> None:
        """End its cells; closing twice is harmless."""
        self._closed = True
        with self._making:
            if self._made:
                self._made.close()

    @property
    def _sandbox(self) -> Sandbox:
        with self._making:
            if self._closed:
                raise ClosedError("the daemon has closed this policy's cells")
            if self._made is None:
                self._made = self._make()
            return self._made

    def _execute(self, frame: Execute, requester: Requester) -> Executed:
        requester.weigh(weight_of(frame))
        self._check_packages(frame.given.packages)
        executing = self._session(frame) if frame.session else self._sandbox
        on_output = requester.on_output if frame.stream else None
        given, cancel = given_of(frame), requester.fileno()
        with self._quota.turn(cancel) as is_turn:
            if not is_turn:
                return packed_result(_cancelled(given.trace_id))
            result = executing._execute(given, on_output, cancel)
            self._quota.spend(result.usage.cpu_user_seconds + result.usage.cpu_system_seconds)
        return packed_result(result)

    def _check_packages(self, packages: Sequence[str]) -> None:
        """Refuse packages under a policy that names none: a client chooses only among those that the
        owner of the daemon allows."""
        policy = self._sandbox.policy
        if packages and not policy.packages.allow:
            raise PolicyError(
                f"packages: the daemon's policy {policy.name!r} allows clients none",
                "its owner lists them in packages.allow of the policy",
            )

    def _describe(self, frame: Describe, requester: Requester) -> Description:
        return Description(self.policies, self._sandbox.policy, self._sandbox.plan)

    def _validate(self, frame: Validate, requester: Requester) -> Validated:
        requester.weigh(4 * len(frame.code))
        return Validated(*self._sandbox.validate_source(text_of(frame.code)))

    def _settle(self, frame: AwaitSettled, requester: Requester) -> Done:
        self._sandbox.settle()
        return Done()

    def _session(self, frame: Any) -> Session:
        return self.opened.named(frame.session)

    def _open(self, frame: OpenSession, requester: Requester) -> Opened:
        self._check_packages(frame.packages)
        with self._room_for_session(frame.id):
            session = self._sandbox.session(frame.id, frame.language, packages=frame.packages)
        return self._told(session)

    def _told(self, session: Session) -> Opened:
        key = self.opened.key_of(session, self)
        return Opened(
            key, session.id, session.diverged, session.language, session.forked_by,
            session.not_copied,
        )  # fmt: skip

    def _room_for_session(self, id: str | None) -> AbstractContextManager[None]:
        if id is not None and self.opened.has(id, self):
            return nullcontext()
        return self._quota.room_for_session(self._count_sessions)

    def _download(self, frame: Download, requester: Requester) -> Content:
        session = self._session(frame)
        sizes = {file.path: file.size_bytes for file in session.files()}
        requester.weigh(_COPIES * sizes.get(frame.path, 0))
        return Content(session.download(frame.path))

    def _snapshot(self, frame: TakeSnapshot, requester: Requester) -> Content:
        session = self._session(frame)
        requester.weigh(_COPIES * sum(file.size_bytes for file in session.files()))
        return Content(session.snapshot())

    def _fork(self, frame: ForkSession, requester: Requester) -> Opened:
        with self._quota.room_for_session(self._count_sessions):
            branch = self._session(frame).fork()
        if requester.is_gone():  # no client has its key then
            branch.close()
        return self._told(branch)

    def _branch(self, frame: BranchSession, requester: Requester) -> OpenedBranches:
        with (
            self._turn(requester),
            self._quota.room_for_session(self._count_sessions, frame.n),
        ):
            made = self._session(frame).branch(frame.n, frame.reseed, replay=frame.replay)
        if requester.is_gone():  # no client has their keys then
            for each in made:
                each.close()
        return OpenedBranches(tuple(map(self._told, made)))

    def _pause(self, frame: PauseSession, requester: Requester) -> Paused:
        self._check_may_pause()
        with self._turn(requester):
            token = self._session(frame).pause()
        if requester.is_gone():  # no client has the token then
            self._sandbox.discard(token)
        return Paused(token)

    def _resume(self, frame: ResumeSession, requester: Requester) -> Opened:
        self._check_may_pause()
        with self._turn(requester), self._quota.room_for_session(self._count_sessions):
            return self._told(self._sandbox.resume(frame.token))

    def _discard(self, frame: DiscardPaused, requester: Requester) -> Done:
        self._check_may_pause()
        self._sandbox.discard(frame.token)
        return Done()

    def _check_may_pause(self) -> None:
        if not self._may_pause:
            raise PolicyError(
                "pause: this daemon keeps no paused sessions",
                "its owner names pauses.directory in its configuration",
            )

    @contextlib.contextmanager
    def _turn(self, requester: Requester) -> Iterator[None]:
        """Hold the turn of a call: what a copy of a session costs counts as one."""
        with self._quota.turn(requester.fileno()) as is_turn:
            if not is_turn:
                raise BusyError("the request was cancelled while it waited for its turn")
            yield

    def _extend(self, frame: ExtendSession, requester: Requester) -> Done:
        if frame.seconds > self._lifetime_seconds:
            raise PolicyError(
                f"seconds: a session of this daemon lives at most {self._lifetime_seconds:g} s more, "
                f"got {frame.seconds:g}",
                "its owner sets that by cellwright serve --session-lifetime",
            )
        self._session(frame).extend(frame.seconds)
        return Done()

    def _expose(self, frame: ExposePort, requester: Requester) -> PortExposed:
        session = self._session(frame)
        with self._ports.room_for(session):
            exposed = session.expose(frame.port, path=frame.path, host_port=frame.host_port)
            if requester.is_gone():  # no client has its key then
                exposed.close()
            return PortExposed(self._ports.add(session, exposed), exposed.address)

    def _close_port(self, frame: ClosePort, requester: Requester) -> Done:
        self._ports.close(frame.port)
        return Done()

    def _terminal(self, frame: OpenTerminal, requester: Requester) -> Done:
        arguments = asdict(frame)
        del arguments["session"]
        with (
            requester.terminal_quota(),
            self._quota.turn(requester.fileno()) as is_turn,  # a call, as long as it is open
        ):
            if is_turn:
                self._lend_terminal(frame, arguments, requester)
        return Done()

    def _lend_terminal(
        self, frame: OpenTerminal, arguments: dict[str, Any], requester: Requester
    ) -> None:
        with self._session(frame)._terminal(TerminalArguments(**arguments)) as terminal:
            report = terminal.report
            opened = TerminalOpened(report.id, report.pid, report.exit_code)
            requester.lend(opened, terminal.fileno())

    def _close(self, frame: CloseSession, requester: Requester) -> Done:
        if not self.opened.why_lost(frame.session).lost:
            self._session(frame).close()
        return Done()


class OpenedSessions:
    """Sessions by the unique key that clients use for them, with the service that opened each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_key: dict[str, Session] = {}
        self._services: dict[str, Service] = {}  # by the same keys
        self._lost: dict[str, LostReason] = {}

    def has(self, id: str, service: Service) -> bool:
        """Tell whether a session of that id, opened by a service, lives."""
        with self._lock:
            return any(
                each.id == id and not each.lost and self._services[key] is service
                for key, each in self._by_key.items()
            )

    def key_of(self, session: Session, service: Service) -> str:
        with self._lock:
            self._forget_the_lost()
            for key, known in self._by_key.items():
                if known is session:
                    return key
            key = os.urandom(16).hex()
            self._by_key[key] = session
            self._services[key] = service
            return key

    def named(self, key: str) -> Session:
        with self._lock:
            if session := self._by_key.get(key):
                return session
            why = self._lost.get(key, _UNKNOWN)
        raise gone(why.lost, why.expired)

    def why_lost(self, key: str) -> LostReason:
        with self._lock:
            session = self._by_key.get(key)
            return _reason(session) if session else self._lost.get(key, _UNKNOWN)

    def _forget_the_lost(self) -> None:
        """Keep only the reason of each lost session: its history may be large."""
        for key in [key for key, each in self._by_key.items() if each.lost]:
            self._lost[key] = _reason(self._by_key.pop(key))
            del self._services[key]
        while len(self._lost) > _REMEMBERED:
            del self._lost[next(iter(self._lost))]


def _cancelled(trace_id: str | None) -> SandboxResult:
    """Return the result of a call that was cancelled while it waited for its turn."""
    return SandboxResult(
        status=SandboxStatus.CANCELLED, reason="cancelled", error="cancelled while it waited",
        execution_id=new_execution_id(), trace_id=trace_id,
    )  # fmt: skip


def _reason(session: Session) -> LostReason:
    return LostReason(session.lost, session.expired, session.paused)
