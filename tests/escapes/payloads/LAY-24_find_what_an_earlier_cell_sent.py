"""A network namespace that another cell had counts what it sent, and keeps what it left."""

import contextlib
import json
import socket

_SENT = {"Tcp": "OutSegs", "Udp": "OutDatagrams", "Icmp": "OutMsgs"}


def sent() -> dict[str, int]:
    """Return how many packets were sent here, by protocol."""
    with open("/proc/self/net/snmp") as file:
        lines = [line.split() for line in file]
    counts = {}
    for names, values in zip(lines[::2], lines[1::2], strict=True):
        protocol = names[0].rstrip(":")
        if protocol in _SENT:
            counts[protocol] = int(values[names.index(_SENT[protocol])])
    return counts


def leave_something() -> None:
    """Send packets and name a socket, where the profile has any."""
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()
    with contextlib.suppress(OSError):
        socket.socket(socket.AF_UNIX).bind("\0sbx-left")


found = {name: count for name, count in sent().items() if count}
with open("/proc/self/net/unix") as file:
    found |= {line.split()[-1]: 1 for line in list(file)[1:]}
leave_something()

print(json.dumps({"case": "LAY-24", "escaped": bool(found), "detail": f"found: {found}"}))
