"""`SandboxConfig`, the short form of a policy, and checks of other arguments of `Sandbox`."""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import msgspec

from ...policies.errors import PolicyError
from ...policies.languages import interpreted_languages
from ...policies.policy import (  # fmt: skip
    MIB,
    Limits,
    Network,
    Policy,
    Processes,
    check_limit,
    check_policy,
)
from ...runner.audit.level import AuditLevel
from ...runner.pool import PoolSettings
from ...runner.session import SessionSettings
from .expansion import denied_patterns, expand, with_files


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """Limits and permissions of a sandbox; everything is denied by default.

    `allowed_paths` and `denied_paths` are globs of host paths.  Allowed ones are shown in the cell at
    the same place, read-only or, with `allow_file_write`, writable; denied ones do not exist there,
    whatever shows them.  Without `allow_file_read` and `allow_file_write` no allowed path is shown;
    a UserWarning says so when the configuration is made.
    `optional_layers` names layers that the sandbox may do without where the host lacks them.
    """

    timeout_seconds: float = 30.0
    max_memory_mb: float = 256
    max_output_bytes: int = 100_000
    max_processes: int = 64
    max_cpus: float = 1.0
    workspace_mb: float = 64
    allow_file_read: bool = False
    allow_file_write: bool = False
    allow_network: bool = False
    allow_subprocess: bool = False
    allowed_paths: Sequence[str] = ()
    denied_paths: Sequence[str] = ()
    optional_layers: Sequence[str] = ()
    enable_audit: bool = True
    audit_level: AuditLevel = AuditLevel.INFO
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.allowed_paths and not self._shows_paths():
            warnings.warn(
                "allowed_paths: no path is shown, because neither allow_file_read=True nor "
                "allow_file_write=True is given",
                stacklevel=3,  # the line that makes the configuration
            )

    def policy(self) -> Policy:
        """Return the equivalent policy; raises PolicyError naming an invalid field."""
        self._check()
        policy = Policy(
            name="config",
            processes=self._processes(),
            network=Network(),
            limits=self._limits(),
            environment=dict(self.environment),
            optional_layers=tuple(self.optional_layers),
        )
        shown = expand("allowed_paths", self.allowed_paths) if self._shows_paths() else ()
        return check_policy(
            with_files(
                policy,
                read=() if self.allow_file_write else shown,
                write=shown if self.allow_file_write else (),
                hidden=denied_patterns("denied_paths", self.denied_paths),
            )
        )

    def _check(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type is bool:
                check_flag(each.name, value)
            if each.type in (int, float):
                check_limit(each.name, value, whole=each.type is int)
        if not isinstance(self.environment, Mapping):
            raise PolicyError(f"environment: must be a mapping, got {self.environment!r}")
        if self.allow_network:
            raise PolicyError(
                "allow_network: there is no way out of a cell",
                "do the request on the host and pass its result in with inputs= or files=",
            )

    def _shows_paths(self) -> bool:
        return self.allow_file_read or self.allow_file_write

    def _limits(self) -> Limits:
        return Limits(
            wall_seconds=self.timeout_seconds,
            cpu_seconds=self.timeout_seconds * max(1.0, self.max_cpus),
            cpus=self.max_cpus,
            memory_bytes=int(self.max_memory_mb * MIB),
            processes=int(self.max_processes),
            output_bytes=int(self.max_output_bytes),
            workspace_bytes=int(self.workspace_mb * MIB),
        )

    def _processes(self) -> Processes:
        if not self.allow_subprocess:
            return Processes()
        return Processes(subprocesses=True, execute=("/usr/bin", "/usr/sbin", "/usr/lib"))


def check_flag(name: str, value: object) -> bool:
    """Return `value`; raises PolicyError unless it is True or False."""
    if not isinstance(value, bool):
        raise PolicyError(f"{name}: must be True or False, got {value!r}")
    return value


def check_host_path(name: str, path: object) -> str:
    """Return a path of the host as text; raises PolicyError for anything else."""
    if not isinstance(path, str | os.PathLike):
        raise PolicyError(f"{name}: must be a path, got {path!r}")
    return os.fspath(path)


def with_timeout(limits: Limits, seconds: float | None, name: str = "timeout") -> Limits:
    """Return `limits` with a wall time of `seconds`; `name` is the caller's name for it.

    Raises PolicyError if that is more than the limits allow: a call can only lower a limit.
    """
    if seconds is None:
        return limits
    check_limit(name, seconds, limit="wall_seconds")
    _check_lower(name, seconds, "wall_seconds", limits.wall_seconds, "s")
    return msgspec.structs.replace(limits, wall_seconds=float(seconds))


def with_memory(limits: Limits, mebibytes: float | None, name: str = "memory") -> Limits:
    """Return `limits` with a memory cap of `mebibytes`; raises PolicyError if they allow less."""
    if mebibytes is None:
        return limits
    check_limit(name, mebibytes, limit="memory_bytes", unit=MIB)
    _check_lower(name, mebibytes, "memory_bytes", limits.memory_bytes / MIB, "MiB")
    return msgspec.structs.replace(limits, memory_bytes=int(mebibytes * MIB))


def _check_lower(name: str, asked: float, field: str, most: float, unit: str) -> None:
    if asked > most:
        raise PolicyError(
            f"{name}: {asked:g} {unit} is more than limits.{field} of the policy, {most:g} {unit}",
            f"a call can only lower a limit; {field} below [limits] in a policy file raises it",
        )


def check_sessions(settings: SessionSettings) -> SessionSettings:
    """Return `settings`; raises PolicyError naming an invalid one."""
    if not isinstance(settings, SessionSettings):
        raise PolicyError(f"sessions: must be SessionSettings, got {settings!r}")
    for name, value in settings._asdict().items():
        check_limit(f"sessions.{name}", value, whole=not name.endswith("seconds"))
    if settings.alive < 1 or settings.requests < 1:
        raise PolicyError("sessions.alive and sessions.requests must be at least 1")
    return settings


def check_interpreters(paths: Mapping[str, str | os.PathLike[str]]) -> dict[str, str]:
    """Return `paths`, language to interpreter, if each can be executed; raises PolicyError."""
    if not isinstance(paths, Mapping):
        raise PolicyError(f"interpreters: must be a mapping, got {type(paths).__name__}")
    known = interpreted_languages()
    checked = {}
    for language, path in paths.items():
        if language not in known:
            raise PolicyError(f"interpreters: {language!r} must be one of {', '.join(known)}")
        if not (isinstance(path, str | os.PathLike) and os.path.isabs(path)):
            raise PolicyError(f"interpreters.{language}: {path!r} is not an absolute path")
        if not (os.path.isfile(path) and os.access(path, os.X_OK)):
            raise PolicyError(f"interpreters.{language}: {path} cannot be executed")
        checked[language] = os.fspath(path)
    return checked


def check_pool(pool: int | PoolSettings, *, fresh_exec: bool) -> PoolSettings:
    """Return the settings of the pool, with a launcher for every cell if `fresh_exec`.

    `pool` may be their `size` alone.  Raises PolicyError naming an invalid one.
    """
    if not isinstance(pool, int | PoolSettings):
        raise PolicyError(f"pool: must be a whole number or PoolSettings, got {pool!r}")
    settings = pool if isinstance(pool, PoolSettings) else PoolSettings(size=pool)
    if check_flag("fresh_exec", fresh_exec):
        settings = settings._replace(cells_per_launcher=1)
    for name, value in settings._asdict().items():
        check_limit(f"pool.{name}", value, whole=not name.endswith("seconds"))
    for name in ("running", "programs", "cells_per_launcher"):
        if getattr(settings, name) < 1:
            raise PolicyError(f"pool.{name} must be at least 1")
    return settings
