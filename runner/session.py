"""Session cells: each lives across requests, with its interpreter's state and its files."""

import contextlib
import math
import os
import select
import threading
import time
from collections.abc import Callable, Iterator

from msgspec.structs import replace

from ..policies.errors import CellwrightError, ClosedError, LauncherLost, SessionLost
from ..policies.languages import LANGUAGES, PYTHON
from ..policies.policy import Limits
from .capture import OnOutput
from .cell_network import CellNetwork
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
from .outcome import Count, conclude
from .request import Request
from .result import SandboxResult
from .settings import SessionSettings
from .watching.between_requests import BetweenRequests
from .workspace import Listing

_WAIT_SECONDS = 30.0  # for the running request to end
# At least so long between two looks at a session's CPU time: threads and children can exceed the
# limit by what they use in this time while no request runs.
_CPU_LOOK_SECONDS = 0.1
_MEMORY_LOOK_SECONDS = 0.25  # and at its memory, where the kernel may give more than the cap


class SessionCell:
    """A cell and its requests, which are served one after the other in order of arrival."""

    def __init__(
        self, held: HeldCell, layers: tuple[str, ...], limits: Limits, settings: SessionSettings,
        give_back: Callable[[HeldCell], None], language: str = PYTHON,
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
        self._listing: Listing = {}
        self._owner = os.getpid()
        self._lock = threading.Lock()  # guards the next two
        self._holders = 0
        self._born_at = self.used_at = time.monotonic()
        self._cpu_look_at = self._born_at + limits.cpu_seconds / limits.cpus
        self._memory_look_at = self._born_at
        self.lost = ""  # why it is gone
        self._between: BetweenRequests | None = None  # None without a listener
        self.on_begin: Callable[[str], None] = lambda execution_id: None
        self.on_end: Callable[[str, str], None] = lambda action, why: None
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

    def network(self) -> CellNetwork | None:
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
                self.on_begin(request.execution_id)
                return self._execute_to_the_end(request, asked_at, on_output, cancel)
        finally:
            self.used_at = time.monotonic()
            self._concurrency.release()

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
            raise SessionLost(f"the session is gone: {self.lost}", "open another one")

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

    def _require_owner(self) -> None:
        if os.getpid() != self._owner:
            raise ClosedError("the session was opened before this process was forked")

    def due_at(self) -> float:
        """Return the moment, by time.monotonic, at which `look` may find a reason to end the
        session."""
        return min(self._expires_at(), self._cpu_look_at, self._memory_look_at)

    def attend_by(self, epoll: select.epoll) -> int:
        """Have `epoll` report when `attend` is to be called; return the descriptor, -1 for none."""
        if self._held.listener:
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
        now = time.monotonic()
        if self._expires_at() <= now:
            self.try_to_evict("it was idle, or alive, for too long")
            return
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
            left = limits.cpu_seconds - used
            self._cpu_look_at = now + max(left / limits.cpus, _CPU_LOOK_SECONDS)
            if left <= 0:
                self.try_to_evict(
                    f"it used more than {limits.cpu_seconds:g} s of CPU time between two requests",
                    "lost",
                )

    def _look_at_memory(self, now: float) -> None:
        with contextlib.suppress(SessionLost), self.held():
            cell = self._held.cell
            self._memory_look_at = now + _MEMORY_LOOK_SECONDS if cell.can_exceed else math.inf
            if cell.has_exceeded():
                self.try_to_evict("it needed more memory than it may, between two requests", "lost")

    def _expires_at(self) -> float:
        settings = self._settings
        return min(self.used_at + settings.idle_seconds, self._born_at + settings.lifetime_seconds)

    def try_to_evict(self, why: str, action: str = "evicted") -> bool:
        """End the session unless a request runs; return whether it is gone."""
        if not self._concurrency.try_acquire():
            return bool(self.lost)
        try:
            self.end(why, action)
        finally:
            self._concurrency.release()
        return True

    def end(self, why: str, action: str = "lost") -> None:
        """End the session, once; the trail calls it `action`.

        Its processes are killed; the cell is taken down now, or by the last thread that uses it.
        In a forked child of the owner this does nothing.
        """
        if os.getpid() != self._owner:
            return
        with self._lock:
            if self.lost:
                return
            self.lost = why
            if self._between:
                self._between.close()
            last = not self._holders
            if not last:
                self._held.cell.kill()
        if last:
            self._dispose()
        self.on_end(action, why)

    def _dispose(self) -> None:
        with contextlib.suppress(CellwrightError):  # its launcher died: all is freed even so
            try:
                if self.on_last_look:
                    self.on_last_look(self._held.workspace_at_rest)
            finally:
                self._give_back(self._held)


def _difference(now: CgroupUsage, before: CgroupUsage) -> CgroupUsage:
    """Return the usage since `before`; peaks are of the whole session."""

    user = (now.cpu_user_seconds or 0.0) - (before.cpu_user_seconds or 0.0)
    system = (now.cpu_system_seconds or 0.0) - (before.cpu_system_seconds or 0.0)
    return now._replace(cpu_user_seconds=max(0.0, user), cpu_system_seconds=max(0.0, system))
