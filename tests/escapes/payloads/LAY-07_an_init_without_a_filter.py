"""What pid 1 could be made to do if it were taken over: any system call, had it no filter."""

import json

with open("/proc/1/status") as file:
    (mode,) = (line.split()[1] for line in file if line.startswith("Seccomp:"))

print(json.dumps({"case": "LAY-07", "escaped": mode != "2", "detail": f"Seccomp {mode}"}))
