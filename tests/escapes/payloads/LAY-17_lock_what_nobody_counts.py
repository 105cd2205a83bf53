"""Each record lock is kernel memory of which no cgroup knows; there may be hundreds, not thousands."""

import contextlib
import fcntl
import json
import os
import struct

_MOST = 4096
descriptors = [os.open(f"/tmp/lock-{number}", os.O_RDWR | os.O_CREAT) for number in range(8)]
for descriptor in descriptors:
    with contextlib.suppress(OSError):
        for place in range(1500):
            one_byte = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 2 * place, 1, 0)
            fcntl.fcntl(descriptor, fcntl.F_SETLK, one_byte)

held = 0
for descriptor in descriptors:
    with open(f"/proc/self/fdinfo/{descriptor}") as file:
        held += file.read().count("lock:")

print(json.dumps({"case": "LAY-17", "escaped": held > _MOST, "detail": f"{held} locks held"}))
