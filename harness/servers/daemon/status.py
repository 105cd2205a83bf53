"""The state of the daemon now: for `cellwright status`, and as gauges for a scrape."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ....runner.supervisors import SupervisorsState
from ...sandbox.remote.frames import DaemonStatus, ServedPolicyStatus, TenantStatus
from ...version import installed_version
from ..operations.measurements import (
    REQUESTS_REFUSED,
    Measurements,
    Reading,
)
from ..operations.sandbox_gauges import (
    DRAINING,
    OPEN_CONNECTIONS,
    RUNNING_REQUESTS,
    TENANT_CALLS,
    TENANT_SESSIONS,
    readings_of,
)
from .peers import Peer
from .tenants import Tenant, Tenants


class ReloadState(NamedTuple):
    """How often the configuration was reloaded, and why the last time had no effect."""

    path: str = ""
    applied: int = 0
    error: str = ""


def status_for(
    peer: Peer, tenants: Tenants, measurements: Measurements, connections: Counter[str],
    *, uptime_seconds: float, reload: ReloadState,
) -> DaemonStatus:  # fmt: skip
    """Return what a client may know: of other tenants only the daemon's user is told.

    Raises PolicyError if a reload has taken the client its right to connect.
    """
    sees_all = peer.uid in (0, os.geteuid())
    own = tenants.tenant_of(peer.uid, peer.groups)  # it may have another one than when it connected
    policies = tenants.plan.policies if sees_all else tenants.policies_of(own)
    shown = [each for each in tenants.all() if sees_all or each.name == own]
    counted = dict(measurements.counters())[REQUESTS_REFUSED]
    return DaemonStatus(
        installed_version(), os.getpid(), uptime_seconds, reload.path if sees_all else "",
        reload.applied, reload.error if sees_all else "", sum(len(each.retired) for each in shown),
        tuple(_policy_status(name, shown) for name in policies),
        tuple(_tenant_status(each, connections[each.name]) for each in shown),
        tuple(
            (tenant, limit, int(count))
            for (tenant, limit), count in sorted(counted.items())
            if sees_all or tenant == own
        ),
    )  # fmt: skip


def gauges_of(
    tenants: Tenants, measurements: Measurements, counts: tuple[int, int], *, is_draining: bool
) -> Iterator[Reading]:
    """Yield the gauges of a daemon; `counts`: connections, and requests at work."""
    yield Reading(DRAINING, (), float(is_draining))
    yield Reading(OPEN_CONNECTIONS, (), counts[0])
    yield Reading(RUNNING_REQUESTS, (), counts[1])
    for tenant in tenants.all():
        label = measurements.known_tenant(tenant.name)
        running, waiting = tenant.quota.load()
        yield Reading(TENANT_CALLS, (label, "running"), running)
        yield Reading(TENANT_CALLS, (label, "waiting"), waiting)
        yield Reading(
            TENANT_SESSIONS, (label,), sum(each.sessions() for each in tenant.all_services())
        )
        for name, state in _states([tenant]):
            yield from readings_of(measurements.known_policy(name), state)


def _states(tenants: Sequence[Tenant]) -> Iterator[tuple[str, SupervisorsState]]:
    for tenant in tenants:
        for service in tenant.all_services():
            if state := service.state():
                yield service.name, state


def _policy_status(name: str, tenants: Sequence[Tenant]) -> ServedPolicyStatus:
    states = [state for known, state in _states(tenants) if known == name]
    each = [supervisor for state in states for supervisor in state.supervisors]
    memory = [one.memory_bytes for one in each if one.memory_bytes is not None]
    seconds = [one.cpu_seconds for one in each if one.cpu_seconds is not None]
    return ServedPolicyStatus(
        name, sum(one.ready for one in each), sum(one.wanted for one in each),
        sum(one.running for one in each), sum(one.waiting for one in each),
        sum(state.sessions for state in states), sum(state.frozen for state in states),
        sum(memory) if memory else None, sum(seconds) if seconds else None,
    )  # fmt: skip


def _tenant_status(tenant: Tenant, connections: int) -> TenantStatus:
    settings = tenant.quota.settings
    running, waiting = tenant.quota.load()
    return TenantStatus(
        tenant.name, connections, running, settings.calls, waiting,
        sum(each.sessions() for each in tenant.all_services()), settings.sessions,
        tenant.quota.cpu_seconds_left(), settings.cpu_seconds_per_minute,
    )  # fmt: skip
