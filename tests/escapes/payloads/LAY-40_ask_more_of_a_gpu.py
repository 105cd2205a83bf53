"""The nodes of a GPU, or whatever of the kind is there: other nodes than those that were named, requests
that lead to objects of other processes, to a process's memory or to the machine, and the names of
others' threads.  Without a GPU there must be no node at all; with one, a request counts as answered if
it does not fail."""

import errno
import fcntl
import json
import os
import stat

SHOWN = set(filter(None, os.environ.get("SBXT_GPU", "").split(",")))
OWN = {
    "fd", "full", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout", "tools", "tty",
    "urandom", "zero",
}  # fmt: skip
# The wrapper of any other request, registry, I2C, objects of other clients (dup, share), idle channels,
# events, export to and import from a descriptor, dma-buf; memory of processes by nvidia-uvm's tools.
REQUESTS = [
    *(0xC0000000 | size << 16 | 0x4600 | number for number, size in (
        (0xD3, 16), (0x4D, 40), (0x39, 120), (0x34, 28), (0x35, 24), (0x41, 48), (0x52, 24),
        (0x5C, 16), (0x5D, 16), (0xD9, 16),
    )),
    *(0xD3 | 16 << 16 | kind << 8 for kind in (0x00, 0x54, 0x66, 0x89)),  # the driver ignores the type
    62, 63, 0x30000003, 0x4B22, 0x4B26,
]  # fmt: skip

others = sorted(set(os.listdir("/dev")) - OWN - SHOWN)
got = [f"/dev/{name}" for name in others if stat.S_ISCHR(os.stat(f"/dev/{name}").st_mode)]
for name in ("mem", "kmsg", "sda", "kvm", "nvidia-modeset", "nvidia-caps", "dri", "kfd", "nvidia1"):
    if name not in SHOWN:
        try:
            os.close(os.open(f"/dev/{name}", os.O_RDONLY))
            got.append(f"opened /dev/{name}")
        except OSError:
            pass
for name in sorted(SHOWN | {"null", "zero"}):
    node = os.open(f"/dev/{name}", os.O_RDWR)
    for request in REQUESTS:
        try:
            fcntl.ioctl(node, request, bytes(256))
            got.append(f"{request:#x} of {name}")
        except OSError as error:
            if error.errno not in (
                errno.ENOTTY,
                errno.EPERM,
                errno.EACCES,
            ):  # the driver has read it
                got.append(f"{request:#x} of {name}: {errno.errorcode[error.errno]}")
    os.close(node)
for path in ("/proc/1/comm", "/proc/self/task/1/comm", "/proc/1/task/1/comm"):
    try:
        with open(path, "wb") as file:
            file.write(b"renamed")
            got.append(f"written to {path}")
    except OSError:
        pass

print(json.dumps({"case": "LAY-40", "escaped": bool(got), "detail": f"got: {got}"}))
