"""Addresses that stand for names: one each, none twice, and never taken from a connection."""

import ipaddress

import pytest

from cellwright.runner.egress.addresses import (
    MOST_NAMES,
    NETWORK,
    NoFreeAddressError,
    SharedBudget,
    SyntheticAddresses,
)


def with_room(most_names: int = MOST_NAMES) -> SyntheticAddresses:
    return SyntheticAddresses(SharedBudget(MOST_NAMES, 0).share(), most_names)


def test_each_name_has_an_address_of_its_own() -> None:
    names = with_room()
    first, second = names.address_of("a.example"), names.address_of("b.example")
    assert first != second
    assert names.address_of("a.example") == first
    assert (names.name_of(first), names.name_of(second)) == ("a.example", "b.example")
    assert ipaddress.ip_address(first) in NETWORK
    assert names.name_of("198.18.0.1") is None
    assert names.name_of("127.0.0.1") == "localhost"  # of the host, if a rule allows it


def test_the_least_recently_used_name_loses_its_address() -> None:
    names = with_room(most_names=2)
    first = names.address_of("a.example")
    second = names.address_of("b.example")
    names.address_of("a.example")
    names.address_of("c.example")
    assert names.name_of(second) is None
    assert names.name_of(first) == "a.example"
    assert len(names) == 2


def test_a_name_with_a_connection_keeps_its_address() -> None:
    names = with_room(most_names=2)
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
    names = with_room(most_names=1)
    usable = NETWORK.num_addresses - 3  # network, interface, broadcast
    given = {names.address_of(f"{n}.example") for n in range(usable)}
    assert len(given) == usable
    assert names.address_of("again.example") in given
    reserved = {"198.18.0.0", "198.18.0.1", "198.19.255.255"}
    assert given.isdisjoint(reserved)


def test_every_address_of_the_range_can_stand_for_a_name_at_a_time() -> None:
    """And finding the next one does not become slow: a cell may ask for a hundred a second."""
    names = with_room()
    first = names.address_of("0.example")
    names.hold("0.example")
    for n in range(1, MOST_NAMES):
        names.address_of(f"{n}.example")
    assert len(names) == MOST_NAMES == 131_069
    oldest = names.address_of("1.example")
    assert names.name_of(oldest) == "1.example"
    second = names.address_of("2.example")
    names.address_of("1.example")  # by now the least recently used one is the third
    names.address_of("2.example")
    third = names.address_of("3.example")
    for n in range(4, MOST_NAMES):
        names.address_of(f"{n}.example")
    names.address_of("1.example")
    names.address_of("2.example")
    assert names.address_of("new.example") == third
    assert names.name_of(first) == "0.example"
    assert names.name_of(second) == "2.example"
    assert len(names) == MOST_NAMES


def test_a_cell_keeps_names_although_others_have_taken_all_in_common() -> None:
    budget = SharedBudget(3, 2)
    share = budget.share()
    greedy, other = SyntheticAddresses(share), SyntheticAddresses(budget.share())
    for n in range(9):
        greedy.address_of(f"{n}.example")
    for n in range(9):
        other.address_of(f"{n}.example")
    assert (len(greedy), len(other)) == (5, 2)
    share.give_back_all()  # its cell has ended
    other.address_of("more.example")
    assert len(other) == 3
