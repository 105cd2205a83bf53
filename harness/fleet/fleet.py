"""`Fleet`: runs programs in the cells of many hosts, with metrics for Prometheus."""

import contextlib
import itertools
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, Unpack

import msgspec

from ...policies.closing import Closing
from ...policies.errors import (
    BusyError,
    CellwrightError,
    ClosedError,
    NodeLost,
    PolicyError,
    QuotaExceeded,
)
from ...policies.languages import PYTHON
from ...runner.concurrency import NEVER
from ...runner.requests.result import SandboxResult
from ..sandbox.calls.background import mapped, width_of
from ..sandbox.calls.call_request import cpu_seconds_of
from ..sandbox.checks import check_whole
from ..sandbox.judging.checkers import Checker
from ..sandbox.judging.judge import submission
from ..sandbox.judging.verdicts import Case, JudgeLimits, Judgement
from ..sandbox.languages.compiled import Build, call_of_build
from ..sandbox.parameters import (
    CallArguments,
    CompileArguments,
    CompileOptions,
    ProgramOptions,
    SourceOptions,
)
from ..sandbox.remote import frames
from ..sandbox.remote.call_frames import packed, requirements_of, result_of
from ..sandbox.remote.frames import Describe, Description, Execute, Executed, Opened, OpenSession
from ..sandbox.remote.judge_frames import build_of, packed_compile, packed_judging
from ..sandbox.sessions.session import Session
from ..servers.client_quota import OwnedTable
from ..servers.daemon.quotas import QuotaSettings, TenantQuota
from ..servers.measurements import REQUESTS, Measurements, MetricFamily, Reading
from ..servers.request_log import OperatorsPages
from .cell_node import MOST_KEY, FleetNode, NodeReply
from .node_dispatch import Dispatch, FleetLink, FleetSession, reply_as
from .router import RouterLimits, RouterState, Wanted

if TYPE_CHECKING:
    from ..sandbox.sandbox_arguments import PolicyLike

DEFAULT_TENANT = "default"
_MARGIN_SECONDS = 60.0  # beyond the limits of a call, until a node counts as lost


class Fleet(Closing):
    """Nodes that run programs, each call in a cell of its own.  Safe from many threads.

    `nodes` and `slots`: the nodes, and how many calls each runs at once. `on_ray` starts them.
    `tenants`: the names that calls may give, with the quotas of each; by default one tenant without
    quotas. `limits`: of the queues. Raises PolicyError for invalid arguments, and the errors of nodes
    that cannot make cells.
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
        self._dispatch = Dispatch(nodes, slots, limits, self._note_retry, chance)
        # sessions by their node's key; sessions of a lost node are not counted
        self.sessions: OwnedTable[str, FleetSession] = OwnedTable(
            self, lambda each: self._dispatch.router.why_lost(each.node)
        )
        self._metrics = FleetMetrics(
            tuple(given), lambda: self.state, lambda: len(self.sessions.items())
        )
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
            check_whole(name, count)
        from ..sandbox.sandbox_arguments import SandboxArguments, policy_of_arguments
        from .cell_node import NodeSettings
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
        """Return the metrics in the text format of Prometheus; raises PolicyError without the extra
        `metrics`."""
        return self._metrics.text()

    def execute(
        self, code: str | bytes | Build, language: str = PYTHON, *, key: str | None = None,
        tenant: str = DEFAULT_TENANT, **options: Unpack[ProgramOptions],
    ) -> SandboxResult:  # fmt: skip
        """Run a program in a fresh cell of some node, and return its result.

        `key`: a call with a key that an earlier call of the tenant had is not run again: it returns the
        outcome of that one.  The other arguments are those of `Sandbox.execute`.

        Raises what `Sandbox.execute` raises; BusyError if a queue is full or the wait too long,
        QuotaExceeded for a limit of the tenant.  OutcomeUnknown: the call may have begun on a node that
        was lost, so it is not repeated, or the outcome is no longer kept.  A call that has not begun
        goes to another node; NodeLost if there is none.
        """
        if isinstance(code, Build):
            given = call_of_build("execute", code, None, options)
        else:
            given = CallArguments.of("execute", code=code, language=language, **options)
        return self._execute(given, key, tenant)

    def compile(
        self, source: str | bytes | None = None, language: str = "cpp", *,
        tenant: str = DEFAULT_TENANT, **options: Unpack[CompileOptions],
    ) -> Build:  # fmt: skip
        """Compile a program on some node; a node that does not have the build yet makes it again when
        it first runs it.  The other arguments and errors are those of `Sandbox.compile`."""
        given = CompileArguments.of("compile", source=source, language=language, **options)
        with self._turn("fleet_compile", tenant) as quota:
            reply = self._dispatch.run(packed_compile(given), Wanted())
            build = build_of(given, reply_as(reply, frames.Compiled))
            quota.spend(cpu_seconds_of(build.compile))
        return build

    def judge(
        self, source: str | bytes | Build, language: str | None = None,
        cases: Sequence[Case] = (), *, checker: Checker = "tokens",
        limits: JudgeLimits | None = None, all: bool = False, strict: bool = False,
        tenant: str = DEFAULT_TENANT, **options: Unpack[SourceOptions],
    ) -> Judgement:  # fmt: skip
        """Judge a program on some node, all cases there.  The arguments and errors are those of
        `Sandbox.judge`; `checker` is no function, and `limits` are at most those of the policy."""
        chosen = limits or JudgeLimits().within(self._limits)
        given = submission(
            source, language, checker, chosen, options.get("flags", ()), options.get("sources"),
            every=all, strict=strict, compile_timeout=options.get("compile_timeout"),
        )  # fmt: skip
        with self._turn("fleet_judge", tenant) as quota:
            reply = self._dispatch.run(packed_judging(given, cases), Wanted())
            done: Judgement = reply_as(reply, frames.Judged).judgement
            quota.spend(done.cpu_seconds)
        return done

    def map(
        self, programs: Iterable[str | bytes], language: str = PYTHON, *,
        keys: Iterable[str] | None = None, return_errors: bool = False, at_once: int | None = None,
        tenant: str = DEFAULT_TENANT, **options: Unpack[ProgramOptions],
    ) -> Iterator[SandboxResult | CellwrightError]:  # fmt: skip
        """Run programs, and yield the result of each once, in their order.

        `keys`: the key of each.  `return_errors`: yield the CellwrightError of a call in the place of
        its result, instead of raising the first.  `at_once`: how many run at once, default all slots
        of the fleet.  The other arguments are those of `execute`, the same for all.  Programs are read
        from the iterable as results are taken, so that it may be endless.
        """
        width = self._dispatch.slots if at_once is None else width_of(at_once)
        same = CallArguments.of("map", code="", language=language, **options)

        def execute(item: tuple[str | bytes, str | None]) -> SandboxResult:
            return self._execute(msgspec.structs.replace(same, code=item[0]), item[1], tenant)

        named = itertools.repeat(None) if keys is None else keys
        items = zip(programs, named, strict=keys is not None)
        return mapped(execute, items, width, return_errors=return_errors)

    def _execute(self, given: CallArguments, key: str | None, tenant: str) -> SandboxResult:
        if given.workspace is not None or given.clean:
            raise PolicyError("workspace: not available in a fleet")
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
        with self._metrics.request("fleet_session", tenant), self.sessions.room(tenant) as put:
            node, reply = self._dispatch.open(request, Wanted(frozenset(names)))
            opened = reply_as(reply, Opened)
            link = FleetLink(self._ask_node, self.sessions)
            session = FleetSession(link, node, tenant, opened, self._limits)
            return put(opened.session, session)

    def _ask_node(self, node: str, tenant: str, request: Any) -> NodeReply:
        if not isinstance(request, Execute):
            return self._dispatch.ask(request, node)
        with self._turn("fleet_session_execute", tenant) as quota:
            reply = self._dispatch.run(request, Wanted(node=node))
            return _spent(reply, quota) if isinstance(reply, Executed) else reply

    def close(self) -> None:
        """End every node with its cells; calls that wait raise ClosedError."""
        for quota in self._quotas.values():
            quota.close()
        self._dispatch.close()

    def take(self, tenant: str, amount: int = 1) -> None:
        """Count sessions of a tenant, for the table of sessions; raises QuotaExceeded."""
        self._quota(tenant).take(tenant, amount)

    def give_back(self, tenant: str, amount: int = 1) -> None:
        """Count less sessions of a tenant."""
        self._quota(tenant).give_back(tenant, amount)

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
    quota.spend(cpu_seconds_of(reply.result.compile, reply.result.usage))
    return reply


_NODES = MetricFamily("cellwright_fleet_nodes", "Nodes of the fleet", ("state",))
_FREE = MetricFamily("cellwright_fleet_free_cells", "Calls that a node can take now", ("node",))
_WAITING = MetricFamily("cellwright_fleet_waiting", "Calls that wait for a node")
_SESSIONS = MetricFamily("cellwright_fleet_sessions", "Sessions that are open")


class FleetMetrics:
    """Counts requests by kind and outcome, and refusals by tenant and limit; safe from many threads."""

    def __init__(
        self, tenants: Sequence[str], state: Callable[[], RouterState], sessions: Callable[[], int]
    ) -> None:
        self.measurements = Measurements(tenants=tenants)
        self.measurements.add_gauges(lambda: _gauges(state(), sessions()))

    @contextlib.contextmanager
    def request(self, kind: str, tenant: str) -> Iterator[None]:
        """Count the request that the block makes, and its time."""
        began, outcome = time.monotonic(), "ok"
        try:
            yield
        except BaseException as error:
            outcome = _outcome_of(error)
            if isinstance(error, BusyError):
                limit = error.limit if isinstance(error, QuotaExceeded) else "queue"
                self.measurements.note_refusal(tenant, limit)
            raise
        finally:
            self.measurements.note_request(kind, outcome, time.monotonic() - began)

    def note_retry(self) -> None:
        """Count a call that is sent again, because nothing of it had begun."""
        self.measurements.count(REQUESTS, "fleet_retry", "ok")

    def text(self) -> str:
        """Return the metrics; raises PolicyError without the extra `metrics`."""
        return OperatorsPages(self.measurements).answer("/metrics").body.decode()


def _outcome_of(error: BaseException) -> str:
    for kind, word in ((BusyError, "busy"), (NodeLost, "node_lost"), (ClosedError, "closed")):
        if isinstance(error, kind):
            return word
    return "error"


def _gauges(state: RouterState, sessions: int) -> Iterable[Reading]:
    yield Reading(_NODES, ("alive",), len(state.free))
    yield Reading(_NODES, ("lost",), len(state.lost))
    for node, free in state.free.items():
        yield Reading(_FREE, (node,), free)
    yield Reading(_WAITING, (), state.waiting)
    yield Reading(_SESSIONS, (), sessions)
