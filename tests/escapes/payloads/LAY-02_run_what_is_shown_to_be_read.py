"""A program of the host's that is shown as data: start it, or map it as code, as ld.so does for it."""

import json
import mmap
import os
import subprocess

program = os.path.join(os.environ["SBXT_SHOWN"], "program")
ran = []


def start():
    subprocess.run([program], check=True)


def map_as_code():
    with open(program, "rb") as file:
        mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)


for attempt in (start, map_as_code):
    try:
        attempt()
        ran.append(attempt.__name__)
    except OSError:
        pass

print(json.dumps({"case": "LAY-02", "escaped": bool(ran), "detail": f"came through: {ran}"}))
