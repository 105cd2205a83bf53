"""A path is shown beneath a directory that may be written: put a link in the place where the next launcher
looks for it, to be shown what only the launcher may reach."""

import contextlib
import json
import os

top = os.environ["SBXT_WRITABLE"]
above = os.path.join(top, "sub")
shown, moved = os.path.join(above, "inner"), os.path.join(top, "moved")
came_through = []
for place in (shown, above):
    with contextlib.suppress(OSError):
        os.rename(place, moved)
        os.symlink("/root", place)
        came_through.append(f"a link at {place}")
        os.unlink(place)
        os.rename(moved, place)

print(json.dumps({"case": "LAY-22", "escaped": bool(came_through), "detail": f"{came_through}"}))
