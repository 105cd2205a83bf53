"""The daemon's configuration file: TOML. Every field is checked before any takes effect.

The file must be a regular file that only the daemon's user or root may write, because it names what
clients may do.
"""

import grp
import os
import pwd
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ....policies.errors import PolicyError
from ....policies.policy import Policy, named_layers
from ....policies.profiles.loading import (
    invalid_field,
    load_policy,
    parsed_toml,
    place_of,
    profile_names,
    read_regular_file,
    with_units,
)
from ....runner.settings import PauseSettings, PoolSettings, SessionSettings
from .quotas import QuotaSettings, ServeLimits

OWNER, OTHERS = "owner", "other"  # names of tenants that the file does not list
_MOST_TENANTS = 64
_SMALL_HOST = 1 << 30  # bytes of memory; the kernel keeps some of what a host has
_DOCUMENT = "harness/servers/daemon/README.md lists every field"
_Name = Annotated[str, Meta(pattern="^[A-Za-z0-9_.-]{1,64}$")]
_Positive = Annotated[float, Meta(gt=0, le=31_536_000)]
_Count = Annotated[int, Meta(ge=1, le=100_000)]
_Whole = Annotated[int, Meta(ge=1, le=1 << 40)]
_Strings = tuple[Annotated[str, Meta(min_length=1, max_length=4096)], ...]
_DEFAULT_SESSIONS = SessionSettings()
_DEFAULT_PAUSES = PauseSettings()


def default_pool() -> int:
    """Return how many ready cells of each policy a daemon keeps: none on a host with little memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return PoolSettings().size if memory >= _SMALL_HOST else 0


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class SessionTable(_Table, frozen=True, kw_only=True):
    """`[sessions]`: for each tenant and policy."""

    alive: _Count = _DEFAULT_SESSIONS.alive
    freeze_seconds: _Positive = _DEFAULT_SESSIONS.freeze_seconds
    idle_seconds: _Positive = _DEFAULT_SESSIONS.idle_seconds
    lifetime_seconds: _Positive = _DEFAULT_SESSIONS.lifetime_seconds
    pause_seconds: _Positive | None = None
    memory_bytes: _Whole | None = None

    @property
    def settings(self) -> SessionSettings:
        return SessionSettings(
            self.alive, self.freeze_seconds, self.idle_seconds, self.lifetime_seconds,
            pause_seconds=self.pause_seconds, memory_bytes=self.memory_bytes, evict=True,
        )  # fmt: skip


class PauseTable(_Table, frozen=True, kw_only=True):
    """`[pauses]`: the paused sessions of each tenant, in a directory of its own below `directory`;
    without one no session is paused."""

    directory: str | None = None
    keep_seconds: _Positive = _DEFAULT_PAUSES.keep_seconds
    most_bytes: _Whole = 256 * 1024 * 1024  # bytes of one session
    quota_bytes: _Whole = 1024 * 1024 * 1024  # bytes of a tenant, unless its quota has paused_bytes
    pausable: bool = False  # sessions can be resumed after a restart of the daemon

    def of_tenant(self, tenant: str, paused_bytes: int | None) -> PauseSettings | None:
        """Return the settings of a tenant's sandboxes; None if its sessions cannot be paused."""
        if self.directory is None:
            return None
        return PauseSettings(
            Path(self.directory) / f"tenant-{tenant}", None, self.keep_seconds, self.most_bytes,
            paused_bytes or self.quota_bytes,
        )  # fmt: skip


class QuotaTable(_Table, frozen=True, kw_only=True):
    """`[quota]`: limits of a tenant, concurrent or per minute; a missing field means no limit."""

    calls: _Count | None = None
    queue: Annotated[int, Meta(ge=0, le=100_000)] = 64
    queue_seconds: _Positive = 30.0
    sessions: _Count | None = None
    cpu_seconds_per_minute: _Positive | None = None
    paused_bytes: _Whole | None = None

    @property
    def settings(self) -> QuotaSettings:
        return QuotaSettings(
            self.calls, self.queue, self.queue_seconds, self.sessions, self.cpu_seconds_per_minute,
            self.paused_bytes,
        )  # fmt: skip


class TenantTable(QuotaTable, frozen=True, kw_only=True):
    """`[[tenants]]`: processes of these users, or with one of these groups, share quotas and cells."""

    name: _Name
    users: tuple[str | int, ...] = ()
    groups: tuple[str | int, ...] = ()
    policies: _Strings = ()  # names of policies; empty for all


LimitsTable = msgspec.defstruct(
    "LimitsTable",
    [
        (name, _Positive if isinstance(default, float) else _Whole, default)
        for name, default in ServeLimits._field_defaults.items()
    ],
    frozen=True, forbid_unknown_fields=True,
)  # fmt: skip


class DaemonConfiguration(_Table, frozen=True, kw_only=True):
    """The configuration of `cellwright serve`; the options of the command set parts of it."""

    policies: Annotated[_Strings, Meta(min_length=1, max_length=64)] = ("strict",)
    optional: _Strings = ()
    socket: str | None = None
    socket_group: str | int | None = None
    pool: Annotated[int, Meta(ge=0, le=10_000)] = default_pool()
    workers: Annotated[int, Meta(ge=1, le=256)] | Literal["auto"] = 1
    python: str | None = None
    backend: Literal["cells", "oci"] = "cells"
    runtime: Annotated[str, Meta(min_length=1)] | None = None  # with backend = "oci", as rootfs
    rootfs: str | None = None
    images: dict[str, Annotated[str, Meta(min_length=1)]] = {}  # by the name of a policy
    find_links: str | None = None
    no_index: bool = False
    index_url: str | None = None
    audit: str | None = None
    metrics: str | None = None
    health: str | None = None
    request_log: str | None = None
    opentelemetry: bool = False
    drain_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 10.0
    sessions: SessionTable = SessionTable()
    pauses: PauseTable = PauseTable()
    quota: QuotaTable = QuotaTable()
    limits: LimitsTable = LimitsTable()  # type: ignore[valid-type]
    tenants: Annotated[tuple[TenantTable, ...], Meta(max_length=_MOST_TENANTS)] = ()

    @property
    def serve_limits(self) -> ServeLimits:
        return ServeLimits(**msgspec.structs.asdict(self.limits))


_TABLES = (SessionTable, PauseTable, QuotaTable, TenantTable, LimitsTable)
NEED_RESTART = (
    "socket", "socket_group", "audit", "metrics", "health", "request_log", "opentelemetry", "limits",
)  # fmt: skip


def read_configuration(path: Path) -> DaemonConfiguration:
    """Return the configuration in a file, with absolute paths; raises PolicyError with file, line and
    field of the first error."""
    text = read_regular_file(path, owned=True)
    data = parsed_toml(text, path)
    try:
        read = msgspec.convert(with_units(data), DaemonConfiguration)
        checked = _with_absolute_paths(read, path.absolute().parent)
        tenant_rules(checked)
        _check_pauses(checked)
        _check_backend(checked)
        policies_of(checked)
    except msgspec.ValidationError as error:
        what, hint = invalid_field(str(error), DaemonConfiguration, _TABLES, _DOCUMENT)
        raise PolicyError(f"{place_of(path, text, str(error))}: {what}", hint) from None
    except PolicyError as error:
        place = place_of(path, text, error.what)
        raise PolicyError(f"{place}: {error.what}", error.hint) from None
    return checked


def policies_of(configuration: DaemonConfiguration) -> dict[str, Policy]:
    """Return the policies by name; the first is the default of clients.  Raises PolicyError."""
    chosen = named_layers("optional", configuration.optional)
    found: dict[str, Policy] = {}
    for name in configuration.policies:
        if name not in profile_names():
            read_regular_file(Path(name))  # load_policy would wait for the writer of a FIFO
        policy = load_policy(name)
        layers = (*policy.optional_layers, *chosen)
        policy = msgspec.structs.replace(policy, optional_layers=layers)
        if policy.name in found:
            raise PolicyError(
                f"policies: names must differ, got {policy.name} twice",
                "change `name` in the TOML files",
            )
        found[policy.name] = policy
    for name in configuration.images:
        if name not in found:
            raise PolicyError(f"images: {name!r} is not of {', '.join(found)}")
    for tenant in configuration.tenants:
        if unknown := [each for each in tenant.policies if each not in found]:
            known = ", ".join(found)
            raise PolicyError(
                f"tenants.policies: {unknown[0]!r} of {tenant.name} is not of {known}"
            )
    return found


class TenantRules(msgspec.Struct, frozen=True):
    """The ids of users and groups that may connect."""

    socket_group: int | None
    by_user: dict[int, str]
    by_group: dict[int, str]


def tenant_rules(configuration: DaemonConfiguration) -> TenantRules:
    """Return who belongs to which tenant; raises PolicyError for an unknown user or group, or one that
    two tenants have."""
    by_user: dict[int, str] = {}
    by_group: dict[int, str] = {}
    names: set[str] = set()
    for tenant in configuration.tenants:
        if tenant.name in names or tenant.name in (OWNER, OTHERS):
            raise PolicyError(f"tenants.name: {tenant.name!r} is used twice, or has a meaning")
        names.add(tenant.name)
        if not (tenant.users or tenant.groups):
            raise PolicyError(f"tenants.users: {tenant.name} has neither users nor groups")
        for user in tenant.users:
            _add(by_user, _uid(user), tenant.name, "users", user)
        for group in tenant.groups:
            _add(by_group, _gid(group), tenant.name, "groups", group)
    given = configuration.socket_group
    if configuration.tenants and given is None:
        raise PolicyError(
            "tenants: others cannot connect without socket_group",
            "name the group whose members may connect",
        )
    return TenantRules(None if given is None else _gid(given), by_user, by_group)


def _check_pauses(configuration: DaemonConfiguration) -> None:
    if configuration.sessions.settings.pauses and configuration.pauses.directory is None:
        raise PolicyError(
            "sessions: idle sessions are paused only with pauses.directory",
            "name a directory for their states below [pauses]",
        )


def _check_backend(configuration: DaemonConfiguration) -> None:
    for name in ("runtime", "rootfs"):
        if configuration.backend != "oci" and getattr(configuration, name) is not None:
            raise PolicyError(f'{name}: needs backend = "oci"')
    if configuration.backend == "oci" and configuration.images:
        raise PolicyError('images: cannot be combined with backend = "oci"')


def _add(known: dict[int, str], number: int, tenant: str, field: str, given: str | int) -> None:
    if known.setdefault(number, tenant) != tenant:
        raise PolicyError(f"tenants.{field}: {given} belongs to {known[number]} and to {tenant}")


def _uid(user: str | int) -> int:
    try:
        return user if isinstance(user, int) else pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError):
        raise PolicyError(f"tenants.users: this host has no user {user!r}") from None


def _gid(group: str | int) -> int:
    try:
        return group if isinstance(group, int) else grp.getgrnam(group).gr_gid
    except (KeyError, ValueError):
        raise PolicyError(f"groups: this host has no group {group!r}") from None


def _with_absolute_paths(read: DaemonConfiguration, beside: Path) -> DaemonConfiguration:
    """Return the configuration with paths that count from the directory of the file."""

    def place(path: str | None) -> str | None:
        return path if path is None else str(beside / path)

    known = profile_names()
    changed: dict[str, Any] = {
        "policies": tuple(each if each in known else str(beside / each) for each in read.policies),
        "socket": place(read.socket),
        "audit": place(read.audit),
        "find_links": place(read.find_links),
        "rootfs": place(read.rootfs),
        "images": {
            policy: place(image) if image[0] in "./" else image
            for policy, image in read.images.items()
        },
        "pauses": msgspec.structs.replace(read.pauses, directory=place(read.pauses.directory)),
        "request_log": read.request_log if read.request_log == "-" else place(read.request_log),
    }
    for name in ("metrics", "health", "runtime"):
        if "/" in (getattr(read, name) or ""):
            changed[name] = place(getattr(read, name))
    return msgspec.structs.replace(read, **changed)
