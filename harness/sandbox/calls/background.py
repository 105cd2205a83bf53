"""Executions in the background: a handle for threads and for asyncio, and the threads of `aexecute`.

`Background`: a call in a thread of its own, which other threads can cancel and wait for.

`mapped`: many programs, a bounded number of them at once, each result once.
"""

import collections
import contextlib
import contextvars
import os
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, Self, TypeVar, cast

from msgspec.structs import replace

from ....policies.errors import CellwrightError
from ....runner.concurrency import begin_thread
from ....runner.requests.request import OnOutput
from ....runner.requests.result import SandboxResult, SandboxStatus
from ..checks import check_whole
from ..parameters import CallArguments

if TYPE_CHECKING:  # both take as long to import as a cell to start, and a program needs neither
    import asyncio

_QUEUED_CHUNKS = 64  # with more the program waits, so that a slow reader does not grow memory
_T = TypeVar("_T")
Chunk = tuple[str, bytes]  # stream and bytes


class Chunks:
    """Output on its way from the thread that executes to the readers; ends once, for all of them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: collections.deque[Chunk] = collections.deque()
        self._is_wanted = True
        self._has_ended = False
        self._to_wake: list[Callable[[], None]] = []  # readers in event loops

    def put(self, stream: str, data: bytes) -> None:
        """Wait for room, and add a chunk; drop it if the reader has given up."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_wanted or len(self._queue) < _QUEUED_CHUNKS)
            if self._is_wanted:
                self._queue.append((stream, data))
                self._wake()

    def abandon(self) -> None:
        """Drop all that comes from now on."""
        with self._changed:
            self._is_wanted = False
            self._wake()

    def end(self) -> None:
        with self._changed:
            self._has_ended = True
            self._wake()

    def take(self) -> Chunk | None:
        """Wait for the next chunk; return None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._has_ended)
            return self._next()

    async def take_async(self) -> Chunk | None:
        """`take` for asyncio: the event loop goes on meanwhile."""
        while True:
            with self._changed:
                if self._queue or self._has_ended:
                    return self._next()
                changed = self._next_change()
            await changed

    async def wait_for_end(self) -> None:
        """Wait until nothing is added any more."""
        while True:
            with self._changed:
                if self._has_ended:
                    return
                changed = self._next_change()
            await changed

    def _next(self) -> Chunk | None:
        if not self._queue:
            return None
        chunk = self._queue.popleft()
        self._changed.notify_all()  # there is room now
        return chunk

    def _next_change(self) -> "asyncio.Future[None]":
        """Return a future of the running event loop that is done at the next change."""
        import asyncio

        loop = asyncio.get_running_loop()
        changed: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not changed.done():  # its task may have been cancelled
                changed.set_result(None)

        def wake_from_any_thread() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(wake)

        self._to_wake.append(wake_from_any_thread)
        return changed

    def _wake(self) -> None:
        self._changed.notify_all()
        to_wake, self._to_wake = self._to_wake, []
        for wake in to_wake:
            wake()


class Output:
    """The output of a `Run`: (stream, bytes) as it comes, for `for` and for `async for`."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        chunk = self._chunks.take()
        if chunk is None:
            raise StopIteration
        return chunk

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        chunk = await self._chunks.take_async()
        if chunk is None:
            raise StopAsyncIteration
        return chunk


class Run:
    """A started execution: read its output as it comes, cancel it, get its result.

    Made by `start` of a sandbox or a session.
    """

    def __init__(
        self, execute: Callable[[CallArguments], SandboxResult], given: CallArguments
    ) -> None:
        self._chunks = chunks = Chunks()
        self._background = Background(
            "cellwright-run",
            lambda cancel: execute(replace(given, on_output=chunks.put, cancel=cancel)),
            chunks.end,
        )

    @property
    def status(self) -> SandboxStatus:
        """RUNNING, or how it ended."""
        result = self._background.outcome
        return result.status if result else SandboxStatus.RUNNING

    def output(self) -> Output:
        """Return an iterator over (stream, bytes), for `for` or `async for`.

        The program waits for a slow reader.
        """
        return Output(self._chunks)

    def cancel(self) -> None:
        """End it, if it still runs."""
        self._background.cancel()
        self._chunks.abandon()

    def result(self) -> SandboxResult:
        """Wait for the end and return the result, which also holds the unread output.

        Raises what `execute` raises.
        """
        self._chunks.abandon()
        return self._background.result()

    async def aresult(self) -> SandboxResult:
        """`result` for asyncio; cancelling the task leaves the execution running."""
        self._chunks.abandon()
        await self._chunks.wait_for_end()
        return self._background.result()


class Threads:
    """The threads in which the calls of `aexecute` on one object run, at most `width` at once; the
    rest wait in order.

    The event loop's default executor has a few threads, which everything that the embedding program
    gives to `asyncio.to_thread` shares: executions there would hold up unrelated work, and run fewer
    at once than the sandbox may.
    """

    def __init__(self, width: int, name: str = "cellwright-aexecute") -> None:
        from concurrent.futures import ThreadPoolExecutor

        self._executor = ThreadPoolExecutor(width, name)
        self._owner = os.getpid()

    def are_ours(self) -> bool:
        """Tell whether they run in this process: the child of a fork has none of them."""
        return os.getpid() == self._owner

    async def execute(self, work: Callable[[int], _T]) -> _T:
        """Call `work` in one of them with a descriptor that becomes readable when the task is
        cancelled; the task ends after `work` has, even if it is cancelled again."""
        import asyncio

        context = contextvars.copy_context()
        cancel = os.eventfd(0, os.EFD_CLOEXEC)
        try:
            submitted = self._executor.submit(context.run, work, cancel)
            done = asyncio.wrap_future(submitted)
            try:
                return await asyncio.shield(done)
            except asyncio.CancelledError:
                if not submitted.cancel():  # the call has begun
                    os.eventfd_write(cancel, 1)
                    await _end_of(done)  # `work` polls the descriptor until then
                raise
        finally:
            os.close(cancel)

    async def call(
        self, function: Callable[[], _T], discard: Callable[[_T], None] | None = None
    ) -> _T:
        """Call `function` in one of them.

        If the task is cancelled, the function still runs to its end unless it has not begun; `discard`
        is called with its result.
        """
        import asyncio

        submitted = self._executor.submit(contextvars.copy_context().run, function)
        try:
            return await asyncio.shield(asyncio.wrap_future(submitted))
        except asyncio.CancelledError:
            if not submitted.cancel() and discard:
                submitted.add_done_callback(lambda made: made.exception() or discard(made.result()))
            raise

    def close(self) -> None:
        """Have each end once it has nothing to do."""
        if self.are_ours():
            self._executor.shutdown(wait=False)


async def _end_of(done: "asyncio.Future[_T]") -> None:
    import asyncio

    while not done.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([done])


async def in_thread(function: Callable[[], _T], discard: Callable[[_T], None] | None = None) -> _T:
    """Call `function` in a thread of its own, as `Threads.call` does."""
    threads = Threads(1, "cellwright-async")
    try:
        return await threads.call(function, discard)
    finally:
        threads.close()


def in_loop(on_output: Callable[[str, bytes], Awaitable[None] | None]) -> OnOutput:
    """Return an `on_output` for another thread; awaitables of the given one are awaited in this
    loop."""
    import asyncio

    loop = asyncio.get_running_loop()

    async def wait_for(told: Awaitable[None]) -> None:
        await told

    def tell(stream: str, data: bytes) -> None:
        if (told := on_output(stream, data)) is not None:
            asyncio.run_coroutine_threadsafe(wait_for(told), loop).result()

    return tell


T = TypeVar("T")


class Background(Generic[T]):
    """Calls `work` with a descriptor that becomes readable on `cancel`, and then `on_end`."""

    def __init__(self, name: str, work: Callable[[int], T], on_end: Callable[[], None]) -> None:
        self._work = work
        self._on_end = on_end
        # Reentrant: a finalizer may call `cancel` in a thread that holds it.
        self._lock = threading.RLock()
        self._cancel = os.eventfd(0, os.EFD_CLOEXEC)
        self.outcome: T | None = None
        self._error: BaseException | None = None
        try:
            self._thread = begin_thread(name, self._run)
        except BaseException:
            os.close(self._cancel)
            self._cancel = -1
            raise

    def _run(self) -> None:
        try:
            self.outcome = self._work(self._cancel)
        except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
            self._error = error
        with self._lock:
            os.close(self._cancel)
            self._cancel = -1
        self._on_end()

    def cancel(self) -> None:
        """End the call, if it still runs."""
        with self._lock:
            if self._cancel >= 0:
                os.eventfd_write(self._cancel, 1)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds for the end; tell whether the call has ended."""
        if (
            self._thread is not threading.current_thread()
        ):  # a finalizer may run in this very thread
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def result(self) -> T:
        """Wait for the end and return the result; raises what `work` raised."""
        self.join()
        if self._error is not None:
            raise self._error
        return cast("T", self.outcome)  # the thread sets one or the other


_AHEAD = 2  # calls read ahead from the iterable for each running call
_MORE = 2  # at once than processors: a cell that starts or ends waits for the kernel

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


def width_of(at_once: int | None) -> int:
    """Return how many calls run at once; raises PolicyError for an invalid number."""
    if at_once is None:
        return len(os.sched_getaffinity(0)) + _MORE
    return check_whole("at_once", at_once)


def mapped(
    execute: Callable[[Item], Outcome], items: Iterable[Item], width: int,
    *, return_errors: bool, ordered: bool = True,
) -> Iterator[Outcome | CellwrightError]:  # fmt: skip
    """Yield the outcome of `execute` for each item, in their order or as they end; at most `width` run
    at once.

    Calls that have not started are cancelled when the iterator is closed, and those that run are
    waited for.
    """
    import concurrent.futures

    waiting: dict[concurrent.futures.Future[Outcome], None] = {}  # in their order
    ended: SimpleQueue[concurrent.futures.Future[Outcome]] = SimpleQueue()

    def is_next_done() -> bool:
        if not waiting:
            return False
        return next(iter(waiting)).done() if ordered else not ended.empty()

    def take() -> Outcome | CellwrightError:
        future = next(iter(waiting)) if ordered else ended.get()
        del waiting[future]
        try:
            return future.result()
        except CellwrightError as error:
            if not return_errors:
                raise
            return error

    with concurrent.futures.ThreadPoolExecutor(width, "cellwright-map") as threads:
        try:
            for item in items:
                future = threads.submit(execute, item)
                waiting[future] = None
                if not ordered:
                    future.add_done_callback(ended.put)
                while len(waiting) > _AHEAD * width or is_next_done():
                    yield take()
            while waiting:
                yield take()
        finally:
            for each in waiting:
                each.cancel()
