"""Pid 1 has the guest's uid and shares its descriptors and memory with the nursery: list them, read it, again and
again, for the nursery may have a moment in which it hides nothing.  The kernel lets its limits be set."""

import contextlib
import json
import os
import resource

_SECRETS = ("mem", "maps", "environ", "auxv", "stack")
seen = []
for _ in range(2000):
    with contextlib.suppress(OSError):
        seen.append(f"descriptors {os.listdir('/proc/1/fd')}")
        break
for name in _SECRETS:
    with contextlib.suppress(OSError), open(f"/proc/1/{name}", "rb") as file:
        seen.append(f"{name} {len(file.read(1))}")
with contextlib.suppress(OSError):
    seen.append(f"limits {resource.prlimit(1, resource.RLIMIT_NOFILE, (9, 9))}")

print(json.dumps({"case": "LAY-06", "escaped": bool(seen), "detail": f"seen: {seen}"}))
