"""Root of an image has capabilities over its files and ids alone: try to be somebody else, to gain more by files,
to make devices and whiteouts, to change what the kernel has in /proc, and to reach what lies beneath the root."""

import contextlib
import ctypes
import json
import os
import stat
import struct

_C = ctypes.CDLL(None, use_errno=True)
_CAP_SYS_ADMIN, _UNMAPPED = 1 << 21, (65536, 2**31, 2**32 - 2)
_LAUNCHERS = ("layers", "places", "changes", "image")  # directories of its root
came = []


def attempt(name, act, *arguments):
    with contextlib.suppress(OSError, ValueError):
        if act(*arguments):
            came.append(name)


def in_child(act, *arguments):
    """Tell whether `act` returns true in a child, which it may change as it likes."""
    try:
        pid = os.fork()
    except OSError:
        return False
    if not pid:
        with contextlib.suppress(BaseException):
            os._exit(1 if act(*arguments) else 0)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def capabilities():
    with open("/proc/thread-self/status") as file:
        return int(next(line.split()[1] for line in file if line.startswith("CapEff")), 16)


def becomes(uid):
    os.setresuid(uid, uid, uid)
    return os.getuid() == uid


def joins(gid):
    os.setgroups([gid])
    return gid in os.getgroups()


def gives_away(path, uid):
    _C.chown(path.encode(), ctypes.c_uint(uid), ctypes.c_uint(uid))
    return os.stat(path).st_uid == uid


def makes(path, kind, device):
    os.mknod(path, kind | 0o666, device)
    return True


def sets(path, name):
    os.setxattr(path, name, b"y")
    return name in os.listxattr(path)


def calls(call, arguments):
    return hasattr(_C, call) and getattr(_C, call)(*arguments) >= 0


def keeps_capabilities():
    _C.prctl(8, 1, 0, 0, 0)  # PR_SET_KEEPCAPS
    os.setresuid(5, 5, 5)
    return os.getuid() == 5 and capabilities() != 0


def gains_by_a_file(place, uid=5):
    """Execute a copy of a program with file capabilities and set-uid bits, as another id."""
    found = [path for path in ("/bin/busybox", "/usr/bin/grep") if os.path.exists(path)]
    with open(found[0], "rb") as source, open(f"{place}/program", "wb") as program:
        program.write(source.read())
    attribute = struct.pack("<IIIII", 0x0200_0001, _CAP_SYS_ADMIN, _CAP_SYS_ADMIN, 0, 0)
    with contextlib.suppress(OSError):
        os.setxattr(f"{place}/program", "security.capability", attribute)
    os.chmod(f"{place}/program", 0o6755)
    if os.geteuid() == 0:
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    if os.getuid() == 0:  # there is no other id
        return
    nothing = "CapEff:.0000000000000000"
    os.execv(f"{place}/program", ["grep", "-q", nothing, "/proc/self/status"])  # 1: other lines


def climbs():
    """Return the names of the launcher's root that lie above a directory or beneath a mount."""
    found = set()
    places = ["/", "/proc/self/root", "/proc/self/cwd", "/proc/1/root", "/proc/1/cwd"]
    with open("/proc/self/mountinfo") as file:
        places += [line.split()[4] for line in file]
    for place in places:
        with contextlib.suppress(OSError):
            directory = os.open(place, os.O_PATH | os.O_DIRECTORY)
            for _ in range(40):
                found |= {name for name in _LAUNCHERS if _has(name, directory)}
                above = os.open("..", os.O_PATH | os.O_DIRECTORY, dir_fd=directory)
                os.close(directory)
                directory = above
            os.close(directory)
    return found


def _has(name, directory):
    with contextlib.suppress(OSError):
        return os.stat(name, dir_fd=directory, follow_symlinks=False) is not None
    return False


with open("/workspace/file", "w"):
    pass
for number in _UNMAPPED:
    attempt(f"setuid {number}", in_child, becomes, number)
    attempt(f"setgroups {number}", in_child, joins, number)
    attempt(f"chown {number}", gives_away, "/workspace/file", number)
attempt("keepcaps", in_child, keeps_capabilities)
for place in ("/workspace", "/tmp"):
    attempt(f"file of {place}", in_child, gains_by_a_file, place)
    attempt(f"whiteout in {place}", makes, f"{place}/whiteout", stat.S_IFCHR, 0)
    attempt(f"null in {place}", makes, f"{place}/null", stat.S_IFCHR, os.makedev(1, 3))
    attempt(f"disk in {place}", makes, f"{place}/disk", stat.S_IFBLK, os.makedev(254, 0))
    attempt(f"trusted in {place}", sets, place, "trusted.overlay.opaque")
for name in ("oom_score_adj", "uid_map", "gid_map", "setgroups", "loginuid", "mem", "projid_map"):
    attempt(f"/proc/self/{name}", os.open, f"/proc/self/{name}", os.O_WRONLY)
for path in ("/dev/null", "/dev", "/proc", "/sys"):
    attempt(f"chown {path}", gives_away, path, 5)
for name in ("user", "mnt", "net", "pid"):
    attempt(f"ns/{name}", os.readlink, f"/proc/1/ns/{name}")
for call, arguments in (
    ("chroot", (b"/tmp",)), ("umount2", (b"/", 2)), ("umount2", (b"/proc", 2)), ("mount", (None, b"/", None, 0x1020, None)),
    ("setns", (0, 0)), ("unshare", (0x10000000,)), ("pivot_root", (b".", b".")), ("fanotify_init", (0, 0)),
):  # fmt: skip
    attempt(f"{call} {arguments}", calls, call, arguments)
before = set(os.listdir("/")) & {*_LAUNCHERS}
came += [f"above: {name}" for name in sorted(climbs() - before)] + sorted(before)
print(json.dumps({"case": "LAY-42", "escaped": bool(came), "detail": ", ".join(came)}))
