"""`ToolSpec`: the definition of a tool, with its schemas, grants, tests and provenance.

Names of tools: one validator for made tools, functions of the host and tools of servers.

A name appears in source code, on command lines, in paths and in a model's context, so it is plain ASCII
without characters that have a meaning in one of these places.
"""

import enum
import hashlib
import re
from typing import Any, NamedTuple

import msgspec

from ...policies.errors import PolicyError, ToolInvalid
from ...policies.permission_sets import (
    FilePermission,
    NetworkPermission,
    PermissionLevel,
    PermissionSet,
    ProcessPermission,
)


class ToolState(enum.Enum):
    """How far a tool can be trusted."""

    DRAFT = "draft"  # made, not tested
    TESTED = "tested"  # its own tests passed in a cell
    TRUSTED = "trusted"  # approved by a person, or written by a developer
    RETIRED = "retired"  # failed too often, or withdrawn; calls are refused


class ToolOwner(enum.Enum):
    """The origin of a tool, which decides where it runs."""

    DEVELOPER = "developer"  # code of the host; runs on the host
    AGENT = "agent"  # made by an agent; runs in cells
    SERVER = "server"  # offered by an MCP server; runs there


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Grants(_Part, frozen=True):
    """An immutable PermissionSet that can be stored."""

    files: tuple[FilePermission, ...] = ()
    network: tuple[NetworkPermission, ...] = ()
    processes: tuple[ProcessPermission, ...] = ()

    @property
    def permissions(self) -> PermissionSet:
        return PermissionSet([*self.files, *self.network, *self.processes])


def grants_of(permissions: PermissionSet | None) -> Grants:
    """Return the grants of a PermissionSet; raises PolicyError for any other type."""
    if permissions is None:
        return Grants()
    if not isinstance(permissions, PermissionSet):
        raise PolicyError(f"permissions: must be a PermissionSet, got {permissions!r}")
    given = permissions.permissions
    return Grants(
        files=tuple(each for each in given if isinstance(each, FilePermission)),
        network=tuple(each for each in given if isinstance(each, NetworkPermission)),
        processes=tuple(each for each in given if isinstance(each, ProcessPermission)),
    )


class ToolTest(_Part, frozen=True):
    """A test of a tool: a call with `input` must return `expected`; or `source`, which runs after the
    tool's own source and asserts."""

    input: dict[str, Any] = {}
    expected: Any = None
    source: str = ""


class Provenance(_Part, frozen=True):
    """The origin of a tool, as its maker states it."""

    maker: str = ""  # its owner: an agent may delete only its own tools
    task: str = ""  # the task that it was made for
    model: str = ""  # the model that wrote it
    parent: str = ""  # the tool that it was derived from
    packages: tuple[str, ...] = ()  # with which its tests ran, such as "idna==3.10"


class ToolSpec(_Part, frozen=True):
    """The definition of a tool.

    `parameters` and `output_schema` are JSON Schema.  `source_hash` is the SHA-256 of the source, and
    `function` the name of the function in it that a call runs.  `calls` lists the only tools that the
    tool may call itself.  `requirements` are the packages that it imports; its calls get those versions
    with which it was tested (`provenance.packages`).  A call of a `risky` tool needs approval.  The
    broker fills in the arguments named in `credentials`.  `idempotent`: two equal calls have the effect
    of one.  `replaces` are the names of tools that were merged with this one.
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
    server: str = ""  # the server that offers it, and the prefix of its name: github.create_issue
    function: str = ""
    grants: Grants = Grants()
    timeout: float = 30.0  # seconds of one call
    calls: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    risky: bool = False
    idempotent: bool = False
    credentials: dict[str, str] = {}  # argument -> name in the vault; callers cannot pass it
    tags: tuple[str, ...] = ()
    tests: tuple[ToolTest, ...] = ()
    provenance: Provenance = Provenance()
    replaces: tuple[str, ...] = ()

    @property
    def permissions(self) -> PermissionSet:
        """The permissions of its cells, as a new set: changing the set does not change the tool."""
        return self.grants.permissions

    @property
    def reference(self) -> str:
        return f"{self.name}@{self.version}"

    @property
    def digest(self) -> str:
        """The SHA-256 of everything that decides a call's effect, such as source, packages and
        permissions.

        Trust and approval are bound to it: another tool of the same name has another digest.
        """
        decides = (
            self.source_hash, self.function, self.parameters, self.grants, self.calls,
            self.requirements, self.provenance.packages, self.credentials,
        )  # fmt: skip
        return hashlib.sha256(msgspec.json.encode(decides, order="deterministic")).hexdigest()

    @property
    def identity(self) -> str:
        """Version and digest, which an approval is bound to beside the name: another version may be
        made before a person decides."""
        return f"{self.version} {self.digest}"

    @property
    def may_be_repeated(self) -> bool:
        """Tell whether a call whose outcome is unknown may be made again: the tool is declared
        idempotent, or it runs in a cell and can change nothing outside it."""
        if self.idempotent:
            return True
        writes = any(each.level is PermissionLevel.WRITE for each in self.grants.files)
        reaches = any(each.allowed_hosts for each in self.grants.network)
        return self.owner is ToolOwner.AGENT and not (self.calls or writes or reaches)


def hash_of(source: str) -> str:
    """Return the SHA-256 of a source, in hexadecimal."""
    return hashlib.sha256(source.encode()).hexdigest()


_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9_-])?")
_SEPARATORS = re.compile(r"[._-]+")
_VERSION = re.compile(r"[1-9][0-9]{0,8}")
_SHOWN = 80


class Reference(NamedTuple):
    """A tool, or one version of it: `name@2`."""

    name: str
    version: int | None = None

    def __str__(self) -> str:
        return self.name if self.version is None else f"{self.name}@{self.version}"


def normalised(name: object) -> str:
    """Return the name of a tool in lower case.

    Raises ToolInvalid unless the name is an ASCII letter or digit, followed by up to 63 letters,
    digits, `_`, `-` and single dots inside.  Nothing else is repaired: a name that only looks like
    another one, or equals it after Unicode folding, is refused.
    """
    if isinstance(name, str) and name.isascii():
        small = name.lower()
        if _NAME.fullmatch(small) and ".." not in small:
            return small
    raise ToolInvalid(
        f"{_shown(name)} is not a valid tool name",
        "begin with a letter or digit; go on with letters, digits, _ - and single dots; 64 at most",
    )


def key_of(name: str) -> str:
    """Return the key that is unique among tools: `send-mail`, `send_mail` and `Send.Mail` share one."""
    return _SEPARATORS.sub("_", normalised(name))


def function_name(name: str) -> str:
    """Return the name of the function for a tool called `name`, with `_` for dots and hyphens."""
    return re.sub(r"[.-]", "_", normalised(name))


def reference(text: object) -> Reference:
    """Parse `name` or `name@version`; raises ToolInvalid if the text is neither."""
    name, at, version = text.partition("@") if isinstance(text, str) else (text, "", "")
    if at and not _VERSION.fullmatch(version):
        raise ToolInvalid(f"{_shown(text)}: the version must be a number from 1, as in `name@2`")
    return Reference(normalised(name), int(version) if at else None)


def _shown(name: object) -> str:
    """Return `name` for a message: escaped, and cut if it is long."""
    return ascii(name)[:_SHOWN] if isinstance(name, str) else f"a {type(name).__name__}"
