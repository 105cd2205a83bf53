"""Session cells: each lives across requests, with its interpreter's state and its files."""

import contextlib
import math
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from ..policies.errors import (
    CellwrightError,
    ClosedError,
    LauncherLost,
    SessionExpired,
    SessionLost,
)
from ..policies.languages import LANGUAGES, PYTHON
from ..policies.policy import Limits
from .capture import OnOutput
from .cells import MEMORY_LOOK_SECONDS, pid_of
from .cgroups import CgroupUsage
from .concurrency import ConcurrencyLimit
from .execution import (
    Execution,
    Turn,
    WorkspaceChanges,
    called_off,
    look_at_files,
    perform,
    phases,
)
from .held_cell import HeldCell
from .living import KeptRecord, keep_record
from .outcome import Count, conclude
from .request import Request
from .result import SandboxResult
from .settings import SessionSettings
from .workspace import Listing, list_files

if TYPE_CHECKING:
    from .cell_network import CellNetwork
    from .egress_process import NetworkRecord
    from .watching.between_requests import BetweenRequests

_WAIT_SECONDS = 30.0  # for the running request to end
# At least so long between two looks at a session's CPU time: threads and children can exceed the
# limit by what they use in this time while no request runs.
_CPU_LOOK_SECONDS = 0.1
_LEAST_CPU_SECONDS = 0.001
_EXPIRED = {
    "idle_seconds": "it was idle for too long (idle_seconds)",
    "lifetime_seconds": "it lived for too long (lifetime_seconds)",
}


class SessionPast(NamedTuple):
    """What the requests of a session came to."""

    requests: int
    last_exit_code: int
    cpu_seconds: float


class SessionCell:
    """A cell and its requests, which are served one after the other in order of arrival."""

    def __init__(
        self, held: HeldCell, layers: tuple[str, ...], limits: Limits, settings: SessionSettings,
        give_back: Callable[[HeldCell], None], language: str = PYTHON,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._held = held
        self._layers = layers
        self.limits = limits
        self.language = language
        self._is_shell = language in LANGUAGES and LANGUAGES[language].is_shell
        self._settings = settings
        self._give_back = give_back
        self._concurrency = ConcurrencyLimit(1, _WAIT_SECONDS)
        self._requests = self._last_exit_code = 0
        self._cpu_before = 0.0  # CPU seconds that the session used of which this is a branch
        self._listing: Listing = {}
        self._owner = os.getpid()
        self._lock = threading.Lock()  # guards the next two
        self._holders = 0
        self._clock = clock
        self._record: KeptRecord | None = None
        self._born_at = self.used_at = clock()
        self._kept_until = 0.0  # by `extend`
        self._freezing = threading.Lock()  # guards the next three
        self.is_frozen = False
        self._users = 0  # such as connections to exposed ports: it is not idle while there are any
        self._freeze_at = self._born_at + settings.freeze_seconds
        self._cpu_look_at = self._born_at + limits.cpu_seconds / limits.cpus
        self._memory_look_at = self._born_at
        self.lost = ""  # why it is gone
        self.expired = ""  # the setting that has ended it, if one has
        self.on_thaw: Callable[[], None] = lambda: None
        self._between: BetweenRequests | None = None  # None without a listener
        self.on_begin: Callable[[str], None] = lambda execution_id: None
        self.on_end: Callable[[str, str], None] = lambda action, why: None
        self.on_last_network: Callable[[NetworkRecord], None] = lambda record: None
        # Called before the cell is taken down, with what kills it and then gives its /workspace.
        self.on_last_look: Callable[[Callable[[], int]], None] | None = None

    @contextlib.contextmanager
    def held(self) -> Iterator[int]:
        """Keep the cell's descriptors open for a while, and return that of /workspace.

        If they were closed while a thread uses them, another cell could get their numbers.  Raises
        SessionLost, and ClosedError in a forked child of the owner.
        """
        self._require_owner()
        with self._lock:
            self._require_life()
            self._holders += 1
        try:
            yield self._held.cell.workspace
        finally:
            with self._lock:
                self._holders -= 1
                last = bool(self.lost) and not self._holders
            if last:
                self._dispose()

    def network(self) -> "CellNetwork | None":
        """Return the cell's network, which the caller closes; None if its policy has no loopback.

        Raises SessionLost.
        """
        with self.held():
            return self._held.network()

    def execute(self, request: Request, on_output: OnOutput | None, cancel: int) -> SandboxResult:
        """Run `request` with the state that earlier requests left.

        Raises SessionLost if the cell was already gone, BusyError if the running request does not
        end.
        """
        self._require_owner()  # before any lock: another thread may have held it
        asked_at = time.monotonic()
        if not self._concurrency.acquire(cancel):
            return called_off(request, asked_at, self._layers)
        try:
            with self.held(), self._unattended(request):
                if not self._held.is_alive():
                    self.end("its process ended between two requests")
                if path := self._held.uncovered():
                    self.end(
                        f"{path}, which the policy hides, was replaced or made after the start"
                    )
                self._require_life()
                self._thaw()
                self.on_begin(request.execution_id)
                request = self._within_cpu_time(request)
                return self._execute_to_the_end(request, asked_at, on_output, cancel)
        finally:
            self._note_use()
            self._concurrency.release()

    def _within_cpu_time(self, request: Request) -> Request:
        """Leave a branch the CPU time that the session had left of which it is one."""
        if not self._cpu_before:
            return request
        limits = request.limits
        left = max(_LEAST_CPU_SECONDS, limits.cpu_seconds - self._cpu_before)
        return replace(request, limits=replace(limits, cpu_seconds=left))

    @contextlib.contextmanager
    def _unattended(self, request: Request | None = None) -> Iterator[None]:
        """Keep the thread that answers between two requests away meanwhile.

        A shell's program that opens a door to a tool waits for the next request, in which there is one.
        """
        if self._between:
            self._between.pause()
        try:
            yield
        finally:
            waits_at_doors = self._is_shell and request and request.on_call
            if self._between and not waits_at_doors:
                self._between.resume()

    def _execute_to_the_end(
        self, request: Request, asked_at: float, on_output: OnOutput | None, cancel: int
    ) -> SandboxResult:
        """Execute, and end the session if an exception interrupts this before the guest's answer:
        the program would go on, and its answer would be taken for the next request's."""
        try:
            return self._execute(request, asked_at, on_output, cancel)
        except LauncherLost as error:
            if self.lost:  # the sandbox was closed while this ran
                raise SessionLost(f"the session is gone: {self.lost}") from None
            self.end(str(error))
            raise
        except BaseException as error:
            self.end(f"request {self._requests} was left: {type(error).__name__}")
            raise

    def _execute(
        self, request: Request, asked_at: float, on_output: OnOutput | None, cancel: int
    ) -> SandboxResult:
        leased_at = time.monotonic()
        self._requests += 1
        cgroup = self._held.cell.cgroup
        before = cgroup.usage()
        performed = self._perform(request, on_output, cancel)
        if self.lost and not performed.seen.stays:  # it was closed while this ran
            cause = performed.seen.cause or "cancelled"
            performed = performed._replace(seen=performed.seen._replace(cause=cause))
        ended_at = time.monotonic()
        stays = performed.seen.stays
        network = self._held.settle_egress(ends=not stays)
        performed = performed._replace(seen=performed.seen.refused(network.refused))
        made = look_at_files(self._held.cell.workspace, request, self._listing, cancel)
        self._listing = made.listing
        counted = Count(_difference(cgroup.usage(), before), 0 if stays else cgroup.oom_kills())
        moments = (asked_at, leased_at, performed.seen.sent_at, ended_at, time.monotonic())
        result = self._conclude(request, performed, made, counted, moments)
        if network.connections:
            result = replace(result, connections=network.connections)
        self._last_exit_code = result.exit_code or 0
        if not stays:
            self.end(f"request {self._requests} ended it: {result.reason}, {result.error}")
        elif self._requests >= self._settings.requests:
            self.end(f"it has served {self._requests} requests")
        return result

    def _perform(self, request: Request, on_output: OnOutput | None, cancel: int) -> Execution:
        """Perform the request; in a language other than Python start the interpreter first, once.
        Refusals during that start are not the program's, and are dropped."""
        turn = Turn(self._requests, self.language, self._last_exit_code)
        if self._requests == 1 and self.language != PYTHON:
            started = perform(self._held, request, None, cancel, turn._replace(number=0))
            said = started.seen.finished
            if not (started.seen.stays and said and said.ends_well):
                return started
            request = replace(request, files=())  # they are written
        return perform(self._held, request, on_output, cancel, turn)

    def _conclude(
        self, request: Request, performed: Execution, made: WorkspaceChanges, counted: Count,
        moments: tuple[float, ...],
    ) -> SandboxResult:  # fmt: skip
        return conclude(
            performed.seen, counted, performed.captures, request.limits,
            layers=self._layers, phases=phases(moments),
            execution_time=moments[-1] - moments[0], execution_id=request.execution_id,
            trace_id=request.trace_id, session_lost=not performed.seen.stays,
            files=made.files, artifacts=made.artifacts, uncollected=made.uncollected,
        )  # fmt: skip

    def _require_life(self) -> None:
        if self.lost:
            raise gone(self.lost, self.expired)

    def at_rest(self, look: Callable[[int], None]) -> None:
        """Call `look` with a descriptor of /workspace while no request runs; raises SessionLost,
        and BusyError if the running request does not end."""
        self._require_owner()
        self._concurrency.acquire()
        try:
            with self.held() as workspace, self._unattended():
                look(workspace)
        finally:
            self._concurrency.release()

    @contextlib.contextmanager
    def resting(self) -> Iterator[tuple[HeldCell, SessionPast]]:
        """Keep requests away, and yield the thawed cell and what its requests came to so far; raises
        SessionLost, and BusyError if the running request does not end."""
        self._require_owner()
        self._concurrency.acquire()
        try:
            with self.held(), self._unattended():
                if not self._held.is_alive():
                    self.end("its process ended between two requests")
                self._require_life()
                self._thaw()
                used = self._cpu_before + (self._held.cell.cgroup.cpu_seconds() or 0.0)
                yield self._held, SessionPast(self._requests, self._last_exit_code, used)
        finally:
            self._note_use()
            self._concurrency.release()

    @contextlib.contextmanager
    def fresh(self) -> Iterator[HeldCell]:
        """Yield the cell of a session that no caller knows yet, and keep it from being frozen; what its
        processes open meanwhile is answered.  Raises SessionLost."""
        self.begin_use()
        try:
            with self.held():
                yield self._held
        finally:
            self.end_use()

    def continue_from(self, past: SessionPast) -> None:
        """Go on where another session was, of which this is a branch by now."""
        self._requests, self._last_exit_code, self._cpu_before = past
        self._listing = list_files(self._held.cell.workspace)

    def _require_owner(self) -> None:
        if os.getpid() != self._owner:
            raise ClosedError("the session was opened before this process was forked")

    def due_at(self) -> float:
        """Return the moment, by time.monotonic, at which `look` may find a reason to end the
        session."""
        expires_at = self._expiry()[0]
        if self.is_frozen:  # it uses no CPU time and no more memory
            return expires_at
        return min(expires_at, self._freeze_at, self._cpu_look_at, self._memory_look_at)

    def attend_by(self, epoll: select.epoll) -> int:
        """Have `epoll` report when `attend` is to be called; return the descriptor, -1 for none."""
        if self._held.listener:
            from .watching.between_requests import BetweenRequests  # not for single-use cells

            self._between = BetweenRequests(epoll, self._held.cell.listener, self._held.listener)
        return self._between.descriptor if self._between else -1

    @property
    def attend_again_at(self) -> float:
        """The moment, by time.monotonic, at which `attend` is to be called even without news."""
        return self._between.again_at if self._between else math.inf

    def attend(self) -> None:
        """Answer what threads and children attempt between two requests; end the session if they
        exceed a limit.  During a request this does nothing: its supervision answers."""
        if self._between and self._concurrency.try_acquire():
            try:
                with self.held():
                    complaint = self._between.answer()
                if complaint:
                    self.end(complaint)
            except SessionLost:
                return
            finally:
                self._concurrency.release()

    def look(self) -> None:
        """End the session if it was idle or lived too long, or if its CPU time or memory is used
        up.

        Supervision checks these while a request runs; threads and children that a request left go
        on between requests, when only this method looks.
        """
        now = self._clock()
        if self._users:
            self._note_use()
        expires_at, limit = self._expiry()
        if expires_at <= now:
            self.try_to_evict(_EXPIRED[limit], expired=limit)
            return
        if self.is_frozen:
            return
        if self._freeze_at <= now:
            self._freeze(now)
        if self._cpu_look_at <= now:
            self._look_at_cpu_time(now)
        if self._memory_look_at <= now:
            self._look_at_memory(now)

    def _look_at_cpu_time(self, now: float) -> None:
        with contextlib.suppress(SessionLost), self.held():
            limits, used = self.limits, self._held.cell.cgroup.cpu_seconds()
            if used is None:  # no cgroup counts: RLIMIT_CPU holds, for each process by itself
                self._cpu_look_at = math.inf
                return
            left = limits.cpu_seconds - used - self._cpu_before
            self._cpu_look_at = now + max(left / limits.cpus, _CPU_LOOK_SECONDS)
            if left <= 0:
                self.try_to_evict(
                    f"it used more than {limits.cpu_seconds:g} s of CPU time between two requests",
                    "lost",
                )

    def _look_at_memory(self, now: float) -> None:
        with contextlib.suppress(SessionLost), self.held():
            cell = self._held.cell
            self._memory_look_at = now + MEMORY_LOOK_SECONDS if cell.can_exceed else math.inf
            if cell.has_exceeded():
                self.try_to_evict("it needed more memory than it may, between two requests", "lost")

    def _expiry(self) -> tuple[float, str]:
        """Return when the session expires, and the setting that ends it then."""
        settings = self._settings
        by_age = self._born_at + settings.lifetime_seconds, "lifetime_seconds"
        by_idleness = self.used_at + settings.idle_seconds, "idle_seconds"
        when, limit = min(by_age, by_idleness)
        return max(when, self._kept_until), limit

    def extend(self, seconds: float) -> None:
        """Let the session live for `seconds` from now at least, however idle or old; raises
        SessionLost."""
        with self.held():
            self._kept_until = max(self._kept_until, self._clock() + seconds)

    def freeze(self) -> bool:
        """Stop its processes now, unless something uses it; tell whether they stand still."""
        self._freeze(self._clock())
        return self.is_frozen

    def _freeze(self, now: float) -> None:
        """Stop its processes, unless a request runs or something else uses it."""
        self._freeze_at = now + self._settings.freeze_seconds  # the next attempt
        if not self._concurrency.try_acquire():
            return
        try:
            with contextlib.suppress(SessionLost), self.held(), self._freezing:
                if not self._users:
                    self.is_frozen = self._held.cell.cgroup.freeze()
        finally:
            self._concurrency.release()

    def _thaw(self) -> None:
        with self._freezing:
            was_frozen, self.is_frozen = self.is_frozen, False
            self._held.cell.cgroup.thaw()
        if was_frozen:
            self._note_use()
            self.on_thaw()

    def keep_record(self, id: str, policy: str) -> None:
        """Have the session listed as `id` (living.py) while it lives."""
        with contextlib.suppress(SessionLost, ProcessLookupError), self.held():
            cell = self._held.cell
            init = pid_of(cell.pidfd)
            self._record = keep_record(
                "session", init, policy, self.language, cell.cgroup.places, id
            )
        if self.lost and self._record:  # it ended meanwhile
            self._record.remove()

    def _note_use(self) -> None:
        self.used_at = self._clock()
        if self._record:
            self._record.touch()
        self._freeze_at = self.used_at + self._settings.freeze_seconds

    @property
    def is_in_use(self) -> bool:
        """Tell whether something other than requests uses it, such as a terminal."""
        return self._users > 0

    def begin_use(self) -> None:
        """Thaw the session, and keep it from being idle until `end_use`; raises SessionLost."""
        with self.held():
            with self._freezing:
                self._users += 1
            self._thaw()

    def end_use(self) -> None:
        self._note_use()
        with self._freezing:
            self._users -= 1

    def try_to_evict(self, why: str, action: str = "evicted", expired: str = "") -> bool:
        """End the session unless a request runs; return whether it is gone.

        `expired` is the setting that ends it, if one does.
        """
        if not self._concurrency.try_acquire():
            return bool(self.lost)
        try:
            self.end(why, action, expired)
        finally:
            self._concurrency.release()
        return True

    def end(self, why: str, action: str = "lost", expired: str = "") -> None:
        """End the session, once; the trail calls it `action`.

        Its processes are killed; the cell is taken down now, or by the last thread that uses it.
        In a forked child of the owner this does nothing.
        """
        if os.getpid() != self._owner:
            return
        with self._lock:
            if self.lost:
                return
            self.lost, self.expired = why, expired
            if self._between:
                self._between.close()
            last = not self._holders
            if not last:
                self._held.cell.kill()
        if last:
            self._dispose()
        if self._record:
            self._record.remove()
        self.on_end(action, why)

    def _dispose(self) -> None:
        with contextlib.suppress(CellwrightError):  # its launcher died: all is freed even so
            try:
                if self.on_last_look:
                    self.on_last_look(self._held.workspace_at_rest)
            finally:
                try:
                    self._settle_network()
                finally:
                    self._give_back(self._held)

    def _settle_network(self) -> None:
        """Have the connections end, and the records reach the trail, that no result will have."""
        if self._held.egress is None:
            return
        cell = self._held.cell
        cell.kill_init()
        cell.cgroup.thaw()  # on v1 the killed die only then
        if any(network := self._held.settle_egress(ends=True)):
            self.on_last_network(network)


def gone(why: str, expired: str = "") -> SessionLost:
    """Return the error for a session that has ended; `expired` is the setting that ended it, if any."""
    message = f"the session is gone: {why}"
    if expired:
        hint = f"open another one; more {expired}, or extend(), lets it live longer"
        return SessionExpired(message, hint, limit=expired)
    return SessionLost(message, "open another one")


def _difference(now: CgroupUsage, before: CgroupUsage) -> CgroupUsage:
    """Return the usage since `before`; peaks are of the whole session."""

    user = (now.cpu_user_seconds or 0.0) - (before.cpu_user_seconds or 0.0)
    system = (now.cpu_system_seconds or 0.0) - (before.cpu_system_seconds or 0.0)
    return now._replace(cpu_user_seconds=max(0.0, user), cpu_system_seconds=max(0.0, system))
