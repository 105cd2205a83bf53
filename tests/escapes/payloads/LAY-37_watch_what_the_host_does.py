"""inotify tells of the cell's own files, and where the cell may write of changes; it must not tell of what is
read on the host, of devices that all processes share, or hold more watches than the cell pays for."""

import contextlib
import ctypes
import json
import os
import struct

_ALL, _READING = 0xFFF, 0x31  # IN_ACCESS, IN_CLOSE_NOWRITE and IN_OPEN are of reading
_MOST_DESCRIPTORS = 16
_MEMORY_BYTES = int(os.environ["SBXT_MEMORY_BYTES"])
_C = ctypes.CDLL(None, use_errno=True)


def events(descriptor: int) -> list[int]:
    """Return the masks of what was reported."""
    found = []
    with contextlib.suppress(BlockingIOError):
        while data := os.read(descriptor, 65536):
            while data:
                _, mask, _, length = struct.unpack_from("=iIII", data)
                found.append(mask)
                data = data[16 + length :]
    return found


def use(path: str) -> None:
    """Read what lies at a path, and write there, as a process of the host may."""
    with contextlib.suppress(OSError):
        os.listdir(path)
    for flags in (os.O_RDONLY, os.O_WRONLY):
        with contextlib.suppress(OSError):
            file = os.open(path, flags | os.O_NONBLOCK)
            with contextlib.suppress(OSError):
                os.read(file, 1) if flags == os.O_RDONLY else os.write(file, b"\n")
            os.close(file)


def told_of(path: str, mask: int = _ALL) -> list[int]:
    """Return what a watch on `path` tells while the path is used."""
    descriptor = _C.inotify_init1(os.O_NONBLOCK)
    if descriptor < 0:
        return []
    try:
        if _C.inotify_add_watch(descriptor, path.encode(), mask) < 0:
            return []
        use(path)
        return events(descriptor)
    finally:
        os.close(descriptor)


def attacks() -> list[str]:
    os.symlink("/usr", "/workspace/link")
    os.symlink("../dev/null", "/tmp/null")
    host = ["/", "/usr", "/workspace/link", "/tmp/null", "/workspace/../usr", "/dev", "/etc/passwd"]
    host += [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty")]
    host += ["/proc/self/root/usr", "/proc/self/exe", "/proc/1/root", os.environ["SBXT_SHOWN"]]
    came = [path for path in host if told_of(path)]
    writable = os.environ["SBXT_WRITABLE"]
    came += [
        f"reading of {path}"
        for path in (writable, f"{writable}/conf", f"{writable}/sub/inner")
        for mask in (_ALL, _READING, 0x20)
        if any(each & _READING for each in told_of(path, mask))
    ]
    kept = []
    while len(kept) < 1000 and (made := _C.inotify_init1(os.O_NONBLOCK)) >= 0:
        kept.append(made)
    if len(kept) > _MOST_DESCRIPTORS:
        came.append(f"{len(kept)} descriptors")
    watches = set()  # where files of an image are not watched, all have the same number
    with contextlib.suppress(OSError):
        for number in range(20_000):
            os.mkdir(f"/tmp/{number}")
            watch = _C.inotify_add_watch(kept[0], b"/tmp/%d" % number, 2) if kept else -1
            if watch < 0:
                break
            watches.add(watch)
    if len(watches) > _MEMORY_BYTES // 65536:
        came.append(f"{len(watches)} watches")
    return came


came = attacks()
print(
    json.dumps(
        {
            "case": "LAY-37",
            "escaped": bool(came),
            "detail": ", ".join(came)[:400] or os.uname().release,
        }
    )
)
