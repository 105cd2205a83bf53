"""A pid 1 with another capability could do more than make namespaces if it were taken over, and with a
bounding set that is not empty it could regain one."""

import json

_CAP_SYS_ADMIN = 21
with open("/proc/1/status") as file:
    fields = [line.split() for line in file]
status = {name.rstrip(":"): words[0] for name, *words in fields if words}

has = int(status["CapPrm"], 16) | int(status["CapEff"], 16)
escaped = bool(has & ~(1 << _CAP_SYS_ADMIN)) or bool(int(status["CapBnd"], 16))
escaped = escaped or status["NoNewPrivs"] != "1"
detail = {name: status[name] for name in ("CapPrm", "CapEff", "CapBnd", "NoNewPrivs")}
print(json.dumps({"case": "LAY-08", "escaped": escaped, "detail": str(detail)}))
