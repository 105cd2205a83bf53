"""The permission model: a friendly front to policies.  What it says, the kernel enforces.

Data only; `harness/sandbox/expansion.py` asks the host what the globs match.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from .errors import PolicyError


class PermissionLevel(enum.Enum):
    """What may be done with files; each but EXECUTE includes those before it."""

    NONE = "none"
    READ = "read"
    WRITE = "write"
    EXECUTE = "execute"  # read, and executed as a program


@dataclass(frozen=True, kw_only=True)
class FilePermission:
    """Host files by globs of absolute paths; denied beats allowed.

    Names that begin with a dot are hidden, at any depth, unless `allow_hidden`.
    """

    level: PermissionLevel = PermissionLevel.READ
    allowed_paths: Sequence[str] = ()
    denied_paths: Sequence[str] = ()
    allow_hidden: bool = False


@dataclass(frozen=True, kw_only=True)
class NetworkPermission:
    """The network.  A cell has none but its own loopback (`allow_localhost`): whatever asks for more
    is refused when the sandbox is made."""

    allow_outbound: bool = False
    allow_inbound: bool = False
    allowed_hosts: Sequence[str] = ()
    denied_hosts: Sequence[str] = ()
    allowed_ports: Sequence[int] = ()
    allow_localhost: bool = False


@dataclass(frozen=True, kw_only=True)
class ProcessPermission:
    """Programs by globs of their names; denied beats allowed, and what is not allowed does not exist
    in the cell.  Shells are none of them unless `allow_shell`.  `max_processes` counts processes and
    threads besides the program's own."""

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
        """Add one; raises PolicyError if it is none."""
        if not isinstance(permission, FilePermission | NetworkPermission | ProcessPermission):
            raise PolicyError(f"{permission!r} is no permission")
        self.permissions.append(permission)
        return self
