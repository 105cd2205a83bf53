"""The gauges of a server, and those of the sandboxes that it has."""

from collections.abc import Iterator

from ....runner.supervisors import SupervisorsState
from .measurements import MetricFamily, Reading

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
