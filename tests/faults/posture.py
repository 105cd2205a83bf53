"""The confinement of a living cell as one value, to compare a cell after a fault with a sound one."""

import os
import re
from pathlib import Path
from typing import Any

from cellwright import Sandbox
from cellwright.testing import inspect
from tests.escapes.live_cell import NAMESPACES, LiveCell, children, status

_CONFINED = (
    "Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "Seccomp_filters", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb",
)  # fmt: skip
# What only the guest can tell: that Landlock refuses a write which mode and mount would allow, that a
# host's file is not there, that its descriptors and its terminal are its own, that what it may use is there.
# Then it waits.
PROGRAM = """
import ctypes, os, signal, socket
def errno_of(attempt):
    try:
        attempt()
    except OSError as error:
        return error.errno
    return 0
def own_file(directory):
    open(directory + "/own", "x").close()
    os.unlink(directory + "/own")
def to_itself():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock: sock.connect(("127.0.0.1", 9))
def watches():  # how many descriptors of inotify there may be, and watches: one for each file
    libc, made, count = ctypes.CDLL(None), [], 0
    while len(made) < 20 and (each := libc.inotify_init1(0)) >= 0: made.append(each)
    while made and count < 2500:
        open(f"/tmp/{count}", "x").close()
        if libc.inotify_add_watch(made[0], b"/tmp/%d" % count, 2) < 0: break
        count += 1
    for number in range(count): os.unlink(f"/tmp/{number}")
    if os.path.exists(f"/tmp/{count}"): os.unlink(f"/tmp/{count}")
    for each in made: os.close(each)
    return len(made), count
seen = [
    watches(), errno_of(lambda: open("/dev/urandom", "wb")), errno_of(lambda: open("/etc/shadow")),
    errno_of(lambda: open("/proc/sys/kernel/core_pattern")), os.getsid(0), os.getpid(), sorted(os.listdir("/")),
    [errno_of(lambda: open("/dev/" + name, mode).close()) for name in ("null", "zero", "full") for mode in ("rb", "wb")],
    [errno_of(lambda: own_file(directory)) for directory in ("/workspace", "/tmp", *globals().get("writable", ()))], errno_of(to_itself),
    ctypes.CDLL(None).prctl(27, 0, 0, 0, 0),  # PR_GET_SECUREBITS
    [errno_of(lambda: open("/dev/" + name, "r+b", buffering=0).close()) for name in ("tty", "pts/ptmx")],
    errno_of(lambda: os.get_terminal_size(os.open("/dev/urandom", os.O_RDONLY))),
    os.umask(0o22), os.uname().nodename, dict(os.environ), os.getcwd(), bool(os.listdir("/workspace")),
]
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print("up", flush=True)
signal.sigwait([signal.SIGUSR1])
seen
"""


def posture(living: LiveCell) -> dict[str, Any]:
    """Return the facts that must be the same in every cell of a policy."""
    here = os.getpid()
    guest = f"/proc/{living.guest}"
    return {
        **{f"{role} is": _confinement(getattr(living, role)) for role in ("guest", "init", "nursery", "launcher", "keeper")},
        "namespaces of the host": _shared(living.guest, here),
        "namespaces of the launcher": _shared(living.guest, living.launcher),
        "namespaces of init": _shared(living.guest, living.init),
        "host's namespaces of the launcher": _shared(living.launcher, here),
        "id maps": [Path(f"{guest}/{name}").read_text().split() for name in ("uid_map", "gid_map", "setgroups")],
        "mounts": sorted(_mount(line) for line in Path(f"{guest}/mountinfo").read_text().splitlines()),
        "addresses": sorted(re.findall(r"-- (\S+)|^(\w+)", Path(f"{guest}/net/fib_trie").read_text() + Path(f"{guest}/net/if_inet6").read_text(), re.M)),
        "limits": Path(f"{guest}/limits").read_text(),
        "descriptors": _descriptors(living.guest),
        "cgroups": [re.sub(r"\d+", "N", line) for line in Path(f"{guest}/cgroup").read_text().splitlines()],
        "cwd, root": [os.readlink(f"{guest}/{name}") for name in ("cwd", "root")],
        "environment": Path(f"{guest}/environ").read_bytes(),
        "out of memory first": {
            role: Path(f"/proc/{getattr(living, role)}/oom_score_adj").read_text() for role in ("guest", "init", "launcher", "nursery")
        },
        "name": Path(f"{guest}/comm").read_text(),
        "session": Path(f"{guest}/stat").read_text().rpartition(")")[2].split()[3] == str(living.guest),
    }  # fmt: skip


def living_in(sandbox: Sandbox) -> LiveCell:
    """Return the only cell of a sandbox."""
    launcher = inspect(sandbox).supervisor.generation.launcher.pids()[2]
    return LiveCell(sandbox, children(launcher)[0])


def _confinement(pid: int) -> dict[str, str]:
    seen = status(pid)
    return {name: seen[name] for name in _CONFINED} | {
        "mem": str(os.stat(f"/proc/{pid}/mem").st_uid == 0)
    }


def _descriptors(pid: int) -> dict[str, str]:
    """Return the kind of each; Python opens /dev/urandom itself once getrandom(2) has failed."""
    opened = {n: os.readlink(f"/proc/{pid}/fd/{n}") for n in os.listdir(f"/proc/{pid}/fd")}
    return {n: name.partition(":")[0] for n, name in opened.items() if name != "/dev/urandom"}


def _shared(pid: int, other: int) -> list[str]:
    return [kind for kind in NAMESPACES if _namespace(pid, kind) == _namespace(other, kind)]


def _namespace(pid: int, kind: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/{kind}")


def _mount(line: str) -> tuple[str, ...]:
    """Return where it is, with which flags, of what, and whether events spread from or to it."""
    fields, _, of = line.partition(" - ")
    _, _, _, root, place, flags, *spread = fields.split()
    kind, _, options = of.split(" ", 2)
    root = root.removesuffix("//deleted")  # as ldconfig(8) replaces /etc/ld.so.cache at any time
    return root, place, flags, " ".join(spread), kind, options
