"""Addresses that may be dialled: public ones, and those in networks that a rule names.

The tables follow the special-purpose registries of IANA as of 2026; Python's `is_global` differs from
version to version.  Addresses of metadata services, which give out credentials, are always refused.
"""

from collections.abc import Callable, Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
AddressNetwork = IPv4Network | IPv6Network

_METADATA = frozenset(
    ip_address(text)
    for text in (
        "169.254.169.254",  # AWS, Azure, Google, Oracle, OpenStack, DigitalOcean and others
        "169.254.170.2",  # AWS ECS
        "169.254.170.23",  # AWS EKS
        "169.254.42.42",  # Scaleway
        "169.254.0.23",  # Tencent
        "168.63.129.16",  # Azure's host
        "100.100.100.200",  # Alibaba
        "192.0.0.192",  # Oracle
        "fd00:ec2::254",  # AWS
        "fd00:ec2::23",  # AWS EKS
        "fd20:ce::254",  # Google
        "fd00:42::42",  # Scaleway
        "fe80::a9fe:a9fe",  # OpenStack
    )
)
_SPECIAL_IPV4 = tuple(
    (IPv4Network(text), reason)
    for text, reason in (
        ("0.0.0.0/8", "unspecified"),
        ("10.0.0.0/8", "private"),
        ("100.64.0.0/10", "shared by a carrier (CGNAT)"),
        ("127.0.0.0/8", "loopback"),
        ("169.254.0.0/16", "link-local"),
        ("172.16.0.0/12", "private"),
        ("192.0.0.0/24", "reserved for protocols"),
        ("192.0.2.0/24", "for documentation"),
        ("192.31.196.0/24", "AS112"),
        ("192.52.193.0/24", "AMT"),
        ("192.88.99.0/24", "a 6to4 relay"),
        ("192.168.0.0/16", "private"),
        ("192.175.48.0/24", "AS112"),
        ("198.18.0.0/15", "for benchmarks"),
        ("198.51.100.0/24", "for documentation"),
        ("203.0.113.0/24", "for documentation"),
        ("224.0.0.0/4", "multicast"),
        ("255.255.255.255/32", "broadcast"),
        ("240.0.0.0/4", "reserved"),
    )
)
_PUBLIC_IPV6 = IPv6Network("2000::/3")
_MAPPED = IPv6Network("::ffff:0:0/96")
_NAT64 = IPv6Network("64:ff9b::/96")
_SPECIAL_IPV6 = tuple(
    (IPv6Network(text), reason)
    for text, reason in (
        ("::/128", "unspecified"),
        ("::1/128", "loopback"),
        ("::/96", "IPv4-compatible"),
        ("::ffff:0:0:0/96", "IPv4-translated"),
        ("64:ff9b:1::/48", "local NAT64"),
        ("100::/64", "discarded"),
        ("2001::/32", "Teredo"),
        ("2001:2::/48", "for benchmarks"),
        ("2001::/23", "reserved for protocols"),
        ("2001:db8::/32", "for documentation"),
        ("2002::/16", "6to4"),
        ("3fff::/20", "for documentation"),
        ("5f00::/16", "segment routing"),
        ("fc00::/7", "private"),
        ("fe80::/10", "link-local"),
        ("fec0::/10", "site-local"),
        ("ff00::/8", "multicast"),
    )
)
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
    """Return what kind of address it is if it is not public."""
    if isinstance(address, IPv4Address):
        return next((kind for network, kind in _SPECIAL_IPV4 if address in network), "")
    for network, kind in _SPECIAL_IPV6:
        if address in network:
            return kind
    if int(address) >> 32 & 0xFFFFFFFF in _ISATAP:
        return "ISATAP"
    return "" if address in _PUBLIC_IPV6 else "not public"
