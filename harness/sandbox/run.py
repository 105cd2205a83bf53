"""An execution in the background: a handle for threads, threads for asyncio."""

import asyncio
import collections
import contextvars
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...runner.capture import OnOutput
from ...runner.result import SandboxResult, SandboxStatus
from .background import Background

_Execute = Callable[..., SandboxResult]  # as Executing.execute
_QUEUED_CHUNKS = 64  # then the guest waits: a slow reader never grows memory


class _Chunks:
    """Output on its way from the thread that runs to those that read; ends once, for all of them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: collections.deque[tuple[str, bytes]] = collections.deque()
        self._wanted = True
        self._ended = False

    def put(self, stream: str, data: bytes) -> None:
        """Wait for room; drop what nobody wants any more."""
        with self._changed:
            self._changed.wait_for(lambda: not self._wanted or len(self._waiting) < _QUEUED_CHUNKS)
            if self._wanted:
                self._waiting.append((stream, data))
                self._changed.notify_all()

    def abandon(self) -> None:
        with self._changed:
            self._wanted = False
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ended)
                if not self._waiting:
                    return
                chunk = self._waiting.popleft()
                self._changed.notify_all()
            yield chunk


class Run:
    """A started execution: read its output as it comes, cancel it, get its result."""

    def __init__(self, execute: _Execute, code: str | bytes, language: str, **given: Any) -> None:
        self._chunks = chunks = _Chunks()

        def work(cancel: int) -> SandboxResult:
            return execute(code, language, on_output=chunks.put, cancel=cancel, **given)

        self._background = Background("cellwright-run", work, chunks.end)

    @property
    def status(self) -> SandboxStatus:
        """RUNNING, or how it ended."""
        result = self._background.outcome
        return result.status if result else SandboxStatus.RUNNING

    def output(self) -> Iterator[tuple[str, bytes]]:
        """Yield (stream, bytes) as they come; the guest waits for a reader that is slow."""
        return iter(self._chunks)

    def cancel(self) -> None:
        """End it, if it is still running; harmless otherwise."""
        self._background.cancel()
        self._chunks.abandon()

    def result(self) -> SandboxResult:
        """Wait for the end; output that nobody has read so far is in the result only."""
        self._chunks.abandon()
        return self._background.result()


class Threads:
    """The threads in which the calls of `aexecute` on one object run, at most `width` at once; the
    rest wait in order.

    The event loop's default executor has a few threads, which everything that the embedding program
    gives to `asyncio.to_thread` shares: executions there would hold up what has nothing to do with
    them, and run fewer at once than the sandbox may.
    """

    def __init__(self, width: int) -> None:
        self._executor = ThreadPoolExecutor(width, "cellwright-aexecute")
        self._owner = os.getpid()

    def are_ours(self) -> bool:
        """Tell whether they run in this process: the child of a fork has none of them."""
        return os.getpid() == self._owner

    async def execute(
        self, execute: _Execute, code: str | bytes, language: str, **given: Any
    ) -> SandboxResult:
        """Call `execute` in one of them; cancelling the task ends the execution."""
        context = contextvars.copy_context()
        cancel = os.eventfd(0, os.EFD_CLOEXEC)
        try:
            submitted = self._executor.submit(
                context.run, lambda: execute(code, language, cancel=cancel, **given)
            )
            work = asyncio.wrap_future(submitted)
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                if not submitted.cancel():  # it has begun
                    os.eventfd_write(cancel, 1)
                    await asyncio.wait([work])
                raise
        finally:
            os.close(cancel)

    def close(self) -> None:
        """Have each end once it has nothing to do."""
        if self.are_ours():
            self._executor.shutdown(wait=False)


def in_loop(on_output: Callable[[str, bytes], Awaitable[None] | None]) -> OnOutput:
    """Return a function for another thread that has what `on_output` returns awaited in this loop."""
    loop = asyncio.get_running_loop()

    async def wait_for(told: Awaitable[None]) -> None:
        await told

    def tell(stream: str, data: bytes) -> None:
        if (told := on_output(stream, data)) is not None:
            asyncio.run_coroutine_threadsafe(wait_for(told), loop).result()

    return tell
