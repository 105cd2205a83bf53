"""Messages of E2B's control interface that the server reads; members that it does not know are ignored,
as by E2B, and those that a cell cannot follow are refused."""

from typing import Annotated, Any

import msgspec

MOST_SECONDS = 24 * 60 * 60
DEFAULT_SECONDS = 300
_Seconds = Annotated[int, msgspec.Meta(ge=0, le=MOST_SECONDS)]
_Text = Annotated[str, msgspec.Meta(max_length=4096)]
_Texts = Annotated[dict[_Text, _Text], msgspec.Meta(max_length=256)]
_Hosts = Annotated[tuple[_Text, ...], msgspec.Meta(max_length=256)]


class E2bNetwork(msgspec.Struct, frozen=True, rename="camel"):
    """Which hosts programs may reach, within what the policy of the server allows."""

    allow_out: _Hosts = ()
    deny_out: _Hosts = ()
    rules: Any = None
    dns_servers: Any = None
    egress_proxy: Any = None
    mask_request_host: Any = None
    allow_internet: bool | None = msgspec.field(default=None, name="allow_internet_access")

    def unsupported(self) -> str:
        """Return the name of a member that is set and that a cell cannot follow; else empty."""
        named = {
            "rules": self.rules, "dnsServers": self.dns_servers,
            "egressProxy": self.egress_proxy, "maskRequestHost": self.mask_request_host,
        }  # fmt: skip
        return next((f"network.{name}" for name, value in named.items() if value), "")


class AutoResume(msgspec.Struct, frozen=True):
    """Whether a request to a paused sandbox resumes it."""

    enabled: bool = False


class NewSandbox(msgspec.Struct, frozen=True, rename="camel"):
    """The request to make a sandbox."""

    template: _Text = msgspec.field(default="base", name="templateID")
    timeout: _Seconds = DEFAULT_SECONDS
    metadata: _Texts = {}
    env_vars: _Texts = {}
    auto_pause: bool = False
    auto_resume: AutoResume | None = None
    allow_internet: bool | None = msgspec.field(default=None, name="allow_internet_access")
    network: E2bNetwork | None = None
    mcp: Any = None
    iam: Any = None
    volume_mounts: Any = None

    def unsupported(self) -> str:
        """Return the name of a member that is set and that a cell cannot follow; else empty."""
        named = {"mcp": self.mcp, "iam": self.iam, "volumeMounts": self.volume_mounts}
        found = next((name for name, value in named.items() if value), "")
        return found or (self.network.unsupported() if self.network else "")


class Lifetime(msgspec.Struct, frozen=True):
    """The request to let a sandbox live for so many seconds from now."""

    timeout: _Seconds | None = None
    duration: _Seconds | None = None  # of refreshes


class NewSnapshot(msgspec.Struct, frozen=True):
    """The request to keep the files of a sandbox."""

    name: _Text | None = None


class NewForks(msgspec.Struct, frozen=True):
    """The request to make sandboxes with the files of another one."""

    timeout: _Seconds = DEFAULT_SECONDS
    count: Annotated[int, msgspec.Meta(ge=1, le=100)] = 1


class ExecuteCode(msgspec.Struct, frozen=True):
    """The request to run code in a context."""

    code: Annotated[str, msgspec.Meta(max_length=16 * 1024 * 1024)]
    context_id: _Text | None = None
    language: _Text | None = None
    env_vars: _Texts | None = None


class NewContext(msgspec.Struct, frozen=True):
    """The request to make a context."""

    language: _Text | None = None
    cwd: _Text | None = None
