"""`McpServers`: the tools of MCP servers for a broker; synchronous, safe from many threads.

The state of servers, and the progress of calls, for callers of McpServers.

`ServerLoop`: the one thread whose event loop manages all servers.
"""

import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, TypeVar, TypeVarTuple

import anyio
from anyio.abc import TaskStatus
from anyio.from_thread import start_blocking_portal

from ...policies.closing import Closing
from ...policies.errors import BudgetExceeded, ClosedError, PolicyError, ToolError, ToolFailed
from ...runner.concurrency import NEVER, STEPS_PER_SECOND, Budget
from ..schemas.spec import ToolSpec, key_of
from ..tools.registry import ToolRegistry
from ..tools.tool import Caller, Tool, Vault
from .definitions import Drift, Pins
from .managed_server import Elicit, Listing, ManagedServer, SharedContext, State
from .server_config import ServerConfig, read_servers, servers_of
from .server_processes import launch_server
from .tool_index import ToolIndex, value_of
from .transports import Launch
from .waiting_threads import in_thread


class Progressed(NamedTuple):
    """Progress of a call: `done` of `total` (None if unknown), and a message."""

    tool: str
    done: float
    total: float | None
    message: str


class ServerStatus(NamedTuple):
    """A server's state: the number of callable `tools`, why others were `dropped`, and `drift` from the
    pins."""

    name: str
    state: State
    place: str
    sandboxed: bool
    remote: bool
    tools: int
    dropped: tuple[str, ...]
    drift: Drift
    error: str
    starts: int
    protocol: str
    pid: int


def state_of(config: ServerConfig, server: ManagedServer | None) -> State:
    """Return a server's state; `server` is None until the first request to any server."""
    if config.disabled:
        return "disabled"
    return server.state if server else "configured"


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


_STEPS = 10 * STEPS_PER_SECOND  # for the definitions of one server


class McpServers(Closing):
    """Servers that start when one of their tools is called first; a server without pins also starts
    when its tools are listed.

    `servers` is a file (JSON or TOML), a parsed file, or ServerConfigs.  `pins` is the file of pinned
    definitions, `vault` has the credentials that headers and env name.  `elicit` answers the questions
    of servers, in a thread of its own.  `on_progress` gets the progress of calls; it runs on the event
    loop, so a slow one delays all servers.  A `registry` gets the tools too.  `launch` starts a server.

    It is a Catalogue: `Broker(servers)`.  Close it, or use it as a context manager.
    """

    def __init__(
        self, servers: str | os.PathLike[str] | Mapping[str, Any] | Sequence[ServerConfig], *,
        pins: str | os.PathLike[str] | None = None, vault: Vault | None = None,
        elicit: Elicit | None = None, on_progress: Callable[[Progressed], None] | None = None,
        registry: ToolRegistry | None = None, launch: Launch = launch_server,
    ) -> None:  # fmt: skip
        """Read the configuration and the pins; raises PolicyError, RegistryError."""
        self.configs = {config.name: config for config in _configs(servers)}
        self._index = ToolIndex(self.configs.values(), Pins(pins), self._tool)
        self._on_progress = on_progress
        self._context = SharedContext(vault or Vault(), elicit, launch, self._listed)
        self._lock = threading.Lock()
        self._loops: list[ServerLoop] = []
        self._closed = False
        self._registry = registry
        if registry:
            registry.attach(self)
        self._finalizer = weakref.finalize(self, _close, self._loops)  # at exit at the latest

    # for brokers and registries

    def revision(self) -> int:
        """Return a number that changes with the tools."""
        return self._index.revision

    def owns(self, name: str) -> bool:
        """Tell whether a name belongs, or could belong, to a tool of these servers."""
        server = name.lower().partition(".")[0]
        return server in self.configs or self._index.find(key_of(name)) is not None

    def get(self, name: str) -> Tool:
        """Return a tool, starting its server if that has no pins.

        Raises ToolNotFound, ToolDenied for a tool that differs from its pin, ToolFailed if the server
        cannot be started.
        """
        server = name.lower().partition(".")[0]
        if not self._index.knows(server) and server in self.configs:
            self._list(server)
        return self._index.get(name)

    def specs(self) -> list[ToolSpec]:
        """Return every callable tool; a server that cannot be started has none."""
        self._list_all(only_unknown=True)
        return self._index.specs()

    # for hosts and people

    def list_tools(self, server: str | None = None) -> list[ToolSpec]:
        """List the tools of one server, or of all, anew; raises ToolFailed if the one server fails."""
        if server is None:
            self._list_all(only_unknown=False)
        else:
            self._list(self._config(server).name)
        return [spec for spec in self._index.specs() if server in (None, spec.server)]

    def start_call(self, name: str, arguments: dict[str, Any]) -> "Future[Any]":
        """Start a call without a broker's checks, for a host that has its own; cancelling the future
        cancels the call at the server."""
        return self._begin(self.get(name).spec, arguments)

    def status(self) -> list[ServerStatus]:
        """Return the state of every server without contacting any."""
        loop = self._loops[-1] if self._loops else None
        return [self._status(config, loop) for config in self.configs.values()]

    def check(self, server: str) -> ServerStatus:
        """List a server's tools, starting it if needed, and return its state; raises ToolFailed."""
        config = self._config(server)
        self._list(config.name)
        return self._status(config, self._open_loop())

    def difference(self, server: str) -> str:
        """Return for a person how a server's tools differ from their pins; "" if they do not."""
        self._list(self._config(server).name)
        return self._index.difference(server)

    def pin(self, server: str) -> Drift:
        """Pin a server's tools as they are now; return what that changed."""
        self._list(self._config(server).name)
        config = self._config(server)
        try:
            return self._index.pin(config, _budget(config, config.connect_timeout))
        except BudgetExceeded as exceeded:
            raise ToolFailed(f"{server} cannot be pinned: {exceeded.what}") from None

    def close(self) -> None:
        """End every server; later calls raise ClosedError.  Closing twice is harmless."""
        self._closed = True
        if self._registry:
            self._registry.detach(self)
        self._finalizer()

    # internals

    def _config(self, server: str) -> ServerConfig:
        if server not in self.configs:
            known = ", ".join(sorted(self.configs)) or "none"
            raise PolicyError(f"server {server!a} not found", f"configured servers: {known}")
        return self.configs[server]

    def _tool(self, spec: ToolSpec) -> Tool:
        return Tool(spec, partial(self._perform, spec))

    def _perform(self, spec: ToolSpec, arguments: dict[str, Any], caller: Caller) -> Any:
        future = self._begin(spec, arguments)
        try:
            return future.result()
        except CancelledError:
            raise ClosedError("McpServers was closed") from None
        except BaseException:
            future.cancel()  # Ctrl-C: cancels the call at the server
            raise

    def _begin(self, spec: ToolSpec, arguments: dict[str, Any]) -> "Future[Any]":
        return self._open_loop().begin(self._call, spec, arguments)

    async def _call(self, spec: ToolSpec, arguments: dict[str, Any]) -> Any:
        def progress(done: float, total: float | None, message: str) -> None:
            if self._on_progress:
                self._on_progress(Progressed(spec.name, done, total, message))

        server = self._open_loop().servers[spec.server]
        check_listed = partial(self._index.check, spec)
        result, transport = await server.call(spec.function, arguments, check_listed, progress)
        return value_of(result, spec, transport)

    async def _listed(self, config: ServerConfig, listing: Listing) -> None:
        """Update the index with a listing; raises ToolFailed.

        It gets 0.9 of the time left, so that an exceeded budget is reported rather than the timeout.
        """
        seconds = 0.9 * (anyio.current_effective_deadline() - anyio.current_time())
        try:
            await in_thread(
                lambda stop: self._index.update(config, listing, _budget(config, seconds, stop))
            )
        except BudgetExceeded as exceeded:
            raise ToolFailed(exceeded.what) from None

    def _list(self, server: str) -> None:
        loop = self._open_loop()
        loop.begin(loop.servers[server].refresh).result()

    def _list_all(self, *, only_unknown: bool) -> None:
        """List the tools of several servers concurrently; a failure is kept in the server's status."""
        wanted = [
            name for name, config in self.configs.items()
            if not config.disabled and not (only_unknown and self._index.knows(name))
        ]  # fmt: skip
        if not wanted:
            return
        loop = self._open_loop()
        asked = [loop.begin(loop.servers[name].refresh) for name in wanted]
        for future in asked:
            error = future.exception()
            if error and not isinstance(error, ToolError):
                raise error

    def _open_loop(self) -> ServerLoop:
        with self._lock:
            if self._closed:
                raise ClosedError("McpServers was closed")
            if not self._loops or self._loops[-1].process != os.getpid():
                self._loops.append(ServerLoop(self.configs.values(), self._context))
            return self._loops[-1]

    def _status(self, config: ServerConfig, loop: ServerLoop | None) -> ServerStatus:
        server = loop.servers[config.name] if loop else None
        connection = server.connection if server else None
        count, dropped, drift = self._index.summary(config.name)
        return ServerStatus(
            config.name, state_of(config, server), config.place,
            config.sandboxed and not config.url, bool(config.url), count, dropped, drift,
            server.error if server else "", server.starts if server else 0,
            connection.protocol if connection else "", connection.transport.pid if connection else 0,
        )  # fmt: skip


def _budget(config: ServerConfig, seconds: float, stop: int = NEVER) -> Budget:
    return Budget(f"checking the tools of {config.name}", _STEPS, seconds=seconds, cancel=stop)


def _close(loops: list[ServerLoop]) -> None:
    while loops:
        loops.pop().close()


def _configs(
    given: str | os.PathLike[str] | Mapping[str, Any] | Sequence[ServerConfig],
) -> Sequence[ServerConfig]:
    if isinstance(given, str | os.PathLike):
        return read_servers(given)
    return servers_of(given) if isinstance(given, Mapping) else given
