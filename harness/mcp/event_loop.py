"""`ServerLoop`: the one thread whose event loop manages all servers."""

import os
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import TypeVar, TypeVarTuple

import anyio
from anyio.abc import TaskStatus
from anyio.from_thread import start_blocking_portal

from ...policies.errors import ClosedError
from .config import ServerConfig
from .managed_server import ManagedServer, SharedContext

_Result = TypeVar("_Result")
_Arguments = TypeVarTuple("_Arguments")


class ServerLoop:
    """An event loop in a thread of its own, with a ManagedServer for every server."""

    def __init__(self, configs: Iterable[ServerConfig], context: SharedContext) -> None:
        self.process = os.getpid()  # a fork has no threads: it needs a new loop
        self.servers: dict[str, ManagedServer] = {}
        self._context = context
        self._stack = ExitStack()
        self._portal = self._stack.enter_context(
            start_blocking_portal("asyncio", name="cellwright-servers")
        )
        self._stop = self._portal.call(anyio.Event)
        self._done, _ = self._portal.start_task(self._manage, tuple(configs))

    async def _manage(
        self, configs: tuple[ServerConfig, ...], *, task_status: TaskStatus[None]
    ) -> None:
        async with anyio.create_task_group() as group:
            self.servers = {
                each.name: ManagedServer(each, self._context, group) for each in configs
            }
            task_status.started()
            await self._stop.wait()
            for server in self.servers.values():
                server.stop()

    def begin(
        self, work: Callable[[*_Arguments], Awaitable[_Result]], *arguments: *_Arguments
    ) -> "Future[_Result]":
        """Start work on the loop; cancelling the future cancels it."""
        try:
            return self._portal.start_task_soon(work, *arguments)
        except RuntimeError:
            raise ClosedError("McpServers was closed") from None

    def close(self) -> None:
        """End every server and the thread; waiting callers get an error."""
        if self.process != os.getpid():
            return
        with self._stack:
            self._portal.call(self._stop.set)
            self._done.result()
            self._portal.call(self._portal.stop, True)  # cancels waiting callers
