"""A pid 1 without a filter could make any system call if it were taken over."""

import json

with open("/proc/1/status") as file:
    (mode,) = (line.split()[1] for line in file if line.startswith("Seccomp:"))

print(json.dumps({"case": "LAY-07", "escaped": mode != "2", "detail": f"Seccomp {mode}"}))
