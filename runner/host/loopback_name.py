"""A name of this host that leads to itself: what tries the way out of a cell has a server there.

`localhost` will not do: in a cell it is the cell's own loopback.
"""

import ipaddress
import socket
from typing import NamedTuple

# Beside the host's name: names that systemd's nss-myhostname answers, or that Debian's /etc/hosts has.
_USUAL = ("cell.localhost", "localhost.localdomain", "ip6-localhost")


class LoopbackName(NamedTuple):
    """A name, and the loopback address that this host finds for it first."""

    name: str
    address: str

    @property
    def network(self) -> str:
        """The network of that address alone, as rules write it."""
        return str(ipaddress.ip_network(self.address))


def loopback_name() -> LoopbackName | None:
    """Return a name that this host resolves to one loopback address, not localhost; None without."""
    for name in (socket.gethostname(), *_USUAL):
        if name == "localhost":
            continue
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except OSError:  # gaierror is one
            continue
        addresses = {str(each[4][0]) for each in found}
        if len(addresses) == 1 and ipaddress.ip_address(min(addresses)).is_loopback:
            return LoopbackName(name, min(addresses))
    return None
