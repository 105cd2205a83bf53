"""TCP's buffers are kernel memory, which must not exceed the cell's cap."""

import json
import os
import socket
import time

_SEGMENT = bytes(1 << 18)
_SECONDS = 6.0
most = int(os.environ["SBXT_MEMORY_BYTES"])
kept = []  # a closed descriptor holds nothing


def fill() -> int:
    """Fill as many connections as there are descriptors for; return how much is in them."""
    end, held = time.monotonic() + _SECONDS, 0
    try:
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        while time.monotonic() < end:
            ends = [socket.create_connection(listener.getsockname()), listener.accept()[0]]
            kept.extend(ends)
            for one in ends:
                one.setblocking(False)
                try:
                    while True:
                        held += one.send(_SEGMENT)
                except BlockingIOError:
                    pass
    except OSError:
        pass
    return held


read, write = os.pipe()
children = 0
try:
    while children < 8:
        if os.fork() == 0:
            os.write(write, fill().to_bytes(8, "little"))
            time.sleep(_SECONDS)
            os._exit(0)
        children += 1
except OSError:
    pass
held = sum(int.from_bytes(os.read(read, 8), "little") for _ in range(children)) or fill()

detail = f"{held} bytes in sockets, of {most}"
print(json.dumps({"case": "LAY-18", "escaped": held > most, "detail": detail}))
