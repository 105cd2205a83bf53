"""`McpServers`: the tools of MCP servers, for a broker; a synchronous face, safe from many threads."""

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any

import anyio

from ...policies.errors import BudgetExceeded, ClosedError, PolicyError, ToolError, ToolFailed
from ...runner.budget import STEPS_PER_SECOND, Budget
from ...runner.turns import NEVER
from ..schemas.spec import ToolSpec
from ..schemas.tool_names import key_of
from ..tools.caller import Caller, Tool
from ..tools.registry import ToolRegistry
from ..tools.vault import Vault
from .call_results import value_of
from .config import ServerConfig, read_servers, servers_of
from .connection import Elicit, Listing
from .event_loop import ServerLoop
from .index import ToolIndex
from .launching import launch_server
from .managed_server import SharedContext
from .pins import Drift, Pins
from .status import Progressed, ServerStatus, state_of
from .threads import in_thread
from .transports import Launch

_STEPS = 10 * STEPS_PER_SECOND  # for the definitions of one server


class McpServers:
    """Servers, none of which is started before one of its tools is called; or, if nothing of it is
    pinned, before its tools are asked for.

    `servers` are a file (JSON or TOML), what was parsed of one, or ServerConfigs.  `pins` is where
    definitions are pinned, `vault` has the credentials that headers and env name, `elicit` is asked
    what servers ask, in a thread of its own, `on_progress` is told how calls go on, and must be quick
    or it holds others up.  With a `registry` the tools are among its tools too.  `launch` starts a
    server.

    It is a Catalogue: `Broker(servers)`.  Close it, or use it as a context manager.
    """

    def __init__(
        self, servers: str | os.PathLike[str] | Mapping[str, Any] | Sequence[ServerConfig], *,
        pins: str | os.PathLike[str] | None = None, vault: Vault | None = None,
        elicit: Elicit | None = None, on_progress: Callable[[Progressed], None] | None = None,
        registry: ToolRegistry | None = None, launch: Launch = launch_server,
    ) -> None:  # fmt: skip
        """Read what is configured and what is pinned; raises PolicyError, RegistryError."""
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
        self._finalizer = weakref.finalize(self, _close, self._loops)  # at exit, if not before

    # what a broker and a registry ask

    def revision(self) -> int:
        """Return a number that is another one after the tools have changed."""
        return self._index.revision

    def owns(self, name: str) -> bool:
        """Tell whether a name is, or would be, that of a tool of these servers."""
        server = name.lower().partition(".")[0]
        return server in self.configs or self._index.find(key_of(name)) is not None

    def get(self, name: str) -> Tool:
        """Return a tool; a server of which nothing is known is started.

        Raises ToolNotFound, ToolDenied for one that is not what was pinned, ToolFailed if its server
        cannot be had.
        """
        server = name.lower().partition(".")[0]
        if not self._index.knows(server) and server in self.configs:
            self._ask(server)
        return self._index.get(name)

    def specs(self) -> list[ToolSpec]:
        """Return every tool that can be called; a server that cannot be had has none."""
        self._ask_all(only_unknown=True)
        return self._index.specs()

    # what people ask

    def list_tools(self, server: str | None = None) -> list[ToolSpec]:
        """Return the tools of one server, or of all, having asked; raises ToolFailed for one."""
        if server is None:
            self._ask_all(only_unknown=False)
        else:
            self._ask(self._config(server).name)
        return [spec for spec in self._index.specs() if server in (None, spec.server)]

    def start_call(self, name: str, arguments: dict[str, Any]) -> "Future[Any]":
        """Begin a call that no broker checks, for a host that does; cancelling it cancels it there."""
        return self._begin(self.get(name).spec, arguments)

    def status(self) -> list[ServerStatus]:
        """Return what is known of every server, without asking any."""
        loop = self._loops[-1] if self._loops else None
        return [self._status(config, loop) for config in self.configs.values()]

    def check(self, server: str) -> ServerStatus:
        """Ask a server for its tools, starting it if need be; raises ToolFailed."""
        config = self._config(server)
        self._ask(config.name)
        return self._status(config, self._open_loop())

    def difference(self, server: str) -> str:
        """Return how its tools differ from those that are pinned, for a person; "" if they do not."""
        self._ask(self._config(server).name)
        return self._index.difference(server)

    def pin(self, server: str) -> Drift:
        """Believe what a server says of its tools now; return what that changed."""
        self._ask(self._config(server).name)
        config = self._config(server)
        try:
            return self._index.pin(config, _budget(config, config.connect_timeout))
        except BudgetExceeded as exceeded:
            raise ToolFailed(f"{server} cannot be pinned: {exceeded.what}") from None

    def close(self) -> None:
        """End every server; what is called then raises ToolFailed.  Closing twice is fine."""
        self._closed = True
        if self._registry:
            self._registry.detach(self)
        self._finalizer()

    def __enter__(self) -> "McpServers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # inside

    def _config(self, server: str) -> ServerConfig:
        if server not in self.configs:
            known = ", ".join(sorted(self.configs)) or "none"
            raise PolicyError(f"there is no server {server!a}", f"there are: {known}")
        return self.configs[server]

    def _tool(self, spec: ToolSpec) -> Tool:
        return Tool(spec, partial(self._perform, spec))

    def _perform(self, spec: ToolSpec, arguments: dict[str, Any], caller: Caller) -> Any:
        future = self._begin(spec, arguments)
        try:
            return future.result()
        except CancelledError:
            raise ClosedError("these servers were closed") from None
        except BaseException:
            future.cancel()  # Ctrl-C: the server is told
            raise

    def _begin(self, spec: ToolSpec, arguments: dict[str, Any]) -> "Future[Any]":
        return self._open_loop().begin(self._call, spec, arguments)

    async def _call(self, spec: ToolSpec, arguments: dict[str, Any]) -> Any:
        def progress(done: float, total: float | None, message: str) -> None:
            if self._on_progress:
                self._on_progress(Progressed(spec.name, done, total, message))

        server = self._open_loop().servers[spec.server]
        believed = partial(self._index.check, spec)
        result, transport = await server.call(spec.function, arguments, believed, progress)
        return value_of(result, spec, transport)

    async def _listed(self, config: ServerConfig, listing: Listing) -> None:
        """Take up what a server lists, before the time for that is over, or only that would be told;
        raises ToolFailed."""
        seconds = 0.9 * (anyio.current_effective_deadline() - anyio.current_time())
        try:
            await in_thread(
                lambda stop: self._index.take(config, listing, _budget(config, seconds, stop))
            )
        except BudgetExceeded as exceeded:
            raise ToolFailed(exceeded.what) from None

    def _ask(self, server: str) -> None:
        loop = self._open_loop()
        loop.begin(loop.servers[server].refresh).result()

    def _ask_all(self, *, only_unknown: bool) -> None:
        """Ask those that are wanted, at once; what one cannot answer is in its status."""
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
                raise ClosedError("these servers were closed")
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
    """Return what may be spent on the definitions of one server."""
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
