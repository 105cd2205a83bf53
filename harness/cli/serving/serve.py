"""`cellwright serve`: starts a daemon that shares pools of cells among processes, until a signal."""

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ....policies.errors import PolicyError
from ....policies.policy import Policy, check_limit
from ....runner.settings import PoolSettings, SessionSettings
from ...servers.daemon.configuration import (
    DaemonConfiguration,
    LimitsTable,
    SessionTable,
    default_pool,
    read_configuration,
    tenant_rules,
)
from ...servers.daemon.lifecycle import check_start, next_commands, plan_of, run_daemon, write_units
from ...servers.daemon.open_cells import PreparedCommand
from ...servers.daemon.quotas import ServeLimits
from ...servers.daemon.tenants import TenantPlan
from ..options import (  # fmt: skip
    AUDIT_HELP,
    SUCCEEDED,
    add_backend,
    add_image,
    add_operations,
    add_policy,
    add_workers,
    backend_of,
    image_of,
    policy_named,
    words_of,
)
from ..package_options import add_python, add_sources

_NOT_REPEATED = ("units", "socket", "delegated")  # left out of units, because systemd listens


def add(parser: argparse.ArgumentParser) -> None:
    add_policy(parser, several=True)
    add_backend(parser)
    add_image(parser)
    parser.set_defaults(parser=parser)
    parser.add_argument(
        "--socket",
        type=Path,
        metavar="PATH",
        help="the socket to listen on; default /run/cellwright.sock, for an ordinary user that name "
        "in $XDG_RUNTIME_DIR",
    )
    parser.add_argument(
        "--pool", type=int, default=default_pool(), metavar="N",
        help=f"ready cells of each policy; default {PoolSettings().size}, or 0 on a host with less "
        "than 1 GiB of memory",
    )  # fmt: skip
    add_workers(parser, "of each policy")
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
        "--config", type=Path, metavar="FILE",
        help="read everything from this TOML file instead, and again at SIGHUP",
    )  # fmt: skip
    parser.add_argument(
        "--check",
        action="store_true",
        help="only check the file of --config, and the extras and addresses that it needs",
    )
    add_operations(parser)
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
    if options.config is None:
        serve(options, [policy_named(name, options) for name in options.policy or [None]])
        return SUCCEEDED
    _refuse_other_options(options)
    read = partial(read_configuration, options.config)
    plan = plan_of(read())
    if options.check:
        check_start(plan.configuration)
        print(f"{options.config}: valid: {', '.join(plan.policies)}")
    elif options.units:
        _write_units(options.units, ["--config", os.path.abspath(options.config)], plan)
    else:
        run_daemon(
            plan, file=options.config, read=read, delegated=options.delegated, prepare=_prepare
        )
    return SUCCEEDED


def serve(
    options: argparse.Namespace, policies: list[Policy],
    limits: ServeLimits = ServeLimits(),  # noqa: B008 - a constant
) -> None:  # fmt: skip
    """Serve as the options say until SIGTERM, SIGINT or SIGHUP.

    Raises PolicyError, and BusyError if a daemon listens on the socket already.
    """
    if options.check:
        raise PolicyError("--check: requires --config")
    check_limit("--drain", options.drain)
    names = [policy.name for policy in policies]
    if len(set(names)) < len(names):
        raise PolicyError(
            f"--policy: names must differ, got {', '.join(names)}",
            "change `name` in the TOML files",
        )
    configuration = _configuration_of(options, limits, names)
    plan = TenantPlan(
        configuration, dict(zip(names, policies, strict=True)), tenant_rules(configuration)
    )
    if options.units:
        _write_units(options.units, words_of(options, _NOT_REPEATED), plan)
    else:
        run_daemon(plan, delegated=options.delegated, prepare=_prepare)


def _prepare(*command: Any) -> PreparedCommand:
    from ..open_cell_command import prepare  # imported at the first command of `exec`

    return prepare(*command)


def _write_units(directory: Path, arguments: Sequence[str], plan: TenantPlan) -> None:
    print(*write_units(directory, arguments, plan), sep="\n", flush=True)  # before the steps
    print(next_commands(directory), file=sys.stderr)


def _configuration_of(
    options: argparse.Namespace, limits: ServeLimits, policies: list[str]
) -> DaemonConfiguration:
    return DaemonConfiguration(
        socket=None if options.socket is None else os.fspath(options.socket),
        optional=tuple(options.optional),
        pool=options.pool,
        workers=options.workers,
        python=options.python,
        **backend_of(options),
        images={name: image for image in image_of(options).values() for name in policies},
        find_links=options.find_links,
        no_index=options.no_index,
        index_url=options.index_url,
        audit=options.audit,
        metrics=options.metrics,
        health=options.health,
        request_log=options.request_log,
        opentelemetry=options.otel,
        drain_seconds=options.drain,
        sessions=SessionTable(
            alive=options.sessions,
            freeze_seconds=options.session_freeze,
            idle_seconds=options.session_idle,
            lifetime_seconds=options.session_lifetime,
        ),
        limits=LimitsTable(**limits._asdict()),
    )


def _refuse_other_options(options: argparse.Namespace) -> None:
    """The file says everything, so that a reload finds everything there."""
    for action in options.parser._actions:
        value: Any = getattr(options, action.dest, None)
        beside = action.dest in ("help", "config", "check", "units", "delegated")
        if not beside and value != action.default:
            raise PolicyError(
                f"{action.option_strings[-1]}: cannot be combined with --config",
                "write it into the file",
            )
