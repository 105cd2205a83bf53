"""Addresses of this host: those of its own interfaces."""

import ipaddress
import socket

_DISCARD = 9  # a port; nothing is sent to it


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
    except OSError:  # no route, so it cannot be dialled either
        return False
