"""An execution in the background: a handle for threads, a coroutine for asyncio."""

import asyncio
import contextlib
import functools
import os
import queue
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..runner.result import SandboxResult, SandboxStatus

if TYPE_CHECKING:
    from .sandbox import Sandbox

_QUEUED_CHUNKS = 64  # then the guest waits: a slow reader never grows memory


class Run:
    """A started execution: read its output as it comes, cancel it, get its result."""

    def __init__(self, sandbox: "Sandbox", code: str | bytes, language: str, **given: Any) -> None:
        self._cancel = os.eventfd(0, os.EFD_CLOEXEC)
        self._chunks: queue.Queue[tuple[str, bytes] | None] = queue.Queue(_QUEUED_CHUNKS)
        self._abandoned = threading.Event()
        self._result: SandboxResult | None = None
        self._error: BaseException | None = None
        work = functools.partial(self._work, sandbox, code, language, given)
        self._thread = threading.Thread(target=work, name="cellwright-run", daemon=True)
        self._thread.start()

    def _work(
        self, sandbox: "Sandbox", code: str | bytes, language: str, given: dict[str, Any]
    ) -> None:
        try:
            self._result = sandbox.execute(
                code, language, on_output=self._put, cancel=self._cancel, **given
            )
        except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
            self._error = error
        self._enqueue(None)

    def _put(self, stream: str, data: bytes) -> None:
        self._enqueue((stream, data))

    def _enqueue(self, chunk: tuple[str, bytes] | None) -> None:
        """Wait for room in the queue; give up once nobody will read it."""
        while not self._abandoned.is_set():
            with contextlib.suppress(queue.Full):
                self._chunks.put(chunk, timeout=0.1)
                return

    @property
    def status(self) -> SandboxStatus:
        """RUNNING, or how it ended."""
        return self._result.status if self._result else SandboxStatus.RUNNING

    def output(self) -> Iterator[tuple[str, bytes]]:
        """Yield (stream, bytes) as they come; the guest waits for a reader that is slow."""
        while (chunk := self._chunks.get()) is not None:
            yield chunk

    def cancel(self) -> None:
        """End it, if it is still running; harmless otherwise."""
        if self._cancel >= 0:
            os.eventfd_write(self._cancel, 1)
        self._abandoned.set()

    def result(self) -> SandboxResult:
        """Wait for the end; output that nobody has read so far is in the result only."""
        self._abandoned.set()
        self._thread.join()
        if self._cancel >= 0:
            os.close(self._cancel)
            self._cancel = -1
        if self._error is not None:
            raise self._error
        assert self._result is not None  # noqa: S101 - the thread sets one or the other
        return self._result


async def aexecute(
    sandbox: "Sandbox", code: str | bytes, language: str, **given: Any
) -> SandboxResult:
    """Run `sandbox.execute` in a thread; cancelling the task ends the execution."""
    cancel = os.eventfd(0, os.EFD_CLOEXEC)
    work = asyncio.create_task(
        asyncio.to_thread(sandbox.execute, code, language, cancel=cancel, **given)
    )
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        os.eventfd_write(cancel, 1)
        await work
        raise
    finally:
        os.close(cancel)
