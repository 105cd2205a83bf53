"""`CheckerPool`: at most four checkers, each a confined process that serves one thread at a time.

A process starts when no other is free, in some 60 ms, and stays for later requests until this process
ends.  A request that reaches a limit costs its process.
"""

import atexit
import os
import signal
import threading

import msgspec

from ...policies.errors import BudgetExceeded, BusyError, LaunchError
from ...runner import channel
from ...runner.concurrency import CANCEL, STEPS_PER_SECOND, Budget, ConcurrencyLimit
from ...runner.confined.confined_process import ConfinedProcess
from ...runner.launching.spawn import interpreter, spec_of
from ...runner.messages import decode, encode
from .checker import (
    CPU_SECONDS,
    MEMORY_BYTES,
    CheckAnswer,
    CheckerBoot,
    CheckRequest,
)

_MODULE = "cellwright.harness.schemas.checker"
_PROCESSES = 4  # processes of 256 MiB each
_QUEUE_SECONDS = 10.0
_NO_ANSWER = BrokenPipeError, ConnectionResetError, TimeoutError, msgspec.DecodeError


class CheckerPool:
    """Starts checkers when they are needed.  Safe from many threads."""

    def __init__(self) -> None:
        """Start nothing."""
        self._slots = ConcurrencyLimit(_PROCESSES, _QUEUE_SECONDS)
        self._lock = threading.Lock()
        self._idle: list[ConfinedProcess] = []

    def ask(self, request: CheckRequest, schema: bytes, budget: Budget) -> CheckAnswer:
        """Return the answer of a checker, which is given the `schema` if it does not know it yet.

        Raises BudgetExceeded at a limit of the process, at the deadline, once the caller has given up,
        and if no checker was free in time; LaunchError if none can be started.
        """
        budget.look()
        try:
            is_taken = self._slots.acquire(CANCEL.get())
        except BusyError:
            message = f"{budget.what}: other checks took longer than {_QUEUE_SECONDS:g} s"
            raise BudgetExceeded(message, cause="wall_time") from None
        if not is_taken:
            raise BudgetExceeded(f"{budget.what} was cancelled by the caller", cause="cancelled")
        try:
            return self._ask(request, schema, budget)
        finally:
            self._slots.release()

    def close(self) -> None:
        """End the idle checkers."""
        with self._lock:
            while self._idle:
                self._idle.pop().end()

    def _ask(self, request: CheckRequest, schema: bytes, budget: Budget) -> CheckAnswer:
        process = self._take()
        is_ended = True
        try:
            answer = _answer_of(process, request, budget)
            if not answer.is_known:
                asked = CheckRequest(request.digest, schema, request.value)
                answer = _answer_of(process, asked, budget)
            is_ended = answer.is_last
        except _NO_ANSWER:
            raise _exceeded(budget.what, process.end()) from None
        except BaseException:
            process.end()
            raise
        if is_ended:
            process.end()
        else:
            with self._lock:
                self._idle.append(process)
        budget.spend(int(answer.cpu_seconds * STEPS_PER_SECOND))
        return answer

    def _take(self) -> ConfinedProcess:
        with self._lock:
            while self._idle:
                if not (process := self._idle.pop()).has_ended():
                    return process
                process.end()
        return _start()


def _answer_of(process: ConfinedProcess, request: CheckRequest, budget: Budget) -> CheckAnswer:
    control = process.control
    control.settimeout(_QUEUE_SECONDS)  # a request can be larger than the socket's buffer
    channel.send(control, encode(request))
    budget.wait_for(control.fileno())
    frame = channel.Receiver(control, channel.PACKET_BYTES).receive_whole()
    answer: CheckAnswer = decode(frame, CheckAnswer)  # raises if the process ends
    return answer


def _exceeded(what: str, ended_by: int) -> BudgetExceeded:
    if ended_by in (signal.SIGPROF, signal.SIGKILL):
        return BudgetExceeded(
            f"{what} takes more than {CPU_SECONDS:g} s of CPU time", cause="wall_time"
        )
    return BudgetExceeded(f"{what} takes more than {MEMORY_BYTES >> 20} MiB of memory")


def _start() -> ConfinedProcess:
    from ...policies.compiling.compile import computing_filter
    from ...runner.host.ids import id_for
    from ...runner.kernel import landlock

    uid = 0 if os.geteuid() else id_for(None)
    boot = CheckerBoot(_package(), uid, landlock.abi(), computing_filter())
    return ConfinedProcess(interpreter(), _MODULE, boot, "the checker of schemas")


def _package() -> str:
    """Return the directory in which jsonschema-rs is; raises LaunchError without it."""
    spec = spec_of("jsonschema_rs")
    if spec is None or spec.origin is None:
        raise LaunchError("the package jsonschema-rs is not installed", "pip install cellwright")
    return os.path.dirname(os.path.dirname(spec.origin))


checkers = CheckerPool()


def _start_anew() -> None:
    """Leave the checkers to the parent: a forked child starts its own."""
    global checkers  # noqa: PLW0603
    checkers = CheckerPool()


def _close() -> None:
    checkers.close()


os.register_at_fork(after_in_child=_start_anew)
atexit.register(_close)
