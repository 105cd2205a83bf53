"""The life of the daemon: its start, signals, reloads, and reports to systemd; and the systemd units
that start it when the first client connects.
"""

import contextlib
import ipaddress
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ....policies.errors import CellwrightError, PolicyError
from ....policies.policy import Policy
from ....runner.audit.log import AuditLog
from ....runner.cgroups.systemd import take_delegation
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
from ...sandbox.sandbox_arguments import HostSettings
from ...text.terminal_text import ProgressLine
from ...user_data import make_private_directory
from ..client_quota import allow_descriptors
from ..measurements import Measurements
from ..request_log import OperatorSettings, check_addresses, observing, serving_operators
from ..telemetry import check_installed
from .configuration import NEED_RESTART, OWNER, DaemonConfiguration, policies_of, tenant_rules
from .daemon_listener import RequestObserver
from .daemon_server import ReloadState, Server, gauges_of
from .open_cells import OpenCells, Prepare
from .quotas import QuotaSettings
from .tenants import TenantPlan, Tenants

if TYPE_CHECKING:
    from ...sandbox.packages.package_store import PackageStore

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_END_SECONDS = 5.0
ReadConfiguration = Callable[[], DaemonConfiguration]


def plan_of(configuration: DaemonConfiguration) -> TenantPlan:
    """Return a configuration with its policies, and the numbers of its users; raises PolicyError."""
    return TenantPlan(configuration, policies_of(configuration), tenant_rules(configuration))


def check_start(configuration: DaemonConfiguration) -> None:
    """Raise PolicyError or LaunchError for what would end the daemon when it starts: an extra, an
    address, a Python or a folder of wheels that is missing."""
    check_addresses(_operators(configuration))
    if configuration.opentelemetry:
        check_installed()
    if configuration.socket:
        check_length(configuration.socket)
    find_python(configuration.python)
    _store(configuration)


def run_daemon(
    plan: TenantPlan, *, file: Path | None = None, read: ReadConfiguration | None = None,
    delegated: bool = False, prepare: Prepare | None = None,
) -> None:  # fmt: skip
    """Serve until SIGTERM or SIGINT; SIGHUP reloads the configuration by `read`, or without it ends the
    daemon, too.  `file`: where `read` reads.  `prepare`: what reads the arguments of `cellwright exec`.

    Raises PolicyError, and BusyError if a daemon listens on the socket already.
    """
    for number in _signals():  # a signal before the server drains: clean up and exit
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    allow_descriptors()
    configuration = plan.configuration
    measurements = Measurements()
    _name_labels(measurements, plan)
    with contextlib.ExitStack() as stack:
        group = -1 if plan.rules.socket_group is None else plan.rules.socket_group
        listener, place = stack.enter_context(_listening(configuration, group))
        settings = _operators(configuration)
        seen = stack.enter_context(observing(settings, measurements))
        root = take_delegation() if delegated else None
        with ProgressLine("starting cells"):
            tenants = Tenants(
                plan, lambda policy, chosen, tenant, quota: _sandbox(
                    policy, chosen, tenant, quota, seen.trail, root
                ),
            )  # fmt: skip
        try:
            # A trail would lack the commands of open cells.
            open_cells = OpenCells(None if seen.trail else prepare, configuration.sessions.settings)
            server = Server(listener, tenants, RequestObserver(measurements, seen.log), open_cells)
            server.reloads = ReloadState(str(file or ""))
            measurements.add_gauges(
                lambda: gauges_of(
                    tenants, measurements, server.counts(), is_draining=server.is_draining
                )
            )
            pages = serving_operators(
                settings, measurements, tenants.probe,
                lambda: "draining" if server.is_draining else "", server.is_well, group,
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


def _operators(configuration: DaemonConfiguration) -> OperatorSettings:
    return OperatorSettings(
        configuration.audit, configuration.metrics, configuration.request_log,
        configuration.opentelemetry, configuration.health,
    )  # fmt: skip


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
        self._thread.join(_END_SECONDS)  # the thread may wait for the reader of stderr
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
    if configuration.pauses.directory is not None:  # another user could replace a tenant's
        make_private_directory(Path(configuration.pauses.directory), PolicyError)
    if configuration.backend == "oci":
        from ...sandbox.containers.images import check_holds_sessions  # seldom needed

        check_holds_sessions(configuration.runtime)
    return Sandbox(
        policy=policy, pool=_pool(configuration), sessions=configuration.sessions.settings,
        audit=trail or False, workers=configuration.workers,
        image=configuration.images.get(policy.name),
        host=HostSettings(
            cgroup_root=root, python=configuration.python, backend=configuration.backend,
            runtime=configuration.runtime, rootfs=configuration.rootfs,
            package_store=_store(configuration), pauses=pauses or PauseSettings(),
            pausable=pauses is not None and configuration.pauses.pausable,
        ),
    )  # fmt: skip


def _pool(configuration: DaemonConfiguration) -> PoolSettings:
    """Return the pool of one policy, which runs as many cells as clients may have requests: one client
    could take all of fewer."""
    return PoolSettings(size=configuration.pool, running=configuration.serve_limits.running)


def _store(configuration: DaemonConfiguration) -> "PackageStore | None":
    if not (configuration.find_links or configuration.no_index or configuration.index_url):
        return None
    from ...sandbox.packages.package_store import PackageStore

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
        if reloader:  # the reloader is closed now
            signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end the daemon; SIGHUP is not one if nohup(1) made it ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(each for each in _SIGNALS if each is not signal.SIGHUP or not ignored)


def _report(words: str) -> None:
    print(f"cellwright: {words}", file=sys.stderr, flush=True)


NAMES = ("cellwright.socket", "cellwright.service")
_STOP_SECONDS = 20  # time for the daemon to end after its drain
_DEFAULT_PLACES = {"system": "/run/cellwright.sock", "user": "%t/cellwright.sock"}


_ONLY_LOCAL = "IPAddressAllow=localhost\nIPAddressDeny=any\n"  # systemd.resource-control(5)


def write_units(directory: Path, arguments: Sequence[str], plan: TenantPlan) -> tuple[Path, ...]:
    """Write system units for root, else user units; return their paths.  Raises PolicyError.

    systemd starts the daemon, which has this plan, with `arguments`.
    """
    from importlib import resources  # imports shutil and tempfile

    configuration, group = plan.configuration, plan.rules.socket_group
    place = (
        os.path.abspath(configuration.socket).replace("%", "%%")
        if configuration.socket
        else _DEFAULT_PLACES[kind_of_user()]
    )
    addresses = "" if _needs_other_hosts(plan) else _ONLY_LOCAL
    kind = kind_of_user()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PolicyError(f"cannot make {directory}: {error.strerror}") from None
    reload = "ExecReload=/bin/kill -HUP $MAINPID\n" if "--config" in arguments else ""
    written = []
    for name in NAMES:
        template = resources.files(__package__).joinpath(f"{kind}.{name.rpartition('.')[2]}")
        path = directory / name
        try:
            text = template.read_text().replace("@COMMAND@", _command(arguments))
            stop = f"{configuration.drain_seconds + _STOP_SECONDS:g}"
            mode = "0600" if group is None else f"0660\nSocketGroup={group}"
            text = text.replace("@SOCKET@", place).replace("@STOP@", stop).replace("@MODE@", mode)
            path.write_text(text.replace("@RELOAD@", reload).replace("@ADDRESSES@", addresses))
        except OSError as error:
            raise PolicyError(f"cannot write {path}: {error.strerror}") from None
        written.append(path)
    return tuple(written)


def _needs_other_hosts(plan: TenantPlan) -> bool:
    """Tell whether the daemon, or one of its cells, connects to other hosts, or they to it."""
    configuration = plan.configuration
    has_index = not configuration.no_index
    return (
        configuration.opentelemetry
        or any(map(_is_for_others, (configuration.metrics, configuration.health)))
        or any(
            each.network.allow or (has_index and (each.packages.allow or each.packages.require))
            for each in plan.policies.values()
        )
    )


def _is_for_others(address: str | None) -> bool:
    """Tell whether an address of pages is neither a path nor one of loopback."""
    if not address or "/" in address:
        return False
    try:
        return not ipaddress.ip_address(address.rpartition(":")[0].strip("[]")).is_loopback
    except ValueError:  # not an address: the daemon will refuse it
        return False


def next_commands(directory: Path) -> str:
    """Return what to do after `write_units`, so that systemd listens, at boot too."""
    if kind_of_user() == "system":
        place, manager, after = "/etc/systemd/system", "systemctl", ""
    else:
        place, manager = "~/.config/systemd/user", "systemctl --user"
        after = "\n  loginctl enable-linger  # at boot too, before you log in"
    is_there = directory.absolute() == Path(place).expanduser()
    copy = (
        "" if is_there else f"  cp {' '.join(str(directory / name) for name in NAMES)} {place}/\n"
    )
    return f"next:\n{copy}  {manager} daemon-reload\n  {manager} enable --now {NAMES[0]}{after}"


def kind_of_user() -> str:
    return "system" if os.geteuid() == 0 else "user"


def _command(arguments: Sequence[str]) -> str:
    """Return the daemon's command line, quoted for systemd (systemd.service(5), "Command lines")."""
    words = ("-I", "-m", "cellwright", "serve", "--delegated", *arguments)
    return " ".join((_quoted(sys.executable), *(_quoted_if_needed(word) for word in words)))


def _quoted_if_needed(word: str) -> str:
    return word if re.fullmatch(r"[\w./:=-]+", word, re.ASCII) else _quoted(word)


def _quoted(word: str) -> str:
    """Return a quoted word in which systemd expands no specifier, variable or escape."""
    for special, plain in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        word = word.replace(special, plain)
    return f'"{word}"'
