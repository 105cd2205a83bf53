"""`JudgingCore`: what the dialects share: the sandbox, the queue of requests, and the numbers.

A request waits for its turn as long as its client does; nobody is refused because the machine is busy,
since clients of these interfaces take that for a wrong answer.  Once a client has disconnected, its
request leaves the queue, and its compiler and programs are killed.
"""

import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Annotated, Any, NamedTuple, TypeVar

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....policies.policy import MIB, Limits
from ....runner import channel
from ...mcp.waiting_threads import in_thread
from ...sandbox.judging.verdicts import Case, CaseResult, JudgeLimits, Judgement
from ...sandbox.sandbox import Sandbox
from ..client_quota import CLIENT
from ..http_access import ClientTurns, until_gone
from ..measurements import VERDICTS, Measurements, MetricFamily, Reading, readings_of

_Result = TypeVar("_Result")
_Struct = TypeVar("_Struct", bound=msgspec.Struct)
Until = Callable[[], Awaitable[object]]
MOST_BODY = (
    512 * MIB
)  # open-r1 sends the cases of a problem as files, up to 512 MB (its own remark)
_MINUTE = 60.0
# Texts "nan" and "inf" become numbers too: timers of the event loop fail on one, `round` on the other.
# Every number of a request therefore has limits.
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e15)]
# Of a case: it holds a turn of one client so long, and if it runs alone those of all.
_MOST_WALL_SECONDS = 600.0
_MOST_MEMORY, _MOST_OUTPUT, _MOST_PROCESSES = 1024 * MIB, 64 * MIB, 256


_REQUESTS_NOW = MetricFamily("cellwright_judge_requests", "Requests of clients now", ("state",))
_CLIENT_GONE = 499  # nginx's status of such a request, for the log


class LateError(Exception):
    """A request did not get its turn in time."""


class JudgedRun(NamedTuple):
    """One program that was run once: whether it compiled, and how it ended if it did."""

    compiled: Any  # CompileResult, or None where nothing compiles
    ran: CaseResult | None


class JudgingCore:
    """Judges for all clients: `at_once` programs run at a time, those of each client in turn."""

    def __init__(self, sandbox: Sandbox, at_once: int, measurements: Measurements) -> None:
        self.sandbox = sandbox
        self._measurements = measurements
        measurements.add_gauges(self._gauges)
        self._turns = ClientTurns(at_once, at_once)
        self.at_once = at_once
        self.languages = tuple(each for each in sandbox.languages() if not each.missing)
        self.waiting = self.running = 0
        self.verdicts: Counter[str] = Counter()
        self._ended: deque[float] = deque()

    async def work(
        self, client: str, do: Callable[[int], _Result], until: Until, patience: float | None = None
    ) -> _Result:
        """Return what `do`, which blocks, returns when it is the client's turn.

        Once `until` returns, the descriptor that `do` gets is readable.  Raises LateError if there was
        no turn within `patience` seconds, DialectError if `until` returned before.
        """
        async with self._turn(client, until, patience):
            self.running += 1
            try:
                return await in_thread(do, until)
            finally:
                self.running -= 1
                self._note()

    @contextlib.asynccontextmanager
    async def _turn(self, client: str, until: Until, patience: float | None) -> AsyncIterator[None]:
        is_in = False

        async def leave(scope: anyio.CancelScope) -> None:
            await until()
            scope.cancel()

        async with contextlib.AsyncExitStack() as held:
            self.waiting += 1
            try:
                async with anyio.create_task_group() as beside:
                    beside.start_soon(leave, beside.cancel_scope)
                    with anyio.move_on_after(patience) as waiting:
                        await held.enter_async_context(self._turns.turn(client))
                        is_in = True
                    beside.cancel_scope.cancel()
            finally:
                self.waiting -= 1
            if waiting.cancelled_caught:
                raise LateError
            if not is_in:
                raise DialectError(_CLIENT_GONE, "the client has disconnected")
            yield

    def run_once(
        self, source: str, language: str, case: Case, limits: JudgeLimits, *, cancel: int,
        flags: tuple[str, ...] = (), sources: dict[str, bytes] | None = None,
        checker: str = "tokens", compile_timeout: float | None = None,
    ) -> JudgedRun:  # fmt: skip
        """Run a program once, as one case."""
        self.check(limits)
        done = self.sandbox.judge(
            source, language, [case], limits=limits, flags=flags, sources=sources, checker=checker,
            compile_timeout=compile_timeout, cancel=cancel,
        )  # fmt: skip
        self.count(done, cancel)
        return JudgedRun(done.compile, done.cases[0] if done.cases else None)

    def count(self, done: Judgement, cancel: int) -> None:
        """Count a verdict, unless the client has gone."""
        if not channel.has_news(cancel):
            self.verdicts[done.verdict.value] += 1
            self._measurements.count(VERDICTS, done.verdict.value)

    def check(self, limits: JudgeLimits) -> None:
        """Raise PolicyError for limits that no client may ask for: those of the server's policy, or
        what each of these interfaces has by default if that is more."""
        limits.check_times()
        limits.check_within(self.most(), "this server")

    def most(self) -> Limits:
        """Return the largest limits that a client may ask for."""
        own = self.sandbox.policy.limits
        return msgspec.structs.replace(
            own, memory_bytes=max(own.memory_bytes, _MOST_MEMORY),
            output_bytes=max(own.output_bytes, _MOST_OUTPUT),
            processes=max(own.processes, _MOST_PROCESSES),
            wall_seconds=max(own.wall_seconds, _MOST_WALL_SECONDS),
        )  # fmt: skip

    def _gauges(self) -> Iterator[Reading]:
        yield Reading(_REQUESTS_NOW, ("running",), self.running)
        yield Reading(_REQUESTS_NOW, ("waiting",), self.waiting)
        yield from readings_of(
            self._measurements.known_policy(self.sandbox.policy.name), self.sandbox._state()
        )

    def per_minute(self) -> int:
        """Return how many requests ended in the last minute."""
        self._forget_old()
        return len(self._ended)

    def _note(self) -> None:
        self._ended.append(time.monotonic())
        self._forget_old()

    def _forget_old(self) -> None:
        while self._ended and self._ended[0] < time.monotonic() - _MINUTE:
            self._ended.popleft()


class DialectError(Exception):
    """A request that a dialect refuses, with the status and text of its answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def body_of(request: Request, kind: type[_Struct], refused: int = 422) -> _Struct:
    """Return the JSON body of a request; raises DialectError, with the status `refused`, for an
    invalid one."""
    data = (
        bytearray()
    )  # not request.body(), which a waiting request would keep beside what it holds
    async for piece in request.stream():
        data += piece
        if len(data) > MOST_BODY:
            raise DialectError(413, f"the body has more than {MOST_BODY} bytes")
    try:
        channel.refuse_large_json(data)
        return msgspec.json.decode(data, type=kind, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DialectError(refused, str(error)) from None


def answer(value: Any, status: int = 200) -> Response:
    """Return an answer in JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def client_of(request: Request) -> str:
    name: str = request.scope[CLIENT]
    return name


def until_gone_of(request: Request) -> Until:
    """Return what waits until the client of a request, whose body was read, has disconnected."""
    return partial(until_gone, request.scope, request.receive)
