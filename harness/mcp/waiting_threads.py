"""Blocking work in a thread for a task of an event loop; the work is notified when the task is
cancelled."""

import os
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import anyio.to_thread

_T = TypeVar("_T")


async def in_thread(
    work: Callable[[int], _T], until: Callable[[], Awaitable[object]] = anyio.sleep_forever
) -> _T:
    """Return the result of `work`, called in a thread, or raise its exception; always waits for its
    end.

    `work` gets a descriptor that becomes readable when this is cancelled or `until` returns: it should
    end then.
    """
    stop = os.eventfd(0, os.EFD_CLOEXEC)

    async def tell() -> None:
        try:
            await until()
        finally:
            os.eventfd_write(stop, 1)

    def outcome() -> tuple[_T, None] | tuple[None, Exception]:
        try:
            return work(stop), None
        except Exception as error:  # noqa: BLE001 - raised again, outside the task group
            return None, error

    try:
        async with anyio.create_task_group() as beside:
            beside.start_soon(tell)
            with anyio.CancelScope(shield=True):
                limiter = anyio.CapacityLimiter(1)  # the caller bounds the number of threads
                value, error = await anyio.to_thread.run_sync(outcome, limiter=limiter)
            beside.cancel_scope.cancel()
    finally:
        os.close(stop)
    if error is not None:
        raise error
    return value  # type: ignore[return-value] # None only where that is what `work` returned
