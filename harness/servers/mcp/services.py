"""What stands behind what clients see: cells, the tools that can be called, and who makes more."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ....policies.errors import PolicyError
from ....runner.pool import PoolSettings
from ...making.factory import ToolFactory
from ...sandbox.sandbox import Sandbox
from ...tools.approval import Approve
from ...tools.broker import Broker
from ...tools.caller import Caller
from ...tools.catalogue import Catalogue
from ...tools.filters import ResultFilter
from ...tools.meter import Meter
from ...tools.registry import ToolRegistry
from .sessions import SessionLimits

_CELLS = 4  # that wait ready for the programs of one client


class ClientServices(NamedTuple):
    """Of one client: `search` and `catalogue` know what `broker` can call, which programs in `sandbox`
    are offered; `factory` makes tools that are its own."""

    sandbox: Sandbox
    broker: Broker
    catalogue: Catalogue
    search: Callable[..., dict[str, Any]]
    factory: ToolFactory
    meter: Meter

    def caller(self, id: str, traceparent: str) -> Caller:
        """Return on whose behalf a single call is made: under the rules of the policy, like a
        program's."""
        rules = self.sandbox.policy.tools
        return Caller(id=id, traceparent=traceparent, rules=rules, meter=self.meter, is_model=True)

    def close(self) -> None:
        """End what runs."""
        self.sandbox.close()
        self.factory.close()


class ServicesByClient:
    """One for each client, made when it first comes; a client is a token, so they are few.

    They share `ceiling`, which none exceeds, its trail, and `registry`: a tool that one has made the
    others may call, and not replace.
    """

    def __init__(
        self, ceiling: Sandbox, registry: ToolRegistry, approve: Approve, limits: SessionLimits,
        filters: Sequence[ResultFilter] = (),
    ) -> None:  # fmt: skip
        self.ceiling = ceiling
        self.registry = registry
        self._approve = approve
        self._limits = limits
        self._filters = filters
        self._lock = threading.Lock()
        self._made: dict[str, ClientServices] = {}
        self._closed = False

    def of(self, client: str) -> ClientServices:
        """Return the services of a client."""
        with self._lock:
            if self._closed:
                raise PolicyError("the server is being ended")
            if client not in self._made:
                self._made[client] = self._make(client)
            return self._made[client]

    def _make(self, client: str) -> ClientServices:
        factory = ToolFactory(
            self.ceiling, self.registry, maker=f"mcp {client}", approve=self._approve,
            filters=self._filters,
        )  # fmt: skip
        try:
            sandbox = self.ceiling.sibling(
                self.ceiling.policy,
                PoolSettings(size=_CELLS),
                factory.broker,
                self._limits.settings,
            )
        except BaseException:
            factory.close()
            raise
        rate = self.ceiling.policy.tools.calls_per_second
        meter = Meter(float("inf"), rate)
        return ClientServices(sandbox, factory.broker, factory, factory.search, factory, meter)

    def close(self) -> None:
        """End all that runs for any client."""
        with self._lock:
            self._closed = True
            made = list(self._made.values())
        for each in made:
            each.close()
