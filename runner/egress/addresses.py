"""`SyntheticAddresses`: the addresses that stand for names inside one cell.  Pure.

The addresses are of 198.18.0.0/15, which is for benchmarks of networks and belongs to nobody
(RFC 2544).  Inside a cell all of them are local, and no other address but loopback exists.
"""

import ipaddress
from collections import Counter, OrderedDict, deque

from .budgets import BudgetShare

NETWORK = ipaddress.IPv4Network("198.18.0.0/15")
_FIRST = int(NETWORK.network_address)
_RESERVED = 2  # the network's own address, and that of the interface
MOST_NAMES = NETWORK.num_addresses - _RESERVED - 1  # the last address is for broadcasts


class NoFreeAddressError(Exception):
    """Every name that has an address has a connection too."""


class SyntheticAddresses:
    """Gives names an address each, and takes it back from the least recently used one.

    A name that has connections keeps its address.  Addresses are given in turn, so one that was taken
    back stands for no other name until all others of 131,069 have been given, unless those stand for
    names.
    """

    def __init__(self, share: BudgetShare, most_names: int = MOST_NAMES) -> None:
        """`share`: a wildcard allows any number of names, and each takes memory of the process."""
        self._share = share
        self._most_names = most_names
        self._addresses: OrderedDict[str, str] = OrderedDict()  # by name; last used last
        self._names: dict[str, str] = {}
        self._connections: Counter[str] = Counter()
        self._next = _RESERVED
        self._unused: deque[str] = deque()  # of those that were given once; last used last

    def __len__(self) -> int:
        return len(self._names)

    def address_of(self, name: str) -> str:
        """Return the address of `name`, a new one if it has none; raises NoFreeAddressError."""
        if name in self._addresses:
            self._addresses.move_to_end(name)
            return self._addresses[name]
        if len(self._addresses) >= self._most_names or not self._share.has_room():
            self._forget_one()
        self._share.take()
        address = self._next_address()
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
                address = self._addresses.pop(name)
                del self._names[address]
                self._unused.append(address)
                self._share.give_back()
                return
        raise NoFreeAddressError

    def _next_address(self) -> str:
        if self._next >= _RESERVED + MOST_NAMES:
            return self._unused.popleft()
        self._next += 1
        return str(ipaddress.IPv4Address(_FIRST + self._next - 1))
