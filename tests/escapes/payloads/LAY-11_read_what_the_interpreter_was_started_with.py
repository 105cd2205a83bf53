"""The kernel's copy of the variables that a process was started with stays, whatever the process does to
its own: that of the launcher is in every cell."""

import json

with open("/proc/self/environ", "rb") as file:
    found = file.read()

detail = f"{len(found)} bytes {found[:500]!r}"
print(json.dumps({"case": "LAY-11", "escaped": bool(found), "detail": detail}))
