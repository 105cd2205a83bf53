"""Executions in the background: a handle for threads and for asyncio, and the threads of `aexecute`."""

import asyncio
import collections
import contextvars
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Self, TypeVar

from ...runner.capture import OnOutput
from ...runner.result import SandboxResult, SandboxStatus
from .background import Background

_QUEUED_CHUNKS = 64  # then the program waits: a slow reader never grows memory
_T = TypeVar("_T")
Chunk = tuple[str, bytes]  # the stream, and what the program wrote to it


class Chunks:
    """Output on its way from the thread that executes to the readers; ends once, for all of them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: collections.deque[Chunk] = collections.deque()
        self._is_wanted = True
        self._has_ended = False
        self._to_wake: list[Callable[[], None]] = []  # readers in event loops

    def put(self, stream: str, data: bytes) -> None:
        """Wait for room, and add a chunk; drop it if nobody will read it."""
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

    def __init__(self, execute: Callable[[OnOutput, int], SandboxResult]) -> None:
        self._chunks = chunks = Chunks()
        self._background = Background(
            "cellwright-run", lambda cancel: execute(chunks.put, cancel), chunks.end
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
        """Wait for the end and return the result, which also holds the output that nobody has read.

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

    def __init__(self, width: int) -> None:
        self._executor = ThreadPoolExecutor(width, "cellwright-aexecute")
        self._owner = os.getpid()

    def are_ours(self) -> bool:
        """Tell whether they run in this process: the child of a fork has none of them."""
        return os.getpid() == self._owner

    async def execute(self, work: Callable[[int], _T]) -> _T:
        """Call `work` in one of them with a descriptor that becomes readable when the task is
        cancelled; the task ends after `work` has."""
        context = contextvars.copy_context()
        cancel = os.eventfd(0, os.EFD_CLOEXEC)
        try:
            submitted = self._executor.submit(context.run, work, cancel)
            done = asyncio.wrap_future(submitted)
            try:
                return await asyncio.shield(done)
            except asyncio.CancelledError:
                if not submitted.cancel():  # it has begun
                    os.eventfd_write(cancel, 1)
                    await asyncio.wait([done])
                raise
        finally:
            os.close(cancel)

    async def call(self, function: Callable[[], _T]) -> _T:
        """Call `function` in one of them; if the task is cancelled, it still runs to its end."""
        context = contextvars.copy_context()
        return await asyncio.wrap_future(self._executor.submit(context.run, function))

    def close(self) -> None:
        """Have each end once it has nothing to do."""
        if self.are_ours():
            self._executor.shutdown(wait=False)


async def in_thread(function: Callable[[], _T], discard: Callable[[_T], None] | None = None) -> _T:
    """Call `function` in a thread of its own.

    If the task is cancelled, the function still runs to its end; `discard` is called with its result.
    """
    executor = ThreadPoolExecutor(1, "cellwright-async")
    submitted = executor.submit(contextvars.copy_context().run, function)
    executor.shutdown(wait=False)
    try:
        return await asyncio.shield(asyncio.wrap_future(submitted))
    except asyncio.CancelledError:
        if discard:
            submitted.add_done_callback(lambda made: made.exception() or discard(made.result()))
        raise


def in_loop(on_output: Callable[[str, bytes], Awaitable[None] | None]) -> OnOutput:
    """Return an `on_output` for another thread; what the given one returns is awaited in this loop."""
    loop = asyncio.get_running_loop()

    async def wait_for(told: Awaitable[None]) -> None:
        await told

    def tell(stream: str, data: bytes) -> None:
        if (told := on_output(stream, data)) is not None:
            asyncio.run_coroutine_threadsafe(wait_for(told), loop).result()

    return tell
