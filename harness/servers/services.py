"""The services of each client: its sandbox, broker, catalogue and tool factory; and its sessions, open
and paused: only its owner can use a session, and their number is limited.
"""

import contextlib
import secrets
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from ...policies.closing import Closing
from ...policies.errors import BusyError, CellwrightError, ClosedError, SessionLost
from ...runner.settings import PauseSettings, PoolSettings, SessionSettings
from ..making.factory import ToolFactory
from ..sandbox.sandbox import Sandbox
from ..sandbox.sessions.session import Session
from ..schemas.spec import ToolSpec
from ..skills.skill_search import SkillSearch
from ..skills.skills import Skills
from ..tools.approval import Approve
from ..tools.broker import Broker
from ..tools.catalogue import Catalogue
from ..tools.registry import ToolRegistry
from ..tools.results import ResultFilter
from ..tools.tool import Caller, Meter
from .client_quota import ClientQuota, OwnedTable, QuotaLevel
from .measurements import Measurements, Reading, readings_of

if TYPE_CHECKING:
    from ..privacy.scope import PrivacyScope

_ID_BYTES = 16
_PAUSED_BYTES = 5 << 29  # bytes of one client: a quarter of all paused states


class SessionLimits(NamedTuple):
    """The number of open sessions, and the seconds that one may be idle."""

    of_one: int = 8
    of_all: int = 32
    idle_seconds: float = 1800.0

    @property
    def of_a_client(self) -> int:
        """Return the limit of one client over all its conversations; some are left for other
        clients."""
        return max(self.of_one, self.of_all * 3 // 4)

    @property
    def settings(self) -> SessionSettings:
        """Return the settings for a sandbox.  It allows one more than we do: at its own limit it would
        end another client's oldest session instead of refusing."""
        return SessionSettings(alive=self.of_all + 1, idle_seconds=self.idle_seconds)

    @property
    def pauses(self) -> PauseSettings:
        """Return the settings of paused sessions.  Clients have no tokens, so the states are of no use
        to another process."""
        return PauseSettings(sandbox_bytes=_PAUSED_BYTES, is_private=True)


class SessionOwner(Protocol):
    """The owner of sessions; `id` begins with the name of its client (see `client_of`)."""

    @property
    def id(self) -> str: ...


class _PausedSession:
    """A session without a cell.  Its token stays here: a client names the session by its id."""

    def __init__(self, id: str, sandbox: Sandbox, language: str) -> None:
        self.id = id
        self.sandbox = sandbox
        self.language = language
        self.token = ""  # empty until the session is paused
        self.turn = threading.Lock()  # held while the session is paused, resumed or discarded


class ListedSession(NamedTuple):
    """A session as its owner sees it in a list."""

    id: str
    language: str
    is_paused: bool


class OwnedSessions:
    """Sessions by owner and id; to other owners a session does not exist.  Safe from many threads.

    A paused session is resumed by its next use, if its owner may have one more open session.
    """

    def __init__(self, limits: SessionLimits) -> None:
        of_owner = QuotaLevel(limits.of_one, "conversation")
        of_client = QuotaLevel(limits.of_a_client, of=client_of)
        total, hint = limits.of_all, "close one"
        quota = ClientQuota("open sessions", of_owner, total, hint, [of_client])
        pausers = ClientQuota("paused sessions", of_client, total, hint)
        # both by owner and id
        self._open: OwnedTable[tuple[str, str], Session] = OwnedTable(quota, lambda each: each.lost)
        self._paused: OwnedTable[tuple[str, str], _PausedSession] = OwnedTable(
            pausers, lambda each: False
        )

    def open(
        self, owner: SessionOwner, sandbox: Sandbox, language: str, packages: Sequence[str] = ()
    ) -> Session:
        """Open a session; raises BusyError if its owner, its client or all together have too many."""
        with self._open.room(owner.id) as put:
            id = secrets.token_hex(_ID_BYTES)  # without a handshake, the id is the only credential
            return put((owner.id, id), sandbox.session(id, language, packages=packages))

    def named(
        self, owner: SessionOwner, name: str, sandbox: Sandbox, language: str,
        packages: Sequence[str] = (),
    ) -> Session:  # fmt: skip
        """Return the owner's session of a name that the owner chose, or open it."""
        known = self._open.get((owner.id, name))
        is_new = known is None or bool(known.lost)
        with self._open.room(owner.id, int(is_new)) as put:
            session = sandbox.session(name, language, packages=packages)
            try:
                return put((owner.id, name), session)
            except BusyError:  # the known session ended meanwhile, and there is no room for another
                session.close()
                raise

    def get(self, owner: SessionOwner, id: str) -> Session:
        """Return a session of this owner, resumed if it was paused; raises the same SessionLost for
        another owner's as for an unknown one, and what resuming raises."""
        session, paused = self._open.get((owner.id, id)), self._paused.get((owner.id, id))
        if session is not None and not session.lost:
            return session
        if paused:
            return self._resumed(owner, id, paused)
        raise _not_found(id, session)

    def branch(self, owner: SessionOwner, id: str, n: int) -> tuple[Session, ...]:
        """Open `n` branches of a session; raises BusyError if these are too many for its owner, and
        PolicyError if its memory cannot be copied: no call of a tool is repeated."""
        source = self.get(owner, id)
        with self._open.room(owner.id, n) as put:
            made = source.branch(n, replay=False)
            return tuple(put((owner.id, each.id), each) for each in made)

    def pause(self, owner: SessionOwner, id: str, sandbox: Sandbox) -> None:
        """Keep a session on disk, without a cell; raises PauseError, BusyError, and it stays open."""
        session, key = self.get(owner, id), (owner.id, id)
        paused = _PausedSession(id, sandbox, session.language)
        with self._paused.room(owner.id) as put, paused.turn:
            if put(key, paused) is not paused:
                raise _not_found(id, session)
            try:
                paused.token = session.pause()
            except BaseException:
                self._paused.pop(key)
                raise

    def _resumed(self, owner: SessionOwner, id: str, paused: _PausedSession) -> Session:
        key = owner.id, id
        with paused.turn:
            if self._paused.get(key) is not paused:
                # another thread resumed or closed it, or it could not be paused
                known = self._open.get(key)
                if known is None or known.lost:
                    raise _not_found(id, known)
                return known
            with self._open.room(owner.id) as put:
                session = put(key, paused.sandbox.resume(paused.token))
            self._paused.pop(key)
        return session

    def _discard(self, key: tuple[str, str]) -> bool:
        """Remove a paused session; tell whether it was one."""
        paused = self._paused.get(key)
        if paused is None:
            return False
        with paused.turn:
            if self._paused.get(key) is not paused:
                return False
            with contextlib.suppress(CellwrightError):  # the state has expired
                paused.sandbox.discard(paused.token)
            self._paused.pop(key)
        return True

    def of(self, owner: SessionOwner) -> list[Session]:
        """Return an owner's open sessions, oldest first."""
        return self._open.of(owner.id)

    def listed(self, owner: SessionOwner) -> list[ListedSession]:
        """Return an owner's sessions, the open ones first, each kind oldest first."""
        paused = [each for each in self._paused.of(owner.id) if each.token]
        return [
            *(ListedSession(each.id, each.language, False) for each in self.of(owner)),
            *(ListedSession(each.id, each.language, True) for each in paused),
        ]

    def close(self, owner: SessionOwner, id: str) -> None:
        """End a session; raises SessionLost if it does not exist."""
        if not self._discard((owner.id, id)):
            self.get(owner, id).close()

    def close_all(self, owner_id: str) -> None:
        """End all sessions of an owner whose conversation has ended."""
        for paused in self._paused.of(owner_id):
            self._discard((owner_id, paused.id))
        for session in self._open.of(owner_id):
            self._open.pop((owner_id, session.id))
            with contextlib.suppress(CellwrightError):  # the launcher died, which frees it as well
                session.close()

    def discard_paused(self) -> None:
        """Remove all paused sessions: no other server can resume them."""
        for key in dict(self._paused.items()):
            self._discard(key)


def _not_found(id: str, session: Session | None) -> SessionLost:
    why = session.lost if session and session.lost else "not found, or it has ended"
    return SessionLost(f"session {id[:64]!r}: {why}", 'open a new one with session="new"')


def client_of(owner_id: str) -> str:
    """Return the client's name in an owner's id (see `clients.owner_id`)."""
    return owner_id.partition("/")[0]


class _Closable(Protocol):
    def close(self) -> None: ...


_K = TypeVar("_K", bound=Hashable)
_C = TypeVar("_C", bound=_Closable)
_CELLS = 4  # cells kept ready for each client


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


class MadeByKey(Closing, Generic[_K, _C]):
    """Things that are closed at the end, such as the services of a client; `make` makes each at its
    first use.  Safe from many threads."""

    def __init__(self, make: Callable[[_K], _C]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: dict[_K, _C] = {}
        self.is_closed = False

    def of(self, key: _K) -> _C:
        """Return the thing of a key; raises ClosedError after `close`, and what making it raises."""
        with self._lock:
            if self.is_closed:
                raise ClosedError("the server is shutting down")
            if key not in self._made:
                self._made[key] = self._make(key)
            return self._made[key]

    def made(self) -> dict[_K, _C]:
        """Return the open objects by key."""
        with self._lock:
            return {} if self.is_closed else dict(self._made)

    def close(self) -> None:
        """Close everything that was made."""
        with self._lock:
            self.is_closed = True
            made = list(self._made.values())
        for each in made:
            each.close()


class ServicesByClient:
    """ClientServices for each client, made at its first request; a client is a token, so they are few.

    All share the policy and trail of `ceiling`, and `registry`: clients may call each other's made
    tools but not replace them.
    """

    def __init__(
        self, ceiling: Sandbox, registry: ToolRegistry, approve: Approve, limits: SessionLimits,
        filters: Sequence[ResultFilter] = (), skills: Skills | None = None, server: str = "mcp",
        running: int = PoolSettings().running, workers: int | Literal["auto"] = 1,
    ) -> None:  # fmt: skip
        """`server` names the server in the owner of made tools; `running` is the number of cells that
        one client uses at once, and `workers` that of the processes that make them."""
        self.ceiling = ceiling
        self.registry = registry
        self._approve = approve
        self._limits = limits
        self._filters = filters
        self.skills = skills  # offered to clients even if none is usable now
        self._server = server
        self._pool = PoolSettings(size=_CELLS, running=running)
        self._workers = workers
        self._by_client = MadeByKey(self._make)
        self._others = MadeByKey(self._make_other)  # sandboxes by client and Python version

    def of(self, client: str) -> ClientServices:
        """Return the services of a client."""
        return self._by_client.of(client)

    def sandbox_of(self, client: str, python: str = "") -> Sandbox:
        """Return a client's sandbox, or its one for another version of Python that this host has;
        raises LaunchError, Unavailable."""
        return self._others.of((client, python)) if python else self.of(client).sandbox

    def made(self) -> tuple[ClientServices, ...]:
        """Return the services of the clients that have sent a request."""
        return tuple(self._by_client.made().values())

    def _make_other(self, key: tuple[str, str]) -> Sandbox:
        client, python = key
        return self.ceiling.sibling(
            self.ceiling.policy, self._pool._replace(size=1), self.of(client).broker,
            self._limits.settings, private_to=f"{self._server} {client}", python=python,
        )  # fmt: skip

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
                skills=self.skills,
                private_to=name,
                workers=self._workers,
            )
        except BaseException:
            factory.close()
            raise
        rate = self.ceiling.policy.tools.calls_per_second
        meter = Meter(float("inf"), rate)
        search = factory.search
        if self.skills:
            among = SkillSearch(sandbox.skills, self.registry, self.registry.model)
            search = partial(_search_all, among)
        privacy = self.ceiling.privacy
        scope = privacy.scope(of=name) if privacy else None
        return ClientServices(sandbox, factory.broker, factory, search, factory, meter, scope)

    def gauges(self, measurements: Measurements) -> Iterator[Reading]:
        """Yield the current state of all clients' cells."""
        sandboxes = [] if self._by_client.is_closed else [self.ceiling]
        sandboxes += [each.sandbox for each in self.made()]
        sandboxes += self._others.made().values()
        for sandbox in sandboxes:
            policy = measurements.known_policy(sandbox.policy.name)
            yield from readings_of(policy, sandbox._state())

    def close(self) -> None:
        """End the running programs of all clients."""
        self._others.close()
        self._by_client.close()


def shown_parameters(spec: ToolSpec) -> dict[str, Any]:
    """Return the schema of a tool's arguments without those that only the host fills in."""
    if not spec.credentials:
        return spec.parameters
    properties = spec.parameters.get("properties", {})
    kept = {key: each for key, each in properties.items() if key not in spec.credentials}
    required = [name for name in spec.parameters.get("required", ()) if name in kept]
    return spec.parameters | {"properties": kept, "required": required}


def _search_all(among: SkillSearch, query: str, limit: int) -> dict[str, Any]:
    told = among.search(query, limit)
    found = told.pop("found")
    if any("kind" in each for each in found):
        told.setdefault("hint", told.pop("note"))
    return told | {"tools": found}
