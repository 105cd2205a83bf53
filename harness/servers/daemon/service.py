"""The requests of clients under one policy: each returns a reply or raises."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec.structs import asdict, replace

from ....policies.errors import BusyError, ClosedError, PolicyError
from ....policies.policy import Policy
from ....runner.messages import new_execution_id
from ....runner.requests.result import SandboxResult, SandboxStatus
from ....runner.sessions.events import gone
from ....runner.supervisor import SupervisorsState
from ...sandbox.calls.call_request import cpu_seconds_of
from ...sandbox.network.exposed_ports import ExposedPort
from ...sandbox.parameters import TerminalArguments
from ...sandbox.remote import frames
from ...sandbox.remote.call_frames import (
    given_of,
    packed_result,
    text_of,
    weight_of,
)
from ...sandbox.sandbox import Sandbox
from ...sandbox.sessions.session import Session
from ..client_quota import ClientQuota, OwnedTable, QuotaLevel
from ..served_requests import refuse_packages
from .quotas import ServeLimits, TenantQuota

_REMEMBERED = 1000  # lost sessions whose reason is kept
_UNKNOWN = frames.LostReason("unknown to the daemon")
_COPIES = 3  # copies of content while it is sent: itself, its frame, the packets


class Requester(Protocol):
    """The client of a running request."""

    def fileno(self) -> int:
        """Return the descriptor that cancels the request once it is readable."""

    def weigh(self, extra: int) -> None:
        """Count bytes that the request needs; raises BusyError."""

    def on_output(self, stream: str, data: bytes) -> None: ...

    def terminal_quota(self) -> AbstractContextManager[None]: ...

    def hand_over(self, frame: msgspec.Struct, descriptors: tuple[int, ...]) -> None: ...

    def await_end(self, watched: int) -> None: ...

    def is_gone(self) -> bool: ...


class Service:
    """Carries out requests; safe from many threads."""

    def __init__(
        self, policy: Policy, make: Callable[[], Sandbox], policies: tuple[str, ...],
        limits: ServeLimits, lifetime_seconds: float, opened: "OpenedSessions",
        *, may_pause: bool = False,
    ) -> None:  # fmt: skip
        """`make` makes the sandbox when it is first needed.

        `lifetime_seconds`: the most by which a client can extend the life of a session.  `opened`: the
        sessions of the tenant, which clients go on using when another service takes this one's place.
        """
        if policy.privacy.enabled:
            raise PolicyError(
                f"policy {policy.name!r}: privacy is not available in a daemon",
                "make a Sandbox in the process that holds the personal data",
            )
        self.name = policy.name
        self.policies = policies
        self._opened = opened
        self._make = make
        self._making = threading.Lock()
        self._made: Sandbox | None = None
        self._closed = False
        self._held = 0  # requests that use the policy
        self._lock = threading.Lock()
        self._quota = opened.quota
        self._lifetime_seconds = lifetime_seconds
        self._may_pause = may_pause
        of_session = QuotaLevel(limits.ports_per_session, "session")
        self._ports: OwnedTable[str, _ExposedBySession] = OwnedTable(
            ClientQuota("exposed ports", of_session, float("inf")), lambda each: each.session.lost
        )
        self._answers: dict[type, Callable[[Any, Requester], msgspec.Struct]] = {
            frames.Execute: self._execute,
            frames.CompileProgram: self._compile,
            frames.JudgeProgram: self._judge,
            frames.Describe: self._describe,
            frames.Validate: self._validate,
            frames.AwaitSettled: self._settle,
            frames.OpenSession: self._open,
            frames.CheckSession: lambda frame, requester: self._opened.why_lost(
                frame.session, self.name
            ),
            frames.ListSessionFiles: lambda frame, requester: frames.Files(
                self._session(frame).files()
            ),
            frames.Download: self._download,
            frames.TakeSnapshot: self._snapshot,
            frames.ForkSession: self._fork,
            frames.BranchSession: self._branch,
            frames.PauseSession: self._pause,
            frames.ResumeSession: self._resume,
            frames.DiscardPaused: self._discard,
            frames.ExtendSession: self._extend,
            frames.ExposePort: self._expose,
            frames.ClosePort: self._close_port,
            frames.OpenTerminal: self._terminal,
            frames.CloseSession: self._close,
        }

    def answer(self, request: Any, requester: Requester) -> msgspec.Struct:
        """Return the reply; raises the exceptions of the same call of a Sandbox or Session."""
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

    def probe(self) -> None:
        """Run an empty program in a cell; raises CellwrightError."""
        self._sandbox._probe()

    def state(self) -> SupervisorsState | None:
        """Return the current state of its cells; None before the sandbox is made, and after the end."""
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

    def _execute(self, frame: frames.Execute, requester: Requester) -> frames.Executed:
        requester.weigh(weight_of(frame))
        refuse_packages(self._sandbox.policy, frame.given.packages, "daemon")
        executing = self._session(frame) if frame.session else self._sandbox
        on_output = requester.on_output if frame.stream else None
        given = replace(given_of(frame), on_output=on_output, cancel=requester.fileno())
        with self._quota.turn(given.cancel) as is_turn:
            if not is_turn:
                return packed_result(_cancelled(given.trace_id))
            result = executing._execute(given)
            self._quota.spend(cpu_seconds_of(result.compile, result.usage))
        return packed_result(result)

    def _compile(self, frame: frames.CompileProgram, requester: Requester) -> frames.Compiled:
        from ...sandbox.remote.judge_frames import compile_of  # seldom needed

        given = replace(compile_of(frame), cancel=requester.fileno())
        with self._turn(requester):
            build = self._sandbox._compile(given)
            self._quota.spend(cpu_seconds_of(build.compile))
        entry = self._sandbox._language_table().called(build.language)
        return frames.Compiled(build.language, entry.source if entry else "", build.compile)

    def _judge(self, frame: frames.JudgeProgram, requester: Requester) -> frames.Judged:
        from ...sandbox.remote.judge_frames import JUDGE_WEIGHT, judging_of  # seldom needed

        requester.weigh(JUDGE_WEIGHT * len(frame.given))
        given, cases = judging_of(frame, requester.fileno())
        given.limits.check_within(self._sandbox.policy.limits, "the policy of this daemon")
        with self._turn(requester):
            try:
                done = self._sandbox._judged(given, cases)
            finally:
                self._quota.spend(sum(given.spent))
        return frames.Judged(done)

    def _describe(self, frame: frames.Describe, requester: Requester) -> frames.Description:
        return frames.Description(self.policies, self._sandbox.policy, self._sandbox.plan)

    def _validate(self, frame: frames.Validate, requester: Requester) -> frames.Validated:
        requester.weigh(4 * len(frame.code))
        return frames.Validated(*self._sandbox.validate_source(text_of(frame.code)))

    def _settle(self, frame: frames.AwaitSettled, requester: Requester) -> frames.Done:
        self._sandbox.settle()
        return frames.Done()

    def _session(self, frame: Any) -> Session:
        return self._opened.named(frame.session, self.name)

    def _open(self, frame: frames.OpenSession, requester: Requester) -> frames.Opened:
        refuse_packages(self._sandbox.policy, frame.packages, "daemon")
        is_known = frame.id is not None and self._opened.has(frame.id, self)
        with self._opened.room(0 if is_known else 1) as put:
            session = self._sandbox.session(frame.id, frame.language, packages=frame.packages)
            return self._opened_frame(session, put)

    def _opened_frame(self, session: Session, put: "PutOpened") -> frames.Opened:
        key = self._opened.key_of(session, self, put)
        return frames.Opened(
            key, session.id, session.diverged, session.language, session.forked_by,
            session.not_copied,
        )  # fmt: skip

    def _download(self, frame: frames.Download, requester: Requester) -> frames.Content:
        session = self._session(frame)
        sizes = {file.path: file.size_bytes for file in session.files()}
        requester.weigh(_COPIES * sizes.get(frame.path, 0))
        return frames.Content(session.download(frame.path))

    def _snapshot(self, frame: frames.TakeSnapshot, requester: Requester) -> frames.Content:
        session = self._session(frame)
        requester.weigh(_COPIES * sum(file.size_bytes for file in session.files()))
        return frames.Content(session.snapshot())

    def _fork(self, frame: frames.ForkSession, requester: Requester) -> frames.Opened:
        with self._opened.room() as put:
            branch = self._session(frame).fork()
            if requester.is_gone():  # without a client nobody has its key
                branch.close()
            return self._opened_frame(branch, put)

    def _branch(self, frame: frames.BranchSession, requester: Requester) -> frames.OpenedBranches:
        with self._turn(requester), self._opened.room(frame.n) as put:
            made = self._session(frame).branch(frame.n, frame.reseed, replay=frame.replay)
            if requester.is_gone():  # without a client nobody has their keys
                for each in made:
                    each.close()
            return frames.OpenedBranches(tuple(self._opened_frame(each, put) for each in made))

    def _pause(self, frame: frames.PauseSession, requester: Requester) -> frames.Paused:
        self._check_may_pause()
        with self._turn(requester):
            token = self._session(frame).pause()
        if requester.is_gone():  # without a client nobody has the token
            self._sandbox.discard(token)
        return frames.Paused(token)

    def _resume(self, frame: frames.ResumeSession, requester: Requester) -> frames.Opened:
        self._check_may_pause()
        with self._turn(requester), self._opened.room() as put:
            return self._opened_frame(self._sandbox.resume(frame.token), put)

    def _discard(self, frame: frames.DiscardPaused, requester: Requester) -> frames.Done:
        self._check_may_pause()
        self._sandbox.discard(frame.token)
        return frames.Done()

    def _check_may_pause(self) -> None:
        if not self._may_pause:
            raise PolicyError(
                "pause: this daemon keeps no paused sessions",
                "its owner names pauses.directory in its configuration",
            )

    @contextlib.contextmanager
    def _turn(self, requester: Requester) -> Iterator[None]:
        """Hold the turn of a call: copying a session, a compiler and a judge count as one."""
        with self._quota.turn(requester.fileno()) as is_turn:
            if not is_turn:
                raise BusyError("the request was cancelled while it waited for its turn")
            yield

    def _extend(self, frame: frames.ExtendSession, requester: Requester) -> frames.Done:
        if frame.seconds > self._lifetime_seconds:
            raise PolicyError(
                f"seconds: a session of this daemon lives at most {self._lifetime_seconds:g} s more, "
                f"got {frame.seconds:g}",
                "its owner sets that by cellwright serve --session-lifetime",
            )
        self._session(frame).extend(frame.seconds)
        return frames.Done()

    def _expose(self, frame: frames.ExposePort, requester: Requester) -> frames.PortExposed:
        session = self._session(frame)
        with self._ports.room(session) as put:
            exposed = session.expose(frame.port, path=frame.path, host_port=frame.host_port)
            if requester.is_gone():  # without a client nobody has its key
                exposed.close()
            key = os.urandom(16).hex()
            put(key, _ExposedBySession(session, exposed))
        return frames.PortExposed(key, exposed.address)

    def _close_port(self, frame: frames.ClosePort, requester: Requester) -> frames.Done:
        if found := self._ports.pop(frame.port):
            found.port.close()
        return frames.Done()

    def _terminal(self, frame: frames.OpenTerminal, requester: Requester) -> frames.Done:
        arguments = asdict(frame)
        del arguments["session"]
        with (
            requester.terminal_quota(),
            self._quota.turn(requester.fileno()) as is_turn,  # counts as a call while it is open
        ):
            if is_turn:
                self._lend_terminal(frame, arguments, requester)
        return frames.Done()

    def _lend_terminal(
        self, frame: frames.OpenTerminal, arguments: dict[str, Any], requester: Requester
    ) -> None:
        with self._session(frame)._terminal(TerminalArguments(**arguments)) as terminal:
            report = terminal.report
            opened = frames.TerminalOpened(report.id, report.pid, report.exit_code)
            requester.hand_over(opened, (terminal.fileno(),))
            requester.await_end(terminal.fileno())

    def _close(self, frame: frames.CloseSession, requester: Requester) -> frames.Done:
        if not self._opened.why_lost(frame.session, self.name).lost:
            self._session(frame).close()
        return frames.Done()


class _ExposedBySession(NamedTuple):
    """A port that a client exposed; the end of its session closes it."""

    session: Session
    port: ExposedPort


class _OpenedSession(NamedTuple):
    session: Session
    service: Service


PutOpened = Callable[[str, _OpenedSession], _OpenedSession]


class OpenedSessions:
    """The sessions of one tenant by the unique key that its clients use, with the service that opened
    each.  A client finds those of services of its policy."""

    def __init__(self, quota: TenantQuota) -> None:
        self.quota = quota
        self._table: OwnedTable[str, _OpenedSession] = OwnedTable(
            quota, lambda each: each.session.lost, self._note_lost
        )
        self._lost: dict[str, frames.LostReason] = {}

    def room(self, n: int = 1) -> AbstractContextManager[PutOpened]:
        """Keep room for `n` more sessions during the block; raises QuotaExceeded."""
        return self._table.room(None, n)

    def has(self, id: str, service: Service) -> bool:
        """Tell whether a session of that id, opened by a service, lives."""
        found = (each for _, each in self._table.items())
        return any(each.session.id == id and each.service is service for each in found)

    def key_of(self, session: Session, service: Service, put: PutOpened) -> str:
        """Return the key of a session, which is new if the session is."""
        for key, known in self._table.items():
            if known.session is session:
                return key
        key = os.urandom(16).hex()
        put(key, _OpenedSession(session, service))
        return key

    def named(self, key: str, policy: str) -> Session:
        found = self._table.get(key)
        if found and found.service.name == policy:
            return found.session
        why = self._lost.get(key, _UNKNOWN)
        raise gone(why.lost, why.expired)

    def why_lost(self, key: str, policy: str) -> frames.LostReason:
        found = self._table.get(key)
        if found and found.service.name == policy:
            return _reason(found.session)
        return self._lost.get(key, _UNKNOWN)

    def _note_lost(self, key: str, opened: _OpenedSession) -> None:
        """Keep only the reason of a lost session: its history may be large."""
        self._lost[key] = _reason(opened.session)
        with contextlib.suppress(KeyError, StopIteration, RuntimeError):  # another thread was first
            while len(self._lost) > _REMEMBERED:
                del self._lost[next(iter(self._lost))]


def _cancelled(trace_id: str | None) -> SandboxResult:
    return SandboxResult(
        status=SandboxStatus.CANCELLED, reason="cancelled", error="cancelled while it waited",
        execution_id=new_execution_id(), trace_id=trace_id,
    )  # fmt: skip


def _reason(session: Session) -> frames.LostReason:
    return frames.LostReason(session.lost, session.expired, session.paused)
