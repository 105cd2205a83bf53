"""The requests of clients under one policy: each returns a reply or raises."""

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import msgspec
from msgspec.structs import asdict

from ....policies.errors import PolicyError
from ....runner.session import gone
from ....runner.settings import SessionSettings
from ...sandbox.parameters import TerminalArguments
from ...sandbox.remote.arguments import given_of, packed_result, text_of, weight_of
from ...sandbox.remote.frames import (
    AwaitSettled,
    CheckSession,
    ClosePort,
    CloseSession,
    Content,
    Describe,
    Description,
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
    OpenSession,
    OpenTerminal,
    PortExposed,
    TakeSnapshot,
    TerminalOpened,
    Validate,
    Validated,
)
from ...sandbox.sandbox import Sandbox
from ...sandbox.session import Session
from .limits import ServeLimits
from .ports import DaemonsPorts

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
        self, sandbox: Sandbox, policies: tuple[str, ...],
        limits: ServeLimits = ServeLimits(),  # noqa: B008 - a constant
        lifetime_seconds: float = SessionSettings().lifetime_seconds,
    ) -> None:  # fmt: skip
        """`lifetime_seconds`: the most by which a client can extend the life of a session."""
        if sandbox.privacy:
            raise PolicyError(
                f"policy {sandbox.policy.name!r}: privacy is not available in a daemon",
                "make a Sandbox in the process that holds the personal data",
            )
        self._sandbox = sandbox
        self._lifetime_seconds = lifetime_seconds
        self._ports = DaemonsPorts(limits.ports_per_session)
        self._policies = policies
        self._opened = _Opened()
        self._answers: dict[type, Callable[[Any, Requester], msgspec.Struct]] = {
            Execute: self._execute,
            Describe: self._describe,
            Validate: self._validate,
            AwaitSettled: self._settle,
            OpenSession: self._open,
            CheckSession: lambda frame, requester: self._opened.why_lost(frame.session),
            ListSessionFiles: lambda frame, requester: Files(self._session(frame).files()),
            Download: self._download,
            TakeSnapshot: self._snapshot,
            ForkSession: self._fork,
            ExtendSession: self._extend,
            ExposePort: self._expose,
            ClosePort: self._close_port,
            OpenTerminal: self._terminal,
            CloseSession: self._close,
        }

    def answer(self, request: Any, requester: Requester) -> msgspec.Struct:
        """Return the reply; raises what the same call of a Sandbox or Session raises."""
        return self._answers[type(request)](request, requester)

    def close(self) -> None:
        self._sandbox.close()

    def _execute(self, frame: Execute, requester: Requester) -> Executed:
        requester.weigh(weight_of(frame))
        self._check_packages(frame.given.packages)
        executing = self._session(frame) if frame.session else self._sandbox
        on_output = requester.on_output if frame.stream else None
        return packed_result(executing._execute(given_of(frame), on_output, requester.fileno()))

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
        return Description(self._policies, self._sandbox.policy, self._sandbox.plan)

    def _validate(self, frame: Validate, requester: Requester) -> Validated:
        requester.weigh(4 * len(frame.code))
        return Validated(*self._sandbox.validate_source(text_of(frame.code)))

    def _settle(self, frame: AwaitSettled, requester: Requester) -> Done:
        self._sandbox.settle()
        return Done()

    def _session(self, frame: Any) -> Session:
        return self._opened.named(frame.session)

    def _open(self, frame: OpenSession, requester: Requester) -> Opened:
        self._check_packages(frame.packages)
        session = self._sandbox.session(frame.id, frame.language, packages=frame.packages)
        return Opened(self._opened.key_of(session), session.id, session.diverged, session.language)

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
        branch = self._session(frame).fork()
        if requester.is_gone():  # no client has its key then
            branch.close()
        return Opened(self._opened.key_of(branch), branch.id, branch.diverged, branch.language)

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
            self._session(frame)._terminal(TerminalArguments(**arguments)) as terminal,
        ):
            report = terminal.report
            opened = TerminalOpened(report.id, report.pid, report.exit_code)
            requester.lend(opened, terminal.fileno())
        return Done()

    def _close(self, frame: CloseSession, requester: Requester) -> Done:
        if not self._opened.why_lost(frame.session).lost:
            self._session(frame).close()
        return Done()


class _Opened:
    """Sessions by the unique key that clients use for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_key: dict[str, Session] = {}
        self._lost: dict[str, LostReason] = {}

    def key_of(self, session: Session) -> str:
        with self._lock:
            self._forget_the_lost()
            for key, known in self._by_key.items():
                if known is session:
                    return key
            key = os.urandom(16).hex()
            self._by_key[key] = session
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
        while len(self._lost) > _REMEMBERED:
            del self._lost[next(iter(self._lost))]


def _reason(session: Session) -> LostReason:
    return LostReason(session.lost, session.expired)
