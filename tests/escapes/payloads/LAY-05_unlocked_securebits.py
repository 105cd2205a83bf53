"""Unless securebits say otherwise, and are locked, who becomes root has every capability of root."""

import ctypes
import json

_PR_GET_SECUREBITS = 27
_NOROOT, _NO_SETUID_FIXUP, _NO_CAP_AMBIENT_RAISE = 0x01, 0x04, 0x40
_WANTED = 3 * (_NOROOT | _NO_SETUID_FIXUP | _NO_CAP_AMBIENT_RAISE)  # each with its lock

bits = ctypes.CDLL(None).prctl(_PR_GET_SECUREBITS, 0, 0, 0, 0)
escaped = bits >= 0 and bits & _WANTED != _WANTED
print(json.dumps({"case": "LAY-05", "escaped": escaped, "detail": f"securebits {bits:#x}"}))
