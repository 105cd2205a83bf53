"""Files of the machine are in memory of the supervisor: a changed one would lie to the next reader, and open
ones cost memory that no cgroup of the cell counts."""

import ctypes
import json
import mmap
import os

MOST = 5000
gained, refused = [], []
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


def attempt(name, run):
    try:
        run()
        gained.append(name)
    except (OSError, ValueError) as error:
        refused.append(f"{name}: {error}")


def reopened(descriptor, flags):
    return os.open(f"/proc/self/fd/{descriptor}", flags)


held = os.open("/proc/meminfo", os.O_RDONLY)
attempt("write", lambda: os.write(reopened(held, os.O_RDWR), b"x"))
attempt("append", lambda: os.write(reopened(held, os.O_WRONLY | os.O_APPEND), b"x"))
attempt("truncate", lambda: os.truncate(f"/proc/self/fd/{held}", 0))
attempt("grow", lambda: os.truncate(f"/proc/self/fd/{held}", 1 << 20))
attempt("map", lambda: mmap.mmap(reopened(held, os.O_RDWR), 4096, mmap.MAP_SHARED)[:1])
if os.pread(held, 9, 0) != b"MemTotal:":
    gained.append("it has changed")

kept = 0
try:
    while kept < MOST:
        descriptor = os.open("/proc/uptime", os.O_RDONLY)
        place = libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_PRIVATE, descriptor, 0)
        os.close(descriptor)
        if place in (None, 2**64 - 1):
            break
        kept += 1
except OSError as error:
    refused.append(f"{kept} kept: {error}")
if kept >= MOST:
    gained.append(f"{kept} kept")

print(
    json.dumps(
        {"case": "LAY-35", "escaped": bool(gained), "detail": f"gained: {gained}, {refused}"}
    )
)
