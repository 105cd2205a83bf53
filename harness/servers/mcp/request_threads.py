"""Blocking work of a request in a thread; the work is told to end when the request ends."""

import codecs
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple, TypeVar, cast

import anyio
from anyio import from_thread

from ....runner.capture import OnOutput
from ...mcp.threads import in_thread
from ...text.terminal import harmless
from ..client_turns import ClientTurns
from ..tokens import GONE
from .clients import Context, is_modern, owner_of
from .stream_events import READER

T = TypeVar("T")
_AT_ONCE, _AT_ONCE_OF_ONE = 64, 48
_UNSENT = 64  # pieces of progress that a client has not read; further ones are dropped
_MESSAGE_CHARACTERS = 4096
_TAKING_SECONDS = 5.0  # for a client to read the rest of the progress, once there is a result


class RequestControl(NamedTuple):
    """The connection between work and its request: `stop` is a descriptor that is readable once the
    work should end; `on_output` reports a program's output, None if the client did not ask for it."""

    stop: int
    on_output: OnOutput | None


class RequestThreads:
    """Runs blocking work with a limit for all clients and one for each; the rest waits.  So one client
    cannot use all threads."""

    def __init__(self) -> None:
        self._turns = ClientTurns(_AT_ONCE_OF_ONE, _AT_ONCE)

    async def do(self, context: Context, work: Callable[[RequestControl], T]) -> T:
        """Return what `work` returns, or raise what it raises; waits for its end in any case.

        The work is told to end if the request is cancelled, or its client disconnects and does not
        resume the answer in time.
        """
        async with self._turns.turn(owner_of(context).client):
            value, error = await _run_reporting(context, work)
        if error:
            raise error
        return cast("T", value)


async def _run_reporting(
    context: Context, work: Callable[[RequestControl], T]
) -> tuple[T | None, Exception | None]:
    """Return the result or the exception of the work, and report its progress meanwhile."""
    progress = Progress(context) if wants_progress(context) else None

    def outcome(stop: int) -> tuple[T | None, Exception | None]:
        try:
            return work(RequestControl(stop, progress.tell if progress else None)), None
        except Exception as error:  # noqa: BLE001 - raised again, outside the task group
            return None, error

    async with anyio.create_task_group() as beside:
        if progress:
            beside.start_soon(progress.relay)
        # waits for the thread, which ends the cell
        found = await in_thread(outcome, _until_abandoned(context))
        if progress:
            await progress.finish()
        beside.cancel_scope.cancel()
    return found


def _until_abandoned(context: Context) -> Callable[[], Awaitable[object]]:
    """Return what waits until the client has disconnected and will not resume the answer."""
    if context.request is None:
        return anyio.sleep_forever
    gone: anyio.Event = context.request.scope[GONE]
    reader = READER.get()
    if reader is None or is_modern(context):
        return gone.wait
    return partial(reader.events.until_abandoned, str(context.request_id), reader)


def wants_progress(context: Context) -> bool:
    """Tell whether the client sent a progress token."""
    return (context.meta or {}).get("progress_token") is not None


class Progress:
    """Sends a program's output to its client while the program runs.

    A client that does not read it does not delay the program: it misses some, and gets all of it in the
    result.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._sending, self._receiving = anyio.create_memory_object_stream[str](_UNSENT)
        self._done = anyio.Event()
        make = codecs.getincrementaldecoder("utf-8")  # a character may be split between two pieces
        self._decoders = {"stdout": make("replace"), "stderr": make("replace")}

    def tell(self, stream: str, data: bytes) -> None:
        """Queue output; called from the thread of the work."""
        text = harmless(self._decoders[stream].decode(data))
        pieces = [
            text[at : at + _MESSAGE_CHARACTERS] for at in range(0, len(text), _MESSAGE_CHARACTERS)
        ]
        from_thread.run_sync(self._offer, pieces)

    def _offer(self, pieces: list[str]) -> None:
        for piece in pieces:
            try:
                self._sending.send_nowait(piece)
            except anyio.WouldBlock:
                return

    async def relay(self) -> None:
        """Send the queued output until the queue is closed."""
        try:
            with self._receiving:
                count = 0
                async for piece in self._receiving:
                    count += 1
                    await self._context.session.report_progress(count, None, piece)
        finally:
            self._done.set()

    async def finish(self) -> None:
        """Wait until all is sent, at most `_TAKING_SECONDS`: other requests wait for this thread."""
        self._sending.close()
        with anyio.move_on_after(_TAKING_SECONDS):
            await self._done.wait()
