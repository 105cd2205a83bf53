"""Attempt refused calls: the host checks whether the result reports them."""

import ctypes
import json

refused = ctypes.CDLL(None).mount(b"/", b"/", b"tmpfs", 0, None)
detail = "CHECK_HOST: mount(2) is among the violations"
print(json.dumps({"case": "LAY-09", "escaped": refused == 0, "detail": detail}))
