"""Messages of E2B's control interface that the server reads, and the network rules that they ask for.

Members that the server does not know are ignored, as by E2B, and those that a cell cannot follow are
refused.  A sandbox gets the network rules of the server's policy, or fewer.
"""

import ipaddress
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from ....policies.errors import PolicyError
from ....policies.network.rule import NetworkDenial, NetworkRule
from ....policies.policy import Network, Policy
from ...sandbox.sandbox import Sandbox

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
    duration: _Seconds | None = None  # seconds of a refresh


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


_ALL = ("0.0.0.0/0", "::/0", "*")


def narrowed(policy: Policy, network: E2bNetwork | None, allow_internet: bool | None) -> Policy:
    """Return the policy with no more hosts than a client asks for.

    Raises PolicyError for a host that the policy does not allow.
    """
    asked = network or E2bNetwork()
    if allow_internet is not None:
        asked = msgspec.structs.replace(asked, allow_internet=allow_internet)
    allowed, denied = _rules(policy.network.allow, asked), _denied(asked)
    denials = [NetworkDenial(host=host) for host in denied if policy.network.allow]
    network_rules = msgspec.structs.replace(
        policy.network,
        allow=tuple(allowed),
        deny=(*policy.network.deny, *denials) if allowed else (),
    )
    return msgspec.structs.replace(policy, network=network_rules)


def change(sandbox: Sandbox, network: Network, asked: E2bNetwork) -> None:
    """Let a running sandbox reach exactly the hosts that a client asks for.

    `network` is that of its policy.  Raises PolicyError for hosts that it does not allow.
    """
    wanted = {rule.host for rule in _rules(network.allow, asked)}
    known = {rule.host for rule in network.allow}
    if not wanted <= known:
        raise PolicyError(
            f"network: {', '.join(sorted(wanted - known))} has no rule of its own in the policy",
            "make another sandbox with these hosts",
        )
    if not network.allow:
        return  # the sandbox has no network, as the remaining request asks
    again = [rule for rule in network.allow if rule.host in wanted and _is_denied(sandbox, rule)]
    if capped := [rule.host for rule in again if _is_capped(rule)]:
        raise PolicyError(
            f"network: {', '.join(capped)} cannot be allowed again, because its caps would count anew",
            "make another sandbox",
        )
    for rule in again:
        sandbox.network.allow(rule)
    for rule in network.allow:
        if rule.host not in wanted:
            sandbox.network.deny(NetworkDenial(host=rule.host, ports=rule.each_port()))
    for host in _denied(asked):
        sandbox.network.deny(host)


def _is_denied(sandbox: Sandbox, rule: NetworkRule) -> bool:
    denials = (NetworkDenial(host=rule.host), NetworkDenial(host=rule.host, ports=rule.each_port()))
    return any(str(each) in sandbox.network.rules for each in denials)


def _is_capped(rule: NetworkRule) -> bool:
    caps = (rule.sent_bytes, rule.received_bytes, rule.lifetime_seconds)
    return any(each is not None for each in caps)


def _rules(rules: Sequence[NetworkRule], asked: E2bNetwork) -> list[NetworkRule]:
    denies_all = asked.allow_internet is False or any(each in _ALL for each in asked.deny_out)
    hosts = [each for each in asked.allow_out if each not in _ALL]
    found = [rule for host in hosts for rule in _allowing(rules, host)]
    return found if denies_all else list(rules)


def _allowing(rules: Sequence[NetworkRule], host: str) -> list[NetworkRule]:
    """Return the rules that allow a host, each for this host alone; raises PolicyError."""
    found = [
        msgspec.structs.replace(rule, host=host) for rule in rules
        if rule.host in (host, "*") or (rule.host.startswith("*.") and host.endswith(rule.host[1:]))
    ]  # fmt: skip
    if not found:
        raise PolicyError(
            f"network.allowOut: the policy of this server does not allow {host!r}",
            "its operator adds it to [[network.allow]] of the policy",
        )
    return found


def _denied(asked: E2bNetwork) -> list[str]:
    hosts = [each for each in asked.deny_out if each not in _ALL]
    for each in hosts:
        if _is_address(each):
            raise PolicyError(
                f"network.denyOut: {each} is an address; cells reach hosts by name only"
            )
    return hosts


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True
