"""`cellwright serve`: starts a daemon that shares pools of cells among processes, until a signal."""

import argparse
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ...policies.errors import PolicyError
from ...policies.policy import Policy, check_limit
from ...runner.cgroups.delegation import take_delegation
from ...runner.settings import PoolSettings, SessionSettings
from ..sandbox.remote.address import default_path, listening_at, notify, passed_by_systemd
from ..sandbox.sandbox import Sandbox
from ..servers.daemon.limits import ServeLimits
from ..servers.daemon.server import Server
from ..servers.daemon.service import Service
from ..servers.daemon.units import write_units
from ..servers.descriptors import allow_descriptors
from .options import AUDIT_HELP, SUCCEEDED, add_policy, audit_of, policy_named, words_of
from .packages import add_python, add_sources, store_of

if TYPE_CHECKING:
    from ...runner.audit.log import AuditLog

_NOT_REPEATED = ("units", "socket", "delegated")  # in units: systemd listens
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def add(parser: argparse.ArgumentParser) -> None:
    add_policy(parser, several=True)
    parser.set_defaults(parser=parser)
    parser.add_argument(
        "--socket",
        type=Path,
        metavar="PATH",
        help="the socket to listen on; default /run/cellwright.sock, for an ordinary user that name "
        "in $XDG_RUNTIME_DIR",
    )
    parser.add_argument(
        "--pool", type=int, default=PoolSettings().size, metavar="N",
        help="ready cells of each policy; default %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--sessions", type=int, default=SessionSettings().alive, metavar="N",
        help="open sessions at most, of each policy; default %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--session-idle", type=float, default=SessionSettings().idle_seconds, metavar="S",
        help="seconds after which an idle session is closed; default %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--session-freeze", type=float, default=SessionSettings().freeze_seconds, metavar="S",
        help="seconds without a call after which a session is frozen; default %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--session-lifetime", type=float, default=SessionSettings().lifetime_seconds, metavar="S",
        help="seconds after which any session is closed, and the most by which a client extends its "
        "life; default %(default)s",
    )  # fmt: skip
    add_python(parser, "run Python programs by this Python of the host")
    add_sources(parser)
    parser.add_argument("--audit", metavar="FILE", help=AUDIT_HELP)
    parser.add_argument(
        "--drain", type=float, default=10.0, metavar="S",
        help="seconds that running programs get to complete after SIGTERM; default %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--delegated", action="store_true",
        help="make cgroups below the daemon's own, which systemd delegated (Delegate=yes)",
    )  # fmt: skip
    parser.add_argument("--units", type=Path, metavar="DIR", help="only write systemd units to DIR")


def run(options: argparse.Namespace) -> int:
    serve(options, [policy_named(name, options) for name in options.policy or [None]])
    return SUCCEEDED


def serve(
    options: argparse.Namespace, policies: list[Policy],
    limits: ServeLimits = ServeLimits(),  # noqa: B008 - a constant
) -> None:  # fmt: skip
    """Serve until SIGTERM, SIGINT or SIGHUP.

    Raises PolicyError, and BusyError if a daemon listens on the socket already.
    """
    if options.units:
        print(
            *write_units(
                options.units, words_of(options, _NOT_REPEATED), options.socket, options.drain
            ),
            sep="\n",
        )
        return
    check_limit("--drain", options.drain)
    for number in _signals():  # before the server drains: clean up and exit
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    allow_descriptors()
    with _listener(options) as (listener, place), audit_of(options) as audit:
        services = _services(options, policies, audit, limits)
        server = Server(listener, services, limits, options.drain)
        names = ", ".join(policy.name for policy in policies)
        with _stopping_on_signals(server):
            print(f"cellwright: serving {names} at {place}", file=sys.stderr, flush=True)
            notify(f"READY=1\nSTATUS=serving {names}", os.environ)
            server.run()


@contextlib.contextmanager
def _listener(options: argparse.Namespace) -> Iterator[tuple[socket.socket, str]]:
    """Open the socket that systemd passed, or a new one; yield it and its name."""
    passed = passed_by_systemd(os.environ)
    if passed:
        with passed:
            yield passed, str(passed.getsockname())
        return
    path = options.socket or default_path()
    with listening_at(path) as listener:
        yield listener, str(path)


def _services(
    options: argparse.Namespace, policies: list[Policy], audit: "AuditLog | None",
    limits: ServeLimits,
) -> dict[str, Service]:  # fmt: skip
    """Return a service for each policy; if one fails, close the others."""
    names = tuple(policy.name for policy in policies)
    if len(set(names)) < len(names):
        raise PolicyError(
            f"--policy: names must differ, got {', '.join(names)}",
            "change `name` in the TOML files",
        )
    root = take_delegation() if options.delegated else None
    sessions = SessionSettings(
        options.sessions, options.session_freeze, options.session_idle, options.session_lifetime
    )
    has_sources = options.find_links or options.no_index or options.index_url
    with contextlib.ExitStack() as made:
        services = {}
        for policy in policies:
            sandbox = Sandbox(
                policy=policy, pool=options.pool, sessions=sessions, audit=audit or False,
                cgroup_root=root, python=options.python,
                package_store=store_of(options) if has_sources else None,
            )  # fmt: skip
            made.callback(sandbox.close)
            services[policy.name] = Service(sandbox, names, limits, sessions.lifetime_seconds)
        made.pop_all()
        return services


@contextlib.contextmanager
def _stopping_on_signals(server: Server) -> Iterator[None]:
    """Drain at the first signal, cancel at the second.

    The interpreter's C handler wakes the server by its descriptor: a signal that comes just before the
    server waits would else be handled only after the wait.
    """
    for number in _signals():
        signal.signal(number, lambda *_: server.stop())
    signal.set_wakeup_fd(server.waker, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)


def _signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end the daemon; SIGHUP is not one if nohup(1) made it ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(each for each in _SIGNALS if each is not signal.SIGHUP or not ignored)
