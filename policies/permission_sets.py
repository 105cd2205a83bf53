"""Permissions: a short form of policies, which the kernel enforces like any policy.

Data only; `harness/sandbox/faces/permissions.py` expands the globs on the host.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from .errors import PolicyError


class PermissionLevel(enum.Enum):
    """Access to files: WRITE includes READ, and EXECUTE includes READ but not WRITE."""

    NONE = "none"
    READ = "read"
    WRITE = "write"
    EXECUTE = "execute"  # read, and execute as a program


@dataclass(frozen=True, kw_only=True)
class FilePermission:
    """Access to host files, by globs of absolute paths; `denied_paths` win over `allowed_paths`.

    Names that begin with a dot are hidden at any depth, unless `allow_hidden` is set.
    """

    level: PermissionLevel = PermissionLevel.READ
    allowed_paths: Sequence[str] = ()
    denied_paths: Sequence[str] = ()
    allow_hidden: bool = False


@dataclass(frozen=True, kw_only=True)
class NetworkPermission:
    """Access to hosts by name; `denied_hosts` win over `allowed_hosts`.

    `*.example.org` stands for every name below example.org.  `allowed_ports` are by default 443; port
    80 is for HTTP, 443 for TLS, and others for any bytes.  `allow_outbound` alone allows nothing: name
    the hosts.  `allow_inbound` is refused.  `allow_localhost` is the cell's own loopback.
    """

    allow_outbound: bool = False
    allow_inbound: bool = False
    allowed_hosts: Sequence[str] = ()
    denied_hosts: Sequence[str] = ()
    allowed_ports: Sequence[int] = ()
    allow_localhost: bool = False


@dataclass(frozen=True, kw_only=True)
class ProcessPermission:
    """Programs that may be executed, by globs of their names; `denied_commands` win.

    Other programs do not exist in the cell.  Shells are excluded unless `allow_shell` is set.
    `max_processes` counts processes and threads besides the program's own.
    """

    allow_subprocess: bool = False
    allow_shell: bool = False
    allowed_commands: Sequence[str] = ()
    denied_commands: Sequence[str] = ()
    max_processes: int = 62


Permission = FilePermission | NetworkPermission | ProcessPermission


@dataclass
class PermissionSet:
    """Permissions of all kinds; an empty set denies everything."""

    permissions: list[Permission] = field(default_factory=list)

    def add(self, permission: Permission) -> "PermissionSet":
        """Add a permission; raises PolicyError for any other type."""
        if not isinstance(permission, FilePermission | NetworkPermission | ProcessPermission):
            raise PolicyError(
                "permission: must be a FilePermission, NetworkPermission or ProcessPermission, "
                f"got {permission!r}"
            )
        self.permissions.append(permission)
        return self
