"""`SyntheticAddresses`: the addresses that stand for names inside one cell.  Pure.

The addresses are of 198.18.0.0/15, which is for benchmarks of networks and belongs to nobody
(RFC 2544).  Inside a cell all of them are local, and no other address but loopback exists.
"""

import ipaddress
from collections import Counter, OrderedDict

NETWORK = ipaddress.IPv4Network("198.18.0.0/15")
_FIRST = int(NETWORK.network_address)
_RESERVED = 2  # the network's own address, and that of the interface
_LAST = NETWORK.num_addresses - 2  # the one after it is for broadcasts
MOST_NAMES = 4096  # at once: a wildcard allows any number of names, and each takes memory here


class NoFreeAddressError(Exception):
    """Every name that has an address has a connection too."""


class SyntheticAddresses:
    """Gives names an address each, and takes it back from the least recently used one.

    A name that has connections keeps its address.  Addresses are given in turn, so one that was taken
    back stands for no other name until all others of 131,069 have been given.
    """

    def __init__(self, most_names: int = MOST_NAMES) -> None:
        self._most_names = most_names
        self._addresses: OrderedDict[str, str] = OrderedDict()  # by name; last used last
        self._names: dict[str, str] = {}
        self._connections: Counter[str] = Counter()
        self._next = _RESERVED

    def __len__(self) -> int:
        return len(self._names)

    def address_of(self, name: str) -> str:
        """Return the address of `name`, a new one if it has none; raises NoFreeAddressError."""
        if name in self._addresses:
            self._addresses.move_to_end(name)
            return self._addresses[name]
        if len(self._addresses) >= self._most_names:
            self._forget_one()
        address = self._unused()
        self._addresses[name] = address
        self._names[address] = name
        return address

    def name_of(self, address: str) -> str | None:
        """Return the name that `address` stands for, if it stands for one."""
        return self._names.get(address)

    def hold(self, name: str) -> None:
        """Have `name` keep its address, once more, until `release`."""
        self._connections[name] += 1
        self._addresses.move_to_end(name)

    def release(self, name: str) -> None:
        self._connections[name] -= 1
        if not self._connections[name]:
            del self._connections[name]

    def _forget_one(self) -> None:
        for name in self._addresses:
            if name not in self._connections:
                del self._names[self._addresses.pop(name)]
                return
        raise NoFreeAddressError

    def _unused(self) -> str:
        while True:
            number = self._next
            self._next = number + 1 if number < _LAST else _RESERVED
            address = str(ipaddress.IPv4Address(_FIRST + number))
            if address not in self._names:
                return address
