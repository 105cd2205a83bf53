"""Devices of the whole machine, whose mode lets everybody write and whose mount is writable: the pool
of random numbers takes what is written to it."""

import json
import os

written = []
for name in ("random", "urandom"):
    try:
        device = os.open(f"/dev/{name}", os.O_WRONLY)
        written.append(f"{os.write(device, b'x')} to {name}")
    except OSError:
        pass

print(json.dumps({"case": "LAY-10", "escaped": bool(written), "detail": f"written: {written}"}))
