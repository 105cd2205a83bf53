"""Each file is below what one may hold; together they are more than there is room for."""

import json
import os

_STEP = 1 << 20
room = int(os.environ["SBXT_WORKSPACE_BYTES"])
most = 0
for place in ("/workspace", "/tmp"):
    written = 0
    try:
        while written <= room:
            with open(f"{place}/{written // (8 * _STEP)}", "ab") as file:
                written += file.write(bytes(_STEP))
    except OSError:
        pass
    most = max(most, written)

detail = f"{most} bytes in one of them, of {room}"
print(json.dumps({"case": "LAY-13", "escaped": most > room, "detail": detail}))
