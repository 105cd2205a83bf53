"""The signals that end a server."""

import signal
from collections.abc import Awaitable, Callable

import anyio
from anyio.abc import TaskStatus

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


async def until_signalled(serve: Callable[[anyio.Event], Awaitable[None]]) -> None:
    """Serve to the end; a signal sets the event that `serve` gets, and cancels what is not shielded.

    Signals are heard before `serve` begins: one may come as soon as the server has said its address.
    """
    ending = anyio.Event()

    async def listen(scope: anyio.CancelScope, *, task_status: TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(*_SIGNALS) as signals:
            task_status.started()
            async for _ in signals:
                ending.set()
                scope.cancel()

    async with anyio.create_task_group() as beside:
        await beside.start(listen, beside.cancel_scope)
        await serve(ending)
        beside.cancel_scope.cancel()
