"""A file made by memfd_create is on no tmpfs that has a size; this runs where no cgroup counts memory."""

import json
import os

_STEP = 1 << 20
room = int(os.environ["SBXT_WORKSPACE_BYTES"])
held, files = 0, []
try:
    while held <= 2 * room:
        files.append(os.memfd_create("more"))
        for _ in range(room // (2 * _STEP)):
            held += os.write(files[-1], bytes(_STEP))
except OSError:
    pass

detail = f"{held} bytes in files of no file system, which may have {room}"
print(json.dumps({"case": "LAY-19", "escaped": held > 2 * room, "detail": detail}))
