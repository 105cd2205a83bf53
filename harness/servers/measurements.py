"""`Measurements`: the metrics of a server, from the records of its trail and from its requests.

Prometheus, OpenTelemetry and `cellwright status` read the same numbers.  A label's value is one of a
closed set, or a name that the operator gave; any other becomes "other", and a family has at most
`MOST_SERIES` series.  So no guest or client can make an answer long, whatever it calls its things.
"""

import bisect
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ...runner.audit.record import AuditEntry
from ...runner.supervisor import SupervisorsState

MOST_SERIES = 512
OTHER = "other"
BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    60.0,
    300.0,
)
# Sandboxes whose policy is remembered; each client of a server may have one.
_KNOWN_SANDBOXES = 1000
_LAYERS = ("mount_ns", "landlock", "seccomp", "egress", "network", "listener")
_CAPS = ("wall_time", "cpu_time", "memory", "output")
_ENDS = ("ok", "error", "timeout", "killed", "oom", "cancelled", "rejected", "lost")
_PHASES = ("lease", "send", "run", "reply", "teardown")

Labels = tuple[str, ...]


class MetricFamily(NamedTuple):
    """Series of one name, which differ by their labels."""

    name: str
    help: str
    labels: Labels = ()


class HistogramSeries(NamedTuple):
    """Cumulated counts by upper bound, as Prometheus has them; the last is of all."""

    counts: tuple[int, ...]
    sum: float


class Reading(NamedTuple):
    """The value that a gauge has now."""

    family: MetricFamily
    labels: Labels
    value: float


EXECUTIONS = MetricFamily(
    "cellwright_executions", "Programs that ended, by how they ended", ("policy", "outcome")
)
REJECTED = MetricFamily(
    "cellwright_programs_rejected", "Programs refused before they ran", ("policy",)
)
LEASES = MetricFamily(
    "cellwright_pool_leases", "Programs that found a ready cell (hit) or none", ("policy", "result")
)
REFUSALS = MetricFamily(
    "cellwright_refusals", "Attempts of programs that a layer refused", ("policy", "layer")
)
CAPS_HIT = MetricFamily("cellwright_caps_hit", "Programs that a cap ended", ("policy", "cap"))
CPU_SECONDS = MetricFamily(
    "cellwright_program_cpu_seconds", "CPU time of programs that ended", ("policy",)
)
SESSIONS = MetricFamily(
    "cellwright_session_events", "Sessions that were opened or ended", ("policy", "event")
)
CONNECTIONS = MetricFamily(
    "cellwright_network_connections", "Connections of programs to hosts", ("policy", "outcome")
)
TOOL_CALLS = MetricFamily(
    "cellwright_tool_events", "Calls of tools, by what became of them", ("event",)
)
REQUESTS = MetricFamily(
    "cellwright_requests", "Requests to the server that were answered", ("kind", "outcome")
)
REQUESTS_REFUSED = MetricFamily(
    "cellwright_requests_refused", "Requests that a limit or quota refused", ("tenant", "limit")
)
VERDICTS = MetricFamily("cellwright_judge_verdicts", "Programs that were judged", ("verdict",))
COUNTERS = (
    EXECUTIONS, REJECTED, LEASES, REFUSALS, CAPS_HIT, CPU_SECONDS, SESSIONS, CONNECTIONS, TOOL_CALLS,
    REQUESTS, REQUESTS_REFUSED, VERDICTS,
)  # fmt: skip
PHASES = MetricFamily("cellwright_phase_seconds", "Time of programs, by phase", ("phase",))
REQUEST_SECONDS = MetricFamily(
    "cellwright_request_seconds", "Time to the answer of a request", ("kind",)
)
HISTOGRAMS = (PHASES, REQUEST_SECONDS)

ReadGauges = Callable[[], Iterable[Reading]]


class Measurements:
    """Counts, by families and labels; safe from many threads.  An instance is an `on_entry` of a trail.

    `policies` and `tenants` are the names that may be labels; programs of others count as "other".
    """

    def __init__(self, policies: Sequence[str] = (), tenants: Sequence[str] = ()) -> None:
        self.began_at = time.time()
        self.policies = frozenset(policies)
        self.tenants = frozenset(tenants)
        self._lock = threading.Lock()
        self._counts: dict[MetricFamily, dict[Labels, float]] = {each: {} for each in COUNTERS}
        self._times: dict[MetricFamily, dict[Labels, _Histogram]] = {
            each: {} for each in HISTOGRAMS
        }
        self._policy_of: OrderedDict[str, str] = OrderedDict()  # sandbox id -> policy
        self._read_gauges: list[ReadGauges] = []
        self._takes = {
            "policy": self._take_policy, "execution": self._take_execution,
            "validation": self._take_rejection, "violation": self._take_violation,
            "session": self._take_session, "network": self._take_network, "tool": self._take_tool,
        }  # fmt: skip

    def __call__(self, entry: AuditEntry) -> None:
        """Take one record of the trail; those of other categories are not counted."""
        if take := self._takes.get(entry.category):
            take(entry)

    def count(self, family: MetricFamily, *labels: str, amount: float = 1) -> None:
        """Add to a counter; `labels` must come from a closed set."""
        with self._lock:
            series = self._counts[family]
            key = _key(series, labels)
            series[key] = series.get(key, 0) + amount

    def observe(self, family: MetricFamily, seconds: float, *labels: str) -> None:
        """Add to a histogram; `labels` must come from a closed set."""
        with self._lock:
            series = self._times[family]
            series.setdefault(_key(series, labels), _Histogram()).add(seconds)

    def note_request(self, kind: str, outcome: str, seconds: float) -> None:
        """Count an answered request; `kind` and `outcome` are words of the server, not of clients."""
        self.count(REQUESTS, kind, outcome)
        self.observe(REQUEST_SECONDS, seconds, kind)

    def note_refusal(self, tenant: str, limit: str) -> None:
        """Count a request that a limit refused; `limit` is a word of the server."""
        self.count(REQUESTS_REFUSED, _among(self.tenants, tenant), limit)

    def add_gauges(self, read: ReadGauges) -> None:
        """Ask `read` for the gauges at each scrape."""
        self._read_gauges.append(read)

    def gauges(self) -> list[Reading]:
        """Return the gauges now, each series once: equal labels are summed."""
        sums: dict[tuple[MetricFamily, Labels], float] = {}
        for read in self._read_gauges:
            for family, labels, value in read():
                sums[family, labels] = sums.get((family, labels), 0.0) + value
        return [Reading(*key, value) for key, value in sums.items()][:MOST_SERIES]

    def counters(self) -> Iterator[tuple[MetricFamily, dict[Labels, float]]]:
        """Yield each family of counters with its series."""
        for family, series in self._counts.items():
            with self._lock:
                yield family, dict(series)

    def histograms(self) -> Iterator[tuple[MetricFamily, dict[Labels, HistogramSeries]]]:
        """Yield each family of histograms with its series."""
        for family, series in self._times.items():
            with self._lock:
                yield family, {labels: each.seen() for labels, each in series.items()}

    def known_policy(self, name: str) -> str:
        """Return the label for a policy."""
        return _among(self.policies, name)

    def known_tenant(self, name: str) -> str:
        """Return the label for a tenant."""
        return _among(self.tenants, name)

    def _policy(self, entry: AuditEntry) -> str:
        return self._policy_of.get(entry.sandbox_id, OTHER)

    def _take_policy(self, entry: AuditEntry) -> None:
        with self._lock:
            self._policy_of[entry.sandbox_id] = self.known_policy(entry.target)
            while len(self._policy_of) > _KNOWN_SANDBOXES:
                self._policy_of.popitem(last=False)

    def _take_execution(self, entry: AuditEntry) -> None:
        if entry.action == "start":
            return
        policy, details = self._policy(entry), entry.details
        self.count(EXECUTIONS, policy, _among(_ENDS, entry.action))
        if details.get("reason") in _CAPS:
            self.count(CAPS_HIT, policy, details["reason"])
        if "pool_hit" in details:
            self.count(LEASES, policy, "hit" if details["pool_hit"] else "miss")
        self.count(CPU_SECONDS, policy, amount=details.get("cpu_seconds", 0.0))
        for phase in _PHASES:
            if (seconds := details.get(f"{phase}_seconds")) is not None:
                self.observe(PHASES, seconds, phase)

    def _take_rejection(self, entry: AuditEntry) -> None:
        self.count(REJECTED, self._policy(entry))

    def _take_violation(self, entry: AuditEntry) -> None:
        layer = str(entry.details.get("rule", "")).partition(":")[0]
        self.count(
            REFUSALS,
            self._policy(entry),
            _among(_LAYERS, layer),
            amount=entry.details.get("count", 1),
        )

    def _take_session(self, entry: AuditEntry) -> None:
        event = "opened" if entry.action == "opened" else "ended"
        self.count(SESSIONS, self._policy(entry), event)

    def _take_network(self, entry: AuditEntry) -> None:
        if entry.action == "connection":
            outcome = "ok" if entry.details.get("outcome") == "ok" else "failed"
            self.count(CONNECTIONS, self._policy(entry), outcome)

    def _take_tool(self, entry: AuditEntry) -> None:
        known = ("call", "returned", "approved", "waiting", "refused", "failed")
        self.count(TOOL_CALLS, _among(known, entry.action))


class _Histogram:
    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(BUCKETS, seconds)] += 1
        self._sum += seconds

    def seen(self) -> HistogramSeries:
        total, counts = 0, []
        for count in self._counts:
            total += count
            counts.append(total)
        return HistogramSeries(tuple(counts), self._sum)


def _among(known: Iterable[str], value: str) -> str:
    return value if value in known else OTHER


def _key(series: Mapping[Labels, object], labels: Labels) -> Labels:
    """Return the labels of a series; in a family that is full, those of one for all others."""
    if labels in series or len(series) < MOST_SERIES:
        return labels
    return (OTHER,) * len(labels)


DRAINING = MetricFamily("cellwright_draining", "1 while the server takes no new requests")
OPEN_CONNECTIONS = MetricFamily("cellwright_connections", "Open connections of clients")
RUNNING_REQUESTS = MetricFamily("cellwright_requests_running", "Requests that are being answered")
POOL_CELLS = MetricFamily(
    "cellwright_pool_cells",
    "Cells that wait for a program (ready), and that should",
    ("policy", "state"),
)
CALLS = MetricFamily(
    "cellwright_calls", "Programs that run, and calls that wait for a turn", ("policy", "state")
)
SESSIONS_NOW = MetricFamily(
    "cellwright_sessions", "Open sessions: thawed or frozen", ("policy", "state")
)
MEMORY = MetricFamily(
    "cellwright_cgroup_memory_bytes", "Memory of launchers and cells, as their cgroups count",
    ("policy",),
)  # fmt: skip
CPU = MetricFamily(
    "cellwright_cgroup_cpu_seconds", "CPU time of launchers and cells that live now", ("policy",)
)
TENANT_CALLS = MetricFamily(
    "cellwright_tenant_calls",
    "Calls of a tenant that run, or wait for its quota",
    ("tenant", "state"),
)
TENANT_SESSIONS = MetricFamily(
    "cellwright_tenant_sessions", "Open sessions of a tenant", ("tenant",)
)


def readings_of(policy: str, state: SupervisorsState) -> Iterator[Reading]:
    """Yield the gauges of one sandbox; readings of equal labels are to be summed."""
    for each in state.supervisors:
        yield Reading(POOL_CELLS, (policy, "ready"), each.ready)
        yield Reading(POOL_CELLS, (policy, "wanted"), each.wanted)
        yield Reading(CALLS, (policy, "running"), each.running)
        yield Reading(CALLS, (policy, "waiting"), each.waiting)
        if each.memory_bytes is not None:
            yield Reading(MEMORY, (policy,), each.memory_bytes)
        if each.cpu_seconds is not None:
            yield Reading(CPU, (policy,), each.cpu_seconds)
    yield Reading(SESSIONS_NOW, (policy, "thawed"), state.sessions - state.frozen)
    yield Reading(SESSIONS_NOW, (policy, "frozen"), state.frozen)
