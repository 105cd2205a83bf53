"""`cellwright status`: shows the current state of a daemon."""

import argparse
import os
from pathlib import Path
from typing import Any

import msgspec

from ...sandbox.remote.address import default_path
from ...sandbox.remote.connections import Requests, daemon_connections
from ...sandbox.remote.frames import DaemonStatus, GetStatus, ServedPolicyStatus, TenantStatus
from ...text.terminal_text import harmless, print_header
from ..options import SUCCEEDED, add_json, print_json

_MIB = 1024 * 1024


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--socket",
        "--connect",
        type=Path,
        metavar="PATH",
        help="the daemon's socket; default that of your user",
    )
    add_json(parser, "object")


def run(options: argparse.Namespace) -> int:
    """Ask, and print the answer; raises LaunchError if no daemon answers."""
    pool = daemon_connections(os.fspath(options.socket or default_path()), "")
    try:
        status = Requests(pool).ask(GetStatus(), DaemonStatus)
    finally:
        pool.close()
    if options.json:
        known: dict[str, Any] = {
            name: msgspec.to_builtins(getattr(status, name)) for name in status.__struct_fields__
        }
        print_json(known)
        return SUCCEEDED
    _print(status)
    return SUCCEEDED


def _print(status: DaemonStatus) -> None:
    version = status.version or "(not installed)"
    print(f"cellwright {version}, process {status.pid}, up {_duration(status.uptime_seconds)}")
    if status.configuration:
        print(f"configuration {harmless(status.configuration)}, reloaded {status.reloads} times")
    if status.reload_error:
        print(f"last reload had no effect: {harmless(status.reload_error)}")
    if status.retired:
        print(f"policies of earlier configurations in use: {status.retired}")
    print_header(
        f"{'POLICY':<20} {'READY':>9} {'RUNNING':>8} {'WAITING':>8} {'SESSIONS':>9} {'FROZEN':>7} "
        f"{'MIB':>8} {'CPU':>10}"
    )
    for policy in status.policies:
        print(_policy_line(policy))
    print_header(
        f"{'TENANT':<20} {'CLIENTS':>9} {'CALLS':>8} {'WAITING':>8} {'SESSIONS':>9} {'CPU LEFT':>15}"
    )
    for tenant in status.tenants:
        print(_tenant_line(tenant))
    for name, limit, count in status.refused:
        print(f"refused to {harmless(name)}: {count} by the limit of {limit}")


def _policy_line(policy: ServedPolicyStatus) -> str:
    memory = "-" if policy.memory_bytes is None else f"{policy.memory_bytes / _MIB:.1f}"
    cpu = "-" if policy.cpu_seconds is None else f"{policy.cpu_seconds:,.1f} s"
    ready = f"{policy.ready}/{policy.wanted}"
    return (
        f"{harmless(policy.name):<20} {ready:>9} {policy.running:>8} {policy.waiting:>8} "
        f"{policy.sessions:>9} {policy.frozen:>7} {memory:>8} {cpu:>10}"
    )


def _tenant_line(tenant: TenantStatus) -> str:
    calls = _of(tenant.calls, tenant.most_calls)
    sessions = _of(tenant.sessions, tenant.most_sessions)
    left = "-"
    if tenant.cpu_seconds_left is not None:
        left = f"{tenant.cpu_seconds_left:.1f}/{tenant.cpu_seconds_per_minute:g} s"
    return (
        f"{harmless(tenant.name):<20} {tenant.connections:>9} {calls:>8} {tenant.waiting:>8} "
        f"{sessions:>9} {left:>15}"
    )


def _of(used: int, most: int | None) -> str:
    return str(used) if most is None else f"{used}/{most}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (
        f"{days}d {hours:02}:{minutes:02}:{rest:02}"
        if days
        else f"{hours:02}:{minutes:02}:{rest:02}"
    )
