"""A lock that a cell gets on a file of the host keeps the host's programs waiting."""

import contextlib
import fcntl
import json
import os
import struct
import threading

shown = os.environ["SBXT_SHOWN"]
one_byte = struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, 1, 0)
locked = []


def lock(name: str) -> None:
    """Lock the file `name` for us alone, and one byte of it with others."""
    descriptor = os.open(f"{shown}/{name}", os.O_RDONLY)
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETLK, one_byte)
    with open(f"/proc/self/fdinfo/{descriptor}") as file:
        locked.extend(line for line in file if line.startswith("lock:"))


lock("program")
with contextlib.suppress(RuntimeError):  # a profile without threads
    other = threading.Thread(target=lock, args=("program",))
    other.start()
    other.join()

print(json.dumps({"case": "LAY-20", "escaped": bool(locked), "detail": f"locked: {locked}"}))
