"""A server that answers without end must not keep the egress process from its other work.

`SBXT_WEB_PORT` is a port of `SBXT_NAME` on which a rule allows GET of /public/*; the server there answers
a request of /public/endless with interim answers without end.  Without it there is no way out.
"""

import contextlib
import json
import os
import socket

NAME, PORT = os.environ.get("SBXT_NAME", ""), int(os.environ.get("SBXT_WEB_PORT", "0"))


def asked(path: str) -> socket.socket:
    sock = socket.create_connection((NAME, PORT), 3)
    sock.sendall(f"GET {path} HTTP/1.1\r\nHost: {NAME}:{PORT}\r\n\r\n".encode())
    return sock


def is_served() -> bool:
    with contextlib.suppress(OSError), asked("/public/a") as sock:
        return sock.recv(12) == b"HTTP/1.1 200"
    return False


if PORT and not is_served():
    print(
        json.dumps(
            {"case": "LAY-29", "escaped": False, "detail": f"SKIP: {NAME} is not reached either"}
        )
    )
else:
    kept = [asked("/public/endless") for _ in range(8 if PORT else 0)]
    served = not PORT or any(is_served() for _ in range(4))
    print(
        json.dumps(
            {"case": "LAY-29", "escaped": not served, "detail": f"beside {len(kept)} connections"}
        )
    )
