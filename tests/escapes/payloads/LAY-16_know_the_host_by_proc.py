"""A whole /proc tells who the host is, what it has and how it is set."""

import contextlib
import json

_HOST = ("sys/kernel/random/boot_id", "cmdline", "kallsyms", "keys", "interrupts", "timer_list")
seen = []
for name in _HOST:
    with contextlib.suppress(OSError), open(f"/proc/{name}") as file:
        seen.append(f"{name} {file.readline(40).strip()}")

print(json.dumps({"case": "LAY-16", "escaped": bool(seen), "detail": f"seen: {seen}"}))
