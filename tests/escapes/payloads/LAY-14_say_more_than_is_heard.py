"""Keep the host reading: more output than the cap, and still alive to say so."""

import json
import os

cap = int(os.environ["SBXT_OUTPUT_TOTAL_BYTES"])
more_than_pipes_hold = 16 << 20
left = cap + more_than_pipes_hold
while left > 0:
    left -= os.write(1, bytes(1 << 20))

detail = f"wrote more than {cap} bytes"
print("\n" + json.dumps({"case": "LAY-14", "escaped": True, "detail": detail}))
