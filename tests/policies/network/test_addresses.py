"""Addresses that may be dialled are public, or in a network that a rule names."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellwright.policies.network.address_ranges import networks_of, refusal_of

PUBLIC = ("8.8.8.8", "1.1.1.1", "93.184.215.14", "2606:4700::1111", "2a00:1450:4001::200e", "64:ff9b::8.8.8.8", "::ffff:8.8.8.8")  # fmt: skip
REFUSED = {
    "0.0.0.0": "unspecified",
    "10.1.2.3": "private",
    "100.64.0.1": "CGNAT",
    "127.0.0.1": "loopback",
    "127.255.255.254": "loopback",
    "169.254.1.1": "link-local",
    "172.31.255.255": "private",
    "192.0.0.8": "protocols",
    "192.0.2.1": "documentation",
    "192.31.196.1": "AS112",
    "192.52.193.1": "AMT",
    "192.88.99.1": "6to4 relay",
    "192.175.48.1": "AS112",
    "192.168.1.1": "private",
    "198.18.0.1": "benchmarks",
    "198.19.255.255": "benchmarks",
    "198.51.100.1": "documentation",
    "203.0.113.1": "documentation",
    "224.0.0.251": "multicast",
    "240.0.0.1": "reserved",
    "255.255.255.255": "broadcast",
    "::": "unspecified",
    "::1": "loopback",
    "::ffff:127.0.0.1": "loopback",
    "::ffff:10.0.0.1": "private",
    "::127.0.0.1": "IPv4-compatible",
    "::ffff:0:127.0.0.1": "IPv4-translated",
    "64:ff9b::127.0.0.1": "loopback",
    "64:ff9b::10.0.0.1": "private",
    "64:ff9b:1::1": "local NAT64",
    "100::1": "discarded",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2": "Teredo",
    "2001:2::1": "benchmarks",
    "2001:20::1": "protocols",
    "2001:db8::1": "documentation",
    "2002:7f00:1::1": "6to4",
    "3fff::1": "documentation",
    "2606:4700::5efe:127.0.0.1": "ISATAP",
    "2606:4700::200:5efe:10.0.0.1": "ISATAP",
    "4000::1": "not public",
    "5f00::1": "segment routing",
    "fc00::1": "private",
    "fd12:3456::1": "private",
    "fe80::1": "link-local",
    "fec0::1": "site-local",
    "ff02::1": "multicast",
    "fe80::1%eth0": "zone id",
    "2606:4700::1%1": "zone id",
    "127.1": "not an address",
    "0x7f.0.0.1": "not an address",
    "": "not an address",
}
METADATA = [
    "169.254.169.254",
    "169.254.170.2",
    "168.63.129.16",
    "100.100.100.200",
    "fd00:ec2::254",
    "fd20:ce::254",
    "::ffff:169.254.169.254",
    "::169.254.169.254",
    "64:ff9b::169.254.169.254",
    "64:ff9b::168.63.129.16",
    "64:ff9b:1:a9fe:a9:fe00::",
    "64:ff9b:1:a9:fe:a9fe::",
    "64:ff9b:1:0:a9:fea9:fe00:0",
    "2002:a9fe:a9fe::1",
    "2606:4700::5efe:169.254.169.254",
    "::ffff:0:169.254.169.254",
    "2001:0:a9fe:a9fe::1",
    "2001:0:4136:e378:8000:63bf:5601:5601",
]


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_may_be_dialled(address: str) -> None:
    assert refusal_of(address) is None
    assert refusal_of(ipaddress.ip_address(address)) is None


@pytest.mark.parametrize(("address", "why"), REFUSED.items(), ids=REFUSED)
def test_any_other_address_is_refused_with_the_reason(address: str, why: str) -> None:
    assert why in str(refusal_of(address))


@pytest.mark.parametrize("address", METADATA)
def test_no_rule_opens_a_metadata_service(address: str) -> None:
    everything = networks_of(("0.0.0.0/0", "::/0"))
    assert "metadata" in str(refusal_of(address, everything))


def test_a_named_network_may_be_dialled_and_its_neighbours_may_not() -> None:
    named = networks_of(("10.1.0.0/16", "fd12::/16", "127.0.0.0/8"))
    for address in ("10.1.2.3", "::ffff:10.1.2.3", "64:ff9b::10.1.2.3", "fd12::1", "127.0.0.1"):
        assert refusal_of(address, named) is None
        assert refusal_of(address)
    for address in ("10.2.0.1", "fd13::1", "::1", "192.168.0.1", "::10.1.2.3"):
        assert refusal_of(address, named)


def test_a_public_address_of_this_host_must_be_named() -> None:
    for address in ("8.8.8.8", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"):
        own = refusal_of(address, is_own=lambda each: str(each) == "8.8.8.8")
        assert "an address of this host" in str(own)
        assert refusal_of(address, networks_of(("8.8.8.0/24",)), is_own=lambda _: True) is None
    assert refusal_of("8.8.4.4", is_own=lambda each: str(each) == "8.8.8.8") is None


@given(st.ip_addresses())
def test_what_python_takes_for_private_is_never_dialled(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    mapped = getattr(address, "ipv4_mapped", None)
    if not (mapped or address).is_global:
        is_nat64 = (
            address in ipaddress.ip_network("64:ff9b::/96") if address.version == 6 else False
        )
        assert refusal_of(address) or is_nat64


@given(st.ip_addresses(v=4))
def test_a_mapped_address_is_judged_as_the_one_that_it_carries(
    address: ipaddress.IPv4Address,
) -> None:
    assert bool(refusal_of(f"::ffff:{address}")) == bool(refusal_of(address))
    assert bool(refusal_of(f"64:ff9b::{address}")) == bool(refusal_of(address))
