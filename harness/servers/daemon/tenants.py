"""`Tenants`: who may use the daemon, and the services of each tenant.

Each tenant has sandboxes of its own: cells of one sandbox share a launcher, and so an address layout
and a hash seed, and sessions are found by an id.  The services of tenants other than the owner are
made when they are first used.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from ....policies.errors import CellwrightError, PolicyError, QuotaExceeded
from ....policies.policy import Policy
from ...sandbox.sandbox import Sandbox
from .configuration import OTHERS, OWNER, DaemonConfiguration, TenantRules
from .quotas import Peer, QuotaSettings, ServeLimits, TenantQuota
from .service import OpenedSessions, Service

MOST_TENANTS = 128
MOST_RETIRED = 8  # services with a changed policy that sessions of a tenant still use

_UNNAMED = "uid-"  # the beginning of the names of tenants that the configuration does not name

MakeSandbox = Callable[[Policy, DaemonConfiguration, str, QuotaSettings], Sandbox]  # for a tenant


class TenantPlan(NamedTuple):
    """A configuration with its resolved users and groups."""

    configuration: DaemonConfiguration
    policies: Mapping[str, Policy]
    rules: TenantRules


class Tenant:
    """One tenant: its quotas, and its services by the names of policies."""

    def __init__(self, name: str, quota: QuotaSettings) -> None:
        self.name = name
        self.quota = TenantQuota(name, quota)
        self.opened = OpenedSessions(self.quota)
        self.services: dict[str, Service] = {}
        self.retired: list[Service] = []

    def all_services(self) -> list[Service]:
        return [*self.services.values(), *self.retired]

    def is_idle(self) -> bool:
        return all(each.is_idle() for each in self.all_services())

    def close(self) -> None:
        self.quota.close()
        for service in self.all_services():
            service.close()


class Tenants:
    """Safe from many threads."""

    def __init__(self, plan: TenantPlan, make: MakeSandbox) -> None:
        """Make the services of the daemon's own user; raises what `make` raises."""
        self._make = make
        self._plan = plan
        self._lock = threading.Lock()
        self._changing = threading.Lock()
        self._closed = False
        self._by_name: dict[str, Tenant] = {}
        owner = self._tenant_named(self.tenant_of(os.geteuid(), frozenset()))
        try:
            for name in self._policies_of(plan, owner.name):
                self._service(owner, name).start()
        except BaseException:
            self.close()
            raise

    @property
    def plan(self) -> TenantPlan:
        return self._plan

    @property
    def limits(self) -> ServeLimits:
        return self._plan.configuration.serve_limits

    def tenant_of(self, uid: int, groups: frozenset[int]) -> str:
        """Return the name of the tenant of a process; raises PolicyError if it may not connect."""
        rules = self._plan.rules
        if tenant := rules.by_user.get(uid):
            return tenant
        if uid == os.geteuid():
            return OWNER
        if rules.socket_group is None or rules.socket_group not in groups:
            raise PolicyError(f"this daemon serves user {os.geteuid()}, not {uid}")
        named = sorted({rules.by_group[each] for each in groups if each in rules.by_group})
        return named[0] if named else f"{_UNNAMED}{uid}"

    def policies_of(self, tenant: str) -> tuple[str, ...]:
        """Return the names of the policies that a tenant may use."""
        return self._policies_of(self._plan, tenant)

    def check(self, peer: Peer, policy: str) -> None:
        """Raise PolicyError if a client may not use a policy, and QuotaExceeded if there are too many
        tenants."""
        with self.lent(peer, policy):
            pass

    @contextlib.contextmanager
    def lent(self, peer: Peer, policy: str) -> Iterator[Service]:
        """Lend the service of a client under a policy, an empty name for the first, during the block: a
        reload does not close it meanwhile.  Raises as `check` does."""
        with self._lock:
            tenant = self._tenant_named(self.tenant_of(peer.uid, peer.groups))
            service = self._service(tenant, policy)
            service.hold()
        try:
            yield service
        finally:
            service.release()

    def probe(self) -> None:
        """Run an empty program in a cell of the daemon's own user, under its first policy; raises
        CellwrightError."""
        with self.lent(Peer(os.getpid(), os.geteuid(), frozenset()), "") as service:
            service.probe()

    def reload(self, plan: TenantPlan) -> None:
        """Apply another plan to requests that begin from now on; all of it, or raise and keep the old.

        Sessions of a changed policy stay under the old one; its cells end with the last of them.
        """
        with self._changing, contextlib.ExitStack() as made:
            self._check_room()
            owner = self._by_name[self.tenant_of(os.geteuid(), frozenset())]
            fresh: dict[str, Service] = {}
            for name in self._policies_of(plan, owner.name):
                if not self._is_kept(plan, name):
                    fresh[name] = self._new_service(plan, owner, name)
                    made.callback(fresh[name].close)
                    fresh[name].start()
            with self._lock:
                if self._closed:  # closed meanwhile, so the new sandbox must be closed here
                    raise PolicyError("the daemon is shutting down")
                self._apply(plan, owner, fresh)
            made.pop_all()
        self.sweep()

    def sweep(self) -> bool:
        """Close services that no request or session uses any more; return whether any is left."""
        idle: list[Service] = []
        with self._lock:
            for tenant in self._by_name.values():
                idle += [each for each in tenant.retired if each.is_idle()]
                tenant.retired = [each for each in tenant.retired if each not in idle]
            left = any(tenant.retired for tenant in self._by_name.values())
        for service in idle:
            with contextlib.suppress(CellwrightError):
                service.close()
        return left

    def all(self) -> Iterator[Tenant]:
        """Yield the tenants that are in use or were."""
        with self._lock:
            tenants = [*self._by_name.values()]
        yield from tenants

    def close(self) -> None:
        """End every cell."""
        with self._lock:
            self._closed = True
            tenants = [*self._by_name.values()]
        for tenant in tenants:
            tenant.close()

    def _tenant_named(self, name: str) -> Tenant:
        """Return a tenant; the caller holds the lock, as for the next two."""
        if name not in self._by_name:
            if len(self._by_name) >= MOST_TENANTS:
                self._forget_an_idle_one()
            self._by_name[name] = Tenant(name, _quota_of(self._plan, name))
        return self._by_name[name]

    def _forget_an_idle_one(self) -> None:
        for name, tenant in self._by_name.items():
            if name.startswith(_UNNAMED) and tenant.is_idle():
                del self._by_name[name]
                threading.Thread(target=tenant.close).start()  # in a thread, because it takes long
                return
        raise QuotaExceeded(f"at most {MOST_TENANTS} tenants at once", limit="tenants")

    def _service(self, tenant: Tenant, policy: str) -> Service:
        names = self._policies_of(self._plan, tenant.name)
        name = policy or names[0]
        if name not in names:
            raise PolicyError(f"policy: {name!r} is not one of the daemon's: {', '.join(names)}")
        if name not in tenant.services:
            if self._closed:
                raise PolicyError("the daemon is shutting down")
            tenant.services[name] = self._new_service(self._plan, tenant, name)
        return tenant.services[name]

    def _new_service(self, plan: TenantPlan, tenant: Tenant, name: str) -> Service:
        configuration, policy = plan.configuration, plan.policies[name]
        quota = _quota_of(plan, tenant.name)
        return Service(
            policy, lambda: self._make(policy, configuration, tenant.name, quota),
            self._policies_of(plan, tenant.name), configuration.serve_limits,
            configuration.sessions.lifetime_seconds, tenant.opened,
            may_pause=configuration.pauses.directory is not None,
        )  # fmt: skip

    def _policies_of(self, plan: TenantPlan, tenant: str) -> tuple[str, ...]:
        chosen = [each.policies for each in plan.configuration.tenants if each.name == tenant]
        return (chosen[0] if chosen else ()) or tuple(plan.policies)

    def _is_kept(self, plan: TenantPlan, name: str) -> bool:
        old, new = self._plan, plan
        same = all(
            getattr(old.configuration, field) == getattr(new.configuration, field)
            for field in (
                "pool",
                "workers",
                "python",
                "backend",
                "runtime",
                "rootfs",
                "sessions",
                "pauses",
            )
        ) and _paused_bytes(old) == _paused_bytes(new)
        return (
            same
            and old.policies.get(name) == new.policies.get(name)
            and old.configuration.images.get(name) == new.configuration.images.get(name)
        )

    def _check_room(self) -> None:
        self.sweep()
        if any(len(each.retired) >= MOST_RETIRED for each in self.all()):
            raise QuotaExceeded(
                f"sessions still use {MOST_RETIRED} policies of earlier configurations",
                "close them, or restart the daemon",
                limit="reloads",
            )

    def _apply(self, plan: TenantPlan, owner: Tenant, fresh: dict[str, Service]) -> None:
        kept = [name for name in plan.policies if self._is_kept(plan, name)]
        for tenant in self._by_name.values():
            before = tenant.services
            allowed = self._policies_of(plan, tenant.name)
            tenant.services = {
                name: before[name] for name in kept if name in before and name in allowed
            }
            if tenant is owner:
                tenant.services |= fresh
            else:
                tenant.services |= {
                    name: self._new_service(plan, tenant, name)
                    for name in allowed
                    if name in before and name not in kept
                }
            for service in tenant.services.values():
                service.policies = allowed
            tenant.retired += [
                each for each in before.values() if each not in tenant.services.values()
            ]
            tenant.quota.change(_quota_of(plan, tenant.name))
        self._plan = plan


def _paused_bytes(plan: TenantPlan) -> list[tuple[str, int | None]]:
    tables = plan.configuration.tenants
    return [(OTHERS, plan.configuration.quota.paused_bytes)] + [
        (each.name, each.paused_bytes) for each in tables
    ]


def _quota_of(plan: TenantPlan, tenant: str) -> QuotaSettings:
    named = [each.settings for each in plan.configuration.tenants if each.name == tenant]
    if named or tenant == OWNER:
        return named[0] if named else QuotaSettings()
    return plan.configuration.quota.settings
