"""A directory that may be written holds a path that is hidden: uncover it, replace the cover, or move a
directory above it, so that the next launcher finds nothing to hide."""

import contextlib
import json
import os

top = os.environ["SBXT_WRITABLE"]
hidden = os.path.join(top, "conf", "secrets")
came_through = []
moved = os.path.join(top, "moved")
with contextlib.suppress(OSError):
    os.rename(os.path.dirname(hidden), moved)
    came_through.append("moved what lies above")
    os.rename(moved, os.path.dirname(hidden))
for attempt in (lambda: os.rename(hidden, moved), lambda: os.rmdir(hidden)):
    with contextlib.suppress(OSError):
        attempt()
        came_through.append("moved or removed the cover")
for directory, _, names in os.walk(top):
    for name in names:
        with contextlib.suppress(OSError), open(os.path.join(directory, name)) as file:
            if "CANARY" in file.read():
                came_through.append(f"read {name}")

print(json.dumps({"case": "LAY-21", "escaped": bool(came_through), "detail": f"{came_through}"}))
