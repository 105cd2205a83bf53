"""`Fleet`: runs programs in the cells of many hosts."""

import contextlib
import random
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from ...policies.closing import Closing
from ...policies.errors import CellwrightError, PolicyError
from ...policies.languages import PYTHON
from ...runner.concurrency import NEVER
from ...runner.result import SandboxResult
from ..sandbox.parameters import CallArguments, FileContent
from ..sandbox.remote.arguments import packed, requirements_of, result_of
from ..sandbox.remote.frames import Describe, Description, Execute, Executed, Opened, OpenSession
from ..sandbox.session import Session
from ..servers.daemon.quotas import QuotaSettings, TenantQuota
from .dispatch import Dispatch, reply_as
from .fleet_metrics import FleetMetrics
from .fleet_session import FleetSession
from .mapping import mapped
from .messages import MOST_KEY, NodeReply, NodeRequest
from .nodes import FleetNode
from .router import RouterLimits, RouterState, Wanted

if TYPE_CHECKING:
    from ..sandbox.sandbox_arguments import PolicyLike

DEFAULT_TENANT = "default"
_MARGIN_SECONDS = 60.0  # beyond the limits of a call, until a node counts as lost
_NOT_IN_A_FLEET = MappingProxyType({"workspace": None, "clean": False})


class Fleet(Closing):
    """Nodes that run programs, each call in a cell of its own.  Safe from many threads.

    `nodes` and `slots`: the nodes, and how many calls each runs at once.  `on_ray` starts them.
    `tenants`: the names that calls may give, with the quotas of each; by default one tenant without
    quotas.  `limits`: of the queues.  Raises PolicyError for invalid arguments, and what the nodes
    raise where they cannot make cells.
    """

    def __init__(
        self,
        nodes: Sequence[FleetNode],
        slots: int,
        *,
        tenants: Mapping[str, QuotaSettings] | None = None,
        limits: RouterLimits = RouterLimits(),  # noqa: B008 - a constant
        chance: random.Random | None = None,
    ) -> None:
        given = {DEFAULT_TENANT: QuotaSettings()} if tenants is None else dict(tenants)
        self._quotas = {name: TenantQuota(name, settings) for name, settings in given.items()}
        self._lock = threading.Lock()
        self._sessions: dict[str, FleetSession] = {}  # by the key that their node has for them
        self._dispatch = Dispatch(nodes, slots, limits, self._note_retry, chance)
        self._metrics = FleetMetrics(tuple(given), lambda: self.state, self._count_sessions)
        described = [
            reply_as(self._dispatch.ask(Describe(), node.name), Description) for node in nodes
        ]
        self._limits = described[0].policy.limits
        self._dispatch.answer_seconds = _MARGIN_SECONDS + 2 * self._limits.wall_seconds

    @classmethod
    def on_ray(
        cls,
        *,
        policy: "PolicyLike | None" = None,
        slots: int = 8,
        pool: int = 8,
        sessions: int = 32,
        audit: str = "",
        cgroup_root: str = "",
        find_links: str = "",
        index: bool = True,
        resource: str | None = None,
        nodes_per_host: int = 1,
        tenants: Mapping[str, QuotaSettings] | None = None,
        limits: RouterLimits = RouterLimits(),  # noqa: B008 - a constant
    ) -> Self:
        """Return a fleet with one actor on each node of the Ray cluster that `ray.init` connected to.

        `policy`: as of `Sandbox`.  `slots`: calls that a node runs at once; `pool`: cells that wait
        ready there; `sessions`: sessions that live there at once.  `audit`: the path of the trail on
        each node, with `{node}` for its name.  `cgroup_root`: as of `Sandbox`, on each node.
        `find_links`, `index`: where each node gets packages from: a folder of wheels there, and whether
        to ask the index of its settings of pip, too.
        `resource`: use only nodes that have this custom resource.  `nodes_per_host`: actors on each
        node, for hosts with many processors.

        Raises PolicyError without the extra `fleet` or for invalid arguments, LaunchError if an actor
        cannot be started, and what `Sandbox` raises where a host cannot make cells.
        """
        counts = {"slots": slots, "sessions": sessions, "nodes_per_host": nodes_per_host}
        for name, count in counts.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise PolicyError(f"{name}: must be a whole number from 1, got {count!r}")
        from ..sandbox.sandbox_arguments import SandboxArguments, policy_of_arguments
        from .messages import NodeSettings
        from .ray_nodes import start_nodes  # Ray is large

        settings = NodeSettings(
            name="", policy=policy_of_arguments(SandboxArguments(policy=policy)), slots=slots,
            pool=pool, sessions=sessions, audit=audit, cgroup_root=cgroup_root,
            find_links=find_links, index=index,
        )  # fmt: skip
        nodes = start_nodes(settings, nodes_per_host, resource)
        try:
            return cls(nodes, slots, tenants=tenants, limits=limits)
        except BaseException:
            for node in nodes:
                node.close()
            raise

    @property
    def state(self) -> RouterState:
        """Free slots by node, the nodes that were lost, and how many calls wait."""
        return self._dispatch.router.state()

    def metrics_text(self) -> str:
        """Return what the fleet counts in the text format of Prometheus; raises PolicyError without
        the extra `metrics`."""
        return self._metrics.text()

    def execute(
        self, code: str | bytes, language: str = PYTHON, *, key: str | None = None,
        tenant: str = DEFAULT_TENANT, stdin: str | bytes | None = None,
        inputs: Mapping[str, Any] | None = None,
        files: Mapping[str, FileContent] | None = None, env: Mapping[str, str] | None = None,
        timeout: float | None = None, collect: Sequence[str] = (), trace_id: str | None = None,
        plain: bool = False, arguments: Sequence[str] = (), filename: str | None = None,
        packages: Sequence[str] = (), requirements: Sequence[str] = (),
    ) -> SandboxResult:  # fmt: skip
        """Run a program in a fresh cell of some node, and return its result.

        `key`: a call with a key that an earlier call of the tenant had is not run again: it returns the
        outcome of that one.  The other arguments are those of `Sandbox.execute`.

        Raises what `Sandbox.execute` raises; BusyError if a queue is full or the wait too long,
        QuotaExceeded for a limit of the tenant.  OutcomeUnknown: the call may have begun on a node that
        was lost, so it is not repeated, or the outcome is no longer kept.  A call that has not begun
        goes to another node; NodeLost if there is none.
        """
        return self._execute(CallArguments.of({**locals(), **_NOT_IN_A_FLEET}), key, tenant)

    def map(
        self, programs: Iterable[str | bytes], language: str = PYTHON, *,
        keys: Iterable[str] | None = None, return_errors: bool = False, at_once: int | None = None,
        tenant: str = DEFAULT_TENANT, stdin: str | bytes | None = None,
        inputs: Mapping[str, Any] | None = None,
        files: Mapping[str, FileContent] | None = None, env: Mapping[str, str] | None = None,
        timeout: float | None = None, collect: Sequence[str] = (), trace_id: str | None = None,
        plain: bool = False, arguments: Sequence[str] = (), filename: str | None = None,
        packages: Sequence[str] = (), requirements: Sequence[str] = (),
    ) -> Iterator[SandboxResult | CellwrightError]:  # fmt: skip
        """Run programs, and yield the result of each once, in their order.

        `keys`: the key of each.  `return_errors`: yield the CellwrightError of a call in the place of
        its result, instead of raising the first.  `at_once`: how many run at once, default all slots
        of the fleet.  The other arguments are those of `execute`, the same for all.  Programs are read
        from the iterable as results are taken, so that it may be endless.
        """
        width = self._dispatch.slots if at_once is None else at_once
        if width < 1:
            raise PolicyError(f"at_once: must be at least 1, got {at_once}")
        same = CallArguments.of({**locals(), "code": "", **_NOT_IN_A_FLEET})

        def execute(code: str | bytes, key: str | None) -> SandboxResult:
            return self._execute(msgspec.structs.replace(same, code=code), key, tenant)

        return mapped(execute, programs, keys, width, return_errors=return_errors)

    def _execute(self, given: CallArguments, key: str | None, tenant: str) -> SandboxResult:
        request = packed(given, self._limits)
        wanted = Wanted(frozenset(requirements_of(given.packages)))
        named = None if key is None else _named(key, tenant)
        with self._turn("fleet_execute", tenant) as quota:
            reply = self._dispatch.run(request, wanted, named)
            return result_of(_spent(reply_as(reply, Executed), quota))

    def session(
        self, language: str = PYTHON, *, packages: Sequence[str] = (), tenant: str = DEFAULT_TENANT
    ) -> Session:
        """Return a session, whose calls all go to one node; close it.

        If that node is lost every call raises SessionNodeLost: a session never begins anew by itself.
        Terminals and ports are not available.  Raises what `Sandbox.session` raises, and BusyError and
        QuotaExceeded as `execute` does.
        """
        names = requirements_of(packages)
        request = OpenSession(secrets.token_hex(16), language, names)
        with self._metrics.request("fleet_session", tenant), self.room_for_session(tenant):
            node, reply = self._dispatch.open(request, Wanted(frozenset(names)))
            opened = reply_as(reply, Opened)
            session = FleetSession(self, node, tenant, opened, self._limits)
            self.keep_session(session, opened.session)
            return session

    def ask_node(self, node: str, tenant: str, request: NodeRequest) -> NodeReply:
        """Send a request of a session to its node; for `FleetSession`."""
        if not isinstance(request, Execute):
            return self._dispatch.ask(request, node)
        with self._turn("fleet_session_execute", tenant) as quota:
            reply = self._dispatch.run(request, Wanted(node=node))
            return _spent(reply, quota) if isinstance(reply, Executed) else reply

    def room_for_session(self, tenant: str) -> AbstractContextManager[None]:
        """Keep room for a session of a tenant during the block; raises QuotaExceeded."""
        return self._quota(tenant).room_for_session(lambda: self._count_sessions(tenant))

    def keep_session(self, session: FleetSession, key: str) -> None:
        """Count a session until `forget_session`; for `FleetSession`."""
        with self._lock:
            self._sessions[key] = session

    def forget_session(self, key: str) -> None:
        with self._lock:
            self._sessions.pop(key, None)

    def close(self) -> None:
        """End every node with its cells; calls that wait raise ClosedError."""
        for quota in self._quotas.values():
            quota.close()
        self._dispatch.close()

    def _count_sessions(self, tenant: str | None = None) -> int:
        router = self._dispatch.router
        with self._lock:
            return sum(
                tenant in (None, each.tenant) and not router.why_lost(each.node)
                for each in self._sessions.values()
            )

    def _note_retry(self) -> None:
        self._metrics.note_retry()

    def _quota(self, tenant: str) -> TenantQuota:
        if (quota := self._quotas.get(tenant)) is None:
            raise PolicyError(
                f"tenant: unknown: {str(tenant)[:64]!r}", "name it in tenants= of the Fleet"
            )
        return quota

    @contextlib.contextmanager
    def _turn(self, kind: str, tenant: str) -> Iterator[TenantQuota]:
        quota = self._quota(tenant)
        with self._metrics.request(kind, tenant), quota.turn(NEVER):
            yield quota


def _named(key: object, tenant: str) -> str:
    """Return the key as nodes know it: those of two tenants are never the same."""
    if not isinstance(key, str) or not key:
        raise PolicyError(f"key: must be a text that is not empty, got {key!r}")
    named = f"{tenant}/{key}"
    if len(named) > MOST_KEY:
        raise PolicyError(f"key: must have at most {MOST_KEY - len(tenant) - 1} characters")
    return named


def _spent(reply: Executed, quota: TenantQuota) -> Executed:
    """Count the CPU time of a call."""
    usage = reply.result.usage
    quota.spend(usage.cpu_user_seconds + usage.cpu_system_seconds)
    return reply
