"""A pipe in a directory that is only read: a message in it is a command to the process that reads it, and a
message taken out of it never arrives."""

import errno
import json
import os

shown, writable = os.environ["SBXT_SHOWN"], os.environ["SBXT_WRITABLE"]
used = []


def use(path, flags):
    try:
        if flags & os.O_PATH:
            path, flags = f"/proc/self/fd/{os.open(path, os.O_PATH)}", flags & ~os.O_PATH
        os.open(path, flags | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ENXIO:  # ENXIO: a pipe without a reader
            return
    used.append(f"{path} {flags}")


places = [f"{shown}/pipe", f"{shown}/deep/pipe"]
if os.statvfs(inner := f"{writable}/sub/inner").f_flag & os.ST_RDONLY:  # not in a container
    places.append(f"{inner}/pipe")
for place in places:
    for flags in (os.O_WRONLY, os.O_RDONLY, os.O_RDWR):
        use(place, flags)
        use(place, flags | os.O_PATH)

print(json.dumps({"case": "LAY-26", "escaped": bool(used), "detail": f"used: {used}"}))
