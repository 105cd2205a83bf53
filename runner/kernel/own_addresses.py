"""Addresses of this host: those of its own interfaces."""

import errno
import ipaddress
import socket


def is_own_address(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Tell whether the kernel takes an address for one of this network namespace.

    Only such an address can be bound (ip(7)), unless `net.ipv4.ip_nonlocal_bind` is set: then every
    address counts as one.
    """
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.bind((str(address), 0))
    except OSError as error:
        return error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True
