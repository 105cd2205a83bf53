"""Addresses that stand for names: one each, none twice, and never taken from a connection."""

import ipaddress

import pytest

from cellwright.runner.egress.addresses import NETWORK, NoFreeAddressError, SyntheticAddresses


def test_each_name_has_an_address_of_its_own() -> None:
    names = SyntheticAddresses()
    first, second = names.address_of("a.example"), names.address_of("b.example")
    assert first != second
    assert names.address_of("a.example") == first
    assert (names.name_of(first), names.name_of(second)) == ("a.example", "b.example")
    assert ipaddress.ip_address(first) in NETWORK
    assert names.name_of("198.18.0.1") is None
    assert names.name_of("127.0.0.1") is None


def test_the_least_recently_used_name_loses_its_address() -> None:
    names = SyntheticAddresses(most_names=2)
    first = names.address_of("a.example")
    second = names.address_of("b.example")
    names.address_of("a.example")
    names.address_of("c.example")
    assert names.name_of(second) is None
    assert names.name_of(first) == "a.example"
    assert len(names) == 2


def test_a_name_with_a_connection_keeps_its_address() -> None:
    names = SyntheticAddresses(most_names=2)
    first, _ = names.address_of("a.example"), names.address_of("b.example")
    names.hold("a.example")
    names.hold("a.example")
    names.address_of("c.example")
    names.release("a.example")
    assert names.name_of(first) == "a.example"
    names.hold("c.example")
    with pytest.raises(NoFreeAddressError):
        names.address_of("d.example")
    names.release("a.example")
    names.address_of("d.example")
    assert names.name_of(first) is None


def test_an_address_stands_for_another_name_only_after_all_others_did() -> None:
    names = SyntheticAddresses(most_names=1)
    usable = NETWORK.num_addresses - 3  # network, interface, broadcast
    given = {names.address_of(f"{n}.example") for n in range(usable)}
    assert len(given) == usable
    assert names.address_of("again.example") in given
    reserved = {"198.18.0.0", "198.18.0.1", "198.19.255.255"}
    assert given.isdisjoint(reserved)
