"""Terminals and System V objects are of the whole host but for the namespaces of the cell, and locked segments are
counted for a user in all cells."""

import ctypes
import json
import os
from functools import partial

MOST_TERMINALS, SHM_LOCK, SHM_HUGETLB, IPC_CREAT = 16, 11, 0o4000, 0o1000
TIOCSTI, TIOCLINUX, TIOCSETD, TIOCCONS = 0x5412, 0x541C, 0x5423, 0x541D
gained, refused = [], []
libc = ctypes.CDLL(None, use_errno=True)


def attempt(name, run):
    try:
        run()
        gained.append(name)
    except OSError as error:
        refused.append(f"{name}: {error.errno}")


def called(function, *arguments):
    result = getattr(libc, function)(*arguments)
    if result == -1:
        raise OSError(ctypes.get_errno(), function)
    return result


masters = []
try:
    while len(masters) <= MOST_TERMINALS:
        masters.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
except OSError as error:
    refused.append(f"{len(masters)} terminals: {error.errno}")
if len(masters) > MOST_TERMINALS:
    gained.append(f"{len(masters)} terminals")
for request in (TIOCSTI, TIOCLINUX, TIOCSETD, TIOCCONS, 1 << 32 | TIOCSTI):
    if masters:
        asked = ctypes.c_ulong(request)
        attempt(f"ioctl {request:#x}", partial(called, "ioctl", masters[0], asked, b"\n\0\0\0"))

try:
    segment = called("shmget", 0x5BC, 4096, IPC_CREAT | 0o600)
    attempt("lock of a segment", lambda: called("shmctl", segment, SHM_LOCK, None))
except OSError as error:
    refused.append(f"segment: {error.errno}")
attempt("huge pages", lambda: called("shmget", 0x5BD, 1 << 21, IPC_CREAT | SHM_HUGETLB | 0o600))
attempt("queue", lambda: called("msgget", 0x5BE, IPC_CREAT | 0o600))

print(
    json.dumps(
        {"case": "LAY-36", "escaped": bool(gained), "detail": f"gained: {gained}, {refused}"}
    )
)
