"""The requests of clients under one policy: each returns a reply or raises."""

import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from ....runner.session import gone
from ...sandbox.remote.arguments import given_of, packed_result, text_of, weight_of
from ...sandbox.remote.frames import (
    AwaitSettled,
    CheckSession,
    CloseSession,
    Content,
    Describe,
    Description,
    Done,
    Download,
    Execute,
    Executed,
    Files,
    ForkSession,
    ListSessionFiles,
    LostReason,
    Opened,
    OpenSession,
    TakeSnapshot,
    Validate,
    Validated,
)
from ...sandbox.sandbox import Sandbox
from ...sandbox.session import Session

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

    def is_gone(self) -> bool: ...


class Service:
    """Carries out requests; safe from many threads."""

    def __init__(self, sandbox: Sandbox, policies: tuple[str, ...]) -> None:
        self._sandbox = sandbox
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
            CloseSession: self._close,
        }

    def answer(self, request: Any, requester: Requester) -> msgspec.Struct:
        """Return the reply; raises what the same call of a Sandbox or Session raises."""
        return self._answers[type(request)](request, requester)

    def close(self) -> None:
        self._sandbox.close()

    def _execute(self, frame: Execute, requester: Requester) -> Executed:
        requester.weigh(weight_of(frame))
        executing = self._session(frame) if frame.session else self._sandbox
        on_output = requester.on_output if frame.stream else None
        return packed_result(executing._execute(given_of(frame), on_output, requester.fileno()))

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
        session = self._sandbox.session(frame.id, frame.language)
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
