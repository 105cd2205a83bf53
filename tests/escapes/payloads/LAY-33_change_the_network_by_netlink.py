"""rtnetlink tells of the cell's own interfaces; it must neither change them, nor lead to another protocol or
network, nor hold memory that no cgroup counts."""

import contextlib
import json
import os
import signal
import socket
import struct
import threading

_MOST_SOCKETS = 16
_STARVED, _SPINNING = 24, 8
_GET_LINK, _DUMP, _ACK = 18, 0x300, 4
# RTM_ types that are a GET: the third of each four, from 16 on.
_CHANGES = [kind for kind in range(16, 128) if kind % 4 != 2]
_FORMS = (
    bytes(16),
    struct.pack("=BxHiII", 0, 0, 1, 1, 0xFFFFFFFF),
    struct.pack("=BBBBi", 2, 8, 0, 0, 1),
)


def answers(sock: socket.socket, kind: int, flags: int, body: bytes) -> list[tuple[int, bytes]]:
    """Return the messages of the first packet that answers."""
    sock.send(struct.pack("=IHHII", 16 + len(body), kind, 1 | flags, 1, 0) + body)
    data, found = sock.recv(65536), []
    while len(data) >= 16:
        length, what = struct.unpack_from("=IH", data)
        found.append((what, data[16:length]))
        data = data[(length + 3) & ~3 :]
    return found


def errno_of(sock: socket.socket, kind: int, body: bytes) -> int:
    for what, payload in answers(sock, kind, _ACK, body):
        if what == 2:
            return -struct.unpack_from("=i", payload)[0]
    return 0


def held_at_once() -> int:
    """Return how many sockets threads hold that ask at once and get no turn after the answer."""
    kept, threads, spinning = [], [], []

    def ask() -> None:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            together.wait()
            kept.append(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))

    together = threading.Barrier(_STARVED)
    with contextlib.suppress(OSError):
        for _ in range(_SPINNING):
            spinning.append(os.fork())
            if not spinning[-1]:
                signal.alarm(10)
                while True:
                    pass
    with contextlib.suppress(RuntimeError):
        for _ in range(_STARVED):
            threads.append(threading.Thread(target=ask))
            threads[-1].start()
    if len(threads) < _STARVED:
        together.abort()
    for each in threads:
        each.join()
    for pid in spinning:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return len(kept)


def attacks() -> list[str]:
    came = []
    for protocol in range(1, 32):
        with contextlib.suppress(OSError):
            socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol).close()
            came.append(f"protocol {protocol}")
    try:
        sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
    except OSError:
        return came
    sock.settimeout(3)
    came.extend(
        f"request {kind}"
        for kind in _CHANGES
        if any(errno_of(sock, kind, body) == 0 for body in _FORMS)
    )
    links = [each for each in answers(sock, _GET_LINK, _DUMP, bytes(16)) if each[0] == 16]
    if any(struct.unpack_from("=i", each, 4)[0] != 1 for _, each in links):
        came.append("another interface")
    other = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
    other.bind((0, 0))
    with contextlib.suppress(OSError):
        sock.sendto(b"message", (other.getsockname()[0], 0))
        came.append("a message to a socket of a process")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, 33, 1 << 28)  # SO_RCVBUFFORCE
        came.append("a larger buffer")
    sock.close()
    other.close()
    if (at_once := held_at_once()) > _MOST_SOCKETS:
        came.append(f"{at_once} sockets at once")
    kept = []
    with contextlib.suppress(OSError):
        while len(kept) < 1000:
            kept.append(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
    if len(kept) > _MOST_SOCKETS:
        came.append(f"{len(kept)} sockets")
    return came


came = attacks()
print(
    json.dumps(
        {
            "case": "LAY-33",
            "escaped": bool(came),
            "detail": ", ".join(came)[:400] or os.uname().release,
        }
    )
)
