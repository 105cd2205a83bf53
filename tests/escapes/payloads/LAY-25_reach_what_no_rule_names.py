"""The way out by name leads to the names of the rules and nowhere else, and carries nothing but TCP to them.

`SBXT_NAME` is a name that the policy allows on port `SBXT_NAME_PORT`; without it there is no way out.
"""

import contextlib
import itertools
import json
import os
import socket

NAME, PORT = os.environ.get("SBXT_NAME", ""), int(os.environ.get("SBXT_NAME_PORT", "9"))
LISTENER = int(os.environ.get("SBXT_LISTENER_PORT", "9"))  # a port of the host's loopback
ADDRESSES = (
    "127.0.0.1", "127.0.1.1", "0.0.0.0", "::1", "::ffff:127.0.0.1", "169.254.169.254", "fd00:ec2::254",
    "100.100.100.200", "10.0.2.2", "192.168.0.1", "8.8.8.8", "2001:4860:4860::8888", "64:ff9b::7f00:1",
    *(f"198.{second}.0.{last}" for second in (18, 19) for last in range(9)),
)  # fmt: skip
NAMES = (
    "localhost",
    "metadata.google.internal",
    "example.org",
    f"x.{NAME}",
    f"{NAME}.example.org",
    "127.1",
    "0x7f000001",
)


def reached(host: str, port: int, what: bytes = b"12345") -> bool:
    """Tell whether somebody answers there."""
    with (
        contextlib.suppress(OSError, UnicodeError),
        socket.create_connection((host, port), 3) as sock,
    ):
        sock.sendall(what)
        sock.shutdown(socket.SHUT_WR)
        return bool(sock.recv(9))
    return False


def resolved(name: str) -> bool:
    with contextlib.suppress(OSError, UnicodeError):
        return bool(socket.getaddrinfo(name, PORT))
    return False


def asked(question: bytes) -> bool:
    """Tell whether a resolver on the list of the cell answers `question` with records."""
    with open("/etc/resolv.conf") as file:
        servers = [line.split()[1] for line in file if line.startswith("nameserver")]
    for server in servers:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.settimeout(3)
            sock.sendto(question, (server, 53))
            answer = sock.recv(512)
            if int.from_bytes(answer[6:8], "big"):
                return True
    return False


def query(name: str, kind: int) -> bytes:
    labels = b"".join(bytes([len(each)]) + each.encode() for each in name.split("."))
    return b"\0\7\1\0\0\1\0\0\0\0\0\0" + labels + b"\0" + kind.to_bytes(2, "big") + b"\0\1"


def opened(family: int, kind: int, protocol: int) -> bool:
    with contextlib.suppress(OSError), socket.socket(family, kind, protocol):
        return True
    return False


def tried() -> list[str]:
    named = {each[4][0] for each in socket.getaddrinfo(NAME, PORT)} if NAME else set()
    found = [f"{each}:{port}" for each, port in itertools.product(ADDRESSES, (PORT, LISTENER, 80))
             if (port != PORT or each not in named) and reached(each, port)]  # fmt: skip
    found += [
        f"the name {each}"
        for each in NAMES
        if each not in ("localhost", "127.1", "0x7f000001") and resolved(each)
    ]
    found += [f"{each}:{LISTENER}" for each in NAMES if reached(each, LISTENER)]
    found += [
        f"{NAME}:{port}"
        for port in (LISTENER, 25, 53, 443)
        if NAME and port != PORT and reached(NAME, port)
    ]
    secret = "73656372657473" * 4  # leaves the cell as a label of a name
    with contextlib.suppress(OSError):
        found += [
            f"a question of kind {kind}"
            for kind in (1, 16, 255, 252)
            if asked(query(f"{secret}.example.org", kind))
        ]
        found += [
            f"{NAME} of kind {kind}" for kind in (16, 255, 252) if NAME and asked(query(NAME, kind))
        ]
    found += [
        f"a socket {each}"
        for each in ((2, 3, 1), (2, 2, 1), (17, 3, 0x300), (2, 5, 132), (40, 1, 0))
        if opened(*each)
    ]
    return found


if NAME and not reached(NAME, PORT):
    print(
        json.dumps(
            {"case": "LAY-25", "escaped": False, "detail": f"SKIP: {NAME} is not reached either"}
        )
    )
else:
    found = tried()
    print(json.dumps({"case": "LAY-25", "escaped": bool(found), "detail": f"reached: {found}"}))
