"""A Unix socket in a directory that is shown leads to the process that listens: an agent, a bus, a daemon."""

import json
import os
import socket

shown, reached, refused = os.environ["SBXT_SHOWN"], [], []


def attempt(name, run):
    try:
        run()
        reached.append(name)
    except OSError as error:
        refused.append(f"{name}: {error.errno}")


def connect(kind, path):
    with socket.socket(socket.AF_UNIX, kind) as sock:
        sock.connect(path)


def pair(kind, path):
    one, other = socket.socketpair(socket.AF_UNIX, kind)
    with one, other:
        one.connect(path) if kind == socket.SOCK_STREAM else one.sendto(b"guest", path)


os.symlink(shown, "/tmp/there")
for above in (shown, "/tmp/there"):
    for kind, name in ((socket.SOCK_STREAM, "stream"), (socket.SOCK_DGRAM, "dgram")):
        path = f"{above}/{name}"
        attempt(f"connect {path}", lambda kind=kind, path=path: connect(kind, path))
        attempt(f"pair {path}", lambda kind=kind, path=path: pair(kind, path))
attempt("SEQPACKET", lambda: connect(socket.SOCK_SEQPACKET, f"{shown}/stream"))
one, _ = socket.socketpair()
attempt("a pair again", lambda: one.sendto(b"guest", f"{shown}/stream"))

print(
    json.dumps(
        {"case": "LAY-27", "escaped": bool(reached), "detail": f"reached: {reached}, {refused}"}
    )
)
