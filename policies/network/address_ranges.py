"""Addresses that may be dialled: public ones, and those in networks that a rule names.

The tables follow the special-purpose registries of IANA as of 2026; Python's `is_global` differs from
version to version.  Addresses of metadata services, which give out credentials, are always refused.
"""

import tomllib
from collections.abc import Callable, Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path

Address = IPv4Address | IPv6Address
AddressNetwork = IPv4Network | IPv6Network

# Read now: the egress process opens no file later.
_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
_METADATA = frozenset(map(ip_address, _TABLES["metadata"]))
_SPECIAL = tuple((ip_network(text), reason) for text, reason in _TABLES["special"].items())
_PUBLIC_IPV6 = IPv6Network("2000::/3")
_MAPPED = IPv6Network("::ffff:0:0/96")
_NAT64 = IPv6Network("64:ff9b::/96")
_ISATAP = (0x00005EFE, 0x02005EFE)  # the upper half of the interface id (RFC 5214, 6.1)


def refusal_of(
    address: Address | str,
    allowed_networks: Iterable[AddressNetwork] = (),
    *,
    is_own: Callable[[Address], bool] | None = None,
) -> str | None:
    """Return why an address must not be dialled; None if it may be.

    Public addresses may be dialled, and those in `allowed_networks`.  An IPv6 address that carries an
    IPv4 address is judged by both.  `is_own` tells whether an address is one of this host's interfaces,
    which must be named too even if it is public.
    """
    try:
        given = ip_address(address)
    except ValueError:
        return f"{str(address)[:60]!a} is not an address"
    if getattr(given, "scope_id", None):
        return f"{given} has a zone id"
    meant = _meant(given)
    if not _METADATA.isdisjoint((given, *_carried(given))):
        return f"{given} is a metadata service"
    if any(_lies_in(each, network) for each in {given, meant} for network in allowed_networks):
        return None
    kind = _special(meant)
    if not kind and is_own and is_own(meant):
        kind = "an address of this host"
    return f"{given} is {kind}: no rule names its network" if kind else None


def networks_of(texts: Iterable[str]) -> tuple[AddressNetwork, ...]:
    """Return the networks, such as 10.1.0.0/16; raises ValueError for one that is not a network."""
    return tuple(ip_network(text) for text in texts)


def _lies_in(address: Address, network: AddressNetwork) -> bool:
    return address.version == network.version and address in network


def _meant(address: Address) -> Address:
    """Return the address that a connection reaches: the kernel and NAT64 gateways translate these."""
    if isinstance(address, IPv6Address) and (address in _MAPPED or address in _NAT64):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _carried(address: Address) -> tuple[IPv4Address, ...]:
    """Return each IPv4 address that an IPv6 address may stand for.

    Local NAT64 prefixes may be 48, 56, 64 or 96 bits long (RFC 6052, 2.2).
    """
    if isinstance(address, IPv4Address):
        return ()
    bits = int(address)
    found = [bits & 0xFFFFFFFF]  # mapped, compatible, translated, NAT64, ISATAP
    found.append(bits >> 80 & 0xFFFFFFFF)  # 6to4
    found.append(~bits & 0xFFFFFFFF)  # Teredo: the client, inverted
    found.append(bits >> 64 & 0xFFFFFFFF)  # Teredo: the server
    found.append((bits >> 64 & 0xFFFF) << 16 | bits >> 40 & 0xFFFF)  # NAT64 /48
    found.append((bits >> 64 & 0xFF) << 24 | bits >> 32 & 0xFFFFFF)  # NAT64 /56
    found.append(bits >> 24 & 0xFFFFFFFF)  # NAT64 /64
    return tuple(map(IPv4Address, found))


def _special(address: Address) -> str:
    if kind := next((kind for network, kind in _SPECIAL if _lies_in(address, network)), ""):
        return str(kind)
    if isinstance(address, IPv4Address):
        return ""
    if int(address) >> 32 & 0xFFFFFFFF in _ISATAP:
        return "ISATAP"
    return "" if address in _PUBLIC_IPV6 else "not public"
