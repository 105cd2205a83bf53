"""The life of the daemon: what it opens, its signals, reloads, and what it reports to systemd."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ....policies.errors import CellwrightError, PolicyError
from ....policies.policy import Policy
from ....runner.audit.log import AuditLog
from ....runner.cgroups.delegation import take_delegation
from ....runner.settings import PauseSettings, PoolSettings
from ...sandbox.pythons import find_python
from ...sandbox.remote.address import (
    check_length,
    default_path,
    listening_at,
    notify,
    passed_by_systemd,
)
from ...sandbox.sandbox import Sandbox
from ...state import make_private_directory
from ...text.progress import ProgressLine
from ..descriptors import allow_descriptors
from ..operations.endpoint import check_address
from ..operations.measurements import Measurements
from ..operations.observation import OperatorSettings, observing, serving_operators
from ..operations.pages import OperatorsPages
from ..operations.telemetry import check_installed
from .configuration import NEED_RESTART, OWNER, DaemonConfiguration, policies_of, tenant_rules
from .observer import RequestObserver
from .quotas import QuotaSettings
from .server import Server
from .status import ReloadState, gauges_of
from .tenants import TenantPlan, Tenants

if TYPE_CHECKING:
    from ...sandbox.packages.store import PackageStore

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_END_SECONDS = 5.0
ReadConfiguration = Callable[[], DaemonConfiguration]


def plan_of(configuration: DaemonConfiguration) -> TenantPlan:
    """Return a configuration with its policies, and the numbers of its users; raises PolicyError."""
    return TenantPlan(configuration, policies_of(configuration), tenant_rules(configuration))


def check_start(configuration: DaemonConfiguration) -> None:
    """Raise PolicyError or LaunchError for what would end the daemon when it starts: an extra, an
    address, a Python or a folder of wheels that is missing."""
    if configuration.metrics:
        check_address(configuration.metrics)
        OperatorsPages(Measurements())
    if configuration.opentelemetry:
        check_installed()
    if configuration.socket:
        check_length(configuration.socket)
    find_python(configuration.python)
    _store(configuration)


def run_daemon(
    plan: TenantPlan, *, file: Path | None = None, read: ReadConfiguration | None = None,
    delegated: bool = False,
) -> None:  # fmt: skip
    """Serve until SIGTERM or SIGINT; SIGHUP reloads the configuration by `read`, or without it ends the
    daemon, too.  `file`: where `read` reads.

    Raises PolicyError, and BusyError if a daemon listens on the socket already.
    """
    for number in _signals():  # before the server drains: clean up and exit
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    allow_descriptors()
    configuration = plan.configuration
    measurements = Measurements()
    _name_labels(measurements, plan)
    with contextlib.ExitStack() as stack:
        group = -1 if plan.rules.socket_group is None else plan.rules.socket_group
        listener, place = stack.enter_context(_listening(configuration, group))
        settings = OperatorSettings(
            configuration.audit, configuration.metrics, configuration.request_log,
            configuration.opentelemetry,
        )  # fmt: skip
        seen = stack.enter_context(observing(settings, measurements))
        root = take_delegation() if delegated else None
        with ProgressLine("starting cells"):
            tenants = Tenants(
                plan, lambda policy, chosen, tenant, quota: _sandbox(
                    policy, chosen, tenant, quota, seen.trail, root
                ),
            )  # fmt: skip
        try:
            server = Server(listener, tenants, RequestObserver(measurements, seen.log))
            server.reloads = ReloadState(str(file or ""))
            measurements.add_gauges(
                lambda: gauges_of(
                    tenants, measurements, server.counts(), is_draining=server.is_draining
                )
            )
            pages = serving_operators(
                settings, measurements, lambda: "draining" if server.is_draining else "",
                server.is_well, group,
            )  # fmt: skip
            stack.enter_context(pages)
        except BaseException:
            tenants.close()
            raise
        reloader = Reloader(server, tenants, measurements, read) if read else None
        with _on_signals(server, reloader):
            names = ", ".join(plan.policies)
            _report(f"serving {names} at {place}")
            notify(f"READY=1\nSTATUS=serving {names}", os.environ)
            server.run()
        if reloader:
            reloader.close()


class Reloader:
    """Reloads the configuration in a thread of its own, one time after the other; requests that come
    meanwhile lead to one more.  A configuration that cannot be applied changes nothing."""

    def __init__(
        self, server: Server, tenants: Tenants, measurements: Measurements, read: ReadConfiguration
    ) -> None:
        self._server = server
        self._tenants = tenants
        self._measurements = measurements
        self._read = read
        self._wanted = os.eventfd(0, os.EFD_CLOEXEC)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="cellwright-reload", daemon=True)
        self._thread.start()

    def request(self) -> None:
        """Reload soon; for signal handlers, which may interrupt each other."""
        os.eventfd_write(self._wanted, 1)

    def close(self) -> None:
        self._closed = True
        self.request()
        self._thread.join(_END_SECONDS)  # it may wait for the reader of stderr
        if not self._thread.is_alive():
            os.close(self._wanted)

    def _run(self) -> None:
        while True:
            os.eventfd_read(self._wanted)
            if self._closed:
                return
            self._reload()

    def _reload(self) -> None:
        notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}", os.environ)
        state = self._server.reloads
        try:
            plan = plan_of(self._read())
            _refuse_what_needs_restart(self._tenants.plan.configuration, plan.configuration)
            self._tenants.reload(plan)
        except CellwrightError as error:
            self._server.reloads = state._replace(error=error.what)
            _report(f"configuration not reloaded, the former one stays in force: {error}")
        except Exception as error:  # noqa: BLE001 - a bug must not end a daemon that serves
            self._server.reloads = state._replace(error=f"{type(error).__name__}: {error}")
            _report(f"configuration not reloaded: {type(error).__name__}: {error}")
        else:
            _name_labels(self._measurements, plan)
            self._server.reloads = state._replace(applied=state.applied + 1, error="")
            self._server.sweep_soon()
            _report(f"configuration reloaded: serving {', '.join(plan.policies)}")
        names = ", ".join(self._tenants.plan.policies)
        notify(f"READY=1\nSTATUS=serving {names}", os.environ)


def _refuse_what_needs_restart(old: DaemonConfiguration, new: DaemonConfiguration) -> None:
    for field in NEED_RESTART:
        if getattr(old, field) != getattr(new, field):
            raise PolicyError(f"{field}: changes only when the daemon is restarted")


def _name_labels(measurements: Measurements, plan: TenantPlan) -> None:
    """Let the names that the operator gave be labels; those of earlier configurations stay labels."""
    measurements.policies |= frozenset(plan.policies)
    measurements.tenants |= {OWNER, *(each.name for each in plan.configuration.tenants)}


@contextlib.contextmanager
def _listening(
    configuration: DaemonConfiguration, group: int
) -> Iterator[tuple[socket.socket, str]]:
    """Open the socket that systemd passed, or a new one; yield it and its name."""
    passed = passed_by_systemd(os.environ)
    if passed:
        with passed:
            yield passed, str(passed.getsockname())
        return
    path = Path(configuration.socket) if configuration.socket else default_path()
    with listening_at(path, group) as listener:
        yield listener, str(path)


def _sandbox(
    policy: Policy, configuration: DaemonConfiguration, tenant: str, quota: QuotaSettings,
    trail: AuditLog | None, root: str | None,
) -> Sandbox:  # fmt: skip
    pauses = configuration.pauses.of_tenant(tenant, quota.paused_bytes)
    if configuration.pauses.directory is not None:  # else another user could replace a tenant's
        make_private_directory(Path(configuration.pauses.directory), PolicyError)
    if configuration.backend == "oci":
        from ...sandbox.containers.containers import check_holds_sessions  # seldom needed

        check_holds_sessions(configuration.runtime)
    return Sandbox(
        policy=policy, pool=_pool(configuration), sessions=configuration.sessions.settings,
        audit=trail or False, cgroup_root=root, python=configuration.python,
        backend=configuration.backend, runtime=configuration.runtime, rootfs=configuration.rootfs,
        package_store=_store(configuration), pauses=pauses or PauseSettings(),
        pausable=pauses is not None and configuration.pauses.pausable,
    )  # fmt: skip


def _pool(configuration: DaemonConfiguration) -> PoolSettings:
    """Return the pool of one policy, which runs as many cells as clients may have requests: one client
    could take all of fewer."""
    return PoolSettings(size=configuration.pool, running=configuration.serve_limits.running)


def _store(configuration: DaemonConfiguration) -> "PackageStore | None":
    if not (configuration.find_links or configuration.no_index or configuration.index_url):
        return None
    from ...sandbox.packages.store import PackageStore

    return PackageStore(
        find_links=configuration.find_links, index=not configuration.no_index,
        index_url=configuration.index_url, optional_layers=configuration.optional,
        python=configuration.python,
    )  # fmt: skip


@contextlib.contextmanager
def _on_signals(server: Server, reloader: Reloader | None) -> Iterator[None]:
    """Drain at the first signal, cancel at the second; reload at SIGHUP.

    The interpreter's C handler wakes the server by its descriptor: a signal that comes just before the
    server waits would else be handled only after the wait.
    """

    def stop(*_: object) -> None:
        notify("STOPPING=1", os.environ)
        server.stop()

    for number in _signals():
        signal.signal(number, stop)
    if reloader:
        signal.signal(signal.SIGHUP, lambda *_: reloader.request())
    signal.set_wakeup_fd(server.waker, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        if reloader:  # which is closed now
            signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end the daemon; SIGHUP is not one if nohup(1) made it ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(each for each in _SIGNALS if each is not signal.SIGHUP or not ignored)


def _report(words: str) -> None:
    print(f"cellwright: {words}", file=sys.stderr, flush=True)
