"""A file beneath a directory that is shown, and one in a directory beneath it, both hidden: read them
by every name they have."""

import json
import os

shown = os.environ["SBXT_SHOWN"]
seen = []
for top, _, names in os.walk(shown):
    for name in names:
        try:
            with open(os.path.join(top, name)) as file:
                text = file.read()
        except OSError:
            continue
        if "CANARY" in text:
            seen.append(f"{name}: {text}")

print(json.dumps({"case": "LAY-03", "escaped": bool(seen), "detail": f"read: {seen}"}))
