"""The services of each client: its sandbox, broker, catalogue and tool factory."""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ...policies.errors import PolicyError
from ...policies.policy import Policy
from ...runner.settings import PoolSettings
from ..making.factory import ToolFactory
from ..sandbox.sandbox import Sandbox
from ..schemas.spec import ToolSpec
from ..skills.search import SkillSearch
from ..skills.skills import Skills
from ..tools.approval import Approve
from ..tools.broker import Broker
from ..tools.caller import Caller
from ..tools.catalogue import Catalogue
from ..tools.filters import ResultFilter
from ..tools.meter import Meter
from ..tools.registry import ToolRegistry
from .operations.measurements import Measurements, Reading
from .operations.sandbox_gauges import readings_of
from .owned_sessions import SessionLimits

if TYPE_CHECKING:
    from ..privacy.scope import PrivacyScope

_CELLS = 4  # kept ready for the programs of one client


class ClientServices(NamedTuple):
    """The services of one client.  `search` and `catalogue` know the tools that `broker` can call, and
    that programs in `sandbox` can call; `factory` makes tools that belong to this client.  With
    `privacy`, it gets tokens in place of personal data."""

    sandbox: Sandbox
    broker: Broker
    catalogue: Catalogue
    search: Callable[..., dict[str, Any]]
    factory: ToolFactory
    meter: Meter
    privacy: "PrivacyScope | None" = None

    def caller(self, id: str, traceparent: str) -> Caller:
        """Return the caller for a single call, under the same rules of the policy as a program."""
        rules = self.sandbox.policy.tools
        return Caller(
            id=id, traceparent=traceparent, rules=rules, meter=self.meter, is_model=True,
            privacy=self.privacy,
        )  # fmt: skip

    def close(self) -> None:
        """End the running programs."""
        self.sandbox.close()
        self.factory.close()


class ServicesByClient:
    """ClientServices for each client, made at its first request; a client is a token, so they are few.

    All share the policy and trail of `ceiling`, and `registry`: clients may call each other's made
    tools but not replace them.
    """

    def __init__(
        self, ceiling: Sandbox, registry: ToolRegistry, approve: Approve, limits: SessionLimits,
        filters: Sequence[ResultFilter] = (), skills: Skills | None = None, server: str = "mcp",
        running: int = PoolSettings().running,
    ) -> None:  # fmt: skip
        """`server` names the server in the owner of made tools; `running` is the number of cells that
        one client uses at once."""
        self.ceiling = ceiling
        self.registry = registry
        self._approve = approve
        self._limits = limits
        self._filters = filters
        self._skills = skills
        self._server = server
        self._pool = PoolSettings(size=_CELLS, running=running)
        self._lock = threading.Lock()
        self._made: dict[str, ClientServices] = {}
        self._others: dict[tuple[str, str], Sandbox] = {}  # by client and version of Python
        self._closed = False

    @property
    def skills(self) -> Skills | None:
        """The skills that clients are offered."""
        return self._skills

    @property
    def has_skills(self) -> bool:
        """Tell whether clients are offered skills, even if none is usable now."""
        return self._skills is not None

    def of(self, client: str) -> ClientServices:
        """Return the services of a client."""
        with self._lock:
            if self._closed:
                raise PolicyError("the server is shutting down")
            if client not in self._made:
                self._made[client] = self._make(client)
            return self._made[client]

    def sandbox_of(self, client: str, python: str = "") -> Sandbox:
        """Return a client's sandbox, or its one for another version of Python that this host has;
        raises LaunchError, Unavailable."""
        own = self.of(client)
        if not python:
            return own.sandbox
        with self._lock:
            if self._closed:
                raise PolicyError("the server is shutting down")
            if (client, python) not in self._others:
                self._others[client, python] = self.ceiling.sibling(
                    self.ceiling.policy, self._pool._replace(size=1), own.broker,
                    self._limits.settings, private_to=f"{self._server} {client}", python=python,
                )  # fmt: skip
            return self._others[client, python]

    def made(self) -> tuple[ClientServices, ...]:
        """Return the services of the clients that have sent a request."""
        with self._lock:
            return tuple(self._made.values())

    def _make(self, client: str) -> ClientServices:
        name = f"{self._server} {client}"
        factory = ToolFactory(
            self.ceiling, self.registry, maker=name, approve=self._approve,
            filters=self._filters,
        )  # fmt: skip
        try:
            sandbox = self.ceiling.sibling(
                self.ceiling.policy,
                self._pool,
                factory.broker,
                self._limits.settings,
                skills=self._skills,
                private_to=name,
            )
        except BaseException:
            factory.close()
            raise
        rate = self.ceiling.policy.tools.calls_per_second
        meter = Meter(float("inf"), rate)
        search = factory.search
        if self._skills:
            among = SkillSearch(sandbox.skills, self.registry, self.registry.model)
            search = partial(_search_all, among)
        privacy = self.ceiling.privacy
        scope = privacy.scope(of=name) if privacy else None
        return ClientServices(sandbox, factory.broker, factory, search, factory, meter, scope)

    def gauges(self, measurements: Measurements) -> Iterator[Reading]:
        """Yield what the cells of all clients do and use now."""
        with self._lock:
            sandboxes = [] if self._closed else [self.ceiling]
            sandboxes += [each.sandbox for each in self._made.values() if not self._closed]
            sandboxes += [each for each in self._others.values() if not self._closed]
        for sandbox in sandboxes:
            policy = measurements.known_policy(sandbox.policy.name)
            yield from readings_of(policy, sandbox._state())

    def close(self) -> None:
        """End the running programs of all clients."""
        with self._lock:
            self._closed = True
            made, others = list(self._made.values()), list(self._others.values())
        for sandbox in others:
            sandbox.close()
        for each in made:
            each.close()


def refuse_packages(policy: Policy, packages: Sequence[str]) -> None:
    """Refuse packages under a policy that names none: a client chooses only among those that the owner
    of the server allows."""
    if packages and not policy.packages.allow:
        raise PolicyError(
            f"packages: the server's policy {policy.name!r} allows clients none",
            "its owner lists them in packages.allow of the policy",
        )


def shown_parameters(spec: ToolSpec) -> dict[str, Any]:
    """Return the schema of a tool's arguments without those that only the host fills in."""
    if not spec.credentials:
        return spec.parameters
    properties = spec.parameters.get("properties", {})
    kept = {key: each for key, each in properties.items() if key not in spec.credentials}
    required = [name for name in spec.parameters.get("required", ()) if name in kept]
    return spec.parameters | {"properties": kept, "required": required}


def _search_all(among: SkillSearch, query: str, limit: int) -> dict[str, Any]:
    """Search skills and tools; the answer has the form of ToolFactory.search."""
    told = among.search(query, limit)
    found = told.pop("found")
    if any("kind" in each for each in found):
        told.setdefault("hint", told.pop("note"))
    return told | {"tools": found}
