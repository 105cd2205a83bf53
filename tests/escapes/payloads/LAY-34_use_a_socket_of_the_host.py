"""The control channel is a socket of the host's network namespace: it could tell of the host's interfaces, by
their numbers or names, or take a name that a server of the host wants."""

import errno
import fcntl
import json
import os
import socket
import struct
from functools import partial

SIOCGIFNAME = 0x8910
gained, refused = [], []


def attempt(name, run):
    try:
        gained.append(f"{name}: {run()!r}")
    except OSError as error:
        refused.append(f"{name}: {error.errno}")


def interface(descriptor, number):
    request = struct.pack("=16si20x", b"", number)
    name = fcntl.ioctl(descriptor, SIOCGIFNAME, request)[:16].rstrip(b"\0")
    if name == b"lo":
        raise OSError(0, "the cell has it too")
    return name


def guess_name(descriptor):
    with socket.socket(fileno=os.dup(descriptor)) as sock:
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"no-such-name\0")
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise
    return "a name that the host has would be another answer"


def take_name(descriptor):
    with socket.socket(fileno=os.dup(descriptor)) as sock:
        sock.bind(b"\0cellwright-taken")
        return sock.getsockname()


for entry in os.listdir("/proc/self/fd"):
    try:
        is_socket = os.readlink(f"/proc/self/fd/{entry}").startswith("socket:")
    except OSError:
        continue
    if is_socket:
        for number in range(1, 9):
            attempt(f"interface {number} by {entry}", partial(interface, int(entry), number))
        attempt(f"names by {entry}", partial(guess_name, int(entry)))
        attempt(f"name of {entry}", partial(take_name, int(entry)))

print(
    json.dumps(
        {"case": "LAY-34", "escaped": bool(gained), "detail": f"gained: {gained}, {refused}"}
    )
)
