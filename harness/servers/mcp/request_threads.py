"""Blocking work on behalf of a request: in a thread, told to end when the request is over."""

import codecs
from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast

import anyio
from anyio import CapacityLimiter, from_thread

from ....runner.capture import OnOutput
from ...mcp.threads import in_thread
from ...text.terminal import harmless
from .clients import Context, owner_of

T = TypeVar("T")
GONE = "cellwright.gone"  # in the scope of an HTTP request: an event, set once nobody listens
_AT_ONCE, _AT_ONCE_OF_ONE = 64, 48
_UNSENT = 64  # pieces of progress that a client has not taken: what is more is left out
_MESSAGE_CHARACTERS = 4096
_TAKING_SECONDS = 5.0  # that a client has for the rest of the progress, once there is a result


class RequestControl(NamedTuple):
    """How work and its request hear of each other: `stop` is a descriptor that is readable once the
    work should end, `on_output` tells what a program writes, if the client wants to know."""

    stop: int
    on_output: OnOutput | None


class RequestThreads:
    """Does blocking work, so many pieces at a time, the rest in the order in which they came; one
    client never has all the turns."""

    def __init__(self) -> None:
        self._turns = CapacityLimiter(_AT_ONCE)
        self._turns_of_one: dict[str, CapacityLimiter] = {}  # a client is a token, so they are few

    async def do(self, context: Context, work: Callable[[RequestControl], T]) -> T:
        """Return what `work` returns, or raise what it raises; it has ended when this has.

        It is told to end if the request is cancelled, or if whoever made it is gone: no answer is
        ever sent a second time, so nobody could be told what came of it.
        """
        async with self._of_one(owner_of(context).client), self._turns:
            value, error = await _attended(context, work)
        if error:
            raise error
        return cast("T", value)

    def _of_one(self, client: str) -> CapacityLimiter:
        return self._turns_of_one.setdefault(client, CapacityLimiter(_AT_ONCE_OF_ONE))


async def _attended(
    context: Context, work: Callable[[RequestControl], T]
) -> tuple[T | None, Exception | None]:
    """Return what came of the work, with its progress told beside it."""
    progress = Progress(context) if wants_progress(context) else None

    def outcome(stop: int) -> tuple[T | None, Exception | None]:
        try:
            return work(RequestControl(stop, progress.tell if progress else None)), None
        except Exception as error:  # noqa: BLE001 - raised again, outside the group of tasks
            return None, error

    gone: anyio.Event | None = context.request.scope[GONE] if context.request else None
    async with anyio.create_task_group() as beside:
        if progress:
            beside.start_soon(progress.relay)
        # its cell is taken down by the thread: that is waited for
        found = await in_thread(outcome, gone.wait if gone else anyio.sleep_forever)
        if progress:
            await progress.finish()
        beside.cancel_scope.cancel()
    return found


def wants_progress(context: Context) -> bool:
    """Tell whether the client gave a token to tell progress by."""
    return (context.meta or {}).get("progress_token") is not None


class Progress:
    """Tells a client what a program writes while it runs.

    A client that does not take it never holds the program up: it misses some, and has it all in the
    result.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._sending, self._receiving = anyio.create_memory_object_stream[str](_UNSENT)
        self._done = anyio.Event()
        make = codecs.getincrementaldecoder("utf-8")  # a character may come in two parts
        self._decoders = {"stdout": make("replace"), "stderr": make("replace")}

    def tell(self, stream: str, data: bytes) -> None:
        """Pass output on, from the thread that has it."""
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
        """Send what comes, until there is no more."""
        try:
            with self._receiving:
                count = 0
                async for piece in self._receiving:
                    count += 1
                    await self._context.session.report_progress(count, None, piece)
        finally:
            self._done.set()

    async def finish(self) -> None:
        """Wait until all is sent, but not for who does not take it: others wait for this turn."""
        self._sending.close()
        with anyio.move_on_after(_TAKING_SECONDS):
            await self._done.wait()
