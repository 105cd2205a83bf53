"""`SandboxConfig`, the short form of a policy."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from ....policies.argument_checks import check_names
from ....policies.errors import PolicyError
from ....policies.policy import (
    MIB,
    Limits,
    Network,
    Packages,
    Policy,
    Processes,
    check_limit,
    check_policy,
)
from ....runner.settings import AuditLevel
from ..checks import check_flag, suggests_fields
from .permissions import denied_patterns, expand, from_wildcards, with_files


@dataclass(frozen=True, kw_only=True)
class ConfigFields:
    """The fields of a configuration but its timeout, which has two names."""

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
    packages: Sequence[str] = ()


@suggests_fields
@dataclass(frozen=True, kw_only=True)
class SandboxConfig(ConfigFields):
    """Limits and permissions of a sandbox; everything is denied by default.

    `allowed_paths` and `denied_paths` are globs of host paths.  Allowed ones are shown in the cell at
    the same place, read-only or, with `allow_file_write`, writable; denied ones do not exist there,
    whatever shows them.  Without `allow_file_read` and `allow_file_write` no allowed path is shown;
    a UserWarning says so when the configuration is made.
    `packages` are requirements such as "pandas==2.3.*" that Python programs can import.
    `optional_layers` names layers that the sandbox may do without where the host lacks them.
    """

    timeout_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.allowed_paths and not self._shows_paths():
            warnings.warn(
                "allowed_paths: no path is shown, because neither allow_file_read=True nor "
                "allow_file_write=True is given",
                stacklevel=4,  # the line that makes the configuration
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
            packages=Packages(
                require=check_names(
                    "packages", [self.packages] if isinstance(self.packages, str) else self.packages
                )
            ),
            optional_layers=tuple(self.optional_layers),
        )
        shown = expand("allowed_paths", self.allowed_paths) if self._shows_paths() else ()
        return check_policy(
            with_files(
                policy,
                read=() if self.allow_file_write else shown,
                write=shown if self.allow_file_write else (),
                hidden=denied_patterns("denied_paths", self.denied_paths),
                optional=from_wildcards(self.allowed_paths, shown),
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
                "allow_network: must be False: programs reach hosts by name alone",
                "name them in network.allow of a policy, or in NetworkPermission(allowed_hosts=[...])",
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
