"""An execution in the background: a handle for threads, a coroutine for asyncio."""

import asyncio
import collections
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from ..runner.capture import OnOutput
from ..runner.result import SandboxResult, SandboxStatus
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


async def aexecute(
    execute: _Execute, code: str | bytes, language: str, **given: Any
) -> SandboxResult:
    """Run `execute` in a thread; cancelling the task ends the execution."""
    cancel = os.eventfd(0, os.EFD_CLOEXEC)
    work = asyncio.create_task(asyncio.to_thread(execute, code, language, cancel=cancel, **given))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        os.eventfd_write(cancel, 1)
        await work
        raise
    finally:
        os.close(cancel)


def in_loop(on_output: Callable[[str, bytes], Awaitable[None] | None]) -> OnOutput:
    """Return a function for another thread that has what `on_output` returns awaited in this loop."""
    loop = asyncio.get_running_loop()

    async def wait_for(told: Awaitable[None]) -> None:
        await told

    def tell(stream: str, data: bytes) -> None:
        if (told := on_output(stream, data)) is not None:
            asyncio.run_coroutine_threadsafe(wait_for(told), loop).result()

    return tell
