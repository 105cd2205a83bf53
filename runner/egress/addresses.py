"""`SyntheticAddresses`: the addresses that stand for names inside one cell, and `SharedBudget`: things
that all cells need, which no cell can take from all others.  Pure.

The addresses are in 198.18.0.0/15, a range for benchmarks of networks that no host has (RFC 2544).
Inside a cell all of them are local, and no other address but loopback exists.
"""

import ipaddress
import socket
from collections import Counter, OrderedDict, deque
from typing import NamedTuple

_OWN_NAMES, _COMMON_NAMES = 4096, 4 * 131_072  # a name of 253 characters takes 500 bytes
_OWN_CONNECTIONS = 16


class SharedBudget:
    """`common` things for all cells, and `own` for each."""

    def __init__(self, common: int, own: int) -> None:
        self.common = common
        self.own = own

    def share(self) -> "BudgetShare":
        """Return the amount that a new cell may take."""
        return BudgetShare(self)


class BudgetShare:
    """One cell's share of a budget."""

    def __init__(self, budget: SharedBudget) -> None:
        self._budget = budget
        self._taken = 0

    def has_room(self) -> bool:
        """Tell whether one more may be taken now."""
        return self._taken < self._budget.own or self._budget.common > 0

    def take(self) -> None:
        """Count one more; the caller has looked whether there is room."""
        if self._taken >= self._budget.own:
            self._budget.common -= 1
        self._taken += 1

    def give_back(self, count: int = 1) -> None:
        from_common = min(count, max(0, self._taken - self._budget.own))
        self._taken -= count
        self._budget.common += from_common

    def give_back_all(self) -> None:
        self.give_back(self._taken)


class Budgets(NamedTuple):
    """The budgets of a process."""

    names: SharedBudget
    connections: SharedBudget


def budgets(open_files: int) -> Budgets:
    """Return the budgets of a process that may have so many descriptors.

    Half of the descriptors are for the cells' own sockets and connections, and for resolving names.
    """
    common = open_files // 2 // 2  # a connection has two descriptors
    return Budgets(SharedBudget(_COMMON_NAMES, _OWN_NAMES), SharedBudget(common, _OWN_CONNECTIONS))


NETWORK = ipaddress.IPv4Network("198.18.0.0/15")
_LOCALHOST, _LOOPBACK = "localhost", "127.0.0.1"
_FIRST = int(NETWORK.network_address)
_RESERVED = 2  # the address of the network and that of the interface
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
        self._addresses: OrderedDict[str, str] = OrderedDict()  # by name; the last used last
        self._names: dict[str, str] = {}
        self._connections: Counter[str] = Counter()
        self._next = _RESERVED
        self._unused: deque[str] = deque()  # freed addresses; the last used comes last

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
        """Return the name that `address` stands for, if it stands for one.  A port of the cell's
        loopback on which we listen is one of the host's, if a rule allows that name."""
        return _LOCALHOST if address == _LOOPBACK else self._names.get(address)

    def hold(self, name: str) -> None:
        """Have `name` keep its address, once more, until `release`."""
        self._connections[name] += 1
        if name in self._addresses:
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


# Addresses of this host: those of its own interfaces, and a name that leads to them.
_DISCARD = 9  # port of the discard service; nothing is sent


def is_own_address(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Tell whether the kernel takes an address for one of this network namespace.

    Only to such an address does it connect from the same address (ip(7)); a datagram socket that is
    connected sends nothing.
    """
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.connect((str(address), _DISCARD))
            return ipaddress.ip_address(sock.getsockname()[0]) == address
    except OSError:  # no route, so the address cannot be dialled either
        return False


# Names of the loopback besides the host's name, of systemd's nss-myhostname; and names that a cell has
# for its own loopback (runner/fixed_root.py), which lead nowhere else.
_USUAL = ("cell.localhost", "localhost.localdomain")
_OF_A_CELL = ("localhost", "cell", "ip6-localhost", "ip6-loopback")


class LoopbackName(NamedTuple):
    """A name, and the loopback address that this host finds for it first.

    A test of the way out of a cell has a server there.  `localhost` will not do: in a cell it is the
    cell's own loopback.
    """

    name: str
    address: str

    @property
    def network(self) -> str:
        """The network of that address alone, as rules write it."""
        return str(ipaddress.ip_network(self.address))


def loopback_name() -> LoopbackName | None:
    """Return a name that this host, not a cell, resolves to one loopback address; None without."""
    for name in (socket.gethostname(), *_USUAL):
        if name in _OF_A_CELL:
            continue
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except OSError:  # includes gaierror
            continue
        addresses = {str(each[4][0]) for each in found}
        if len(addresses) == 1 and ipaddress.ip_address(min(addresses)).is_loopback:
            return LoopbackName(name, min(addresses))
    return None
