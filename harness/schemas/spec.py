"""`ToolSpec`: all that is known of a tool."""

import enum
import hashlib
from typing import Any

import msgspec

from ...policies.errors import PolicyError
from ...policies.permissions import (
    FilePermission,
    NetworkPermission,
    PermissionLevel,
    PermissionSet,
    ProcessPermission,
)


class ToolState(enum.Enum):
    """How far a tool can be relied on."""

    DRAFT = "draft"  # made, and nobody has tested it
    TESTED = "tested"  # its own tests passed in a cell
    TRUSTED = "trusted"  # a person said so, or a developer wrote it
    RETIRED = "retired"  # it failed too often, or was taken back; not called any more


class ToolOwner(enum.Enum):
    """Who answers for a tool."""

    DEVELOPER = "developer"  # it is code of the host, and runs there
    AGENT = "agent"  # it was made, and runs in cells
    SERVER = "server"  # an MCP server's, and it runs there


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Grants(_Part, frozen=True):
    """A PermissionSet that can be stored and not be changed."""

    files: tuple[FilePermission, ...] = ()
    network: tuple[NetworkPermission, ...] = ()
    processes: tuple[ProcessPermission, ...] = ()

    @property
    def permissions(self) -> PermissionSet:
        return PermissionSet([*self.files, *self.network, *self.processes])


def grants_of(permissions: PermissionSet | None) -> Grants:
    """Return what a PermissionSet grants; raises PolicyError if it is none."""
    if permissions is None:
        return Grants()
    if not isinstance(permissions, PermissionSet):
        raise PolicyError(f"permissions: must be a PermissionSet, not {permissions!r}")
    given = permissions.permissions
    return Grants(
        files=tuple(each for each in given if isinstance(each, FilePermission)),
        network=tuple(each for each in given if isinstance(each, NetworkPermission)),
        processes=tuple(each for each in given if isinstance(each, ProcessPermission)),
    )


class ToolTest(_Part, frozen=True):
    """One test of a tool: what comes of `input` is `expected`; or `source`, which runs after the
    tool's and asserts."""

    input: dict[str, Any] = {}
    expected: Any = None
    source: str = ""


class Provenance(_Part, frozen=True):
    """Where a tool comes from, in its maker's words."""

    maker: str = ""  # whose it is: an agent may delete only its own
    task: str = ""
    model: str = ""
    parent: str = ""  # the tool that it was made of


class ToolSpec(_Part, frozen=True):
    """All that is known of a tool.

    `parameters` and `output_schema` are JSON Schema.  `source_hash` is that of the source; `function`
    the one in it that is called.  `calls` are the only tools that it may call itself; `risky` asks for
    approval.  `credentials` are arguments that the broker puts in.  `idempotent`: to call it twice does
    no more than to call it once.
    """

    name: str
    description: str = ""
    source_code: str = ""
    parameters: dict[str, Any] = {}
    output_schema: dict[str, Any] | None = None
    created_at: str = ""  # ISO 8601, UTC
    version: int = 1
    source_hash: str = ""
    state: ToolState = ToolState.DRAFT
    owner: ToolOwner = ToolOwner.AGENT
    server: str = ""  # whose it is, and what its name begins with: "github" of github.create_issue
    function: str = ""
    grants: Grants = Grants()
    timeout: float = 30.0
    calls: tuple[str, ...] = ()
    risky: bool = False
    idempotent: bool = False
    credentials: dict[str, str] = {}  # argument -> name in the vault; nobody else gives it
    tags: tuple[str, ...] = ()
    tests: tuple[ToolTest, ...] = ()
    provenance: Provenance = Provenance()

    @property
    def permissions(self) -> PermissionSet:
        """What its cells may do beyond nothing; a fresh set, so that changing it changes nothing."""
        return self.grants.permissions

    @property
    def reference(self) -> str:
        return f"{self.name}@{self.version}"

    @property
    def identity(self) -> str:
        """What a word of approval is bound to, beside the name: another version may be made before
        there is one."""
        return f"{self.version} {self.source_hash}"

    @property
    def may_be_repeated(self) -> bool:
        """Tell whether a call may be made again of which nobody knows what came: it is said to be
        idempotent, or it was made and can change nothing outside of its cell."""
        if self.idempotent:
            return True
        writes = any(each.level is PermissionLevel.WRITE for each in self.grants.files)
        return self.owner is ToolOwner.AGENT and not self.calls and not writes


def hash_of(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()
